"""Update rules match golden numbers. The tests also cover parameters that decay, are frozen, or
have their own rate or rule."""

import pathlib
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxtrain.config import Group, Optim
from jaxtrain.optim import OptimError, make_optimizer
from jaxtrain.optim import optimizer as optimizer_lib
from jaxtrain.optim.param_groups import group_of_each
from jaxtrain.parallel.layout import make_layout, make_mesh
from jaxtrain.specs import zeros
from jaxtrain.types import Spec

DATA = pathlib.Path(__file__).parents[1] / "data"
GOLDEN = dict(np.load(DATA / "optim" / "adamw.npz"))
# the settings of the golden trajectories
PLAIN = Optim(lr=0.01, b2=0.95, weight_decay=0.1, schedule="constant", clip=0.0)


def table(tree):
    return jax.tree.map(lambda x: Spec(x.shape, (None,) * x.ndim, zeros), tree)


def run(optim, params, grads):
    """The parameters after each of n updates. ``grads`` leaves are [n, ...]."""
    tx = make_optimizer(optim, table(params), steps=100)

    @jax.jit
    def update(state, grads):
        params, opt_state = state
        updates, opt_state = tx.update(grads, opt_state, params)
        params = optax.apply_updates(params, updates)
        return (params, opt_state), params

    state, trajectory = (params, tx.init(params)), []
    for i in range(len(jax.tree.leaves(grads)[0])):
        state, params = update(state, jax.tree.map(lambda g, i=i: g[i], grads))
        trajectory.append(params)
    return jax.tree.map(lambda *xs: np.stack(xs), *trajectory)


def golden(*names):
    """(initial parameters, gradients [n, ...], expected parameters [n, ...])"""
    return tuple(
        {p: GOLDEN[f"{kind}/{p}"] for p in names} for kind in ("init", "grads", "adamw_float64")
    )


def test_adamw_equals_the_golden_trajectory():
    init, grads, expected = golden("w", "b", "stack")
    # The golden run decays biases and the stack too.
    found = run(replace(PLAIN, decayed=".", undecayed="^$"), init, grads)
    for name in expected:
        np.testing.assert_allclose(found[name], expected[name], rtol=0, atol=2e-6, err_msg=name)


def test_the_schedule_scales_update_and_decay_alike():
    """Two updates at half the rate: decay shrinks by (1 - lr wd / 2) if no gradient ever comes."""
    params = {"w": jnp.ones(3)}
    found = run(
        Optim(lr=0.1, weight_decay=0.5, schedule="constant", warmup=2, lr_init=0.5),
        params,
        {"w": jnp.zeros((3, 3))},
    )
    np.testing.assert_allclose(
        found["w"][:, 0], np.cumprod([1 - 0.1 * 0.5 * r for r in (0.5, 0.75, 1.0)]), rtol=1e-6
    )


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


def test_a_clip_takes_sums_that_are_known_but_of_frozen_parameters():
    params = {"base": {"w": jnp.ones(3)}, "head": {"w": jnp.ones(4)}}
    specs = jax.tree.map(lambda x: Spec(x.shape, (None,), zeros), params)
    optim = Optim(
        name="sign_sgd", lr=1.0, clip=0.5, weight_decay=0.0, groups=(Group("^base/", freeze=True),)
    )
    clip = optax.chain(*optimizer_lib._clips(optim, group_of_each(optim, specs)))
    grads = {"base": {"w": jnp.zeros(3)}, "head": {"w": jnp.ones(4)}}
    known = {"base/w": jnp.float32(100.0), "head/w": jnp.float32(16.0)}
    clipped, _ = clip.update(grads, clip.init(params), params, square_sums=known)
    np.testing.assert_allclose(clipped["head"]["w"], 0.5 / 4)
    clipped, _ = clip.update(grads, clip.init(params), params)
    np.testing.assert_allclose(clipped["head"]["w"], 0.5 / 2)


def test_a_group_with_a_clip_of_its_own_counts_in_no_other():
    init, grads, _ = golden("w")
    optim = replace(PLAIN, clip=0.1, groups=(Group("^probe/", clip=0.3),))
    huge = {"w": grads["w"] * 1e3}
    found = run(optim, {"probe": init, "encoder": init}, {"probe": huge, "encoder": grads})
    for name, clip, own in (("encoder", 0.1, grads), ("probe", 0.3, huge)):
        np.testing.assert_allclose(
            found[name]["w"], run(replace(PLAIN, clip=clip), init, own)["w"], rtol=0, atol=1e-6
        )


