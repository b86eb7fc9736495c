"""LeJEPA: views of one recording agree, and embeddings are spread like an isotropic Gaussian (Balestriero & LeCun 2025).

SIGReg compares, along random directions, the empirical characteristic function of a batch with that of a standard normal.
Both statistics are over the global batch on every mesh (`jaxtrain.nn.batch_norm.over_data`); they do not decompose over
microbatches: with train.accumulate = n they are of a microbatch.

Shapes: V views, B batch, P values of a projected embedding, S slices, K knots.
"""

import jax
import jax.numpy as jnp
import numpy as np

from jaxtrain.nn.batch_norm import over_data
from jaxtrain.types import Array, Key

KNOTS, LAST = 17, 3.0  # of the integral along each slice, evenly from 0 to LAST


def directions(key: Key, size: int, slices: int) -> Array:
    """float32 [P, S]: random directions, of unit length."""
    a_ps = jax.random.normal(key, (size, slices))
    return a_ps / jnp.broadcast_to(jnp.linalg.norm(a_ps, axis=0, keepdims=True), a_ps.shape)


def sigreg(z_vbp: Array, a_ps: Array, weight_b: Array) -> Array:
    """B × mean over views and slices of sum_k w_k ((mean_b cos(t_k u) - phi_k)^2 + (mean_b sin(t_k u))^2), u = z A.

    phi_k = exp(-t_k^2 / 2); w_k = phi_k times the trapezoid rule's weights, twice, for the half line that symmetry leaves out.

    Args:
      weight_b: rows of weight 0 are left out; B is the sum over the global batch.
    """
    t = np.linspace(0, LAST, KNOTS)
    phi = np.exp(-(t**2) / 2)
    w = 2 * (LAST / (KNOTS - 1)) * phi
    w[[0, -1]] /= 2
    total = jnp.maximum(over_data(weight_b.sum()), 1e-9)
    u_vbs = jnp.einsum("vbp,ps->vbs", z_vbp, a_ps, precision=jax.lax.Precision.HIGHEST)

    @jax.checkpoint  # all knots at once, or kept for the backward pass, would be 2 K times the batch's projections
    def knot(t_k: Array) -> tuple[Array, Array]:
        weight_vbs = jnp.broadcast_to(weight_b[None, :, None], u_vbs.shape)
        return (jnp.cos(t_k * u_vbs) * weight_vbs).sum(1), (jnp.sin(t_k * u_vbs) * weight_vbs).sum(1)

    cos_kvs, sin_kvs = over_data(jax.lax.map(knot, jnp.asarray(t, jnp.float32)))
    phi_kvs = jnp.broadcast_to(jnp.asarray(phi, jnp.float32)[:, None, None], cos_kvs.shape)
    each_k = (jnp.square(cos_kvs / total - phi_kvs) + jnp.square(sin_kvs / total)).mean((1, 2))
    return total * (each_k * jnp.asarray(w, jnp.float32)).sum()


def invariance(z_vbp: Array, weight_b: Array) -> Array:
    """Mean over all elements of (mean_v z - z)^2, over the global batch."""
    each_b = jnp.square(z_vbp.mean(0, keepdims=True) - z_vbp).mean((0, 2))
    return over_data((each_b * weight_b).sum()) / jnp.maximum(over_data(weight_b.sum()), 1e-9)
