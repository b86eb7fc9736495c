"""The files of a run, found, read and drawn for people, without jax and without the run's code."""
