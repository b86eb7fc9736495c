"""A config is built from a file and a command line: read with its types, or refused with all its
errors at once."""

import json
import pathlib

import pytest

from jaxtrain import config as config_lib
from jaxtrain.config import ConfigError, Group
from tests.config.toys import FILE, errors, load
from tests.support import installed

ROOT = pathlib.Path(__file__).parents[2]


def test_a_file_states_what_differs_and_the_rest_is_the_default():
    config = load()
    assert (config.train.batch, config.model.text, config.workdir) == (32, "a", "runs/toy")
    assert config.optim == config_lib.Optim() and config.train.steps == config_lib.Train().steps
    assert config.model.n_classes == 3  # a fact from the data


def test_a_file_takes_an_argument_with_any_text():
    assert load(source="configs/toy.py:/data/a:b=c").model.text == "/data/a:b=c"


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("whole=3", 3),
        ("whole=-0", 0),
        ("real=3", 3.0),
        ("real=1e-3", 1e-3),
        ("text=b", "b"),
        ("text=1", "1"),
        ("text=a=b,c", "a=b,c"),
        ("text=", ""),
        ("flag=true", True),
        ("flag=True", True),
        ("flag=false", False),
        ("pair=(3, 4)", (3, 4)),
        ("pair=[3, 4]", (3, 4)),
        ("pair=3,4", (3, 4)),
        ("many=()", ()),
        ("many=(1,)", (1.0,)),
        ("many=1,2.5", (1.0, 2.5)),
        ("maybe=0.25", 0.25),
        ("maybe=none", None),
        ("maybe=None", None),
        ("n_classes=3", 3),
        ("table.noise=2", {"noise": 2.0}),
        ("table={'a': 1}", {"a": 1.0}),
    ],
)
def test_a_field_of_every_type_is_read_from_the_command_line(argument, value):
    found = getattr(
        load(f"--config.model.{argument}").model, argument.partition("=")[0].partition(".")[0]
    )
    assert found == value and type(found) is type(value)
    if isinstance(value, tuple):
        assert [type(x) for x in found] == [type(x) for x in value]


def test_sections_within_sections_are_read_too():
    model = load(
        "--config.model.first.width=5", "--config.model.layers=({'width': 3}, {'bias': False})"
    ).model
    assert (model.first.width, model.first.bias) == (5, True)
    assert [(layer.width, layer.bias) for layer in model.layers] == [(3, True), (8, False)]
    assert load("--config.optim.groups=({'match': '^probe/', 'lr': 1},)").optim.groups == (
        Group("^probe/", lr=1.0),
    )
    assert load("--config.mesh.axis_rules.vocab=fsdp?").mesh.axis_rules == {"vocab": "fsdp?"}


def test_the_last_of_two_overrides_counts_and_a_space_may_stand_for_the_sign():
    assert load("--config.train.steps=3", "--config.train.steps", "5").train.steps == 5


def test_an_empty_workdir_is_the_default_one():
    assert load("--config.workdir=").workdir == "runs/toy"


@pytest.mark.parametrize(
    ("argument", "nearest"),
    [
        ("trian.steps=1", "'train'"),
        ("workdri=x", "'workdir'"),
        ("train.bacth=1", "'batch'"),
        ("model.whoel=1", "'whole'"),
        ("model.first.widht=1", "'width'"),
        ("data.paht=x", "'path'"),
        ("mesh.modle=1", "'model'"),
        ("mesh.rules={}", "'axis_rules'"),
        ("optim.weight_dcay=1", "'weight_decay'"),
    ],
)
def test_a_misspelt_key_is_reported_with_its_nearest_spelling(argument, nearest):
    path = argument.partition("=")[0].replace("trian.steps", "trian")
    assert f"did you mean {nearest}?" in errors(f"--config.{argument}")[path]


def test_a_misspelt_key_within_a_tuple_is_reported_by_place():
    found = errors("--config.optim.groups=({'match': 'a'}, {'mtach': 'b'})")
    assert "did you mean 'match'?" in found["optim.groups[1].mtach"]


def test_an_unknown_key_without_a_similar_name_lists_the_allowed_keys():
    assert "steps, batch" in errors("--config.train.zzzz=1")["train.zzzz"]


@pytest.mark.parametrize(
    ("argument", "wanted"),
    [
        ("model.whole=1.5", "a whole number"),
        ("model.whole=True", "a whole number"),
        ("model.whole='1'", "a whole number"),
        ("model.whole=none", "a whole number"),
        ("model.whole=", "a whole number"),
        ("model.real=fast", "a number"),
        ("model.real=True", "a number"),
        ("model.flag=1", "true or false"),
        ("model.flag=yes", "true or false"),
        ("model.pair=1", "a tuple"),
        ("model.pair=(1, 2, 3)", "2 values"),
        ("model.maybe=x", "a number"),
        ("model.table=3", "a dictionary"),
        ("model.first=3", "is a section with the fields ['width', 'bias']"),
        ("train=3", "is a section"),
    ],
)
def test_a_wrong_type_is_reported_with_the_one_that_is_expected(argument, wanted):
    path, _, value = argument.partition("=")
    text = errors(f"--config.{argument}")[path]
    assert wanted in text and value.strip("'") in text


