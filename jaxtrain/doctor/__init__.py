"""Checks before a run of this machine, as one process of the run sees it.

check          one finding: ok, warn or fail, with its remedy
host           cores, memory, open files, threads, /dev/shm
devices        the devices of jax, the driver, a product with a known result
config         the errors of a config, its folders, and the sizes of its run
disk           a folder: its speed and its free space
data           the index, examples of both splits, rows per second
software       the packages and the commit
in_subprocess  a group of checks in a subprocess, which may crash or hang
examine        the order of the checks
output         the findings as lines, or as JSON
"""
