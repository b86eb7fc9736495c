"""A trace of `jax.profiler` of a few steps: the longest operations, matrix units, gaps, copies.

    python -m tools.chip.operations FOLDER     # as jax.profiler.trace(FOLDER) wrote it

Read are the XSpace files (``plugins/profile/*/*.xplane.pb``) by `jaxtrain.telemetry.report.trace`.
On a GPU an operation is a kernel of a stream, on a TPU an event of the line ``XLA Ops``, on a CPU
any event that names an instruction.
"""

import pathlib
import re
import sys
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from jaxtrain.telemetry.report import trace as scoped

# What a name says of where the work is done; the first that matches counts. Kernels of cuBLAS,
# CUTLASS, cuDNN and XLA's Triton on GPUs; HLO names elsewhere ("onednn" is XLA's library for CPUs
# that only takes products).
KINDS = (
    ("copy to the device", re.compile(r"memcpyh2d|infeed", re.I)),
    ("copy from the device", re.compile(r"memcpyd2h|outfeed", re.I)),
    ("attention", re.compile(r"fmha|sdpa|flash|splash", re.I)),
    (
        "product",
        re.compile(
            r"gemm|nvjet|cutlass|cublas|xmma|wgmma|(^|[/_.\-])dot([_.\-]|$)|matmul|conv|onednn",
            re.I,
        ),
    ),
    (
        "between devices",
        re.compile(r"nccl|all-?reduce|all-?gather|reduce-?scatter|all-?to-?all|collective", re.I),
    ),
    ("graph", re.compile(r"graph", re.I)),
    ("copy", re.compile(r"memcpy|memset|^copy|transpose", re.I)),
)
MATRIX = ("attention", "product")  # kinds that run in matrix units
NOT_CONVOLUTION = re.compile(r"convert", re.I)  # "conv" is in it, too
YNNPACK = re.compile(r"ynn", re.I)  # sums and products, as the scope says


class Operation(NamedTuple):
    name: str
    where: str  # its scope, as far as the trace says
    start: float  # [ns]
    end: float

    @property
    def kind(self) -> str:
        name = self.where if YNNPACK.search(self.name) else NOT_CONVOLUTION.sub("", self.name)
        return next((kind for kind, pattern in KINDS if pattern.search(name)), "other")


def read(folder: str | pathlib.Path) -> list[Operation]:
    """All operations of a trace, by start. Raises ValueError without any."""
    found = sorted(pathlib.Path(folder).rglob("*.xplane.pb"))
    if not found:
        raise ValueError(
            f"{folder} holds no *.xplane.pb; jax.profiler.trace({str(folder)!r}) would write one"
        )
    each = (op for file in found for op in scoped.operations(file))
    if not (
        ops := [
            Operation(name, scope or name, start / 1e3, end / 1e3)
            for name, scope, start, end in each
        ]
    ):
        raise ValueError(f"{found[-1]} names no operation of a device")
    return sorted(ops, key=lambda op: op.start)


