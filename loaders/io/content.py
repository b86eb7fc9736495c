"""Files and arrays known by their content, at a cost that each start can afford.

The SHA-256 of a file is kept in $JAXTRAIN_CACHE/digests (or ~/.cache/jaxtrain/digests), with the
file's inode, size and times. While these stay as they are, the file is not read again. So a corpus
is read once on a machine, and later only the files that have changed.

What is read whole has a bound, `WHOLE`. Files beyond it are sampled: `N_BLOCKS` blocks of each,
evenly spaced, with its size. A sample differs if a file was made again, and may be the same if a
few bytes of it were changed.
"""

import concurrent.futures
import contextlib
import hashlib
import json
import os
import pathlib
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import BinaryIO

import numpy as np

from loaders.io import atomic_write, files, machine

WHOLE = 4 << 30  # [bytes] of the files that are read whole at a start
WHOLE_ARRAYS = 1 << 30  # [bytes] of arrays that are hashed whole
PIECE = 4 << 20  # [bytes] that are read at once
MAX_FILES = 4096  # that are looked at for it
MAX_SAMPLED = 256  # files that are sampled for `known`
N_BLOCKS = 16  # of a file that is sampled, or of an array
BLOCK = 16 << 10  # [bytes]
THREADS = 8
RECENT = 2.0  # [s] in which a file may change again without another time
Parts = Sequence[pathlib.Path]  # files whose bytes follow each other
Stamp = list[list[int]]  # inode, size, and times of change of each


class Cache:
    """The digests of files that were read before on this machine, by the names of a caller."""

    def __init__(self, parts_of: Mapping[str, Parts]):
        self._parts_of = parts_of
        with concurrent.futures.ThreadPoolExecutor(THREADS) as pool:
            stamps = pool.map(_stamp, parts_of.values())
            self._stamps = dict(zip(parts_of, stamps, strict=True))
        paths = {}
        for name, parts in parts_of.items():
            paths[name] = [os.path.abspath(path) for path in parts]
        key = hashlib.sha256(json.dumps(paths).encode()).hexdigest()[:32]
        self._file: pathlib.Path | None = None
        with contextlib.suppress(FileNotFoundError):  # there is no home
            self._file = machine.cache_folder("digests", f"{key}.json")
        self._digests = self._read()

    def _read(self) -> dict[str, str]:
        """Return the digests of the files that have not changed since they were read."""
        if self._file is None:
            return {}
        try:
            entries = files.read_json(self._file)
        except files.FileError:
            return {}
        digests = {}
        for name, stamp in self._stamps.items():
            entry = entries.get(name)
            if isinstance(entry, list) and len(entry) == 2 and entry[0] == stamp:
                digests[name] = str(entry[1])
        return digests

    def unread(self) -> list[str]:
        """Return the names whose files were not read yet, or have changed."""
        return [name for name in self._parts_of if name not in self._digests]

    def size(self, name: str) -> int:
        """Return the bytes of the files of a name."""
        return sum(size for _, size, _, _ in self._stamps[name])

    def digests(self, names: Sequence[str]) -> dict[str, str]:
        """Return the digest of each name, of which files are read that were not read yet."""
        unread = [name for name in names if name not in self._digests]
        if unread:
            with concurrent.futures.ThreadPoolExecutor(THREADS) as pool:
                results = pool.map(lambda name: whole(self._parts_of[name]), unread)
                self._digests |= dict(zip(unread, results, strict=True))
            self._write()
        return {name: self._digests[name] for name in names}

    def _write(self) -> None:
        latest = (time.time() - RECENT) * 1e9
        entries = {}
        for name, digest in self._digests.items():
            stamp = self._stamps[name]
            is_settled = all(max(times) < latest for _, _, *times in stamp)
            # a file that changed while it was read has another stamp now
            if is_settled and stamp == _stamp(self._parts_of[name]):
                entries[name] = [stamp, digest]
        if self._file is None:
            return
        # without it, the next start reads the files again
        with contextlib.suppress(OSError), atomic_write.shared(self._file) as partial:
            partial.write_text(json.dumps(entries))


def _stamp(parts: Parts) -> Stamp:
    """Return what tells files from later ones. Raises FileError."""
    stamp = []
    for path in parts:
        with files.regular(path) as file:
            status = os.fstat(file.fileno())
        stamp.append([status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns])
    return stamp


