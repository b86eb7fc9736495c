"""The order of the doctor's checks: which folders are examined, and with which arguments."""

import types

import pytest

from jaxtrain.doctor import examine
from jaxtrain.doctor.check import FAIL, OK, Findings, fail, ok
from jaxtrain.parallel import cluster

FACTS = {
    "workdir": "/runs/x",
    "folder": "/saves/x",
    "checkpoints": ["/saves/x", 4, 1000],
    "rows_per_second": 50.0,
}


@pytest.fixture
def asked(monkeypatch):
    """The calls of subprocesses, each of which answers at once."""
    calls, answers, more = [], {}, {}

    def answer(group, arguments, *, within, remedy, crashed=""):
        calls.append(
            types.SimpleNamespace(group=group, arguments=arguments, remedy=remedy, crashed=crashed)
        )
        what = arguments.get("what", group)
        check = answers.get(what, ok(group, what, "well"))
        facts = {"devices": {"count": 2, "kind": "cpu"}, "config": FACTS | more}
        return Findings([check], facts.get(group, {}) if check.verdict != FAIL else {})

    monkeypatch.setattr(examine.in_subprocess, "examine", answer)
    for name in cluster.discover.VARIABLES:
        monkeypatch.delenv(name, raising=False)
    return types.SimpleNamespace(found=calls, answers=answers, more=more)


@pytest.fixture
def second_of_two(monkeypatch):
    membership = cluster.Cluster(2, 1, "127.0.0.1:1", launcher="test")
    monkeypatch.setattr(examine.cluster, "find", lambda: membership)


def disks(asked):
    return {each.arguments["what"]: each.arguments for each in asked.found if each.group == "disk"}


def test_free_space_is_that_of_the_checkpoints_folder(asked):
    examine.examine("x.py", ())
    looked = disks(asked)
    assert list(looked) == ["TMPDIR", "cache", "workdir", "checkpoints"]
    assert looked["checkpoints"]["checkpoints"] == ["/saves/x", 4, 1000]
    assert "checkpoints" not in looked["workdir"]

    asked.found.clear()
    asked.more["folder"] = ""
    examine.examine("x.py", ())
    assert list(disks(asked)) == ["TMPDIR", "cache", "workdir"]
    assert disks(asked)["workdir"]["checkpoints"] == ["/saves/x", 4, 1000]


def test_a_process_of_a_job_checks_its_own_part(asked, second_of_two):
    report = examine.examine("x.py", ())
    assert (report.process, report.processes) == (1, 2)
    arguments = {each.group: each.arguments for each in asked.found}
    assert (arguments["config"]["count"], arguments["config"]["kind"]) == (4, "cpu")
    data = arguments["data"]
    assert (data["process"], data["processes"], data["wanted"]) == (1, 2, 50.0)


def test_a_secret_that_a_run_would_miss_is_a_finding(asked, monkeypatch):
    monkeypatch.delenv("JAXTRAIN_SECRET", raising=False)
    for host, verdict in (("127.0.0.1", OK), ("10.0.0.1", FAIL)):
        membership = cluster.Cluster(2, 1, f"{host}:1", launcher="test")
        monkeypatch.setattr(examine.cluster, "find", lambda: membership)  # noqa: B023
        report = examine.examine("", ())
        (check,) = [check for check in report.checks if check.group == "processes"]
        assert check.verdict == verdict
    assert "JAXTRAIN_SECRET is not set" in check.text and "openssl rand" in check.remedy


def test_a_config_that_cannot_be_read_leaves_the_machine_s_checks(asked):
    asked.answers["config"] = fail("config", "file", "x.py does not exist", "copy it")
    report = examine.examine("x.py", ())
    assert list(disks(asked)) == ["TMPDIR", "cache"]
    assert "data" not in [each.group for each in asked.found]
    assert report.failed


def test_config_errors_are_not_blamed_on_the_driver(asked):
    examine.examine("x.py", ())
    remedies = {each.group: each.remedy for each in asked.found}
    assert (
        "nvidia-smi" in remedies["devices"]
        and "nvidia-smi" not in remedies["config"] + remedies["data"]
    )
    (devices,) = [each for each in asked.found if each.group == "devices"]
    assert "source" not in devices.arguments
    for each in asked.found:
        if each.group in ("config", "data"):
            assert (
                "ends the process" in each.crashed
                and "hang" not in each.crashed
                and "answers" not in each.crashed
            )


def test_each_error_of_the_launchers_variables_is_a_finding(asked, monkeypatch):
    monkeypatch.setenv("JAXTRAIN_COORDINATOR", "nowhere")
    monkeypatch.setenv("JAXTRAIN_PROCESSES", "two")
    checks = examine.examine("", []).checks
    wrong = [check.text for check in checks if check.verdict == FAIL]
    assert (
        len(wrong) == 3
        and wrong[0].startswith("JAXTRAIN_PROCESS is not set")
        and "host:port" in wrong[2]
    ), wrong
