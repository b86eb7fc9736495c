"""lejepa: views agree, and embeddings spread as a Gaussian does (Balestriero & LeCun 2025).

SIGReg compares, along random directions, the empirical characteristic function of a batch with that
of a standard normal. Both statistics are over the global batch on every mesh
(`jaxtrain.nn.batch_norm.over_data`); with train.accumulate = n they are of a microbatch.

Shapes: V views, B rows, R spectrograms, D embed, H hidden, P projected values, S slices, K knots.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxtrain.nn.batch_norm import over_data
from jaxtrain.specs import fan_in, fold_in_path, ones, zeros
from jaxtrain.types import Array, Key, Mean, PyTree, Spec
from jaxtrain.workloads.bird.objective import ALL, Inputs, Objective, Section, batch_normed
from jaxtrain.workloads.bird.settings import Settings
from loaders.io import checks

SIZE = 16  # [values] of a projection
SLICES = 256  # [directions] drawn in every step
KNOTS = 17  # of the integral along each slice, evenly from 0 to LAST
LAST = 3.0


@dataclass(frozen=True)
class Lejepa(Section):
    """(1 - trade) × distance of views from their mean + trade × SIGReg, of projected features."""

    on_resume = checks.OnResume(checks.FUNCTION, state=("hidden",))

    trade: float = 0.02  # [1] share of SIGReg in the objective
    hidden: int = 2048  # [values] width of the projector's two hidden layers


def problems(c: Settings, s: Lejepa) -> Iterator[tuple[str, str]]:
    yield from checks.within(s, "[0, 1)", "trade")
    yield from checks.at_least(s, 1, "hidden")


def validate_data(c: Settings, s: Lejepa, info: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    if c.n_views < 2:
        yield "lejepa.weight", f"is {s.weight}, and a row has one view; set data.views to 2 or more"


def specs(c: Settings, s: Lejepa) -> PyTree:
    d, h = c.embed, s.hidden
    return {
        "w0": Spec((d, h), ("embed", "mlp"), fan_in(d)),
        "b0": Spec((h,), ("mlp",), zeros),
        "scale0": Spec((h,), ("mlp",), ones),
        "bias0": Spec((h,), ("mlp",), zeros),
        "w1": Spec((h, h), ("embed", "mlp"), fan_in(h)),
        "b1": Spec((h,), ("mlp",), zeros),
        "scale1": Spec((h,), ("mlp",), ones),
        "bias1": Spec((h,), ("mlp",), zeros),
        "w_out": Spec((h, SIZE), ("embed", None), fan_in(h)),
        "b_out": Spec((SIZE,), (None,), zeros),
    }


def projected(params: Mapping[str, Array], pooled_rd: Array, weight_r: Array) -> Array:
    """Features through the projector, [R, P]."""
    x_rh = jnp.einsum("rd,dh->rh", pooled_rd, params["w0"])
    x_rh += params["b0"][None]
    x_rh = jax.nn.relu(batch_normed(x_rh, params["scale0"], params["bias0"], weight_r))
    x_rh = jnp.einsum("rd,dh->rh", x_rh, params["w1"])
    x_rh += params["b1"][None]
    x_rh = jax.nn.relu(batch_normed(x_rh, params["scale1"], params["bias1"], weight_r))
    z_rp = jnp.einsum("rh,hp->rp", x_rh, params["w_out"])
    return z_rp + params["b_out"][None]


def loss(s: Lejepa, x: Inputs) -> tuple[Array, dict[str, Mean]]:
    z_rp = projected(x.params, x.features.pooled_rd, x.weight_r)
    z_vbp = x.by_view(z_rp).transpose(1, 0, 2)
    assert x.key is not None  # only training batches have this objective
    a_ps = directions(fold_in_path(x.key, "slices"), SIZE, SLICES)
    # Both are of the global batch, and so identical in every part of it. Weights make them add up
    # to themselves.
    distance = invariance(z_vbp, x.weight_b)
    spread = sigreg(z_vbp, a_ps, x.weight_b)
    total = (1 - s.trade) * distance + s.trade * spread
    n = x.weight_b.sum()
    return total * n, {
        "lejepa_invariance": Mean(distance * n, n),
        "lejepa_sigreg": Mean(spread * n, n),
    }


def directions(key: Key, size: int, slices: int) -> Array:
    """float32 [P, S]: random directions, of unit length."""
    a_ps = jax.random.normal(key, (size, slices))
    length_1s = jnp.linalg.norm(a_ps, axis=0, keepdims=True)
    return a_ps / jnp.broadcast_to(length_1s, a_ps.shape)


def sigreg(z_vbp: Array, a_ps: Array, weight_b: Array) -> Array:
    """Return the distance of features from a Gaussian, times B, the global batch's weight.

    B × mean over views and slices of sum_k w_k ((mean_b cos t_k u - phi_k)^2 + (mean_b sin t_k
    u)^2), u = z A. phi_k = exp(-t_k^2 / 2); w_k = phi_k times the trapezoid rule's weights, twice,
    for the half line that symmetry leaves out. Rows of weight 0 are left out.
    """
    t_k = np.linspace(0, LAST, KNOTS)
    phi_k = np.exp(-(t_k**2) / 2)
    w_k = 2 * (LAST / (KNOTS - 1)) * phi_k
    w_k[[0, -1]] /= 2
    total = jnp.maximum(over_data(weight_b.sum()), 1e-9)
    u_vbs = jnp.einsum("vbp,ps->vbs", z_vbp, a_ps, precision=jax.lax.Precision.HIGHEST)

    # all knots at once, or kept for the backward pass, would be 2 K times the batch's projections
    @jax.checkpoint
    def sums_at_knot(t: Array) -> tuple[Array, Array]:
        weight_vbs = jnp.broadcast_to(weight_b[None, :, None], u_vbs.shape)
        cos_vs = (jnp.cos(t * u_vbs) * weight_vbs).sum(1)
        sin_vs = (jnp.sin(t * u_vbs) * weight_vbs).sum(1)
        return cos_vs, sin_vs

    cos_kvs, sin_kvs = over_data(jax.lax.map(sums_at_knot, jnp.asarray(t_k, jnp.float32)))
    phi_kvs = jnp.broadcast_to(jnp.asarray(phi_k, jnp.float32)[:, None, None], cos_kvs.shape)
    cos_error_kvs = jnp.square(cos_kvs / total - phi_kvs)
    sin_error_kvs = jnp.square(sin_kvs / total)
    error_k = (cos_error_kvs + sin_error_kvs).mean((1, 2))
    return total * (error_k * jnp.asarray(w_k, jnp.float32)).sum()


def invariance(z_vbp: Array, weight_b: Array) -> Array:
    """Mean over all elements of (mean_v z - z)^2, over the global batch."""
    mean_1bp = z_vbp.mean(0, keepdims=True)
    distance_b = jnp.square(mean_1bp - z_vbp).mean((0, 2))
    total = over_data((distance_b * weight_b).sum())
    return total / jnp.maximum(over_data(weight_b.sum()), 1e-9)


def flops(c: Settings, s: Lejepa) -> int:
    h = s.hidden
    projector = c.embed * h + h * h + h * SIZE
    return 3 * (2 * projector + 2 * SIZE * SLICES)


OBJECTIVE = Objective(
    Lejepa,
    ALL,
    specs,
    loss,
    flops,
    problems=problems,
    validate_data=validate_data,
    batch_statistic="SIGReg",
)
