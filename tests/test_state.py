"""The plan of a run's state, and the state that fits this plan."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxtrain import specs
from jaxtrain.config import Config, Optim
from jaxtrain.optim import make_optimizer
from jaxtrain.parallel.layout import LayoutError, make_layout, make_mesh
from jaxtrain.step import state, train_step
from jaxtrain.types import LossOut, Mean, Spec, Variables
from tests.support import xla
from tests.support.toy_task import FIELDS, TASK, TX


def make(sizes, *, ema=True, fields=FIELDS, **rules):
    layout = make_layout(
        make_mesh(*sizes, devices=jax.devices()[: np.prod(sizes)]), {"batch": "data", **rules}
    )
    return state.make_abstract(TASK, TX, layout, fields, batch=16, ema=ema)


@pytest.mark.parametrize("ema", [False, True])
@pytest.mark.parametrize("sizes", [(1, 1, 1), (2, 2, 2), (1, 8, 1), (4, 1, 2)])
def test_the_real_state_is_the_planned_one(sizes, ema):
    plan = make(sizes, ema=ema)
    real = state.init_state(TASK, TX, plan, jax.random.key(0))
    assert jax.tree.structure(real) == jax.tree.structure(plan.state)
    for path, x in jax.tree.leaves_with_path(
        jax.tree.map(lambda p, r: (p, r), plan.state, real), is_leaf=is_pair
    ):
        planned, found = x
        assert (planned.shape, planned.dtype, planned.sharding) == (
            found.shape,
            found.dtype,
            found.sharding,
        ), path


def is_pair(x):
    return isinstance(x, tuple) and len(x) == 2 and isinstance(x[0], jax.ShapeDtypeStruct)


@pytest.mark.parametrize("sizes", [(1, 1, 1), (2, 2, 2), (1, 8, 1)])
def test_bytes_per_device_are_those_that_a_device_holds(sizes):
    plan = make(sizes)
    real = state.init_state(TASK, TX, plan, jax.random.key(0))
    for device in (jax.devices()[0], jax.devices()[np.prod(sizes) - 1]):
        held = sum(
            s.data.nbytes
            for x in jax.tree.leaves(real)
            for s in x.addressable_shards
            if s.device == device
        )
        assert state.bytes_per_device(plan.state) == state.bytes_per_device(real) == held


def test_moments_live_where_their_parameter_does():
    plan = make((2, 2, 2))
    adam = next(s for s in plan.state.opt_state if isinstance(s, optax.ScaleByAdamState))
    for moments in (adam.mu, adam.nu, plan.state.ema):
        where = jax.tree.map(
            lambda m, p: (m.shape, m.sharding) == (p.shape, p.sharding),
            moments,
            plan.state.variables.params,
        )
        assert all(jax.tree.leaves(where))
    assert not adam.mu["body"]["w"].sharding.is_fully_replicated
    assert adam.count.sharding.is_fully_replicated and adam.count.dtype == jnp.int32


def test_a_new_state_is_at_step_zero_with_the_average_at_its_parameters():
    real = state.init_state(TASK, TX, make((2, 2, 2)), jax.random.key(0))
    assert real.step == 0 and real.step.dtype == jnp.int32
    jax.tree.map(np.testing.assert_array_equal, real.ema, real.variables.params)
    real.variables.params["body"]["w"].delete()
    # it has memory of its own: a donated state must not hold a buffer twice
    assert np.isfinite(real.ema["body"]["w"]).all()


def test_the_batch_has_what_the_task_reads_and_no_more():
    batch = make((2, 2, 2)).batch
    assert {name: (x.shape, x.dtype) for name, x in batch.items()} == {
        "x": ((16, 3), "f4"),
        "label": ((16,), "i4"),
    }
    assert batch["x"].sharding.shard_shape((16, 3)) == (8, 3)


def test_a_field_that_the_loader_does_not_give_is_named():
    with pytest.raises(ValueError, match=r"\['label'\].*gives \['unused', 'x'\]"):
        make((1, 1, 1), fields={k: v for k, v in FIELDS.items() if k != "label"})


def test_an_array_that_does_not_fit_the_mesh_is_named():
    with pytest.raises(LayoutError, match="body/w: dimension 'mlp' of size 6"):
        make((1, 1, 4))
    with pytest.raises(LayoutError, match=r"batch\['x'\]: dimension 'batch' of size 16"):
        layout = make_layout(make_mesh(3, 1, 1, devices=jax.devices()[:3]), {})
        state.make_abstract(
            TASK._replace(specs=TASK.specs._replace(model_state={})),
            TX,
            layout,
            FIELDS,
            batch=16,
            ema=False,
        )


@pytest.mark.parametrize(
    "optim", [Optim(name="adafactor"), Optim(moments="int8"), Optim(moments="bfloat16")]
)
@pytest.mark.parametrize("sizes", [(1, 1, 1), (2, 2, 2)])
def test_small_state_is_split_as_its_parameter_is(optim, sizes):
    specs_ = {
        "w": Spec((256, 512), ("embed", "mlp"), specs.fan_in(8)),
        "b": Spec((512,), ("mlp",), specs.zeros),
    }
    task = TASK._replace(specs=Variables(params=specs_))
    tx = make_optimizer(optim, specs_, steps=10)
    layout = make_layout(
        make_mesh(*sizes, devices=jax.devices()[: np.prod(sizes)]), {"batch": "data"}
    )
    plan = state.make_abstract(task, tx, layout, FIELDS, batch=16, ema=False)
    real = state.init_state(task, tx, plan, jax.random.key(0))
    for planned, found in zip(jax.tree.leaves(plan.state), jax.tree.leaves(real), strict=True):
        assert (planned.shape, planned.dtype, planned.sharding) == (
            found.shape,
            found.dtype,
            found.sharding,
        )
    whole = sum(x.nbytes for x in jax.tree.leaves(real.opt_state))
    assert state.bytes_per_device(plan.state.opt_state) < whole / min(sizes[1] * sizes[2], 2) + 4096


@pytest.mark.parametrize("sizes", [(1, 1, 1), (2, 2, 2)])
def test_an_offloaded_state_lives_in_host_memory_and_comes_over_for_the_update(sizes):
    """The numbers are the same as without offloading, and the moments are in host memory before and
    after."""
    table = {"w": Spec((8, 4), ("embed", None), specs.ones)}

    def loss(variables, batch, key):
        y = batch["x"] @ variables.params["w"][:3]
        return LossOut(Mean(jnp.square(y).sum(), jnp.float32(y.shape[0])), {})

    task = TASK._replace(specs=Variables(params=table), loss=loss, axes={"x": ("batch", None)})
    tx = make_optimizer(Optim(lr=0.1, schedule="constant"), table, steps=10)
    layout = make_layout(
        make_mesh(*sizes, devices=jax.devices()[: np.prod(sizes)]), {"batch": "data"}
    )
    rows = np.random.default_rng(0).normal(size=(16, 3)).astype("f4")
    found = []
    for offload in (False, True):
        plan = state.make_abstract(task, tx, layout, FIELDS, batch=16, ema=False, offload=offload)
        run = train_step.make_train_step(
            Config(optim=Optim(offload=offload)), layout, task, tx, plan
        )
        now = state.init_state(task, tx, plan, jax.random.key(0))
        for _ in range(2):
            now, _ = run(
                now,
                {"x": jax.device_put(rows, plan.batch["x"].sharding)},
                train_step.put_stop(layout, False),
            )
            kinds = {x.sharding.memory_kind for x in jax.tree.leaves(now.opt_state) if x.ndim}
            assert kinds == {"pinned_host" if offload else "device"}
        found.append(now.variables.params["w"])
    np.testing.assert_array_equal(*found)


def test_initial_values_do_not_depend_on_how_long_the_compiler_thinks(monkeypatch):
    """The values are compiled in less time than a step, to the same bits. With XLA of jax 0.12, the
    last bit may differ."""
    plan, key = make((2, 2, 2)), jax.random.key(3)
    # These are XLA's defaults, not those of the tests.
    usual = {
        "xla_backend_optimization_level": 3,
        **({"xla_cpu_use_fusion_emitters": True} if xla.OLD_EMITTERS else {}),
    }
    monkeypatch.setattr(state, "QUICK", usual | state.QUICK)
    quick = jax.device_get(state.init_state(TASK, TX, plan, key))
    monkeypatch.setattr(state, "QUICK", usual)
    rtol = 0 if xla.OLD_EMITTERS else 2e-7
    same = functools.partial(np.testing.assert_allclose, rtol=rtol, atol=0)
    jax.tree.map(same, quick, jax.device_get(state.init_state(TASK, TX, plan, key)))
