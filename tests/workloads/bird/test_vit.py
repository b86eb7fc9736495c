"""The encoder is compared with a plain one in numpy. The tests also cover its sizes, and the effect
of each option."""

import re
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxtrain import specs
from jaxtrain.config import Optim
from jaxtrain.optim import make_optimizer
from jaxtrain.optim.param_groups import BELOW_LAYERS
from jaxtrain.workloads.bird import vit

TINY = vit.Encoder(n_frames=64, n_mels=32, embed=32, depth=2, heads=4, dtype="float32")
FULL = replace(
    TINY,
    patch=(8, 16),
    n_registers=3,
    positions="rope",
    qk_norm=True,
    mlp="swiglu",
    layer_scale=0.5,
    patch_norm=True,
)


def quickly(f, *args):
    """Runs f(*args) with machine code that compiles quickly."""
    return jax.jit(f).lower(*args).compile({"xla_backend_optimization_level": 0})(*args)


def encode(c, params, x, **options):
    return quickly(lambda p, x: vit.encode(c, p, x, **options), params, x)


def params_of(c, seed=0):
    """Random parameters, also in place of initial ones and zeros."""
    table = vit.make_specs(c)
    rng = np.random.default_rng(seed)
    return specs.map_specs(
        lambda path, s: (("scale" in path) + 0.3 * rng.normal(size=s.shape)).astype("f4"), table
    )


def frames(c, n, seed=0):
    return np.random.default_rng(seed).normal(size=(n, c.n_frames, c.n_mels)).astype("f4")


def reference(c, params, x, visible=None):
    """Maps one spectrogram [F, W] to tokens [T, D] in float64, one head and one token after
    another."""
    p = jax.tree.map(lambda a: np.asarray(a, np.float64), params)

    def norm(z, scale, bias):
        return (z - z.mean()) / np.sqrt(z.var() + 1e-5) * scale + bias

    (f, w), columns = c.patch, c.n_mels // c.patch[1]
    tokens, places = [], []
    for i in range(c.n_patches) if visible is None else visible:
        row, column = divmod(int(i), columns)
        patch = x[row * f : row * f + f, column * w : column * w + w].astype(np.float64).ravel()
        level = 0.0
        if c.patch_norm:
            std = np.sqrt(patch.var() + 0.01)
            level = np.array([patch.mean(), np.log(std)]) @ p["w_patch_level"]
            patch = (patch - patch.mean()) / std
        token = patch @ p["w_patch"] + p["b_patch"] + level
        tokens.append(token + (p["pos"][i] if "pos" in p else 0))
        places.append((row, column))
    tokens = [*p.get("cls", ()), *tokens, *p.get("embed_registers", ())]
    places = [None] * c.n_cls + places + [None] * c.n_registers
    k = c.embed // c.heads

    def turned(z, place):
        """Rotated by the angles of its row in the first half of the pairs, and of its column in the
        second."""
        if c.positions != "rope" or place is None:
            return z
        half = k // 2
        f = vit.ROPE_BASE ** (-np.arange(0, half, 2) / half)
        angle = np.concatenate([place[0] * f, place[1] * f])
        a, b = z[:half], z[half:]
        return np.concatenate(
            [a * np.cos(angle) - b * np.sin(angle), b * np.cos(angle) + a * np.sin(angle)]
        )

    def gelu(z):
        return z / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (z + 0.044715 * z**3)))

    t = np.stack(tokens)
    for l in range(c.depth):
        b = {name: z[l] for name, z in p["blocks"].items()}
        y = np.stack([norm(z, b["scale_attention"], b["bias_attention"]) for z in t])
        out = np.zeros_like(t)
        for h in range(c.heads):
            q, key, v = (y @ b["w_qkv"][:, i, h] + b["b_qkv"][i, h] for i in range(3))
            if c.qk_norm:
                q = np.stack([norm(z, b["scale_q"], b["bias_q"]) for z in q])
                key = np.stack([norm(z, b["scale_k"], b["bias_k"]) for z in key])
            q, key = (
                np.stack([turned(z, place) for z, place in zip(zs, places, strict=True)])
                for zs in (q, key)
            )
            e = np.exp(q @ key.T / np.sqrt(k))
            out += e / e.sum(1, keepdims=True) @ v @ b["w_out"][h]
        t = t + (out + b["b_out"]) * b.get("scale_added_attention", 1)
        y = np.stack([norm(z, b["scale_mlp"], b["bias_mlp"]) for z in t])
        if c.mlp == "swiglu":
            gate = y @ b["w_gate"]
            out = (gate / (1 + np.exp(-gate)) * (y @ b["w_up"])) @ b["w_down"]
        else:
            out = gelu(y @ b["w_up"] + b["b_up"]) @ b["w_down"] + b["b_down"]
        t = t + out * b.get("scale_added_mlp", 1)
    return np.stack([norm(z, p["scale"], p["bias"]) for z in t])


