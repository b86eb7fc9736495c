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

    def restart(new: Array, old: Array) -> Array:
        done = done_b.reshape(-1, *[1] * (old.ndim - 1))
        return jnp.where(done, new.astype(old.dtype), old)

    slots = dict(model_state)
    for state, initial in (("z_h", "init_h"), ("z_l", "init_l")):
        first_state = jnp.broadcast_to(model_state[initial], model_state[state].shape)
        slots[state] = restart(first_state, model_state[state])
    slots["steps"] = restart(jnp.zeros_like(model_state["steps"]), model_state["steps"])
    for name in ("inputs", "labels", "puzzle"):
        slots[name] = restart(batch[name], model_state[name])
    return slots


def examples(
    config: Any, model_state: Any, batch: Mapping[str, Any], position: int
) -> Sequence[Example]:
    """Draw each slot's puzzle. One that began before has no id: its batch's row is dropped."""
    slots = jax.device_get(reset_halted(model_state, batch))
    no_guess = jnp.zeros((0, *slots["inputs"].shape), jnp.int32)
    pictures = np.asarray(boards.draw(slots["inputs"], slots["labels"], no_guess))
    row_examples = []
    for slot, is_new in enumerate(np.asarray(model_state["halted"])):
        step = int(slots["steps"][slot]) + 1
        row_examples.append(
            Example(
                id="" if is_new else f"row:{slot}",
                text=f"supervision step {step}",
                pictures={"puzzle and solution": pictures[slot]},
            )
        )
    return row_examples


def halt(c: Config, steps_b: Array, q_b2: Array, least_b: Array) -> Array:
    """bool [B]: done after these steps, but not before ``least_b`` of them, except at the end."""
    q_halt_b = q_b2[:, 0]
    if c.q_continue:
        wants_halt_b = q_halt_b > q_b2[:, 1]
    else:
        wants_halt_b = q_halt_b > 0
    at_end_b = steps_b >= c.halt_steps
    return at_end_b | (wants_halt_b & (steps_b >= least_b))


def least_steps(c: Config, probability: Array | float, key: Key, row_b: Array) -> Array:
    """Draw int32 [B]: with ``probability`` 2 … halt_steps, else 0, by the key and the row alone."""

    def steps_of(row: Array) -> Array:
        row_key = jax.random.fold_in(key, row)
        key_explore, key_steps = jax.random.split(row_key)
        smallest = min(2, c.halt_steps)
        steps = jax.random.randint(key_steps, (), smallest, c.halt_steps + 1)
        explores = jax.random.uniform(key_explore) < probability
        return jnp.where(explores, steps, 0)

    return jax.vmap(steps_of)(row_b)


def cross_entropy(logits: Array, label: Array, kind: str) -> Array:
    """-log p(label) over the last axis, 0 if the label is `IGNORED`.

    stablemax (Prieto et al. 2025): p = s / sum s with s(x) = 1 + x for x >= 0 and 1 / (1 - x)
    below. It is written as log1p(sum of the other s / s(label)): all terms are positive, so that
    float32 keeps its relative precision even if p is close to 1, and log s of large and small
    numbers never cancel.
    """
    valid = label != IGNORED
    symbols = jnp.arange(logits.shape[-1])[(None,) * label.ndim]
    is_label = symbols == jnp.where(valid, label, 0)[..., None]
    if kind == "softmax":
        log_p = jax.nn.log_softmax(logits)
        loss = -jnp.where(is_label, log_p, 0).sum(-1)
    else:
        # where on the inputs too: a maximum would halve the gradient at exactly 0
        below = logits < 0
        negative = jnp.where(below, logits, 0)
        s = jnp.where(below, 1 / (1 - negative), 1 + logits)
        s_others = jnp.where(is_label, 0, s).sum(-1)
        s_label = jnp.where(is_label, s, 0).sum(-1)
        loss = jnp.log1p(s_others / s_label)
    return jnp.where(valid, loss, 0)


def binary_cross_entropy(logit: Array, target: Array) -> Array:
    return jnp.maximum(logit, 0) - logit * target + jnp.log1p(jnp.exp(-jnp.abs(logit)))


def scores(c: Config, logits_bsv: Array, q_b2: Array, labels_bs: Array) -> dict[str, Array]:
    """Return each row's losses and accuracies, [B]. One without labels is exact, not ``valid``."""
    valid_bs = labels_bs != IGNORED
    right_bs = (logits_bsv.argmax(-1) == labels_bs) & valid_bs
    n_valid_b = valid_bs.sum(-1)
    exact_b = right_bs.sum(-1) == n_valid_b
    loss_bs = cross_entropy(logits_bsv, labels_bs, c.loss)
    return {
        "lm_loss": loss_bs.sum(-1) / jnp.maximum(n_valid_b, 1),
        "q_halt_loss": binary_cross_entropy(q_b2[:, 0], exact_b.astype(jnp.float32)),
        "accuracy": right_bs.sum(-1) / jnp.maximum(n_valid_b, 1),
        "exact_accuracy": exact_b,
        "q_halt_accuracy": (q_b2[:, 0] >= 0) == exact_b,
        "valid": n_valid_b > 0,
    }


