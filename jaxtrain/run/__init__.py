"""The objects of a run, and the loop over its steps."""
