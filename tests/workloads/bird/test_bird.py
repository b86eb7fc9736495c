"""The bird workload: FLOPs, the inputs of each gradient, its formulas, and steps with every
objective on every mesh."""

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxtrain import config as config_lib
from jaxtrain import specs
from jaxtrain.assembly import assemble
from jaxtrain.optim import make_optimizer
from jaxtrain.parallel import one_device
from jaxtrain.parallel.layout import make_layout, make_mesh
from jaxtrain.types import Variables
from jaxtrain.workloads.bird import augment, classes, masked, vit
from jaxtrain.workloads.bird import model as bird
from jaxtrain.workloads.bird.objectives.diet import Diet
from jaxtrain.workloads.bird.objectives.lejepa import Lejepa
from jaxtrain.workloads.bird.objectives.mae import Mae
from jaxtrain.workloads.bird.objectives.supervised import Supervised
from jaxtrain.workloads.bird.objectives.teacher import Teacher
from jaxtrain.workloads.bird.settings import POOLS, Mask
from loaders.base import Field
from tests.support.cases import Run, initial
from tests.support.cases.bird import CASE, DECODER, EVERY, ROWS, TINY, every_batch

# Machine code that compiles quickly rather than runs fast.
jit = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})
BATCH = 6


no_shard = one_device.shard


def alone():
    """The shards of one device."""
    return make_layout(make_mesh(1, 1, 1, devices=jax.devices()[:1]), {}).shard


def make_task(model, seed=0):
    task = bird.make_task(config_lib.Config(model=model, seed=seed), no_shard, BATCH)
    return task._replace(
        loss=jax.jit(task.loss), evaluate=jax.jit(task.evaluate), pictures=jax.jit(task.pictures)
    )


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
    return jit(lambda key: specs.materialise(make_task(TINY).specs, key))(jax.random.key(1))


@pytest.mark.parametrize("pool", POOLS)
def test_flops_are_those_that_xla_counts(pool):
    """The depth is 1, since XLA counts the body of a scan once. The model is wide, so that products
    outweigh norms and softmax."""
    c = bird.Config(
        n_classes=16,
        n_frames=128,
        n_mels=64,
        embed=256,
        depth=1,
        heads=4,
        pool=pool,
        n_cls=int(pool == "cls"),
        dtype="float32",
    )
    task = make_task(c)
    abstract = jax.eval_shape(lambda: specs.materialise(task.specs, jax.random.key(0)))
    rows = {
        "spectrogram": jax.ShapeDtypeStruct((BATCH, 128, 64), jnp.float32),
        **{name: jax.ShapeDtypeStruct((BATCH,), jnp.int32) for name in ("label", "index", "epoch")},
        "weight": jax.ShapeDtypeStruct((BATCH,), jnp.float32),
    }
    forward = jit(task.evaluate).lower(abstract, rows).compile().cost_analysis()["flops"]
    assert bird.forward_flops(c) * BATCH == pytest.approx(forward, rel=0.05)
    # The first product needs no gradient of its input, which the factor 3 for a training step
    # counts.
    grad = jit(jax.grad(lambda v, b: task.loss(v, b, None).loss.total)).lower(abstract, rows)
    assert task.flops == pytest.approx(grad.compile().cost_analysis()["flops"], rel=0.05)


def grads_of(task, name, variables, batch):
    grad = jit(
        jax.grad(lambda params: task.loss(Variables(params), batch, None).metrics[name].total)
    )
    return jax.device_get(grad(variables.params))


def test_the_probe_trains_nothing_but_itself(variables, batch):
    grads = grads_of(make_task(TINY), "probe_loss", variables, batch)
    assert all((g == 0).all() for g in jax.tree.leaves((grads["encoder"], grads["objective"])))
    assert all((g != 0).any() for g in jax.tree.leaves(grads["probe"]))


def test_the_objective_trains_all_but_the_probe(variables, batch):
    grads = grads_of(make_task(TINY), "objective_loss", variables, batch)
    assert all((g == 0).all() for g in jax.tree.leaves(grads["probe"]))
    assert all((g != 0).any() for g in jax.tree.leaves((grads["encoder"], grads["objective"])))


