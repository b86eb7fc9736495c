"""One optimizer step is the same on every mesh and with accumulation, and gradients are reduced
once."""

import dataclasses
import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxtrain import config as config_lib
from jaxtrain.assembly import assemble
from jaxtrain.optim import Optimizer
from jaxtrain.parallel.layout import Devices, LayoutError, make_mesh
from jaxtrain.plan import hlo
from jaxtrain.specs import fan_in, ones, zeros
from jaxtrain.step import state as state_lib
from jaxtrain.step import train_step as step_lib
from jaxtrain.types import LossOut, Mean, Spec, Task, Variables
from loaders.base import Field
from tests.support import toy, toy_rows

BATCH = 32
MESHES = {
    "alone": (1, 1, 1),
    "mixed": (2, 2, 2),
    "data": (8, 1, 1),
    "fsdp": (1, 8, 1),
    "model": (1, 1, 8),
}
MODEL = toy.Config()
FIELDS = toy_rows.element_spec(toy_rows.Config())
# An eps above rounding noise. Otherwise Adam would make the noise as large as a gradient.
OPTIM = config_lib.Optim(lr=0.01, schedule="constant", clip=0.5, eps=1e-4)


def make_batch(seed):
    rng = np.random.default_rng(seed)
    return {
        "x": rng.normal(size=(BATCH, toy_rows.WIDTH)).astype("f4"),
        "label": rng.integers(0, toy_rows.CLASSES, BATCH, dtype="i4"),
        "index": np.arange(BATCH),
        "epoch": np.full(BATCH, seed, "i4"),
        # The weights are uneven in every way of splitting: by data group and by row modulo 4. Some
        # rows have no weight at all.
        "weight": (
            rng.random(BATCH) * (np.arange(BATCH) % 4 != 1) * (np.arange(BATCH) > 10)
        ).astype("f4"),
    }


class Run:
    """A task on a mesh, with its step compiled."""

    def __init__(self, mesh, accumulate=1, *, ema=0.0, task=None, fields=FIELDS):
        sizes = MESHES[mesh]
        config = config_lib.Config(
            model=MODEL,
            optim=OPTIM,
            train=config_lib.Train(steps=10, batch=BATCH, accumulate=accumulate, ema=ema),
            metrics=config_lib.Metrics(every=1),
        )
        make_task = (lambda *_: task) if task else toy.make_task
        mesh = make_mesh(*sizes, devices=jax.devices()[: np.prod(sizes)])
        assembly = assemble(config, mesh, make_task=make_task, fields=fields)
        self.layout, self.task, self.tx, self.abstract = (
            assembly.layout,
            assembly.task,
            assembly.tx,
            assembly.abstract,
        )
        # This machine code is quick to compile rather than fast. XLA transforms the program in the
        # same way before.
        options = {"xla_backend_optimization_level": 0}
        self.compiled = assembly.trace(None).lower().compile(compiler_options=options)

    def step(self, state, batch, *, stop=False):
        return self.compiled(state, batch, step_lib.put_stop(self.layout, stop))

    def init(self):
        return state_lib.init_state(self.task, self.tx, self.abstract, jax.random.key(0))

    def put(self, batch):
        return {
            name: jax.device_put(batch[name], x.sharding) for name, x in self.abstract.batch.items()
        }


def host(tree):
    return jax.tree.map(np.asarray, tree)


@pytest.fixture(scope="module")
def make_run():
    return functools.cache(Run)


@pytest.fixture(scope="module")
def alone(make_run):
    """The state and the metrics after one and after two steps on one device."""
    return two_steps(make_run("alone"))


def two_steps(run):
    state, found = run.init(), []
    for seed in range(2):
        state, metrics = run.step(state, run.put(make_batch(seed)))
        found.append((host(state), host(metrics)))
    return found


def assert_close(expected, found, *, atol):
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(expected)]
    for path, x, y in zip(paths, jax.tree.leaves(expected), jax.tree.leaves(found), strict=True):
        np.testing.assert_allclose(
            y, x, rtol=2e-4, atol=atol * max(1e-3, np.abs(x).max()), err_msg=path
        )


