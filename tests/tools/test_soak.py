"""`make soak`: what a lap left is compared with the first one's; in the long form, real faults in a real run."""

import json
import subprocess
import sys
import time
import types

import pytest

from loaders import demo
from tools import soak

SMALL = (
    "--config.model.embed=32 --config.model.depth=2 --config.model.heads=4 --config.model.patch=(32,32) "
    "--config.train.steps=24 --config.train.batch=8 --config.train.eval_every=0 --config.optim.warmup=0 "
    "--config.checkpoint.every=4 --config.mesh.data=4 --config.data.threads=1"
).split()


def test_a_lap_that_lost_a_row_or_a_record_is_told(tmp_path):
    def lap(number, rows, losses):
        (tmp_path / f"rows{number}-0.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + '[1, 0, "cut')
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
    assert "its records are [(1, None)]" in found[4]


def test_a_fault_behind_the_last_step_needs_no_hand(tmp_path):
    one, fault = soak.Soak(tmp_path, [], ["kill"], None, 0, ""), soak.Fault("host", 60, noticed=1.0)
    (tmp_path / "log1-0.txt").write_text("resuming from step 60: …\n")
    codes = iter([[0, None], [0, None]])
    job = types.SimpleNamespace(workdir=tmp_path / "lap1", began=0.0, steps=lambda: 60, codes=lambda: next(codes, [0, 0]))
    assert one._goes_on(job, fault, 60)
    assert not fault.by_hand and fault.lost == 0 and fault.resumed > 0


@pytest.mark.parametrize(("said", "wrong"), [(soak.LATE.decode(), 0), ("Segmentation fault", 1)])
def test_a_start_that_a_busy_machine_ended_is_a_fault_and_another_end_is_wrong(tmp_path, monkeypatch, said, wrong):
    """The first start makes no step and ends with 70; the second, if there is one, ends well."""
    (tmp_path / soak.DISK / "lap1").mkdir(parents=True)
    codes = iter([70, 0])

    class Job(soak.Job):
        def __init__(self, hosts, config, folder, lap, *, alone, loader):
            self.began, self.workdir = time.monotonic(), folder / soak.DISK / f"lap{lap}"
            code, path = next(codes), folder / f"log{lap}-0.txt"
            command = f"import sys; print({said!r} if {code} else 'well'); sys.exit({code})"
            with path.open("a") as log:
                self.logs = [(path, log.tell())]
                self.processes = [subprocess.Popen([sys.executable, "-c", command], stdout=log)]

    monkeypatch.setattr(soak, "Job", Job)
    one = soak.Soak(tmp_path, [], ["kill"], None, 0, "")
    one.lap(1, until=time.monotonic() + 60)
    assert [fault.kind for fault in one.faults] == ["load"] * (1 - wrong) and len(one.wrong) == wrong
    assert not wrong or "ended with [70]" in one.wrong[0]


def test_the_table_has_a_row_for_each_kind():
    faults = [soak.Fault("kill", 5, noticed=1.0, resumed=4.0, lost=1), soak.Fault("kill", 9, noticed=3.0, resumed=6.0, lost=3)]
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
    assert soak.main(["--hours", "1", "--faults", "4", "--kinds", "kill,term,damage,stop", *config]) == 0
    printed = capsys.readouterr().out
    print(printed)
    assert "0 wrong, 0 by hand" in printed and "4 faults in" in printed and "goodput" in printed
