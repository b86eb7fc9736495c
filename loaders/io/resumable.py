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

MAX_ENDS = 1 << 30  # [bytes] of the ends of an interrupted command's records


class Records:
    """The records so far.

    Attributes:
      n: records of an earlier attempt.
    """

    def __init__(self, partial: IO[bytes], ends: IO[bytes], kept: Sequence[int]):
        self.n = len(kept)
        self._partial, self._ends, self._kept = partial, ends, kept
        self._end = kept[-1] if kept else 0

    def kept(self) -> Iterator[bytes]:
        """Yield the records of an earlier attempt, in order."""
        start = 0
        for end in self._kept:
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
    digest = hashlib.sha256(
        "\0".join(map(str, made_of)).encode(errors="surrogatepass")
    ).hexdigest()[:16]
    partial, ends = (
        path.with_name(f".{path.name}.{digest}.{kind}") for kind in ("partial", "done")
    )
    with atomic_write.naming(path):
        kept = _kept(partial, ends)
        for each in () if kept else (partial, ends):
            each.unlink(missing_ok=True)  # never through a link that someone left there
        mode = "r+b" if kept else "x+b"
        with open(partial, mode, buffering=0) as records, open(ends, mode, buffering=0) as counted:
            for opened, size in ((records, kept[-1] if kept else 0), (counted, 8 * len(kept))):
                opened.truncate(size)
                opened.seek(size)
            yield Records(records, counted, kept)
        partial.replace(path)
        # Also of commands that this one replaces.
        for other in path.parent.glob(f".{glob.escape(path.name)}.{'[0-9a-f]' * 16}.*"):
            if other.suffix in (".partial", ".done"):
                other.unlink(missing_ok=True)


def _kept(partial: pathlib.Path, ends: pathlib.Path) -> list[int]:
    try:
        counted = files.read(files.inside(ends.parent, ends.name), most=MAX_ENDS)
        with files.regular(files.inside(partial.parent, partial.name)) as opened:
            size = os.fstat(opened.fileno()).st_size
    except files.FileError:
        return []
    found = np.frombuffer(counted[: len(counted) // 8 * 8], "<i8")
    good = (np.diff(found, prepend=0) > 0) & (found <= size)
    kept: list[int] = found[: len(found) if good.all() else int(good.argmin())].tolist()
    return kept


def _write(opened: IO[bytes], data: bytes) -> None:
    rest = memoryview(data)
    while rest:
        rest = rest[opened.write(rest) or 0 :]
