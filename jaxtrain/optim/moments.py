"""The state of an update rule between steps: its moments, and float32 copies of the parameters.

Moments are kept in float32, in bfloat16, or in 8 bits. The latter follow Dettmers et al. (2022),
with power-law codes instead of a table. Both smaller forms are rounded at random, without bias.
Else an average that moves by a thousandth per step would not move at all if the nearest number is
half a hundredth away. The draws are a hash of (step, place), so that no mesh changes a number.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxtrain.types import Array, PyTree

MIN_SIZE = 4096  # [elements] smaller moments stay in float32 under "int8"
MIN_ROW = 64  # [elements] that share a scale
# field of a rule's state -> codes and their law: value = scale × sign(code) (|code| / codes)^power
LAWS = {"mu": (127, 2, jnp.int8), "nu": (255, 4, jnp.uint8)}


class StoredState(NamedTuple):
    """A rule's state in few bits. ``scales``: field -> float32 of its rank, one for each row."""

    rule: Any
    scales: dict[str, PyTree]


class MasterState(NamedTuple):
    masters: PyTree  # float32
    rule: Any


def stored(
    tx: optax.GradientTransformation, how: str, names: tuple[str, ...]
) -> optax.GradientTransformation:
    """Make a rule keep the moments ``names``, fields of its state, as "bfloat16" or "int8"."""

    def of_each(f: Callable[..., Any], *states: Any) -> dict[str, PyTree]:
        """Compute f(name, moment of each state) for every array of every moment."""
        return {
            name: jax.tree.map(functools.partial(f, name), *(state[name] for state in states))
            for name in names
        }

    def put(state: Any, step: Array) -> Any:
        salts = {name: step + np.uint32(i << 30) for i, name in enumerate(names)}
        moments = {name: getattr(state, name) for name in names}
        if how == "bfloat16":
            rounded = of_each(lambda name, x: round_to_bfloat16(x, salts[name]), moments)
            return state._replace(**rounded)
        scales = of_each(lambda name, x: row_scales(x), moments)
        codes = of_each(lambda name, x, s: quantise(x, s, salts[name], name), moments, scales)
        return StoredState(state._replace(**codes), scales)

    def get(state: Any) -> Any:
        if how == "bfloat16":
            rounded = {name: getattr(state, name) for name in names}
            return state._replace(**of_each(lambda name, x: x.astype(jnp.float32), rounded))
        codes = {name: getattr(state.rule, name) for name in names}
        moments = of_each(lambda name, c, s: dequantise(c, s, name), codes, state.scales)
        return state.rule._replace(**moments)

    def init(params: PyTree) -> Any:
        return put(tx.init(params), jnp.uint32(0))

    def update(grads: PyTree, state: Any, params: PyTree = None) -> tuple[PyTree, Any]:
        updates, new = tx.update(grads, get(state), params)
        return updates, put(new, new.count.astype(jnp.uint32))

    return optax.GradientTransformation(init, update)


def with_masters(
    tx: optax.GradientTransformationExtraArgs,
) -> optax.GradientTransformationExtraArgs:
    """Apply ``tx`` to float32 copies of the parameters, which are part of the state.

    The parameters are the rounded copies. The updates are the differences of the rounded
    parameters, so that ``apply_updates`` reaches them exactly.
    """

    def init(params: PyTree) -> MasterState:
        masters = jax.tree.map(lambda p: jnp.array(p, jnp.float32, copy=True), params)
        return MasterState(masters, tx.init(masters))

    def update(
        grads: PyTree, state: MasterState, params: PyTree, **extra: Any
    ) -> tuple[PyTree, MasterState]:
        grads = jax.tree.map(lambda g: g.astype(jnp.float32), grads)
        updates, rule = tx.update(grads, state.rule, state.masters, **extra)
        masters = jax.tree.map(jnp.add, state.masters, updates)
        moves = jax.tree.map(
            lambda m, p: m.astype(p.dtype).astype(jnp.float32) - p.astype(jnp.float32),
            masters,
            params,
        )
        return moves, MasterState(masters, rule)

    return optax.GradientTransformationExtraArgs(init, update)


def row_axis(shape: tuple[int, ...]) -> int | None:
    """Return the dimension whose elements share a scale: the last one of at least `MIN_ROW`.

    None means that the array is not quantised. Blocks of a dimension would be finer. But to spread
    their scales over 4,096 columns a TPU writes them out, in float32. For the autoencoder of 8.36
    billion parameters on eight v4, that takes 22 GB besides the state, and 4 GB with rows.
    """
    wide = [axis for axis, size in enumerate(shape) if size >= MIN_ROW]
    return max(wide, default=None) if math.prod(shape) >= MIN_SIZE else None


def row_scales(x: Array) -> Array:
    """Return the largest magnitude of each row, float32 of x's rank, or 1 if x is not quantised."""
    if (axis := row_axis(x.shape)) is None:
        return jnp.ones((1,) * x.ndim, jnp.float32)
    return jnp.abs(x).max(axis, keepdims=True)


def quantise(x: Array, scales: Array, salt: Array, name: str) -> Array:
    """Round x at random to 8 bits, without bias. A positive "nu" never becomes 0, as it divides."""
    if row_axis(x.shape) is None:
        return x
    n, power, dtype = LAWS[name]
    y = jnp.clip(jnp.abs(x) / jnp.broadcast_to(jnp.where(scales > 0, scales, 1), x.shape), 0, 1)
    low = jnp.clip(jnp.floor(y ** (1 / power) * n), 0, n - 1)
    below, above = (low / n) ** power, ((low + 1) / n) ** power
    code = low + (uniform(x.shape, salt) < (y - below) / (above - below))
    if name == "nu":
        code = jnp.where(x > 0, jnp.maximum(code, 1), 0)
    return (code * jnp.sign(x)).astype(dtype)


def dequantise(codes: Array, scales: Array, name: str) -> Array:
    """Return the float32 values of codes."""
    if row_axis(codes.shape) is None:
        return codes
    n, power, _ = LAWS[name]
    c = codes.astype(jnp.float32)
    return jnp.sign(c) * (jnp.abs(c) / n) ** power * jnp.broadcast_to(scales, c.shape)


def round_to_bfloat16(x: Array, salt: Array) -> Array:
    """Round float32 at random to one of the two nearest bfloat16, without bias."""
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32) + (_hash(x.shape, salt) >> np.uint32(16))
    return jax.lax.bitcast_convert_type((bits >> np.uint32(16)).astype(jnp.uint16), jnp.bfloat16)


def uniform(shape: tuple[int, ...], salt: Array) -> Array:
    """Draw float32 in [0, 1), a function of each element's place and the salt."""
    return (_hash(shape, salt) >> np.uint32(8)).astype(jnp.float32) * np.float32(2**-24)


def _hash(shape: tuple[int, ...], salt: Array) -> Array:
    """Hash each place's number to uint32 elementwise: MurmurHash3's finalizer (Appleby)."""
    h = jnp.full(shape, salt * np.uint32(0x9E3779B9), jnp.uint32)
    for i in range(len(shape)):
        stride = np.uint32(math.prod(shape[i + 1 :]) % 2**32)
        h = h + jax.lax.broadcasted_iota(jnp.uint32, shape, i) * stride
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        h = (h ^ (h >> np.uint32(shift))) * np.uint32(factor)
    return h ^ (h >> np.uint32(16))
