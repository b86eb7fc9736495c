"""The parameters that a table of specs yields."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxtrain import specs
from jaxtrain.parallel.layout import LayoutError, make_layout, make_mesh
from jaxtrain.types import Spec

TABLE = {
    "encoder": {
        "w": Spec((4, 8), ("embed", "mlp"), specs.fan_in(4)),
        "pos": Spec((6, 4), ("seq", "embed"), specs.truncated_normal(0.02)),
        "scale": Spec((4,), ("embed",), specs.ones),
    },
    "head": {
        "w": Spec((4, 10), ("embed", "vocab"), specs.fan_in(4), "bfloat16"),
        "b": Spec((10,), ("vocab",), specs.zeros),
    },
}


def make(table, layout, seed=0):
    shardings = jax.tree.map(lambda x: x.sharding, specs.abstract(table, layout))
    return jax.jit(lambda key: specs.materialise(table, key), out_shardings=shardings)(
        jax.random.key(seed)
    )


def assert_equal(left, right):
    jax.tree.map(
        lambda x, y: np.testing.assert_array_equal(np.asarray(x), np.asarray(y)), left, right
    )


@pytest.fixture(scope="module")
def alone():
    return make(TABLE, make_layout(make_mesh(1, 1, 1, devices=jax.devices()[:1]), {}))


def test_paths_and_count():
    assert specs.paths(TABLE) == ["encoder/pos", "encoder/scale", "encoder/w", "head/b", "head/w"]
    assert specs.paths(jax.tree.map(lambda s: 0, TABLE, is_leaf=specs.is_spec)) == specs.paths(
        TABLE
    )
    assert specs.count(TABLE) == 32 + 24 + 4 + 40 + 10


def test_initialisation_does_not_depend_on_the_mesh(alone):
    spread = make(TABLE, make_layout(make_mesh(2, 2, 2), {}))
    assert (
        len(spread["encoder"]["w"].sharding.device_set) == 8
        and not spread["encoder"]["w"].is_fully_replicated
    )
    assert_equal(alone, spread)


def test_initialisation_does_not_depend_on_the_rest_of_the_table(alone):
    table = {"head": dict(reversed(TABLE["head"].items())), "encoder": {"w": TABLE["encoder"]["w"]}}
    found = specs.materialise(table, jax.random.key(0))
    np.testing.assert_array_equal(found["head"]["w"], alone["head"]["w"])
    np.testing.assert_array_equal(found["encoder"]["w"], alone["encoder"]["w"])


def test_parameters_of_one_shape_differ_and_so_do_seeds():
    w = Spec((4, 8), ("embed", "mlp"), specs.fan_in(4))
    one, two = (specs.materialise({"a": w, "b": w}, jax.random.key(seed)) for seed in (0, 1))
    assert not np.array_equal(one["a"], one["b"])
    assert not np.array_equal(one["a"], two["a"])


def test_dtypes_and_shapes_are_the_tables(alone):
    assert alone["head"]["w"].dtype == jnp.bfloat16 and alone["encoder"]["w"].dtype == jnp.float32
    assert jax.tree.map(jnp.shape, alone) == jax.tree.map(
        lambda s: s.shape, TABLE, is_leaf=specs.is_spec
    )


@pytest.mark.parametrize(
    ("init", "std"), [(specs.truncated_normal(0.02), 0.02), (specs.fan_in(64), 1 / 8)]
)
def test_standard_deviation_is_the_one_asked_for(init, std):
    x = np.asarray(init(jax.random.key(3), (400, 1000), jnp.float32), np.float64)
    # The sample deviation of n draws is within 4 / sqrt(2 n) of the true one, except once in 16 000
    # times.
    assert abs(x.std() / std - 1) < 4 / np.sqrt(2 * x.size)
    assert abs(x.mean()) < 4 * std / np.sqrt(x.size)
    # the normal distribution is cut at two of its deviations
    assert 2 * std < np.abs(x).max() < 2.28 * std


@pytest.mark.parametrize(
    "other",
    [
        TABLE["encoder"]["w"]._replace(shape=(8, 4)),
        TABLE["encoder"]["w"]._replace(axes=("mlp", "embed")),
        TABLE["encoder"]["w"]._replace(dtype="bfloat16"),
    ],
)
def test_digest_changes_with_the_table(other):
    changed = {**TABLE, "encoder": {**TABLE["encoder"], "w": other}}
    assert specs.digest(changed) != specs.digest(TABLE)


def test_digest_changes_with_a_path_and_not_with_the_order():
    renamed = {"encoder2": TABLE["encoder"], "head": TABLE["head"]}
    assert specs.digest(renamed) != specs.digest(TABLE)
    assert specs.digest(dict(reversed(TABLE.items()))) == specs.digest(TABLE)


def test_a_parameter_that_does_not_fit_the_mesh_is_named_by_path():
    with pytest.raises(LayoutError, match="encoder/pos: dimension 'embed' of size 4"):
        specs.abstract(TABLE, make_layout(make_mesh(1, 8, 1), {}))
