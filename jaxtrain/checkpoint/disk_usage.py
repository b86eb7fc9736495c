"""The folder of a run's checkpoints, the bytes of those there, and the speed of its disk."""

import contextlib
import os
import shutil
import time

BLOCK = 4 << 20  # [bytes]
MAX_SECONDS = 5.0  # [s] of writing


def folder_of(workdir: str, folder: str) -> str:
    """Return the folder of the checkpoints, or a store's address, by config.checkpoint.folder."""
    return folder or os.path.join(workdir, "checkpoints")


def held(folder: str, most: int, each: int) -> int:
    """Return the bytes of the newest ``most`` checkpoints of a folder, each ``each`` at most."""
    steps = []
    try:
        with os.scandir(os.path.expanduser(folder)) as entries:
            for entry in entries:
                if entry.name.isdecimal() and entry.is_dir():
                    steps.append((int(entry.name), entry.path))
    except OSError:
        return 0
    newest = sorted(steps, reverse=True)[:most]
    return sum(min(_size(path), each) for _, path in newest)


def _size(folder: str) -> int:
    size = 0
    for path, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):  # a run may be removing it
                size += os.lstat(os.path.join(path, name)).st_size
    return size


def write(path: str, most: int) -> float:
    """Write and sync a file of ``most`` bytes or a tenth of the free space. Returns [bytes/s]."""
    free = shutil.disk_usage(os.path.dirname(path)).free
    max_size = max(min(most, free // 10), BLOCK)
    block = os.urandom(BLOCK)
    size = 0
    began = time.perf_counter()
    with open(path, "wb", buffering=0) as file:
        while size < max_size and time.perf_counter() - began < MAX_SECONDS:
            size += file.write(block)
        os.fsync(file.fileno())
    return size / (time.perf_counter() - began)


def read(path: str) -> float:
    """Read a file that has been synced, from its disk if the system drops it. Returns [bytes/s]."""
    with open(path, "rb", buffering=0) as file:
        if hasattr(os, "posix_fadvise"):  # not on macOS
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        size = 0
        began = time.perf_counter()
        while block := file.read(BLOCK):
            size += len(block)
        return size / (time.perf_counter() - began)
