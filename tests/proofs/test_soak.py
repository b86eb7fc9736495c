"""`make soak`: the files of a lap are compared with those of the first one. In the long form, a
real run has real faults."""

import json
import subprocess
import sys
import time
import types

import pytest

from jaxtrain import config as config_lib
from jaxtrain.arrays import checksums
from loaders.audio import demo
from tests.proofs import soak

SMALL = (
    "--config.model.embed=32 --config.model.depth=2 --config.model.heads=4"
    " --config.model.patch=(32,32) --config.train.steps=24 --config.train.batch=8"
    " --config.train.eval_every=0 --config.optim.warmup=0 --config.checkpoint.every=4"
    " --config.mesh.data=4 --config.data.threads=1"
).split()


def test_a_lap_that_lost_a_row_or_a_record_is_reported(tmp_path):
    def lap(number, rows, losses):
        (tmp_path / f"rows{number}-0.jsonl").write_text(
            "".join(json.dumps(row) + "\n" for row in rows) + '[1, 0, "cut'
        )
        workdir = tmp_path / soak.DISK / f"lap{number}"
        workdir.mkdir(parents=True)
        lines = [{"step": step, "split": "train", "loss": loss} for step, loss in losses]
        (workdir / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))

    rows, losses = [[0, 0, "a"], [0, 1, "b"]], [(1, 0.5), (2, 0.25)]
    lap(0, rows, losses)
    lap(1, [rows[0], *rows], losses)  # read again after a fault
    lap(2, rows[:1], losses)
    lap(3, [*rows, [0, 1, "c"]], losses)
    lap(4, rows, losses[:1])
    found = {}
    for number in range(1, 5):
        one = soak.Soak(tmp_path, [], ["kill"], None, 0, "")
        one.compare(number, bits=False)
        found[number] = " ".join(one.wrong)
    assert not found[1]
    assert "row 1 of batch 0 is None, not b" in found[2]
    assert "row 1 of batch 0 was read with two contents" in found[3]
    assert (
        "record 0 has the loss 0.0, where the first lap's record 2 has 0.25; process 0 said"
        in found[4]
    )


def test_a_fault_behind_the_last_step_needs_no_hand(tmp_path):
    one, fault = soak.Soak(tmp_path, [], ["kill"], None, 0, ""), soak.Fault("host", 60, noticed=1.0)
    (tmp_path / "log1-0.txt").write_text("resuming from step 60: …\n")
    codes = iter([[0, None], [0, None]])
    job = types.SimpleNamespace(
        workdir=tmp_path / "lap1", began=0.0, steps=lambda: 60, codes=lambda: next(codes, [0, 0])
    )
    assert one._goes_on(job, fault, 60)
    assert not fault.by_hand and fault.lost == 0 and fault.resumed > 0


def test_an_end_without_a_fault_is_wrong(tmp_path, monkeypatch):
    """The start takes no step and exits with 70."""
    (tmp_path / soak.DISK / "lap1").mkdir(parents=True)

    class Job(soak.Job):
        def __init__(self, hosts, config, folder, lap, *, alone, loader, supervised):
            self.began, self.workdir = time.monotonic(), folder / soak.DISK / f"lap{lap}"
            command = [sys.executable, "-c", "raise SystemExit(70)"]
            self.processes = [subprocess.Popen(command)]

    monkeypatch.setattr(soak, "Job", Job)
    one = soak.Soak(tmp_path, [], ["kill"], None, 0, "")
    one.lap(1, until=time.monotonic() + 60)
    assert one.faults == [] and len(one.wrong) == 1
    assert "ended with [70]" in one.wrong[0]


@pytest.mark.parametrize(("checkpoints", "kind"), [(0, "kill"), (1, "kill"), (2, "damage")])
def test_a_damage_that_nothing_could_survive_is_a_kill(tmp_path, checkpoints, kind):
    """A damage of the only checkpoint counts as a kill. Otherwise a bit of the newest checkpoint
    changes."""
    files = [
        tmp_path / "lap1" / "checkpoints" / str(8 + 4 * i) / "array" for i in range(checkpoints)
    ]
    for path in files:
        path.parent.mkdir(parents=True)
        path.write_bytes(bytes(100))
    if files:
        checksums.write(files[-1].parent)
    steps = iter([5])
    job = types.SimpleNamespace(
        workdir=tmp_path / "lap1", processes=[None] * 4, steps=lambda: next(steps, 20)
    )
    job.codes, job.signal, job.kill = lambda: [-9] * 4, lambda *_: None, lambda: None
    one = soak.Soak(tmp_path, [], ["damage"], None, 0, "")
    one._reaches = lambda job, step: True
    assert one._fault(job, time.monotonic() + 60).kind == kind
    assert not any(path.read_bytes().strip(b"\0") for path in files[:-1]), "the others stay whole"
    assert bool(files and checksums.verify(files[-1].parent)) == (kind == "damage")


