"""The mixer's kernel for TPUs, by the interpreter against the formula."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxtrain.parallel import layout
from jaxtrain.parallel.layout import make_layout, make_mesh
from jaxtrain.workloads.trm import model, tpu_mixer


def arrays(b, t, d, n, dtype="float32"):
    rng = np.random.default_rng(0)
    shapes = [((t, 2, n), t), ((n, t), n), ((b, t, d), 1), ((b, t, d), 1)]
    return [jnp.asarray(rng.normal(size=s) * k**-0.5, dtype) for s, k in shapes]


def shard_on(data, fsdp=1, model=1):
    mesh = make_mesh(data, fsdp, model, devices=jax.devices()[: data * fsdp * model])
    return make_layout(mesh, {}).shard


def by_formula(w_up, w_down, x):
    gate, value = jnp.einsum("btd,tcn->cbnd", x, w_up)
    y = x + jnp.einsum("bnd,nt->btd", jax.nn.silu(gate) * value, w_down)
    return y / jnp.sqrt((y * y).mean(1, keepdims=True) + model.EPS)


def result_and_gradients(f, *args):
    @jax.jit
    def both(*args):
        *args, dz = args
        z, pull = jax.vjp(f, *args)
        return z, *pull(dz)

    return both(*args)


@pytest.mark.parametrize(
    ("sizes", "mesh"),
    [((6, 21, 128, 128), (1,)), ((4, 97, 128, 256), (1,)), ((8, 21, 128, 128), (2, 2))],
    ids=str,
)
def test_it_equals_the_formula_and_its_gradients(sizes, mesh):
    """On a mesh each device adds up its own rows' gradients of the matrices."""
    args = arrays(*sizes)
    shard = shard_on(*mesh)
    how = dict(eps=model.EPS, interpret=True)
    ours = result_and_gradients(lambda *a: tpu_mixer.mix(*a, shard, **how), *args)
    exact = result_and_gradients(by_formula, *args)
    for x, y in zip(ours, exact, strict=True):
        np.testing.assert_allclose(x, y, rtol=0, atol=2e-5 * float(jnp.abs(y).max()))


def test_no_row_reads_another():
    *matrices, x, _ = arrays(4, 21, 128, 128)
    how = dict(eps=model.EPS, interpret=True)
    z = tpu_mixer.mix(*matrices, x, shard_on(1), **how)
    poisoned = tpu_mixer.mix(*matrices, x.at[1:].set(1e6), shard_on(1), **how)
    np.testing.assert_array_equal(z[0], poisoned[0])


def test_sixteen_bits_are_as_near_to_the_formula_as_products_of_xla():
    args = arrays(4, 97, 128, 256)
    exact = result_and_gradients(by_formula, *args)
    narrow = [x.astype(jnp.bfloat16) for x in args]
    shard = shard_on(1)
    how = dict(eps=model.EPS, interpret=True)
    ours = result_and_gradients(lambda *a: tpu_mixer.mix(*a, shard, **how), *narrow)
    theirs = result_and_gradients(lambda *a: model.mix(*a, shard), *narrow)

    def error(x, y):
        return float(np.linalg.norm(np.asarray(x, "f4") - y) / np.linalg.norm(y))

    for ours_, theirs_, y in zip(ours, theirs, exact, strict=True):
        assert error(ours_, y) < 1.2 * error(theirs_, y)


def test_gradients_of_the_matrices_are_added_up_over_devices_before_they_are_rounded():
    args = arrays(16, 21, 128, 128)
    exact = result_and_gradients(by_formula, *args)[1:3]
    narrow = [x.astype(jnp.bfloat16) for x in args]

    def error(mesh):
        shard = shard_on(*mesh)
        how = dict(eps=model.EPS, interpret=True)
        found = result_and_gradients(lambda *a: tpu_mixer.mix(*a, shard, **how), *narrow)[1:3]
        pairs = zip(found, exact, strict=True)
        return max(np.linalg.norm(np.asarray(x, "f4") - y) / np.linalg.norm(y) for x, y in pairs)

    one = error((1,))
    for mesh in ((4,), (1, 4)):
        assert error(mesh) < 1.02 * one, "before: 1.05 times"


def test_it_is_for_16_bits_and_whole_widths_on_tpus():
    def fits(kind="TPU v5 lite", dtype="bfloat16", t=97, n=512, parts=1, d=512):
        mesh = layout.abstract_mesh(1, 1, parts, count=parts, what="a test")
        shard = make_layout(mesh, {}, devices=layout.devices_of(kind)).shard
        x = jax.ShapeDtypeStruct((8, t, d), jnp.dtype(dtype))
        return tpu_mixer.fits(x, jax.ShapeDtypeStruct((t, 2, n), x.dtype), shard)

    assert fits() and not fits("NVIDIA H100") and not fits("cpu")
    assert all(fits(kind) for kind in ("TPU v5", "TPU v6 lite", "TPU7x", "TPU v99"))
    assert fits("TPU v4") and fits(n=640) and not fits("TPU v4", n=640), "16 MiB of a core"
    assert not fits(dtype="float32") and not fits(n=64)
    assert not fits(parts=2), "the model axis splits the inner width"
    assert not fits(t=916, n=2560), "a maze of 30 × 30 takes more than the chip's own memory"


def test_a_slice_without_a_kernel_for_the_mixer_is_reported_once(caplog):
    mesh = layout.abstract_mesh(1, 1, 1, count=1, what="a test")
    shard = make_layout(mesh, {}, devices=layout.Devices("tpu")).shard
    shapes = ((97, 2, 64), (64, 97), (8, 97, 512))
    arrays = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes]
    with caplog.at_level("INFO", "jaxtrain"):
        for kernel in ("tokamax", "auto"):
            tpu_mixer.log_no_kernel.cache_clear()
            for _ in range(2):
                jax.eval_shape(lambda *a, k=kernel: model.mix(*a, shard, kernel=k), *arrays)
        jax.eval_shape(lambda *a: model.mix(*a, shard, kernel="xla"), *arrays)
    assert (
        caplog.messages
        == [
            "no kernel for TPUs mixes 97 tokens of 512 bfloat16 values with an inner width of 64 on"
            " this mesh: XLA's own products are used, which write gate and values"
        ]
        * 2
    )
