"""The files of a run, found, read and drawn for people, without jax and without the run's code.

run       a workdir, its state and its newest numbers, and all workdirs under a folder
records   metrics.jsonl as columns, thinned without losing peaks
page      one HTML file of one run, or of several
"""