@pytest.mark.parametrize(
    ("value", "where"),
    [("(1, 'x')", "model.pair"), ("('x',)", "model.many"), ("{'a': 'x'}", "model.table")],
)
def test_a_wrong_type_within_a_value_is_reported(value, where):
    assert "'x'" in errors(f"--config.{where}={value}")[where]


@pytest.mark.parametrize("value", ["1", True, 1.0, None, [1]])
def test_a_file_is_held_to_its_types_without_guessing(value):
    with pytest.raises(ConfigError) as error:
        config_lib.from_dict(
            {
                "workload": "toy_workload",
                "loader": "toy_loader",
                "workdir": "runs",
                "model": {"whole": value},
            }
        )
    assert dict(error.value.problems).keys() == {"model.whole"}


@pytest.mark.parametrize("value", [5, None, True, ["toy_workload"], ""])
@pytest.mark.parametrize("name", ["workload", "loader"])
def test_an_invalid_module_name_is_one_error(name, value):
    with pytest.raises(ConfigError) as error:
        config_lib.from_dict(
            {"workload": "toy_workload", "loader": "toy_loader", "workdir": "runs", name: value}
        )
    ((path, text),) = error.value.problems
    assert path == name and text.startswith(f"is {value!r}") and "; expected " in text


@pytest.mark.parametrize("value", [None, 0, False, "", ()])
@pytest.mark.parametrize("name", ["model", "data", "checkpoint"])
def test_a_section_of_the_wrong_type_is_an_error(name, value):
    with pytest.raises(ConfigError) as error:
        config_lib.from_dict(
            {"workload": "toy_workload", "loader": "toy_loader", "workdir": "runs", name: value}
        )
    ((path, text),) = error.value.problems
    assert path == name and text.startswith(f"is {value!r}; it is a section with the fields ")


def test_data_that_cannot_be_read_are_an_error_of_the_config(here):
    (here / "broken").touch()
    assert errors("--config.data.path=broken") == {"data": "shard 3 is cut short"}


def test_a_missing_dataset_is_reported_by_the_real_loader(here):
    (here / "esc10").mkdir()
    found = errors("--config.loader=loaders.audio.spectrogram", "--config.data.train=ecs10")
    assert "did you mean" in found["data.train"] and "esc10" in found["data.train"]


def test_a_missing_file_is_reported_with_those_that_exist():
    assert "did you mean 'configs/toy.py'?" in errors(source="configs/tyo.py")[""]
    assert "does not exist" in errors(source="nowhere/toy.py")[""]
    with pytest.raises(ConfigError, match="file is missing; for example --config="):
        config_lib.parse_args(["--explain"])


@installed.needs("trm")
def test_a_shipped_config_is_found_by_its_name_anywhere(here):
    config = config_lib.load("trm_sudoku:4x4", [("workdir", str(here))])
    assert config.workload == "jaxtrain.workloads.trm" and config.train.steps == 600
    found = errors(source="trm_sudoko:4x4")[""]
    assert "trm_sudoko does not exist" in found and "did you mean 'trm_sudoku'?" in found
    assert errors(source="configs/xcm.py")[""].endswith(
        "the config that jaxtrain ships is --config=xcm"
    )
    (here / "text").write_text(FILE)
    assert errors(source="text")[""] == "file text is no config; its name must end in .py"


@installed.needs("trm")
def test_a_users_config_can_change_a_shipped_one(here):
    own = (
        "from jaxtrain.configs import trm_sudoku\n\n\ndef get_config():\n    config ="
        " trm_sudoku.get_config('4x4')\n"
    )
    (here / "mine.py").write_text(f"{own}    config.train.steps = 70\n    return config\n")
    config = config_lib.load("mine.py", [("train.batch", "8"), ("train.eval_every", "0")])
    assert (config.train.steps, config.train.batch, config.optim.name) == (70, 8, "adam_atan2")


def test_a_file_that_offers_no_config_is_reported(here):
    (here / "configs" / "empty.py").write_text("config = 3\n")
    assert "defines no function get_config" in errors(source="configs/empty.py")[""]


@pytest.mark.parametrize(
    ("text", "line", "why"),
    [
        ("import no_such_module\n", 1, "ModuleNotFoundError: No module named 'no_such_module'"),
        ("x = 3\n\ndef get_config(:\n", 3, "invalid syntax"),
        ("STEPS = 3\nSTPES + 1\n", 2, "NameError: name 'STPES' is not defined"),
    ],
)
@pytest.mark.parametrize("name", ["wrong", "with_wrong"])
def test_a_file_that_cannot_be_imported_is_reported(name, text, line, why, here):
    """The same holds for a module of the user's that the file imports."""
    imported = f"wrong_in_line_{line}"  # another test may have imported its own module wrong
    (here / "configs" / f"{imported}.py").write_text(text)
    (here / "configs" / "with_wrong.py").write_text(f"import {imported}\n{FILE}")
    source = f"configs/{imported if name == 'wrong' else name}.py"
    found = errors(source=source)[""]
    assert (
        found
        == f"file {source} cannot be imported: {here}/configs/{imported}.py, line {line}: {why}"
    )


