"""What moves between devices, read off a compiled program's text."""

import math
import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute", "collective-broadcast")
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


def collectives(text: str) -> list[Collective]:
    """Every collective of a compiled module (``compiled.as_text()``)."""
    parts = re.findall(r"^(ENTRY )?%?([\w.\-]+) [^\n]*\{\n(.*?)^\}", text, re.M | re.S)
    bodies = {name: body.splitlines() for _, name, body in parts}
    devices = max((int(n) for n in re.findall(r"(?:num_partitions|replica_count)=(\d+)", text[:4000])), default=1)
    times: dict[str, int] = {}
    loops: set[str] = set()

    def visit(name: str, n: int, in_loop: bool) -> None:
        times[name] = times.get(name, 0) + n
        if in_loop:
            loops.add(name)
        for line in bodies.get(name, ()):
            trips = _trips(line, bodies) if " while(" in line else 1
            for kind, called in re.findall(r"\b(calls|to_apply|body|branch_computations)=\{?([%\w.\-, ]+)", line):
                for target in re.findall(r"[\w.\-]+", called):
                    if target in bodies:
                        of_loop = kind == "body"
                        visit(target, n * (trips if of_loop else 1), in_loop or of_loop)

    for entry, name, _ in parts:
        if entry:
            visit(name, 1, False)
    found = []
    pattern = re.compile(rf" ({'|'.join(KINDS)})(-start)?\(")
    for name, lines in bodies.items():
        for line in lines:
            if name in times and (match := pattern.search(line)):
                kind, start = match.groups()
                results = _SHAPE.findall(line[: match.start()].partition(" = ")[2])
                if start and kind != "all-reduce":  # the others start with (operands, results)
                    results = [r for r in results if r[0] != "u32" or r[1]] if kind == "collective-permute" else results
                    results = results[len(results) // 2 :]
                if name.startswith("all-reduce-scatter"):  # how TPUs write it: a fusion of a sum and each device's part of it
                    kind, results = "reduce-scatter", [r for r in _SHAPE.findall(lines[-1].partition(" = ")[2])[:1]]
                shapes = tuple(tuple(int(n) for n in dims.split(",") if n) for _, dims in results)
                size = sum(math.prod(s) * _bits(t) // 8 for s, (t, _) in zip(shapes, results, strict=True))
                found.append(Collective(kind, shapes, size, groups(line, devices), times[name], name in loops, line.strip()))
    return found


def groups(line: str, devices: int) -> list[list[int]]:
    """Lists of device numbers that exchange values: in each of the notations that XLA prints."""
    if explicit := re.search(r"(?:replica_groups|source_target_pairs)=\{((?:\{[\d,]*\},?)+)\}", line):
        return [[int(i) for i in group.split(",")] for group in re.findall(r"\{(.*?)\}", explicit[1])]
    if iota := re.search(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", line):
        return _places(*iota.group(2, 3)).reshape(_numbers(iota[1])).tolist()
    if mesh := re.search(
        r"replica_groups=mesh\[([^\]]*)\](?:, device_ids=\(\[([\d,]+)\](?:T\(([\d,]+)\))?\))? \{([^}:]*)\}", line
    ):
        names, sizes = zip(*re.findall(r"'(\w+)'=(\d+)", mesh[1]), strict=True)
        sizes = [int(n) for n in sizes]
        along = [names.index(name) for name in re.findall(r"'(\w+)'", mesh[4])]
        places = _places(mesh[2] or str(math.prod(sizes)), mesh[3]).reshape(sizes)
        return np.moveaxis(places, along, range(-len(along), 0)).reshape(-1, math.prod(sizes[i] for i in along)).tolist()
    if "replica_groups={}" in line:
        return [list(range(devices))]
    raise ValueError(f"an unknown notation of groups: {line}")


def _trips(line: str, bodies: Mapping[str, list[str]]) -> int:
    """Of a loop with a fixed length: as the compiler notes it, else the number that its condition compares with."""
    if noted := re.search(r'"known_trip_count":\{"n":"(\d+)"', line):
        return int(noted[1])
    condition = re.search(r"condition=%?([\w.\-]+)", line)
    bounds = [
        int(n) for text in bodies.get(condition[1] if condition else "", ()) for n in re.findall(r" constant\((\d+)\)", text)
    ]
    return max(bounds, default=1)


def _numbers(text: str) -> list[int]:
    return [int(n) for n in text.split(",")]


def _places(dims: str, order: str | None) -> np.ndarray:
    places = np.arange(math.prod(_numbers(dims))).reshape(_numbers(dims))
    return places.transpose(_numbers(order)) if order else places


def _bits(dtype: str) -> int:
    return _BITS.get(dtype) or int(re.match(r"[fsuc](\d+)", dtype)[1])


def summary(found: Sequence[Collective], mesh: Mapping[str, int]) -> dict[tuple[str, tuple[str, ...]], tuple[int, float]]:
    """(kind, axes) -> (executions per step, bytes that a device sends)."""
    table: dict = {}
    for c in found:
        key = (c.kind, c.axes(mesh))
        n, sent = table.get(key, (0, 0.0))
        table[key] = (n + c.times, sent + c.sent)
    return table
