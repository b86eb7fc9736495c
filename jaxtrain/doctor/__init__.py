"""Looks at everything that a run needs before it is started: alone, or in all processes of a job, with one report.

check      one finding: ok, warn or fail, with its remedy
host       cores, memory and its limits, /dev/shm, open files, temporary files
devices    what jax finds, the driver, the memory in use, a product compared with its known result
config     the mistakes of a config; its folders, and what its run needs
disk       a folder: whether it can be written, how fast, how much fits; whether all processes see the same
network    names, interfaces, the coordinator's port; latency, bandwidth and clocks between the hosts
software   packages, commit, config, environment and data, which must be the same in all processes
data       the index, a sample of both splits' shards, rows per second
apart      a group in a process of its own, which may crash or hang
meeting    rounds in which the processes tell process 0 what they found
examine    the order of all this
report     the findings as lines, or as JSON
"""
