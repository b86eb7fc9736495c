"""A vision transformer over log-mel spectrograms: the encoder, and stacks of its blocks.

Pre-norm (Dosovitskiy et al. 2021). A spectrogram [time, mel] is cut into patches, rows first. The
sequence is [CLS …, patches …, registers …]. Registers (Darcet et al. 2024) are tokens that nothing
reads. Positions are learned and added to the patches, or rotary along both axes of the grid (Heo et
al. 2024), which CLS and registers are spared.

Only numpy and JAX are needed to compute with it, so that an exported encoder runs anywhere.

Shapes: B batch, F frames, W mels, N patches, V visible patches, P values in a patch, T tokens, D
embed, H heads, K head dimension, M mlp, L layers.
"""

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from jaxtrain.nn import attention, remat
from jaxtrain.nn.layers import gelu, layer_norm, product, rotate, scaled, spread
from jaxtrain.parallel import one_device
from jaxtrain.specs import fan_in, ones, truncated_normal, zeros
from jaxtrain.types import Array, Key, PyTree, Shard, Spec
from loaders.io import checks

EPS = 1e-5  # of the layer norms, if no config says otherwise
SAVED = ("attention", "mlp")  # activations that remat may keep
EXPORTED = {"F32": np.dtype("<f4"), "F16": np.dtype("<f2"), "BF16": np.dtype(ml_dtypes.bfloat16)}
EXACT = jax.lax.Precision.HIGHEST

# name -> embed, depth, heads (Touvron et al. 2021, Dosovitskiy et al. 2021)
PRESETS = {
    "ti": (192, 12, 3),
    "s": (384, 12, 6),
    "b": (768, 12, 12),
    "l": (1024, 24, 16),
    "h": (1280, 32, 16),
}
CHOICES: dict[str, Iterable[str]] = {
    "preset": PRESETS,
    "dtype": ("float32", "bfloat16"),
    "positions": ("learned", "rope"),
    "mlp": ("gelu", "gelu_exact", "swiglu"),
    "norm": ("tokens", "pooled"),
}


