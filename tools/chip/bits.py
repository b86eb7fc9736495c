"""Bits and faults on a device: whether steps repeat, by array, and whether a killed run does.

A case's steps are taken again and again from the same state and rows, and after each step a digest
of each array is compared with the first time's. Arrays of stacked layers have a digest a layer. The
first moments after one step are the gradients, scaled. So their names tell which operation differs
first: a backward pass comes to the head, then to the layers from the last on, and to the embedding.

Then a small run of each workload is killed (`jaxtrain prove`), and some of its steps are replayed
(`jaxtrain replay`).
"""

import functools
import os
import pathlib
import re
import subprocess
import sys
import tempfile
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxtrain import specs
from jaxtrain.types import PyTree
from tools.chip import cases

ROOT = pathlib.Path(__file__).resolve().parents[2]
STEPS, REPEATS = 3, 4
LISTED = 12  # names of arrays that are kept
LAYERS = re.compile(r"(^|/)(blocks|net)/")
RUN_STEPS, KILLS, SMALL_KILLS, REPLAYED = 24, 2, 1, (10, 14)


def measure(case: cases.Case, data: cases.Data, device: jax.Device) -> dict[str, Any]:
    """Return the seconds of a step, and the arrays that differ when steps are repeated."""
    chosen = cases.choose(case, data, device)
    return cases.with_fewer_rows(chosen, device, functools.partial(_measure, case, device))


def _measure(case: cases.Case, device: jax.Device, chosen: cases.Chosen) -> dict[str, Any]:
    program, batch = cases.compiled(chosen), cases.first_batch(chosen.assembly)
    is_small = device.platform == "cpu"
    seconds = cases.Steps(chosen, batch, program).seconds(0.1 if is_small else 2.0)
    first = _digests(chosen, batch, program)
    n_repeats = 2 if is_small else REPEATS
    repeats = [_first_difference(first, _digests(chosen, batch, program)) for _ in range(n_repeats)]
    differing = [difference for difference in repeats if difference]
    earliest = min(differing, key=lambda difference: difference["step"], default=None)
    return {
        "case": case.name,
        "rows": chosen.assembly.config.train.batch,
        "flags": os.environ.get("XLA_FLAGS", ""),
        "seconds_per_step": seconds,
        "arrays": len(first[0]),
        "repeats": n_repeats,
        "differing": len(differing),
        "earliest": earliest,
    }


def _digests(chosen: cases.Chosen, batch: Any, program: Any) -> list[dict[str, int]]:
    """Return, for each step from the initial state, the digest of each array by its name."""
    run = cases.Steps(chosen, batch, program)
    by_step = []
    for _ in range(STEPS):
        out = run()
        after = {"loss": out["loss"].total, "state": run.state}
        by_step.append(named(after))
    return by_step


def named(tree: PyTree) -> dict[str, int]:
    """Return a digest of each array, or of each of its layers, by its path."""
    paths = specs.paths(tree)
    leaves = [jax.random.key_data(x) if _is_key(x) else x for x in jax.tree.leaves(tree)]
    n_rows = [
        len(x) if LAYERS.search(path) and x.ndim > 1 else 1
        for path, x in zip(paths, leaves, strict=True)
    ]
    digests = jax.device_get([digest(x, n) for x, n in zip(leaves, n_rows, strict=True)])
    return {
        f"{path}[{i}]" if n > 1 else path: int(value)
        for path, n, rows in zip(paths, n_rows, digests, strict=True)
        for i, value in enumerate(np.atleast_1d(rows))
    }


def _is_key(x: Any) -> bool:
    return bool(jnp.issubdtype(x.dtype, jax.dtypes.prng_key))


@functools.partial(jax.jit, static_argnames="n_rows")
def digest(x: jax.Array, n_rows: int) -> jax.Array:
    """Return a sum of all bits, weighted by their places, of each row: uint32 [n_rows].

    Integers are added modulo 2^32, so that no order of additions changes it.
    """
    if x.dtype == bool:
        x = x.astype(jnp.uint8)
    unsigned = jnp.dtype(f"uint{8 * x.dtype.itemsize}")
    bits = jax.lax.bitcast_convert_type(x, unsigned).astype(jnp.uint32).reshape(n_rows, -1)
    place = jax.lax.broadcasted_iota(jnp.uint32, bits.shape, 1)
    return jnp.sum(bits * (place * jnp.uint32(2654435761) | 1), axis=1, dtype=jnp.uint32)


def _first_difference(
    first: list[dict[str, int]], again: list[dict[str, int]]
) -> dict[str, Any] | None:
    for step, (before, after) in enumerate(zip(first, again, strict=True), 1):
        names = [name for name, value in before.items() if after[name] != value]
        if names:
            return {
                "step": step,
                "n_arrays": len(names),
                "has_loss": "loss" in names,
                "names": names[:LISTED],
                "same": [name for name in before if name not in names][:LISTED],
            }
    return None


def killed(case: cases.Case, data: cases.Data) -> dict[str, Any]:
    """Kill a small run of the case's workload, and replay some of its steps."""
    small = cases.Data(data.folder, small=True)
    settings = {**case.common(small), **case.small}
    if not data.small:
        settings["model.dtype"] = "bfloat16"  # whose kernels a GPU's runs take
    fields = [f"--config.{name}={value}" for name, value in settings.items()]
    config = [f"--config={ROOT}/{case.source(small)}", *fields]
    n_kills = SMALL_KILLS if data.small else KILLS
    amount = [f"--steps={RUN_STEPS}", f"--kills={n_kills}", "--minutes=0"]
    first, last = REPLAYED
    steps = [f"--step={first}", f"--until={last}", "--no-page"]
    with tempfile.TemporaryDirectory(dir=data.folder) as folder:
        runs = pathlib.Path(folder) / "runs"
        proof = _command("prove", *config, *amount, f"--out={runs}")
        replay = _command("replay", str(runs / "undisturbed"), *steps)
    return {"case": case.name, "prove": proof, "replay": replay}


def _command(*arguments: str) -> dict[str, Any]:
    """Run a command of jaxtrain to its end. A process that shares the device would change it."""
    command = [sys.executable, "-m", "jaxtrain", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    lines = done.stdout.strip().splitlines()
    is_broken = done.returncode not in (0, 1) or not lines
    return {
        "same": done.returncode == 0,
        "broken": is_broken,
        "lines": lines[-6:] if lines else done.stderr.strip().splitlines()[-6:],
    }
