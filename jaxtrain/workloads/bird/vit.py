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
from jaxtrain.nn.layers import biases, gelu, layer_norm, product, rotate, scaled, spread
from jaxtrain.parallel import one_device
from jaxtrain.specs import fan_in, ones, truncated_normal, zeros
from jaxtrain.types import Array, PyTree, Shard, Spec
from jaxtrain.workloads.bird import half_stack
from loaders.io import checks

EPS = 1e-5  # of the layer norms, if no config says otherwise
PATCH_EPS = 1e-2  # of patch_norm: a patch whose values differ by less than 0.1 stays nearly even
LEVEL_STD = 0.3  # of the first weights of a patch's level, so that its pattern is most of a token
MLP_RATIO = 4  # inner width of the MLP, over embed
ROPE_BASE = 100.0  # longest wavelength over 2 pi, in patches, nearly
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
            "mlp",
            "n_cls",
            "n_registers",
        ),
    )

    n_frames: int = 512  # [frames] frames of a spectrogram
    n_mels: int = 128  # [bands] mel bands of a spectrogram
    # [frames, bands] size of a patch; 8 × 32 and 4 × 64 are as many values, finer in time
    patch: tuple[int, int] = (16, 16)
    # [name] size ti, s, b, l or h, which sets embed, depth and heads if they are 0
    preset: str = "s"
    embed: int = 0  # [values] width of a token; 0 = the preset's
    depth: int = 0  # [layers] number of layers of the encoder; 0 = the preset's
    heads: int = 0  # [heads] number of heads of the attention; 0 = the preset's
    # [name] kind of MLP: gelu (by tanh), gelu_exact (by erf, as in timm), or swiglu (gated, no
    # biases, 2/3 as wide)
    mlp: str = "gelu"
    eps: float = EPS  # [1] number added to the variance in the layer norms (timm: 1e-6)
    # [name] the last layer norm is of all tokens, or as in Bird-MAE of the pooled features alone
    norm: str = "tokens"
    n_cls: int = 1  # [tokens] class tokens: 1, or 0 if patches are pooled (model.pool="patches")
    # [bool] normalise the values of each patch before they become a token (Kumar et al. 2023), so
    # that the level of a noise hides no faint sound; its mean and deviation are two more values
    patch_norm: bool = False
    n_registers: int = 0  # [tokens] extra tokens, which nothing reads
    # [name] kind of positions: learned, or rope (rotary along time and mel)
    positions: str = "learned"
    qk_norm: bool = False  # [bool] layer norm of each head's queries and keys
    # [1] initial factor of a layer's output, learned for each channel; 0 = none, 1e-4 is usual
    layer_scale: float = 0.0
    # [name] type of activations and matrix products; parameters, norms and losses are float32
    dtype: str = "bfloat16"
    # [how] recomputation in the backward pass: none, full, or 'save attention,mlp'
    remat: str = "none"
    # [layers] number of layers of the stack's loop that are compiled one after the other; depth =
    # no loop, 0 = depth for 16 bits on GPUs, else 1
    unroll: int = 0

    def __post_init__(self) -> None:
        embed, depth, heads = PRESETS.get(self.preset, (1, 1, 1))
        for name, value in (("embed", embed), ("depth", depth), ("heads", heads)):
            if getattr(self, name) == 0:
                object.__setattr__(self, name, value)

    def validate(self) -> Iterator[tuple[str, str]]:
        yield from checks.at_least(self, 1, "n_frames", "n_mels", "embed", "depth", "heads")
        yield from checks.not_negative(self, "n_registers", "layer_scale", "unroll")
        for name, choices in CHOICES.items():
            yield from checks.choice(self, choices, name)
        yield from checks.choice(self, (0, 1), "n_cls")
        yield from checks.positive(self, "eps")
        sides = (("n_frames", self.patch[0]), ("n_mels", self.patch[1]))
        for name, side in sides:
            size = getattr(self, name)
            if side < 1 or size % side:
                yield "patch", f"is {self.patch}, which does not divide {name}={size}"
        if self.heads > 0 and self.embed % self.heads:
            yield "heads", f"is {self.heads}, which does not divide embed={self.embed}"
        elif self.positions == "rope" and self.heads > 0 and self.embed // self.heads % 4:
            yield (
                "positions",
                "is 'rope', which turns pairs along two axes, and a head has"
                f" {self.embed // self.heads} values; it takes a multiple of 4",
            )
        for text in remat.problems(self.remat, SAVED):
            yield "remat", text

    @property
    def grid(self) -> tuple[int, int]:
        """Patches along time and along mel."""
        return self.n_frames // self.patch[0], self.n_mels // self.patch[1]

    @property
    def n_patches(self) -> int:
        return self.grid[0] * self.grid[1]

    @property
    def n_tokens(self) -> int:
        """CLS, patches and registers."""
        return self.n_cls + self.n_patches + self.n_registers

    @property
    def patch_size(self) -> int:
        return self.patch[0] * self.patch[1]

    @property
    def stack(self) -> "Stack":
        hidden = self.embed * MLP_RATIO
        gated = self.mlp == "swiglu"
        return Stack(
            embed=self.embed,
            depth=self.depth,
            heads=self.heads,
            hidden=int(2 / 3 * hidden) if gated else hidden,
            gated=gated,
            qk_norm=self.qk_norm,
            layer_scale=self.layer_scale,
            dtype=self.dtype,
            remat=self.remat,
            unroll=self.unroll,
            exact=self.mlp == "gelu_exact",
            eps=self.eps,
        )


