"""The bytes and products of each kernel that a compiled program executes, and their roofline.

A kernel is an instruction that is executed by itself: a fusion, a call of a library, a product, a
copy. Instructions inside of a fusion are not counted, since their values stay on the chip.

    slices             read and write the slice. An update in place writes the update
    fusions            read each operand once, or its slices if they read nothing else of it
    loops              count their rounds
    conditions         count all of their branches
    asynchronous       their start counts, and the wait for their end does not
    attention          cuDNN's has the products of its pairs, the fewest of a row's documents
                       (`attention_work`). Kernels of Pallas have their bytes alone
    tiles              arrays of TPUs are padded to them, and those in VMEM take no bytes: `layouts`

A TPU's compiler also writes the cycles that it expects of most kernels. They are its model. It has
none for kernels of Pallas, exchanges, and copies that overlap other kernels.

The roofline of a kernel is the time of its bytes at the memory's rate or of its products at the
rate of matrix products, whichever is longer (S. Williams et al., "Roofline", CACM 52(4), 2009).
"""

import collections
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from jaxtrain.plan import attention_work, hlo, layouts
from jaxtrain.plan.hlo import Instruction, Program

# Instructions that move no bytes: they name a value, wait for one, or call what is counted itself.
WITHOUT_TRAFFIC = {
    "after-all",
    "async-start",
    "async-update",
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
RENAMES = ("bitcast", "copy", "reshape")  # inside of a fusion
WITHOUT_WORK = hlo.MARKS | {"AllocateBuffer", "ConcatBitcast"}  # calls
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
    cycles: int = 0  # by the estimate of a TPU's compiler, 0 = it has none

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
    cycles: int = 0  # as in `Kernel`


def traffic(program: Program) -> list[Kernel]:
    """List the kernels that a step executes."""
    kernels = []
    for computation, times in program.times.items():
        if computation in program.inlined:
            continue
        body = {i.name: i for i in program.bodies.get(computation, ())}
        for i in body.values():
            operation = _operation(i)
            if operation in WITHOUT_TRAFFIC | WITHOUT_WORK or i.op.endswith("-done"):
                continue
            read, written = _bytes_moved(i, body, program)
            flops = _flops(i, body, program)
            kernels.append(
                Kernel(i.name, operation, _scope(i), times, read, written, flops, _cycles(i))
            )
    return kernels


def seconds_of_each(kernels: Iterable[Kernel], rates: Rates) -> dict[str, float]:
    """Return the seconds of one execution by the roofline, by the kernel's name."""
    return {kernel.name: kernel.seconds(rates) / kernel.times for kernel in kernels}


def roofline(kernels: Iterable[Kernel], rates: Rates) -> Roofline:
    seconds = seconds_of_bytes = read = written = flops = 0.0
    executions = cycles = 0
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
        cycles += kernel.times * kernel.cycles
        scopes[short_scope(kernel)] += of_kernel
    largest_first = dict(sorted(scopes.items(), key=lambda item: -item[1]))
    return Roofline(
        seconds, seconds_of_bytes, read, written, flops, executions, largest_first, cycles
    )


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
        if kernel.flops and not attention_work.is_call(kernel.op):
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


def _cycles(i: Instruction) -> int:
    match = re.search(r'"estimated_cycles":"(\d+)"', i.line)
    return int(match[1]) if match else 0


def _size(i: Instruction) -> int:
    """Return the bytes of an instruction's results in the device's memory."""
    return sum(array.bits_in_memory for array in layouts.arrays(i.result)) // 8


def _padded(i: Instruction) -> int:
    """Return the bytes of an instruction's results in any memory."""
    return sum(array.bits for array in layouts.arrays(i.result)) // 8


def _bytes_moved(
    i: Instruction, body: Mapping[str, Instruction], program: Program
) -> tuple[int, int]:
    """Return the bytes that one execution reads and writes."""
    fused = _fused(i, program)
    if fused:
        sizes = [_size(body[name]) if name in body else None for name in i.operands]
        return _read_by_fusion(fused, sizes, program), _written_by_fusion(i, fused, program)
    operands = [_size(body[name]) for name in i.operands if name in body]
    if i.op.removesuffix("-start") in SLICES:
        source = operands[0] if operands else _padded(i)
        part, written = _part_and_result(i)
        return min(source, part), written
    if i.op == "dynamic-update-slice":
        update = body[i.operands[1]]
        return _size(update), min(_padded(update), _size(i))
    read = sum(operands)
    if i.op == "copy-start":  # (copy, source, its state)
        return read, layouts.arrays(i.result)[0].bits_in_memory // 8
    if i.op.endswith("-start"):
        return read, _written_by_start(i, len(i.operands))
    return read, _size(i) - _workspace(i)


def _written_by_start(i: Instruction, n_operands: int) -> int:
    """Return the bytes of the results of an asynchronous exchange: (operands, results, states)."""
    arrays = layouts.arrays(i.result)
    results = arrays[n_operands : 2 * n_operands] or arrays  # of an older all-reduce, alone
    return sum(array.bits_in_memory for array in results) // 8


def _workspace(i: Instruction) -> int:
    """Return the bytes that a product of cuBLAS has for its own use, its last result."""
    last = layouts.arrays(i.result)[-1:]
    is_workspace = '"__cublas' in i.line and [array.dtype for array in last] == ["s8"]
    return last[0].bits_in_memory // 8 if is_workspace else 0


def _part_and_result(i: Instruction) -> tuple[int, int]:
    """Return the bytes that a slice reads from the device's memory, and those that it writes."""
    if not i.op.endswith("-start"):
        return _padded(i), _size(i)
    part = layouts.arrays(i.result)[-2]  # ((operands), part, its state)
    return part.bits // 8, part.bits_in_memory // 8


def _fused(i: Instruction, program: Program) -> list[Instruction]:
    """Return the instructions of a fusion, [] for any other instruction."""
    if i.op not in ("fusion", "fusion-start"):
        return []
    targets = [target for role, target in i.called if role == "calls"]
    return program.bodies.get(targets[0], []) if targets else []


def _read_by_fusion(
    fused: Sequence[Instruction], sizes: Sequence[int | None], program: Program
) -> int:
    users = _users(fused)
    read = 0
    for parameter in fused:
        if parameter.op != "parameter":
            continue
        number = _number_of(parameter)
        size = sizes[number] if number < len(sizes) else None
        whole = _size(parameter) if size is None else size
        if whole:
            read += min(whole, _part_read(parameter, users, whole, program))
    return read


def _users(fused: Sequence[Instruction]) -> dict[str, list[Instruction]]:
    users: dict[str, list[Instruction]] = collections.defaultdict(list)
    for i in fused:
        for operand in i.operands:
            users[operand].append(i)
    return users


def _number_of(parameter: Instruction) -> int:
    match = re.search(r" parameter\((\d+)\)", parameter.line)
    return int(match[1]) if match else 0


def _part_read(
    array: Instruction, users: Mapping[str, Sequence[Instruction]], whole: int, program: Program
) -> int:
    """Return the bytes of an array, ``whole``, that a fusion's instructions read."""
    if array.is_root:
        return whole
    part = 0
    for user in users[array.name]:
        inner = _fused(user, program)
        if user.op in RENAMES:
            part += _part_read(user, users, whole, program)
        elif user.op in SLICES and user.operands[0] == array.name:
            part += _padded(user)
        elif user.op == "dynamic-update-slice" and user.operands[0] == array.name:
            part += 0  # updated in place
        elif inner:
            place = user.operands.index(array.name)
            parameters = [i for i in inner if i.op == "parameter" and _number_of(i) == place]
            users_there = _users(inner)
            part += sum(_part_read(i, users_there, whole, program) for i in parameters)
        else:
            return whole
    return part


def _written_by_fusion(i: Instruction, fused: Sequence[Instruction], program: Program) -> int:
    by_name = {inner.name: inner for inner in fused}
    root = next((inner for inner in fused if inner.is_root), None)
    if root is None:
        return 0
    if root.op != "tuple":
        return min(_written(root, by_name, program), _size(i))
    written = 0
    for name, array in zip(root.operands, layouts.arrays(i.result), strict=False):
        written += min(_written(by_name[name], by_name, program), array.bits_in_memory // 8)
    return written


def _written(result: Instruction, by_name: Mapping[str, Instruction], program: Program) -> int:
    """Return the bytes that a fusion writes of a result: all of it, or its update in place."""
    source = result
    while source.op in RENAMES and source.operands[0] in by_name:
        source = by_name[source.operands[0]]
    if source.op == "dynamic-update-slice":
        return _padded(by_name[source.operands[1]])
    inner = {i.name: i for i in _fused(source, program)}
    root = next((i for i in inner.values() if i.is_root and i.op != "tuple"), None)
    if root is not None:
        return min(_padded(result), _written(root, inner, program))
    return _padded(result)


def _flops(i: Instruction, body: Mapping[str, Instruction], program: Program) -> float:
    fused = _fused(i, program)
    if not fused:
        return hlo.flops(i, body) or attention_work.flops(i)
    by_name = {inner.name: inner for inner in fused}
    return sum(_flops(inner, by_name, program) for inner in fused)
