"""A decoder's parts, from a parameter table to the last hidden state, for any workload with text.

A layer is two residual parts, attention (`attend`) and a feed-forward net (`feed_forward`). Each
takes its own entries of one dictionary of weights, so that a workload may have several nets for one
attention. `Decoder` has their settings: as in Llama (Grattafiori et al. 2024), Qwen2 (biases of q,
k, v), Qwen3 (norms of q and k) or GPT-2 (layer norms, GELU, learned positions, biases). Matrices
are (out, in), byte for byte as at Hugging Face.

Shapes: B batch, T tokens, D embed, H heads, G key/value heads, K head dimension, M inner width,
V vocabulary, L layers.
"""

import functools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxtrain.config import ModelSection
from jaxtrain.nn import attention as attention_lib
from jaxtrain.nn import remat, ring
from jaxtrain.nn.layers import (
    Rope,
    after_sums,
    biases,
    gelu,
    layer_norm,
    lookup,
    project,
    project_each,
    rms_norm,
    rope_angles,
    rotate,
)
from jaxtrain.specs import ones, truncated_normal, zeros
from jaxtrain.types import OF_DATA, Array, Batch, OfData, PyTree, Shard, Spec
from loaders.io import checks

NORMS = ("rms", "layer")
ACTIVATIONS = ("swiglu", "gelu")
POSITIONS = ("rope", "learned")
DTYPES = ("float32", "bfloat16")
TABLE = ("vocab", "embed")  # logical axes of the embedding and of the head
KEPT = ("qkv", "attention", "mlp")  # names for remat="save …"
KERNELS = {"attention": attention_lib.is_forward}  # this name keeps all results of such a kernel
Weights = Mapping[str, Array]
Angles = tuple[Array, Array] | None  # cos and sin of rotary positions
# (q, k, v) -> (y [B, T, H, K], extra results)
Mix = Callable[[Array, Array, Array], tuple[Array, PyTree]]
# (y [B, T, D], "attention" or "mlp") -> what is added to the residual
Drop = Callable[[Array, str], Array]
Body = Callable[[Array, PyTree], tuple[Array, PyTree]]  # a layer: (x, its entry) -> (x, extra)


def whole(y: Array, part: str) -> Array:
    return y


