"""Paths, counts, abstract arrays and real arrays of a table of `Spec`."""

import hashlib
import json
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxtrain.parallel.layout import Layout
from jaxtrain.types import Array, Initializer, Key, PyTree, Spec


def is_spec(x: Any) -> bool:
    return isinstance(x, Spec)


def map_specs(f: Callable[[str, Spec], Any], specs: PyTree) -> PyTree:
    """Apply f(path, spec) to every spec. A path reads ``encoder/blocks/w_qkv``."""
    return jax.tree.map_with_path(
        lambda path, spec: f(path_name(path), spec), specs, is_leaf=is_spec
    )


def path_name(path: tuple[Any, ...]) -> str:
    return jax.tree_util.keystr(path, simple=True, separator="/")


def paths(tree: PyTree) -> list[str]:
    return [path_name(path) for path, _ in jax.tree.leaves_with_path(tree, is_leaf=is_spec)]


def count(specs: PyTree) -> int:
    return sum(math.prod(spec.shape) for spec in jax.tree.leaves(specs, is_leaf=is_spec))


def digest(specs: PyTree) -> str:
    """Change when a path, shape, axis or dtype does: whether a checkpoint fits the model."""
    leaves = jax.tree.leaves(specs, is_leaf=is_spec)
    rows = []
    for path, spec in zip(paths(specs), leaves, strict=True):
        rows.append((path, spec.shape, spec.axes, jnp.dtype(spec.dtype).name))
    return hashlib.sha256(json.dumps(rows).encode()).hexdigest()[:16]


def abstract(specs: PyTree, layout: Layout) -> PyTree:
    """Shapes, dtypes, shardings. Raises LayoutError with the path of an array that misfits."""

    def array(path: str, spec: Spec) -> jax.ShapeDtypeStruct:
        sharding = layout.sharding(spec.axes, spec.shape, path=path)
        return jax.ShapeDtypeStruct(spec.shape, jnp.dtype(spec.dtype), sharding=sharding)

    return map_specs(array, specs)


def materialise(specs: PyTree, key: Key) -> PyTree:
    """Return the initial arrays. Jitted with their shardings, every device makes only its part.

    Each key folds in its parameter's path: no order of the table and no mesh changes a number.
    """

    def array(path: str, spec: Spec) -> Array:
        return spec.init(fold_in_path(key, path), spec.shape, jnp.dtype(spec.dtype))

    return map_specs(array, specs)


def fold_in_path(key: Key, path: str) -> Key:
    digest = hashlib.sha256(path.encode()).digest()
    return jax.random.fold_in(key, np.uint32(int.from_bytes(digest[:4], "little")))


zeros, ones = jax.nn.initializers.zeros, jax.nn.initializers.ones


def truncated_normal(stddev: float) -> Initializer:
    """Draw from a normal distribution cut at two standard deviations, scaled to ``stddev``."""

    def init(key: Key, shape: tuple[int, ...], dtype: Any) -> Array:
        # 0.87962566 is the standard deviation of a unit normal cut at ±2.
        unit = jax.random.truncated_normal(key, -2, 2, shape, jnp.float32)
        return (unit * (stddev / 0.87962566103423978)).astype(dtype)

    return init


def fan_in(n: int) -> Initializer:
    """Variance 1/n for a matrix that sums n inputs (LeCun et al. 1998), n given for stacks."""
    return truncated_normal(1 / math.sqrt(n))
