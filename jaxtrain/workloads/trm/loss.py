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
from jaxtrain.types import (
    Array,
    Axes,
    Batch,
    Example,
    Key,
    LossOut,
    Mean,
    PyTree,
    Shard,
    Task,
    Variables,
)
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
        is_done = done_b.reshape(-1, *[1] * (old.ndim - 1))
        new = new.astype(old.dtype)
        return jnp.where(is_done, new, old)

    slots = dict(model_state)
    for name, initial in (("z_h", "init_h"), ("z_l", "init_l")):
        z = model_state[name]
        first_z = jnp.broadcast_to(model_state[initial], z.shape)
        slots[name] = restart(first_z, z)
    steps = model_state["steps"]
    slots["steps"] = restart(jnp.zeros_like(steps), steps)
    for name in ("inputs", "labels", "puzzle"):
        slots[name] = restart(batch[name], model_state[name])
    return slots


def examples(
    config: Any, model_state: Any, batch: Mapping[str, Any], position: int
) -> Sequence[Example]:
    """Draw each slot's puzzle. One that began before has no id: its batch's row is dropped."""
    slots = reset_halted(model_state, batch)
    slots = jax.device_get(slots)
    inputs_bs = slots["inputs"]
    no_guess_kbs = jnp.zeros((0, *inputs_bs.shape), jnp.int32)
    drawn_boards = boards.draw(inputs_bs, slots["labels"], no_guess_kbs)
    is_new_b = np.asarray(model_state["halted"])
    row_examples = []
    for slot, board in enumerate(np.asarray(drawn_boards)):
        step = int(slots["steps"][slot]) + 1
        example_id = f"row:{slot}"
        if is_new_b[slot]:
            example_id = ""
        text = f"supervision step {step}"
        pictures = {"puzzle and solution": board}
        row_examples.append(Example(id=example_id, text=text, pictures=pictures))
    return row_examples


def halt(c: Config, steps_b: Array, q_b2: Array, least_b: Array) -> Array:
    """bool [B]: done after these steps, but not before ``least_b`` of them, except at the end."""
    q_halt_b = q_b2[:, 0]
    if c.q_continue:
        q_continue_b = q_b2[:, 1]
        wants_halt_b = q_halt_b > q_continue_b
    else:
        wants_halt_b = q_halt_b > 0
    at_end_b = steps_b >= c.halt_steps
    may_halt_b = steps_b >= least_b
    return at_end_b | (wants_halt_b & may_halt_b)


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
    symbols_v = jnp.arange(logits.shape[-1])
    symbols = symbols_v[(None,) * label.ndim]
    symbol = jnp.where(valid, label, 0)
    is_label = symbols == symbol[..., None]
    if kind == "softmax":
        log_p = jax.nn.log_softmax(logits)
        log_p_label = jnp.where(is_label, log_p, 0)
        loss = -log_p_label.sum(-1)
    else:
        # where on the inputs too: a maximum would halve the gradient at exactly 0
        below = logits < 0
        negative = jnp.where(below, logits, 0)
        s_below = 1 / (1 - negative)
        s = jnp.where(below, s_below, 1 + logits)
        s_others = jnp.where(is_label, 0, s).sum(-1)
        s_label = jnp.where(is_label, s, 0).sum(-1)
        ratio = s_others / s_label
        loss = jnp.log1p(ratio)
    return jnp.where(valid, loss, 0)


def binary_cross_entropy(logit: Array, target: Array) -> Array:
    # The logarithm of 1 + exp(logit) overflows for no logit in this form.
    difference = jnp.maximum(logit, 0) - logit * target
    small = jnp.exp(-jnp.abs(logit))
    return difference + jnp.log1p(small)


def scores(c: Config, logits_bsv: Array, q_b2: Array, labels_bs: Array) -> dict[str, Array]:
    """Return each row's losses and accuracies, [B]. One without labels is exact, not ``valid``."""
    valid_bs = labels_bs != IGNORED
    answer_bs = logits_bsv.argmax(-1)
    right_bs = (answer_bs == labels_bs) & valid_bs
    n_valid_b = valid_bs.sum(-1)
    n_right_b = right_bs.sum(-1)
    exact_b = n_right_b == n_valid_b
    loss_bs = cross_entropy(logits_bsv, labels_bs, c.loss)
    row_scores = {"lm_loss": loss_bs.sum(-1) / jnp.maximum(n_valid_b, 1)}
    q_halt_b = q_b2[:, 0]
    is_exact_b = exact_b.astype(jnp.float32)
    row_scores["q_halt_loss"] = binary_cross_entropy(q_halt_b, is_exact_b)
    row_scores["accuracy"] = right_bs.sum(-1) / jnp.maximum(n_valid_b, 1)
    row_scores["exact_accuracy"] = exact_b
    row_scores["q_halt_accuracy"] = (q_b2[:, 0] >= 0) == exact_b
    row_scores["valid"] = n_valid_b > 0
    return row_scores


