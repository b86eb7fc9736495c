"""A run put together before any array exists, to train, plan or embed."""

import dataclasses
import functools
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
from jaxtrain.step import update as update_lib
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
    # (stage of the task, has_norms=…) -> its jitted training step, the same one each time: JAX
    # traces it once
    train_step: Callable[..., jax.stages.Wrapped] = dataclasses.field(repr=False, compare=False)

    def stages(self) -> dict[Hashable, int]:
        starts: dict[Hashable, int] = {}
        for step in range(self.config.train.steps):
            starts.setdefault(self.task.stage(step), step)
        return starts

    def has_norms(self, step: int) -> bool:
        """Whether the program of step number ``step``, from 1 on, computes norms of its update.

        All do, unless norms are expensive: then those steps alone whose metrics are recorded.
        """
        return not self._are_norms_expensive or bool(step_lib.is_recorded(self.config, step))

    @functools.cached_property
    def _are_norms_expensive(self) -> bool:
        state = self.abstract.state
        params = state.variables.params
        return update_lib.are_norms_expensive(self.layout, state.opt_state, params)

    def trace(self, stage: Hashable, *, has_norms: bool = True) -> jax.stages.Traced:
        """Trace the training step of one of the task's stages, once.

        Raises LayoutError: the loss reads a field of the loader that the task's axes do not have.
        """
        step = self.train_step(stage, has_norms=has_norms)
        stop = step_lib.abstract_stop(self.layout)
        try:
            traced: jax.stages.Traced = step.trace(self.abstract.state, self.abstract.batch, stop)
        except KeyError as error:
            self._raise_if_left_out(error)
            raise
        return traced

    def _raise_if_left_out(self, error: KeyError) -> None:
        """Raise LayoutError for a field of the loader that the task's axes do not have."""
        loader_fields = base.module(self.config.loader).element_spec(self.config.data)
        field = error.args[0] if error.args else None
        if field in loader_fields and field not in self.abstract.batch:
            raise layout_lib.LayoutError(
                f"the loss reads batch[{field!r}], which the axes of the task of"
                f" {self.config.workload} do not have; add {field!r} to Task.axes with the axes of"
                " its dimensions, ('batch', …)"
            ) from error

    def with_batch(self, batch: Mapping[str, jax.ShapeDtypeStruct]) -> "Assembly":
        if batch == self.abstract.batch:
            return self
        return dataclasses.replace(self, abstract=self.abstract._replace(batch=dict(batch)))

    def compiler_options(self) -> dict[str, Any]:
        """Return the options of its programs. Raises ConfigError: the compiler refuses some."""
        return dict(self._compiler_options)

    @functools.cached_property
    def _compiler_options(self) -> dict[str, Any]:
        mesh = self.layout.mesh
        device = mesh.devices.flat[0]
        nearest = mesh.local_devices[0] if mesh.local_devices else device
        return xla_options.options(
            self.config.compiler,
            device.device_kind,
            count=mesh.size,
            device=nearest,
            has_adapters=self.config.lora.rank > 0,
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
    task = make_task(config, layout.shard, config.train.batch)
    if config.lora.rank:
        task = lora.adapt(task, config.lora)
    tx = optim.make_optimizer(
        config.optim, task.specs.params, steps=config.train.steps, seed=config.seed
    )
    abstract = state_lib.make_abstract(
        task,
        tx,
        layout,
        _loader_fields(config) if fields is None else fields,
        batch=config.train.batch,
        ema=config.train.ema > 0,
        offload=config.optim.offload,
    )
    make_step = functools.partial(step_lib.make_train_step, config, layout, task, tx, abstract)
    return Assembly(config, layout, task, tx, abstract, functools.cache(make_step))


def _loader_fields(config: config_lib.Config) -> Mapping[str, Field]:
    """Return the arrays of a row of a batch. Raises LayoutError for one without shape or dtype."""
    fields: Mapping[str, Field] = base.module(config.loader).element_spec(config.data)
    for name, field in fields.items():
        if not (hasattr(field, "shape") and hasattr(field, "dtype")):
            raise layout_lib.LayoutError(
                f"config.loader is {config.loader!r}, whose fields have {field!r} as {name!r};"
                " expected loaders.base.Field(shape, dtype)"
            )
    return fields


def describe(assembly: Assembly) -> str:
    mesh = assembly.layout.mesh
    n_parameters = specs.count(assembly.task.specs.params)
    state_bytes = state_lib.bytes_per_device(assembly.abstract.state)
    return (
        f"{n_parameters:,} parameters, {state_bytes / 1e6:.1f} MB of state per device; mesh"
        f" {dict(mesh.shape)} on {mesh.size} × {mesh.devices.flat[0].device_kind}"
    )