@pytest.mark.parametrize(
    ("c", "partly"),
    [(TINY, False), (TINY, True), (FULL, False), (FULL, True), (replace(FULL, n_cls=0), False)],
    ids=["plain", "learned", "all", "visible", "without CLS"],
)
def test_equals_a_plain_encoder(c, partly):
    params, x = params_of(c), frames(c, 2)
    visible = np.array([[0, 3, 4, 7], [1, 2, 5, 6]]) if partly else None
    one_hot = jnp.asarray(np.eye(c.n_patches)[visible], jnp.float32) if partly else None
    found = encode(c, params, x, visible_bvn=one_hot)
    for i in range(2):
        expected = reference(c, params, x[i], None if visible is None else visible[i])
        np.testing.assert_allclose(found.cls[i], expected[: c.n_cls], rtol=0, atol=2e-4)
        np.testing.assert_allclose(
            found.patches[i], expected[c.n_cls : len(expected) - c.n_registers], rtol=0, atol=2e-4
        )


@pytest.mark.parametrize(("preset", "expected"), [("s", 21_491_712), ("b", 85_450_752)])
def test_the_published_number_of_parameters(preset, expected):
    assert specs.count(vit.make_specs(vit.Encoder(preset=preset))) == expected


@pytest.mark.parametrize("preset", vit.PRESETS)
@pytest.mark.parametrize("patch", [(16, 16), (8, 32), (4, 64)])
def test_parameters_by_arithmetic_and_256_patches_of_256_values(preset, patch):
    plain = vit.Encoder(preset=preset, patch=patch)
    d, l, k = plain.embed, plain.depth, plain.embed // plain.heads
    assert plain.n_patches == 256 and plain.patch_size == 256
    block = 2 * 2 * d + d * 3 * d + 3 * d + d * d + d + 2 * 4 * d * d + 5 * d
    rest = 256 * d + d + 256 * d + d + 2 * d
    assert specs.count(vit.make_specs(plain)) == rest + l * block
    rich = replace(
        plain,
        n_registers=4,
        positions="rope",
        qk_norm=True,
        mlp="swiglu",
        layer_scale=1e-4,
    )
    hidden = int(2 / 3 * 4 * d)
    block = 2 * 2 * d + 3 * d * d + 3 * d + d * d + d + 3 * d * hidden + 4 * k + 2 * d
    assert specs.count(vit.make_specs(rich)) == 256 * d + d + 5 * d + 2 * d + l * block


def test_an_encoder_without_a_class_token_has_256_places():
    c = vit.Encoder(n_cls=0)
    assert c.n_tokens == 256 == vit.Encoder().n_tokens - 1 and not list(c.validate())
    assert "cls" not in vit.make_specs(c)
    assert dict(vit.Encoder(n_cls=2).validate()).keys() == {"n_cls"}


def test_explicit_sizes_override_a_preset():
    c = vit.Encoder(preset="b", depth=3)
    assert (c.embed, c.depth, c.heads) == (768, 3, 12)


def test_nothing_reads_registers_and_they_are_read_by_layers():
    c = replace(TINY, n_registers=2)
    params, x = params_of(c), frames(c, 1)
    one = encode(c, params, x)
    other = encode(c, {**params, "embed_registers": -params["embed_registers"]}, x)
    assert one.patches.shape == (1, c.n_patches, 32) and one.cls.shape == (1, 1, 32)
    assert float(jnp.abs(one.patches - other.patches).max()) > 1e-3


def test_patches_are_cut_row_by_row_in_time():
    c = vit.Encoder(n_frames=4, n_mels=6, patch=(2, 3))
    x = np.arange(24).reshape(1, 4, 6)
    expected = [x[0, i : i + 2, j : j + 3].ravel() for i in (0, 2) for j in (0, 3)]
    np.testing.assert_array_equal(vit.patchify(c, jnp.asarray(x))[0], expected)


def test_recomputing_layers_changes_no_gradient():
    params, x = params_of(FULL), frames(FULL, 2)
    grads = [
        quickly(jax.grad(lambda p, c=c: (vit.encode(c, p, x).patches ** 2).sum()), params)
        for c in (FULL, replace(FULL, remat="save attention,mlp"))
    ]
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-3), *grads)


def test_half_precision_keeps_norms_in_float32():
    found, exact = (
        encode(replace(FULL, dtype=name), params_of(FULL), frames(FULL, 2))
        for name in ("bfloat16", "float32")
    )
    assert found.cls.dtype == found.patches.dtype == jnp.float32
    assert 1e-4 < float(jnp.abs(found.cls - exact.cls).mean()) < 0.1


def test_every_parameter_has_its_place_in_the_optimizer():
    """Only matrices decay, parameters below the layers have the rate of the lowest layer, and each
    layer's matrices use Muon."""
    table = vit.make_specs(replace(FULL, positions="learned"))
    for name in ("adamw", "muon"):
        make_optimizer(Optim(name=name, layer_decay=0.75), table, steps=2)
    below = [
        path for path in specs.paths(table) if "/" not in path and path not in ("scale", "bias")
    ]
    assert below and all(re.search(BELOW_LAYERS, path) for path in below)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("patch", (16, 24)),
        ("patch", (0, 16)),
        ("heads", 5),
        ("dtype", "float16"),
        ("embed", -1),
    ]
    + [
        ("preset", "xl"),
        ("mlp", "relu"),
        ("positions", "none"),
        ("remat", "all"),
        ("n_registers", -1),
    ],
)
def test_an_invalid_model_names_the_field(field, value):
    problems = dict(replace(TINY, **{field: value}).validate())
    assert field in problems and str(value) in problems[field]
    assert not list(TINY.validate()) and not list(FULL.validate())


def test_rope_wants_heads_of_a_multiple_of_four():
    assert "positions" in dict(replace(TINY, embed=24, positions="rope").validate())
