"""A resumed run trains the function that its checkpoint holds, on the weights that it froze; else it says why not."""

import json
import pathlib
import shutil

import pytest

from jaxtrain import config as config_lib
from jaxtrain import loop
from jaxtrain.checkpoint import CheckpointError, base_weights
from jaxtrain.commands import checkpoint, export, lora_to_peft
from tests.support import small_runs

LORA = {"lora__rank": "2", "lora__alpha": "8", "warm_start__source": "A", "seed": "1"}


def train(workdir, **fields):
    overrides = {name.replace("__", "."): value for name, value in fields.items()}
    result = loop.run(config_lib.load("cfg.py", [("workdir", str(workdir)), *overrides.items()]))
    return result.evaluation.get("cross_entropy")


def adapters(workdir, **fields):
    return train(workdir, **{**LORA, **fields})


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A base at steps 2 and 4; adapters B and K on its step 2; the end of B, trained before A went on."""
    folder = tmp_path_factory.mktemp("runs")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        small_runs.of_bytes(folder)
        train("A")
        adapters("B")
        adapters("K", warm_start__keep="true")
        shutil.copytree("B", "before")
        ended = adapters("before", train__steps="4")
        assert export.main(["B", "--out", "exported"]) == 0
        train("A", train__steps="4")
    return folder, ended


@pytest.fixture
def folder(runs, tmp_path, monkeypatch):
    shutil.copytree(runs[0], tmp_path / "all", copy_function=shutil.copy)
    monkeypatch.chdir(tmp_path / "all")
    return tmp_path / "all"


def weights(folder):
    return (folder / "model.safetensors").read_bytes()


def test_a_base_that_trains_on_changes_nothing(runs, folder):
    record = json.loads((folder / "B" / "checkpoints" / "2" / "data" / "metadata").read_text())["base"]
    assert record["source"] == str(runs[0] / "A" / "checkpoints" / "2") and record["named"] == "A"
    assert adapters("B", train__steps="4") == runs[1]
    assert export.main(["B", "--step", "2", "--out", "again"]) == 0
    assert weights(folder / "again") == weights(folder / "exported")


def test_a_base_that_is_gone_or_differs_ends_every_command_that_needs_it(runs, folder, capsys):
    record = folder / "B" / "checkpoints" / "2" / "data" / "metadata"
    record.write_text(record.read_text().replace(str(runs[0]), str(folder)))  # the copy's own A
    (folder / "B" / "checkpoints" / "2" / "manifest.json").unlink()
    (folder / "A" / "checkpoints" / "2").rename(folder / "elsewhere")
    commands = (
        lambda name: export.main(["B", "--out", name]),
        lambda name: lora_to_peft.main(["B", "--out", name]),
        lambda name: checkpoint.main(["export", "B", "--out", name]),
    )
    for i, command in enumerate(commands):
        assert command(f"out{i}") != 0 and not (folder / f"out{i}").exists()
        found = capsys.readouterr().err
        assert f"{folder}/A/checkpoints/2, digest " in found and "gone or differ" in found
    with pytest.raises(CheckpointError, match=r"gone or differ.*--config.resume.allow=warm_start.source"):
        adapters("B", train__steps="4")
    assert export.main(["B", "--base", "A", "--out", "wrong"]) != 0
    assert "holds other weights" in capsys.readouterr().err
    assert export.main(["B", "--base", "elsewhere", "--out", "right"]) == 0
    assert weights(folder / "right") == weights(folder / "exported")


def test_a_kept_base_is_used_when_its_run_is_gone(runs, folder):
    shutil.rmtree(folder / "A")
    assert export.main(["K", "--out", "kept"]) == 0
    assert weights(folder / "kept") == weights(folder / "exported")
    assert adapters("K", train__steps="4") == runs[1]


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"lora__alpha": "64", "model__window": "2"}, r"model.window: 0 saved, 2 now; .*lora.alpha: 8.0 saved, 64.0 now"),
        ({"optim__name": "lion", "train__ema": "0.9"}, r"other arrays.*ema: 0.0 saved, 0.9 now; .*'adamw' saved, 'lion' now"),
        ({"train__batch": "16"}, r"config.train.batch: 8 saved, 16 now; order: .*resume.data='restart'"),
        ({"warm_start__source": ""}, r"would be random \(config.warm_start.source: 'A' saved, '' now\)"),
        ({"warm_start__source": "A/checkpoints/4"}, r"'A' saved, 'A/checkpoints/4' now; .* holds other weights"),
        ({"warm_start__step": "4"}, r"config.warm_start.step: the run froze .*/A/checkpoints/2, 4 now"),
    ],
    ids=str,
)
def test_a_changed_field_is_named_and_nothing_is_trained(runs, monkeypatch, fields, error):
    monkeypatch.chdir(runs[0])
    with pytest.raises(CheckpointError, match=error):
        adapters("B", **{**fields, "train__steps": "4"})
    assert [step.name for step in (runs[0] / "B" / "checkpoints").iterdir()] == ["2"]


def test_a_change_that_is_meant_is_trained_and_then_recorded(folder, caplog):
    with caplog.at_level("INFO", "jaxtrain"):
        adapters("B", train__steps="4", lora__alpha="16", optim__clip="0.5", resume__allow="lora.alpha")
        assert "config.optim.clip: 1.0 saved, 0.5 now; config.lora.alpha: 8.0 saved, 16.0 now" in caplog.text
        adapters("B", train__steps="6", lora__alpha="16", warm_start__source="A/checkpoints/4", resume__allow="warm_start")
    record = json.loads((folder / "B" / "checkpoints" / "6" / "data" / "metadata").read_text())["base"]
    assert record["source"] == str(folder / "A" / "checkpoints" / "4")


def test_frozen_weights_that_were_initialised_are_named_by_no_source():
    """Not even by ".", which is where "" leads to."""
    base = base_weights.Base("", "", "0123")
    assert base.is_named("") and not base.is_named(".")


def test_a_copy_of_a_base_is_never_taken_for_another_of_the_same_name(tmp_path):
    places = []
    for name in ("one", "other"):
        (tmp_path / name / "model").mkdir(parents=True)
        (tmp_path / name / "model" / "model.safetensors").write_text(name)
        rules = config_lib.WarmStart(source=str(tmp_path / name / "model"))
        place = base_weights.keep(rules, str(tmp_path / "run"), {"one": "00000aa", "other": "00000bb"}[name])
        assert base_weights.keep(base_weights.at(rules, place), str(tmp_path / "run"), "00000cc") == place, "a copy of its own"
        places.append(place)
        base = base_weights.Base(rules.source, rules.source, f"{pathlib.Path(place).name.partition('-')[0]}123")
        assert base_weights.places(base, tmp_path / "run") == [place, rules.source]
        assert (pathlib.Path(place) / "model.safetensors").read_text() == name
    assert places[0] != places[1]
