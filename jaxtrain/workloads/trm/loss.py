"""The task of the recursive model: the supervision steps of a row, its scores, and its halting.

The states stay in the train state, a slot for each row of the batch. The next step continues from
them until the q-head says that the answer is right, or ``halt_steps`` are over. Then the slot takes
the row that the batch brings. Rows that the batch brings to the other slots are dropped. All of it
happens on the device.

That is the contract "deep". The contract "last" (the recursive stem model, Hakimi 2026) has no
slots: each training step takes its rows from their beginning through a number of supervision steps,
which is drawn, and has a loss after the last one alone. The steps before it are a detached warm-up,
so that the model learns to continue from any depth.

Shapes: as in `model`.
"""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxtrain.config import Config as RunConfig
from jaxtrain.types import Array, Batch, Example, Key, LossOut, Mean, PyTree, Shard, Task, Variables
from jaxtrain.workloads.trm import boards, rollouts
from jaxtrain.workloads.trm.model import (
    IGNORED,
    Config,
    Cycles,
    make_model_state,
    make_specs,
    refine,
    start,
    train_flops,
)

TABLE = "puzzle/w_rows"  # the parameter whose rows that it read the loss reports
# folded into a step's key for `depth`: rows fold in their own places, which are smaller
OF_DEPTH = 2**31 - 1
LOSSES = ("lm_loss", "q_halt_loss", "q_continue_loss")
ACCURACIES = ("accuracy", "exact_accuracy", "q_halt_accuracy")  # of finished rows


def reset_halted(model_state: PyTree, batch: Batch) -> PyTree:
    """Return the slots of a step. A slot whose row is done starts again on the batch's row."""
    done_b = model_state["halted"]

    def pick(new: Array, old: Array) -> Array:
        return jnp.where(done_b.reshape(-1, *[1] * (old.ndim - 1)), new.astype(old.dtype), old)

    return {
        **model_state,
        "z_h": pick(
            jnp.broadcast_to(model_state["init_h"], model_state["z_h"].shape), model_state["z_h"]
        ),
        "z_l": pick(
            jnp.broadcast_to(model_state["init_l"], model_state["z_l"].shape), model_state["z_l"]
        ),
        "steps": pick(jnp.zeros_like(model_state["steps"]), model_state["steps"]),
        **{name: pick(batch[name], model_state[name]) for name in ("inputs", "labels", "puzzle")},
    }


def examples(
    config: Any, model_state: Any, batch: Mapping[str, Any], position: int
) -> Sequence[Example]:
    """Draw each slot's puzzle. One that began before has no id: its batch's row is dropped."""
    slots = jax.device_get(reset_halted(model_state, batch))
    no_guess = jnp.zeros((0, *slots["inputs"].shape), jnp.int32)
    drawn = np.asarray(boards.draw(slots["inputs"], slots["labels"], no_guess))
    return [
        Example(
            id="" if new else f"row:{k}",
            text=f"supervision step {int(slots['steps'][k]) + 1}",
            pictures={"puzzle and solution": drawn[k]},
        )
        for k, new in enumerate(np.asarray(model_state["halted"]))
    ]


def halt(c: Config, steps_b: Array, q_b2: Array, least_b: Array) -> Array:
    """bool [B]: done after these steps, but not before ``least_b`` of them, except at the end."""
    wants_b = q_b2[:, 0] > (q_b2[:, 1] if c.q_continue else 0)
    return (steps_b >= c.halt_steps) | (wants_b & (steps_b >= least_b))


def least_steps(c: Config, probability: Array | float, key: Key, row_b: Array) -> Array:
    """Draw int32 [B]: with ``probability`` 2 … halt_steps, else 0, by the key and the row alone."""

    def steps_of(row: Array) -> Array:
        key_whether, key_steps = jax.random.split(jax.random.fold_in(key, row))
        steps = jax.random.randint(key_steps, (), min(2, c.halt_steps), c.halt_steps + 1)
        return jnp.where(jax.random.uniform(key_whether) < probability, steps, 0)

    return jax.vmap(steps_of)(row_b)