def test_each_model_has_a_config_with_all_that_it_needs(tmp_path):
    """The language model has text. Each model has enough checkpoints for damage, and is split over
    four processes."""
    assert len(soak.pages()) > 100_000
    (tmp_path / "text.txt").write_text(soak.pages())
    workloads = set()
    for given in soak.MODELS.values():
        arguments = config_lib.parse_args([x.format(folder=tmp_path) for x in given])
        config = config_lib.load(arguments.source, arguments.overrides)
        workloads.add(config.workload)
        assert (
            config.mesh.data == soak.PROCESSES and config.train.steps >= 8 * config.checkpoint.every
        )
    assert workloads == {"jaxtrain.workloads.bird", "jaxtrain.workloads.language"}


def test_every_option_is_explained_and_an_unknown_model_is_refused(capsys):
    assert all(action.help for action in soak.make_parser()._actions)
    with pytest.raises(SystemExit):
        soak.main(["--model", "lungs"])
    assert "--model is 'lungs'; expected one of: bird, language" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--hours=nan", "--hours=-1", "--hours=inf", "--faults=-3"])
def test_a_soak_of_no_time_is_refused_and_not_found_well(option, capsys):
    with pytest.raises(SystemExit, match="2"):
        soak.main([option])
    assert f"{option.partition('=')[0]} is {option.partition('=')[2]}" in capsys.readouterr().err


def test_hours_of_the_environment_that_are_no_number_are_a_line(monkeypatch, capsys):
    monkeypatch.setenv("SOAK_HOURS", "abc")
    with pytest.raises(SystemExit, match="2"):
        soak.main([])
    assert "argument --hours: invalid float value: 'abc'" in capsys.readouterr().err


def test_the_table_has_a_row_for_each_kind():
    faults = [
        soak.Fault("kill", 5, noticed=1.0, resumed=4.0, lost=1),
        soak.Fault("kill", 9, noticed=3.0, resumed=6.0, lost=3),
    ]
    rows = list(soak.table([*faults, soak.Fault("slow", 3, resumed=11.0)]))
    assert rows[2:] == [
        "| kill | 2 | 2.0, 3.0 | 5.0, 6.0 | 2.0, 3.0 | 0 |",
        "| slow | 1 |  | 11.0, 11.0 | 0.0, 0.0 | 0 |",
        "| all | 3 | 2.0, 3.0 | 6.0, 11.0 | 1.0, 3.0 | 0 |",
    ]


@pytest.mark.slow
def test_a_run_bears_some_faults_without_help(tmp_path, capsys):
    corpus = demo.ensure(tmp_path, n_train=24, n_test=13)
    config = [f"--config=configs/xcm.py:{corpus}", *SMALL]
    assert (
        soak.main(["--hours", "1", "--faults", "4", "--kinds", "kill,term,damage,stop", *config])
        == 0
    )
    printed = capsys.readouterr().out
    print(printed)
    assert "0 wrong, 0 by hand" in printed and "4 faults in" in printed and "goodput" in printed


def test_an_interrupted_soak_prints_what_it_found(tmp_path, capsys):
    def lap(number, **_):
        if number:
            one.faults.append(soak.Fault("kill", 5, noticed=1.0, resumed=4.0))
            raise KeyboardInterrupt
        return False

    one = soak.Soak(tmp_path, [], ["kill"], None, 0, "")
    one.lap = lap
    assert soak.report(one, hours=1.0, most=0) == 130
    printed = capsys.readouterr().out
    assert "| kill | 1 | 1.0, 1.0 | 4.0, 4.0 |" in printed and "1 faults in" in printed
    assert printed.splitlines()[-1] == "interrupted in lap 1, which is not compared"
