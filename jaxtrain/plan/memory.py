"""The exact bytes of arrays on one device, between two steps and as arguments of a step."""

import functools
import itertools
import math
import os
from collections.abc import Sequence

import jax
import numpy as np

from jaxtrain import specs
from jaxtrain.assembly import Assembly
from jaxtrain.parallel import layout as layout_lib
from jaxtrain.step import state as state_lib
from jaxtrain.step import train_step as step_lib
from jaxtrain.telemetry import console
from jaxtrain.types import PyTree
from loaders.io import machine

in_bytes = functools.partial(console.in_bytes, form=".2f")


def device_bytes(x: jax.ShapeDtypeStruct, *, tiled: bool) -> int:
    """Return the bytes of one device's part of an array, ``tiled`` as on a TPU."""
    shape = x.sharding.shard_shape(x.shape)
    size = np.dtype(x.dtype).itemsize
    return padded(shape, size) if tiled else math.prod(shape) * size


def padded(shape: Sequence[int], size: int) -> int:
    """Return the bytes of an array of values of ``size`` bytes in a TPU's memory.

    Two dimensions are padded to tiles of 8 × 128 words of 32 bits, with fewer rows if the array has
    fewer: those with the least padding. A vector is padded to 128 to 1024 words.
    """
    packed = max(1, 4 // size)  # values in a word
    n_values = math.prod(shape)
    if not n_values:
        return 0
    if len(shape) < 2:
        tile = min(max(_power_of_two(n_values), 128 * packed), 1024)
        return _round_up(n_values, tile) * size
    paddings = []
    for rows, columns in itertools.permutations(shape, 2):
        tile_rows = min(max(_power_of_two(rows), packed), 8)
        padded_tile = _round_up(rows, tile_rows) * _round_up(columns, 128)
        paddings.append(n_values // (rows * columns) * padded_tile)
    return min(paddings) * size


def _round_up(n: int, unit: int) -> int:
    return -(-n // unit) * unit


def _power_of_two(n: int) -> int:
    """Return the least power of two that is not below ``n``."""
    return 1 << max(0, n - 1).bit_length()


def held(abstract: state_lib.Abstract, layout: layout_lib.Layout, *, tiled: bool) -> dict[str, int]:
    """Return a device's bytes between two steps, by kind, but for host memory (`offloaded`)."""

    def size(tree: PyTree) -> int:
        return _on_device(tree, tiled=tiled)

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


def _on_device(tree: PyTree, *, tiled: bool) -> int:
    on_device = [x for x in jax.tree.leaves(tree) if not is_on_host(x)]
    return sum(device_bytes(x, tiled=tiled) for x in on_device)


def offloaded(abstract: state_lib.Abstract) -> int:
    """Return the bytes of host memory for one device between two steps."""
    on_host = [x for x in jax.tree.leaves(abstract.state) if is_on_host(x)]
    return sum(device_bytes(x, tiled=False) for x in on_host)


def is_on_host(x: jax.ShapeDtypeStruct) -> bool:
    return bool(x.sharding.memory_kind == state_lib.HOST)


def second(abstract: state_lib.Abstract, layout: layout_lib.Layout, *, tiled: bool) -> int:
    """Return the bytes of config.guard.verify_every: a second state, and a neighbour's batch."""
    size = _on_device(abstract.state, tiled=tiled)
    if layout.mesh.size > 1:
        size += _on_device(abstract.batch, tiled=tiled)
    return size


def least(assembly: Assembly, *, tiled: bool) -> int:
    """Return the bytes that a step needs at least: those held, and gradients of the parameters.

    Gradients whose norms are known without them (`Task.measured`) need not exist at once.
    """
    parts = held(assembly.abstract, assembly.layout, tiled=tiled)
    is_whole = assembly.config.train.accumulate == 1 and assembly.layout.mesh.shape["data"] == 1
    measured = assembly.task.measured if is_whole else ()
    params = assembly.abstract.state.variables.params
    by_path = dict(zip(specs.paths(params), jax.tree.leaves(params), strict=True))
    alone = _on_device([by_path[path] for path in measured], tiled=tiled)
    return sum(parts.values()) + parts["parameters"] - alone


def host_memory() -> float:
    """Return the bytes available to a process by Linux's estimate, else (macOS) all memory."""
    installed = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return machine.meminfo().get("MemAvailable", installed)
