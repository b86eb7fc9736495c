"""The kind of each kernel of a program: kernels of one kind reach about the same rates.

product     of matrices, with what is fused to it
attention   a library's or a Pallas kernel
reduction   a fusion that adds up or takes the largest, as norms and softmax do
gather      reads or writes rows by their numbers, sorts
copy        moves values: copies, transposes, slices, pads and stacks
map         computes each number by itself
"""

import re
from collections.abc import Iterator

from jaxtrain.plan.hlo import Instruction, Program
from jaxtrain.plan.traffic import Kernel

KINDS = ("product", "attention", "reduction", "gather", "copy", "map")
# Operations of a fusion decide its kind, the first kind of which it has one.
DECISIVE = {
    "reduction": {"reduce", "reduce-window"},
    "gather": {"gather", "scatter", "sort"},
}
MOVES = {
    "bitcast",
    "broadcast",
    "concatenate",
    "constant",
    "copy",
    "copy-start",
    "dynamic-slice",
    "dynamic-update-slice",
    "iota",
    "pad",
    "parameter",
    "reshape",
    "reverse",
    "slice",
    "transpose",
    "tuple",
}
ATTENTION = re.compile(r"fmha|flash|splash|mha|attention", re.IGNORECASE)


def kind(kernel: Kernel, instruction: Instruction, program: Program) -> str:
    is_call = instruction.op == "custom-call" and not kernel.op.startswith("__cublas")
    if is_call and ATTENTION.search(f"{kernel.op} {kernel.scope}"):
        return "attention"
    if kernel.flops or kernel.op.startswith("__cublas"):
        return "product"
    operations = {i.op.removesuffix("-start") for i in parts(instruction, program)}
    for of_kind, decisive in DECISIVE.items():
        if operations & decisive:
            return of_kind
    return "copy" if operations <= MOVES else "map"


def parts(instruction: Instruction, program: Program) -> Iterator[Instruction]:
    """Yield the instructions of a kernel, those of fusions within fusions too."""
    if instruction.op not in ("fusion", "fusion-start"):
        yield instruction
        return
    for role, target in instruction.called:
        if role == "calls":
            for i in program.bodies.get(target, ()):
                yield from parts(i, program)
