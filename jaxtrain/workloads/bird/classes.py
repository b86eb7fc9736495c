"""Classes of recordings: labels of rows and views, losses, the accuracy, the online probe.

Shapes: B rows, R spectrograms, C classes, D embed.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxtrain.nn.layers import layer_norm
from jaxtrain.specs import fan_in, ones, zeros
from jaxtrain.types import Array, Mean, PyTree, Spec
from jaxtrain.workloads.bird import vit
from jaxtrain.workloads.bird.settings import Settings


class Labels(NamedTuple):
    """The classes of R spectrograms, with mixup of two recordings each."""

    label: Array  # int32 [R]; or of several classes uint8 [R, C]
    partner_label: Array | None  # of the recording that is mixed in
    own_share: Array | None  # float32 [R]: weight of `label`; `partner_label` has the rest
    weight: Array  # float32 [R]; 0 = no label


def specs(c: Settings) -> PyTree:
    """Return a linear layer from the features to the classes."""
    assert c.n_classes is not None  # `validate_data` asks for it
    return {
        "w": Spec((c.embed, c.n_classes), ("embed", "vocab"), fan_in(c.embed)),
        "b": Spec((c.n_classes,), ("vocab",), zeros),
    }


def scores(params: dict[str, Array], x_rd: Array) -> Array:
    """Logits [R, C]."""
    return x_rd @ params["w"] + params["b"][None]


def cross_entropy(logits_bc: Array, label_b: Array, *, smoothing: float = 0.0) -> Array:
    """Return -sum_c target_c log softmax(logits)_c, [B], with ``smoothing`` spread evenly."""
    log_p_bc = jax.nn.log_softmax(logits_bc)
    # A masked sum, not a gather: classes may be split over devices, and each then adds its own.
    is_label_bc = jnp.arange(log_p_bc.shape[1])[None] == label_b[:, None]
    picked_b = jnp.where(is_label_bc, log_p_bc, 0).sum(-1)
    return -(1 - smoothing) * picked_b - smoothing * log_p_bc.mean(-1)


def asymmetric_loss(
    logits_bc: Array, target_bc: Array, *, gamma_positive: float, gamma_negative: float, clip: float
) -> Array:
    """Return the asymmetric loss of scores, [B] (Ridnik et al. 2021).

    -sum_c [y (1 - p)^g+ log p + (1 - y) q^g- log(1 - q)], q = max(p - clip, 0). With both exponents
    and the clip 0 it is the binary cross-entropy, summed over the classes.
    """
    log_p_bc = jax.nn.log_sigmoid(logits_bc)
    log_not_p_bc = jax.nn.log_sigmoid(-logits_bc)
    p_bc = jax.nn.sigmoid(logits_bc)
    positive_bc = log_p_bc * _power(1 - p_bc, gamma_positive)
    q_bc = p_bc
    if clip:
        q_bc = jnp.maximum(p_bc - clip, 0)
        log_not_p_bc = jnp.log(jnp.maximum(1 - q_bc, 1e-8))
    negative_bc = log_not_p_bc * _power(q_bc, gamma_negative)
    return -(target_bc * positive_bc + (1 - target_bc) * negative_bc).sum(-1)


def _power(x: Array, exponent: float) -> Array:
    """x^exponent, with a derivative at 0 that is not nan."""
    if exponent == 0:
        return jnp.ones_like(x)
    if exponent == 1:
        return x
    return jnp.maximum(x, 1e-12) ** exponent


MAX_CONFUSED = 512  # classes up to which confusions are counted: 1 MB


def counts(c: Settings, logits_bc: Array, labels: Labels) -> dict[str, Mean]:
    """Return `jaxtrain.types.COUNTS` of an evaluation: answers are best, or above 1/2."""
    if c.multilabel:
        label_bc = labels.label > 0
        answer_bc = logits_bc > 0
    else:
        class_1c = jnp.arange(c.n_classes)[None]
        label_bc = class_1c == labels.label[:, None]
        answer_bc = class_1c == logits_bc.argmax(-1)[:, None]
    label_bc = label_bc * labels.weight[:, None]
    answer_bc = answer_bc.astype(jnp.float32)
    n = labels.weight.sum()
    answers_bc = answer_bc * labels.weight[:, None]
    right_bc = label_bc * answer_bc
    sums_3c = jnp.stack([label_bc.sum(0), right_bc.sum(0), answers_bc.sum(0)])
    metrics = {"classes": Mean(sums_3c, n)}
    if not c.multilabel and logits_bc.shape[1] <= MAX_CONFUSED:
        metrics["confusions"] = Mean(jnp.einsum("bc,bd->cd", label_bc, answer_bc), n)
    return metrics


def accuracy(c: Settings, logits_rc: Array, labels: Labels) -> Mean:
    """Return the share of rows whose largest score is of one of their classes, if they have any."""
    best_r = logits_rc.argmax(-1)
    if not c.multilabel:
        is_right_r = best_r == labels.label
        return Mean((is_right_r * labels.weight).sum(), labels.weight.sum())
    is_best_rc = jnp.arange(c.n_classes)[None] == best_r[:, None]
    is_right_r = (is_best_rc & (labels.label > 0)).any(-1)
    weight_r = labels.weight * (labels.label > 0).any(-1)
    return Mean((is_right_r * weight_r).sum(), weight_r.sum())


def probe_specs(c: Settings) -> PyTree:
    """Return the online probe of any objective's features: layer norm and a linear layer."""
    d = c.embed
    return {
        "scale": Spec((d,), ("embed",), ones),
        "bias": Spec((d,), ("embed",), zeros),
        **specs(c),
    }


def probe_scores(params: PyTree, pooled_rd: Array) -> Array:
    """Logits [R, C]."""
    # Without this the probe's loss trains the encoder, and every objective becomes half a
    # supervised one.
    pooled_rd = jax.lax.stop_gradient(pooled_rd)
    return scores(params, layer_norm(pooled_rd, params["scale"], params["bias"], vit.EPS))


def probe_loss(c: Settings, logits_rc: Array, labels: Labels) -> Array:
    """Cross-entropy with the recording's class, or binary ones with each of its classes, [R]."""
    if c.multilabel:
        target_rc = labels.label.astype(jnp.float32)
        return asymmetric_loss(
            logits_rc, target_rc, gamma_positive=0.0, gamma_negative=0.0, clip=0.0
        )
    return cross_entropy(logits_rc, labels.label)