@pytest.mark.parametrize(
    ("mesh", "accumulate"),
    [("fsdp", 1), ("model", 1), ("alone", 4), ("mixed", 4), ("data", 4)],
)
def test_a_step_is_the_same_on_every_mesh_and_in_parts(make_run, alone, mesh, accumulate):
    """The comparison covers the loss, the gradients (by Adam's first moment, which is 0.1 g,
    clipped, after one step), and the result of two steps."""
    found = two_steps(make_run(mesh, accumulate))
    for (state, metrics), (expected, expected_metrics) in zip(found, alone, strict=True):
        assert_close(expected_metrics, metrics, atol=1e-5)
        assert_close(moments(expected), moments(state), atol=1e-4)
        assert_close(expected.variables.params, state.variables.params, atol=1e-4)


def moments(state):
    return next(s.mu for s in state.opt_state if isinstance(s, optax.ScaleByAdamState))


def test_gradients_are_those_of_the_plain_mean(make_run, alone):
    """The reference is jax.grad of the weighted mean, without any code of step.py."""
    run, batch = make_run("alone"), make_batch(0) | {"row": np.arange(BATCH)}
    key = jax.random.fold_in(jax.random.key(0), 0)  # the key of the run's seed and the step

    def loss(params):
        out = run.task.loss(Variables(params), batch, key)
        return out.loss.total / out.loss.weight

    value, grads = jax.jit(jax.value_and_grad(loss))(run.init().variables.params)
    state, metrics = alone[0]
    norm = float(optax.tree.norm(grads))
    assert float(metrics["loss"].total / metrics["loss"].weight) == pytest.approx(
        float(value), rel=1e-5
    )
    assert float(metrics["grad_norm"].total) == pytest.approx(norm, rel=1e-5)
    assert norm > OPTIM.clip
    assert_close(
        jax.tree.map(lambda g: 0.1 * g * OPTIM.clip / norm, host(grads)), moments(state), atol=1e-5
    )


@pytest.mark.parametrize("mesh", ["mixed", "data"])
def test_accumulation_reduces_over_data_once(make_run, mesh):
    run = make_run(mesh, 4)
    found = [
        c
        for c in hlo.collectives(run.compiled.as_text())
        if "data" in c.axes(run.layout.mesh.shape)
    ]
    assert not [c.name for c in found if c.in_loop]
    # Each gradient is reduced over data once, however XLA bundles the reductions.
    reduced = sum(math.prod(shape) for c in found if c.kind == "all-reduce" for shape in c.shapes)
    sizes = sum(
        math.prod(x.sharding.shard_shape(x.shape))
        for x in jax.tree.leaves(run.abstract.state.variables.params)
    )
    assert sizes <= reduced <= 1.02 * sizes, (sizes, reduced)


def test_a_batch_that_accumulation_does_not_divide_is_named():
    with pytest.raises(
        LayoutError,
        match="train.batch=32 puts 4 rows on each of 8 parts .* train.accumulate=3 .* of 24",
    ):
        Run("data", 3)


def test_the_state_is_donated(make_run):
    run = make_run("mixed")
    state = run.init()
    run.step(state, run.put(make_batch(0)))
    assert all(x.is_deleted() for x in jax.tree.leaves(state))


def test_the_update_writes_the_state_in_place(make_run):
    """This is one CPU device. The compiler would first copy every parameter and moment if it could
    not see their last reader."""
    text = make_run("alone").compiled.as_text()
    copied = re.findall(r"f32\[([\d,]+)\]\S* copy\((?:f32\S* )?%(\w+?)__", text)
    names = re.findall(r"%(state_opt_state|state_variables)\w*\S* = ", text)
    assert len(set(names)) == 2, "the parameters of the program are called so"
    assert (
        sum(
            math.prod(map(int, shape.split(",")))
            for shape, name in copied
            if name.startswith("state")
        )
        < 100
    )


def test_a_program_grows_with_the_number_of_parameters_and_not_its_square():
    """On one CPU device, each moment is written after all parameters. If XLA fuses that order into
    every loop, the program of 100 parameters is ten times as long as it need be."""

    def length(n):
        def loss(variables, batch, key):
            total = (batch["x"] @ sum(variables.params.values()) * batch["weight"]).sum()
            return LossOut(Mean(total, batch["weight"].sum()), {})

        params = {f"w{i}": Spec((4,), ("embed",), fan_in(4)) for i in range(n)}
        task = toy_task()._replace(
            specs=Variables(params), loss=loss, advance=lambda params, state, step: state
        )
        return Run("alone", task=task, fields=TOY_FIELDS).compiled.as_text().count("\n")

    few, more, most = map(length, (5, 10, 20))
    assert most - more < 3 * (more - few)


