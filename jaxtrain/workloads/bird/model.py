"""Bird sound: a vision transformer over log-mel spectrograms, and an online probe.

The loss is a weighted sum of objectives, each on if its weight is above 0; each is one file of
`objectives`:

    supervised  cross-entropy with the class, or the asymmetric loss of several (Ridnik et al. 2021)
    lejepa      views agree, and embeddings are Gaussian (Balestriero & LeCun 2025)
    diet        which of all recordings it is (Ibrahim et al. 2024)
    mae         the values of masked patches, from the visible ones (He et al. 2022)
    teacher     the average encoder's features of masked patches (Assran et al. 2023)

mae and teacher share masks and the pass over visible patches, the others one over all patches. The
probe (layer norm, linear) reads the same features without passing gradients back. It has its own
learning rate, and is comparable between objectives. A row may hold several views of its recording
(data.views); every view is encoded.

Modules of this folder, each of which imports only those before it: vit, log_mel, augment, masked,
settings, classes, objective, views, objectives, model.

Shapes: B rows, V views of a row, R = B V spectrograms, F frames, W mels, N patches, C classes.
"""

import functools
import logging
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxtrain.config import Config as RunConfig
from jaxtrain.types import Array, Axes, Batch, Key, LossOut, Mean, PyTree, Shard, Task, Variables
from jaxtrain.workloads.bird import augment as augment_lib
from jaxtrain.workloads.bird import classes, views, vit
from jaxtrain.workloads.bird.classes import Labels
from jaxtrain.workloads.bird.objective import ALL, VISIBLE, Features, Inputs, Objective
from jaxtrain.workloads.bird.objectives import OBJECTIVES
from jaxtrain.workloads.bird.settings import Settings
from loaders.io import checks

log = logging.getLogger("jaxtrain")


def with_objectives(cls: type) -> type:
    """Declare a field for each objective's section, so that config and command line know all."""
    for name, objective in OBJECTIVES.items():
        cls.__annotations__[name] = objective.section
        setattr(cls, name, field(default_factory=objective.section))
    return cls


