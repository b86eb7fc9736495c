"""metrics.jsonl as columns: a million records in seconds, in curves that keep every peak."""

import io
import json
import math
import os
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import pyarrow as pa
from pyarrow import compute
from pyarrow import json as arrow

from jaxtrain.telemetry.report import run as run_lib
from jaxtrain.telemetry.report.markup import spread
from loaders.io import files

CHUNK = 16 << 20  # [bytes] that are parsed at once
USUAL = 50  # records before a step from which the usual value of a metric is taken
FAR = 8.0  # [deviations] of a spike
MAX_NAMES = 2000  # metrics of a run: more is no run's


Columns = dict[str, np.ndarray]  # metric, and "step", -> values by step, nan if a record has none


class Records(NamedTuple):
    """The records of a run."""

    splits: dict[str, Columns]
    lines: int  # that are records
    odd: int  # lines that are no records


def read(path: pathlib.Path) -> Records:
    """Read the complete lines of metrics.jsonl, which may still be written. Raises FileError."""
    parts: dict[str, list[Columns]] = {}
    n_records = n_odd = 0
    if not path.exists():
        return Records({}, 0, 0)
    with files.regular(path) as file:
        for text in _chunks(file):
            splits, n_odd_here = _parsed(text)
            n_odd += n_odd_here
            for split, columns in splits.items():
                n_records += len(columns["step"])
                parts.setdefault(split, []).append(columns)
    joined = {split: _joined(columns) for split, columns in parts.items()}
    return Records(joined, n_records, n_odd)


def _chunks(file: BinaryIO) -> Iterator[bytes]:
    """Yield the file in parts that end with a line, without an incomplete last line."""
    incomplete = b""
    while block := file.read(CHUNK):
        lines, newline, incomplete = (incomplete + block).rpartition(b"\n")
        if newline:
            yield lines + newline
    if incomplete and run_lib.parse(incomplete):
        yield incomplete + b"\n"


def _parsed(text: bytes) -> tuple[dict[str, Columns], int]:
    """Return the columns of each split, and the number of lines that are no records."""
    splits = _parsed_by_arrow(text)
    if splits is not None:
        return splits, 0
    records: dict[str, list[dict[str, Any]]] = {}
    n_odd = 0
    for line in text.split(b"\n"):
        if not line:
            continue
        record = run_lib.parse(line)
        if record:
            records.setdefault(record["split"], []).append(record)
        else:
            n_odd += 1
    return {split: _columns(of_split) for split, of_split in records.items()}, n_odd


def _columns(records: Sequence[Mapping[str, Any]]) -> Columns:
    names = dict.fromkeys(name for record in records for name in record if name != "split")
    columns = {}
    for name in dict.fromkeys([*list(names)[:MAX_NAMES], "step"]):
        columns[name] = np.array([run_lib.number(record.get(name)) for record in records])
    return columns


def _parsed_by_arrow(text: bytes) -> dict[str, Columns] | None:
    """Parse by pyarrow, which is ten times as fast. Return None if there is an odd line."""
    options = arrow.ReadOptions(block_size=len(text) + 1)
    try:
        return _splits(arrow.read_json(io.BytesIO(text), options))
    except (pa.ArrowException, ValueError, OSError):  # ValueError: names that are not UTF-8
        return None


def _splits(table: pa.Table) -> dict[str, Columns] | None:
    if not _is_of_records(table):
        return None
    table = table.combine_chunks()
    split = table["split"]
    if table["step"].null_count or split.null_count or compute.min(table["step"]).as_py() < 0:
        return None
    values = {}
    for field in table.schema:
        if field.name != "split" and field.type != pa.null():
            values[field.name] = table[field.name].cast(pa.float64()).to_numpy()
    splits = {}
    for name in dict.fromkeys(compute.unique(split).to_pylist()):
        is_of_split = compute.equal(split, name).to_numpy()
        columns = {metric: x[is_of_split] for metric, x in values.items()}
        for metric in list(columns):
            if metric != "step" and np.isnan(columns[metric]).all():
                del columns[metric]
        splits[name] = columns
    return splits


def _is_of_records(table: pa.Table) -> bool:
    """Whether a table has the columns of records: a step, a split, and numbers."""
    types = {field.name: field.type for field in table.schema}
    if len(types) != table.num_columns or table.num_columns > MAX_NAMES:
        return False
    if types.get("step") != pa.int64() or types.pop("split", None) != pa.string():
        return False
    return all(kind in (pa.int64(), pa.float64(), pa.null()) for kind in types.values())


def _joined(parts: list[Columns]) -> Columns:
    if len(parts) == 1:
        return parts[0]
    names = dict.fromkeys(name for part in parts for name in part)
    missing = [np.full(len(part["step"]), math.nan) for part in parts]
    joined = {}
    for name in names:
        pieces = zip(parts, missing, strict=True)
        joined[name] = np.concatenate([part.get(name, nans) for part, nans in pieces])
    return joined