@pytest.mark.parametrize("clip", [3.0, 1000.0])
def test_clipping_scales_all_gradients_by_one_factor(clip):
    init, grads, _ = golden("w", "b")
    norm = np.sqrt(sum((np.float64(g) ** 2).reshape(len(g), -1).sum(1) for g in grads.values()))
    assert (norm > 3).any() and (norm < 3).any() and (norm < 1000).all()
    scaled = {
        n: (g * np.minimum(1, clip / norm).reshape(len(g), *[1] * (g.ndim - 1))).astype("f4")
        for n, g in grads.items()
    }
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
        assert any(
            f"'{path}' matches {which}" in line and "change the patterns so that" in line
            for line in lines
        )
    assert any(
        "groups[0].match='^probe/' matches no parameter" in line and "kernel" in line
        for line in lines
    )


RULES = dict(np.load(DATA / "optim" / "rules.npz"))
ATAN2 = Optim(name="adam_atan2", lr=0.01, b2=0.95, weight_decay=1.0, schedule="constant", clip=0.0)
EVERYTHING = {"decayed": ".", "undecayed": "^$"}  # as in the golden trajectories


@pytest.mark.parametrize(
    ("rule", "optim"),
    [
        ("adam_atan2_package", ATAN2),
        (
            "lion",
            Optim(name="lion", lr=0.002, b2=0.99, weight_decay=0.3, schedule="constant", clip=0.0),
        ),
        (
            "sign_sgd",
            Optim(name="sign_sgd", lr=0.01, weight_decay=1.0, schedule="constant", clip=0.0),
        ),
    ],
)
def test_rules_equal_their_golden_trajectories(rule, optim):
    init, grads, expected = (
        {p: RULES[f"{k}/{p}"] for p in ("w", "b", "stack")}
        for k in ("init", "grads", f"{rule}_float64")
    )
    found = run(replace(optim, **EVERYTHING), init, grads)
    for name in expected:
        np.testing.assert_allclose(found[name], expected[name], rtol=0, atol=2e-6, err_msg=name)


def test_groups_with_rules_of_their_own_move_as_if_alone_and_keep_only_their_moments():
    init, grads = ({p: RULES[f"{k}/{p}"] for p in ("w", "b", "stack")} for k in ("init", "grads"))
    groups = (Group("^w", lr=0.002, weight_decay=0.3, name="sign_sgd"), Group("^b", name="adamw"))
    found = run(replace(ATAN2, groups=groups, **EVERYTHING), init, grads)
    np.testing.assert_allclose(
        found["stack"], RULES["adam_atan2_package_float64/stack"], rtol=0, atol=2e-6
    )
    alone = replace(ATAN2, lr=0.002, weight_decay=0.3, name="sign_sgd", **EVERYTHING)
    np.testing.assert_array_equal(found["w"], run(alone, {"w": init["w"]}, {"w": grads["w"]})["w"])
    alone = replace(ATAN2, name="adamw", **EVERYTHING)
    np.testing.assert_array_equal(found["b"], run(alone, {"b": init["b"]}, {"b": grads["b"]})["b"])
    state = make_optimizer(replace(ATAN2, groups=groups, **EVERYTHING), table(init), steps=1).init(
        init
    )
    shapes = sorted(x.shape for x in jax.tree.leaves(state) if x.ndim)
    assert shapes == sorted(2 * [init["b"].shape] + 2 * [init["stack"].shape])


@pytest.mark.parametrize("devices", [1, 4])
def test_a_sparse_table_moves_only_its_touched_rows(devices):
    """Duplicates are summed, a sum of zero still decays, and a row without an id keeps its bits.
    This holds when split over devices, too."""
    ids, grads, expected = (RULES[f"sparse/{name}"] for name in ("ids", "grads", "table_float64"))
    layout = make_layout(make_mesh(1, devices, 1, devices=jax.devices()[:devices]), {})
    rows = layout.sharding(("item", None), expected[0].shape)
    assert len(rows.device_set) == devices
    optim = Optim(name="sign_sgd", lr=0.01, weight_decay=1.0, schedule="constant", clip=0.0)
    params = jax.device_put({"w": RULES["sparse/table0"]}, rows)
    tx = make_optimizer(optim, table(params), steps=100)

    @jax.jit
    def update(params, state, ids, grads):
        dense = jax.grad(lambda p: (p["w"][ids] * grads).sum())(params)
        sparse_rows = {"w": jnp.zeros(len(params["w"]), jnp.int32).at[ids].add(1)}
        updates, state = tx.update(dense, state, params, sparse_rows=sparse_rows)
        return optax.apply_updates(params, updates), state

    state = tx.init(params)
    for i in range(len(expected)):
        before = np.asarray(params["w"])
        params, state = update(params, state, ids[i], grads[i])
        assert params["w"].sharding.is_equivalent_to(rows, 2)
        np.testing.assert_allclose(params["w"], expected[i], rtol=0, atol=1e-6)
        untouched = np.setdiff1d(np.arange(len(before)), ids[i])
        np.testing.assert_array_equal(np.asarray(params["w"])[untouched], before[untouched])


