"""The costs of kernels on a machine's CPUs, as a sum over the work that they do.

A CPU's kernels are too small, and too unlike each other, for shares of one rate. A `Work` counts
the numbers that a kernel computes, adds up or moves, and its bytes by the cache that holds them.
Each has a cost in seconds, which `calibration` fits to kernels that it times on the machine.
Kernels of a library, products that XLA computes itself, and its others have costs of their own.

Devices of one machine share its cores. Costs are measured with one device, with one device a core
and with two a core. With more, the kernels of D devices on C cores run D / C after another.

In an exchange the devices of a group meet once for each array: a sum of 18 arrays takes 18
rendezvous, each at a cost for each device of the group.
"""

import collections
import math
import re
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import NamedTuple

from jaxtrain.plan import hlo, kinds, traffic
from jaxtrain.plan.hlo import Collective, Instruction, Program

EXPENSIVE = {
    "division": set("cbrt divide remainder rsqrt sqrt".split()),
    "exponential": set("exponential exponential-minus-one expm1 log log-plus-one logistic".split()),
    "tanh": {"erf", "tanh"},
    "most expensive": set("atan2 cosine power sine tan".split()),
}
KIND_OF = {op: kind for kind, ops in EXPENSIVE.items() for op in ops}
MOVED = set(
    "concatenate copy dynamic-slice dynamic-update-slice pad reverse slice transpose".split()
)
# Prefixes of kinds of work with costs of their own.
LIBRARY, PRODUCT, PRODUCTS = "library: ", "product by XLA: ", "batched product by XLA: "
PREFIXES = (LIBRARY, PRODUCT, PRODUCTS, "")
LAUNCHES = tuple(f"{prefix}launch" for prefix in PREFIXES)
BY_NUMBER = {"gather", "scatter"}
FREE = set(
    "bitcast bitcast-convert broadcast constant dot get-tuple-element iota parameter reduce"
    " reduce-window reshape sort tuple".split()
)
THIN = 32  # rows, columns or depth of a product, from which on it is as fast as large ones
# [bytes] of a kernel that the second and the third cache hold; what is beyond costs more
CACHES = {"beyond the second cache": 1 << 20, "beyond the third cache": 16 << 20}
# [s] of one, about as a core of 2.5 GHz with vectors of 512 bits has them
TYPICAL = {
    "launch": 1e-6,
    "map": 3e-11,
    "sum": 1.5e-10,
    "result of a sum": 1e-9,
    "product": 5e-12,
    "thin product": 4e-12,
    "result of a product": 1e-10,
    "operand of a product": 5e-11,
    "small product": 1e-7,
    "division": 4e-10,
    "exponential": 3e-10,
    "tanh": 5e-10,
    "most expensive": 2e-9,
    "gather": 2e-10,
    "sort": 5e-9,
    "move": 3e-11,
    "turn": 1e-9,
    "moved": 1e-11,
    "beyond the second cache": 1e-11,
    "beyond the third cache": 3e-11,
}
LAYOUT = re.compile(r"\]\{(\d+)")  # the axis whose numbers are neighbours
Work = Mapping[str, float]


class Exchanges(NamedTuple):
    """Exchanges of a machine's devices: they meet, and one copies from the memory of the others."""

    rendezvous: float  # [s] of each device in one
    sending: float  # [s/byte]

    def lanes(self, collective: Collective) -> frozenset[Hashable]:
        return frozenset({"memory"})  # the same for all

    def seconds(self, collective: Collective) -> float:
        work = _work_of_exchange(collective)
        return self.rendezvous * work["rendezvous"] + self.sending * work["sending"]


class HostCosts(NamedTuple):
    costs: Mapping[str, float]  # kind of work -> [s]
    name: str
    threads: int  # cores that one device has for itself
    error: float | None = None  # median of the programs that the costs were fitted to
    steps: int = 0  # how many programs

    def seconds(self, work: Work) -> float:
        return sum(self.costs.get(kind, 0.0) * amount for kind, amount in work.items())

    @property
    def exchanges(self) -> Exchanges:
        return Exchanges(self.costs.get("rendezvous", 0.0), self.costs.get("sending", 0.0))

    def describe(self) -> str:
        return f"{self.name}: median error {self.error:.0%} on the {self.steps} programs of its fit"


def typical_cost(kind: str) -> float:
    """Return the seconds of a kind of kernels' work on a common CPU."""
    prefix = next(prefix for prefix in PREFIXES if kind.startswith(prefix))
    return TYPICAL[kind.removeprefix(prefix)]


def work_without_kernels(program: Program) -> dict[str, float]:
    """Add up the work of a step that is no kernel's: its call, exchanges, and kernels to start."""
    together: dict[str, float] = collections.defaultdict(float)
    for collective in hlo.collectives(program):
        for kind, amount in _work_of_exchange(collective).items():
            together[kind] += collective.times * amount
    return {**together, **work_of_call(program)}


