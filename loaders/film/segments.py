"""Audio codes and the texts that are spoken in a film, as arrays of a dataset."""

import csv
import datetime
import io
import pathlib
import zipfile
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from loaders.audio.recordings import tables, values
from loaders.base import DataError, narrowed
from loaders.film import film_files, foreign_files
from loaders.io import checks, files

MAX_SHEET = 64 << 20  # [bytes] of a workbook, unpacked, which openpyxl makes objects of
MAX_ROWS = 1 << 20  # of a sheet, as many as Excel's have
MAX_CELLS = 1 << 24  # of a sheet


def read_codes(path: pathlib.Path) -> np.ndarray:
    """int16 [times, codebooks]."""
    codes = foreign_files.only_array(path)
    if codes.ndim == 3 and len(codes) == 1:
        codes = codes[0]
    is_integer = np.issubdtype(codes.dtype, np.integer)
    if codes.ndim != 2 or not codes.size or not is_integer:
        raise DataError(
            f"{path} holds {codes.dtype} {codes.shape}; expected integers [codebooks, times]"
        )
    n_codebooks, n_times = codes.shape
    if n_codebooks > n_times:
        raise DataError(
            f"{path} holds {n_codebooks} codebooks of {n_times} times; expected"
            " [codebooks, times]: transpose it"
        )
    lowest = codes.min()
    highest = codes.max()
    if lowest < 0 or highest > film_files.LARGEST_CODE:
        raise DataError(
            f"{path} holds codes from {lowest} to {highest}; expected 0 … {film_files.LARGEST_CODE}"
        )
    return narrowed(np.ascontiguousarray(codes.T), np.int16, f"the codes of {path}")


def window_text(
    place: pathlib.Path,
    annotations: pathlib.Path | None,
    *,
    columns: tuple[str, str],
    slots: int,
    tr: float,
    volumes: int,
    cut: bool,
    start: float = 0.0,
) -> tuple[np.ndarray, np.ndarray, str]:
    """float32 [volumes, values]; each volume's first one that shares a segment, and a note.

    The note is about both. ``place``: the file of embeddings. ``columns``: of ``annotations``, with
    the begin and the end of a segment. ``cut``: rows after ``volumes`` may be left out. ``start``:
    [s] of the film, at the first volume. Raises DataError.
    """
    embeddings = _read_embeddings(place)
    if not annotations:
        n_rows = len(embeddings)
        if n_rows < volumes or (n_rows > volumes and not cut):
            raise DataError(
                f"{place} has {n_rows} rows for {volumes} volumes; give one for each, or"
                " --annotations"
            )
        return embeddings[:volumes], np.arange(volumes), ""
    spans = read_annotations(annotations, *columns) - start
    n_segments = len(spans)
    if n_segments != len(embeddings):
        raise DataError(
            f"{annotations} has {n_segments} segments, and {place} {len(embeddings)} rows"
        )
    text = np.zeros((volumes, slots, embeddings.shape[1]), np.float32)
    first_volume = np.full(n_segments, volumes)  # that has each segment
    text_since = np.arange(volumes)
    for volume in range(volumes):
        touching = _window_segments(spans, volume, tr)
        segments = touching[-slots:]
        text[volume, slots - len(segments) :] = embeddings[segments]
        since = np.minimum(first_volume[segments], volume)
        first_volume[segments] = since
        text_since[volume] = since.min(initial=volume)
    is_unused = first_volume == volumes
    n_unused = int(is_unused.sum())
    if n_unused == n_segments:
        raise DataError(
            f"{annotations}: no segment touches the {volumes * tr:g} s of film; they lie from"
            f" {spans.min():g} to {spans.max():g} in {' and '.join(columns)}, which are seconds"
        )
    is_empty = ~text.any((1, 2))
    n_empty = int(is_empty.sum())
    note = ""
    if n_empty or n_unused:
        note = f" (none in {n_empty} volumes; {n_unused} of {n_segments} segments are in no volume)"
    return text.reshape(volumes, -1), text_since, note


def _read_embeddings(path: pathlib.Path) -> np.ndarray:
    """Return float32 [rows, values]. Raises DataError."""
    embeddings = foreign_files.only_array(path)
    is_floating = np.issubdtype(embeddings.dtype, np.floating)
    if embeddings.ndim != 2 or not embeddings.size or not is_floating:
        raise DataError(
            f"{path} holds {embeddings.dtype} {embeddings.shape}; expected floating-point numbers"
            " [rows, values]"
        )
    with np.errstate(over="ignore"):
        embeddings = embeddings.astype(np.float32)
    is_broken_row = (~np.isfinite(embeddings)).any(1)
    if is_broken_row.any():
        raise DataError(
            f"{path} has values that are not finite in float32, in {is_broken_row.sum()} of its"
            " rows"
        )
    return embeddings


def _window_segments(spans: np.ndarray, volume: int, tr: float) -> np.ndarray:
    """Return the segments that touch a volume's window, in the order of their begins."""
    # The first volume's window lies before the film, and holds what the film begins with.
    window_begin = max(volume - 1, 0) * tr
    window_end = max(volume, 1) * tr
    begins = spans[:, 0]
    ends = spans[:, 1]
    # A segment may be a single moment: its begin may be its end.
    ends_in_or_after = (ends > window_begin) | (begins >= window_begin)
    touching = np.flatnonzero((begins < window_end) & ends_in_or_after)
    by_begin = np.argsort(begins[touching], kind="stable")
    return touching[by_begin]


class _WrongRow(ValueError):
    """The error of a row, without its number."""


class NumberedRow(NamedTuple):
    """A filled row of a table."""

    number: int  # from 1 on
    cells: list[Any]


