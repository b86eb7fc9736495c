"""The least time that a compiled step takes by a chip's datasheet, and how much of it only waits for other devices.

The scheduled program is gone through in its order. An instruction takes as long as its products take at the chip's peak, or as
long as its operands take to be read and its results to be written at the memory's, whichever is longer. What moves between
devices, and what is copied to memory near a TPU's cores, goes on beside that from where it begins to where it is waited for,
one exchange after the other. So it is a bound, by which two programs for one chip can be compared. It is not a forecast: no
latency is counted, no kernel reaches the peaks, and no time here was compared with a chip's.
"""

import math
import re
from collections.abc import Mapping
from typing import NamedTuple

from jaxtrain.parallel.chips import Chip
from jaxtrain.plan import hlo

FREE = {"parameter", "constant", "get-tuple-element", "tuple", "bitcast", "after-all", "partition-id", "replica-id", "domain"}
SLICES = {"slice", "dynamic-slice", "gather"}  # they read of an operand what they return


class Times(NamedTuple):
    """Seconds of one step on one device."""

    computing: float  # of products and memory
    sending: float  # of all exchanges with other devices, one after the other
    waiting: float  # of ``sending``, what nothing computes beside

    @property
    def together(self) -> float:
        return self.computing + self.waiting


class Clock:
    """Three things that go on at the same time: the device's own work, its links, and copies to memory near its cores."""

    def __init__(self) -> None:
        self.now = self.computing = self.sending = self.waiting = 0.0
        self.busy = {"links": 0.0, "copies": 0.0}  # until when
        self.ends: dict[str, tuple[str, float]] = {}  # what was begun and is not waited for yet

    def compute(self, seconds: float) -> None:
        self.now += seconds
        self.computing += seconds

    def start(self, name: str, kind: str, seconds: float) -> None:
        self.busy[kind] = max(self.busy[kind], self.now) + seconds
        self.sending += seconds if kind == "links" else 0.0
        self.ends[name] = kind, self.busy[kind]

    def wait(self, name: str) -> None:
        kind, end = self.ends.pop(name, ("", 0.0))
        late = max(0.0, end - self.now)
        self.now += late
        if kind == "links":
            self.waiting += late
        else:
            self.computing += late

    def inside(self, times: Times, n: int) -> None:
        """A loop of ``n`` rounds."""
        self.now += n * times.together
        self.computing += n * times.computing
        self.sending += n * times.sending
        self.waiting += n * times.waiting


