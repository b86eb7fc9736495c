"""Prove that steps can be made again and that flipped bits are found.

The table is that of docs/results/proofs.md.

    python -m tools.replay_proof --out DIR [--part replay|flips|verify|alarms …] [--workload NAME …]
        [--steps N]

    python -m tools.replay_proof --out proof --steps 200  # 1,000 steps of the five workloads
    python -m tools.replay_proof --out proof --part alarms --workload language --steps 20000

The shipped configs are trained at a small size. Each part prints a row, and appends it to
DIR/rows.txt:

    replay  N steps of a run are made again by `jaxtrain replay`, in random windows, and their
            digests compared
    flips   N flips of a bit in the parameters, moments or average after a step: the replay names
            step and array
    verify  N flips in what a device computes, found by guard.verify_every=1, which names the array
            and takes the right state
    alarms  N steps verified without a flip

A flip is of a random bit of a random number of a random array.
"""

import argparse
import contextlib
import io
import logging
import pathlib
import random
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import numpy as np

from jaxtrain import cli, loop, specs
from jaxtrain import config as config_lib
from jaxtrain.compile import step_compiler
from jaxtrain.telemetry.report import steps as steps_lib
from jaxtrain.telemetry.report.run import open_run
from jaxtrain.verify import Verifier

WIDTHS = {"video_widths": 3, "trunk_widths": 2, "decoder_widths": 4, "decode_video_widths": 2, "decode_audio_widths": 2,
          "decode_text_widths": 2, "audio_widths": 2, "text_widths": 2}  # fmt: skip
CONFIGS: dict[str, tuple[str, dict[str, str]]] = {
    "bird": ("configs/xcm.py", {"model.embed": "32", "model.depth": "1", "model.heads": "2", "train.batch": "4"}),
    "language": ("configs/sums.py", {"model.embed": "32", "model.depth": "1", "model.heads": "2", "train.batch": "4"}),
    "trm": (
        "configs/trm_sudoku.py:4x4",
        {"model.embed": "32", "model.heads": "2", "model.puzzle_embed": "32", "train.batch": "4"},
    ),
    "giblet": (
        "configs/giblet.py:demo",
        {f"model.{name}": f"({'16, ' * n})" for name, n in WIDTHS.items()}
        | {"model.bottleneck": "8", "model.head_width": "16", "train.batch": "4"},
    ),
    "audio_language": (
        "configs/higgs.py:blank",
        {f"model.{name}": value for name, value in {"embed": "32", "depth": "1", "heads": "4", "kv_heads": "2",
         "head_dim": "8", "mlp": "32"}.items()} | {"train.batch": "2", "train.accumulate": "1", "lora.rank": "0",
                                                   "warm_start.source": ""},
    ),
}  # fmt: skip
EVERY = 10  # steps between checkpoints


def overrides(name: str, workdir: pathlib.Path, steps: int, more: Mapping[str, str]) -> list[tuple[str, str]]:
    fields = {
        "workdir": str(workdir), "train.steps": str(steps), "train.eval_every": "0", "train.patience": "0",
        "checkpoint.every": str(EVERY), "checkpoint.keep": "100000", "checkpoint.best": "", "metrics.every": "1",
        "metrics.digest": "true", "mesh.data": "-1", "mesh.fsdp": "1",
    }  # fmt: skip
    return list({**CONFIGS[name][1], **fields, **more}.items())


def train(name: str, workdir: pathlib.Path, steps: int, **more: str) -> None:
    """Train a small run in this process."""
    fields = {key.replace("__", "."): value for key, value in more.items()}
    loop.run(config_lib.load(CONFIGS[name][0], overrides(name, workdir, steps, fields)))


def replay(run: pathlib.Path, first: int, last: int) -> tuple[int, str]:
    """Make steps again.

    Return the number that was compared, if all are the same, and the output.
    """
    out, text = run.with_name(f"{run.name}-replay-{first}-{last}"), io.StringIO()
    with contextlib.redirect_stdout(text):
        cli.main(["replay", str(run), "--step", str(first), "--until", str(last), "--no-page", "--out", str(out)])
    subprocess.run(["rm", "-rf", str(out)], check=True)
    found = re.search(r"identical to step \d+: (\d+) recorded", text.getvalue())
    return int(found[1]) if found else 0, text.getvalue()


def windows(run: pathlib.Path, total: int, wanted: int, rng: random.Random) -> tuple[int, int]:
    """Replay random windows until ``wanted`` steps were compared.

    Return the steps compared and the windows that differed.
    """
    compared = wrong = 0
    while compared < wanted and wrong < 3:
        first = rng.randint(1, max(total - 3 * EVERY, 1))
        n, text = replay(run, first, min(first + 3 * EVERY, total))
        compared += n
        if not n:
            wrong += 1
            print(text, flush=True)
    return compared, wrong


def replay_part(name: str, out: pathlib.Path, steps: int) -> str:
    total = min(steps, 200)
    train(name, out / name, total)
    compared, wrong = windows(out / name, total, steps, random.Random(0))
    return f"| replay | {name} | {compared} steps made again | {wrong} windows differed |"


def flipped(x: Any, rng: random.Random) -> Any:
    """Flip one bit of an array, on its devices."""
    host = np.array(x)
    words = host.reshape(-1).view(np.uint8)
    words[rng.randrange(len(words))] ^= 1 << rng.randrange(8)
    return jax.device_put(host, x.sharding)


