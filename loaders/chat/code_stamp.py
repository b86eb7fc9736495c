"""Which recording a file of codes was made of: a stamp behind its array.

    CLIP.CODEC.npy   the array, as numpy writes it. Readers of .npy stop at its end
    12 bytes         "codes of 1\\r\\n"
    32 bytes         the SHA-256 of the recording
    4 × int64        its inode, size [bytes], and times of change [ns] (mtime, ctime)

While inode, size and times are those of the stamp, the recording is not read. Else its SHA-256
decides. So a recording that was replaced is noticed under any date, and a copied folder keeps its
codes.
"""

import contextlib
import enum
import os
import pathlib
import struct
import time
from collections.abc import Mapping
from typing import NamedTuple

from loaders.io import content, files

MAGIC = b"codes of 1\r\n"
LAYOUT = struct.Struct("<12s32s4q")


class Kept(enum.Enum):
    """Whether a file of codes is of its recording."""

    YES = "yes"
    NO = "no"
    UNREAD = "only by the content of the recording"


class Stamp(NamedTuple):
    """A recording, as it was when its codes were made."""

    sha256: bytes
    status: tuple[int, ...]  # inode, size [bytes], mtime and ctime [ns]

    def packed(self) -> bytes:
        return LAYOUT.pack(MAGIC, self.sha256, *self.status)


def status_of(recording: pathlib.Path) -> tuple[int, ...]:
    """Return what tells a recording from a later one. Raises OSError."""
    status = os.stat(recording)
    return (status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)


def settled(status: tuple[int, ...]) -> tuple[int, ...]:
    """Return a status by which no file is known if it may change again under the same times."""
    latest_ns = (time.time() - content.RECENT) * 1e9
    inode, size, *times = status
    if max(times) < latest_ns:
        return status
    return (inode, size, 0, 0)


def read(codes: pathlib.Path) -> Stamp | None:
    """Return the stamp of a file of codes, or None if it has none. Raises FileError: no file."""
    with files.regular(codes) as file:
        size = os.fstat(file.fileno()).st_size
        file.seek(max(size - LAYOUT.size, 0))
        tail = file.read(LAYOUT.size)
    if len(tail) < LAYOUT.size or not tail.startswith(MAGIC):
        return None
    _, sha256, *status = LAYOUT.unpack(tail)
    return Stamp(sha256, tuple(status))


def decide(codes: pathlib.Path, recording: pathlib.Path) -> Kept:
    """Say whether codes are of a recording, without reading it."""
    try:
        now = status_of(recording)
        stamp = read(codes)
        if stamp is None:  # codes of an earlier version, or made by hand
            _, _, changed_ns, _ = now
            is_newer = codes.stat().st_mtime_ns >= changed_ns
            return Kept.YES if is_newer else Kept.NO
    except (OSError, files.FileError):
        return Kept.NO
    if stamp.status == now:
        return Kept.YES
    _, size_then, *_ = stamp.status
    _, size_now, *_ = now
    if size_then != size_now or not os.access(recording, os.R_OK):
        return Kept.NO
    return Kept.UNREAD


def same_content(recordings: Mapping[pathlib.Path, pathlib.Path]) -> set[pathlib.Path]:
    """Return the files of codes whose recordings have the content of their stamps.

    ``recordings``: by their files of codes. Each is read once on a machine, until it changes.
    """
    same = set()
    parts_of = {str(codes): [recording] for codes, recording in recordings.items()}
    with contextlib.suppress(files.FileError):
        digests = content.Cache(parts_of).digests(list(parts_of))
        for codes in recordings:
            stamp = read(codes)
            if stamp and stamp.sha256.hex() == digests[str(codes)]:
                same.add(codes)
    return same
