"""The list of what a run was trained on, in its workdir: the data may change, or move.

    workdir/training_sources.csv    name, bytes, digest

Commands that score the run compare with it. Sources that were read by an earlier start stay.
"""

import csv
import io
import os
import pathlib
from collections.abc import Iterable

from loaders.io import atomic_write, files

FILE = "training_sources.csv"
MAX_BYTES = 1 << 30


def write(workdir: str, sources: Iterable[tuple[str, int, str]]) -> None:
    """Add sources, name and bytes and digest, to the list of a workdir. Raises OSError."""
    new_lines = {(name, str(n_bytes), digest) for name, n_bytes, digest in sources}
    if not new_lines:
        return
    path = pathlib.Path(workdir) / FILE
    lines = _read(path)
    if not new_lines <= lines:
        atomic_write.write_csv(path, sorted(lines | new_lines), errors="surrogateescape")


def _read(path: pathlib.Path) -> set[tuple[str, str, str]]:
    """Return the lines of an earlier list, or none if it is missing or damaged."""
    if not os.path.exists(path):
        return set()
    try:
        text = files.read_text(path, most=MAX_BYTES)
        return {(name, n_bytes, digest) for name, n_bytes, digest in csv.reader(io.StringIO(text))}
    except (files.FileError, ValueError, csv.Error):
        return set()
