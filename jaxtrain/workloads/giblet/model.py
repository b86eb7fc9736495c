"""The Giblet autoencoder: a window of film in, the brain's response and the window out.

A row is one moment of one viewer: the frames, codec codes and text embeddings of the window before
it, and the fMRI volume measured then. Three encoders of flattened vectors, a trunk to the
bottleneck, a head to the voxels, a decoder with three heads. Every hidden layer is a matrix
product, batch norm, ReLU, dropout (which commutes with a ReLU: its place does not matter). Integers
become floats in one place, `entry`.

The batch is small and the matrices are not: of 8.36 billion parameters the first matrix alone
(1,641,600 × 4,096) has 6.7. So weights stay in place and activations move. A matrix is split over
its input rows ("input" or "embed", by fsdp) and each device multiplies its slice of the inputs of
*all* rows of its group along "data"; the devices exchange sums [B, width]. No matrix is gathered,
forward or backward.

Batch norm takes its statistics over the global batch (`jaxtrain.nn.batch_norm` defines it with
train.accumulate), or, with ``groups``, of runs of the batch's rows, as the original's devices do.

Shapes: B rows, I inputs of a layer, O outputs, F frames, V voxels, D any width, G groups.
"""

import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxtrain.config import ModelSection
from jaxtrain.nn import remat
from jaxtrain.nn.batch_norm import batch_norm
from jaxtrain.specs import fold_in_path, ones, zeros
from jaxtrain.types import (
    OF_DATA,
    Array,
    Axes,
    Export,
    Hub,
    Initializer,
    Key,
    OfData,
    PyTree,
    Shard,
    Spec,
)
from loaders.io import checks

DTYPES = ("float32", "bfloat16")
RECONSTRUCTIONS = ("frame", "window")
AUDIO = ("codes", "features")
FMRI_LOSSES = ("mse", "mae", "cosine")
MODALITIES = ("video", "audio", "text")
EPS = 1e-5  # of the norms
MOMENTUM = 0.1  # of the running statistics
# that the card of an export has
METRICS = ("fmri_r", "fmri_r_null", "voxel_r", "voxel_r_null", "total_loss")
# an evaluation needs the running statistics
EXPORT = Export(model_state=".", hub=lambda *_: Hub(metrics=METRICS))
LARGEST_CODE = 1023.0
CHANNELS = 3  # of a frame