@pytest.mark.parametrize("rule", ["adamw", "lion", "muon", "adafactor"])
def test_norms_that_nobody_records_change_nothing(rule):
    """A step that does not record the norms leaves the same bits. A step that is skipped or
    recorded has the norms."""
    config = config_lib.Config(
        model=MODEL,
        optim=dataclasses.replace(OPTIM, name=rule),
        train=config_lib.Train(steps=10, batch=BATCH, ema=0.9),
    )
    run = assemble(
        config,
        make_mesh(1, 1, 1, devices=jax.devices()[:1]),
        make_task=lambda *_: toy_task(),
        fields=TOY_FIELDS,
    )
    batch = {"x": np.ones((BATCH, 4), "f4"), "weight": np.ones(BATCH, "f4")}
    found = []
    for every in (1, 2):
        recording = dataclasses.replace(config, metrics=config_lib.Metrics(every=every))
        step = step_lib.make_train_step(recording, run.layout, run.task, run.tx, run.abstract)
        state = state_lib.init_state(run.task, run.tx, run.abstract, jax.random.key(0))
        for scale in (1, 2, np.nan):
            rows = {"x": scale * batch["x"], "weight": batch["weight"]}
            rows = {
                name: jax.device_put(rows[name], x.sharding)
                for name, x in run.abstract.batch.items()
            }
            state, metrics = step(state, rows, step_lib.put_stop(run.layout, False))
            found.append(host((state, metrics)))
    for i in range(3):
        (state, metrics), (other, others) = found[i], found[3 + i]
        jax.tree.map(np.testing.assert_array_equal, state, other)
        is_norm = "param_norm_after", "param_norm_before", "update_norm"
        if i == 0:
            unknown = {name: np.isnan(others.pop(name).total) for name in is_norm}
            assert all(np.isfinite(metrics.pop(name).total) for name in is_norm)
            # Moments that are kept in rows are not computed twice, so their norms cost little.
            assert set(unknown.values()) == {rule != "adafactor"}
        assert_close(metrics, others, atol=0)
    assert found[5][1]["skipped"].total == 1 and found[5][1]["update_norm"].total == 0


@pytest.mark.parametrize("rule", ["adamw", "muon", "adafactor"])
@pytest.mark.parametrize("devices", [Devices("gpu", "9.0"), Devices("cpu", "")], ids=["gpu", "cpu"])
def test_a_program_without_norms_leaves_the_same_bits(rule, devices):
    """Also after a step that is skipped, and one that is refused because the run stops."""
    config = config_lib.Config(
        model=MODEL,
        optim=dataclasses.replace(OPTIM, name=rule),
        train=config_lib.Train(steps=10, batch=BATCH, ema=0.9),
        metrics=config_lib.Metrics(every=1),
    )
    run = assemble(
        config,
        make_mesh(1, 1, 1, devices=jax.devices()[:1]),
        make_task=lambda *_: toy_task(),
        fields=TOY_FIELDS,
    )
    layout = run.layout._replace(devices=devices)
    x = np.random.default_rng(0).standard_normal((BATCH, 4)).astype("f4")
    found = []
    for has_norms in (True, False):
        step = step_lib.make_train_step(
            config, layout, run.task, run.tx, run.abstract, has_norms=has_norms
        )
        state = state_lib.init_state(run.task, run.tx, run.abstract, jax.random.key(0))
        for scale, stop in ((1, False), (2, False), (np.nan, False), (3, True)):
            rows = {"x": scale * x, "weight": np.ones(BATCH, "f4")}
            rows = {
                name: jax.device_put(rows[name], of_batch.sharding)
                for name, of_batch in run.abstract.batch.items()
            }
            state, metrics = step(state, rows, step_lib.put_stop(run.layout, stop))
            found.append(host((state, metrics)))
    for (state, metrics), (other, others) in zip(found[:4], found[4:], strict=True):
        jax.tree.map(np.testing.assert_array_equal, state, other)
        left_out = metrics.keys() - others.keys()
        assert left_out == {"update_norm", "param_norm_before", "param_norm_after"}
        jax.tree.map(
            np.testing.assert_array_equal, {name: metrics[name] for name in others}, others
        )
    assert found[6][1]["skipped"].total == 1 and found[7][1]["stopped"].total == 1


