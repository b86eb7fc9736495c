"""The exchanges between devices, and the products, of a compiled program, read from its text."""

import functools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

KINDS = (
    "all-reduce",
    "all-gather",
    "reduce-scatter",
    "all-to-all",
    "collective-permute",
    "collective-broadcast",
)
# Custom calls that compute nothing.
MARKS = {
    "Sharding",
    "SPMDFullToShardShape",
    "SPMDShardToFullShape",
    "annotate_device_placement",
    "MoveToHost",
    "MoveToDevice",
}
SHAPE = re.compile(r"\b(pred|bf16|[fsuc]\d+(?:e\d+m\d+\w*)?)\[([\d,]*)\](?:\{[\d,]*(:[^}]*)?\})?")
_CALLED = re.compile(
    r"\b(calls|to_apply|body|branch_computations|true_computation|false_computation)"
    r"=(?:\{([^}]*)\}|%?([\w.\-]+))"
)
# The groups of a collective: listed; [groups,size]<=[dims]T(order); or by the axes of a mesh.
_LISTED_GROUPS = re.compile(r"(?:replica_groups|source_target_pairs)=\{((?:\{[\d,]*\},?)+)\}")
_IOTA_GROUPS = re.compile(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
_GROUPS_OF_MESH = re.compile(
    r"replica_groups=mesh\[([^\]]*)\](?:, device_ids=\(\[([\d,]+)\](?:T\(([\d,]+)\))?\))?"
    r" \{([^}:]*)\}"
)


class Instruction(NamedTuple):
    name: str
    op: str
    result: str  # its type as text
    operands: tuple[str, ...]
    line: str

    @property
    def called(self) -> list[tuple[str, str]]:
        """The computations that it calls, each with the role it has there."""
        calls = []
        for role, several, one in _CALLED.findall(self.line):
            calls += [(role, name) for name in re.findall(r"[\w.\-]+", several or one)]
        return calls

    @property
    def shapes(self) -> list[tuple[str, tuple[int, ...]]]:
        return [(dtype, _dims(dims)) for dtype, dims, _ in SHAPE.findall(self.result)]

    @property
    def is_root(self) -> bool:
        return self.line.startswith("ROOT ")


def instruction(line: str) -> Instruction | None:
    """Parse a line, None if it has no instruction."""
    line = line.strip()
    name, equals, definition = line.removeprefix("ROOT ").partition(" = ")
    if not equals or " " in name:
        return None
    if definition.startswith("("):
        result, call = _split(definition)
    else:
        result, call = definition.split(" ", 1)
    match = re.match(r"\s*([\w\-]+)(?=\()", call)
    if not match:
        return None
    arguments, _ = _split(call[match.end() :])
    operands = tuple(re.findall(r"%([\w.\-]+)", arguments))
    return Instruction(name.lstrip("%"), match[1], result, operands, line)


def _split(text: str) -> tuple[str, str]:
    """Split a text that begins with a parenthesis where it closes."""
    depth = 0
    for i, character in enumerate(text):
        if character == "(":
            depth += 1
        elif character == ")":
            depth -= 1
        if not depth:
            return text[: i + 1], text[i + 1 :]
    return text, ""


class Collective(NamedTuple):
    kind: str  # one of KINDS
    shapes: tuple[tuple[int, ...], ...]  # of its results
    bytes: int  # of its results, on one device
    groups: list[list[int]]  # devices that exchange values, as places in the mesh
    times: int  # how often a step executes it: loops around it counted
    in_loop: bool
    is_async: bool = False  # it overlaps computation: it ends later, or is a part of a product
    dtypes: tuple[str, ...] = ()  # of its results

    @property
    def sent(self) -> float:
        """The bytes that one device sends in all, by the ring algorithms."""
        n = max(len(group) for group in self.groups)
        factor = {
            "all-reduce": 2 * (n - 1) / n,
            "all-gather": (n - 1) / n,
            "reduce-scatter": n - 1,
            "all-to-all": (n - 1) / n,
        }
        return self.times * self.bytes * factor.get(self.kind, 1)

    def axes(self, mesh: Mapping[str, int]) -> tuple[str, ...]:
        """Return the axes of a mesh (name -> size) along which devices of one group differ."""
        sizes = tuple(mesh.values())
        axes = set[int]()
        for group in self.groups:
            places = np.unravel_index(group, sizes)
            axes |= {i for i, along_axis in enumerate(places) if len(set(along_axis.tolist())) > 1}
        return tuple(name for i, name in enumerate(mesh) if i in axes)


class Exchanged(NamedTuple):
    times: int  # executions in a step
    sent: float  # [bytes] by one device
    early: int  # those of the executions that overlap computation


Exchanges = dict[tuple[str, tuple[str, ...]], Exchanged]  # (kind, mesh axes) ->


class Product(NamedTuple):
    """One product of matrices: an instruction, a call of a library or of a generated kernel."""

    operands: tuple[str, ...]  # types
    flops: float  # in a step: loops around it counted
    line: str  # of the program's text


class Program:
    """The computations of a compiled module's text (``compiled.as_text()``)."""

    def __init__(self, text: str):
        # A kernel of Pallas has a text of several lines, of which one may begin with "}}".
        parts = re.findall(r"^(ENTRY )?%?([\w.\-]+) [^\n]*\{\n(.*?)^\}(?!\})", text, re.M | re.S)
        self.bodies = {name: _instructions(body) for _, name, body in parts}
        counts = re.findall(r"(?:num_partitions|replica_count)=(\d+)", text[:4000])
        self.devices = max(map(int, counts), default=1)
        self.times: dict[str, int] = {}  # computation -> how often a step executes it, if it does
        self.loops: set[str] = set()  # computations inside of loops
        self.started: set[str] = set()  # that begin at one place and are waited for at another
        self.fused: set[str] = set()  # of a single kernel
        self.inlined: set[str] = set()  # a part of a kernel, or applied by one to each number
        self.unknown: set[str] = set()  # loops whose rounds the text does not say: they count once
        self.entries = [name for entry, name, _ in parts if entry]
        for name in self.entries:
            self._visit(name, 1, False)
        for name in self.fused | self.inlined:
            self._inline(name)

    def _inline(self, computation: str) -> None:
        self.inlined.add(computation)
        for i in self.bodies[computation]:
            for _, target in i.called:
                if target in self.bodies:
                    self._inline(target)

    def _rounds(self, loop: Instruction) -> int:
        """Return the rounds of a loop, 1 if they are unknown."""
        n_trips = trips(loop, self.bodies)
        if not n_trips:
            self.unknown.add(loop.name)
        return n_trips or 1

    def _visit(self, computation: str, times: int, in_loop: bool) -> None:
        self.times[computation] = self.times.get(computation, 0) + times
        if in_loop:
            self.loops.add(computation)
        for i in self.bodies.get(computation, ()):
            n_trips = self._rounds(i) if i.op == "while" else 1
            for role, target in i.called:
                if target not in self.bodies:
                    continue
                if i.op == "async-start" and '"is_sync":true' not in i.line:
                    self.started.add(target)
                if i.op in ("fusion", "fusion-start"):
                    self.fused.add(target)
                elif role == "to_apply" and i.op != "call":
                    self.inlined.add(target)
                if role == "body":
                    self._visit(target, times * n_trips, True)
                else:
                    self._visit(target, times, in_loop)

    def executed(self) -> Iterator[tuple[str, Instruction]]:
        """Yield the instructions that a step executes, each with its computation."""
        for computation, body in self.bodies.items():
            if computation in self.times:
                for i in body:
                    yield computation, i

    def library_calls(self) -> dict[str, int]:
        """Return target of a custom call -> executions in a step, without the compiler's marks."""
        calls: dict[str, int] = {}
        for computation, i in self.executed():
            match = re.search(r'custom_call_target="([^"]+)"', i.line)
            if match and match[1] not in MARKS:
                calls[match[1]] = calls.get(match[1], 0) + self.times[computation]
        return calls

    def products(self) -> list[Product]:
        """List matrix products and convolutions (products on TPUs), without Pallas kernels."""
        every_product = []
        for computation in self.times:
            body = {i.name: i for i in self.bodies.get(computation, ())}
            for i in body.values():
                if not _is_product(i):
                    continue
                dtypes = []
                for name in i.operands[:2]:
                    dtypes.append(body[name].shapes[0][0] if name in body else "")
                flops_of_step = flops(i, body) * self.times[computation]
                every_product.append(Product(tuple(dtypes), flops_of_step, i.line))
        return every_product


def _is_product(i: Instruction) -> bool:
    is_call = i.op == "custom-call" and 'custom_call_target="__cublas' in i.line
    is_product = is_call or i.op == "dot" or _is_convolution(i)
    return is_product and len(i.operands) >= 2 and bool(i.shapes)


def _is_convolution(i: Instruction) -> bool:
    return i.op == "convolution" and "dim_labels=" in i.line


def flops(i: Instruction, body: Mapping[str, Instruction]) -> float:
    """Return the FLOP of one execution of a matrix product among ``body``, else 0."""
    if not _is_product(i):
        return 0.0
    _, dims = i.shapes[0]
    left = body.get(i.operands[0])
    if _is_convolution(i):
        operands = [body[name].shapes[0][1] for name in i.operands[:2] if name in body]
        return 2.0 * math.prod(dims) * _taps(i.line, operands, dims)
    depth = _depth(i.line, left.shapes[0][1] if left and left.shapes else ())
    return 2.0 * math.prod(dims) * depth


def _instructions(body: str) -> list[Instruction]:
    return [i for line in body.splitlines() if (i := instruction(line))]


def _depth(line: str, left: Sequence[int]) -> int:
    """Count the numbers that a product adds up for each of its results."""
    summed = re.search(r'lhs_contracting_dim(?:ension)?s"?[=:][{\[]"?([\d,"]*)', line)
    if not (summed and left):
        return 1
    axes = _dims(summed[1])
    return math.prod(left[axis] for axis in axes)


def _taps(line: str, operands: Sequence[Sequence[int]], result: Sequence[int]) -> float:
    """Return the numbers that a convolution adds up for each of its results, on average.

    TPUs compute products of matrices as convolutions, in which a batch can be a window over rows
    that are far apart. Places of the window in the padding, and between rows, are not counted.
    """
    labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", line)
    if not labels or len(operands) < 2:
        return 1.0
    (left, right), window = operands, _window(line)
    taps = float(right[labels[2].index("i")])
    for place, axis in enumerate(sorted(label for label in labels[2] if label.isdigit())):
        sizes = _Sizes(
            left[labels[1].index(axis)],
            right[labels[2].index(axis)],
            result[labels[3].index(axis)],
        )
        steps = {name: numbers[place] for name, numbers in window.items() if place < len(numbers)}
        taps *= _pairs(sizes, tuple(sorted(steps.items()))) / sizes.result
    return taps


class _Sizes(NamedTuple):
    """Of one dimension of a convolution."""

    left: int
    window: int
    result: int


def _window(line: str) -> dict[str, list[int]]:
    """Return the numbers of a convolution's window by their name, one for each dimension."""
    window = re.search(r"window=\{([^}]*)\}", line)
    numbers = {}
    for name, text in re.findall(r"(\w+)=([\dx_\-]+)", window[1] if window else ""):
        # of padding, the one before the first row
        numbers[name] = [int(part.split("_")[0]) for part in text.split("x")]
    return numbers


@functools.lru_cache(maxsize=4096)
def _pairs(sizes: _Sizes, window: tuple[tuple[str, int], ...]) -> int:
    """Count the pairs of a result and a place in its window that has a number of the left side."""
    steps = dict(window)
    stride, left_dilation = steps.get("stride", 1), steps.get("lhs_dilate", 1)
    last = (sizes.left - 1) * left_dilation
    divisor = math.gcd(stride, left_dilation)
    period = left_dilation // divisor
    inverse = pow(stride // divisor, -1, period)
    pairs = 0
    for place in range(sizes.window):
        # result r reads row r * stride - offset, if it is one of the left side's
        offset = steps.get("pad", 0) - place * steps.get("rhs_dilate", 1)
        if offset % divisor:
            continue
        first = max(0, -(-offset // stride))
        final = min(sizes.result - 1, (last + offset) // stride)
        earliest = first + (offset // divisor * inverse - first) % period
        pairs += max(0, (final - earliest) // period + 1)
    return pairs


def collectives(text: str | Program) -> list[Collective]:
    program = text if isinstance(text, Program) else Program(text)
    found = (collective(program, computation, i) for computation, i in program.executed())
    return [each for each in found if each is not None]


def collective(program: Program, computation: str, i: Instruction) -> Collective | None:
    """Read an instruction of an executed computation, None if it is no collective."""
    kind = i.op.removesuffix("-start")
    if kind not in KINDS:
        return None
    results = _results(i, kind)
    # on TPUs a fusion of a sum and each device's part
    if computation.startswith("all-reduce-scatter"):
        kind = "reduce-scatter"
        results = program.bodies[computation][-1].shapes[:1]
    sizes = [math.prod(dims) * bits(dtype) // 8 for dtype, dims in results]
    return Collective(
        kind,
        shapes=tuple(dims for _, dims in results),
        bytes=sum(sizes),
        groups=groups(i.line, program.devices),
        times=program.times[computation],
        in_loop=computation in program.loops,
        is_async=_is_async(program, computation, i),
        dtypes=tuple(dtype for dtype, _ in results),
    )


def _results(i: Instruction, kind: str) -> list[tuple[str, tuple[int, ...]]]:
    """Return the types and shapes of a collective's results."""
    results = i.shapes
    # From jax 0.11 on an all-reduce starts as the others do, with ((operands), results).
    has_operands = kind != "all-reduce" or i.result.startswith("((")
    if not (i.op.endswith("-start") and has_operands):
        return results
    if kind == "collective-permute":
        results = [(dtype, dims) for dtype, dims in results if dtype != "u32" or dims]
    # The others start with (operands, results).
    return results[len(results) // 2 :]


def _is_async(program: Program, computation: str, i: Instruction) -> bool:
    if i.op.endswith("-start") and '"is_sync":true' not in i.line:
        return True
    if computation in program.started:
        return True
    # TPUs gather inside of a product that needs something else.
    is_product = any(other.op in ("convolution", "dot") for other in program.bodies[computation])
    return is_product and computation in program.fused


def groups(line: str, devices: int) -> list[list[int]]:
    """Parse the lists of device numbers that exchange values, in each notation of XLA."""
    if listed := _LISTED_GROUPS.search(line):
        texts = re.findall(r"\{(.*?)\}", listed[1])
        return [[int(i) for i in text.split(",")] for text in texts]
    if iota := _IOTA_GROUPS.search(line):
        _, group_size = _dims(iota[1])
        return _places(iota[2], iota[3]).reshape(-1, group_size).tolist()
    if of_mesh := _GROUPS_OF_MESH.search(line):
        return _groups_of_mesh(*of_mesh.groups())
    if "replica_groups={}" in line:
        return [list(range(devices))]
    raise ValueError(f"an unknown notation of groups: {line}")


def _groups_of_mesh(
    axes: str, ids: str | None, order: str | None, axes_of_group: str
) -> list[list[int]]:
    names, texts = zip(*re.findall(r"'(\w+)'=(\d+)", axes), strict=True)
    sizes = [int(text) for text in texts]
    along = [names.index(name) for name in re.findall(r"'(\w+)'", axes_of_group)]
    group_size = math.prod(sizes[i] for i in along)
    places = _places(ids or str(math.prod(sizes)), order).reshape(sizes)
    last_axes = range(-len(along), 0)
    return np.moveaxis(places, along, last_axes).reshape(-1, group_size).tolist()


def trips(loop: Instruction, bodies: Mapping[str, list[Instruction]]) -> int:
    """Return the rounds of a loop of fixed length, as the compiler notes it, or from its condition.

    They are 0 if both are unclear. By the condition, they are its bound by the step of its counter:
    rings of products and gathers count by twos.
    """
    if noted := re.search(r'"known_trip_count":\{"n":"(\d+)"', loop.line):
        return int(noted[1])
    parts = dict(re.findall(r"\b(condition|body)=%?([\w.\-]+)", loop.line))
    condition = bodies.get(parts.get("condition", ""), [])
    body = bodies.get(parts.get("body", ""), [])
    limit = max(filter(None, map(_constant, _with_called(condition, bodies))), default=0)
    return math.ceil(limit / _step(condition, body))


def _with_called(
    condition: Sequence[Instruction], bodies: Mapping[str, list[Instruction]]
) -> list[Instruction]:
    """Return the instructions of a loop's condition, with those of its fusions."""
    instructions = list(condition)
    for i in condition:
        for _, target in i.called:
            instructions += bodies.get(target, [])
    return instructions


def _constant(i: Instruction) -> int:
    """Return the value of a constant, 0 for any other instruction."""
    match = re.search(r" constant\((\d+)\)", i.line)
    return int(match[1]) if match else 0


def _step(condition: Sequence[Instruction], body: Sequence[Instruction]) -> int:
    """Return how a loop's counter (all its condition reads) grows a round, 1 if unclear."""
    indices = set()
    for i in condition:
        if match := re.search(r" get-tuple-element\(.*\), index=(\d+)", i.line):
            indices.add(int(match[1]))
    new_state = next((i.operands for i in body if i.is_root and i.op == "tuple"), ())
    if len(indices) != 1 or len(new_state) <= min(indices):
        return 1
    by_name = {i.name: i for i in body}
    counter = by_name.get(new_state[min(indices)])
    if counter is None or counter.op != "add":
        return 1
    summands = [by_name[name] for name in counter.operands if name in by_name]
    return next(filter(None, map(_constant, summands)), 1)


def _dims(text: str) -> tuple[int, ...]:
    return tuple(int(n) for n in re.findall(r"\d+", text))


def _places(dims: str, order: str | None) -> np.ndarray:
    sizes = _dims(dims)
    places = np.arange(math.prod(sizes)).reshape(sizes)
    return places.transpose(_dims(order)) if order else places


def bits(dtype: str) -> int:
    return 8 if dtype == "pred" else _dims(dtype)[0]


def summary(exchanges: Sequence[Collective], mesh: Mapping[str, int]) -> Exchanges:
    """Add up the collectives of each kind along the same axes of a mesh (name -> size)."""
    table: Exchanges = {}
    for collective in exchanges:
        key = collective.kind, collective.axes(mesh)
        times, sent, early = table.get(key, Exchanged(0, 0.0, 0))
        if collective.is_async:
            early += collective.times
        table[key] = Exchanged(times + collective.times, sent + collective.sent, early)
    return table
