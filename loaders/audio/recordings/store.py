"""The folder of an index: written whole or not at all, and read again.

DIR/
  index.json                      root, classes, options, and rows and hours of each split
  data/SPLIT-00000-of-00002.parquet      rows, as Hugging Face's Hub names shards
  headers.cache              headers of all recordings, so that the next run reads only new ones
  errors.csv                      every error: kind, text
"""

import dataclasses
import itertools
import json
import os
import pathlib
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from loaders.audio import shards
from loaders.audio.recordings import find
from loaders.audio.recordings.annotations import Errors
from loaders.audio.recordings.headers import HIGHEST, LOWEST, Header
from loaders.audio.recordings.rows import Plan, Row
from loaders.base import DataError
from loaders.io import atomic_write, columnar, files

SHARD_ROWS = 1_000_000
GROUP_ROWS = 100_000  # of a row group, which are in memory together
VERSION = "2"  # of index.json
PARTS_VERSION = "1"  # of the rows in Parquet: equals that of rust/core/src/source/parts.rs
TEXTS = ("recording", "site", "date", "time")
PLACES = ("latitude", "longitude")
ROW_FIELDS = ("start", "end", "channel", "labels", "low", "high")
HEADER_FIELDS = ("rate", "frames", "channels")


def schema(names: list[str]) -> pa.Schema:
    """Return the columns of an index, its classes' ``names`` as Hugging Face declares them."""
    column_types = {
        "audio": pa.struct({"bytes": pa.binary(), "path": pa.string()}),
        "start": pa.float64(),
        "end": pa.float64(),
        "channel": pa.int32(),
        "label": pa.int64(),
        "labels": pa.list_(pa.int64()),
        "low": pa.float64(),
        "high": pa.float64(),
        "rate": pa.int32(),
        "frames": pa.int64(),
        "channels": pa.int32(),
        **dict.fromkeys(TEXTS, pa.string()),
        **dict.fromkeys(PLACES, pa.float64()),
    }
    features = {name: _feature(name, kind, names) for name, kind in column_types.items()}
    metadata = {
        "huggingface": json.dumps({"info": {"features": features}}),
        "jaxtrain.index": PARTS_VERSION,
    }
    return pa.schema(column_types, metadata=metadata)


def _feature(column: str, kind: pa.DataType, class_names: list[str]) -> dict[str, Any]:
    """Return the declaration of a column for Hugging Face's libraries."""
    class_label = {"names": class_names, "_type": "ClassLabel"}
    if column == "audio":
        return {
            "bytes": {"dtype": "binary", "_type": "Value"},
            "path": {"dtype": "string", "_type": "Value"},
        }
    if column == "label":
        return class_label
    if column == "labels":
        return {"feature": class_label, "_type": "Sequence"}
    return {"dtype": str(kind).replace("double", "float64"), "_type": "Value"}


def write(
    out: pathlib.Path, plan: Plan, errors: Errors, options: Mapping[str, Any]
) -> dict[str, Any]:
    """Write an index into a folder next to ``out`` and rename it. Return its index.json.

    Raises DataError: ``out`` holds anything but an index; OSError with the name ``out``: the disk
    is full.
    """
    refuse_other(out)
    with atomic_write.folder(out, replace=True) as fresh:
        (fresh / "data").mkdir()
        split_counts = _write_splits(fresh / "data", plan)
        if not split_counts:
            reason = "they name no recording, or windows without an event alone"
            if errors.counts:
                reason = "see the list of errors"
            raise DataError(f"the sources leave no row to write; {reason}")
        root = os.path.relpath(plan.root, os.path.realpath(out))
        index = {
            "version": VERSION,
            "root": root,
            "classes": plan.names,
            "splits": split_counts,
            "errors": dict(sorted(errors.counts.items())),
            "options": dict(options),
        }
        _write_recordings(fresh / "headers.cache", plan)
        errors.save(fresh / "errors.csv", always=True)
        index_text = json.dumps(index, indent=2, ensure_ascii=False)
        (fresh / "index.json").write_text(index_text + "\n")
    shards.note_root(out, os.path.normpath(os.path.join(os.path.realpath(out), root)))
    return index


def _write_splits(folder: pathlib.Path, plan: Plan) -> dict[str, dict[str, Any]]:
    """Write the shards of all splits. Return the counts of those with rows."""
    split_counts: dict[str, dict[str, Any]] = {}
    for split in sorted(set(plan.splits.values())):
        counts = write_split(folder, split, plan)
        if counts["rows"]:
            split_counts[split] = counts
    return split_counts