def cross_entropy(logits: Array, label: Array, kind: str) -> Array:
    """-log p(label) over the last axis, 0 if the label is `IGNORED`.

    stablemax (Prieto et al. 2025): p = s / sum s with s(x) = 1 + x for x >= 0 and 1 / (1 - x)
    below. It is written as log1p(sum of the other s / s(label)): all terms are positive, so that
    float32 keeps its relative precision even if p is close to 1, and log s of large and small
    numbers never cancel.
    """
    valid = label != IGNORED
    picked = (
        jnp.arange(logits.shape[-1])[(None,) * label.ndim] == jnp.where(valid, label, 0)[..., None]
    )
    if kind == "softmax":
        loss = -jnp.where(picked, jax.nn.log_softmax(logits), 0).sum(-1)
    else:
        # where on the inputs too: a maximum would halve the gradient at exactly 0
        below = logits < 0
        s = jnp.where(below, 1 / (1 - jnp.where(below, logits, 0)), 1 + logits)
        loss = jnp.log1p(jnp.where(picked, 0, s).sum(-1) / jnp.where(picked, s, 0).sum(-1))
    return jnp.where(valid, loss, 0)


def binary_cross_entropy(logit: Array, target: Array) -> Array:
    return jnp.maximum(logit, 0) - logit * target + jnp.log1p(jnp.exp(-jnp.abs(logit)))


def scores(c: Config, logits_bsv: Array, q_b2: Array, labels_bs: Array) -> dict[str, Array]:
    """Return each row's losses and accuracies, [B]. One without labels is exact, not ``valid``."""
    valid_bs = labels_bs != IGNORED
    right_bs = (logits_bsv.argmax(-1) == labels_bs) & valid_bs
    n_b = valid_bs.sum(-1)
    exact_b = right_bs.sum(-1) == n_b
    return {
        "lm_loss": cross_entropy(logits_bsv, labels_bs, c.loss).sum(-1) / jnp.maximum(n_b, 1),
        "q_halt_loss": binary_cross_entropy(q_b2[:, 0], exact_b.astype(jnp.float32)),
        "accuracy": right_bs.sum(-1) / jnp.maximum(n_b, 1),
        "exact_accuracy": exact_b,
        "q_halt_accuracy": (q_b2[:, 0] >= 0) == exact_b,
        "valid": n_b > 0,
    }


def curriculum(c: Config, step: int) -> Cycles:
    """Return a step's cycles: from first to last over ``growth`` steps, rounded down."""

    def grown(first: int, last: int, growth: int) -> int:
        first = first or last
        return int(first + (min(step / growth, 1.0) if growth else 1.0) * (last - first))

    growth_low = c.growth if c.growth_low is None else c.growth_low
    return grown(c.first_high, c.cycles_high, c.growth), grown(
        c.first_low, c.cycles_low, growth_low
    )


def depth(c: Config, step: Array, key: Key) -> Array:
    """Draw the supervision steps of a step of contract "last", int32 [], from fewest to most."""
    first = c.first_steps or c.halt_steps
    most = first + (c.halt_steps - first) * jnp.minimum(step / max(c.growth_steps, 1), 1)
    most = jnp.floor(most).astype(jnp.int32) if c.growth_steps else jnp.int32(c.halt_steps)
    return jax.random.randint(
        jax.random.fold_in(key, OF_DEPTH), (), c.least_steps or most, most + 1
    )


class Model(NamedTuple):
    """The part of the run that every function of the task reads."""

    c: Config
    shard: Shard
    steps: int  # of the whole run


def make_task(config: RunConfig[Config], shard: Shard, batch: int) -> Task:
    c = config.model
    model = Model(c, shard, config.train.steps)
    return Task(
        specs=Variables(make_specs(c), model_state=make_model_state(c, batch)),
        loss=functools.partial({"deep": loss, "last": last_loss}[c.contract], model),
        evaluate=functools.partial(evaluate, model),
        axes={
            "inputs": ("batch", None),
            "labels": ("batch", None),
            "puzzle": ("batch",),
            "difficulty": ("batch",),
            "weight": ("batch",),
        },
        flops=batch * train_flops(c, c.cycles),
        advance=lambda params, model_state, step: {**model_state, "step": step + 1},
        stage=functools.partial(curriculum, c),
        progress=functools.partial(progress, model),
        predict=functools.partial(predict, model),
    )


