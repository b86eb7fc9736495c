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

from jaxtrain.types import Array, Key, PyTree, Shard, Variables
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


class Explored(NamedTuple):
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
            any_solved_b1 = self.solved.any(-1, keepdims=True)
            none_solved_b1 = ~any_solved_b1
            is_candidate_br = self.solved | none_solved_b1
            q_br = jnp.where(is_candidate_br, q_br, -jnp.inf)
        return q_br.argmax(-1)

    def of(self, best_b: Array) -> tuple[Array, Array]:
        """Return logits [B, S, V] and q [B, 2] of a rollout of each board."""
        index_b111 = best_b[:, None, None, None]
        logits_b1sv = jnp.take_along_axis(self.logits, index_b111, 1)
        logits_bsv = logits_b1sv[:, 0]
        index_b11 = best_b[:, None, None]
        q_b12 = jnp.take_along_axis(self.q, index_b11, 1)
        q_b2 = q_b12[:, 0]
        return logits_bsv, q_b2


class Views(NamedTuple):
    """A symmetry of the puzzle for each row."""

    places: Array  # int32 [N, S]: the cell that each place takes
    names: Array  # int32 [N, V]: the new symbol of each symbol

    def of(self, inputs_ns: Array) -> Array:
        """Return the boards as they are seen."""
        renamed_ns = jnp.take_along_axis(self.names, inputs_ns, 1)
        return jnp.take_along_axis(renamed_ns, self.places, 1)

    def back(self, logits_nsv: Array) -> Array:
        """Return the logits of cells and symbols as they were."""
        place_of_cell_ns = self.places.argsort(1)
        place_ns1 = place_of_cell_ns[..., None]
        of_cells_nsv = jnp.take_along_axis(logits_nsv, place_ns1, 1)
        name_n1v = self.names[:, None]
        return jnp.take_along_axis(of_cells_nsv, name_n1v, 2)


def views(kind: str, side: int, keys_n: Array, vary_n: Array) -> Views:
    """Draw a symmetry of a kind of puzzle from each key. Rows that do not vary stay as they are."""

    def uniform(domain: int, *shape: int) -> Array:
        """[N, *shape] in [0, 1), for a use of its own for each ``domain``."""

        def of_row(key: Key) -> Array:
            number = OF_VIEW + domain
            domain_key = jax.random.fold_in(key, number)
            return jax.random.uniform(domain_key, shape)

        return jax.vmap(of_row)(keys_n)

    def shuffled(domain: int, *shape: int) -> Array:
        """[N, *shape]: permutations of the last axis."""
        vary = vary_n.reshape(-1, *[1] * len(shape))
        draws = uniform(domain, *shape)
        permutation = draws.argsort(-1)
        in_order = jnp.arange(shape[-1])
        identity = in_order[(None,) * len(shape)]
        return jnp.where(vary, permutation, identity)

    n_rows = len(vary_n)
    n_symbols = puzzles.n_symbols(kind)
    symbols_v = jnp.arange(n_symbols)
    names_nv = jnp.broadcast_to(symbols_v[None], (n_rows, n_symbols))
    if kind not in puzzles.BOXES:
        turns = puzzles.turns(side)
        turns_8s = jnp.asarray(turns)
        share_n = uniform(puzzles.TURN)
        turn_n = jnp.floor(8 * share_n)
        turn_n = turn_n.astype(int)
        turn_n = jnp.where(vary_n, turn_n, 0)
        places_ns = turns_8s[turn_n]
        return Views(places_ns, names_nv)
    height, width = puzzles.BOXES[kind]
    n_bands = side // height
    bands = shuffled(puzzles.BANDS, n_bands)
    rows = shuffled(puzzles.LINES, n_bands, height)
    n_stacks = side // width
    stacks = shuffled(puzzles.STACKS, n_stacks)
    columns = shuffled(puzzles.COLUMNS, n_stacks, width)
    share_n = uniform(puzzles.TURN)
    is_turned_n = share_n < 0.5
    is_turned_n = vary_n & is_turned_n
    padding_and_blank = names_nv[:, :2]
    digits = shuffled(puzzles.DIGITS, side)
    digits = digits + 2
    names_nv = jnp.concatenate([padding_and_blank, digits], 1)
    places_ns = puzzles.cells_at(kind, (bands, rows), (stacks, columns), is_turned_n)
    return Views(places_ns, names_nv)


