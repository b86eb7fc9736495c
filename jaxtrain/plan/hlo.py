"""What moves between devices, read off a compiled program's text."""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute", "collective-broadcast")
# Custom calls that compute nothing.
MARKS = {"Sharding", "SPMDFullToShardShape", "SPMDShardToFullShape", "annotate_device_placement", "MoveToHost", "MoveToDevice"}
_BITS = {"pred": 8, "s4": 4, "u4": 4, "s8": 8, "u8": 8, "bf16": 16, "c64": 64, "c128": 128}  # others end in their bits
_SHAPE = re.compile(r"\b(pred|bf16|[fsuc]\d+(?:e\d+m\d+\w*)?)\[([\d,]*)\]")


class Collective(NamedTuple):
    """One instruction that exchanges values between devices."""

    kind: str  # one of KINDS
    shapes: tuple[tuple[int, ...], ...]  # of its results
    bytes: int  # of its results, on one device
    groups: list[list[int]]  # devices that exchange values, as places in the mesh
    times: int  # how often a step executes it: loops around it counted
    in_loop: bool
    line: str
    is_async: bool = False  # computation goes on beside it: it begins, and ends later, or it is a part of a product

    @property
    def sent(self) -> float:
        """Bytes that one device sends in all, by the ring algorithms."""
        n = max(len(group) for group in self.groups)
        factor = {"all-reduce": 2 * (n - 1) / n, "all-gather": (n - 1) / n, "reduce-scatter": n - 1, "all-to-all": (n - 1) / n}
        return self.times * self.bytes * factor.get(self.kind, 1)

    def axes(self, mesh: Mapping[str, int]) -> tuple[str, ...]:
        """The axes of a mesh (name -> size) along which devices of one group differ."""
        sizes = tuple(mesh.values())
        spans = [np.unravel_index(group, sizes) for group in self.groups]
        return tuple(name for i, name in enumerate(mesh) if any(len(set(places[i].tolist())) > 1 for places in spans))


class Product(NamedTuple):
    """One product of matrices: an instruction, a call of a library or of a generated kernel."""

    operands: tuple[str, ...]  # types
    result: str
    flops: float  # in a step: loops around it counted
    line: str