def test_rows_without_weight_do_not_count(variables, batch):
    task = make_task(replace(TINY, augment=augment.Augment(gain=0.1)))
    other = dict(
        batch, spectrogram=batch["spectrogram"].at[2].set(1e3), label=batch["label"].at[2].set(0)
    )
    loss = jit(
        jax.value_and_grad(lambda params, b: task.loss(Variables(params), b, None).loss.total)
    )
    jax.tree.map(
        np.testing.assert_array_equal, loss(variables.params, batch), loss(variables.params, other)
    )
    for b in (batch, other):
        sums = task.evaluate(variables, b)
        assert {name: float(m.weight) for name, m in sums.items()} == dict.fromkeys(sums, 4.5)


def test_a_weight_counts_as_so_many_rows(variables, batch):
    """Sums over single rows, times their weights, equal the sums over the batch."""
    task = make_task(TINY)
    single = dict(batch, weight=jnp.ones(BATCH))
    each = [
        task.evaluate(variables, {k: x[i : i + 1] for k, x in single.items()}) for i in range(BATCH)
    ]
    for name, found in task.evaluate(variables, batch).items():
        expected = sum(
            float(w) * np.asarray(e[name].total) for w, e in zip(batch["weight"], each, strict=True)
        )
        np.testing.assert_allclose(found.total, expected, rtol=1e-5, atol=1e-6)


AUGMENTED = replace(
    TINY, augment=augment.Augment(shift=20, time_masks=2, mel_masks=1, gain=0.2, noise=0.05)
)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_cross_entropy_equals_the_formula(smoothing):
    rng = np.random.default_rng(0)
    logits, label = rng.normal(size=(7, 5)) * 10, np.arange(7) % 5
    target = np.full((7, 5), smoothing / 5) + (1 - smoothing) * np.eye(5)[label]
    expected = -(target * (logits - np.log(np.exp(logits).sum(1, keepdims=True)))).sum(1)
    found = classes.cross_entropy(
        jnp.asarray(logits, jnp.float32), jnp.asarray(label), smoothing=smoothing
    )
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


def test_smoothing_is_for_training_only(variables, batch):
    plain, smooth = (
        make_task(TINY),
        make_task(replace(TINY, supervised=Supervised(label_smoothing=0.3))),
    )
    jax.tree.map(
        np.testing.assert_array_equal,
        plain.evaluate(variables, batch),
        smooth.evaluate(variables, batch),
    )
    one, two = (t.loss(variables, batch, None) for t in (plain, smooth))
    assert float(one.metrics["objective_loss"].total) != float(two.metrics["objective_loss"].total)
    assert float(one.metrics["probe_loss"].total) == float(two.metrics["probe_loss"].total)


def test_half_precision_keeps_norms_and_loss_in_float32(variables, batch):
    task = make_task(replace(TINY, dtype="bfloat16"))
    assert all(m.total.dtype == jnp.float32 for m in task.evaluate(variables, batch).values())
    exact = make_task(TINY).evaluate(variables, batch)["objective_loss"]
    assert float(task.evaluate(variables, batch)["objective_loss"].total) == pytest.approx(
        float(exact.total), rel=0.03
    )


def test_pictures_show_input_and_augmentation_mel_up(batch):
    pictures = make_task(AUGMENTED).pictures(batch)
    assert {k: x.shape for k, x in pictures.items()} == dict.fromkeys(
        ("input", "augmented"), (BATCH, 32, 64)
    )
    for x in pictures.values():
        assert float(x.min()) == 0 and float(x.max()) == pytest.approx(1)
    loudest = np.unravel_index(np.asarray(batch["spectrogram"][0]).argmax(), (64, 32))
    assert np.unravel_index(np.asarray(pictures["input"][0]).argmax(), (32, 64)) == loudest[::-1]
    assert (pictures["input"] != pictures["augmented"]).any()


