"""Rollouts: different passes over the same board, of which the best is taken.

They differ by noise (Sghaier et al. 2026): before each supervision step, Gaussian noise is added to
both states. Or they differ by symmetry: each pass sees the board in another order of its lines and
with other names of its digits, and its answer is put back. Either leads passes that would settle on
a wrong board to others. The q-head, or the rules of the puzzle, choose among the boards. The first
pass is the model's own. The norms keep the root mean square of a state at 1, so that noise is in
its units.

Shapes: as in `model`; R rollouts, N = B × R rows, the rollouts of a board next to each other.
"""

import math
from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxtrain.types import Array, Key, Shard, Variables
from jaxtrain.workloads.trm.model import Config, refine, start
from loaders.sudoku import puzzles

OF_VIEW = 1 << 30  # folded into a rollout's key for its symmetry: its steps fold in smaller numbers


class Search(NamedTuple):
    """How boards are searched. Each value is part of the compiled program."""

    rollouts: int = 1
    steps: int = 16  # [supervision steps] at most
    # halt: a rollout ends when the q-head is sure; check: those of a board, when one keeps the
    # rules
    stop: str = "none"
    # [1] a rollout ends when its answer's state changes by less, in its own units; 0 = never
    residual: float = 0.0
    # [bool] all rollouts but the first see the board under a random symmetry
    symmetry: bool = False


class Found(NamedTuple):
    """Each rollout's end, [B, R, …]."""

    logits: Array  # float32 [B, R, S, V]
    q: Array  # float32 [B, R, 2]
    solved: Array  # bool [B, R]: the board keeps the givens and the rules
    sure: Array  # int32 [B, R] first step at which the q-head was sure; 0: at none
    since: Array  # int32 [B, R] first step whose board is the last one
    steps: Array  # int32 [B, R] that the rollout took

    def best(self, by: str) -> Array:
        """Return int32 [B]: the number of the rollout that is taken for each board.

        The q-head chooses: among all with "q", and with "check" among those whose answers keep the
        rules, if there are any.
        """
        q_br = self.q[..., 0]
        if by == "check":
            q_br = jnp.where(self.solved | ~self.solved.any(-1, keepdims=True), q_br, -jnp.inf)
        return q_br.argmax(-1)

    def of(self, best_b: Array) -> tuple[Array, Array]:
        """Return logits [B, S, V] and q [B, 2] of a rollout of each board."""
        logits_bsv = jnp.take_along_axis(self.logits, best_b[:, None, None, None], 1)[:, 0]
        return logits_bsv, jnp.take_along_axis(self.q, best_b[:, None, None], 1)[:, 0]


class Views(NamedTuple):
    """A symmetry of the puzzle for each row."""

    places: Array  # int32 [N, S]: the cell that each place takes
    names: Array  # int32 [N, V]: the new symbol of each symbol

    def of(self, inputs_ns: Array) -> Array:
        """Return the boards as they are seen."""
        return jnp.take_along_axis(jnp.take_along_axis(self.names, inputs_ns, 1), self.places, 1)

    def back(self, logits_nsv: Array) -> Array:
        """Return the logits of cells and symbols as they were."""
        there = jnp.take_along_axis(logits_nsv, self.places.argsort(1)[..., None], 1)
        return jnp.take_along_axis(there, self.names[:, None], 2)


