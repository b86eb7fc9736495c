"""One wrong bit in the new parameters of a step on one device."""

import itertools
from typing import Any

import jax
import numpy as np

from jaxtrain.run.step_compiler import StepCompiler
from jaxtrain.run.verify import Verifier


def programs(calls: Any, monkeypatch: Any = None) -> None:
    """Makes one bit wrong in the program of call n, counted from 0 in this process.

    ``calls``: maps a call to the place of the device among all devices.
    """
    change = setattr if monkeypatch is None else monkeypatch.setattr
    at, second, count = StepCompiler.at, Verifier._program, itertools.count()

    def wrapped(program):
        def step(*arguments):
            state, out = program(*arguments)
            if (call := next(count)) in calls:
                leaves, tree = jax.tree.flatten(state.variables.params)
                params = jax.tree.unflatten(
                    tree, [_flipped(leaves[0], jax.devices()[calls[call]]), *leaves[1:]]
                )
                state = state.replace(variables=state.variables._replace(params=params))
            return state, out

        return step

    change(StepCompiler, "at", lambda self, item: wrapped(at(self, item)))
    change(Verifier, "_program", lambda self, *which: wrapped(second(self, *which)))


def _flipped(x, device):
    parts = {shard.device: np.array(shard.data) for shard in x.addressable_shards}
    if device in parts:  # otherwise another process has it
        parts[device].reshape(-1).view(np.uint32)[:1] ^= np.uint32(1 << 7)
    placed = [jax.device_put(part, d) for d, part in parts.items()]
    return jax.make_array_from_single_device_arrays(x.shape, x.sharding, placed)