def loss(
    model: Model, variables: Variables, batch: Batch, key: Key, stage: Cycles | None = None
) -> LossOut:
    """One supervision step of every slot. ``stage`` is of `curriculum`, None = the last."""
    c, cycles = model.c, stage or model.c.cycles
    rows = reset_halted(variables.model_state, batch)
    z_h, z_l, logits_bsv, q_b2 = refine(c, variables.params, rows, cycles, model.shard)
    steps_b = rows["steps"] + 1
    least_b = least_steps(c, exploration(model, rows["step"]), key, batch["row"])
    done_b = halt(c, steps_b, q_b2, least_b)
    model_state = jax.lax.stop_gradient(
        {**rows, "z_h": z_h, "z_l": z_l, "steps": steps_b, "halted": done_b}
    )
    each = scores(c, logits_bsv, q_b2, rows["labels"])
    if c.q_continue:
        # The value of another step: the better of that step's two values, but at the end only its
        # first.
        *_, next_b2 = jax.lax.stop_gradient(
            refine(c, variables.params, model_state, cycles, model.shard)
        )
        value_b = jnp.where(steps_b >= c.halt_steps, next_b2[:, 0], next_b2.max(-1))
        each["q_continue_loss"] = binary_cross_entropy(q_b2[:, 1], jax.nn.sigmoid(value_b))
    return loss_of(model, each, rows["puzzle"], steps_b, done_b, model_state)


def last_loss(
    model: Model, variables: Variables, batch: Batch, key: Key, stage: Cycles | None = None
) -> LossOut:
    """Take supervision steps of each row from its beginning, with a loss after the last one."""
    c, cycles = model.c, stage or model.c.cycles
    n_steps = depth(c, variables.model_state["step"], key)
    z = start(c, variables.model_state, batch["inputs"].shape[0], model.shard)
    params, rows = jax.lax.stop_gradient(
        (variables.params, {"inputs": batch["inputs"], "puzzle": batch["puzzle"]})
    )

    def step(_: Array, z: dict[str, Array]) -> dict[str, Array]:
        z_h, z_l = refine(c, params, {**rows, **z}, cycles, model.shard)[:2]
        return {"z_h": z_h, "z_l": z_l}

    with jax.named_scope("warm_up"):
        z = jax.lax.stop_gradient(jax.lax.fori_loop(0, n_steps - 1, step, z))
    *_, logits_bsv, q_b2 = refine(c, variables.params, {**rows, **z}, cycles, model.shard)
    each = scores(c, logits_bsv, q_b2, batch["labels"])
    steps_b = jnp.broadcast_to(n_steps, q_b2.shape[:1])
    return loss_of(
        model, each, batch["puzzle"], steps_b, jnp.ones_like(steps_b, bool), variables.model_state
    )


def loss_of(
    model: Model,
    each: dict[str, Array],
    puzzle_b: Array,
    steps_b: Array,
    done_b: Array,
    model_state: PyTree,
) -> LossOut:
    """Return the loss of rows, and the metrics of those that are done."""
    c = model.c
    losses = {name: each[name] for name in LOSSES if name in each}
    n, finished_b = jnp.float32(steps_b.shape[0]), (done_b & each["valid"]).astype(jnp.float32)
    metrics: dict[str, Mean] = {name: Mean(value_b.sum(), n) for name, value_b in losses.items()}
    metrics |= {
        name: Mean((each[name] * finished_b).sum(), finished_b.sum()) for name in ACCURACIES
    }
    metrics["steps"] = Mean((steps_b * finished_b).sum(), finished_b.sum())
    metrics["halted"] = Mean(finished_b.sum(), n)
    sparse_rows = {}
    if c.puzzle_embed:
        # The rows of the slots, not of the batch.
        sparse_rows[TABLE] = model.shard(
            jnp.zeros(c.n_puzzles, jnp.int32).at[puzzle_b].add(1), "item"
        )
    q_loss_b = each["q_halt_loss"] + (each["q_continue_loss"] if c.q_continue else 0)
    return LossOut(
        Mean((each["lm_loss"] + 0.5 * q_loss_b).sum(), n), metrics, model_state, sparse_rows
    )


def exploration(model: Model, step: Array) -> Array | float:
    """Return the probability of exploring at a step, annealed linearly."""
    c = model.c
    if c.explore_end is None:
        return c.explore
    return c.explore + (c.explore_end - c.explore) * jnp.minimum(step / model.steps, 1)


