"""A step's program as the peak-memory walk sees it: arrays on one device, the instructions that make them, and what moves.

Every array carries the mesh axes that split its dimensions, so that its size is that on one device.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Self, cast

import jax
import jax.extend as jex
import numpy as np

Split = tuple[tuple[str, ...], ...]  # for each dimension, the mesh axes that it is split over
Moved = dict[tuple[str, tuple[str, ...]], tuple[int, float]]  # (kind, axes) -> (executions, bytes sent), as `hlo.summary`

# What may lie between a product and the constraint that pins where its result lives.
PASSES = {"transpose", "reshape", "convert_element_type", "mul", "div", "squeeze", "expand_dims", "add_any", "pad", "stack"}

SAME = {"reshape", "squeeze", "expand_dims", "broadcast_in_dim"}  # of leading dimensions: the same array


class Compiler(NamedTuple):
    """How a compiler lays out and fuses."""

    # (shape on a device, dtype, whether the last two dimensions are the tiles') -> bytes in memory
    bytes_of: Callable[[Sequence[int], np.dtype, bool], int]
    into_products: bool  # element-wise operands are computed inside a matrix product
    recomputes: bool  # cheap arithmetic is computed again for each of its readers
    # And so are sigmoids and divisions by a scalar, as on GPUs and TPUs from v5e on was seen (on a v4 sigmoids of checkpoints).
    recomputes_more: bool
    halves: bool  # it multiplies 16-bit numbers; else it widens them to float32 first
    # The 16-bit result of a product over the last dimension of its first operand is kept in float32, as YNNPACK's are: rounded
    # and widened again in one instruction with it.
    widens_products: bool
    widens_stacks: bool  # the rows that a loop writes in bfloat16 are kept in float32
    merges: bool  # equal computations are done once
    checkpoints: bool  # what a checkpoint wants done again is done again, outside of loops too
    breadth_first: bool  # a loop's body begins with all that is ready: the rows that it reads, where they become arrays
    copies: bool  # a donated argument that is still read once the result is in its place is copied before the first instruction
    # As seen on GPUs: what a product gathers is an array (gathered along its slowest dimension: else it is copied to be so), a
    # sum over devices does not overwrite what is summed, and a loop's gradients are split as they are pinned to be after it.
    apart: bool
    # As seen on v5e: a product that gathers an operand, or whose result is summed where it is split, goes round a ring
    # of devices piece by piece, and both of its operands are arrays. Between two devices none was seen.
    rings: bool
    # As seen on TPUs: rows of a loop that it does nothing with but round them are rounded before it, all at once.
    rounds_rows: bool


class Value:
    """An array of the program, on one device."""

    __slots__ = (
        "shape", "split", "dtype", "node", "readers", "weak", "size", "constant", "on_host", "inline", "outer", "in_order",
    )  # fmt: skip

    def __init__(self, shape: Sequence[int], dtype: Any, split: Split, node: "Node | None", *, weak: bool = False):
        self.shape, self.dtype, self.split, self.node, self.weak = tuple(shape), dtype, split, node, weak
        self.constant = self.on_host = self.inline = False
        self.in_order = False  # its dimensions lie in memory in their order, as kernels take and give arrays
        self.outer: Value | None = None  # of a loop's result, the same array outside
        self.readers: list[Node] = []
        self.size = 0


class Node:
    """An instruction. ``kind``: cheap, dear, reduce, product, alias or other (which stands for itself)."""

    __slots__ = (
        "kind", "name", "inputs", "outputs", "inner", "place", "kept", "holds", "free", "costly", "again", "apart", "waits",
        "ring", "summed", "state",
    )  # fmt: skip

    def __init__(self, kind: str, name: str, inputs: list[Value]):
        self.kind, self.name, self.inputs, self.inner = kind, name, inputs, 0
        self.outputs: list[Value] = []
        self.place, self.kept, self.holds = 0.0, False, False
        self.free: bool = all(v.constant if v.node is None else v.node.free for v in inputs)  # computed from no array at all
        self.again = False  # a checkpoint's, computed again
        self.apart = False  # its results do not lie where its operands lay
        self.ring = False  # a product that devices exchange pieces for as they compute it
        self.summed: set[str] = set()  # the mesh axes along which that is so unless its result is summed whole
        self.waits: list[Value] = []  # what has to be there first, besides its operands: of a barrier
        self.state: list[tuple[Value, Value]] | None = None  # of a loop: what changes in place, before and after it
        self.costly: bool = kind == "dear" or any(v.node and v.node.costly for v in inputs) and kind in ("cheap", "alias")


class Graph:
    """The arrays and instructions of one computation: the step itself, or a loop's body.

    Attributes:
      mesh: axis -> size, of the axes that arrays are split over here (in a manual region, without the manual ones).
      sizes: axis -> size of all axes.
      times: how often a step executes it.
      nodes: instructions in program order.
      done: results by what computes them, where equal computations are merged.
      copied: ids of a loop body's inputs that have to be copied in another order of dimensions before they are gathered.
    """

    def __init__(self, mesh: Mapping[str, int], compiler: Compiler, *, times: int = 1):
        self.mesh, self.compiler, self.times = dict(mesh), compiler, times
        self.sizes: Mapping[str, int] = self.mesh
        self.moves: list[tuple[str, Value, set[str], int]] = []  # (kind, array, mesh axes, executions)
        self.nodes: list[Node] = []
        self.again = False  # inside of what a checkpoint computes again
        self.literals: dict[tuple[str, str], Value] = {}
        self.done: dict[tuple, list[Value]] = {}
        self.copied: set[int] = set()
        self.is_body = False
        self.slices: dict[tuple[int, int], Value] = {}  # of what an unrolled loop reads, and the loop backward again

    def body(self, *, times: int = 1) -> Self:
        """An empty graph for a computation inside this one, with its own lifetimes."""
        inner = type(self)(self.mesh, self.compiler, times=self.times * times)
        inner.is_body = True
        return inner

    def manual(self, axes: set[str] | frozenset[str]) -> Self:
        """A region where ``axes`` are manual: its instructions are this graph's own."""
        inner = type(self)({k: n for k, n in self.mesh.items() if k not in axes}, self.compiler, times=self.times)
        inner.nodes, inner.moves, inner.sizes = self.nodes, self.moves, self.sizes
        inner.copied, inner.is_body = self.copied, self.is_body
        return inner

    def literal(self, v: jex.core.Literal) -> Value:
        key = (repr(v.val), str(v.aval))
        if key not in self.literals:
            value = Value(np.shape(v.val), cast(jax.core.ShapedArray, v.aval).dtype, ((),) * np.ndim(v.val), None, weak=True)
            value.constant = True
            self.literals[key] = value
        return self.literals[key]

    def append(self, kind: str, name: str, inputs: list[Value], outputs: Sequence[tuple], *, weak: bool = False) -> Node:
        """Adds an instruction with ``outputs`` of (shape, dtype, split)."""
        node = Node(kind, name, inputs)
        node.outputs = [Value(shape, dtype, split, node, weak=weak) for shape, dtype, split in outputs]
        for value in inputs:
            value.readers.append(node)
        self.nodes.append(node)
        return node

    def renamed(
        self, name: str, value: Value, *, split: Split, shape: Sequence[int] | None = None, weak: bool = False
    ) -> Value:
        """The same array under another name."""
        shape = value.shape if shape is None else shape
        return self.append("alias", name, [value], [(shape, value.dtype, split)], weak=weak).outputs[0]

    def add(self, kind: str, eqn: Any, inputs: list[Value], splits: Sequence[Split], *, weak: bool = False) -> list[Value]:
        """Adds the instruction of a jaxpr's equation."""
        outputs = [(v.aval.shape, getattr(v.aval, "dtype", np.int32), s) for v, s in zip(eqn.outvars, splits, strict=True)]
        node = self.append(kind, title(eqn), inputs, outputs, weak=weak)
        node.again = self.again
        return node.outputs

    def written(self, name: str, value: Value, dtype: Any) -> Value:
        """A value in another form, once for all its readers."""
        if (name, id(value)) not in self.done:
            node = self.append("cheap", name, [value], [(value.shape, dtype, value.split)], weak=value.weak)
            self.done[name, id(value)] = node.outputs
        return self.done[name, id(value)][0]

    def gathered(self, value: Value, axes: set[str]) -> Value:
        """The array that devices along ``axes`` have together, once for all its readers.

        A collective joins parts along the slowest dimension. Of others the compiler copies the part in another order first,
        and what a loop gathers slice by slice it copies before the loop, all slices at once.
        """
        key = ("gathered", id(value), *sorted(axes))
        if key not in self.done:
            at = 0 if not self.compiler.apart else min(i for i, dim in enumerate(value.split) if axes & set(dim))
            if math.prod(value.shape[:at]) > 1:
                source = value
                while source.node and source.node.kind == "alias":
                    source = source.node.inputs[0]
                if source.node is None and self.is_body:
                    self.copied.add(id(source))
                elif source.node is None:
                    value = self.written("turned", value, value.dtype)
            split = tuple(tuple(a for a in dim if a not in axes) for dim in value.split)
            node = self.append("other", "all-gather", [value], [(value.shape, value.dtype, split)])
            self.done[key] = node.outputs
        return self.done[key][0]

    def several(self, axes: set[str]) -> set[str]:
        """Those of ``axes`` that have several devices."""
        return {a for a in axes if self.sizes.get(a, 1) > 1}

    def move(self, kind: str, value: Value, axes: set[str]) -> None:
        """Notes that ``value`` is exchanged over those of ``axes`` that have several devices."""
        if axes := self.several(axes):
            self.moves.append((kind, value, axes, self.times))

    def moved(self) -> Moved:
        """What one device sends, by the ring algorithms."""
        table: Moved = {}
        for kind, value, axes, times in {(kind, id(v), *axes): (kind, v, axes, n) for kind, v, axes, n in self.moves}.values():
            n = math.prod(self.sizes[a] for a in axes)
            parts = [math.prod(self.sizes.get(a, 1) for a in dim) for dim in value.split]
            shape = [-(-d // part) for d, part in zip(value.shape, parts, strict=True)]
            size = math.prod(shape) * (width(value) if value.dtype != jax.dtypes.prng_key else 8)
            if kind == "all-reduce" and axes <= (pinned_axes(value) or set()):
                kind = "reduce-scatter"
            factor = {
                "all-reduce": 2 * (n - 1) / n,
                "reduce-scatter": (n - 1) / n,
                "all-gather": n - 1,
                "all-to-all": (n - 1) / n,
            }
            key = (kind, tuple(a for a in self.sizes if a in axes))
            count, sent = table.get(key, (0, 0.0))
            table[key] = (count + times, sent + times * size * factor.get(kind, 1))
        return table

    def size(self, value: Value) -> int:
        """Bytes on one device; 0 for what is in host memory or inside of another array's computation."""
        if not value.size and not value.on_host and not value.inline:
            shape = [
                -(-n // math.prod(self.mesh.get(a, 1) for a in dim)) for n, dim in zip(value.shape, value.split, strict=True)
            ]
            dtype = value.dtype
            try:
                dtype = np.dtype(dtype)
            except TypeError:  # a key is two words
                dtype, shape = np.dtype(np.uint32), [*shape, 2]
            value.size = self.compiler.bytes_of(shape, dtype, lies_in_order(value))
        return value.size


def title(eqn: Any) -> str:
    stack = str(eqn.source_info.name_stack)
    shapes = ",".join(getattr(v.aval, "str_short", lambda: "")() for v in eqn.outvars[:2])
    return f"{eqn.primitive.name} {shapes} {stack}"


def constants(consts: Sequence[Any]) -> list[Value]:
    """Arrays that a closed jaxpr brings along: whole on every device."""
    return [Value(np.shape(c), np.result_type(c), ((),) * np.ndim(c), None) for c in consts]


def is_half(value: Value) -> bool:
    return value.dtype.itemsize == 2


def lies_in_order(value: Value) -> bool:
    """Whether it is a kernel's, or such an array under another name."""
    while not value.in_order:
        node = value.node
        if node is None or node.kind != "alias" and node.name.split()[0] not in SAME:
            return False
        if node.inputs[0].shape[-2:] != value.shape[-2:]:
            return False
        value = node.inputs[0]
    return True


def width(value: Value) -> int:
    return value.dtype.itemsize


def pin(nodes: Sequence[Node]) -> None:
    """Splits what a constraint pins as it says, back through arithmetic to the loop or the product that makes it.

    So it does what is added to an array that is split. What another constraint pins stays as that says.
    """
    for node in reversed(nodes):
        if node.name.split()[0] not in ("sharding_constraint", "add", "add_any"):
            continue
        wanted, todo = node.outputs[0].split, list(node.inputs)
        while todo:
            value = todo.pop()
            if value.node is None or value.shape != node.outputs[0].shape or axes_of(value.split) or not axes_of(wanted):
                continue
            if value.node.name.startswith("sharding_constraint"):
                continue
            value.split = wanted
            if value.node.kind in ("cheap", "alias"):
                todo += value.node.inputs


def axes_of(split: Split) -> set[str]:
    return {a for dim in split for a in dim}


def split_of(spec: jax.sharding.PartitionSpec, rank: int) -> Split:
    """A PartitionSpec with a tuple for each of ``rank`` dimensions."""
    dims = [() if d is None else (d,) if isinstance(d, str) else tuple(d) for d in spec]
    return (*dims, *[()] * (rank - len(dims)))


def joined(values: Sequence[Value], shape: Sequence[int]) -> Split:
    """Of element-wise arithmetic: what any operand is split over; an axis goes to one dimension, the stronger operand's."""
    split: list[tuple[str, ...]] = [()] * len(shape)
    used: set[str] = set()
    for value in sorted(values, key=lambda v: v.weak):
        for i, dim in enumerate(value.split):
            if not split[i] and value.shape[i] == shape[i] and not used & set(dim):
                split[i] = dim
                used |= set(dim)
    return tuple(split)


def reshaped(old: Sequence[int], new: Sequence[int], split: Split, mesh: Mapping[str, int]) -> Split:
    """An axis stays with the leading new dimension of the group that its old one is part of, where it divides that."""
    placed: list[tuple[str, ...]] = [()] * len(new)
    i = j = 0
    while i < len(old) and j < len(new):
        a, b, i2, j2 = old[i], new[j], i + 1, j + 1
        while a != b:
            if a < b and i2 < len(old):
                a, i2 = a * old[i2], i2 + 1
            elif b < a and j2 < len(new):
                b, j2 = b * new[j2], j2 + 1
            else:
                break
        axes = [x for k in range(i, i2) for x in split[k]]
        if i2 - i == 1 or split[i]:
            for k in range(j, j2):
                places = math.prod(mesh.get(x, 1) for x in axes)
                if axes and new[k] % places == 0:
                    placed[k], axes = tuple(axes), []
        else:
            for k in range(i, i2):  # a dimension inside the group: the new one of the same size keeps it
                for m in range(j, j2):
                    if split[k] and new[m] == old[k] and not placed[m]:
                        placed[m] = split[k]
        i, j = i2, j2
    return tuple(placed)


def pinned_axes(value: Value) -> set[str] | None:
    """The mesh axes that a result is pinned to, by the first constraint on its way; None without one."""
    readers = value.readers
    while value.outer or len(readers) == 1 and readers[0].name.split()[0] in PASSES:
        value = value.outer or readers[0].outputs[0]
        readers = value.readers
    pinned = [r for r in readers if r.name.startswith("sharding_constraint")]
    return axes_of(pinned[0].outputs[0].split) if pinned and len(readers) == 1 else None