def from_saved(section: Mapping[str, Any]) -> Encoder:
    """Return the encoder of a run's saved config.json, of which ``section`` is "model"."""
    saved = {name: section[name] for name in Encoder.__dataclass_fields__ if name in section}
    return Encoder(**{**saved, "patch": tuple(saved["patch"])})


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
    unroll: int = 0
    exact: bool = False  # GELU by the error function, not by tanh
    eps: float = EPS


class Encoded(NamedTuple):
    """float32, after the last layer norm if it is of the tokens."""

    cls: Array  # [B, 1, D], or [B, 0, D] without a class token
    patches: Array  # [B, N, D], or of the visible ones [B, V, D]


def stack_specs(s: Stack) -> PyTree:
    l, d, m = s.depth, s.embed, s.hidden
    h, k = s.heads, s.embed // s.heads
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
        table["scale_q"] = Spec((l, k), ("layer", "head_dim"), ones)
        table["bias_q"] = Spec((l, k), ("layer", "head_dim"), zeros)
        table["scale_k"] = Spec((l, k), ("layer", "head_dim"), ones)
        table["bias_k"] = Spec((l, k), ("layer", "head_dim"), zeros)
    if s.layer_scale:
        factor = jax.nn.initializers.constant(s.layer_scale)
        table["scale_added_attention"] = Spec((l, d), ("layer", "embed"), factor)
        table["scale_added_mlp"] = Spec((l, d), ("layer", "embed"), factor)
    return table


def make_specs(c: Encoder) -> PyTree:
    d, p = c.embed, c.patch_size
    table = {
        "w_patch": Spec((p, d), ("patch", "embed"), fan_in(p)),
        "b_patch": Spec((d,), ("embed",), zeros),
        "blocks": stack_specs(c.stack),
        "scale": Spec((d,), ("embed",), ones),
        "bias": Spec((d,), ("embed",), zeros),
    }
    if c.patch_norm:
        table["w_patch_level"] = Spec((2, d), (None, "embed"), truncated_normal(LEVEL_STD))
    if c.positions == "learned":
        table["pos"] = Spec((c.n_patches, d), ("seq", "embed"), truncated_normal(0.02))
    if c.n_cls:
        table["cls"] = Spec((c.n_cls, d), (None, "embed"), truncated_normal(0.02))
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
        header_size = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(header_size))
        data = file.read()
    params: dict[str, Any] = {}
    layers: dict[str, dict[int, np.ndarray]] = {}  # name of a weight -> layer -> its array
    for name, entry in header.items():
        part, _, path_in_encoder = name.partition(".")
        if part != "encoder":
            continue
        start, stop = entry["data_offsets"]
        stored = np.frombuffer(data[start:stop], EXPORTED[entry["dtype"]])
        array = stored.reshape(entry["shape"]).astype(np.float32)
        if path_in_encoder.startswith("blocks."):
            _, layer, weight = path_in_encoder.split(".")
            layers.setdefault(weight, {})[int(layer)] = array
        else:
            params[path_in_encoder] = array
    blocks: dict[str, np.ndarray] = {}
    for weight, by_layer in layers.items():
        blocks[weight] = np.stack([by_layer[i] for i in sorted(by_layer)])
    params["blocks"] = blocks
    return params


