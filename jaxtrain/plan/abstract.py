"""A run put together on a mesh of devices that need not exist."""

import jax

from jaxtrain import config as config_lib
from jaxtrain.assembly import Assembly, assemble
from jaxtrain.parallel import layout as layout_lib
from jaxtrain.plan.target import Target


def abstractly(config: config_lib.Config, target: Target) -> Assembly:
    """The run on an abstract mesh. Raises as `assemble` does."""
    m = config.mesh
    mesh = layout_lib.abstract_mesh(m.data, m.fsdp, m.model, count=target.count, what=target.name)
    devices = layout_lib.devices_like(jax.devices()[0]) if target.here else layout_lib.devices_of(target.known.kind)
    return assemble(config, mesh, devices=devices)
