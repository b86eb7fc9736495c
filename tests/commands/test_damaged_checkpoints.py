"""Damaged weights are refused by name wherever they are read, not by a resume alone."""

import json
import pathlib
import re
import shutil

import pytest

import jaxtrain
from jaxtrain import cli
from jaxtrain.arrays.stored import StoredError
from tests.support import small_runs

ROOT = pathlib.Path(__file__).parents[2]
CONFIG = "--config=cfg.py"


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A run of two checkpoints, of which the newest has a wrong bit, and an export with one."""
    folder = small_runs.of_bytes(tmp_path_factory.mktemp("damaged"))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        command = ["train", CONFIG, "--config.workdir=run", "--config.train.steps=4"]
        assert cli.main([*command, "--config.metrics.digest=true"]) == 0
        assert cli.main(["export", "run", "--out", "whole"]) == 0
        shutil.copytree("whole", "export")
        flip(folder / "export" / "model.safetensors")
        shutil.copytree("run", "intact")
        flip(largest_file(folder / "run" / "checkpoints" / "4" / "state"))
        yield folder


def flip(path: pathlib.Path) -> None:
    """Change a bit in the middle of a file."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def largest_file(folder: pathlib.Path) -> pathlib.Path:
    paths = [path for path in folder.rglob("*") if path.is_file()]
    return max(paths, key=lambda path: path.stat().st_size)


@pytest.mark.parametrize(
    "command",
    [
        ["generate", "run", "one"],
        ["checkpoint", "export", "run", "--out", "weights"],
        ["export", "run", "--out", "weights"],
        ["generate", "export", "one"],
        ["export", "--reverse", "export", "--out", "weights"],
    ],
)
def test_no_command_computes_with_damaged_weights(runs, command, capsys):
    assert cli.main(command) == 2
    said = capsys.readouterr().err
    assert "is damaged: " in said and len(said.splitlines()) == 1
    assert "choose another step of the run: 2" in said or "export it again" in said
    assert not (runs / "weights").exists()


def test_a_script_gets_the_same_error(runs):
    with pytest.raises(StoredError, match="is damaged: state/.* choose another step of the run: 2"):
        jaxtrain.load("run")
    assert jaxtrain.load("run", step=2).params


def test_a_warm_start_refuses_a_damaged_export(runs, capsys):
    command = ["train", CONFIG, "--config.workdir=warm", "--config.warm_start.source=export"]
    assert cli.main(command) == 2
    assert "model.safetensors differs" in capsys.readouterr().err


def test_a_card_that_people_edit_is_no_damage(runs, capsys):
    (runs / "whole" / "README.md").write_text("# My model\n")
    assert cli.main(["generate", "whole", "one", "--tokens", "2"]) == 0
    assert cli.main(["checkpoint", "verify", "whole"]) == 1, "which compares every file"
    assert "README.md differs" in capsys.readouterr().out


def test_commands_that_look_into_a_checkpoint_name_the_damage(runs, capsys):
    assert cli.main(["checkpoint", "inspect", "run"]) == 1
    said = capsys.readouterr().out
    assert "checkpoints/4: state/" in said and "sha256 differs" in said.splitlines()[-1]
    assert cli.main(["checkpoint", "diff", "run", "intact"]) == 1
    assert "sha256 differs" in capsys.readouterr().out
    assert cli.main(["checkpoint", "inspect", "intact"]) == 0


def test_a_replay_begins_at_an_older_intact_checkpoint(runs, capsys):
    shutil.copytree("intact", "longer")
    command = ["train", CONFIG, "--config.workdir=longer", "--config.train.steps=6"]
    assert cli.main([*command, "--config.metrics.digest=true"]) == 0
    flip(largest_file(runs / "longer" / "checkpoints" / "4" / "state"))
    capsys.readouterr()
    assert cli.main(["replay", "longer", "--step", "6", "--no-page"]) == 0
    said = capsys.readouterr().out
    assert "checkpoints/4 is damaged, and passed over: state/" in said
    assert "identical to step 6" in said


def test_a_diff_that_can_compare_nothing_does_not_say_identical(tmp_path, capsys):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        records = [{"step": n, "split": "train", "loss": None, "grad_norm": None} for n in (1, 2)]
        lines = [json.dumps(record) + "\n" for record in records]
        (tmp_path / name / "metrics.jsonl").write_text("".join(lines))
    assert cli.main(["diff", str(tmp_path / "a"), str(tmp_path / "b")]) == 1
    said = capsys.readouterr().out
    assert "nothing is compared: of the 2 steps that a and b have both recorded, none" in said
    assert "identical" not in said


def test_all_commands_find_a_step_in_one_place():
    """`source.find` verifies. Only the modules of stored arrays and of a resume open a step."""
    allowed = ("arrays/", "checkpoint/")
    for path in sorted((ROOT / "jaxtrain").rglob("*.py")):
        name = str(path.relative_to(ROOT / "jaxtrain"))
        if not name.startswith(allowed):
            assert not re.search(r"\b(find_step|open_step)\(", path.read_text()), (
                f"{name} reads a step by itself, unverified; use arrays.source.find"
            )
