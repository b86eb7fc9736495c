"""teacher: an average's features of masked patches, from visible ones (Assran et al. 2023)."""

from collections.abc import Iterator
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp

from jaxtrain.types import Array, Mean, PyTree
from jaxtrain.workloads.bird import masked, vit
from jaxtrain.workloads.bird.objective import VISIBLE, Inputs, Objective, Section
from jaxtrain.workloads.bird.settings import Settings
from loaders.io import checks


@dataclass(frozen=True)
class Teacher(Section):
    """Features of masked patches, by an exponential moving average of the encoder."""

    on_resume = checks.OnResume(checks.FUNCTION)

    momentum: float = 0.996  # [1] momentum of the average at the start, which rises linearly to 1
    # [section] the predictor
    decoder: masked.Decoder = field(default_factory=lambda: masked.Decoder(192, 4, 4))


def problems(c: Settings, s: Teacher) -> Iterator[tuple[str, str]]:
    yield from checks.within(s, "[0, 1]", "momentum")
    yield from checks.under("decoder", s.decoder.validate())


def specs(c: Settings, s: Teacher) -> PyTree:
    return masked.decoder_specs(c, s.decoder, c.embed)


def advance(s: Teacher, params: PyTree, average: PyTree, step: Array, steps: int) -> PyTree:
    """Make the teacher the student after the first step, then a slower and slower average of it."""
    is_first = step == 0
    progress = jnp.minimum(step / steps, 1.0)
    momentum = jnp.where(is_first, 0.0, s.momentum + (1 - s.momentum) * progress)

    def moved(teacher: Array, student: Array) -> Array:
        return momentum * teacher + (1 - momentum) * student

    return jax.tree.map(moved, average, params["encoder"])


def loss(s: Teacher, x: Inputs) -> tuple[Array, dict[str, Mean]]:
    assert x.masks is not None  # of a pass over visible patches, which it needs
    pred_rnd = masked.decode(x.c, s.decoder, x.params, x.features.encoded, x.masks, x.shard)
    teacher = jax.lax.stop_gradient(x.model_state)
    target_rnd = masked.normalised(vit.encode(x.c, teacher, x.x_rfw, x.shard).patches)
    error_r = masked.masked_error(pred_rnd, target_rnd, x.masks.masked)
    return (error_r * x.weight_r).sum(), {}


def evaluate(s: Teacher, x: Inputs) -> tuple[Mean, dict[str, Mean]]:
    total, _ = loss(s, x)
    return Mean(total, x.weight_b.sum()), {}


def flops(c: Settings, s: Teacher) -> int:
    """Return the FLOPs. The teacher itself has no backward pass."""
    return 3 * masked.decoder_flops(c, s.decoder, c.embed) + vit.forward_flops(c)


OBJECTIVE = Objective(
    Teacher,
    VISIBLE,
    specs,
    loss,
    flops,
    evaluate=evaluate,
    problems=problems,
    advance=advance,
    model_state=lambda params: params["encoder"],  # the average has the shape of the encoder
)