@dataclass(frozen=True)
class Encoder(checks.Section):
    """ViT-S by default."""

    on_resume = checks.OnResume(
        free=("preset", "remat", "unroll"),
        state=(
            "n_frames",
            "n_mels",
            "patch",
            "embed",
            "depth",
            "heads",
            "mlp_ratio",
            "mlp",
            "n_cls",
            "n_registers",
        ),
    )

    n_frames: int = 512  # [frames] frames of a spectrogram, 10 ms each
    n_mels: int = 128  # [bands] mel bands of a spectrogram
    # [frames, bands] size of a patch; 8 × 32 and 4 × 64 are as many values, finer in time
    patch: tuple[int, int] = (16, 16)
    # [name] size ti, s, b, l or h, which sets embed, depth and heads if they are 0
    preset: str = "s"
    embed: int = 0  # [values] width of a token; 0 = the preset's
    depth: int = 0  # [layers] number of layers of the encoder; 0 = the preset's
    heads: int = 0  # [heads] number of heads of the attention; 0 = the preset's
    mlp_ratio: int = 4  # [1] inner width of the MLP, over embed
    # [name] kind of MLP: gelu (by tanh), gelu_exact (by erf, as in timm), or swiglu (gated, no
    # biases, 2/3 as wide)
    mlp: str = "gelu"
    eps: float = EPS  # [1] number added to the variance in the layer norms (timm: 1e-6)
    # [name] the last layer norm is of all tokens, or as in Bird-MAE of the pooled features alone
    norm: str = "tokens"
    n_cls: int = 1  # [tokens] CLS tokens, whose mean is the feature "cls"
    n_registers: int = 0  # [tokens] extra tokens, which nothing reads
    # [name] kind of positions: learned, or rope (rotary along time and mel)
    positions: str = "learned"
    rope_base: float = 100.0  # [1] longest wavelength of rope over 2 pi, in patches, nearly
    qk_norm: bool = False  # [bool] layer norm of each head's queries and keys
    # [1] initial factor of a layer's output, learned for each channel; 0 = none, 1e-4 is usual
    layer_scale: float = 0.0
    # [1] stochastic depth: share of the rows that skip the last layer, and evenly less before it
    drop_path: float = 0.0
    # [name] type of activations and matrix products; parameters, norms and losses are float32
    dtype: str = "bfloat16"
    # [how] recomputation in the backward pass: none, full, or 'save attention,mlp'
    remat: str = "none"
    # [layers] number of layers of the stack's loop that are compiled one after the other; depth =
    # no loop
    unroll: int = 1

    def __post_init__(self) -> None:
        for name, value in zip(
            ("embed", "depth", "heads"), PRESETS.get(self.preset, (1, 1, 1)), strict=True
        ):
            if getattr(self, name) == 0:
                object.__setattr__(self, name, value)

    def validate(self) -> Iterator[tuple[str, str]]:
        yield from checks.at_least(
            self, 1, "n_frames", "n_mels", "embed", "depth", "heads", "mlp_ratio", "n_cls", "unroll"
        )
        yield from checks.not_negative(self, "n_registers", "layer_scale")
        for name, allowed in CHOICES.items():
            yield from checks.choice(self, allowed, name)
        yield from checks.positive(self, "eps")
        for size, part, axis in zip(
            (self.n_frames, self.n_mels), self.patch, ("n_frames", "n_mels"), strict=True
        ):
            if part < 1 or size % part:
                yield "patch", f"is {self.patch}, which does not divide {axis}={size}"
        if self.heads > 0 and self.embed % self.heads:
            yield "heads", f"is {self.heads}, which does not divide embed={self.embed}"
        elif self.positions == "rope" and self.heads > 0 and self.embed // self.heads % 4:
            values = f"a head has {self.embed // self.heads} values"
            yield (
                "positions",
                (
                    f"is 'rope', which turns pairs along two axes, and {values}; it takes a"
                    " multiple of 4"
                ),
            )
        if self.rope_base <= 1:
            yield "rope_base", f"is {self.rope_base}; it must be above 1"
        yield from checks.within(self, "[0, 1)", "drop_path")
        yield from (("remat", text) for text in remat.problems(self.remat, SAVED))

    @property
    def grid(self) -> tuple[int, int]:
        """Patches along time and along mel."""
        return self.n_frames // self.patch[0], self.n_mels // self.patch[1]

    @property
    def n_patches(self) -> int:
        return self.grid[0] * self.grid[1]

    @property
    def patch_size(self) -> int:
        return self.patch[0] * self.patch[1]

    @property
    def stack(self) -> "Stack":
        hidden = self.embed * self.mlp_ratio
        gated = self.mlp == "swiglu"
        return Stack(
            self.embed,
            self.depth,
            self.heads,
            int(2 / 3 * hidden) if gated else hidden,
            gated,
            self.qk_norm,
            self.layer_scale,
            self.dtype,
            self.remat,
            self.unroll,
            self.mlp == "gelu_exact",
            self.eps,
        )


def from_saved(section: Mapping[str, Any]) -> Encoder:
    """Return the encoder of a run's saved config.json, of which ``section`` is "model"."""
    known = {name: section[name] for name in Encoder.__dataclass_fields__ if name in section}
    return Encoder(**{**known, "patch": tuple(known["patch"])})


class Stack(NamedTuple):
    """Layers of one shape, kept as one table along a first axis and scanned over."""

    embed: int
    depth: int
    heads: int
    hidden: int  # inner width of the MLP
    gated: bool = False
    qk_norm: bool = False
    layer_scale: float = 0.0
    dtype: str = "float32"
    remat: str = "none"
    unroll: int = 1
    exact: bool = False  # GELU by the error function, not by tanh
    eps: float = EPS


class Encoded(NamedTuple):
    """float32, after the last layer norm if it is of the tokens."""

    cls: Array  # [B, n_cls, D]
    patches: Array  # [B, N, D], or of the visible ones [B, V, D]