def views(kind: str, side: int, keys_n: Array, vary_n: Array) -> Views:
    """Draw a symmetry of a kind of puzzle from each key. Rows that do not vary stay as they are."""

    def draws(domain: int, *shape: int) -> Array:
        return jax.vmap(
            lambda key: jax.random.uniform(jax.random.fold_in(key, OF_VIEW + domain), shape)
        )(keys_n)

    def shuffled(domain: int, *shape: int) -> Array:
        """[N, *shape]: permutations of the last axis."""
        vary = vary_n.reshape(-1, *[1] * len(shape))
        return jnp.where(
            vary, draws(domain, *shape).argsort(-1), jnp.arange(shape[-1])[(None,) * len(shape)]
        )

    names = jnp.broadcast_to(
        jnp.arange(puzzles.n_symbols(kind))[None], (len(vary_n), puzzles.n_symbols(kind))
    )
    if kind not in puzzles.BOXES:
        turns = jnp.asarray(puzzles.turns(side))
        return Views(
            turns[jnp.where(vary_n, jnp.floor(8 * draws(puzzles.TURN)).astype(int), 0)], names
        )
    high, wide = puzzles.BOXES[kind]
    rows = shuffled(puzzles.BANDS, side // high), shuffled(puzzles.LINES, side // high, high)
    columns = shuffled(puzzles.STACKS, side // wide), shuffled(puzzles.COLUMNS, side // wide, wide)
    turn_n = vary_n & (draws(puzzles.TURN) < 0.5)
    names = jnp.concatenate([names[:, :2], shuffled(puzzles.DIGITS, side) + 2], 1)
    return Views(puzzles.cells_at(kind, rows, columns, turn_n), names)


def search_of(c: Config) -> Search:
    """Return the search of an evaluation."""
    return Search(c.rollouts, c.test_steps or c.halt_steps, "none", c.residual, c.symmetry)


def explore(
    c: Config,
    variables: Variables,
    rows: Mapping[str, Array],
    search: Search,
    noise: Array | float,
    key: Key,
    shard: Shard,
) -> Found:
    """Search boards.

    A row's noise and symmetry follow from the key, its board, its rollout and the step alone.

    Args:
      rows: ``inputs`` [B, S] and ``puzzle`` [B], among others.
      noise: standard deviation, in units of the state's root mean square.
    """
    n_boards, r = rows["inputs"].shape[0], search.rollouts
    given = {
        name: shard(jnp.repeat(rows[name], r, axis=0), "batch", *[None] * (rows[name].ndim - 1))
        for name in ("inputs", "puzzle")
    }
    kind = puzzles.kind_of(c.n_cells, c.vocab)
    keys_n = jax.vmap(lambda number, i: jax.random.fold_in(jax.random.fold_in(key, number), i))(
        _numbers(given["inputs"]), jnp.tile(jnp.arange(r), n_boards)
    )
    if search.symmetry:
        view = views(kind, math.isqrt(c.n_cells), keys_n, jnp.tile(jnp.arange(r) > 0, n_boards))
        given["inputs"] = shard(view.of(given["inputs"]), "batch", None)
    noise_n = noise * jnp.tile(jnp.arange(r) > 0, n_boards)

    def disturbed(z_ntd: Array, i: Array, which: int) -> Array:
        if r == 1:
            return z_ntd

        def draw(key: Key) -> Array:
            return jax.random.normal(jax.random.fold_in(key, 2 * i + which), z_ntd.shape[1:])

        return (z_ntd + noise_n[:, None, None] * jax.vmap(draw)(keys_n)).astype(z_ntd.dtype)

    def step(state: dict[str, Array]) -> dict[str, Array]:
        i, done_n = state["i"], state["done"]
        z = {"z_h": disturbed(state["z_h"], i, 0), "z_l": disturbed(state["z_l"], i, 1)}
        z_h, z_l, logits_nsv, q_n2 = refine(c, variables.params, {**given, **z}, c.cycles, shard)
        q_n2 = jnp.where(jnp.isnan(q_n2), -jnp.inf, q_n2)  # a state that overflowed is not chosen
        answer_ns, before_ns = logits_nsv.argmax(-1), state["logits"].argmax(-1)
        changed_n = (answer_ns != before_ns).any(-1) | (i == 0)
        sure_n = q_n2[:, 0] > (q_n2[:, 1] if c.q_continue else 0)
        solved_n = (
            puzzles.is_solved(kind, given["inputs"], answer_ns) if kind else jnp.zeros_like(sure_n)
        )
        new = {
            "z_h": z_h,
            "z_l": z_l,
            "logits": shard(logits_nsv, "batch", None, None),
            "q": shard(q_n2, "batch", None),
            "solved": solved_n,
            "sure": jnp.where((state["sure"] == 0) & sure_n, i + 1, state["sure"]),
            "since": jnp.where(changed_n, i + 1, state["since"]),
            "steps": jnp.full_like(state["steps"], i + 1),
            "done": done_n,
        }
        new = {
            name: jnp.where(done_n.reshape(-1, *[1] * (x.ndim - 1)), state[name], x)
            for name, x in new.items()
        }
        if search.stop == "halt":
            new["done"] |= sure_n
        if search.stop == "check":
            new["done"] |= jnp.repeat(new["solved"].reshape(n_boards, r).any(-1), r)
        if search.residual:
            moved_n = jnp.sqrt(jnp.square((z_h - state["z_h"]).astype(jnp.float32)).mean((1, 2)))
            new["done"] |= moved_n < search.residual
        return {**new, "i": i + 1}

    n = n_boards * r
    count_n = jnp.zeros(n, jnp.int32)
    state = {
        **start(c, variables.model_state, n, shard),
        "logits": jnp.zeros((n, c.n_cells, c.vocab)),
        "q": jnp.zeros((n, 2)),
        **dict.fromkeys(("sure", "since", "steps"), count_n),
        **dict.fromkeys(("solved", "done"), count_n > 0),
        "i": jnp.int32(0),
    }
    state = jax.lax.while_loop(
        lambda state: (state["i"] < search.steps) & ~state["done"].all(), step, state
    )
    if search.symmetry:
        state["logits"] = shard(view.back(state["logits"]), "batch", None, None)
    return Found(
        *(state[name].reshape(n_boards, r, *state[name].shape[1:]) for name in Found._fields)
    )


def _numbers(inputs_ns: Array) -> Array:
    """Return uint32 [N]: a number that follows from a board alone, wherever it is in a batch."""
    weights_s = np.array(
        [pow(2_654_435_761, i + 1, 2**32) for i in range(inputs_ns.shape[1])], np.uint32
    )
    return (inputs_ns.astype(jnp.uint32) * weights_s[None]).sum(-1, dtype=jnp.uint32)
