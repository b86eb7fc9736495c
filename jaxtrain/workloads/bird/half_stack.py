"""The stack of `vit.run_stack` in 16 bits on GPUs, whose time is that of the bytes that it moves.

It computes the same function with fewer arrays of all tokens:

    rows       The tokens of all examples are the rows of one matrix, so that a product adds its
               bias. They are padded once, not in each layer, to a number that products and
               attention take.
    folded     A norm's scale and bias are part of the matrices that read it, and a learned factor
               of a layer's output is part of its last matrix. Their gradients are sums over
               matrices, not over tokens.
    backward   A norm keeps its input, and an activation its inputs. Each is computed again in the
               backward pass, together with its derivative if it is an activation.

Shapes: B batch, T tokens, N = B × T rows, D embed, H heads, K head dimension, P = H × K, M mlp,
L layers.
"""

import functools
import math
import operator
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp

from jaxtrain.nn import attention, remat
from jaxtrain.nn.layers import gelu, layer_norm, product, rotate, sums_gradients
from jaxtrain.types import Array, PyTree, Shard

if TYPE_CHECKING:
    from jaxtrain.workloads.bird.vit import Stack

EXACT = jax.lax.Precision.HIGHEST
ROWS = 8  # XLA pads each 16-bit product whose rows are no multiple of it
TOKENS = 2  # cuDNN's attention takes multiples of it
Matrices = tuple[Array, ...]
Activation = Callable[..., Array]  # number by number


class Tokens(NamedTuple):
    """How the rows of the matrix [N, D] are the tokens of examples."""

    batch: int
    padded: int  # tokens of an example, with padding
    length: int  # tokens of an example, without
    turns: tuple[Array, Array] | None  # cos and sin [B or 1, T, 1, K / 2] of rotary positions

    @property
    def rows(self) -> int:
        return self.batch * self.padded


def fits(s: "Stack", x_btd: Array, shard: Shard) -> bool:
    """Whether the stack is in 16 bits, for GPUs, with whole rows on each device."""
    is_on_gpus = shard.devices[0] == "gpu"
    is_half = jnp.dtype(s.dtype).itemsize < 4
    return is_on_gpus and is_half and shard.size("seq", x_btd.shape[1]) == 1


