"""The rows of embeddings nearest to a query by cosine, or that a fitted head gives most.

The result is exact, but for `nearest_by_index`, which asks usearch for candidates.
"""

import hashlib
import heapq
import pathlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxtrain.arrays import stored
from jaxtrain.types import PyTree
from jaxtrain.workloads.bird import vit
from jaxtrain.workloads.bird.inference import InferenceError, encoder, heads
from jaxtrain.workloads.bird.inference.embeddings import Embeddings
from jaxtrain.workloads.bird.inference.heads import Head
from loaders.audio import spectrogram
from loaders.base import DataError
from loaders.io import atomic_write, files, machine

CHUNK = 1 << 26  # [values] of embeddings that are looked at together


class Hit(NamedTuple):
    """A row that was found."""

    score: float  # cosine, or the head's score
    folder: int  # number of its folder
    row: int
    query: int  # number of the nearest query


def nearest(
    folders: Sequence[Embeddings], queries: np.ndarray, *, kind: str, top: int
) -> list[Hit]:
    """Return the ``top`` rows nearest to any query, float32 [Q, D]. Raises InferenceError."""
    units = _unit(queries)

    def score(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        cosine = _unit(x) @ units.T
        query = cosine.argmax(1)
        return cosine[np.arange(len(x)), query], query

    _refuse_width(folders, queries, kind)
    return _best(folders, kind, score, top)


def nearest_by_index(
    folders: Sequence[Embeddings],
    queries: np.ndarray,
    *,
    kind: str,
    top: int,
    note: Callable[[str], None] = lambda text: None,
) -> list[Hit]:
    """Return nearly the same by an index of usearch, made once a folder. Raises InferenceError."""
    _refuse_width(folders, queries, kind)
    units = _unit(queries)
    hits = []
    for number, folder in enumerate(folders):
        index = _index(folder, kind, note)
        count = min(max(2 * top, 64), len(index))
        index.expansion_search = max(4 * count, 256)
        candidates = [index.search(unit, count).keys for unit in units]
        rows = np.unique(np.concatenate(candidates)).astype(np.int64)
        features = np.asarray(folder.array(kind, 2)[rows], np.float32)
        cosine = _unit(features) @ units.T
        for row, of_queries in zip(rows.tolist(), cosine, strict=True):
            query = int(of_queries.argmax())
            hits.append(Hit(float(of_queries[query]), number, row, query))
    return heapq.nsmallest(top, hits, key=_rank)


def _index(folder: Embeddings, kind: str, note: Callable[[str], None]) -> Any:
    """Return the user's cached index of a folder's rows, made at first use, not the folder's."""
    try:
        from usearch.index import Index
    except ImportError as error:
        raise InferenceError(
            "--approximate needs usearch: pip install 'jaxtrain[search]'"
        ) from error
    x = folder.array(kind, 2)
    is_decoded = folder.decoded()
    path = _index_path(folder, kind)
    if path.is_file() and (stored_index := Index.restore(path, view=True)) is not None:
        return stored_index
    index = Index(ndim=x.shape[1], metric="cos", dtype="f16")
    step = max(1, CHUNK // x.shape[1])
    for first in range(0, folder.n, step):
        end = min(first + step, folder.n)
        features = np.asarray(x[first:end], np.float32)
        is_finite = np.isfinite(features).all(1)
        rows = np.flatnonzero(is_decoded[first:end] & is_finite)
        if len(rows):
            index.add(rows + first, features[rows], threads=machine.cores())
        note(f"{folder.folder}: {end} of {folder.n} rows are in the index {path}")
    with atomic_write.shared(path) as partial:
        index.save(partial)
    return index


def _index_path(folder: Embeddings, kind: str) -> pathlib.Path:
    """Return the file of an index, whose name changes with the arrays."""
    stats = []
    for name in (kind, "weight"):
        stat = (folder.folder / f"{name}.npy").stat()
        stats.append((name, stat.st_size, files.changed_ns(stat)))
    content = f"{folder.folder.resolve()} {folder.encoder} {stats}"
    key = hashlib.sha256(content.encode()).hexdigest()[:24]
    return machine.cache_folder("search", f"{key}.usearch")


def _refuse_width(folders: Sequence[Embeddings], queries: np.ndarray, kind: str) -> None:
    for folder in folders:
        width = folder.array(kind, 2).shape[1]
        if width != queries.shape[1]:
            raise InferenceError(
                f"{folder.folder} has {width} features, and the query {queries.shape[1]}; search"
                " with one run's"
            )


def by_head(folders: Sequence[Embeddings], head: Head, label: int, *, top: int) -> list[Hit]:
    """Return the ``top`` rows by a head's score of a class, best first. Raises InferenceError."""
    kind = "patches" if head.kind == "patches" else head.pool
    for folder in folders:
        heads.refuse_other(
            head,
            digest=folder.encoder,
            width=folder.all_features(kind).shape[-1],
            front_end=folder.front_end,
            run=str(folder.folder),
        )
    arrays = {name: jnp.asarray(x) for name, x in head.arrays.items()}

    @jax.jit
    def compute(x: jax.Array) -> jax.Array:
        rows = x.reshape(len(x), -1, x.shape[-1])
        return heads.scores(head, arrays, {head.pool: rows[:, 0]}, rows)[:, label]

    def score(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return np.asarray(compute(x)), np.zeros(len(x), np.int64)

    return _best(folders, kind, score, top)


def _best(
    folders: Sequence[Embeddings],
    kind: str,
    score: Callable[[np.ndarray], tuple[np.ndarray, np.ndarray]],
    top: int,
) -> list[Hit]:
    best: list[Hit] = []
    for number, folder in enumerate(folders):
        x = folder.all_features(kind)
        is_decoded = folder.decoded()
        values_of_row = int(np.prod(x.shape[1:]))
        step = max(1, CHUNK // values_of_row)
        for first in range(0, folder.n, step):
            part = slice(first, first + step)
            scores, query = score(np.asarray(x[part], np.float32))
            is_valid = is_decoded[part] & np.isfinite(scores)
            scores = np.where(is_valid, scores, -np.inf)
            hits = list(best)
            for i in np.argpartition(-scores, min(top, len(scores)) - 1)[:top].tolist():
                if np.isfinite(scores[i]):
                    hits.append(Hit(float(scores[i]), number, first + i, int(query[i])))
            best = heapq.nsmallest(top, hits, key=_rank)
    return best


def _rank(hit: Hit) -> tuple[float, int, int]:
    """Sort by score from the best one down, then by place."""
    return -hit.score, hit.folder, hit.row


def _unit(x: np.ndarray) -> np.ndarray:
    x = np.asarray(x, np.float32)
    length = np.linalg.norm(x, axis=1, keepdims=True)
    unit: np.ndarray = x / np.maximum(length, 1e-9)
    return unit


def split_query(text: str) -> tuple[str, float | None]:
    """Return a query's file or folder, and the number after its last @. Raises InferenceError."""
    name, at, number = text.rpartition("@")
    if not at or files.expanded(text).exists():
        return text, None
    try:
        value = float(number)
    except ValueError:
        return text, None
    if not 0 <= value < float("inf"):
        raise InferenceError(
            f"the query {text!r} ends in @{number}; expected seconds, or the number of a row"
        )
    return name, value


def run_of(folder: Embeddings) -> str:
    """Return the run that made a folder. Raises InferenceError: none is named, or an address."""
    run = folder.metadata.get("model")
    if not isinstance(run, str) or not run or "\0" in run:
        raise InferenceError(f"{folder.folder} does not say which run made it; name the run: --run")
    if stored.is_address(run):
        raise InferenceError(
            f"{folder.folder} was made by the address {run[:200]!r}, which is connected to only if"
            " you trust it and name it with --run"
        )
    return run


def of_row(folder: Embeddings, row: float, kind: str) -> np.ndarray:
    """Return the features of a row, float32 [D]. Raises InferenceError."""
    if row != int(row) or not 0 <= row < folder.n:
        raise InferenceError(
            f"{folder.folder} has no row {row:g}; its rows are 0 to {folder.n - 1}"
        )
    return np.array(folder.array(kind, 2)[int(row)], np.float32)


class Encoder:
    """Embeds clips as a folder was embedded, by its run."""

    def __init__(self, run: str, folder: Embeddings, kind: str):
        """Raise StoredError, ConfigError, and InferenceError: it is not the folder's encoder."""
        self._model = encoder.load(run)
        self._kind = kind
        if folder.encoder != self._model.digest:
            raise InferenceError(
                f"{folder.folder} is of the encoder {folder.encoder or '(unknown)'}, and {run}"
                f" holds {self._model.digest}; name the run, and step, that it was made by: --run"
            )
        encoder.refuse_missing(self._model, [kind])
        changes: dict[str, Any] = {}
        slow_down = folder.front_end.get("time_expansion")
        if isinstance(slow_down, int | float):
            changes["time_expansion"] = float(slow_down)
        # The recordings of "demo" are not read.
        self._data = encoder.data_config(
            self._model, label="", multilabel=False, train="demo", test="", **changes
        )
        for field, problem in self._data.validate():
            raise InferenceError(f"{run}: its config.data.{field} {problem}")

    def clip(self, path: str, start: float | None) -> np.ndarray:
        """Return the features of the window at ``start``, or of the file's centre: float32 [D].

        ``start`` [s] is in the time of the file, also if that is slower than life. Raises
        DataError: the file cannot be read, or ends before.
        """
        data = self._data
        try:
            wave, rate = self._cut(files.expanded(path).read_bytes(), path, start)
        except DataError:
            raise
        except (OSError, ValueError) as error:
            raise DataError(f"{path}: {getattr(error, 'strerror', None) or error}") from error
        c = self._model.config
        x = spectrogram.front_end(
            wave, rate, clip_seconds=data.clip_seconds, n_frames=data.n_frames, of=data
        )

        @jax.jit
        def features(params: PyTree, x: jax.Array) -> jax.Array:
            tokens = vit.encode(c, params, x)
            return vit.pooled(c, params, tokens.patches if self._kind == "mean" else tokens.cls)

        return np.asarray(features(self._model.params, x[None])).squeeze(0)

    def _cut(self, content: bytes, path: str, start: float | None) -> tuple[np.ndarray, int]:
        """Return the samples of `clip`, and their rate in life."""
        _, stored_rate, n_samples = spectrogram.decode(content, 0, 0)
        rate = round(stored_rate * self._data.time_expansion)
        length = round(self._data.clip_seconds * rate)
        if start is None:
            first = max(0, (n_samples - length) // 2)
        else:
            first = round(start * stored_rate)
        if first >= n_samples:
            seconds = n_samples / stored_rate
            raise DataError(f"{path} has {seconds:.3f} s, and the query begins at {start} s")
        first = max(0, min(first, n_samples - length))
        wave, _, _ = spectrogram.decode(content, first, min(length, n_samples - first))
        return wave, rate
