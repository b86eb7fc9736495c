"""Embeddings of any dataset by a trained encoder; an interrupted command can be rerun.

`jaxtrain.workloads.bird.commands.embed` documents the folder. Its arrays are NAME.npy.partial until
all of their rows are there. The slower of device and loader sets the pace, which is reported.
"""

import contextlib
import errno
import json
import os
import pathlib
import time
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from jaxtrain.types import PyTree
from jaxtrain.workloads.bird.inference import InferenceError, encoder, trained_on
from jaxtrain.workloads.bird.inference.embeddings import ABOUT, ROWS, VERSION
from jaxtrain.workloads.bird.model import Config
from loaders.audio import shards, spectrogram
from loaders.audio.front_end import DEFAULT
from loaders.audio.recordings import headers, windows
from loaders.base import DataError
from loaders.io import atomic_write, columnar
from loaders.io import files as files_lib

MAX_REASONS = 10  # of unreadable rows that are noted
FLUSH = 20  # [s] between notes of the progress


def embed(
    model: encoder.Model,
    data: spectrogram.Config,
    out: str | pathlib.Path,
    *,
    split: str = "train",
    kinds: Sequence[str] = (),
    columns: Sequence[str] = (),
    batch: int = 64,
) -> dict[str, Any]:
    """Write the folder ``out``, or the rest of it. Return the content of `ABOUT`.

    Without ``kinds`` they are "mean", and "cls" if the encoder has a class token. Raises
    InferenceError for a folder that was made of something else, and for kinds that the encoder does
    not have, DataError for the data.
    """
    encoder.refuse_missing(model, kinds)
    kinds = kinds or ("mean", "cls")[: 1 + model.config.n_cls]
    out = files_lib.expanded(out)
    out.mkdir(parents=True, exist_ok=True)
    compute = features(model.config, kinds, data.views)
    setup = encoder.set_up(model, data, compute, model.head, split=split, batch=batch)
    loader = setup.loader
    batch = setup.batch
    n = setup.n
    made_of = {
        "encoder": model.digest,
        "data": loader.state(0)["fingerprint"],
        "rows": n,
        "split": split,
        "kinds": list(kinds),
        "columns": list(columns),
        "views": data.views,
        "batch": batch,
        "version": VERSION,
    }
    if data.settings != DEFAULT.settings:
        made_of["front_end"] = data.settings
    if data.time_expansion != 1:
        made_of["time_expansion"] = data.time_expansion
    start = _rows_done(out, made_of)
    root, places = _places(data, split)
    if not start:
        is_trained = trained_on.of_rows(
            trained_on.of_model(model),
            places.column("path").to_pylist(),
            root,
            links=data.follow_links,
        )
        places = places.append_column("trained", pa.array(is_trained, pa.bool_()))
    progress = {
        **made_of,
        "done": start,
        "model": model.name,
        "class_names": list(setup.info.get("class_names", ())),
        "multilabel": data.multilabel,
        "root": root,
        "pool": encoder.pool_of(model),
        "front_end": data.settings,
        "clips": encoder.clips(data),
    }
    shapes = {}
    for name, output in setup.shapes.items():
        shapes[name] = jax.ShapeDtypeStruct((n, *output.shape[1:]), output.dtype)
    files = _open(out, shapes, start)
    if not start:
        with atomic_write.file(out / ROWS) as rows_file:
            pq.write_table(places.slice(0, n), rows_file)
        for name in columns:
            values = _column(data, split, name)
            atomic_write.save(out / f"{name}.npy", values[:n])
    loader.seek(start // batch)
    stream = setup.stream()
    began = time.perf_counter()
    noted = began
    try:
        for position, outputs in setup.outputs(stream):
            first = (position - 1) * batch
            end = min(position * batch, n)
            for name, x in outputs.items():
                files[name][first:end] = x[: n - first]
            progress["done"] = end
            if time.perf_counter() - noted > FLUSH:
                noted = time.perf_counter()
                _note(out, files, progress)
    finally:
        stream.close()
        _note(out, files, progress)
    seconds = time.perf_counter() - began
    for name in files:
        partial = out / f"{name}.npy.partial"
        if partial.exists():
            partial.replace(out / f"{name}.npy")
    is_decoded = np.load(out / "weight.npy", mmap_mode="r") > 0
    progress["unreadable"] = n - int(is_decoded.sum())
    reasons = [reason for _, reason in loader.diagnostics().get("bad_list", ())]
    progress["reasons"] = reasons[:MAX_REASONS]
    progress["examples_per_second"] = (n - start) / seconds
    progress["waiting"] = stream.waited / seconds
    _note(out, files, progress)
    return progress


def refuse_other(path: pathlib.Path, made_of: Mapping[str, Any], kind: str) -> dict[str, Any]:
    """Read the notes of an earlier command. Raises InferenceError if it was made of others."""
    try:
        notes = files_lib.read_json(files_lib.inside(path.parent, path.name))
    except files_lib.FileError as error:
        raise InferenceError(f"{error}; choose another --out") from error
    changes = []
    for name, value in made_of.items():
        earlier = notes.get(name)
        if earlier != value:
            changes.append(f"{name} was {earlier!r:.60} and is {value!r:.60}")
    if changes:
        raise InferenceError(
            f"{path.parent} holds {kind} of something else: {', '.join(changes)}; choose another"
            " --out"
        )
    return notes


def _rows_done(out: pathlib.Path, made_of: Mapping[str, Any]) -> int:
    """Return the number of rows that an earlier attempt embedded."""
    path = out / ABOUT
    if not path.exists():
        return 0
    n_rows = refuse_other(path, made_of, "embeddings").get("done", 0)
    if type(n_rows) is not int or not 0 <= n_rows <= made_of["rows"]:
        raise InferenceError(
            f"{path} says that {n_rows!r} of {made_of['rows']} rows are done; choose another --out"
        )
    return n_rows


def _open(
    out: pathlib.Path, shapes: Mapping[str, jax.ShapeDtypeStruct], start: int
) -> dict[str, np.memmap]:
    """Open the arrays; new ones are named NAME.npy.partial until they are whole.

    Their space is reserved: a disk that fills up under a memory map ends the process with SIGBUS.
    Raises OSError when there is too little.
    """
    return _reopen(out, shapes) if start else _create(out, shapes)


def _reopen(out: pathlib.Path, shapes: Mapping[str, jax.ShapeDtypeStruct]) -> dict[str, np.memmap]:
    """Open the arrays of an earlier attempt. Raises InferenceError: they have other rows."""
    paths = {}
    try:
        for name, x in shapes.items():
            path = out / f"{name}.npy"
            if not path.exists():
                path = path.with_name(f"{path.name}.partial")
            array = files_lib.array(files_lib.inside(out, path.name))
            if (array.shape, array.dtype) != (x.shape, x.dtype):
                raise files_lib.FileError(
                    f"{path} holds {array.dtype} {array.shape}; its rows are not those of this"
                    " command"
                )
            paths[name] = path
    except files_lib.FileError as error:
        raise InferenceError(f"{error}; choose another --out") from error
    return {name: np.lib.format.open_memmap(path, mode="r+") for name, path in paths.items()}


def _create(out: pathlib.Path, shapes: Mapping[str, jax.ShapeDtypeStruct]) -> dict[str, np.memmap]:
    """Make the arrays, with their space on the disk. Raises OSError."""
    files = {}
    paths = {name: out / f"{name}.npy.partial" for name in shapes}
    try:
        for name, x in shapes.items():
            path = paths[name]
            with atomic_write.naming(out / f"{name}.npy"):
                path.unlink(missing_ok=True)  # never through a link that someone left there
                files[name] = np.lib.format.open_memmap(path, "w+", dtype=x.dtype, shape=x.shape)
                _reserve(path)
    except OSError:
        files.clear()  # the error would keep the mapped files, and their space on the disk
        for path in paths.values():
            path.unlink(missing_ok=True)
        raise
    for name in shapes:
        (out / f"{name}.npy").unlink(missing_ok=True)  # of an attempt that left no note
    return files


def _reserve(path: pathlib.Path) -> None:
    if hasattr(os, "posix_fallocate"):
        with path.open("r+b") as file:
            try:
                os.posix_fallocate(file.fileno(), 0, path.stat().st_size)
            except OSError as error:  # some file systems cannot
                if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
                    raise


def _note(out: pathlib.Path, files: Mapping[str, np.memmap], content: Mapping[str, Any]) -> None:
    """First the rows reach the disk, then the note that they are there."""
    for file in files.values():
        file.flush()
    atomic_write.write(out / ABOUT, json.dumps(content, indent=2) + "\n")


def features(c: Config, kinds: Sequence[str], views: int) -> encoder.Compute:
    def compute(
        head: PyTree, pooled: encoder.Arrays, patches: jax.Array, batch: encoder.Arrays
    ) -> dict[str, jax.Array]:
        def rows(z: jax.Array) -> jax.Array:
            return z.reshape(-1, views, *z.shape[1:])

        outputs = {}
        for name in kinds:
            if name in pooled:
                outputs[name] = rows(pooled[name]).mean(1)
        if "patches" in kinds:
            outputs["patches"] = rows(patches).astype(jnp.float16)
        if head:
            features = pooled["cls" if c.pool == "cls" else "mean"]
            logits = features @ head["w"] + head["b"][None]
            outputs["scores"] = rows(logits).mean(1)
        for name in ("label", "labels", "index", "weight"):
            if name in batch:
                outputs[name] = batch[name]
        return outputs

    return compute


def _places(data: spectrogram.Config, split: str) -> tuple[str, pa.Table]:
    """Return the recordings' root, "" in shards, and path, start, end and clock of all rows."""
    paths = _shards(data, split)
    index = shards.open_index(paths, label="", audio_root=data.audio_root, links=data.follow_links)
    of_index = shards.index_file(paths[0])
    n = index.n_rows
    columns: dict[str, list[Any]] = {"start": [], "end": [], "date": [], "time": []}
    if of_index:
        for path in paths:
            for name, values in columnar.read_some(path, *columns).items():
                columns[name] += values
    for name, values in columns.items():
        if len(values) not in (0, n):
            raise DataError(
                f"{paths[0].parent} has shards with different columns; make the index again"
            )
        columns[name] = values or [None] * n
    clocks = []
    for date, time_of_day, start in zip(
        columns["date"], columns["time"], columns["start"], strict=True
    ):
        seconds = (start or 0.0) / data.time_expansion
        clocks.append(windows.clock(date, time_of_day, seconds) or None)
    root = data.audio_root
    if not root and of_index:
        root = str(shards.index_root(of_index))
    names = index.paths()
    folder = str(files_lib.expanded(root).absolute()) if root else ""
    table = pa.table(
        {
            "path": pa.array(names, pa.string()),
            "start": pa.array(columns["start"], pa.float64()),
            "end": pa.array(columns["end"], pa.float64()),
            "clock": pa.array(clocks, pa.string()),
            "content": pa.array(_contents(names, folder, data.follow_links), pa.string()),
        }
    )
    return folder, table


def _contents(names: Sequence[str | None], root: str, links: bool) -> list[str | None]:
    """Return a digest for each row whose recording is a file, by which copies are recognised."""
    if not root:
        return [None] * len(names)
    content_of: dict[str | None, str | None] = {None: None}
    for name in names:
        if name not in content_of:
            content_of[name] = None
            with contextlib.suppress(OSError, files_lib.FileError):
                path = files_lib.inside(pathlib.Path(root), name, links=links)
                content_of[name] = headers.content_of(str(path))
    return [content_of[name] for name in names]


def _column(data: spectrogram.Config, split: str, name: str) -> np.ndarray:
    parts = [columnar.read(path, name)[0].to_numpy() for path in _shards(data, split)]
    values = np.concatenate(parts)
    if not np.issubdtype(values.dtype, np.integer):
        raise InferenceError(f"column {name!r} holds {values.dtype}; expected integers (--columns)")
    return values


def _shards(data: spectrogram.Config, split: str) -> list[pathlib.Path]:
    data = encoder.of_split(data, split)
    folder = shards.resolve(data.train)
    return shards.find_shards(folder, data.train_split, links=data.follow_links)
