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
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from jaxtrain.config import Config as RunConfig
from jaxtrain.nn import transformer
from jaxtrain.nn.cross_entropy import cross_entropy
from jaxtrain.types import Array, Batch, Key, LossOut, Mean, PyTree, Shard, Task, Variables
from jaxtrain.workloads.audio_language.model import (
    Config,
    audio_logits,
    decode,
    make_specs,
    states,
    step_flops,
    text_logits,
)


def make_task(config: RunConfig[Config], shard: Shard, batch: int) -> Task:
    c = config.model
    row = {
        name: ("batch", None)
        for name in ("text", "place", "slot", "text_at", "text_target", "audio_at", "label_scale")
    }
    frozen = bool(config.lora.rank)
    flops = [
        batch * sum(b[4] * step_flops(c, b, causal=x, frozen=frozen) for b in c.buckets or ())
        for x in (True, False)
    ]
    return Task(
        specs=Variables(make_specs(c)),
        loss=functools.partial(loss, c, shard),
        evaluate=functools.partial(evaluate, c, shard),
        axes={
            "index": ("batch",),
            **row,
            **{name: ("batch", None, None) for name in ("codes", "audio_target")},
        },
        flops=int(flops[0]),
        full_flops=int(flops[1]),
        finish=functools.partial(finish, c),
        tokens=batch * sum(b[4] * (b[0] + b[1]) for b in c.buckets or ()),
        predict=functools.partial(predict, c, shard),
    )


def loss(c: Config, shard: Shard, variables: Variables, batch: Batch, key: Key) -> LossOut:
    x_bud = decode(c, variables.params, batch, shard)
    total, metrics = measure(c, variables.params, x_bud, batch, shard)
    return LossOut(Mean(total, jnp.float32(batch["row"].shape[0])), metrics)


def predict(c: Config, shard: Shard, variables: Variables, batch: Batch) -> dict[str, Array]:
    """Logits ``text`` [B, U, V] and ``audio`` [B, U, K, codes] of all places of the rows."""
    x_bud = decode(c, variables.params, batch, shard)
    return {
        "text": text_logits(c, variables.params, x_bud),
        "audio": audio_logits(variables.params, x_bud),
    }


def evaluate(c: Config, shard: Shard, variables: Variables, batch: Batch) -> dict[str, Mean]:
    x_bud = decode(c, variables.params, batch, shard)
    return measure(c, variables.params, x_bud, batch, shard)[1]


def finish(c: Config, record: Mapping[str, Any]) -> dict[str, float]:
    """Add the loss over a whole split, whose labels no batch's scale counts."""
    audio = [
        record[f"audio_{k}"] for k in range(c.codebooks) if not math.isnan(record[f"audio_{k}"])
    ]
    parts = {"text": record["text"], "audio": sum(audio) / len(audio) if audio else math.nan}
    return {**record, **parts, "loss": sum(x for x in parts.values() if not math.isnan(x))}


def measure(
    c: Config, params: PyTree, x_bud: Array, batch: Batch, shard: Shard
) -> tuple[Array, dict[str, Mean]]:
    """Return the loss, summed over rows, and the sums of every metric."""
    scale = batch["label_scale"].max(0)  # the same in all rows

    def sums(x_bnd: Array, w_vd: Array, target_bn: Array) -> tuple[Array, Array, Array]:
        weight_bn = (target_bn >= 0).astype(jnp.float32)
        labelled = cross_entropy(
            x_bnd, w_vd, target_bn, weight_bn, shard, chunk=c.chunk, axes=transformer.TABLE
        )
        return labelled.loss, labelled.correct, weight_bn.sum()

    with jax.named_scope("text_head"):
        nats, right, n = sums(
            states(shard, x_bud, batch["text_at"]),
            transformer.head(c, params),
            batch["text_target"],
        )
    total = nats * scale[0]
    metrics = {"text": Mean(nats, n), "text_accuracy": Mean(right, n)}
    with jax.named_scope("audio_head"):
        x_bmd = states(shard, x_bud, batch["audio_at"])
        for k in range(c.codebooks):
            nats, right, n = sums(x_bmd, params["w_head_audio"][k], batch["audio_target"][..., k])
            total += nats * scale[1 + k]
            metrics |= {f"audio_{k}": Mean(nats, n), f"audio_accuracy_{k}": Mean(right, n)}
    return total, metrics
