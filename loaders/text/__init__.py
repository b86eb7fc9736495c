"""Text: token files, packing and mixtures of sources."""
