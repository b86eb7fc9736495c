"""Schedules and rules against golden numbers; which parameters decay, are frozen, have their own rate or rule."""

import json
import pathlib
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxtrain.config import Group, Optim
from jaxtrain.layout import make_layout, make_mesh
from jaxtrain.optim import OptimError, make_optimizer, make_schedule
from jaxtrain.specs import zeros
from jaxtrain.types import Spec

DATA = pathlib.Path(__file__).parent / "data"
SCHEDULES = json.loads((DATA / "schedule" / "schedule.json").read_text())
GOLDEN = dict(np.load(DATA / "optim" / "adamw.npz"))
PLAIN = Optim(lr=0.01, b2=0.95, weight_decay=0.1, schedule="constant", clip=0.0)  # what the golden trajectories ran with


def table(tree):
    return jax.tree.map(lambda x: Spec(x.shape, (None,) * x.ndim, zeros), tree)


def run(optim, params, grads, n=10):
    """The parameters after each of n updates; ``grads`` leaves are [n, ...]."""
    tx = make_optimizer(optim, table(params), steps=100)

    @jax.jit
    def update(state, grads):
        params, opt_state = state
        updates, opt_state = tx.update(grads, opt_state, params)
        params = optax.apply_updates(params, updates)
        return (params, opt_state), params

    state, trajectory = (params, tx.init(params)), []
    for i in range(n):
        state, params = update(state, jax.tree.map(lambda g, i=i: g[i], grads))
        trajectory.append(params)
    return jax.tree.map(lambda *xs: np.stack(xs), *trajectory)


def golden(*names):
    """(initial parameters, gradients [10, ...], expected parameters [10, ...])"""
    return tuple({p: GOLDEN[f"{kind}/{p}"] for p in names} for kind in ("init", "grads", "adamw_float64"))


@pytest.mark.parametrize("name", SCHEDULES)
def test_schedule_equals_the_golden_one(name):
    kind, p, values = (SCHEDULES[name][k] for k in ("kind", "params", "values"))
    ratios = {"lr_init": p["init"] / p["peak"], "lr_floor": p["floor"] / p["peak"]}
    optim = Optim(
        schedule=kind.split("_")[0], warmup=p["W"], decay=p.get("D", 0), decay_shape=p.get("shape", "linear"), **ratios
    )
    found = make_schedule(optim, p["N"])(np.arange(len(values)))
    np.testing.assert_allclose(np.asarray(found) * p["peak"], values, rtol=0, atol=2e-6 * p["peak"])


def test_constant_schedule_warms_up_and_stays():
    found = make_schedule(Optim(schedule="constant", warmup=4, lr_init=0.2), 10)(np.array([0, 2, 4, 9, 50]))
    np.testing.assert_allclose(found, [0.2, 0.6, 1, 1, 1], rtol=1e-6)


def test_adamw_equals_the_golden_trajectory():
    init, grads, expected = golden("w", "b", "stack")
    # The golden run decays biases and the stack too.
    found = run(replace(PLAIN, decayed=".", undecayed="^$"), init, grads)
    for name in expected:
        np.testing.assert_allclose(found[name], expected[name], rtol=0, atol=2e-6, err_msg=name)


def test_the_schedule_scales_update_and_decay_alike():
    """Two updates at half the rate: decay shrinks by (1 - lr wd / 2) where no gradient ever comes."""
    params = {"w": jnp.ones(3)}
    found = run(
        Optim(lr=0.1, weight_decay=0.5, schedule="constant", warmup=2, lr_init=0.5), params, {"w": jnp.zeros((3, 3))}, n=3
    )
    np.testing.assert_allclose(found["w"][:, 0], np.cumprod([1 - 0.1 * 0.5 * r for r in (0.5, 0.75, 1.0)]), rtol=1e-6)


def test_decay_spares_what_undecayed_names():
    init, grads, expected = golden("w", "b")
    found = run(PLAIN, init, grads)
    np.testing.assert_allclose(found["w"], expected["w"], rtol=0, atol=2e-6)
    without = run(replace(PLAIN, weight_decay=0.0), init, grads)
    np.testing.assert_array_equal(found["b"], without["b"])
    assert np.abs(found["b"] - expected["b"]).max() > 1e-4


def test_a_group_has_its_own_rate_and_decay_and_the_first_match_wins():
    init, grads, _ = golden("w")
    own = {"head": init, "body": init}
    groups = (Group("^head/", lr=0.003, weight_decay=0.7), Group("w", lr=0.02))
    found = run(replace(PLAIN, groups=groups), own, {"head": grads, "body": grads})
    for name, lr, decay in (("head", 0.003, 0.7), ("body", 0.02, 0.1)):
        alone = run(replace(PLAIN, lr=lr, weight_decay=decay), init, grads)
        np.testing.assert_allclose(found[name]["w"], alone["w"], rtol=1e-6, atol=1e-7)


def test_a_frozen_group_is_untouched_and_does_not_count_in_the_clip():
    init, grads, _ = golden("w")
    optim = replace(PLAIN, clip=0.1, groups=(Group("^base/", freeze=True),))
    huge = {"w": np.full_like(grads["w"], 1e6)}
    found = run(optim, {"base": init, "head": init}, {"base": huge, "head": grads})
    for step in found["base"]["w"]:
        np.testing.assert_array_equal(step, init["w"])
    alone = run(replace(PLAIN, clip=0.1), init, grads)
    np.testing.assert_allclose(found["head"]["w"], alone["w"], rtol=0, atol=1e-6)


