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

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxtrain.config import ModelSection
from jaxtrain.nn import remat
from jaxtrain.nn.batch_norm import batch_norm
from jaxtrain.nn.dropout import drop
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
MUCH_LARGER = 4  # times as many numbers, by which reading operands instead of a matrix pays
# fields of `Config` that decide the arrays of the state
STATE_FIELDS = (
    "n_frames",
    "height",
    "width",
    "codebooks",
    "audio_frames",
    "n_text",
    "n_voxels",
    "bottleneck",
    "head_width",
    "video_widths",
    "audio_widths",
    "text_widths",
    "trunk_widths",
    "decoder_widths",
    "decode_video_widths",
    "decode_audio_widths",
    "decode_text_widths",
    "param_dtype",
)
# fields of `Config` that the data decide
SIZES = ("n_frames", "height", "width", "codebooks", "audio_frames", "n_text", "n_voxels")
WEIGHTS = ("weight_video", "weight_audio", "weight_text", "weight_fmri")


@dataclass(frozen=True)
class Config(ModelSection):
    """The published widths by default."""

    on_resume = checks.OnResume(checks.FUNCTION, free=("remat",), state=STATE_FIELDS)

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
    # [name] type of the parameters, and of the sums of their gradients over microbatches and
    # replicas
    param_dtype: str = "float32"
    # [name] recomputation in the backward pass: none, or full (statistics move once)
    remat: str = "none"

    def validate(self) -> Iterator[tuple[str, str]]:
        sizes = [name for name in SIZES if getattr(self, name) is not None]
        yield from checks.at_least(self, 1, *sizes)
        yield from checks.at_least(self, 1, "bottleneck", "head_width", "groups")
        for name, value in vars(self).items():
            if name.endswith("widths") and min(value) < 1:
                yield name, f"is {value}; each must be at least 1"
        yield from checks.not_negative(self, *WEIGHTS)
        yield from checks.choice(self, RECONSTRUCTIONS, "reconstruct")
        yield from checks.choice(self, FMRI_LOSSES, "fmri_loss")
        yield from checks.choice(self, DTYPES, "dtype", "param_dtype")
        yield from checks.choice(self, remat.WHOLE, "remat")
        yield from checks.choice(self, (*AUDIO, None), "audio")
        if self.reconstruct == "window" and self.frame:
            yield "frame", f"is {self.frame}, and reconstruct='window' makes all of them; unset it"
        if not 0 <= self.dropout < 1 / 0.3:
            yield "dropout", f"is {self.dropout}; the largest rate, 0.3 of it, must lie in [0, 1)"
        if not any(getattr(self, name) for name in WEIGHTS):
            yield "weight_fmri", "is 0 like all the other weights; nothing would be learned"

    def validate_data(self, info: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
        for name in (*SIZES, "audio"):
            value = getattr(self, name)
            of_data = info.get(name)
            if value is None:
                yield name, "is None, and the data do not give it; set it"
            elif of_data is not None and value != of_data:
                text = f"is {value}, and the data have {of_data}; nothing is cut or padded to fit"
                yield name, f"{text}: config.model.{name}=None takes the data's"
        n = self.n_frames
        if n is not None and not -n <= self.frame < n:
            text = f"is {self.frame}, and a window has the frames 0 … {n - 1}"
            yield "frame", f"{text} (or -{n} … -1)"

    @property
    def reads_whole_microbatches(self) -> bool:
        return True  # batch norm

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
        sizes = self.inputs
        if self.reconstruct == "frame":
            sizes["video"] = self.frame_size
        return sizes


class Layer(NamedTuple):
    """y = x w + b, and with a rate also batch norm, ReLU and dropout."""

    n_in: int
    n_out: int
    rate: float | None = None  # of the dropout; None = a linear layer
    norm: bool = True  # the bottleneck has only this
    relu: bool = True
    axes: Axes = ("embed", "mlp")


Table = dict[str, dict[str, list[Layer]]]


def layers(c: Config) -> Table:
    """Return the whole net: part -> branch -> its layers, in order."""
    return {"encoder": _encoder(c), "decoder": _decoder(c)}


def _encoder(c: Config) -> dict[str, list[Layer]]:
    sizes = c.inputs
    last_widths = (c.video_widths[-1], c.audio_widths[-1], c.text_widths[-1])
    joined = sum(last_widths)
    trunk = _chain(joined, (joined, *c.trunk_widths), (0.2, 0.3, 0.3))
    to_bottleneck = Layer(c.trunk_widths[-1], c.bottleneck, 0.0, relu=False)
    to_head = Layer(c.bottleneck, c.head_width, 0.3)
    to_voxels = Layer(c.head_width, c.n_voxels, norm=False, relu=False, axes=("embed", "output"))
    return {
        "video": _chain(sizes["video"], c.video_widths, (0.3, 0.3, 0.2), ("input", "mlp")),
        "audio": _chain(sizes["audio"], c.audio_widths, (0.3, 0.2)),
        "text": _chain(sizes["text"], c.text_widths, (0.2, 0.2)),
        "trunk": [*trunk, to_bottleneck],
        "fmri": [to_head, to_voxels],
    }


def _decoder(c: Config) -> dict[str, list[Layer]]:
    shared = c.decoder_widths[-1]
    sizes = c.outputs
    pixels: Axes = ("embed", "mlp")
    if c.reconstruct == "window":
        # The last matrix of a whole window is as large as the first, and split over the same
        # pixels.
        pixels = ("mlp", "input")
    return {
        "trunk": _chain(c.bottleneck, c.decoder_widths, (0.3,) * 4),
        "video": _head(shared, c.decode_video_widths, sizes["video"], pixels),
        "audio": _head(shared, c.decode_audio_widths, sizes["audio"]),
        "text": _head(shared, c.decode_text_widths, sizes["text"]),
    }


def _chain(
    n_in: int, widths: tuple[int, ...], rates: tuple[float, ...], axes: Axes = ("embed", "mlp")
) -> list[Layer]:
    """Return layers of these widths in turn. ``axes`` are those of the first matrix."""
    chain = []
    for n_out, rate in zip(widths, rates, strict=True):
        chain.append(Layer(n_in, n_out, rate, axes=axes))
        n_in = n_out
        axes = ("embed", "mlp")
    return chain


def _head(
    n_in: int, widths: tuple[int, int], n_out: int, axes: Axes = ("embed", "mlp")
) -> list[Layer]:
    """Return a head of the decoder: two layers, and the matrix of its outputs."""
    hidden = _chain(n_in, widths, (0.3, 0.3))
    output = Layer(widths[-1], n_out, norm=False, relu=False, axes=axes)
    return [*hidden, output]


def uniform(bound: float) -> Initializer:
    """Uniform in ±``bound``: 1 / sqrt(inputs) is torch.nn.Linear's default, biases too."""

    def init(key: Key, shape: tuple[int, ...], dtype: Any) -> Array:
        values = jax.random.uniform(key, shape, jnp.float32, -bound, bound)
        return values.astype(dtype)

    return init


def normal(stddev: float) -> Initializer:
    def init(key: Key, shape: tuple[int, ...], dtype: Any) -> Array:
        values = jax.random.normal(key, shape, jnp.float32)
        values = stddev * values
        return values.astype(dtype)

    return init


def make_specs(c: Config) -> PyTree:
    """part / branch / number / w, b, and scale, bias of the norm."""

    def of_layer(part: str, layer: Layer) -> dict[str, Spec]:
        return _layer_specs(part, layer, c.param_dtype)

    return _by_layer(c, of_layer)


def make_model_state(c: Config) -> PyTree:
    """Return the running statistics of every norm, float32."""

    def of_layer(part: str, layer: Layer) -> dict[str, Spec]:
        if not layer.norm:
            return {}
        shape = (layer.n_out,)
        mean = Spec(shape, (None,), zeros)
        var = Spec(shape, (None,), ones)
        return {"mean": mean, "var": var}

    return _by_layer(c, of_layer)


def _by_layer(c: Config, of_layer: Callable[[str, Layer], dict[str, Spec]]) -> PyTree:
    """Return part / branch / number / the specs of each layer that has some."""
    tree: dict[str, Any] = {}
    for part, branches in layers(c).items():
        tree[part] = {}
        for branch, chain in branches.items():
            specs = [of_layer(part, layer) for layer in chain]
            tree[part][branch] = {str(i): spec for i, spec in enumerate(specs) if spec}
    return tree


def _layer_specs(part: str, layer: Layer, dtype: str) -> dict[str, Spec]:
    n_in, n_out = layer.n_in, layer.n_out
    bound = n_in**-0.5
    w_init = b_init = uniform(bound)
    if part == "decoder":  # He et al. 2015, by outputs
        stddev = (2 / n_out) ** 0.5
        w_init = normal(stddev)
        b_init = zeros
    b_axes: Axes = (None,)
    if layer.axes[1] == "input":
        b_axes = ("input",)
    specs = {
        "w": Spec((n_in, n_out), layer.axes, w_init, dtype),
        "b": Spec((n_out,), b_axes, b_init, dtype),
    }
    if layer.norm:
        specs["scale"] = Spec((n_out,), (None,), ones, dtype)
        specs["bias"] = Spec((n_out,), (None,), zeros, dtype)
    return specs


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
    y = x.astype(jnp.float32)
    if x.dtype == jnp.uint8:
        y = y * (1 / 255)
    return y


def multiply(x_bi: Array, w_io: Array, zero: Array | None = None) -> Array:
    """Multiply x by w, float32 [B, O].

    ``zero``: float32 [], by which the derivative is the sum of squares of w's gradient, for w of 16
    bits. None = the sum is not needed.
    """
    if w_io.dtype == jnp.float32:
        return jnp.dot(x_bi, w_io)
    if zero is None:
        return _multiply_narrow(x_bi, w_io)
    return _multiply_measured(x_bi, w_io, zero)


@jax.custom_vjp
def _multiply_narrow(x_bi: Array, w_io: Array) -> Array:
    """Multiply arrays of 16 bits. The gradient rounds dy to 16 bits, too.

    JAX's own gradient keeps dy in float32. Each matrix is then written out in float32 before its
    product with dy, and so is the gradient: 26.9 GB of the first matrix at the published size.
    """
    return jnp.dot(x_bi, w_io, preferred_element_type=jnp.float32)


def _multiply_forward(x_bi: Array, w_io: Array) -> tuple[Array, tuple[Array, Array]]:
    return _multiply_narrow(x_bi, w_io), (x_bi, w_io)


def _multiply_backward(residuals: tuple[Array, Array], dy_bo: Array) -> tuple[Array, Array]:
    x_bi, w_io = residuals
    dy_bo = dy_bo.astype(w_io.dtype)
    dx_bi = jnp.einsum("bo,io->bi", dy_bo, w_io)
    dw_io = jnp.einsum("bi,bo->io", x_bi, dy_bo)
    return dx_bi, dw_io


_multiply_narrow.defvjp(_multiply_forward, _multiply_backward)


@jax.custom_vjp
def _multiply_measured(x_bi: Array, w_io: Array, zero: Array) -> Array:
    return _multiply_narrow(x_bi, w_io)


def _measured_forward(x_bi: Array, w_io: Array, zero: Array) -> tuple[Array, tuple[Array, Array]]:
    return _multiply_forward(x_bi, w_io)


def _measured_backward(residuals: tuple[Array, Array], dy_bo: Array) -> tuple[Array, Array, Array]:
    """Sum the squares of dw = x^T dy without reading dw, by the products of each two rows.

    They are B × B numbers of x, and of dy: the sum is that of (x x^T) (dy dy^T) by elements.
    """
    x_bi, w_io = residuals
    dy_bo = dy_bo.astype(w_io.dtype)
    of_x_bb = jnp.einsum("bi,ci->bc", x_bi, x_bi, preferred_element_type=jnp.float32)
    of_dy_bb = jnp.einsum("bo,co->bc", dy_bo, dy_bo, preferred_element_type=jnp.float32)
    square_sum = jnp.maximum((of_x_bb * of_dy_bb).sum(), 0.0)
    return *_multiply_backward(residuals, dy_bo), square_sum


_multiply_measured.defvjp(_measured_forward, _measured_backward)


class Net(NamedTuple):
    """The net with its arrays, for one step."""

    c: Config
    params: PyTree
    running: PyTree  # statistics
    shard: Shard
    draws: Draws | None
    zeros: Mapping[str, Array]  # by the paths of `measured`

    def branch(self, part: str, branch: str, x_bi: Array) -> tuple[Array, PyTree]:
        """Return the layers of a branch, in turn: float32 [B, O], and running statistics."""
        running = {}
        chain = layers(self.c)[part][branch]
        params = self.params[part][branch]
        old_running = self.running[part][branch]
        for i, layer in enumerate(chain):
            number = str(i)
            path = f"{part}/{branch}/{number}"
            with jax.named_scope(path):
                w = params[number]
                y_bo = self._product(layer, w, x_bi, self.zeros.get(f"{path}/w"))
                if layer.norm:
                    y_bo, running[number] = self._norm(w, y_bo, old_running[number])
                if layer.relu:
                    y_bo = jax.nn.relu(y_bo)
                if self.draws and layer.rate and self.c.dropout:
                    rate = self.c.dropout * layer.rate
                    key = fold_in_path(self.draws.key, path)
                    y_bo = drop(y_bo, rate, key, self.draws.row_b)
            x_bi = y_bo
        return x_bi, running

    def _product(self, layer: Layer, w: PyTree, x_bi: Array, zero: Array | None) -> Array:
        """Compute x w + b, float32 [B, O]."""
        dtype = jnp.dtype(self.c.dtype)
        # "rows", not "batch": a device has its slice of the inputs of all its group's rows.
        in_axis, out_axis = layer.axes
        x_bi = x_bi.astype(dtype)
        x_bi = self.shard(x_bi, "rows", in_axis)
        w_io = w["w"].astype(dtype)
        y_bo = multiply(x_bi, w_io, zero)
        # Whole over fsdp: its gradient too is gathered before it meets x, not the matrix.
        y_bo = self.shard(y_bo, "rows", out_axis)
        b_o = w["b"].astype(jnp.float32)
        b_bo = jnp.broadcast_to(b_o, y_bo.shape)
        return y_bo + b_bo

    def _norm(self, w: PyTree, y_bo: Array, running: PyTree) -> tuple[Array, PyTree]:
        """Return batch norm's result and its new running statistics."""
        member_bg = None
        if self.draws:
            member_bg = self.draws.member_bg
        scale, bias = w["scale"], w["bias"]
        return batch_norm(y_bo, scale, bias, running, member_bg, momentum=MOMENTUM, eps=EPS)


def forward(
    c: Config,
    params: PyTree,
    running: PyTree,
    inputs: Mapping[str, Any],
    shard: Shard,
    draws: Draws | None = None,
) -> tuple[Outputs, PyTree]:
    """Return `Outputs` of the loader's inputs [B, values], and the new running statistics.

    Without ``draws`` it normalises with ``running``, drops nothing and rounds the codes.
    ``inputs`` may have the zeros of `Task.measured`.
    """
    run = Net(c, params, running, shard, draws, inputs.get("square_sums", {})).branch
    encoder, decoder = {}, {}  # the new running statistics
    # Bytes travel to the pixels' weights, and become floats there.
    video = shard(inputs["video"], "rows", "input")
    video = entry(video)
    video, encoder["video"] = run("encoder", "video", video)
    audio, encoder["audio"] = run("encoder", "audio", entry(inputs["audio"]))
    text, encoder["text"] = run("encoder", "text", entry(inputs["text"]))
    gathered = [shard(x_bd, "rows", None) for x_bd in (video, audio, text)]
    joined = jnp.concatenate(gathered, axis=1)
    joined = shard(joined, "rows", None)
    bottleneck, encoder["trunk"] = run("encoder", "trunk", joined)
    shared, decoder["trunk"] = run("decoder", "trunk", bottleneck)
    audio, decoder["audio"] = run("decoder", "audio", shared)
    if c.audio == "codes":
        audio = jax.nn.sigmoid(audio)
        audio = LARGEST_CODE * audio
        if not draws:
            audio = jnp.round(audio)
            audio = jnp.clip(audio, 0, LARGEST_CODE)
    fmri, encoder["fmri"] = run("encoder", "fmri", bottleneck)
    fmri = shard(fmri, "batch", None)
    video, decoder["video"] = run("decoder", "video", shared)
    video = jax.nn.sigmoid(video)
    text, decoder["text"] = run("decoder", "text", shared)
    outputs = Outputs(bottleneck, fmri, video, audio, text)
    return outputs, {"encoder": encoder, "decoder": decoder}


def measured(c: Config, rows: int) -> tuple[str, ...]:
    """List the paths of matrices that are much larger than the products of a step's rows.

    `_measured_backward` reads these instead. It is for products of 16 bits.
    """
    if c.dtype == "float32":
        return ()
    paths = []
    for part, branches in layers(c).items():
        for branch, chain in branches.items():
            for i, layer in enumerate(chain):
                n_operands = rows * (layer.n_in + layer.n_out)
                if MUCH_LARGER * n_operands <= layer.n_in * layer.n_out:
                    paths.append(f"{part}/{branch}/{i}/w")
    return tuple(paths)


def n_weights(c: Config) -> int:
    """Numbers in all matrices."""
    n = 0
    for branches in layers(c).values():
        for chain in branches.values():
            for layer in chain:
                n += layer.n_in * layer.n_out
    return n
