"""lejepa: views of a recording agree, and embeddings are spread like a Gaussian (Balestriero & LeCun 2025).

Shapes: V views, B rows, R spectrograms, D embed, H hidden, P projected values, S slices.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jaxtrain.specs import fan_in, fold_in_path, ones, zeros
from jaxtrain.types import Array, Mean, PyTree, Spec
from jaxtrain.workloads.bird import sigreg
from jaxtrain.workloads.bird.heads import NORMS, normed
from jaxtrain.workloads.bird.objective import ALL, Inputs, Objective, Section
from jaxtrain.workloads.bird.settings import Settings
from loaders.io import checks


@dataclass(frozen=True)
class Lejepa(Section):
    """(1 - trade) × distance of the views from their mean + trade × SIGReg, of projected features."""

    trade: float = 0.02  # [1] share of SIGReg
    size: int = 16  # [values] of a projection
    hidden: int = 2048  # [values] width of the projector's two hidden layers
    norm: str = "batch"  # [name] of these: batch (over the global batch) or layer
    slices: int = 256  # [directions] drawn in every step


def problems(c: Settings, s: Lejepa) -> Iterator[tuple[str, str]]:
    del c
    yield from checks.choice(s, NORMS, "norm")
    yield from checks.within(s, "[0, 1)", "trade")
    yield from checks.at_least(s, 1, "size", "hidden", "slices")


def data_problems(c: Settings, s: Lejepa, facts: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    del facts
    if c.n_views < 2:
        yield "lejepa.weight", f"is {s.weight}, and a row has one view; set data.views to 2 or more"


def specs(c: Settings, s: Lejepa) -> PyTree:
    h = s.hidden
    table: dict[str, Spec] = {}
    for i, n_in in enumerate((c.embed, h)):
        table |= {
            f"w{i}": Spec((n_in, h), ("embed", "mlp"), fan_in(n_in)),
            f"b{i}": Spec((h,), ("mlp",), zeros),
            f"scale{i}": Spec((h,), ("mlp",), ones),
            f"bias{i}": Spec((h,), ("mlp",), zeros),
        }
    return table | {"w_out": Spec((h, s.size), ("embed", None), fan_in(h)), "b_out": Spec((s.size,), (None,), zeros)}


def projected(s: Lejepa, params: PyTree, pooled_rd: Array, weight_r: Array) -> Array:
    """Features through the projector, [R, P]."""
    x_rh = pooled_rd
    for i in range(2):
        x_rh = jnp.einsum("rd,dh->rh", x_rh, params[f"w{i}"]) + params[f"b{i}"][None]
        x_rh = jax.nn.relu(normed(s.norm, x_rh, params[f"scale{i}"], params[f"bias{i}"], weight_r))
    return jnp.einsum("rh,hp->rp", x_rh, params["w_out"]) + params["b_out"][None]


def loss(s: Lejepa, x: Inputs) -> tuple[Array, dict[str, Mean]]:
    z_vbp = x.by_view(projected(s, x.params, x.features.pooled_rd, x.weight_r)).transpose(1, 0, 2)
    assert x.key is not None  # only training batches have this objective
    a_ps = sigreg.directions(fold_in_path(x.key, "slices"), s.size, s.slices)
    # Both are of the global batch, and so identical in every part of it; weighted to add up to themselves.
    parts = {"invariance": sigreg.invariance(z_vbp, x.weight_b), "sigreg": sigreg.sigreg(z_vbp, a_ps, x.weight_b)}
    total = (1 - s.trade) * parts["invariance"] + s.trade * parts["sigreg"]
    n = x.weight_b.sum()
    return total * n, {f"lejepa_{name}": Mean(value * n, n) for name, value in parts.items()}


def flops(c: Settings, s: Lejepa) -> int:
    h = s.hidden
    return 3 * (2 * (c.embed * h + h * h + h * s.size) + 2 * s.size * s.slices)


OBJECTIVE = Objective(
    Lejepa, ALL, specs, loss, flops, problems=problems, data_problems=data_problems, batch_statistic=lambda s: "SIGReg"
)  # fmt: skip