@pytest.mark.parametrize(("mesh", "accumulate"), [("alone", 1), ("alone", 2), ("data", 1)])
def test_a_batch_of_no_weight_is_skipped(mesh, accumulate):
    """The batch is also skipped if the loss selects its rows, and no gradient shows the divisor."""

    def loss(variables, batch, key):
        each = (batch["x"] @ variables.params["w"]) ** 2
        return LossOut(
            Mean(jnp.where(batch["weight"] > 0, each, 0).sum(), batch["weight"].sum()), {}, None
        )

    run = Run(mesh, accumulate, task=toy_task()._replace(loss=loss), fields=TOY_FIELDS)
    state = run.init()
    before = host(state.variables.params)
    state, metrics = run.step(
        state, run.put({"x": np.ones((BATCH, 4), "f4"), "weight": np.zeros(BATCH, "f4")})
    )
    assert metrics["skipped"].total == 1
    jax.tree.map(np.testing.assert_array_equal, before, host(state.variables.params))


def by_matrix(grads, state, params, *, sparse_rows):
    return jax.tree.map(lambda g: -0.1 * (jnp.eye(len(g)) @ g), grads), state


@pytest.mark.parametrize("stop", [False, True])
@pytest.mark.parametrize(
    "rule", [None, Optimizer(lambda params: (), by_matrix)], ids=["adamw", "products"]
)
def test_the_step_for_gpus_has_the_same_results(rule, stop):
    """The norms are computed before the parameters, and the update is then computed again. If that
    costs more than it saves, it is not."""
    run = Run("alone", 1, task=toy_task(), fields=TOY_FIELDS)
    tx, abstract = rule or run.tx, run.abstract
    if rule:
        abstract = abstract._replace(state=abstract.state.replace(opt_state=()))
    batch = {"x": np.ones((BATCH, 4), "f4"), "weight": np.ones(BATCH, "f4")}
    found = []
    for layout in (run.layout, run.layout._replace(devices=Devices("gpu", "9.0"))):
        config = config_lib.Config(metrics=config_lib.Metrics(every=1))
        step = step_lib.make_train_step(config, layout, run.task, tx, abstract)
        state = run.init()
        state = state.replace(opt_state=()) if rule else state
        found.append(host(step(state, run.put(batch), step_lib.put_stop(layout, stop))))
    assert_close(*found, atol=1e-6)
    assert (found[1][1]["update_norm"].total == 0) == stop


def test_a_step_runs_without_jit():
    run = Run("alone", 1, task=toy_task(), fields=TOY_FIELDS)
    rows = run.put({"x": np.ones((BATCH, 4), "f4"), "weight": np.ones(BATCH, "f4")})
    config = config_lib.Config(train=config_lib.Train(accumulate=2))
    given = (run.layout, run.task, run.tx, run.init(), rows, step_lib.put_stop(run.layout, False))
    state, metrics = host(step_lib.train_step(config, *given))
    expected, others = host(run.step(run.init(), rows))
    assert_close(expected, state, atol=1e-6)
    assert_close({"loss": others["loss"]}, {"loss": metrics["loss"]}, atol=1e-6)


def test_a_step_that_is_refused_keeps_every_bit_of_the_parameters():
    run = Run("alone", 1, task=toy_task(), fields=TOY_FIELDS)
    state = run.init()
    before = np.array([-0.0, 0.0, 1.5, -2.5], "f4")
    state = state.replace(variables=state.variables._replace(params={"w": jax.device_put(before)}))
    batch = {"x": np.ones((BATCH, 4), "f4"), "weight": np.ones(BATCH, "f4")}
    state, _ = run.step(state, run.put(batch), stop=True)
    assert np.asarray(state.variables.params["w"]).tobytes() == before.tobytes()


# The smallest workload with a model state. One part of the model state belongs to the rows and
# another to all of them, and each row has a random draw.
TOY_FIELDS = {"x": Field((4,), np.float32), "weight": Field((), np.float32)}


