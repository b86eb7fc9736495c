"""The rates that this very card reaches: cards of one kind differ by a tenth."""

import time
from typing import Any

import jax
import jax.numpy as jnp

SIDE, SMALL_SIDE = 8192, 512  # of square matrices
BYTES, SMALL_BYTES = 2**31, 2**24  # of the array that is copied
REPEATS = 20


def measure(device: jax.Device) -> dict[str, float]:
    """Return FLOP/s of a large bfloat16 product, and bytes/s read and written by a copy."""
    is_small = device.platform == "cpu"
    side = SMALL_SIDE if is_small else SIDE
    n_bytes = SMALL_BYTES if is_small else BYTES
    with jax.default_device(device):
        matrix = jnp.ones((side, side), jnp.bfloat16)
        array = jnp.zeros(n_bytes // 4, jnp.float32)
    product = _seconds(jax.jit(lambda x: x @ x), matrix)
    copy = _seconds(jax.jit(lambda x: x + 1), array)
    return {"flops_per_second": 2 * side**3 / product, "bytes_per_second": 2 * n_bytes / copy}


def _seconds(function: Any, operand: jax.Array) -> float:
    jax.block_until_ready(function(operand))
    begin = time.perf_counter()
    last = operand
    for _ in range(REPEATS):
        last = function(operand)
    jax.block_until_ready(last)
    return (time.perf_counter() - begin) / REPEATS
