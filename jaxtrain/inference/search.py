"""The rows of embeddings that are nearest to a query by cosine, or that a fitted head gives most: exact, in one pass."""

import heapq
import pathlib
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxtrain.inference import embed, heads
from jaxtrain.inference.embeddings import Embeddings, EmbeddingsError
from jaxtrain.inference.heads import Head
from jaxtrain.nn import vit
from loaders import spectrogram
from loaders.base import DataError

CHUNK = 1 << 26  # [values] of embeddings that are looked at together


class Hit(NamedTuple):
    """A row that was found."""

    score: float  # cosine, or the head's score
    folder: int  # number of its folder
    row: int
    query: int  # number of the nearest query


def nearest(folders: Sequence[Embeddings], queries: np.ndarray, *, kind: str, top: int) -> list[Hit]:
    """The ``top`` rows whose features have the highest cosine with any of the queries, float32 [Q, D]; the best first.

    Raises EmbeddingsError.
    """
    units = _unit(queries)

    def score(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        cosine = _unit(x) @ units.T
        best = cosine.argmax(1)
        return cosine[np.arange(len(x)), best], best

    for each in folders:
        if each.array(kind, 2).shape[1] != queries.shape[1]:
            have = each.array(kind, 2).shape[1]
            raise EmbeddingsError(f"{each.folder} has {have} features, and the query {queries.shape[1]}; search with one run's")
    return _best(folders, kind, score, top)


def by_head(folders: Sequence[Embeddings], head: Head, label: int, *, top: int) -> list[Hit]:
    """The ``top`` rows by a head's score of a class; the best first. Raises EmbeddingsError, HeadError."""
    kind = "patches" if head.kind == "patches" else head.pool
    for each in folders:
        width = each.array(kind, 4 if kind == "patches" else 2).shape[-1]
        heads.refuse_other(head, digest=each.encoder, width=width, front_end=each.front_end, run=str(each.folder))
    arrays = {name: jnp.asarray(x) for name, x in head.arrays.items()}

    @jax.jit
    def compute(x: jax.Array) -> jax.Array:
        z = heads.logits(head.kind, arrays, x.reshape(len(x), -1, x.shape[-1])[:, 0], x.reshape(len(x), -1, x.shape[-1]))
        return (jax.nn.softmax(z) if head.scores == "softmax" else jax.nn.sigmoid(z))[:, label]

    def score(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return np.asarray(compute(x)), np.zeros(len(x), np.int64)

    return _best(folders, kind, score, top)


def _best(
    folders: Sequence[Embeddings], kind: str, score: Callable[[np.ndarray], tuple[np.ndarray, np.ndarray]], top: int
) -> list[Hit]:
    found: list[Hit] = []
    for number, each in enumerate(folders):
        x, weight = each.array(kind, 4 if kind == "patches" else 2), each.array("weight", 1)
        step = max(1, CHUNK // int(np.prod(x.shape[1:])))
        for first in range(0, each.n, step):
            scores, query = score(np.asarray(x[first : first + step], np.float32))
            scores = np.where((np.asarray(weight[first : first + step]) > 0) & np.isfinite(scores), scores, -np.inf)
            rows = np.argpartition(-scores, min(top, len(scores)) - 1)[:top]
            hits = [Hit(float(scores[i]), number, first + int(i), int(query[i])) for i in rows if np.isfinite(scores[i])]
            found = heapq.nsmallest(top, [*found, *hits], key=lambda hit: (-hit.score, hit.folder, hit.row))
    return found


def _unit(x: np.ndarray) -> np.ndarray:
    x = np.asarray(x, np.float32)
    return x / np.maximum(np.linalg.norm(x, axis=1, keepdims=True), 1e-9)


def split_query(text: str) -> tuple[str, float | None]:
    """A query's file or folder, and what is behind its last @: seconds, or a row. Raises EmbeddingsError."""
    name, at, number = text.rpartition("@")
    if not at or pathlib.Path(text).expanduser().exists():
        return text, None
    try:
        value = float(number)
    except ValueError:
        return text, None
    if not 0 <= value < float("inf"):
        raise EmbeddingsError(f"the query {text!r} ends in @{number}; expected seconds, or the number of a row")
    return name, value


def of_row(folder: Embeddings, row: float, kind: str) -> np.ndarray:
    """The features of a row, float32 [D]. Raises EmbeddingsError."""
    if row != int(row) or not 0 <= row < folder.n:
        raise EmbeddingsError(f"{folder.folder} has no row {row:g}; its rows are 0 to {folder.n - 1}")
    return np.array(folder.array(kind, 2)[int(row)], np.float32)


class Encoder:
    """Embeds clips as a folder was embedded, by its run."""

    def __init__(self, run: str, folder: Embeddings, kind: str):
        """Raises StoredError, EmbedError; EmbeddingsError: it is not the encoder of the folder."""
        self._model, self._kind = embed.load(run), kind
        if folder.encoder != self._model.digest:
            raise EmbeddingsError(
                f"{folder.folder} is of the encoder {folder.encoder or '(unknown)'}, and {run} holds {self._model.digest}; "
                "name the run, and step, that it was made by: --run"
            )
        self._data = embed.data_config(self._model, label="", multilabel=False, test="")

    def clip(self, path: str, start: float | None) -> np.ndarray:
        """The features of the window that begins at ``start`` [s], None: of the file's centre; float32 [D].

        Raises DataError: the file cannot be read, or ends before.
        """
        try:
            content = pathlib.Path(path).expanduser().read_bytes()
            _, rate, frames = spectrogram.decode(content, 0, 0)
            rate = round(rate * self._data.time_expansion)
            length = round(self._data.clip_seconds * rate)
            first = max(0, (frames - length) // 2) if start is None else round(start * rate)
            if first >= frames:
                raise DataError(f"{path} has {frames / rate:.3f} s, and the query begins at {start} s")
            first = max(0, min(first, frames - length))
            wave, _, _ = spectrogram.decode(content, first, min(length, frames - first))
        except (OSError, ValueError) as error:
            if isinstance(error, DataError):
                raise
            raise DataError(f"{path}: {getattr(error, 'strerror', None) or error}") from error
        c, data = self._model.config, self._data
        x = spectrogram.front_end(wave, rate, clip_seconds=data.clip_seconds, n_frames=data.n_frames, of=data)
        setup = jax.jit(lambda params, x: vit.encode(c, params, x))(self._model.params, x[None])
        return np.asarray(setup.patches.mean(1) if self._kind == "mean" else setup.cls.mean(1))[0]
