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
from jaxtrain.parallel.layout import generation
from jaxtrain.types import Array

CUDNN = 91000  # [version] that a program for GPUs is traced for on a host without one
_PATCHING = threading.Lock()  # one thread at a time replaces JAX's questions to the host


def fused(
    q_bthk: Array,
    k_bsgk: Array,
    v_bsgk: Array,
    *,
    causal: bool,
    window: int,
    length: int = 0,
    capability: str = "",
    implementation: Literal["cudnn", "xla"] = "cudnn",
) -> Array:
    """Call cuDNN's kernel, which has left windows alone. Odd lengths get a place that none sees.

    The kernel writes zeros to the places from ``length`` on, and to their gradients. 0 = none.
    """
    b, t = q_bthk.shape[:2]
    if t % 2:
        q_bthk, k_bsgk, v_bsgk = (
            jnp.pad(x, ((0, 0), (0, 1), (0, 0), (0, 0))) for x in (q_bthk, k_bsgk, v_bsgk)
        )
        if not causal:
            length = length or t
    lengths = jnp.full(b, length, jnp.int32) if length else None
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

    planned = generation(capability)

    def at_least(other: str) -> bool:
        return planned >= generation(other)

    def equal(other: str) -> bool:
        return planned == generation(other)

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