def search_of(c: Config) -> Search:
    """Return the search of an evaluation."""
    return Search(c.rollouts, c.test_steps or c.halt_steps, "none", c.residual, c.symmetry)


class Passes(NamedTuple):
    """The rollouts of boards as rows, N = B × R, with all that their steps share."""

    c: Config
    params: PyTree
    search: Search
    kind: str  # of the puzzle; "" = unknown
    rows: Mapping[str, Array]  # inputs [N, S] as each rollout sees them, puzzle [N]
    keys_n: Array
    noise_n: Array  # standard deviation; 0 for the first rollout of a board
    shard: Shard

    def step(self, state: dict[str, Array]) -> dict[str, Array]:
        """Take a supervision step with each row that is not done."""
        c, shard = self.c, self.shard
        i, done_n = state["i"], state["done"]
        z_h = self._disturbed(state["z_h"], i, 0)
        z_l = self._disturbed(state["z_l"], i, 1)
        rows = {**self.rows, "z_h": z_h, "z_l": z_l}
        z_h, z_l, logits_nsv, q_n2 = refine(c, self.params, rows, c.cycles, shard)
        # a state that overflowed is not chosen
        q_n2 = jnp.where(jnp.isnan(q_n2), -jnp.inf, q_n2)
        answer_ns = logits_nsv.argmax(-1)
        previous_ns = state["logits"].argmax(-1)
        changed_ns = answer_ns != previous_ns
        changed_n = changed_ns.any(-1)
        changed_n |= i == 0
        sure_n = self._is_sure(q_n2)
        solved_n = self._is_solved(answer_ns)
        new = {"z_h": z_h, "z_l": z_l}
        new["logits"] = shard(logits_nsv, "batch", None, None)
        new["q"] = shard(q_n2, "batch", None)
        new["solved"] = solved_n
        becomes_sure_n = (state["sure"] == 0) & sure_n
        new["sure"] = jnp.where(becomes_sure_n, i + 1, state["sure"])
        new["since"] = jnp.where(changed_n, i + 1, state["since"])
        new["steps"] = jnp.full_like(state["steps"], i + 1)
        new["done"] = done_n
        for name, x in new.items():
            is_done = done_n.reshape(-1, *[1] * (x.ndim - 1))
            new[name] = jnp.where(is_done, state[name], x)
        if self.search.stop == "halt":
            new["done"] |= sure_n
        if self.search.stop == "check":
            new["done"] |= self._of_solved_boards(new["solved"])
        if self.search.residual:
            move_ntd = z_h - state["z_h"]
            residual_n = _root_mean_square(move_ntd)
            new["done"] |= residual_n < self.search.residual
        new["i"] = i + 1
        return new

    def _disturbed(self, z_ntd: Array, i: Array, number: int) -> Array:
        """Add the noise of step i to the state of this number: 0 is z_h, 1 is z_l."""
        if self.search.rollouts == 1:
            return z_ntd

        def draw(key: Key) -> Array:
            step_key = jax.random.fold_in(key, 2 * i + number)
            return jax.random.normal(step_key, z_ntd.shape[1:])

        noise_n11 = self.noise_n[:, None, None]
        draws_ntd = jax.vmap(draw)(self.keys_n)
        disturbed_ntd = z_ntd + noise_n11 * draws_ntd
        return disturbed_ntd.astype(z_ntd.dtype)

    def _is_sure(self, q_n2: Array) -> Array:
        q_halt_n = q_n2[:, 0]
        if self.c.q_continue:
            q_continue_n = q_n2[:, 1]
            return q_halt_n > q_continue_n
        return q_halt_n > 0

    def _is_solved(self, answer_ns: Array) -> Array:
        if not self.kind:
            return jnp.zeros(len(answer_ns), bool)
        solved_n: Array = puzzles.is_solved(self.kind, self.rows["inputs"], answer_ns)
        return solved_n

    def _of_solved_boards(self, solved_n: Array) -> Array:
        """Whether a row's board is solved by any of its rollouts, bool [N]."""
        r = self.search.rollouts
        solved_br = solved_n.reshape(-1, r)
        solved_b = solved_br.any(-1)
        return jnp.repeat(solved_b, r)