def curriculum(c: Config, step: int) -> Cycles:
    """Return a step's cycles: from first to last over ``growth`` steps, rounded down."""

    def grow(first: int, last: int, growth: int) -> int:
        first = first or last
        share = 1.0
        if growth:
            share = min(step / growth, 1.0)
        cycles = first + share * (last - first)
        return int(cycles)

    growth_low = c.growth_low
    if growth_low is None:
        growth_low = c.growth
    high = grow(c.first_high, c.cycles_high, c.growth)
    low = grow(c.first_low, c.cycles_low, growth_low)
    return high, low


def depth(c: Config, step: Array, key: Key) -> Array:
    """Draw the supervision steps of a step of contract "last", int32 [], from fewest to most."""
    first = c.first_steps or c.halt_steps
    growth = max(c.growth_steps, 1)
    share = jnp.minimum(step / growth, 1)
    most = first + (c.halt_steps - first) * share
    if c.growth_steps:
        most = jnp.floor(most)
        most = most.astype(jnp.int32)
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
    model_state = make_model_state(c, batch)
    loss_of_contract = {"deep": loss, "last": last_loss}[c.contract]
    axes: dict[str, Axes] = dict.fromkeys(("inputs", "labels"), ("batch", None))
    axes |= dict.fromkeys(("puzzle", "difficulty", "weight"), ("batch",))
    return Task(
        specs=Variables(make_specs(c), model_state=model_state),
        loss=functools.partial(loss_of_contract, model),
        evaluate=functools.partial(evaluate, model),
        axes=axes,
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
    model_state = {**rows, "z_h": z_h, "z_l": z_l, "steps": steps_b, "halted": done_b}
    model_state = jax.lax.stop_gradient(model_state)
    row_scores = scores(c, logits_bsv, q_b2, rows["labels"])
    if c.q_continue:
        refined = refine(c, variables.params, model_state, cycles, model.shard)
        *_, next_q_b2 = jax.lax.stop_gradient(refined)
        value_b = _value(c, steps_b, next_q_b2)
        q_continue_b = q_b2[:, 1]
        target_b = jax.nn.sigmoid(value_b)
        row_scores["q_continue_loss"] = binary_cross_entropy(q_continue_b, target_b)
    return loss_of(model, row_scores, rows["puzzle"], steps_b, done_b, model_state)


def _value(c: Config, steps_b: Array, next_q_b2: Array) -> Array:
    """Return the value [B] of another step: the better of its two, but at the end its first."""
    at_end_b = steps_b >= c.halt_steps
    q_halt_b = next_q_b2[:, 0]
    better_b = next_q_b2.max(-1)
    return jnp.where(at_end_b, q_halt_b, better_b)


def last_loss(
    model: Model, variables: Variables, batch: Batch, key: Key, stage: Cycles | None = None
) -> LossOut:
    """Take supervision steps of each row from its beginning, with a loss after the last one."""
    c = model.c
    cycles = stage or c.cycles
    model_state = variables.model_state
    n_steps = depth(c, model_state["step"], key)
    n_rows = len(batch["inputs"])
    z = start(c, model_state, n_rows, model.shard)
    rows = {name: batch[name] for name in ("inputs", "puzzle")}
    params, rows = jax.lax.stop_gradient((variables.params, rows))

    def step(_: Array, z: dict[str, Array]) -> dict[str, Array]:
        z_h, z_l, _, _ = refine(c, params, rows | z, cycles, model.shard)
        return {"z_h": z_h, "z_l": z_l}

    with jax.named_scope("warm_up"):
        z = jax.lax.fori_loop(0, n_steps - 1, step, z)
        z = jax.lax.stop_gradient(z)
    *_, logits_bsv, q_b2 = refine(c, variables.params, rows | z, cycles, model.shard)
    row_scores = scores(c, logits_bsv, q_b2, batch["labels"])
    steps_b = jnp.broadcast_to(n_steps, (n_rows,))
    done_b = jnp.ones_like(steps_b, bool)
    puzzle_b = batch["puzzle"]
    return loss_of(model, row_scores, puzzle_b, steps_b, done_b, model_state)


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
    n_rows = jnp.float32(len(steps_b))
    finished_b = done_b & row_scores["valid"]
    finished_b = finished_b.astype(jnp.float32)
    metrics: dict[str, Mean] = {}
    for name in LOSSES:
        if name in row_scores:
            total = row_scores[name].sum()
            metrics[name] = Mean(total, n_rows)
    for name in ACCURACIES:
        metrics[name] = weighted_mean(row_scores[name], finished_b)
    metrics["steps"] = weighted_mean(steps_b, finished_b)
    metrics["halted"] = Mean(finished_b.sum(), n_rows)
    sparse_rows = {}
    if c.puzzle_embed:
        # The rows of the slots, not of the batch.
        no_reads = jnp.zeros(c.n_puzzles, jnp.int32)
        reads = no_reads.at[puzzle_b].add(1)
        sparse_rows[TABLE] = model.shard(reads, "item")
    q_continue_loss_b: Array | int = 0
    if c.q_continue:
        q_continue_loss_b = row_scores["q_continue_loss"]
    q_loss_b = row_scores["q_halt_loss"] + q_continue_loss_b
    loss_b = row_scores["lm_loss"] + 0.5 * q_loss_b
    total_loss = Mean(loss_b.sum(), n_rows)
    return LossOut(total_loss, metrics, model_state, sparse_rows)


def weighted_mean(value_b: Array, weight_b: Array) -> Mean:
    weighted_b = value_b * weight_b
    return Mean(weighted_b.sum(), weight_b.sum())


def exploration(model: Model, step: Array) -> Array | float:
    """Return the probability of exploring at a step, annealed linearly."""
    c = model.c
    if c.explore_end is None:
        return c.explore
    change = c.explore_end - c.explore
    share = jnp.minimum(step / model.steps, 1)
    return c.explore + change * share


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

    def step(state: tuple[Any, ...], _: None) -> tuple[tuple[Any, ...], PyTree]:
        z, _, _ = state
        rows = {**batch, **z}
        z_h, z_l, logits_bsv, q_b2 = refine(c, variables.params, rows, c.cycles, model.shard)
        logits_bsv = model.shard(logits_bsv, "batch", None, None)
        q_b2 = model.shard(q_b2, "batch", None)
        to_keep = None
        if keep:
            to_keep = keep(logits_bsv, q_b2)
        z = {"z_h": z_h, "z_l": z_l}
        return (z, logits_bsv, q_b2), to_keep

    n_rows = len(batch["inputs"])
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
    n_rows = len(batch["inputs"])
    puzzle_b = jnp.zeros(n_rows, jnp.int32)
    rows = {"puzzle": puzzle_b, **batch}
    logits_bsv, q_b2, _ = solve(model, variables, rows)
    answer_bs = logits_bsv.argmax(-1)
    q_halt_b = q_b2[:, 0]
    return {"answer": answer_bs, "confidence": jax.nn.sigmoid(q_halt_b)}


def evaluate(model: Model, variables: Variables, batch: Batch) -> dict[str, Mean]:
    c = model.c
    explored = None
    search = rollouts.search_of(c)
    if search == rollouts.Search(steps=c.halt_steps):
        logits_bsv, q_b2, _ = solve(model, variables, batch)
    else:
        key = jax.random.key(0)
        explored = rollouts.explore(c, variables, batch, search, c.noise, key, model.shard)
        best_b = explored.best("q")
        logits_bsv, q_b2 = explored.of(best_b)
    row_scores = scores(c, logits_bsv, q_b2, batch["labels"])
    weight_b = batch["weight"] * row_scores["valid"]
    metrics = {}
    for name in ("lm_loss", "q_halt_loss", *ACCURACIES):
        metrics[name] = weighted_mean(row_scores[name], weight_b)
    if explored:
        metrics |= _rollout_metrics(c, explored, batch["labels"], weight_b)
    exact_b = row_scores["exact_accuracy"]
    if c.n_difficulties > 1:
        for k in range(c.n_difficulties):
            name = f"exact_accuracy_difficulty_{k}"
            is_k_b = batch["difficulty"] == k
            metrics[name] = weighted_mean(exact_b, weight_b * is_k_b)
    return metrics


def _rollout_metrics(
    c: Config, explored: rollouts.Explored, labels_bs: Array, weight_b: Array
) -> dict[str, Mean]:
    """Return the metrics of an evaluation by rollouts."""
    steps_br = explored.steps.astype(jnp.float32)
    steps_b = steps_br.mean(1)
    metrics = {"test_steps": weighted_mean(steps_b, weight_b)}
    if c.rollouts == 1:
        return metrics
    halted_br = explored.sure[:, 1:] > 0
    halts_b = halted_br.astype(jnp.float32).mean(1)
    if c.n_puzzles == 1:  # rows of a mixture have other rules
        best_b = explored.best("check")
        logits_bsv, q_b2 = explored.of(best_b)
        checked = scores(c, logits_bsv, q_b2, labels_bs)
        exact_b = checked["exact_accuracy"]
        metrics["exact_accuracy_checked"] = weighted_mean(exact_b, weight_b)
    metrics["rollouts_halted"] = weighted_mean(halts_b, weight_b)
    return metrics


def progress(model: Model, variables: Variables, batch: Batch) -> dict[str, Array]:
    """Return the first boards, a picture each: the puzzle, each step's guess, the solution."""
    # rows that divide over the devices
    n_parts = model.shard.size("batch", len(batch["inputs"]))
    n_rows = math.lcm(4, n_parts)
    first_rows = {name: x[:n_rows] for name, x in batch.items()}

    def answer(logits_bsv: Array, q_b2: Array) -> Array:
        return logits_bsv.argmax(-1)

    _, _, guess_kbs = solve(model, variables, first_rows, answer)
    inputs_bs = first_rows["inputs"][:4]
    labels_bs = first_rows["labels"][:4]
    return {"steps": boards.draw(inputs_bs, labels_bs, guess_kbs[:, :4])}
