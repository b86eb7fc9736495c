"""The exchanges between devices, and the products, of a compiled program, read from its text."""

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
    r"\b(calls|to_apply|body|branch_computations|true_computation|false_computation)=\{?([%\w.\-, ]+)"
)


class Instruction(NamedTuple):
    name: str
    op: str
    result: str  # its type as text
    operands: tuple[str, ...]
    line: str

    @property
    def called(self) -> list[tuple[str, str]]:
        found = _CALLED.findall(self.line)
        return [(how, name) for how, names in found for name in re.findall(r"[\w.\-]+", names)]

    @property
    def shapes(self) -> list[tuple[str, tuple[int, ...]]]:
        return [(dtype, _dims(dims)) for dtype, dims, _ in SHAPE.findall(self.result)]

    @property
    def is_root(self) -> bool:
        return self.line.startswith("ROOT ")


def instruction(line: str) -> Instruction | None:
    line = line.strip()
    left, equals, right = line.removeprefix("ROOT ").partition(" = ")
    if not equals or " " in left:
        return None
    result, rest = _split(right) if right.startswith("(") else right.split(" ", 1)
    match = re.match(r"\s*([\w\-]+)(?=\()", rest)
    if not match:
        return None
    inside, _ = _split(rest[match.end() :])
    return Instruction(
        left.lstrip("%"), match[1], result, tuple(re.findall(r"%([\w.\-]+)", inside)), line
    )


def _split(text: str) -> tuple[str, str]:
    """Split a text that begins with a parenthesis where it closes."""
    depth = 0
    for i, c in enumerate(text):
        depth += (c == "(") - (c == ")")
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
        spans = [np.unravel_index(group, sizes) for group in self.groups]
        return tuple(
            name
            for i, name in enumerate(mesh)
            if any(len(set(places[i].tolist())) > 1 for places in spans)
        )


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
        self.bodies = {
            name: [i for line in body.splitlines() if (i := instruction(line))]
            for _, name, body in parts
        }
        self.devices = max(
            (int(n) for n in re.findall(r"(?:num_partitions|replica_count)=(\d+)", text[:4000])),
            default=1,
        )
        self.times: dict[str, int] = {}  # computation -> how often a step executes it, if it does
        self.loops: set[str] = set()  # computations inside of loops
        self.started: set[str] = set()  # that begin at one place and are waited for at another
        self.fused: set[str] = set()  # of a single kernel
        for entry, name, _ in parts:
            if entry:
                self._visit(name, 1, False)

    def _visit(self, name: str, n: int, in_loop: bool) -> None:
        self.times[name] = self.times.get(name, 0) + n
        if in_loop:
            self.loops.add(name)
        for i in self.bodies.get(name, ()):
            n_trips = trips(i, self.bodies) if i.op == "while" else 1
            for how, target in i.called:
                if target in self.bodies:
                    if i.op == "async-start" and '"is_sync":true' not in i.line:
                        self.started.add(target)
                    if i.op == "fusion":
                        self.fused.add(target)
                    is_body = how == "body"
                    self._visit(target, n * (n_trips if is_body else 1), in_loop or is_body)

    def executed(self) -> Iterator[tuple[str, Instruction]]:
        for name, body in self.bodies.items():
            yield from ((name, i) for i in body if name in self.times)

    def library_calls(self) -> dict[str, int]:
        """Return target of a custom call -> executions in a step, without the compiler's marks."""
        calls: dict[str, int] = {}
        for name, i in self.executed():
            if (match := re.search(r'custom_call_target="([^"]+)"', i.line)) and match[
                1
            ] not in MARKS:
                calls[match[1]] = calls.get(match[1], 0) + self.times[name]
        return calls

    def products(self) -> list[Product]:
        """List matrix products, without Pallas kernels and convolutions (products on TPUs)."""
        every_product = []
        shapes = {(name, i.name): i.shapes[0] for name, i in self.executed() if i.shapes}
        for name, i in self.executed():
            is_call = i.op == "custom-call" and 'custom_call_target="__cublas' in i.line
            if not (is_call or i.op == "dot") or len(i.operands) < 2 or not i.shapes:
                continue
            types, dims = zip(
                *(shapes.get((name, x), ("", ())) for x in i.operands[:2]), strict=True
            )
            flops = 2.0 * math.prod(i.shapes[0][1]) * _depth(i.line, dims[0]) * self.times[name]
            every_product.append(Product(types, flops, i.line))
        return every_product


def _depth(line: str, left: Sequence[int]) -> int:
    """Count the numbers that a product adds up for each of its results."""
    summed = re.search(r'lhs_contracting_dim(?:ension)?s"?[=:][{\[]"?([\d,"]*)', line)
    return math.prod(left[i] for i in _dims(summed[1])) if summed and left else 1