def stack_specs(s: Stack) -> PyTree:
    d, h, k, m, l = s.embed, s.heads, s.embed // s.heads, s.hidden, s.depth
    table = {
        "scale_attention": Spec((l, d), ("layer", "embed"), ones),
        "bias_attention": Spec((l, d), ("layer", "embed"), zeros),
        "w_qkv": Spec((l, d, 3, h, k), ("layer", "embed", None, "heads", "head_dim"), fan_in(d)),
        "b_qkv": Spec((l, 3, h, k), ("layer", None, "heads", "head_dim"), zeros),
        "w_out": Spec((l, h, k, d), ("layer", "heads", "head_dim", "embed"), fan_in(d)),
        "b_out": Spec((l, d), ("layer", "embed"), zeros),
        "scale_mlp": Spec((l, d), ("layer", "embed"), ones),
        "bias_mlp": Spec((l, d), ("layer", "embed"), zeros),
        "w_up": Spec((l, d, m), ("layer", "embed", "mlp"), fan_in(d)),
        "w_down": Spec((l, m, d), ("layer", "mlp", "embed"), fan_in(m)),
    }
    if s.gated:
        table["w_gate"] = Spec((l, d, m), ("layer", "embed", "mlp"), fan_in(d))
    else:
        table["b_up"] = Spec((l, m), ("layer", "mlp"), zeros)
        table["b_down"] = Spec((l, d), ("layer", "embed"), zeros)
    if s.qk_norm:
        for name in ("q", "k"):
            table[f"scale_{name}"] = Spec((l, k), ("layer", "head_dim"), ones)
            table[f"bias_{name}"] = Spec((l, k), ("layer", "head_dim"), zeros)
    if s.layer_scale:
        for name in SAVED:
            table[f"scale_added_{name}"] = Spec(
                (l, d), ("layer", "embed"), jax.nn.initializers.constant(s.layer_scale)
            )
    return table


def make_specs(c: Encoder) -> PyTree:
    d, p = c.embed, c.patch_size
    table = {
        "w_patch": Spec((p, d), ("patch", "embed"), fan_in(p)),
        "b_patch": Spec((d,), ("embed",), zeros),
        "cls": Spec((c.n_cls, d), (None, "embed"), truncated_normal(0.02)),
        "blocks": stack_specs(c.stack),
        "scale": Spec((d,), ("embed",), ones),
        "bias": Spec((d,), ("embed",), zeros),
    }
    if c.positions == "learned":
        table["pos"] = Spec((c.n_patches, d), ("seq", "embed"), truncated_normal(0.02))
    if c.n_registers:
        table["embed_registers"] = Spec((c.n_registers, d), (None, "embed"), truncated_normal(0.02))
    return table


def export_names(config: Mapping[str, Any], path: str) -> str | list[str]:
    """Dots for slashes, with every layer of the encoder under its own name."""
    encoder, blocks, name = path.partition("/blocks/")
    if not blocks:
        return path.replace("/", ".")
    return [f"{encoder}.blocks.{i}.{name}" for i in range(config["depth"])]


