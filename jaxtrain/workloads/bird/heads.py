"""Norms of a head's hidden values, by name: a layer that several objectives share.

Shapes: R spectrograms, H hidden values.
"""

import jax.numpy as jnp

from jaxtrain.nn.batch_norm import batch_norm
from jaxtrain.nn.layers import layer_norm
from jaxtrain.types import Array
from jaxtrain.workloads.bird import vit

NORMS = ("batch", "layer")


def normed(norm: str, x_rh: Array, scale_h: Array, bias_h: Array, weight_r: Array) -> Array:
    """Hidden values [R, H]: with "batch" each channel over the valid rows of the global batch, with "layer" each row."""
    if norm == "layer":
        return layer_norm(x_rh, scale_h, bias_h, vit.EPS)
    zero, valid_r1 = jnp.zeros(x_rh.shape[1]), (weight_r > 0).astype(x_rh.dtype)[:, None]
    return batch_norm(x_rh, scale_h, bias_h, {"mean": zero, "var": zero}, valid_r1, momentum=0.0, eps=vit.EPS)[0]