class Program:
    """A compiled module's text (``compiled.as_text()``), taken apart.

    Attributes:
      bodies: computation -> its lines.
      times: computation -> how often a step executes it, for those that it does.
      loops: computations inside of loops.
      begun: computations that begin at one place and are waited for at another.
      fused: computations of a single kernel.
    """

    def __init__(self, text: str):
        # A kernel of Pallas has a text of several lines, of which one may begin with "}}".
        parts = re.findall(r"^(ENTRY )?%?([\w.\-]+) [^\n]*\{\n(.*?)^\}(?!\})", text, re.M | re.S)
        self.bodies = {name: body.splitlines() for _, name, body in parts}
        self.devices = max((int(n) for n in re.findall(r"(?:num_partitions|replica_count)=(\d+)", text[:4000])), default=1)
        self.times: dict[str, int] = {}
        self.loops: set[str] = set()
        self.begun: set[str] = set()
        self.fused: set[str] = set()
        for entry, name, _ in parts:
            if entry:
                self._visit(name, 1, False)

    def _visit(self, name: str, n: int, in_loop: bool) -> None:
        self.times[name] = self.times.get(name, 0) + n
        if in_loop:
            self.loops.add(name)
        for line in self.bodies.get(name, ()):
            n_trips = trips(line, self.bodies) if " while(" in line else 1
            for kind, called in re.findall(r"\b(calls|to_apply|body|branch_computations)=\{?([%\w.\-, ]+)", line):
                for target in re.findall(r"[\w.\-]+", called):
                    if target in self.bodies:
                        if " async-start(" in line and '"is_sync":true' not in line:
                            self.begun.add(target)
                        if " fusion(" in line:
                            self.fused.add(target)
                        of_loop = kind == "body"
                        self._visit(target, n * (n_trips if of_loop else 1), in_loop or of_loop)

    def lines(self) -> Iterator[tuple[str, str]]:
        """(computation, line) of all that a step executes."""
        for name, lines in self.bodies.items():
            if name in self.times:
                yield from ((name, line) for line in lines)

    def library_calls(self) -> dict[str, int]:
        """Target of a custom call -> its executions in a step, without those that only mark something for the compiler."""
        calls: dict[str, int] = {}
        for name, line in self.lines():
            if (match := re.search(r'custom_call_target="([^"]+)"', line)) and match[1] not in MARKS:
                calls[match[1]] = calls.get(match[1], 0) + self.times[name]
        return calls

    def workspace(self) -> int:
        """Bytes that cuDNN's attention will ask for where its calls have none yet: the largest call's, estimated.

        A compiler without a card cannot ask cuDNN. The backward pass takes about 4 B T H K + 4 B H T + 256 bytes of queries
        [B, T, H, K] (fitted to one shape), the forward pass next to nothing.
        """
        sizes = [0]
        for _, line in self.lines():
            if re.search(r'custom_call_target="__cudnn\$fmha\w*Backward"', line) and re.search(r"\bu8\[0\]", line):
                result = re.search(r"\[([\d,]+)\]", line.partition(" = ")[2])
                assert result is not None, line  # every instruction has a type
                dims = _numbers(result[1])
                size = math.prod(dims)
                sizes.append(4 * size + 4 * size // dims[-1] + 256)
        return max(sizes)

    def products(self) -> list[Product]:
        """Every product of matrices, kernels of Pallas aside; convolutions too, as which TPUs write them."""
        every_product = []
        for name, lines in self.bodies.items():
            if name not in self.times:
                continue
            shapes: dict[str, tuple[str, tuple[int, ...]]] = {}
            for line in lines:
                left, _, right = line.strip().removeprefix("ROOT ").partition(" = ")
                results = _SHAPE.findall(
                    right[: right.find("(", 1) + 1] if not right.startswith("(") else right[: right.find(")")]
                )
                if results:
                    shapes[left.lstrip("%")] = (results[0][0], _dims(results[0][1]))
                match = re.search(r" (dot|convolution|custom-call)\(([^)]*)\)", line)
                if not match or match[1] == "custom-call" and not re.search(r'custom_call_target="__cublas', line):
                    continue
                operands = [shapes.get(x, ("", ())) for x in re.findall(r"%([\w.\-]+)", match[2])][:2]
                if len(operands) < 2 or not results:
                    continue
                dims = [dims for _, dims in operands]
                depth = _depth_of_convolution(line, *dims) if match[1] == "convolution" else _depth(line, dims[0])
                flops = 2.0 * math.prod(_dims(results[0][1])) * depth * self.times[name]
                every_product.append(Product(tuple(dtype for dtype, _ in operands), results[0][0], flops, line.strip()))
        return every_product


def _depth(line: str, left: Sequence[int]) -> int:
    """How many numbers a product adds up for each of its results."""
    summed = re.search(r'lhs_contracting_dim(?:ension)?s"?[=:][{\[]"?([\d,"]*)', line)
    places = [int(n) for n in re.findall(r"\d+", summed[1])] if summed else []
    return math.prod(left[i] for i in places) if places and left else 1


def _depth_of_convolution(line: str, image: Sequence[int], kernel: Sequence[int]) -> float:
    """The same of a convolution, on average: what its window reads of the padding is nothing.

    Of matrices that are counted, TPUs make places of the window, all but one of them in the padding for each result.
    """
    labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", line)
    assert labels is not None, line  # every convolution has them
    window = re.search(r"window=\{([^}]*)\}", line)
    given = dict(re.findall(r"(\w+)=(\S+)", window[1])) if window else {}
    depth: float = kernel[labels[2].index("i")]
    for i, size in enumerate(_by_x(given.get("size", ""))):

        def of(name: str, i: int = i) -> int:
            return _by_x(given[name])[i] if name in given else 1

        low, high = (int(n) for n in given["pad"].split("x")[i].split("_")) if "pad" in given else (0, 0)
        stride, spread, gap = of("stride"), of("rhs_dilate"), of("lhs_dilate")
        reach = (image[labels[1].index(str(i))] - 1) * gap + 1
        n = (reach + low + high - (size - 1) * spread - 1) // stride + 1  # results
        inside, step = 0, max(1, 2**22 // n)  # some of the window at a time
        for first in range(0, size, step):
            taps = np.arange(first, min(first + step, size)) * spread
            at = np.arange(n)[:, None] * stride - low + taps[None]
            inside += int(((at >= 0) & (at < reach) & (at % gap == 0)).sum())
        depth *= inside / n
    return depth


def _by_x(text: str) -> list[int]:
    return [int(n) for n in text.split("x") if n]


def collectives(text: str | Program) -> list[Collective]:
    """Every collective of a compiled module."""
    program = text if isinstance(text, Program) else Program(text)
    every_collective = []
    pattern = re.compile(rf" ({'|'.join(KINDS)})(-start)?\(")
    for name, line in program.lines():
        if match := pattern.search(line):
            kind, start = match.groups()
            is_async = bool(start) and '"is_sync":true' not in line or name in program.begun
            # TPUs gather inside of a product that needs something else.
            is_async |= name in program.fused and any(re.search(r" (convolution|dot)\(", text) for text in program.bodies[name])
            results = _SHAPE.findall(line[: match.start()].partition(" = ")[2])
            if start and kind != "all-reduce":  # the others start with (operands, results)
                results = [r for r in results if r[0] != "u32" or r[1]] if kind == "collective-permute" else results
                results = results[len(results) // 2 :]
            if name.startswith("all-reduce-scatter"):  # how TPUs write it: a fusion of a sum and each device's part of it
                last = program.bodies[name][-1].partition(" = ")[2]
                kind, results = "reduce-scatter", [r for r in _SHAPE.findall(last)[:1]]
            shapes = tuple(_dims(dims) for _, dims in results)
            size = sum(math.prod(s) * bits(t) // 8 for s, (t, _) in zip(shapes, results, strict=True))
            within = groups(line, program.devices)
            times, in_loop = program.times[name], name in program.loops
            every_collective.append(Collective(kind, shapes, size, within, times, in_loop, line.strip(), is_async))
    return every_collective


def groups(line: str, devices: int) -> list[list[int]]:
    """Lists of device numbers that exchange values: in each of the notations that XLA prints."""
    if explicit := re.search(r"(?:replica_groups|source_target_pairs)=\{((?:\{[\d,]*\},?)+)\}", line):
        return [[int(i) for i in group.split(",")] for group in re.findall(r"\{(.*?)\}", explicit[1])]
    if iota := re.search(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", line):
        return _places(*iota.group(2, 3)).reshape(_numbers(iota[1])).tolist()
    if mesh := re.search(
        r"replica_groups=mesh\[([^\]]*)\](?:, device_ids=\(\[([\d,]+)\](?:T\(([\d,]+)\))?\))? \{([^}:]*)\}", line
    ):
        names, texts = zip(*re.findall(r"'(\w+)'=(\d+)", mesh[1]), strict=True)
        sizes = [int(n) for n in texts]
        along = [names.index(name) for name in re.findall(r"'(\w+)'", mesh[4])]
        places = _places(mesh[2] or str(math.prod(sizes)), mesh[3]).reshape(sizes)
        return np.moveaxis(places, along, range(-len(along), 0)).reshape(-1, math.prod(sizes[i] for i in along)).tolist()
    if "replica_groups={}" in line:
        return [list(range(devices))]
    raise ValueError(f"an unknown notation of groups: {line}")


def trips(line: str, bodies: Mapping[str, list[str]]) -> int:
    """Of a loop with a fixed length: as the compiler notes it, else its condition's bound by the step of its counter.

    The rings that TPUs make of products and gathers count by twos.
    """
    if noted := re.search(r'"known_trip_count":\{"n":"(\d+)"', line):
        return int(noted[1])
    condition, body = (re.search(rf"{name}=%?([\w.\-]+)", line) for name in ("condition", "body"))
    tested = bodies.get(condition[1] if condition else "", ())
    bounds = [int(n) for text in tested for n in re.findall(r" constant\((\d+)\)", text)]
    return math.ceil(max(bounds, default=1) / _step(tested, bodies.get(body[1] if body else "", ())))


def _step(condition: Sequence[str], body: Sequence[str]) -> int:
    """By how much a loop's counter, the only part of its state that the condition reads, grows in each round; 1 if unclear."""
    read = {m[1] for text in condition if (m := re.search(r" get-tuple-element\([^)]*\), index=(\d+)", text))}
    root = next((text for text in body if re.match(r"\s*ROOT .* tuple\(", text)), "")
    operands = re.findall(r"%([\w.\-]+)", root[root.rfind(" tuple(") :].partition(")")[0])
    lines = {m[1]: text for text in body if (m := re.match(r"\s*%([\w.\-]+) = ", text))}
    if len(read) != 1 or len(operands) <= int(min(read)):
        return 1
    grown = re.search(r" add\(([^)]*)\)", lines.get(operands[int(min(read))], ""))
    added = [lines.get(name, "") for name in re.findall(r"%([\w.\-]+)", grown[1])] if grown else []
    return next((int(m[1]) for text in added if (m := re.search(r" constant\(([1-9]\d*)\)", text))), 1)


def _numbers(text: str) -> list[int]:
    return [int(n) for n in text.split(",")]


def _dims(text: str) -> tuple[int, ...]:
    return tuple(int(n) for n in text.split(",") if n)


def _places(dims: str, order: str | None) -> np.ndarray:
    places = np.arange(math.prod(_numbers(dims))).reshape(_numbers(dims))
    return places.transpose(_numbers(order)) if order else places


def bits(dtype: str) -> int:
    if dtype in _BITS:
        return _BITS[dtype]
    number = re.match(r"[fsuc](\d+)", dtype)
    assert number is not None, dtype
    return int(number[1])


def summary(exchanges: Sequence[Collective], mesh: Mapping[str, int]) -> dict[tuple[str, tuple[str, ...]], tuple[int, float]]:
    """(kind, axes) -> (executions per step, bytes that a device sends)."""
    table: dict = {}
    for c in exchanges:
        key = (c.kind, c.axes(mesh))
        n, sent = table.get(key, (0, 0.0))
        table[key] = (n + c.times, sent + c.sent)
    return table


def overlapping(exchanges: Sequence[Collective], mesh: Mapping[str, int]) -> dict[tuple[str, tuple[str, ...]], int]:
    """(kind, axes) -> those of `summary`'s executions that overlap computation."""
    table: dict = {}
    for c in exchanges:
        key = (c.kind, c.axes(mesh))
        table[key] = table.get(key, 0) + c.times * c.is_async
    return table
