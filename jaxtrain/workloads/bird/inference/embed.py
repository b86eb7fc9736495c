"""Embeddings of any dataset by a trained encoder, written so that an interrupted command can be rerun.

The folder that `embed` writes:

      mean.npy      float32 [n, D]         mean of the patches                     (kinds: which of these three)
      cls.npy       float32 [n, D]         mean of the CLS tokens
      patches.npy   float16 [n, V, N, D]   every patch of every view
      scores.npy    float32 [n, C]         of the run's supervised head, where it has one
      label.npy     int64 [n]; or labels.npy uint8 [n, C] of several classes
      rows.parquet  path, start, end [s], clock of every row, as far as the data say them
      index.npy     int64 [n]              the recording's row in its split's shards
      weight.npy    float32 [n]            0 for a recording that cannot be decoded, whose features mean nothing
      NAME.npy                             any other column of integers
      embeddings.json                      what all this was made of, class names, and the progress

The arrays are called NAME.npy.partial until all of their rows are there. The device computes while the loader's threads decode:
the slower of the two sets the pace, which is reported with its share of waiting.
"""

import dataclasses
import errno
import hashlib
import json
import math
import os
import pathlib
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from jaxtrain import config as config_lib
from jaxtrain import specs
from jaxtrain.arrays import run_workload, stored
from jaxtrain.arrays import source as source_lib
from jaxtrain.data import feed
from jaxtrain.parallel.layout import Layout, make_layout, make_mesh
from jaxtrain.types import PyTree
from jaxtrain.workloads.bird import model as bird
from jaxtrain.workloads.bird import vit
from loaders.audio import front_end, shards, spectrogram
from loaders.audio.front_end import DEFAULT, FrontEnd
from loaders.audio.recordings import windows
from loaders.base import DataError, Rows
from loaders.io import atomic_write, checks, columnar
from loaders.io import files as files_lib

AHEAD = 3  # [batches] that the loader may have on the device before it computes them
FLUSH = 20  # [s] between notes of the progress
PROGRESS = "embeddings.json"
ROWS = "rows.parquet"
# Fields of a run's data section that decide how a recording reaches the encoder.
CLIPS = ("clip_seconds", "n_frames", "short", "short_fill", "time_expansion")


class EmbedError(ValueError):
    """A run, a dataset or a folder that cannot be used."""


class Model(NamedTuple):
    """An encoder with its weights on the host."""

    config: bird.Config
    params: PyTree  # encoder
    head: PyTree | None  # of the supervised objective: w, b
    run: dict[str, Any]  # the run's whole config
    name: str
    probe: PyTree | None = None  # of the online probe: scale, bias, w, b

    @property
    def front_end(self) -> FrontEnd:
        """What its spectrograms are made by. Raises EmbedError: the run's config has none, or says two things."""
        try:
            trained = front_end.saved(self.run.get("data") or {})
        except ValueError as error:
            raise EmbedError(f"{self.name}: its config's {error}") from error
        if unlike := (self.config.front_end or trained).differences(trained):
            raise EmbedError(f"{self.name}: its config's sections model and data name different front ends: {unlike}")
        return trained

    @property
    def digest(self) -> str:
        c = self.config
        digest = hashlib.sha256()
        if (c.mlp == "gelu_exact", c.eps, c.norm) != (False, vit.EPS, "tokens"):  # what else decides features, beside shapes
            digest.update(repr((c.mlp, c.eps, c.norm)).encode())
        for path, x in zip(specs.paths(self.params), jax.tree.leaves(self.params), strict=True):
            digest.update(path.encode())
            digest.update(np.ascontiguousarray(x).tobytes())
        return digest.hexdigest()[:16]


