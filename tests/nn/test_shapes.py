"""The shapes of nn/'s functions, checked by jaxtyping against the suffixes of their names."""

import functools
import importlib
import inspect
import pkgutil
import sys
from dataclasses import replace
from unittest import mock

import jax
import jax.numpy as jnp
import pytest

from jaxtrain import nn, specs
from jaxtrain.config import Lora
from jaxtrain.nn import batch_norm, lora, ring, sampling, transformer
from jaxtrain.parallel.layout import make_layout, make_mesh
from jaxtrain.types import LossOut, Mean, Task, Variables
from tests.support import shapes, tokamax_package

MODULES = [
    importlib.import_module(f"{nn.__name__}.{found.name}")
    for found in pkgutil.iter_modules(nn.__path__)
]
RESULTS = {
    "attention.attention": "b t h k",
    "attention.masked": "b t h k",
    "attention.within": "b t h k",
    "attention.blocks_of": "",
    "attention.choose": "",
    "attention.visible": "t s",
    "batch_norm.member": "b g",
    "attention.refusal_of_cudnn": "",
    "cudnn.bounds": "",
    "cudnn.fused": "b t h k",
    "cudnn.packed": "b t h k",
    "cpu.heads_first": "b t h k",
    "dropout.attention": "b t h k",
    "layers.lookup": "b t d",
    "layers.rotate": "b t h k",
    "pair_blocks.pair_blocks": "b t h k",
    "ring.attention": "b t h k",
    "ring.whole": "b t h k",
    "sampling.choose": "",
    "short.short": "b t h k",
    "splash.splash": "b t h k",
    "tokamax_attention.attend": "b t h k",
    "tokamax_attention.ranges": "",
    "transformer.decode": "b t d",
    "transformer.embed": "b t d",
    "transformer.feed_forward": "b t d",
    "transformer.head": "v d",
}
# The dimensions of these functions' arrays have no letters: any shape is allowed.
ANY = {
    "cpu.product",
    "cpu.scaled",
    "cpu.spread",
    "cpu.update_in_place",
    "layers.biases",
    "layers.gelu",
    "layers.layer_norm",
    "layers.product",
    "layers.product_in_float32",
    "layers.project",
    "layers.project_each",
    "layers.rms_norm",
    "layers.scaled",
    "layers.spread",
    "remat.name",
    "transformer.norm",
    "transformer.stacked",
    "transformer.whole",
}


@pytest.fixture
def checked(monkeypatch):
    """Replaces every function of nn/ with arrays by a checked one, in all of its modules."""
    return shapes.check(MODULES, monkeypatch, RESULTS)


B, T, V = 8, 128, 24
DECODER = transformer.Decoder(
    embed=32, depth=2, heads=4, kv_heads=2, head_dim=64, mlp=48, context=T, dtype="float32"
)
GPT = replace(
    DECODER,
    kv_heads=4,
    norm="layer",
    activation="gelu",
    positions="learned",
    bias=True,
    qkv_bias=True,
    tied=True,
)


def shard_on(data, fsdp, model, **rules):
    devices = jax.devices()[: data * fsdp * model]
    return make_layout(make_mesh(data, fsdp, model, devices=devices), rules).shard


def arrays(*sizes, dtype="float32"):
    return [jax.ShapeDtypeStruct(size, dtype) for size in sizes]


def params_of(c):
    return specs.map_specs(
        lambda path, s: jax.ShapeDtypeStruct(s.shape, s.dtype), transformer.decoder_specs(c, V)
    )