def curriculum(c: Config, step: int) -> Cycles:
    """Return a step's cycles: from first to last over ``growth`` steps, rounded down."""

    def grow(first: int, last: int, growth: int) -> int:
        first = first or last
        share = min(step / growth, 1.0) if growth else 1.0
        return int(first + share * (last - first))

    growth_low = c.growth if c.growth_low is None else c.growth_low
    high = grow(c.first_high, c.cycles_high, c.growth)
    low = grow(c.first_low, c.cycles_low, growth_low)
    return high, low


def depth(c: Config, step: Array, key: Key) -> Array:
    """Draw the supervision steps of a step of contract "last", int32 [], from fewest to most."""
    first = c.first_steps or c.halt_steps
    share = jnp.minimum(step / max(c.growth_steps, 1), 1)
    most = first + (c.halt_steps - first) * share
    if c.growth_steps:
        most = jnp.floor(most).astype(jnp.int32)
    else:
        most = jnp.int32(c.halt_steps)
    depth_key = jax.random.fold_in(key, OF_DEPTH)
    smallest = c.least_steps or most
    return jax.random.randint(depth_key, (), smallest, most + 1)


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
    c = model.c
    cycles = stage or c.cycles
    rows = reset_halted(variables.model_state, batch)
    z_h, z_l, logits_bsv, q_b2 = refine(c, variables.params, rows, cycles, model.shard)
    steps_b = rows["steps"] + 1
    probability = exploration(model, rows["step"])
    least_b = least_steps(c, probability, key, batch["row"])
    done_b = halt(c, steps_b, q_b2, least_b)
    model_state = jax.lax.stop_gradient(
        {**rows, "z_h": z_h, "z_l": z_l, "steps": steps_b, "halted": done_b}
    )
    row_scores = scores(c, logits_bsv, q_b2, rows["labels"])
    if c.q_continue:
        # The value of another step: the better of that step's two values, but at the end only its
        # first.
        *_, next_b2 = jax.lax.stop_gradient(
            refine(c, variables.params, model_state, cycles, model.shard)
        )
        value_b = jnp.where(steps_b >= c.halt_steps, next_b2[:, 0], next_b2.max(-1))
        row_scores["q_continue_loss"] = binary_cross_entropy(q_b2[:, 1], jax.nn.sigmoid(value_b))
    return loss_of(model, row_scores, rows["puzzle"], steps_b, done_b, model_state)


def last_loss(
    model: Model, variables: Variables, batch: Batch, key: Key, stage: Cycles | None = None
) -> LossOut:
    """Take supervision steps of each row from its beginning, with a loss after the last one."""
    c = model.c
    cycles = stage or c.cycles
    n_steps = depth(c, variables.model_state["step"], key)
    z = start(c, variables.model_state, batch["inputs"].shape[0], model.shard)
    rows = {"inputs": batch["inputs"], "puzzle": batch["puzzle"]}
    params, rows = jax.lax.stop_gradient((variables.params, rows))

    def step(_: Array, z: dict[str, Array]) -> dict[str, Array]:
        z_h, z_l = refine(c, params, {**rows, **z}, cycles, model.shard)[:2]
        return {"z_h": z_h, "z_l": z_l}

    with jax.named_scope("warm_up"):
        z = jax.lax.stop_gradient(jax.lax.fori_loop(0, n_steps - 1, step, z))
    *_, logits_bsv, q_b2 = refine(c, variables.params, {**rows, **z}, cycles, model.shard)
    row_scores = scores(c, logits_bsv, q_b2, batch["labels"])
    steps_b = jnp.broadcast_to(n_steps, q_b2.shape[:1])
    done_b = jnp.ones_like(steps_b, bool)
    puzzle_b = batch["puzzle"]
    return loss_of(model, row_scores, puzzle_b, steps_b, done_b, variables.model_state)


def loss_of(
    model: Model,
    row_scores: dict[str, Array],
    puzzle_b: Array,
    steps_b: Array,
    done_b: Array,
    model_state: PyTree,
) -> LossOut:
    """Return the loss of rows, and the metrics of those that are done."""
    c = model.c
    losses = {name: row_scores[name] for name in LOSSES if name in row_scores}
    n_rows = jnp.float32(steps_b.shape[0])
    finished_b = (done_b & row_scores["valid"]).astype(jnp.float32)
    metrics: dict[str, Mean] = {}
    for name, loss_b in losses.items():
        metrics[name] = Mean(loss_b.sum(), n_rows)
    for name in ACCURACIES:
        metrics[name] = weighted_mean(row_scores[name], finished_b)
    metrics["steps"] = weighted_mean(steps_b, finished_b)
    metrics["halted"] = Mean(finished_b.sum(), n_rows)
    sparse_rows = {}
    if c.puzzle_embed:
        # The rows of the slots, not of the batch.
        reads = jnp.zeros(c.n_puzzles, jnp.int32).at[puzzle_b].add(1)
        sparse_rows[TABLE] = model.shard(reads, "item")
    q_continue_loss_b = row_scores["q_continue_loss"] if c.q_continue else 0
    q_loss_b = row_scores["q_halt_loss"] + q_continue_loss_b
    loss_b = row_scores["lm_loss"] + 0.5 * q_loss_b
    return LossOut(Mean(loss_b.sum(), n_rows), metrics, model_state, sparse_rows)