def spikes(columns: Mapping[str, np.ndarray], most: int = 40) -> list[tuple[int, float, float]]:
    """Find (step, loss, usual loss) of losses far above the `USUAL` records before, largest first.

    The usual loss is their median. A spike is more than `FAR` of their deviations (1.4826 times the
    median one) above it.
    """
    step = columns.get("step", np.zeros(0))
    loss = columns.get("loss", np.zeros(0))
    is_finite = np.isfinite(loss)
    step = step[is_finite]
    loss = loss[is_finite]
    if len(loss) < 10:
        return []
    jump = np.diff(loss, prepend=loss[0])
    candidates = np.flatnonzero(jump > FAR / 2 * np.median(np.abs(jump)))
    largest_first = candidates[np.argsort(-jump[candidates], kind="stable")]
    ranked = []  # (deviations above the usual loss, step, loss, usual loss)
    for i in largest_first[:1000]:
        earlier = loss[max(i - USUAL, 0) : i]
        usual, deviation = usually(earlier)
        deviation = max(deviation, 1e-3 * abs(usual))
        if len(earlier) >= 10 and loss[i] > usual + FAR * deviation:
            height = (float(loss[i]) - usual) / max(deviation, 1e-30)
            ranked.append((height, int(step[i]), float(loss[i]), usual))
    ranked.sort(reverse=True)
    return [(at, height, usual) for _, at, height, usual in ranked[:most]]


def usually(values: np.ndarray) -> tuple[float, float]:
    """Return the median of values, and 1.4826 times their median deviation from it."""
    usual = float(np.median(values))
    return usual, 1.4826 * float(np.median(np.abs(values - usual)))


def thinned(step: np.ndarray, value: np.ndarray, most: int) -> tuple[np.ndarray, np.ndarray]:
    """At most ``most`` points of a curve, with each stretch's extremes, the first and last."""
    is_finite = np.isfinite(value)
    step = step[is_finite]
    value = value[is_finite]
    if len(step) <= most:
        return step, value
    n_stretches = max((most - 2) // 2, 1)
    edges = np.linspace(0, len(step), n_stretches + 1).astype(int)
    starts = edges[:-1]
    lengths = np.diff(edges)
    stretch = np.repeat(np.arange(n_stretches), lengths)
    lowest = np.repeat(np.minimum.reduceat(value, starts), lengths)
    highest = np.repeat(np.maximum.reduceat(value, starts), lengths)
    low = _first_of_each(value == lowest, stretch, n_stretches)
    high = _first_of_each(value == highest, stretch, n_stretches)
    points = np.unique(np.concatenate([[0], low, high, [len(step) - 1]]))
    return step[points], value[points]


def _first_of_each(is_extreme: np.ndarray, stretch: np.ndarray, n_stretches: int) -> np.ndarray:
    """Return the place of the first extreme of each stretch."""
    extremes = np.flatnonzero(is_extreme)
    _, first = np.unique(stretch[extremes], return_index=True)
    assert len(first) == n_stretches
    return extremes[first]


def generations(path: pathlib.Path, *, steps: int, each: int) -> dict[int, list[dict[str, str]]]:
    """Step -> generations of generations.jsonl: some steps, with the first and the last."""
    by_step: dict[int, list[dict[str, str]]] = {}
    for record in run_lib.objects(path):
        rows = by_step.setdefault(record.pop("step"), [])
        if len(rows) < each:
            rows.append({str(name)[:80]: _text(value) for name, value in record.items()})
    return {step: by_step[step] for step in spread(sorted(by_step), steps)}


def _text(value: object) -> str:
    if isinstance(value, str):
        text = value
    elif isinstance(value, float):
        text = f"{value:.4g}"
    else:
        try:
            text = json.dumps(value)
        except RecursionError:  # nested as deep as could just be read
            text = "…"
    return text if len(text) <= 1500 else text[:1500] + " …"


def pictures(folder: pathlib.Path) -> dict[str, dict[int, list[str]]]:
    """Name of a kind -> step (-1: of the run's begin) -> names of PNG files in order."""
    numbered: dict[str, dict[int, dict[int, str]]] = {}  # kind -> step -> number -> file
    try:
        entries = [entry for entry in os.scandir(folder) if entry.is_file(follow_symlinks=False)]
    except OSError:
        return {}
    for entry in entries:
        stem, _, suffix = entry.name.rpartition(".")
        kind, _, number = stem.rpartition("_")
        if suffix != "png" or not number.isdecimal() or len(number) > 6 or not kind:
            continue
        step = -1
        if kind.startswith("step"):
            digits, _, kind_of_step = kind[4:].partition("_")
            if digits.isdecimal() and len(digits) < 16:
                step = int(digits)
                kind = kind_of_step
        numbered.setdefault(kind, {}).setdefault(step, {})[int(number)] = entry.name
    by_kind = {}
    for kind, steps in sorted(numbered.items()):
        by_kind[kind] = {step: _in_order(names) for step, names in sorted(steps.items())}
    return by_kind


def _in_order(names: Mapping[int, str]) -> list[str]:
    return [names[number] for number in sorted(names)]
