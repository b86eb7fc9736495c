"""Bytes of arrays on one device, exactly: what is held between two steps, and what a step reads."""

import itertools
import math
import os
import pathlib
from collections.abc import Mapping, Sequence

import jax
import numpy as np

from jaxtrain.parallel import layout as layout_lib
from jaxtrain.step import state as state_lib
from jaxtrain.step import train_step as step_lib
from jaxtrain.types import PyTree

MEMINFO = pathlib.Path("/proc/meminfo")


def device_bytes(x: jax.ShapeDtypeStruct, *, tiled: bool) -> int:
    """Bytes of one device's part of an array; ``tiled``: as a TPU lays it out.

    A TPU pads the last two dimensions in memory to tiles of 8 × 128 words of 32 bits, fewer rows where there are fewer, and
    chooses which two dimensions these are so that the padding is least; a vector is padded to 128 to 1024 words.
    """
    shape, size = x.sharding.shard_shape(x.shape), np.dtype(x.dtype).itemsize
    return padded(shape, size) if tiled else math.prod(shape) * size


def padded(shape: Sequence[int], size: int) -> int:
    """Bytes of an array of values of ``size`` bytes in a TPU's memory."""
    packed = max(1, 4 // size)  # values in a word
    if 0 in shape:
        return 0
    if len(shape) < 2:
        n = math.prod(shape)
        return _up(n, min(max(_power(n), 128 * packed), 1024)) * size
    ways = [
        math.prod(shape) // (rows * columns) * _up(rows, min(max(_power(rows), packed), 8)) * _up(columns, 128)
        for rows, columns in itertools.permutations(shape, 2)
    ]
    return min(ways) * size


def _up(n: int, unit: int) -> int:
    return -(-n // unit) * unit


def _power(n: int) -> int:
    return 1 << max(0, n - 1).bit_length()


def held(abstract: state_lib.Abstract, layout: layout_lib.Layout, *, tiled: bool) -> dict[str, int]:
    """Bytes that one device holds between two steps, by what they are; what is in host memory aside (`offloaded`)."""

    def size(tree: PyTree) -> int:
        return sum(device_bytes(x, tiled=tiled) for x in jax.tree.leaves(tree) if not is_on_host(x))

    state = abstract.state
    return {
        "parameters": size(state.variables.params),
        "frozen": size(state.variables.frozen),
        "optimizer": size(state.opt_state),
        "average of the parameters": size(state.ema),
        "carry": size(state.variables.carry),
        "counters": size((state.step, state.norms, step_lib.abstract_stop(layout))),
        "batch": size(abstract.batch),
    }


def offloaded(abstract: state_lib.Abstract) -> int:
    """Bytes that host memory holds for one device between two steps."""
    return sum(device_bytes(x, tiled=False) for x in jax.tree.leaves(abstract.state) if is_on_host(x))


def is_on_host(x: jax.ShapeDtypeStruct) -> bool:
    return x.sharding.memory_kind == state_lib.HOST


def least(held: Mapping[str, int]) -> int:
    """Bytes that one device needs at the least while a step runs: what it holds, and gradients of the parameters' types."""
    return sum(held.values()) + held["parameters"]


def host_memory() -> float:
    """Bytes that this machine could still give to a process, as Linux estimates them; elsewhere (macOS), all that it has."""
    try:
        lines = MEMINFO.read_text().splitlines()
    except OSError:
        lines = []
    for line in lines:
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def in_bytes(n: float) -> str:
    """A number of bytes for a person, in decimal units."""
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if abs(n) >= size:
            return f"{n / size:.2f} {unit}"
    return f"{n:.0f} B"
