"""diet: classify the recording among all (Ibrahim et al. 2024).

Features are normalised over the global batch, and logits are cosines (Wu et al. 2018).

Shapes: B rows, V views, R spectrograms, D embed, K rank.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jaxtrain.nn.cross_entropy import Sums, cross_entropy
from jaxtrain.specs import fan_in, ones, zeros
from jaxtrain.types import Array, Mean, PyTree, Spec
from jaxtrain.workloads.bird import augment, views
from jaxtrain.workloads.bird.objective import ALL, Inputs, Objective, Section, batch_normed
from jaxtrain.workloads.bird.settings import Settings
from loaders.io import checks

TABLE_MULTIPLE = 128  # the table of recordings has a multiple of these rows: devices share them
CHUNK = 1024  # [views] on each device whose logits exist at the same time
TEMPERATURE = 0.1  # of the cosines


@dataclass(frozen=True)
class Diet(Section):
    """A softmax over all recordings, from features of a low rank."""

    on_resume = checks.OnResume(checks.FUNCTION, state=("rank",))

    rank: int = 64  # [values] size of the layer between the features and the recordings


def problems(c: Settings, s: Diet) -> Iterator[tuple[str, str]]:
    yield from checks.at_least(s, 1, "rank")


def validate_data(c: Settings, s: Diet, info: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    if c.n_recordings is None:
        yield "n_recordings", "is None, and the dataset info of the loader has no n_recordings"


def table_rows(c: Settings) -> int:
    """Rows of the table of recordings, of which those beyond ``n_recordings`` are never read."""
    n_multiples = -(-(c.n_recordings or 1) // TABLE_MULTIPLE)
    return n_multiples * TABLE_MULTIPLE


def specs(c: Settings, s: Diet) -> PyTree:
    d, k = c.embed, s.rank
    return {
        "w_low": Spec((d, k), ("embed", None), fan_in(d)),
        "b_low": Spec((k,), (None,), zeros),
        "w_recordings": Spec((table_rows(c), k), ("vocab", None), fan_in(k)),
        "scale_low": Spec((k,), (None,), ones),
        "bias_low": Spec((k,), (None,), zeros),
    }


def loss(s: Diet, x: Inputs) -> tuple[Array, dict[str, Mean]]:
    """Cross-entropy with the recording's index, under mixup with both, by their shares."""
    index_b = x.batch["index"]
    weight_b1 = x.weight_b[:, None] / x.c.n_views
    weight_bv = jnp.broadcast_to(weight_b1, (index_b.shape[0], x.c.n_views))
    low_bvk, table = head(s, x)

    def entropy(index_b: Array, weight_bv: Array) -> Sums:
        label_bv = jnp.broadcast_to(index_b[:, None], weight_bv.shape)
        return cross_entropy(
            low_bvk, table, label_bv, weight_bv, x.shard, chunk=CHUNK, size=x.c.n_recordings
        )

    if x.share_bv is None:
        sums = entropy(index_b, weight_bv)
        return sums.loss, {"diet_accuracy": Mean(sums.correct, weight_bv.sum())}
    own_weight_bv = weight_bv * x.share_bv
    partner_weight_bv = weight_bv * (1 - x.share_bv)
    sums = entropy(index_b, own_weight_bv)
    partner_sums = entropy(augment.partner(index_b), partner_weight_bv)
    total = sums.loss + partner_sums.loss
    return total, {"diet_accuracy": Mean(sums.correct, own_weight_bv.sum())}


def head(s: Diet, x: Inputs) -> tuple[Array, Array]:
    """Features of low rank [B, V, K], and the table [rows, K]: their products are logits."""
    low_rk = x.features.pooled_rd @ x.params["w_low"]
    low_rk += x.params["b_low"][None]
    weight_r = views.repeated(x.c, x.weight_b)
    low_rk = batch_normed(low_rk, x.params["scale_low"], x.params["bias_low"], weight_r)
    low_rk = unit(jax.nn.relu(low_rk)) / TEMPERATURE
    table = unit(x.params["w_recordings"])
    return x.by_view(low_rk.astype(jnp.dtype(x.c.dtype))), table


def unit(x: Array) -> Array:
    """Scale the vectors along the last axis to length 1."""
    return x * jax.lax.rsqrt(jnp.square(x).sum(-1, keepdims=True) + 1e-12)


def flops(c: Settings, s: Diet) -> int:
    return 3 * 2 * s.rank * (c.embed + table_rows(c))


OBJECTIVE = Objective(
    Diet,
    ALL,
    specs,
    loss,
    flops,
    problems=problems,
    validate_data=validate_data,
    batch_statistic="diet's batch norm",
)