def encode(
    c: Encoder,
    params: PyTree,
    x_bfw: Array,
    shard: Shard = one_device.shard,
    *,
    visible_bvn: Array | None = None,
) -> Encoded:
    """Spectrograms [B, F, W] through the encoder.

    It sees all patches in order, or those of ``visible_bvn``, one-hot along N.
    """
    with jax.named_scope("patchify"):
        x_btd = embed(c, params, x_bfw, shard, visible_bvn)
    turns = axial_rope(c, visible_bvn) if c.positions == "rope" else None
    x_btd = run_stack(c.stack, params["blocks"], x_btd, shard, turns=turns)
    x_btd = x_btd.astype(jnp.float32)
    if c.norm == "tokens":
        x_btd = layer_norm(x_btd, params["scale"], params["bias"], c.eps, shard)
    last = x_btd.shape[1] - c.n_registers
    return Encoded(cls=x_btd[:, : c.n_cls], patches=x_btd[:, c.n_cls : last])


def embed(
    c: Encoder, params: PyTree, x_bfw: Array, shard: Shard, visible_bvn: Array | None
) -> Array:
    """Return the tokens [B, T, D] of spectrograms: CLS, patches, registers."""
    n_rows = x_bfw.shape[0]
    x_bnp = patchify(c, x_bfw)
    if c.patch_norm:
        x_bnp, level_bn2 = _normalised(x_bnp.astype(jnp.float32))
    # Half precision would round the measurements at the input.
    x_bnd = product(
        "bnp,pd->bnd", x_bnp.astype(jnp.float32), params["w_patch"], shard, precision=EXACT
    )
    if c.patch_norm:
        x_bnd += product("bnl,ld->bnd", level_bn2, params["w_patch_level"], shard, precision=EXACT)
    x_bnd += spread(params["b_patch"], x_bnd.shape, shard)
    if c.positions == "learned":
        x_bnd += spread(params["pos"], x_bnd.shape, shard)
    if visible_bvn is not None:
        x_bnd = select(visible_bvn, x_bnd)

    def of_every_row(x_td: Array) -> Array:
        return jnp.broadcast_to(x_td, (n_rows, *x_td.shape))

    tokens = [x_bnd]
    if c.n_cls:
        tokens.insert(0, of_every_row(params["cls"]))
    if c.n_registers:
        tokens.append(of_every_row(params["embed_registers"]))
    return jnp.concatenate(tokens, axis=1)


def pooled(c: Encoder, params: PyTree, x_bnd: Array) -> Array:
    """Return the mean [B, D] of an `Encoded`'s CLS or patches, by the encoder's ``params``."""
    x_bd = x_bnd.mean(1)
    if c.norm == "tokens":
        return x_bd
    return layer_norm(x_bd, params["scale"], params["bias"], c.eps)


def run_stack(
    s: Stack,
    stack: PyTree,
    x_btd: Array,
    shard: Shard,
    *,
    turns: tuple[Array, Array] | None = None,
) -> Array:
    """Tokens [B, T, D] through the layers of a stack, in its dtype."""
    if half_stack.fits(s, x_btd, shard):
        return half_stack.run_stack(s, stack, x_btd, shard, turns)

    def layer(x_btd: Array, w: PyTree) -> tuple[Array, None]:
        x_btd = attend(s, w, x_btd, shard, turns)
        x_btd = feed_forward(s, w, x_btd, shard)
        return shard(x_btd, "batch", "seq", None), None

    x_btd = shard(x_btd.astype(jnp.dtype(s.dtype)), "batch", "seq", None)
    x_btd, _ = remat.scan(layer, x_btd, stack, s.remat, unroll=s.unroll or 1)
    return x_btd