def refuse_other(out: pathlib.Path) -> None:
    """Raise DataError if a folder is no index. Put back one whose replacement was interrupted."""
    old = out.with_name(f".{out.name}.old")
    if not out.exists() and (old / "index.json").is_file():
        os.rename(old, out)
    if out.exists() and not out.is_dir():
        raise DataError(f"--out {out} is not a folder")
    if out.is_dir() and any(out.iterdir()) and not (out / "index.json").is_file():
        raise DataError(
            f"--out {out} is a folder that holds other things; name a new one, or one of jaxtrain"
            " index"
        )


def read(folder: pathlib.Path) -> dict[str, Any]:
    """Read index.json of an index. Raises DataError."""
    try:
        index = files.read_json(files.inside(folder, "index.json"))
        _check(index)
    except (ValueError, TypeError) as error:
        reason = find.how_to_index(folder) or str(error)
        raise DataError(f"{folder} is not an index of jaxtrain index: {reason}") from error
    return index


def _check(index: Mapping[str, Any]) -> None:
    """Raise TypeError if a part of index.json is missing or of another kind."""
    version = index.get("version")
    if version != VERSION:
        raise TypeError(
            f"it is of version {version!r:.80}, and this jaxtrain reads {VERSION!r}; make it again"
        )
    splits = index.get("splits")
    if not isinstance(splits, dict) or not all(map(_is_counted, splits.values())):
        raise TypeError("it has no splits, or one without its rows and hours")
    if not isinstance(index.get("errors", {}), dict):
        raise TypeError("its errors are no counts")
    names = index.get("classes")
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise TypeError("it has no classes")
    for split in splits:
        if not re.fullmatch(r"[A-Za-z]\w*", split):
            raise TypeError(f"it has a split {split!r}")


def _is_counted(split: Any) -> bool:
    if not isinstance(split, dict):
        return False
    for name in ("rows", "recordings", "hours", "hours_of_recordings"):
        if not isinstance(split.get(name), int | float):
            return False
    return True


def read_recordings(folder: pathlib.Path) -> dict[str, Header]:
    """Return the headers that an index keeps, by absolute path, or none of another version."""
    headers: dict[str, Header] = {}
    try:
        root = os.path.normpath(os.path.join(os.path.realpath(folder), read(folder)["root"]))
        for row in pq.read_table(files.inside(folder, "headers.cache")).to_pylist():
            path = os.path.join(root, row.pop("path"))
            row["about"] = dict(row["about"])
            headers[path] = Header(**row)
    except Exception:  # noqa: BLE001  a damaged table makes pyarrow raise many kinds
        return {}
    if not all(map(_is_header, headers.values())):
        return {}
    return headers


def read_contents(folder: pathlib.Path) -> dict[str, tuple[int, str]]:
    """Return size and digest of an index's recordings, by their names, or none if it lacks them."""
    try:
        with columnar.native(files.inside(folder, "headers.cache")) as file:
            table = pq.read_table(file, columns=["path", "size", "digest"])
        columns = [table.column(name).to_pylist() for name in ("path", "size", "digest")]
        return {name: (int(size), str(digest)) for name, size, digest in zip(*columns, strict=True)}
    except Exception:  # noqa: BLE001  a damaged table makes pyarrow raise many kinds
        return {}


def _is_header(header: Header) -> bool:
    numbers = (
        header.size,
        header.mtime,
        header.rate,
        header.frames,
        header.channels,
        header.stated,
    )
    if not all(type(number) is int and number >= 0 for number in numbers):
        return False
    if not LOWEST <= header.rate <= HIGHEST:
        return False
    if type(header.peak) is not float or not header.peak >= 0:
        return False
    if type(header.beyond) is not int or type(header.first_beyond) is not int:
        return False
    flag_types = {type(header.slow), type(header.cancels)}
    text_types = set(map(type, (header.digest, *header.about, *header.about.values())))
    return flag_types == {bool} and text_types == {str}


def _write_recordings(file: pathlib.Path, plan: Plan) -> None:
    headers = {path.partition("\0")[0]: header for path, header in plan.headers.items()}
    paths = sorted(headers)
    names = [os.path.relpath(path, plan.root).replace(os.sep, "/") for path in paths]
    column_types = {
        "size": pa.int64(),
        "mtime": pa.int64(),
        "rate": pa.int32(),
        "frames": pa.int64(),
        "channels": pa.int32(),
        "slow": pa.bool_(),
        "stated": pa.int64(),
        "cancels": pa.bool_(),
        "digest": pa.string(),
        "peak": pa.float64(),
        "beyond": pa.int64(),
        "first_beyond": pa.int64(),
    }
    columns = {"path": pa.array(names, pa.string())}
    for column, kind in column_types.items():
        columns[column] = pa.array([getattr(headers[path], column) for path in paths], kind)
    about_items = [sorted(headers[path].about.items()) for path in paths]
    columns["about"] = pa.array(about_items, pa.map_(pa.string(), pa.string()))
    # The file is closed also on a full disk: pyarrow leaves that to the collector.
    with file.open("wb") as opened:
        pq.write_table(pa.table(columns), opened)


