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
        text = os.environ.get("JAXTRAIN_SHARDS_GB", str(LIMIT))
        try:
            limit = float(text) * 1e9
        except ValueError:
            limit = math.nan
        if not limit >= 0:
            raise DataError(f"JAXTRAIN_SHARDS_GB is {text!r}; expected a number")
        self._folder, self._address, self._limit = folder, address, limit
        self._lock, self._left = threading.Lock(), 0.0
        if needed > limit:
            raise DataError(
                f"{address} holds {needed / 1e9:.1f} GB, and the cache may hold {limit / 1e9:.1f}"
                f" GB; {REMEDY}"
            )
        used = sum(_bytes(other, claimed=True) for other in self._others() if _in_use(other))
        if used + needed > limit:
            there = f"runs use {used / 1e9:.1f} GB of the cache's {limit / 1e9:.1f}"
            raise DataError(f"{address} holds {needed / 1e9:.1f} GB; {there}; {REMEDY}")
        self.take(0)

    def take(self, n: int) -> None:
        """Make room for ``n`` arrived bytes: remove old copies. Raises DataError if that fails."""
        with self._lock:
            if n > self._left or not n:
                self._left = min(self._free(n), max(n, self._limit / LOOKS))
            self._left -= n

    def _free(self, n: int) -> float:
        sizes = {place: _bytes(place) for place in (self._folder, *self._others())}
        for other in sorted(sizes.keys() - {self._folder}, key=_last_use):
            if sum(sizes.values()) + n <= self._limit:
                break
            with contextlib.suppress(OSError), open(other / ".use", "a") as use:
                _lock(use)
                shutil.rmtree(other)
                del sizes[other]
        free = self._limit - sum(sizes.values())
        if n and free < n:
            raise DataError(
                f"{self._address} does not fit: runs use the cache's {self._limit / 1e9:.1f} GB;"
                f" {REMEDY}"
            )
        return free

    def _others(self) -> list[pathlib.Path]:
        return [
            other
            for other in self._folder.parent.iterdir()
            if other.is_dir() and other != self._folder
        ]


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
                size, (_, parts) = path.stat().st_size, neighbours(path)
                if not claimed and parts.is_file():
                    there = parts.read_bytes()
                    size = min(
                        size, int.from_bytes(there[:HEAD], "little") * there[HEAD:].count(PRESENT)
                    )
                total += size
    return total
