"""Where arrays live: the mesh of devices, and the rules from logical axes to mesh axes.

A rule names the mesh axes that a logical axis is split over, in order: ``"fsdp"``, ``"data,fsdp"``, ``""`` (stays whole).
A trailing ``?`` allows a dimension that does not divide to stay whole; without it that is an error, with the name of the
parameter, never a silent replica.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jaxtrain.types import Array, Axes

MESH_AXES = ("data", "fsdp", "model")

RULES: dict[str, str] = {
    "batch": "data,fsdp",
    "embed": "fsdp",
    "heads": "model",
    "mlp": "model",
    "vocab": "model?",  # a number of classes is what the data say: often prime
    "layer": "",
    "seq": "",
    "head_dim": "",
    "patch": "",
    "puzzle": "fsdp?",  # rows of an embedding table: as many as there are puzzles
    "rows": "data",  # of a batch, where the devices of a group work on all of its rows together
    "pixel": "fsdp",  # inputs of a matrix that reads a whole film window
    "voxel": "model?",  # as many as a brain mask has
}


class LayoutError(ValueError):
    """Shapes, rules and mesh that do not fit together."""


def make_mesh(data: int, fsdp: int, model: int, *, devices: Sequence[jax.Device] | None = None) -> jax.sharding.Mesh:
    """A (data, fsdp, model) mesh over all devices; one size may be -1. Raises LayoutError if the sizes do not fit."""
    devices = jax.devices() if devices is None else list(devices)
    sizes = [data, fsdp, model]
    if -1 in sizes:
        known = -int(np.prod(sizes))
        if known < 1 or len(devices) % known:
            raise LayoutError(
                f"mesh {dict(zip(MESH_AXES, sizes, strict=True))}: {known} does not divide the {len(devices)} devices"
            )
        sizes[sizes.index(-1)] = len(devices) // known
    if int(np.prod(sizes)) != len(devices):
        raise LayoutError(
            f"mesh {dict(zip(MESH_AXES, sizes, strict=True))} has {int(np.prod(sizes))} places, and there are "
            f"{len(devices)} devices ({devices[0].device_kind}); set one axis to -1"
        )
    # Explicit, because the default type of an axis changed between JAX releases.
    return jax.make_mesh(sizes, MESH_AXES, axis_types=(AxisType.Auto,) * 3, devices=devices)


class Layout(NamedTuple):
    """A mesh with rules. ``rules`` are complete: `make_layout` merges overrides into `RULES`."""

    mesh: jax.sharding.Mesh
    rules: Mapping[str, str]

    def spec(self, axes: Axes, shape: Sequence[int], *, path: str = "array") -> PartitionSpec:
        """The partition of an array of ``shape`` whose dimensions have the logical names ``axes``.

        Raises:
          LayoutError: an unknown name, a dimension that does not divide, a mesh axis used twice; with ``path``.
        """
        if len(axes) != len(shape):
            raise LayoutError(f"{path}: {len(axes)} axes {axes} for the {len(shape)} dimensions of {tuple(shape)}")
        parts, used = [], {}
        for axis, size in zip(axes, shape, strict=True):
            if axis is None:
                parts.append(None)
                continue
            if axis not in self.rules:
                raise LayoutError(
                    f"{path}: axis {axis!r} has no rule; there are {sorted(self.rules)}, and config.mesh.rules adds more"
                )
            rule = self.rules[axis]
            names = tuple(name for name in rule.rstrip("?").split(",") if name and self.mesh.shape[name] > 1)
            places = int(np.prod([self.mesh.shape[name] for name in names]))
            if size % places:
                if not rule.endswith("?"):
                    raise LayoutError(
                        f"{path}: dimension {axis!r} of size {size} does not divide over mesh axes {names} of size {places}; "
                        f"change the mesh, or let it stay whole with config.mesh.rules = {{{axis!r}: '{rule}?'}}"
                    )
                names = ()
            for name in names:
                if name in used:
                    raise LayoutError(f"{path}: axes {used[name]!r} and {axis!r} both want mesh axis {name!r}")
                used[name] = axis
            parts.append(names if len(names) > 1 else names[0] if names else None)
        while parts and parts[-1] is None:  # one spelling for one layout, so that equal shardings compare equal
            parts.pop()
        return PartitionSpec(*parts)

    def sharding(self, axes: Axes, shape: Sequence[int], *, path: str = "array") -> NamedSharding:
        return NamedSharding(self.mesh, self.spec(axes, shape, path=path))

    def shard(self, x: Array, *axes: str | None) -> Array:
        """Pins ``x`` to the layout inside a jitted function; axes that are manual there (see step.py) are left out."""
        context = jax.sharding.get_abstract_mesh()
        manual = set() if context.empty else set(context.manual_axes)
        local = {name: size for name, size in self.mesh.shape.items() if name in manual}
        shape = [s * int(np.prod([local.get(n, 1) for n in self._names(a)])) for s, a in zip(x.shape, axes, strict=True)]
        parts = [_without(part, manual) for part in self.spec(axes, shape)]
        mesh = context if manual else self.mesh
        return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, PartitionSpec(*parts)))

    def replicated(self) -> NamedSharding:
        return NamedSharding(self.mesh, PartitionSpec())

    def _names(self, axis: str | None) -> tuple[str, ...]:
        return tuple(n for n in self.rules.get(axis, "").rstrip("?").split(",") if n)


def make_layout(mesh: jax.sharding.Mesh, rules: Mapping[str, str]) -> Layout:
    """`RULES` with overrides. Raises LayoutError for a rule that names no mesh axis."""
    merged = {**RULES, **rules}
    for axis, rule in merged.items():
        unknown = [name for name in rule.rstrip("?").split(",") if name and name not in MESH_AXES]
        if unknown:
            raise LayoutError(f"config.mesh.rules[{axis!r}] = {rule!r} names {unknown}; the mesh axes are {MESH_AXES}")
    return Layout(mesh, merged)


def _without(part: str | tuple[str, ...] | None, manual: set[str]) -> tuple[str, ...] | None:
    names = (part,) if isinstance(part, str) else part or ()
    return tuple(name for name in names if name not in manual) or None
