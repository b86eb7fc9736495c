"""Heads: what makes scores by class of an encoder's output. A run's own, or a file of `jaxtrain fit`.

    linear       logits x @ w + b of the pooled features x
    probe        the same behind a layer norm: what accompanies training without labels (`jaxtrain.workloads.bird.probe`)
    prototypes   logits scale × cosine(x - mean, prototype) + b, of the pooled features
    patches      the same of every patch; the largest of a class counts

Shapes: B rows, N patches, D embed, C classes, K prototypes of a class.
"""

import difflib
import hashlib
import json
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxtrain.types import Array
from jaxtrain.workloads.bird import probe
from loaders.io import atomic_write, files

KINDS: Mapping[str, tuple[str, ...]] = {  # and their arrays
    "linear": ("w", "b"),
    "probe": ("scale", "bias", "w", "b"),
    "prototypes": ("mean", "prototypes", "scale", "b"),
    "patches": ("mean", "prototypes", "scale", "b"),
}
FITTED = ("linear", "prototypes", "patches")  # kinds that a file may hold
POOLS = ("mean", "cls")
SCORES = ("softmax", "sigmoid")
VERSION = 1


class HeadError(ValueError):
    """A head that cannot be used."""


class Head(NamedTuple):
    """A head with its arrays on the host."""

    kind: str  # of `KINDS`
    pool: str  # of `POOLS`: the features that it reads
    scores: str  # of `SCORES`: what makes scores of its logits
    arrays: Mapping[str, np.ndarray]  # float32
    names: tuple[str, ...]  # of the classes
    name: str  # for people
    thresholds: np.ndarray | None = None  # float32 [C]: a score from which on a class counts as there
    encoder: str = ""  # the digest of the encoder that it belongs to; "" = the one that it comes with
    front_end: Mapping[str, Any] = {}  # of the recordings that it was fitted on
    about: Mapping[str, Any] = {}  # how it was fitted

    @property
    def digest(self) -> str:
        digest = hashlib.sha256(f"{self.kind} {self.pool} {self.scores}".encode())
        for name in sorted(self.arrays):
            digest.update(np.ascontiguousarray(self.arrays[name], "<f4").tobytes())
        return digest.hexdigest()[:16]


def logits(kind: str, arrays: Mapping[str, Array], x_bd: Array, patches_bnd: Array) -> Array:
    """Logits [B, C] of the pooled features, or of the patches."""
    if kind == "probe":
        return probe.scores(arrays, x_bd)
    if kind == "linear":
        return x_bd @ arrays["w"] + arrays["b"][None]
    of_patches = kind == "patches"
    x = patches_bnd if of_patches else x_bd[:, None]
    cosine = jnp.einsum("bnd,ckd->bnck", unit(x - arrays["mean"][None, None]), arrays["prototypes"])
    return cosine.max((1, 3)) * arrays["scale"][None] + arrays["b"][None]


def unit(x: Array) -> Array:
    """Vectors of length 1 along the last axis; a zero stays zero."""
    return x / jnp.maximum(jnp.sqrt(jnp.square(x).sum(-1, keepdims=True)), 1e-9)


def scores(head: Head, arrays: Mapping[str, Array], pooled: Mapping[str, Array], patches_bnd: Array) -> Array:
    """Scores in [0, 1], [B, C]. ``pooled``: the features "mean" and "cls", [B, D] each."""
    z = logits(head.kind, arrays, pooled[head.pool], patches_bnd)
    return jax.nn.softmax(z) if head.scores == "softmax" else jax.nn.sigmoid(z)


def save(path: str | os.PathLike, head: Head) -> None:
    """Writes a head, which a command fitted, as one .npz. Raises OSError."""
    about = {
        "version": VERSION,
        "kind": head.kind,
        "pool": head.pool,
        "scores": head.scores,
        "names": list(head.names),
        "encoder": head.encoder,
        "front_end": dict(head.front_end),
        "about": dict(head.about),
    }
    arrays = {name: np.asarray(x, np.float32) for name, x in head.arrays.items()}
    if head.thresholds is not None:
        arrays["thresholds"] = np.asarray(head.thresholds, np.float32)
    arrays["json"] = np.frombuffer(json.dumps(about, ensure_ascii=False).encode(), np.uint8)
    with atomic_write.file(path) as file:
        np.savez(file, allow_pickle=False, **arrays)