def solve(
    model: Model,
    variables: Variables,
    batch: Batch,
    keep: Callable[[Array, Array], PyTree] | None = None,
) -> tuple[Array, Array, PyTree]:
    """All supervision steps, from the start: last logits and q, and ``keep`` of each, stacked.

    It is called as ``keep(logits, q)``.
    """
    c, n = model.c, batch["inputs"].shape[0]

    def step(state: tuple[Any, ...], _: None) -> tuple[tuple[Any, ...], PyTree]:
        z_h, z_l, logits_bsv, q_b2 = refine(
            c, variables.params, {**batch, **state[0]}, c.cycles, model.shard
        )
        logits_bsv, q_b2 = (
            model.shard(logits_bsv, "batch", None, None),
            model.shard(q_b2, "batch", None),
        )
        return ({"z_h": z_h, "z_l": z_l}, logits_bsv, q_b2), (
            keep(logits_bsv, q_b2) if keep else None
        )

    first = (
        start(c, variables.model_state, n, model.shard),
        jnp.zeros((n, c.n_cells, c.vocab)),
        jnp.zeros((n, 2)),
    )
    (_, logits_bsv, q_b2), kept = jax.lax.scan(step, first, length=c.halt_steps)
    return logits_bsv, q_b2, kept


def predict(model: Model, variables: Variables, batch: Batch) -> dict[str, Array]:
    """Symbols ``answer`` [B, S] of the cells, and ``confidence`` [B].

    The inputs are ``inputs`` [B, S] and, if there are ids, ``puzzle`` [B].
    """
    n = batch["inputs"].shape[0]
    logits_bsv, q_b2, _ = solve(model, variables, {"puzzle": jnp.zeros(n, jnp.int32), **batch})
    return {"answer": logits_bsv.argmax(-1), "confidence": jax.nn.sigmoid(q_b2[:, 0])}


def evaluate(model: Model, variables: Variables, batch: Batch) -> dict[str, Mean]:
    c, found = model.c, None
    search = rollouts.search_of(c)
    if search == rollouts.Search(steps=c.halt_steps):
        logits_bsv, q_b2, _ = solve(model, variables, batch)
    else:
        found = rollouts.explore(
            c, variables, batch, search, c.noise, jax.random.key(0), model.shard
        )
        logits_bsv, q_b2 = found.of(found.best("q"))
    each = scores(c, logits_bsv, q_b2, batch["labels"])
    weight_b = batch["weight"] * each["valid"]
    metrics = {
        name: Mean((each[name] * weight_b).sum(), weight_b.sum())
        for name in ("lm_loss", "q_halt_loss", *ACCURACIES)
    }
    if found:
        taken_b = found.steps.astype(jnp.float32).mean(1)
        metrics["test_steps"] = Mean((taken_b * weight_b).sum(), weight_b.sum())
    if found and c.rollouts > 1:
        halts_b = (found.sure[:, 1:] > 0).astype(jnp.float32).mean(1)
        if c.n_puzzles == 1:  # rows of a mixture have other rules
            checked = scores(c, *found.of(found.best("check")), batch["labels"])
            metrics["exact_accuracy_checked"] = Mean(
                (checked["exact_accuracy"] * weight_b).sum(), weight_b.sum()
            )
        metrics["rollouts_halted"] = Mean((halts_b * weight_b).sum(), weight_b.sum())
    for k in range(c.n_difficulties if c.n_difficulties > 1 else 0):
        weight_of_k_b = weight_b * (batch["difficulty"] == k)
        metrics[f"exact_accuracy_difficulty_{k}"] = Mean(
            (each["exact_accuracy"] * weight_of_k_b).sum(), weight_of_k_b.sum()
        )
    return metrics


def progress(model: Model, variables: Variables, batch: Batch) -> dict[str, Array]:
    """Return the first boards, a picture each: the puzzle, each step's guess, the solution."""
    # rows that divide over the devices
    n = math.lcm(4, model.shard.size("batch", batch["inputs"].shape[0]))
    first = {name: x[:n] for name, x in batch.items()}
    _, _, guess_kbs = solve(model, variables, first, lambda logits_bsv, q_b2: logits_bsv.argmax(-1))
    return {"steps": boards.draw(first["inputs"][:4], first["labels"][:4], guess_kbs[:, :4])}