@pytest.mark.parametrize("clip", [3.0, 1000.0])
def test_clipping_scales_all_gradients_by_one_factor(clip):
    init, grads, _ = golden("w", "b")
    norm = np.sqrt(sum((np.float64(g) ** 2).reshape(10, -1).sum(1) for g in grads.values()))
    assert (norm > 3).any() and (norm < 3).any() and (norm < 1000).all()
    scaled = {n: (g * np.minimum(1, clip / norm).reshape(10, *[1] * (g.ndim - 1))).astype("f4") for n, g in grads.items()}
    found = run(replace(PLAIN, clip=clip), init, grads)
    expected = run(PLAIN, init, scaled)
    for name in found:
        np.testing.assert_allclose(found[name], expected[name], rtol=0, atol=2e-6)


def test_coverage_errors_list_every_offender():
    specs = {"encoder": {"w": 0, "gamma": 0}, "kernel": 0, "bias_w": 0}
    specs = jax.tree.map(lambda _: Spec((2,), (None,), zeros), specs)
    optim = Optim(decayed="(^|/|_)w[^/]*$", groups=(Group("^probe/", lr=1.0), Group("^encoder/")))
    with pytest.raises(OptimError) as error:
        make_optimizer(optim, specs, steps=10)
    lines = str(error.value).splitlines()
    assert len(lines) == 4
    for path, which in (("encoder/gamma", "neither"), ("kernel", "neither"), ("bias_w", "both")):
        assert any(f"'{path}' matches {which}" in line for line in lines)
    assert any("groups[0].match='^probe/' matches no parameter" in line and "kernel" in line for line in lines)


RULES = dict(np.load(DATA / "optim" / "rules.npz"))
ATAN2 = Optim(name="adam_atan2", lr=0.01, b2=0.95, weight_decay=1.0, schedule="constant", clip=0.0)
EVERYTHING = {"decayed": ".", "undecayed": "^$"}  # as the golden trajectories ran


@pytest.mark.parametrize(
    ("rule", "optim"),
    [
        ("adam_atan2_package", ATAN2),
        ("adam_atan2_paper", replace(ATAN2, atan2_correction="inside")),
        ("adam_atan2_scaled", replace(ATAN2, atan2_correction="inside", atan2_a=1.27)),
        ("lion", Optim(name="lion", lr=0.002, b2=0.99, weight_decay=0.3, schedule="constant", clip=0.0)),
        ("sign_sgd", Optim(name="sign_sgd", lr=0.01, weight_decay=1.0, schedule="constant", clip=0.0)),
    ],
)
def test_rules_equal_their_golden_trajectories(rule, optim):
    init, grads, expected = ({p: RULES[f"{k}/{p}"] for p in ("w", "b", "stack")} for k in ("init", "grads", f"{rule}_float64"))
    found = run(replace(optim, **EVERYTHING), init, grads)
    for name in expected:
        np.testing.assert_allclose(found[name], expected[name], rtol=0, atol=2e-6, err_msg=name)


def test_groups_with_rules_of_their_own_move_as_if_alone_and_keep_only_their_moments():
    init, grads = ({p: RULES[f"{k}/{p}"] for p in ("w", "b", "stack")} for k in ("init", "grads"))
    groups = (Group("^w", lr=0.002, weight_decay=0.3, name="sign_sgd"), Group("^b", name="adamw"))
    found = run(replace(ATAN2, groups=groups, **EVERYTHING), init, grads)
    np.testing.assert_allclose(found["stack"], RULES["adam_atan2_package_float64/stack"], rtol=0, atol=2e-6)
    alone = replace(ATAN2, lr=0.002, weight_decay=0.3, name="sign_sgd", **EVERYTHING)
    np.testing.assert_array_equal(found["w"], run(alone, {"w": init["w"]}, {"w": grads["w"]})["w"])
    alone = replace(ATAN2, name="adamw", **EVERYTHING)
    np.testing.assert_array_equal(found["b"], run(alone, {"b": init["b"]}, {"b": grads["b"]})["b"])
    state = make_optimizer(replace(ATAN2, groups=groups, **EVERYTHING), table(init), steps=1).init(init)
    shapes = sorted(x.shape for x in jax.tree.leaves(state) if x.ndim)
    assert shapes == sorted(2 * [init["b"].shape] + 2 * [init["stack"].shape])


@pytest.mark.parametrize("devices", [1, 4])
def test_a_sparse_table_moves_only_its_touched_rows(devices):
    """Duplicates are summed; a sum of zero still decays; a row that no id names keeps its bits. Split over devices too."""
    ids, grads, expected = (RULES[f"sparse/{name}"] for name in ("ids", "grads", "table_float64"))
    layout = make_layout(make_mesh(1, devices, 1, devices=jax.devices()[:devices]), {})
    rows = layout.sharding(("puzzle", None), expected[0].shape)
    assert len(rows.device_set) == devices
    optim = Optim(name="sign_sgd", lr=0.01, weight_decay=1.0, schedule="constant", clip=0.0)
    params = jax.device_put({"w": RULES["sparse/table0"]}, rows)
    tx = make_optimizer(optim, table(params), steps=100)

    @jax.jit
    def update(params, state, ids, grads):
        dense = jax.grad(lambda p: (p["w"][ids] * grads).sum())(params)
        touched = {"w": jnp.zeros(len(params["w"]), jnp.int32).at[ids].add(1)}
        updates, state = tx.update(dense, state, params, touched=touched)
        return optax.apply_updates(params, updates), state

    state = tx.init(params)
    for i in range(10):
        before = np.asarray(params["w"])
        params, state = update(params, state, ids[i], grads[i])
        assert params["w"].sharding.is_equivalent_to(rows, 2)
        np.testing.assert_allclose(params["w"], expected[i], rtol=0, atol=1e-6)
        untouched = np.setdiff1d(np.arange(len(before)), ids[i])
        np.testing.assert_array_equal(np.asarray(params["w"])[untouched], before[untouched])
