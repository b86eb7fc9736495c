"""A run put together before any array exists, to train, plan or embed."""

import dataclasses
import logging
from collections.abc import Callable, Hashable, Mapping
from typing import Any

import jax

from jaxtrain import config as config_lib
from jaxtrain import optim, specs, workload
from jaxtrain.compile import xla_options
from jaxtrain.nn import lora
from jaxtrain.parallel import layout as layout_lib
from jaxtrain.step import state as state_lib
from jaxtrain.step import train_step as step_lib
from jaxtrain.types import Task
from loaders import base
from loaders.base import Field

log = logging.getLogger("jaxtrain")


@dataclasses.dataclass(frozen=True)
class Assembly:
    """Everything that a config decides, for one mesh, before anything is allocated."""

    config: config_lib.Config
    layout: layout_lib.Layout
    task: Task
    tx: optim.Optimizer
    abstract: state_lib.Abstract
    _traces: dict[Hashable, jax.stages.Traced] = dataclasses.field(
        default_factory=dict, repr=False, compare=False
    )

    def stages(self) -> dict[Hashable, int]:
        starts: dict[Hashable, int] = {}
        for step in range(self.config.train.steps):
            starts.setdefault(self.task.stage(step), step)
        return starts

    def trace(self, stage: Hashable) -> jax.stages.Traced:
        """Trace the training step of one of the task's stages, once.

        Raises LayoutError: the loss reads a field of the loader that the task's axes do not have.
        """
        if stage not in self._traces:
            c = self.config
            step = step_lib.make_train_step(
                self.task,
                self.tx,
                self.layout,
                self.abstract,
                accumulate=c.train.accumulate,
                ema=c.train.ema,
                guard=c.guard,
                seed=c.seed,
                stage=stage,
                records=lambda step: (step % c.metrics.every == 0) | (step == c.train.steps),
            )
            try:
                self._traces[stage] = step.trace(
                    self.abstract.state, self.abstract.batch, step_lib.abstract_stop(self.layout)
                )
            except KeyError as error:
                name = error.args[0] if error.args else None
                if name in self.abstract.batch or name not in base.module(c.loader).element_spec(
                    c.data
                ):
                    raise
                raise layout_lib.LayoutError(
                    f"the loss reads batch[{name!r}], which the axes of the task of {c.workload} do"
                    f" not have; add {name!r} to Task.axes with the axes of its dimensions,"
                    " ('batch', …)"
                ) from error
        return self._traces[stage]

    def with_batch(self, batch: Mapping[str, jax.ShapeDtypeStruct]) -> "Assembly":
        if batch == self.abstract.batch:
            return self
        return dataclasses.replace(
            self, abstract=self.abstract._replace(batch=dict(batch)), _traces={}
        )

    def compiler_options(self) -> dict[str, Any]:
        """Return the options of its programs. Raises ConfigError: the compiler refuses some."""
        mesh = self.layout.mesh
        device = mesh.devices.flat[0]
        nearest = mesh.local_devices[0] if mesh.local_devices else device
        return xla_options.options(
            self.config.compiler, device.device_kind, count=mesh.size, device=nearest
        )


def assemble(
    config: config_lib.Config,
    mesh: jax.sharding.Mesh | jax.sharding.AbstractMesh | None = None,
    *,
    devices: layout_lib.Devices = layout_lib.CPUS,
    make_task: Callable[..., Task] | None = None,
    fields: Mapping[str, Field] | None = None,
) -> Assembly:
    """Put a config together: layout, task, optimizer, abstract state.

    Args:
      mesh: None = all devices, as config.mesh says.
      devices: the devices that an abstract mesh stands for. The step calls their kernels.
      make_task: None = that of config.workload.
      fields: the arrays of a row of a batch; None = those of config.loader.

    Raises LayoutError: shapes, axis rules and mesh do not fit together; OptimError, LoraError:
    parameters that no group, or no adapter, covers as configured.
    """
    if mesh is None:
        mesh = layout_lib.make_mesh(config.mesh.data, config.mesh.fsdp, config.mesh.model)
    layout = layout_lib.make_layout(mesh, config.mesh.axis_rules, devices=devices)
    make_task = make_task or workload.of(config.workload).make_task
    task = lora.adapt(make_task(config, layout.shard, config.train.batch), config.lora)
    tx = optim.make_optimizer(config.optim, task.specs.params, steps=config.train.steps)
    if fields is None:
        fields = base.module(config.loader).element_spec(config.data)
        for name, field in fields.items():
            if not (hasattr(field, "shape") and hasattr(field, "dtype")):
                text = (
                    f"config.loader is {config.loader!r}, whose fields have {field!r} as {name!r}"
                )
                raise layout_lib.LayoutError(f"{text}; expected loaders.base.Field(shape, dtype)")
    abstract = state_lib.make_abstract(
        task,
        tx,
        layout,
        fields,
        batch=config.train.batch,
        ema=config.train.ema > 0,
        offload=config.optim.offload,
    )
    return Assembly(config, layout, task, tx, abstract)


def describe(assembly: Assembly) -> str:
    mesh, size = assembly.layout.mesh, state_lib.bytes_per_device(assembly.abstract.state)
    return (
        f"{specs.count(assembly.task.specs.params):,} parameters, {size / 1e6:.1f} MB of state per"
        f" device; mesh {dict(mesh.shape)} on {mesh.size} × {mesh.devices.flat[0].device_kind}"
    )
