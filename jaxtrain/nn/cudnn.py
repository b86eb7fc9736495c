"""cuDNN's fused attention, traced for GPUs that need not be here.

Shapes: B batch, T queries, S keys, H heads, G key/value heads, K head dimension.
"""

import contextlib
import threading
from collections.abc import Iterator
from typing import Literal
from unittest import mock

import jax
import jax.numpy as jnp

from jaxtrain.parallel import one_device
from jaxtrain.types import Array

HOPPER = (9, 0)  # compute capability from which cuDNN has heads of more than 128 values
CUDNN = 91000  # [version] that a program for GPUs is traced for on a host without one
_PATCHING = threading.Lock()  # one thread at a time replaces JAX's questions to the host


def fits(shape: tuple[int, ...], capability: str) -> bool:
    """Tell whether these GPUs have a fused kernel, cuDNN's or `nn.flash`, for [B, T, H, K]."""
    generation = _generation(capability)
    return generation >= (8, 0) and shape[3] <= (256 if generation >= HOPPER else 128)


def fused(
    q_bthk: Array,
    k_bsgk: Array,
    v_bsgk: Array,
    *,
    causal: bool,
    window: int,
    capability: str = "",
    implementation: Literal["cudnn", "xla"] = "cudnn",
) -> Array:
    """Call cuDNN's kernel, which has left windows alone. Odd lengths get a place that none sees."""
    b, t = q_bthk.shape[:2]
    lengths = None
    if t % 2:
        q_bthk, k_bsgk, v_bsgk = (
            jnp.pad(x, ((0, 0), (0, 1), (0, 0), (0, 0))) for x in (q_bthk, k_bsgk, v_bsgk)
        )
        if not causal:
            lengths = jnp.full(b, t, jnp.int32)
    left = (window - 1, 0 if causal else window - 1) if window else None
    with _as_on(capability) if implementation == "cudnn" else contextlib.nullcontext():
        y_bthk = jax.nn.dot_product_attention(
            q_bthk,
            k_bsgk,
            v_bsgk,
            is_causal=causal,
            local_window_size=left,
            query_seq_lengths=lengths,
            key_value_seq_lengths=lengths,
            implementation=implementation,
        )
    return y_bthk[:, :t]


@contextlib.contextmanager
def _as_on(capability: str) -> Iterator[None]:
    """Trace as on a host with a GPU of this capability, unless this is one (JAX 0.10 to 0.12)."""
    if one_device.host() in (("gpu", capability), ("gpu", "")):
        yield
        return
    from jax._src.cudnn import fused_attention_stablehlo as cudnn

    own = _generation(capability)

    def at_least(other: str) -> bool:
        return own >= _generation(other)

    def equal(other: str) -> bool:
        return own == _generation(other)

    with (
        _PATCHING,
        mock.patch.multiple(
            cudnn,
            check_cudnn_version=lambda: CUDNN,
            check_compute_capability=at_least,
            is_cuda_compute_capability_equal=equal,
        ),
    ):
        yield


def _generation(capability: str) -> tuple[int, ...]:
    """Parse "9.0" to (9, 0), "gfx942" of another vendor to none; unknown: the oldest supported."""
    if not capability:
        return (8, 0)
    parts = capability.split(".")
    return tuple(int(n) for n in parts) if all(n.isdecimal() for n in parts) else (0, 0)