@pytest.mark.parametrize(
    ("where", "section"),
    [
        ("pool", dict(pool="mean")),
        ("pool", dict(pool="cls", n_cls=0)),
        ("supervised.label_smoothing", dict(supervised=Supervised(label_smoothing=1.0))),
    ]
    + [
        ("supervised.loss", dict(supervised=Supervised(loss="hinge"))),
        ("mae.weight", dict(mae=Mae(-1.0))),
    ]
    + [
        ("supervised.weight", dict(supervised=Supervised(0.0))),
        ("mask.ratio", dict(mask=Mask(1.0))),
    ]
    + [
        ("augment.noise", dict(augment=augment.Augment(noise=-0.1))),
        ("lejepa.hidden", dict(lejepa=Lejepa(hidden=0))),
    ]
    + [
        ("diet.rank", dict(diet=Diet(rank=0))),
    ]
    + [
        ("mae.decoder.heads", dict(mae=Mae(1.0, masked.Decoder(32, 1, 5)))),
        ("heads", dict(heads=5)),
    ],
)
def test_an_invalid_model_names_the_field(where, section):
    assert where in dict(replace(TINY, **section).validate())
    assert not list(TINY.validate())


ONLY = dict(supervised=Supervised(0.0))


@pytest.mark.parametrize(
    ("where", "section", "info"),
    [
        ("n_classes", dict(), {"n_unlabelled": 2}),
        ("n_classes", dict(n_classes=None), {}),
    ]
    + [
        ("lejepa.weight", dict(ONLY, lejepa=Lejepa(1.0)), {"views": 1}),
    ]
    + [("n_recordings", dict(ONLY, diet=Diet(1.0)), {})]
    + [("supervised.loss", dict(multilabel=True), {"multilabel": True})]
    + [("augment.background", dict(augment=augment.Augment(background=0.1)), {})],
)
def test_a_model_that_does_not_go_with_the_data_names_the_field(where, section, info):
    assert where in dict(replace(TINY, **section).validate_data(info))


def test_a_model_that_goes_with_its_data_has_no_problems():
    assert not list(TINY.validate_data({"n_classes": 5, "n_unlabelled": 0, "n_frames": 64}))
    unlabelled = replace(TINY, **ONLY, n_classes=None, diet=Diet(1.0), n_recordings=7)
    assert not list(
        unlabelled.validate_data({"n_recordings": 7})
    ) and "probe" not in bird.make_specs(unlabelled)


# Every objective.


@pytest.mark.parametrize(
    ("mesh", "pool"), [((8, 1, 1), {}), ((2, 4, 1), dict(pool="patches", n_cls=0))]
)
def test_an_evaluation_draws_rows_for_every_device(mesh, pool):
    """Four rows of one view do not divide over eight devices: the first evaluation of a masked
    autoencoder ended the run there."""
    model = replace(TINY, mask=Mask(0.5, 2), mae=Mae(1.0, DECODER), **pool)
    rows = {name: x[:, 0] if name == "spectrogram" else x for name, x in every_batch(0).items()}
    fields = {name: Field(x.shape[1:], x.dtype) for name, x in rows.items()}
    config = config_lib.Config(model=model, optim=CASE.optim, train=config_lib.Train(batch=ROWS))
    run = assemble(config, make_mesh(*mesh), make_task=bird.make_task, fields=fields)
    drawn = jax.eval_shape(run.task.progress, run.abstract.state.variables, run.abstract.batch)
    assert drawn["restored"].shape == (8, 32, 64), "mel up, time to the right"


@functools.cache
def two_steps():
    """Variables and metrics after each of two real steps with two objectives."""
    model = replace(TINY, mask=Mask(0.5, 2), teacher=Teacher(0.6, 0.5, DECODER))
    case = CASE._replace(
        model=model, batch=lambda seed: {name: one_view(x) for name, x in every_batch(seed).items()}
    )
    return [(state.variables, metrics) for state, metrics in Run(case, (1, 1, 1)).take(2)[0]]


def one_view(x):
    return x[:, 0] if x.ndim == 4 else x


def test_norms_are_reported_by_group():
    variables, metrics = two_steps()[0]
    value = {name: float(m.total / m.weight) for name, m in metrics.items()}
    for kind in ("grad_norm", "update_norm", "param_norm_before", "param_norm_after"):
        groups = [value[f"{kind}_{group}"] for group in ("encoder", "objective", "probe")]
        assert value[kind] == pytest.approx(np.sqrt(np.square(groups).sum()), rel=1e-5) and all(
            g > 0 for g in groups
        )
    after = np.sqrt(sum(np.square(x).sum() for x in jax.tree.leaves(variables.params["encoder"])))
    assert (
        value["param_norm_after_encoder"]
        == pytest.approx(after, rel=1e-5)
        != value["param_norm_before_encoder"]
    )


