"""The task of the autoencoder: reconstructions, predictions, their errors, and the evaluation.

Shapes: as in `model`.
"""

import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxtrain.config import Config as RunConfig
from jaxtrain.config import ConfigError
from jaxtrain.nn.batch_norm import member, over_data
from jaxtrain.types import Array, Batch, Example, Key, LossOut, Mean, PyTree, Shard, Task, Variables
from jaxtrain.workloads.giblet import voxels
from jaxtrain.workloads.giblet.model import (
    CHANNELS,
    MODALITIES,
    Config,
    Draws,
    Outputs,
    entry,
    forward,
    make_model_state,
    make_specs,
    n_weights,
)

STD_EPS = 1e-8  # added to a standard deviation that a loss is divided by


class Model(NamedTuple):
    """The part of the run that every function of the task reads."""

    c: Config
    shard: Shard
    batch: int  # rows of the global batch


def make_task(config: RunConfig[Config], shard: Shard, batch: int) -> Task:
    """Make the task. Raises ConfigError if batch norm would get groups of fewer than two rows."""
    c = config.model
    n_groups = c.groups * config.train.accumulate
    if batch % n_groups or batch // n_groups < 2:
        text = (
            f"is {c.groups}, and train.accumulate {config.train.accumulate}: they do not divide"
            f" train.batch={batch} into groups"
        )
        raise ConfigError([("model.groups", f"{text} of 2 rows or more, which batch norm needs")])
    model = Model(c, shard, batch)
    return Task(
        specs=Variables(make_specs(c), model_state=make_model_state(c)),
        loss=functools.partial(loss, model),
        evaluate=functools.partial(evaluate, model),
        axes={
            **{name: ("batch", None) for name in (*MODALITIES, "fmri")},
            **{name: ("batch",) for name in ("index", "volume", "weight")},
        },
        flops=6 * n_weights(c) * batch,
        pictures=functools.partial(pictures, c),
        progress=functools.partial(progress, model),
        finish=voxels.finish,
        predict=functools.partial(predict, model),
    )


def loss(model: Model, variables: Variables, batch: Batch, key: Key) -> LossOut:
    c, shard = model.c, model.shard
    draws = Draws(key, batch["row"], member(batch["row"], c.groups, model.batch))

    def run(params: PyTree, running: PyTree, inputs: Mapping[str, Array]) -> tuple[Outputs, PyTree]:
        return forward(c, params, running, inputs, shard, draws)

    inputs = {name: batch[name] for name in MODALITIES}
    out, running = (jax.checkpoint(run) if c.remat == "full" else run)(
        variables.params, variables.model_state, inputs
    )
    target, weight_b = targets(c, batch, shard), batch["weight"]
    each = errors(c, out, target, weight_b)
    each["fmri_r"] = voxels.pearson(jax.lax.stop_gradient(out.fmri), target["fmri"])
    n = weight_b.sum()
    metrics = {
        _loss_name(name): Mean((value_b * weight_b).sum(), n) for name, value_b in each.items()
    }
    return LossOut(metrics.pop("total_loss"), metrics, running)


def predict(model: Model, variables: Variables, batch: Batch) -> Outputs:
    """Reconstructions and fMRI [B, V] of the loader's ``video``, ``audio``, ``text``."""
    return forward(model.c, variables.params, variables.model_state, batch, model.shard)[0]


def evaluate(model: Model, variables: Variables, batch: Batch) -> dict[str, Mean]:
    """Losses and correlations of rows, also of shuffled pairs, and voxels' sums for `finish`."""
    c, shard = model.c, model.shard
    out, _ = forward(c, variables.params, variables.model_state, batch, shard)
    target, weight_b = targets(c, batch, shard), batch["weight"]
    each = errors(c, out, target, weight_b)
    y_bv, t_bv = out.fmri, target["fmri"]
    partner_bv, has_partner_b = voxels.shuffled(t_bv, weight_b, batch["volume"])
    each |= {"fmri_r": voxels.pearson(y_bv, t_bv), "fmri_r2": voxels.r_squared(y_bv, t_bv)}
    null_b = weight_b * has_partner_b
    metrics = {
        _loss_name(name): Mean((value_b * weight_b).sum(), weight_b.sum())
        for name, value_b in each.items()
    }
    metrics["fmri_r_null"] = Mean((voxels.pearson(y_bv, partner_bv) * null_b).sum(), null_b.sum())
    for kind, x_bv, w_b in (("voxel", t_bv, weight_b), ("null", partner_bv, null_b)):
        products = {"y": y_bv, "t": x_bv, "yy": y_bv * y_bv, "tt": x_bv * x_bv, "yt": y_bv * x_bv}
        for name, product_bv in products.items():
            metrics[f"{kind}/{name}"] = Mean((product_bv * w_b[:, None]).sum(0), w_b.sum())
    return metrics


