"""The bird workload: sizes, FLOPs, what reaches which gradient, augmentation, its formulas."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxtrain import config as config_lib
from jaxtrain import specs
from jaxtrain.types import Variables
from jaxtrain.workloads import bird

TINY = bird.Config(n_classes=5, n_frames=64, n_mels=32, embed=32, depth=2, heads=4, dtype="float32")
BATCH = 6
augment = jax.jit(bird.augment, static_argnums=(0, 1))


def no_shard(x, *axes):
    return x


def make_task(model, seed=0):
    task = bird.make_task(config_lib.Config(model=model, seed=seed), no_shard, BATCH)
    return task._replace(loss=jax.jit(task.loss), evaluate=jax.jit(task.evaluate), pictures=jax.jit(task.pictures))


@pytest.fixture(scope="module")
def batch():
    rng = np.random.default_rng(0)
    return {
        "spectrogram": jnp.asarray(rng.normal(size=(BATCH, 64, 32)), jnp.float32),
        "label": jnp.asarray([0, 1, 2, 3, 4, 0], jnp.int32),
        "index": jnp.arange(10, 10 + BATCH, dtype=jnp.int32),
        "epoch": jnp.zeros(BATCH, jnp.int32),
        "weight": jnp.asarray([1, 1, 0, 1, 0.5, 1], jnp.float32),
    }


@pytest.fixture(scope="module")
def variables():
    return jax.jit(lambda key: specs.materialise(make_task(TINY).specs, key))(jax.random.key(1))


@pytest.mark.parametrize(("embed", "heads", "expected"), [(384, 6, 21_491_712), (768, 12, 85_450_752)])
def test_encoder_has_the_vits_number_of_parameters(embed, heads, expected):
    table = bird.make_specs(bird.Config(n_classes=10, embed=embed, heads=heads))
    assert specs.count(table["encoder"]) == expected
    assert specs.count(table["objective"]) == 10 * embed + 10


@pytest.mark.parametrize("pool", bird.POOLS)
def test_flops_are_those_that_xla_counts(pool):
    """Depth 1, since XLA counts the body of a scan once; wide, so that products outweigh norms and softmax."""
    c = bird.Config(n_classes=16, n_frames=128, n_mels=64, embed=256, depth=1, heads=4, n_cls=2, pool=pool, dtype="float32")
    task = make_task(c)
    abstract = jax.eval_shape(lambda: specs.materialise(task.specs, jax.random.key(0)))
    rows = {
        "spectrogram": jax.ShapeDtypeStruct((BATCH, 128, 64), jnp.float32),
        **{name: jax.ShapeDtypeStruct((BATCH,), jnp.int32) for name in ("label", "index", "epoch")},
        "weight": jax.ShapeDtypeStruct((BATCH,), jnp.float32),
    }
    forward = jax.jit(task.evaluate).lower(abstract, rows).compile().cost_analysis()["flops"]
    assert bird.forward_flops(c) * BATCH == pytest.approx(forward, rel=0.05)
    # The first product needs no gradient of its input, which the factor 3 for a training step counts.
    grad = jax.jit(jax.grad(lambda v, b: task.loss(v, b, None).loss.total)).lower(abstract, rows)
    assert task.flops == pytest.approx(grad.compile().cost_analysis()["flops"], rel=0.05)


def grads_of(task, name, variables, batch):
    return jax.jit(jax.grad(lambda params: task.loss(Variables(params), batch, None).metrics[name].total))(variables.params)


def test_the_probe_trains_nothing_but_itself(variables, batch):
    grads = grads_of(make_task(TINY), "probe_loss", variables, batch)
    assert all((g == 0).all() for g in jax.tree.leaves((grads["encoder"], grads["objective"])))
    assert all((g != 0).any() for g in jax.tree.leaves(grads["probe"]))


def test_the_objective_trains_all_but_the_probe(variables, batch):
    grads = grads_of(make_task(TINY), "objective_loss", variables, batch)
    assert all((g == 0).all() for g in jax.tree.leaves(grads["probe"]))
    assert all((g != 0).any() for g in jax.tree.leaves((grads["encoder"], grads["objective"])))


def test_rows_without_weight_do_not_count(variables, batch):
    task = make_task(replace(TINY, gain=0.1))
    other = dict(batch, spectrogram=batch["spectrogram"].at[2].set(1e3), label=batch["label"].at[2].set(0))
    loss = jax.jit(jax.value_and_grad(lambda params, b: task.loss(Variables(params), b, None).loss.total))
    jax.tree.map(np.testing.assert_array_equal, loss(variables.params, batch), loss(variables.params, other))
    for b in (batch, other):
        sums = task.evaluate(variables, b)
        assert {name: float(m.weight) for name, m in sums.items()} == dict.fromkeys(sums, 4.5)


def test_a_weight_counts_as_so_many_rows(variables, batch):
    """Sums over single rows, times their weights, are the sums over the batch."""
    task = make_task(TINY)
    single = dict(batch, weight=jnp.ones(BATCH))
    each = [task.evaluate(variables, {k: x[i : i + 1] for k, x in single.items()}) for i in range(BATCH)]
    for name, found in task.evaluate(variables, batch).items():
        expected = sum(float(w) * float(e[name].total) for w, e in zip(batch["weight"], each, strict=True))
        assert float(found.total) == pytest.approx(expected, rel=1e-5)


AUGMENTED = replace(TINY, shift=20, time_masks=2, time_mask=20, mel_masks=1, mel_mask=8, gain=0.2, noise=0.05)


def test_augmentation_depends_on_seed_epoch_and_recording_alone(batch):
    full = augment(AUGMENTED, 0, batch)
    order = np.array([3, 1, 5, 0, 4, 2])
    moved = augment(AUGMENTED, 0, {k: x[order] for k, x in batch.items()})
    np.testing.assert_array_equal(moved, full[order])
    alone = augment(AUGMENTED, 0, {k: x[2:3] for k, x in batch.items()})
    np.testing.assert_allclose(alone, full[2:3], rtol=0, atol=1e-6)  # the mean of one row alone is summed in another order


@pytest.mark.parametrize("change", [{"seed": 1}, {"epoch": 1}, {"index": 100}])
def test_augmentation_changes_with_each_of_them(batch, change):
    seed = change.get("seed", 0)
    other = dict(batch, epoch=batch["epoch"] + change.get("epoch", 0), index=batch["index"] + change.get("index", 0))
    before, after = augment(AUGMENTED, 0, batch), augment(AUGMENTED, seed, other)
    assert all((x != y).any() for x, y in zip(before, after, strict=True))


def test_no_augmentation_by_default(batch):
    np.testing.assert_array_equal(augment(TINY, 0, batch), batch["spectrogram"])


@pytest.mark.parametrize(("kind", "axis", "longest"), [("time", 1, 20), ("mel", 2, 8)])
def test_masks_lie_on_their_axis(batch, kind, axis, longest):
    n = 400
    rows = {k: jnp.repeat(x[:1], n, axis=0) for k, x in batch.items()} | {"index": jnp.arange(n)}
    c = replace(TINY, **{f"{kind}_masks": 1, f"{kind}_mask": longest})
    before, after = np.asarray(rows["spectrogram"]), np.asarray(augment(c, 0, rows))
    changed = (before != after).all(axis=3 - axis)  # a whole frame, or a whole band
    np.testing.assert_array_equal((before != after).sum((1, 2)), changed.sum(1) * before.shape[3 - axis])
    np.testing.assert_allclose(after[before != after], before[0].mean(), rtol=1e-5, atol=1e-6)
    lengths = changed.sum(1)
    assert set(lengths) == set(range(longest + 1))
    assert (np.abs(np.diff(changed, axis=1, prepend=False, append=False)).sum(1) <= 2).all()  # one span
    assert changed.any(0).all()  # anywhere, the edges too


def test_shift_rotates_in_time_and_gain_is_one_number(batch):
    n = 200
    rows = {k: jnp.repeat(x[:1], n, axis=0) for k, x in batch.items()} | {"index": jnp.arange(n)}
    x = np.asarray(rows["spectrogram"][0])
    by = [next(s for s in range(-3, 4) if (np.roll(x, s, 0) == y).all()) for y in augment(replace(TINY, shift=3), 0, rows)]
    assert set(by) == set(range(-3, 4))
    gains = np.asarray(augment(replace(TINY, gain=0.5), 0, rows)) - x
    assert np.ptp(gains, axis=(1, 2)).max() < 1e-6
    assert -0.5 <= gains.min() < -0.4 and 0.4 < gains.max() <= 0.5
    noise = np.asarray(augment(replace(TINY, noise=0.1), 0, rows)) - x
    assert noise.std() == pytest.approx(0.1, rel=0.01) and abs(np.corrcoef(noise[0].ravel(), noise[1].ravel())[0, 1]) < 0.1


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_cross_entropy_equals_the_formula(smoothing):
    rng = np.random.default_rng(0)
    logits, label = rng.normal(size=(7, 5)) * 10, np.arange(7) % 5
    target = np.full((7, 5), smoothing / 5) + (1 - smoothing) * np.eye(5)[label]
    expected = -(target * (logits - np.log(np.exp(logits).sum(1, keepdims=True)))).sum(1)
    found = bird.cross_entropy(jnp.asarray(logits, jnp.float32), jnp.asarray(label), smoothing=smoothing)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


def test_smoothing_is_for_training_only(variables, batch):
    plain, smooth = make_task(TINY), make_task(replace(TINY, label_smoothing=0.3))
    jax.tree.map(np.testing.assert_array_equal, plain.evaluate(variables, batch), smooth.evaluate(variables, batch))
    one, two = (t.loss(variables, batch, None) for t in (plain, smooth))
    assert float(one.metrics["objective_loss"].total) != float(two.metrics["objective_loss"].total)
    assert float(one.metrics["probe_loss"].total) == float(two.metrics["probe_loss"].total)


@pytest.mark.parametrize("offset", [0.0, 300.0])
def test_layer_norm_equals_float64(offset):
    rng = np.random.default_rng(0)
    x, scale, bias = (rng.normal(size=s).astype("f4") for s in ((3, 7, 32), (32,), (32,)))
    x = x + np.float32(offset)
    wide = x.astype(np.float64)
    expected = (wide - wide.mean(-1, keepdims=True)) / np.sqrt(wide.var(-1, keepdims=True) + 1e-5) * scale + bias
    # The mean of values near 300 has an error of some ulps of 3e-5.
    np.testing.assert_allclose(bird.layer_norm(x, scale, bias), expected, rtol=0, atol=2e-4 if offset else 5e-6)


def test_half_precision_keeps_norms_and_loss_in_float32(variables, batch):
    task = make_task(replace(TINY, dtype="bfloat16"))
    assert all(m.total.dtype == jnp.float32 for m in task.evaluate(variables, batch).values())
    assert jnp.finfo(bird.layer_norm(jnp.ones((1, 4), jnp.bfloat16), jnp.ones(4), jnp.ones(4)).dtype).bits == 32
    exact = make_task(TINY).evaluate(variables, batch)["objective_loss"]
    assert float(task.evaluate(variables, batch)["objective_loss"].total) == pytest.approx(float(exact.total), rel=0.03)


def test_recomputing_layers_changes_no_gradient(variables, batch):
    one, two = (grads_of(make_task(c), "objective_loss", variables, batch) for c in (TINY, replace(TINY, remat=True)))
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-6), one, two)


def test_patches_are_cut_row_by_row_in_time():
    c = bird.Config(n_classes=2, n_frames=4, n_mels=6, patch=(2, 3))
    x = np.arange(24).reshape(1, 4, 6)
    found = np.asarray(bird.patchify(c, jnp.asarray(x)))
    expected = [x[0, i : i + 2, j : j + 3].ravel() for i in (0, 2) for j in (0, 3)]
    np.testing.assert_array_equal(found[0], expected)


def test_pictures_show_input_and_augmentation_mel_up(batch):
    pictures = make_task(AUGMENTED).pictures(batch)
    assert {k: x.shape for k, x in pictures.items()} == dict.fromkeys(("input", "augmented"), (BATCH, 32, 64))
    for x in pictures.values():
        assert float(x.min()) == 0 and float(x.max()) == pytest.approx(1)
    loudest = np.unravel_index(np.asarray(batch["spectrogram"][0]).argmax(), (64, 32))
    assert np.unravel_index(np.asarray(pictures["input"][0]).argmax(), (32, 64)) == loudest[::-1]
    assert (pictures["input"] != pictures["augmented"]).any()


@pytest.mark.parametrize(
    ("field", "value"),
    [("patch", (16, 24)), ("patch", (0, 16)), ("heads", 5), ("pool", "mean"), ("dtype", "float16"), ("embed", 0)]
    + [("label_smoothing", 1.0), ("shift", -1), ("noise", -0.1), ("mel_mask", -1), ("n_cls", 0)],
)
def test_a_model_that_makes_no_sense_names_the_field(field, value):
    problems = dict(replace(TINY, **{field: value}).problems())
    assert field in problems and str(value) in problems[field]


def test_a_good_model_has_no_problems_and_facts_are_checked():
    assert not list(TINY.problems())
    assert not list(TINY.data_problems({"n_classes": 5, "n_unlabelled": 0}))
    assert [w for w, _ in TINY.data_problems({"n_classes": 6, "n_unlabelled": 2})] == ["n_classes", "n_classes"]
    assert list(replace(TINY, n_classes=None).data_problems({}))
