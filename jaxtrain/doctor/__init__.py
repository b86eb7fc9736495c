"""Looks at what a run needs before it starts: alone, or in all processes of a job, with one report.

check      one finding: ok, warn or fail, with its remedy
host       cores, memory, limits, /dev/shm
devices    those that jax finds, the driver, a product with a known result
config     the errors of a config, its folders, and the sizes of its run
disk       a folder: its speed, its room, whether all processes see it
data       the index, examples of both splits, rows per second
software   packages, commit and files, config, environment, data: the same in all processes
network    the host's name, ports and clocks between hosts
apart      a group in a process of its own, which may crash or hang
meetings   the rendezvous in which processes tell process 0 what they found
examine    the order of all this
report     the findings as lines, or as JSON
"""
