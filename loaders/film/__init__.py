"""Films with the fMRI of their viewers."""
