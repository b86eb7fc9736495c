"""Optimizers and schedules that a config names as module:factory are trained on meshes, saved and
resumed."""

import functools
import sys
import types
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest

from jaxtrain import config as config_lib
from jaxtrain.assembly import assemble
from jaxtrain.checkpoint import Checkpointer, History
from jaxtrain.config import Group, Optim, factories
from jaxtrain.optim import OptimError, learning_rates, make_optimizer
from jaxtrain.parallel.layout import LayoutError, make_mesh
from jaxtrain.specs import fan_in, zeros
from jaxtrain.step import state as state_lib
from jaxtrain.step import train_step as step_lib
from jaxtrain.types import LossOut, Mean, Spec, Task, Variables
from loaders.base import Field

BATCH = 16
FIELDS = {"x": Field((16,), np.dtype("f4")), "weight": Field((), np.dtype("f4"))}
DATA = {"position": 0, "fingerprint": "a"}
TABLE = {
    "layer": {"w": Spec((16, 32), ("embed", "mlp"), fan_in(16)), "b": Spec((32,), ("mlp",), zeros)},
    "head": {"w": Spec((32, 16), ("mlp", "embed"), fan_in(32))},
}
MESHES = {"data": (8, 1, 1), "fsdp": (1, 8, 1), "model": (1, 1, 8)}
NAMES = {
    "adamw": Optim(
        name="optax:adamw", arguments={"b2": 0.95, "weight_decay": 0.1}, lr=0.01, warmup=2
    ),
    "muon": Optim(
        name="optax.contrib:muon",
        arguments={"beta": 0.9, "ns_coeffs": [3.4445, -4.775, 2.0315]},
        lr=0.01,
    ),
    "schedule_free": Optim(
        name="optax.contrib:schedule_free_adamw", schedule="constant", lr=0.01, warmup=2
    ),
    "noisy_sgd": Optim(name="optax:noisy_sgd", arguments={"eta": 0.1}, lr=0.01),
}
OPTAX = {
    "adamw": lambda rate: optax.adamw(rate, b2=0.95, weight_decay=0.1),
    "muon": lambda rate: optax.contrib.muon(rate, beta=0.9),
    "schedule_free": optax.contrib.schedule_free_adamw,
    "noisy_sgd": lambda rate: optax.noisy_sgd(
        rate, 0.1, **factories.with_key("optax:noisy_sgd", {}, 0)
    ),
}


def loss(variables, batch, key):
    p = variables.params
    y = jnp.tanh(batch["x"] @ p["layer"]["w"] + p["layer"]["b"][None]) @ p["head"]["w"]
    each = jnp.square(y - batch["x"][:, ::-1]).sum(1)
    return LossOut(Mean((each * batch["weight"]).sum(), batch["weight"].sum()), {})


TASK = Task(
    Variables(TABLE),
    loss,
    lambda variables, batch: {},
    {"x": ("batch", None), "weight": ("batch",)},
    flops=0,
)


def own(monkeypatch, **functions):
    """Writes a user's module with these functions."""
    module = types.ModuleType("own_optim")
    vars(module).update(functions)
    monkeypatch.setitem(sys.modules, "own_optim", module)


class Run:
    """The toy under an optimizer on a mesh."""

    def __init__(self, optim, sizes):
        train = config_lib.Train(steps=10, batch=BATCH)
        config = config_lib.Config(optim=optim, train=train, metrics=config_lib.Metrics(every=1))
        mesh = make_mesh(*sizes, devices=jax.devices()[: np.prod(sizes)])
        self.made = assemble(config, mesh, make_task=lambda *_: TASK, fields=FIELDS)
        self.step = (
            self.made.trace(None)
            .lower()
            .compile(compiler_options={"xla_backend_optimization_level": 0})
        )

    def init(self):
        return state_lib.init_state(TASK, self.made.tx, self.made.abstract, jax.random.key(0))

    def take(self, state, *seeds):
        for seed in seeds:
            rows = batch_of(seed)
            batch = {
                name: jax.device_put(rows[name], x.sharding)
                for name, x in self.made.abstract.batch.items()
            }
            state, _ = self.step(state, batch, step_lib.put_stop(self.made.layout, False))
        return state


