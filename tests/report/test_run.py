"""`jaxtrain runs`: its list of the runs in a folder of workdirs, whether alive, ended, killed or
odd."""

import json
import os
import signal
import subprocess
import sys

import pyarrow.parquet as pq
import pytest

from jaxtrain import cli
from jaxtrain.parallel.lease import Lease
from jaxtrain.telemetry import goodput
from jaxtrain.telemetry.report import run as run_lib
from tests.support.reports import make


def shown(folder, capsys, *options, code=0):
    assert cli.main(["runs", str(folder), *options]) == code
    told = capsys.readouterr()
    return told.out if not code else told.err


def test_states_scores_and_restarts_are_in_the_table(tmp_path, capsys):
    top = tmp_path / "runs"
    make(top / "ended", scores=[(50, {"accuracy": 0.75}), (100, {"accuracy": 0.5})])
    make(top / "sweep" / "000", reached=40, end="", scores=[(40, {"loss": 0.25})])
    make(
        top / "sweep" / "001",
        reached=40,
        end="ended by SIGTERM after step 40, saved in x",
        checkpoint={"best": "-error"},
    )
    make(top / "failed", reached=40, end="disk full")
    make(top / "older", reached=40, end=None)
    make(top / "ended" / "checkpoints" / "no-run")
    make(top / "export")
    (top / "export" / "jaxtrain.json").write_text("{}")
    (top / "empty").mkdir()
    (top / "loop").symlink_to(top)
    for again, step, end in (
        (goodput.Clock(), None, "ConfigError: model.width"),
        (goodput.Clock(), 100, "ended"),
    ):
        again.open(str(top / "ended"), process=0, processes=1, facts={})
        if step is not None:  # the first one is refused, which is no restart
            again.steps(step)
        again.close(end)
    rows = {row["run"]: row for row in map(json.loads, shown(top, capsys, "--json").splitlines())}
    states = {name: (row["state"], row["step"], row["steps"]) for name, row in rows.items()}
    assert states == {
        "ended": ("ended", 100, 100),
        "failed": ("failed", 40, 100),
        "older": ("stopped", 40, 100),
        "sweep/000": ("killed", 40, 100),
        "sweep/001": ("saved", 40, 100),
    }
    found = rows["ended"]
    assert (
        found["metric"],
        found["last"],
        found["best"],
        found["best_step"],
        found["restarts"],
    ) == (
        "accuracy",
        0.5,
        0.75,
        50,
        1,
    )
    assert (
        rows["sweep/000"]["metric"] == "loss"
        and rows["sweep/000"]["best"] == 0.25
        and 0 <= found["goodput"] <= 1
    )
    assert rows["sweep/001"]["metric"] is None, (
        "its config names another score, which no evaluation has"
    )
    assert found["disk"] == sum(p.stat().st_size for p in (top / "ended").rglob("*") if p.is_file())
    table = shown(top, capsys, "--metric=-loss").splitlines()
    assert table[0].split()[:5] == ["run", "state", "step", "saved", "left"] and len(table) == 6
    assert next(line for line in table if line.startswith("sweep/000")).split()[1:3] == [
        "killed",
        "40/100",
    ]


def test_a_run_that_trains_is_seen_and_one_that_was_killed(tmp_path, capsys):
    path = make(tmp_path / "run", reached=40, end=None)
    with Lease([str(path)]):
        [row] = map(json.loads, shown(tmp_path, capsys, "--json").splitlines())
        assert row["state"] == "training" and row["eta_seconds"] == 65.0
        assert " 0:01:05 " in shown(tmp_path, capsys)
    code = (
        "import os, signal; from jaxtrain.parallel.lease import Lease;"
        f" Lease([{str(path)!r}]).__enter__()"
    )
    code += "; os.kill(os.getpid(), 9)"
    killed = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    )
    assert killed.returncode == -signal.SIGKILL and (path / "lease.json").exists()
    assert json.loads(shown(tmp_path, capsys, "--json"))["state"] == "stopped"


def test_jobs_that_wait_in_a_queue_are_listed_also_before_their_first_start(
    tmp_path, capsys, monkeypatch
):
    """A stand-in for SLURM's squeue answers here. tests/commands/test_launch_slurm.py asks a real
    one."""
    top, tools = tmp_path / "runs", tmp_path / "tools"
    make(top / "again", reached=40, end="ended by SIGTERM after step 40")
    make(top / "sweep" / "000", reached=40, end="disk full")
    for folder, job, name in (
        ("again", "7", ""),
        ("sweep", "8_0", "000"),
        ("sweep", "8_1", "001"),
        ("gone", "9", ""),
    ):
        (top / folder / "slurm").mkdir(parents=True, exist_ok=True)
        with (top / folder / "slurm" / "jobs.jsonl").open("a") as file:
            file.write(
                json.dumps({"job": job, "workdir": str(top / folder / name), "overrides": {}})
                + "\n"
            )
    tools.mkdir()
    (tools / "squeue").write_text("#!/bin/sh\necho 7; echo 8_1; echo 1234\n")
    (tools / "squeue").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tools}:{os.environ['PATH']}")
    rows = {row["run"]: row for row in map(json.loads, shown(top, capsys, "--json").splitlines())}
    assert {name: (row["state"], row["step"]) for name, row in rows.items()} == {
        "again": ("queued", 40),
        "sweep/000": ("failed", 40),
        "sweep/001": ("queued", 0),
    }
    assert rows["sweep/001"]["workdir"] == str(top / "sweep" / "001")
    (tools / "squeue").write_text("#!/bin/sh\nexit 1\n")
    assert "queued" not in shown(top, capsys)