@dataclass(frozen=True)
class Decoder(ModelSection):
    """The settings of a decoder. A workload's Config extends them."""

    unroll_by_plan = True
    doubted = ("segments",)
    on_resume = checks.OnResume(
        checks.FUNCTION,
        free=("remat", "unroll", "documents"),
        state=(
            "embed",
            "depth",
            "heads",
            "kv_heads",
            "head_dim",
            "mlp",
            "qkv_bias",
            "bias",
            "qk_norm",
            "tied",
        ),
    )

    embed: int = 768  # [values] width of a token
    depth: int = 12  # [layers] number of layers of attention and a feed-forward net
    heads: int = 12  # [heads] number of heads of the queries
    # [heads] number of heads of keys and values, each for heads / kv_heads of the queries; 0 =
    # heads
    kv_heads: int = 0
    head_dim: int = 0  # [values] size of a head; 0 = embed / heads
    mlp: int = 2048  # [values] inner width of the feed-forward net
    norm: str = "rms"  # [name] kind of norms: rms or layer
    eps: float = 1e-5  # [1] number added to the mean square in norms
    # [name] kind of feed-forward net: swiglu (three matrices, Shazeer 2020) or gelu (two)
    activation: str = "swiglu"
    # [name] kind of positions: rope, or learned (one vector for each of the context's places)
    positions: str = "rope"
    rope: Rope = field(default_factory=Rope)  # [section]
    context: OfData[int] = OF_DATA  # [tokens] length of a row; None = as the data have
    # [documents] most documents of a row, for which attention on GPUs reserves memory, and of
    # which a row with more makes the loss NaN there; None = as the data have
    documents: OfData[int] = OF_DATA
    window: int = 0  # [tokens] places that a query looks back, itself included; 0 = all
    qkv_bias: bool = False  # [bool] biases of q, k and v
    bias: bool = False  # [bool] biases of everything else: output, feed-forward net, layer norms
    qk_norm: bool = False  # [bool] RMS norm of every head's query and key, before the rotation
    tied: bool = False  # [bool] the head is the embedding
    # [1] standard deviation of initial weights; divided by sqrt(2 depth) in the matrices that end
    # in the residual
    init_std: float = 0.02
    # [name] type of activations and matrix products; parameters, norms, softmax and loss are
    # float32
    dtype: str = "bfloat16"
    # [name] recomputation in the backward pass: none, full, or all but 'save attention,mlp'
    remat: str = "none"
    # [layers] number of layers of the stack's loop that are compiled one after the other; depth =
    # no loop; 0 = depth on GPUs if the plan fits, else 1
    unroll: int = 0

    def validate(self) -> Iterator[tuple[str, str]]:
        yield from checks.at_least(self, 1, "embed", "depth", "heads", "mlp")
        yield from checks.not_negative(self, "kv_heads", "head_dim", "window", "unroll")
        if self.documents is not None:
            yield from checks.at_least(self, 1, "documents")
        yield from checks.positive(self, "eps", "init_std")
        yield from checks.choice(self, NORMS, "norm")
        yield from checks.choice(self, ACTIVATIONS, "activation")
        yield from checks.choice(self, POSITIONS, "positions")
        yield from checks.choice(self, DTYPES, "dtype")
        if self.heads > 0 and not self.head_dim and self.embed % self.heads:
            yield (
                "heads",
                f"is {self.heads}, which does not divide embed={self.embed}; set head_dim",
            )
        if self.heads > 0 and self.kv_heads > 0 and self.heads % self.kv_heads:
            yield "kv_heads", f"is {self.kv_heads}, which does not divide heads={self.heads}"
        if self.positions == "rope" and self.heads > 0 and self.k % 2:
            yield "head_dim", f"is {self.k}; rotary positions turn pairs, so it must be even"
        for error in remat.problems(self.remat, KEPT):
            yield "remat", error
        yield from self.rope.validate()

    def row_doubts(self, rows: Mapping[str, np.ndarray]) -> str:
        if "segments" not in rows or not self.documents:
            return ""
        segments_bt = rows["segments"]
        is_first_bt = np.diff(segments_bt, axis=1, prepend=0) != 0
        n_b = (is_first_bt & (segments_bt != 0)).sum(1)
        n_beyond = (n_b > self.documents).sum()
        if not n_beyond:
            return ""
        return (
            f"{n_beyond} of its {len(n_b)} rows here have up to {n_b.max()} documents, more than"
            f" config.model.documents={self.documents}, for which attention on GPUs is NaN"
        )

    @property
    def g(self) -> int:
        return self.kv_heads or self.heads

    @property
    def k(self) -> int:
        return self.head_dim or self.embed // self.heads


def norm_specs(c: Decoder, name: str, layers: tuple[int, ...]) -> dict[str, Spec]:
    """Return a norm's table. "" is the one after the last layer. ``layers``: (L,) in a stack."""
    shape = (*layers, c.embed)
    axes = (*("layer" for _ in layers), "embed")
    suffix = f"_{name}" if name else ""
    specs = {f"scale{suffix}": Spec(shape, axes, ones)}
    if c.norm == "layer" and c.bias:
        specs[f"bias{suffix}"] = Spec(shape, axes, zeros)
    return specs


def attention_specs(c: Decoder) -> dict[str, Spec]:
    l, d, h, g, k = c.depth, c.embed, c.heads, c.g, c.k
    init = truncated_normal(c.init_std)
    init_last = truncated_normal(c.init_std / math.sqrt(2 * l))
    specs = {
        **norm_specs(c, "attention", (l,)),
        "w_q": Spec((l, h, k, d), ("layer", "heads", "head_dim", "embed"), init),
        "w_k": Spec((l, g, k, d), ("layer", "kv_heads", "head_dim", "embed"), init),
        "w_v": Spec((l, g, k, d), ("layer", "kv_heads", "head_dim", "embed"), init),
        "w_out": Spec((l, d, h, k), ("layer", "embed", "heads", "head_dim"), init_last),
    }
    if c.qkv_bias:
        specs["b_q"] = Spec((l, h, k), ("layer", "heads", "head_dim"), zeros)
        specs["b_k"] = Spec((l, g, k), ("layer", "kv_heads", "head_dim"), zeros)
        specs["b_v"] = Spec((l, g, k), ("layer", "kv_heads", "head_dim"), zeros)
    if c.qk_norm:
        specs["scale_q"] = Spec((l, k), ("layer", "head_dim"), ones)
        specs["scale_k"] = Spec((l, k), ("layer", "head_dim"), ones)
    if c.bias:
        specs["b_out"] = Spec((l, d), ("layer", "embed"), zeros)
    return specs