def batch_of(seed):
    rng = np.random.default_rng(seed)
    return {
        "x": rng.normal(size=(BATCH, 16)).astype("f4"),
        "weight": rng.random(BATCH).astype("f4"),
    }


def checkpointer(workdir):
    return Checkpointer(config_lib.Config(workdir=str(workdir)), TASK)


def bits(tree):
    return {
        jax.tree_util.keystr(path): np.asarray(x).tobytes()
        for path, x in jax.tree.leaves_with_path(tree)
    }


MATRIX = [(name, mesh) for name in NAMES for mesh in MESHES]
QUICK = {
    ("adamw", "data"),
    ("muon", "fsdp"),
    ("schedule_free", "model"),
    ("noisy_sgd", "fsdp"),
}


@pytest.mark.parametrize(
    ("name", "mesh"),
    [pytest.param(*pair, marks=() if pair in QUICK else pytest.mark.slow) for pair in MATRIX],
)
def test_an_optimizer_of_optax_trains_on_a_mesh_and_resumes_bit_for_bit(name, mesh, tmp_path):
    """Parameters follow optax's own loop on one device, and the optimizer state is split like its
    parameters."""
    run = Run(NAMES[name], MESHES[mesh])
    state = run.take(run.init(), 0, 1)
    for planned, found in zip(
        jax.tree.leaves(run.made.abstract.state), jax.tree.leaves(state), strict=True
    ):
        assert (planned.shape, planned.dtype, planned.sharding) == (
            found.shape,
            found.dtype,
            found.sharding,
        )
    split = [x for x in jax.tree.leaves(state.opt_state) if x.size >= 512]
    assert bool(split) == (name != "noisy_sgd")  # which keeps a key alone
    for x in split:
        assert (x.sharding.shard_shape(x.shape) != x.shape) == (mesh != "data")
    writer = checkpointer(tmp_path)
    writer.save(2, state, DATA, History())
    writer.close()
    last = bits(run.take(state, 2, 3))

    again = Run(NAMES[name], MESHES[mesh])
    reader = checkpointer(tmp_path)
    restored = reader.restore(again.made.abstract, DATA)
    reader.close()
    assert restored.step == 2
    resumed = again.take(restored.state, 2, 3)
    assert bits(resumed) == last

    expected = by_optax(name, run.init().variables.params, 4)
    close = functools.partial(np.testing.assert_allclose, rtol=1e-3, atol=1e-5)
    jax.tree.map(close, resumed.variables.params, expected)


def by_optax(name, params, n):
    """Parameters after n steps of optax's transformation behind a clip, on one device."""
    params = jax.device_get(params)
    rates = jnp.asarray(learning_rates(NAMES[name], 10, np.arange(10)))
    tx = optax.chain(optax.clip_by_global_norm(1.0), OPTAX[name](lambda count: rates[count]))
    state = tx.init(params)
    for seed in range(n):

        def mean(params, seed=seed):
            out = loss(Variables(params), batch_of(seed), None).loss
            return out.total / out.weight

        updates, state = tx.update(jax.grad(mean)(params), state, params)
        params = optax.apply_updates(params, updates)
    return params


def updated(optim, grads, n=1, table=TABLE):
    """Parameters, which begin as ones, after n updates with the same gradients, and the state."""
    tx = make_optimizer(optim, table, steps=10)
    params = jax.tree.map(lambda s: jnp.ones(s.shape), table, is_leaf=lambda x: isinstance(x, Spec))
    state = tx.init(params)
    for _ in range(n):
        updates, state = tx.update(grads, state, params, sparse_rows={})
        params = optax.apply_updates(params, updates)
    return params, state


GRADS = jax.tree.map(lambda s: jnp.ones(s.shape), TABLE, is_leaf=lambda x: isinstance(x, Spec))


