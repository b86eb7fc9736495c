"""Prove that steps can be made again and that flipped bits are found.

    XLA_FLAGS=--xla_force_host_platform_device_count=2 python -m tests.proofs.replay_proof \
        --out DIR [--part NAME …] [--workload NAME …] [--trials N]

The shipped configs are trained at a small size, on a mesh of two devices. Each part prints a row
for each workload, and appends it to DIR/rows.txt. docs/results/proofs.md has the table.

    replay     N steps in two random windows of a run are made again by `jaxtrain replay`
    processes  a run of two processes is killed after a random step, and one process trains on: its
               N steps are those of an undisturbed run, and one process makes them again; then two
               processes make the undisturbed run's again
    flips      N flips in parameters, moments, average, gradients and batches; a replay finds each
               by the digests of arrays, which name step and array
    verify     N flips on one device but in batches, found by guard.verify_every=1, which names
               step, array and device
    disk       N flips in the files of checkpoints, found by the checksums, which name the file, and
               by the digests of its arrays
    alarms     N verified steps without a flip

A flip is of a random bit of a random number of a random array. A gradient is flipped inside the
compiled step, before the update. After a flip of the part `flips` the run continues with the right
state, so that one replay compares many. The replay has the same program as the run.
"""

import argparse
import contextlib
import dataclasses
import io
import itertools
import os
import pathlib
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import unittest.mock
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxtrain import cli, specs
from jaxtrain import config as config_lib
from jaxtrain.arrays import checksums, source
from jaxtrain.checkpoint.checkpointer import saved_parts
from jaxtrain.parallel import cluster
from jaxtrain.run import loop
from jaxtrain.run.step_compiler import StepCompiler
from jaxtrain.run.stream import Item, Stream
from jaxtrain.run.verify import Outcome, Verifier
from jaxtrain.step import accumulate, digest
from jaxtrain.step import train_step as step_lib
from jaxtrain.telemetry.report import step_differences as steps_lib
from jaxtrain.telemetry.report.run import open_run

WIDTHS = {
    "video_widths": 3,
    "trunk_widths": 2,
    "decoder_widths": 4,
    "decode_video_widths": 2,
    "decode_audio_widths": 2,
    "decode_text_widths": 2,
    "audio_widths": 2,
    "text_widths": 2,
}
SMALL = {"model.embed": "16", "model.depth": "1", "model.heads": "2", "train.batch": "4"}
CONFIGS: dict[str, tuple[str, dict[str, str]]] = {
    "bird": ("configs/xcm.py", SMALL),
    "language": (
        "configs/sums.py",
        SMALL
        | {
            "model.mlp": "32",
            "model.generation.prompts": "()",
            "model.targets": "()",
            "data.context": "16",
        },
    ),
    "trm": (
        "configs/trm_sudoku.py:4x4",
        {"model.embed": "16", "model.heads": "2", "model.puzzle_embed": "16", "train.batch": "4"},
    ),
    "giblet": (
        "configs/giblet.py:demo",
        {f"model.{name}": f"({'8, ' * n})" for name, n in WIDTHS.items()}
        | {"model.bottleneck": "8", "model.head_width": "8", "train.batch": "4"},
    ),
    "audio_language": (
        "configs/higgs.py:blank",
        SMALL
        | {
            "model.vocab": "512",
            "model.kv_heads": "2",
            "model.head_dim": "8",
            "model.mlp": "16",
            "train.accumulate": "1",
            "train.batch": "2",
            "lora.rank": "0",
            "warm_start.source": "",
            "data.buckets": "2",
        },
    ),
}
patch = unittest.mock.patch.object
DEVICES, EVERY = 2, 50  # of the mesh; steps between checkpoints
KINDS = ("params", "opt_state", "ema", "gradients", "batch")


def fields(name: str, workdir: pathlib.Path, steps: int, more: Mapping[str, str]) -> dict[str, str]:
    return {
        **CONFIGS[name][1],
        "workdir": str(workdir),
        "train.steps": str(steps),
        "train.eval_every": "0",
        "train.patience": "0",
        "train.ema": "0.9",
        "optim.clip": "0",
        "checkpoint.every": str(EVERY),
        "checkpoint.keep": "1000",
        "checkpoint.best": "",
        "metrics.every": "1",
        "metrics.digest": "true",
        "mesh.data": "-1",
        "mesh.fsdp": "1",
        **more,
    }


