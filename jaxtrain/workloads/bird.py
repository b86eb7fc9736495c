"""Bird audio: a vision transformer over log-mel spectrograms, trained with labels or without, and an online probe.

The loss is a weighted sum of objectives, each on where its weight is above 0:

    supervised  cross-entropy with the class, or the asymmetric loss of several (Ridnik et al. 2021)
    mae         the values of masked patches, from the visible ones (He et al. 2022)
    lejepa      views of a recording agree, and embeddings are spread like a Gaussian (Balestriero & LeCun 2025)
    diet        which of all recordings it is (Ibrahim et al. 2024)
    teacher     what an average of the encoder makes of masked patches, from the visible ones (Assran et al. 2023)

mae and teacher share masks and the pass over visible patches; the others share one over all patches. The probe (layer norm,
linear) reads the same features without passing gradients back: it has its own learning rate, and is comparable between
objectives. A row of the batch may hold several views of its recording (data.views); every view is encoded.

Shapes: B rows, V views of a row, R = B V spectrograms, F frames, W mels, N patches, D embed, C classes, P projected values.
"""

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxtrain.config import Config as RunConfig
from jaxtrain.nn import augment as augment_lib
from jaxtrain.nn import log_mel, masked, sigreg, vit
from jaxtrain.nn.batch_norm import batch_norm
from jaxtrain.nn.cross_entropy import cross_entropy as chunked_cross_entropy
from jaxtrain.nn.layers import layer_norm
from jaxtrain.specs import fan_in, fold_in_path, ones, zeros
from jaxtrain.types import Array, Batch, Key, LossOut, Mean, PyTree, Shard, Spec, Task, Variables

log = logging.getLogger("jaxtrain")

POOLS = ("cls", "patches")
FORMS = ("spectrogram", "waveform")
LOSSES = ("softmax", "asymmetric")
NORMS = ("batch", "layer")
OBJECTIVES = ("supervised", "mae", "lejepa", "diet", "teacher")
TABLE_MULTIPLE = 128  # rows of the table of recordings come in these, so that devices can share them


@dataclass(frozen=True)
class Supervised:
    """Classes of the recordings."""

    weight: float = 1.0  # [1] in the loss; 0 = off
    loss: str = "softmax"  # [name] softmax of one class, or asymmetric: each class for itself
    label_smoothing: float = 0.0  # [1] softmax: share of the target that is spread over all classes
    gamma_negative: float = 4.0  # [1] asymmetric: exponent that makes little of easy negatives
    gamma_positive: float = 1.0  # [1] asymmetric: and of easy positives
    clip: float = 0.05  # [1] asymmetric: probability that a negative may have for nothing


@dataclass(frozen=True)
class Mask:
    """Which patches mae and teacher mask."""

    ratio: float = 0.75  # [1] share of the patches
    block: int = 2  # [patches] side of the squares that are masked together


@dataclass(frozen=True)
class Mae:
    """Masked patches' values, normalised patch by patch."""

    weight: float = 0.0  # [1] in the loss; 0 = off
    decoder: masked.Decoder = field(default_factory=masked.Decoder)  # [section]


@dataclass(frozen=True)
class Lejepa:
    """(1 - trade) × distance of the views from their mean + trade × SIGReg, of projected features."""

    weight: float = 0.0  # [1] in the loss; 0 = off
    trade: float = 0.02  # [1] share of SIGReg
    size: int = 16  # [values] of a projection
    hidden: int = 2048  # [values] width of the projector's two hidden layers
    norm: str = "batch"  # [name] of these: batch (over the global batch) or layer
    slices: int = 256  # [directions] drawn in every step


@dataclass(frozen=True)
class Diet:
    """Every recording is a class of its own."""

    weight: float = 0.0  # [1] in the loss; 0 = off
    rank: int = 64  # [values] between the features and the recordings
    label_smoothing: float = 0.0  # [1] share of the target that is spread over all recordings
    chunk: int = 1024  # [views] on each device whose logits are there at the same time
    norm: str = "batch"  # [name] of the values before the table: batch (over the global batch), layer or none
    temperature: float = 0.1  # [1] logits are cosines over it (Wu et al. 2018); 0 = products as they are, as published


@dataclass(frozen=True)
class Teacher:
    """Masked patches as an exponential average of the encoder sees them, which sees all of them."""

    weight: float = 0.0  # [1] in the loss; 0 = off
    momentum: float = 0.996  # [1] of the average at the start; it rises linearly to 1 at the end
    decoder: masked.Decoder = field(default_factory=lambda: masked.Decoder(192, 4, 4))  # [section] the predictor


