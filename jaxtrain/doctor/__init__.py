"""Checks before a run, on one machine or in all processes of a job, with one report.

check          one finding: ok, warn or fail, with its remedy
host           cores, memory, open files, threads, /dev/shm
devices        the devices of jax, the driver, a product with a known result
config         the errors of a config, its folders, and the sizes of its run
disk           a folder: its speed, its free space, whether all processes see it
data           the index, examples of both splits, rows per second
software       packages, commit and files, config, environment, data: the same in all processes
network        the host's name, ports and clocks between hosts
in_subprocess  a group of checks in a subprocess, which may crash or hang
peers          the rendezvous in which processes report their findings to process 0
examine        the order of the checks
output         the findings as lines, or as JSON
"""