def train(name: str, workdir: pathlib.Path, steps: int, **more: str) -> None:
    own = fields(
        name, workdir, steps, {key.replace("__", "."): value for key, value in more.items()}
    )
    loop.run(config_lib.load(CONFIGS[name][0], list(own.items())))


def replay(run: pathlib.Path, first: int, last: int) -> tuple[int, str, pathlib.Path]:
    """Make steps again. Return the number that is the same, the output, and the workdir."""
    out, text = run.with_name(f"{run.name}-replay-{first}-{last}"), io.StringIO()
    shutil.rmtree(out, ignore_errors=True)
    with contextlib.redirect_stdout(text):
        cli.main(
            [
                "replay",
                str(run),
                "--step",
                str(first),
                "--until",
                str(last),
                "--no-page",
                "--out",
                str(out),
            ]
        )
    return same(text.getvalue()), text.getvalue(), out


def same(text: str) -> int:
    found = re.search(r"identical to step \d+: (\d+) recorded", text)
    if not found:
        print(text, flush=True)
    return int(found[1]) if found else 0


def replay_part(name: str, out: pathlib.Path, trials: int) -> str:
    rng, run, length = random.Random(0), out / name, trials // 2
    train(name, run, trials)
    firsts = [rng.randint(1, trials - length + 1) for _ in range(2)]
    counts = [replay(run, first, first + length - 1)[0] for first in firsts]
    return (
        f"{sum(counts)} steps made again, asked from {firsts[0]} and {firsts[1]} on, have the same"
        " digest"
    )