class Roofline:
    """The times of one program on one chip."""

    def __init__(self, program: hlo.Program, chip: Chip):
        self._program, self._chip = program, chip
        self._bodies = program.bodies
        self._exchanges = {c.name: c.sent / max(c.times, 1) / chip.links for c in hlo.collectives(program)}
        self._products: dict[str, float] = {}
        for one in program.products():
            wide = "f32" in one.operands and chip.kind.startswith("NVIDIA")  # as TF32, at half the speed
            self._products[one.name] = one.flops * (2 if wide else 1)
        self._known: dict[str, Times] = {}

    def of(self, name: str) -> Times:
        if name not in self._known:
            clock = Clock()
            self._run(name, clock)
            self._known[name] = Times(clock.computing, clock.sending, clock.waiting)
        return self._known[name]

    def _run(self, name: str, clock: Clock) -> None:
        shapes = {i.name: i.result for i in self._bodies.get(name, ())}
        for i in self._bodies.get(name, ()):
            if i.op in FREE:
                continue
            elif i.op == "while":
                body = next(c for kind, c in i.called if kind == "body")
                clock.inside(self.of(body), hlo.trips(i, self._bodies))
            elif i.op == "conditional":
                clock.inside(max((self.of(c) for _, c in i.called), key=lambda t: t.together, default=Times(0, 0, 0)), 1)
            elif i.op == "call":
                for _, c in i.called:
                    self._run(c, clock)
            elif i.op.endswith("-update") and i.operands[0] in clock.ends:
                clock.ends[i.name] = clock.ends.pop(i.operands[0])
            elif i.op.endswith(("-done", "-update")):
                clock.wait(i.operands[0])
            elif seconds := self._exchange(i):
                clock.start(i.name, "links", seconds)
                if i.op == "fusion":  # a product that a TPU gathers inside of
                    clock.compute(self._seconds(name, i, shapes))
                if not i.op.endswith("-start") or '"is_sync":true' in i.line:
                    clock.wait(i.name)
            elif i.op.endswith("-start"):
                clock.start(i.name, "copies", _copied(i) / self._chip.bandwidth)
            else:
                clock.compute(self._seconds(name, i, shapes))

    def _exchange(self, i: hlo.Instruction) -> float:
        """Seconds that an instruction, or what it is made of, takes on the links; 0 for what sends nothing."""
        inner = [j for _, c in i.called for j in self._bodies.get(c, ())] if i.op in ("fusion", "async-start") else []
        own = self._exchanges.get(i.name, 0.0)
        return own + sum(self._exchange(j) for j in inner)

    def _seconds(self, name: str, i: hlo.Instruction, shapes: Mapping[str, str]) -> float:
        n = self._program.times.get(name, 1)
        moved = self._moved(i, shapes)
        flops = self._products.get(i.name, 0.0) / n
        flops += sum(self._flops(c) for _, c in i.called if i.op == "fusion") + _kernel_flops(i, shapes)
        return max(flops / self._chip.flops, moved / self._chip.bandwidth)

    def _flops(self, name: str) -> float:
        """Of one execution of a fused computation."""
        n = self._program.times.get(name, 1)
        own = sum(self._products.get(i.name, 0.0) for i in self._bodies.get(name, ())) / n
        return own + sum(self._flops(c) for i in self._bodies.get(name, ()) if i.op == "fusion" for _, c in i.called)

    def _moved(self, i: hlo.Instruction, shapes: Mapping[str, str]) -> float:
        """Bytes that an instruction reads and writes."""
        sizes = [_bytes(shapes.get(x, "")) for x in i.operands]
        if i.op in SLICES:
            return 2 * _bytes(i.result)
        if i.op == "dynamic-update-slice":
            return 2 * sizes[1]
        if i.op == "scatter":
            return 3 * sum(sizes[len(sizes) // 2 + 1 :]) + sizes[len(sizes) // 2]
        if i.op == "fusion" and i.called:
            body = i.called[0][1]
            read = sum(self._read(body, k, size) for k, size in enumerate(sizes))
            return read + self._written(body, _bytes(i.result))
        return sum(sizes) + _bytes(i.result)

    def _read(self, body: str, k: int, size: float) -> float:
        """Bytes that a fused computation reads of its operand ``k``: of what it only slices, the slices."""
        inner = self._bodies.get(body, [])
        names = {i.name for i in inner if i.op == "parameter" and f"parameter({k})" in i.line}
        total = 0.0
        for i in inner:
            if not names & set(i.operands):
                continue
            if i.op == "bitcast":
                names.add(i.name)
            elif i.op in SLICES and i.operands[0] in names:
                total += _bytes(i.result)
            elif i.op == "dynamic-update-slice" and i.operands[0] in names:
                pass  # written in its place
            elif i.op == "fusion":
                total += sum(self._read(c, at, size) for _, c in i.called for at, x in enumerate(i.operands) if x in names)
            else:
                return size
        return min(total, size)

    def _written(self, body: str, size: float) -> float:
        """Bytes that a fused computation writes: of what it updates in place, the updates."""
        inner = {i.name: i for i in self._bodies.get(body, ())}
        root = next((i for i in inner.values() if i.is_root), None)
        if root is None:
            return size
        total = 0.0
        for result in [inner[x] for x in root.operands if x in inner] if root.op == "tuple" else [root]:
            while result.op == "bitcast" and result.operands[0] in inner:
                result = inner[result.operands[0]]
            if result.op == "dynamic-update-slice" and result.operands[1] in inner:
                total += _bytes(inner[result.operands[1]].result)
            else:
                total += _bytes(result.result)
        return min(total, size)


def times(program: hlo.Program, chip: Chip) -> Times:
    """Of a compiled, scheduled program on one chip."""
    return Roofline(program, chip).of(next(iter(program.times)))  # the entry is visited first


def _bytes(text: str) -> float:
    """Of a type's arrays in the device's large memory: those near the cores, "S(1)", take none of its time."""
    return sum(
        math.prod(int(n) for n in dims.split(",") if n) * hlo.bits(dtype) / 8
        for dtype, dims, layout in hlo.SHAPE.findall(text)
        if "S(" not in layout
    )


def _copied(i: hlo.Instruction) -> float:
    """Bytes of the large memory that a copy beside the device's work reads and writes; of part of an array, that part."""
    if i.op == "copy-start":
        return _bytes(i.result)
    sizes = [_bytes(f"{dtype}[{dims}]") for dtype, dims, _ in hlo.SHAPE.findall(i.result) if dims]
    return min(sizes, default=0.0)


def _kernel_flops(i: hlo.Instruction, shapes: Mapping[str, str]) -> float:
    """Of attention's kernels, as though nothing were masked."""
    if i.op != "custom-call":
        return 0.0
    products = next((n for name, n in KERNELS.items() if re.search(name, i.line)), 0)
    if not products or len(i.operands) < 2:
        return 0.0
    given = [hlo.SHAPE.findall(shapes.get(x, "")) for x in i.operands[:2]]
    q, k = ([int(n) for n in found[0][1].split(",") if n] if found else [] for found in given)
    if len(q) != 4 or len(k) != 4:
        return 0.0
    return 2.0 * products * math.prod(q) * k[1]


# Products of each place's query with each place's key, [B, T, H, K] with [B, S, G, K], in attention's kernels.
KERNELS = {
    r"__cudnn\$fmha\w*Backward": 5,
    r"__cudnn\$fmha": 2,
    "flash_forward": 2,
    "flash_backward_queries": 3,
    "flash_backward_keys": 4,
}
