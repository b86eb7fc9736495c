"""The mesh of devices, and the rules from logical axes to mesh axes, by which arrays are laid out.

An axis rule (`config.AXIS_RULES`, config.mesh.axis_rules) names the mesh axes that a logical axis
is split over, in order: ``"fsdp"``, ``"data,fsdp"``, ``""`` (stays whole). A dimension that does
not divide is an error with the name of the parameter. With a trailing ``?`` it stays whole.
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jaxtrain.config import AXIS_RULES
from jaxtrain.parallel import chips, jax_options
from jaxtrain.types import Array, Axes
from loaders.io.checks import UserError

DATA = "data"  # the mesh axis of replicas, over which a step reduces its gradients once
MESH_AXES = (DATA, "fsdp", "model")
# Compute capability by a part of device_kind (NVIDIA, "CUDA GPU Compute Capability").
CAPABILITIES = {
    "A100": "8.0",
    "A6000": "8.6",
    "L40S": "8.9",
    "H100": "9.0",
    "H200": "9.0",
    "B200": "10.0",
    "B300": "10.3",
}


class LayoutError(UserError, ValueError):
    """Shapes, rules and mesh that do not fit together."""


def mesh_sizes(sizes: Sequence[int], count: int, what: str) -> tuple[int, int, int]:
    """Return (data, fsdp, model) of ``count`` devices; one may be -1. Raises LayoutError."""
    sizes = list(sizes)
    mesh = dict(zip(MESH_AXES, sizes, strict=True))
    existing = "is 1 device" if count == 1 else f"are {count} devices"
    if -1 in sizes:
        n_fixed = -int(np.prod(sizes))
        if n_fixed < 1 or count % n_fixed:
            remedy = _divided_cpu(what, n_fixed) or "change the mesh"
            raise LayoutError(
                f"mesh {mesh} needs a multiple of {n_fixed} devices, and there {existing} ({what});"
                f" {remedy}"
            )
        sizes[sizes.index(-1)] = count // n_fixed
    n_places = int(np.prod(sizes))
    if n_places != count:
        remedy = "set one axis to -1"
        if n_places > count and (division := _divided_cpu(what, n_places)):
            remedy += f", or {division}"
        raise LayoutError(
            f"mesh {mesh} has {n_places} places, and there {existing} ({what}); {remedy}"
        )
    data, fsdp, model = sizes
    return data, fsdp, model


def _divided_cpu(what: str, n_devices: int) -> str:
    """Return how a CPU becomes several devices, or "" for other devices."""
    if n_devices < 1 or not what.endswith("cpu"):
        return ""
    n_parts = -(-n_devices // jax.process_count())
    flag = f"XLA_FLAGS=--xla_force_host_platform_device_count={n_parts}"
    return f"divide the CPU into {n_parts} devices with {flag}"


def make_mesh(
    data: int, fsdp: int, model: int, *, devices: Sequence[jax.Device] | None = None
) -> jax.sharding.Mesh:
    """Make a (data, fsdp, model) mesh; one size may be -1. Raises LayoutError if they do not fit.

    Neighbours in the mesh are neighbours in a slice. Slices, which are the nodes of GPUs, are
    joined by the slower network (`require_slices`).
    """
    devices = jax_options.devices() if devices is None else list(devices)
    sizes = mesh_sizes((data, fsdp, model), len(devices), devices[0].device_kind)
    slices: dict[int, list[jax.Device]] = {}
    for device in devices:
        slices.setdefault(getattr(device, "slice_index", 0), []).append(device)
    require_slices(sizes, len(slices), devices_like(devices[0]).platform)
    # The types are explicit, since the default changed between JAX releases.
    types = (AxisType.Auto,) * 3
    if sizes[0] % len(slices):
        in_order = [device for i in sorted(slices) for device in slices[i]]
        places = np.array(in_order).reshape(sizes)
        return jax.sharding.Mesh(places, MESH_AXES, axis_types=types)
    slice_sizes = (sizes[0] // len(slices), *sizes[1:])
    meshes = [arranged(slice_sizes, slices[i]) for i in sorted(slices)]
    return jax.sharding.Mesh(np.concatenate(meshes), MESH_AXES, axis_types=types)


def arranged(sizes: tuple[int, int, int], devices: Sequence[Any]) -> np.ndarray[Any, Any]:
    """Return the devices of one slice as a mesh, neighbours of which are neighbours in the slice.

    As `jax.make_mesh` does, but for an axis that is no product of whole sides of a TPU slice, as
    fsdp=32 of 4 × 4 × 4 chips. JAX splits a side unasked on v5e alone.
    """
    splits = devices[0].device_kind == "TPU v5 lite"
    try:
        return mesh_utils.create_device_mesh(sizes, devices, allow_split_physical_axes=splits)
    except NotImplementedError:
        return mesh_utils.create_device_mesh(sizes, devices, allow_split_physical_axes=True)


def require_slices(sizes: tuple[int, int, int], n_slices: int, platform: str) -> None:
    """Raise LayoutError if a mesh needs more of the network between slices than there is.

    Gradients cross it once a step if each slice has whole replicas, "data". Nodes of GPUs may also
    share a replica, "fsdp", whose gathers then cross it in each layer. "model" must stay within a
    slice, as its sums of activations are never hidden.
    """
    data, fsdp, _ = sizes
    if data % n_slices == 0 or (platform == "gpu" and data * fsdp % n_slices == 0):
        return
    mesh = dict(zip(MESH_AXES, sizes, strict=True))
    if platform == "gpu":
        raise LayoutError(
            f"mesh {mesh}: the {n_slices} nodes do not divide data × fsdp = {data * fsdp}; model"
            " must stay within a node"
        )
    raise LayoutError(
        f"mesh {mesh}: the {n_slices} slices do not divide data={data}; fsdp and model must stay"
        " within a slice"
    )


def abstract_mesh(
    data: int, fsdp: int, model: int, *, count: int, what: str
) -> jax.sharding.AbstractMesh:
    """Make a mesh without devices, to plan for ``count`` of them."""
    sizes = mesh_sizes((data, fsdp, model), count, what)
    return jax.sharding.AbstractMesh(sizes, MESH_AXES, axis_types=(AxisType.Auto,) * 3)


class Devices(NamedTuple):
    """The kind of devices that a program is for, which need not be here."""

    platform: str = "cpu"  # cpu, gpu or tpu
    # of an NVIDIA GPU, as "9.0", or the version of a TPU, as "v5e"; "" = unknown
    capability: str = ""


def generation(capability: str) -> tuple[int, ...]:
    """Parse "9.0" to (9, 0), "gfx942" of another vendor to none; unknown: the oldest supported."""
    if not capability:
        return (8, 0)
    parts = capability.split(".")
    if not all(part.isdecimal() for part in parts):
        return (0, 0)
    return tuple(int(part) for part in parts)


def devices_of(kind: str) -> Devices:
    """Return the devices of a ``device_kind``. Other kinds than TPUs and NVIDIA GPUs are CPUs."""
    if kind.startswith("TPU"):
        chip = chips.find(kind)
        return Devices("tpu", chip.name if chip else "")
    if kind.startswith("NVIDIA"):
        for name, capability in CAPABILITIES.items():
            if name in kind:
                return Devices("gpu", capability)
        return Devices("gpu")
    return Devices()


def devices_like(device: jax.Device) -> Devices:
    """Return devices like one that is here or in a topology."""
    if device.platform in ("cuda", "rocm", "gpu"):
        capability = str(getattr(device, "compute_capability", ""))
        return Devices("gpu", capability or devices_of(device.device_kind).capability)
    return devices_of(device.device_kind) if device.platform == "tpu" else Devices(device.platform)


CPUS = Devices()


class Layout(NamedTuple):
    """A mesh with complete rules: `make_layout` merges overrides into `AXIS_RULES`."""

    mesh: jax.sharding.Mesh | jax.sharding.AbstractMesh
    axis_rules: Mapping[str, str]
    devices: Devices = CPUS

    def spec(self, axes: Axes, shape: Sequence[int], *, path: str = "array") -> PartitionSpec:
        """Return the partition of an array whose dimensions have the logical names ``axes``.

        Raises LayoutError, with ``path``, for an unknown name, a dimension that does not divide, or
        a mesh axis that is used twice.
        """
        if len(axes) != len(shape):
            _raise_for_dimensions(axes, shape, path)
        parts: list[tuple[str, ...]] = []
        for axis, size in zip(axes, shape, strict=True):
            parts.append(self._dividing_names(axis, size, path))
        names = list(itertools.chain(*parts))
        if len(set(names)) < len(names):
            _raise_for_shared_name(axes, parts, path)
        # one spelling for one layout, so that equal shardings compare equal
        while parts and not parts[-1]:
            parts.pop()
        return PartitionSpec(*parts)

    def _dividing_names(self, axis: str | None, size: int, path: str) -> tuple[str, ...]:
        """List the mesh axes that a dimension is split over. Raises LayoutError."""
        if axis is None:
            return ()
        if axis not in self.axis_rules:
            self._raise_without_rule(axis, path)
        names = self.names(axis)
        n_parts = math.prod(self.mesh.shape[name] for name in names)
        if size % n_parts == 0:
            return names
        if not self.axis_rules[axis].endswith("?"):
            self._raise_indivisible(axis, size, n_parts, path)
        return ()

    def _raise_without_rule(self, axis: str, path: str) -> None:
        raise LayoutError(
            f"{path}: axis {axis!r} has no rule; expected one of: {sorted(self.axis_rules)}, or add"
            " a rule in config.mesh.axis_rules"
        )

    def _raise_indivisible(self, axis: str, size: int, n_parts: int, path: str) -> None:
        rule = self.axis_rules[axis]
        if axis == "batch":  # each device has rows of its own
            remedy = f"make train.batch a multiple of {n_parts}"
        else:
            remedy = f"let it stay whole with config.mesh.axis_rules = {{{axis!r}: '{rule}?'}}"
        raise LayoutError(
            f"{path}: dimension {axis!r} of size {size} does not divide over mesh axes"
            f" {self.names(axis)} of size {n_parts}; change the mesh, or {remedy}"
        )

    def sharding(self, axes: Axes, shape: Sequence[int], *, path: str = "array") -> NamedSharding:
        return NamedSharding(self.mesh, self.spec(axes, shape, path=path))

    @property
    def shard(self) -> "Sharder":
        return Sharder(self)

    def replicated(self) -> NamedSharding:
        return NamedSharding(self.mesh, PartitionSpec())

    def names(self, axis: str | None) -> tuple[str, ...]:
        """List the mesh axes of several devices that a logical axis is split over if it divides."""
        if axis is None:
            return ()
        names = self.axis_rules[axis].rstrip("?").split(",")
        return tuple(name for name in names if name and self.mesh.shape[name] > 1)


def _raise_for_dimensions(axes: Axes, shape: Sequence[int], path: str) -> None:
    raise LayoutError(
        f"{path}: {len(axes)} axes {axes} for the {len(shape)} dimensions of {tuple(shape)}"
    )


def _raise_for_shared_name(axes: Axes, parts: Sequence[tuple[str, ...]], path: str) -> None:
    axis_of: dict[str, str | None] = {}  # mesh axis -> the logical axis that has it
    for axis, names in zip(axes, parts, strict=True):
        for name in names:
            if name in axis_of:
                raise LayoutError(
                    f"{path}: axes {axis_of[name]!r} and {axis!r} both want mesh axis {name!r}"
                )
            axis_of[name] = axis


class Sharder(NamedTuple):
    """The `jaxtrain.types.Shard` that a workload sees in a jitted function, without manual axes."""

    layout: Layout

    def __call__(self, x: Array, *axes: str | None) -> Array:
        """Constrain ``x`` to the layout."""
        mesh = jax.sharding.get_abstract_mesh() if manual_axes() else self.mesh
        x = jax.lax.with_sharding_constraint(x, NamedSharding(mesh, self.spec(x.shape, axes)))
        return x

    @property
    def mesh(self) -> jax.sharding.Mesh | jax.sharding.AbstractMesh:
        return self.layout.mesh

    @property
    def devices(self) -> Devices:
        """The devices that the program is for. A plan is traced where others are."""
        return self.layout.devices

    def spec(self, shape: Sequence[int], axes: Axes) -> PartitionSpec:
        """Return the partition of an array as it is seen here."""
        if manual := manual_axes():
            return self._spec_of_part(shape, axes, manual)
        return self.layout.spec(axes, shape)

    def _spec_of_part(self, shape: Sequence[int], axes: Axes, manual: set[str]) -> PartitionSpec:
        """Return the partition of an array that is the part along the manual axes already."""
        whole = [self._whole_size(n, axis, manual) for n, axis in zip(shape, axes, strict=True)]
        spec = self.layout.spec(axes, whole)
        return PartitionSpec(*(_without(part, manual) for part in spec))

    def _whole_size(self, size: int, axis: str | None, manual: set[str]) -> int:
        """Return the size of a dimension of which this is the part along the manual axes."""
        names = [name for name in self.layout.names(axis) if name in manual]
        n_parts: int = math.prod(self.mesh.shape[name] for name in names)
        return size * n_parts

    def names(self, axis: str | None, size: int) -> tuple[str, ...]:
        """List the mesh axes that a dimension is split over, without manual ones."""
        spec = self.spec((size,), (axis,))
        return _names(spec[0]) if len(spec) else ()

    def size(self, axis: str | None, size: int) -> int:
        """Count the parts that a dimension is split into, without manual axes."""
        return math.prod(self.mesh.shape[name] for name in self.names(axis, size))


def manual_axes() -> set[str]:
    """Return the mesh axes that are manual in the current trace."""
    context = jax.sharding.get_abstract_mesh()
    return set() if context.empty else set(context.manual_axes)


def make_layout(
    mesh: jax.sharding.Mesh | jax.sharding.AbstractMesh,
    axis_rules: Mapping[str, str],
    *,
    devices: Devices = CPUS,
) -> Layout:
    """Make a layout of `AXIS_RULES` with overrides. Raises LayoutError: an unknown mesh axis.

    ``devices``: their kind, for an abstract mesh. Another mesh has its own.
    """
    merged = {**AXIS_RULES, **axis_rules}
    for axis, rule in merged.items():
        unknown = [name for name in rule.rstrip("?").split(",") if name and name not in MESH_AXES]
        if unknown:
            raise LayoutError(
                f"config.mesh.axis_rules[{axis!r}] = {rule!r} names {unknown}; the mesh axes are"
                f" {MESH_AXES}"
            )
    if not isinstance(mesh, jax.sharding.AbstractMesh):
        devices = devices_like(mesh.devices.flat[0])
    return Layout(mesh, merged, devices)


def _names(part: str | tuple[str, ...] | None) -> tuple[str, ...]:
    """List the mesh axes of a dimension of a PartitionSpec."""
    return (part,) if isinstance(part, str) else part or ()


def _without(part: str | tuple[str, ...] | None, manual: set[str]) -> tuple[str, ...] | None:
    return tuple(name for name in _names(part) if name not in manual) or None