@dataclass(frozen=True)
@with_objectives
class Config(Settings):
    """Supervised by default. An objective is on if its weight is above 0."""

    on_resume = checks.OnResume(checks.FUNCTION)  # the weights of objectives

    def validate(self) -> Iterator[tuple[str, str]]:
        yield from super().validate()
        for name, objective in OBJECTIVES.items():
            section = self.section(name)
            yield from checks.under(name, checks.not_negative(section, "weight"))
            yield from checks.under(name, objective.problems(self, section))
        if not self.on:
            first, *later = OBJECTIVES
            yield (
                f"{first}.weight",
                f"is 0, as are those of {', '.join(later)}; nothing would be learned",
            )

    def validate_data(self, info: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
        yield from super().validate_data(info)
        for name, objective in self.on.items():
            yield from objective.validate_data(self, self.section(name), info)

    def section(self, name: str) -> Any:
        return getattr(self, name)

    @property
    def reads_whole_microbatches(self) -> bool:
        statistics = [objective.batch_statistic for objective in self.on.values()]
        return any(statistics) or bool(self.augment.mixup)

    @property
    def on(self) -> dict[str, Objective]:
        """The objectives that the loss consists of."""
        return {
            name: objective
            for name, objective in OBJECTIVES.items()
            if self.section(name).weight > 0
        }

    def reads(self, needs: str) -> bool:
        """Whether some objective reads this pass of the encoder."""
        return any(objective.needs == needs for objective in self.on.values())


def make_specs(c: Config) -> PyTree:
    """Return the specs of encoder, objective/NAME of those in use, probe if there are classes."""
    objectives = {name: objective.specs(c, c.section(name)) for name, objective in c.on.items()}
    table = {"encoder": vit.make_specs(c), "objective": objectives}
    if c.n_classes:
        table["probe"] = classes.probe_specs(c)
    return table


def make_model_state(c: Config, table: PyTree) -> PyTree:
    """Return a table for each objective with a state, or ()."""
    states = {
        name: objective.model_state(table)
        for name, objective in c.on.items()
        if objective.model_state
    }
    return states or ()


def forward_flops(c: Config) -> int:
    """Floating-point operations of a spectrogram's products in the encoder and heads of classes."""
    head = 2 * c.embed * (c.n_classes or 0)
    n_heads = 2 if "supervised" in c.on else 1
    return vit.forward_flops(c) + n_heads * head


def train_flops(c: Config) -> int:
    """Of one view in a step: three encoder passes, the probe forward, and the objectives."""
    forward = 2 * c.embed * (c.n_classes or 0)
    if c.reads(ALL):
        forward += vit.forward_flops(c)
    if c.reads(VISIBLE):
        forward += vit.forward_flops(c, c.n_patches - c.n_masked)
    objectives = sum(objective.flops(c, c.section(name)) for name, objective in c.on.items())
    return 3 * forward + objectives


class Model(NamedTuple):
    c: Config
    shard: Shard
    seed: int
    steps: int  # of the whole run


def make_task(config: RunConfig[Config], shard: Shard, batch: int) -> Task:
    c = config.model
    announce_microbatches(c, batch, config.train.accumulate)
    model = Model(c, shard, config.seed, config.train.steps)
    table = make_specs(c)
    return Task(
        specs=Variables(table, model_state=make_model_state(c, table)),
        loss=functools.partial(loss, model),
        evaluate=functools.partial(evaluate, model),
        axes=batch_axes(c),
        flops=batch * c.n_views * train_flops(c),
        pictures=functools.partial(pictures, model),
        progress=functools.partial(progress, model),
        advance=functools.partial(advance, model),
        terms=(_objective_term(c), "probe_loss") if c.n_classes else (),
        predict=functools.partial(predict, model),
    )


def _objective_term(c: Config) -> str:
    names = list(c.on)
    if len(names) == 1 and c.section(names[0]).weight == 1:
        return f"{names[0]}_loss"
    return "objective_loss"


def announce_microbatches(c: Config, batch: int, accumulate: int) -> None:
    """Log the parts of a loss that do not decompose over microbatches."""
    if accumulate == 1:
        return
    for objective in c.on.values():
        if objective.batch_statistic:
            log.warning(
                "%s is over a microbatch's %d rows, not the batch's %d",
                objective.batch_statistic,
                batch // accumulate,
                batch,
            )
    if c.augment.mixup:
        log.warning("with train.accumulate=%d rows are mixed within microbatches", accumulate)


def batch_axes(c: Config) -> dict[str, Axes]:
    view_axis = (None,) if c.n_views > 1 else ()
    clip_axes = (None,) if c.form == "waveform" else (None, None)
    clip: Axes = ("batch", *view_axis, *clip_axes)
    axes: dict[str, Axes] = {c.form or "spectrogram": clip}
    if c.augment.background:
        axes["background"] = clip
    if c.n_classes and c.multilabel:
        axes["labels"] = ("batch", None)
    elif c.n_classes:
        axes["label"] = ("batch",)
    return axes | {"index": ("batch",), "epoch": ("batch",), "weight": ("batch",)}


def loss(model: Model, variables: Variables, batch: Batch, key: Key) -> LossOut:
    c, weight_b = model.c, batch["weight"]
    batch = views.with_spectrograms(c, batch, model.shard)
    augmented = augment_lib.augment(c.augment, model.seed, batch, c.spectrograms)
    labels = None
    if c.n_classes:
        labels = views.labels_of_views(c, batch, augmented.own_share)
    encode = functools.partial(
        encoded_inputs,
        model,
        variables,
        batch,
        augmented.x,
        key=key,
        labels=labels,
        share_bv=augmented.own_share,
    )
    passes = {needs: encode(needs) for needs in (ALL, VISIBLE) if c.reads(needs)}
    # Sums over the rows: the term of each objective.
    sums: dict[str, Array] = {}
    metrics: dict[str, Mean] = {}
    for name, objective in c.on.items():
        with jax.named_scope(name):
            own_inputs = of_objective(passes[objective.needs], variables, name)
            sums[name], own_metrics = objective.loss(c.section(name), own_inputs)
        metrics |= own_metrics
    total = sum(c.section(name).weight * term for name, term in sums.items())
    n = weight_b.sum()
    metrics |= {f"{name}_loss": Mean(term, n) for name, term in sums.items()}
    metrics["objective_loss"] = Mean(total, n)
    if labels is not None:
        # The features of all patches if some objective reads them, else of the visible ones.
        first_pass = next(iter(passes.values()))
        probe = variables.params["probe"]
        logits_rc = classes.probe_scores(probe, first_pass.features.pooled_rd)
        probe_total = (classes.probe_loss(c, logits_rc, labels) * labels.weight).sum()
        metrics["probe_loss"] = Mean(probe_total, labels.weight.sum())
        metrics["probe_accuracy"] = classes.accuracy(c, logits_rc, labels)
        total += probe_total
    return LossOut(Mean(total, n), metrics, None)


def evaluate(model: Model, variables: Variables, batch: Batch) -> dict[str, Mean]:
    """Average scores over views. Leave out terms that only a training batch has."""
    c, weight_b = model.c, batch["weight"]
    batch = views.with_spectrograms(c, batch, model.shard)
    labels = views.labels_of_rows(c, batch) if c.n_classes else None
    terms = {name: objective for name, objective in c.on.items() if objective.evaluate}
    needed_passes = {objective.needs for objective in terms.values()}
    if labels is not None:
        needed_passes.add(ALL)
    encode = functools.partial(
        encoded_inputs, model, variables, batch, batch["spectrogram"], labels=labels
    )
    passes = {needs: encode(needs) for needs in (ALL, VISIBLE) if needs in needed_passes}
    metrics: dict[str, Mean] = {}
    if labels is not None:
        metrics |= evaluate_probe(c, variables.params["probe"], passes[ALL], labels)
    for name, objective in terms.items():
        assert objective.evaluate is not None
        with jax.named_scope(name):
            own_inputs = of_objective(passes[objective.needs], variables, name)
            term, own_metrics = objective.evaluate(c.section(name), own_inputs)
        metrics |= {f"{name}_loss": term, **own_metrics}
    if terms.keys() == c.on.keys():
        total = sum(c.section(name).weight * metrics[f"{name}_loss"].total for name in terms)
        metrics["objective_loss"] = Mean(total, weight_b.sum())
    return metrics


def evaluate_probe(c: Config, probe: PyTree, x: Inputs, labels: Labels) -> dict[str, Mean]:
    """Return the probe's metrics of rows, whose scores are averaged over the views."""
    logits_rc = classes.probe_scores(probe, x.features.pooled_rd)
    logits_bc = x.by_view(logits_rc).mean(1)
    total = (classes.probe_loss(c, logits_bc, labels) * labels.weight).sum()
    metrics = {
        "probe_loss": Mean(total, labels.weight.sum()),
        "probe_accuracy": classes.accuracy(c, logits_bc, labels),
    }
    if "supervised" not in c.on:  # which counts the answers of its own head
        metrics |= classes.counts(c, logits_bc, labels)
    return metrics


def predict(model: Model, variables: Variables, batch: Batch) -> dict[str, Array]:
    """Return features [B, D] of normalised ``spectrogram``, and the probe's ``scores`` [B, C]."""
    c, encoder = model.c, variables.params["encoder"]
    encoded = vit.encode(c, encoder, batch["spectrogram"].astype(jnp.float32), model.shard)
    features_bd = views.pooled(c, encoder, encoded)
    if not c.n_classes:
        return {"features": features_bd}
    scores_bc = classes.probe_scores(variables.params["probe"], features_bd)
    return {"features": features_bd, "scores": scores_bc}


def encoded_inputs(
    model: Model,
    variables: Variables,
    batch: Batch,
    x: Array,
    needs: str,
    *,
    key: Key | None = None,
    labels: Labels | None = None,
    share_bv: Array | None = None,
) -> Inputs:
    """One pass of the encoder over spectrograms ``x``; `of_objective` adds what one objective has.

    ``key``: of the step; None in an evaluation.
    """
    c = model.c
    x_rfw = views.flat(c, x)
    masks = views.masks(c, model.seed, batch) if needs == VISIBLE else None
    visible_rvn = masks.visible if masks else None
    encoder = variables.params["encoder"]
    encoded = vit.encode(c, encoder, x_rfw, model.shard, visible_bvn=visible_rvn)
    weight_b = batch["weight"]
    return Inputs(
        c=c,
        shard=model.shard,
        params=(),
        model_state=(),
        key=key,
        batch=batch,
        x_rfw=x_rfw,
        weight_b=weight_b,
        weight_r=views.repeated(c, weight_b) / c.n_views,
        labels=labels,
        features=Features(encoded, views.pooled(c, encoder, encoded)),
        masks=masks,
        share_bv=share_bv,
    )


def of_objective(shared: Inputs, variables: Variables, name: str) -> Inputs:
    model_state = variables.model_state[name] if name in variables.model_state else ()
    return shared._replace(params=variables.params["objective"][name], model_state=model_state)


def advance(model: Model, params: PyTree, model_state: PyTree, step: Array) -> PyTree:
    """Return the model state after a step, by the new parameters."""
    c = model.c
    for name, objective in c.on.items():
        if objective.advance:
            section = c.section(name)
            state = objective.advance(section, params, model_state[name], step, model.steps)
            model_state = {**model_state, name: state}
    return model_state


def pictures(model: Model, batch: Batch) -> dict[str, Array]:
    """Return first views, mel up and time to the right, from quietest to loudest value of each."""
    c = model.c
    first_rows: Batch = {name: x[:8] for name, x in batch.items()}
    first_rows = views.with_spectrograms(c, first_rows, model.shard)
    augmented = augment_lib.augment(c.augment, model.seed, first_rows, c.spectrograms).x
    images = {"input": first_rows["spectrogram"], "augmented": augmented}
    if c.reads(VISIBLE):
        x_rnp = vit.patchify(c, views.flat(c, augmented))
        is_masked_rn1 = views.masks(c, model.seed, first_rows).masked[:, :, None] > 0
        quietest_r11 = x_rnp.min((1, 2), keepdims=True)
        masked_rnp = jnp.where(is_masked_rn1, quietest_r11, x_rnp)
        images["masked"] = views.unpatchify(c, masked_rnp)
    return {name: views.as_picture(views.flat(c, x)[:: c.n_views]) for name, x in images.items()}


def progress(model: Model, variables: Variables, batch: Batch) -> dict[str, Array]:
    """Return the pictures of each objective that draws some, of the first rows of an evaluation."""
    c = model.c
    drawing = {name: objective for name, objective in c.on.items() if objective.progress}
    if not drawing:
        return {}
    n_rows = next(iter(batch.values())).shape[0]
    n_first = math.lcm(4, model.shard.size("batch", n_rows))  # they divide over the devices
    first_rows: Batch = {name: x[:n_first] for name, x in batch.items()}
    first_rows = views.with_spectrograms(c, first_rows, model.shard)
    images: dict[str, Array] = {}
    for name, objective in drawing.items():
        assert objective.progress is not None
        x = first_rows["spectrogram"]
        shared = encoded_inputs(model, variables, first_rows, x, objective.needs)
        images |= objective.progress(c.section(name), of_objective(shared, variables, name))
    return images
