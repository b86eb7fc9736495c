"""The autoencoder is compared with the original's numbers. The tests also cover its batch norm, its
shards on meshes and in parts, and its size."""

import functools
import json
import pathlib
import re
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxtrain import config as config_lib
from jaxtrain import specs as specs_lib
from jaxtrain.nn.batch_norm import member
from jaxtrain.types import Variables
from jaxtrain.workloads.giblet import loss as giblet_loss
from jaxtrain.workloads.giblet import model as giblet
from jaxtrain.workloads.giblet import voxels as giblet_voxels
from tests.support.cases import Run, assembled, assert_alike, initial
from tests.support.cases.giblet import CASE, ROWS, SMALL, random_batch

DATA = pathlib.Path(__file__).parents[1] / "data" / "giblet"
GOLDEN = json.loads((DATA / "config.json").read_text())
RESULTS, GRADS, WEIGHTS, INPUTS = (
    dict(np.load(DATA / f"{name}.npz")) for name in ("results", "grads", "weights", "inputs")
)
HEADS = {
    "first_frame": dict(reconstruct="frame", frame=0),
    "full_window": dict(reconstruct="window"),
}
WHOLE = giblet.Config(
    n_frames=38,
    height=90,
    width=160,
    codebooks=8,
    audio_frames=112,
    n_text=3072,
    n_voxels=77_347,
    audio="codes",
)

OUTPUTS = {
    "bottleneck": "bottleneck",
    "fmri": "predicted_fmri",
    "video": "video_recon",
    "text": "text_recon",
}
FIELDS = ("video", "audio", "text", "fmri")

# Maps our names to the original's, encoder and decoder. "." ends a name with different
# continuations for its matrix and its norm.
NAMES = {
    **{
        f"encoder/{m}/{i}": (f"encoder.{m}_encoder.fc{i + 1}", f"encoder.{m}_encoder.bn{i + 1}")
        for m, n in (("video", 3), ("audio", 2), ("text", 2))
        for i in range(n)
    },
    **{
        f"encoder/trunk/{i}": (f"encoder.{n}.0", f"encoder.{n}.1")
        for i, n in enumerate(("feature_conv", "layer5", "layer6", "layer7_bottleneck"))
    },
    "encoder/fmri/0": ("encoder.bottleneck_to_voxels.0", "encoder.bottleneck_to_voxels.1"),
    "encoder/fmri/1": ("encoder.bottleneck_to_voxels.4", ""),
    **{
        f"decoder/trunk/{i}": (f"decoder.layer{8 + i}.0", f"decoder.layer{8 + i}.1")
        for i in range(4)
    },
    **{
        f"decoder/{m}/{i}": (f"decoder.layer12_{m}.{4 * i}", f"decoder.layer12_{m}.{4 * i + 1}")
        for m in giblet.MODALITIES
        for i in range(2)
    },
    "decoder/video/2": ("decoder.layer13_video.0", ""),
    "decoder/audio/2": ("decoder.layer13_audio", ""),
    "decoder/text/2": ("decoder.layer13_text", ""),
}


def same(x, *axes):
    return x


def tiny(head="first_frame", **changes):
    g, d = GOLDEN, GOLDEN["dims"]
    c = giblet.Config(
        n_frames=g["frames"],
        height=g["h"],
        width=g["w"],
        codebooks=g["audio_codebooks"],
        audio_frames=g["audio_frames"],
        n_text=g["text"],
        n_voxels=g["voxels"],
        audio="codes",
        video_widths=(d["v1"], d["v2"], d["vf"]),
        audio_widths=(d["a1"], d["af"]),
        text_widths=(d["t1"], d["tf"]),
        trunk_widths=(d["l5"], d["l6"]),
        bottleneck=d["bott"],
        head_width=d["vox_h"],
        decoder_widths=(d["d8"], d["d9"], d["d10"], d["d11"]),
        decode_video_widths=(d["dv1"], d["dv2"]),
        decode_audio_widths=(d["da1"], d["da2"]),
        decode_text_widths=(d["dt1"], d["dt2"]),
        dropout=0.0,
        dtype="float32",
        **HEADS[head],
    )
    return replace(c, **changes)


def task_of(config, batch=GOLDEN["batch"]):
    return giblet_loss.make_task(
        config_lib.Config(model=config, train=config_lib.Train(batch=batch)), same, batch
    )


