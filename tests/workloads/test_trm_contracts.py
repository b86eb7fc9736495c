"""Contracts of training of the recursive model: gradients by NumPy, depths, floating-point
operations, meshes and parts."""

import math
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxtrain import config as config_lib
from jaxtrain.arrays import stored_params
from jaxtrain.types import Variables
from jaxtrain.workloads.trm import loss as trm_loss
from jaxtrain.workloads.trm import model as trm
from tests.support.cases import Run, assert_alike
from tests.support.cases.trm import CASE, LAST, TINY, calm, random_batch

CALM = CASE._replace(model=LAST, begin=calm)


def norm(x, axis):
    return x / np.sqrt((x * x).mean(axis, keepdims=True) + 1e-5)


def gated(x, up, down):  # the last axis of x is mixed
    gate, y = x @ up[:, 0], x @ up[:, 1]
    return (gate / (1 + np.exp(-gate)) * y) @ down


def net(c, p, x):
    for l in range(c.depth):
        w = {name: each[l] for name, each in p["net"].items()}
        xt = x.swapaxes(1, 2)
        x = norm(xt + gated(xt, w["w_mix_up"], w["w_mix_down"]), 2).swapaxes(1, 2)
        x = norm(x + gated(x, w["w_up"], w["w_down"]), 2)
    return x


def cycle(c, p, batch, z):
    rows = np.pad(
        p["puzzle"]["w_rows"][batch["puzzle"]],
        ((0, 0), (0, c.puzzle_tokens * c.embed - c.puzzle_embed)),
    )
    cells = p["w_cells"][batch["inputs"]]
    x = np.sqrt(c.embed) * np.concatenate([rows.reshape(len(cells), -1, c.embed), cells], 1)
    z_h, z_l = z
    for _ in range(c.cycles_low):
        z_l = net(c, p, z_l + z_h + x)
    return net(c, p, z_h + z_l), z_l


def loss_of(c, p, batch, z):
    """The loss after one more cycle from z, summed over rows, by the formulas."""
    z_h, _ = cycle(c, p, batch, z)
    logits, q = z_h[:, c.puzzle_tokens :] @ p["w_symbols"], (z_h[:, 0] @ p["w_q"] + p["b_q"])[:, 0]
    s = np.where(logits < 0, 1 / (1 - np.minimum(logits, 0)), 1 + logits)
    valid = batch["labels"] >= 0
    label = np.where(valid, batch["labels"], 0)
    each = (
        -np.log(np.take_along_axis(s / s.sum(-1, keepdims=True), label[..., None], -1))[..., 0]
        * valid
    )
    exact = ((logits.argmax(-1) == label) | ~valid).all(1)
    q_loss = np.log1p(np.exp(-np.abs(q))) + np.maximum(q, 0) - q * exact
    return (each.sum(1) / valid.sum(1) + 0.5 * q_loss).sum()


def test_gradients_reach_the_last_cycle_of_the_last_step_alone():
    """The gradients match finite differences in float64, with all values before the last cycle held
    fixed."""
    c = replace(LAST, least_steps=0, halt_steps=3)
    run = config_lib.Config(model=c, train=config_lib.Train(batch=32))
    task = trm_loss.make_task(run, stored_params.one_device().shard, 32)
    variables = Run(CASE._replace(model=c), (1, 1, 1)).init().variables
    batch = {**random_batch(3), "row": np.arange(32, dtype=np.int32)}

    def total(params):
        out = task.loss(
            Variables(params, model_state=variables.model_state), batch, jax.random.key(0)
        )
        return out.loss.total, out

    (value, out), grads = jax.jit(jax.value_and_grad(total, has_aux=True))(variables.params)
    assert out.metrics["steps"].total == 3 * out.metrics["steps"].weight and set(
        out.model_state
    ) == {
        "init_h",
        "init_l",
        "step",
    }
    p = jax.tree.map(lambda x: np.asarray(x, np.float64), variables.params)
    begin = [np.asarray(variables.model_state[f"init_{k}"], np.float64) for k in "hl"]
    z = tuple(np.broadcast_to(x, (32, c.n_tokens, c.embed)) for x in begin)
    for _ in range(3 * c.cycles_high - 1):
        z = cycle(c, p, batch, z)
    assert loss_of(c, p, batch, z) == pytest.approx(float(value), rel=1e-4)
    rng = np.random.default_rng(0)
    leaves, tree = jax.tree.flatten(p)
    for i, (x, grad) in enumerate(zip(leaves, jax.tree.leaves(grads), strict=True)):
        direction = rng.standard_normal(x.shape)
        direction *= 1e-5 / np.linalg.norm(direction)
        ends = []
        for sign in (1, -1):
            moved = jax.tree.unflatten(tree, [*leaves[:i], x + sign * direction, *leaves[i + 1 :]])
            ends.append(loss_of(c, moved, batch, z))
        expected = (ends[0] - ends[1]) / 2
        assert (np.asarray(grad, np.float64) * direction).sum() == pytest.approx(
            expected, rel=2e-2, abs=2e-9
        )


