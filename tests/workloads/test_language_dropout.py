"""Dropout of the language model: the same draws on every mesh and after a resume, and none in an
evaluation."""

import dataclasses
import re
import signal

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxtrain import config as config_lib
from jaxtrain.nn import attention, dropout
from jaxtrain.parallel.layout import LayoutError
from jaxtrain.types import Variables
from jaxtrain.workloads.language import dropout as language_dropout
from jaxtrain.workloads.language import loss as language_loss
from tests.support import processes, small_runs
from tests.support.cases import Run, assembled, assert_alike, initial
from tests.support.cases.language import CASE, DROPPED, TINY, alone, packed_batch


def case(**changes):
    return CASE._replace(model=dataclasses.replace(TINY, **changes))


@pytest.fixture(scope="module")
def one_device():
    return Run(case(**DROPPED), (1, 1, 1)).take(2)


@pytest.mark.parametrize(
    ("mesh", "accumulate", "changes"),
    [
        ((1, 2, 1), 2, dict(remat="save attention")),
        pytest.param((2, 2, 2), 2, dict(remat="save attention"), marks=pytest.mark.slow),
        pytest.param((1, 8, 1), 1, dict(remat="full"), marks=pytest.mark.slow),
        pytest.param((1, 1, 1), 4, dict(unroll=3), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_a_step_draws_the_same_on_a_mesh_and_in_parts(one_device, mesh, accumulate, changes):
    """tests/test_matrix.py has the other meshes, and several processes."""
    found = Run(case(**DROPPED, **changes), mesh, accumulate).take(2)
    assert_alike(one_device, found, share=2e-4)


def test_the_draws_of_16_bits_are_those_of_float32():
    """The backward pass of 16 bits computes attention again, and draws the same weights."""
    c = dataclasses.replace(TINY, depth=1, dtype="bfloat16", **DROPPED)
    narrow = language_loss.make_task(config_lib.Config(model=c), alone(), 16)
    wide = language_loss.make_task(
        config_lib.Config(model=dataclasses.replace(c, dtype="float32")), alone(), 16
    )
    params = initial(narrow.specs.params)
    batch = {**packed_batch(0), "row": np.arange(16, dtype="i4")}

    @jax.jit
    def gradients(params):
        def total(task):
            return lambda p: task.loss(Variables(p), batch, jax.random.key(3)).loss.total

        return jax.grad(total(narrow))(params), jax.grad(total(wide))(params)

    of_narrow, of_wide = (
        np.concatenate([np.ravel(x) for x in jax.tree.leaves(g)]) for g in gradients(params)
    )
    assert np.linalg.norm(of_narrow - of_wide) < 0.05 * np.linalg.norm(of_wide)


@pytest.mark.parametrize("rate", [0.1, 0.6])
def test_dropped_numbers_are_a_share_and_the_others_keep_the_mean(rate):
    x = jnp.ones((64, 32, 32))
    y = np.asarray(dropout.drop(x, rate, jax.random.key(0), jnp.arange(64)))
    n = y.size
    share = (y == 0).mean()
    assert abs(share - rate) < 5 * np.sqrt(rate * (1 - rate) / n)
    np.testing.assert_allclose(y[y != 0], 1 / (1 - rate), rtol=1e-6)
    assert abs(y.mean() - 1) < 5 * np.sqrt(rate / (1 - rate) / n)


def test_draws_differ_by_row_part_layer_and_step_alone():
    c = dataclasses.replace(TINY, **DROPPED)
    x = jnp.ones((4, 16, 32))

    def drawn(key, part="mlp", rows=(0, 1, 2, 3)):
        draws = language_dropout.Draws(c, key, jnp.asarray(rows), alone())
        return np.asarray(draws.values(x, part))

    first = drawn(jax.random.key(0))
    np.testing.assert_array_equal(drawn(jax.random.key(0), rows=(3, 2, 1, 0)), first[::-1])
    for other in (
        drawn(jax.random.key(1)),
        drawn(jax.random.key(0), "attention"),
        drawn(jax.random.split(jax.random.key(0), 3)[1]),
        np.roll(first, 1, axis=0),
    ):
        assert 0.3 < ((first == 0) != (other == 0)).mean() < 0.55  # 2 × 0.3 × 0.7


@pytest.mark.parametrize(
    "changes", [DROPPED, dict(dropout=0.3), dict(attention_dropout=0.2)], ids=str
)
def test_a_loss_drops_what_its_config_says(changes):
    """The loss differs by the key alone."""
    model = config_lib.Config(model=dataclasses.replace(TINY, **changes))
    task = language_loss.make_task(model, alone(), 16)
    params = initial(task.specs.params)
    batch = {**packed_batch(0), "row": np.arange(16, dtype="i4")}
    loss = jax.jit(lambda key: task.loss(Variables(params), batch, key).loss)
    losses = [loss(jax.random.key(i)).total for i in range(3)]
    assert len({float(x) for x in losses}) == 3
    assert float(loss(jax.random.key(0)).total) == float(losses[0])


def test_an_evaluation_and_a_step_without_rates_are_the_programs_without_dropout():
    plain, dropping = assembled(case(), (1, 1, 1)), assembled(case(**DROPPED), (1, 1, 1))
    params = plain.abstract.state.variables
    batch = {**plain.abstract.batch, "row": jax.ShapeDtypeStruct((16,), jnp.int32)}

    def evaluation(assembly):
        return jax.jit(assembly.task.evaluate).lower(params, batch).as_text()

    assert evaluation(plain) == evaluation(dropping)
    steps = [assembly.trace(None).lower().as_text() for assembly in (plain, dropping)]
    assert "threefry" not in steps[0] and "threefry" in steps[1]


@pytest.mark.parametrize(
    ("kv_heads", "window", "segments"), [(4, 0, False), (2, 0, True), (1, 5, True)], ids=str
)
def test_attention_with_dropped_weights_is_its_formula(kv_heads, window, segments):
    rng = np.random.default_rng(0)
    b, t, h, k = 2, 12, 4, 8
    q = rng.standard_normal((b, t, h, k), "f4")
    keys, values = rng.standard_normal((2, b, t, kv_heads, k), "f4")
    segment_bt = np.sort(rng.integers(0, 3, (b, t)), axis=1) if segments else None
    kept = rng.random((b, h, t, t)) < 0.7
    places = np.arange(t)
    mask = attention.visible(places, places, causal=True, window=window)[None]
    if segments:
        mask = mask & attention.same_segment(segment_bt, segment_bt)
    found = dropout.attention(alone(), q, keys, values, mask, lambda w: jnp.where(kept, w / 0.7, 0))
    wide_k, wide_v = (np.repeat(x, h // kv_heads, axis=2) for x in (keys, values))
    scores = np.einsum("bthk,bshk->bhts", q, wide_k) / np.sqrt(k)
    weights = np.where(np.asarray(mask)[:, None], np.exp(scores), 0)
    weights /= weights.sum(-1, keepdims=True)
    expected = np.einsum("bhts,bshk->bthk", weights * kept / 0.7, wide_v)
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5)
    whole = dropout.attention(alone(), q, keys, values, mask, lambda w: w)
    expected = attention.attention(
        *(jnp.asarray(x) for x in (q, keys, values)),
        causal=True,
        window=window,
        segments_bt=segment_bt,
    )
    np.testing.assert_allclose(whole, expected, rtol=0, atol=1e-5)


def test_rates_outside_of_0_to_1_are_refused():
    bad = dataclasses.replace(TINY, dropout=1.0, attention_dropout=-0.1)
    assert [name for name, _ in bad.validate()] == ["dropout", "attention_dropout"]


def test_rows_that_devices_share_refuse_dropped_weights_by_name():
    rules = {"batch": "data", "seq": "fsdp"}
    with pytest.raises(LayoutError, match=r"attention_dropout is 0\.2, and .* over fsdp"):
        assembled(case(**DROPPED), (2, 2, 2), rules=rules)
    assembled(case(dropout=0.3), (2, 2, 2), rules=rules)


@pytest.mark.slow
def test_a_row_in_parts_drops_the_numbers_of_a_whole_one():
    rules = {"batch": "data", "seq": "fsdp"}
    expected = Run(case(dropout=0.3), (1, 1, 1)).take(2)
    assert_alike(expected, Run(case(dropout=0.3), (2, 2, 2), rules=rules).take(2), share=2e-4)


SETTINGS = ("--config.model.dropout=0.2", "--config.model.attention_dropout=0.2")


@pytest.mark.slow
def test_a_resumed_run_and_a_killed_one_have_the_bits_of_a_whole_one(tmp_path):
    folder = small_runs.lm(tmp_path)
    args = ("lm.py", *SETTINGS, "--config.lora.rank=0", "--config.train.steps=60")
    args = (*args, "--config.train.eval_every=0", "--config.checkpoint.every=2")
    processes.run(folder, *args, "--config.workdir=whole")
    expected = processes.hashes(folder / "whole", 60)
    killed = processes.command(folder, *args, "--config.workdir=parts")
    try:
        processes.wait_for(lambda: processes.step_of(folder / "parts") >= 10)
    finally:
        killed.send_signal(signal.SIGKILL)
        killed.communicate(timeout=60)
    output = processes.run(folder, *args, "--config.workdir=parts")
    step = int(re.search(r"resuming from step (\d+)", output)[1])
    assert 0 < step < 60
    assert processes.hashes(folder / "parts", 60) == expected
    losses = [
        {n: record["loss"] for n, record in processes.records(folder / name, "train").items()}
        for name in ("whole", "parts")
    ]
    assert losses[0] == losses[1] and len(losses[0]) == 60