def read_exported(path: str | os.PathLike[str]) -> PyTree:
    """Return an encoder, float32, of a model.safetensors of `jaxtrain export`, by numpy alone."""
    with open(path, "rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        data = file.read()
    params: dict[str, Any] = {}
    layers: dict[str, dict[int, np.ndarray]] = {}
    for name, entry in header.items():
        part, _, rest = name.partition(".")
        if part != "encoder":
            continue
        start, stop = entry["data_offsets"]
        x = (
            np.frombuffer(data[start:stop], EXPORTED[entry["dtype"]])
            .reshape(entry["shape"])
            .astype(np.float32)
        )
        if rest.startswith("blocks."):
            _, i, leaf = rest.split(".")
            layers.setdefault(leaf, {})[int(i)] = x
        else:
            params[rest] = x
    return {
        **params,
        "blocks": {
            leaf: np.stack([each[i] for i in sorted(each)]) for leaf, each in layers.items()
        },
    }


def encode(
    c: Encoder,
    params: PyTree,
    x_bfw: Array,
    shard: Shard = one_device.shard,
    *,
    visible_bvn: Array | None = None,
    keep_l2b: Array | None = None,
) -> Encoded:
    """Spectrograms [B, F, W] through the encoder.

    It sees all patches in order, or those of ``visible_bvn``, one-hot along N. ``keep_l2b``:
    `survival` in training with stochastic depth.
    """
    with jax.named_scope("patchify"):
        x_bnp = patchify(c, x_bfw)
        # Half precision would round the measurements at the input.
        x_bnd = product(
            "bnp,pd->bnd", x_bnp.astype(jnp.float32), params["w_patch"], shard, precision=EXACT
        )
        x_bnd += spread(params["b_patch"], x_bnd.shape, shard)
        if c.positions == "learned":
            x_bnd += spread(params["pos"], x_bnd.shape, shard)
        if visible_bvn is not None:
            x_bnd = select(visible_bvn, x_bnd)
        tokens = [jnp.broadcast_to(params["cls"], (x_bfw.shape[0], *params["cls"].shape)), x_bnd]
        if c.n_registers:
            registers = params["embed_registers"]
            tokens.append(jnp.broadcast_to(registers, (x_bfw.shape[0], *registers.shape)))
        x_btd = jnp.concatenate(tokens, axis=1)
    turns = axial_rope(c, visible_bvn) if c.positions == "rope" else None
    x_btd = run_stack(c.stack, params["blocks"], x_btd, shard, turns=turns, keep_l2b=keep_l2b)
    x_btd = x_btd.astype(jnp.float32)
    if c.norm == "tokens":
        x_btd = layer_norm(x_btd, params["scale"], params["bias"], c.eps, shard)
    return Encoded(x_btd[:, : c.n_cls], x_btd[:, c.n_cls : x_btd.shape[1] - c.n_registers])


def pooled(c: Encoder, params: PyTree, x_bnd: Array) -> Array:
    """Return the mean [B, D] of an `Encoded`'s CLS or patches, by the encoder's ``params``."""
    x_bd = x_bnd.mean(1)
    return x_bd if c.norm == "tokens" else layer_norm(x_bd, params["scale"], params["bias"], c.eps)


def run_stack(
    s: Stack,
    stack: PyTree,
    x_btd: Array,
    shard: Shard,
    *,
    turns: tuple[Array, Array] | None = None,
    keep_l2b: Array | None = None,
) -> Array:
    """Tokens [B, T, D] through the layers of a stack, in its dtype."""
    dtype, cheap = jnp.dtype(s.dtype), remat.cheap(s.remat)

    def add(x_btd: Array, y_btd: Array, w: PyTree, i: int, keep_2b: Array | None) -> Array:
        y_btd = remat.name(y_btd, SAVED[i])
        if s.layer_scale:
            y_btd = scaled(y_btd, w[f"scale_added_{SAVED[i]}"].astype(dtype), shard)
        if keep_2b is not None:
            y_btd *= keep_2b[i].astype(dtype)[:, None, None]
        return x_btd + y_btd

    @cheap
    def project(x_btd: Array, scale: Array, bias: Array, *matrices: Array) -> list[Array]:
        y_btd = layer_norm(x_btd, scale, bias, s.eps, shard)
        return [
            product(("btd,dm->btm", "btd,dchk->btchk")[len(m.shape) > 2], y_btd, m, shard)
            for m in matrices
        ]

    @cheap
    def place(
        z_bthk: Array, scale: Array | None, bias: Array | None, turns: tuple[Array, Array] | None
    ) -> Array:
        if scale is not None:
            z_bthk = layer_norm(z_bthk, scale, bias, s.eps, shard)
        return z_bthk if turns is None else rotate(z_bthk, turns)

    @cheap
    def activate(y_btm: Array, gate_btm: Array | None, w_down: Array) -> Array:
        if gate_btm is not None:
            y_btm = shard(jax.nn.silu(gate_btm) * y_btm, "batch", "seq", "mlp")
        else:
            y_btm = gelu(y_btm) if s.exact else jax.nn.gelu(y_btm, approximate=True)
        return product("btm,md->btd", y_btm, w_down, shard)

    def layer(x_btd: Array, xs: tuple[PyTree, Array | None]) -> tuple[Array, None]:
        w, keep_2b = xs
        with jax.named_scope("attention"):
            (qkv_bt3hk,) = project(x_btd, w["scale_attention"], w["bias_attention"], w["w_qkv"])
            qkv_bt3hk += spread(w["b_qkv"].astype(dtype), qkv_bt3hk.shape, shard)
            qkv_bt3hk = shard(qkv_bt3hk, "batch", "seq", None, "heads", "head_dim")
            q, k, v = (z[:, :, 0] for z in jnp.split(qkv_bt3hk, 3, axis=2))
            if s.qk_norm or turns is not None:
                q, k = (
                    place(z, w.get(f"scale_{n}"), w.get(f"bias_{n}"), turns)
                    for z, n in ((q, "q"), (k, "k"))
                )
            y_btd = product(
                "bthk,hkd->btd", attention.within(shard, q, k, v, policy=s.remat), w["w_out"], shard
            )
            x_btd = add(
                x_btd, y_btd + spread(w["b_out"].astype(dtype), y_btd.shape, shard), w, 0, keep_2b
            )
        with jax.named_scope("mlp"):
            norm = (w["scale_mlp"], w["bias_mlp"])
            if s.gated:
                y_btm, gate_btm = project(x_btd, *norm, w["w_up"], w["w_gate"])
            else:
                (y_btm,), gate_btm = project(x_btd, *norm, w["w_up"]), None
                y_btm = shard(
                    y_btm + spread(w["b_up"].astype(dtype), y_btm.shape, shard),
                    "batch",
                    "seq",
                    "mlp",
                )
            y_btd = activate(y_btm, gate_btm, w["w_down"])
            if not s.gated:
                y_btd += spread(w["b_down"].astype(dtype), y_btd.shape, shard)
            x_btd = add(x_btd, y_btd, w, 1, keep_2b)
        return shard(x_btd, "batch", "seq", None), None

    x_btd = shard(x_btd.astype(dtype), "batch", "seq", None)
    return remat.scan(layer, x_btd, (stack, keep_l2b), s.remat, unroll=s.unroll)[0]


def patchify(c: Encoder, x_bfw: Array) -> Array:
    """[B, F, W] -> [B, N, P], patches and their values both row by row in time."""
    (f, w), b = c.patch, x_bfw.shape[0]
    x = x_bfw.reshape(b, c.n_frames // f, f, c.n_mels // w, w)
    return x.transpose(0, 1, 3, 2, 4).reshape(b, c.n_patches, f * w)


def select(visible_bvn: Array, x_bnd: Array) -> Array:
    """Return the patches [B, V, D] of a one-hot matrix by a product, which devices can split."""
    return jnp.einsum("bvn,bnd->bvd", visible_bvn, x_bnd, precision=EXACT)


def axial_rope(c: Encoder, visible_bvn: Array | None) -> tuple[Array, Array]:
    """cos and sin [B or 1, T, 1, K / 2] of the angles of pairs, half in time, half in mel.

    Each axis has the frequencies base^(-2 i / (K / 2)) of places in the whole grid. CLS and
    registers do not turn.
    """
    axis = c.embed // c.heads // 2
    f = c.rope_base ** (-np.arange(0, axis, 2) / axis)
    place_n2 = np.stack(np.meshgrid(*map(np.arange, c.grid), indexing="ij"), -1).reshape(-1, 2)
    angle_nk = (place_n2[:, :, None] * f).reshape(c.n_patches, -1)
    angle_bnk = jnp.asarray(angle_nk, jnp.float32)[None]
    if visible_bvn is not None:
        angle_bnk = jnp.einsum("bvn,nk->bvk", visible_bvn, angle_bnk[0], precision=EXACT)
    angle_btk = jnp.pad(angle_bnk, ((0, 0), (c.n_cls, c.n_registers), (0, 0)))
    return jnp.cos(angle_btk)[:, :, None], jnp.sin(angle_btk)[:, :, None]


def survival(c: Encoder, key_b: Key) -> Array | None:
    """float32 [L, 2, B]: factors of attention's and MLP's outputs, 0 or 1 / (1 - rate), or None.

    The rate rises from 0 in the first layer to drop_path in the last (Huang et al. 2016).
    """
    if not c.drop_path:
        return None
    rate_l = (
        np.linspace(0, c.drop_path, c.depth, dtype=np.float32)[:, None]
        if c.depth > 1
        else np.array([[c.drop_path]])
    )
    rate_l2 = jnp.broadcast_to(jnp.asarray(rate_l, jnp.float32), (c.depth, 2))
    kept_bl2 = jax.vmap(lambda key: jax.random.uniform(key, (c.depth, 2)) >= rate_l2)(key_b)
    return jnp.where(kept_bl2, (1 / (1 - rate_l2))[None], 0.0).transpose(1, 2, 0)


def stack_flops(s: Stack, tokens: int) -> int:
    """Floating-point operations of a stack's matrix products for one row, forward."""
    matrices = s.embed * (4 * s.embed + (3 if s.gated else 2) * s.hidden)
    return s.depth * (2 * tokens * matrices + 4 * tokens * tokens * s.embed)


def forward_flops(c: Encoder, visible: int | None = None) -> int:
    """Return the same of the encoder, of whose patches ``visible`` enter (None: all)."""
    seen = c.n_patches if visible is None else visible
    return 2 * c.n_patches * c.patch_size * c.embed + stack_flops(
        c.stack, c.n_cls + seen + c.n_registers
    )