def test_our_schedule_and_clip_apply():
    optim = Optim(name="optax:sgd", lr=0.5, schedule="constant", warmup=2, lr_init=0.5, clip=1.0)
    found, _ = updated(optim, GRADS, n=2)
    step = 1 / np.sqrt(2 * 16 * 32 + 32)  # of a gradient of ones, clipped to a norm of 1
    np.testing.assert_allclose(found["head"]["w"], 1 - step * (0.25 + 0.375), rtol=1e-5)
    np.testing.assert_allclose(learning_rates(optim, 10, np.arange(3)), [0.25, 0.375, 0.5])


def test_a_frozen_group_is_untouched_and_has_no_state():
    optim = Optim(
        name="optax:adamw",
        arguments={"weight_decay": 0.5},
        lr=0.1,
        groups=(Group("^layer/", freeze=True),),
    )
    found, state = updated(optim, GRADS)
    assert (found["layer"]["w"] == 1).all() and (found["layer"]["b"] == 1).all()
    assert (found["head"]["w"] != 1).all()
    assert sum(x.size for x in jax.tree.leaves(state) if x.ndim) == 2 * 32 * 16


def test_masters_work_under_any_optimizer():
    table = {"w": Spec((4, 4), ("embed", "mlp"), zeros, "bfloat16")}
    tx = make_optimizer(
        Optim(name="optax:sgd", lr=1e-5, schedule="constant", clip=0.0, masters=True),
        table,
        steps=600,
    )
    params = {"w": jnp.ones((4, 4), jnp.bfloat16)}
    state = tx.init(params)
    for _ in range(3):
        _, state = tx.update(params, state, params, sparse_rows={})
    np.testing.assert_allclose(state.masters["w"], 1 - 3e-5, rtol=1e-6)


def test_a_users_schedule_gives_the_learning_rates(monkeypatch):
    own(
        monkeypatch,
        falling=lambda steps, learning_rate, low=0.0: (
            lambda step: learning_rate * (1 - step / steps) + low
        ),
    )
    optim = Optim(
        name="sign_sgd",
        lr=0.5,
        schedule="own_optim:falling",
        schedule_arguments={"low": 0.25},
        clip=0.0,
    )
    optim = replace(optim, weight_decay=0.0)
    np.testing.assert_allclose(
        learning_rates(optim, 10, np.arange(3)), [0.75, 0.7, 0.65], rtol=1e-6
    )
    for name in ("sign_sgd", "optax:sgd"):
        found, _ = updated(replace(optim, name=name), GRADS, n=2)
        np.testing.assert_allclose(found["head"]["w"], 1 - 0.75 - 0.7, atol=1e-6)


@pytest.mark.parametrize("at", [2, "2"])  # "2": as config.json has it
def test_a_schedule_of_optax_may_have_steps_for_keys(at):
    arguments = {"init_value": 0.5, "boundaries_and_scales": {at: 0.1}}
    optim = Optim(schedule="optax:piecewise_constant_schedule", schedule_arguments=arguments)
    np.testing.assert_allclose(
        learning_rates(optim, 10, np.arange(4)), [0.5, 0.5, 0.05, 0.05], rtol=1e-6
    )


def test_an_optimizer_that_takes_no_learning_rate_has_its_own(monkeypatch):
    own(monkeypatch, fixed=lambda: optax.sgd(0.25))
    optim = Optim(name="own_optim:fixed", clip=0.0)
    assert learning_rates(optim, 10, np.arange(3)) is None
    np.testing.assert_allclose(updated(optim, GRADS)[0]["head"]["w"], 0.75)


def failing(grads, state, params=None):
    raise RuntimeError("no second moment")


CONSTANT = optax.GradientTransformation(
    lambda params: (), lambda grads, state, params=None: (grads, state)
)


def with_noise(grads, state, params=None):
    """Draw random numbers that no state has."""
    scale = np.random.default_rng().random()
    return jax.tree.map(lambda g: g * scale, grads), state


