"""Heads make scores by class of an encoder's output.

A head is a run's own, or a file of `jaxtrain fit`.

    linear       logits x @ w + b of the pooled features x
    probe        the same after a layer norm: it accompanies training (`…bird.classes`)
    prototypes   logits scale × cosine(x - mean, prototype) + b, of the pooled features
    patches      the same of every patch, of which the largest of a class counts

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
from jaxtrain.workloads.bird import classes
from jaxtrain.workloads.bird.inference import InferenceError
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
# Fields of a head that its file describes in JSON.
ABOUT = {
    "kind": str,
    "pool": str,
    "scores": str,
    "names": list,
    "encoder": str,
    "front_end": dict,
    "about": dict,
}


class Head(NamedTuple):
    """A head with its arrays on the host."""

    kind: str  # of `KINDS`
    pool: str  # of `POOLS`: the features that it reads
    scores: str  # of `SCORES`: the function from logits to scores
    arrays: Mapping[str, np.ndarray]  # float32
    names: tuple[str, ...]  # of the classes
    name: str  # for people
    # float32 [C]: a score from which on a class counts as there
    thresholds: np.ndarray | None = None
    # the digest of the encoder that it belongs to; "" = the one that it comes with
    encoder: str = ""
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
        return classes.probe_scores(arrays, x_bd)
    if kind == "linear":
        return x_bd @ arrays["w"] + arrays["b"][None]
    of_patches = kind == "patches"
    x = patches_bnd if of_patches else x_bd[:, None]
    cosine = jnp.einsum("bnd,ckd->bnck", unit(x - arrays["mean"][None, None]), arrays["prototypes"])
    return cosine.max((1, 3)) * arrays["scale"][None] + arrays["b"][None]


def unit(x: Array) -> Array:
    """Vectors of length 1 along the last axis. A zero stays zero."""
    return x / jnp.maximum(jnp.sqrt(jnp.square(x).sum(-1, keepdims=True)), 1e-9)


def scores(
    head: Head, arrays: Mapping[str, Array], pooled: Mapping[str, Array], patches_bnd: Array
) -> Array:
    """Scores in [0, 1], [B, C]. ``pooled``: the features "mean" and "cls", [B, D] each."""
    z = logits(head.kind, arrays, pooled[head.pool], patches_bnd)
    return jax.nn.softmax(z) if head.scores == "softmax" else jax.nn.sigmoid(z)


def save(path: str | os.PathLike[str], head: Head) -> None:
    """Write a head, which a command fitted, as one .npz. Raises OSError."""
    about = {"version": VERSION, **{name: getattr(head, name) for name in ABOUT}}
    arrays = {name: np.asarray(x, np.float32) for name, x in head.arrays.items()}
    if head.thresholds is not None:
        arrays["thresholds"] = np.asarray(head.thresholds, np.float32)
    arrays["json"] = np.frombuffer(json.dumps(about, ensure_ascii=False).encode(), np.uint8)
    with atomic_write.file(path) as file:
        np.savez(file, allow_pickle=False, **arrays)


def read(path: str | os.PathLike[str]) -> Head:
    """Read a file of `save`. Raises InferenceError: it is none."""
    path = files.expanded(path)
    try:
        arrays = files.arrays(path)
        about = files.parse(bytes(arrays.pop("json")).decode(), str(path))
    except files.FileError as error:
        raise InferenceError(f"{error}; name a file of `jaxtrain fit`") from error
    except (KeyError, UnicodeDecodeError, TypeError, ValueError) as error:
        raise InferenceError(f"{path} is no file of `jaxtrain fit`") from error
    if about.get("version") != VERSION:
        raise InferenceError(
            f"{path} is not a head of this version of `jaxtrain fit`; fit it again"
        )
    choices = {"kind": FITTED, "pool": POOLS, "scores": SCORES}
    wrong = [name for name, kind in ABOUT.items() if not isinstance(about.get(name), kind)]
    wrong += [
        name
        for name, allowed in choices.items()
        if name not in wrong and about[name] not in allowed
    ]
    if wrong or not all(isinstance(name, str) for name in about["names"]):
        raise InferenceError(
            f"{path} does not describe a head: its {(wrong or ['names'])[0]} cannot be used; fit it"
            " again"
        )
    thresholds = arrays.pop("thresholds", None)
    _check(path, about["kind"], arrays, thresholds, len(about["names"]))
    known = {name: about[name] for name in ABOUT} | {"names": tuple(about["names"])}
    return Head(**known, arrays=arrays, name=str(path), thresholds=thresholds)


def _check(
    path: pathlib.Path,
    kind: str,
    arrays: Mapping[str, np.ndarray],
    thresholds: np.ndarray | None,
    n_classes: int,
) -> None:
    """Raise InferenceError for arrays that do not fit together."""
    if set(arrays) != set(KINDS[kind]):
        needed = f"a head of kind {kind} has {', '.join(KINDS[kind])}"
        raise InferenceError(f"{path} holds the arrays {', '.join(sorted(arrays))}; {needed}")
    given = {**arrays, **({} if thresholds is None else {"thresholds": thresholds})}
    if wrong := [
        name for name, x in given.items() if x.dtype != np.float32 or not np.isfinite(x).all()
    ]:
        raise InferenceError(
            f"{path}: its {wrong[0]} holds values that are no numbers of 32 bits; fit it again"
        )
    width = (arrays["w"] if kind == "linear" else arrays["mean"]).shape[:1]
    shapes = {
        "w": (*width, n_classes),
        "b": (n_classes,),
        "mean": width,
        "scale": (n_classes,),
        "thresholds": (n_classes,),
    }
    for name, x in given.items():
        expected = shapes.get(name) or (n_classes, *x.shape[1:2], *width)
        if x.shape != expected or 0 in x.shape:
            asked = f"{n_classes} classes and {width} features ask for {expected}"
            raise InferenceError(f"{path}: its {name} is {list(x.shape)}; {asked}")


def refuse_other(
    head: Head, *, digest: str, width: int, front_end: Mapping[str, Any], run: str
) -> None:
    """Raise InferenceError unless a fitted head belongs to this encoder and front end."""
    have = (head.arrays["w"] if head.kind == "linear" else head.arrays["mean"]).shape[0]
    wrong = []
    if have != width:
        wrong.append(f"{have} features, and {run} has {width}")
    if head.encoder and head.encoder != digest:
        wrong.append(f"the encoder {head.encoder}, and {run} holds {digest}")
    for name, value in head.front_end.items():
        if name in front_end and front_end[name] != value:
            wrong.append(
                f"recordings with data.{name}={value!r}, and {run} has {front_end[name]!r}"
            )
    if wrong:
        raise InferenceError(
            f"{head.name} was fitted on {wrong[0]}; fit it on embeddings by that run"
        )


def read_names(given: Sequence[str], known: Sequence[str], what: str) -> list[int]:
    """Return the numbers of classes. Raises InferenceError with the nearest spelling."""
    numbers = {name: i for i, name in enumerate(known)}
    for name in given:
        if name not in numbers:
            nearest = ", ".join(
                difflib.get_close_matches(name, known, n=1, cutoff=0.5) or known[:5]
            )
            others = f"there are {len(known)} others, for example {nearest}"
            raise InferenceError(f"{what} names the class {name!r}, and {others}")
    return [numbers[name] for name in given]
