"""diet: classify the recording among all (Ibrahim et al. 2024).

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
from jaxtrain.workloads.bird.objective import ALL, NORMS, Inputs, Objective, Section, normed
from jaxtrain.workloads.bird.settings import Settings
from loaders.io import checks

# rows of the table of recordings come in these, so that devices can share them
TABLE_MULTIPLE = 128


@dataclass(frozen=True)
class Diet(Section):
    """A softmax over all recordings, from features of a low rank."""

    on_resume = checks.OnResume(checks.FUNCTION, free=("chunk",), state=("rank",))

    rank: int = 64  # [values] size of the layer between the features and the recordings
    label_smoothing: float = 0.0  # [1] share of the target that is spread over all recordings
    chunk: int = 1024  # [views] views on each device whose logits exist at the same time
    # [name] norm before the table: batch (over the global batch), layer or none
    norm: str = "batch"
    # [1] temperature, by which cosines are divided (Wu et al. 2018); 0 = plain products, as
    # published
    temperature: float = 0.1


def problems(c: Settings, s: Diet) -> Iterator[tuple[str, str]]:
    yield from checks.choice(s, (*NORMS, "none"), "norm")
    yield from checks.within(s, "[0, 1)", "label_smoothing")
    yield from checks.not_negative(s, "temperature")
    yield from checks.at_least(s, 1, "rank", "chunk")


def validate_data(c: Settings, s: Diet, info: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    if c.n_recordings is None:
        yield "n_recordings", "is None, and the dataset info of the loader has no n_recordings"


def table_rows(c: Settings) -> int:
    """Rows of the table of recordings, of which those beyond ``n_recordings`` are never read."""
    return -(-(c.n_recordings or 1) // TABLE_MULTIPLE) * TABLE_MULTIPLE


def specs(c: Settings, s: Diet) -> PyTree:
    d, k = c.embed, s.rank
    norm = {"scale_low": Spec((k,), (None,), ones), "bias_low": Spec((k,), (None,), zeros)}
    return {
        "w_low": Spec((d, k), ("embed", None), fan_in(d)),
        "b_low": Spec((k,), (None,), zeros),
        "w_recordings": Spec((table_rows(c), k), ("vocab", None), fan_in(k)),
        **(norm if s.norm != "none" else {}),
    }


def loss(s: Diet, x: Inputs) -> tuple[Array, dict[str, Mean]]:
    """Cross-entropy with the recording's index, under mixup with both, by their shares."""
    index_b = x.batch["index"]
    weight_bv = jnp.broadcast_to(x.weight_b[:, None] / x.c.n_views, (index_b.shape[0], x.c.n_views))
    low_bvk, table = head(s, x)

    def entropy(index_b: Array, weight_bv: Array) -> Sums:
        label_bv = jnp.broadcast_to(index_b[:, None], weight_bv.shape)
        size, smoothing = x.c.n_recordings, s.label_smoothing
        return cross_entropy(
            low_bvk,
            table,
            label_bv,
            weight_bv,
            x.shard,
            chunk=s.chunk,
            size=size,
            smoothing=smoothing,
        )

    if x.share_bv is None:
        own = entropy(index_b, weight_bv)
        return own.loss, {"diet_accuracy": Mean(own.correct, weight_bv.sum())}
    own_bv, other_bv = weight_bv * x.share_bv, weight_bv * (1 - x.share_bv)
    own, other = entropy(index_b, own_bv), entropy(augment.partner(index_b), other_bv)
    return own.loss + other.loss, {"diet_accuracy": Mean(own.correct, own_bv.sum())}


def head(s: Diet, x: Inputs) -> tuple[Array, Array]:
    """Features of low rank [B, V, K], and the table [rows, K]: their products are logits."""
    low_rk = x.features.pooled_rd @ x.params["w_low"] + x.params["b_low"][None]
    if s.norm != "none":
        low_rk = normed(
            s.norm,
            low_rk,
            x.params["scale_low"],
            x.params["bias_low"],
            views.repeated(x.c, x.weight_b),
        )
    low_rk, table = jax.nn.relu(low_rk), x.params["w_recordings"]
    if s.temperature:
        low_rk, table = unit(low_rk) / s.temperature, unit(table)
    return x.by_view(low_rk.astype(jnp.dtype(x.c.dtype))), table


def unit(x: Array) -> Array:
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
    batch_statistic=lambda s: "diet's batch norm" if s.norm == "batch" else "",
)
