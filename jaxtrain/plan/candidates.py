"""The meshes and options that a search of the plan may choose from.

mesh              each split of the devices over data, fsdp and model that the network between
                  slices allows
sequence          rows split over fsdp by their places, if the task has such an axis. A mesh has it
                  after its other options
train.accumulate  each number of microbatches that divides a device's rows, unless the loss reads
                  all rows of a microbatch
model.remat       none and full
optim.offload     if the optimizer's state may be in host memory
narrower          moments and parameters in 16 bits. They change the numbers of a run, so that a
                  search proposes them, and no run takes them by itself

The values of a choice are those of a run's config, so that a choice is also a line of overrides.
"""

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from jaxtrain import config as config_lib
from jaxtrain.config import consistency, factories
from jaxtrain.parallel import layout as layout_lib
from jaxtrain.plan.target import Target, abstractly

ACCUMULATE, REMAT, OFFLOAD = "train.accumulate", "model.remat", "optim.offload"
MESH = tuple(f"mesh.{name}" for name in layout_lib.MESH_AXES)
RULES = "mesh.axis_rules"
SEQUENCE = {"batch": "data", "seq": "fsdp"}  # rules by which fsdp splits rows by their places


class Choice(NamedTuple):
    """A value for each field that the plan decides."""

    values: tuple[tuple[str, Any], ...] = ()

    def __str__(self) -> str:
        return ", ".join(f"{path}={value}" for path, value in self.values)

    def overrides(self) -> str:
        """Write it as arguments of a command in a shell."""
        arguments = [f"--config.{path}={value}" for path, value in self.values]
        return " ".join(shlex.quote(argument) for argument in arguments)

    def __or__(self, other: "Choice") -> "Choice":
        return Choice((*self.values, *other.values))

    def apply(self, config: config_lib.Config) -> config_lib.Config:
        """Return the config with these values, and nothing on auto."""
        sections: dict[str, dict[str, Any]] = {"train": {"auto": ()}}
        for path, value in self.values:
            section, _, field = path.partition(".")
            sections.setdefault(section, {})[field] = value
        changed = {}
        for section, values in sections.items():
            changed[section] = replace(getattr(config, section), **values)
        return replace(config, **changed)


NOTHING = Choice()


def meshes(target: Target) -> Iterator[Choice]:
    """Yield each mesh of the target's devices. Those with more replicas come first."""
    count = target.count
    for data in reversed(_divisors(count)):
        for fsdp in reversed(_divisors(count // data)):
            sizes = (data, fsdp, count // (data * fsdp))
            try:
                layout_lib.require_slices(sizes, target.slices, target.platform)
            except layout_lib.LayoutError:
                continue
            yield Choice(tuple(zip(MESH, sizes, strict=True)))


def sequence(config: config_lib.Config, mesh: Choice, target: Target) -> Choice | None:
    """Return a mesh with rows that fsdp splits by their places, None if the task has no such."""
    fsdp = dict(mesh.values)[MESH[1]]
    if fsdp == 1 or "seq" in config.mesh.axis_rules:
        return None
    split = mesh | Choice(((RULES, {**config.mesh.axis_rules, **SEQUENCE}),))
    try:
        axes = abstractly(split.apply(config), target).task.axes
    except (ValueError, TypeError):
        return None
    return split if any("seq" in of_field for of_field in axes.values()) else None


def same_numbers(config: config_lib.Config, rows: int, fields: tuple[str, ...]) -> list[Choice]:
    """List values of ``fields`` that change the last bits of a run's numbers at most.

    ``rows``: of a global batch on one device. The least recomputation and the fewest microbatches
    come first. A choice leaves out the values that the config has, unless they are on auto.
    """
    choices = [Choice()]
    values: dict[str, list[Any]] = {
        OFFLOAD: [False, True],
        REMAT: _policies(config),
        ACCUMULATE: _divisors(rows),
    }
    if config.model.reads_whole_microbatches:
        values[ACCUMULATE] = [config.train.accumulate]
    for path in fields:
        section, _, field = path.partition(".")
        if not hasattr(getattr(config, section), field):
            continue
        current = getattr(getattr(config, section), field)
        longer = []
        for value in values[path]:
            is_default = value == current and path not in config.train.auto
            own = Choice() if is_default else Choice(((path, value),))
            longer += [own | choice for choice in choices]
        choices = longer
    return choices


def smallest(configs: Sequence[config_lib.Config]) -> tuple[int, int]:
    """Return the places of two configs of `same_numbers`, one of which takes the least memory.

    Both compute all layers again, with the fewest and with the most microbatches: several have less
    of each activation, and a sum of the gradients besides those of one.
    """
    policies = [getattr(config.model, "remat", "none") for config in configs]
    return policies.index(policies[-1]), len(configs) - 1


def narrower(config: config_lib.Config) -> Iterator[Choice]:
    """Yield moments and parameters in 16 bits, as far as the config allows them."""
    optim = config.optim
    is_built_in = not factories.is_factory(optim.name)
    has_moments = is_built_in and any(
        config_lib.UPDATE_RULES[rule].moments for rule in optim.rules()
    )
    if has_moments and optim.moments == "float32":
        yield Choice((("optim.moments", "bfloat16"),))
    if getattr(config.model, "param_dtype", "") == "float32" and not optim.masters:
        yield Choice((("model.param_dtype", "bfloat16"), ("optim.masters", True)))


def objection(config: config_lib.Config) -> str:
    """Return why a config contradicts itself, or ""."""
    problems = [*consistency.between_sections(config)]
    return "; ".join(f"{path} {text}" for path, text in problems)


def _policies(config: config_lib.Config) -> list[str]:
    policies = ["none", "full"]
    current = getattr(config.model, "remat", "none")
    return policies if current in policies else [current, *policies]


def _divisors(count: int) -> list[int]:
    return [n for n in range(1, count + 1) if count % n == 0]
