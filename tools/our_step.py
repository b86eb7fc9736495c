"""A training step of jaxtrain as benches take it: assembled and compiled as a run does."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from jaxtrain import config as config_lib
from jaxtrain.assembly import assemble
from jaxtrain.compile import xla_options
from jaxtrain.parallel import layout as layout_lib
from jaxtrain.step import state as state_lib
from jaxtrain.step import train_step as step_lib
from jaxtrain.types import PyTree, Task
from loaders.base import Field

Batch = Mapping[str, np.ndarray]


class Ours:
    """jaxtrain's step on one device, always of one batch, whose way to the device is included."""

    def __init__(
        self,
        make_task: Callable[..., Task],
        model: Any,
        o: config_lib.Optim,
        batch: Batch,
        *,
        ema: float = 0.0,
        stage: Any = None,
    ):
        train = config_lib.Train(steps=1000, batch=len(next(iter(batch.values()))), ema=ema)
        config = config_lib.Config(model=model, train=train, optim=o)
        fields = {name: Field(x.shape[1:], x.dtype) for name, x in batch.items()}
        mesh = layout_lib.make_mesh(1, 1, 1, devices=jax.devices()[:1])
        run = assemble(config, mesh, make_task=make_task, fields=fields)
        self.flops = run.task.flops
        self._step = xla_options.compile(
            run.trace(stage).lower(), run.compiler_options(), config.compiler
        )
        self._stop = step_lib.put_stop(run.layout, False)
        self._batch, self._place = batch, run.abstract.batch
        self._state = state_lib.init_state(run.task, run.tx, run.abstract, jax.random.key(0))

    def __call__(self) -> float:
        rows = {
            name: jax.device_put(self._batch[name], x.sharding) for name, x in self._place.items()
        }
        self._state, out = self._step(self._state, rows, self._stop)
        return float(out["loss"].total / out["loss"].weight)

    def params(self) -> PyTree:
        return jax.device_get(self._state.variables.params)

    def model_state(self) -> PyTree:
        return jax.device_get(self._state.variables.model_state)