def read_annotations(path: pathlib.Path, start: str, end: str) -> np.ndarray:
    """Return begin and end of segments [s], float64 [segments, 2], of 2.5, 02:03 or 1:02:03.5."""
    with files.reading(path):
        rows, separator = _read_table(path)
    header = []
    if rows:
        header = [str(cell).strip() for cell in rows[0].cells]
    columns = _time_columns(path, header, (start, end))
    spans = []
    wrong_rows = []
    for row in rows[1:]:
        try:
            _check_row(row, header, columns, separator)
            spans.append(_span(row, columns, (start, end)))
        except _WrongRow as error:
            wrong_rows.append(f"{path}: row {row.number} {error}")
    if wrong_rows:
        raise DataError(f"{wrong_rows[0]}{checks.more(len(wrong_rows))}", listed=wrong_rows)
    if not spans:
        raise DataError(f"{path} has no segment")
    return np.array(spans)


def _span(row: NumberedRow, columns: Sequence[int], names: Sequence[str]) -> tuple[float, float]:
    """Return the begin and the end of a segment [s]. Raises _WrongRow."""
    try:
        begin, end = [_seconds(cell) for cell in _cells_at(columns, row)]
    except (TypeError, ValueError):
        raise _WrongRow(
            f"has no seconds, nor hh:mm:ss, in {' and '.join(names)}: {row.cells}"
        ) from None
    if not begin <= end:
        raise _WrongRow(f"ends at {end:g} s, before it begins at {begin:g} s")
    return begin, end


def _time_columns(path: pathlib.Path, header: Sequence[str], names: Sequence[str]) -> list[int]:
    """Return the indices of the columns of these names. Raises DataError: not one of each."""
    matches = {name: _matching_columns(header, name) for name in names}
    repeated = [name for name, indices in matches.items() if len(indices) > 1]
    if repeated:
        raise DataError(
            f"{path} has the column {repeated[0]} more than once: {', '.join(header)}; rename all"
            " but one of them"
        )
    absent = [name for name, indices in matches.items() if not indices]
    if absent:
        raise DataError(
            f"{path} has no column {' and no '.join(absent)}; expected one of: {', '.join(header)}"
            " (--start, --end)"
        )
    return [matches[name][0] for name in names]


def _matching_columns(header: Sequence[str], name: str) -> list[int]:
    """Return the indices of the columns of that name, else of that name in another case."""
    same_name = [index for index, title in enumerate(header) if title == name]
    if same_name:
        return same_name
    folded_name = name.casefold()
    return [index for index, title in enumerate(header) if title.casefold() == folded_name]


def _cells_at(columns: Sequence[int], row: NumberedRow) -> list[Any]:
    """Return a row's cells in these columns, None for one beyond its end."""
    return [row.cells[column] if column < len(row.cells) else None for column in columns]


def _check_row(
    row: NumberedRow, header: Sequence[str], columns: Sequence[int], separator: str
) -> None:
    """Raise _WrongRow if the separator may also stand inside a cell of the row."""
    extra_cells = row.cells[len(header) :]
    if separator and any(str(cell).strip() for cell in extra_cells):
        raise _WrongRow(
            f"has {len(row.cells)} cells, and the header {len(header)}: {row.cells}; put quotes"
            f" around a cell that holds the separator {separator!r}"
        )
    if separator != ",":
        return
    for cell in _cells_at(columns, row):
        if "," in str(cell):
            raise _WrongRow(
                f"has {cell!r}, and commas separate the columns, so that one in a number is"
                " unclear; write numbers with a point, or separate the columns by semicolons"
            )


def _read_table(path: pathlib.Path) -> tuple[list[NumberedRow], str]:
    """Return a table's filled rows, and its separator, "" of a workbook."""
    if path.suffix.lower() == ".xlsx":
        return _read_sheet(path), ""
    content = tables.text_of(path)
    first_line, _, later_lines = content.partition("\n")
    first_number = 1
    separator = tables.stated_separator(first_line)
    if separator:
        first_number = 2
        content = later_lines
    else:
        separator = tables.separator(first_line)
    rows = []
    reader = csv.reader(io.StringIO(content), delimiter=separator)
    for number, cells in enumerate(reader, first_number):
        if any(cells):
            rows.append(NumberedRow(number, cells))
    return rows, separator


def _read_sheet(path: pathlib.Path) -> list[NumberedRow]:
    """Return the filled rows of a workbook's first sheet. Raises DataError."""
    openpyxl = foreign_files.package("openpyxl")
    rows = []
    n_cells = 0
    with files.regular(path) as file:
        archive = zipfile.ZipFile(file)
        files.check_archive(archive, path, most=MAX_SHEET, remedy="; save the sheet as CSV")
        book = openpyxl.load_workbook(file, read_only=True, data_only=True)
        sheet = book.worksheets[0]
        sheet.reset_dimensions()  # else rows would be filled up to the claimed width
        for number, cells in enumerate(sheet.iter_rows(values_only=True), 1):
            n_cells += len(cells)
            if number > MAX_ROWS or n_cells > MAX_CELLS:
                raise DataError(
                    f"{path} has more than {MAX_ROWS:,} rows or {MAX_CELLS:,} cells, with the empty"
                    " ones between those that hold something; save the sheet as CSV"
                )
            if any(cell not in (None, "") for cell in cells):
                rows.append(NumberedRow(number, list(cells)))
        book.close()
    return rows


def _seconds(cell: Any) -> float:
    if isinstance(cell, datetime.timedelta):  # a workbook's
        return cell.total_seconds()
    if isinstance(cell, datetime.time):
        return values.minutes(cell.isoformat()) or 0.0
    if not isinstance(cell, str):
        return float(cell)
    seconds = values.minutes(cell)
    if seconds is None:
        raise ValueError(cell)
    return seconds
