"""metrics.jsonl as columns: a million records in seconds, in curves that keep every peak."""

import io
import json
import math
import os
import pathlib
from collections.abc import Iterator, Mapping
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


class Records(NamedTuple):
    """The records of a run."""

    # split -> metric, and "step", -> values by step, nan if a record has none
    splits: dict[str, dict[str, np.ndarray]]
    lines: int  # that are records
    odd: int  # lines that are no records


def read(path: pathlib.Path) -> Records:
    """Read the complete lines of metrics.jsonl, which may still be written. Raises FileError."""
    parts: dict[str, list[dict[str, np.ndarray]]] = {}
    count = odd = 0
    if not path.exists():
        return Records({}, 0, 0)
    with files.regular(path) as file:
        for text in _chunks(file):
            rows, wrong = _columns(text)
            odd += wrong
            for split, columns in rows.items():
                count += len(columns["step"])
                parts.setdefault(split, []).append(columns)
    return Records({split: _joined(each) for split, each in parts.items()}, count, odd)


def _chunks(file: BinaryIO) -> Iterator[bytes]:
    """Yield the file in parts that end with a line, without an incomplete last line."""
    rest = b""
    while block := file.read(CHUNK):
        whole, newline, rest = (rest + block).rpartition(b"\n")
        if newline:
            yield whole + newline
    if rest and run_lib.parse(rest):
        yield rest + b"\n"


def _columns(text: bytes) -> tuple[dict[str, dict[str, np.ndarray]], int]:
    found = _by_arrow(text)
    if found is not None:
        return found, 0
    rows: dict[str, list[dict[str, Any]]] = {}
    lines = [line for line in text.split(b"\n") if line]
    for line in lines:
        if record := run_lib.parse(line):
            rows.setdefault(record["split"], []).append(record)
    columns = {}
    for split, records in rows.items():
        names = list(
            dict.fromkeys(name for record in records for name in record if name != "split")
        )[:MAX_NAMES]
        columns[split] = {
            n: np.array([run_lib.number(r.get(n)) for r in records])
            for n in {**dict.fromkeys(names), "step": None}
        }
    return columns, len(lines) - sum(len(records) for records in rows.values())


def _by_arrow(text: bytes) -> dict[str, dict[str, np.ndarray]] | None:
    """Parse by pyarrow, which is ten times as fast. Return None if there is an odd line."""
    try:
        return _table(
            arrow.read_json(io.BytesIO(text), arrow.ReadOptions(block_size=len(text) + 1))
        )
    except (pa.ArrowException, ValueError, OSError):  # ValueError: names that are not UTF-8
        return None


def _table(table: pa.Table) -> dict[str, dict[str, np.ndarray]] | None:
    schema = {field.name: field.type for field in table.schema}
    if len(schema) != table.num_columns or table.num_columns > MAX_NAMES:
        return None
    if schema.get("step") != pa.int64() or schema.get("split") != pa.string():
        return None
    if not all(
        t in (pa.int64(), pa.float64(), pa.null()) for n, t in schema.items() if n != "split"
    ):
        return None
    table = table.combine_chunks()
    step, split = table["step"], table["split"]
    if step.null_count or split.null_count or compute.min(step).as_py() < 0:
        return None
    values = {
        name: table[name].cast(pa.float64()).to_numpy()
        for name, kind in schema.items()
        if name != "split" and kind != pa.null()
    }
    found = {}
    for name in dict.fromkeys(compute.unique(split).to_pylist()):
        chosen = compute.equal(split, name).to_numpy()
        columns = {metric: x[chosen] for metric, x in values.items()}
        found[name] = {
            metric: x for metric, x in columns.items() if metric == "step" or not np.isnan(x).all()
        }
    return found