@dataclass(frozen=True)
class Config(vit.Config):
    """ViT-S, supervised, by default."""

    n_classes: int | None = None  # [classes] None = as many as the data have names for; without any there is no probe
    multilabel: bool | None = None  # [bool] a recording has any number of classes; None = as the data say
    n_recordings: int | None = None  # [recordings] that diet tells apart; None = as many as the data have
    views: int | None = None  # [views] of a recording in a row; None = as the data say
    form: str | None = None  # [name] what a row holds of a view: spectrogram, or waveform, int16; None = as the data say
    pool: str = "cls"  # [name] what objectives and probe read: the mean of "cls" or of "patches"
    supervised: Supervised = field(default_factory=Supervised)  # [section]
    mask: Mask = field(default_factory=Mask)  # [section]
    mae: Mae = field(default_factory=Mae)  # [section]
    lejepa: Lejepa = field(default_factory=Lejepa)  # [section]
    diet: Diet = field(default_factory=Diet)  # [section]
    teacher: Teacher = field(default_factory=Teacher)  # [section]
    augment: augment_lib.Config = field(default_factory=augment_lib.Config)  # [section]

    def problems(self) -> Iterator[tuple[str, str]]:
        yield from super().problems()
        yield from self.augment.problems()
        choices = (
            ("pool", self.pool, POOLS),
            ("form", self.form, (*FORMS, None)),
            ("supervised.loss", self.supervised.loss, LOSSES),
        )
        norms = (("lejepa.norm", self.lejepa.norm, NORMS), ("diet.norm", self.diet.norm, (*NORMS, "none")))
        for where, value, allowed in (*choices, *norms):
            if value not in allowed:
                yield where, f"is {value!r}; there are: {', '.join(map(str, allowed))}"
        for name in OBJECTIVES:
            if getattr(self, name).weight < 0:
                yield f"{name}.weight", f"is {getattr(self, name).weight}; it must not be negative"
        if not any(self.has(name) for name in OBJECTIVES):
            yield "supervised.weight", f"is 0, as are those of {', '.join(OBJECTIVES[1:])}; nothing would be learned"
        for where, section in (("supervised", self.supervised), ("diet", self.diet)):
            if not 0 <= section.label_smoothing < 1:
                yield f"{where}.label_smoothing", f"is {section.label_smoothing}; it lies in [0, 1)"
        if self.supervised.label_smoothing and self.supervised.loss != "softmax":
            yield "supervised.label_smoothing", f"is {self.supervised.label_smoothing}, which only loss='softmax' has"
        for where, value in (("supervised.clip", self.supervised.clip), ("lejepa.trade", self.lejepa.trade)):
            if not 0 <= value < 1:
                yield where, f"is {value}; it lies in [0, 1)"
        if not 0 <= self.teacher.momentum <= 1:
            yield "teacher.momentum", f"is {self.teacher.momentum}; it lies in [0, 1]"
        if self.diet.temperature < 0:
            yield "diet.temperature", f"is {self.diet.temperature}; it must not be negative, and 0 is none"
        sizes = (("mask.block", self.mask.block), ("diet.rank", self.diet.rank), ("diet.chunk", self.diet.chunk))
        for where, value in (*sizes, *((f"lejepa.{n}", getattr(self.lejepa, n)) for n in ("size", "hidden", "slices"))):
            if value < 1:
                yield where, f"is {value}; it must be at least 1"
        if all(part > 0 for part in self.patch) and not 0 < self.n_masked < self.n_patches:
            yield "mask.ratio", f"is {self.mask.ratio}, which masks {self.n_masked} of {self.n_patches} patches"
        for name in ("mae", "teacher"):
            yield from ((f"{name}.decoder.{where}", text) for where, text in getattr(self, name).decoder.problems())

    def data_problems(self, facts: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
        if self.n_classes is None and self.has("supervised"):
            yield "n_classes", "is None, and the data name no classes; set it, or store the labels as a ClassLabel"
        elif self.n_classes is not None and self.n_classes < facts.get("n_classes", 0):
            yield "n_classes", f"is {self.n_classes}, and the data have {facts['n_classes']} classes"
        if facts.get("n_unlabelled", 0) and self.has("supervised"):
            yield (
                "n_classes",
                f"needs a label on every recording, and {facts['n_unlabelled']} have null; add them to data.exclude, or train "
                "without labels: model.supervised.weight=0",
            )
        if self.multilabel and self.has("supervised") and self.supervised.loss == "softmax":
            yield "supervised.loss", "is 'softmax', and the data have several classes in a recording; use 'asymmetric'"
        if self.multilabel is not None and bool(facts.get("multilabel")) != self.multilabel:
            yield "multilabel", f"is {self.multilabel}, and data.label names a column that says otherwise"
        if self.views not in (None, facts.get("views", 1)):
            yield "views", f"is {self.views}, and the data have {facts.get('views', 1)}; set data.views"
        if self.form not in (None, facts.get("form", "spectrogram")):
            yield "form", f"is {self.form!r}, and data.form is {facts.get('form', 'spectrogram')!r}; both must be the same"
        if self.has("lejepa") and self.n_views < 2:
            yield "lejepa.weight", f"is {self.lejepa.weight}, and a row has one view; set data.views to 2 or more"
        if self.has("diet") and self.n_recordings is None:
            yield "n_recordings", "is None, and the data do not say how many recordings there are; set it"
        elif self.n_recordings is not None and self.n_recordings < facts.get("n_recordings", 0):
            yield "n_recordings", f"is {self.n_recordings}, and the data have {facts['n_recordings']}"
        if self.augment.background and not facts.get("background"):
            yield "augment.background", f"is {self.augment.background}, and data.background names no recordings"
        if self.n_frames != facts.get("n_frames", self.n_frames):
            yield "n_frames", f"is {self.n_frames}, and data.n_frames is {facts['n_frames']}; both must be the same"

    def has(self, objective: str) -> bool:
        return getattr(self, objective).weight > 0

    @property
    def n_views(self) -> int:
        return self.views or 1

    @property
    def n_masked(self) -> int:
        return int(self.n_patches * self.mask.ratio)

    @property
    def sees_all(self) -> bool:
        """Whether some objective reads a pass over all patches."""
        return any(self.has(name) for name in ("supervised", "lejepa", "diet"))

    @property
    def masks(self) -> bool:
        return self.has("mae") or self.has("teacher")

    @property
    def table_rows(self) -> int:
        """Of the table of recordings; those beyond `n_recordings` are never read."""
        return -(-(self.n_recordings or 1) // TABLE_MULTIPLE) * TABLE_MULTIPLE


def make_specs(c: Config) -> PyTree:
    """encoder, objective/NAME for each that is on, probe."""
    d = c.embed
    classes = lambda: {  # noqa: E731
        "w": Spec((d, c.n_classes), ("embed", "vocab"), fan_in(d)),
        "b": Spec((c.n_classes,), ("vocab",), zeros),
    }
    objective = {}
    if c.has("supervised"):
        objective["supervised"] = classes()
    if c.has("mae"):
        objective["mae"] = masked.decoder_specs(c, c.mae.decoder, c.patch_size)
    if c.has("lejepa"):
        h, sizes = c.lejepa.hidden, (d, c.lejepa.hidden, c.lejepa.hidden)
        head = {}
        for i, n in enumerate(sizes[:2]):
            head |= {
                f"w{i}": Spec((n, h), ("embed", "mlp"), fan_in(n)),
                f"b{i}": Spec((h,), ("mlp",), zeros),
                f"scale{i}": Spec((h,), ("mlp",), ones),
                f"bias{i}": Spec((h,), ("mlp",), zeros),
            }
        head |= {
            "w_out": Spec((h, c.lejepa.size), ("embed", None), fan_in(h)),
            "b_out": Spec((c.lejepa.size,), (None,), zeros),
        }
        objective["lejepa"] = head
    if c.has("diet"):
        r = c.diet.rank
        objective["diet"] = {
            "w_low": Spec((d, r), ("embed", None), fan_in(d)),
            "b_low": Spec((r,), (None,), zeros),
            "w_recordings": Spec((c.table_rows, r), ("vocab", None), fan_in(r)),
        }
        if c.diet.norm != "none":
            objective["diet"] |= {"scale_low": Spec((r,), (None,), ones), "bias_low": Spec((r,), (None,), zeros)}
    if c.has("teacher"):
        objective["teacher"] = masked.decoder_specs(c, c.teacher.decoder, d)
    table = {"encoder": vit.make_specs(c), "objective": objective}
    if c.n_classes:
        table["probe"] = {"scale": Spec((d,), ("embed",), ones), "bias": Spec((d,), ("embed",), zeros), **classes()}
    return table


export_names = vit.export_names

EXAMPLE = '''"""The features of a recording: python example.py bird.ogg"""
import json, pathlib, sys
import jax
from jaxtrain.nn import vit
from loaders import spectrogram
here = pathlib.Path(__file__).parent
config = json.loads((here / "config.json").read_text())
c, data, params = vit.from_saved(config["model"]), config["data"], vit.read_exported(here / "model.safetensors")
wave, rate, _ = spectrogram.decode(pathlib.Path(sys.argv[1]).read_bytes())
x = spectrogram.front_end(wave, rate, clip_seconds=data["clip_seconds"], n_frames=data["n_frames"])
cls, patches = jax.jit(lambda params, x: vit.encode(c, params, x))(params, x[None])
print(*patches.mean(1)[0].tolist())
'''


def export_files(config: Mapping[str, Any], dtype: Any) -> dict[str, bytes]:
    """example.py, which needs numpy, JAX and this package."""
    del config, dtype
    return {"example.py": EXAMPLE.encode()}


class Labels(NamedTuple):
    """The classes of R spectrograms; with mixup of two recordings each."""

    own: Array  # int32 [R]; or of several classes uint8 [R, C]
    other: Array | None  # the partner's
    share: Array | None  # float32 [R]: how much the own ones count
    weight: Array  # float32 [R]; 0 where there is no label


def cross_entropy(logits_bc: Array, label_b: Array, *, smoothing: float = 0.0) -> Array:
    """-sum_c target_c log softmax(logits)_c, [B]; the target is one-hot, ``smoothing`` of it spread evenly."""
    log_p_bc = jax.nn.log_softmax(logits_bc)
    # A masked sum, not a gather: classes may be split over devices, and each then adds what it has.
    picked_b = jnp.where(jnp.arange(log_p_bc.shape[1])[None] == label_b[:, None], log_p_bc, 0).sum(-1)
    return -(1 - smoothing) * picked_b - smoothing * log_p_bc.mean(-1)


def asymmetric_loss(logits_bc: Array, target_bc: Array, *, gamma_positive: float, gamma_negative: float, clip: float) -> Array:
    """-sum_c [y (1 - p)^g+ log p + (1 - y) q^g- log(1 - q)], q = max(p - clip, 0), [B] (Ridnik et al. 2021).

    With both exponents and the clip 0 it is the binary cross-entropy, summed over the classes.
    """
    log_p_bc, log_not_p_bc = jax.nn.log_sigmoid(logits_bc), jax.nn.log_sigmoid(-logits_bc)
    p_bc = jax.nn.sigmoid(logits_bc)
    positive_bc = log_p_bc * _power(1 - p_bc, gamma_positive)
    if clip:
        q_bc = jnp.maximum(p_bc - clip, 0)
        log_not_p_bc = jnp.log(jnp.maximum(1 - q_bc, 1e-8))
    else:
        q_bc = p_bc
    negative_bc = log_not_p_bc * _power(q_bc, gamma_negative)
    return -(target_bc * positive_bc + (1 - target_bc) * negative_bc).sum(-1)


def _power(x: Array, exponent: float) -> Array:
    """x^exponent whose derivative at 0 is no nan."""
    return jnp.ones_like(x) if exponent == 0 else x if exponent == 1 else jnp.maximum(x, 1e-12) ** exponent


def class_targets(c: Config, labels: Labels) -> Array:
    """float32 [R, C]: 1 for each class that is heard, in a mixture for those of both recordings."""

    def hot(label: Array) -> Array:
        return (label if c.multilabel else label[:, None] == jnp.arange(c.n_classes)[None]).astype(jnp.float32)

    own_rc = hot(labels.own)
    return own_rc if labels.other is None else jnp.maximum(own_rc, hot(labels.other))


def class_loss(c: Config, logits_rc: Array, labels: Labels, *, smoothing: float) -> Array:
    """The supervised objective of each spectrogram, [R]."""
    s = c.supervised
    if s.loss == "asymmetric":
        target_rc = class_targets(c, labels)
        return asymmetric_loss(
            logits_rc, target_rc, gamma_positive=s.gamma_positive, gamma_negative=s.gamma_negative, clip=s.clip
        )
    own_r = cross_entropy(logits_rc, labels.own, smoothing=smoothing)
    if labels.other is None:
        return own_r
    return labels.share * own_r + (1 - labels.share) * cross_entropy(logits_rc, labels.other, smoothing=smoothing)


def probe_loss(c: Config, logits_rc: Array, labels: Labels) -> Array:
    """Cross-entropy with the recording's own class, or binary ones with each of its classes, [R]."""
    if c.multilabel:
        return asymmetric_loss(logits_rc, labels.own.astype(jnp.float32), gamma_positive=0.0, gamma_negative=0.0, clip=0.0)
    return cross_entropy(logits_rc, labels.own)


def accuracy(c: Config, logits_rc: Array, labels: Labels) -> Mean:
    """Whether the largest score is of the recording's own class, or of one of its classes; without any it does not count."""
    best_r = logits_rc.argmax(-1)
    if not c.multilabel:
        return Mean(((best_r == labels.own) * labels.weight).sum(), labels.weight.sum())
    right_r = ((jnp.arange(c.n_classes)[None] == best_r[:, None]) & (labels.own > 0)).any(-1)
    weight_r = labels.weight * (labels.own > 0).any(-1)
    return Mean((right_r * weight_r).sum(), weight_r.sum())


def normed(norm: str, x_rh: Array, scale_h: Array, bias_h: Array, weight_r: Array) -> Array:
    """A projector's hidden values [R, H], each channel over the rows of the global batch that count, or each row."""
    if norm == "layer":
        return layer_norm(x_rh, scale_h, bias_h, vit.EPS)
    zero, counts_r1 = jnp.zeros(x_rh.shape[1]), (weight_r > 0).astype(x_rh.dtype)[:, None]
    return batch_norm(x_rh, scale_h, bias_h, {"mean": zero, "var": zero}, counts_r1, momentum=0.0, eps=vit.EPS)[0]


def project(c: Config, params: PyTree, pooled_rd: Array, weight_r: Array) -> Array:
    """Features through lejepa's projector, [R, P]."""
    x = pooled_rd
    for i in range(2):
        x = jnp.einsum("rd,dh->rh", x, params[f"w{i}"]) + params[f"b{i}"][None]
        x = jax.nn.relu(normed(c.lejepa.norm, x, params[f"scale{i}"], params[f"bias{i}"], weight_r))
    return jnp.einsum("rh,hp->rp", x, params["w_out"]) + params["b_out"][None]


def make_task(config: RunConfig, shard: Shard, batch: int) -> Task:
    c: Config = config.model
    if config.train.accumulate > 1:
        if c.has("diet") and c.diet.norm == "batch":
            log.warning("diet's batch norm is over a microbatch's %d rows", batch // config.train.accumulate)
        if c.has("lejepa"):
            log.warning("SIGReg is of a microbatch's %d rows, not of the batch's %d", batch // config.train.accumulate, batch)
        if c.augment.mixup:
            log.warning("with train.accumulate=%d rows are mixed within microbatches", config.train.accumulate)

    def pool(encoded: vit.Encoded) -> Array:
        return (encoded.cls if c.pool == "cls" else encoded.patches).mean(axis=1)

    def flat(x: Array) -> Array:
        """[B, F, W] or [B, V, F, W] -> [R, F, W]."""
        return x.reshape(-1, c.n_frames, c.n_mels).astype(jnp.float32)

    def heard(batch: Batch) -> Batch:
        """The batch with spectrograms, which rows of waveforms become here."""
        if c.form != "waveform":
            return batch
        names = {"spectrogram": "waveform", **({"background": "background"} if c.augment.background else {})}
        with jax.named_scope("log_mel"):
            return {**batch, **{name: log_mel.split(batch[wave], c.n_frames, shard) for name, wave in names.items()}}

    def each_view(x_b: Array) -> Array:
        return x_b if c.n_views == 1 else _repeat(x_b, c.n_views)

    def labels_of(batch: Batch) -> Labels:
        """Of the rows."""
        own_b = batch["labels" if c.multilabel else "label"]
        weight_b = batch["weight"] if c.multilabel else batch["weight"] * (own_b >= 0)
        return Labels(own_b, None, None, weight_b)

    def labels_of_views(batch: Batch, own_bv: Array | None) -> Labels:
        rows = labels_of(batch)
        mixed = own_bv is not None
        return Labels(
            each_view(rows.own),
            each_view(augment_lib.partner(rows.own)) if mixed else None,
            own_bv.reshape(-1) if mixed else None,
            each_view(rows.weight) / c.n_views,
        )

    def classify(head: PyTree, x_rd: Array) -> Array:
        return x_rd @ head["w"] + head["b"][None]

    def probe(params: PyTree, pooled_rd: Array) -> Array:
        # Without this the probe's loss trains the encoder, and every objective becomes half a supervised one.
        pooled_rd = jax.lax.stop_gradient(pooled_rd)
        return classify(params["probe"], layer_norm(pooled_rd, params["probe"]["scale"], params["probe"]["bias"], vit.EPS))

    def masks_of(batch: Batch) -> masked.Masks:
        """A function of (seed, epoch, recording, view), as augmentations are."""
        index_r, epoch_r = each_view(batch["index"]), each_view(batch["epoch"])
        view_r = jnp.arange(index_r.shape[0]) % c.n_views
        keys_r = jax.vmap(lambda e, i, v: fold_in_path(augment_lib.view_key(config.seed, e, i, v), "masks"))(
            epoch_r, index_r, view_r
        )
        return masked.draw_masks(keys_r, c.grid, c.n_masked, c.mask.block)

    def survival(batch: Batch, key: Key, name: str) -> Array | None:
        if not c.drop_path:
            return None
        place_r = each_view(batch["row"]) * c.n_views + jnp.arange(batch["row"].shape[0] * c.n_views) % c.n_views
        return vit.survival(c, jax.vmap(lambda r: jax.random.fold_in(fold_in_path(key, name), r))(place_r))

    def masked_errors(params: PyTree, carry: PyTree, x_rfw: Array, seen: vit.Encoded, masks: masked.Masks) -> dict[str, Array]:
        found = {}
        if c.has("mae"):
            with jax.named_scope("mae"):
                pred = masked.decode(c, c.mae.decoder, params["objective"]["mae"], seen, masks, shard)
                target = masked.normalised(vit.patchify(c, x_rfw))
                found["mae"] = masked.masked_error(pred, target, masks.masked)
        if c.has("teacher"):
            with jax.named_scope("teacher"):
                pred = masked.decode(c, c.teacher.decoder, params["objective"]["teacher"], seen, masks, shard)
                whole = vit.encode(c, jax.lax.stop_gradient(carry["teacher"]), x_rfw, shard).patches
                found["teacher"] = masked.masked_error(pred, masked.normalised(whole), masks.masked)
        return found

    def loss(variables: Variables, batch: Batch, key: Key) -> LossOut:
        params, batch = variables.params, heard(batch)
        augmented = augment_lib.augment(c.augment, config.seed, batch)
        x_rfw, weight_b = flat(augmented.x), batch["weight"]
        weight_r = each_view(weight_b) / c.n_views
        labels = labels_of_views(batch, augmented.own) if c.n_classes else None
        # Sums over the rows of what each objective is, and metrics beside.
        sums: dict[str, Array] = {}
        metrics: dict[str, Mean] = {}
        features_rd = None
        if c.sees_all:
            features_rd = pool(vit.encode(c, params["encoder"], x_rfw, shard, keep_l2b=survival(batch, key, "all")))
        if c.has("supervised"):
            with jax.named_scope("supervised"):
                logits_rc = classify(params["objective"]["supervised"], features_rd)
                each_r = class_loss(c, logits_rc, labels, smoothing=c.supervised.label_smoothing)
                sums["supervised"] = (each_r * weight_r).sum()
                metrics["accuracy"] = accuracy(c, logits_rc, labels)
        if c.has("lejepa"):
            with jax.named_scope("lejepa"):
                z_rp = project(c, params["objective"]["lejepa"], features_rd, weight_r)
                z_vbp = z_rp.reshape(-1, c.n_views, z_rp.shape[1]).transpose(1, 0, 2)
                a_ps = sigreg.directions(fold_in_path(key, "slices"), c.lejepa.size, c.lejepa.slices)
                # Of the global batch, and so alike in every part of it; weighted to add up to themselves.
                parts = {"invariance": sigreg.invariance(z_vbp, weight_b), "sigreg": sigreg.sigreg(z_vbp, a_ps, weight_b)}
                total = (1 - c.lejepa.trade) * parts["invariance"] + c.lejepa.trade * parts["sigreg"]
                sums["lejepa"] = total * weight_b.sum()
                metrics |= {f"lejepa_{name}": Mean(x * weight_b.sum(), weight_b.sum()) for name, x in parts.items()}
        if c.has("diet"):
            with jax.named_scope("diet"):
                sums["diet"], metrics["diet_accuracy"] = diet(params["objective"]["diet"], features_rd, batch, augmented.own)
        if c.masks:
            masks = masks_of(batch)
            keep = survival(batch, key, "visible")
            seen = vit.encode(c, params["encoder"], x_rfw, shard, visible_bvn=masks.visible, keep_l2b=keep)
            for name, each_r in masked_errors(params, variables.carry, x_rfw, seen, masks).items():
                sums[name] = (each_r * weight_r).sum()
            features_rd = pool(seen) if features_rd is None else features_rd
        total = sum(getattr(c, name).weight * x for name, x in sums.items())
        n = weight_b.sum()
        metrics |= {f"{name}_loss": Mean(x, n) for name, x in sums.items()}
        metrics["objective_loss"] = Mean(total, n)
        if labels is not None:
            logits_rc = probe(params, features_rd)
            found = Mean((probe_loss(c, logits_rc, labels) * labels.weight).sum(), labels.weight.sum())
            metrics["probe_loss"] = found
            metrics["probe_accuracy"] = accuracy(c, logits_rc, labels)
            total += found.total
        return LossOut(Mean(total, n), metrics, None)

    def diet(head: PyTree, features_rd: Array, batch: Batch, own_bv: Array | None) -> tuple[Array, Mean]:
        """Cross-entropy with the recordings' own numbers."""
        low_rk = features_rd @ head["w_low"] + head["b_low"][None]
        if c.diet.norm != "none":
            low_rk = normed(c.diet.norm, low_rk, head["scale_low"], head["bias_low"], each_view(batch["weight"]))
        low_rk, table = jax.nn.relu(low_rk), head["w_recordings"]
        if c.diet.temperature:
            low_rk, table = unit(low_rk) / c.diet.temperature, unit(table)
        low_rk = low_rk.astype(jnp.dtype(c.dtype))
        low_bvk = low_rk.reshape(-1, c.n_views, low_rk.shape[1])
        weight_bv = jnp.broadcast_to(batch["weight"][:, None] / c.n_views, low_bvk.shape[:2])

        def of(index_b: Array, weight_bv: Array) -> Any:
            label_bv = jnp.broadcast_to(index_b[:, None], weight_bv.shape)
            return chunked_cross_entropy(
                low_bvk, table, label_bv, weight_bv, shard, chunk=c.diet.chunk, size=c.n_recordings,
                smoothing=c.diet.label_smoothing,
            )  # fmt: skip

        if own_bv is None:
            found = of(batch["index"], weight_bv)
            return found.loss, Mean(found.correct, weight_bv.sum())
        own, other = of(batch["index"], weight_bv * own_bv), of(augment_lib.partner(batch["index"]), weight_bv * (1 - own_bv))
        return own.loss + other.loss, Mean(own.correct, (weight_bv * own_bv).sum())

    def evaluate(variables: Variables, batch: Batch) -> dict[str, Mean]:
        """Scores are averaged over the views of a recording. Of what is a statistic of a training batch nothing is told."""
        params, weight_b = variables.params, batch["weight"]
        x_rfw, found = flat(heard(batch)["spectrogram"]), {}
        if c.n_classes:
            labels = labels_of(batch)
            features_rd = pool(vit.encode(c, params["encoder"], x_rfw, shard))
            scored = {"probe": probe(params, features_rd)}
            if c.has("supervised"):
                scored["supervised"] = classify(params["objective"]["supervised"], features_rd)
            n = labels.weight.sum()
            for name, logits_rc in scored.items():
                logits_bc = logits_rc.reshape(-1, c.n_views, c.n_classes).mean(1)
                each_b = (
                    probe_loss(c, logits_bc, labels) if name == "probe" else class_loss(c, logits_bc, labels, smoothing=0.0)
                )
                found[f"{name}_loss"] = Mean((each_b * labels.weight).sum(), n)
                found["accuracy" if name == "supervised" else "probe_accuracy"] = accuracy(c, logits_bc, labels)
        if c.masks:
            masks = masks_of(batch)
            seen = vit.encode(c, params["encoder"], x_rfw, shard, visible_bvn=masks.visible)
            weight_r = each_view(weight_b) / c.n_views
            for name, each_r in masked_errors(params, variables.carry, x_rfw, seen, masks).items():
                found[f"{name}_loss"] = Mean((each_r * weight_r).sum(), weight_b.sum())
        on = [name for name in OBJECTIVES if c.has(name)]
        if all(f"{name}_loss" in found for name in on):
            total = sum(getattr(c, name).weight * found[f"{name}_loss"].total for name in on)
            found["objective_loss"] = Mean(total, weight_b.sum())
        return found

    def advance(params: PyTree, carry: PyTree, step: Array) -> PyTree:
        """The teacher is the student after the first step, and its slower and slower average from then on."""
        start = c.teacher.momentum
        momentum = jnp.where(step == 0, 0.0, start + (1 - start) * jnp.minimum(step / config.train.steps, 1.0))
        return {
            "teacher": jax.tree.map(lambda old, new: momentum * old + (1 - momentum) * new, carry["teacher"], params["encoder"])
        }

    def pictures(batch: Batch) -> dict[str, Array]:
        """The first view of the first rows, mel up and time to the right, from the quietest to the loudest value of each."""
        first = heard({name: x[:8] for name, x in batch.items()})
        views = {"input": first["spectrogram"], "augmented": augment_lib.augment(c.augment, config.seed, first).x}
        if c.masks:
            x_rnp = vit.patchify(c, flat(views["augmented"]))
            hidden_rn1 = masks_of(first).masked[:, :, None]
            views["masked"] = unpatchify(c, jnp.where(hidden_rn1 > 0, x_rnp.min((1, 2), keepdims=True), x_rnp))
        return {name: as_picture(flat(x)[:: c.n_views]) for name, x in views.items()}

    def progress(variables: Variables, batch: Batch) -> dict[str, Array]:
        """What mae makes of masked patches, at their own mean and spread; the visible ones as they are."""
        if not c.has("mae"):
            return {}
        first = heard({name: x[:4] for name, x in batch.items()})
        x_rfw, masks = flat(first["spectrogram"]), masks_of(first)
        seen = vit.encode(c, variables.params["encoder"], x_rfw, shard, visible_bvn=masks.visible)
        pred = masked.decode(c, c.mae.decoder, variables.params["objective"]["mae"], seen, masks, shard)
        x_rnp = vit.patchify(c, x_rfw)
        mean_rn1, std_rn1 = x_rnp.mean(-1, keepdims=True), x_rnp.std(-1, keepdims=True)
        made = jnp.where(masks.masked[:, :, None] > 0, pred * std_rn1 + mean_rn1, x_rnp)
        return {"restored": as_picture(unpatchify(c, made)[:: c.n_views])}

    table = make_specs(c)
    fields = ["label", "labels"][bool(c.multilabel)] if c.n_classes else None
    views = (None,) * (c.n_views > 1)
    clip = ("batch", *views, None) if c.form == "waveform" else ("batch", *views, None, None)
    axes = {c.form or "spectrogram": clip, **({"background": clip} if c.augment.background else {})}
    axes |= {fields: ("batch", None) if c.multilabel else ("batch",)} if fields else {}
    return Task(
        specs=Variables(table, carry={"teacher": table["encoder"]} if c.has("teacher") else ()),
        loss=loss,
        evaluate=evaluate,
        axes={**axes, **{name: ("batch",) for name in ("index", "epoch", "weight")}},
        flops=batch * c.n_views * train_flops(c),
        pictures=pictures,
        progress=progress,
        **({"advance": advance} if c.has("teacher") else {}),
    )


def unit(x: Array) -> Array:
    """Each row at length 1."""
    return x * jax.lax.rsqrt(jnp.square(x).sum(-1, keepdims=True) + 1e-12)


def _repeat(x_b: Array, n: int) -> Array:
    """[B, …] -> [B n, …]: every row n times in a row, without a gather."""
    return jnp.broadcast_to(x_b[:, None], (x_b.shape[0], n, *x_b.shape[1:])).reshape(-1, *x_b.shape[1:])


def unpatchify(c: Config, x_rnp: Array) -> Array:
    """[R, N, P] -> [R, F, W], the way back from `vit.patchify`."""
    (rows, columns), (f, w) = c.grid, c.patch
    return x_rnp.reshape(-1, rows, columns, f, w).transpose(0, 1, 3, 2, 4).reshape(-1, c.n_frames, c.n_mels)


def as_picture(x_rfw: Array) -> Array:
    """[R, F, W] -> [R, W, F] in 0..1."""
    low, high = x_rfw.min((1, 2), keepdims=True), x_rfw.max((1, 2), keepdims=True)
    return ((x_rfw - low) / (high - low + 1e-9)).transpose(0, 2, 1)


def forward_flops(c: Config) -> int:
    """Floating-point operations of the matrix products for one spectrogram through the encoder and the heads for classes."""
    heads = (c.has("supervised") + 1) * bool(c.n_classes)
    return vit.forward_flops(c) + heads * 2 * c.embed * (c.n_classes or 0)


def train_flops(c: Config) -> int:
    """Of one view in a training step; the backward pass is twice the forward, and the teacher has none."""
    d = c.embed
    forward = 2 * d * (c.n_classes or 0) * (1 + c.has("supervised"))
    if c.sees_all:
        forward += vit.forward_flops(c)
    if c.has("lejepa"):
        h = c.lejepa.hidden
        forward += 2 * (d * h + h * h + h * c.lejepa.size) + 2 * c.lejepa.size * c.lejepa.slices
    if c.has("diet"):
        forward += 2 * c.diet.rank * (d + c.table_rows)
    if c.masks:
        forward += vit.forward_flops(c, c.n_patches - c.n_masked)
    for name, size in (("mae", c.patch_size), ("teacher", d)):
        if c.has(name):
            s = getattr(c, name).decoder.stack(c)
            forward += vit.stack_flops(s, 1 + c.n_patches) + 2 * c.n_patches * s.embed * (d + size)
    return 3 * forward + vit.forward_flops(c) * c.has("teacher")
