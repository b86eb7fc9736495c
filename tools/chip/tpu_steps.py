"""Compile the measured cases for TPUs that need not be here, and print the work of their steps.

    python -m tools.chip.tpu_steps FOLDER  # all cases for their slices of v5e
    python -m tools.chip.tpu_steps FOLDER --cases=trm,vit-s --target=tpu:v6e:2x2
    python -m tools.chip.tpu_steps FOLDER --cases=lm-1b-2k model.remat=none

Settings after FOLDER are for every case. FOLDER gets the corpora, and with --keep the programs'
texts. The compiler is that of `jaxtrain plan --setup tpu`. A case takes minutes.

Of one chip and one step:

    counted            the model's FLOP at the chip's peak
    products           FLOP of the products in the program ÷ counted, without kernels of Pallas
    HBM                bytes of the device's memory with the padding of tiles
    roofline           `jaxtrain.plan.traffic`, and the MFU that it would be
    cycles             by the compiler's own estimate, which has none for kernels of Pallas, copies
                       behind other kernels and exchanges
    exchanged          bytes of the results of all exchanges
    passes             bytes of HBM ÷ bytes of the parameters, if they bind the step
"""

import argparse
import pathlib
import sys
import time
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from jaxtrain import config as config_lib
from jaxtrain import plan
from jaxtrain.plan import hlo, traffic, worker
from jaxtrain.plan.choices import resolve
from jaxtrain.plan.compile import Compiled
from jaxtrain.plan.target import Target, abstractly
from tools.chip import cases

V5E = "tpu:v5e:2x2"
OVER_ALL = {"mesh.data": "1", "mesh.fsdp": "-1"}
# rows for four chips
SETTINGS: dict[str, cases.Overrides] = {
    "vit-s": {"train.batch": "1024"},
    "vit-b": {"train.batch": "512"},
    "lm-1b-2k": {"train.batch": "16", "model.remat": "full", **OVER_ALL},
    "lm-1b-8k": {"train.batch": "4", "model.remat": "full", **OVER_ALL},
    "trm": {"train.batch": "3072", "train.accumulate": "4"},
    "higgs-lora": OVER_ALL,
    "giblet": {"model.param_dtype": "bfloat16", "optim.moments": "bfloat16"},
}
LARGER = {"giblet": "tpu:v5e:4x4"}  # case -> its slice, as its state does not fit four chips
MAX_PASSES = 20
HEAD = (
    "| case | rows a chip | counted ms | products | HBM GB | GB a row | roofline ms | cycles ms |"
    " exchanged GB | passes | Pallas | peak GB | s |\n"
    "|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|"
)


class Step(NamedTuple):
    """A compiled step, with the quantities that its figures are relative to."""

    name: str
    rows: float  # of a chip
    flops: float  # counted, of a chip
    parameter_bytes: float  # of a chip
    compiled: Compiled


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    args.folder.mkdir(parents=True, exist_ok=True)
    data = cases.Data(args.folder, small=False)
    print(HEAD, flush=True)
    failed = False
    for name in args.cases:
        target = args.target
        if target == V5E and name in LARGER:
            target = LARGER[name]
        more = dict(setting.split("=", 1) for setting in args.settings)
        case = next(case for case in cases.CASES if case.name == name)
        config = case.config(data, {}, {**SETTINGS[name], **more})
        began = time.monotonic()
        step = compiled(name, config, target)
        if isinstance(step, str):
            print(f"| {name} | {step} |", flush=True)
            failed = True
            continue
        print(row(step, plan.parse_target(target), time.monotonic() - began), flush=True)
        if args.keep:
            (args.folder / f"{name}.txt").write_text(step.compiled.text)
        for scope in args.scopes:
            print(of_scope(step.compiled, plan.parse_target(target), scope), flush=True)
    return int(failed)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        "python -m tools.chip.tpu_steps",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("settings", nargs="*", help="SECTION.FIELD=VALUE for every case")
    parser.add_argument("--target", default=V5E, help=f"default: {V5E}, or a larger slice")
    parser.add_argument("--cases", default=",".join(SETTINGS), help="default: all")
    parser.add_argument("--scopes", default="", help="of the source, whose sums are printed")
    parser.add_argument("--keep", action="store_true", help="write the programs' texts")
    args = parser.parse_intermixed_args(argv)  # settings may be last
    args.cases = args.cases.split(",")
    args.scopes = [scope for scope in args.scopes.split(",") if scope]
    for name in args.cases:
        if name not in SETTINGS:
            parser.error(f"--cases={name} is unknown; expected of: {', '.join(SETTINGS)}")
    for setting in args.settings:
        if "=" not in setting:
            parser.error(f"{setting}: expected SECTION.FIELD=VALUE")
    return args


