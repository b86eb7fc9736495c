"""Where arrays live: the mesh of devices, and the rules from logical axes to mesh axes.

An axis rule (`config.AXIS_RULES`, config.mesh.axis_rules) names the mesh axes that a logical axis is split over, in order:
``"fsdp"``, ``"data,fsdp"``, ``""`` (stays whole). A trailing ``?`` allows a dimension that does not divide to stay whole;
without it that is an error, with the name of the parameter, never a silent replica.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jaxtrain.config import AXIS_RULES
from jaxtrain.types import Array, Axes

DATA = "data"  # the mesh axis of replicas, over which a step reduces its gradients once
MESH_AXES = (DATA, "fsdp", "model")
# Compute capability by what a device_kind contains (NVIDIA, "CUDA GPU Compute Capability"), where there is no device to ask.
CAPABILITIES = {"A100": "8.0", "A6000": "8.6", "L40S": "8.9", "H100": "9.0", "H200": "9.0", "B200": "10.0"}


class LayoutError(ValueError):
    """Shapes, rules and mesh that do not fit together."""


def mesh_sizes(sizes: Sequence[int], count: int, what: str) -> tuple[int, int, int]:
    """Devices along (data, fsdp, model) for ``count`` of them; one size may be -1. Raises LayoutError if they do not fit."""
    sizes = list(sizes)
    asked = dict(zip(MESH_AXES, sizes, strict=True))
    if -1 in sizes:
        known = -int(np.prod(sizes))
        if known < 1 or count % known:
            raise LayoutError(f"mesh {asked}: {known} does not divide the {count} devices")
        sizes[sizes.index(-1)] = count // known
    if int(np.prod(sizes)) != count:
        there = "is 1 device" if count == 1 else f"are {count} devices"
        raise LayoutError(f"mesh {asked} has {int(np.prod(sizes))} places, and there {there} ({what}); set one axis to -1")
    data, fsdp, model = sizes
    return data, fsdp, model


def make_mesh(data: int, fsdp: int, model: int, *, devices: Sequence[jax.Device] | None = None) -> jax.sharding.Mesh:
    """A (data, fsdp, model) mesh over all devices; one size may be -1. Raises LayoutError if the sizes do not fit.

    Within a slice (devices joined by their own links) neighbours in the mesh are neighbours in the machine. Between slices
    there is only the data centre's network, which gradients cross once per step: they are along "data", each a whole number
    of replicas.
    """
    devices = jax.devices() if devices is None else list(devices)
    sizes = mesh_sizes((data, fsdp, model), len(devices), devices[0].device_kind)
    slices: dict[int, list[jax.Device]] = {}
    for device in devices:
        slices.setdefault(getattr(device, "slice_index", 0), []).append(device)
    replicas, short = divmod(sizes[0], len(slices))
    if short:
        raise LayoutError(
            f"mesh {dict(zip(MESH_AXES, sizes, strict=True))}: the {len(slices)} slices do not divide data={sizes[0]}; fsdp "
            "and model must stay within a slice"
        )
    # Explicit, because the default type of an axis changed between JAX releases.
    parts = [
        jax.make_mesh((replicas, *sizes[1:]), MESH_AXES, axis_types=(AxisType.Auto,) * 3, devices=slices[i])
        for i in sorted(slices)
    ]
    if len(parts) == 1:
        return parts[0]
    together = np.concatenate([part.devices for part in parts])
    return jax.sharding.Mesh(together, MESH_AXES, axis_types=(AxisType.Auto,) * 3)


def abstract_mesh(data: int, fsdp: int, model: int, *, count: int, what: str) -> jax.sharding.AbstractMesh:
    """The same without devices, to plan for ``count`` of them that need not exist."""
    sizes = mesh_sizes((data, fsdp, model), count, what)
    return jax.sharding.AbstractMesh(sizes, MESH_AXES, axis_types=(AxisType.Auto,) * 3)


class Devices(NamedTuple):
    """What a program must know of the devices that it is for, which need not be here."""

    platform: str = "cpu"  # cpu, gpu or tpu
    capability: str = ""  # of an NVIDIA GPU, as "9.0"; "" = unknown


def devices_of(kind: str) -> Devices:
    """Those of a ``device_kind``, as JAX spells it; what is neither a TPU nor an NVIDIA GPU is a CPU."""
    if kind.startswith("TPU"):
        return Devices("tpu")
    if kind.startswith("NVIDIA"):
        return Devices("gpu", next((capability for name, capability in CAPABILITIES.items() if name in kind), ""))
    return Devices()


def devices_like(device: jax.Device) -> Devices:
    """Those of which there is one, here or in a topology."""
    if device.platform in ("cuda", "rocm", "gpu"):
        return Devices("gpu", str(getattr(device, "compute_capability", "")) or devices_of(device.device_kind).capability)
    return Devices(device.platform)


CPUS = Devices()


class Layout(NamedTuple):
    """A mesh with rules. ``axis_rules`` are complete: `make_layout` merges overrides into `AXIS_RULES`."""

    mesh: jax.sharding.Mesh | jax.sharding.AbstractMesh
    axis_rules: Mapping[str, str]
    devices: Devices = CPUS

    def spec(self, axes: Axes, shape: Sequence[int], *, path: str = "array") -> PartitionSpec:
        """The partition of an array of ``shape`` whose dimensions have the logical names ``axes``.

        Raises:
          LayoutError: an unknown name, a dimension that does not divide, a mesh axis used twice; with ``path``.
        """
        if len(axes) != len(shape):
            raise LayoutError(f"{path}: {len(axes)} axes {axes} for the {len(shape)} dimensions of {tuple(shape)}")
        parts: list[str | tuple[str, ...] | None] = []
        used: dict[str, str] = {}  # mesh axis -> the logical axis that has it
        for axis, size in zip(axes, shape, strict=True):
            if axis is None:
                parts.append(None)
                continue
            if axis not in self.axis_rules:
                raise LayoutError(
                    f"{path}: axis {axis!r} has no rule; expected one of: {sorted(self.axis_rules)}, or add a rule in "
                    "config.mesh.axis_rules"
                )
            rule = self.axis_rules[axis]
            names = tuple(name for name in rule.rstrip("?").split(",") if name and self.mesh.shape[name] > 1)
            places = int(np.prod([self.mesh.shape[name] for name in names]))
            if size % places:
                if not rule.endswith("?"):
                    remedy = f"let it stay whole with config.mesh.axis_rules = {{{axis!r}: '{rule}?'}}"
                    if axis == "batch":  # each device has rows of its own
                        remedy = f"make train.batch a multiple of {places}"
                    raise LayoutError(
                        f"{path}: dimension {axis!r} of size {size} does not divide over mesh axes {names} of size {places}; "
                        f"change the mesh, or {remedy}"
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

    @property
    def shard(self) -> "Sharder":
        return Sharder(self)

    def replicated(self) -> NamedSharding:
        return NamedSharding(self.mesh, PartitionSpec())

    def names(self, axis: str | None) -> tuple[str, ...]:
        """The mesh axes of more than one device that a logical axis is split over, if its size divides."""
        if axis is None:
            return ()
        return tuple(n for n in self.axis_rules[axis].rstrip("?").split(",") if n and self.mesh.shape[n] > 1)


class Sharder(NamedTuple):
    """What a workload sees of a layout, inside a jitted function. Axes that are manual there (see step.py) are left out."""

    layout: Layout

    def __call__(self, x: Array, *axes: str | None) -> Array:
        """Pins ``x`` to the layout."""
        return jax.lax.with_sharding_constraint(x, NamedSharding(self._mesh(), self.spec(x.shape, axes)))

    @property
    def devices(self) -> Devices:
        """What the program is for. Never ask the host: a plan is traced where the devices are not."""
        return self.layout.devices

    def spec(self, shape: Sequence[int], axes: Axes) -> PartitionSpec:
        """The partition of an array as it is seen here."""
        manual = self._manual()
        local = {name: self.layout.mesh.shape[name] for name in manual}
        whole = [s * int(np.prod([local.get(n, 1) for n in self.layout.names(a)])) for s, a in zip(shape, axes, strict=True)]
        return PartitionSpec(*(_without(part, manual) for part in self.layout.spec(axes, whole)))

    def names(self, axis: str | None, size: int) -> tuple[str, ...]:
        """The mesh axes that a dimension is split over, of those that are not manual."""
        (part,) = [*self.spec((size,), (axis,)), None][:1]
        return (part,) if isinstance(part, str) else part or ()

    def size(self, axis: str | None, size: int) -> int:
        """Into how many parts a dimension of that size is split, manual axes aside."""
        return int(np.prod([self.layout.mesh.shape[n] for n in self.names(axis, size)]))

    def local(self, f: Callable, args: Sequence[Any], axes: Sequence[Axes], out: Any) -> Any:
        """f(*args) on every device's own part of the arguments; without more than one device, f as it is.

        For what XLA cannot split by itself (gathers, kernels) or splits badly. Not differentiable: what one shard_map inside
        another keeps for its backward pass gets a wrong sharding (jax 0.10), so a caller defines the derivative
        (`jax.custom_vjp`) by calls of this, or says `differentiable` or `kernel`.

        Args:
          axes: logical axes of every argument.
          out: a tree with, for every result, its PartitionSpec (`spec` makes them).
        """
        return self._map(f, args, self._specs(args, axes), out)

    def differentiable(
        self,
        f: Callable,
        args: Sequence[Array],
        axes: Sequence[Axes],
        out: PartitionSpec,
        *,
        constants: Sequence[Array] = (),
        constant_axes: Sequence[Axes] = (),
    ) -> Any:
        """`local`, of f(*args, *constants), with a derivative by ``args``: the backward pass computes ``f`` again, in parts."""
        n, everything = len(args), (*axes, *constant_axes)

        def forward(*args: Array) -> Array:
            return self.local(f, args, everything, out)

        def backward(args: tuple, cotangent: Array) -> tuple:
            def pull(cotangent: Array, *args: Array) -> tuple:
                return jax.vjp(lambda *a: f(*a, *args[n:]), *args[:n])[1](cotangent)

            ins = self._specs(args, everything)
            grads = self._map(pull, (cotangent, *args), [out, *ins], tuple(ins[:n]))
            return (*grads, *(_no_derivative(x) for x in args[n:]))

        call = jax.custom_vjp(forward)
        call.defvjp(lambda *args: (forward(*args), args), backward)
        return call(*args, *constants)

    def kernel(
        self,
        f: Callable,
        args: Sequence[Array],
        axes: Sequence[Axes],
        out: PartitionSpec,
        *,
        constants: Sequence[Array] = (),
        constant_axes: Sequence[Axes] = (),
    ) -> Array:
        """f(*args, *constants) for kernels that XLA must not split: on each device's own part, every axis of the mesh manual.

        Where an axis were left to XLA, it would hand the call to the kernel's own partitioner, which knows no axes that are
        manual already (cuDNN's), or to none (Pallas). The derivative by ``args`` is f's own, and what f keeps for it is kept:
        the forward pass is not computed again. One that is an argument or the result is kept once.
        """
        n, everything = len(args), (*axes, *constant_axes)
        free = tuple(name for name in self.layout.mesh.axis_names if name not in self._manual())
        own = PartitionSpec(free)  # along a new first axis: each device's own, whatever its shape
        traced: dict[str, Any] = {}  # how f's derivative takes what it keeps; `backward` is traced after `forward`

        def local(*args: Array) -> tuple[Array, list[Array]]:
            y, pull = jax.vjp(lambda *a: f(*a, *args[n:]), *args[:n])
            leaves, traced["tree"] = jax.tree.flatten(pull)
            known = (*args, y)
            traced["known"] = [next((i for i, x in enumerate(known) if x is leaf), None) for leaf in leaves]
            return y, [leaf[None] for leaf, i in zip(leaves, traced["known"], strict=True) if i is None]

        def forward(*args: Array) -> tuple[Array, tuple]:
            y, kept = self._map(local, args, self._specs(args, everything), (out, own), every=True)
            known = (*args, y)
            shared = {i: known[i] for i in traced["known"] if i is not None}
            return y, (shared, kept)

        def pull(cotangent: Array, shared: dict[int, Array], kept: list[Array]) -> tuple:
            rest = iter(kept)
            leaves = [next(rest)[0] if i is None else shared[i] for i in traced["known"]]
            return jax.tree.unflatten(traced["tree"], leaves)(cotangent)

        def backward(kept: tuple, cotangent: Array) -> tuple:
            shared, kept = kept
            specs = [*self._specs((*args, *constants), everything), out]
            ins = [out, {i: specs[i] for i in shared}, [own] * len(kept)]
            grads = self._map(pull, (cotangent, shared, kept), ins, tuple(specs[:n]), every=True)
            return (*grads, *(_no_derivative(x) for x in constants))

        call = jax.custom_vjp(lambda *args: self._map(f, args, self._specs(args, everything), out, every=True))
        call.defvjp(forward, backward)
        return call(*args, *constants)

    def _specs(self, args: Sequence[Array], axes: Sequence[Axes]) -> list[PartitionSpec]:
        return [self.spec(x.shape, a) for x, a in zip(args, axes, strict=True)]

    def _map(self, f: Callable, args: Sequence[Any], ins: Sequence[Any], outs: Any, *, every: bool = False) -> Any:
        """With ``every``, axes of one device are manual too, and JAX does not track along which axes arrays differ."""
        sizes = {name: size for name, size in self.layout.mesh.shape.items() if name not in self._manual()}
        # Axes of one device have nothing to split, and XLA's partitioner stumbles over them (jax 0.10.2: a RET_CHECK).
        free = {name for name, size in sizes.items() if size > 1 or every}
        if self.layout.mesh.size == 1 or not any(size > 1 for size in sizes.values()) and not every:
            return f(*args)
        nested = tuple(sorted(self._manual())) if every else ()
        local = (lambda *xs: f(*jax.tree.map(_untracked, xs))) if nested else f
        mapped = jax.shard_map(
            local, mesh=self._mesh(), in_specs=tuple(ins), out_specs=outs, axis_names=free, check_vma=not every
        )
        # In a loop over layers, JAX computes what depends on no layer (masks) before the loop, and would cut `f` in two; what
        # goes from one part to the other is what it cannot place. Nothing is kept of what is under a checkpoint.
        outputs = jax.checkpoint(mapped, prevent_cse=False)(*args)
        return _varying(outputs, nested) if nested else outputs

    def _mesh(self) -> Any:
        return jax.sharding.get_abstract_mesh() if self._manual() else self.layout.mesh

    def _manual(self) -> set[str]:
        context = jax.sharding.get_abstract_mesh()
        return set() if context.empty else set(context.manual_axes)


def make_layout(
    mesh: jax.sharding.Mesh | jax.sharding.AbstractMesh, axis_rules: Mapping[str, str], *, devices: Devices = CPUS
) -> Layout:
    """A layout of `AXIS_RULES` with overrides.

    Args:
      devices: those that an abstract mesh stands for. A mesh of devices says it itself.

    Raises LayoutError for a rule that names no mesh axis.
    """
    merged = {**AXIS_RULES, **axis_rules}
    for axis, rule in merged.items():
        unknown = [name for name in rule.rstrip("?").split(",") if name and name not in MESH_AXES]
        if unknown:
            raise LayoutError(f"config.mesh.axis_rules[{axis!r}] = {rule!r} names {unknown}; the mesh axes are {MESH_AXES}")
    if not isinstance(mesh, jax.sharding.AbstractMesh):
        devices = devices_like(mesh.devices.flat[0])
    return Layout(mesh, merged, devices)


def _untracked(x: Array) -> Array:
    """Where JAX does not track along which axes arrays differ, arguments say it all the same. A reshape forgets it."""
    return jnp.squeeze(x[None], 0)


def _varying(tree: Any, names: tuple[str, ...]) -> Any:
    """Says that arrays differ along manual axes, which JAX forgets in part where it does not track it. Nothing is computed."""
    differs = jax.lax.pcast(jnp.ones((), bool), names, to="varying")
    return jax.tree.map(lambda x: jnp.where(differs, x, x), tree)


def _no_derivative(x: Array) -> np.ndarray:
    return np.zeros(x.shape, jax.dtypes.float0)


def _without(part: str | tuple[str, ...] | None, manual: set[str]) -> tuple[str, ...] | None:
    names = (part,) if isinstance(part, str) else part or ()
    return tuple(name for name in names if name not in manual) or None