def weighted_mean(value_b: Array, weight_b: Array) -> Mean:
    return Mean((value_b * weight_b).sum(), weight_b.sum())


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
    c = model.c
    n_rows = batch["inputs"].shape[0]

    def step(state: tuple[Any, ...], _: None) -> tuple[tuple[Any, ...], PyTree]:
        rows = {**batch, **state[0]}
        z_h, z_l, logits_bsv, q_b2 = refine(c, variables.params, rows, c.cycles, model.shard)
        logits_bsv = model.shard(logits_bsv, "batch", None, None)
        q_b2 = model.shard(q_b2, "batch", None)
        to_keep = keep(logits_bsv, q_b2) if keep else None
        return ({"z_h": z_h, "z_l": z_l}, logits_bsv, q_b2), to_keep

    z = start(c, variables.model_state, n_rows, model.shard)
    no_logits_bsv = jnp.zeros((n_rows, c.n_cells, c.vocab))
    no_q_b2 = jnp.zeros((n_rows, 2))
    first_state = (z, no_logits_bsv, no_q_b2)
    last_state, by_step = jax.lax.scan(step, first_state, length=c.halt_steps)
    _, logits_bsv, q_b2 = last_state
    return logits_bsv, q_b2, by_step


def predict(model: Model, variables: Variables, batch: Batch) -> dict[str, Array]:
    """Symbols ``answer`` [B, S] of the cells, and ``confidence`` [B].

    The inputs are ``inputs`` [B, S] and, if there are ids, ``puzzle`` [B].
    """
    n_rows = batch["inputs"].shape[0]
    rows = {"puzzle": jnp.zeros(n_rows, jnp.int32), **batch}
    logits_bsv, q_b2, _ = solve(model, variables, rows)
    return {"answer": logits_bsv.argmax(-1), "confidence": jax.nn.sigmoid(q_b2[:, 0])}


def evaluate(model: Model, variables: Variables, batch: Batch) -> dict[str, Mean]:
    c = model.c
    explored = None
    search = rollouts.search_of(c)
    if search == rollouts.Search(steps=c.halt_steps):
        logits_bsv, q_b2, _ = solve(model, variables, batch)
    else:
        key = jax.random.key(0)
        explored = rollouts.explore(c, variables, batch, search, c.noise, key, model.shard)
        logits_bsv, q_b2 = explored.of(explored.best("q"))
    row_scores = scores(c, logits_bsv, q_b2, batch["labels"])
    weight_b = batch["weight"] * row_scores["valid"]
    metrics = {}
    for name in ("lm_loss", "q_halt_loss", *ACCURACIES):
        metrics[name] = weighted_mean(row_scores[name], weight_b)
    if explored:
        steps_b = explored.steps.astype(jnp.float32).mean(1)
        metrics["test_steps"] = weighted_mean(steps_b, weight_b)
    if explored and c.rollouts > 1:
        halts_b = (explored.sure[:, 1:] > 0).astype(jnp.float32).mean(1)
        if c.n_puzzles == 1:  # rows of a mixture have other rules
            checked = scores(c, *explored.of(explored.best("check")), batch["labels"])
            metrics["exact_accuracy_checked"] = weighted_mean(checked["exact_accuracy"], weight_b)
        metrics["rollouts_halted"] = weighted_mean(halts_b, weight_b)
    if c.n_difficulties > 1:
        for k in range(c.n_difficulties):
            name = f"exact_accuracy_difficulty_{k}"
            weight_of_k_b = weight_b * (batch["difficulty"] == k)
            metrics[name] = weighted_mean(row_scores["exact_accuracy"], weight_of_k_b)
    return metrics


def progress(model: Model, variables: Variables, batch: Batch) -> dict[str, Array]:
    """Return the first boards, a picture each: the puzzle, each step's guess, the solution."""
    # rows that divide over the devices
    n = math.lcm(4, model.shard.size("batch", batch["inputs"].shape[0]))
    first = {name: x[:n] for name, x in batch.items()}
    _, _, guess_kbs = solve(model, variables, first, lambda logits_bsv, q_b2: logits_bsv.argmax(-1))
    return {"steps": boards.draw(first["inputs"][:4], first["labels"][:4], guess_kbs[:, :4])}
