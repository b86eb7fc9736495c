"""A config out of a file and a command line: read with its types, or refused with all its mistakes at once."""

import dataclasses
import json
import os
import pathlib
import runpy
import subprocess
import sys

import pytest

from jaxtrain import config as config_lib
from jaxtrain.config import Config, ConfigError, Group
from jaxtrain.nn import augment, masked
from jaxtrain.nn.layers import Rope
from jaxtrain.workloads import bird, language
from loaders import spectrogram

ROOT = pathlib.Path(__file__).parents[2]

# A workload and a loader whose fields have every type that a field may have, and which need no data on disk.
WORKLOAD = '''
from dataclasses import dataclass, field
from jaxtrain.config import ModelSection

@dataclass(frozen=True)
class Layer:
    """One layer."""

    width: int = 8  # [values] of its output
    bias: bool = True  # [bool] whether it has one

@dataclass(frozen=True)
class Config(ModelSection):
    """A toy."""

    n_classes: int | None = None  # [classes] None = what the data say
    whole: int = 1  # [1] a whole number
    real: float = 0.5  # [1] a number
    text: str = "a"  # [name] some text
    flag: bool = False  # [bool] a switch
    pair: tuple[int, int] = (1, 2)  # [1] two numbers
    many: tuple[float, ...] = ()  # [1] any number of numbers
    maybe: float | None = None  # [1] a number or nothing
    table: dict[str, float] = field(default_factory=dict)  # [name: 1] named numbers
    first: Layer = field(default_factory=Layer)  # [section]
    layers: tuple[Layer, ...] = ()  # [layers] any number of layers

    def problems(self):
        if self.whole < 0:
            yield "whole", f"is {self.whole}; it must not be negative"

    def data_problems(self, facts):
        if self.n_classes != facts["n_classes"]:
            yield "n_classes", f"is {self.n_classes}, and the data have {facts['n_classes']} classes"
'''
LOADER = '''
import os
from dataclasses import dataclass
from jaxtrain.config import DataSection

@dataclass(frozen=True)
class Config(DataSection):
    """Toy data."""

    path: str = ""  # [path] of the data; empty = none needed

    def problems(self):
        if self.path and not os.path.exists(self.path):
            yield "path", f"is {self.path!r}, which does not exist"

def facts(config):
    if config.path.endswith("broken"):
        raise ValueError("shard 3 is cut short")
    return {"n_classes": 3, "n_train": 7}
'''
FILE = """
def get_config(argument=""):
    return dict(workload="toy_workload", loader="toy_loader", model=dict(text=argument or "a"), train=dict(batch=32))
"""


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    """A folder with toy modules and configs/toy.py, where the test runs."""
    (tmp_path / "configs").mkdir()
    (tmp_path / "toy_workload.py").write_text(WORKLOAD)
    (tmp_path / "toy_loader.py").write_text(LOADER)
    (tmp_path / "configs" / "toy.py").write_text(FILE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("toy_workload", "toy_loader"):
        sys.modules.pop(name, None)
    return tmp_path


def load(*arguments, source="configs/toy.py"):
    found = config_lib.parse_args([f"--config={source}", *arguments])
    return config_lib.load(found.source, found.overrides)


def mistakes(*arguments, source="configs/toy.py"):
    """{path: text} of everything that is wrong."""
    with pytest.raises(ConfigError) as error:
        load(*arguments, source=source)
    for path, text in error.value.problems:
        assert (f"  config.{path} {text}" if path else f"  {text}") in str(error.value)
    assert len(dict(error.value.problems)) == len(error.value.problems)
    return dict(error.value.problems)


def test_a_file_states_what_differs_and_the_rest_is_the_default():
    config = load()
    assert (config.train.batch, config.model.text, config.workdir) == (32, "a", "runs/toy")
    assert config.optim == config_lib.Optim() and config.train.steps == config_lib.Train().steps
    assert config.model.n_classes == 3  # a fact of the data


def test_a_file_takes_an_argument_with_any_text():
    assert load(source="configs/toy.py:/data/a:b=c").model.text == "/data/a:b=c"


def test_options_of_the_compiler_are_read_as_they_are_written_and_named_by_xla():
    assert load("--config.compiler.xla_a=true", "--config.compiler.xla_b=98304", "--config.compiler.xla_c=/d").compiler == {
        "xla_a": "true",
        "xla_b": 98304,
        "xla_c": "/d",
    }
    found = mistakes("--config.compiler.--xla_a=1", "--config.compiler.fast=1", "--config.compiler.xla_b=(1, 2)")
    assert "say xla_a" in found["compiler.--xla_a"] and "begin with xla_" in found["compiler.fast"]
    assert found["compiler.xla_b"] == "is (1, 2) (tuple); expected true or false, a number or a string"


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
    found = getattr(load(f"--config.model.{argument}").model, argument.partition("=")[0].partition(".")[0])
    assert found == value and type(found) is type(value)
    if isinstance(value, tuple):
        assert [type(x) for x in found] == [type(x) for x in value]


def test_sections_within_sections_are_read_too():
    model = load("--config.model.first.width=5", "--config.model.layers=({'width': 3}, {'bias': False})").model
    assert (model.first.width, model.first.bias) == (5, True)
    assert [(layer.width, layer.bias) for layer in model.layers] == [(3, True), (8, False)]
    assert load("--config.optim.groups=({'match': '^probe/', 'lr': 1},)").optim.groups == (Group("^probe/", lr=1.0),)
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
def test_a_misspelt_key_is_told_with_its_nearest_spelling(argument, nearest):
    path = argument.partition("=")[0].replace("trian.steps", "trian")
    assert f"did you mean {nearest}?" in mistakes(f"--config.{argument}")[path]


def test_a_misspelt_key_within_a_tuple_is_told_by_place():
    found = mistakes("--config.optim.groups=({'match': 'a'}, {'mtach': 'b'})")
    assert "did you mean 'match'?" in found["optim.groups[1].mtach"]


def test_a_key_that_is_like_no_other_lists_what_there_is():
    assert "steps, batch" in mistakes("--config.train.zzzz=1")["train.zzzz"]


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
def test_a_wrong_type_is_told_with_the_one_that_is_wanted(argument, wanted):
    path, _, value = argument.partition("=")
    text = mistakes(f"--config.{argument}")[path]
    assert wanted in text and value.strip("'") in text


@pytest.mark.parametrize(
    ("value", "where"), [("(1, 'x')", "model.pair"), ("('x',)", "model.many"), ("{'a': 'x'}", "model.table")]
)
def test_a_wrong_type_within_a_value_is_told(value, where):
    assert "'x'" in mistakes(f"--config.{where}={value}")[where]


@pytest.mark.parametrize("value", ["1", True, 1.0, None, [1]])
def test_a_file_is_held_to_its_types_without_guessing(value):
    with pytest.raises(ConfigError) as error:
        config_lib.from_dict({"workload": "toy_workload", "loader": "toy_loader", "workdir": "runs", "model": {"whole": value}})
    assert dict(error.value.problems).keys() == {"model.whole"}


@pytest.mark.parametrize(
    ("arguments", "path", "told"),
    [
        (["train.batch=10", "train.accumulate=4"], "train.batch", "accumulate=4"),
        (["train.batch=36", "mesh.data=8"], "train.batch", "32 and 40"),
        (["train.batch=32", "mesh.data=2", "mesh.fsdp=2", "train.accumulate=16"], "train.batch", "64"),
        (["train.steps=0"], "train.steps", "at least 1"),
        (["train.ema=1"], "train.ema", "[0, 1)"),
        (["optim.schedule=cosin"], "optim.schedule", "did you mean 'cosine'?"),
        (["optim.name=adam"], "optim.name", "adamw"),
        (["optim.lr=0"], "optim.lr", "positive"),
        (["optim.decay=5"], "optim.decay", "schedule is 'cosine'"),
        (["optim.warmup=50", "train.steps=40"], "optim.warmup", "train.steps=40"),
        (["optim.schedule=wsd", "optim.warmup=30", "optim.decay=20", "train.steps=40"], "optim.decay", "train.steps=40"),
        (["optim.b2=1"], "optim.b2", "[0, 1)"),
        (["optim.decayed=("], "optim.decayed", "not a regular expression"),
        (["optim.groups=({'match': '['},)"], "optim.groups[0].match", "not a regular expression"),
        (["optim.groups=({'match': 'w', 'lr': -1},)"], "optim.groups[0].lr", "-1"),
        (["mesh.data=-1", "mesh.fsdp=-1"], "mesh.data", "only one axis"),
        (["mesh.model=0"], "mesh.model", "-1 for the rest"),
        (["mesh.axis_rules.embed=fdsp?"], "mesh.axis_rules.embed", "did you mean 'fsdp'?"),
        (["mesh.axis_rules.vocap=fsdp"], "mesh.axis_rules.vocap", "did you mean 'vocab'?"),
        (["checkpoint.every=0"], "checkpoint.every", "at least 1"),
        (["checkpoint.folder=gcs://bucket/run"], "checkpoint.folder", "did you mean 'gs'?"),
        (["metrics.every=0"], "metrics.every", "at least 1"),
        (["seed=-1"], "seed", "2**32"),
        (["model.whole=-1"], "model.whole", "negative"),
        (["model.n_classes=5"], "model.n_classes", "3 classes"),
        (["data.path=/nowhere/at/all"], "data.path", "does not exist"),
        (["workload=toy_wrkload"], "workload", "toy_wrkload"),
        (["workload=json"], "workload", "without a dataclass named Config"),
        (["workload=toy_loader"], "workload", "whose Config is not a ModelSection; derive it from jaxtrain.config"),
        (["loader=toy_workload"], "loader", "whose Config is not a DataSection; derive it from loaders.checks.DataSection"),
        (["train.batch.size=3"], "train.batch.size", "not a section"),
    ],
)
def test_a_value_that_makes_no_sense_is_told_with_the_remedy(arguments, path, told):
    found = mistakes(*[f"--config.{a}" for a in arguments])
    assert list(found) == [path]
    assert told in found[path]


def test_data_that_cannot_be_read_are_a_mistake_of_the_config(here):
    (here / "broken").touch()
    assert mistakes("--config.data.path=broken") == {"data": "shard 3 is cut short"}


def test_a_missing_dataset_is_told_by_the_real_loader(here):
    (here / "esc10").mkdir()
    found = mistakes("--config.loader=loaders.spectrogram", "--config.data.train=ecs10")
    assert "did you mean" in found["data.train"] and "esc10" in found["data.train"]


@pytest.mark.parametrize("workdir", ["file/runs", "file", "/proc/nothing/runs", "/sys/runs"])
def test_a_workdir_that_cannot_be_written_is_told(here, workdir):
    """Also to root, whom no permission stops: below a file, or where the kernel takes no files."""
    (here / "file").touch()
    if workdir.startswith("/") and not pathlib.Path(workdir).parents[-2].exists():
        pytest.skip("not a Linux machine")
    found = mistakes(f"--config.workdir={workdir}")
    assert list(found) == ["workdir"] and workdir in found["workdir"] and "choose" in found["workdir"]


def test_looking_at_a_workdir_leaves_nothing_behind(here):
    before = sorted(here.rglob("*"))
    load("--config.workdir=deep/er/runs")
    assert sorted(p for p in here.rglob("*") if "__pycache__" not in p.parts) == before


def test_all_mistakes_are_told_together(here):
    (here / "file").touch()
    found = mistakes(
        "--config.trian.steps=3",
        "--config.train.bacth=3",
        "--config.train.batch=30",
        "--config.mesh.data=8",
        "--config.model.whole=x",
        "--config.model.first.width=1.5",
        "--config.model.nothing.at.all=1",
        "--config.optim.lr=-1",
        "--config.optim.lr.peak=1",
        "--config.data.path=/nowhere",
        "--config.workdir=file/runs",
    )
    assert set(found) == {
        "trian", "train.bacth", "train.batch", "model.whole", "model.first.width", "model.nothing", "optim.lr", "optim.lr.peak",
        "data.path", "workdir",
    }  # fmt: skip


def test_unknown_arguments_are_told_with_the_mistakes_of_the_config():
    with pytest.raises(ConfigError) as error:
        load("--confg.train.steps=3", "train.steps=4", "--config.train.bacth=3", "--config.seed")
    text = str(error.value)
    assert len(error.value.problems) == 4 and text.startswith("the config has 4 mistakes:")
    for part in (
        "'--confg.train.steps=3' is unknown",
        "'train.steps=4' is unknown",
        "config.train.bacth",
        "config.seed is given",
    ):
        assert part in text


def test_a_missing_file_is_told_with_those_that_there_are():
    assert "did you mean 'configs/toy.py'?" in mistakes(source="configs/tyo.py")[""]
    assert "does not exist" in mistakes(source="nowhere/toy.py")[""]
    with pytest.raises(ConfigError, match="file is missing; say for example --config="):
        config_lib.parse_args(["--explain"])


def test_a_file_that_offers_no_config_is_told(here):
    (here / "configs" / "empty.py").write_text("config = 3\n")
    assert "defines no function get_config" in mistakes(source="configs/empty.py")[""]


def test_what_a_file_says_against_its_argument_is_a_mistake_of_the_config(here):
    text = 'def get_config(name="mine"):\n    raise ValueError(f"{name} and nothing else")\n'
    (here / "configs" / "default.py").write_text(text)
    assert mistakes(source="configs/default.py")[""].endswith("says: mine and nothing else")
    assert mistakes(source="configs/default.py:other")[""].endswith("says: other and nothing else")
    (here / "configs" / "picky.py").write_text('def get_config(path=""):\n    raise ValueError(f"no data at {path!r}")\n')
    assert mistakes(source="configs/picky.py:x") == {"": "file configs/picky.py says: no data at 'x'"}


def test_names_are_taken_as_a_shell_has_them(here):
    load_giblet = lambda *o: config_lib.load(str(ROOT / "configs/giblet.py:blank"), [*o, ("workdir", str(here))])  # noqa: E731
    assert load_giblet(("data.subjects", "viewer-1,viewer-3")).data.subjects == ("viewer-1", "viewer-3")
    assert load_giblet(("data.subjects", "viewer-1")).data.subjects == ("viewer-1",)
    assert load_giblet(("data.subjects", "('viewer-2',)")).data.subjects == ("viewer-2",)
    for text in ("('viewer-1',", "viewer-{1,2}"):
        with pytest.raises(ConfigError, match=r"data.subjects is .*; expected a tuple, for example \('a', 'b'\)"):
            load_giblet(("data.subjects", text))
    with pytest.raises(ConfigError, match=r"optim.moments is 'int8', and adafactor keep no such moments"):
        load_giblet(("optim.name", "adafactor"), ("optim.moments", "int8"))


def test_an_argument_that_a_file_does_not_take_is_told(here):
    (here / "configs" / "fixed.py").write_text(FILE.replace('argument=""', "").replace('argument or "a"', '"a"'))
    assert load(source="configs/fixed.py").model.text == "a"
    assert "takes no argument, and '/data' is given" in mistakes(source="configs/fixed.py:/data")[""]


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
    """Defaults live on the dataclasses alone, and a config that states nothing is told of nothing."""
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


def command(here, *arguments):
    """The command in a process where any use of a device fails: no such platform."""
    environment = {**os.environ, "JAX_PLATFORMS": "nonexistent", "PYTHONPATH": f"{ROOT}{os.pathsep}{here}"}
    return subprocess.run(
        [sys.executable, "-m", "jaxtrain.main", "--config=configs/toy.py", *arguments],
        cwd=here, env=environment, capture_output=True, text=True, timeout=120,
    )  # fmt: skip


def test_mistakes_are_told_before_a_device_is_touched(here):
    done = command(here, "--config.train.bacth=3", "--config.model.whole=x")
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert "config.train.bacth" in done.stderr and "config.model.whole" in done.stderr
    assert "nonexistent" in command(here).stderr  # without mistakes a device is asked for, and the platform is missed


def test_explain_touches_no_device_and_trains_nothing(here):
    done = command(here, "--explain")
    assert done.returncode == 0, done.stderr
    assert "config.train.steps" in done.stdout and not (here / "runs").exists()


def test_xcl_is_xcm_without_five_recordings(tmp_path):
    paths = {name: ROOT / "configs" / f"{name}.py" for name in ("xcm", "xcl")}
    xcm, xcl = (runpy.run_path(str(path))["get_config"](str(tmp_path)) for path in paths.values())
    assert xcl.data.exclude == (495640, 495763, 497541, 498645, 501254)
    del xcl.data.exclude
    assert xcl == xcm
