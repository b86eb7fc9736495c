"""The limits of the chip itself: matrix products, copies in its memory and from the host."""

import math
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def _rate(run: Callable[[], Any], amount: float, seconds: float) -> float:
    """Of ``amount`` a call: the best of three runs of ``seconds`` / 3, waited for at the end."""
    jax.block_until_ready(run())
    begin = time.perf_counter()
    jax.block_until_ready(run())
    n, best = max(1, math.ceil(seconds / 3 / (time.perf_counter() - begin))), 0.0
    for _ in range(3):
        begin, last = time.perf_counter(), None
        for _ in range(n):
            last = run()
        jax.block_until_ready(last)
        best = max(best, n * amount / (time.perf_counter() - begin))
    return best


def product(device: jax.Device, size: int, dtype: str, seconds: float) -> float:
    """[FLOP/s] of normal square matrices' product. Zeros draw less power: faster."""
    a, b = (
        jax.device_put(jax.random.normal(jax.random.key(i), (size, size), jnp.dtype(dtype)), device)
        for i in range(2)
    )
    times = jax.jit(lambda a, b: a @ b)
    return _rate(lambda: times(a, b), 2 * size**3, seconds)


def measure(device: jax.Device, *, small: bool, quick: bool) -> dict[str, Any]:
    """Rates, with the sizes they were measured at. The products' peak is the best of them."""
    sizes, n_bytes = ((256, 512), 2**22) if small else ((4096, 8192, 16384), 2**31)
    seconds = 0.1 if small else 0.5 if quick else 1.5
    dtype = "float32" if small else "bfloat16"
    products = {str(size): product(device, size, dtype, seconds) for size in sizes}
    x = jax.device_put(jnp.ones(n_bytes // 4, jnp.float32), device)
    add = jax.jit(lambda x: x + 1)  # a plain copy might be left out
    host = np.ones(min(n_bytes, 2**28), np.uint8)
    return {
        "product": {
            "dtype": dtype,
            "flops_per_second": max(products.values()),
            "by_size": products,
        },
        # Read once and written once.
        "copy": {"bytes_per_second": _rate(lambda: add(x), 2 * n_bytes, seconds), "bytes": n_bytes},
        "from_host": {
            "bytes_per_second": _rate(lambda: jax.device_put(host, device), host.nbytes, seconds),
            "bytes": host.nbytes,
        },
    }
