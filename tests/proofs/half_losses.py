"""Compare losses in 16 bits of newer operations with those of a sum in another order.

    XLA_FLAGS=--xla_force_host_platform_device_count=8 python -m tests.proofs.half_losses

    gram      giblet, whose clip knows its gradients' norms by products of rows, not by the
              gradients
    chunks    the language model over fsdp=8, whose loss takes a quarter of the tokens at a time
    glu       the recursive model, whose cycles without a gradient round SwiGLU once, as tokamax's
              kernel does; a function of its formula stands in for it
    vit       the bird encoder, whose layers in 16 bits on GPUs have rows of padded tokens, folded
              norms and derivatives of their own
    higgs     adapters of the audio language model as on GPUs: one microbatch whose layers are
              written out and keep their activations, and adapters that read their input once, in
              place of four microbatches of a loop that recomputes

Each case trains a small model for --steps in bfloat16 on the same rows, in four ways: by the older
operation, by the newer one, by the older one on another mesh, which adds in another order, and by
the older one in float32. A row of the table has the mean of |loss - the older one's loss| / loss,
over all steps and over the first ten. It exits with 1 if the newer operation is further away than
twice the other order, and than float32.
"""

import argparse
import contextlib
import dataclasses
import functools
import sys
import types
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

from jaxtrain import config as config_lib
from jaxtrain.nn import layers, transformer
from jaxtrain.step import train_step as step_lib
from jaxtrain.workloads.audio_language import hugging_face as higgs
from jaxtrain.workloads.bird import half_stack
from jaxtrain.workloads.bird.objectives.supervised import Supervised
from jaxtrain.workloads.giblet import model as giblet
from jaxtrain.workloads.trm import tokamax_glu
from loaders.chat import chatml
from tests.support.cases import Case, Run
from tests.support.cases import audio_language as higgs_cases
from tests.support.cases import bird as bird_cases
from tests.support.cases import giblet as giblet_cases
from tests.support.cases import language as language_cases
from tests.support.cases import trm as trm_cases

BATCHES = 8  # that come again and again
FIRST = 10  # [steps] before runs diverge
BOUND = 2.0  # times the difference of another order


class Comparison(NamedTuple):
    case: Case
    mesh: tuple[int, int, int]
    other_order: tuple[int, int, int]
    older: Any  # context manager
    newer: Any
    changes: dict[str, Any] = {}  # of the newer one's model
    accumulate: int = 1  # of the older one; the newer one has 1


@contextlib.contextmanager
def gram(factor: float) -> Iterator[None]:
    with mock.patch.object(giblet, "MUCH_LARGER", factor):
        yield


@contextlib.contextmanager
def stand_in() -> Iterator[None]:
    """Put a function in tokamax's place that multiplies and acts in float32 and rounds once."""

    def gated_linear_unit(x: Any, w: Any, *, activation: Any, implementation: str) -> Any:
        gate, up = (jnp.dot(x, w[:, i], preferred_element_type=jnp.float32) for i in range(2))
        return (activation(gate) * up).astype(x.dtype)

    package = types.SimpleNamespace(gated_linear_unit=gated_linear_unit)
    with (
        mock.patch.dict(sys.modules, tokamax=package),
        mock.patch.object(tokamax_glu, "fits", lambda *_: True),
        mock.patch.object(tokamax_glu, "is_installed", lambda: True),
    ):
        yield


@contextlib.contextmanager
def stack_of_gpus() -> Iterator[None]:
    def fits(stack: Any, x_btd: Any, shard: Any) -> bool:
        return jnp.dtype(stack.dtype).itemsize < 4 and shard.size("seq", x_btd.shape[1]) == 1

    with mock.patch.object(half_stack, "fits", fits):
        yield


@contextlib.contextmanager
def adapters_of_gpus() -> Iterator[None]:
    """Let the adapters of several matrices read their input once."""

    def project_each(equation: str, x: Any, ws: Sequence[Any], shard: Any) -> list[Any]:
        first, *others = ws
        product = functools.partial(layers.product, shard=shard)
        found: list[Any] = first.project_each(equation, x, others, product)
        return found

    with mock.patch.object(transformer, "project_each", project_each):
        yield


def spectrograms(seed: int) -> dict[str, np.ndarray]:
    """Return a batch of one view of each row."""
    batch = bird_cases.every_batch(seed)
    return batch | {"spectrogram": batch["spectrogram"][:, 0]}


@functools.cache
def conversations() -> dict[str, np.ndarray]:
    """Return the rows of all batches, in shapes that hold each of them."""
    rows = [x for seed in range(BATCHES) for x in higgs_cases.conversations(seed)]
    found = higgs_cases.batch_of(rows, spare=1, pad=1)
    return {name: np.asarray(x) for name, x in found.items() if name != "row"}


