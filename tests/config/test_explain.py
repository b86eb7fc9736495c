"""Every field has a unit and a meaning, and a default that is fine."""

import dataclasses

import pytest
from toys import load

from jaxtrain import config as config_lib
from jaxtrain.config import Config, Group
from jaxtrain.nn import augment, masked
from jaxtrain.nn.layers import Rope
from jaxtrain.workloads import bird, language
from loaders import spectrogram


def sections():
    """Every dataclass of a real run's config."""
    own = [f.default_factory for f in dataclasses.fields(Config) if dataclasses.is_dataclass(f.default_factory)]
    parts = [bird.Supervised, bird.Mask, bird.Mae, bird.Lejepa, bird.Diet, bird.Teacher, augment.Config, masked.Decoder]
    return [Config, Group, bird.Config, *parts, language.Config, Rope, spectrogram.Config, *own]


@pytest.mark.parametrize("cls", sections(), ids=lambda c: f"{c.__module__}.{c.__name__}")
def test_every_field_has_a_unit_and_a_meaning(cls):
    glosses = config_lib.gloss(cls)
    assert list(glosses) == [f.name for f in dataclasses.fields(cls)]
    for name, (unit, meaning) in glosses.items():
        assert unit, name
        assert meaning or unit == "section", name


@pytest.mark.parametrize("cls", [c for c in sections() if c is not Config], ids=lambda c: f"{c.__module__}.{c.__name__}")
def test_every_field_has_a_default_which_is_fine(cls):
    """Defaults live on the dataclasses alone, and a config that states nothing has no mistake."""
    assert list(getattr(cls(), "problems", list)()) == []


def test_explain_lists_every_field_with_value_unit_and_meaning():
    config = load("--config.train.steps=77", "--config.model.first.width=5")
    explained = {line.split()[0]: line for line in config_lib.explain(config).splitlines()}

    def leaves(section, path):
        for f in dataclasses.fields(section):
            value = getattr(section, f.name)
            if dataclasses.is_dataclass(value):
                yield from leaves(value, f"{path}{f.name}.")
            else:
                yield f"{path}{f.name}", value

    assert list(explained) == [path for path, _ in leaves(config, "config.")]
    assert all(repr(value) in explained[path] for path, value in leaves(config, "config."))
    for path, value, unit, meaning in (
        ("config.train.steps", "77", "steps", "optimizer steps of the whole run"),
        ("config.model.first.width", "5", "values", "of its output"),
        ("config.data.path", "''", "path", "of the data; empty = none needed"),
        ("config.model.n_classes", "3", "classes", "None = what the data say"),
    ):
        assert explained[path].split(maxsplit=3) == [path, value, unit, meaning]