def test_the_teacher_begins_as_the_student_and_follows_it():
    (first, _), (second, _) = two_steps()
    jax.tree.map(
        np.testing.assert_array_equal, first.model_state["teacher"], first.params["encoder"]
    )
    momentum = 0.5 + 0.5 * 1 / 10
    expected = jax.tree.map(
        lambda t, s: momentum * t + (1 - momentum) * s,
        first.model_state["teacher"],
        second.params["encoder"],
    )
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6),
        second.model_state["teacher"],
        expected,
    )


@functools.cache
def grads_of_every_loss():
    c = replace(EVERY, augment=augment.Augment(mixup=0.5))
    task = bird.make_task(config_lib.Config(model=c), alone(), 8)
    made = jit(lambda key: specs.materialise(task.specs, key))(jax.random.key(1))
    batch = every_batch(3, 8)

    def sums(params):
        out = task.loss(Variables(params, (), made.model_state), batch, jax.random.key(2))
        return {name: m.total for name, m in out.metrics.items() if name.endswith("_loss")}, out

    return jax.device_get(jit(jax.jacrev(sums, has_aux=True))(made.params))


def test_the_loss_is_the_weighted_sum():
    _, out = grads_of_every_loss()
    value = {name: float(m.total / m.weight) for name, m in out.metrics.items()}
    parts = {name: getattr(EVERY, name).weight for name in bird.OBJECTIVES}
    assert value["objective_loss"] == pytest.approx(
        sum(w * value[f"{name}_loss"] for name, w in parts.items()), rel=1e-5
    )
    labelled = float(out.metrics["probe_loss"].weight / out.loss.weight)
    loss = float(out.loss.total / out.loss.weight)
    assert loss == pytest.approx(value["objective_loss"] + labelled * value["probe_loss"], rel=1e-5)
    assert 0 < labelled < 1


@pytest.mark.parametrize("name", bird.OBJECTIVES)
def test_an_objective_trains_the_encoder_and_its_own_head_alone(name):
    grads, _ = grads_of_every_loss()
    norms = {
        path: float(np.abs(g).max())
        for path, g in zip(
            specs.paths(grads[f"{name}_loss"]), jax.tree.leaves(grads[f"{name}_loss"]), strict=True
        )
    }
    assert norms["encoder/w_patch"] > 0 and norms["encoder/blocks/w_qkv"] > 0
    for path, norm in norms.items():
        if path.startswith(f"objective/{name}/w"):
            assert norm > 0, path
        elif not path.startswith(("encoder/", f"objective/{name}/")):
            assert norm == 0, path


def test_the_probe_reads_any_objective_and_trains_none():
    grads, _ = grads_of_every_loss()
    for path, g in zip(
        specs.paths(grads["probe_loss"]), jax.tree.leaves(grads["probe_loss"]), strict=True
    ):
        assert bool((g != 0).any()) == path.startswith("probe/"), path


