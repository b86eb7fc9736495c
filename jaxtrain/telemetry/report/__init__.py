"""What a run left, for people to look at: found, read and drawn, without jax and without the run's code.

run       a workdir: its state, its newest numbers; all workdirs under a folder
records   metrics.jsonl as columns, thinned without losing peaks
page      one HTML file of one run, or of several
"""
