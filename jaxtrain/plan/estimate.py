"""The order in which a search compiles its candidates: a rough time of a step, before it exists.

It is arithmetic on the table of parameters, in the time of one assembly and without a trace:

    products   the FLOP of the model, by the devices that share each matrix and its rows, a third
               more if layers are computed again
    bytes      the state is read and written once. Matrices are read for each microbatch, and their
               inputs and outputs three times
    exchanges  fsdp gathers the matrices for each microbatch, and adds up their gradients. data adds
               up gradients once a step, those of a layer together. model adds up one side of each
               matrix that it splits. Over a whole torus of TPUs gathers are sums
               (`gathers_by_sums`)

Only its order counts. The compilers' programs decide between the candidates that it puts first.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import NamedTuple

import jax
import numpy as np

from jaxtrain import specs
from jaxtrain.assembly import Assembly
from jaxtrain.parallel import chips
from jaxtrain.parallel.layout import DATA
from jaxtrain.plan import exposure, forecast, hlo, traffic
from jaxtrain.plan.memory import held, offloaded
from jaxtrain.plan.target import Target
from jaxtrain.types import Spec

PASSES = 3  # of a matrix's products: forward, and the gradients of both operands
RECOMPUTED = 4 / 3  # of the products, if layers are computed again
HOST_LINK = 25e9  # [bytes/s] between a device and its host's memory
# Of a CPU's device, for which only the ratios matter: about two cores of a server.
CPU = traffic.Rates(bandwidth=10e9, flops=100e9)
CPU_LINKS = 5e9  # [bytes/s] between devices of CPUs, which copy through memory
OTHER = "l40s"  # a card with PCIe alone, for one that is in no table
NOT_MULTIPLIED = {"item"}  # axes of tables whose rows are looked up


class Machine(NamedTuple):
    """The rates of a target."""

    rates: traffic.Rates
    links: exposure.Links


def machine_of(target: Target, mesh: Mapping[str, int]) -> Machine:
    """Return the rates of a target with a mesh (axis -> size)."""
    if target.platform == "cpu":
        return Machine(CPU, exposure.Links(CPU_LINKS, CPU_LINKS, target.count))
    known = target if target.chip else replace(target, chip=chips.by_name(OTHER))
    return Machine(forecast.rates_of(known.known_chip), exposure.links_of(known, mesh))


class _Matrix(NamedTuple):
    """A parameter that rows are multiplied with, as a device sees it while it multiplies."""

    share: float  # of its numbers: 1 / the size of the model axis if that splits it
    size: int  # numbers, of all layers
    width: float  # numbers of an input and an output of it, of all layers
    whole_width: int  # of the side that model leaves whole, of all layers
    layers: int  # that have such a matrix


def seconds(assembly: Assembly, target: Target, *, accumulate: int, remat: str) -> float:
    """Return a rough time of a step with so many microbatches and that recomputation."""
    mesh = assembly.layout.mesh.shape
    machine = machine_of(target, mesh)
    matrices = list(_matrices(assembly))
    n_numbers = sum(matrix.size for matrix in matrices) or 1
    # how many rows of activations a matrix is multiplied with, in a step of one device
    n_rows = assembly.task.flops / (2 * PASSES * n_numbers) / row_shards(assembly)
    again = RECOMPUTED if remat != "none" else 1.0
    itemsize = np.dtype(getattr(assembly.config.model, "dtype", "float32")).itemsize

    local = sum(matrix.share * matrix.size for matrix in matrices)
    computing = again * 2 * PASSES * n_rows * local / machine.rates.flops
    read = accumulate * local + n_rows * sum(matrix.width for matrix in matrices)
    moving = again * PASSES * itemsize * read / machine.rates.bandwidth
    on_host = 2 * offloaded(assembly.abstract)
    state = sum(held(assembly.abstract, assembly.layout, tiled=target.tiled).values())
    update = 2 * state + on_host

    times: float = accumulate * sum(matrix.layers for matrix in matrices)
    gathered = accumulate * local * ((PASSES * again - 1) * itemsize + 4)
    kind = "all-reduce" if gathers_by_sums(target, mesh["fsdp"]) else "all-gather"
    exchanging = _on_links("fsdp", kind, gathered, PASSES * again * times, assembly, machine)
    depth = max((matrix.layers for matrix in matrices), default=1)
    summed = 4 * local / mesh["fsdp"]
    exchanging += _on_links(DATA, "all-reduce", summed, depth, assembly, machine)
    split = [matrix for matrix in matrices if matrix.share < 1]
    rows = again * n_rows * sum(matrix.whole_width for matrix in split) * itemsize
    # of two matrices one after the other, one needs a sum in each direction
    times = accumulate * again * sum(matrix.layers for matrix in split)
    exchanging += _on_links("model", "all-reduce", rows, times, assembly, machine)
    return (
        max(computing, moving) + update / machine.rates.bandwidth + on_host / HOST_LINK + exchanging
    )


def _on_links(
    axis: str, kind: str, n_bytes: float, times: float, assembly: Assembly, machine: Machine
) -> float:
    """Return the seconds of ``times`` exchanges over a mesh axis, with so many bytes in all."""
    mesh = assembly.layout.mesh.shape
    if mesh[axis] == 1:
        return 0.0
    names = list(mesh)
    stride = math.prod(mesh[name] for name in names[names.index(axis) + 1 :])
    group = [stride * i for i in range(mesh[axis])]
    exchange = hlo.Collective(kind, (), int(n_bytes), [group], 1, False)
    return machine.links.seconds(exchange) + (times - 1) * machine.links.latency(exchange)


def gathers_by_sums(target: Target, fsdp: int) -> bool:
    """Tell whether a gather over so many devices is one over all chips of a torus of TPUs.

    libtpu (0.0.42) has no such gather: each device writes its part into zeros, and all of them add
    these up, which sends twice the bytes. It scatters sums of gradients likewise.
    """
    return target.is_torus and fsdp == target.count // target.slices


def row_shards(assembly: Assembly) -> int:
    """Count the devices that share the rows of a batch, and their places."""
    layout = assembly.layout
    names = {*layout.names("batch"), *layout.names("seq")}
    return math.prod(layout.mesh.shape[name] for name in names)


def _matrices(assembly: Assembly) -> Iterator[_Matrix]:
    variables = assembly.abstract.state.variables
    for part in ("params", "frozen"):
        table = jax.tree.leaves(getattr(assembly.task.specs, part), is_leaf=specs.is_spec)
        arrays = jax.tree.leaves(getattr(variables, part))
        for spec, array in zip(table, arrays, strict=True):
            if NOT_MULTIPLIED.isdisjoint(spec.axes):
                matrix = _matrix(spec, array.sharding.spec, assembly.layout.mesh.shape["model"])
                if matrix:
                    yield matrix


def _matrix(spec: Spec, placement: jax.sharding.PartitionSpec, model: int) -> _Matrix | None:
    """Return a parameter of two dimensions or more, besides that of layers, else None."""
    placed = (*placement, *[None] * (len(spec.shape) - len(placement)))
    n_layers = 1
    sides: list[tuple[int, bool]] = []  # size, and whether model splits it
    for axis, size, names in zip(spec.axes, spec.shape, placed, strict=True):
        if axis == "layer":
            n_layers *= size
        else:
            sides.append((size, names == "model" or names is not None and "model" in names))
    if len(sides) < 2:
        return None
    # Heads and the values of one are a side together, before or after the other. Cut between the
    # two, a side would be their product with the other one.
    sizes = [size for size, _ in sides]
    cut = min(range(1, len(sides)), key=lambda i: math.prod(sizes[:i]) + math.prod(sizes[i:]))
    first, last = math.prod(sizes[:cut]), math.prod(sizes[cut:])
    is_first = any(is_split for _, is_split in sides[:cut])
    is_split = is_first or any(is_split for _, is_split in sides[cut:])
    share = 1 / model if is_split else 1.0
    width = first * (share if is_first else 1.0) + last * (1.0 if is_first else share)
    whole = last if is_first else first
    return _Matrix(share, math.prod(spec.shape), n_layers * width, n_layers * whole, n_layers)