MUON = dict(np.load(DATA / "optim" / "muon.npz"))
MATRICES = {"w": ("embed", "mlp"), "stack": ("layer", "embed", "mlp")}


def steps(optim, specs, params, grads):
    """The parameters after each update of ``grads``, a list of trees."""
    tx = make_optimizer(optim, specs, steps=100)

    @jax.jit
    def update(params, state, grads):
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    state, found = tx.init(params), []
    for g in grads:
        params, state = update(params, state, g)
        found.append(params)
    return found, state


def test_muon_equals_its_golden_trajectory_stacks_matrix_by_matrix():
    init, grads, expected = (
        {p: MUON[f"{k}/{p}"] for p in MATRICES}
        for k in ("init", "grads", "muon_match_rms_adamw_float64")
    )
    specs = {p: Spec(init[p].shape, axes, zeros) for p, axes in MATRICES.items()}
    optim = Optim(
        name="muon",
        lr=0.02,
        weight_decay=0.1,
        schedule="constant",
        clip=0.0,
        **EVERYTHING,
    )
    found, _ = steps(
        optim, specs, init, [{p: grads[p][i] for p in grads} for i in range(len(grads["w"]))]
    )
    for i, params in enumerate(found):
        for p in MATRICES:
            np.testing.assert_allclose(
                params[p], expected[p][i], rtol=0, atol=1e-5, err_msg=f"{p} {i}"
            )


def test_muon_takes_each_head_projection_as_a_matrix_and_leaves_the_rest_to_adamw():
    key = jax.random.key(0)
    shapes = {
        "w_qkv": ((2, 8, 3, 2, 6), ("layer", "embed", None, "heads", "head_dim")),
        "w_out": ((2, 8, 2, 6), ("layer", "embed", "heads", "head_dim")),
        "w_head": ((8, 30), ("embed", "vocab")),
        "scale": ((2, 8), ("layer", "embed")),
    }
    shapes["bias"] = ((8,), ("embed",))
    specs = {name: Spec(shape, axes, zeros) for name, (shape, axes) in shapes.items()}
    params = {name: jax.random.normal(key, shape) for name, (shape, _) in shapes.items()}
    grads = {
        name: jax.random.normal(jax.random.key(1), shape) for name, (shape, _) in shapes.items()
    }
    optim = Optim(
        name="muon",
        lr=1.0,
        weight_decay=0.0,
        schedule="constant",
        clip=0.0,
        groups=(Group("^scale", name="lion"),),
    )
    (found,), _ = steps(optim, specs, params, [grads])
    move = jax.tree.map(lambda p, f: np.asarray(p - f), params, found)
    for matrix in (move["w_qkv"][1, :, 2].reshape(8, 12), move["w_out"][0].reshape(8, 12)):
        singular = np.linalg.svd(matrix / (0.2 * np.sqrt(12)), compute_uv=False)
        assert singular.min() > 0.5 and singular.max() < 1.4
    np.testing.assert_allclose(np.abs(move["scale"]), 1, rtol=1e-5)
    for name in ("w_head", "bias"):  # AdamW's first update is the sign of the gradient
        np.testing.assert_allclose(move[name], np.sign(grads[name]), atol=1e-4)
    with pytest.raises(
        OptimError, match="'bias' with the axes .* 1 dimensions .* muon needs matrices"
    ):
        make_optimizer(replace(optim, groups=(Group("^bias", name="muon"),)), specs, steps=1)


def test_adafactor_equals_optax():
    shapes = {"w": (130, 150), "stack": (3, 140, 128), "small": (20, 30), "b": (9,)}
    params = {name: jnp.zeros(shape) for name, shape in shapes.items()}
    grads = [
        {n: jax.random.normal(jax.random.key(i), s) * 10.0**i for n, s in shapes.items()}
        for i in range(4)
    ]
    optim = Optim(
        name="adafactor", lr=0.1, weight_decay=0.0, schedule="constant", clip=0.0, **EVERYTHING
    )
    found, state = steps(optim, table(params), params, grads)
    theirs = optax.adafactor(0.1, multiply_by_parameter_scale=False)
    own, kept = params, theirs.init(params)
    for i, g in enumerate(grads):
        updates, kept = theirs.update(g, kept, own)
        own = optax.apply_updates(own, updates)
        for name in shapes:
            np.testing.assert_allclose(
                found[i][name], own[name], rtol=2e-5, atol=2e-6, err_msg=name
            )
    assert sum(x.size for x in jax.tree.leaves(state)) < 2_000  # of 73,869 parameters