def original(path):
    """The original's name of one of our parameters or running statistics, and whether it is
    transposed."""
    where, name = path.rsplit("/", 1)
    matrix, norm = NAMES[where]
    theirs = {
        "w": "weight",
        "b": "bias",
        "scale": "weight",
        "bias": "bias",
        "mean": "running_mean",
        "var": "running_var",
    }[name]
    return f"{matrix if name in 'wb' else norm}.{theirs}", name == "w"


def from_original(table, arrays, head, prefix=""):
    def one(path, spec):
        name, turned = original(path)
        if name.startswith("decoder.layer13_video"):
            name = f"{head}:{name}"
        x = np.asarray(arrays[prefix + name], "f4")
        x = x.T if turned else x
        assert x.shape == spec.shape, path
        return jnp.asarray(x)

    return specs_lib.map_specs(one, table)


def golden_variables(task, head):
    return Variables(
        *(from_original(table, WEIGHTS, head) if table else () for table in task.specs)
    )


def batch_of(name):
    n = GOLDEN["batch"]
    batch = {field: jnp.asarray(INPUTS[f"{name}.{field}"]) for field in FIELDS}
    numbers = {name: jnp.arange(n, dtype=jnp.int32) for name in ("row", "index", "volume")}
    return {**batch, **numbers, "weight": jnp.ones(n)}


def draws(batch, groups=1):
    n = len(batch["row"])
    return giblet.Draws(jax.random.key(0), batch["row"], member(batch["row"], groups, n))


def close(found, expected, atol, *, what=""):
    np.testing.assert_allclose(
        found, expected, rtol=0, atol=atol * np.abs(expected).max(), err_msg=what
    )


def value(metrics, name):
    return float(metrics[name].total / metrics[name].weight)


@pytest.mark.parametrize(
    ("changes", "encoder", "decoder"),
    [
        ({}, 8_095_583_203, 264_241_152),
        (dict(n_frames=10, n_voxels=83_138), 3_235_947_138, 264_241_152),
    ],
)
def test_parameters_are_the_published_number(changes, encoder, decoder):
    table = giblet.make_specs(replace(WHOLE, **changes))
    assert (specs_lib.count(table["encoder"]), specs_lib.count(table["decoder"])) == (
        encoder,
        decoder,
    )
    if not changes:
        assert specs_lib.count(table) == 8_359_824_355
        assert table["encoder"]["video"]["0"]["w"].shape == (1_641_600, 4096)
        parts = {"video": 6_734_500_864, "audio": 592_128, "text": 1_706_240, "fmri": 1_300_934_179}
        assert {name: specs_lib.count(table["encoder"][name]) for name in parts} == parts
    else:
        assert specs_lib.count(table) == 3_500_188_290


@pytest.mark.parametrize("head", HEADS)
def test_evaluation_equals_the_originals(head):
    c = tiny(head)
    task = task_of(c)
    variables, batch = golden_variables(task, head), batch_of("eval")
    moved = from_original(
        task.specs.model_state, RESULTS, "first_frame", "first_frame.after_train2."
    )
    run = jax.jit(lambda v, b: giblet.forward(c, v.params, v.model_state, b, same))
    for when, model_state in (("eval_after_train2", moved), ("eval", variables.model_state)):
        out, kept = run(variables._replace(model_state=model_state), batch)
        for ours, theirs in OUTPUTS.items():
            close(getattr(out, ours), RESULTS[f"{head}.{when}.{theirs}"], 1e-5, what=ours)
        codes = RESULTS[f"{head}.{when}.audio_recon"]
        np.testing.assert_array_equal(out.audio.reshape(codes.shape), codes)
        assert jax.tree.all(jax.tree.map(np.array_equal, kept, model_state)), (
            "an evaluation leaves the statistics alone"
        )
    found, prefix = jax.jit(task.evaluate)(variables, batch), f"{head}.eval"
    for name in (*giblet.MODALITIES, "fmri", "total"):
        np.testing.assert_allclose(
            value(found, f"{name}_loss"), RESULTS[f"{prefix}.loss.{name}_loss"], rtol=5e-5
        )
    close(
        giblet_voxels.pearson(out.fmri, batch["fmri"]), RESULTS[f"{prefix}.fmri_correlation"], 2e-5
    )
    close(giblet_voxels.r_squared(out.fmri, batch["fmri"]), RESULTS[f"{prefix}.fmri_r2"], 2e-5)
    np.testing.assert_allclose(
        value(found, "fmri_r"), RESULTS[f"{prefix}.fmri_correlation"].mean(), atol=2e-5
    )
    np.testing.assert_allclose(
        value(found, "fmri_r2"), RESULTS[f"{prefix}.fmri_r2"].mean(), atol=2e-5
    )
    for kind, theirs in (("mae", "mae"), ("cosine", "correlation")):
        each = giblet_loss.errors(
            replace(c, fmri_loss=kind), out, giblet_loss.targets(c, batch, same), batch["weight"]
        )
        np.testing.assert_allclose(
            each["fmri"].mean(), RESULTS[f"{prefix}.fmri_loss_{theirs}"], rtol=5e-5
        )