def _root_mean_square(z_ntd: Array) -> Array:
    z_ntd = z_ntd.astype(jnp.float32)
    square_ntd = jnp.square(z_ntd)
    mean_square_n = square_ntd.mean((1, 2))
    return jnp.sqrt(mean_square_n)


def explore(
    c: Config,
    variables: Variables,
    rows: Mapping[str, Array],
    search: Search,
    noise: Array | float,
    key: Key,
    shard: Shard,
) -> Explored:
    """Search boards.

    A row's noise and symmetry follow from the key, its board, its rollout and the step alone.

    Args:
      rows: ``inputs`` [B, S] and ``puzzle`` [B], among others.
      noise: standard deviation, in units of the state's root mean square.
    """
    r = search.rollouts
    n_boards = len(rows["inputs"])
    repeated = {}
    for name in ("inputs", "puzzle"):
        x = jnp.repeat(rows[name], r, axis=0)
        repeated[name] = shard(x, "batch", *[None] * (x.ndim - 1))
    kind = puzzles.kind_of(c.n_cells, c.vocab)
    keys_n = _row_keys(key, repeated["inputs"], r)
    if search.symmetry:
        side = math.isqrt(c.n_cells)
        view = views(kind, side, keys_n, _is_later(n_boards, r))
        seen_ns = view.of(repeated["inputs"])
        repeated["inputs"] = shard(seen_ns, "batch", None)
    is_later_n = _is_later(n_boards, r)
    noise_n = noise * is_later_n
    passes = Passes(c, variables.params, search, kind, repeated, keys_n, noise_n, shard)

    def goes_on(state: dict[str, Array]) -> Array:
        return (state["i"] < search.steps) & ~state["done"].all()

    n_rows = n_boards * r
    state = _begin(c, variables.model_state, n_rows, shard)
    state = jax.lax.while_loop(goes_on, passes.step, state)
    if search.symmetry:
        logits_nsv = view.back(state["logits"])
        state["logits"] = shard(logits_nsv, "batch", None, None)
    ends = {}
    for name in Explored._fields:
        x = state[name]
        ends[name] = x.reshape(n_boards, r, *x.shape[1:])
    return Explored(**ends)


def _begin(c: Config, model_state: PyTree, n: int, shard: Shard) -> dict[str, Array]:
    """Return the state of n rows before their first step."""
    zero_n = jnp.zeros(n, jnp.int32)
    state = start(c, model_state, n, shard)
    state["logits"] = jnp.zeros((n, c.n_cells, c.vocab))
    state["q"] = jnp.zeros((n, 2))
    state |= dict.fromkeys(("sure", "since", "steps"), zero_n)
    state |= dict.fromkeys(("solved", "done"), zero_n > 0)
    state["i"] = jnp.int32(0)
    return state


def _is_later(n_boards: int, r: int) -> Array:
    """Return bool [N]: whether a row is not the first rollout of its board."""
    rollout_r = jnp.arange(r)
    is_later_r = rollout_r > 0
    return jnp.tile(is_later_r, n_boards)


def _row_keys(key: Key, inputs_ns: Array, r: int) -> Array:
    """Return the key of each row, by its board and its rollout alone."""
    n_rows = len(inputs_ns)
    board_n = _numbers(inputs_ns)
    rollout_r = jnp.arange(r)
    rollout_n = jnp.tile(rollout_r, n_rows // r)

    def of_row(board: Array, rollout: Array) -> Key:
        board_key = jax.random.fold_in(key, board)
        return jax.random.fold_in(board_key, rollout)

    return jax.vmap(of_row)(board_n, rollout_n)


def _numbers(inputs_ns: Array) -> Array:
    """Return uint32 [N]: a number that follows from a board alone, wherever it is in a batch."""
    n_cells = inputs_ns.shape[1]
    powers = [pow(2_654_435_761, i + 1, 2**32) for i in range(n_cells)]
    weights_s = np.array(powers, np.uint32)
    inputs_ns = inputs_ns.astype(jnp.uint32)
    weighted_ns = inputs_ns * weights_s[None]
    return weighted_ns.sum(-1, dtype=jnp.uint32)
