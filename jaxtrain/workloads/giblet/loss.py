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
from jaxtrain.types import (
    Array,
    Axes,
    Batch,
    Example,
    Key,
    LossOut,
    Mean,
    PyTree,
    Shard,
    Task,
    Variables,
)
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
    measured,
    n_weights,
)

OUTPUTS = (*MODALITIES, "fmri")
STD_EPS = 1e-8  # added to a standard deviation that a loss is divided by


class Model(NamedTuple):
    """The part of the run that every function of the task reads."""

    c: Config
    shard: Shard
    batch: int  # rows of the global batch


def make_task(config: RunConfig[Config], shard: Shard, batch: int) -> Task:
    """Make the task. Raises ConfigError if batch norm would get groups of fewer than two rows."""
    c = config.model
    accumulate = config.train.accumulate
    n_groups = c.groups * accumulate
    if batch % n_groups or batch // n_groups < 2:
        text = (
            f"is {c.groups}, and train.accumulate {accumulate}: they do not divide"
            f" train.batch={batch} into groups of 2 rows or more, which batch norm needs"
        )
        raise ConfigError([("model.groups", text)])
    model = Model(c, shard, batch)
    params, model_state = make_specs(c), make_model_state(c)
    axes: dict[str, Axes] = dict.fromkeys(OUTPUTS, ("batch", None))
    axes |= dict.fromkeys(("index", "volume", "weight"), ("batch",))
    return Task(
        specs=Variables(params, model_state=model_state),
        loss=functools.partial(loss, model),
        evaluate=functools.partial(evaluate, model),
        axes=axes,
        flops=6 * n_weights(c) * batch,
        measured=measured(c, batch),
        pictures=functools.partial(pictures, c),
        progress=functools.partial(progress, model),
        finish=voxels.finish,
        predict=functools.partial(predict, model),
    )


def loss(model: Model, variables: Variables, batch: Batch, key: Key) -> LossOut:
    c, shard = model.c, model.shard
    row_b = batch["row"]
    member_bg = member(row_b, c.groups, model.batch)
    draws = Draws(key, row_b, member_bg)

    def run(params: PyTree, running: PyTree, inputs: Mapping[str, Array]) -> tuple[Outputs, PyTree]:
        return forward(c, params, running, inputs, shard, draws)

    inputs = {name: batch[name] for name in MODALITIES}
    if "square_sums" in batch:
        inputs["square_sums"] = batch["square_sums"]
    apply = jax.checkpoint(run) if c.remat == "full" else run
    out, running = apply(variables.params, variables.model_state, inputs)
    target = targets(c, batch, shard)
    weight_b = batch["weight"]
    scores = errors(c, out, target, weight_b)
    fmri_bv = jax.lax.stop_gradient(out.fmri)
    scores["fmri_r"] = voxels.pearson(fmri_bv, target["fmri"])
    n = weight_b.sum()
    metrics = {}
    for name, value_b in scores.items():
        weighted_b = value_b * weight_b
        metrics[_metric(name)] = Mean(weighted_b.sum(), n)
    total_loss = metrics.pop("total_loss")
    return LossOut(total_loss, metrics, running)


def predict(model: Model, variables: Variables, batch: Batch) -> Outputs:
    """Reconstructions and fMRI [B, V] of the loader's ``video``, ``audio``, ``text``."""
    params, running = variables.params, variables.model_state
    outputs, _ = forward(model.c, params, running, batch, model.shard)
    return outputs


def evaluate(model: Model, variables: Variables, batch: Batch) -> dict[str, Mean]:
    """Losses and correlations of rows, also of shuffled pairs, and voxels' sums for `finish`."""
    out = predict(model, variables, batch)
    target = targets(model.c, batch, model.shard)
    weight_b = batch["weight"]
    scores = errors(model.c, out, target, weight_b)
    y_bv, t_bv = out.fmri, target["fmri"]
    partner_bv, has_partner_b = voxels.shuffled(t_bv, weight_b, batch["volume"])
    scores["fmri_r"] = voxels.pearson(y_bv, t_bv)
    scores["fmri_r2"] = voxels.r_squared(y_bv, t_bv)
    null_weight_b = weight_b * has_partner_b
    metrics = {}
    for name, value_b in scores.items():
        metrics[_metric(name)] = weighted_mean(value_b, weight_b)
    null_r_b = voxels.pearson(y_bv, partner_bv)
    metrics["fmri_r_null"] = weighted_mean(null_r_b, null_weight_b)
    metrics |= _moments("voxel", y_bv, t_bv, weight_b)
    metrics |= _moments("null", y_bv, partner_bv, null_weight_b)
    return metrics


def weighted_mean(value_b: Array, weight_b: Array) -> Mean:
    weighted_b = value_b * weight_b
    return Mean(weighted_b.sum(), weight_b.sum())