def load(run: str, *, step: int | None = None, ema: bool = False, random: int | None = None) -> Model:
    """Reads the encoder of a run, a step or an export.

    Args:
      random: a seed, by which the run's encoder is initialised instead of read.

    Raises StoredError and EmbedError.
    """
    source = source_lib.find(run, step)
    config, arrays = source.config(bird.__package__), source.parameters(ema=ema)
    c = config_lib.section(bird.Config, run_workload.model_of(config))
    if problems := list(checks.under("model", c.problems())):
        raise config_lib.ConfigError(problems)
    table = vit.make_specs(c)
    # A config may name any size: initialised or read, the encoder is no larger than what the run holds.
    for path, spec in zip(specs.paths(table), jax.tree.leaves(table, is_leaf=specs.is_spec), strict=True):
        _check(arrays, f"encoder/{path}", spec)
    if random is not None:
        made = specs.materialise({"encoder": table}, jax.random.key(random))["encoder"]
        return Model(c, jax.tree.map(np.asarray, made), None, config, f"{run}, initialised with seed {random}")
    params = specs.map_specs(lambda p, _: _read(arrays, f"encoder/{p}"), table)
    name = f"{source.path}{' (ema)' if ema else ''}"
    head = _leaves(arrays, "objective/supervised", c.embed, "w", "b")
    probe = _leaves(arrays, "probe", c.embed, "scale", "bias", "w", "b")
    return Model(c, params, head, config, name, probe)


def _leaves(arrays: dict[str, stored.Stored], folder: str, width: int, *names: str) -> PyTree | None:
    """The arrays of a head for features [width]; None unless all are there. Raises EmbedError: they do not fit together."""
    if any(f"{folder}/{name}" not in arrays for name in names):
        return None
    classes = arrays[f"{folder}/b"].shape
    fits = {"scale": (width,), "bias": (width,), "w": (width, *classes), "b": (math.prod(classes),)}
    for name in names:
        if (shape := arrays[f"{folder}/{name}"].shape) != fits[name] or 0 in shape:
            raise EmbedError(f"{folder}/{name} is {shape}; {width} features and classes {classes} expect {fits[name]}")
    return {name: _read(arrays, f"{folder}/{name}") for name in names}


def _check(arrays: dict[str, stored.Stored], path: str, spec: Any) -> None:
    if path not in arrays or arrays[path].shape != spec.shape:
        shape = arrays[path].shape if path in arrays else "missing"
        raise EmbedError(f"{path} is {shape}; the run's config expects {spec.shape}")


def _read(arrays: dict[str, stored.Stored], path: str) -> np.ndarray:
    return np.asarray(arrays[path].read(()), np.float32)


def data_config(model: Model, **changes: Any) -> spectrogram.Config:
    """The run's own data section with ``changes``, by which nothing is held out, excluded or mixed in.

    The run may be anyone's: where recordings are files, and whether links are followed, is for ``changes`` alone to say. So are
    addresses.

    Raises StoredError for an address of the run's own, and EmbedError for changes that make other spectrograms than those that
    the encoder was trained on.
    """
    data = {
        name: value for name, value in (model.run.get("data") or {}).items() if name in spectrogram.Config.__dataclass_fields__
    }
    own = {
        "audio_root": "",
        "follow_links": False,
        "test_share": 0.0,
        "exclude": (),
        "exclude_paths": (),
        "background": "",
        "bad_budget": 1.0,
        "form": "spectrogram",
    }
    for name in ("train", "test"):
        if name not in changes:
            source_lib.refuse_address(data.get(name), f"data.{name}", "--data")
            if "**" in str(data.get(name)):  # it would be looked for on the whole disk, through links in circles
                raise EmbedError(f"the run's config.data.{name} is {str(data[name])[:200]!r}; name the data with --data")
    made = config_lib.section(spectrogram.Config, {**data, **own, **changes})
    if unlike := model.front_end.differences(made.front_end):
        raise EmbedError(f"{model.name} was trained on other spectrograms than are asked for: {unlike}; omit those settings")
    return made


def clips(data: spectrogram.Config) -> dict[str, Any]:
    """What decides, beside the front end, how a recording reaches the encoder."""
    return {name: getattr(data, name) for name in CLIPS}


def of_split(data: spectrogram.Config, split: str) -> spectrogram.Config:
    """A data section whose training split is ``split``, any that the data have, and which reads no other.

    "train" and "test" are those that the section trains and tests on.
    """
    name = {"train": data.train_split, "test": data.test_split}.get(split, split)
    path = data.test if data.test and split in ("test", data.test_split) else data.train
    # Shards that lie side by side are no splits by name: their test split is a share of them.
    folder = pathlib.Path(path).expanduser()
    other = "test" if folder.is_dir() and not shards.has_split(folder, name) else name
    return dataclasses.replace(data, train=path, test="", train_split=name, test_split=other)


