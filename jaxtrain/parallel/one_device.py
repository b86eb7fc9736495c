"""The `jaxtrain.types.Shard` of one device, whose parts are the arrays themselves."""

from typing import Any, NamedTuple

import jax
from jax.sharding import PartitionSpec

from jaxtrain.parallel import layout
from jaxtrain.types import Array, Axes


class OneDevice(NamedTuple):
    """The layout of one device. For several devices it is `jaxtrain.parallel.layout.Sharder`."""

    mesh: None = None

    def __call__(self, x: Array, *axes: str | None) -> Array:
        return x

    @property
    def devices(self) -> layout.Devices:
        return host()

    def spec(self, shape: tuple[int, ...], axes: Axes) -> PartitionSpec:
        return PartitionSpec()

    def names(self, axis: str | None, size: int) -> tuple[str, ...]:
        return ()

    def size(self, axis: str | None, size: int) -> int:
        return 1


shard = OneDevice()


def host() -> layout.Devices:
    """Return the kind of device of this process: `jax.default_device`, else its first device."""
    options: Any = jax.config  # jax adds its options as it is imported
    device: Any = options.jax_default_device
    if isinstance(device, str):
        device = jax.devices(device)[0]
    device = device or jax.devices()[0]
    return layout.devices_like(device)