def feed_forward_specs(c: Decoder) -> dict[str, Spec]:
    l, d, m = c.depth, c.embed, c.mlp
    init = truncated_normal(c.init_std)
    init_last = truncated_normal(c.init_std / math.sqrt(2 * l))
    specs = norm_specs(c, "mlp", (l,))
    if c.activation == "swiglu":
        specs["w_gate"] = Spec((l, m, d), ("layer", "mlp", "embed"), init)
    specs["w_up"] = Spec((l, m, d), ("layer", "mlp", "embed"), init)
    specs["w_down"] = Spec((l, d, m), ("layer", "embed", "mlp"), init_last)
    if c.bias:
        specs["b_up"] = Spec((l, m), ("layer", "mlp"), zeros)
        specs["b_down"] = Spec((l, d), ("layer", "embed"), zeros)
        if c.activation == "swiglu":
            specs["b_gate"] = Spec((l, m), ("layer", "mlp"), zeros)
    return specs


def decoder_specs(c: Decoder, vocab: int) -> dict[str, Any]:
    """Return the whole table: embedding, stack, last norm, and a head unless it is tied."""
    d, init = c.embed, truncated_normal(c.init_std)
    specs: dict[str, Any] = {"embed": Spec((vocab, d), TABLE, init)}
    if c.positions == "learned":
        specs["pos"] = Spec((c.context, d), (None, "embed"), init)
    specs["blocks"] = {**attention_specs(c), **feed_forward_specs(c)}
    specs |= norm_specs(c, "", ())
    if not c.tied:
        specs["w_head"] = Spec((vocab, d), TABLE, init)
    return specs


def head(c: Decoder, params: PyTree) -> Array:
    """Return the matrix [V, D] from the last hidden states to logits."""
    w_vd: Array = params["embed" if c.tied else "w_head"]
    return w_vd


def norm(c: Decoder, w: Weights, name: str, x: Array, shard: Shard | None = None) -> Array:
    """Norm by the weights ``scale_name`` and ``bias_name``; "" is the norm after the stack."""
    suffix = f"_{name}" if name else ""
    scale = w[f"scale{suffix}"]
    if c.norm == "rms":
        return rms_norm(x, scale, c.eps, shard)
    return layer_norm(x, scale, w.get(f"bias{suffix}"), c.eps, shard)


def attend(
    c: Decoder,
    w: Weights,
    x_btd: Array,
    shard: Shard,
    *,
    angles: Angles,
    mix: Mix,
    drop: Drop = whole,
) -> tuple[Array, PyTree]:
    """Compute x + attention(norm(x)), and return the extra results of ``mix``.

    ``mix`` computes attention between the projections: `mixer`, or `sampling.cached`.
    """

    def projections(x_btd: Array, w: Weights) -> tuple[Array, Array, Array]:
        y_btd = norm(c, w, "attention", x_btd, shard)
        matrices = w["w_q"], w["w_k"], w["w_v"]
        q_bthk, k_bsgk, v_bsgk = project_each("btd,hkd->bthk", y_btd, matrices, shard)
        return q_bthk, k_bsgk, v_bsgk

    with jax.named_scope("attention"):
        used = _subset(w, "scale_attention", "bias_attention", "w_q", "w_k", "w_v")
        q_bthk, k_bsgk, v_bsgk = remat.cheap(c.remat, projections, x_btd, used)
        q_bthk = _laid_out(q_bthk, w.get("b_q"), "heads", shard)
        q_bthk = remat.name(_placed(c, q_bthk, w.get("scale_q"), angles), "qkv")
        k_bsgk = _laid_out(k_bsgk, w.get("b_k"), "kv_heads", shard)
        k_bsgk = remat.name(_placed(c, k_bsgk, w.get("scale_k"), angles), "qkv")
        v_bsgk = remat.name(_laid_out(v_bsgk, w.get("b_v"), "kv_heads", shard), "qkv")
        y_bthk, extra = mix(q_bthk, k_bsgk, v_bsgk)
        y_bthk = shard(y_bthk, "batch", "seq", "heads", "head_dim")
        y_btd = project("bthk,dhk->btd", y_bthk, w["w_out"], shard)
        if c.bias:
            y_btd = _add_bias(y_btd, w["b_out"], shard)
        return shard(x_btd + drop(y_btd, "attention"), "batch", "seq", None), extra


def _laid_out(z_bthk: Array, b_hk: Array | None, heads: str, shard: Shard) -> Array:
    """Add the bias of queries, keys or values, if there is one, and lay them out."""
    if b_hk is not None:
        z_bthk = _add_bias(z_bthk, b_hk, shard)
    return shard(z_bthk, "batch", "seq", heads, "head_dim")


def _add_bias(y: Array, b: Array, shard: Shard) -> Array:
    return y + biases(b, y, shard)