def flip_state(state: Any, part: str, rng: random.Random) -> tuple[Any, str]:
    """Flip a bit of the parameters, of the moments or of the average.

    Return the state and the path of the array.
    """
    values = {"params": state.variables.params, "opt_state": state.opt_state, "ema": state.ema}
    leaves, tree = jax.tree.flatten(values[part])
    at = rng.choice([i for i, x in enumerate(leaves) if x.size])
    path = specs.paths({part: values[part]})[at]
    leaves[at] = flipped(leaves[at], rng)
    changed = jax.tree.unflatten(tree, leaves)
    if part == "params":
        return state.replace(variables=state.variables._replace(params=changed)), path
    return state.replace(**{part: changed}), path


@contextlib.contextmanager
def with_flips(at: Callable[[int], str], rng: random.Random, found: dict[int, str]) -> Iterator[None]:
    """Let the program of each step i flip a bit in the part ``at(i)`` ("" = none).

    ``found``: step -> path of the array.
    """
    real = step_compiler.StepCompiler.at

    def program(self: Any, item: Any) -> Any:
        inner, part = real(self, item), at(item.step)

        def step(state: Any, batch: Any, stop: Any) -> Any:
            if part == "batch" and item.step not in found:
                name = rng.choice(sorted(batch))
                batch, found[item.step] = {**batch, name: flipped(batch[name], rng)}, f"batch/{name}"
            state, out = inner(state, batch, stop)
            if part and item.step not in found:
                state, found[item.step] = flip_state(state, part, rng)
            return state, out

        return step

    step_compiler.StepCompiler.at = program  # type: ignore[method-assign]
    try:
        yield
    finally:
        step_compiler.StepCompiler.at = real  # type: ignore[method-assign]


def flips_part(name: str, out: pathlib.Path, steps: int) -> str:
    """One run has a flip between each two checkpoints.

    Each is looked for from the checkpoint before it.
    """
    rng, found = random.Random(2), dict[int, str]()
    parts = ["params", "opt_state", "ema"][: 3 if float(dict(overrides(name, out, 1, {})).get("train.ema", "0")) else 2]

    def at(step: int) -> str:
        return parts[step // EVERY % len(parts)] if step % EVERY == EVERY // 2 else ""

    with with_flips(at, rng, found):
        train(name, out / f"{name}-flips", EVERY * steps)
    right = 0
    for step, path in found.items():
        _, text = replay(out / f"{name}-flips", step, step)
        well = f"step {step} differs" in text and "(1 of " in text and f"arrays: {path})" in text
        right += well
        if not well:
            print(step, path, text, flush=True)
    return f"| flips | {name} | {len(found)} flips in {', '.join(parts)} | {right} found at their step and array |"


def verify_part(name: str, out: pathlib.Path, steps: int) -> str:
    """Every second step has a flip in its first computation."""
    rng, found, said = random.Random(3), dict[int, str](), io.StringIO()
    parts = ("params", "opt_state", "batch")
    handler = logging.StreamHandler(said)
    handler.setLevel(logging.ERROR)
    logging.getLogger("jaxtrain").addHandler(handler)
    real, turned = Verifier._second, dict[int, int]()

    def second(self: Any, step: Any, state: Any, item: Any, stop: Any) -> Any:
        turned[item.step] = 1
        found.setdefault(item.step, "")  # no flip in the second computation
        result = real(self, step, state, item, stop)
        if not found[item.step]:
            del found[item.step]
        return result

    Verifier._second = second  # type: ignore[method-assign]
    with with_flips(lambda step: parts[step // 2 % 3] if step % 2 == 0 else "", rng, found):
        train(name, out / f"{name}-verify", 2 * steps, guard__verify_every="1", guard__on_mismatch="continue")
    Verifier._second = real  # type: ignore[method-assign]
    logging.getLogger("jaxtrain").removeHandler(handler)
    train(name, out / f"{name}-plain", 2 * steps)
    lines = {int(m[1]): m[0] for m in re.finditer(r"step (\d+) was computed twice.*", said.getvalue())}
    columns = steps_lib.read(open_run(out / f"{name}-verify")), steps_lib.read(open_run(out / f"{name}-plain"))
    same = columns[0].digests == columns[1].digests
    located = sum(_key(path) in lines.get(step, "") for step, path in found.items() if not path.startswith("batch"))
    inside = sum(not path.startswith("batch") for path in found.values())
    unseen = [step for step in found if step not in lines]
    return (
        f"| verify | {name} | {len(found)} flips in {', '.join(parts)} | {len(found) - len(unseen)} found, {len(unseen)} "
        f"without effect on a bit of the state; {located} of {inside} in the state located to their array; no other alarm: "
        f"{set(lines) <= set(found)}; the run's digests are those of an undisturbed run: {same} |"
    )


def _key(path: str) -> str:
    """Return the last name of a path, as the message has it."""
    return path.rpartition("/")[2]


def alarms_part(name: str, out: pathlib.Path, steps: int) -> str:
    train(name, out / f"{name}-alarms", steps, guard__verify_every="1", metrics__digest="false", metrics__every="1000",
          checkpoint__every=str(steps))  # fmt: skip
    text = (out / f"{name}-alarms" / "metrics.jsonl").read_text()
    wrong = text.count('"miscomputed": 1')
    return f"| alarms | {name} | {text.count('miscomputed')} verified steps | {wrong} alarms |"


PARTS = {"replay": replay_part, "flips": flips_part, "verify": verify_part, "alarms": alarms_part}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=pathlib.Path, required=True)
    parser.add_argument("--part", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--workload", nargs="+", choices=CONFIGS, default=list(CONFIGS))
    parser.add_argument("--steps", type=int, default=20)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    for part in args.part:
        for name in args.workload:
            row = PARTS[part](name, args.out, args.steps)
            print(row, flush=True)
            with (args.out / "rows.txt").open("a") as file:
                file.write(row + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
