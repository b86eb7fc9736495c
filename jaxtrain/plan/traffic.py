"""The bytes and products of each kernel that a compiled program executes, and their roofline.

A kernel is an instruction that is executed by itself: a fusion, a call of a library, a product, a
copy. Instructions inside of a fusion are not counted, since their values stay on the chip.

    slices             read and write the slice. An update in place writes the update
    fusions            read each operand once, or its slices if they read nothing else of it
    loops              count their rounds
    asynchronous       their start counts, and the wait for their end does not
    attention          a library's call of it has its bytes alone: its products are in no text

The roofline of a kernel is the time of its bytes at the memory's rate or of its products at the
rate of matrix products, whichever is longer (S. Williams et al., "Roofline", CACM 52(4), 2009).
"""

import collections
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from jaxtrain.plan import hlo
from jaxtrain.plan.hlo import Instruction, Program

# Instructions that move no bytes: they name a value, wait for one, or call what is counted itself.
WITHOUT_TRAFFIC = {
    "after-all",
    "async-start",
    "bitcast",
    "call",
    "conditional",
    "constant",
    "get-tuple-element",
    "iota",
    "opt-barrier",
    "optimization-barrier",
    "parameter",
    "partition-id",
    "replica-id",
    "tuple",
    "while",
}
RENAMES = ("bitcast", "reshape")  # inside of a fusion
SLICES = ("dynamic-slice", "gather", "slice")
SCOPE_PARTS = 3  # of a scope that a person reads
WITHOUT_ROWS = ("guard", "update")  # scopes of a step whose arrays are those of the parameters
PASSES = 3  # of products over their matrices: forward, and the gradients of both operands
LITTLE_MORE = 0.1  # of a step's time


class Kernel(NamedTuple):
    """An executed instruction. Bytes and FLOP are those of one execution on one device."""

    name: str
    op: str  # the operation, or the target of a library's call
    scope: str  # the path of named scopes in the source that it comes from
    times: int  # executions in a step
    read: int  # [bytes]
    written: int  # [bytes]
    flops: float  # of its matrix products

    def seconds(self, rates: "Rates") -> float:
        """Return the time of all executions by the roofline."""
        moving = (self.read + self.written) / rates.bandwidth
        return self.times * max(moving, self.flops / rates.flops)

    def is_bound_by_bytes(self, rates: "Rates") -> bool:
        return (self.read + self.written) / rates.bandwidth >= self.flops / rates.flops


class Rates(NamedTuple):
    bandwidth: float  # [bytes/s] of the memory
    flops: float  # [FLOP/s] of matrix products


class Roofline(NamedTuple):
    """The sums over a step's kernels."""

    seconds: float
    seconds_of_bytes: float  # of the kernels that are bound by bytes
    read: float  # [bytes]
    written: float  # [bytes]
    flops: float
    kernels: int  # executions
    scopes: dict[str, float]  # scope -> seconds, the largest first


def traffic(program: Program) -> list[Kernel]:
    """List the kernels that a step executes."""
    kernels = []
    for computation, times in program.times.items():
        if computation in program.inlined:
            continue
        body = {i.name: i for i in program.bodies.get(computation, ())}
        for i in body.values():
            if i.op in WITHOUT_TRAFFIC or i.op.endswith("-done"):
                continue
            read, written = _bytes_moved(i, body, program)
            kernel = Kernel(
                i.name, _operation(i), _scope(i), times, read, written, _flops(i, body, program)
            )
            kernels.append(kernel)
    return kernels


def roofline(kernels: Iterable[Kernel], rates: Rates) -> Roofline:
    seconds = seconds_of_bytes = read = written = flops = 0.0
    executions = 0
    scopes: dict[str, float] = collections.defaultdict(float)
    for kernel in kernels:
        of_kernel = kernel.seconds(rates)
        seconds += of_kernel
        if kernel.is_bound_by_bytes(rates):
            seconds_of_bytes += of_kernel
        read += kernel.times * kernel.read
        written += kernel.times * kernel.written
        flops += kernel.times * kernel.flops
        executions += kernel.times
        scopes[short_scope(kernel)] += of_kernel
    largest_first = dict(sorted(scopes.items(), key=lambda item: -item[1]))
    return Roofline(seconds, seconds_of_bytes, read, written, flops, executions, largest_first)


