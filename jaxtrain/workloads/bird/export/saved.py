"""The arrays of a saved encoder and its heads, compared with the sizes of the run's config.

Shapes: D embed, C classes.
"""

import math
from collections.abc import Mapping

import jax
import numpy as np

from jaxtrain import specs
from jaxtrain.arrays.stored import Stored, StoredError
from jaxtrain.types import PyTree
from jaxtrain.workloads.bird import vit

HEADS = {
    "linear": ("objective/supervised", ("w", "b")),
    "probe": ("probe", ("scale", "bias", "w", "b")),
}


def misfits(c: vit.Encoder, arrays: Mapping[str, Stored]) -> list[str]:
    """List the arrays of an encoder that are missing, or of another shape than by the config."""
    table = vit.make_specs(c)
    problems = []
    leaves = jax.tree.leaves(table, is_leaf=specs.is_spec)
    for name, spec in zip(specs.paths(table), leaves, strict=True):
        path = f"encoder/{name}"
        shape = arrays[path].shape if path in arrays else "missing"
        if shape != spec.shape:
            problems.append(f"{path} is {shape}; expected {spec.shape}")
    return problems


def encoder(c: vit.Encoder, arrays: Mapping[str, Stored]) -> PyTree:
    """Read the parameters of an encoder without `misfits`, float32."""
    return specs.map_specs(lambda path, _: _read(arrays, f"encoder/{path}"), vit.make_specs(c))


def heads(c: vit.Encoder, arrays: Mapping[str, Stored]) -> dict[str, dict[str, np.ndarray]]:
    """Read a run's heads by kind, that of its labels and its probe. Raises StoredError: no fit."""
    heads: dict[str, dict[str, np.ndarray]] = {}
    for kind, (folder, names) in HEADS.items():
        paths = {name: f"{folder}/{name}" for name in names}
        if any(path not in arrays for path in paths.values()):
            continue
        n_classes = arrays[f"{folder}/b"].shape
        expected = {
            "scale": (c.embed,),
            "bias": (c.embed,),
            "w": (c.embed, *n_classes),
            "b": (math.prod(n_classes),),
        }
        for name, path in paths.items():
            shape = arrays[path].shape
            if shape != expected[name] or 0 in shape:
                raise StoredError(
                    f"{path} is {shape}; {c.embed} features and classes {n_classes} expect"
                    f" {expected[name]}"
                )
        heads[kind] = {name: _read(arrays, path) for name, path in paths.items()}
    return heads


def _read(arrays: Mapping[str, Stored], path: str) -> np.ndarray:
    return np.asarray(arrays[path].read(()), np.float32)
