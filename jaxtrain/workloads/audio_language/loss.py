"""The task of an audio language model: its loss, its evaluation, and the fields of a batch.

A row has U = S + A places, S of them text and A of them columns: those of a bucket, the same for
all its rows. A row's spare places are its last. The fields of a row:

    text          int32 [S]     tokens, in order
    codes         int32 [A, K]  columns, in order
    place         int32 [U]     the place of each text token, then of each column
    slot          int32 [U]     the inverse: which of them stands at each place
    text_at       int32 [N]     places whose state predicts a token, and
    text_target   int32 [N]     the token, negative = nothing
    audio_at      int32 [M]     places whose state predicts a column, and
    audio_target  int32 [M, K]  its codes, negative = nothing
    label_scale   float32 [1 + K]  rows of the global batch over its labels: text, then codebooks
                                   (these again over the number of codebooks that have labels); 0
                                   without labels

Loss = mean over text labels of their cross-entropy + mean over codebooks of the mean over their
labels. Both denominators are the global batch's, which no microbatch knows. Hence ``label_scale``,
by which the loss is a sum over rows.

Shapes: as in `model`.
"""

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxtrain.config import Config as RunConfig
from jaxtrain.nn import transformer
from jaxtrain.nn.cross_entropy import cross_entropy
from jaxtrain.types import (
    Array,
    Axes,
    Batch,
    Key,
    LossOut,
    Mean,
    PyTree,
    Shard,
    Task,
    Variables,
)
from jaxtrain.workloads.audio_language.model import (
    Config,
    audio_logits,
    decode,
    make_specs,
    states,
    step_flops,
    text_logits,
)

# Fields of a batch [rows, …] besides "index", by their numbers of dimensions.
MATRICES = ("text", "place", "slot", "text_at", "text_target", "audio_at", "label_scale")
STACKS = ("codes", "audio_target")


class Labels(NamedTuple):
    """Sums over the labels of one kind."""

    nats: Array  # cross-entropy
    correct: Array
    n_labels: Array

    @property
    def loss(self) -> Mean:
        return Mean(self.nats, self.n_labels)

    @property
    def accuracy(self) -> Mean:
        return Mean(self.correct, self.n_labels)


def make_task(config: RunConfig[Config], shard: Shard, batch: int) -> Task:
    c = config.model
    frozen = bool(config.lora.rank)
    axes: dict[str, Axes] = {"index": ("batch",)}
    for name in MATRICES:
        axes[name] = ("batch", None)
    for name in STACKS:
        axes[name] = ("batch", None, None)
    flops: float = 0  # of the mean row, as places is
    full_flops: float = 0
    places: float = 0
    for bucket in c.buckets or ():
        n_text, n_audio, _, _, share = bucket
        flops += share * step_flops(c, bucket, causal=True, frozen=frozen)
        full_flops += share * step_flops(c, bucket, causal=False, frozen=frozen)
        places += share * (n_text + n_audio)
    return Task(
        specs=Variables(make_specs(c)),
        loss=functools.partial(loss, c, shard),
        evaluate=functools.partial(evaluate, c, shard),
        axes=axes,
        flops=int(batch * flops),
        full_flops=int(batch * full_flops),
        finish=functools.partial(finish, c),
        tokens=batch * places,
        predict=functools.partial(predict, c, shard),
    )


def loss(c: Config, shard: Shard, variables: Variables, batch: Batch, key: Key) -> LossOut:
    x_bud = decode(c, variables.params, batch, shard)
    total, metrics = measure(c, variables.params, x_bud, batch, shard)
    return LossOut(Mean(total, jnp.float32(batch["row"].shape[0])), metrics)


def predict(c: Config, shard: Shard, variables: Variables, batch: Batch) -> dict[str, Array]:
    """Logits ``text`` [B, U, V] and ``audio`` [B, U, K, codes] of all places of the rows."""
    params = variables.params
    x_bud = decode(c, params, batch, shard)
    text = text_logits(c, params, x_bud)
    return {"text": text, "audio": audio_logits(params, x_bud)}


def evaluate(c: Config, shard: Shard, variables: Variables, batch: Batch) -> dict[str, Mean]:
    x_bud = decode(c, variables.params, batch, shard)
    return measure(c, variables.params, x_bud, batch, shard)[1]


def finish(c: Config, record: Mapping[str, Any]) -> dict[str, float]:
    """Add the loss over a whole split, whose labels no batch's scale counts."""
    text = record["text"]
    codebooks = _labelled([record[f"audio_{k}"] for k in range(c.codebooks)])
    audio = math.nan
    if codebooks:
        audio = sum(codebooks) / len(codebooks)
    loss = sum(_labelled([text, audio]))
    return {**record, "text": text, "audio": audio, "loss": loss}


def _labelled(means: Sequence[float]) -> list[float]:
    """Leave out the means without labels, which are NaN."""
    return [mean for mean in means if not math.isnan(mean)]


def measure(
    c: Config, params: PyTree, x_bud: Array, batch: Batch, shard: Shard
) -> tuple[Array, dict[str, Mean]]:
    """Return the loss, summed over rows, and the sums of every metric."""
    scale = batch["label_scale"].max(0)  # [1 + K], the same in all rows
    with jax.named_scope("text_head"):
        x_bnd = states(shard, x_bud, batch["text_at"])
        w_vd = transformer.head(c, params)
        text = _compare(c, x_bnd, w_vd, batch["text_target"], shard)
    total = text.nats * scale[0]
    metrics = {"text": text.loss, "text_accuracy": text.accuracy}
    with jax.named_scope("audio_head"):
        x_bmd = states(shard, x_bud, batch["audio_at"])
        for k in range(c.codebooks):
            w_cd = params["w_head_audio"][k]
            target_bm = batch["audio_target"][..., k]
            codebook = _compare(c, x_bmd, w_cd, target_bm, shard)
            total += codebook.nats * scale[1 + k]
            metrics[f"audio_{k}"] = codebook.loss
            metrics[f"audio_accuracy_{k}"] = codebook.accuracy
    return total, metrics


def _compare(c: Config, x_bnd: Array, w_vd: Array, target_bn: Array, shard: Shard) -> Labels:
    """Compare the logits x_bnd · w_vd with labels, negative ones left out."""
    weight_bn = (target_bn >= 0).astype(jnp.float32)
    sums = cross_entropy(
        x_bnd, w_vd, target_bn, weight_bn, shard, chunk=c.chunk, axes=transformer.TABLE
    )
    return Labels(sums.loss, sums.correct, weight_bn.sum())