def rows_for_little_more(
    kernels: Sequence[Kernel], rates: Rates, *, rows: int, matrices: float
) -> int:
    """Return how many rows a step may have for `LITTLE_MORE` of its time, by an estimate.

    The guard and the update take the same time for any rows, and products read their matrices once
    for any rows. All other bytes, and the FLOP of products, are in proportion to the rows.

    ``matrices``: bytes of the parameters, times the microbatches that read them.
    """
    fixed = moving = computing = in_products = 0.0  # [s]
    for kernel in kernels:
        if any(f"/{name}/" in kernel.scope for name in WITHOUT_ROWS):
            fixed += kernel.seconds(rates)
            continue
        of_bytes = kernel.times * (kernel.read + kernel.written) / rates.bandwidth
        moving += of_bytes
        computing += kernel.times * kernel.flops / rates.flops
        if kernel.flops:
            in_products += of_bytes
    of_matrices = min(in_products, PASSES * matrices / rates.bandwidth)
    allowed = (1 + LITTLE_MORE) * (fixed + max(moving, computing)) - fixed
    growing = moving - of_matrices
    factors = [
        (allowed - of_matrices) / growing if growing > 0 else math.inf,
        allowed / computing if computing > 0 else math.inf,
    ]
    factor = min(factors)
    return int(rows * factor) if math.isfinite(factor) else rows


def short_scope(kernel: Kernel) -> str:
    """Return the innermost names of a kernel's scope, or its operation if it has none."""
    names = []
    for name in kernel.scope.split("/"):
        # the names of transformations, as jit(…) and transpose(jvp(…)), around a name of the source
        inner = re.sub(r"^(?:\w+\()*|\)+$", "", name)
        if inner and inner not in ("while", "body", "closed_call", "checkpoint", "train_step"):
            names.append(inner)
    return "/".join(names[-SCOPE_PARTS:]) or kernel.op


def _scope(i: Instruction) -> str:
    match = re.search(r'op_name="([^"]*)"', i.line)
    return match[1] if match else ""


def _operation(i: Instruction) -> str:
    match = re.search(r'custom_call_target="([^"]+)"', i.line)
    return match[1] if match else i.op


def _size(i: Instruction) -> int:
    """Return the bytes of an instruction's results."""
    return sum(math.prod(dims) * hlo.bits(dtype) for dtype, dims in i.shapes) // 8


def _bytes_moved(
    i: Instruction, body: Mapping[str, Instruction], program: Program
) -> tuple[int, int]:
    """Return the bytes that one execution reads and writes."""
    fused = _fused(i, program)
    if fused:
        sizes = [_size(body[name]) if name in body else None for name in i.operands]
        return _read_by_fusion(fused, sizes), _written_by_fusion(fused)
    if i.op in SLICES:
        return _size(i), _size(i)
    if i.op == "dynamic-update-slice":
        update = _size(body[i.operands[1]])
        return update, update
    read = sum(_size(body[name]) for name in i.operands if name in body)
    # The result of a start holds its operands, too.
    written = read if i.op.endswith("-start") else _size(i)
    return read, written


def _fused(i: Instruction, program: Program) -> list[Instruction]:
    """Return the instructions of a fusion, [] for any other instruction."""
    if i.op not in ("fusion", "fusion-start"):
        return []
    targets = [target for role, target in i.called if role == "calls"]
    return program.bodies.get(targets[0], []) if targets else []


def _read_by_fusion(fused: Sequence[Instruction], sizes: Sequence[int | None]) -> int:
    users: dict[str, list[Instruction]] = collections.defaultdict(list)
    for i in fused:
        for operand in i.operands:
            users[operand].append(i)
    read = 0
    for parameter in fused:
        if parameter.op != "parameter":
            continue
        number = _number_of(parameter)
        size = sizes[number] if number < len(sizes) else None
        whole = _size(parameter) if size is None else size
        read += min(whole, _part_read(parameter, users, whole))
    return read


def _number_of(parameter: Instruction) -> int:
    match = re.search(r" parameter\((\d+)\)", parameter.line)
    return int(match[1]) if match else 0


def _part_read(array: Instruction, users: Mapping[str, Sequence[Instruction]], whole: int) -> int:
    """Return the bytes of an array, ``whole``, that a fusion's instructions read."""
    part = 0
    for user in users[array.name]:
        if user.op in RENAMES:
            part += _part_read(user, users, whole)
        elif user.op in SLICES:
            part += _size(user)
        elif user.op == "dynamic-update-slice" and user.operands[0] == array.name:
            part += 0  # updated in place
        else:
            return whole
    return part


def _written_by_fusion(fused: Sequence[Instruction]) -> int:
    by_name = {i.name: i for i in fused}
    root = next((i for i in fused if i.is_root), None)
    if root is None:
        return 0
    results = [root]
    if root.op == "tuple":
        results = [by_name[name] for name in root.operands]
    return sum(_written(result, by_name) for result in results)


def _written(result: Instruction, by_name: Mapping[str, Instruction]) -> int:
    source = result
    while source.op in RENAMES and source.operands[0] in by_name:
        source = by_name[source.operands[0]]
    if source.op == "dynamic-update-slice":
        return _size(by_name[source.operands[1]])
    return _size(result)


def _flops(i: Instruction, body: Mapping[str, Instruction], program: Program) -> float:
    fused = _fused(i, program)
    if not fused:
        return hlo.flops(i, body)
    by_name = {inner.name: inner for inner in fused}
    return sum(hlo.flops(inner, by_name) for inner in fused)