def test_depths_are_drawn_and_grow_and_are_counted():
    c = replace(LAST, halt_steps=16, first_steps=4, growth_steps=100, least_steps=2)
    of = jax.jit(jax.vmap(lambda step, key: trm_loss.depth(c, step, key), in_axes=(None, 0)))
    keys = jax.random.split(jax.random.key(0), 2000)
    for step, most in ((0, 4), (50, 10), (99, 15), (100, 16), (1000, 16)):
        found = np.bincount(np.asarray(of(jnp.int32(step), keys)), minlength=most + 1)
        assert len(found) == most + 1 and not found[:2].any()
        np.testing.assert_allclose(found[2:] / 2000, 1 / (most - 1), atol=0.05)
    one = (c.cycles_high * (c.cycles_low + 1)) * trm.net_flops(c)
    deep = trm.train_flops(replace(c, contract="deep"), c.cycles)
    assert trm.train_flops(c, c.cycles) - deep == (2 + 16 - 2) / 2 * one
    assert trm.train_flops(replace(c, least_steps=0), c.cycles) - deep == 15 * one


@pytest.mark.parametrize(
    "options",
    [{"contract": "last"}, {"contract": "deep"}, {"contract": "deep", "q_continue": True}],
)
def test_operations_are_those_that_xla_counts(options):
    """With one cycle, since XLA counts the body of a loop once. XLA also counts norms and
    activations."""
    sizes = dict(
        embed=64, puzzle_embed=64, inner_multiple=64, cycles_high=1, cycles_low=1, dtype="float32"
    )
    c = replace(LAST, **sizes, halt_steps=1, least_steps=0, explore_end=None, **options)
    task = trm_loss.make_task(
        config_lib.Config(model=c, train=config_lib.Train(batch=32)),
        stored_params.one_device().shard,
        32,
    )
    variables = Run(CASE._replace(model=c), (1, 1, 1)).init().variables
    batch = {**random_batch(3), "row": np.arange(32, dtype=np.int32)}

    def total(params):
        return task.loss(
            Variables(params, model_state=variables.model_state), batch, jax.random.key(0)
        ).loss.total

    counted = jax.jit(jax.grad(total)).lower(variables.params).compile().cost_analysis()["flops"]
    assert counted == pytest.approx(task.flops, rel=0.08)


def test_cycles_of_the_thought_grow_on_their_own():
    c = replace(
        TINY, cycles_high=3, cycles_low=6, first_high=1, first_low=2, growth=100, growth_low=10
    )
    assert [trm_loss.curriculum(c, step) for step in (0, 5, 10, 50, 100)] == [
        (1, 2),
        (1, 4),
        (1, 6),
        (2, 6),
        (3, 6),
    ]


@pytest.fixture(scope="module")
def alone():
    return Run(CALM, (1, 1, 1)).take(4)


@pytest.mark.slow
def test_steps_are_the_same_in_parts(alone):
    """The test runs on a mesh, with microbatches and recomputation."""
    model = replace(LAST, remat="full")
    assert_alike(alone, Run(CALM._replace(model=model), (4, 2, 1), 2).take(4), share=5e-4)
    depths = {float(metrics["steps"].total / metrics["steps"].weight) for _, metrics in alone[0]}
    assert len(depths) > 1 and depths <= {2, 3, 4}, "each step draws one depth for all of its rows"


def test_options_of_one_contract_are_refused_with_the_other():
    def names(**options):
        return [name for name, _ in replace(TINY, **options).validate()]

    assert names(least_steps=2, first_steps=1) == ["least_steps", "first_steps", "first_steps"]
    assert names(contract="last") == ["explore_end"] and not list(LAST.validate())
    assert names(growth_low=5) == names(growth=0, growth_low=5) == ["growth_low"]
    assert (
        names(growth=5) == ["growth"]
        and not names(growth=5, first_low=1)
        and not names(growth=5, first_high=1)
    )
    last = dict(contract="last", explore_end=None)
    assert names(**last, growth_steps=5) == ["growth_steps"] and not names(
        **last, growth_steps=5, first_steps=2
    )
    assert names(noise=math.inf, rollouts=2) == ["noise"] and names(residual=math.inf) == [
        "residual"
    ]
    assert names(contract="first") == ["contract", "explore_end"]
    assert names(contract="last", explore_end=None, least_steps=4) == ["least_steps"]