def attend(
    s: Stack, w: PyTree, x_btd: Array, shard: Shard, turns: tuple[Array, Array] | None
) -> Array:
    """Compute x + attention(norm(x))."""
    dtype = x_btd.dtype
    with jax.named_scope("attention"):
        norm = (w["scale_attention"], w["bias_attention"])
        (qkv_bt3hk,) = normed_products(s, "btd,dchk->btchk", x_btd, norm, (w["w_qkv"],), shard)
        qkv_bt3hk += biases(w["b_qkv"], qkv_bt3hk, shard)
        qkv_bt3hk = shard(qkv_bt3hk, "batch", "seq", None, "heads", "head_dim")
        q_bthk, k_bthk, v_bthk = (z[:, :, 0] for z in jnp.split(qkv_bt3hk, 3, axis=2))
        if s.qk_norm or turns is not None:
            q_bthk = placed(s, q_bthk, (w.get("scale_q"), w.get("bias_q")), shard, turns)
            k_bthk = placed(s, k_bthk, (w.get("scale_k"), w.get("bias_k")), shard, turns)
        y_bthk = attention.within(shard, q_bthk, k_bthk, v_bthk, policy=s.remat)
        y_btd = product("bthk,hkd->btd", y_bthk, w["w_out"], shard)
        y_btd += biases(w["b_out"], y_btd, shard)
        y_btd = remat.name(y_btd, "attention")
        if s.layer_scale:
            y_btd = scaled(y_btd, w["scale_added_attention"].astype(dtype), shard)
        return x_btd + y_btd


def feed_forward(s: Stack, w: PyTree, x_btd: Array, shard: Shard) -> Array:
    """Compute x + MLP(norm(x))."""
    dtype = x_btd.dtype

    def activate(up_btm: Array, gate_btm: Array | None, w_down: Array) -> Array:
        if gate_btm is not None:
            y_btm = shard(jax.nn.silu(gate_btm) * up_btm, "batch", "seq", "mlp")
        elif s.exact:
            y_btm = gelu(up_btm)
        else:
            y_btm = jax.nn.gelu(up_btm, approximate=True)
        return product("btm,md->btd", y_btm, w_down, shard)

    with jax.named_scope("mlp"):
        norm = (w["scale_mlp"], w["bias_mlp"])
        equation = "btd,dm->btm"
        if s.gated:
            matrices = (w["w_up"], w["w_gate"])
            up_btm, gate_btm = normed_products(s, equation, x_btd, norm, matrices, shard)
            y_btd = remat.cheap(s.remat, activate, up_btm, gate_btm, w["w_down"])
        else:
            (up_btm,) = normed_products(s, equation, x_btd, norm, (w["w_up"],), shard)
            up_btm += biases(w["b_up"], up_btm, shard)
            up_btm = shard(up_btm, "batch", "seq", "mlp")
            y_btd = remat.cheap(s.remat, activate, up_btm, None, w["w_down"])
            y_btd += biases(w["b_down"], y_btd, shard)
        y_btd = remat.name(y_btd, "mlp")
        if s.layer_scale:
            y_btd = scaled(y_btd, w["scale_added_mlp"].astype(dtype), shard)
        return x_btd + y_btd


def normed_products(
    s: Stack,
    equation: str,
    x_btd: Array,
    norm: tuple[Array, Array],
    matrices: tuple[Array, ...],
    shard: Shard,
) -> list[Array]:
    """Multiply the layer norm of x, of scale and bias ``norm``, by each of the matrices."""

    def products(x_btd: Array, scale: Array, bias: Array, *matrices: Array) -> list[Array]:
        y_btd = layer_norm(x_btd, scale, bias, s.eps, shard)
        return [product(equation, y_btd, matrix, shard) for matrix in matrices]

    return remat.cheap(s.remat, products, x_btd, *norm, *matrices)


