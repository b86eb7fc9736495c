"""Rollouts of the recursive model: noise, stops, the choice, on any number of devices, and
confidence with its intervals."""

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxtrain.arrays import stored_params
from jaxtrain.parallel.layout import make_layout, make_mesh
from jaxtrain.workloads.trm import confidence, rollouts
from jaxtrain.workloads.trm.model import refine, start
from jaxtrain.workloads.trm.rollouts import Search
from loaders.base import DataError
from loaders.sudoku import puzzle_generators, puzzles
from tests.support.cases import Run, assert_alike
from tests.support.cases.trm import CASE, TINY, WIDE, calm, random_batch


@pytest.fixture(scope="module")
def variables():
    found = Run(CASE._replace(begin=calm), (1, 1, 1)).init().variables
    # The heads are sure of some boards at some steps.
    return jax.device_get(
        found._replace(
            params={**found.params, "w_q": 3 * jax.random.normal(jax.random.key(5), (16, 2))}
        )
    )


def program(search, shard):
    """The number of steps is an argument: searches that differ in it alone share a program."""

    def run(variables, batch, noise, steps):
        return rollouts.explore(
            TINY, variables, batch, search._replace(steps=steps), noise, jax.random.key(3), shard
        )

    return jax.jit(run)


@functools.cache
def on_one_device(search, is_solved):  # which a test changes
    return program(search, stored_params.one_device().shard)


def explore(variables, search, noise=0.7, *, rows=slice(None), shard=None):
    batch = {name: random_batch(0)[name][rows] for name in ("inputs", "puzzle")}
    any_steps = search._replace(steps=0)
    run = program(any_steps, shard) if shard else on_one_device(any_steps, puzzles.is_solved)
    return jax.device_get(run(variables, batch, jnp.float32(noise), jnp.int32(search.steps)))


@pytest.fixture(scope="module")
def whole(variables):
    return explore(variables, Search(4, 6))


def test_each_rollout_is_the_recursion_with_its_noise(variables, whole):
    """Step by step, without a loop on the device: noise of the given size in both states, none in
    the first rollout."""
    batch = {name: random_batch(0)[name] for name in ("inputs", "puzzle")}
    z = start(TINY, variables.model_state, WIDE, stored_params.one_device().shard)
    step = jax.jit(
        lambda z: refine(
            TINY, variables.params, {**batch, **z}, TINY.cycles, stored_params.one_device().shard
        )
    )
    boards, sure = [], []
    for _ in range(6):
        z_h, z_l, logits, q = step(z)
        z = {"z_h": z_h, "z_l": z_l}
        boards.append(np.asarray(logits.argmax(-1)))
        sure.append(np.asarray(q[:, 0] > 0))
    np.testing.assert_allclose(whole.q[:, 0], q, atol=2e-3)
    np.testing.assert_array_equal(whole.logits[:, 0].argmax(-1), boards[-1])
    first = np.array(sure).argmax(0) + 1
    np.testing.assert_array_equal(whole.sure[:, 0], np.where(np.any(sure, 0), first, 0))
    differs = np.array([(b != boards[-1]).any(1) for b in boards])
    np.testing.assert_array_equal(
        whole.since[:, 0], [max([0, *(np.flatnonzero(d) + 1)]) + 1 for d in differs.T]
    )
    assert len({board.tobytes() for board in whole.q[0, :, 0]}) == 4 and (whole.steps == 6).all()
    still = explore(variables, Search(4, 6), 0.0)
    assert (still.q == still.q[:, :1]).all()
    little = explore(variables, Search(4, 1), 1e-3).q - explore(variables, Search(4, 1), 0.0).q
    more = explore(variables, Search(4, 1), 2e-3).q - explore(variables, Search(4, 1), 0.0).q
    np.testing.assert_allclose(more[:, 1:], 2 * little[:, 1:], atol=3e-3)


def test_noise_follows_from_the_board_and_the_rollout_alone(variables, whole):
    """The noise is the same in another batch, with more rollouts, over eight devices."""
    alone = explore(variables, Search(6, 6), rows=slice(3, 5))
    np.testing.assert_allclose(alone.q[:, :4], whole.q[3:5], atol=1e-2)
    layout = make_layout(make_mesh(8, 1, 1), {})
    replicated = jax.device_put(variables, layout.replicated())
    np.testing.assert_allclose(
        explore(replicated, Search(4, 6), shard=layout.shard).q, whole.q, atol=1e-2
    )