def toy_task(draw=False, dtype="float32"):
    def loss(variables, batch, key):
        y = (batch["x"] @ variables.params["w"]) + variables.model_state["latent"].sum(-1)
        if draw:
            keys = jax.vmap(lambda row: jax.random.fold_in(key, row))(batch["row"])
            y = y * jax.vmap(jax.random.normal)(keys)
        each = (y - 1) ** 2
        model_state = {
            "latent": variables.model_state["latent"] * 0.5 + batch["x"],
            "teacher": variables.model_state["teacher"],
            "count": variables.model_state["count"],
        }
        total = Mean((each * batch["weight"]).sum(), batch["weight"].sum())
        # the same on every device: it has no row's value
        rows = Mean(jnp.float32(batch["x"].shape[0]), jnp.float32(1))
        return LossOut(total, {"rows": rows}, model_state)

    def advance(params, model_state, step):
        teacher = 0.9 * model_state["teacher"] + 0.1 * params["w"].astype(dtype)
        return {**model_state, "teacher": teacher, "count": model_state["count"] + step + 1}

    return Task(
        specs=Variables(
            params={"w": Spec((4,), ("embed",), fan_in(4))},
            model_state={
                "latent": Spec((BATCH, 4), ("batch", None), zeros),
                "teacher": Spec((4,), ("embed",), zeros, dtype),
                "count": Spec((), (), zeros, "int32"),
            },
        ),
        loss=loss,
        evaluate=lambda variables, batch: {},
        axes={"x": ("batch", None), "weight": ("batch",)},
        flops=0,
        advance=advance,
    )


def run_toy(mesh, accumulate, *, draw=False, dtype="float32", ema=0.0):
    run = Run(mesh, accumulate, task=toy_task(draw, dtype), fields=TOY_FIELDS, ema=ema)
    rng = np.random.default_rng(0)
    state, states = run.init(), []
    for _ in range(3):
        batch = {
            "x": rng.normal(size=(BATCH, 4)).astype("f4"),
            "weight": (rng.random(BATCH) > 0.4).astype("f4"),
        }
        state, metrics = run.step(state, run.put(batch))
        states.append(host(state))
    return states, host(metrics), state, run


@pytest.fixture(scope="module")
def toy_alone():
    return {draw: run_toy("alone", 1, draw=draw)[0] for draw in (False, True)}


@pytest.mark.parametrize(
    ("mesh", "accumulate"), [("alone", 4), ("mixed", 1), ("mixed", 4), ("data", 1), ("data", 2)]
)
@pytest.mark.parametrize("draw", [False, True])
def test_a_model_state_is_the_same_on_every_mesh_and_in_parts(toy_alone, mesh, accumulate, draw):
    """A row's random draw is the same, too: it depends on the row's place, not on its device."""
    states, _, state, run = run_toy(mesh, accumulate, draw=draw)
    for expected, found in zip(toy_alone[draw], states, strict=True):
        assert_close(expected, found, atol=1e-5)
    planned = jax.tree.map(lambda x: (x.shape, x.dtype, x.sharding), run.abstract.state)
    assert planned == jax.tree.map(lambda x: (x.shape, x.dtype, x.sharding), state)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_model_state_of_16_bits_is_averaged_over_replicas(accumulate):
    """XLA for CPUs ends the process at a sum of 16 bits over some of the mesh axes."""
    states, _, state, _ = run_toy("mixed", accumulate, dtype="bfloat16")
    teacher = state.variables.model_state["teacher"]
    assert teacher.dtype == jnp.bfloat16
    expected = np.zeros(4)
    for each in states:
        expected = 0.9 * expected + 0.1 * each.variables.params["w"]
    np.testing.assert_allclose(np.asarray(teacher, np.float32), expected, rtol=0.02)


def test_a_rows_model_state_stays_in_its_place(toy_alone):
    rng = np.random.default_rng(0)
    latent = np.zeros((BATCH, 4))
    for state in toy_alone[False]:
        latent = 0.5 * latent + rng.normal(size=(BATCH, 4)).astype("f4")
        rng.random(BATCH)
        np.testing.assert_allclose(
            state.variables.model_state["latent"], latent, rtol=1e-5, atol=1e-6
        )


def follower_task():
    """A task with a model state that only `advance` changes."""

    def loss(variables, batch, key):
        y = batch["x"] @ (variables.params["w"] + variables.model_state["teacher"])
        return LossOut(Mean((y**2 * batch["weight"]).sum(), batch["weight"].sum()), {}, None)

    def advance(params, model_state, step):
        return {
            "rows": model_state["rows"],
            "teacher": 0.9 * model_state["teacher"] + 0.1 * params["w"],
        }

    model_state = {
        "teacher": Spec((4,), ("embed",), fan_in(4)),
        "rows": Spec((BATCH,), ("batch",), ones),
    }
    return toy_task()._replace(
        specs=Variables({"w": Spec((4,), ("embed",), fan_in(4))}, model_state=model_state),
        loss=loss,
        advance=advance,
    )


