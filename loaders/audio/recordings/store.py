"""The folder of an index: written whole or not at all, and read again.

DIR/
  index.json                      root, classes, options, and rows and hours of each split
  data/SPLIT-00000-of-00002.parquet      rows, as Hugging Face's Hub names shards
  headers.cache              headers of all recordings, so that the next run reads only new ones
  errors.csv                      every error: kind, text
"""

import itertools
import json
import os
import pathlib
import re
from collections.abc import Mapping
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from loaders.audio import shards
from loaders.audio.recordings.annotations import Errors
from loaders.audio.recordings.headers import HIGHEST, LOWEST, Header
from loaders.audio.recordings.rows import Plan, Row
from loaders.base import DataError
from loaders.io import atomic_write, files

SHARD_ROWS = 1_000_000
GROUP_ROWS = 100_000  # of a row group, which are in memory together
VERSION = "2"  # of index.json
PARTS_VERSION = "1"  # of the rows in Parquet: equals that of rust/core/src/source/parts.rs
TEXTS = ("recording", "site", "date", "time")
PLACES = ("latitude", "longitude")
OF_ROW = ("start", "end", "channel", "labels", "low", "high")
OF_HEADER = ("rate", "frames", "channels")


def schema(names: list[str]) -> pa.Schema:
    """Return the columns of an index, its classes' ``names`` as Hugging Face declares them."""
    audio = pa.struct({"bytes": pa.binary(), "path": pa.string()})
    numbers = {
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
    }
    fields = {
        "audio": audio,
        **numbers,
        **dict.fromkeys(TEXTS, pa.string()),
        **dict.fromkeys(PLACES, pa.float64()),
    }
    label = {"names": names, "_type": "ClassLabel"}
    features: dict[str, Any] = {
        name: {"dtype": str(kind).replace("double", "float64"), "_type": "Value"}
        for name, kind in fields.items()
    }
    features["audio"] = {
        "bytes": {"dtype": "binary", "_type": "Value"},
        "path": {"dtype": "string", "_type": "Value"},
    }
    features |= {"label": label, "labels": {"feature": label, "_type": "Sequence"}}
    metadata = {
        "huggingface": json.dumps({"info": {"features": features}}),
        "jaxtrain.index": PARTS_VERSION,
    }
    return pa.schema(fields, metadata=metadata)


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
        splits = {
            split: write_split(fresh / "data", split, plan)
            for split in sorted(set(plan.splits.values()))
        }
        splits = {split: about for split, about in splits.items() if about["rows"]}
        if not splits:
            why = (
                "see the list of errors"
                if errors.counts
                else "they name no recording, or windows without an event alone"
            )
            raise DataError(f"the sources leave no row to write; {why}")
        about = {
            "version": VERSION,
            "root": os.path.relpath(plan.root, os.path.realpath(out)),
            "classes": plan.names,
            "splits": splits,
            "errors": {kind: errors.counts[kind] for kind in sorted(errors.counts)},
            "options": dict(options),
        }
        _write_recordings(fresh / "headers.cache", plan)
        errors.save(fresh / "errors.csv", always=True)
        (fresh / "index.json").write_text(json.dumps(about, indent=2, ensure_ascii=False) + "\n")
    shards.note_root(out, os.path.normpath(os.path.join(os.path.realpath(out), str(about["root"]))))
    return about


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
        about = files.read_json(files.inside(folder, "index.json"))
        if about.get("version") != VERSION:
            raise TypeError(
                f"it is of version {about.get('version')!r:.80}, and this jaxtrain reads"
                f" {VERSION!r}; make it again"
            )
        splits, names = about.get("splits"), about.get("classes")
        if not isinstance(splits, dict) or not all(map(_is_counted, splits.values())):
            raise TypeError("it has no splits, or one without its rows and hours")
        if not isinstance(about.get("errors", {}), dict):
            raise TypeError("its errors are no counts")
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise TypeError("it has no classes")
        if wrong := [split for split in splits if not re.fullmatch(r"[A-Za-z]\w*", split)]:
            raise TypeError(f"it has a split {wrong[0]!r}")
        return about
    except (ValueError, TypeError) as error:
        raise DataError(f"{folder} is not an index of jaxtrain index: {error}") from error


def _is_counted(split: Any) -> bool:
    numbers = ("rows", "recordings", "hours", "hours_of_recordings")
    return isinstance(split, dict) and all(
        isinstance(split.get(name), int | float) for name in numbers
    )


def read_recordings(folder: pathlib.Path) -> dict[str, Header]:
    """Return the headers that an index keeps, by absolute path, or none of another version."""
    try:
        root = os.path.normpath(os.path.join(os.path.realpath(folder), read(folder)["root"]))
        rows = pq.read_table(files.inside(folder, "headers.cache")).to_pylist()
        found = {
            os.path.join(root, row.pop("path")): Header(**{**row, "about": dict(row["about"])})
            for row in rows
        }
    except Exception:  # noqa: BLE001  a damaged table makes pyarrow raise many kinds
        return {}
    return found if all(map(_is_header, found.values())) else {}


