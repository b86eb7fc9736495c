"""The stack in 16 bits for GPUs is compared with the plain one, on a CPU."""

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxtrain import specs
from jaxtrain.nn import attention
from jaxtrain.parallel import layout, one_device
from jaxtrain.workloads.bird import half_stack, masked, vit
from tests.support import residuals, shapes

D, L, T, B = 64, 3, 17, 3
PLAIN = vit.Stack(embed=D, depth=L, heads=4, hidden=4 * D, unroll=1)
STACKS = {
    "gelu": PLAIN,
    "recomputed but for the attention": PLAIN._replace(remat="save attention"),
    "gated, norms and rotation of q and k, factors": PLAIN._replace(
        gated=True, qk_norm=True, layer_scale=0.5
    ),
}
H100 = layout.Devices("gpu", "9.0")


def shard_for(devices, **rules):
    """The shards of one device of a kind that need not be here, or of two along fsdp."""
    mesh = layout.abstract_mesh(1, 2 if rules else 1, 1, count=2 if rules else 1, what="a test")
    return layout.make_layout(mesh, rules, devices=devices).shard


def inputs(stack, t=T):
    """Random parameters, also in place of ones and zeros, tokens, and the result's cotangent."""
    rng = np.random.default_rng(0)

    def values(path, spec):
        name = path.split("/")[-1]
        size = spec.shape[1] ** -0.5 if name.startswith("w_") else 0.3
        return (("scale" in name) + size * rng.normal(size=spec.shape)).astype("f4")

    params = specs.map_specs(values, vit.stack_specs(stack))
    x, dy = (rng.normal(size=(B, t, D)).astype("f4") for _ in range(2))
    return params, x, dy


