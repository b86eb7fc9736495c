"""Next-token prediction on packed rows of documents: the task, its loss and its evaluation.

A row of a batch is S tokens of one or several documents. Its fields, all [B, S]:

    tokens     int32    the inputs
    targets    int32    the token after each, any value if ``mask`` is 0
    positions  int32    places within the document
    segments   int32    documents, numbered from 1 in a row; 0 is padding. Attention stays within
                        them
    mask       float32  1 if the target is valid: not padding, not after a document's last token

Shapes: B batch, S tokens, D embed, V vocabulary.
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
from jaxtrain.types import (
    Array,
    Axes,
    Batch,
    DocumentFlops,
    GenerativeEvaluation,
    Key,
    LossOut,
    Mean,
    PyTree,
    Shard,
    Task,
    Variables,
)
from jaxtrain.workloads.language import dropout, evals
from jaxtrain.workloads.language.model import (
    Config,
    document_flops,
    logits,
    make_specs,
    row_flops,
)
from loaders import base


def make_task(config: RunConfig[Config], shard: Shard, batch: int) -> Task:
    c = config.model
    names = ("tokens", "targets", "positions", "segments", "mask")
    axes: dict[str, Axes] = dict.fromkeys(names, ("batch", "seq"))
    if c.n_sources > 1:
        axes["source"] = ("batch",)
    generative: tuple[GenerativeEvaluation, ...] = ()
    if c.generation.prompts or c.targets:
        generative = tuple(evals.generative_evaluations(c, shard, config.seed))
    length = _row_length(config)
    dropout.require_whole_rows(c, shard, length)
    frozen = bool(config.lora.rank)
    return Task(
        specs=Variables(make_specs(c)),
        loss=functools.partial(loss, c, shard),
        evaluate=functools.partial(evaluate, c, shard),
        axes=axes,
        flops=batch * row_flops(c, length, causal=True, frozen=frozen),
        full_flops=batch * row_flops(c, length, causal=False, frozen=frozen),
        document_flops=DocumentFlops(
            ("positions", "segments"), functools.partial(document_flops, c, frozen)
        ),
        tokens=batch * length,
        finish=functools.partial(finish, c),
        generative=generative,
        terms=("cross_entropy", "z_loss") if c.z_loss else (),
        predict=functools.partial(predict, c, shard),
    )


def _row_length(config: RunConfig[Config]) -> int:
    """Return the tokens of a row of the loader, which may be fewer than the model's context."""
    if not config.loader:  # a model that was loaded has none
        return config.model.context
    fields = base.module(config.loader).element_spec(config.data)
    return fields["tokens"].shape[0]


def loss(c: Config, shard: Shard, variables: Variables, batch: Batch, key: Key) -> LossOut:
    if c.dropout or c.attention_dropout:
        x_bsd = dropout.decode(c, variables.params, batch, shard, key)
    else:
        x_bsd = transformer.decode(c, variables.params, batch, shard)
    mask_bs = batch["mask"].astype(jnp.float32)
    total, metrics = measure(c, shard, variables.params, x_bsd, batch, mask_bs)
    metrics["tokens"] = Mean(total.weight, jnp.float32(batch["row"].shape[0]))  # valid ones
    return LossOut(total, metrics)


def predict(c: Config, shard: Shard, variables: Variables, batch: Batch) -> Array:
    """Logits [B, S, V] of ``tokens`` [B, S]."""
    tokens_bs = batch["tokens"]
    positions_bs = jnp.broadcast_to(jnp.arange(tokens_bs.shape[1])[None], tokens_bs.shape)
    return logits(c, variables.params, {"tokens": tokens_bs, "positions": positions_bs}, shard)


def evaluate(c: Config, shard: Shard, variables: Variables, batch: Batch) -> dict[str, Mean]:
    x_bsd = transformer.decode(c, variables.params, batch, shard)
    measured = functools.partial(measure, c, shard, variables.params, x_bsd, batch)
    mask_bs = batch["mask"].astype(jnp.float32)
    if c.n_sources < 2:
        return measured(mask_bs)[1]
    source_b1 = batch["source"][:, None]
    by_source = []
    for source in range(c.n_sources):
        of_source_bs = jnp.where(source_b1 == source, mask_bs, 0)
        by_source.append(measured(of_source_bs)[1])
    # every row is of one source
    metrics: dict[str, Mean] = jax.tree.map(lambda *sums: sum(sums), *by_source)
    for i, of_source in enumerate(by_source):
        metrics[f"cross_entropy_source_{i}"] = of_source["cross_entropy"]
    return metrics


def measure(
    c: Config, shard: Shard, params: PyTree, x_bsd: Array, batch: Batch, mask_bs: Array
) -> tuple[Mean, dict[str, Mean]]:
    """Return the loss over the targets of ``mask_bs``, and metrics."""
    w_vd = transformer.head(c, params)
    sums = cross_entropy(
        x_bsd,
        w_vd,
        batch["targets"],
        mask_bs,
        shard,
        z_loss=c.z_loss,
        chunk=c.chunk,
        axes=transformer.TABLE,
    )
    n = mask_bs.sum()
    metrics = {"cross_entropy": Mean(sums.cross_entropy, n), "accuracy": Mean(sums.correct, n)}
    if c.z_loss:
        metrics["z_loss"] = Mean(c.z_loss * sums.z, n)
    return Mean(sums.loss, n), metrics


def finish(c: Config, record: Mapping[str, Any]) -> dict[str, float]:
    """Add exp(nats per token), and bits for each byte of the text behind the tokens."""
    complete = dict(record)
    for name, nats in record.items():
        if name.startswith("cross_entropy"):
            suffix = name.removeprefix("cross_entropy")
            # exp(700) is the last that a float holds
            complete[f"perplexity{suffix}"] = math.exp(min(nats, 700.0))
    if c.bytes_per_token:
        complete["bits_per_byte"] = record["cross_entropy"] / math.log(2) / c.bytes_per_token
    return complete
