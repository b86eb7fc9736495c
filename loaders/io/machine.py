"""Cores, a cache folder, signals and optional packages, as this machine offers them."""

import contextlib
import ctypes
import errno
import importlib
import importlib.util
import math
import os
import pathlib
import resource
import signal
import sys
from collections.abc import Iterable
from typing import Any

MEMINFO = pathlib.Path("/proc/meminfo")
UNLIMITED = resource.RLIM_INFINITY
M_TRIM_THRESHOLD, M_MMAP_MAX, M_ARENA_MAX = -1, -4, -8  # glibc's malloc.h
_keeps = False  # whether freed memory stays with this process


def cores() -> int:
    """Return the number of cores that this process may use, at least 1.

    Under a scheduler's affinity mask, or in a container with a CPU quota, that is often fewer than
    the machine has.
    """
    n_usable = min(schedulable(), _quota(cgroups()))
    return max(1, math.ceil(n_usable))


def schedulable() -> int:
    """Return the number of cores of this process's affinity mask, whatever its quota."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


def cores_missing(asked: float, given: float, threads: int) -> int:
    """Return how many more cores a loader needs for ``asked`` rows/s.

    ``asked``, ``given``: rows/s, the second above 0. ``threads``: the loader's, which now give
    ``given`` on this machine's cores.
    """
    n_busy = min(threads, cores())
    n_missing = n_busy * (asked / given - 1)
    return max(0, math.ceil(n_missing))


def cache_folder(*parts: str) -> pathlib.Path:
    """Return the folder of files made once and kept.

    It is $JAXTRAIN_CACHE, else $XDG_CACHE_HOME/jaxtrain, else ~/.cache/jaxtrain. ``parts``: folders
    and a file below it. Nothing is created. Raises FileNotFoundError if that is in a missing home,
    as for a container's user without a name.
    """
    folder = os.environ.get("JAXTRAIN_CACHE")
    if not folder:
        caches = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
        folder = os.path.join(caches, "jaxtrain")
    try:
        return pathlib.Path(folder, *parts).expanduser()
    except RuntimeError as error:
        raise FileNotFoundError(errno.ENOENT, "there is no such home", folder) from error


def trim(folder: pathlib.Path, limit: int) -> None:
    """Remove a cache folder's longest unused files (by their times), down to ``limit`` bytes."""
    cached = []
    for path in folder.iterdir():
        with contextlib.suppress(FileNotFoundError):  # another process has removed it
            status = path.stat()
            cached.append((status.st_mtime, status.st_size, path))
    total = sum(size for _, size, _ in cached)
    for _, size, path in sorted(cached):
        if total <= limit:
            return
        path.unlink(missing_ok=True)
        total -= size


def keep_freed_memory() -> bool:
    """Have this process reuse the memory that it frees, if it computes on CPUs.

    Call it before threads are begun. A step frees its temporary arrays, and glibc gives large ones
    back to the system: the next step gets them as new pages, each zeroed at its first touch. Of a
    step of the demo birds on one core that was a fifth of the CPU time. Returns whether it is in
    force. It is not with accelerators, whose hosts hold other things than arrays of steps, with
    another C library, or over the environment's settings of malloc.
    """
    global _keeps
    tunables = os.environ.get("GLIBC_TUNABLES", "")
    if "glibc.malloc" in tunables or any(name.startswith("MALLOC_") for name in os.environ):
        return False
    if os.environ.get("JAX_PLATFORMS") != "cpu" and accelerators():
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if sys.platform != "linux" or mallopt is None:
        return False
    # One arena, since only the first one may grow without bound, no block that is mapped alone,
    # nothing given back at its end.
    has_one_arena = mallopt(M_ARENA_MAX, 1)
    maps_none_alone = mallopt(M_MMAP_MAX, 0)
    never_trims = mallopt(M_TRIM_THRESHOLD, 2**31 - 1)
    _keeps = bool(has_one_arena and maps_none_alone and never_trims)
    return _keeps