def call_everything():
    """Models and kernels are traced. Nothing is computed."""
    shard = shard_on(1, 1, 1)
    tokens, position, segments = arrays((B, T), (B, T), (B, T), dtype="int32")
    [weight] = arrays((B, T))
    for c in (DECODER, replace(DECODER, dtype="bfloat16"), GPT):

        def loss(params, tokens, position, segments, weight, c=c):
            batch = {"tokens": tokens, "positions": position, "segments": segments}
            x_btd = transformer.decode(c, params, batch, shard)
            head = transformer.head(c, params)
            return nn.cross_entropy.cross_entropy(x_btd, head, tokens, weight, shard).loss

        jax.eval_shape(jax.grad(loss), params_of(c), tokens, position, segments, weight)

    prompt, length = arrays((B, 5), (B,), dtype="int32")
    key = jax.eval_shape(lambda: jax.random.key(0))
    generate = functools.partial(sampling.generate, n_new=3)
    jax.eval_shape(
        lambda p, x, n, key: generate(DECODER, p, x, n, key, shard),
        params_of(DECODER),
        prompt,
        length,
        key,
    )

    q, k, v = arrays((B, T, 4, 64), (B, T, 2, 64), (B, T, 2, 64))
    how = dict(causal=True, segments_bt=jnp.ones((B, T), jnp.int32))
    jax.eval_shape(lambda *x: nn.attention.attention(*x, causal=True), q, k, v)
    jax.eval_shape(lambda *x: nn.ring.whole(*x, **how, window=0, keep=None), q, k, v)
    alone = dict(causal=True, window=0, interpret=True)
    nn.attention.blocks_of(how["segments_bt"], shard, 64, causal=True, window=0)
    jax.eval_shape(lambda q: nn.short.short(q, q, q, **alone), q)
    for f in (nn.splash.splash, nn.pair_blocks.pair_blocks):
        jax.eval_shape(lambda *x, f=f: f(*x, **how, window=0, interpret=True), q, k, v)
    jax.eval_shape(
        lambda *x: nn.cudnn.fused(*x, causal=True, window=0, implementation="xla"), q, k, v
    )
    mask = jnp.ones((1, T, T), bool)

    def dropped(q, k, v, row, key):
        def drop(weights):
            return nn.dropout.drop(weights, 0.5, key, row)

        return nn.dropout.attention(shard, q, k, v, mask, drop)

    jax.eval_shape(dropped, q, k, v, length, key)
    masks = nn.attention.Masks(causal=True, packed=True, documents=3)
    nn.attention.refusal_of_cudnn(jnp.zeros((1, T, 4, 64)), ("gpu", "9.0"), masks)
    half = arrays(q.shape, k.shape, v.shape, dtype="bfloat16")
    documents = dict(documents=3, causal=True, window=0, capability="9.0")
    jax.eval_shape(lambda *x: nn.cudnn.packed(*x, **documents), *half, segments)
    with mock.patch.dict(sys.modules, tokamax_package.modules()):
        settings = nn.tokamax_attention.Settings(True, 0, "9.0", None)
        attend = functools.partial(nn.tokamax_attention.attend, settings)
        jax.eval_shape(jax.grad(lambda *x: attend(*x).sum()), q, k, v, segments)
    split = shard_on(1, 8, 1, batch="data", seq="fsdp")
    jax.eval_shape(lambda *x: ring.attention(split, *x, None, causal=True, window=0), q, k, v)

    def normed(x, scale, row):
        member = batch_norm.member(row, 2, B)
        running = {"mean": scale, "var": scale}
        return batch_norm.batch_norm(x, scale, scale, running, member, momentum=0.1, eps=1e-5)

    jax.eval_shape(normed, *arrays((B, 6), (6,)), *arrays((B,), dtype="int32"))
    adapters = Lora(rank=2, adapt="^blocks/w_", train="scale", freeze="embed|w_head", alpha=4)
    table = transformer.decoder_specs(DECODER, V)
    low, full = jax.tree.map(
        lambda s: jax.ShapeDtypeStruct(s.shape, "float32"),
        _split(adapters, table),
        is_leaf=specs.is_spec,
    )

    def adapted(params, frozen, tokens, position):
        whole = lora.combine(adapters, table, Variables(params, frozen)).params
        batch = {"tokens": tokens, "positions": position}
        return transformer.decode(DECODER, whole, batch, shard)

    jax.eval_shape(adapted, low, full, tokens, position)


def _split(adapters, table):
    task = Task(Variables(table), lambda *_: LossOut(Mean(0, 0), {}), lambda *_: {}, {}, flops=0)
    found = lora.adapt(task, adapters).specs
    return found.params, found.frozen


def test_arrays_have_the_dimensions_of_their_names(checked):
    call_everything()
    assert {
        name for name, one in checked.items() if not one.was_called and "._" not in name
    } == set()


def test_every_public_function_of_arrays_is_checked(checked):
    """A function is in `ANY` if its parameters are arrays without letters."""
    unchecked = set()
    for module in MODULES:
        for name, function in vars(module).items():
            own = getattr(function, "__module__", "") == module.__name__ and not name.startswith(
                "_"
            )
            if own and inspect.isfunction(function) and "Array" in str(inspect.signature(function)):
                unchecked.add(f"{module.__name__.rpartition('.')[2]}.{name}")
    assert unchecked == ANY


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("cpu.heads_first", [(B, T, 4, 8), (B, T, 4, 8), (B, T, 4, 6), (1, T, T)]),
        ("attention.same_segment", [(B, T), (B + 1, T)]),
    ],
)
def test_another_shape_is_an_error(checked, name, sizes):
    with pytest.raises(AssertionError, match=name):
        jax.eval_shape(checked[name], *arrays(*sizes))
