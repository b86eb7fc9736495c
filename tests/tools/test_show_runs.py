"""Recipes for a card: their pages, their stages, and a call that is cut off."""

import json
import re

import pytest

from jaxtrain import config as config_lib
from tests import docs_data
from tools import show_runs


@pytest.mark.parametrize("name", ["sudoku-medium", "sudoku-hard"])
def test_a_recipe_of_boards_is_a_config_without_errors(name):
    [config] = show_runs.RECIPES[name].stages.values()
    run = config_lib.load(config)
    assert run.model.contract == "last" and run.model.rollouts > 1
    assert [source.grade for source in run.data.sources] == [name.partition("-")[2]]


def test_a_section_is_replaced_by_the_same_run_and_kept_by_others():
    page = show_runs.with_section("# A\n\ntext\n", "birds, seed 0", "one")
    page = show_runs.with_section(page, "birds, seed 1", "another")
    page = show_runs.with_section(page, "birds, seed 0", r"newer \1")
    assert page.startswith("# A\n\ntext\n") and "one" not in page
    assert page.index("newer \\1") < page.index("another")


def test_the_section_has_seed_curve_and_command(tmp_path):
    records = [{"step": n, "split": "test", "cross_entropy": 2 - n / 100} for n in range(30)]
    records.append({"step": 29, "split": "train", "loss": 1.0})
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    recipe = show_runs.RECIPES["characters"]
    curve = show_runs.curve(tmp_path, recipe.metrics)
    assert len(curve) <= show_runs.MAX_POINTS and curve[-1]["step"] == 29
    text = show_runs.section("characters", recipe, 3, ["jaxtrain train"], {"a": curve}, "H100")
    assert "seed 3" in text and "jaxtrain train" in text and "one H100" in text
    assert re.search(r"\| 29 \| 1.7100 \|$", text, re.M), text


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["birds"], "birds needs the folder of ESC-10"),
        (["birds", "--data=/no/such"], "/no/such: there is no such file or folder"),
        (["sudoku-hard", "--small"], "give --page"),
        (["dogs"], "invalid choice"),
        (["sudoku-hard", "--page=/no/such/x.md"], "/no/such is no folder; make it first"),
        (["birds", "--data=docs"], "--data=docs: config.data.train is 'docs'"),
    ],
)
def test_bad_arguments_have_a_remedy(arguments, expected, capsys):
    with pytest.raises(SystemExit):
        show_runs.main(arguments)
    assert expected in capsys.readouterr().err


def test_a_run_is_of_one_device(tmp_path, monkeypatch, capsys):
    """Else a run that one card began would be the other's when it ends."""
    asked = []
    monkeypatch.setattr(show_runs, "train", lambda command, _: asked.append(command) or 3)
    command = ["sudoku-hard", f"--out={tmp_path}", f"--page={tmp_path / 'x.md'}"]
    monkeypatch.setattr(show_runs, "this_device", lambda: ("NVIDIA H100", "h100"))
    assert show_runs.main(command) == 3 and show_runs.main(command) == 3
    monkeypatch.setattr(show_runs, "this_device", lambda: ("NVIDIA H200", "h200"))
    assert show_runs.main(command) == 2 and len(asked) == 2
    monkeypatch.setattr(show_runs, "this_device", lambda: (show_runs.NO_DEVICE,) * 2)
    assert show_runs.main(command) == 2 and len(asked) == 2
    said = capsys.readouterr().err
    assert "JAX finds no device" in said
    assert "has runs of NVIDIA H100, and this machine has NVIDIA H200" in said and "--out" in said


def test_a_run_whose_time_is_over_is_asked_to_save(monkeypatch, capsys):
    """A stand-in for a run: it ends with 75 as soon as it is told to."""
    program = "trap 'exit 75' TERM; while :; do sleep 0.1; done"
    start = show_runs.subprocess.Popen
    monkeypatch.setattr(
        show_runs.subprocess, "Popen", lambda *_, **__: start(["sh", "-c", program])
    )
    assert show_runs.train(["jaxtrain"], 0) == 3
    assert "the same command resumes it" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("name", ["characters", "birds"])
def test_a_recipe_of_files_ends_in_its_small_form(name, tmp_path, monkeypatch):
    """The birds are two runs: the second begins with the encoder of the first."""
    monkeypatch.delenv("XLA_FLAGS", raising=False)  # of the tests: eight devices
    text = tmp_path / "input.txt"
    text.write_text("ROMEO: the wren sings, and the owl sleeps\n" * 400)
    if name == "birds":
        docs_data.birds(tmp_path)
    data = {"characters": text, "birds": tmp_path / "data" / "esc10"}[name]
    page, out = tmp_path / "page.md", tmp_path / "out"
    command = [name, f"--data={data}", f"--page={page}", f"--out={out}", "--small"]
    assert show_runs.main(command) == 0
    written = page.read_text()
    assert f"<!-- run {name}, seed 0, cpu begins -->" in written
    for stage in show_runs.RECIPES[name].stages:
        assert f"| {stage}: step |" in written
        run = json.loads((out / "seed-0" / stage / "config.json").read_text())
        assert run["train"]["steps"] == 4
    if name == "characters":
        assert run["model"]["dropout"] == run["model"]["attention_dropout"] == 0.2
    else:
        assert run["warm_start"]["source"].endswith("esc10-mae")