@dataclass(frozen=True)
class Config(ModelSection):
    """The published widths by default."""

    on_resume = checks.OnResume(
        checks.FUNCTION,
        free=("remat",),
        state=(
            *(
                "n_frames",
                "height",
                "width",
                "codebooks",
                "audio_frames",
                "n_text",
                "n_voxels",
                "bottleneck",
                "head_width",
            ),
            *("video_widths", "audio_widths", "text_widths", "trunk_widths", "decoder_widths"),
            *("decode_video_widths", "decode_audio_widths", "decode_text_widths", "param_dtype"),
        ),
    )

    # [frames] frames of a window; None = as the data have
    n_frames: OfData[int] = OF_DATA
    height: OfData[int] = OF_DATA  # [pixels] height of a frame
    width: OfData[int] = OF_DATA  # [pixels] width of a frame
    codebooks: OfData[int] = OF_DATA  # [codes] number of codes or features of audio at one time
    audio_frames: OfData[int] = OF_DATA  # [times] times of audio in a window
    n_text: OfData[int] = OF_DATA  # [values] size of a window's text embedding
    n_voxels: OfData[int] = OF_DATA  # [voxels] number of predicted voxels
    # [name] kind of audio: codes (integers up to 1023) or features (any numbers); None = as the
    # data are
    audio: OfData[str] = OF_DATA
    # [values] widths of the video encoder's layers
    video_widths: tuple[int, int, int] = (4096, 2048, 1024)
    audio_widths: tuple[int, int] = (512, 256)  # [values] widths of the audio encoder's layers
    text_widths: tuple[int, int] = (512, 256)  # [values] widths of the text encoder's layers
    # [values] widths between the joined encoders and the bottleneck
    trunk_widths: tuple[int, int] = (4096, 8000)
    bottleneck: int = 2048  # [values] width of the bottleneck, which everything passes through
    head_width: int = 16384  # [values] width between the bottleneck and the voxels
    # [values] widths of the layers that the decoder's heads share
    decoder_widths: tuple[int, int, int, int] = (8000, 4096, 2048, 1536)
    decode_video_widths: tuple[int, int] = (2048, 4096)  # [values] widths before the decoded frame
    decode_audio_widths: tuple[int, int] = (2048, 2048)  # [values] widths before the decoded codes
    # [values] widths before the decoded embeddings
    decode_text_widths: tuple[int, int] = (1024, 1024)
    # [name] part of the video that the decoder makes: one frame, or the whole window
    reconstruct: str = "frame"
    frame: int = 0  # [frames] decoded frame, counted from the window's first; -1 = its last
    dropout: float = 1.0  # [ratio] ratio to the published rates of dropout, 0.2 and 0.3; 0 = none
    # [groups] number of groups of rows that batch norm normalises separately; 8 with a batch of 16
    # = eight devices with 2 rows
    groups: int = 1
    # [name] kind of loss: mse, mae, or cosine (1 - cosine similarity of a row)
    fmri_loss: str = "mse"
    # [bool] divide each mean error by the standard deviation of its targets in the batch
    normalised: bool = False
    weight_video: float = 1.0  # [1] weight of the loss in the total
    weight_audio: float = 1.0  # [1] weight of the loss in the total
    weight_text: float = 1.0  # [1] weight of the loss in the total
    weight_fmri: float = 1.0  # [1] weight of the loss in the total
    # [name] type of the matrix products' inputs; sums, norms and losses are float32
    dtype: str = "bfloat16"
    param_dtype: str = "float32"  # [name] type of the parameters
    # [name] recomputation in the backward pass: none, or full (statistics move once)
    remat: str = "none"

    def validate(self) -> Iterator[tuple[str, str]]:
        yield from checks.at_least(
            self, 1, *(name for name in SIZES if getattr(self, name) is not None)
        )
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

    def validate_data(self, info: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
        for name in (*SIZES, "audio"):
            value, needed = getattr(self, name), info.get(name)
            if value is None:
                yield name, "is None, and the data do not give it; set it"
            elif needed is not None and value != needed:
                text = f"is {value}, and the data have {needed}; nothing is cut or padded to fit"
                yield name, f"{text}: config.model.{name}=None takes the data's"
        if self.n_frames is not None and not -self.n_frames <= self.frame < self.n_frames:
            yield (
                "frame",
                (
                    f"is {self.frame}, and a window has the frames 0 … {self.n_frames - 1} (or"
                    f" -{self.n_frames} … -1)"
                ),
            )

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
        return {
            **self.inputs,
            **({"video": self.frame_size} if self.reconstruct == "frame" else {}),
        }


SIZES = ("n_frames", "height", "width", "codebooks", "audio_frames", "n_text", "n_voxels")


class Layer(NamedTuple):
    """y = x w + b, and with a rate also batch norm, ReLU and dropout."""

    n_in: int
    n_out: int
    rate: float | None = None  # of the dropout; None = a linear layer
    norm: bool = True  # the bottleneck has only this
    relu: bool = True
    axes: Axes = ("embed", "mlp")


def layers(c: Config) -> dict[str, dict[str, list[Layer]]]:
    """Return the whole net: part -> branch -> its layers, in order."""

    def chain(
        n_in: int, widths: tuple[int, ...], rates: tuple[float, ...], first: Axes = ("embed", "mlp")
    ) -> list[Layer]:
        sizes = zip((n_in, *widths[:-1]), widths, rates, strict=True)
        return [
            Layer(i, o, rate, axes=("embed", "mlp") if n else first)
            for n, (i, o, rate) in enumerate(sizes)
        ]

    size, out = c.inputs, c.outputs
    joined = c.video_widths[-1] + c.audio_widths[-1] + c.text_widths[-1]
    # The last matrix of a whole window is as large as the first, and split over the same pixels.
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
    """Uniform in ±``bound``: 1 / sqrt(inputs) is torch.nn.Linear's default, biases too."""

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
        norm = {
            name: Spec((layer.n_out,), (None,), init, c.param_dtype)
            for name, init in (("scale", ones), ("bias", zeros))
        }
        return {
            "w": Spec((layer.n_in, layer.n_out), layer.axes, matrix, c.param_dtype),
            "b": Spec((layer.n_out,), wide, bias, c.param_dtype),
            **(norm if layer.norm else {}),
        }

    return {
        part: {
            branch: {str(i): specs(part, layer) for i, layer in enumerate(chain)}
            for branch, chain in branches.items()
        }
        for part, branches in layers(c).items()
    }


def make_model_state(c: Config) -> PyTree:
    """Return the running statistics of every norm, float32."""

    def norm(layer: Layer) -> dict[str, Spec]:
        return {
            "mean": Spec((layer.n_out,), (None,), zeros),
            "var": Spec((layer.n_out,), (None,), ones),
        }

    return {
        part: {
            branch: {str(i): norm(layer) for i, layer in enumerate(chain) if layer.norm}
            for branch, chain in branches.items()
        }
        for part, branches in layers(c).items()
    }


class Draws(NamedTuple):
    """The randomness and the groups of a training step. An evaluation has none."""

    key: Key
    row_b: Array  # int32 [B]: places in the global batch
    member_bg: Array  # `member` of batch norm's groups


class Outputs(NamedTuple):
    """float32, unless training keeps a narrower type."""

    bottleneck: Array  # [B, bottleneck]
    fmri: Array  # [B, V]
    video: Array  # [B, frame or window], 0..1
    audio: Array  # [B, codebooks × times], 0..1023 and in an evaluation whole numbers, or features
    text: Array  # [B, text]


def entry(x: Array) -> Array:
    """Convert the loader's integers to float32: frames' bytes in 0..1, codes as they are."""
    return x.astype(jnp.float32) * (1 / 255) if x.dtype == jnp.uint8 else x.astype(jnp.float32)


def forward(
    c: Config,
    params: PyTree,
    running: PyTree,
    inputs: Mapping[str, Array],
    shard: Shard,
    draws: Draws | None = None,
) -> tuple[Outputs, PyTree]:
    """Return `Outputs` of the loader's inputs [B, values], and the new running statistics.

    Without ``draws`` it normalises with ``running``, drops nothing and rounds the codes.
    """
    table, dtype = layers(c), jnp.dtype(c.dtype)

    def run(part: str, branch: str, x_bi: Array) -> tuple[Array, PyTree]:
        """Return the layers of a branch, in turn: float32 [B, O], and running statistics."""
        new, old = {}, running[part][branch]
        for i, layer in enumerate(table[part][branch]):
            path, w = f"{part}/{branch}/{i}", params[part][branch][str(i)]
            with jax.named_scope(path):
                # "rows", not "batch": a device has its slice of the inputs of all its group's rows.
                x_bi = shard(x_bi.astype(dtype), "rows", layer.axes[0])
                y_bo = jnp.dot(x_bi, w["w"].astype(dtype), preferred_element_type=jnp.float32)
                # Whole over fsdp: its gradient too is gathered before it meets x, not the matrix.
                y_bo = shard(y_bo, "rows", layer.axes[1])
                y_bo += jnp.broadcast_to(w["b"].astype(jnp.float32), y_bo.shape)
                if layer.norm:
                    norm = functools.partial(batch_norm, momentum=MOMENTUM, eps=EPS)
                    y_bo, new[str(i)] = norm(
                        y_bo, w["scale"], w["bias"], old[str(i)], draws.member_bg if draws else None
                    )
                if layer.relu:
                    y_bo = jax.nn.relu(y_bo)
                if draws and layer.rate and c.dropout:
                    y_bo = drop(
                        y_bo, c.dropout * layer.rate, fold_in_path(draws.key, path), draws.row_b
                    )
            x_bi = y_bo
        return x_bi, new

    encoder, decoder = {}, {}  # the new running statistics
    # Bytes travel to the pixels' weights, and become floats there.
    video, encoder["video"] = run(
        "encoder", "video", entry(shard(inputs["video"], "rows", "input"))
    )
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


def drop(x_bd: Array, rate: float, key: Key, row_b: Array) -> Array:
    """Drop out (Srivastava et al. 2014) by the key and a row's place in the global batch alone."""
    keep_bd = jax.vmap(
        lambda row: jax.random.bernoulli(jax.random.fold_in(key, row), 1 - rate, x_bd.shape[1:])
    )(row_b)
    return jnp.where(keep_bd, x_bd / (1 - rate), 0)


def n_weights(c: Config) -> int:
    """Numbers in all matrices."""
    return sum(
        layer.n_in * layer.n_out
        for branches in layers(c).values()
        for chain in branches.values()
        for layer in chain
    )