def _work_of_exchange(collective: Collective) -> dict[str, float]:
    """Return the work of one execution, in which each device of a group wakes the others."""
    n_devices = len(collective.groups[0])
    sent = collective.bytes * n_devices
    return {"rendezvous": len(collective.shapes) * n_devices, "sending": sent}


def work_of_call(program: Program) -> dict[str, float]:
    """Return the work of a call of the program: its arguments and results, and rounds of loops."""
    [entry] = program.entries
    body = program.bodies[entry]
    n_arguments = sum(i.op == "parameter" for i in body)
    n_rounds = 0
    for computation, i in program.executed():
        if i.op == "while":
            n_rounds += program.times[computation] * (hlo.trips(i, program.bodies) or 1)
    return {"call": 1, "argument": n_arguments, "round": n_rounds}


def works(program: Program, threads: int) -> Iterator[tuple[traffic.Kernel, Work]]:
    """Yield each kernel with the work of one execution.

    ``threads``: cores that one device has for itself.
    """
    instructions = {i.name: i for _, i in program.executed()}
    bodies = {i.name: body for _, body in program.bodies.items() for i in body}
    for kernel in traffic.traffic(program):
        i = instructions[kernel.name]
        if i.op.removesuffix("-start") in hlo.KINDS:
            continue
        work = _work(kernel, i, program, bodies[kernel.name])
        share = 1 / min(threads, _partitions(i))
        yield (
            kernel,
            {kind: n if kind in LAUNCHES else n * share for kind, n in work.items()},
        )


def _partitions(i: Instruction) -> int:
    match = re.search(r'"outer_dimension_partitions":\[([^\]]+)\]', i.line)
    return math.prod(int(n) for n in re.findall(r"\d+", match[1])) if match else 1


def _work(
    kernel: traffic.Kernel, i: Instruction, program: Program, body: Sequence[Instruction]
) -> dict[str, float]:
    work: dict[str, float] = collections.defaultdict(float)
    work["launch"] = 1
    moved = kernel.read + kernel.written
    inner = list(kinds.parts(i, program))
    by_name = {part.name: part for part in (inner if i.op == "fusion" else body)}
    is_library = '"kind":"__ynn_fusion"' in i.line
    for part in inner:
        size = float(sum(math.prod(dims) for _, dims in part.shapes))
        if part.op == "dot":
            for kind, amount in _product(part, by_name).items():
                work[kind] += amount
        elif part.op in ("reduce", "reduce-window"):
            read = by_name.get(part.operands[0])
            n_read = sum(math.prod(dims) for _, dims in read.shapes) if read else size
            work["sum"] += n_read
            work["result of a sum"] += size
        elif part.op == "sort":
            work["sort"] += size * max(1.0, math.log2(max(size, 2)))
        elif part.op in BY_NUMBER:
            work["gather"] += size
        elif part.op in MOVED:
            work["turn" if _turns(part, by_name) else "move"] += min(size, moved)
        elif part.op in KIND_OF:
            work[KIND_OF[part.op]] += size
        elif part.op not in FREE:
            work["map"] += size
    work["moved"] = moved
    for place, cache in CACHES.items():
        if moved > cache:
            work[place] = moved
    prefix = ""
    if is_library:
        prefix = LIBRARY
    elif i.op == "dot":
        prefix = PRODUCTS if work["small product"] > 1 else PRODUCT
    return {f"{prefix}{kind}": amount for kind, amount in work.items()}


def _turns(part: Instruction, by_name: Mapping[str, Instruction]) -> bool:
    """Tell whether neighbours in the result are apart in the operand."""
    source = by_name.get(part.operands[0])
    if source is None or part.op not in ("copy", "transpose"):
        return False
    before, after = (LAYOUT.search(i.result) for i in (source, part))
    if not (before and after):
        return False
    fastest, place = int(before[1]), int(after[1])
    if order := re.search(r" dimensions=\{([\d,]+)\}", part.line):
        place = int(order[1].split(",")[place])
    return fastest != place


def _product(dot: Instruction, by_name: Mapping[str, Instruction]) -> dict[str, float]:
    """Return the work of a product of matrices."""
    flops = hlo.flops(dot, by_name)
    _, dims = dot.shapes[0]
    left, right = (by_name.get(name) for name in dot.operands[:2])
    if left is None or right is None:
        return {"product": flops}
    batch = re.search(r"lhs_batch_dims=\{([\d,]*)\}", dot.line)
    n_batch = len(re.findall(r"\d+", batch[1])) if batch else 0
    n_products = math.prod(dims[:n_batch])
    results = math.prod(dims)
    depth = flops / (2 * results)
    rows = math.prod(left.shapes[0][1]) / (n_products * depth)
    columns = math.prod(right.shapes[0][1]) / (n_products * depth)
    is_thin = min(rows, columns, depth) < THIN
    return {
        "product": flops,
        "thin product": flops if is_thin else 0.0,  # on top
        "result of a product": results,
        "operand of a product": n_products * depth * (rows + columns),
        "small product": n_products,
    }
