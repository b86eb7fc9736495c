"""Bird audio: a vision transformer over log-mel spectrograms, with the supervised objective and an online probe.

The encoder is a pre-norm ViT (Dosovitskiy et al. 2021) over patches of a spectrogram [time, mel], rows first. The objective
is cross-entropy over the mean of its CLS tokens. The probe (layer norm, linear) reads the same features without passing
gradients back; it has its own learning rate and stays comparable between objectives.

Shapes: B batch, F frames, W mels, N patches, P values in a patch, T tokens (CLS, then patches), D embed, H heads,
K head dimension, M mlp, C classes, L layers.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jaxtrain.config import Config as RunConfig
from jaxtrain.nn.attention import attention
from jaxtrain.specs import fan_in, ones, truncated_normal, zeros
from jaxtrain.types import Array, Batch, Key, LossOut, Mean, PyTree, Shard, Spec, Task, Variables

POOLS = ("cls", "patches")
DTYPES = ("float32", "bfloat16")
EPS = 1e-5  # of the layer norms


@dataclass(frozen=True)
class Config:
    """ViT-S by default."""

    n_classes: int | None = None  # [classes] None = as many as the data have names for
    n_frames: int = 512  # [frames] of a spectrogram, 10 ms each
    n_mels: int = 128  # [bands] of a spectrogram
    patch: tuple[int, int] = (16, 16)  # [frames, bands] of a patch
    embed: int = 384  # [values] width of a token
    depth: int = 12  # [layers] of the encoder
    heads: int = 6  # [heads] of the attention
    mlp_ratio: int = 4  # [1] inner width of the MLP, over embed
    n_cls: int = 1  # [tokens] CLS tokens; their mean is what the objective reads
    pool: str = "cls"  # [name] what the objective and the probe read: the mean of "cls" or of "patches"
    dtype: str = "bfloat16"  # [name] of activations and matrix products; parameters, norms and losses are float32
    remat: bool = False  # [bool] recompute each layer in the backward pass instead of keeping its activations
    label_smoothing: float = 0.0  # [1] share of the target that is spread over all classes
    shift: int = 0  # [frames] augmentation: largest rotation in time, either way
    time_masks: int = 0  # [masks] augmentation: spans of frames set to the clip's mean
    time_mask: int = 40  # [frames] longest time mask
    mel_masks: int = 0  # [masks] augmentation: spans of bands set to the clip's mean
    mel_mask: int = 16  # [bands] widest mel mask
    gain: float = 0.0  # [ln energy / 8.86] augmentation: largest change of level, either way
    noise: float = 0.0  # [ln energy / 8.86] augmentation: standard deviation of noise on every value

    def problems(self) -> Iterator[tuple[str, str]]:
        for name in ("n_frames", "n_mels", "embed", "depth", "heads", "mlp_ratio", "n_cls"):
            if getattr(self, name) < 1:
                yield name, f"is {getattr(self, name)}; it must be at least 1"
        for name, allowed in (("pool", POOLS), ("dtype", DTYPES)):
            if getattr(self, name) not in allowed:
                yield name, f"is {getattr(self, name)!r}; there are: {', '.join(allowed)}"
        for size, part, axis in zip((self.n_frames, self.n_mels), self.patch, ("n_frames", "n_mels"), strict=True):
            if part < 1 or size % part:
                yield "patch", f"is {self.patch}, which does not divide {axis}={size}"
        if self.heads > 0 and self.embed % self.heads:
            yield "heads", f"is {self.heads}, which does not divide embed={self.embed}"
        if not 0 <= self.label_smoothing < 1:
            yield "label_smoothing", f"is {self.label_smoothing}; it lies in [0, 1)"
        for name in ("shift", "time_masks", "time_mask", "mel_masks", "mel_mask", "gain", "noise"):
            if getattr(self, name) < 0:
                yield name, f"is {getattr(self, name)}; it must not be negative"

    def data_problems(self, facts: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
        if self.n_classes is None:
            yield "n_classes", "is None, and the data name no classes; set it, or store the labels as a ClassLabel"
        elif self.n_classes < facts.get("n_classes", 0):
            yield "n_classes", f"is {self.n_classes}, and the data have {facts['n_classes']} classes"
        if facts.get("n_unlabelled", 0):
            yield (
                "n_classes",
                f"needs a label on every recording, and {facts['n_unlabelled']} have null; add them to data.exclude",
            )

    @property
    def n_patches(self) -> int:
        return (self.n_frames // self.patch[0]) * (self.n_mels // self.patch[1])


def make_specs(c: Config) -> PyTree:
    d, h, k, m, l = c.embed, c.heads, c.embed // c.heads, c.embed * c.mlp_ratio, c.depth
    p = c.patch[0] * c.patch[1]
    blocks = {
        "scale_attention": Spec((l, d), ("layer", "embed"), ones),
        "bias_attention": Spec((l, d), ("layer", "embed"), zeros),
        "w_qkv": Spec((l, d, 3, h, k), ("layer", "embed", None, "heads", "head_dim"), fan_in(d)),
        "b_qkv": Spec((l, 3, h, k), ("layer", None, "heads", "head_dim"), zeros),
        "w_out": Spec((l, h, k, d), ("layer", "heads", "head_dim", "embed"), fan_in(d)),
        "b_out": Spec((l, d), ("layer", "embed"), zeros),
        "scale_mlp": Spec((l, d), ("layer", "embed"), ones),
        "bias_mlp": Spec((l, d), ("layer", "embed"), zeros),
        "w_up": Spec((l, d, m), ("layer", "embed", "mlp"), fan_in(d)),
        "b_up": Spec((l, m), ("layer", "mlp"), zeros),
        "w_down": Spec((l, m, d), ("layer", "mlp", "embed"), fan_in(m)),
        "b_down": Spec((l, d), ("layer", "embed"), zeros),
    }
    return {
        "encoder": {
            "w_patch": Spec((p, d), ("patch", "embed"), fan_in(p)),
            "b_patch": Spec((d,), ("embed",), zeros),
            "pos": Spec((c.n_patches, d), ("seq", "embed"), truncated_normal(0.02)),
            "cls": Spec((c.n_cls, d), (None, "embed"), truncated_normal(0.02)),
            "blocks": blocks,
            "scale": Spec((d,), ("embed",), ones),
            "bias": Spec((d,), ("embed",), zeros),
        },
        "objective": {
            "w": Spec((d, c.n_classes), ("embed", "vocab"), fan_in(d)),
            "b": Spec((c.n_classes,), ("vocab",), zeros),
        },
        "probe": {
            "scale": Spec((d,), ("embed",), ones),
            "bias": Spec((d,), ("embed",), zeros),
            "w": Spec((d, c.n_classes), ("embed", "vocab"), fan_in(d)),
            "b": Spec((c.n_classes,), ("vocab",), zeros),
        },
    }


def export_names(config: Mapping[str, Any], path: str) -> str | list[str]:
    """Dots for slashes; every layer of the encoder under its own name. ``config`` is this section as it was saved."""
    encoder, blocks, name = path.partition("/blocks/")
    if not blocks:
        return path.replace("/", ".")
    return [f"{encoder}.blocks.{i}.{name}" for i in range(config["depth"])]


def encode(c: Config, params: PyTree, x_bfw: Array, shard: Shard) -> tuple[Array, Array]:
    """Spectrograms [B, F, W] -> (CLS [B, n_cls, D], patches [B, N, D]) in float32, after the last layer norm."""
    dtype = jnp.dtype(c.dtype)
    with jax.named_scope("patchify"):
        x_bnp = patchify(c, x_bfw)
        # The input is the one place where half precision would round what was measured.
        x_bnd = jnp.einsum("bnp,pd->bnd", x_bnp, params["w_patch"], precision=jax.lax.Precision.HIGHEST)
        x_bnd += params["b_patch"][None, None]
        cls_bcd = jnp.broadcast_to(params["cls"], (x_bfw.shape[0], *params["cls"].shape))
        x_btd = jnp.concatenate([cls_bcd, x_bnd + params["pos"][None]], axis=1).astype(dtype)
    x_btd = shard(x_btd, "batch", "seq", None)

    def layer(x_btd: Array, w: PyTree) -> tuple[Array, None]:
        with jax.named_scope("attention"):
            y_btd = layer_norm(x_btd, w["scale_attention"], w["bias_attention"]).astype(dtype)
            qkv_bt3hk = jnp.einsum("btd,dchk->btchk", y_btd, w["w_qkv"].astype(dtype)) + w["b_qkv"].astype(dtype)[None, None]
            qkv_bt3hk = shard(qkv_bt3hk, "batch", "seq", None, "heads", "head_dim")
            y_bthk = attention(qkv_bt3hk[:, :, 0], qkv_bt3hk[:, :, 1], qkv_bt3hk[:, :, 2])
            x_btd += jnp.einsum("bthk,hkd->btd", y_bthk, w["w_out"].astype(dtype)) + w["b_out"].astype(dtype)[None, None]
        with jax.named_scope("mlp"):
            y_btd = layer_norm(x_btd, w["scale_mlp"], w["bias_mlp"]).astype(dtype)
            y_btm = jnp.einsum("btd,dm->btm", y_btd, w["w_up"].astype(dtype)) + w["b_up"].astype(dtype)[None, None]
            y_btm = jax.nn.gelu(shard(y_btm, "batch", "seq", "mlp"))
            x_btd += jnp.einsum("btm,md->btd", y_btm, w["w_down"].astype(dtype)) + w["b_down"].astype(dtype)[None, None]
        return shard(x_btd, "batch", "seq", None), None

    x_btd, _ = jax.lax.scan(jax.checkpoint(layer) if c.remat else layer, x_btd, params["blocks"])
    x_btd = layer_norm(x_btd, params["scale"], params["bias"])
    return x_btd[:, : c.n_cls], x_btd[:, c.n_cls :]


def patchify(c: Config, x_bfw: Array) -> Array:
    """[B, F, W] -> [B, N, P], patches and their values both row by row in time."""
    (f, w), b = c.patch, x_bfw.shape[0]
    x = x_bfw.reshape(b, c.n_frames // f, f, c.n_mels // w, w)
    return x.transpose(0, 1, 3, 2, 4).reshape(b, c.n_patches, f * w)


def layer_norm(x: Array, scale: Array, bias: Array) -> Array:
    """(x - mean) / sqrt(var + eps) scale + bias over the last axis, in float32 (Ba et al. 2016)."""
    x = x.astype(jnp.float32)
    x = x - x.mean(-1, keepdims=True)
    x = x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + EPS)
    return x * jnp.broadcast_to(scale, x.shape) + jnp.broadcast_to(bias, x.shape)


def augment(c: Config, seed: int, batch: Batch) -> Array:
    """Spectrograms [B, F, W] as training sees them: a pure function of (seed, epoch, recording), row by row."""

    def one(x_fw: Array, epoch: Array, index: Array) -> Array:
        key = jax.random.fold_in(jax.random.fold_in(jax.random.key(seed ^ 0x61756700), epoch), index)
        key_shift, key_time, key_mel, key_gain, key_noise = jax.random.split(key, 5)
        mean = x_fw.mean()
        if c.shift:
            x_fw = jnp.roll(x_fw, jax.random.randint(key_shift, (), -c.shift, c.shift + 1), axis=0)
        if c.gain:
            x_fw += jax.random.uniform(key_gain, (), minval=-c.gain, maxval=c.gain)
        if c.noise:
            x_fw += c.noise * jax.random.normal(key_noise, x_fw.shape)
        masked_f = _spans(key_time, c.n_frames, c.time_masks, c.time_mask)
        masked_w = _spans(key_mel, c.n_mels, c.mel_masks, c.mel_mask)
        return jnp.where(masked_f[:, None] | masked_w[None, :], mean, x_fw)

    return jax.vmap(one)(batch["spectrogram"], batch["epoch"], batch["index"])


def _spans(key: Key, size: int, n: int, longest: int) -> Array:
    """bool [size]: the union of n spans of 0 to ``longest`` places (Park et al. 2019)."""
    key_length, key_start = jax.random.split(key)
    length = jax.random.randint(key_length, (n,), 0, longest + 1)
    start = (jax.random.uniform(key_start, (n,)) * (size - length + 1)).astype(jnp.int32)
    place, start, stop = jnp.arange(size)[:, None], start[None], (start + length)[None]
    return ((place >= start) & (place < stop)).any(axis=1)


def cross_entropy(logits_bc: Array, label_b: Array, *, smoothing: float = 0.0) -> Array:
    """-sum_c target_c log softmax(logits)_c, [B]; the target is one-hot, ``smoothing`` of it spread evenly."""
    log_p_bc = jax.nn.log_softmax(logits_bc)
    # A masked sum, not a gather: classes may be split over devices, and each then adds what it has.
    picked_b = jnp.where(jnp.arange(log_p_bc.shape[1])[None] == label_b[:, None], log_p_bc, 0).sum(-1)
    return -(1 - smoothing) * picked_b - smoothing * log_p_bc.mean(-1)


def make_task(config: RunConfig, shard: Shard, batch: int) -> Task:
    c: Config = config.model

    def logits(params: PyTree, x_bfw: Array) -> tuple[Array, Array]:
        """Class scores [B, C] of the objective and of the probe."""
        cls_bcd, patches_bnd = encode(c, params["encoder"], x_bfw, shard)
        pooled_bd = (cls_bcd if c.pool == "cls" else patches_bnd).mean(axis=1)
        objective_bc = pooled_bd @ params["objective"]["w"] + params["objective"]["b"][None]
        probe = params["probe"]
        # Without this the probe's loss trains the encoder, and every objective becomes half a supervised one.
        detached_bd = layer_norm(jax.lax.stop_gradient(pooled_bd), probe["scale"], probe["bias"])
        return objective_bc, detached_bd @ probe["w"] + probe["b"][None]

    def measure(params: PyTree, x_bfw: Array, batch: Batch, *, smoothing: float) -> dict[str, Mean]:
        objective_bc, probe_bc = logits(params, x_bfw)
        label_b, weight_b = batch["label"], batch["weight"]
        each = {
            "objective_loss": cross_entropy(objective_bc, label_b, smoothing=smoothing),
            "probe_loss": cross_entropy(probe_bc, label_b),
            "accuracy": objective_bc.argmax(-1) == label_b,
            "probe_accuracy": probe_bc.argmax(-1) == label_b,
        }
        return {name: Mean((value_b * weight_b).sum(), weight_b.sum()) for name, value_b in each.items()}

    def loss(variables: Variables, batch: Batch, key: Key) -> LossOut:
        del key  # augmentation depends on the recording and its epoch, not on the step
        metrics = measure(variables.params, augment(c, config.seed, batch), batch, smoothing=c.label_smoothing)
        total = metrics["objective_loss"].total + metrics["probe_loss"].total
        return LossOut(Mean(total, metrics["objective_loss"].weight), metrics)

    def evaluate(variables: Variables, batch: Batch) -> dict[str, Mean]:
        return measure(variables.params, batch["spectrogram"], batch, smoothing=0.0)

    def pictures(batch: Batch) -> dict[str, Array]:
        """The first rows, mel up and time to the right, from the quietest to the loudest value of each."""
        first = {name: x[:8] for name, x in batch.items()}
        views = {"input": first["spectrogram"], "augmented": augment(c, config.seed, first)}
        low_high = {k: (x.min((1, 2), keepdims=True), x.max((1, 2), keepdims=True)) for k, x in views.items()}
        return {
            k: ((x - low_high[k][0]) / (low_high[k][1] - low_high[k][0] + 1e-9)).transpose(0, 2, 1) for k, x in views.items()
        }

    specs = make_specs(c)
    return Task(
        specs=Variables(specs),
        loss=loss,
        evaluate=evaluate,
        axes={
            "spectrogram": ("batch", None, None),
            "label": ("batch",),
            "index": ("batch",),
            "epoch": ("batch",),
            "weight": ("batch",),
        },
        flops=3 * batch * forward_flops(c),
        pictures=pictures,
    )


def forward_flops(c: Config) -> int:
    """Floating-point operations of the matrix products for one spectrogram, forward; the backward pass is twice as much."""
    t, d = c.n_cls + c.n_patches, c.embed
    layer = 2 * t * d * d * (4 + 2 * c.mlp_ratio) + 2 * 2 * t * t * d
    return 2 * c.n_patches * c.patch[0] * c.patch[1] * d + c.depth * layer + 2 * 2 * d * c.n_classes
