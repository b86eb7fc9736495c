"""What this machine offers a process: cores to compute on, and a folder to keep made files in."""

import math
import os
import pathlib
import resource
import sys


def cores() -> int:
    """The number of cores that this process may use, at least 1.

    Under a scheduler's affinity mask, or in a container with a CPU quota, that is often fewer than the machine has.
    """
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, math.ceil(min(allowed, _quota())))


def cache_folder(*parts: str) -> pathlib.Path:
    """The folder of files that are made once and kept: $JAXTRAIN_CACHE, else $XDG_CACHE_HOME/jaxtrain, else ~/.cache/jaxtrain.

    Args:
      parts: folders and a file below it. Nothing is created.
    """
    if folder := os.environ.get("JAXTRAIN_CACHE"):
        return pathlib.Path(folder, *parts).expanduser()
    return pathlib.Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "jaxtrain", *parts).expanduser()


def peak_memory() -> int:
    """The most bytes of memory that this process has held at once."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # macOS counts bytes, Linux kibibytes


def _quota(membership: str = "/proc/self/cgroup", mount: str = "/sys/fs/cgroup") -> float:
    """The CPU quota of this process's cgroup (version 2) in cores; infinite where there is none."""
    try:
        lines = pathlib.Path(membership).read_text().splitlines()
    except OSError:
        return math.inf
    smallest = math.inf
    for name in [line.removeprefix("0::/") for line in lines if line.startswith("0::/")]:
        folder = pathlib.Path(mount, name)
        while folder.is_relative_to(mount):  # a limit of any ancestor binds
            try:
                quota, period = (folder / "cpu.max").read_text().split()
                smallest = min(smallest, int(quota) / int(period))
            except (OSError, ValueError):  # the root has no such file; "max" is no number
                pass
            folder = folder.parent
    return smallest
