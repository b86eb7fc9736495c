"""The order of the doctor's checks: which folders are looked at, and that all waits together stay within their bounds."""

import pytest

from jaxtrain.doctor import examine
from jaxtrain.doctor.check import FAIL, fail, ok
from jaxtrain.parallel import cluster

FACTS = {
    "devices": {"count": 2, "kind": "cpu"},
    "config": {},
    "workdir": "/runs/x",
    "folder": "/saves/x",
    "reads": {"train": "/data/train", "test": "/data/test"},
    "checkpoints": ["/saves/x", 4, 1000],
}


@pytest.fixture
def asked(monkeypatch):
    """What is asked of processes of their own, each of which answers at once."""
    found = []

    class Fake:
        def __init__(self, group, arguments, *, environment=None):
            self.group, self.arguments = group, arguments
            found.append(self)

        def result(self, *, within, remedy, crashed=""):
            self.within, self.remedy, self.crashed = within, remedy, crashed
            what = self.arguments.get("what", self.group)
            check = answers.get(what, ok(self.group, what, "well"))
            return [check], FACTS | more if self.group == "config" and check.verdict != FAIL else {}

    answers, more = {}, {}
    monkeypatch.setattr(examine, "Apart", Fake)
    Fake.found, Fake.answers, Fake.more = found, answers, more
    return Fake


def alone(process=0, source="x.py", overrides=()):
    return examine._alone(source, overrides, cluster.Cluster(2, process, "127.0.0.1:1"))


def test_room_and_sharing_are_those_of_the_checkpoints_folder(asked):
    _, facts = alone()
    looked = {each.arguments["what"]: each.arguments for each in asked.found if each.group == "disk"}
    assert set(looked) == {"cache", "workdir", "checkpoints", "data.train", "data.test"}
    assert looked["checkpoints"]["checkpoints"] == ["/saves/x", 4, 1000] and "checkpoints" not in looked["workdir"]
    assert [name for name, each in looked.items() if not each["writes"]] == ["data.train", "data.test"]
    assert facts["shared"] == "/saves/x"

    asked.found.clear()
    asked.more["folder"] = ""
    _, facts = alone()
    looked = {each.arguments["what"]: each.arguments for each in asked.found if each.group == "disk"}
    assert looked["workdir"]["checkpoints"] and facts["shared"] == "/runs/x"
    asked.more["folder"] = "gs://bucket/x"
    assert alone()[1]["shared"] == "", "every host sees a store"


def test_a_folder_that_failed_is_not_waited_for_again(asked):
    asked.answers["checkpoints"] = fail("disk", "answer", "no answer within 25 s", "mount it again")
    assert alone()[1]["shared"] == ""


def test_a_config_that_does_not_answer_hides_no_folder_that_was_typed(asked):
    """It hangs, perhaps, since one of them does: then that one is named."""
    asked.answers["config"] = fail("config", "answer", "no answer within 60 s", "see whether it hangs")
    alone(overrides=[("workdir", "/runs/y"), ("checkpoint.folder", "gs://bucket/y")])
    looked = {each.arguments["what"]: each.arguments["folder"] for each in asked.found if each.group == "disk"}
    assert looked.items() >= {"workdir": "/runs/y", "checkpoints": "gs://bucket/y"}.items()

    asked.found.clear()
    alone(overrides=[("train.steps", "3")])
    assert [each.arguments["what"] for each in asked.found if each.group == "disk"] == ["cache"]


def test_the_network_of_one_process_is_looked_at(asked, monkeypatch):
    for name in cluster.discover.VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "nothere")
    found = {check.name: check for _, check in examine.examine("", [], wait=1).checks if check.group == "network"}
    assert set(found) == {"host name", "NCCL_SOCKET_IFNAME"}
    assert found["NCCL_SOCKET_IFNAME"].verdict == FAIL and "names no interface" in found["NCCL_SOCKET_IFNAME"].text


@pytest.mark.parametrize(("hosts", "says"), [(4, []), (5, ["16 of the 20 links between 5 hosts are measured"])])
def test_links_that_are_not_measured_are_counted(hosts, says):
    first = {p: {"host": p, "name": "", "address": "", "port": 1, "facts": {"shared": ""}} for p in range(hosts)}
    plan = examine._plan(first, cluster.Cluster(hosts, 0, "127.0.0.1:1"))
    told = [check.text for check in examine.network.measured(plan["stations"], plan["rounds"])]
    assert [text[: len(part)] for text, part in zip(told, says, strict=True)] == says


def test_what_is_wrong_with_a_config_is_not_blamed_on_the_driver(asked):
    alone()
    remedies = {each.group: each.remedy for each in asked.found}
    assert "nvidia-smi" in remedies["devices"] and "nvidia-smi" not in remedies["config"] + remedies["data"]
    (devices,) = [each for each in asked.found if each.group == "devices"]
    assert "source" not in devices.arguments
    for each in asked.found:
        if each.group in ("config", "data"):
            assert "ends the process" in each.crashed and "hang" not in each.crashed and "answers" not in each.crashed


def test_each_mistake_of_the_launchers_variables_is_a_finding(asked, monkeypatch):
    for name in cluster.discover.VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("JAXTRAIN_COORDINATOR", "nowhere")
    monkeypatch.setenv("JAXTRAIN_PROCESSES", "two")
    wrong = [check.text for _, check in examine.examine("", [], wait=1).checks if check.verdict == FAIL]
    assert len(wrong) == 3 and wrong[0].startswith("JAXTRAIN_PROCESS is not set") and "host:port" in wrong[2], wrong


def test_all_waits_together_are_within_their_bounds(asked, monkeypatch):
    """Every group is stuck. Those that read begin together; the clock of each runs from its beginning."""
    alone()
    reading = [each.within for each in asked.found if not each.arguments.get("writes", True)]
    others = [each.within for each in asked.found if each.arguments.get("writes", True)]
    assert len(reading) == 2 and len(others) == 6
    assert examine.ITSELF + sum(others) + max(reading) <= examine.LOCAL
    monkeypatch.setattr(examine, "Visitor", lambda coordinator, **given: given)
    visitor, _ = examine._meet(cluster.Cluster(2, 1, "127.0.0.1:1"), 70)
    assert visitor["answer"] >= 70 + examine.LOCAL + examine.ROUND, "process 0 may wait for a third one before it begins"


def test_a_process_that_cannot_look_is_left_out_of_what_all_see(tmp_path, monkeypatch):
    """Process 2's check of the folder failed; it touches it no more, and is not named again."""
    monkeypatch.setattr(examine.disk, "SEEN", 0.5)
    touched = []
    shared = examine.disk.Shared
    monkeypatch.setattr(examine.disk, "Shared", lambda *given: touched.append(given) or shared(*given))

    class Meeting(examine.Host):
        def __init__(self):
            pass

        def share(self, value):
            return value

        def gather(self, value, *, within):
            other = shared(str(tmp_path), "a" * 16).look(1)
            return {0: value, 1: other, 2: None}

    class Guest:
        def share(self, value=None):
            return True

        def gather(self, value, *, within):
            self.said = value

    plan = {"shared": str(tmp_path), "places": {str(p): {"name": f"host{p}"} for p in range(3)}}
    (check,) = examine._shared(Meeting(), plan, "a" * 32, 0, can_look=True)
    assert check.verdict != FAIL and "process 2" not in check.text and len(touched) == 1
    guest = Guest()
    assert examine._shared(guest, plan, "a" * 32, 2, can_look=False) == [] and guest.said is None and len(touched) == 1
