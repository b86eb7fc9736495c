"""No command writes to, trains from or deletes another run's checkpoints and records."""

import hashlib
import json
import os
import shutil
import subprocess
import sys

import pytest

from jaxtrain import cli
from jaxtrain import config as config_lib
from jaxtrain.checkpoint import run_identity
from jaxtrain.parallel.lease import WorkdirError
from tests.support import processes, small_runs
from tests.support.processes import command, run

SMALL = ("--config.train.steps=4", "--config.checkpoint.every=2", "--config.train.eval_every=0")


@pytest.fixture
def folder(tmp_path):
    """A folder with a config of the toy that names every output."""
    write_toy(tmp_path)
    return tmp_path


def write_toy(folder):
    outputs = "checkpoint=dict(every=2, folder='saves'),"
    text = small_runs.TOY.replace("checkpoint=dict(every=10),", outputs)
    assert outputs in text
    (folder / "toy.py").write_text(text)
    return folder / "toy.py"


def refused(folder, *overrides) -> str:
    process = command(folder, "toy.py", *SMALL, *overrides)
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 2, output
    return output


def digests(folder) -> dict[str, str]:
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


@pytest.mark.slow
def test_prove_leaves_the_checkpoints_of_a_config_alone(folder, monkeypatch, capsys):
    from jaxtrain.commands import prove

    run(folder, "toy.py", *SMALL)
    before = digests(folder / "saves") | digests(folder / "runs")
    assert any("saves/4/" in path for path in before)
    monkeypatch.chdir(folder)
    monkeypatch.setenv("PYTHONPATH", f"{processes.ROOT}:{folder}")
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    options = ["--minutes", "0", "--steps", "8", "--kills", "1", "--out", "proof"]
    # a tracker whose package is missing, and scores that end a run
    options += ["--config.metrics.mlflow_experiment=mine", "--config.metrics.tensorboard=true"]
    options += ["--config.train.patience=3", "--config.train.target=0"]
    assert prove.main(["--config=toy.py", "--config.checkpoint.best=-loss", *options]) == 0
    assert "the last checkpoint" in capsys.readouterr().out
    assert (folder / "proof" / "undisturbed" / "checkpoints" / "8").exists()
    assert digests(folder / "saves") | digests(folder / "runs") == before


def test_every_output_of_a_config_is_taken_from_a_run_of_a_command():
    """A field that names a place for results is either empty by default and in the table, or in
    the workdir."""
    sections = {"checkpoint": config_lib.Checkpoint(), "metrics": config_lib.Metrics()}
    ends = ("folder", "_project", "_experiment", "tensorboard")
    outputs = {
        f"{section}.{name}"
        for section, values in sections.items()
        for name in vars(values)
        if name.endswith(ends)
    }
    outputs.add("checkpoint.memory_every")  # steps in shared memory
    assert outputs == set(config_lib.WITHOUT_OUTPUTS)


def test_a_run_is_refused_the_folder_of_another(folder):
    run(folder, "toy.py", *SMALL)
    before = digests(folder / "saves")
    text = refused(folder, "--config.workdir=other", "--config.train.steps=8")
    assert "saves has the checkpoints of another run" in text
    assert str(folder / "runs" / "toy") in text
    assert digests(folder / "saves") == before
    # deleting the file that the message names gives the folder to the other run
    (folder / "saves" / "run.json").unlink()
    output = run(folder, "toy.py", *SMALL, "--config.workdir=other", "--config.train.steps=8")
    assert "resuming from step 4" in output


def test_a_moved_workdir_keeps_its_folder_and_a_copy_is_refused(folder):
    run(folder, "toy.py", *SMALL)
    shutil.copytree(folder / "runs" / "toy", folder / "copy")
    assert "is a copy of" in refused(folder, "--config.workdir=copy", "--config.train.steps=8")
    shutil.rmtree(folder / "copy")
    shutil.move(folder / "runs" / "toy", folder / "moved")
    output = run(folder, "toy.py", *SMALL, "--config.workdir=moved", "--config.train.steps=8")
    assert "resuming from step 4" in output
    assert json.loads((folder / "saves" / "run.json").read_text())["workdir"] == str(
        folder / "moved"
    )


def test_a_workdir_that_was_lost_is_resumed_at_its_path(folder):
    run(folder, "toy.py", *SMALL)
    shutil.rmtree(folder / "runs")
    assert "resuming from step 4" in run(folder, "toy.py", *SMALL, "--config.train.steps=6")


def test_a_folder_in_the_workdir_of_another_run_is_refused(folder):
    run(folder, "toy.py", *SMALL, "--config.checkpoint.folder=", "--config.workdir=first")
    (folder / "link").symlink_to(folder / "first" / "checkpoints")
    (folder / "third").mkdir()
    (folder / "third" / "checkpoints").symlink_to(folder / "first" / "checkpoints")
    before = digests(folder / "first")
    for workdir, taken in (
        ("second", "first/checkpoints"),
        ("second", "link"),
        ("second", "first"),
        ("third", ""),
    ):
        place = [f"--config.workdir={workdir}", f"--config.checkpoint.folder={taken}"]
        text = refused(folder, *place)
        assert "is in the workdir of another run" in text and "config.resume.path" in text
    assert digests(folder / "first") == before


