"""Steps that are computed twice (config.guard.verify_every): an error is found, its device is
named, and its step is corrected."""

import json
import re

import jax
import pytest

from jaxtrain import cli
from jaxtrain.run.verify import Verifier
from tests.support import flips, processes
from tests.support.pages import examples


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("verify")
    for name in ("my_workload.py", "my_config.py", "my_loader.py"):
        (folder / name).write_text(examples()[name])
    return folder


@pytest.fixture
def train(folder, monkeypatch):
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(folder)

    def run(name, *options):
        command = [
            "train",
            "--config=my_config.py",
            f"--config.workdir={name}",
            "--config.train.steps=8",
        ]
        command += [
            "--config.metrics.every=1",
            "--config.metrics.digest=true",
            "--config.checkpoint.every=8",
        ]
        code = cli.main([*command, *options])
        lines = [
            json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()
        ]
        return code, lines

    return run


def digests(lines):
    return [
        (line["step"], line["digest_high"], line["digest_low"])
        for line in lines
        if line["split"] == "train"
    ]


def test_verified_steps_are_the_same_steps_raise_no_alarm_and_compile_once(train, monkeypatch):
    code, plain = train("plain")
    assert code == 0
    compiled, verify = [], Verifier.__call__
    jax.monitoring.register_event_duration_secs_listener(
        lambda name, _, **more: compiled.append(name) if "compile" in name else 0
    )

    def counted(self, *arguments):
        before, result = len(compiled), verify(self, *arguments)
        counts.append(len(compiled) - before)
        return result

    counts = []
    monkeypatch.setattr(Verifier, "__call__", counted)
    code, lines = train("verified", "--config.guard.verify_every=2")
    assert code == 0 and digests(lines) == digests(plain)
    assert counts[0] > 0 and counts[1:] == [0, 0, 0]
    assert [(x["step"], x["miscomputed"]) for x in lines if x["split"] == "verify"] == [
        (2, 0),
        (4, 0),
        (6, 0),
        (8, 0),
    ]


def test_a_wrong_step_stops_the_run_or_is_replaced_and_its_device_is_named(
    train, monkeypatch, capsys, folder
):
    with monkeypatch.context() as patch:
        flips.programs({4: 5}, patch)
        code, _ = train("stopped", "--config.guard.verify_every=4")
    said = capsys.readouterr().err.splitlines()[-1]
    assert code == 2 and "step 4 was computed twice from the same state, and 1 of" in said
    assert "the first was wrong, on cpu 5 of process 0. Nothing of it is saved" in said
    with monkeypatch.context() as patch:
        flips.programs({4: 5}, patch)
        code, lines = train(
            "corrected", "--config.guard.verify_every=4", "--config.guard.on_mismatch=continue"
        )
    assert code == 0 and [x["miscomputed"] for x in lines if x["split"] == "verify"] == [1, 0]
    plain = [
        json.loads(line) for line in (folder / "plain" / "metrics.jsonl").read_text().splitlines()
    ]
    assert digests(lines) == digests(plain), "the run took the right result"
    with monkeypatch.context() as patch:
        flips.programs({4: 5, 5: 2}, patch)
        code, _ = train(
            "none", "--config.guard.verify_every=4", "--config.guard.on_mismatch=continue"
        )
    assert (
        code == 2
        and "A third computation agrees with neither" in capsys.readouterr().err.splitlines()[-1]
    )


def test_a_device_that_always_errs_is_found_by_the_other_placement(train, monkeypatch, capsys):
    class OnItsPlace(dict):
        def __contains__(self, call):
            return True

        def __missing__(self, call):
            return 5

    flips.programs(OnItsPlace(), monkeypatch)
    code, _ = train("always", "--config.guard.verify_every=4")
    assert (
        code == 2
        and "again and again: cpu 5 of process 0" in capsys.readouterr().err.splitlines()[-1]
    )


@pytest.mark.slow
def test_several_processes_verify_and_name_the_process_and_its_device(folder):
    text = (
        "from my_config import get_config\nfrom tests.support import flips\n\nflips.programs({4:"
        " 3})\n"
    )
    # call 4 is the first computation of step 4, and call 3 is the second one
    (folder / "flipped.py").write_text(text)
    values = {
        "workdir": "two",
        "train.steps": 8,
        "metrics.every": 1,
        "metrics.digest": "true",
        "checkpoint.every": 8,
    }
    values |= {"guard.verify_every": 4, "guard.on_mismatch": "continue"}
    arguments = [f"--config.{name}={value}" for name, value in values.items()]
    both = processes.cluster(folder, "flipped.py", *arguments, processes=2, devices=2)
    said = [process.communicate(timeout=300)[0] for process in both]
    assert [process.returncode for process in both] == [0, 0], said
    found = (
        "step 4 was computed twice from the same state, and 1 of 14 arrays differ: params/b_out. A"
        " third computation says"
    )
    assert re.search(
        f"{re.escape(found)} that the first was wrong, on cpu \\d+ of process 1. The run continues",
        said[0],
    )
    lines = [
        json.loads(line) for line in (folder / "two" / "metrics.jsonl").read_text().splitlines()
    ]
    assert [(x["step"], x["miscomputed"]) for x in lines if x["split"] == "verify"] == [
        (4, 1),
        (8, 0),
    ]