def descend(optim, n=150, dtype=jnp.float32):
    """A regression with two layers. Returns its final loss, the state, and the parameters."""
    x = jax.random.normal(jax.random.key(0), (256, 64))
    y = jnp.tanh(x @ jax.random.normal(jax.random.key(1), (64, 64)) / 8)
    params = {
        n: (jax.random.normal(jax.random.key(i), s) * 0.1).astype(dtype)
        for i, (n, s) in enumerate(SHAPES.items())
    }
    specs = {name: Spec(shape, ("embed", "mlp"), zeros, dtype) for name, shape in SHAPES.items()}
    tx = make_optimizer(optim, specs, steps=n)

    def loss(params):
        return jnp.square(
            jnp.tanh(x @ params["w_a"].astype("f4")) @ params["w_b"].astype("f4") - y
        ).mean()

    @jax.jit
    def update(params, state):
        updates, state = tx.update(jax.grad(loss)(params), state, params)
        return optax.apply_updates(params, updates), state

    state = tx.init(params)
    for _ in range(n):
        params, state = update(params, state)
    return float(loss(params)), state, params


SHAPES = {"w_a": (64, 128), "w_b": (128, 64)}
SMALL = Optim(lr=3e-3, weight_decay=0.0, schedule="constant")


@pytest.mark.parametrize("name", ["adamw", "lion", "muon"])
def test_moments_in_few_bits_train_equally_well_and_take_fewer_bytes(name):
    optim = replace(SMALL, name=name, lr=3e-4 if name == "lion" else 3e-3)
    n, moments = 64 * 128 * 2, 2 if name == "adamw" else 1
    whole, *_ = descend(optim)
    for how, least, most in (("bfloat16", 2, 2), ("int8", 1, 1.08)):
        found, state, _ = descend(replace(optim, moments=how))
        assert found == pytest.approx(whole, rel=0.1), how
        size = sum(x.nbytes for x in jax.tree.leaves(state))
        assert least * n * moments <= size <= most * n * moments + 64, how
    assert whole < 0.5 * descend(optim, n=0)[0]


def test_masters_keep_what_bfloat16_would_lose():
    """Updates of a thousandth of a bfloat16's step get lost without masters. With them, the
    parameters are the rounded masters."""
    specs = {"w": Spec((4, 4), ("embed", "mlp"), zeros, "bfloat16")}
    params = {"w": jnp.ones((4, 4), jnp.bfloat16)}
    optim = Optim(name="sign_sgd", lr=1e-5, weight_decay=0.0, schedule="constant", clip=0.0)
    grads = [{"w": jnp.ones((4, 4), jnp.bfloat16)}] * 600
    found, _ = steps(optim, specs, params, grads)
    assert (found[-1]["w"] == 1).all()
    found, state = steps(replace(optim, masters=True), specs, params, grads)
    np.testing.assert_allclose(state.masters["w"], 1 - 600e-5, rtol=1e-4)
    assert found[-1]["w"].dtype == jnp.bfloat16
    np.testing.assert_array_equal(found[-1]["w"], state.masters["w"].astype(jnp.bfloat16))
    with pytest.raises(OptimError, match="masters=True, but every parameter is float32"):
        make_optimizer(replace(optim, masters=True), table({"w": jnp.ones((4, 4))}), steps=1)


def test_layers_below_move_less():
    """In a stack of n layers the rates are d^(n - i), d^(n + 1) below it and 1 above (BEiT's rule).
    Decay follows the rates."""
    specs = {
        "w_patch": Spec((4, 4), ("patch", "embed"), zeros),
        "blocks": {"w": Spec((3, 4, 4), ("layer", "embed", "mlp"), zeros)},
        "head": {"w": Spec((4, 4), ("embed", "vocab"), zeros)},
    }
    params = jax.tree.map(lambda s: jnp.ones(s.shape), specs, is_leaf=lambda x: isinstance(x, Spec))
    optim = Optim(
        name="sign_sgd", lr=0.01, weight_decay=1.0, schedule="constant", clip=0.0, layer_decay=0.5
    )
    (found,), _ = steps(optim, specs, params, [params])
    for x, power in (
        (found["w_patch"], 4),
        (found["head"]["w"], 0),
        *((found["blocks"]["w"][i], 3 - i) for i in range(3)),
    ):
        np.testing.assert_allclose(x, 1 - 0.02 * 0.5**power, rtol=1e-6)
    with pytest.raises(OptimError, match="no parameter has an axis 'layer'"):
        make_optimizer(optim, {"w": specs["w_patch"]}, steps=1)
    with pytest.raises(
        OptimError, match="no name of blocks/w, head/w is that of a parameter below"
    ):
        make_optimizer(optim, {"blocks": specs["blocks"], "head": specs["head"]}, steps=1)