def collectives(text: str | Program) -> list[Collective]:
    program = text if isinstance(text, Program) else Program(text)
    every_collective = []
    for name, i in program.executed():
        kind, start = i.op.removesuffix("-start"), i.op.endswith("-start")
        if kind not in KINDS:
            continue
        is_async = start and '"is_sync":true' not in i.line or name in program.started
        # TPUs gather inside of a product that needs something else.
        products = (other.op in ("convolution", "dot") for other in program.bodies[name])
        is_async |= name in program.fused and any(products)
        results = i.shapes
        if start and kind != "all-reduce":  # the others start with (operands, results)
            if kind == "collective-permute":
                results = [(dtype, dims) for dtype, dims in results if dtype != "u32" or dims]
            results = results[len(results) // 2 :]
        # on TPUs a fusion of a sum and each device's part
        if name.startswith("all-reduce-scatter"):
            kind, results = "reduce-scatter", program.bodies[name][-1].shapes[:1]
        size = sum(math.prod(dims) * bits(dtype) // 8 for dtype, dims in results)
        shapes, within = tuple(dims for _, dims in results), groups(i.line, program.devices)
        times, in_loop = program.times[name], name in program.loops
        every_collective.append(Collective(kind, shapes, size, within, times, in_loop, is_async))
    return every_collective


def groups(line: str, devices: int) -> list[list[int]]:
    """Parse the lists of device numbers that exchange values, in each notation of XLA."""
    if explicit := re.search(
        r"(?:replica_groups|source_target_pairs)=\{((?:\{[\d,]*\},?)+)\}", line
    ):
        return [
            [int(i) for i in group.split(",")] for group in re.findall(r"\{(.*?)\}", explicit[1])
        ]
    if iota := re.search(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", line):
        return _places(*iota.group(2, 3)).reshape(-1, _dims(iota[1])[1]).tolist()
    if mesh := re.search(
        r"replica_groups=mesh\[([^\]]*)\](?:, device_ids=\(\[([\d,]+)\](?:T\(([\d,]+)\))?\))?"
        r" \{([^}:]*)\}",
        line,
    ):
        names, texts = zip(*re.findall(r"'(\w+)'=(\d+)", mesh[1]), strict=True)
        sizes = [int(n) for n in texts]
        along = [names.index(name) for name in re.findall(r"'(\w+)'", mesh[4])]
        places = _places(mesh[2] or str(math.prod(sizes)), mesh[3]).reshape(sizes)
        return (
            np.moveaxis(places, along, range(-len(along), 0))
            .reshape(-1, math.prod(sizes[i] for i in along))
            .tolist()
        )
    if "replica_groups={}" in line:
        return [list(range(devices))]
    raise ValueError(f"an unknown notation of groups: {line}")


def trips(loop: Instruction, bodies: Mapping[str, list[Instruction]]) -> int:
    """Return the rounds of a loop of fixed length, as the compiler notes it, or from its condition.

    That is its bound by the step of its counter: rings of products and gathers count by twos.
    """
    if noted := re.search(r'"known_trip_count":\{"n":"(\d+)"', loop.line):
        return int(noted[1])
    called = dict(re.findall(r"\b(condition|body)=%?([\w.\-]+)", loop.line))
    tested, body = (bodies.get(called.get(part, ""), []) for part in ("condition", "body"))
    return math.ceil(max(filter(None, map(_constant, tested)), default=1) / _step(tested, body))


def _constant(i: Instruction) -> int:
    found = re.search(r" constant\((\d+)\)", i.line)
    return int(found[1]) if found else 0


def _step(condition: Sequence[Instruction], body: Sequence[Instruction]) -> int:
    """Return how a loop's counter (all its condition reads) grows a round, 1 if unclear."""
    read = {
        int(m[1])
        for i in condition
        if (m := re.search(r" get-tuple-element\(.*\), index=(\d+)", i.line))
    }
    state = next((i.operands for i in body if i.is_root and i.op == "tuple"), ())
    if len(read) != 1 or len(state) <= (at := min(read)):
        return 1
    named = {i.name: i for i in body}
    grown = named.get(state[at])
    added = [named[x] for x in grown.operands if x in named] if grown and grown.op == "add" else []
    return next(filter(None, map(_constant, added)), 1)


def _dims(text: str) -> tuple[int, ...]:
    return tuple(int(n) for n in re.findall(r"\d+", text))


def _places(dims: str, order: str | None) -> np.ndarray:
    places = np.arange(math.prod(_dims(dims))).reshape(_dims(dims))
    return places.transpose(_dims(order)) if order else places


def bits(dtype: str) -> int:
    return 8 if dtype == "pred" else _dims(dtype)[0]


def summary(exchanges: Sequence[Collective], mesh: Mapping[str, int]) -> Exchanges:
    table: Exchanges = {}
    for c in exchanges:
        n, sent, early = table.get((c.kind, c.axes(mesh)), (0, 0.0, 0))
        table[c.kind, c.axes(mesh)] = Exchanged(
            n + c.times, sent + c.sent, early + c.times * c.is_async
        )
    return table