def test_recordings_are_told_apart_by_their_number_under_mixup_too():
    """The loss of diet is compared with its whole formula: hundreds of thousands of logits at once,
    both recordings."""
    n = 300_001
    c = replace(
        TINY,
        **ONLY,
        n_recordings=n,
        diet=Diet(1.0, rank=4),
        augment=augment.Augment(mixup=0.5),
    )
    task = bird.make_task(config_lib.Config(model=c), alone(), 4)
    variables = initial(task.specs)
    head = jax.tree.map(np.asarray, variables.params["objective"]["diet"])
    batch = {k: jnp.asarray(x[:4]) for k, x in every_batch(0).items()} | {
        "index": jnp.asarray([0, n - 1, 5, 200_000])
    }
    batch["spectrogram"] = batch["spectrogram"][:, 0]

    @jit
    def computed(variables, batch):
        mixed = augment.augment(c.augment, 0, batch)
        x = vit.encode(c, variables.params["encoder"], mixed.x, no_shard).cls[:, 0]
        return task.loss(variables, batch, None), mixed, x

    out, mixed, x = computed(variables, batch)
    low, table = (
        np.asarray(x, np.float64) @ head["w_low"] + head["b_low"],
        head["w_recordings"][:n].astype(np.float64),
    )
    rows = np.asarray(batch["weight"]) > 0
    low = (low - low[rows].mean(0, keepdims=True)) / np.sqrt(low[rows].var(0, keepdims=True) + 1e-5)
    low = np.maximum(low, 0)
    low = low / np.linalg.norm(low, axis=1, keepdims=True) / 0.1
    table /= np.linalg.norm(table, axis=1, keepdims=True)
    logits = low @ table.T
    log_p = logits - np.log(np.exp(logits).sum(1, keepdims=True))
    own, i = np.asarray(mixed.own_share)[:, 0], np.asarray(batch["index"])
    target = own * log_p[range(4), i] + (1 - own) * log_p[range(4), i[[1, 0, 3, 2]]]
    expected = -target * np.asarray(batch["weight"])
    assert float(out.metrics["diet_loss"].total) == pytest.approx(expected.sum(), rel=1e-5)
    assert head["w_recordings"].shape[0] % 128 == 0


def test_asymmetric_loss_equals_the_formula():
    rng = np.random.default_rng(0)
    logits, y = rng.normal(size=(5, 7)) * 4, rng.integers(0, 2, (5, 7))
    p = 1 / (1 + np.exp(-logits))
    q = np.maximum(p - 0.05, 0)
    expected = -(y * (1 - p) * np.log(p) + (1 - y) * q**4 * np.log(1 - q)).sum(1)

    def found(z):
        return classes.asymmetric_loss(
            z, jnp.asarray(y, jnp.float32), gamma_positive=1.0, gamma_negative=4.0, clip=0.05
        )  # noqa: E731

    np.testing.assert_allclose(found(jnp.asarray(logits, jnp.float32)), expected, rtol=1e-4)
    far = jnp.full((5, 7), 200.0) * jnp.where(jnp.asarray(y) > 0, -1, 1)
    assert jnp.isfinite(jax.grad(lambda z: found(z).sum())(far)).all()


def test_an_evaluation_reports_metrics_that_need_no_training_batch():
    """The whole objective is reported if that is all of it. Scores are means over the views."""
    c = replace(EVERY, lejepa=Lejepa(), diet=Diet())
    task = bird.make_task(config_lib.Config(model=c), no_shard, 4)
    made = jax.device_get(initial(task.specs))
    batch = {k: x[:4] for k, x in every_batch(0).items()} | {"label": np.arange(4, dtype="i4")}
    encode = lambda params, x: vit.encode(c, params, x).patches.mean(1)  # noqa: E731
    evaluated = jit(
        lambda v, b: (
            task.evaluate(v, b),
            encode(v.params["encoder"], b["spectrogram"].reshape(8, 64, 32)),
        )
    )
    counts, features = jax.device_get(evaluated(made, batch))
    found = {name: float(m.total / m.weight) for name, m in counts.items() if not m.total.ndim}
    total = sum(
        getattr(c, name).weight * found[f"{name}_loss"] for name in ("supervised", "mae", "teacher")
    )
    assert found["objective_loss"] == pytest.approx(total, rel=1e-5)
    head = made.params["objective"]["supervised"]
    logits = (features @ head["w"] + head["b"][None]).reshape(4, 2, 5).mean(1)
    each = np.asarray(classes.cross_entropy(logits, batch["label"])) * batch["weight"]
    expected, answers = np.zeros((5, 5)), np.asarray(logits.argmax(-1))
    np.add.at(expected, (np.arange(4), answers), np.asarray(batch["weight"]))
    np.testing.assert_allclose(counts["confusions"].total, expected)
    np.testing.assert_allclose(
        counts["classes"].total, [expected.sum(1), expected.diagonal(), expected.sum(0)]
    )
    assert found["supervised_loss"] == pytest.approx(
        float(each.sum() / batch["weight"].sum()), rel=1e-5
    )
    others = bird.make_task(config_lib.Config(model=replace(c, diet=Diet(1.0))), no_shard, 4)
    variables = Variables(initial(others.specs).params, (), made.model_state)
    assert "objective_loss" not in jax.eval_shape(others.evaluate, variables, batch)