CANNOT = {
    "is another function each time that it is traced": CONSTANT._replace(update=with_noise),
    "cannot update these parameters: RuntimeError: no second moment": CONSTANT._replace(
        update=failing
    ),
    "cannot update these parameters: TypeError: .*'value'": optax.polyak_sgd(),
    r"cannot update these parameters: ValueError: its update of \S+ is of shape": CONSTANT._replace(
        update=lambda grads, state, params: (jax.tree.map(jnp.sum, grads), state)
    ),
    r"changes its state '2' from \(\(2,\), 'float32'\) to \(\(3,\), 'float32'\)": CONSTANT._replace(
        init=lambda params: jnp.zeros(2), update=lambda grads, state, params: (grads, jnp.zeros(3))
    ),
}


@pytest.mark.parametrize("told", CANNOT)
def test_an_optimizer_that_cannot_update_is_named(monkeypatch, told):
    own(monkeypatch, factory=lambda: CANNOT[told])
    with pytest.raises(OptimError, match=f"optim.name='own_optim:factory' {told}"):
        make_optimizer(Optim(name="own_optim:factory"), TABLE, steps=10)


def test_the_seed_of_the_run_decides_an_optimizers_draws():
    optim = NAMES["noisy_sgd"]
    first, again, other = (
        make_optimizer(optim, TABLE, steps=10, seed=seed).init({}) for seed in (1, 1, 2)
    )
    assert bits(first) == bits(again) != bits(other)
    own_key = replace(optim, arguments={"key": 5})
    state = make_optimizer(own_key, TABLE, steps=10, seed=1).init({})
    keys = [x for x in jax.tree.leaves(state) if x.dtype == jnp.uint32]
    np.testing.assert_array_equal(keys, [jax.random.key_data(jax.random.key(5))])


def flat(params):
    """Moments without any dimension of a parameter."""
    return jax.tree.map(lambda p: jnp.zeros(p.size), params)


def test_a_state_that_a_mesh_cannot_split_is_named_with_its_parameter(monkeypatch):
    states = {
        "flat": flat,
        "one": lambda params: jnp.zeros(10_000),
        "rows": lambda params: {
            "of": jax.tree.map(lambda p: p.mean(0), params),
            "key": jnp.zeros(2, jnp.uint32),
        },
        "memory": lambda params: jax.tree.map(lambda p: jnp.zeros((5, *p.shape)), params),
    }
    own(
        monkeypatch,
        **{name: lambda init=init: CONSTANT._replace(init=init) for name, init in states.items()},
    )
    table = {"layer": {"w": Spec((128, 256), ("embed", "mlp"), zeros)}}
    task = TASK._replace(specs=Variables(table))

    def planned(name, sizes):
        config = config_lib.Config(
            optim=Optim(name=f"own_optim:{name}"), train=config_lib.Train(batch=BATCH)
        )
        made = assemble(config, make_mesh(*sizes), make_task=lambda *_: task, fields=FIELDS)
        return [x for x in jax.tree.leaves(made.abstract.state.opt_state) if x.ndim]

    for sizes in ((1, 8, 1), (1, 1, 8)):
        with pytest.raises(
            LayoutError,
            match=r"state '2/layer/w' of shape \(32768,\) belongs to parameter 'layer/w' of shape",
        ):
            planned("flat", sizes)
        with pytest.raises(
            LayoutError, match=r"state '2' of shape \(10000,\) belongs to no parameter"
        ):
            planned("one", sizes)
    assert [
        x.sharding.is_fully_replicated
        for x in (*planned("flat", (8, 1, 1)), *planned("one", (8, 1, 1)))
    ] == [True, True]
    key, row = planned("rows", (1, 2, 4))
    assert key.sharding.is_fully_replicated and row.sharding.shard_shape((256,)) == (64,)
    (memory,) = planned("memory", (1, 2, 4))
    assert memory.sharding.shard_shape(memory.shape) == (5, 64, 64)