@pytest.mark.parametrize(
    ("head", "remat"), [("first_frame", "none"), ("first_frame", "full"), ("full_window", "none")]
)
def test_training_equals_the_originals_and_statistics_move_once(head, remat):
    """This also holds with rematerialisation. The original's video norms moved twice there."""
    c = tiny(head, remat=remat)
    task = task_of(c)
    variables = golden_variables(task, head)

    @jax.jit
    def step(variables, batch):
        def total(params):
            out = task.loss(variables._replace(params=params), batch, jax.random.key(0))
            return out.loss.total / out.loss.weight, out

        outputs, _ = giblet.forward(
            c, variables.params, variables.model_state, batch, same, draws(batch)
        )
        each = giblet_loss.errors(
            replace(c, normalised=True),
            outputs,
            giblet_loss.targets(c, batch, same),
            batch["weight"],
        )
        return (
            *jax.grad(total, has_aux=True)(variables.params),
            outputs,
            jax.tree.map(jnp.mean, each),
        )

    for i in (1, 2):
        grads, loss, out, normalised = step(variables, batch_of(f"train{i}"))
        prefix = f"{head}.train{i}"
        for ours, theirs in OUTPUTS.items():
            close(getattr(out, ours), RESULTS[f"{prefix}.{theirs}"], 2e-4, what=ours)
        close(out.audio, RESULTS[f"{prefix}.audio_recon"].reshape(GOLDEN["batch"], -1), 2e-4)
        np.testing.assert_allclose(
            loss.loss.total / loss.loss.weight, RESULTS[f"{prefix}.total_loss"], rtol=5e-5
        )
        for name in (*giblet.MODALITIES, "fmri", "total"):
            if name != "total":
                np.testing.assert_allclose(
                    value(loss.metrics, f"{name}_loss"), RESULTS[f"{prefix}.{name}_loss"], rtol=5e-5
                )
                np.testing.assert_allclose(
                    normalised[f"{name}_raw"], RESULTS[f"{prefix}.{name}_loss"], rtol=5e-5
                )
            np.testing.assert_allclose(
                normalised[name], RESULTS[f"{prefix}.loss_over_std.{name}_loss"], rtol=5e-5
            )
        np.testing.assert_allclose(
            value(loss.metrics, "fmri_r"), RESULTS[f"{prefix}.fmri_correlation"].mean(), atol=2e-5
        )
        expected = from_original(
            task.specs.model_state, RESULTS, "first_frame", f"first_frame.after_train{i}."
        )
        for path, x, y in zip(
            specs_lib.paths(expected),
            *map(jax.tree.leaves, (loss.model_state, expected)),
            strict=True,
        ):
            close(x, y, 2e-5, what=path)
        if i == 1:
            check_grads(task, head, f"{prefix}.grad.", grads)
        variables = variables._replace(model_state=loss.model_state)


def check_grads(task, head, prefix, grads):
    """Our gradients equal all golden gradients with this prefix. Those of biases before a norm are
    zero."""
    left, n = {name for name in GRADS if name.startswith(prefix)}, 0
    for path, g in zip(specs_lib.paths(task.specs.params), jax.tree.leaves(grads), strict=True):
        name, turned = original(path)
        if prefix + name in GRADS:
            expected = GRADS[prefix + name].T if turned else GRADS[prefix + name]
            left.remove(prefix + name)
            if np.abs(expected).max() < 1e-6:  # a bias before a norm: zero, but for rounding
                np.testing.assert_allclose(g, 0, atol=1.0, err_msg=path)
            else:
                close(g, expected, 3e-3, what=path)
                n += 1
    assert not left and n >= 2


def test_each_term_alone_has_the_originals_gradient():
    """In the total, the audio's gradient hides the others, which are 1e5 times smaller."""
    task = task_of(tiny())
    variables, batch = golden_variables(task, "first_frame"), batch_of("train1")

    def terms(params):
        out = task.loss(variables._replace(params=params), batch, jax.random.key(0))
        return {
            name: out.metrics[f"{name}_loss"].total / GOLDEN["batch"]
            for name in (*giblet.MODALITIES, "fmri")
        }

    for name, grads in jax.jit(jax.jacrev(terms))(variables.params).items():
        check_grads(task, "first_frame", f"first_frame.train1.grad_of.{name}_loss.", grads)