def test_a_rollout_that_overflows_is_not_chosen(variables):
    found = explore(variables, Search(3, 2), 1e30)
    assert (
        np.isneginf(found.q[:, 1:, 0]).all()
        and not found.sure[:, 1:].any()
        and not np.isnan(found.q).any()
    )
    assert all((np.asarray(found.best(by)) == 0).all() for by in ("q", "check"))


@pytest.mark.parametrize(
    ("kind", "side"), [("sudoku", 9), ("sudoku6", 6), ("sudoku4", 4), ("maze", 7)]
)
def test_a_view_of_a_board_has_the_view_of_its_answer(kind, side):
    source = puzzles.Source(kind=kind, n_train=12, n_test=0, blanks=(3, 6), side=side)
    made = puzzle_generators.generate(source, 0)["train"]
    keys, vary = jax.random.split(jax.random.key(1), 12), jnp.arange(12) > 0
    view = rollouts.views(kind, side, keys, vary)
    boards, answers = (np.asarray(view.of(x.astype("i4"))) for x in (made.inputs, made.labels))
    assert puzzles.is_solved(kind, boards, answers).all(), "its givens and its rules are kept"
    changed = (answers != made.labels).any(1)
    assert not changed[0] and changed[1:].mean() > 0.7
    logits = jax.nn.one_hot(answers, puzzles.n_symbols(kind))
    np.testing.assert_array_equal(view.back(logits).argmax(-1), made.labels)
    if kind == "sudoku":
        kept = np.array(
            [
                [len(np.unique(b.reshape(9, 9)[:, k])) for k in range(9)]
                for b in np.asarray(view.places) // 9
            ]
        )
        assert set(kept[1:].reshape(12 - 1, -1)[:, 0]) == {1, 9}, (
            "some are transposed, and others are not"
        )


def test_a_rollout_answers_the_board_as_it_sees_it(variables, whole):
    """Each rollout except the first is the model's own pass over a transformed board, transformed
    back."""
    found = explore(variables, Search(4, 6, symmetry=True), 0.0)
    np.testing.assert_allclose(found.logits[:, 0], whole.logits[:, 0], atol=2e-3)
    assert len({q.tobytes() for q in found.q[0, :, 0]}) == 4
    rows = random_batch(0)

    @jax.jit
    def seen_and_back(variables, rows):
        seen, original, shard = [], rollouts.views, stored_params.one_device().shard
        run = functools.partial(rollouts.explore, TINY, variables)
        rollouts.views = lambda *args: seen.append(original(*args)) or seen[-1]
        try:
            batch = {name: rows[name] for name in ("inputs", "puzzle")}
            run(batch, Search(4, 1, symmetry=True), 0.0, jax.random.key(3), shard)
        finally:
            rollouts.views = original
        inputs, puzzle = (jnp.repeat(rows[name], 4, axis=0) for name in ("inputs", "puzzle"))
        batch = {"inputs": seen[0].of(inputs), "puzzle": puzzle}
        return seen[0].back(run(batch, Search(1, 6), 0.0, jax.random.key(3), shard).logits[:, 0])

    expected = seen_and_back(variables, rows)
    np.testing.assert_allclose(found.logits.reshape(expected.shape), expected, atol=5e-3)
    layout = make_layout(make_mesh(8, 1, 1), {})
    replicated = jax.device_put(variables, layout.replicated())
    spread = explore(replicated, Search(4, 6, symmetry=True), 0.0, shard=layout.shard)
    np.testing.assert_allclose(spread.logits, found.logits, atol=1e-2)