@pytest.mark.parametrize(
    ("field", "name", "place"),
    [
        ("loader", "loaders.tokens", "loaders.text.tokens"),
        ("loader", "loaders.text.token", "loaders.text.tokens"),
        ("workload", "jaxtrain.language", "jaxtrain.workloads.language"),
    ],
)
def test_a_moved_module_of_ours_is_suggested_by_its_new_place(here, field, name, place):
    found = errors(f"--config.{field}={name}")[field]
    assert found == (
        f"is {name!r}, and importing it failed: ModuleNotFoundError: No module named {name!r};"
        f" did you mean {place!r}?"
    )


@pytest.mark.parametrize(
    "line", ["import loaders.tokens", "from loaders import tokens", "from loaders.tokens import x"]
)
def test_a_file_that_imports_a_moved_module_is_told_its_new_place(here, line):
    (here / "configs" / "old.py").write_text(f"{line}\n{FILE}")
    found = errors(source="configs/old.py")[""]
    assert "old.py, line 1: " in found and found.endswith("; did you mean 'loaders.text.tokens'?")


def test_a_workload_that_cannot_be_imported_is_reported(here):
    assert (
        errors("--config.workload=toy_wrkload")["workload"]
        == "is 'toy_wrkload', and importing it failed: ModuleNotFoundError: No module named"
        " 'toy_wrkload'; did you mean 'toy_workload'?"
    )
    (here / "configs" / "cut_short.py").write_text("class Config(:\n")
    text = FILE.replace("toy_workload", "cut_short")
    (here / "configs" / "of_it.py").write_text(text)
    found = errors(source="configs/of_it.py")["workload"]
    assert (
        found
        == f"is 'cut_short', and importing it failed: {here}/configs/cut_short.py, line 1: invalid"
        " syntax"
    )


def test_a_file_that_contradicts_its_argument_is_a_config_error(here):
    text = 'def get_config(name="mine"):\n    raise ValueError(f"{name} and nothing else")\n'
    (here / "configs" / "default.py").write_text(text)
    assert errors(source="configs/default.py")[""].endswith("says: mine and nothing else")
    assert errors(source="configs/default.py:other")[""].endswith("says: other and nothing else")
    (here / "configs" / "picky.py").write_text(
        'def get_config(path=""):\n    raise ValueError(f"no data at {path!r}")\n'
    )
    assert errors(source="configs/picky.py:x") == {"": "file configs/picky.py says: no data at 'x'"}


@installed.needs("giblet")
def test_names_are_taken_as_a_shell_has_them(here):
    def load_giblet(*o):
        return config_lib.load(str(ROOT / "configs/giblet.py:blank"), [*o, ("workdir", str(here))])

    assert load_giblet(("data.subjects", "viewer-1,viewer-3")).data.subjects == (
        "viewer-1",
        "viewer-3",
    )
    assert load_giblet(("data.subjects", "viewer-1")).data.subjects == ("viewer-1",)
    assert load_giblet(("data.subjects", "('viewer-2',)")).data.subjects == ("viewer-2",)
    for text in ("('viewer-1',", "viewer-{1,2}"):
        with pytest.raises(
            ConfigError, match=r"data.subjects is .*; expected a tuple, for example \('a', 'b'\)"
        ):
            load_giblet(("data.subjects", text))
    with pytest.raises(
        ConfigError, match=r"optim.moments is 'int8', and adafactor keep no such moments"
    ):
        load_giblet(("optim.name", "adafactor"), ("optim.moments", "int8"))


def test_an_argument_that_a_file_does_not_take_is_reported(here):
    (here / "configs" / "fixed.py").write_text(
        FILE.replace('argument=""', "").replace('argument or "a"', '"a"')
    )
    assert load(source="configs/fixed.py").model.text == "a"
    assert "takes no argument, and '/data' is given" in errors(source="configs/fixed.py:/data")[""]


def test_a_config_survives_json():
    config = load(
        "--config.model.layers=({'width': 3},)",
        "--config.model.table.a=1",
        "--config.model.many=1,2",
        "--config.mesh.axis_rules.vocab=fsdp?",
        "--config.optim.groups=({'match': '^probe/', 'lr': 1e-7, 'freeze': True},)",
    )
    again = config_lib.from_dict(json.loads(config_lib.to_json(config)))
    assert again == config
    assert config_lib.to_json(again) == config_lib.to_json(config)


def test_a_saved_config_can_be_read_again(here):
    config = load()
    config_lib.save(config, here)
    assert config_lib.from_dict(json.loads((here / "config.json").read_text())) == config
    assert not list(here.glob(".config.json*"))


def test_a_home_is_expanded_and_an_unknown_one_is_named_with_the_other_errors(here, monkeypatch):
    monkeypatch.setenv("HOME", str(here))
    assert load("--config.workdir=~/runs").workdir == str(here / "runs")
    found = errors("--config.workdir=~no-such-user/x", "--config.train.steps=-1")
    assert "no such home" in found["workdir"] and "train.steps" in found
