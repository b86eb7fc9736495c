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
    rows = [
        (p, s.shape, s.axes, jnp.dtype(s.dtype).name)
        for p, s in zip(paths(specs), jax.tree.leaves(specs, is_leaf=is_spec), strict=True)
    ]
    return hashlib.sha256(json.dumps(rows).encode()).hexdigest()[:16]


def abstract(specs: PyTree, layout: Layout) -> PyTree:
    """Shapes, dtypes, shardings. Raises LayoutError with the path of an array that misfits."""
    return map_specs(
        lambda path, s: jax.ShapeDtypeStruct(
            s.shape, jnp.dtype(s.dtype), sharding=layout.sharding(s.axes, s.shape, path=path)
        ),
        specs,
    )


def materialise(specs: PyTree, key: Key) -> PyTree:
    """Return the initial arrays. Jitted with their shardings, every device makes only its part.

    Each key folds in its parameter's path: no order of the table and no mesh changes a number.
    """
    return map_specs(
        lambda path, s: s.init(fold_in_path(key, path), s.shape, jnp.dtype(s.dtype)), specs
    )


def fold_in_path(key: Key, path: str) -> Key:
    return jax.random.fold_in(
        key, np.uint32(int.from_bytes(hashlib.sha256(path.encode()).digest()[:4], "little"))
    )


zeros, ones = jax.nn.initializers.zeros, jax.nn.initializers.ones


def truncated_normal(stddev: float) -> Initializer:
    """Draw from a normal distribution cut at two standard deviations, scaled to ``stddev``."""

    def init(key: Key, shape: tuple[int, ...], dtype: Any) -> Array:
        # 0.87962566 is the standard deviation of a unit normal cut at ±2.
        return (
            jax.random.truncated_normal(key, -2, 2, shape, jnp.float32)
            * (stddev / 0.87962566103423978)
        ).astype(dtype)

    return init


def fan_in(n: int) -> Initializer:
    """Variance 1/n for a matrix that sums n inputs (LeCun et al. 1998), n given for stacks."""
    return truncated_normal(1 / math.sqrt(n))
