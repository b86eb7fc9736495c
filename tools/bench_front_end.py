"""The share of the front end in a ViT-S step that makes its spectrograms (data.form=waveform).

    taskset -c 0 python -m tools.bench_front_end          CPU seconds of a step on one core
    python -m tools.bench_front_end --target gpu:h100x1   FLOPs and bytes, as compiled for a chip

Steps with and without the front end are run by turns. A step is the supervised recipe's, of one
view a row. FLOPs are those of products and transforms. Bytes are those that kernels read and
write, if none is found in a cache.
"""

import argparse
import math
import statistics
import sys
import time
from collections.abc import Iterator, Sequence

import numpy as np

from jaxtrain import config as config_lib
from jaxtrain.plan import hlo, worker
from jaxtrain.workloads.bird import model as bird
from tools.our_step import Ours

FORMS = ("spectrogram", "waveform")
NO_KERNELS = {
    "parameter",
    "constant",
    "tuple",
    "get-tuple-element",
    "bitcast",
    "while",
    "conditional",
    "call",
    "after-all",
}


def cpu_steps(form: str, rows: int) -> Iterator[float]:
    """Compile a step on this machine, and yield the CPU seconds of each run of it."""
    rng = np.random.default_rng(0)
    values = {
        "spectrogram": rng.standard_normal((rows, 512, 128), "f4"),
        "waveform": rng.integers(-9999, 9999, (rows, 160_000), "i2"),
    }
    batch = {
        form: values[form],
        "label": np.zeros(rows, "i4"),
        "index": np.arange(rows, dtype="i4"),
    }
    batch |= {"epoch": np.zeros(rows, "i4"), "weight": np.ones(rows, "f4")}
    model = bird.Config(preset="s", patch=(16, 16), dtype="float32", n_classes=409, form=form)
    step = Ours(bird.make_task, model, config_lib.Optim(), batch)
    while True:
        began = time.process_time()
        step()
        yield time.process_time() - began


def on_cpu(rows: int, rounds: int) -> None:
    steps = {form: cpu_steps(form, rows) for form in FORMS}
    for each in steps.values():
        next(each)  # compiled, and computed once
    turns = [{form: next(steps[form]) for form in FORMS[:: 1 - 2 * (k % 2)]} for k in range(rounds)]
    share = statistics.median(turn["waveform"] / turn["spectrogram"] - 1 for turn in turns)
    middle = {form: statistics.median(turn[form] for turn in turns) for form in FORMS}
    print(
        f"{rows} rows a step, CPU s: "
        + ", ".join(f"{form} {seconds:.3f}" for form, seconds in middle.items())
    )
    print(
        f"the front end adds {share:.1%} (median of {rounds} pairs),"
        f" {share * middle['spectrogram'] / rows * 1e3:.2f} ms a row"
    )


def traffic(program: hlo.Program) -> float:
    """Bytes that the kernels of a step read and write."""
    sizes = {
        (name, i.name): sum(math.prod(dims) * hlo.bits(dtype) / 8 for dtype, dims in i.shapes)
        for name, i in program.executed()
    }
    kernels = (
        (name, i)
        for name, i in program.executed()
        if name not in program.fused and i.op not in NO_KERNELS
    )
    return sum(
        program.times[name]
        * (sizes[name, i.name] + sum(sizes.get((name, x), 0) for x in i.operands))
        for name, i in kernels
    )


def transforms(program: hlo.Program) -> float:
    """FLOPs of the real Fourier transforms of a step: 2.5 n log2 n each."""
    total = 0.0
    for name, i in program.executed():
        if i.op == "fft":
            length = int(i.line.partition("fft_length={")[2].partition("}")[0])
            total += (
                program.times[name]
                * math.prod(i.shapes[0][1][:-1])
                * 2.5
                * length
                * math.log2(length)
            )
    return total


def on_target(target: str, rows: int) -> int:
    settings = {"train.batch": str(rows), "train.accumulate": "1"}
    configs = [
        config_lib.load("configs/xcm.py:demo", {**settings, "data.form": form}.items())
        for form in FORMS
    ]
    answers = worker.ask([worker.Job(config, target, worker.LAST) for config in configs])
    figures = []
    for form, answer in zip(FORMS, answers, strict=True):
        if answer.compiled is None:
            print(f"{form}: {answer.error}", file=sys.stderr)
            return 2
        program = hlo.Program(answer.compiled.text)
        figures.append(
            (sum(answer.compiled.products.values()) + transforms(program), traffic(program))
        )
        print(
            f"{target}, {rows} rows a step, {form}: {figures[-1][0] / 1e12:.3f} TFLOP,"
            f" {figures[-1][1] / 1e9:.2f} GB"
        )
    (flops, size), (more_flops, more_size) = figures
    print(
        f"the front end adds {more_flops / flops - 1:.1%} of FLOPs and {more_size / size - 1:.1%}"
        " of bytes"
    )
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--target", help="as in --plan=; default: this machine's CPU")
    parser.add_argument("--rows", type=int, help="of a step; default: 4, with a target 256")
    parser.add_argument("--rounds", type=int, default=10, help="pairs of steps on the CPU")
    args = parser.parse_args(argv)
    if args.target:
        return on_target(args.target, args.rows or 256)
    on_cpu(args.rows or 4, args.rounds)
    return 0


if __name__ == "__main__":
    sys.exit(main())