def turns_of(stack):
    angle = np.random.default_rng(1).normal(size=(1, T, 1, D // stack.heads // 2))
    return tuple(f(angle).astype("f4") for f in (np.cos, np.sin)) if stack.qk_norm else None


def results(run, stack):
    """The result of a stack, and the gradients of parameters and tokens, by name."""

    def both(params, x, dy):
        shard, turns = one_device.shard, turns_of(stack)
        y, pull = jax.vjp(lambda p, x: run(stack, p, x, shard, turns), params, x)
        grads, dx = pull(dy.astype(y.dtype))
        return {"y": y, "dx": dx, **grads}

    return jax.jit(both, compiler_options={"xla_backend_optimization_level": 0})(*inputs(stack))


def plain(stack, params, x, shard, turns):
    return vit.run_stack(stack, params, x, shard, turns=turns)


def distance(a, b):
    a, b = (np.asarray(x, "f8") for x in (a, b))
    return np.linalg.norm(a - b) / np.linalg.norm(b)


@pytest.mark.parametrize("name", STACKS)
def test_the_same_function_and_gradients(name):
    """In float32 the stacks differ by the order of sums. In 16 bits the new one is as far from
    float32 as the plain one."""
    stack = STACKS[name]
    exact = results(plain, stack)

    def errors(run, stack):
        return {name: distance(x, exact[name]) for name, x in results(run, stack).items()}

    wide = errors(half_stack.run_stack, stack)
    assert wide["y"] < 1e-6 and wide["dx"] < 1e-6 and max(wide.values()) < 2e-6, wide
    half = stack._replace(dtype="bfloat16")
    old, new = errors(plain, half), errors(half_stack.run_stack, half)
    assert max(new.values()) < 0.02 and sum(new.values()) < 1.3 * sum(old.values()), (old, new)


@pytest.mark.parametrize("activation", [vit.gelu, half_stack.gelu_by_tanh, half_stack.swiglu])
def test_an_activation_has_the_derivatives_of_its_definition(activation):
    rng = np.random.default_rng(0)
    n_inputs = 1 + (activation is half_stack.swiglu)
    *args, w, dy = (rng.normal(size=s).astype("f4") for s in [(9, 8)] * n_inputs + [(8, 4), (9, 4)])
    _, pull = jax.vjp(functools.partial(half_stack.activated_product, activation), tuple(args), w)
    _, expected = jax.vjp(lambda args, w: activation(*args) @ w, tuple(args), w)
    for a, b in zip(*(jax.tree.leaves(f(jnp.asarray(dy))) for f in (pull, expected)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_the_function_of_an_encoder_for_gpus(monkeypatch):
    """`vit.encode` and the decoder of masked patches take the stack for GPUs alone, by 16 bits."""
    calls = []
    monkeypatch.setattr(half_stack, "run_stack", lambda s, stack, x, *_: calls.append(s) or x)
    c = vit.Encoder(n_frames=64, n_mels=32, embed=32, depth=2, heads=4, dtype="bfloat16")
    params = specs.map_specs(
        lambda path, s: jax.ShapeDtypeStruct(s.shape, jnp.float32), vit.make_specs(c)
    )
    x = jax.ShapeDtypeStruct((2, 64, 32), jnp.float32)

    def trace(c, devices, **rules):
        calls.clear()
        shard = shard_for(devices, **rules)
        jax.eval_shape(lambda p, x: vit.encode(c, p, x, shard), params, x)
        return len(calls)

    assert trace(c, H100) == 1
    assert trace(replace(c, dtype="float32"), H100) == 0
    assert trace(c, layout.Devices("cpu")) == trace(c, layout.Devices("tpu")) == 0
    d = masked.Decoder(embed=32, depth=1, heads=4)
    assert half_stack.fits(d.stack(c), jnp.zeros((2, 9, 32)), shard_for(H100))
    split = shard_for(H100, batch="", seq="fsdp?")
    assert not half_stack.fits(d.stack(c), jnp.zeros((2, 10, 32)), split), "rows on two devices"


@pytest.mark.parametrize(
    ("b", "t", "expected"),
    [(2048, 257, 258), (2048, 256, 256), (1, 257, 264), (2, 257, 260), (6, 65, 68), (4, 1, 2)],
)
def test_rows_are_padded_once_to_what_products_and_attention_take(b, t, expected):
    assert half_stack.padded_length(b, t) == expected
    assert expected % half_stack.TOKENS == b * expected % half_stack.ROWS == 0


def test_loops_of_layers_are_unrolled_unless_a_number_is_set():
    params, x, _ = inputs(PLAIN)
    for unroll, is_loop in ((0, False), (1, True), (L, False)):
        stack = PLAIN._replace(unroll=unroll, dtype="bfloat16")
        jaxpr = jax.make_jaxpr(
            lambda p, x, s=stack: half_stack.run_stack(s, p, x, one_device.shard, None)
        )(params, x)
        [scan] = [e for e in residuals.equations(jaxpr.jaxpr) if e.primitive.name == "scan"]
        assert (scan.params["unroll"] == 1) == is_loop


def test_layers_keep_what_norms_attention_and_activations_read():
    """x twice, q, k, v, the result of attention in two shapes, and the input of GELU."""
    shard, stack = shard_for(H100), PLAIN._replace(dtype="bfloat16")
    params, x, _ = inputs(stack, t=16)

    def loss(params, x):
        return half_stack.run_stack(stack, params, x, shard, None).astype(jnp.float32).sum()

    jaxpr = jax.make_jaxpr(jax.grad(loss))(params, x).jaxpr
    forward = next(e for e in residuals.equations(jaxpr) if e.primitive.name == "scan")
    rows = [v.aval for v in forward.outvars if v.aval.size >= L * B * 16 * D]
    sizes = sorted((str(x.dtype), x.size // (L * B * 16)) for x in rows)
    assert sizes == [("bfloat16", D)] * 7 + [("bfloat16", 4 * D)]


def test_attention_sees_the_length_of_the_rows(monkeypatch):
    seen = []
    within = attention.within
    monkeypatch.setattr(
        attention,
        "within",
        lambda *a, **k: seen.append((a[1].shape, k["length"])) or within(*a, **k),
    )
    results(half_stack.run_stack, PLAIN)
    assert seen[0] == ((B, 24, 4, D // 4), T)


def test_arrays_have_the_dimensions_of_their_names(monkeypatch):
    checked = shapes.check([half_stack], monkeypatch)
    for stack in STACKS.values():
        results(half_stack.run_stack, stack)
    missed = {one.name for one in checked.values() if not one.was_called}
    # The parts of derivatives were given to JAX before.
    assert {name for name in missed if "_of_" not in name} == {"half_stack.fits"}
