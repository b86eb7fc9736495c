"""An objective is one term of the loss, as a value.

A file of `jaxtrain.workloads.bird.objectives` defines ``OBJECTIVE``. The file's name, say "mae", is
the name of everything that belongs to it: its section of the config (model.mae.weight), its
parameters (objective/mae/…), its model state (mae/…) and its metric (mae_loss). It is part of the
loss if its weight is above 0.

Shapes: B rows, V views of a row, R = B V spectrograms, F frames, W mels, D embed, H hidden values,
N patches.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax.numpy as jnp

from jaxtrain import config as config_lib
from jaxtrain.nn.batch_norm import batch_norm
from jaxtrain.types import Array, Batch, Key, Mean, PyTree, Shard
from jaxtrain.workloads.bird import masked, vit
from jaxtrain.workloads.bird.classes import Labels
from jaxtrain.workloads.bird.settings import Settings
from loaders.io import checks

# the passes of the encoder: over every patch, or over the visible ones
ALL, VISIBLE = "all", "visible"


@dataclass(frozen=True)
class Section(config_lib.Section):
    """An objective's part of the config. Each extends it by fields of its own."""

    on_resume = checks.OnResume(checks.FUNCTION)

    weight: float = 0.0  # [1] weight in the loss; 0 = off


class Features(NamedTuple):
    """One pass of the encoder over R spectrograms, float32."""

    encoded: vit.Encoded
    pooled_rd: Array  # their mean, as model.pool says


class Inputs(NamedTuple):
    """The arguments of an objective: rows of the batch, and the encoder's pass that it needs."""

    c: Settings
    shard: Shard
    params: PyTree  # the objective's own parameters
    model_state: PyTree  # its own model state; () = none
    key: Key | None  # of the step; None in an evaluation, which draws nothing new
    batch: Batch  # the fields of B rows
    x_rfw: Array  # float32 [R, F, W]: augmented in training
    weight_b: Array  # float32 [B]; 0 = padding, or a row that no loss sees
    weight_r: Array  # float32 [R]: the same, shared out to the views
    features: Features
    masks: masked.Masks | None  # of a pass over visible patches
    # of R views in training, of B rows in an evaluation; None without classes
    labels: Labels | None
    share_bv: Array | None  # float32 [B, V]: mixup's share of the row itself; None = no mixup

    def by_view(self, x_r: Array) -> Array:
        """[R, …] -> [B, V, …]."""
        return x_r.reshape(-1, self.c.n_views, *x_r.shape[1:])


class Objective(NamedTuple):
    """One term of the loss. Each function takes the objective's own section of the config.

    Functions without `Inputs` also take the model's settings.
    """

    section: type[Section]
    needs: str  # the pass that it reads: ALL or VISIBLE
    specs: Callable[[Settings, Any], PyTree]  # its parameters, a tree of Spec
    # the weighted sum over rows, and metrics
    loss: Callable[[Any, Inputs], tuple[Array, dict[str, Mean]]]
    # of one view in a training step, backward pass included, beyond the encoder's pass
    flops: Callable[[Settings, Any], int]
    # None = only training batches have it
    evaluate: Callable[[Any, Inputs], tuple[Mean, dict[str, Mean]]] | None = None
    # (field of the section, text)
    problems: Callable[[Settings, Any], Iterator[tuple[str, str]]] = lambda c, section: iter(())
    # (field, text)
    validate_data: Callable[[Settings, Any, Mapping[str, Any]], Iterator[tuple[str, str]]] = (
        lambda c, section, info: iter(())
    )
    # the model's table of parameters -> the table of its state
    model_state: Callable[[PyTree], PyTree] | None = None
    # (…, new params, model state, step, steps) -> model state
    advance: Callable[[Any, PyTree, PyTree, Array, int], PyTree] | None = None
    progress: Callable[[Any, Inputs], dict[str, Array]] | None = None  # pictures at an evaluation
    # name of a statistic of the global batch; "" = none
    batch_statistic: str = ""


def batch_normed(x_rh: Array, scale_h: Array, bias_h: Array, weight_r: Array) -> Array:
    """Normalise hidden values [R, H] by channel over the rows of weight of the global batch."""
    zeros_h = jnp.zeros(x_rh.shape[1])
    valid_r1 = (weight_r > 0).astype(x_rh.dtype)[:, None]
    no_average = {"mean": zeros_h, "var": zeros_h}
    normed_rh, _ = batch_norm(
        x_rh, scale_h, bias_h, no_average, valid_r1, momentum=0.0, eps=vit.EPS
    )
    return normed_rh