def test_stops_keep_the_board_at_which_they_stop(variables, whole, monkeypatch):
    monkeypatch.setattr(puzzles, "is_solved", lambda kind, boards, answers: answers[..., 0] == 3)
    each = [explore(variables, Search(4, k)) for k in range(1, 7)]
    halted = explore(variables, Search(4, 6, "halt"))
    np.testing.assert_array_equal(halted.steps, np.where(whole.sure > 0, whole.sure, 6))
    assert len(np.unique(halted.steps)) > 2
    for k in np.unique(halted.steps):
        at = halted.steps == k
        np.testing.assert_allclose(halted.q[at], each[int(k) - 1].q[at], atol=2e-3)
    solved = np.array([one.solved.any(1) for one in each])
    checked = explore(variables, Search(4, 6, "check"))
    expected = np.where(solved.any(0), solved.argmax(0) + 1, 6)
    assert (checked.steps == expected[:, None]).all() and len(set(expected.tolist())) > 1, (
        "of a board all stop together"
    )
    best = checked.best("check")
    any_solved = checked.solved.any(1)
    assert np.take_along_axis(checked.solved, np.asarray(best)[:, None], 1)[any_solved].all()
    np.testing.assert_array_equal(
        np.asarray(best)[~any_solved], checked.q[..., 0].argmax(1)[~any_solved]
    )


def test_a_fixed_point_stops_at_its_bound(variables):
    assert (explore(variables, Search(1, 6, residual=1e-9)).steps == 6).all()
    assert (explore(variables, Search(1, 6, residual=10.0)).steps == 1).all()
    params = variables.params
    settling = variables._replace(
        params={**params, "net": {name: x / 10 for name, x in params["net"].items()}}
    )
    early, last = (explore(settling, Search(1, n, residual=1e-3)) for n in (200, 3))
    assert 3 < early.steps.min() <= early.steps.max() < 200 and (last.steps == 3).all()
    late = explore(settling, Search(1, 200))
    np.testing.assert_allclose(early.logits, late.logits, atol=0.1)


@pytest.mark.slow
def test_an_evaluation_takes_the_best_rollout_on_every_mesh():
    c = replace(TINY, rollouts=2, noise=0.7, symmetry=True, test_steps=2, n_puzzles=1)
    assert not list(c.validate())
    case = CASE._replace(
        model=c,
        begin=calm,
        batch=lambda seed: {**random_batch(seed), "puzzle": np.zeros(WIDE, "i4")},
    )
    alone = Run(case, (1, 1, 1)).take(1)
    metrics = alone[1]
    assert {"exact_accuracy_checked", "rollouts_halted"} <= set(metrics)
    assert float(metrics["test_steps"].total) == 2 * float(metrics["test_steps"].weight) > 0
    assert_alike(alone, Run(case, (4, 2, 1)).take(1), share=2e-4)


def test_options_are_refused_by_name():
    def names(**options):
        return [name for name, _ in replace(TINY, **options).validate()]

    assert (names(rollouts=4), names(noise=1.0), names(symmetry=True)) == (
        ["rollouts"],
        ["noise"],
        ["symmetry"],
    )
    assert not names(rollouts=4, symmetry=True) and not names(rollouts=4, noise=0.3)
    data = {"n_cells": 16, "vocab": 6, "n_puzzles": 1, "n_difficulties": 2}
    one = replace(TINY, rollouts=2, symmetry=True, n_puzzles=1)
    assert not list(one.validate_data(data))
    assert [text for _, text in replace(one, n_puzzles=2).validate_data(data)] == [
        "is True, of boards of one kind, and the data have 2 ids of puzzles; use noise"
    ]
    assert (
        "no kind of puzzle has 16 cells and 7 symbols"
        in next(replace(one, vocab=7).validate_data(data))[1]
    )
    assert "noise" in [n for n, _ in replace(TINY, rollouts=2, noise=-1.0).validate()]


def test_a_confidence_is_as_often_right():
    """The logits are too sure: the scale that made the answers is found, and the error of the rest
    is small."""
    rng = np.random.default_rng(0)
    q = rng.normal(0, 6, 4000)
    right = rng.random(4000) < 1 / (1 + np.exp(-(0.4 * q - 1)))
    scale = confidence.fit(q, right)
    assert scale.slope == pytest.approx(0.4, abs=0.04) and scale.offset == pytest.approx(
        -1, abs=0.15
    )
    all_right = confidence.fit(np.linspace(1, 5, 30), np.ones(30, bool))
    assert 0.9 < all_right(3.0) < 1
    with pytest.raises(DataError, match="19 boards calibrate no confidence; expected at least 20"):
        confidence.fit(q[:19], right[:19])
