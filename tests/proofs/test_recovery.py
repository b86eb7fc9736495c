"""The bookkeeping of a recovery campaign: it goes on where it stopped, and behind every error."""

import argparse
import contextlib
import json
import time

import pytest

from tests.proofs import recovery, soak

RUN = {"seed": 4, "mesh": "data", "model": "bird", "supervised": True, "fewer_after": 0}
FAULT = {"again": 1, "phases": {}, "cpu": 0.0, "load": 1.0, "ends": [], "session": "run-0"}


def fault(kind, seconds, **more):
    return {**RUN, **FAULT, "kind": kind, "seconds": seconds, **more}


class StandIn:
    """A run whose steps are 0, and that stands still or fails on demand."""

    def __init__(self, folder, error):
        self.workdir = folder / "disk" / "run-0"
        self.error = error
        self.ends = []

    def step(self):
        return 0

    def heads(self, process):
        return [{"pid": 1}]

    def logs(self):
        return "the last lines"

    def reaches(self, step):
        if isinstance(self.error, Exception):
            raise self.error
        return not self.error


@pytest.fixture
def campaign(tmp_path, monkeypatch):
    monkeypatch.setattr(soak.Hosts, "_make", lambda self: False)
    args = argparse.Namespace(
        without_supervisors=False, seed=4, mesh="data", model="bird", wait=0, kinds="kill,cut,disk"
    )
    args.faults, args.minutes = 3, 60.0
    return recovery.Campaign(args, tmp_path, may_fill=False)


def test_a_campaign_goes_on_with_the_fault_after_the_last_line(tmp_path):
    path = tmp_path / "faults.jsonl"
    results = recovery.Results(path)
    results.add(fault("takeover", 5.0, wait=1.5, supervisor=True, victim=[0, 1]))
    results.add({**RUN, "session": "run-0", "records": 9, "rows": 16, "wrong": 0})
    results.add({**RUN, "session": "run-2", "kind": "kill", "problem": "it stood still"})
    results.add({**fault("kill", 5.0), "seed": 5})
    with path.open("a") as file:
        file.write('{"kind": "cut off by a kill')
    assert recovery.Results(path).done(RUN) == 2, "of this seed, and also the one without a time"


@pytest.mark.parametrize("error", [ValueError("a line was cut"), "it stands still"])
def test_an_error_or_a_stand_still_is_a_line_and_the_next_run_begins(tmp_path, campaign, error):
    assert campaign._kinds == ["kill"], "no cable and no disk that may be filled"
    assert campaign._disturb(StandIn(tmp_path, error), known=0), "another run may begin"
    assert campaign.wrong == 1 and campaign.results.done(campaign._run) == 1
    [line] = map(json.loads, (tmp_path / "faults.jsonl").read_text().splitlines())
    assert ("a line was cut" if isinstance(error, Exception) else "stood still") in line["problem"]
    campaign._args.faults = 1
    assert not campaign._disturb(StandIn(tmp_path, error), known=0), "all have been done"


def test_the_table_has_each_kind_and_what_was_not_measured_or_compared():
    lines = [fault("kill", 5.0), fault("kill", 7.0, again=0), fault("cut", 31.0)]
    lines += [fault("host", 9.0, session="run-3"), {**RUN, "kind": "stop", "problem": "x"}]
    lines.append({**RUN, "session": "run-0", "records": 9, "rows": 16, "wrong": 1})
    table = recovery.table_of(recovery.run_of(RUN), lines)
    assert "| bird, mesh data, with supervisors | n | median, 90 %, most [s] |" in table
    assert "| a process is killed | 2 | 6.0, 7.0, 7.0 | 1 |" in table
    assert "| all | 4 | 8.0, 31.0, 31.0 | 1 |" in table
    assert "1 of 4 took more than 30 s." in table
    assert "1 runs: 9 records and 16 rows compared with an undisturbed run's, 1 differ" in table
    assert "1 faults are of runs that ended before they were compared" in table
    assert "1 faults without a time: stop" in table
    assert recovery.WHAT.keys() == {*recovery.KINDS, recovery.GONE}


class OnFullDisk(StandIn):
    """A run that makes its next steps some looks after a fault."""

    def __init__(self, folder, looks):
        super().__init__(folder, "")
        self._looks = looks
        self.killed = False

    def step(self):
        self._looks -= self.killed
        return 7 if self._looks > 0 else 9

    def kill(self, process):
        self.killed = True

    def start_ended(self):
        pass


@pytest.mark.parametrize(("looks", "is_before"), [(3, True), (10_000, False)])
def test_seconds_on_a_full_disk_count_from_the_fault_if_the_run_goes_on(
    tmp_path, monkeypatch, looks, is_before
):
    """Else from the end of the full disk, which measures nothing once the steps are made."""
    monkeypatch.setattr(recovery, "full", lambda disk: contextlib.nullcontext())
    monkeypatch.setattr(recovery, "FULL_DURING_FAULT", 0.6)
    draw = argparse.Namespace(uniform=lambda *bounds: 0.05, randrange=lambda n: 1)
    faults = recovery.Faults(OnFullDisk(tmp_path, looks), tmp_path, draw)
    began = time.monotonic()
    until = faults.do("full-kill")
    assert until - began >= 0.6
    assert faults.notes["step"] == 7
    assert ("seconds" in faults.notes) == is_before
    if is_before:
        assert 0 < faults.notes["seconds"] < until - began
