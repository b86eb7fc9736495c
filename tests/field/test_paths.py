"""Workdirs with any legal name are trained, resumed, and read by every command. Other names are
refused before the first step."""

import json
import pathlib

import jax
import numpy as np
import pytest

from jaxtrain import cli
from jaxtrain import config as config_lib
from jaxtrain.arrays import source as source_lib
from jaxtrain.checkpoint import Checkpointer, History
from jaxtrain.commands import checkpoint, export, lora_to_peft, metrics, report
from jaxtrain.commands import runs as runs_command
from jaxtrain.run import loop
from jaxtrain.workloads.language.commands import generate, tokens
from tests.support import small_runs, toy_task

HARD = " lr=1e-3,betas=[0.9, 0.95]*? {x}%20#&;'\"$~ é\u2028 "
NAMES = [HARD, "[ab]", "é" * 100, "日本" * 33, "-dash", "a\nb", "C:x", "#frag?q=1", "12"]


@pytest.mark.parametrize("name", NAMES, ids=ascii)
def test_steps_are_saved_found_and_copied(tmp_path, name):
    planned = toy_task.planned()
    config = config_lib.Config(workdir=str(tmp_path / name))
    for step in (2, 4):
        ours = Checkpointer(config, toy_task.TASK)
        found = ours.restore(planned, {"position": 0})
        assert (found.step if found else 0) == step - 2
        ours.save(
            step,
            jax.tree.map(lambda x: jax.numpy.zeros(x.shape, x.dtype), planned.state),
            {"position": 0},
            History(),
        )
        ours.close()
    source = source_lib.find(str(tmp_path / name))
    assert source.damage() == [] and source.path.name == "4"
    assert all(
        np.isfinite(np.asarray(one.read(()), np.float32)).all() for one in source.arrays().values()
    )
    assert (
        checkpoint.main(["export", str(tmp_path / name), "--out", str(tmp_path / f"{name} 2")]) == 0
    )


def train(workdir, **fields):
    overrides = {name.replace("__", "."): value for name, value in fields.items()}
    loop.run(config_lib.load("cfg.py", [("workdir", str(workdir)), *overrides.items()]))


@pytest.mark.slow
def test_every_command_works_in_a_folder_with_a_hard_name(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    folder = pathlib.Path(HARD)
    folder.mkdir()
    small_runs.of_bytes(tmp_path)
    run, adapted = str(folder / "run"), str(folder / f"a{HARD}")
    train(run, train__eval_every="1")
    train(run, train__steps="3")
    train(adapted, lora__rank="2", warm_start__source=run, warm_start__keep="true")
    prompts = folder / "prompts.jsonl"
    prompts.write_text(json.dumps("one ") + "\n")
    out = {
        name: str(folder / f"{name}{HARD}")
        for name in ("x", "peft", "merged", "back", "r.html", "m.csv", "g.jsonl", "t")
    }
    commands = [
        (export, [run, "--out", out["x"]]),
        (export, [adapted, "--out", out["merged"]]),
        (lora_to_peft, [adapted, "--out", out["peft"]]),
        (export, ["--reverse", out["x"], "--out", out["back"]]),
        *(
            (checkpoint, [action, path])
            for action in ("inspect", "verify")
            for path in (run, out["x"])
        ),
        (report, [run, "--out", out["r.html"]]),
        (metrics, [run, "--out", out["m.csv"]]),
        (runs_command, [str(folder)]),
        *(
            (
                generate,
                [path, "--prompts", str(prompts), "--tokens", "2", "--out", f"{out['g.jsonl']}{i}"],
            )
            for i, path in enumerate((run, out["merged"]))
        ),
        (tokens, [out["t"], str(folder / "p*.jsonl"), "--tokenizer", "bytes", "--skip", "1"]),
    ]
    for command, argv in commands:
        assert command.main(argv) == 0, (command.__name__, capsys.readouterr().err)
    train(str(folder / "warm"), warm_start__source=out["merged"])


FILES = (
    "fit --out",
    "search --out",
    "review --out",
    "solve --out",
    "generate --out",
    "predict --out",
    "predict --correlation",
    "encode-audio --out",
    "train-codec",
    "report --out",
    "metrics --out",
)
FOLDERS = (
    "detect --out",
    "embed --out",
    "index --out",
    "index --pictures",
    "index --unpack",
    "probe --out",
    "benchmark esc10 --out",
    "prepare --out",
    "generate-audio --out",
    "prepare-giblet --out",
    "tokens",
    "sudoku",
    "export --out",
    "lora-to-peft --out",
    "checkpoint export --out",
    "replay --out",
    "prove --out",
)


@pytest.mark.parametrize("command", [*FILES, *FOLDERS])
def test_an_output_that_cannot_be_written_is_refused_before_any_work(tmp_path, capsys, command):
    """The rest of the command line is ignored."""
    (tmp_path / "file").touch()
    (tmp_path / "folder").mkdir()
    wrong = {
        f"{tmp_path}/file/x": "Not a directory",
        str(tmp_path / ("n" * 256)): "File name too long",
    }
    wrong |= (
        {f"{tmp_path}/folder": "Is a directory"}
        if command in FILES
        else {f"{tmp_path}/file": "Not a directory"}
    )
    for out, why in wrong.items():
        with pytest.raises(SystemExit) as ended:
            cli.main([*command.split(), out])
        assert ended.value.code == 2 and f": {why}; name another path" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("a\\b", "backslash"),
        ("gs:", "address"),
        ("x\udc80", "no UTF-8"),
        ("gs://bucket/run", "is an address"),
    ],
    ids=ascii,
)
def test_paths_that_orbax_cannot_write_are_refused_before_the_first_step(
    tmp_path, monkeypatch, name, why
):
    monkeypatch.chdir(tmp_path)
    tree = {"workload": "jaxtrain.workloads.trm", "loader": "loaders.sudoku.sudoku"}
    with pytest.raises(
        config_lib.ConfigError, match=f"(?s)config.workdir is .*{why}.*choose another folder"
    ):
        config_lib.from_dict(tree | {"workdir": name})
    assert list(tmp_path.iterdir()) == []
    if "://" not in name:
        with pytest.raises(
            config_lib.ConfigError, match=f"(?s)config.checkpoint.folder is .*{why}"
        ):
            config_lib.from_dict(tree | {"workdir": "w", "checkpoint": {"folder": name}})