def test_a_file_that_is_cut_short_or_odd_costs_its_part_alone(tmp_path, capsys):
    path = make(tmp_path / "run", scores=[(100, {"accuracy": 0.5})])
    with (path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 1e9, "split": "test"}\n{"step": 110, "split": "train", "lo')
    (path / "goodput" / "process-0.jsonl").write_bytes(b"\0" * 100)
    make(tmp_path / "next")
    (tmp_path / "next" / "metrics.jsonl").unlink()
    (tmp_path / "next" / "metrics.jsonl").symlink_to("/etc/passwd")
    rows = {
        row["run"]: row for row in map(json.loads, shown(tmp_path, capsys, "--json").splitlines())
    }
    assert (
        rows["run"]["step"] == 100 and rows["run"]["best"] == 0.5 and rows["run"]["goodput"] is None
    )
    assert rows["next"]["best"] is None
    assert "nowhere does not exist; expected a folder with runs" in shown("nowhere", capsys, code=2)
    (tmp_path / "none").mkdir()
    assert shown(tmp_path / "none", capsys) == f"no run in {tmp_path / 'none'}, nor below it\n"


def test_a_record_that_is_a_link_out_of_the_run_is_left_out(tmp_path):
    (tmp_path / "theirs.jsonl").write_text('{"step": 1, "prompt": "private"}\n')
    run, name = tmp_path / "run", "generations.jsonl"
    run.mkdir()
    (run / name).symlink_to("../theirs.jsonl")
    assert run_lib.objects(run / name) == []
    (run / "renamed.jsonl").write_bytes((tmp_path / "theirs.jsonl").read_bytes())
    (run / name).unlink()
    (run / name).symlink_to("renamed.jsonl")
    assert len(run_lib.objects(run / name)) == 1


def test_fields_in_which_configs_differ():
    configs = {
        "a": {"workdir": "a", "optim": {"lr": 1}, "groups": []},
        "b": {"workdir": "b", "optim": {"lr": 2}, "seed": 0},
    }
    assert run_lib.differences(configs) == {
        "groups": {"a": [], "b": None},
        "optim.lr": {"a": 1, "b": 2},
        "seed": {"a": None, "b": 0},
    }
    with pytest.raises(run_lib.RunError, match="holds neither config.json nor metrics.jsonl"):
        run_lib.open_run("/")


def test_the_records_of_runs_become_one_table(tmp_path, capsys):
    a = make(tmp_path / "a", reached=30, scores=[(30, {"accuracy": 0.5})], end=None)
    b = make(tmp_path / "b", reached=10, end=None)
    with (a / "metrics.jsonl").open("a") as file:
        file.write("odd\n")
    assert cli.main(["metrics", str(a), str(b), "--out", str(tmp_path / "m.parquet")]) == 0
    assert "5 records, 3 metrics; 1 lines are no records" in capsys.readouterr().out
    rows = pq.read_table(tmp_path / "m.parquet").to_pylist()
    found = {(r["run"], r["split"], r["step"]): (r["loss"], r["accuracy"]) for r in rows}
    expected = {(str(a), "train", s): (1 / s, None) for s in (10, 20, 30)} | {
        (str(b), "train", 10): (0.1, None)
    }
    assert found == expected | {(str(a), "test", 30): (1.0, 0.5)}
    (b / "metrics.jsonl").write_text("")
    assert cli.main(["metrics", str(b), "--out", str(tmp_path / "n.parquet")]) == 2
    assert (
        "no record in metrics.jsonl" in capsys.readouterr().err
        and not (tmp_path / "n.parquet").exists()
    )


def test_digests_that_cannot_be_read_are_named_and_not_passed_over(tmp_path, capsys):
    first, second = (make(tmp_path / name) for name in ("first", "second"))
    assert cli.main(["diff", str(first), str(second)]) == 0, "without digests"
    (second / "digests.jsonl").mkdir()
    assert cli.main(["diff", str(first), str(second)]) == 2
    assert "digests.jsonl" in capsys.readouterr().err


def test_commands_that_read_runs_import_slow_packages_after_their_arguments():
    for command in ("diff", "prove", "replay", "runs"):
        seen = "print([name for name in ('numpy', 'pyarrow', 'jax') if name in sys.modules])"
        code = f"import sys; from jaxtrain.commands import {command}; {seen}"
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True
        )
        assert done.stdout == "[]\n", command