def processes_part(name: str, out: pathlib.Path, trials: int) -> str:
    rng, run, broken = random.Random(1), out / name, out / f"{name}-killed"
    if not (run / "metrics.jsonl").exists():
        train(name, run, trials)
    own = [
        f"--config.{key}={value}"
        for key, value in fields(name, broken, trials, {"checkpoint.every": "10"}).items()
    ]
    two = _two(subprocess.DEVNULL, "train", f"--config={CONFIGS[name][0]}", *own)
    after = rng.randint(20, trials // 2)
    while all(p.poll() is None for p in two) and _step(broken) < after:
        time.sleep(0.3)
    for process in two:
        process.kill()
    if any(process.wait() != -signal.SIGKILL for process in two):
        raise RuntimeError(
            f"{broken}: a process ended before its kill, with {[p.returncode for p in two]}"
        )
    killed = _step(broken)
    train(name, broken, trials, checkpoint__every="10")
    compared = steps_lib.Compared(*(steps_lib.read(open_run(str(path))) for path in (run, broken)))
    again = replay(broken, 1, trials)[0]
    both = out / f"{name}-two"
    shutil.rmtree(both, ignore_errors=True)
    made = _two(
        subprocess.PIPE,
        "replay",
        str(run),
        "--step",
        "1",
        "--until",
        str(trials),
        "--no-page",
        "--out",
        str(both),
    )
    text = [process.communicate()[0] for process in made][0]
    return (
        f"killed after step {killed} of two processes, ended by one: {compared.summary()}; made"
        f" again by one process: {again} steps the same; the undisturbed run made again by two"
        f" processes: {same(text)} steps the same"
    )


def _two(output: int, *arguments: str) -> list[subprocess.Popen[str]]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    own = {
        "JAXTRAIN_COORDINATOR": f"127.0.0.1:{port}",
        "JAXTRAIN_PROCESSES": "2",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=1",
    }
    return [
        subprocess.Popen(
            [sys.executable, "-m", "jaxtrain", *arguments],
            env=os.environ | own | {"JAXTRAIN_PROCESS": str(i)},
            stdout=output,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        for i in range(2)
    ]


def _step(run: pathlib.Path) -> int:
    return open_run(str(run)).step if (run / "metrics.jsonl").exists() else 0


def flip(x: Any, rng: random.Random, *, everywhere: bool) -> Any:
    """Flip one bit of an array: of its value, or of the part that one device holds."""
    shards = x.addressable_shards
    parts = [np.array(shard.data) for shard in shards]
    chosen = rng.randrange(len(parts))
    words = parts[chosen].reshape(-1).view(np.uint8)
    words[rng.randrange(len(words))] ^= 1 << (0 if x.dtype == bool else rng.randrange(8))
    if everywhere:
        parts = [
            parts[chosen] if s.index == shards[chosen].index else p
            for p, s in zip(parts, shards, strict=True)
        ]
    placed = [jax.device_put(p, s.device) for p, s in zip(parts, shards, strict=True)]
    return jax.make_array_from_single_device_arrays(x.shape, x.sharding, placed)


def flip_state(state: Any, part: str, rng: random.Random, *, everywhere: bool) -> tuple[Any, str]:
    """Flip a bit of the parameters, the moments or the average. Return the state and the path."""
    values = {"params": state.variables.params, "opt_state": state.opt_state, "ema": state.ema}
    leaves, tree = jax.tree.flatten(values[part])
    at = rng.choice([i for i, x in enumerate(leaves) if x.size])
    path = specs.paths({part: values[part]})[at]
    leaves[at] = flip(leaves[at], rng, everywhere=everywhere)
    changed = jax.tree.unflatten(tree, leaves)
    if part == "params":
        return state.replace(variables=state.variables._replace(params=changed)), path
    return state.replace(**{part: changed}), path


def flip_gradient(grads: Any, bit: Any) -> Any:
    """Flip the bit with a number, counted over all gradients. None has a number below 0."""
    leaves, tree = jax.tree.flatten(grads)
    start = 0
    for i, x in enumerate(leaves):
        words = jax.lax.bitcast_convert_type(x, jnp.uint32)  # float32, as all of these small models
        place = bit - start
        mask = jnp.where(
            jnp.arange(x.size) == place // 32, jnp.uint32(1) << (place % 32).astype(jnp.uint32), 0
        )
        leaves[i] = jax.lax.bitcast_convert_type(
            words ^ mask.astype(jnp.uint32).reshape(x.shape), x.dtype
        )
        start += 32 * x.size
    return jax.tree.unflatten(tree, leaves)


@contextlib.contextmanager
def flippable_gradients() -> Iterator[None]:
    """Compile steps that flip the bit -stop - 1 of their gradients, if ``stop`` is negative."""
    step, asked = step_lib.train_step, list[Any]()

    def train_step(
        task: Any, tx: Any, layout: Any, state: Any, batch: Any, stop: Any, **more: Any
    ) -> Any:
        asked.append(stop.sum())
        return step(task, tx, layout, state, batch, stop, **more)

    def flipped(*arguments: Any, **more: Any) -> Any:
        grads, out = accumulate.gradients(*arguments, **more)
        return flip_gradient(grads, -asked[-1] - 1), out

    with patch(step_lib, "train_step", train_step), patch(step_lib, "gradients", flipped):
        yield


class Flipper:
    """Flips a bit in every second step of a run, of one kind after the other.

    Attributes:
      kinds: step -> kind of its flip.
      found: step -> path of the array.
      harmless: steps whose flipped gradient changes no bit of the state.
    """

    def __init__(self, *, seed: int, everywhere: bool, kinds: tuple[str, ...]):
        self.found: dict[int, str] = {}
        self.kinds: dict[int, str] = {}
        self.harmless: set[int] = set()
        self._rng, self._everywhere, self._of = random.Random(seed), everywhere, kinds
        self._right: Any = None  # the state after a flipped step, without its flip
        self._batch: Any = None  # the right one, if the step's is flipped

    def kind(self, step: int) -> str:
        return self._of[step // 2 % len(self._of)] if step % 2 == 0 else ""

    def harmful(self) -> dict[int, str]:
        """Step -> kind of its flip, without the harmless."""
        return {step: kind for step, kind in self.kinds.items() if step not in self.harmless}

    def program(
        self, inner: Callable[..., Any], number: int, *, restore: bool
    ) -> Callable[..., Any]:
        """Return the program of a step with its flip, which ``restore`` takes back afterwards."""

        def step(state: Any, batch: Any, stop: Any) -> Any:
            state, self._right = (state, None) if self._right is None else (self._right, None)
            if not (kind := self.kind(number)):
                return inner(state, batch, stop)
            self.kinds[number] = kind
            right, _ = inner(jax.tree.map(jnp.copy, state), self._batch or batch, stop)
            if kind == "gradients":
                stop = self._bit(state, stop, number)
            state, out = inner(state, batch, stop)
            if kind == "gradients" and all(
                map(_equal, jax.tree.leaves(state), jax.tree.leaves(right))
            ):
                self.harmless.add(number)
            if kind in ("params", "opt_state", "ema"):
                state, self.found[number] = flip_state(
                    state, kind, self._rng, everywhere=self._everywhere
                )
            self._right = right if restore else None
            return state, out

        return step

    def next(self, item: Item) -> Item:
        """Flip a bit of a batch, if it is its turn."""
        self._batch = None
        if self.kind(item.step) != "batch":
            return item
        name = self._rng.choice(sorted(item.arrays.keys() - {"index"}))  # ids, which no step reads
        self.found[item.step], self._batch = f"{digest.BATCH}/{name}", item.arrays
        return dataclasses.replace(
            item, arrays={**item.arrays, name: flip(item.arrays[name], self._rng, everywhere=True)}
        )

    def _bit(self, state: Any, stop: Any, number: int) -> Any:
        params = state.variables.params
        leaves = jax.tree.leaves(params)
        at = self._rng.choice([i for i, x in enumerate(leaves) if x.size])
        bit = sum(32 * x.size for x in leaves[:at]) + self._rng.randrange(32 * leaves[at].size)
        self.found[number] = specs.paths(params)[at]
        whole = np.zeros(stop.shape, np.int32)
        whole[0] = -1 - bit
        return jax.device_put(whole, stop.sharding)


def _equal(x: Any, y: Any) -> bool:
    return np.asarray(x).tobytes() == np.asarray(y).tobytes()


def belongs(kind: str, path: str, differ: list[str]) -> bool:
    """Whether only the flipped array differs, or for a gradient the arrays that it moves."""
    if kind == "gradients":  # the norms are the guard's average of the gradient norm
        return bool(differ) and all(
            name.endswith(f"/{path}") or name.startswith("norms/") for name in differ
        )
    if kind == "batch":
        return [name for name in differ if name.startswith(f"{digest.BATCH}/")] == [path]
    return differ == [path]


def counts(
    flips: Mapping[int, str], arrays: Mapping[int, str], differ: Mapping[int, list[str]]
) -> str:
    """Count the flips that were found, and those whose step and array were, by kind.

    Print the others. ``arrays``: step -> flipped array; ``differ``: step -> arrays found to differ.
    """
    seen = flips.keys() & differ.keys()
    located = {step for step in seen if belongs(flips[step], arrays[step], differ[step])}
    for step in flips.keys() - located:
        print(step, flips[step], arrays[step], differ.get(step, [])[:6], flush=True)

    def of(good: set[int]) -> str:
        kinds = list(flips.values())
        each = (
            f"{k} {sum(flips[s] == k for s in good)}/{kinds.count(k)}" for k in KINDS if k in kinds
        )
        return f"{len(good)} ({', '.join(each)})"

    return f"{len(flips)} flips; {of(seen)} found; {of(located)} located to step and array"


def flips_part(name: str, out: pathlib.Path, trials: int) -> str:
    run, flipper = out / f"{name}-flips", Flipper(seed=2, everywhere=True, kinds=KINDS)
    at, following = StepCompiler.at, Stream.next
    with flippable_gradients():
        with (
            patch(
                StepCompiler,
                "at",
                lambda self, item: flipper.program(at(self, item), item.step, restore=True),
            ),
            patch(Stream, "next", lambda self, **more: flipper.next(following(self, **more))),
        ):
            train(name, run, 2 * trials, checkpoint__every=str(2 * trials), guard__patience="1000")
        made = replay(run, 1, 2 * trials - 1)[2]
    a, b = (steps_lib.read(open_run(str(path))) for path in (run, made))
    compared = steps_lib.Compared(a, b)
    differ = {step: found for step in compared.steps if (found := compared.arrays(step))}
    flips = {step: kind for step, kind in flipper.harmful().items() if step in compared.steps}
    others = len(differ.keys() - flips.keys())
    return (
        f"{counts(flips, flipper.found, differ)}; {others} of {len(compared.steps) - len(flips)}"
        " other steps differ"
    )


def verify_part(name: str, out: pathlib.Path, trials: int) -> str:
    flipper, reported = (
        Flipper(seed=3, everywhere=False, kinds=KINDS[:4]),
        dict[int, tuple[list[str], list[str]]](),
    )
    at, report = StepCompiler.at, Verifier._report

    def program(self: Any, item: Any) -> Any:
        inner = at(self, item)
        each = itertools.chain(
            [flipper.program(inner, item.step, restore=False)], itertools.repeat(inner)
        )
        return lambda *arguments: next(each)(*arguments)  # a third computation is right

    def noted(
        self: Any, step: int, first: Outcome, two: Outcome, third: Outcome, *, repeats: bool
    ) -> None:
        names = specs.paths(saved_parts(self._assembly.abstract.state))
        differ = (first.parts != two.parts).any((0, 2))
        reported[step] = ([n for n, d in zip(names, differ, strict=True) if d], first.devices(two))
        report(self, step, first, two, third, repeats=repeats)

    more = {"guard__verify_every": "1", "guard__on_mismatch": "continue", "guard__patience": "1000"}
    with (
        flippable_gradients(),
        patch(StepCompiler, "at", program),
        patch(Verifier, "_report", noted),
    ):
        train(name, out / f"{name}-verify", 2 * trials, checkpoint__every=str(2 * trials), **more)
    with flippable_gradients():
        train(name, out / f"{name}-plain", 2 * trials, checkpoint__every=str(2 * trials))
    a, b = (steps_lib.read(open_run(str(out / f"{name}-{run}"))) for run in ("verify", "plain"))
    flips, differ = flipper.harmful(), {step: names for step, (names, _) in reported.items()}
    single = sum(
        len(reported[step][1]) == 1
        for step in flips.keys() & reported.keys()
        if flips[step] != "gradients"
    )
    alarms = len(reported.keys() - flips.keys())
    return (
        f"{counts(flips, flipper.found, differ)}, {single} of those in a state to one device;"
        f" {alarms} of {2 * trials - len(flips)} other steps alarmed; the digests are those of an"
        f" undisturbed run: {a.digests == b.digests}"
    )


def disk_part(name: str, out: pathlib.Path, trials: int) -> str:
    run, rng = out / name, random.Random(4)
    if not (run / "metrics.jsonl").exists():
        train(name, run, EVERY)
    recorded = steps_lib.read(open_run(str(run))).arrays
    named = arrays = 0
    saved = sorted((run / "checkpoints").iterdir())
    for _ in range(trials):
        step = rng.choice(saved)
        files = [
            path
            for path in sorted(step.rglob("*"))
            if path.is_file() and path.name not in checksums.UNLISTED
        ]
        path = rng.choices(files, [path.stat().st_size for path in files])[0]
        before = path.read_bytes()
        changed = bytearray(before)
        changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
        path.write_bytes(changed)
        found = checksums.verify(step)
        named += [line.partition(":")[0] for line in found] == [str(path.relative_to(step))]
        arrays += bool(_damaged(step, recorded[int(step.name)]))
        path.write_bytes(before)
    return (
        f"{trials} flips in {len(saved)} checkpoints; {named} found by the checksums, which name"
        f" step and file; {arrays} of them change what is read of an array, and reading or its"
        " digest names it"
    )


def _damaged(step: pathlib.Path, recorded: Mapping[str, str]) -> list[str]:
    """List the arrays of a checkpoint that cannot be read or have another digest."""
    try:
        arrays = source.find(str(step)).arrays()
    except Exception:  # noqa: BLE001  of a damaged index, any kind
        return ["all"]
    found = []
    for path, one in arrays.items():
        try:
            parts = (digest.of_piece(path, one.read(index), index) for index in one.pieces())
            same = steps_lib.digest_text(sum(parts, np.zeros(2, np.uint32))) == recorded[path]
        except Exception:  # noqa: BLE001
            same = False
        found += [] if same else [path]
    return found


def alarms_part(name: str, out: pathlib.Path, trials: int) -> str:
    workdir = out / f"{name}-alarms"
    train(
        name,
        workdir,
        trials,
        guard__verify_every="1",
        metrics__digest="false",
        metrics__every="1000",
        checkpoint__every=str(trials),
    )
    text = (workdir / "metrics.jsonl").read_text()
    wrong = text.count('"miscomputed": 1')
    return f"{text.count('miscomputed')} verified steps, {wrong} alarms"


PARTS: dict[str, Callable[[str, pathlib.Path, int], str]] = {
    "replay": replay_part,
    "processes": processes_part,
    "flips": flips_part,
    "verify": verify_part,
    "disk": disk_part,
    "alarms": alarms_part,
}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=pathlib.Path, required=True)
    parser.add_argument("--part", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--workload", nargs="+", choices=CONFIGS, default=list(CONFIGS))
    parser.add_argument(
        "--trials", type=int, default=20, metavar="N", help="of each part and workload"
    )
    args = parser.parse_args()
    cluster.use_threads_for_host_devices()
    if jax.device_count() != DEVICES:
        parser.error(
            f"there are {jax.device_count()} devices; set"
            f" XLA_FLAGS=--xla_force_host_platform_device_count={DEVICES}"
        )
    cluster.start_jax()
    args.out.mkdir(parents=True, exist_ok=True)
    for name in args.workload:
        for part in args.part:
            row = f"| {part} | {name} | {PARTS[part](name, args.out, args.trials)} |"
            print(row, flush=True)
            with (args.out / "rows.txt").open("a") as file:
                file.write(row + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
