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
    leaves = zip(specs.paths(table), jax.tree.leaves(table, is_leaf=specs.is_spec), strict=True)
    shapes = {f"encoder/{path}": spec.shape for path, spec in leaves}
    found = {path: arrays[path].shape if path in arrays else "missing" for path in shapes}
    return [
        f"{path} is {found[path]}; expected {shape}"
        for path, shape in shapes.items()
        if found[path] != shape
    ]


def encoder(c: vit.Encoder, arrays: Mapping[str, Stored]) -> PyTree:
    """Read the parameters of an encoder without `misfits`, float32."""
    return specs.map_specs(lambda path, _: _read(arrays, f"encoder/{path}"), vit.make_specs(c))


def heads(c: vit.Encoder, arrays: Mapping[str, Stored]) -> dict[str, dict[str, np.ndarray]]:
    """Read a run's heads by kind, that of its labels and its probe. Raises StoredError: no fit."""
    found = {}
    for kind, (folder, names) in HEADS.items():
        if any(f"{folder}/{name}" not in arrays for name in names):
            continue
        n = arrays[f"{folder}/b"].shape
        fits = {"scale": (c.embed,), "bias": (c.embed,), "w": (c.embed, *n), "b": (math.prod(n),)}
        for name in names:
            if (shape := arrays[f"{folder}/{name}"].shape) != fits[name] or 0 in shape:
                raise StoredError(
                    f"{folder}/{name} is {shape}; {c.embed} features and classes {n} expect"
                    f" {fits[name]}"
                )
        found[kind] = {name: _read(arrays, f"{folder}/{name}") for name in names}
    return found


def _read(arrays: Mapping[str, Stored], path: str) -> np.ndarray:
    return np.asarray(arrays[path].read(()), np.float32)