def compiled(name: str, config: config_lib.Config, text: str) -> Step | str:
    """Compile a case's last step for a target, or return the reason if there is none."""
    target = plan.parse_target(text)
    config, choice = plan.decide(config, target, text)
    if choice:
        print(f"{name}: {choice}", file=sys.stderr, flush=True)
    assembly = abstractly(resolve(config, target), target)
    has_norms = assembly.has_norms(1)  # of most steps
    [answer] = worker.ask([worker.Job(config, text, worker.LAST, has_norms)])
    if answer.compiled is None:
        return answer.error
    held = plan.memory.held(assembly.abstract, assembly.layout, tiled=True)
    return Step(
        name,
        config.train.batch / target.count,
        assembly.task.flops / target.count,
        held["parameters"],
        answer.compiled,
    )


def row(step: Step, target: Target, seconds: float) -> str:
    sums = sums_of(step.compiled.kernels, target)
    chip = target.known_chip
    counted = step.flops / chip.flops
    moved = sums.read + sums.written
    of_cycles = sums.cycles / chip.clock
    passes = moved / step.parameter_bytes
    cells = [
        step.name,
        f"{step.rows:g}",
        f"{1e3 * counted:.1f}",
        f"{sums.flops / step.flops:.3f}",
        f"{moved / 1e9:.1f}",
        f"{moved / step.rows / 1e9:.3f}",
        f"{1e3 * sums.seconds:.0f} ({counted / sums.seconds:.0%})",
        f"{1e3 * of_cycles:.0f} ({counted / of_cycles:.0%})",
        f"{exchanged(step.compiled.text) / 1e9:.2f}",
        f"{passes:.1f}" if passes < MAX_PASSES else "",
        f"{step.compiled.library_calls.get('tpu_custom_call', 0)}",
        f"{step.compiled.peak / 1e9:.2f}",
        f"{seconds:.0f}",
    ]
    return f"| {' | '.join(cells)} |"


def sums_of(kernels: Iterable[traffic.Kernel], target: Target) -> traffic.Roofline:
    chip = target.known_chip
    return traffic.roofline(kernels, traffic.Rates(chip.bandwidth, chip.flops))


def exchanged(text: str) -> float:
    """Return the bytes of the results of a step's exchanges on one device."""
    return float(sum(each.times * each.bytes for each in hlo.collectives(text)))


def of_scope(step: Compiled, target: Target, scope: str) -> str:
    """Return the sums of the kernels with a name in their scope."""
    kernels = [kernel for kernel in step.kernels if scope in kernel.scope]
    sums = sums_of(kernels, target)
    cycles = sums.cycles / target.known_chip.clock
    return (
        f"  {scope}: {(sums.read + sums.written) / 1e9:.2f} GB, {sums.flops / 1e12:.3f} TFLOP,"
        f" roofline {1e3 * sums.seconds:.1f} ms, cycles {1e3 * cycles:.1f} ms,"
        f" {cycles / max(sums.seconds, 1e-12):.2f} x"
    )


if __name__ == "__main__":
    sys.exit(main())