def test_statistics_of_a_microbatch_are_announced(caplog):
    train = config_lib.Train(batch=8, accumulate=2)
    bird.make_task(config_lib.Config(model=EVERY, train=train), no_shard, 8)
    assert (
        caplog.text.count("a microbatch's 4 rows") == 2
        and "mixed within microbatches" in caplog.text
    )


def test_muon_takes_hidden_matrices_and_leaves_tables_and_heads():
    table = bird.make_specs(EVERY)
    tx = make_optimizer(config_lib.Optim(name="muon"), table, steps=2)
    state = jax.eval_shape(
        tx.init, jax.eval_shape(lambda: specs.materialise(table, jax.random.key(0)))
    )
    muon = next(
        s
        for s in jax.tree.leaves(state, is_leaf=lambda x: type(x).__name__ == "MuonState")
        if type(s).__name__ == "MuonState"
    )
    own = set(specs.paths(muon.mu))
    assert {
        "encoder/blocks/w_qkv",
        "encoder/blocks/w_out",
        "encoder/blocks/w_down",
        "objective/lejepa/w0",
    } <= own
    assert not own & {
        "objective/diet/w_recordings",
        "objective/supervised/w",
        "probe/w",
        "encoder/pos",
        "encoder/cls",
    }


def test_several_classes_in_a_recording():
    c = replace(
        TINY,
        multilabel=True,
        supervised=Supervised(loss="asymmetric"),
        augment=augment.Augment(mixup=0.5),
    )
    task = make_task(c)
    variables = initial(task.specs)
    labels = np.random.default_rng(1).integers(0, 2, (4, 5), dtype="u1") * np.array(
        [[1], [0], [1], [1]], "u1"
    )
    batch = {k: jnp.asarray(x[:4]) for k, x in every_batch(0).items() if k != "label"} | {
        "labels": jnp.asarray(labels)
    }
    batch["spectrogram"] = batch["spectrogram"][:, 0]
    out = task.loss(variables, batch, None)
    head = jax.device_get(variables.params["objective"]["supervised"])
    encode = jit(lambda params, x: vit.encode(c, params, x, no_shard).cls[:, 0])
    mixed = jit(lambda batch: augment.augment(c.augment, 0, batch).x)(batch)
    x = encode(variables.params["encoder"], mixed)
    union = jnp.asarray(labels | labels[[1, 0, 3, 2]], jnp.float32)
    each = classes.asymmetric_loss(
        x @ head["w"] + head["b"][None], union, gamma_positive=1.0, gamma_negative=4.0, clip=0.05
    )
    assert float(out.metrics["supervised_loss"].total) == pytest.approx(
        float((each * batch["weight"]).sum()), rel=1e-5
    )
    assert {"labels"} <= set(task.axes) and "label" not in task.axes
    # An answer is right if one of the row's classes has the best score.
    probe = jax.tree.map(np.zeros_like, jax.device_get(variables.params["probe"]))
    sure = {**variables.params, "probe": {**probe, "b": np.arange(5, dtype="f4")}}
    found = task.evaluate(Variables(sure), batch)["probe_accuracy"]
    assert float(found.total) == pytest.approx(float((labels[:, 4] * batch["weight"]).sum()))
    assert float(found.weight) == pytest.approx(float((labels.any(1) * batch["weight"]).sum())), (
        "no class, no row"
    )
    weighed = labels * np.asarray(batch["weight"])[:, None]
    x = encode(variables.params["encoder"], batch["spectrogram"].astype(jnp.float32))
    # of several, all with a score above 1/2
    answers = np.asarray(x @ head["w"] + head["b"][None] > 0)
    counts = task.evaluate(variables, batch)
    expected = [
        weighed.sum(0),
        (weighed * answers).sum(0),
        (answers * np.asarray(batch["weight"])[:, None]).sum(0),
    ]
    np.testing.assert_allclose(counts["classes"].total, expected)
    assert "confusions" not in counts