def whole(parts: Parts) -> str:
    """Read files, and return the SHA-256 of their bytes. Raises FileError."""
    digest = hashlib.sha256()
    for path in parts:
        with files.regular(path) as file:
            while piece := file.read(PIECE):
                digest.update(piece)
    return digest.hexdigest()


def sample(parts: Parts) -> str:
    """Return a digest of the sizes of files, and of evenly spaced blocks. Raises FileError."""
    digest = hashlib.sha256()
    for path in parts:
        with files.regular(path) as file:
            size = os.fstat(file.fileno()).st_size
            digest.update(f"{size} ".encode())
            for start in _starts(size):
                digest.update(_block(file, start))
    return digest.hexdigest()


def _starts(size: int) -> Iterator[int]:
    """Yield where the blocks of a sample begin: both ends of ``size`` bytes are in one."""
    if size <= N_BLOCKS * BLOCK:
        yield from range(0, size, BLOCK)
        return
    for i in range(N_BLOCKS):
        yield i * (size - BLOCK) // (N_BLOCKS - 1)


def _block(file: BinaryIO, start: int) -> bytes:
    file.seek(start)
    return file.read(BLOCK)


def known(parts_of: Mapping[str, Parts]) -> dict[str, str]:
    """Return digests of files by their names, which depend on names, sizes and bytes alone.

    At most `MAX_FILES` files of at most `WHOLE` bytes together are read whole. Else `MAX_SAMPLED`
    of them are sampled, evenly spaced by their names.

    Raises FileError: a file that cannot be read.
    """
    names = sorted(parts_of)
    if len(names) <= MAX_FILES:
        cache = Cache(parts_of)
        if sum(map(cache.size, names)) <= WHOLE:
            return cache.digests(names)
    if len(names) > MAX_SAMPLED:
        places = np.linspace(0, len(names) - 1, MAX_SAMPLED).astype(int)
        names = [names[place] for place in places]
    with concurrent.futures.ThreadPoolExecutor(THREADS) as pool:
        samples = pool.map(lambda name: sample(parts_of[name]), names)
        return dict(zip(names, samples, strict=True))


def fingerprint(*values: object) -> str:
    """Return a digest of data of any kind, for the ``fingerprint`` of a loader.

    Args:
      values: arrays of NumPy, paths of files (`pathlib.Path`), mappings and sequences of these, and
        anything that JSON can hold.

    Arrays of at most 1 GiB are hashed whole, of larger ones some blocks. Files are `known` by their
    content, with their names and without their folders.

    Raises FileError: a path of no regular file. Raises TypeError: a value of another kind.
    """
    digest = hashlib.sha256()
    for value in values:
        _add(digest, value)
    return digest.hexdigest()[:16]


def _add(digest: "hashlib._Hash", value: object) -> None:
    if isinstance(value, np.ndarray):
        _add_array(digest, value)
    elif isinstance(value, pathlib.PurePath):
        path = pathlib.Path(value)
        (content,) = known({path.name: [path]}).values()
        digest.update(f"file {path.name} {content}\n".encode(errors="surrogateescape"))
    elif isinstance(value, Mapping):
        digest.update(f"mapping {len(value)}\n".encode())
        for key in sorted(value, key=str):
            digest.update(f"{key}\n".encode())
            _add(digest, value[key])
    elif isinstance(value, list | tuple):
        digest.update(f"sequence {len(value)}\n".encode())
        for item in value:
            _add(digest, item)
    elif isinstance(value, bytes):
        digest.update(f"bytes {len(value)}\n".encode() + value)
    else:
        digest.update(f"{json.dumps(value, default=_number)}\n".encode())


def _number(value: object) -> object:
    """Return a number of NumPy as one of Python. Raises TypeError for another kind of value."""
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(
        f"a fingerprint is of arrays, paths and JSON; {type(value).__name__} is none of them"
    )


def _add_array(digest: "hashlib._Hash", array: np.ndarray) -> None:
    if array.dtype.hasobject:
        raise TypeError("a fingerprint is of arrays of numbers; an array of objects has none")
    digest.update(f"array {array.dtype.str} {array.shape}\n".encode())
    if array.nbytes <= WHOLE_ARRAYS:
        digest.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
        return
    rows = array if array.flags.c_contiguous else array.T if array.flags.f_contiguous else None
    if rows is None:
        raise TypeError(
            f"an array of {array.nbytes:,} bytes is not contiguous; give its whole base"
        )
    as_bytes = rows.reshape(-1).view(np.uint8)
    for start in _starts(array.nbytes):
        digest.update(np.ascontiguousarray(as_bytes[start : start + BLOCK]).data)
