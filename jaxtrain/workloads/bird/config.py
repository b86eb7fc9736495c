"""The section ``model`` of a bird run: the model's settings, and a section for each objective, called as its file."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from jaxtrain.types import PyTree
from jaxtrain.workloads.bird import probe, vit
from jaxtrain.workloads.bird.objective import ALL, VISIBLE, Objective
from jaxtrain.workloads.bird.objectives import OBJECTIVES
from jaxtrain.workloads.bird.settings import Settings
from loaders.io import checks


def with_objectives(cls: type) -> type:
    """Declares a field for the section of each objective, so that config and command line know them all."""
    for name, objective in OBJECTIVES.items():
        cls.__annotations__[name] = objective.section
        setattr(cls, name, field(default_factory=objective.section))
    return cls


@dataclass(frozen=True)
@with_objectives
class Config(Settings):
    """Supervised by default; an objective is on where its weight is above 0."""

    def problems(self) -> Iterator[tuple[str, str]]:
        yield from super().problems()
        for name, objective in OBJECTIVES.items():
            section = self.section(name)
            yield from checks.under(name, checks.not_negative(section, "weight"))
            yield from checks.under(name, objective.problems(self, section))
        if not self.on:
            first, *others = OBJECTIVES
            yield f"{first}.weight", f"is 0, as are those of {', '.join(others)}; nothing would be learned"

    def data_problems(self, facts: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
        yield from super().data_problems(facts)
        for name, objective in self.on.items():
            yield from objective.data_problems(self, self.section(name), facts)

    def section(self, name: str) -> Any:
        """The fields of an objective."""
        return getattr(self, name)

    @property
    def on(self) -> dict[str, Objective]:
        """The objectives that the loss consists of."""
        return {name: objective for name, objective in OBJECTIVES.items() if self.section(name).weight > 0}

    def reads(self, needs: str) -> bool:
        """Whether some objective reads this pass of the encoder."""
        return any(objective.needs == needs for objective in self.on.values())


def make_specs(c: Config) -> PyTree:
    """encoder, objective/NAME for each that is on, probe where there are classes."""
    table = {
        "encoder": vit.make_specs(c),
        "objective": {name: objective.specs(c, c.section(name)) for name, objective in c.on.items()},
    }
    return {**table, "probe": probe.specs(c)} if c.n_classes else table


def make_carry(c: Config, table: PyTree) -> PyTree:
    """A table for each objective that keeps something; () where none does."""
    return {name: objective.carry(table) for name, objective in c.on.items() if objective.carry} or ()


def forward_flops(c: Config) -> int:
    """Floating-point operations of the matrix products for one spectrogram through the encoder and the heads for classes."""
    heads = (("supervised" in c.on) + 1) * bool(c.n_classes)
    return vit.forward_flops(c) + heads * 2 * c.embed * (c.n_classes or 0)


def train_flops(c: Config) -> int:
    """Of one view in a training step: three times the encoder's passes and the probe forward, and the objectives."""
    forward = 2 * c.embed * (c.n_classes or 0)
    if c.reads(ALL):
        forward += vit.forward_flops(c)
    if c.reads(VISIBLE):
        forward += vit.forward_flops(c, c.n_patches - c.n_masked)
    return 3 * forward + sum(objective.flops(c, c.section(name)) for name, objective in c.on.items())