@dataclasses.dataclass
class _Counts:
    """The counts of a split's rows."""

    of_class: np.ndarray  # int64 [classes]: rows with each
    rows: int = 0
    several_classes: int = 0
    no_class: int = 0
    seconds: list[np.ndarray] = dataclasses.field(default_factory=list)  # of each group's rows

    def add(self, group: Sequence[Row]) -> None:
        self.rows += len(group)
        for row in group:
            self.several_classes += len(row.labels) > 1
            self.no_class += not row.labels
            self.of_class[list(row.labels)] += 1
        self.seconds.append(np.array([row.end - row.start for row in group]))

    @property
    def median_seconds(self) -> float:
        if not self.seconds:
            return 0.0
        return round(float(np.median(np.concatenate(self.seconds))), 6)

    @property
    def hours(self) -> float:
        total_seconds = float(sum(map(np.sum, self.seconds)))
        return round(total_seconds / 3600, 6)


def write_split(folder: pathlib.Path, split: str, plan: Plan) -> dict[str, Any]:
    """Write the shards of a split. Return its rows, recordings and hours."""
    index_schema = schema(plan.names)
    shard_paths: list[pathlib.Path] = []
    writer: pq.ParquetWriter | None = None
    counts = _Counts(np.zeros(len(plan.names), np.int64))
    rows = plan.rows(split)
    while group := list(itertools.islice(rows, GROUP_ROWS)):
        if writer is None or counts.rows >= SHARD_ROWS * len(shard_paths):
            if writer:
                writer.close()
            shard_paths.append(folder / f"{split}-{len(shard_paths):05d}")
            writer = _open_shard(shard_paths[-1], index_schema)
        writer.write_table(_table(group, index_schema))
        counts.add(group)
    if writer:
        writer.close()
    for path in shard_paths:
        path.rename(f"{path}-of-{len(shard_paths):05d}.parquet")
    recordings = _recordings(split, plan)
    return {
        "rows": counts.rows,
        "recordings": len(recordings),
        "rows_of_several_classes": counts.several_classes,
        "rows_of_no_class": counts.no_class,
        "rows_of_each_class": counts.of_class.tolist(),
        "median_seconds": counts.median_seconds,
        "hours": counts.hours,
        "hours_of_recordings": _hours_of_recordings(recordings, plan),
    }


def _open_shard(path: pathlib.Path, index_schema: pa.Schema) -> pq.ParquetWriter:
    # A recording's values repeat from row to row. Times and sets of classes do not.
    repeated_columns = ["audio.path", *TEXTS]
    return pq.ParquetWriter(path, index_schema, use_dictionary=repeated_columns, compression="zstd")


def _recordings(split: str, plan: Plan) -> set[str]:
    """Return the paths of a split's recordings."""
    recordings: set[str] = set()
    for key, its_split in plan.splits.items():
        if its_split == split:
            recordings.add(key.partition("\0")[0])
    return recordings


def _hours_of_recordings(recordings: set[str], plan: Plan) -> float:
    seconds = 0.0
    for path in recordings:
        if path in plan.headers:
            seconds += plan.headers[path].seconds
    return round(seconds / 3600, 6)


def _table(rows: list[Row], index_schema: pa.Schema) -> pa.Table:
    columns = []
    for name in index_schema.names:
        if name == "audio":
            paths = pa.array([row.path for row in rows], pa.string())
            audio_bytes = pa.nulls(len(rows), pa.binary())
            column = pa.StructArray.from_arrays([audio_bytes, paths], ["bytes", "path"])
        else:
            column = pa.array(_values(rows, name), index_schema.field(name).type)
        columns.append(column)
    return pa.table(columns, schema=index_schema)


def _values(rows: list[Row], column: str) -> list[Any]:
    """Return the values of a column of an index."""
    if column in ROW_FIELDS:
        return [getattr(row, column) for row in rows]
    if column in HEADER_FIELDS:
        return [getattr(row.header, column) for row in rows]
    if column == "label":
        return [row.labels[0] if len(row.labels) == 1 else None for row in rows]
    if column == "recording":
        return [row.about.get("recording") or row.path for row in rows]
    texts = [row.about.get(column) for row in rows]
    return list(map(_number, texts)) if column in PLACES else texts


def _number(text: str | None) -> float | None:
    try:
        return float(text) if text else None
    except ValueError:
        return None
