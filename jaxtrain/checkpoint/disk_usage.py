"""The folder of a run's checkpoints, named by their steps, and the bytes of those there."""

import contextlib
import os


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
