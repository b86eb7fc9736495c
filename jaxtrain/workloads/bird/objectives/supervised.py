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


@dataclass(frozen=True)
class Supervised(Section):
    """Classes of the recordings."""

    on_resume = checks.OnResume(checks.FUNCTION)

    weight: float = 1.0  # [1] weight in the loss; 0 = off
    # [name] kind of loss: softmax of one class, or asymmetric (a binary loss of each class)
    loss: str = "softmax"
    label_smoothing: float = 0.0  # [1] share of softmax's target that is spread over all classes
    # [1] focusing exponent of negatives in the asymmetric loss: the larger, the less easy ones
    # weigh
    gamma_negative: float = 4.0
    gamma_positive: float = 1.0  # [1] focusing exponent of positives in the asymmetric loss
    # [1] margin of the asymmetric loss, subtracted from the probability of negatives
    clip: float = 0.05


def problems(c: Settings, s: Supervised) -> Iterator[tuple[str, str]]:
    yield from checks.choice(s, LOSSES, "loss")
    yield from checks.within(s, "[0, 1)", "label_smoothing", "clip")
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
    each_r = class_loss(x.c, s, logits_rc, x.labels, smoothing=s.label_smoothing)
    return (each_r * x.weight_r).sum(), {"accuracy": classes.accuracy(x.c, logits_rc, x.labels)}


def evaluate(s: Supervised, x: Inputs) -> tuple[Mean, dict[str, Mean]]:
    """Scores are averaged over the views of a recording, without smoothing."""
    assert x.labels is not None
    logits_bc = x.by_view(classes.scores(x.params, x.features.pooled_rd)).mean(1)
    each_b = class_loss(x.c, s, logits_bc, x.labels, smoothing=0.0)
    mean = Mean((each_b * x.labels.weight).sum(), x.labels.weight.sum())
    return mean, {
        "accuracy": classes.accuracy(x.c, logits_bc, x.labels),
        **classes.counts(x.c, logits_bc, x.labels),
    }


def class_loss(
    c: Settings, s: Supervised, logits_rc: Array, labels: Labels, *, smoothing: float
) -> Array:
    """Return the loss of each spectrogram, [R]."""
    if s.loss == "asymmetric":
        how = {
            "gamma_positive": s.gamma_positive,
            "gamma_negative": s.gamma_negative,
            "clip": s.clip,
        }
        return classes.asymmetric_loss(logits_rc, targets(c, labels), **how)
    own_r = classes.cross_entropy(logits_rc, labels.own, smoothing=smoothing)
    if labels.other is None or labels.share is None:
        return own_r
    return labels.share * own_r + (1 - labels.share) * classes.cross_entropy(
        logits_rc, labels.other, smoothing=smoothing
    )


def targets(c: Settings, labels: Labels) -> Array:
    """float32 [R, C]: 1 for each class of the recording, in a mixture of both recordings."""

    def hot(label: Array) -> Array:
        return (label if c.multilabel else label[:, None] == jnp.arange(c.n_classes)[None]).astype(
            jnp.float32
        )

    own_rc = hot(labels.own)
    return own_rc if labels.other is None else jnp.maximum(own_rc, hot(labels.other))


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
