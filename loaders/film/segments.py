"""Audio codes and the texts that are spoken in a film, as arrays of a dataset."""

import csv
import datetime
import io
import pathlib
import zipfile
from collections.abc import Sequence
from typing import Any

import numpy as np

from loaders.audio.recordings import tables, values
from loaders.base import DataError, narrowed
from loaders.film import film_files, foreign_files
from loaders.io import files

MAX_SHEET = 64 << 20  # [bytes] of a workbook, unpacked, which openpyxl makes objects of
MAX_ROWS, MAX_CELLS = 1 << 20, 1 << 24  # of a sheet; Excel's have that many rows


def read_codes(path: pathlib.Path) -> np.ndarray:
    """int16 [times, codebooks]."""
    codes = foreign_files.only_array(path)
    codes = codes[0] if codes.ndim == 3 and len(codes) == 1 else codes
    if codes.ndim != 2 or not codes.size or not np.issubdtype(codes.dtype, np.integer):
        raise DataError(
            f"{path} holds {codes.dtype} {codes.shape}; expected integers [codebooks, times]"
        )
    if codes.shape[0] > codes.shape[1]:
        raise DataError(
            f"{path} holds {codes.shape[0]} codebooks of {codes.shape[1]} times; expected"
            " [codebooks, times]: transpose it"
        )
    if codes.min() < 0 or codes.max() > film_files.LARGEST_CODE:
        raise DataError(
            f"{path} holds codes from {codes.min()} to {codes.max()}; expected 0 …"
            f" {film_files.LARGEST_CODE}"
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
    embeddings = foreign_files.only_array(place)
    if (
        embeddings.ndim != 2
        or not embeddings.size
        or not np.issubdtype(embeddings.dtype, np.floating)
    ):
        raise DataError(
            f"{place} holds {embeddings.dtype} {embeddings.shape}; expected floating-point numbers"
            " [rows, values]"
        )
    with np.errstate(over="ignore"):
        embeddings = embeddings.astype(np.float32)
    if broken := int((~np.isfinite(embeddings)).any(1).sum()):
        raise DataError(
            f"{place} has values that are not finite in float32, in {broken} of its rows"
        )
    if not annotations:
        if len(embeddings) < volumes or (len(embeddings) > volumes and not cut):
            raise DataError(
                f"{place} has {len(embeddings)} rows for {volumes} volumes; give one for each, or"
                " --annotations"
            )
        return embeddings[:volumes], np.arange(volumes), ""
    times = read_annotations(annotations, *columns) - start
    if len(times) != len(embeddings):
        raise DataError(
            f"{annotations} has {len(times)} segments, and {place} {len(embeddings)} rows"
        )
    text = np.zeros((volumes, slots, embeddings.shape[1]), np.float32)
    first = np.full(len(times), volumes)  # volume that has each segment
    since = np.arange(volumes)
    for i in range(volumes):
        # The first volume's window lies before the film, and holds what the film begins with.
        low, high = max(i - 1, 0) * tr, max(i, 1) * tr
        # or a moment in it
        touching = np.flatnonzero(
            (times[:, 0] < high) & ((times[:, 1] > low) | (times[:, 0] >= low))
        )
        latest = touching[np.argsort(times[touching, 0], kind="stable")][-slots:]
        text[i, slots - len(latest) :] = embeddings[latest]
        first[latest] = np.minimum(first[latest], i)
        since[i] = min([i, *first[latest]])
    without, unused = int((~text.any((1, 2))).sum()), int((first == volumes).sum())
    if unused == len(times):
        raise DataError(
            f"{annotations}: no segment touches the {volumes * tr:g} s of film; they lie from"
            f" {times.min():g} to {times.max():g} in {' and '.join(columns)}, which are seconds"
        )
    note = f" (none in {without} volumes; {unused} of {len(times)} segments are in no volume)"
    return text.reshape(volumes, -1), since, note if without or unused else ""


def read_annotations(path: pathlib.Path, start: str, end: str) -> np.ndarray:
    """Return begin and end of segments [s], float64 [segments, 2], of 2.5, 02:03 or 1:02:03.5."""
    with files.reading(path):
        rows, separator = _table(path)
    _, head = rows[0] if rows else (0, [])
    head = [str(cell).strip() for cell in head]
    columns = {name: _columns(head, name) for name in (start, end)}
    if twice := [name for name, places in columns.items() if len(places) > 1]:
        raise DataError(
            f"{path} has the column {twice[0]} more than once: {', '.join(head)}; rename all but"
            " one of them"
        )
    if absent := [name for name, places in columns.items() if not places]:
        raise DataError(
            f"{path} has no column {' and no '.join(absent)}; expected one of: {', '.join(head)}"
            " (--start, --end)"
        )
    spans = []
    for number, row in rows[1:]:
        if separator and any(str(cell).strip() for cell in row[len(head) :]):
            raise DataError(
                f"{path}: row {number} has {len(row)} cells, and the header {len(head)}: {row}; put"
                f" quotes around a cell that holds the separator {separator!r}"
            )
        cells = [row[at] if at < len(row) else None for (at,) in columns.values()]
        if separator == "," and (commas := [cell for cell in cells if "," in str(cell)]):
            raise DataError(
                f"{path}: row {number} has {commas[0]!r}, and commas separate the columns, so that"
                " one in a number is unclear; write numbers with a point, or separate the columns"
                " by semicolons"
            )
        try:
            times = [_seconds(cell) for cell in cells]
        except (TypeError, ValueError):
            raise DataError(
                f"{path}: row {number} has no seconds, nor hh:mm:ss, in {start} and {end}: {row}"
            ) from None
        if not times[0] <= times[1]:
            raise DataError(
                f"{path}: row {number} ends at {times[1]:g} s, before it begins at {times[0]:g} s"
            )
        spans.append(times)
    if not spans:
        raise DataError(f"{path} has no segment")
    return np.array(spans)


def _columns(head: Sequence[str], name: str) -> list[int]:
    """Return the places of the columns of that name, else of that name in another case."""
    places = [i for i, each in enumerate(head) if each == name]
    return places or [i for i, each in enumerate(head) if each.casefold() == name.casefold()]


def _table(path: pathlib.Path) -> tuple[list[tuple[int, list[Any]]], str]:
    """Return a table's filled rows, by number from 1 on, and its separator, "" of a workbook."""
    if path.suffix.lower() == ".xlsx":
        return _sheet(path), ""
    text = tables.text_of(path)
    first, _, rest = text.partition("\n")
    stated = tables.stated_separator(first)
    separator = stated or tables.separator(first)
    rows = enumerate(
        csv.reader(io.StringIO(rest if stated else text), delimiter=separator), 2 if stated else 1
    )
    return [(number, row) for number, row in rows if any(row)], separator


def _sheet(path: pathlib.Path) -> list[tuple[int, list[Any]]]:
    """Return the filled rows of a workbook's first sheet, with numbers. Raises DataError."""
    openpyxl = foreign_files.package("openpyxl")
    rows, cells = [], 0
    with files.regular(path) as file:
        files.check_archive(
            zipfile.ZipFile(file), path, most=MAX_SHEET, remedy="; save the sheet as CSV"
        )
        book = openpyxl.load_workbook(file, read_only=True, data_only=True)
        sheet = book.worksheets[0]
        sheet.reset_dimensions()  # else rows would be filled up to the claimed width
        for number, row in enumerate(sheet.iter_rows(values_only=True), 1):
            cells += len(row)
            if number > MAX_ROWS or cells > MAX_CELLS:
                raise DataError(
                    f"{path} has more than {MAX_ROWS:,} rows or {MAX_CELLS:,} cells, with the empty"
                    " ones between those that hold something; save the sheet as CSV"
                )
            if any(cell not in (None, "") for cell in row):
                rows.append((number, list(row)))
        book.close()
    return rows


def _seconds(cell: Any) -> float:
    if isinstance(cell, datetime.timedelta):  # a workbook's
        return cell.total_seconds()
    if isinstance(cell, datetime.time):
        return values.minutes(cell.isoformat()) or 0.0
    if not isinstance(cell, str):
        return float(cell)
    if (seconds := values.minutes(cell)) is None:
        raise ValueError(cell)
    return seconds