def pictures(c: Config, batch: Batch) -> dict[str, Array]:
    """Return the last frames of the first windows."""
    return {"frame": _last_frames(c, batch["video"][:8])}


def _last_frames(c: Config, video_bi: Array) -> Array:
    """Return grey pictures [B, height, width]."""
    return (
        entry(video_bi[:, -c.frame_size :])
        .reshape(-1, c.height, c.width, CHANNELS)
        .mean(-1)[:, ::-1]
    )


def examples(
    config: Any, model_state: Any, batch: Mapping[str, Any], position: int
) -> Sequence[Example]:
    """Draw the last frame of each row's window, and say whose volume it is."""
    frames = np.asarray(_last_frames(config.model, batch["video"]))
    volumes = batch["volume"].tolist()
    return [
        Example(text=f"volume {v}", pictures={"last frame": x})
        for v, x in zip(volumes, frames, strict=True)
    ]


def progress(model: Model, variables: Variables, batch: Batch) -> dict[str, Array]:
    """Pictures of rows: voxels by measured (right) and predicted (up) value, within ±3."""
    out, _ = forward(model.c, variables.params, variables.model_state, batch, model.shard)
    return {"fmri": voxels.density(batch["fmri"][:4].astype(jnp.float32), out.fmri[:4])}


def _loss_name(name: str) -> str:
    return f"{name}_loss" if name in (*MODALITIES, "fmri", "total") else name


def targets(c: Config, batch: Batch, shard: Shard) -> dict[str, Array]:
    """Return the target of each output, float32."""
    video_bi = batch["video"]
    if c.reconstruct == "frame":
        start = c.frame % c.n_frames * c.frame_size
        video_bi = video_bi[:, start : start + c.frame_size]
    else:
        video_bi = shard(video_bi, "rows", "input")
    return {
        "video": entry(video_bi),
        **{name: entry(batch[name]) for name in ("audio", "text", "fmri")},
    }


def scale(x_bd: Array, weight_b: Array) -> Array:
    """Return an error's divisor: the standard deviation of the global batch's valid rows.

    It is the unbiased one, plus 1e-8, or 1 if all values are equal (no text, a dark film).
    """
    w_b1 = weight_b[:, None]
    n = jnp.maximum(over_data(weight_b.sum()) * x_bd.shape[1], 2)
    mean = over_data((x_bd * w_b1).sum()) / n
    std = jnp.sqrt(over_data((jnp.square(x_bd - mean) * w_b1).sum()) / (n - 1))
    return jnp.where(std > 1e-5 * jnp.abs(mean), std + STD_EPS, 1.0)


def errors(
    c: Config, out: Outputs, target: Mapping[str, Array], weight_b: Array
) -> dict[str, Array]:
    """Compute each row's errors, [B]: "video", "audio", "text", "fmri", and the weighted "total".

    With ``normalised``, "video" … are divided by `scale` (a cosine is not), and "video_raw" … are
    the undivided ones. Raises ValueError when an output and its target differ in shape.
    """
    losses = {}
    for name in (*MODALITIES, "fmri"):
        y_bd, t_bd = getattr(out, name), target[name]
        if y_bd.shape != t_bd.shape:
            raise ValueError(
                f"{name}: the model makes {y_bd.shape} and the target is {t_bd.shape}; nothing is"
                " cut to fit"
            )
        kind = c.fmri_loss if name == "fmri" else "mse"
        if kind == "mse":
            losses[name] = jnp.square(y_bd - t_bd).mean(1)
        elif kind == "mae":
            losses[name] = jnp.abs(y_bd - t_bd).mean(1)
        else:
            lengths_b = jnp.sqrt(jnp.square(y_bd).sum(1) * jnp.square(t_bd).sum(1))
            losses[name] = 1 - (y_bd * t_bd).sum(1) / jnp.maximum(lengths_b, 1e-8)
        if c.normalised and kind != "cosine":
            losses[f"{name}_raw"] = losses[name]
            losses[name] = losses[name] / scale(t_bd, weight_b)
    losses["total"] = sum(
        getattr(c, f"weight_{name}") * losses[name] for name in (*MODALITIES, "fmri")
    )
    return losses
