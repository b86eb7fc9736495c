"""The Giblet autoencoder: a window of film in, through a bottleneck, the brain's response and the window again out.

A row is one moment of one viewer: the frames, codec codes and text embeddings of the window before it, and the fMRI volume
measured then. Three encoders of flattened vectors, a trunk to the bottleneck, a head to the voxels, a decoder with three heads.
Every hidden layer is a matrix product, batch norm, ReLU, dropout (which commutes with a ReLU: its place does not matter).
Integers become floats in one place, `entry`.

The batch is small and the matrices are not: of 8.36 billion parameters the first matrix alone (1,641,600 × 4,096) has 6.7.
So weights stay where they are and activations move. A matrix is split over its input rows ("input" or "embed", by fsdp) and
each device multiplies its slice of the inputs of *all* rows of its group along "data"; what travels are sums [B, width]. No
matrix is gathered, forward or backward.

Batch norm takes its statistics over the global batch (`jaxtrain.nn.batch_norm` says what that is with train.accumulate), or,
with ``groups``, of runs of the batch's rows, as the original's devices do.

Shapes: B rows, I inputs of a layer, O outputs, F frames, V voxels, D any width, G groups.
"""

import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxtrain.config import Config as RunConfig
from jaxtrain.config import ConfigError, ModelSection
from jaxtrain.nn import remat
from jaxtrain.nn.batch_norm import batch_norm, member, over_data
from jaxtrain.specs import fold_in_path, ones, zeros
from jaxtrain.types import (
    OF_DATA,
    Array,
    Axes,
    Batch,
    Export,
    Hub,
    Initializer,
    Key,
    LossOut,
    Mean,
    OfData,
    PyTree,
    Shard,
    Spec,
    Task,
    Variables,
)
from loaders.io import checks

DTYPES = ("float32", "bfloat16")
RECONSTRUCTIONS = ("frame", "window")
AUDIO = ("codes", "features")
FMRI_LOSSES = ("mse", "mae", "cosine")
MODALITIES = ("video", "audio", "text")
EPS = 1e-5  # of the norms
MOMENTUM = 0.1  # of the running statistics
STD_EPS = 1e-8  # added to a standard deviation that a loss is divided by
METRICS = ("fmri_r", "fmri_r_null", "voxel_r", "voxel_r_null", "total_loss")  # that the card of an export has
EXPORT = Export(carry=".", hub=lambda *_: Hub(metrics=METRICS))  # an evaluation needs the running statistics
LARGEST_CODE = 1023.0
CHANNELS = 3  # of a frame


