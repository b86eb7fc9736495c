"""Every field has a unit, a meaning, and a valid default."""

import dataclasses
import typing

import pytest

from jaxtrain import config as config_lib
from jaxtrain import workload
from jaxtrain.config import Config, Group
from loaders.audio import spectrogram
from tests.config.toys import load


def parts(hint):
    """Every dataclass in a type: itself, its arguments, and the types of its fields."""
    for each in typing.get_args(hint):
        yield from parts(each)
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        yield hint
        for each in typing.get_type_hints(hint).values():
            yield from parts(each)


def sections():
    """Every dataclass in the config of a real run, of each installed workload."""
    own = [
        f.default_factory
        for f in dataclasses.fields(Config)
        if dataclasses.is_dataclass(f.default_factory)
    ]
    models = [workload.of(name).config_class() for name in workload.shipped()]
    return list(
        dict.fromkeys(
            each
            for cls in (Config, Group, spectrogram.Config, *own, *models)
            for each in parts(cls)
        )
    )


@pytest.mark.parametrize("cls", sections(), ids=lambda c: f"{c.__module__}.{c.__name__}")
def test_every_field_has_a_unit_and_a_meaning(cls):
    glosses = config_lib.gloss(cls)
    assert list(glosses) == [f.name for f in dataclasses.fields(cls)]
    for name, (unit, meaning) in glosses.items():
        assert unit, name
        assert meaning or unit == "section", name


@pytest.mark.parametrize(
    "cls", [c for c in sections() if c is not Config], ids=lambda c: f"{c.__module__}.{c.__name__}"
)
def test_every_field_has_a_default_which_is_fine(cls):
    """Defaults are only on the dataclasses, and a config that sets nothing has no errors."""
    assert list(getattr(cls(), "validate", list)()) == []


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


def test_explain_prints_the_fields_first_and_then_the_errors(here, capsys):
    """An incomplete config is explained nevertheless."""
    from jaxtrain.commands import explain, train

    wrong = [
        "--config=configs/toy.py",
        "--config.train.steps=many",
        "--config.data.path=/nowhere",
        "--config.model.first.width=5",
    ]
    assert explain.main(wrong) == 2
    told = capsys.readouterr()
    fields = {line.split()[0]: line for line in told.out.splitlines() if line.startswith("config.")}
    assert "config.train.steps" in fields and " 5 " in fields["config.model.first.width"]
    assert told.err.splitlines()[0] == "error: the config has 2 errors:"
    assert (
        "config.train.steps is 'many'" in told.err and "config.data.path is '/nowhere'" in told.err
    )
    assert train.main([*wrong, "--explain"]) == 2 and capsys.readouterr() == told
    assert not (here / "runs").exists()


def test_nothing_is_made_to_explain_a_config(here, capsys):
    """Fields that missing data decide stay open. Those that existing data decide are filled in."""
    from jaxtrain.commands import explain

    loader = (here / "toy_loader.py").read_text()
    unmade = (
        "    def exists(self):\n        return self.path != 'made at the first use'\n\n    def"
        " validate"
    )
    loader = loader.replace("    def validate", unmade, 1).replace(
        "if self.path and", "if self.path != 'made at the first use' and self.path and"
    )
    made = (
        "    if config.path == 'made at the first use':\n        open('made', 'w').close()\n   "
        " return {"
    )
    (here / "toy_loader.py").write_text(loader.replace("    return {", made, 1))
    for arguments, classes in (([], "3"), (["--config.data.path=made at the first use"], "None")):
        assert explain.main(["--config=configs/toy.py", *arguments]) == 0
        (line,) = [
            x
            for x in capsys.readouterr().out.splitlines()
            if x.startswith("config.model.n_classes")
        ]
        assert line.split()[1] == classes and not (here / "made").exists()
    load("--config.data.path=made at the first use")
    assert (here / "made").exists(), "a run makes them"


def test_a_config_that_needs_an_argument_is_explained_as_far_as_it_goes_without(here, capsys):
    from jaxtrain.commands import explain

    (here / "needs.py").write_text(
        "def get_config(path):\n    return dict(model=open(path).read())\n"
    )
    assert explain.main(["--config=needs.py"]) == 2
    told = capsys.readouterr()
    sections = {line.split(".")[1] for line in told.out.splitlines() if line.startswith("config.")}
    assert {"train", "optim", "checkpoint"} <= sections and not {"model", "data"} & sections
    assert "file needs.py says: [Errno 2]" in told.err and told.err.endswith(
        "come with --config=FILE:ARGUMENT\n"
    )
