"""The exact bytes of arrays on one device, between two steps and as arguments of a step."""

import functools
import itertools
import math
import os
from collections.abc import Mapping, Sequence

import jax
import numpy as np

from jaxtrain.parallel import layout as layout_lib
from jaxtrain.step import state as state_lib
from jaxtrain.step import train_step as step_lib
from jaxtrain.telemetry import console
from jaxtrain.types import PyTree
from loaders.io import machine

in_bytes = functools.partial(console.in_bytes, form=".2f")


def device_bytes(x: jax.ShapeDtypeStruct, *, tiled: bool) -> int:
    """Return the bytes of one device's part of an array, ``tiled`` as on a TPU."""
    shape, size = x.sharding.shard_shape(x.shape), np.dtype(x.dtype).itemsize
    return padded(shape, size) if tiled else math.prod(shape) * size


def padded(shape: Sequence[int], size: int) -> int:
    """Return the bytes of an array of values of ``size`` bytes in a TPU's memory.

    Two dimensions are padded to tiles of 8 × 128 words of 32 bits, with fewer rows if the array has
    fewer: those with the least padding. A vector is padded to 128 to 1024 words.
    """
    packed = max(1, 4 // size)  # values in a word
    if 0 in shape:
        return 0
    if len(shape) < 2:
        n = math.prod(shape)
        return _up(n, min(max(_power(n), 128 * packed), 1024)) * size
    ways = [
        math.prod(shape)
        // (rows * columns)
        * _up(rows, min(max(_power(rows), packed), 8))
        * _up(columns, 128)
        for rows, columns in itertools.permutations(shape, 2)
    ]
    return min(ways) * size


def _up(n: int, unit: int) -> int:
    return -(-n // unit) * unit


def _power(n: int) -> int:
    return 1 << max(0, n - 1).bit_length()


def held(abstract: state_lib.Abstract, layout: layout_lib.Layout, *, tiled: bool) -> dict[str, int]:
    """Return a device's bytes between two steps, by kind, but for host memory (`offloaded`)."""

    def size(tree: PyTree) -> int:
        return sum(device_bytes(x, tiled=tiled) for x in jax.tree.leaves(tree) if not is_on_host(x))

    state = abstract.state
    return {
        "parameters": size(state.variables.params),
        "frozen": size(state.variables.frozen),
        "optimizer": size(state.opt_state),
        "average of the parameters": size(state.ema),
        "model state": size(state.variables.model_state),
        "counters": size((state.step, state.norms, step_lib.abstract_stop(layout))),
        "batch": size(abstract.batch),
    }


def offloaded(abstract: state_lib.Abstract) -> int:
    """Return the bytes of host memory for one device between two steps."""
    return sum(
        device_bytes(x, tiled=False) for x in jax.tree.leaves(abstract.state) if is_on_host(x)
    )


def is_on_host(x: jax.ShapeDtypeStruct) -> bool:
    return bool(x.sharding.memory_kind == state_lib.HOST)


def second(abstract: state_lib.Abstract, layout: layout_lib.Layout, *, tiled: bool) -> int:
    """Return the bytes of config.guard.verify_every: a second state, and a neighbour's batch."""
    copied = [abstract.state, *([abstract.batch] if layout.mesh.size > 1 else [])]
    return sum(device_bytes(x, tiled=tiled) for x in jax.tree.leaves(copied) if not is_on_host(x))


def least(held: Mapping[str, int]) -> int:
    """Return the bytes that a step needs at least: those held, and gradients of the parameters."""
    return sum(held.values()) + held["parameters"]


def host_memory() -> float:
    """Return the bytes available to a process by Linux's estimate, else (macOS) all memory."""
    return machine.meminfo().get(
        "MemAvailable", os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    )