def chat_batch(seed: int) -> dict[str, np.ndarray]:
    n = higgs_cases.BATCH
    batch = {name: x[seed * n : (seed + 1) * n] for name, x in conversations().items()}
    labels = [(batch[f"{kind}_target"] >= 0).sum((0, 1)) for kind in ("text", "audio")]
    scale = chatml.label_scale(int(labels[0]), labels[1], n)
    return batch | {"label_scale": np.tile(scale, (n, 1))}


def half(case: Case, **changes: Any) -> Case:
    return case._replace(model=dataclasses.replace(case.model, dtype="bfloat16", **changes))


def comparisons() -> dict[str, Comparison]:
    plain = contextlib.nullcontext
    trm = trm_cases.MATRIX["trm"]
    # labels that are smoothed, so that the loss does not fall to nothing
    smoothed = dataclasses.replace(bird_cases.TINY, supervised=Supervised(label_smoothing=0.1))
    optim = dataclasses.replace(bird_cases.CASE.optim, lr=0.003)
    bird = bird_cases.CASE._replace(model=smoothed, batch=spectrograms, optim=optim)
    adapters = config_lib.Lora(**{**higgs.ADAPTERS, "rank": 4, "alpha": 16.0})
    chat = higgs_cases.CASE._replace(adapters=adapters, batch=chat_batch)
    return {
        "gram": Comparison(
            half(giblet_cases.CASE), (1, 1, 1), (2, 1, 1), lambda: gram(np.inf), lambda: gram(0)
        ),
        "chunks": Comparison(
            half(language_cases.CASE, chunk=32), (1, 8, 1), (8, 1, 1), plain, plain, dict(chunk=8)
        ),
        "glu": Comparison(
            half(trm, inner_multiple=128, kernel="xla"),
            (1, 1, 1),
            (2, 1, 1),
            plain,
            stand_in,
            dict(kernel="tokamax"),
        ),
        # 9 tokens, which the newer one pads to 10
        "vit": Comparison(half(bird), (1, 1, 1), (2, 1, 1), plain, stack_of_gpus),
        "higgs": Comparison(
            half(chat, remat="full", unroll=1),
            (1, 1, 1),
            (2, 1, 1),
            plain,
            adapters_of_gpus,
            dict(remat="none", unroll=chat.model.depth),
            accumulate=4,
        ),
    }


def losses(case: Case, mesh: Sequence[int], steps: int, accumulate: int = 1) -> np.ndarray:
    """Return the loss of each step, float64 [steps]."""
    run = Run(case._replace(steps=steps), tuple(mesh), accumulate)
    state = run.init()
    go_on = step_lib.put_stop(run.layout, False)
    batches = [run.put(case.batch(seed)) for seed in range(BATCHES)]
    found = []
    for i in range(steps):
        state, metrics = run.step(state, batches[i % BATCHES], go_on)
        total, weight = jax.device_get(metrics["loss"])
        found.append(float(total) / float(weight))
    return np.array(found)


def compare(one: Comparison, steps: int) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Return the loss of each step of the older operation, and of the other runs by their names."""
    wide = one.case._replace(model=dataclasses.replace(one.case.model, dtype="float32"))
    newer = one.case._replace(model=dataclasses.replace(one.case.model, **one.changes))
    with one.older():
        older = losses(one.case, one.mesh, steps, one.accumulate)
        found = {
            "other order": losses(one.case, one.other_order, steps, one.accumulate),
            "float32": losses(wide, one.mesh, steps, one.accumulate),
        }
    with one.newer():
        found["newer"] = losses(newer, one.mesh, steps)
    first, last = older[:BATCHES].mean(), older[-BATCHES:].mean()
    print(f"loss {first:.4f} to {last:.4f}", flush=True)
    return older, found


def row(older: np.ndarray, losses: dict[str, np.ndarray]) -> tuple[str, bool]:
    """Return cells of a table, and whether the newer operation is within rounding."""
    differences = {name: np.abs(x - older) / np.abs(older) for name, x in losses.items()}
    means = {name: x.mean() for name, x in differences.items()}
    cells = [
        f"{means[name]:.1e}, {differences[name][:FIRST].mean():.1e}"
        for name in ("newer", "other order", "float32")
    ]
    bound = max(BOUND * means["other order"], means["float32"])
    return " | ".join(cells), bool(means["newer"] <= bound)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        "python -m tests.proofs.half_losses",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    all_of_them = comparisons()
    parser.add_argument("--only", nargs="+", choices=all_of_them, default=list(all_of_them))
    parser.add_argument("--steps", type=int, default=200)
    args = parser.parse_args(argv)
    rows, code = [], 0
    for name in args.only:
        cells, good = row(*compare(all_of_them[name], args.steps))
        code = code if good else 1
        rows.append(f"| {name} | {cells} |")
    print("| case | newer operation: all steps, the first | another order | float32 |")
    print("|---|---:|---:|---:|")
    print("\n".join(rows))
    return code


if __name__ == "__main__":
    sys.exit(main())
