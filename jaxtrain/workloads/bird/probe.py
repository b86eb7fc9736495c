"""The online probe: layer norm and a linear layer on the features of any objective, which it does not train.

Shapes: R spectrograms, C classes, D embed.
"""

import jax
import jax.numpy as jnp

from jaxtrain.nn.layers import layer_norm
from jaxtrain.specs import ones, zeros
from jaxtrain.types import Array, PyTree, Spec
from jaxtrain.workloads.bird import classes, vit
from jaxtrain.workloads.bird.classes import Labels
from jaxtrain.workloads.bird.settings import Settings


def specs(c: Settings) -> PyTree:
    d = c.embed
    return {"scale": Spec((d,), ("embed",), ones), "bias": Spec((d,), ("embed",), zeros), **classes.specs(c)}


def scores(params: PyTree, pooled_rd: Array) -> Array:
    """Logits [R, C]."""
    # Without this the probe's loss trains the encoder, and every objective becomes half a supervised one.
    pooled_rd = jax.lax.stop_gradient(pooled_rd)
    return classes.scores(params, layer_norm(pooled_rd, params["scale"], params["bias"], vit.EPS))


def loss(c: Settings, logits_rc: Array, labels: Labels) -> Array:
    """Cross-entropy with the recording's own class, or binary ones with each of its classes, [R]."""
    if c.multilabel:
        target_rc = labels.own.astype(jnp.float32)
        return classes.asymmetric_loss(logits_rc, target_rc, gamma_positive=0.0, gamma_negative=0.0, clip=0.0)
    return classes.cross_entropy(logits_rc, labels.own)
