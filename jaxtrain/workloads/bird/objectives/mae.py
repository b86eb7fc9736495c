"""mae: the normalised values of masked patches, from the visible ones (He et al. 2022)."""

from collections.abc import Iterator
from dataclasses import dataclass, field

import jax.numpy as jnp

from jaxtrain.types import Array, Mean, PyTree
from jaxtrain.workloads.bird import masked, views, vit
from jaxtrain.workloads.bird.objective import VISIBLE, Inputs, Objective, Section
from jaxtrain.workloads.bird.settings import Settings
from loaders.io import checks


@dataclass(frozen=True)
class Mae(Section):
    """Values of masked patches."""

    on_resume = checks.OnResume(checks.STATE)

    decoder: masked.Decoder = field(default_factory=masked.Decoder)  # [section]


def problems(c: Settings, s: Mae) -> Iterator[tuple[str, str]]:
    yield from checks.under("decoder", s.decoder.validate())


def specs(c: Settings, s: Mae) -> PyTree:
    return masked.decoder_specs(c, s.decoder, c.patch_size)


def predictions(s: Mae, x: Inputs) -> tuple[Array, Array]:
    """float32 [R, N, P] of every patch, and which are masked, [R, N]."""
    assert x.masks is not None  # of a pass over visible patches, which it needs
    pred_rnp = masked.decode(x.c, s.decoder, x.params, x.features.encoded, x.masks, x.shard)
    return pred_rnp, x.masks.masked


def loss(s: Mae, x: Inputs) -> tuple[Array, dict[str, Mean]]:
    target_rnp = masked.normalised(vit.patchify(x.c, x.x_rfw))
    pred_rnp, masked_rn = predictions(s, x)
    error_r = masked.masked_error(pred_rnp, target_rnp, masked_rn)
    return (error_r * x.weight_r).sum(), {}


def evaluate(s: Mae, x: Inputs) -> tuple[Mean, dict[str, Mean]]:
    total, _ = loss(s, x)
    return Mean(total, x.weight_b.sum()), {}


def progress(s: Mae, x: Inputs) -> dict[str, Array]:
    """Return first views, masked patches as predicted, with their own mean and spread."""
    pred_rnp, masked_rn = predictions(s, x)
    x_rnp = vit.patchify(x.c, x.x_rfw)
    mean_rn1 = x_rnp.mean(-1, keepdims=True)
    std_rn1 = x_rnp.std(-1, keepdims=True)
    is_masked_rn1 = masked_rn[:, :, None] > 0
    restored_rnp = jnp.where(is_masked_rn1, pred_rnp * std_rn1 + mean_rn1, x_rnp)
    restored_rfw = views.unpatchify(x.c, restored_rnp)
    return {"restored": views.as_picture(restored_rfw[:: x.c.n_views])}


def flops(c: Settings, s: Mae) -> int:
    return 3 * masked.decoder_flops(c, s.decoder, c.patch_size)


OBJECTIVE = Objective(
    Mae, VISIBLE, specs, loss, flops, evaluate=evaluate, problems=problems, progress=progress
)
