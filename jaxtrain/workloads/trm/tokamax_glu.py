"""SwiGLU and its two products as one kernel of tokamax, for computations without a derivative.

XLA writes both products out and reads them again. The kernel writes silu(x w_gate) (x w_up) alone.
It is for NVIDIA GPUs of compute capability 9.0, and in a package of its own (tokamax, Apache 2.0).

Shapes: B batch, M rows of an example, N = B × M, K inputs, 2 gate and up, O outputs.
"""

import functools
import logging

import jax
import jax.numpy as jnp

from jaxtrain.nn.tokamax_tracing import HOPPER, PACKAGE, trace_for
from jaxtrain.parallel import kernels
from jaxtrain.parallel.layout import generation
from jaxtrain.types import Array, Axes, Shard
from loaders.io import machine

log = logging.getLogger("jaxtrain")
ROWS, INPUTS, OUTPUTS = 256, 64, 128  # multiples that the kernel takes


def fits(x_bmk: Array, w_k2o: Array, shard: Shard, axes: Axes) -> bool:
    """Whether the kernel computes SwiGLU as `swiglu` on the devices of ``shard``."""
    platform, capability = shard.devices
    lowest, limit = HOPPER
    if platform != "gpu" or not lowest <= generation(capability) < limit:
        return False
    n_outputs = w_k2o.shape[2]
    is_half = x_bmk.dtype.itemsize < 4
    return is_half and n_outputs // shard.size(axes[2], n_outputs) % OUTPUTS == 0


@functools.cache
def is_installed() -> bool:
    """Whether tokamax is installed. It is logged once, since the step's program depends on it."""
    is_here = machine.has_package(PACKAGE)
    if is_here:
        log.info("SwiGLU without a gradient is one kernel of tokamax")
    else:
        log.info(
            "SwiGLU without a gradient is computed by XLA: tokamax, which has a kernel for this"
            " GPU, is not installed; pip install 'jaxtrain[tokamax]' in Python 3.12 or newer"
        )
    return is_here


def swiglu(x_bmk: Array, w_k2o: Array, shard: Shard, axes: Axes) -> Array:
    """Compute silu(x w_gate) (x w_up), [B, M, O] of logical ``axes``, on each device's own part."""
    rows, place, columns = axes
    run = functools.partial(_on_device, shard.devices[1])
    out = shard.spec((*x_bmk.shape[:2], w_k2o.shape[2]), axes)
    arg_axes: list[Axes] = [(rows, place, None), (None, None, columns)]
    return kernels.local(shard, run, (x_bmk, w_k2o), arg_axes, out)


def _on_device(capability: str, x_bmk: Array, w_k2o: Array) -> Array:
    import tokamax

    b, m, k = x_bmk.shape
    filling = (0, -k % INPUTS)
    x_nk = x_bmk.reshape(b * m, k)
    x_nk = jnp.pad(x_nk, ((0, -(b * m) % ROWS), filling))
    w_k2o = jnp.pad(w_k2o, (filling, (0, 0), (0, 0)))
    trace_for(capability)
    y_no: Array = tokamax.gated_linear_unit(
        x_nk, w_k2o, activation=jax.nn.silu, implementation="mosaic"
    )
    return y_no[: b * m].reshape(b, m, -1)