def _subset(w: Weights, *names: str) -> Weights:
    """Return these weights, as far as the decoder has them."""
    return {name: w[name] for name in names if name in w}


def _placed(c: Decoder, z_bthk: Array, scale_k: Array | None, angles: Angles) -> Array:
    """Norm and rotate queries or keys, if the decoder does so."""
    if scale_k is None and angles is None:
        return z_bthk

    def place(z_bthk: Array, scale_k: Array | None, angles: Angles) -> Array:
        if scale_k is not None:
            z_bthk = rms_norm(z_bthk, scale_k, c.eps)
        return z_bthk if angles is None else rotate(z_bthk, angles)

    return remat.cheap(c.remat, place, z_bthk, scale_k, angles)


def feed_forward(c: Decoder, w: Weights, x_btd: Array, shard: Shard, drop: Drop = whole) -> Array:
    """Compute x + net(norm(x))."""
    with jax.named_scope("mlp"):
        if c.activation == "swiglu":
            y_btd = _swiglu(c, w, x_btd, shard)
        else:
            y_btd = _gelu_net(c, w, x_btd, shard)
        if c.bias:
            y_btd = _add_bias(y_btd, w["b_down"], shard)
        return shard(x_btd + drop(y_btd, "mlp"), "batch", "seq", None)


def _swiglu(c: Decoder, w: Weights, x_btd: Array, shard: Shard) -> Array:
    def gate_and_up(x_btd: Array, w: Weights) -> tuple[Array, Array]:
        y_btd = norm(c, w, "mlp", x_btd, shard)
        matrices = w["w_gate"], w["w_up"]
        gate_btm, up_btm = project_each("btd,md->btm", y_btd, matrices, shard)
        return gate_btm, up_btm

    def down(gate_and_up: tuple[Array, Array], w_down: Array) -> Array:
        gate_btm, up_btm = gate_and_up
        return project("btm,dm->btd", jax.nn.silu(gate_btm) * up_btm, w_down, shard)

    used = _subset(w, "scale_mlp", "bias_mlp", "w_gate", "w_up")
    gate_btm, up_btm = remat.cheap(c.remat, gate_and_up, x_btd, used)
    if c.bias:
        gate_btm = _add_bias(gate_btm, w["b_gate"], shard)
        up_btm = _add_bias(up_btm, w["b_up"], shard)
    gate_btm = remat.name(shard(gate_btm, "batch", "seq", "mlp"), "mlp")
    up_btm = remat.name(shard(up_btm, "batch", "seq", "mlp"), "mlp")
    return remat.cheap(c.remat, down, (gate_btm, up_btm), w["w_down"])


def _gelu_net(c: Decoder, w: Weights, x_btd: Array, shard: Shard) -> Array:
    def up(x_btd: Array, w: Weights) -> Array:
        y_btd = norm(c, w, "mlp", x_btd, shard)
        return project("btd,md->btm", y_btd, w["w_up"], shard)

    def down(up_btm: Array, w_down: Array) -> Array:
        return project("btm,dm->btd", gelu(up_btm), w_down, shard)

    used = _subset(w, "scale_mlp", "bias_mlp", "w_up")
    up_btm = remat.cheap(c.remat, up, x_btd, used)
    if c.bias:
        up_btm = _add_bias(up_btm, w["b_up"], shard)
    up_btm = remat.name(shard(up_btm, "batch", "seq", "mlp"), "mlp")
    return remat.cheap(c.remat, down, up_btm, w["w_down"])


def layer(
    c: Decoder, shard: Shard, angles: Angles, mix: Mix, x_btd: Array, w: Weights, drop: Drop = whole
) -> tuple[Array, PyTree]:
    def mix_after_sums(*qkv: Array) -> tuple[Array, PyTree]:
        qkv, used = after_sums(qkv, _subset(w, "w_gate", "w_up", "w_down"), shard)
        y_bthk, extra = mix(*qkv)
        return y_bthk, (extra, used)

    x_btd, (extra, net) = attend(c, w, x_btd, shard, angles=angles, mix=mix_after_sums, drop=drop)
    return feed_forward(c, {**w, **net}, x_btd, shard, drop), extra


def embed(c: Decoder, params: PyTree, tokens_bt: Array, position_bt: Array, shard: Shard) -> Array:
    with jax.named_scope("embed"):
        if c.positions == "learned":
            x_btd = _with_positions(params, tokens_bt, position_bt, shard)
        else:
            x_btd = lookup(params["embed"], tokens_bt, shard, axes=TABLE, dtype=c.dtype)
        return shard(x_btd.astype(c.dtype), "batch", "seq", None)


