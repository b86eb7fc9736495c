"""The order of the doctor's checks: which folders are examined, and that all waits together stay
within their limits."""

import types

import pytest

from jaxtrain.doctor import examine
from jaxtrain.doctor.check import FAIL, fail, ok
from jaxtrain.parallel import cluster

FACTS = {
    "devices": {"count": 2, "kind": "cpu"},
    "config": {},
    "workdir": "/runs/x",
    "folder": "/saves/x",
    "checkpoints": ["/saves/x", 4, 1000],
}


@pytest.fixture
def asked(monkeypatch):
    """The calls of subprocesses, each of which answers at once."""
    calls, answers, more = [], {}, {}

    def answer(group, arguments, *, within, remedy, crashed=""):
        calls.append(
            types.SimpleNamespace(
                **{k: v for k, v in locals().items() if k not in ("calls", "answers", "more")}
            )
        )
        what = arguments.get("what", group)
        check = answers.get(what, ok(group, what, "well"))
        return [check], FACTS | more if group == "config" and check.verdict != FAIL else {}

    monkeypatch.setattr(examine.in_subprocess, "examine", answer)
    return types.SimpleNamespace(found=calls, answers=answers, more=more)


def alone(process=0, source="x.py", overrides=()):
    return examine._alone(source, overrides, cluster.Cluster(2, process, "127.0.0.1:1"))


def test_room_and_sharing_are_those_of_the_checkpoints_folder(asked):
    _, facts = alone()
    looked = {
        each.arguments["what"]: each.arguments for each in asked.found if each.group == "disk"
    }
    assert set(looked) == {"TMPDIR", "cache", "workdir", "checkpoints"}
    assert (
        looked["checkpoints"]["checkpoints"] == ["/saves/x", 4, 1000]
        and "checkpoints" not in looked["workdir"]
    )
    assert facts["shared"] == "/saves/x"

    asked.found.clear()
    asked.more["folder"] = ""
    _, facts = alone()
    looked = {
        each.arguments["what"]: each.arguments for each in asked.found if each.group == "disk"
    }
    assert looked["workdir"]["checkpoints"] and facts["shared"] == "/runs/x"
    asked.more["folder"] = "gs://bucket/x"
    assert alone()[1]["shared"] == "", "every host sees a store"


def test_a_folder_that_failed_is_not_waited_for_again(asked):
    asked.answers["checkpoints"] = fail("disk", "answer", "no answer within 25 s", "mount it again")
    assert alone()[1]["shared"] == ""


def test_the_network_of_one_process_is_looked_at(asked, monkeypatch):
    for name in cluster.discover.VARIABLES:
        monkeypatch.delenv(name, raising=False)
    found = {
        check.name: check
        for _, check in examine.examine("", [], wait=1).checks
        if check.group == "network"
    }
    assert set(found) == {"host name"}


def test_config_errors_are_not_blamed_on_the_driver(asked):
    alone()
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
    for name in cluster.discover.VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("JAXTRAIN_COORDINATOR", "nowhere")
    monkeypatch.setenv("JAXTRAIN_PROCESSES", "two")
    wrong = [
        check.text for _, check in examine.examine("", [], wait=1).checks if check.verdict == FAIL
    ]
    assert (
        len(wrong) == 3
        and wrong[0].startswith("JAXTRAIN_PROCESS is not set")
        and "host:port" in wrong[2]
    ), wrong


def test_all_waits_together_are_within_their_bounds(asked):
    """Every group hangs."""
    alone()
    waits = [each.within for each in asked.found]
    assert len(waits) == 7 and examine.ITSELF + sum(waits) <= examine.LOCAL