def give_back_freed_memory() -> None:
    """Give the freed memory of this process back to the system, if `keep_freed_memory` keeps it.

    Call it before a computation whose arrays have other sizes than the last one's, and would not
    fit into its blocks. It takes milliseconds, and the computation takes new pages.
    """
    if _keeps:
        ctypes.CDLL(None).malloc_trim(0)


def has_package(name: str) -> bool:
    """Tell whether a package is installed. A folder of its name, as wandb/, is none."""
    spec = importlib.util.find_spec(name)
    return spec is not None and spec.origin is not None


def package(name: str) -> Any:
    """Import a package. Raises ImportError, also if only a folder has its name."""
    module = importlib.import_module(name)
    spec = module.__spec__
    if spec is not None and spec.origin is None:
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)
    return module


def signal_numbers(names: Iterable[str]) -> list[int]:
    """Return the numbers of signals to handle: not an ignored SIGHUP, as nohup asks.

    Nor an ignored SIGINT: a shell's script asks so for its background jobs.
    """
    numbers = [getattr(signal, name) for name in names]
    for number in (signal.SIGHUP, signal.SIGINT):
        if number in numbers and signal.getsignal(number) is signal.SIG_IGN:
            numbers.remove(number)
    return numbers


def delay_abort() -> None:
    """Let a thread that aborts wait for 1 s, in which another may end the process with a reason."""
    from loaders import _rust  # most users of this module need no extension

    _rust.delay_abort()


def accelerators() -> list[pathlib.Path]:
    """Return the GPUs and TPUs that the system's drivers show."""
    dev = pathlib.Path("/dev")
    patterns = ("nvidia[0-9]*", "kfd", "accel[0-9]*", "vfio/[0-9]*")
    return [path for pattern in patterns for path in dev.glob(pattern)]


def peak_memory() -> int:
    """Return the most bytes of memory that this process has held at once."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # macOS counts bytes, Linux kibibytes


def open_files() -> tuple[int, int]:
    """Return how many files this process may open at once, and how many it may allow itself."""
    return resource.getrlimit(resource.RLIMIT_NOFILE)


def allow_open_files(count: int) -> int:
    """Raise the limit of open files to ``count`` if possible. Return the limit."""
    soft, hard = open_files()
    if soft < count and soft != resource.RLIM_INFINITY:
        allowed = count if hard == resource.RLIM_INFINITY else min(count, hard)
        if allowed > soft:
            with contextlib.suppress(OSError, ValueError):  # the system has a lower limit
                resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    return open_files()[0]


def meminfo() -> dict[str, int]:
    """Return bytes by name, none without such a file."""
    try:
        lines = MEMINFO.read_text().splitlines()
    except OSError:
        return {}
    sizes = {}
    for line in lines:
        if line.endswith("kB"):
            name, kibibytes, _ = line.split()
            sizes[name.rstrip(":")] = int(kibibytes) * 1024
    return sizes


def most_memory() -> int:
    """Return the memory [bytes] that this process may have: all, or that of ulimit -v."""
    physical = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    return physical if limit == resource.RLIM_INFINITY else min(physical, limit)


def cgroups(
    membership: str = "/proc/self/cgroup", mount: str = "/sys/fs/cgroup"
) -> list[pathlib.Path]:
    """Return this process's cgroup folder (version 2) and those above it: every limit binds."""
    try:
        lines = pathlib.Path(membership).read_text().splitlines()
    except OSError:
        return []
    folders = []
    for line in lines:
        if line.startswith("0::/"):
            folder = pathlib.Path(mount, line.removeprefix("0::/"))
            folders += [path for path in (folder, *folder.parents) if path.is_relative_to(mount)]
    return folders


def _quota(folders: Iterable[pathlib.Path]) -> float:
    """Return the smallest CPU quota of some cgroups in cores, or infinity."""
    smallest = math.inf
    for folder in folders:
        # the root has no such file; "max" is no number
        with contextlib.suppress(OSError, ValueError):
            quota, period = (folder / "cpu.max").read_text().split()
            smallest = min(smallest, int(quota) / int(period))
    return smallest