def _moments(kind: str, y_bv: Array, t_bv: Array, weight_b: Array) -> dict[str, Mean]:
    """Return the means over rows of predictions y, measurements t and their products, [V]."""
    products = {
        "y": y_bv,
        "t": t_bv,
        "yy": y_bv * y_bv,
        "tt": t_bv * t_bv,
        "yt": y_bv * t_bv,
    }
    moments = {}
    for name, product_bv in products.items():
        weighted_bv = product_bv * weight_b[:, None]
        moments[f"{kind}/{name}"] = Mean(weighted_bv.sum(0), weight_b.sum())
    return moments


def pictures(c: Config, batch: Batch) -> dict[str, Array]:
    """Return the last frames of the first windows."""
    first_videos_bi = batch["video"][:8]
    return {"frame": _last_frames(c, first_videos_bi)}


def _last_frames(c: Config, video_bi: Array) -> Array:
    """Return grey pictures [B, height, width]."""
    frame_bi = entry(video_bi[:, -c.frame_size :])
    frame_byxc = frame_bi.reshape(-1, c.height, c.width, CHANNELS)
    grey_byx = frame_byxc.mean(-1)
    return grey_byx[:, ::-1]


def examples(
    config: Any, model_state: Any, batch: Mapping[str, Any], position: int
) -> Sequence[Example]:
    """Draw the last frame of each row's window, and say whose volume it is."""
    last_frames = _last_frames(config.model, batch["video"])
    frames = np.asarray(last_frames)
    volumes = batch["volume"].tolist()
    row_examples = []
    for volume, frame in zip(volumes, frames, strict=True):
        pictures = {"last frame": frame}
        row_examples.append(Example(text=f"volume {volume}", pictures=pictures))
    return row_examples


def progress(model: Model, variables: Variables, batch: Batch) -> dict[str, Array]:
    """Pictures of rows: voxels by measured (right) and predicted (up) value, within ±3."""
    out = predict(model, variables, batch)
    measured_bv = batch["fmri"][:4].astype(jnp.float32)
    return {"fmri": voxels.density(measured_bv, out.fmri[:4])}


def _metric(name: str) -> str:
    """Return the name of a score's metric."""
    if name in (*OUTPUTS, "total"):
        return f"{name}_loss"
    return name


def targets(c: Config, batch: Batch, shard: Shard) -> dict[str, Array]:
    """Return the target of each output, float32."""
    video_bi = batch["video"]
    if c.reconstruct == "frame":
        frame = c.frame % c.n_frames
        start = frame * c.frame_size
        video_bi = video_bi[:, start : start + c.frame_size]
    else:
        video_bi = shard(video_bi, "rows", "input")
    of_outputs = {"video": entry(video_bi)}
    for name in ("audio", "text", "fmri"):
        of_outputs[name] = entry(batch[name])
    return of_outputs


def scale(x_bd: Array, weight_b: Array) -> Array:
    """Return an error's divisor: the standard deviation of the global batch's valid rows.

    It is the unbiased one, plus 1e-8, or 1 if all values are equal (no text, a dark film).
    """
    weight_b1 = weight_b[:, None]
    n_rows = over_data(weight_b.sum())
    n = jnp.maximum(n_rows * x_bd.shape[1], 2)
    weighted_bd = x_bd * weight_b1
    total = over_data(weighted_bd.sum())
    mean = total / n
    square_bd = jnp.square(x_bd - mean)
    weighted_bd = square_bd * weight_b1
    total = over_data(weighted_bd.sum())
    variance = total / (n - 1)
    std = jnp.sqrt(variance)
    varies = std > 1e-5 * jnp.abs(mean)
    return jnp.where(varies, std + STD_EPS, 1.0)


def errors(
    c: Config, out: Outputs, target: Mapping[str, Array], weight_b: Array
) -> dict[str, Array]:
    """Compute each row's errors, [B]: "video", "audio", "text", "fmri", and the weighted "total".

    With ``normalised``, "video" … are divided by `scale` (a cosine is not), and "video_raw" … are
    the undivided ones. Raises ValueError when an output and its target differ in shape.
    """
    losses = {}
    for name in OUTPUTS:
        y_bd = getattr(out, name)
        t_bd = target[name]
        if y_bd.shape != t_bd.shape:
            raise ValueError(
                f"{name}: the model makes {y_bd.shape} and the target is {t_bd.shape}; nothing is"
                " cut to fit"
            )
        kind = "mse"
        if name == "fmri":
            kind = c.fmri_loss
        loss_b = error(kind, y_bd, t_bd)
        losses[name] = loss_b
        if c.normalised and kind != "cosine":
            losses[f"{name}_raw"] = loss_b
            losses[name] = loss_b / scale(t_bd, weight_b)
    weights = {name: getattr(c, f"weight_{name}") for name in OUTPUTS}
    losses["total"] = sum(weights[name] * losses[name] for name in OUTPUTS)
    return losses


def error(kind: str, y_bd: Array, t_bd: Array) -> Array:
    """Compute each row's error [B] of a kind: mse, mae or cosine."""
    if kind == "mse":
        return jnp.square(y_bd - t_bd).mean(1)
    if kind == "mae":
        return jnp.abs(y_bd - t_bd).mean(1)
    return 1 - voxels.cosine(y_bd, t_bd, eps=1e-8)
