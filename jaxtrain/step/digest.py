"""A digest of a state: 64 bits of a hash of the bits of all its arrays.

Each 32-bit word of an array is mixed with the array's path and with its place in the array. The
mixed words are added modulo 2^32. So the digest does not depend on the mesh, on the sharding or on
the number of processes, and one bit that flips changes it.

The same functions work with JAX's arrays and with NumPy's, which read a checkpoint in pieces.
"""

import hashlib
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxtrain import specs
from jaxtrain.types import Array, PyTree

WORD = np.uint32
# first name in the path of a batch's arrays, which are no part of the state's digest
BATCH = "batch"


def of(tree: PyTree) -> Array:
    """Return the digest of all arrays of a tree, uint32 [2]. To be jitted."""
    return of_each(tree).sum(0, dtype=WORD)


def of_each(tree: PyTree) -> Array:
    """Return the part of each array of a tree, uint32 [arrays, 2]. Their sum is the digest."""
    parts = [jnp.zeros((0, 2), WORD)]
    for path, x in jax.tree.leaves_with_path(tree):
        words = _words(x, jax.lax.bitcast_convert_type)
        places = [jax.lax.broadcasted_iota(WORD, words.shape, axis) for axis in range(words.ndim)]
        # One reduction of both sums: XLA's CPU compiler mixes each word once, and in vectors. Two
        # take seven times as long.
        mixed = _mixed(specs.path_name(path), words, places)
        zeros = (WORD(0), WORD(0))
        sums = jax.lax.reduce(mixed, zeros, _add_both, tuple(range(words.ndim)))
        parts.append(jnp.stack(sums)[None])
    return jnp.concatenate(parts)


def _add_both(x: tuple[Any, Any], y: tuple[Any, Any]) -> tuple[Any, Any]:
    return x[0] + y[0], x[1] + y[1]


def of_batch_and_state(batch: PyTree, state: PyTree) -> Array:
    """Return the parts of the arrays of a batch and then of a state, uint32 [arrays, 2]."""
    return jnp.concatenate([of_each({BATCH: batch}), of_each(state)])


def of_piece(path: str, piece: np.ndarray, index: Sequence[slice] = ()) -> np.ndarray:
    """Return the part of a digest, uint32 [2], of a piece at ``index`` of the array at ``path``."""

    def bitcast(x: np.ndarray, word: Any) -> np.ndarray:
        words_per_number = -(-x.dtype.itemsize // 4)
        words: np.ndarray = np.ascontiguousarray(x).view(word)
        return words.reshape(*x.shape, words_per_number)

    words = _words(piece, bitcast)
    starts = [part.start or 0 for part in index] + [0] * (words.ndim - len(index))
    places = []
    for axis, (start, n) in enumerate(zip(starts, words.shape, strict=True)):
        shape = [1] * words.ndim
        shape[axis] = n
        places.append(np.arange(start, start + n, dtype=WORD).reshape(shape))
    return np.array([x.sum(dtype=WORD) for x in _mixed(path, words, places)], WORD)


def _words(x: Any, bitcast: Any) -> Any:
    """Return an array's bits as uint32: a word, or a last axis of 2 for 64-bit numbers."""
    if not x.shape:
        x = x.reshape(1)
    size = x.dtype.itemsize
    if x.dtype == bool:
        return x.astype(WORD)
    bits = bitcast(x, {1: np.uint8, 2: np.uint16}.get(size, WORD))
    if bits.ndim > x.ndim and bits.shape[-1] == 1:
        bits = bits[..., 0]
    return bits.astype(WORD)


def _mixed(path: str, words: Any, places: Sequence[Any]) -> tuple[Any, Any]:
    """Mix each word with its array and its place, in two ways."""
    seed = hashlib.sha256(path.encode()).digest()
    numbers = np.frombuffer(seed, "<u4")
    at = numbers[:1].reshape([1] * words.ndim)
    for axis, place in enumerate(places):
        at = at + place * (numbers[1 + axis % 7] + WORD(2 * (axis // 7)) | WORD(1))
    at = _mix(at)
    mixed = _mix(words ^ at)
    return mixed, mixed * (at | WORD(1))


def _mix(x: Any) -> Any:
    """Mix a word's bits, as the finaliser of MurmurHash3 (Austin Appleby, public domain)."""
    x = (x ^ (x >> 16)) * WORD(0x85EBCA6B)
    x = (x ^ (x >> 13)) * WORD(0xC2B2AE35)
    return x ^ (x >> 16)