def _joined(parts: list[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    if len(parts) == 1:
        return parts[0]
    names = dict.fromkeys(name for part in parts for name in part)
    nothing = [np.full(len(part["step"]), math.nan) for part in parts]
    return {
        name: np.concatenate(
            [part.get(name, none) for part, none in zip(parts, nothing, strict=True)]
        )
        for name in names
    }


def spikes(columns: Mapping[str, np.ndarray], most: int = 40) -> list[tuple[int, float, float]]:
    """Find (step, loss, usual loss) of losses far above the `USUAL` records before, largest first.

    The usual loss is their median. A spike is more than `FAR` of their deviations (1.4826 times the
    median one) above it.
    """
    step, loss = (columns.get(name, np.zeros(0)) for name in ("step", "loss"))
    known = np.isfinite(loss)
    step, loss = step[known], loss[known]
    if len(loss) < 10:
        return []
    jump = np.diff(loss, prepend=loss[0])
    candidates = np.flatnonzero(jump > FAR / 2 * np.median(np.abs(jump)))
    found = []
    for i in candidates[np.argsort(-jump[candidates], kind="stable")][:1000]:
        before = loss[max(i - USUAL, 0) : i]
        usual, deviation = usually(before)
        deviation = max(deviation, 1e-3 * abs(usual))
        if len(before) >= 10 and loss[i] > usual + FAR * deviation:
            found.append(
                (
                    (float(loss[i]) - usual) / max(deviation, 1e-30),
                    int(step[i]),
                    float(loss[i]),
                    usual,
                )
            )
    return [row[1:] for row in sorted(found, reverse=True)[:most]]


def usually(before: np.ndarray) -> tuple[float, float]:
    """Return the median of values, and 1.4826 times their median deviation from it."""
    usual = float(np.median(before))
    return usual, 1.4826 * float(np.median(np.abs(before - usual)))


def thinned(step: np.ndarray, value: np.ndarray, most: int) -> tuple[np.ndarray, np.ndarray]:
    """At most ``most`` points of a curve, with each stretch's extremes, the first and last."""
    known = np.isfinite(value)
    step, value = step[known], value[known]
    if len(step) <= most:
        return step, value
    stretches = max((most - 2) // 2, 1)
    edges = np.linspace(0, len(step), stretches + 1).astype(int)
    starts = edges[:-1]
    lowest, highest = np.minimum.reduceat(value, starts), np.maximum.reduceat(value, starts)
    lengths = np.diff(edges)
    number = np.repeat(np.arange(stretches), lengths)
    low, high = (
        _first(value == np.repeat(x, lengths), number, stretches) for x in (lowest, highest)
    )
    kept = np.unique(np.concatenate([[0], low, high, [len(step) - 1]]))
    return step[kept], value[kept]


def _first(chosen: np.ndarray, number: np.ndarray, stretches: int) -> np.ndarray:
    at = np.flatnonzero(chosen)
    _, first = np.unique(number[at], return_index=True)
    assert len(first) == stretches
    return at[first]


def generations(path: pathlib.Path, *, steps: int, each: int) -> dict[int, list[dict[str, str]]]:
    """Step -> generations of generations.jsonl: some steps, with the first and the last."""
    found: dict[int, list[dict[str, str]]] = {}
    for record in run_lib.objects(path):
        rows = found.setdefault(record["step"], [])
        if len(rows) < each:
            rows.append({str(k)[:80]: _text(v) for k, v in record.items() if k != "step"})
    return {step: found[step] for step in spread(sorted(found), steps)}


def _text(value: object) -> str:
    try:
        text = (
            value
            if isinstance(value, str)
            else f"{value:.4g}"
            if isinstance(value, float)
            else json.dumps(value)
        )
    except RecursionError:  # nested as deep as could just be read
        text = "…"
    return text if len(text) <= 1500 else text[:1500] + " …"


def pictures(folder: pathlib.Path) -> dict[str, dict[int, list[str]]]:
    """Name of a kind -> step (-1: of the run's begin) -> names of PNG files in order."""
    found: dict[str, dict[int, dict[int, str]]] = {}
    try:
        entries = [
            entry.name for entry in os.scandir(folder) if entry.is_file(follow_symlinks=False)
        ]
    except OSError:
        return {}
    for name in entries:
        stem, dot, kind = name.rpartition(".")
        rest, _, number = stem.rpartition("_")
        if kind != "png" or not number.isdecimal() or len(number) > 6 or not rest:
            continue
        step, kind = -1, rest
        if (
            rest.startswith("step")
            and (digits := rest[4:].partition("_")[0]).isdecimal()
            and len(digits) < 16
        ):
            step, kind = int(digits), rest.partition("_")[2]
        found.setdefault(kind, {}).setdefault(step, {})[int(number)] = name
    return {
        kind: {step: [row[i] for i in sorted(row)] for step, row in sorted(found[kind].items())}
        for kind in sorted(found)
    }
