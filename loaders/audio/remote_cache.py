"""The space of copies of remote shards. Older ones go as bytes arrive, never by a claim."""

import contextlib
import fcntl
import math
import os
import pathlib
import shutil
import threading
import time
from typing import IO

from loaders.base import DataError

# of a part. These and HEAD equal those of rust/core/src/source/copy_progress.rs
ABSENT, PRESENT, WANTED, FAILED = range(4)
HEAD = 8  # [bytes] of a list of parts, before them: the size of a part
LIMIT = 200  # [GB] unless $JAXTRAIN_SHARDS_GB says otherwise
LOOKS = 64  # at the cache's contents, also of other processes, while it fills once
REMEDY = "set JAXTRAIN_SHARDS_GB, or copy them by hand"


class DiskBudget:
    """The bytes that the copies in ``folder`` and next to it may still take."""

    def __init__(self, folder: pathlib.Path, needed: int, address: str):
        """Raise DataError if ``needed`` bytes of an address can never fit, and remove nothing."""
        self._folder = folder
        self._address = address
        self._limit = _limit()
        self._lock = threading.Lock()
        self._left = 0.0
        size = f"{address} holds {needed / 1e9:.1f} GB"
        limit = f"{self._limit / 1e9:.1f} GB"
        if needed > self._limit:
            raise DataError(f"{size}, and the cache may hold {limit}; {REMEDY}")
        in_use = sum(_bytes(copy, claimed=True) for copy in self._other_copies() if _in_use(copy))
        if in_use + needed > self._limit:
            raise DataError(
                f"{size}; runs use {in_use / 1e9:.1f} GB of the cache's {limit}; {REMEDY}"
            )
        self.take(0)

    def take(self, n: int) -> None:
        """Make room for ``n`` arrived bytes: remove old copies. Raises DataError if that fails."""
        with self._lock:
            if n > self._left or not n:
                self._left = min(self._free(n), max(n, self._limit / LOOKS))
            self._left -= n

    def _free(self, n: int) -> float:
        sizes = {copy: _bytes(copy) for copy in (self._folder, *self._other_copies())}
        for copy in sorted(sizes.keys() - {self._folder}, key=_last_use):
            if sum(sizes.values()) + n <= self._limit:
                break
            with contextlib.suppress(OSError), open(copy / ".use", "a") as use:
                _lock(use)
                shutil.rmtree(copy)
                del sizes[copy]
        free = self._limit - sum(sizes.values())
        if n and free < n:
            raise DataError(
                f"{self._address} does not fit: runs use the cache's {self._limit / 1e9:.1f} GB;"
                f" {REMEDY}"
            )
        return free

    def _other_copies(self) -> list[pathlib.Path]:
        paths = self._folder.parent.iterdir()
        return [path for path in paths if path.is_dir() and path != self._folder]


def _limit() -> float:
    """Return the bytes that all copies may take. Raises DataError."""
    text = os.environ.get("JAXTRAIN_SHARDS_GB", str(LIMIT))
    try:
        limit = float(text) * 1e9
    except ValueError:
        limit = math.nan
    if not limit >= 0:
        raise DataError(f"JAXTRAIN_SHARDS_GB is {text!r}; expected a number")
    return limit


def neighbours(place: pathlib.Path) -> tuple[pathlib.Path, pathlib.Path]:
    """Return the tag of a copy, and which of its parts are there, until all are."""
    return place.with_name(f".{place.name}.json"), place.with_name(f".{place.name}.parts")


def _last_use(folder: pathlib.Path) -> float:
    with contextlib.suppress(OSError):
        return (folder / ".use").stat().st_mtime
    return 0.0


def _lock(use: IO[str]) -> None:
    """Raise OSError if a process uses the copy. One that only looks locks it for a moment."""
    for _ in range(3):
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(use, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        time.sleep(0.01)
    fcntl.flock(use, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _in_use(folder: pathlib.Path) -> bool:
    try:
        with open(folder / ".use") as use:
            _lock(use)
    except FileNotFoundError:
        return False
    except OSError:
        return True
    return False


def _bytes(folder: pathlib.Path, *, claimed: bool = False) -> int:
    """Return the bytes of a copy on disk, or its claimed size: it has its full length at once."""
    total = 0
    for path in folder.rglob("*"):
        with contextlib.suppress(OSError):  # of another process, which removes it
            if path.is_file():
                size = path.stat().st_size
                total += size if claimed else _copied_bytes(path, size)
    return total


def _copied_bytes(path: pathlib.Path, size: int) -> int:
    """Return the bytes that are there of a file whose full size is ``size``."""
    _, parts = neighbours(path)
    if not parts.is_file():
        return size
    states = parts.read_bytes()
    part_size = int.from_bytes(states[:HEAD], "little")
    return min(size, part_size * states[HEAD:].count(PRESENT))
