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

# The kinds of heads, with their arrays.
KINDS: Mapping[str, tuple[str, ...]] = {
    "linear": ("w", "b"),
    "probe": ("scale", "bias", "w", "b"),
    "prototypes": ("mean", "prototypes", "scale", "b"),
    "patches": ("mean", "prototypes", "scale", "b"),
}
# The array of each kind that a file may hold, whose first axis is that of the features.
_INPUT = {"linear": "w", "prototypes": "mean", "patches": "mean"}
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
    x_bnd = patches_bnd if kind == "patches" else x_bd[:, None]
    centred_bnd = unit(x_bnd - arrays["mean"][None, None])
    cosine = jnp.einsum("bnd,ckd->bnck", centred_bnd, arrays["prototypes"])
    return cosine.max((1, 3)) * arrays["scale"][None] + arrays["b"][None]


def unit(x: Array) -> Array:
    """Vectors of length 1 along the last axis. A zero stays zero."""
    length = jnp.sqrt(jnp.square(x).sum(-1, keepdims=True))
    return x / jnp.maximum(length, 1e-9)


def scores(
    head: Head, arrays: Mapping[str, Array], pooled: Mapping[str, Array], patches_bnd: Array
) -> Array:
    """Scores in [0, 1], [B, C]. ``pooled``: the features "mean" and "cls", [B, D] each."""
    z = logits(head.kind, arrays, pooled[head.pool], patches_bnd)
    if head.scores == "softmax":
        return jax.nn.softmax(z)
    return jax.nn.sigmoid(z)


def save(path: str | os.PathLike[str], head: Head) -> None:
    """Write a head, which a command fitted, as one .npz. Raises OSError."""
    description = {"version": VERSION}
    for name in ABOUT:
        description[name] = getattr(head, name)
    arrays = {name: np.asarray(x, np.float32) for name, x in head.arrays.items()}
    if head.thresholds is not None:
        arrays["thresholds"] = np.asarray(head.thresholds, np.float32)
    text = json.dumps(description, ensure_ascii=False)
    arrays["json"] = np.frombuffer(text.encode(), np.uint8)
    with atomic_write.file(path) as file:
        np.savez(file, allow_pickle=False, **arrays)


def read(path: str | os.PathLike[str]) -> Head:
    """Read a file of `save`. Raises InferenceError: it is none."""
    path = files.expanded(path)
    try:
        arrays = files.arrays(path)
        text = bytes(arrays.pop("json")).decode()
        description = files.parse(text, str(path))
    except files.FileError as error:
        raise InferenceError(f"{error}; name a file of `jaxtrain fit`") from error
    except (KeyError, UnicodeDecodeError, TypeError, ValueError) as error:
        raise InferenceError(f"{path} is no file of `jaxtrain fit`") from error
    if description.get("version") != VERSION:
        raise InferenceError(
            f"{path} is not a head of this version of `jaxtrain fit`; fit it again"
        )
    if unusable := _unusable_field(description):
        raise InferenceError(
            f"{path} does not describe a head: its {unusable} cannot be used; fit it again"
        )
    names = tuple(description["names"])
    thresholds = arrays.pop("thresholds", None)
    _check(path, description["kind"], arrays, thresholds, len(names))
    fields = {name: description[name] for name in ABOUT}
    fields["names"] = names
    return Head(**fields, arrays=arrays, name=str(path), thresholds=thresholds)


def _unusable_field(description: Mapping[str, Any]) -> str:
    """Return the first field of a head's description with a wrong type or value, or ""."""
    for name, kind in ABOUT.items():
        if not isinstance(description.get(name), kind):
            return name
    for name, choices in (("kind", FITTED), ("pool", POOLS), ("scores", SCORES)):
        if description[name] not in choices:
            return name
    if not all(isinstance(name, str) for name in description["names"]):
        return "names"
    return ""


def _check(
    path: pathlib.Path,
    kind: str,
    arrays: Mapping[str, np.ndarray],
    thresholds: np.ndarray | None,
    n_classes: int,
) -> None:
    """Raise InferenceError for arrays that do not fit together."""
    if set(arrays) != set(KINDS[kind]):
        raise InferenceError(
            f"{path} holds the arrays {', '.join(sorted(arrays))}; a head of kind {kind} has"
            f" {', '.join(KINDS[kind])}"
        )
    checked = dict(arrays)
    if thresholds is not None:
        checked["thresholds"] = thresholds
    for name, x in checked.items():
        if x.dtype != np.float32 or not np.isfinite(x).all():
            raise InferenceError(
                f"{path}: its {name} holds values that are no numbers of 32 bits; fit it again"
            )
    width = arrays[_INPUT[kind]].shape[:1]
    shapes = {
        "w": (*width, n_classes),
        "b": (n_classes,),
        "mean": width,
        "scale": (n_classes,),
        "thresholds": (n_classes,),
    }
    for name, x in checked.items():
        expected = shapes.get(name) or (n_classes, *x.shape[1:2], *width)
        if x.shape != expected or 0 in x.shape:
            raise InferenceError(
                f"{path}: its {name} is {list(x.shape)}; {n_classes} classes and {width} features"
                f" ask for {expected}"
            )


def refuse_other(
    head: Head, *, digest: str, width: int, front_end: Mapping[str, Any], run: str
) -> None:
    """Raise InferenceError unless a fitted head belongs to this encoder and front end."""
    head_width = head.arrays[_INPUT[head.kind]].shape[0]
    differences = []
    if head_width != width:
        differences.append(f"{head_width} features, and {run} has {width}")
    if head.encoder and head.encoder != digest:
        differences.append(f"the encoder {head.encoder}, and {run} holds {digest}")
    for name, value in head.front_end.items():
        if name in front_end and front_end[name] != value:
            differences.append(
                f"recordings with data.{name}={value!r}, and {run} has {front_end[name]!r}"
            )
    if differences:
        raise InferenceError(
            f"{head.name} was fitted on {differences[0]}; fit it on embeddings by that run"
        )


def read_names(names: Sequence[str], known: Sequence[str], source: str) -> list[int]:
    """Return the numbers of classes. Raises InferenceError with the nearest spelling."""
    numbers = {name: i for i, name in enumerate(known)}
    for name in names:
        if name not in numbers:
            similar = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
            nearest = ", ".join(similar or known[:5])
            raise InferenceError(
                f"{source} names the class {name!r}, and there are {len(known)} others, for example"
                f" {nearest}"
            )
    return [numbers[name] for name in names]
