"""A file made record by record. Interrupted, the same command goes on behind the last one.

Until it is complete, the records are in .NAME.DIGEST.partial, and .NAME.DIGEST.done has the end of
each. DIGEST is of their origin, so that another command begins again.
"""

import contextlib
import glob
import hashlib
import os
import pathlib
from collections.abc import Iterator, Sequence
from typing import IO

import numpy as np

from loaders.io import atomic_write, files

END_BYTES = 8  # of a record's end: int64
MAX_ENDS = 1 << 30  # [bytes] of the ends of an interrupted command's records


class Records:
    """The records so far.

    Attributes:
      n: records of an earlier attempt.
    """

    def __init__(self, partial: IO[bytes], ends: IO[bytes], earlier_ends: Sequence[int]):
        self.n = len(earlier_ends)
        self._partial = partial
        self._ends = ends
        self._earlier_ends = earlier_ends
        self._end = earlier_ends[-1] if earlier_ends else 0

    def kept(self) -> Iterator[bytes]:
        """Yield the records of an earlier attempt, in order."""
        start = 0
        for end in self._earlier_ends:
            yield os.pread(self._partial.fileno(), end - start, start)
            start = end

    def write(self, record: bytes) -> None:
        """Add one. Raises OSError."""
        _write(self._partial, record)
        self._end += len(record)
        # after the record, so that its count holds
        _write(self._ends, np.array(self._end, "<i8").tobytes())


@contextlib.contextmanager
def file(path: str | os.PathLike[str], made_of: Sequence[object]) -> Iterator[Records]:
    """Yield a file named ``path`` when the block ends well, else its records. Raises OSError."""
    path = pathlib.Path(path)
    origin = "\0".join(map(str, made_of)).encode(errors="surrogatepass")
    digest = hashlib.sha256(origin).hexdigest()[:16]
    partial = path.with_name(f".{path.name}.{digest}.partial")
    ends = path.with_name(f".{path.name}.{digest}.done")
    with atomic_write.naming(path):
        earlier_ends = _read_ends(partial, ends)
        if earlier_ends:
            mode, size = "r+b", earlier_ends[-1]
        else:
            mode, size = "x+b", 0
            partial.unlink(missing_ok=True)  # never through a link that someone left there
            ends.unlink(missing_ok=True)
        with (
            open(partial, mode, buffering=0) as opened_partial,
            open(ends, mode, buffering=0) as opened_ends,
        ):
            _cut(opened_partial, size)
            _cut(opened_ends, END_BYTES * len(earlier_ends))
            yield Records(opened_partial, opened_ends, earlier_ends)
        partial.replace(path)
        # Also of commands that this one replaces.
        for leftover in path.parent.glob(f".{glob.escape(path.name)}.{'[0-9a-f]' * 16}.*"):
            if leftover.suffix in (".partial", ".done"):
                leftover.unlink(missing_ok=True)


def _read_ends(partial: pathlib.Path, ends: pathlib.Path) -> list[int]:
    """Return the ends of the records that an earlier attempt has written, in order."""
    try:
        content = files.read(files.inside(ends.parent, ends.name), most=MAX_ENDS)
        with files.regular(files.inside(partial.parent, partial.name)) as opened:
            size = os.fstat(opened.fileno()).st_size
    except files.FileError:
        return []
    n_whole = len(content) // END_BYTES
    stated_ends = np.frombuffer(content[: n_whole * END_BYTES], "<i8")
    is_valid = (np.diff(stated_ends, prepend=0) > 0) & (stated_ends <= size)
    n_valid = n_whole if is_valid.all() else int(is_valid.argmin())
    valid_ends: list[int] = stated_ends[:n_valid].tolist()
    return valid_ends


def _cut(opened: IO[bytes], size: int) -> None:
    opened.truncate(size)
    opened.seek(size)


def _write(opened: IO[bytes], data: bytes) -> None:
    unwritten = memoryview(data)
    while unwritten:
        n_written = opened.write(unwritten) or 0
        unwritten = unwritten[n_written:]