def test_weights_of_the_losses_and_shapes_that_do_not_match():
    out = giblet.Outputs(*(jnp.ones((2, n)) for n in (5, 4, 3, 2, 1)))
    target = {
        "fmri": jnp.zeros((2, 4)),
        "video": jnp.zeros((2, 3)),
        "audio": 3 * jnp.ones((2, 2)),
        "text": jnp.ones((2, 1)),
    }
    c = replace(
        SMALL,
        normalised=False,
        weight_video=2.0,
        weight_audio=0.5,
        weight_text=9.0,
        weight_fmri=7.0,
    )
    each = giblet_loss.errors(c, out, target, jnp.ones(2))
    np.testing.assert_allclose(each["total"], 2 * 1 + 0.5 * 4 + 9 * 0 + 7 * 1)
    with pytest.raises(
        ValueError,
        match=r"video: the model makes \(2, 3\) and the target is \(2, 6\); nothing is cut",
    ):
        giblet_loss.errors(c, out, {**target, "video": jnp.zeros((2, 6))}, jnp.ones(2))


@pytest.mark.parametrize("n", [1, 2, 3, 8])
def test_the_null_pairs_rows_that_count_of_other_moments(n):
    """This also holds if a batch is not full: r of each prediction with another moment's
    measurement."""
    rng = np.random.default_rng(n)
    y, t = rng.standard_normal((2, 8, 50)).astype("f4")
    weight, volume = (np.arange(8) < n).astype("f4"), np.array([5, 6, 5, 7, 5, 1, 2, 3])
    other, has = giblet_voxels.shuffled(jnp.asarray(t), jnp.asarray(weight), jnp.asarray(volume))
    expected = [(i + n // 2) % n for i in range(n)]
    np.testing.assert_allclose(other[:n], t[expected], rtol=1e-6)
    wanted = [float(volume[i] != volume[j]) for i, j in enumerate(expected)] + [0.0] * (8 - n)
    np.testing.assert_array_equal(has, wanted)
    assert sum(wanted) == {1: 0, 2: 2, 3: 2, 8: 6}[n]
    r = giblet_voxels.pearson(jnp.asarray(y), other)[:n]
    np.testing.assert_allclose(
        r, [np.corrcoef(y[i], t[j])[0, 1] for i, j in enumerate(expected)], atol=1e-5
    )


def averages(y, t, other, has):
    """A record as `metrics.mean` makes it, from one batch of float32."""
    record = {}
    for kind, x, w in (("voxel", t, np.ones(len(y))), ("null", other, has)):
        sums = {"y": y, "t": x, "yy": y * y, "tt": x * x, "yt": y * x}
        record |= {
            f"{kind}/{name}": (product * w[:, None]).sum(0, dtype="f4") / w.sum()
            for name, product in sums.items()
        }
    return record


def test_r_of_voxels_is_of_those_that_vary_and_the_null_of_its_own_rows():
    """Predictions far from zero, a constant voxel, and one with a constant prediction are compared
    with numpy's correlations."""
    rng = np.random.default_rng(0)
    t = rng.standard_normal((60, 30)).astype("f4")
    y = (0.5 * t + rng.standard_normal(t.shape) + 30).astype("f4")
    t[:, 3], y[:, 5] = 0, 30.1
    has = (np.arange(60) % 6 > 0).astype("f4")
    other = np.roll(t, 30, axis=0)
    found = giblet_voxels.finish(averages(y, t, other, has) | {"fmri_r": 0.25})
    voxels = [v for v in range(30) if v != 3]
    r = [np.corrcoef(y[:, v], t[:, v])[0, 1] if v != 5 else 0 for v in voxels]
    null = [np.corrcoef(y[has > 0, v], other[has > 0, v])[0, 1] if v != 5 else 0 for v in voxels]
    r2 = 1 - np.square(y - t)[:, voxels].mean(0) / t[:, voxels].var(0)
    assert found["voxel_r"] == pytest.approx(np.mean(r), abs=2e-3) and found["fmri_r"] == 0.25
    assert (
        found["voxel_r_null"] == pytest.approx(np.mean(null), abs=2e-3) and abs(np.mean(null)) < 0.1
    )
    assert found["voxel_r_best"] == pytest.approx(np.quantile(r, 0.9), abs=2e-3)
    assert found["voxel_r2"] == pytest.approx(r2.mean(), rel=1e-3)
    alone = giblet_voxels.finish(averages(y[:1], t[:1], other[:1], np.zeros(1, "f4") + 1e-30))
    assert all(
        np.isnan(alone[name]) for name in ("voxel_r", "voxel_r2", "voxel_r_best", "voxel_r_null")
    )


def test_a_batch_without_text_is_divided_by_nothing():
    c = replace(SMALL, normalised=True)
    shapes = {
        "video": c.outputs["video"],
        "audio": c.outputs["audio"],
        "text": c.n_text,
        "fmri": c.n_voxels,
    }
    rng = np.random.default_rng(0)
    target = {
        name: jnp.asarray(rng.standard_normal((4, n)), jnp.float32) for name, n in shapes.items()
    }
    target |= {"text": jnp.zeros((4, c.n_text)), "video": jnp.full((4, shapes["video"]), 0.1)}
    out = giblet.Outputs(None, **{name: jnp.ones_like(x) for name, x in target.items()})
    found = giblet_loss.errors(c, out, target, jnp.ones(4))
    for name in ("text", "video"):
        np.testing.assert_allclose(found[name], found[f"{name}_raw"], rtol=1e-6)
    std = np.asarray(target["fmri"]).std(ddof=1)
    np.testing.assert_allclose(found["fmri"], found["fmri_raw"] / std, rtol=1e-5)


# On meshes and in parts, through the real step.


@functools.cache
def trained(mesh, accumulate=1, model=SMALL):
    return Run(CASE._replace(model=model), mesh, accumulate).take(3)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [(1, 1, 1), (2, 2, 2)])
def test_with_accumulation_statistics_are_of_the_same_rows_on_every_mesh(mesh):
    parts, whole = trained(mesh, 2), trained((1, 1, 1))
    assert_alike(trained((1, 1, 1), 2), parts)
    mean = parts[0][0][0].variables.model_state["encoder"]["video"]["0"]["mean"]
    assert not np.allclose(
        mean, whole[0][0][0].variables.model_state["encoder"]["video"]["0"]["mean"], rtol=1e-3
    )


def test_statistics_of_groups_are_those_of_as_many_devices():
    """Two groups, on any mesh, equal the results of two devices that compute alone, with the mean
    of their running values."""
    c = replace(SMALL, dropout=0.0)
    table = giblet_loss.make_task(config_lib.Config(model=c), same, ROWS).specs
    params, model_state = (initial(t) for t in (table.params, table.model_state))
    batch = {name: jnp.asarray(x) for name, x in random_batch(c, 0).items()} | {
        "row": jnp.arange(ROWS, dtype=jnp.int32)
    }
    step = jax.jit(lambda b, d: giblet.forward(c, params, model_state, b, same, d))
    both, running = step(batch, draws(batch, groups=2))
    halves = [{name: x[i * 8 : i * 8 + 8] for name, x in batch.items()} for i in range(2)]
    alone = [step(half, draws({"row": jnp.arange(8)})) for half in halves]
    for i, (out, _) in enumerate(alone):
        for x, y in zip(both, out, strict=True):
            np.testing.assert_allclose(x[i * 8 : i * 8 + 8], y, rtol=1e-4, atol=1e-4)
    expected = jax.tree.map(lambda *x: sum(x) / 2, *(model_state for _, model_state in alone))
    for x, y in zip(jax.tree.leaves(running), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_groups_are_the_same_on_every_mesh():
    """This also holds if a device of "data" has less than a group."""
    c = replace(SMALL, groups=2)
    for mesh in ((2, 2, 2), (4, 2, 1)):
        assert_alike(trained((1, 1, 1), model=c), trained(mesh, model=c))


@pytest.mark.parametrize(("groups", "accumulate"), [(3, 1), (1, 8), (2, 4)])
def test_batch_norm_of_one_row_is_refused(groups, accumulate):
    train = config_lib.Train(batch=8, accumulate=accumulate)
    with pytest.raises(
        config_lib.ConfigError,
        match=rf"model.groups is {groups}, and train.accumulate {accumulate}",
    ):
        giblet_loss.make_task(
            config_lib.Config(model=replace(SMALL, groups=groups), train=train), lambda x, *_: x, 8
        )


def test_products_of_16_bits_have_gradients_of_16_bits():
    """No matrix is written out in float32, and no gradient of one is float32."""
    draw = jax.random.split(jax.random.key(0), 3)
    x, w, dy = (
        jax.random.normal(key, shape)
        for key, shape in zip(draw, ((8, 40), (40, 24), (8, 24)), strict=True)
    )
    narrow = x.astype(jnp.bfloat16), w.astype(jnp.bfloat16)

    def backward(x, w):
        y, pullback = jax.vjp(giblet.multiply, x, w)
        return y, *pullback(dy)

    y, dx, dw = backward(*narrow)
    x, w = (np.float64(z) for z in narrow)
    assert (y.dtype, dx.dtype, dw.dtype) == (jnp.float32, jnp.bfloat16, jnp.bfloat16)
    close(y, x @ w, 1e-6)
    for found, expected in ((dx, np.float64(dy) @ w.T), (dw, x.T @ np.float64(dy))):
        error = np.linalg.norm(np.float64(found) - expected) / np.linalg.norm(expected)
        assert error < 2**-8, "half a unit in the last place of dy, and of the result"
    text = jax.jit(backward).lower(*narrow).as_text()
    operands = re.findall(r"dot_general .* : \((\S+), (\S+)\) ->", text)
    assert len(operands) == 3 and all(
        "bf16" in left and "bf16" in right for left, right in operands
    )


def test_products_of_float32_keep_their_bits():
    """`multiply` is the plain product in float32, and so is its gradient."""
    x, w, dy = (
        jax.random.normal(jax.random.key(i), shape)
        for i, shape in enumerate(((8, 40), (40, 24), (8, 24)))
    )

    def backward(product):
        y, pullback = jax.vjp(product, x, w)
        return y, *pullback(dy)

    plain = functools.partial(jnp.dot, preferred_element_type=jnp.float32)
    for ours, theirs in zip(backward(giblet.multiply), backward(plain), strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_the_derivative_by_a_zero_is_the_sum_of_squares_of_a_gradient():
    """The rows are alike, and their cotangents add up to 0, as batch norm makes them: the sum is
    small against the products that it is made of."""
    rng = np.random.default_rng(0)
    dy = rng.standard_normal((16, 300))
    x, w, dy = (
        jnp.asarray(array, jnp.bfloat16)
        for array in (
            1 + 0.1 * rng.standard_normal((16, 200)),
            rng.standard_normal((200, 300)),
            dy - dy.mean(0),
        )
    )
    _, pull = jax.vjp(giblet.multiply, x, w, jnp.zeros(()))
    dx, dw, square_sum = pull(dy.astype(jnp.float32))
    exact = np.square(np.asarray(x, "f8").T @ np.asarray(dy, "f8")).sum()
    np.testing.assert_allclose(square_sum, exact, rtol=1e-4)
    np.testing.assert_allclose(square_sum, jnp.square(dw.astype(jnp.float32)).sum(), rtol=1e-3)
    plain = jax.vjp(giblet.multiply, x, w)[1](dy.astype(jnp.float32))
    assert (dx == plain[0]).all() and (dw == plain[1]).all()


@pytest.mark.slow
def test_norms_of_gradients_are_known_without_reading_them(monkeypatch):
    """In 16 bits: by the products of each two rows, and by the gradients themselves, in two steps
    that are clipped by them. Those of small matrices, and of parts of a batch, are not known."""
    model = replace(SMALL, dtype="bfloat16", param_dtype="bfloat16")
    case = CASE._replace(model=model, optim=replace(CASE.optim, clip=0.5))
    assert assembled(case, (1, 1, 1)).task.measured == ()
    direct, _ = Run(case, (1, 1, 1)).take(2)
    monkeypatch.setattr(giblet, "MUCH_LARGER", 0)
    run = Run(case, (1, 1, 1))
    assert len(run.task.measured) == giblet_paths(run.task) > 15
    known, _ = run.take(2)
    for (_, one), (_, other) in zip(direct, known, strict=True):
        norms = [name for name in one if name.startswith("grad_norm")]
        assert len(norms) == 3 and all(one[name].total > 0.5 for name in norms)
        for name in (*norms, "update_norm"):
            np.testing.assert_allclose(other[name].total, one[name].total, rtol=4e-3)
    in_parts, _ = Run(case, (2, 1, 1)).take(1)
    np.testing.assert_allclose(
        in_parts[0][1]["grad_norm"].total, direct[0][1]["grad_norm"].total, rtol=0.02
    )


def giblet_paths(task):
    return sum(path.endswith("/w") for path in specs_lib.paths(task.specs.params))