def _is_header(header: Header) -> bool:
    numbers = (
        header.size,
        header.mtime,
        header.rate,
        header.frames,
        header.channels,
        header.stated,
    )
    texts = (header.digest, *header.about, *header.about.values())
    return (
        all(type(x) is int and x >= 0 for x in numbers)
        and LOWEST <= header.rate <= HIGHEST
        and type(header.slow) is type(header.cancels) is bool
        and all(type(x) is str for x in texts)
    )


def _write_recordings(file: pathlib.Path, plan: Plan) -> None:
    headers = {path.partition("\0")[0]: header for path, header in plan.headers.items()}
    names = {
        path: os.path.relpath(path, plan.root).replace(os.sep, "/") for path in sorted(headers)
    }
    kinds = {
        "size": pa.int64(),
        "mtime": pa.int64(),
        "rate": pa.int32(),
        "frames": pa.int64(),
        "channels": pa.int32(),
        "slow": pa.bool_(),
        "stated": pa.int64(),
        "cancels": pa.bool_(),
        "digest": pa.string(),
    }
    columns = {"path": pa.array(names.values(), pa.string())}
    columns |= {
        name: pa.array([getattr(headers[path], name) for path in names], kind)
        for name, kind in kinds.items()
    }
    about = [sorted(headers[path].about.items()) for path in names]
    table = pa.table({**columns, "about": pa.array(about, pa.map_(pa.string(), pa.string()))})
    # closed also on a full disk: pyarrow leaves that to the collector
    with file.open("wb") as opened:
        pq.write_table(table, opened)


def write_split(folder: pathlib.Path, split: str, plan: Plan) -> dict[str, Any]:
    """Write the shards of a split. Return its rows, recordings and hours."""
    kind = schema(plan.names)
    files: list[pathlib.Path] = []
    writer: pq.ParquetWriter | None = None
    lengths: list[np.ndarray] = []
    n_rows, several, empty = 0, 0, 0
    rows = plan.rows(split)
    while group := list(itertools.islice(rows, GROUP_ROWS)):
        if writer is None or n_rows >= SHARD_ROWS * len(files):
            if writer:
                writer.close()
            files.append(folder / f"{split}-{len(files):05d}")
            # A recording's values repeat from row to row. Times and sets of classes do not.
            writer = pq.ParquetWriter(
                files[-1], kind, use_dictionary=["audio.path", *TEXTS], compression="zstd"
            )
        writer.write_table(_table(group, kind))
        n_rows += len(group)
        several += sum(len(row.labels) > 1 for row in group)
        empty += sum(not row.labels for row in group)
        lengths.append(np.array([row.end - row.start for row in group]))
    if writer:
        writer.close()
    for file in files:
        file.rename(f"{file}-of-{len(files):05d}.parquet")
    recordings = {path.partition("\0")[0] for path, its in plan.splits.items() if its == split}
    return {
        "rows": n_rows,
        "recordings": len(recordings),
        "rows_of_several_classes": several,
        "rows_of_no_class": empty,
        "median_seconds": round(float(np.median(np.concatenate(lengths))), 6) if lengths else 0.0,
        "hours": round(float(sum(part.sum() for part in lengths)) / 3600, 6),
        "hours_of_recordings": round(
            sum(plan.headers[path].seconds for path in recordings if path in plan.headers) / 3600, 6
        ),
    }


def _table(rows: list[Row], kind: pa.Schema) -> pa.Table:
    def number(text: str | None) -> float | None:
        try:
            return float(text) if text else None
        except ValueError:
            return None

    columns: dict[str, list[Any]] = {name: [getattr(row, name) for row in rows] for name in OF_ROW}
    columns |= {name: [getattr(row.header, name) for row in rows] for name in OF_HEADER}
    columns |= {name: [row.about.get(name) for row in rows] for name in TEXTS}
    columns |= {name: [number(row.about.get(name)) for row in rows] for name in PLACES}
    columns["label"] = [row.labels[0] if len(row.labels) == 1 else None for row in rows]
    columns["recording"] = [row.about.get("recording") or row.path for row in rows]
    arrays = {name: pa.array(column, kind.field(name).type) for name, column in columns.items()}
    paths = pa.array([row.path for row in rows], pa.string())
    arrays["audio"] = pa.StructArray.from_arrays(
        [pa.nulls(len(rows), pa.binary()), paths], ["bytes", "path"]
    )
    return pa.table([arrays[name] for name in kind.names], schema=kind)