def read(path: str | os.PathLike) -> Head:
    """Reads what `save` wrote. Raises HeadError: it is none, or was made of something else."""
    path = pathlib.Path(path).expanduser()
    try:
        arrays = files.arrays(path)
        about = files.parse(bytes(arrays.pop("json")).decode(), str(path))
    except files.FileError as error:
        raise HeadError(f"{error}; name a file of `jaxtrain fit`") from error
    except (KeyError, UnicodeDecodeError, TypeError, ValueError) as error:
        raise HeadError(f"{path} is no file of `jaxtrain fit`") from error
    names = about.get("names")
    if about.get("version") != VERSION or about.get("kind") not in FITTED or about.get("pool") not in POOLS:
        raise HeadError(f"{path} is not a head of this version of `jaxtrain fit`; fit it again")
    if about.get("scores") not in SCORES or not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise HeadError(f"{path} does not describe a head; fit it again")
    if not all(isinstance(about.get(name), dict) for name in ("front_end", "about")) or not isinstance(
        about.get("encoder"), str
    ):
        raise HeadError(f"{path} does not say what it was fitted on; fit it again")
    thresholds = arrays.pop("thresholds", None)
    _check(path, about["kind"], arrays, thresholds, len(names))
    return Head(
        about["kind"],
        about["pool"],
        about["scores"],
        arrays,
        tuple(names),
        str(path),
        thresholds,
        about["encoder"],
        about["front_end"],
        about["about"],
    )


def _check(
    path: pathlib.Path, kind: str, arrays: Mapping[str, np.ndarray], thresholds: np.ndarray | None, n_classes: int
) -> None:
    """Raises HeadError for arrays that do not fit together."""
    if set(arrays) != set(KINDS[kind]):
        raise HeadError(
            f"{path} holds the arrays {', '.join(sorted(arrays))}; a head of kind {kind} has {', '.join(KINDS[kind])}"
        )
    given = {**arrays, **({} if thresholds is None else {"thresholds": thresholds})}
    if wrong := [name for name, x in given.items() if x.dtype != np.float32 or not np.isfinite(x).all()]:
        raise HeadError(f"{path}: its {wrong[0]} holds values that are no numbers of 32 bits; fit it again")
    width = (arrays["w"] if kind == "linear" else arrays["mean"]).shape[:1]
    shapes = {"w": (*width, n_classes), "b": (n_classes,), "mean": width, "scale": (n_classes,), "thresholds": (n_classes,)}
    for name, x in given.items():
        expected = shapes.get(name) or (n_classes, *x.shape[1:2], *width)
        if x.shape != expected or 0 in x.shape:
            raise HeadError(
                f"{path}: its {name} is {list(x.shape)}; {n_classes} classes and {width} features ask for {expected}"
            )


def refuse_other(head: Head, *, digest: str, width: int, front_end: Mapping[str, Any], run: str) -> None:
    """Raises HeadError unless a fitted head belongs to this encoder and front end."""
    have = (head.arrays["w"] if head.kind == "linear" else head.arrays["mean"]).shape[0]
    if have != width:
        raise HeadError(f"{head.name} was fitted on {have} features, and {run} has {width}; fit it on embeddings by that run")
    if head.encoder and head.encoder != digest:
        raise HeadError(f"{head.name} was fitted on the encoder {head.encoder}, and {run} holds {digest}; fit it by that run")
    for name, value in head.front_end.items():
        if name in front_end and front_end[name] != value:
            raise HeadError(
                f"{head.name} was fitted on recordings with data.{name}={value!r}, and {run} has {front_end[name]!r}; "
                "fit it on embeddings by that run"
            )


def read_names(given: Sequence[str], known: Sequence[str], what: str) -> list[int]:
    """The numbers of classes by their names. Raises HeadError with the nearest spelling."""
    numbers = {name: i for i, name in enumerate(known)}
    for name in given:
        if name not in numbers:
            near = difflib.get_close_matches(name, known, n=1, cutoff=0.5) or list(known[:5])
            raise HeadError(
                f"{what} names the class {name!r}, and there are {len(known)} others, for example {', '.join(near)}"
            )
    return [numbers[name] for name in given]
