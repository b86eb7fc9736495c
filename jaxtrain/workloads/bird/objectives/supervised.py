"""supervised: cross-entropy, or the asymmetric loss of several classes (Ridnik et al. 2021)."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp

from jaxtrain.types import Array, Mean, PyTree
from jaxtrain.workloads.bird import classes
from jaxtrain.workloads.bird.classes import Labels
from jaxtrain.workloads.bird.objective import ALL, Inputs, Objective, Section
from jaxtrain.workloads.bird.settings import Settings
from loaders.io import checks

LOSSES = ("softmax", "asymmetric")
# Of the asymmetric loss, as BirdSet trains with it.
GAMMA_NEGATIVE = 4.0  # focusing exponent of negatives: the larger, the less easy ones weigh
GAMMA_POSITIVE = 1.0  # focusing exponent of positives
CLIP = 0.05  # negative margin, subtracted from the probability of negatives


@dataclass(frozen=True)
class Supervised(Section):
    """Classes of the recordings."""

    on_resume = checks.OnResume(checks.FUNCTION)

    weight: float = 1.0  # [1] weight in the loss; 0 = off
    # [name] kind of loss: softmax of one class, or asymmetric (a binary loss of each class)
    loss: str = "softmax"
    label_smoothing: float = 0.0  # [1] share of softmax's target that is spread over all classes


def problems(c: Settings, s: Supervised) -> Iterator[tuple[str, str]]:
    yield from checks.choice(s, LOSSES, "loss")
    yield from checks.within(s, "[0, 1)", "label_smoothing")
    if s.label_smoothing and s.loss != "softmax":
        yield "label_smoothing", f"is {s.label_smoothing}, which only loss='softmax' has"


def validate_data(c: Settings, s: Supervised, info: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    if c.n_classes is None:
        yield (
            "n_classes",
            "is None, and the data name no classes; store the labels as a ClassLabel",
        )
    if info.get("n_unlabelled", 0):
        yield (
            "n_classes",
            (
                f"needs a label on every recording, and {info['n_unlabelled']} have null; for"
                " windows without a class set data.multilabel=true and"
                " model.supervised.loss=asymmetric, or add them to data.exclude, or train without"
                " labels: model.supervised.weight=0"
            ),
        )
    if c.multilabel and s.loss == "softmax":
        yield (
            "supervised.loss",
            "is 'softmax', and the data have several classes in a recording; use 'asymmetric'",
        )


def specs(c: Settings, s: Supervised) -> PyTree:
    return classes.specs(c)


def loss(s: Supervised, x: Inputs) -> tuple[Array, dict[str, Mean]]:
    assert x.labels is not None  # `validate_data` asks for classes
    logits_rc = classes.scores(x.params, x.features.pooled_rd)
    loss_r = class_loss(x.c, s, logits_rc, x.labels, smoothing=s.label_smoothing)
    total = (loss_r * x.weight_r).sum()
    return total, {"accuracy": classes.accuracy(x.c, logits_rc, x.labels)}


def evaluate(s: Supervised, x: Inputs) -> tuple[Mean, dict[str, Mean]]:
    """Scores are averaged over the views of a recording, without smoothing."""
    assert x.labels is not None
    logits_rc = classes.scores(x.params, x.features.pooled_rd)
    logits_bc = x.by_view(logits_rc).mean(1)
    loss_b = class_loss(x.c, s, logits_bc, x.labels, smoothing=0.0)
    mean = Mean((loss_b * x.labels.weight).sum(), x.labels.weight.sum())
    accuracy = {"accuracy": classes.accuracy(x.c, logits_bc, x.labels)}
    return mean, accuracy | classes.counts(x.c, logits_bc, x.labels)


def class_loss(
    c: Settings, s: Supervised, logits_rc: Array, labels: Labels, *, smoothing: float
) -> Array:
    """Return the loss of each spectrogram, [R]."""
    if s.loss == "asymmetric":
        return classes.asymmetric_loss(
            logits_rc,
            targets(c, labels),
            gamma_positive=GAMMA_POSITIVE,
            gamma_negative=GAMMA_NEGATIVE,
            clip=CLIP,
        )
    own_r = classes.cross_entropy(logits_rc, labels.label, smoothing=smoothing)
    if labels.partner_label is None or labels.own_share is None:
        return own_r
    loss_r = labels.own_share * own_r
    partner_share_r = 1 - labels.own_share
    partner_r = classes.cross_entropy(logits_rc, labels.partner_label, smoothing=smoothing)
    return loss_r + partner_share_r * partner_r


def targets(c: Settings, labels: Labels) -> Array:
    """float32 [R, C]: 1 for each class of the recording, in a mixture of both recordings."""

    def one_hot(label: Array) -> Array:
        if not c.multilabel:
            label = label[:, None] == jnp.arange(c.n_classes)[None]
        return label.astype(jnp.float32)

    own_rc = one_hot(labels.label)
    if labels.partner_label is None:
        return own_rc
    return jnp.maximum(own_rc, one_hot(labels.partner_label))


def flops(c: Settings, s: Supervised) -> int:
    return 3 * 2 * c.embed * (c.n_classes or 0)


OBJECTIVE = Objective(
    Supervised,
    ALL,
    specs,
    loss,
    flops,
    evaluate=evaluate,
    problems=problems,
    validate_data=validate_data,
)