def placed(
    s: Stack,
    z_bthk: Array,
    norm: tuple[Array | None, Array | None],
    shard: Shard,
    turns: tuple[Array, Array] | None,
) -> Array:
    """Norm and rotate queries or keys, if the stack does so."""

    def place(
        z_bthk: Array, scale: Array | None, bias: Array | None, turns: tuple[Array, Array] | None
    ) -> Array:
        if scale is not None:
            z_bthk = layer_norm(z_bthk, scale, bias, s.eps, shard)
        return z_bthk if turns is None else rotate(z_bthk, turns)

    return remat.cheap(s.remat, place, z_bthk, *norm, turns)


def patchify(c: Encoder, x_bfw: Array) -> Array:
    """[B, F, W] -> [B, N, P], patches and their values both row by row in time."""
    n_rows = x_bfw.shape[0]
    f, w = c.patch
    x = x_bfw.reshape(n_rows, c.n_frames // f, f, c.n_mels // w, w)
    return x.transpose(0, 1, 3, 2, 4).reshape(n_rows, c.n_patches, f * w)


def _normalised(x_bnp: Array) -> tuple[Array, Array]:
    """Return patches of mean 0 and of variance nearly 1, and their level [B, N, 2].

    The level is the mean, and the logarithm of the deviation that the values were divided by.
    """
    mean_bn1 = x_bnp.mean(-1, keepdims=True)
    centred_bnp = x_bnp - mean_bn1
    variance_bn1 = jnp.square(centred_bnp).mean(-1, keepdims=True) + PATCH_EPS
    level_bn2 = jnp.concatenate([mean_bn1, jnp.log(variance_bn1) / 2], axis=-1)
    return centred_bnp * jax.lax.rsqrt(variance_bn1), level_bn2


def select(visible_bvn: Array, x_bnd: Array) -> Array:
    """Return the patches [B, V, D] of a one-hot matrix by a product, which devices can split."""
    return jnp.einsum("bvn,bnd->bvd", visible_bvn, x_bnd, precision=EXACT)


def axial_rope(c: Encoder, visible_bvn: Array | None) -> tuple[Array, Array]:
    """cos and sin [B or 1, T, 1, K / 2] of the angles of pairs, half in time, half in mel.

    Each axis has the frequencies base^(-2 i / (K / 2)) of places in the whole grid. CLS and
    registers do not turn.
    """
    axis_size = c.embed // c.heads // 2
    frequency_k = ROPE_BASE ** (-np.arange(0, axis_size, 2) / axis_size)
    rows, columns = c.grid
    row_n, column_n = np.divmod(np.arange(rows * columns), columns)
    row_angle_nk = row_n[:, None] * frequency_k
    column_angle_nk = column_n[:, None] * frequency_k
    angle_nk = np.concatenate([row_angle_nk, column_angle_nk], axis=1)
    angle_bnk = jnp.asarray(angle_nk, jnp.float32)[None]
    if visible_bvn is not None:
        angle_bnk = jnp.einsum("bvn,nk->bvk", visible_bvn, angle_bnk[0], precision=EXACT)
    angle_btk = jnp.pad(angle_bnk, ((0, 0), (c.n_cls, c.n_registers), (0, 0)))
    cos_bt1k = jnp.cos(angle_btk)[:, :, None]
    sin_bt1k = jnp.sin(angle_btk)[:, :, None]
    return cos_bt1k, sin_bt1k


def stack_flops(s: Stack, n_tokens: int) -> int:
    """Floating-point operations of a stack's matrix products for one row, forward."""
    mlp_matrices = 3 if s.gated else 2
    weights = s.embed * (4 * s.embed + mlp_matrices * s.hidden)
    attention_flops = 4 * n_tokens * n_tokens * s.embed
    return s.depth * (2 * n_tokens * weights + attention_flops)


def forward_flops(c: Encoder, n_visible: int | None = None) -> int:
    """Return the same of the encoder, of whose patches ``n_visible`` enter (None: all)."""
    n_hidden = 0 if n_visible is None else c.n_patches - n_visible
    patch_flops = 2 * c.n_patches * c.patch_size * c.embed
    return patch_flops + stack_flops(c.stack, c.n_tokens - n_hidden)