class Setup(NamedTuple):
    """The compiled encoder, its weights and the loader of a split."""

    run: Callable[[PyTree, Mapping[str, jax.Array]], dict[str, jax.Array]]  # compiled: weights, a batch -> what is written
    weights: PyTree
    shapes: Mapping[str, jax.ShapeDtypeStruct]  # of what is written
    abstract: Mapping[str, jax.ShapeDtypeStruct]  # a batch
    rows: Rows
    loader: spectrogram.Spectrograms
    batch: int  # recordings
    n: int  # recordings of the split
    facts: Mapping[str, Any]

    def feed(self) -> feed.Feed:
        return feed.Feed(self.loader, self.abstract, self.rows, depth=AHEAD)


# Weights of its own, features "mean" and "cls" [B × views, D], patches [B × views, N, D], a batch -> what is written.
Compute = Callable[[PyTree, Mapping[str, jax.Array], jax.Array, Mapping[str, jax.Array]], dict[str, jax.Array]]


def set_up(
    model: Model,
    data: spectrogram.Config,
    *,
    split: str = "train",
    kinds: Sequence[str] = ("mean", "cls"),
    batch: int = 64,
    compute: Compute | None = None,
    weights: PyTree = None,
) -> Setup:
    """Opens the data and compiles the encoder for them, and what is made of its tokens.

    Args:
      compute: None = what `embed` writes, of these ``kinds``.
      weights: those of ``compute``.

    Raises DataError.
    """
    if compute is None:
        compute, weights = _features(model.config, kinds, data.views), model.head
    data = of_split(data, split)
    layout = make_layout(make_mesh(-1, 1, 1), {})
    batch = -(-batch // len(jax.devices())) * len(jax.devices())
    abstract = {
        name: jax.ShapeDtypeStruct(
            (batch, *f.shape), f.dtype, sharding=layout.sharding(("batch", *(None,) * len(f.shape)), (batch, *f.shape))
        )
        for name, f in spectrogram.fields(data).items()
    }
    rows = feed.rows_for(abstract)
    for where, text in data.problems():
        raise DataError(f"data.{where} {text}")
    loader = spectrogram.make_loader(data, split="train", rows=rows, seed=0, in_order=True)
    facts = spectrogram.facts(data)
    weights = jax.device_put((model.params, weights), layout.replicated())
    run = _program(model, layout, compute).lower(weights, abstract)
    return Setup(run.compile(), weights, run.out_info, abstract, rows, loader, batch, facts["n_train"], facts)


def embed(
    model: Model,
    data: spectrogram.Config,
    out: str | pathlib.Path,
    *,
    split: str = "train",
    kinds: Sequence[str] = ("mean", "cls"),
    columns: Sequence[str] = (),
    batch: int = 64,
) -> dict[str, Any]:
    """Writes the folder ``out``, or the rest of it. Returns the content of `PROGRESS`.

    Raises EmbedError for a folder that was made of something else, DataError for the data.
    """
    out = pathlib.Path(out).expanduser()
    out.mkdir(parents=True, exist_ok=True)
    setup = set_up(model, data, split=split, kinds=kinds, batch=batch)
    loader, batch, n, facts = setup.loader, setup.batch, setup.n, setup.facts
    made_of = {
        "encoder": model.digest,
        "data": loader.state(0)["fingerprint"],
        "rows": n,
        "split": split,
        "kinds": list(kinds),
        "columns": list(columns),
        "views": data.views,
        "batch": batch,
    }
    made_of |= {"front_end": data.settings} if data.settings != DEFAULT.settings else {}
    made_of |= {"time_expansion": data.time_expansion} if data.time_expansion != 1 else {}
    progress = _progress(out, made_of)
    progress |= {"model": model.name, "class_names": list(facts.get("class_names", ())), "multilabel": data.multilabel}
    root, places = _places(data, split)
    progress |= {"root": root, "pool": "cls" if model.config.pool == "cls" else "mean"}
    progress |= {"front_end": data.settings, "clips": clips(data)}
    start = progress.get("done", 0)
    files = _open(out, {name: jax.ShapeDtypeStruct((n, *x.shape[1:]), x.dtype) for name, x in setup.shapes.items()}, start)
    if not start:
        with atomic_write.file(out / ROWS) as opened:
            pq.write_table(places.slice(0, n), opened)
        for name in columns:
            atomic_write.save(out / f"{name}.npy", _column(data, split, name)[:n])
    loader.seek(start // batch)
    stream = setup.feed()
    began = noted = time.perf_counter()
    pending: list[tuple[int, Any]] = []

    def write(done: int, outputs: dict[str, jax.Array]) -> None:
        first = done - batch
        for name, x in jax.device_get(outputs).items():
            files[name][first : min(done, n)] = x[: n - first]
        progress["done"] = min(done, n)

    try:
        for position, arrays in stream:
            pending.append((position * batch, setup.run(setup.weights, arrays)))
            if len(pending) > 1:  # the device has its next batch before we wait for this one
                write(*pending.pop(0))
            if time.perf_counter() - noted > FLUSH:
                noted = time.perf_counter()
                _note(out, files, {**made_of, **progress})
        for item in pending:
            write(*item)
    finally:
        stream.close()
        _note(out, files, {**made_of, **progress})
    seconds = time.perf_counter() - began
    for file in files.values():
        file.flush()
    for name in files:
        if (partial := out / f"{name}.npy.partial").exists():
            partial.replace(out / f"{name}.npy")
    bad = n - int((np.load(out / "weight.npy", mmap_mode="r") > 0).sum())
    progress |= {"unreadable": bad, "samples_per_second": (n - start) / seconds, "waiting": stream.waited / seconds}
    _note(out, files, {**made_of, **progress})
    return {**made_of, **progress}


def _progress(out: pathlib.Path, made_of: dict[str, Any]) -> dict[str, Any]:
    """Reads the progress of an earlier attempt; empty for a new folder."""
    path = out / PROGRESS
    if not path.exists():
        return {}
    try:
        before = files_lib.read_json(files_lib.inside(out, PROGRESS))
    except files_lib.FileError as error:
        raise EmbedError(f"{error}; choose another --out") from error
    if differing := [name for name, value in made_of.items() if before.get(name) != value]:
        changes = ", ".join(f"{name} was {before.get(name)!r} and is {made_of[name]!r}" for name in differing)
        raise EmbedError(f"{out} holds embeddings of something else: {changes}; choose another --out")
    done = before.get("done", 0)
    if type(done) is not int or not 0 <= done <= made_of["rows"]:
        raise EmbedError(f"{path} says that {done!r} of {made_of['rows']} rows are done; choose another --out")
    return {"done": done}


def _open(out: pathlib.Path, shapes: Mapping[str, jax.ShapeDtypeStruct], start: int) -> dict[str, np.memmap]:
    """Opens the arrays, new ones under the names NAME.npy.partial, which they keep until they are whole.

    Their space is reserved: a disk that fills up under a memory map ends the process with SIGBUS. Raises OSError when there is
    too little.
    """
    if start:
        paths = {name: out / f"{name}.npy" for name in shapes}
        paths = {name: path if path.exists() else path.with_name(f"{path.name}.partial") for name, path in paths.items()}
        try:
            for name, path in paths.items():
                there = files_lib.array(files_lib.inside(out, path.name))
                if (there.shape, there.dtype) != (shapes[name].shape, shapes[name].dtype):
                    raise files_lib.FileError(
                        f"{path} holds {there.dtype} {there.shape}; its rows are not those of this command"
                    )
        except files_lib.FileError as error:
            raise EmbedError(f"{error}; choose another --out") from error
        return {name: np.lib.format.open_memmap(path, mode="r+") for name, path in paths.items()}
    files = {}
    paths = {name: out / f"{name}.npy.partial" for name in shapes}
    try:
        for name, x in shapes.items():
            with atomic_write.naming(out / f"{name}.npy"):
                paths[name].unlink(missing_ok=True)  # never through a link that someone left there
                files[name] = np.lib.format.open_memmap(paths[name], mode="w+", dtype=x.dtype, shape=x.shape)
                _reserve(paths[name])
    except OSError:
        files.clear()  # the error would keep what is mapped, and with it the space on the disk
        for path in paths.values():
            path.unlink(missing_ok=True)
        raise
    for name in shapes:
        (out / f"{name}.npy").unlink(missing_ok=True)  # of an attempt that left no note
    return files


def _reserve(path: pathlib.Path) -> None:
    """Makes the disk keep the space of a sparse file, where the system and the file system can."""
    if hasattr(os, "posix_fallocate"):
        with path.open("r+b") as file:
            try:
                os.posix_fallocate(file.fileno(), 0, path.stat().st_size)
            except OSError as error:
                if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
                    raise


def _note(out: pathlib.Path, files: dict[str, np.memmap], content: dict[str, Any]) -> None:
    """First the rows reach the disk, then the note that they are there."""
    for file in files.values():
        file.flush()
    atomic_write.write(out / PROGRESS, json.dumps(content, indent=2) + "\n")


def _program(model: Model, layout: Layout, compute: Compute) -> Any:
    c = dataclasses.replace(model.config, drop_path=0.0)

    def run(weights: tuple, batch: dict[str, jax.Array]) -> dict[str, jax.Array]:
        params, own = weights
        x = batch["spectrogram"].astype(jnp.float32).reshape(-1, c.n_frames, c.n_mels)
        cls, patches = vit.encode(c, params, x, layout.shard)
        pooled = {name: vit.pooled(c, params, tokens) for name, tokens in (("mean", patches), ("cls", cls))}
        return compute(own, pooled, patches, batch)

    return jax.jit(run)


def _features(c: bird.Config, kinds: Sequence[str], views: int) -> Compute:
    def compute(
        head: PyTree, pooled: Mapping[str, jax.Array], patches: jax.Array, batch: Mapping[str, jax.Array]
    ) -> dict[str, jax.Array]:
        def rows(z: jax.Array) -> jax.Array:
            return z.reshape(-1, views, *z.shape[1:])

        outputs = {name: rows(pooled[name]).mean(1) for name in kinds if name in pooled}
        if "patches" in kinds:
            outputs["patches"] = rows(patches).astype(jnp.float16)
        if head:
            features = pooled["cls" if c.pool == "cls" else "mean"]
            outputs["scores"] = rows(features @ head["w"] + head["b"][None]).mean(1)
        for name in ("label", "labels", "index", "weight"):
            if name in batch:
                outputs[name] = batch[name]
        return outputs

    return compute


def _places(data: spectrogram.Config, split: str) -> tuple[str, pa.Table]:
    """The root of the recordings, "" where they lie in shards; and path, start, end and clock of all rows of a split."""
    data = of_split(data, split)
    paths = shards.find_shards(shards.resolve(data.train), data.train_split, links=data.follow_links)
    index = shards.open_index(paths, label="", audio_root=data.audio_root, links=data.follow_links)
    of_index = shards.index_file(paths[0])
    n = index.n_rows
    columns: dict[str, list[Any]] = {name: [] for name in ("start", "end", "date", "time")}
    for path in paths if of_index else ():
        for name, values in columnar.read_some(path, *columns).items():
            columns[name] += values
    if any(len(values) not in (0, n) for values in columns.values()):
        raise DataError(f"{paths[0].parent} has shards with different columns; make the index again")
    start, end, date, time = (values or [None] * n for values in columns.values())
    clocks = [windows.clock(*each) or None for each in zip(date, time, [x or 0.0 for x in start], strict=True)]
    root = data.audio_root or (str(shards.index_root(of_index)) if of_index else "")
    arrays = [pa.array(x, kind) for x, kind in ((index.paths(), pa.string()), (start, pa.float64()), (end, pa.float64()))]
    table = pa.table([*arrays, pa.array(clocks, pa.string())], names=["path", "start", "end", "clock"])
    return str(pathlib.Path(root).expanduser().absolute()) if root else "", table


def _column(data: spectrogram.Config, split: str, name: str) -> np.ndarray:
    """Reads a column of integers, of all recordings of a split in order."""
    data = of_split(data, split)
    paths = shards.find_shards(shards.resolve(data.train), data.train_split, links=data.follow_links)
    parts = [columnar.read(path, name)[0].to_numpy() for path in paths]
    values = np.concatenate(parts)
    if not np.issubdtype(values.dtype, np.integer):
        raise EmbedError(f"column {name!r} holds {values.dtype}; expected integers (--columns)")
    return values
