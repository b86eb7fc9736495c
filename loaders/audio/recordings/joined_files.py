"""Raven's tables over several files, whose times count over all files unless File Offset is there.

Raven names the file of a selection (Begin File), and counts Begin Time from the start of the first
file. People also join tables of single files, whose times count from the start of each. The lengths
of the files tell both apart, unless all times fit either way.
"""

import contextlib
from collections.abc import Callable, Iterable

from loaders import _rust
from loaders.audio.recordings.column_names import plain
from loaders.audio.recordings.columns import Layout, Options
from loaders.audio.recordings.lines import Line
from loaders.base import DataError


def refuse(
    layout: Layout, options: Options, lines: Iterable[Line], seconds: Callable[[Line], float]
) -> None:
    """Raise DataError if the times of a table of Raven may count over all of its files.

    ``seconds``: the length of a line's recording, 0 if it is not known.
    """
    start_column = layout.column("start")
    if not start_column or not plain(start_column).startswith("begintime"):
        return
    if options.start_column or not layout.column("file") or layout.column("file offset"):
        return
    lines_of: dict[str, list[Line]] = {}
    for line in lines:
        if line.file and line.start is not None and not line.is_dropped:
            lines_of.setdefault(line.file, []).append(line)
    if len(lines_of) < 2:
        return
    earliest_first = sorted(lines_of.values(), key=_first_start)
    end_of_files = 0.0  # at least, of those that begin earlier
    for of_file in earliest_first:
        if _first_start(of_file) < end_of_files:
            return  # it begins in an earlier file: times count from the start of each
        last_start = max(line.start or 0.0 for line in of_file)
        end_of_files = max(end_of_files + seconds(of_file[0]), last_start)
    file_column = layout.column("file")
    raise DataError(
        f"{layout.table.path}: {start_column!r} may count over all {len(lines_of)} files of"
        f" {file_column!r}, as Raven's does; add Raven's measurement File Offset (s), or say"
        f" --start-column {start_column!r} if it counts from the start of each file"
    )


def seconds_of(path: str) -> float:
    """Return the length of a recording, or 0 if it cannot be read."""
    with contextlib.suppress(OSError, ValueError):
        rate, frames, _, _ = _rust.recording_info(path)
        return frames / rate
    return 0.0


def _first_start(lines: Iterable[Line]) -> float:
    return min(line.start or 0.0 for line in lines)