@dataclass(frozen=True)
class Config(ModelSection):
    """The published widths by default."""

    n_frames: OfData[int] = OF_DATA  # [frames] of a window; None = as the data have, like the next six
    height: OfData[int] = OF_DATA  # [pixels] of a frame
    width: OfData[int] = OF_DATA  # [pixels] of a frame
    codebooks: OfData[int] = OF_DATA  # [codes] of audio at one time, or features
    audio_frames: OfData[int] = OF_DATA  # [times] of audio in a window
    n_text: OfData[int] = OF_DATA  # [values] of a window's text embeddings
    n_voxels: OfData[int] = OF_DATA  # [voxels] predicted
    audio: OfData[str] = OF_DATA  # [name] codes (integers up to 1023) or features (any numbers); None = as the data are
    video_widths: tuple[int, int, int] = (4096, 2048, 1024)  # [values] of the video encoder's layers
    audio_widths: tuple[int, int] = (512, 256)  # [values] of the audio encoder's layers
    text_widths: tuple[int, int] = (512, 256)  # [values] of the text encoder's layers
    trunk_widths: tuple[int, int] = (4096, 8000)  # [values] between the joined encoders and the bottleneck
    bottleneck: int = 2048  # [values] that everything passes through
    head_width: int = 16384  # [values] between the bottleneck and the voxels
    decoder_widths: tuple[int, int, int, int] = (8000, 4096, 2048, 1536)  # [values] that the decoder's heads share
    decode_video_widths: tuple[int, int] = (2048, 4096)  # [values] before the frame
    decode_audio_widths: tuple[int, int] = (2048, 2048)  # [values] before the codes
    decode_text_widths: tuple[int, int] = (1024, 1024)  # [values] before the embeddings
    reconstruct: str = "frame"  # [name] what of the video the decoder makes: one frame, or the whole window
    frame: int = 0  # [frames] which one, counted from the window's first; -1 = its last
    dropout: float = 1.0  # [ratio] of the published rates, 0.2 and 0.3; 0 = none
    groups: int = 1  # [groups] of rows that batch norm treats alone, in order; 8 with a batch of 16 = eight devices with 2 rows
    fmri_loss: str = "mse"  # [name] mse, mae, or cosine (1 - cosine similarity of a row)
    normalised: bool = False  # [bool] divide each mean error by the standard deviation of its targets in the batch
    weight_video: float = 1.0  # [1] of its loss in the total
    weight_audio: float = 1.0  # [1] of its loss in the total
    weight_text: float = 1.0  # [1] of its loss in the total
    weight_fmri: float = 1.0  # [1] of its loss in the total
    dtype: str = "bfloat16"  # [name] of the matrix products' inputs; sums, norms and losses are float32
    param_dtype: str = "float32"  # [name] of the parameters
    remat: str = "none"  # [name] none, or full: compute the forward pass again in the backward pass (statistics move once)

    def problems(self) -> Iterator[tuple[str, str]]:
        yield from checks.at_least(self, 1, *(name for name in SIZES if getattr(self, name) is not None))
        yield from checks.at_least(self, 1, "bottleneck", "head_width", "groups")
        for name, value in vars(self).items():
            if name.endswith("widths") and min(value) < 1:
                yield name, f"is {value}; each must be at least 1"
        yield from checks.not_negative(self, *(f"weight_{name}" for name in (*MODALITIES, "fmri")))
        yield from checks.choice(self, RECONSTRUCTIONS, "reconstruct")
        yield from checks.choice(self, FMRI_LOSSES, "fmri_loss")
        yield from checks.choice(self, DTYPES, "dtype", "param_dtype")
        yield from checks.choice(self, remat.WHOLE, "remat")
        yield from checks.choice(self, (*AUDIO, None), "audio")
        if self.reconstruct == "window" and self.frame:
            yield "frame", f"is {self.frame}, and reconstruct='window' makes all of them; unset it"
        if not 0 <= self.dropout < 1 / 0.3:
            yield "dropout", f"is {self.dropout}; the largest rate, 0.3 of it, must lie in [0, 1)"
        if not any(getattr(self, f"weight_{name}") for name in (*MODALITIES, "fmri")):
            yield "weight_fmri", "is 0 like all the other weights; nothing would be learned"

    def data_problems(self, facts: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
        for name in (*SIZES, "audio"):
            value, needed = getattr(self, name), facts.get(name)
            if value is None:
                yield name, "is None, and the data do not give it; set it"
            elif needed is not None and value != needed:
                text = f"is {value}, and the data have {needed}; nothing is cut or padded to fit"
                yield name, f"{text}: config.model.{name}=None takes the data's"
        if self.n_frames is not None and not -self.n_frames <= self.frame < self.n_frames:
            yield "frame", f"is {self.frame}, and a window has the frames 0 … {self.n_frames - 1} (or -{self.n_frames} … -1)"

    @property
    def frame_size(self) -> int:
        return self.height * self.width * CHANNELS

    @property
    def inputs(self) -> dict[str, int]:
        """Values of each modality in a row."""
        return {
            "video": self.n_frames * self.frame_size,
            "audio": self.codebooks * self.audio_frames,
            "text": self.n_text,
        }

    @property
    def outputs(self) -> dict[str, int]:
        """Values that the decoder makes."""
        return {**self.inputs, **({"video": self.frame_size} if self.reconstruct == "frame" else {})}


SIZES = ("n_frames", "height", "width", "codebooks", "audio_frames", "n_text", "n_voxels")


class Layer(NamedTuple):
    """y = x w + b; with a rate, also batch norm, ReLU and dropout."""

    n_in: int
    n_out: int
    rate: float | None = None  # of the dropout; None = a linear layer
    norm: bool = True  # the bottleneck has only this
    relu: bool = True
    axes: Axes = ("embed", "mlp")


def layers(c: Config) -> dict[str, dict[str, list[Layer]]]:
    """The whole net: part -> branch -> its layers, in order."""

    def chain(n_in: int, widths: tuple[int, ...], rates: tuple[float, ...], first: Axes = ("embed", "mlp")) -> list[Layer]:
        sizes = zip((n_in, *widths[:-1]), widths, rates, strict=True)
        return [Layer(i, o, rate, axes=("embed", "mlp") if n else first) for n, (i, o, rate) in enumerate(sizes)]

    size, out = c.inputs, c.outputs
    joined = c.video_widths[-1] + c.audio_widths[-1] + c.text_widths[-1]
    # The last matrix of a whole window is as large as the first; it is split over the same pixels.
    pixels: Axes = ("mlp", "input") if c.reconstruct == "window" else ("embed", "mlp")

    def head(name: str, widths: tuple[int, int], axes: Axes = ("embed", "mlp")) -> list[Layer]:
        hidden = chain(c.decoder_widths[-1], widths, (0.3, 0.3))
        return [*hidden, Layer(widths[-1], out[name], norm=False, relu=False, axes=axes)]

    return {
        "encoder": {
            "video": chain(size["video"], c.video_widths, (0.3, 0.3, 0.2), ("input", "mlp")),
            "audio": chain(size["audio"], c.audio_widths, (0.3, 0.2)),
            "text": chain(size["text"], c.text_widths, (0.2, 0.2)),
            "trunk": [
                *chain(joined, (joined, *c.trunk_widths), (0.2, 0.3, 0.3)),
                Layer(c.trunk_widths[-1], c.bottleneck, 0.0, relu=False),
            ],
            "fmri": [
                Layer(c.bottleneck, c.head_width, 0.3),
                Layer(c.head_width, c.n_voxels, norm=False, relu=False, axes=("embed", "output")),
            ],
        },
        "decoder": {
            "trunk": chain(c.bottleneck, c.decoder_widths, (0.3,) * 4),
            "video": head("video", c.decode_video_widths, pixels),
            "audio": head("audio", c.decode_audio_widths),
            "text": head("text", c.decode_text_widths),
        },
    }


def uniform(bound: float) -> Initializer:
    """Uniform in ±``bound``; 1 / sqrt(inputs) is what torch.nn.Linear begins with, weights and biases."""

    def init(key: Key, shape: tuple[int, ...], dtype: Any) -> Array:
        return jax.random.uniform(key, shape, jnp.float32, -bound, bound).astype(dtype)

    return init


def normal(stddev: float) -> Initializer:
    def init(key: Key, shape: tuple[int, ...], dtype: Any) -> Array:
        return (stddev * jax.random.normal(key, shape, jnp.float32)).astype(dtype)

    return init


def make_specs(c: Config) -> PyTree:
    """part / branch / number / w, b, and scale, bias of the norm."""

    def specs(part: str, layer: Layer) -> dict[str, Spec]:
        matrix, bias = uniform(layer.n_in**-0.5), uniform(layer.n_in**-0.5)
        if part == "decoder":  # He et al. 2015, by outputs
            matrix, bias = normal((2 / layer.n_out) ** 0.5), zeros
        wide: Axes = ("input",) if layer.axes[1] == "input" else (None,)
        norm = {name: Spec((layer.n_out,), (None,), init, c.param_dtype) for name, init in (("scale", ones), ("bias", zeros))}
        return {
            "w": Spec((layer.n_in, layer.n_out), layer.axes, matrix, c.param_dtype),
            "b": Spec((layer.n_out,), wide, bias, c.param_dtype),
            **(norm if layer.norm else {}),
        }

    return {
        part: {branch: {str(i): specs(part, layer) for i, layer in enumerate(chain)} for branch, chain in branches.items()}
        for part, branches in layers(c).items()
    }


def make_carry(c: Config) -> PyTree:
    """The running statistics of every norm, float32."""

    def norm(layer: Layer) -> dict[str, Spec]:
        return {"mean": Spec((layer.n_out,), (None,), zeros), "var": Spec((layer.n_out,), (None,), ones)}

    return {
        part: {
            branch: {str(i): norm(layer) for i, layer in enumerate(chain) if layer.norm} for branch, chain in branches.items()
        }
        for part, branches in layers(c).items()
    }


class Draws(NamedTuple):
    """The randomness and the groups of a training step; an evaluation has none."""

    key: Key
    row_b: Array  # int32 [B]: places in the global batch
    member_bg: Array  # `member` of batch norm's groups


class Outputs(NamedTuple):
    """float32, except where training keeps a narrower type."""

    bottleneck: Array  # [B, bottleneck]
    fmri: Array  # [B, V]
    video: Array  # [B, frame or window], 0..1
    audio: Array  # [B, codebooks × times], 0..1023 and in an evaluation whole numbers; or features
    text: Array  # [B, text]


def entry(x: Array) -> Array:
    """The one place where the loader's integers become float32: bytes of frames in 0..1, codes with the same values."""
    return x.astype(jnp.float32) * (1 / 255) if x.dtype == jnp.uint8 else x.astype(jnp.float32)


def forward(
    c: Config, params: PyTree, running: PyTree, inputs: Mapping[str, Array], shard: Shard, draws: Draws | None = None
) -> tuple[Outputs, PyTree]:
    """Outputs, and the new running statistics.

    Args:
      inputs: "video", "audio", "text", [B, values] each, as the loader gives them.
      draws: in training; None normalises with ``running``, drops nothing and rounds the codes.
    """
    table = layers(c)

    def run(part: str, branch: str, x_bi: Array) -> tuple[Array, PyTree]:
        name, chain = f"{part}/{branch}", table[part][branch]
        return run_chain(c, chain, name, params[part][branch], running[part][branch], x_bi, shard, draws)

    encoder, decoder = {}, {}  # the new running statistics
    # Bytes travel to where the pixels' weights are; there they become floats.
    video, encoder["video"] = run("encoder", "video", entry(shard(inputs["video"], "rows", "input")))
    audio, encoder["audio"] = run("encoder", "audio", entry(inputs["audio"]))
    text, encoder["text"] = run("encoder", "text", entry(inputs["text"]))
    joined = jnp.concatenate([shard(x_bi, "rows", None) for x_bi in (video, audio, text)], axis=1)
    bottleneck, encoder["trunk"] = run("encoder", "trunk", shard(joined, "rows", None))
    shared, decoder["trunk"] = run("decoder", "trunk", bottleneck)
    audio, decoder["audio"] = run("decoder", "audio", shared)
    if c.audio == "codes":
        audio = LARGEST_CODE * jax.nn.sigmoid(audio)
        if not draws:
            audio = jnp.clip(jnp.round(audio), 0, LARGEST_CODE)
    fmri, encoder["fmri"] = run("encoder", "fmri", bottleneck)
    fmri = shard(fmri, "batch", None)
    video, decoder["video"] = run("decoder", "video", shared)
    video = jax.nn.sigmoid(video)
    text, decoder["text"] = run("decoder", "text", shared)
    return Outputs(bottleneck, fmri, video, audio, text), {"encoder": encoder, "decoder": decoder}


def run_chain(
    c: Config,
    chain: Sequence[Layer],
    name: str,
    params: PyTree,
    running: PyTree,
    x_bi: Array,
    shard: Shard,
    draws: Draws | None,
) -> tuple[Array, PyTree]:
    """The layers of one branch, called ``name``, one after the other; float32 [B, O], and the new running statistics."""
    new, dtype = {}, jnp.dtype(c.dtype)
    for i, layer in enumerate(chain):
        path, w = f"{name}/{i}", params[str(i)]
        with jax.named_scope(path):
            # "rows" and not "batch": every device has its slice of the inputs of all its group's rows.
            x_bi = shard(x_bi.astype(dtype), "rows", layer.axes[0])
            y_bo = jnp.dot(x_bi, w["w"].astype(dtype), preferred_element_type=jnp.float32)
            # Pinned whole over fsdp: its gradient too is then gathered before it meets x, not the matrix instead.
            y_bo = shard(y_bo, "rows", layer.axes[1])
            y_bo += jnp.broadcast_to(w["b"].astype(jnp.float32), y_bo.shape)
            if layer.norm:
                member_bg = draws.member_bg if draws else None
                y_bo, new[str(i)] = batch_norm(
                    y_bo, w["scale"], w["bias"], running[str(i)], member_bg, momentum=MOMENTUM, eps=EPS
                )
            if layer.relu:
                y_bo = jax.nn.relu(y_bo)
            if draws and layer.rate and c.dropout:
                y_bo = drop(y_bo, c.dropout * layer.rate, fold_in_path(draws.key, path), draws.row_b)
        x_bi = y_bo
    return x_bi, new


def drop(x_bd: Array, rate: float, key: Key, row_b: Array) -> Array:
    """Dropout (Srivastava et al. 2014). A row's mask is a function of the key and its place in the global batch alone."""
    keep_bd = jax.vmap(lambda row: jax.random.bernoulli(jax.random.fold_in(key, row), 1 - rate, x_bd.shape[1:]))(row_b)
    return jnp.where(keep_bd, x_bd / (1 - rate), 0)


def targets(c: Config, batch: Batch, shard: Shard) -> dict[str, Array]:
    """The target of each output, float32."""
    video_bi = batch["video"]
    if c.reconstruct == "frame":
        start = c.frame % c.n_frames * c.frame_size
        video_bi = video_bi[:, start : start + c.frame_size]
    else:
        video_bi = shard(video_bi, "rows", "input")
    return {"video": entry(video_bi), **{name: entry(batch[name]) for name in ("audio", "text", "fmri")}}


def scale(x_bd: Array, weight_b: Array) -> Array:
    """The divisor of an error: the unbiased standard deviation of all values of the valid rows of the global batch, plus 1e-8.

    Where the values are all equal (no text in a batch, a dark film) it is 1.
    """
    w_b1 = weight_b[:, None]
    n = jnp.maximum(over_data(weight_b.sum()) * x_bd.shape[1], 2)
    mean = over_data((x_bd * w_b1).sum()) / n
    std = jnp.sqrt(over_data((jnp.square(x_bd - mean) * w_b1).sum()) / (n - 1))
    return jnp.where(std > 1e-5 * jnp.abs(mean), std + STD_EPS, 1.0)


def errors(c: Config, out: Outputs, target: Mapping[str, Array], weight_b: Array) -> dict[str, Array]:
    """Each loss of each row, [B]: "video", "audio", "text" (mean squares), "fmri"; and "total", weighted.

    With ``normalised``, "video" … are divided by `scale` (a cosine is not), and "video_raw" … are the undivided ones.

    Raises ValueError when an output and its target differ in shape.
    """
    losses = {}
    for name in (*MODALITIES, "fmri"):
        y_bd, t_bd = getattr(out, name), target[name]
        if y_bd.shape != t_bd.shape:
            raise ValueError(f"{name}: the model makes {y_bd.shape} and the target is {t_bd.shape}; nothing is cut to fit")
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
    losses["total"] = sum(getattr(c, f"weight_{name}") * losses[name] for name in (*MODALITIES, "fmri"))
    return losses


def pearson(x_bv: Array, y_bv: Array) -> Array:
    """Correlation of each row across voxels, [B]; 0 where one of them is constant."""
    x_bv, y_bv = (z - z.mean(1, keepdims=True) for z in (x_bv, y_bv))
    lengths_b = jnp.sqrt(jnp.square(x_bv).sum(1) * jnp.square(y_bv).sum(1))
    return (x_bv * y_bv).sum(1) / jnp.maximum(lengths_b, 1e-12)


def r_squared(y_bv: Array, target_bv: Array) -> Array:
    """1 - SS_residual / SS_total of each row across voxels, [B]."""
    total_b = jnp.square(target_bv - target_bv.mean(1, keepdims=True)).sum(1)
    return 1 - jnp.square(target_bv - y_bv).sum(1) / jnp.maximum(total_b, 1e-12)


class Model(NamedTuple):
    """The part of the run that every function of the task reads."""

    c: Config
    shard: Shard
    batch: int  # rows of the global batch


def make_task(config: RunConfig, shard: Shard, batch: int) -> Task:
    """Raises ConfigError where batch norm would get groups of fewer than two rows."""
    c: Config = config.model
    n_groups = c.groups * config.train.accumulate
    if batch % n_groups or batch // n_groups < 2:
        text = (
            f"is {c.groups}, and train.accumulate {config.train.accumulate}: they do not divide train.batch={batch} into groups"
        )
        raise ConfigError([("model.groups", f"{text} of 2 rows or more, which batch norm needs")])
    model = Model(c, shard, batch)
    return Task(
        specs=Variables(make_specs(c), carry=make_carry(c)),
        loss=functools.partial(loss, model),
        evaluate=functools.partial(evaluate, model),
        axes={
            **{name: ("batch", None) for name in (*MODALITIES, "fmri")},
            **{name: ("batch",) for name in ("index", "volume", "weight")},
        },
        flops=6 * n_weights(c) * batch,
        pictures=functools.partial(pictures, c),
        progress=functools.partial(progress, model),
        finish=finish,
        predict=functools.partial(predict, model),
    )


def n_weights(c: Config) -> int:
    """Numbers in all matrices."""
    return sum(layer.n_in * layer.n_out for branches in layers(c).values() for chain in branches.values() for layer in chain)


def loss(model: Model, variables: Variables, batch: Batch, key: Key) -> LossOut:
    c, shard = model.c, model.shard
    draws = Draws(key, batch["row"], member(batch["row"], c.groups, model.batch))

    def run(params: PyTree, running: PyTree, inputs: Mapping[str, Array]) -> tuple[Outputs, PyTree]:
        return forward(c, params, running, inputs, shard, draws)

    inputs = {name: batch[name] for name in MODALITIES}
    out, running = (jax.checkpoint(run) if c.remat == "full" else run)(variables.params, variables.carry, inputs)
    target, weight_b = targets(c, batch, shard), batch["weight"]
    each = errors(c, out, target, weight_b)
    each["fmri_r"] = pearson(jax.lax.stop_gradient(out.fmri), target["fmri"])
    n = weight_b.sum()
    metrics = {_loss_name(name): Mean((value_b * weight_b).sum(), n) for name, value_b in each.items()}
    return LossOut(metrics.pop("total_loss"), metrics, running)


def predict(model: Model, variables: Variables, batch: Batch) -> Outputs:
    """Reconstructions and fMRI [B, V] of ``video``, ``audio`` and ``text``, [B, values] each, as the loader gives them."""
    return forward(model.c, variables.params, variables.carry, batch, model.shard)[0]


def evaluate(model: Model, variables: Variables, batch: Batch) -> dict[str, Mean]:
    """Losses, correlations and those of shuffled pairs of each row; and the sums of each voxel that `finish` needs."""
    c, shard = model.c, model.shard
    out, _ = forward(c, variables.params, variables.carry, batch, shard)
    target, weight_b = targets(c, batch, shard), batch["weight"]
    each = errors(c, out, target, weight_b)
    y_bv, t_bv = out.fmri, target["fmri"]
    partner_bv, has_partner_b = shuffled(t_bv, weight_b, batch["volume"])
    each |= {"fmri_r": pearson(y_bv, t_bv), "fmri_r2": r_squared(y_bv, t_bv)}
    null_b = weight_b * has_partner_b
    metrics = {_loss_name(name): Mean((value_b * weight_b).sum(), weight_b.sum()) for name, value_b in each.items()}
    metrics["fmri_r_null"] = Mean((pearson(y_bv, partner_bv) * null_b).sum(), null_b.sum())
    for kind, x_bv, w_b in (("voxel", t_bv, weight_b), ("null", partner_bv, null_b)):
        products = {"y": y_bv, "t": x_bv, "yy": y_bv * y_bv, "tt": x_bv * x_bv, "yt": y_bv * x_bv}
        for name, product_bv in products.items():
            metrics[f"{kind}/{name}"] = Mean((product_bv * w_b[:, None]).sum(0), w_b.sum())
    return metrics


def pictures(c: Config, batch: Batch) -> dict[str, Array]:
    """The last frames of the first windows, in grey."""
    frame = entry(batch["video"][:8, -c.frame_size :]).reshape(-1, c.height, c.width, CHANNELS)
    return {"frame": frame.mean(-1)[:, ::-1]}


def progress(model: Model, variables: Variables, batch: Batch) -> dict[str, Array]:
    """Of the first rows: the number of voxels by measured (to the right) and predicted value (upwards), within ±3."""
    out, _ = forward(model.c, variables.params, variables.carry, batch, model.shard)
    return {"fmri": density(batch["fmri"][:4].astype(jnp.float32), out.fmri[:4])}


def _loss_name(name: str) -> str:
    return f"{name}_loss" if name in (*MODALITIES, "fmri", "total") else name


def finish(record: Mapping[str, Any]) -> dict[str, float]:
    """Adds what needs the whole split: r and R² of each voxel across moments, from its means, as averages over the voxels whose
    measurement varies; nan when none does.

    "voxel_r_best" is the 90 % quantile over the voxels, "voxel_r_null" the average with shuffled pairs.
    """
    voxel, null = spread(record, "voxel"), spread(record, "null")
    r, r2 = correlation(voxel), 1 - voxel.residual / voxel.var_t
    return {
        **{name: x for name, x in record.items() if not name.startswith(("voxel/", "null/"))},
        "voxel_r": _mean(r),
        "voxel_r_null": _mean(correlation(null)),
        "voxel_r2": _mean(r2),
        "voxel_r_best": float(np.quantile(r, 0.9)) if r.size else math.nan,
    }


class Spread(NamedTuple):
    """How predictions y and measurements t of voxels vary over moments; of the voxels whose measurement varies."""

    covariance: np.ndarray
    var_y: np.ndarray
    var_t: np.ndarray
    residual: np.ndarray  # mean square of t - y


def spread(record: Mapping[str, Any], kind: str) -> Spread:
    y, t, yy, tt, yt = (np.asarray(record[f"{kind}/{name}"]) for name in ("y", "t", "yy", "tt", "yt"))
    # Of squares that were summed in float32, a difference of this size is rounding.
    var_y, var_t = (np.where(zz - z * z > 1e-5 * zz, zz - z * z, 0) for z, zz in ((y, yy), (t, tt)))
    varies = var_t > 0
    return Spread(*(x[varies] for x in (yt - y * t, var_y, var_t, yy - 2 * yt + tt)))


def correlation(s: Spread) -> np.ndarray:
    """Pearson's r of each voxel; 0 where the prediction is constant."""
    return np.clip(np.where(s.var_y > 0, s.covariance / np.sqrt(np.where(s.var_y > 0, s.var_y * s.var_t, 1)), 0), -1, 1)


def _mean(x: np.ndarray) -> float:
    return float(x.mean()) if x.size else math.nan


def shuffled(x_bv: Array, weight_b: Array, volume_b: Array) -> tuple[Array, Array]:
    """For the null: each row's partner, half of the valid rows away, [B, V], and whether it has one, [B].

    A test split comes in a mixed order, so that partners are no neighbours in time. A row is no partner of itself, nor are two
    viewers of one moment, who saw the same.
    """
    n = weight_b.sum().astype(jnp.int32)
    place_b = jnp.cumsum(weight_b).astype(jnp.int32) - 1
    partner_b = (place_b + n // 2) % jnp.maximum(n, 1)
    pick_bb = (partner_b[:, None] == place_b[None]) * weight_b[:, None] * weight_b[None]
    exactly = jax.lax.Precision.HIGHEST
    other_b = (pick_bb * (volume_b[:, None] != volume_b[None])).sum(1)
    return jnp.matmul(pick_bb, x_bv, precision=exactly), other_b


def density(x_bv: Array, y_bv: Array, bins: int = 96, limit: float = 3.0) -> Array:
    """[B, bins (y), bins (x)] in 0..1: the logarithm of the number of voxels in each cell, with the diagonal in grey."""
    edges = jnp.arange(bins)[None, None]
    place = lambda z: jnp.clip((z / limit + 1) * (bins / 2), 0, bins - 1).astype(jnp.int32)[..., None] == edges  # noqa: E731
    count_byx = jnp.einsum("bvy,bvx->byx", place(y_bv).astype(jnp.float32), place(x_bv).astype(jnp.float32))
    grey = jnp.log1p(count_byx) / jnp.log1p(jnp.maximum(count_byx.max((1, 2), keepdims=True), 1))
    return jnp.maximum(grey, 0.3 * jnp.eye(bins)[None])