def _with_positions(params: PyTree, tokens_bt: Array, position_bt: Array, shard: Shard) -> Array:
    """Add up the vectors of tokens and of learned places in float32, to round their sum once."""
    x_btd = lookup(params["embed"], tokens_bt, shard, axes=TABLE)
    return x_btd + lookup(params["pos"], position_bt, shard, axes=(None, "embed"))


def decode(c: Decoder, params: PyTree, batch: Batch, shard: Shard) -> Array:
    """Compute the last normed hidden states [B, T, D]. Times `head` they are logits.

    ``batch`` has ``tokens`` and ``positions`` [B, T], and ``segments`` if rows have documents.
    """
    position_bt = batch["positions"]
    x_btd = embed(c, params, batch["tokens"], position_bt, shard)
    mix = mixer(c, batch.get("segments"), shard)
    body = functools.partial(layer, c, shard, angles(c, position_bt), mix)
    return stacked(c, params, body, x_btd, params["blocks"], shard)


def stacked(c: Decoder, params: PyTree, body: Body, x: Array, stack: PyTree, shard: Shard) -> Array:
    """Take x [B, T, D] through ``body`` of each of a stack's entries, and the last norm."""
    x, _ = remat.scan(
        body, x, stack, c.remat, unroll=c.unroll, shard=shard, kernels=KERNELS, once=True
    )
    return norm(c, params, "", x, shard)


def angles(c: Decoder, position_bt: Array) -> Angles:
    return rope_angles(c.rope, position_bt, c.k) if c.positions == "rope" else None


def mixer(c: Decoder, segments_bt: Array | None, shard: Shard, *, causal: bool = True) -> Mix:
    """Make attention within a row, if the layout splits rows, heads or the sequence (`nn.ring`)."""
    blocks = None
    if segments_bt is not None and shard.devices[0] == "tpu":
        blocks = attention_lib.blocks_of(segments_bt, shard, c.k, causal=causal, window=c.window)

    def mix(q_bthk: Array, k_bsgk: Array, v_bsgk: Array) -> tuple[Array, None]:
        n_parts = shard.size("heads", q_bthk.shape[2])
        if k_bsgk.shape[2] % n_parts:
            k_bsgk, v_bsgk = _repeated(k_bsgk, v_bsgk, n_parts, shard)
        if shard.names("seq", q_bthk.shape[1]):
            y_bthk = ring.attention(
                shard, q_bthk, k_bsgk, v_bsgk, segments_bt, causal=causal, window=c.window
            )
        else:
            y_bthk = attention_lib.within(
                shard,
                q_bthk,
                k_bsgk,
                v_bsgk,
                causal=causal,
                window=c.window,
                segments_bt=segments_bt,
                blocks=blocks,
                documents=c.documents or 0,
                keep="attention",
                policy=c.remat,
            )
        return y_bthk, None

    return mix


def _repeated(k_bsgk: Array, v_bsgk: Array, n_parts: int, shard: Shard) -> tuple[Array, Array]:
    """Repeat key and value heads that are too few, so that each device has those of its queries."""
    g = k_bsgk.shape[2]
    times = math.lcm(g, n_parts) // g
    k_bsgk = shard(jnp.repeat(k_bsgk, times, axis=2), "batch", "seq", "heads", None)
    v_bsgk = shard(jnp.repeat(v_bsgk, times, axis=2), "batch", "seq", "heads", None)
    return k_bsgk, v_bsgk


def token_flops(c: Decoder, specs: PyTree) -> int:
    """Count the floating-point operations of products with parameters for one token, forward.

    Each number of a matrix counts 2. A tied embedding counts once, as the head.
    """
    matrices = [s for name, s in specs["blocks"].items() if name.startswith("w_")]
    n_numbers: int = sum(math.prod(s.shape) for s in matrices) + math.prod(head(c, specs).shape)
    return 2 * n_numbers


def attention_flops(c: Decoder, tokens: int, *, causal: bool) -> int:
    """Count the floating-point operations of scores and weighted sums over one row, forward.

    With ``causal``, places that the mask or the window hides are left out.
    """
    pairs = tokens * tokens
    if causal:
        longest = min(c.window or tokens, tokens)
        pairs = longest * (longest + 1) // 2 + (tokens - longest) * longest
    return pair_flops(c) * pairs


def pair_flops(c: Decoder) -> int:
    """Count the floating-point operations of a query and a key in all layers, forward."""
    return c.depth * 2 * 2 * c.heads * c.k
