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
from jaxtrain.workloads.bird.objective import ALL, NORMS, Inputs, Objective, Section, normed
from jaxtrain.workloads.bird.settings import Settings
from loaders.io import checks

KNOTS, LAST = 17, 3.0  # of the integral along each slice, evenly from 0 to LAST


@dataclass(frozen=True)
class Lejepa(Section):
    """(1 - trade) × distance of views from their mean + trade × SIGReg, of projected features."""

    on_resume = checks.OnResume(checks.FUNCTION, state=("size", "hidden"))

    trade: float = 0.02  # [1] share of SIGReg in the objective
    size: int = 16  # [values] size of a projection
    hidden: int = 2048  # [values] width of the projector's two hidden layers
    norm: str = "batch"  # [name] norm of the projector: batch (over the global batch) or layer
    slices: int = 256  # [directions] number of directions drawn in every step


def problems(c: Settings, s: Lejepa) -> Iterator[tuple[str, str]]:
    yield from checks.choice(s, NORMS, "norm")
    yield from checks.within(s, "[0, 1)", "trade")
    yield from checks.at_least(s, 1, "size", "hidden", "slices")


def validate_data(c: Settings, s: Lejepa, info: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    if c.n_views < 2:
        yield "lejepa.weight", f"is {s.weight}, and a row has one view; set data.views to 2 or more"


def specs(c: Settings, s: Lejepa) -> PyTree:
    h = s.hidden
    table: dict[str, Spec] = {}
    for i, n_in in enumerate((c.embed, h)):
        table[f"w{i}"] = Spec((n_in, h), ("embed", "mlp"), fan_in(n_in))
        channels = {"b": zeros, "scale": ones, "bias": zeros}
        table |= {f"{name}{i}": Spec((h,), ("mlp",), init) for name, init in channels.items()}
    return table | {
        "w_out": Spec((h, s.size), ("embed", None), fan_in(h)),
        "b_out": Spec((s.size,), (None,), zeros),
    }


def projected(s: Lejepa, params: Mapping[str, Array], pooled_rd: Array, weight_r: Array) -> Array:
    """Features through the projector, [R, P]."""
    x_rh = pooled_rd
    for i in range(2):
        x_rh = jnp.einsum("rd,dh->rh", x_rh, params[f"w{i}"]) + params[f"b{i}"][None]
        x_rh = jax.nn.relu(normed(s.norm, x_rh, params[f"scale{i}"], params[f"bias{i}"], weight_r))
    return jnp.einsum("rh,hp->rp", x_rh, params["w_out"]) + params["b_out"][None]


def loss(s: Lejepa, x: Inputs) -> tuple[Array, dict[str, Mean]]:
    z_vbp = x.by_view(projected(s, x.params, x.features.pooled_rd, x.weight_r)).transpose(1, 0, 2)
    assert x.key is not None  # only training batches have this objective
    a_ps = directions(fold_in_path(x.key, "slices"), s.size, s.slices)
    # Both are of the global batch, and so identical in every part of it. Weights make them add up
    # to themselves.
    parts = {"invariance": invariance(z_vbp, x.weight_b), "sigreg": sigreg(z_vbp, a_ps, x.weight_b)}
    total = (1 - s.trade) * parts["invariance"] + s.trade * parts["sigreg"]
    n = x.weight_b.sum()
    return total * n, {f"lejepa_{name}": Mean(value * n, n) for name, value in parts.items()}


def directions(key: Key, size: int, slices: int) -> Array:
    """float32 [P, S]: random directions, of unit length."""
    a_ps = jax.random.normal(key, (size, slices))
    return a_ps / jnp.broadcast_to(jnp.linalg.norm(a_ps, axis=0, keepdims=True), a_ps.shape)


def sigreg(z_vbp: Array, a_ps: Array, weight_b: Array) -> Array:
    """Return the distance of features from a Gaussian, times B, the global batch's weight.

    B × mean over views and slices of sum_k w_k ((mean_b cos t_k u - phi_k)^2 + (mean_b sin t_k
    u)^2), u = z A. phi_k = exp(-t_k^2 / 2); w_k = phi_k times the trapezoid rule's weights, twice,
    for the half line that symmetry leaves out. Rows of weight 0 are left out.
    """
    t = np.linspace(0, LAST, KNOTS)
    phi = np.exp(-(t**2) / 2)
    w = 2 * (LAST / (KNOTS - 1)) * phi
    w[[0, -1]] /= 2
    total = jnp.maximum(over_data(weight_b.sum()), 1e-9)
    u_vbs = jnp.einsum("vbp,ps->vbs", z_vbp, a_ps, precision=jax.lax.Precision.HIGHEST)

    # all knots at once, or kept for the backward pass, would be 2 K times the batch's projections
    @jax.checkpoint
    def knot(t_k: Array) -> tuple[Array, Array]:
        weight_vbs = jnp.broadcast_to(weight_b[None, :, None], u_vbs.shape)
        return (jnp.cos(t_k * u_vbs) * weight_vbs).sum(1), (jnp.sin(t_k * u_vbs) * weight_vbs).sum(
            1
        )

    cos_kvs, sin_kvs = over_data(jax.lax.map(knot, jnp.asarray(t, jnp.float32)))
    phi_kvs = jnp.broadcast_to(jnp.asarray(phi, jnp.float32)[:, None, None], cos_kvs.shape)
    each_k = (jnp.square(cos_kvs / total - phi_kvs) + jnp.square(sin_kvs / total)).mean((1, 2))
    return total * (each_k * jnp.asarray(w, jnp.float32)).sum()


def invariance(z_vbp: Array, weight_b: Array) -> Array:
    """Mean over all elements of (mean_v z - z)^2, over the global batch."""
    each_b = jnp.square(z_vbp.mean(0, keepdims=True) - z_vbp).mean((0, 2))
    return over_data((each_b * weight_b).sum()) / jnp.maximum(over_data(weight_b.sum()), 1e-9)


def flops(c: Settings, s: Lejepa) -> int:
    h = s.hidden
    return 3 * (2 * (c.embed * h + h * h + h * s.size) + 2 * s.size * s.slices)


OBJECTIVE = Objective(
    Lejepa,
    ALL,
    specs,
    loss,
    flops,
    problems=problems,
    validate_data=validate_data,
    batch_statistic=lambda s: "SIGReg",
)