def union(spans: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """Disjoint spans that cover the same, by start."""
    merged: list[tuple[float, float]] = []
    for start, end in sorted(spans):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


def covered(spans: Iterable[tuple[float, float]]) -> float:
    return sum(end - start for start, end in union(spans))


def common(a: Iterable[tuple[float, float]], b: Iterable[tuple[float, float]]) -> float:
    """How long both are at work."""
    a, b = union(a), union(b)
    return covered(a) + covered(b) - covered([*a, *b])


class Summary(NamedTuple):
    """Of the time from the first operation to the last."""

    seconds: float
    idle: float  # [share] of it in which no operation runs
    longest_gap: float  # [s]
    matrix: float  # [share] of the operations' time that is in matrix units, as far as names show
    kinds: dict[str, float]  # [share] of the operations' time
    # (name, where, kind, share of the operations' time, times), the most first
    top: list[tuple[str, str, str, float, int]]
    copied: float  # [s] that copies to the device took
    overlap: float | None  # [share] of them in which something else runs; None: there are none


def summary(operations: Sequence[Operation], *, top: int = 8) -> Summary:
    """Return times of operations that run side by side add up, so that shares are of their sum."""
    kinds: dict[str, float] = {}
    by_name: dict[tuple[str, str], list[float]] = {}
    for op in operations:
        kinds[op.kind] = kinds.get(op.kind, 0.0) + op.end - op.start
        by_name.setdefault((_plain(op.name), op.kind), []).append(op.end - op.start)
    where = {_plain(op.name): op.where for op in reversed(operations)}
    busy = sum(kinds.values())
    spans = union((op.start, op.end) for op in operations)
    whole = spans[-1][1] - spans[0][0]
    gaps = [after[0] - before[1] for before, after in zip(spans, spans[1:], strict=False)]
    copies = [(op.start, op.end) for op in operations if op.kind == "copy to the device"]
    others = [
        (op.start, op.end)
        for op in operations
        if op.kind not in ("copy to the device", "copy from the device")
    ]
    ranked = sorted(by_name.items(), key=lambda item: -sum(item[1]))[:top]
    return Summary(
        seconds=whole * 1e-9,
        idle=sum(gaps) / whole if whole else 0.0,
        longest_gap=max(gaps, default=0.0) * 1e-9,
        matrix=sum(kinds.get(kind, 0.0) for kind in MATRIX) / busy,
        kinds={kind: kinds[kind] / busy for kind in sorted(kinds, key=lambda kind: -kinds[kind])},
        top=[
            (name, where[name], kind, sum(times) / busy, len(times))
            for (name, kind), times in ranked
        ],
        copied=covered(copies) * 1e-9,
        overlap=common(copies, others) / covered(copies) if copies else None,
    )


def _plain(name: str) -> str:
    """Return the name without the number that distinguishes copies of one operation."""
    return re.sub(r"([._]\d+)+$", "", name)


def advice(found: Summary) -> str:
    """Return the first thing to look at, by the longest time without a matrix unit."""
    lost = {
        kind: share * (1 - found.idle) for kind, share in found.kinds.items() if kind not in MATRIX
    }
    lost["gaps"] = found.idle
    worst = max(lost, key=lambda kind: lost[kind])
    if lost[worst] < 0.1:
        return (
            f"nothing stands out: {found.matrix:.0%} of the operations' time is in matrix units,"
            f" gaps are {found.idle:.0%}"
        )
    if worst == "gaps":
        longest = f"longest {1e3 * found.longest_gap:.2f} ms"
        return (
            f"gaps: nothing runs in {found.idle:.0%} of the time ({longest}); what feeds the"
            " device?"
        )
    if worst == "graph":
        return (
            f"kernels inside CUDA graphs, {lost[worst]:.0%} of the time, are not distinguished; to"
            " see them: XLA_FLAGS=--xla_gpu_enable_command_buffer= and --only profile"
        )
    name, where, _, share, times = next(
        row for row in (*found.top, ("", "", worst, 0.0, 0)) if row[2] == worst
    )
    most = (
        f"; most of one name in {name} ({where or 'unnamed'}), {share:.0%} in {times} calls"
        if name
        else ""
    )
    return (
        f"{'operations outside matrix units' if worst == 'other' else worst}: {lost[worst]:.0%} of"
        f" the time{most}"
    )


def lines(found: Summary) -> list[str]:
    """For people."""
    kinds = ", ".join(f"{kind} {share:.0%}" for kind, share in found.kinds.items())
    rows = [
        (
            f"{1e3 * found.seconds:.1f} ms, {found.idle:.1%} of it gaps (longest"
            f" {1e3 * found.longest_gap:.2f} ms); {found.matrix:.0%} of the operations' time in"
            " matrix units"
        ),
        f"by kind: {kinds}",
    ]
    rows += [
        f"{share:6.1%}  {times:5} ×  {name[:60]:60}  {kind}"
        for name, _, kind, share, times in found.top
    ]
    if found.overlap is not None:
        rows.append(
            f"copies to the device: {1e3 * found.copied:.2f} ms, {found.overlap:.0%} of it while"
            " something computes"
        )
    return [*rows, f"next: {advice(found)}"]


if __name__ == "__main__":
    try:
        print("\n".join(lines(summary(read(sys.argv[1])))))
    except (IndexError, ValueError) as error:
        sys.exit(f"{__doc__.splitlines()[2].strip()}\n{error}")