def test_links_of_two_workdirs_to_one_folder_are_refused(tmp_path):
    """Checkpoints may lie on another disk, but not those of two runs in one folder."""
    (tmp_path / "scratch").mkdir()
    configs = []
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "checkpoints").symlink_to(tmp_path / "scratch")
        overrides = [("workdir", str(tmp_path / name)), ("checkpoint.folder", "")]
        configs.append(config_lib.load(str(write_toy(tmp_path)), overrides))
    folders = [run_identity.folder_elsewhere(config) for config in configs]
    assert folders[0] == str(tmp_path / "first" / "checkpoints")
    run_identity.claim(configs[0].workdir, folders[0])
    run_identity.claim(configs[0].workdir, folders[0])
    with pytest.raises(WorkdirError, match="has the checkpoints of another run, .*first"):
        run_identity.claim(configs[1].workdir, folders[1])
    (tmp_path / "first" / "checkpoints").unlink()
    assert run_identity.folder_elsewhere(configs[0]) == ""


def test_a_damaged_owner_is_named(folder):
    run(folder, "toy.py", *SMALL)
    (folder / "saves" / "run.json").write_text('{"run": 3}')
    text = refused(folder, "--config.train.steps=8")
    assert "saves/run.json does not name the run" in text


def test_a_folder_in_the_home_is_one_folder_for_checkpoints_and_for_the_lease(folder, tmp_path):
    home = tmp_path / "home"
    home.mkdir()
    run(folder, "toy.py", *SMALL, "--config.checkpoint.folder=~/saves", HOME=str(home))
    assert {"4", "run.json"} <= {path.name for path in (home / "saves").iterdir()}
    assert not (folder / "~").exists()


def test_a_full_disk_leaves_no_part_of_the_file_that_names_the_run(tmp_path):
    """Else the next start would be refused, and a user would have to delete it."""
    program = (
        "import resource, sys\n"
        "from jaxtrain.checkpoint import run_identity\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (5, 5))\n"
        "run_identity.claim(sys.argv[1], sys.argv[2])\n"
    )
    folders = [tmp_path / "workdir", tmp_path / "saves"]
    for folder in folders:
        folder.mkdir()
    command = [sys.executable, "-c", program, *map(str, folders)]
    environment = {**os.environ, "PYTHONPATH": str(processes.ROOT), "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert "OSError" in done.stderr, done.stderr
    run_identity.claim(*map(str, folders))
    names = [json.loads((folder / "run.json").read_text()) for folder in folders]
    assert names[0] == names[1] and names[0]["workdir"] == str(folders[0])


def test_points_of_a_sweep_have_folders_of_their_own(folder, monkeypatch):
    text = (folder / "toy.py").read_text()
    sweep = "\ndef sweeps():\n    yield {'optim.lr': 1e-3}\n    yield {'optim.lr': 3e-4}\n"
    (folder / "swept.py").write_text(text + sweep)
    monkeypatch.chdir(folder)
    points = [config for config, _ in config_lib.sweeps("swept.py")]
    assert [config.checkpoint.folder for config in points] == ["saves/000", "saves/001"]
    shared = "\ndef sweeps():\n    for lr in (1, 2):\n"
    shared += "        yield {'optim.lr': lr, 'checkpoint.folder': 'one'}\n"
    (folder / "shared.py").write_text(text + shared)
    with pytest.raises(config_lib.ConfigError, match="'one' in more than one sweep"):
        config_lib.sweeps("shared.py")


@pytest.mark.parametrize("inside", ["", "checkpoints", "checkpoints/4"])
def test_no_output_is_written_into_a_run(tmp_path, monkeypatch, capsys, inside):
    monkeypatch.chdir(tmp_path)
    out = tmp_path / "other" / inside
    out.mkdir(parents=True)
    for name in ("config.json", "metrics.jsonl"):
        (tmp_path / "other" / name).touch()
    for argv in (
        ["checkpoint", "export", "run"],
        ["prove", "--minutes=0"],
        ["replay", "run", "--step=3"],
    ):
        with pytest.raises(SystemExit):
            cli.main([*argv, "--out", str(out)])
        said = capsys.readouterr().err
        assert f"{out} is in the workdir of a run, {tmp_path}/other; name another folder" in said


def test_tokens_are_not_written_among_other_files(tmp_path, capsys):
    (tmp_path / "notes.txt").write_text("a text")
    argv = ["tokens", str(tmp_path), str(tmp_path / "notes.txt"), "--tokenizer=bytes"]
    assert cli.main(argv) == 2
    assert "holds other files, such as notes.txt; name a new folder" in capsys.readouterr().err
    (tmp_path / "train").mkdir()
    argv[1] = str(tmp_path / "train")
    assert cli.main(argv) == 0