def run_stack(
    s: "Stack", stack: PyTree, x_btd: Array, shard: Shard, turns: tuple[Array, Array] | None
) -> Array:
    """Tokens [B, T, D] through the layers of a stack, in its dtype."""
    b, t, d = x_btd.shape
    n_padded = padded_length(b // shard.size("batch", b), t)
    filling = ((0, 0), (0, n_padded - t), (0, 0))
    if turns is not None:
        cos_bt1k, sin_bt1k = (jnp.pad(z, (*filling, (0, 0))) for z in turns)
        turns = (cos_bt1k, sin_bt1k)
    tokens = Tokens(b, n_padded, t, turns)

    def layer(x_nd: Array, w: PyTree) -> tuple[Array, None]:
        x_nd = attend(s, w, x_nd, shard, tokens)
        x_nd = feed_forward(s, w, x_nd, shard)
        return shard(x_nd, "batch", None), None

    with jax.named_scope("fold"):
        folded = fold(s, stack, is_summed=sums_gradients(shard))
    x_nd = jnp.pad(x_btd.astype(s.dtype), filling).reshape(tokens.rows, d)
    x_nd = shard(x_nd, "batch", None)
    x_nd, _ = remat.scan(layer, x_nd, folded, s.remat, unroll=s.unroll or s.depth)
    return x_nd.reshape(b, n_padded, d)[:, :t]


def padded_length(b: int, t: int) -> int:
    """Return the smallest number of tokens, t or more, so that ``b`` examples need no padding."""
    multiple = math.lcm(TOKENS, ROWS // math.gcd(ROWS, b))
    return -(-t // multiple) * multiple


def fold(s: "Stack", stack: PyTree, *, is_summed: bool = False) -> dict[str, Array]:
    """Return the matrices and biases of all layers, in the stack's dtype, and norms of q and k.

    ``is_summed``: they stay in float32, in which devices then add up their gradients. Each product
    rounds them.
    """
    l, d, p = s.depth, s.embed, s.embed
    folded: dict[str, Array] = {}
    w_qkv = stack["w_qkv"].reshape(l, d, 3, p)
    b_qkv = stack["b_qkv"].reshape(l, 3, p)
    norm = (stack["scale_attention"], stack["bias_attention"])
    for i, name in enumerate("qkv"):
        folded[f"w_{name}"], b_lp = _with_norm(norm, w_qkv[:, :, i])
        folded[f"b_{name}"] = b_lp + b_qkv[:, i]
    folded["w_out"], folded["b_out"] = stack["w_out"].reshape(l, p, d), stack["b_out"]
    norm = (stack["scale_mlp"], stack["bias_mlp"])
    folded["w_up"], folded["b_up"] = _with_norm(norm, stack["w_up"])
    folded["w_down"] = stack["w_down"]
    if s.gated:
        folded["w_gate"], folded["b_gate"] = _with_norm(norm, stack["w_gate"])
    else:
        folded["b_up"] += stack["b_up"]
        folded["b_down"] = stack["b_down"]
    if s.layer_scale:
        _multiply(folded, stack["scale_added_attention"], "w_out", "b_out")
        _multiply(folded, stack["scale_added_mlp"], "w_down", "b_down")
    if not is_summed:
        folded = {name: x.astype(s.dtype) for name, x in folded.items()}
    norms = {name: stack[name] for name in stack if name.endswith(("_q", "_k"))}
    return folded | norms


def _with_norm(norm: tuple[Array, Array], w_ldm: Array) -> tuple[Array, Array]:
    """Return matrices and biases that read the norm without its own scale and bias."""
    scale_ld, bias_ld = norm
    b_lm = jnp.einsum("ld,ldm->lm", bias_ld, w_ldm, precision=EXACT)
    return scale_ld[:, :, None] * w_ldm, b_lm


def _multiply(folded: dict[str, Array], factor_ld: Array, w: str, b: str) -> None:
    """Multiply the results of a matrix and its bias by ``factor_ld``."""
    folded[w] = folded[w] * factor_ld[:, None]
    if b in folded:
        folded[b] = folded[b] * factor_ld


def attend(s: "Stack", w: PyTree, x_nd: Array, shard: Shard, tokens: Tokens) -> Array:
    """Compute x + attention(norm(x))."""
    shape = (tokens.batch, tokens.padded, s.heads, s.embed // s.heads)

    def heads(z_np: Array, name: str) -> Array:
        z_bthk = (z_np + _row(w[f"b_{name}"], z_np)).reshape(shape)
        return shard(z_bthk, "batch", "seq", "heads", "head_dim")

    with jax.named_scope("attention"):
        matrices = (w["w_q"], w["w_k"], w["w_v"])
        q_np, k_np, v_np = normed_products(s.eps, x_nd, matrices)
        q_bthk, k_bthk, v_bthk = heads(q_np, "q"), heads(k_np, "k"), heads(v_np, "v")
        if s.qk_norm or tokens.turns is not None:
            q_bthk = placed(s, q_bthk, (w.get("scale_q"), w.get("bias_q")), tokens.turns)
            k_bthk = placed(s, k_bthk, (w.get("scale_k"), w.get("bias_k")), tokens.turns)
        length = tokens.length if tokens.length < tokens.padded else 0
        y_bthk = attention.within(shard, q_bthk, k_bthk, v_bthk, length=length, policy=s.remat)
        y_nd = product("np,pd->nd", y_bthk.reshape(tokens.rows, s.embed), w["w_out"], shard)
        y_nd = remat.name(y_nd + _row(w["b_out"], y_nd), "attention")
        return x_nd + y_nd


def feed_forward(s: "Stack", w: PyTree, x_nd: Array, shard: Shard) -> Array:
    """Compute x + MLP(norm(x))."""
    names = ("gate", "up") if s.gated else ("up",)
    if s.gated:
        activation: Activation = swiglu
    else:
        activation = gelu if s.exact else gelu_by_tanh
    with jax.named_scope("mlp"):
        matrices = tuple(w[f"w_{name}"] for name in names)
        inputs = []
        for name, z_nm in zip(names, normed_products(s.eps, x_nd, matrices), strict=True):
            z_nm = z_nm + _row(w[f"b_{name}"], z_nm)
            inputs.append(shard(z_nm, "batch", "mlp"))
        y_nd = activated_product(activation, tuple(inputs), w["w_down"])
        if not s.gated:
            y_nd = y_nd + _row(w["b_down"], y_nd)
        return x_nd + remat.name(y_nd, "mlp")


def _row(b_d: Array, y_nd: Array) -> Array:
    return jnp.broadcast_to(b_d, y_nd.shape).astype(y_nd.dtype)


def placed(
    s: "Stack",
    z_bthk: Array,
    norm: tuple[Array | None, Array | None],
    turns: tuple[Array, Array] | None,
) -> Array:
    """Norm and rotate queries or keys. The backward pass does so once more."""

    def place(z_bthk: Array, norm: tuple[Array | None, Array | None]) -> Array:
        scale, bias = norm
        if scale is not None:
            z_bthk = layer_norm(z_bthk, scale, bias, s.eps)
        return z_bthk if turns is None else rotate(z_bthk, turns)

    if s.remat == "none":
        place = jax.checkpoint(place)
    return place(z_bthk, norm)


# --- Norms and the products that read them -----------------------------------------------------


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def normed_products(eps: float, x_nd: Array, matrices: Matrices) -> list[Array]:
    """Multiply (x - mean) / sqrt(var + eps) of each row by each of the matrices."""
    unit_nd, _ = _unit(eps, x_nd)
    unit_nd = unit_nd.astype(x_nd.dtype)
    return [unit_nd @ w.astype(x_nd.dtype) for w in matrices]


def _unit(eps: float, x_nd: Array) -> tuple[Array, Array]:
    """Return (x - mean) rate and rate = 1 / sqrt(var + eps) of each row, in float32."""
    y_nd = x_nd.astype(jnp.float32)
    y_nd = y_nd - y_nd.mean(-1, keepdims=True)
    variance_n1 = jnp.square(y_nd).mean(-1, keepdims=True)
    rate_n1 = jax.lax.rsqrt(variance_n1 + eps)
    return y_nd * rate_n1, rate_n1


def _forward_of_norm(
    eps: float, x_nd: Array, matrices: Matrices
) -> tuple[list[Array], tuple[Array, Matrices]]:
    # Kept means and rates would be results, and XLA makes three kernels of a norm with those.
    return normed_products(eps, x_nd, matrices), (x_nd, matrices)


def _backward_of_norm(
    eps: float, residuals: tuple[Array, Matrices], dy: list[Array]
) -> tuple[Array, Matrices]:
    """Return the derivatives of x and of the matrices.

    With u = (x - mean) rate, dx = (du - mean(du) - u mean(du u)) rate.
    """
    x_nd, matrices = residuals
    # Without the barrier, XLA would keep the norm of the forward pass.
    x_nd, dy = jax.lax.optimization_barrier((x_nd, dy))
    unit_nd, rate_n1 = _unit(eps, x_nd)
    half_nd = unit_nd.astype(x_nd.dtype)
    dw = tuple(_gradient(half_nd, dy_nm, w) for dy_nm, w in zip(dy, matrices, strict=True))
    parts = [dy_nm @ w.astype(x_nd.dtype).T for dy_nm, w in zip(dy, matrices, strict=True)]
    d_unit_nd = functools.reduce(operator.add, parts).astype(jnp.float32)
    shift_n1 = d_unit_nd.mean(-1, keepdims=True)
    slope_n1 = (d_unit_nd * unit_nd).mean(-1, keepdims=True)
    dx_nd = (d_unit_nd - shift_n1 - unit_nd * slope_n1) * rate_n1
    return dx_nd.astype(x_nd.dtype), dw


def _gradient(x_nd: Array, dy_nm: Array, w_dm: Array) -> Array:
    """Return the gradient by a matrix, in its dtype."""
    return jnp.matmul(x_nd.T, dy_nm, preferred_element_type=w_dm.dtype)


normed_products.defvjp(_forward_of_norm, _backward_of_norm)


# --- Activations and the product that reads them -----------------------------------------------


def gelu_by_tanh(x: Array) -> Array:
    return jax.nn.gelu(x, approximate=True)


def swiglu(gate: Array, up: Array) -> Array:
    """Compute silu(gate) up (Shazeer 2020)."""
    return jax.nn.silu(gate) * up


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def activated_product(activation: Activation, inputs: Matrices, w_md: Array) -> Array:
    """Multiply ``activation(*inputs)``, [N, M], by a matrix."""
    # In 16 bits, XLA computes GELU by tanh within the product before it.
    y_nm = activation(*inputs)
    return y_nm @ w_md.astype(y_nm.dtype)


def _forward_of_activation(
    activation: Activation, inputs: Matrices, w_md: Array
) -> tuple[Array, tuple[Matrices, Array]]:
    return activated_product(activation, inputs, w_md), (inputs, w_md)


def _backward_of_activation(
    activation: Activation, residuals: tuple[Matrices, Array], dy_nd: Array
) -> tuple[Matrices, Array]:
    inputs, w_md = residuals
    dy_nm = dy_nd @ w_md.astype(dy_nd.dtype).T
    # The barriers make one kernel of the activation and its derivatives, after dy.
    inputs, dy_nm = jax.lax.optimization_barrier((inputs, dy_nm))
    wide = [x_nm.astype(jnp.float32) for x_nm in inputs]
    y_nm, pull = jax.vjp(activation, *wide)
    d_inputs = tuple(dx_nm.astype(dy_nm.dtype) for dx_nm in pull(dy_nm.astype(jnp.float32)))
    y_nm, d_inputs = jax.lax.optimization_barrier((y_nm.astype(dy_nm.dtype), d_inputs))
    return d_inputs, _gradient(y_nm, dy_nd, w_md)


activated_product.defvjp(_forward_of_activation, _backward_of_activation)