def test_a_model_state_that_the_loss_leaves_alone_is_not_reduced():
    """Only the gradient, the loss, its weight and the stop flags are summed over data."""
    found = {}
    for mesh, accumulate in (("alone", 1), ("data", 1), ("data", 2)):
        run = Run(mesh, accumulate, task=follower_task(), fields=TOY_FIELDS)
        state, rng = run.init(), np.random.default_rng(0)
        for _ in range(2):
            batch = {
                "x": rng.normal(size=(BATCH, 4)).astype("f4"),
                "weight": rng.random(BATCH).astype("f4"),
            }
            before = host(state.variables.model_state)
            state, _ = run.step(state, run.put(batch))
        found[mesh, accumulate] = host(state.variables)
        reduced = [
            c
            for c in hlo.collectives(run.compiled.as_text())
            if "data" in c.axes(run.layout.mesh.shape)
        ]
        sizes = sorted(math.prod(shape) for c in reduced for shape in c.shapes)
        assert sizes == ([] if mesh == "alone" else [1, 1, 1, 4]), sizes
    expected = found.pop(("alone", 1))
    np.testing.assert_allclose(
        expected.model_state["teacher"],
        0.9 * before["teacher"] + 0.1 * expected.params["w"],
        rtol=1e-5,
    )
    for variables in found.values():
        assert_close(expected, variables, atol=1e-5)


def test_advance_sees_the_new_parameters_and_the_step(toy_alone):
    teacher = np.zeros(4)
    for i, state in enumerate(toy_alone[False]):
        teacher = 0.9 * teacher + 0.1 * state.variables.params["w"]
        np.testing.assert_allclose(state.variables.model_state["teacher"], teacher, rtol=1e-5)
        assert state.step == i + 1
        assert state.variables.model_state["count"] == sum(range(1, i + 2))


PLAIN = {
    "a metric": lambda out: out._replace(metrics={"rows": jnp.float32(1)}),
    "the loss": lambda out: out._replace(loss=out.loss.total),
    "all": lambda out: out.loss,
}


@pytest.mark.parametrize(
    ("part", "text"),
    [
        ("a metric", "'rows' of the loss"),
        ("the loss", "'loss' of the loss"),
        ("all", "returned a Mean"),
    ],
)
def test_a_loss_that_returns_other_types_is_reported(part, text):
    task = toy_task()
    wrong = task._replace(loss=lambda *given: PLAIN[part](task.loss(*given)))
    with pytest.raises(TypeError, match=text):
        Run("alone", 1, task=wrong, fields=TOY_FIELDS, ema=0.0)


def test_a_metric_named_as_one_of_every_step_is_an_error():
    task = toy_task()

    def loss(*given):
        out = task.loss(*given)
        return out._replace(metrics={**out.metrics, "grad_norm": out.loss})

    with pytest.raises(
        ValueError, match="metrics named grad_norm, and every step has its own; rename them"
    ):
        Run("alone", 1, task=task._replace(loss=loss), fields=TOY_FIELDS, ema=0.0)


@pytest.mark.parametrize(
    ("mesh", "accumulate"), [("alone", 1), ("alone", 4), ("data", 1), ("mixed", 4)]
)
def test_a_metric_without_rows_counts_once_for_each_part(mesh, accumulate):
    _, metrics, _, _ = run_toy(mesh, accumulate)
    assert metrics["rows"].total == BATCH


def test_the_average_follows_its_formula():
    """The average starts at the initialisation and is then decay average + (1 - decay) parameters.
    Training does not see it."""
    states, _, _, run = run_toy("mixed", 1, ema=0.75)
    average = host(run.init().variables.params["w"])
    for state in states:
        average = 0.75 * average + 0.25 * state.variables.params["w"]
        np.testing.assert_allclose(state.ema["w"], average, rtol=1e-6)


def test_without_an_average_none_is_kept(toy_alone):
    assert toy_alone[False][0].ema == ()


@pytest.mark.parametrize("mesh", ["mixed", "data"])
def test_an_evaluation_is_the_same_on_every_mesh(make_run, mesh):
    found = []
    for run in (make_run("alone"), make_run(mesh)):
        evaluate = step_lib.make_eval_step(run.task, run.layout)
        found.append(host(evaluate(run.init().variables, run.put(make_batch(0)))))
    assert_close(*found, atol=1e-5)
    assert found[1]["accuracy"].weight == pytest.approx(make_batch(0)["weight"].sum(), rel=1e-6)
