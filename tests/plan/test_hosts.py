"""The needs of a run's hosts: their parts of the state, disks, open files and processes."""

import pytest

from jaxtrain import plan
from jaxtrain.plan import hosts
from loaders.io import machine
from tests.plan.cases import load

MB = 1e6
SECONDS = 0.5  # of a step


@pytest.fixture
def found(tmp_path, monkeypatch):
    """Return the findings by name for a target, with disks of so many bytes/s."""
    monkeypatch.setattr(hosts, "READING", 0.01)

    def found(target, *overrides, workload="trm", writing=500 * MB, reading=1000 * MB):
        monkeypatch.setattr(hosts, "_rates", lambda folder: hosts.Rates(writing, reading))
        where = plan.parse_target(target)
        workdir = ("workdir", str(tmp_path / "run"))
        config = load(workload, tmp_path, monkeypatch, workdir, *overrides)
        assembly = plan.abstractly(config, where)
        of_host = hosts.share(assembly, where)
        texts = {name: (text, good) for name, text, good in hosts.checks(assembly, where, SECONDS)}
        return of_host, texts

    return found


def test_each_host_has_its_part_of_the_state_and_of_a_checkpoint(found):
    mesh = ("mesh.fsdp", "16"), ("mesh.data", "1")
    of_host, texts = found("gpu:h100x8*2", *mesh, workload="language")
    assert (of_host.processes, of_host.devices) == (2, 8)
    whole = of_host.checkpoint
    assert of_host.written == whole / 2 and of_host.held == pytest.approx(whole / 2, rel=0.1)
    assert "2 processes take about 0.0 s to join" in texts["processes"][0]
    assert "on a host of 8 devices: its part of" in texts["host memory"][0]
    assert "less config.mesh.data" not in texts["restores"][0]


def test_replicas_on_many_hosts_all_read_the_whole_checkpoint(found):
    of_host, texts = found("gpu:h100x8*4", ("mesh.data", "32"))
    assert of_host.held < of_host.checkpoint  # the carry of puzzles is split over the batch
    text, good = texts["restores"]
    assert good and "more config.mesh.fsdp, and less config.mesh.data" in text


def test_a_tpu_slice_has_a_process_for_four_chips(found):
    of_host, texts = found("tpu:v4:2x2x4", ("mesh.data", "16"))
    assert (of_host.processes, of_host.devices) == (4, 4)
    assert "process 0 has a connection to each of 3 others, and needs 32" in texts["open files"][0]


@pytest.mark.parametrize(
    ("name", "processes"),
    [
        ("gpu:gb200x72", (18, 4)),
        ("gpu:gb200x68", (17, 4)),
        ("gpu:gb300x144", (36, 4)),
        ("gpu:h100x8*4", (4, 8)),
        ("gpu:h100x4*2", (2, 4)),
        ("tpu:tpu7x:4x4x4", (16, 8)),
        ("tpu:tpu7x:1x1x1*2", (2, 2)),
        ("tpu:v5p:4x4x4*2", (32, 4)),
    ],
)
def test_hosts_are_those_of_the_chip(name, processes):
    assert hosts._processes(plan.parse_target(name)) == processes


def test_saves_that_take_longer_than_the_steps_between_them_have_a_remedy(found):
    of_host, texts = found("gpu:h100x8", ("checkpoint.every", "10"))
    text, good = texts["saves"]
    assert good and "config.checkpoint.every" not in text
    rate = of_host.checkpoint / 20  # [bytes/s]: 20 s to write and 20 s to read, and 5 s of steps
    _, texts = found("gpu:h100x8", ("checkpoint.every", "10"), writing=rate, reading=rate)
    text, good = texts["saves"]
    assert good and "longer than the 10 steps between two" in text
    assert "--config.checkpoint.every=80 would do" in text


def test_a_save_that_would_fail_by_its_time_is_a_problem(found):
    of_host, texts = found("gpu:h100x8", writing=1.0)
    text, good = texts["saves"]
    assert not good and "a save fails after 1:00:00. A faster disk" in text


def test_a_limit_of_open_files_below_the_connections_has_a_remedy(found, monkeypatch):
    monkeypatch.setattr(machine, "open_files", lambda: (64, 128))
    _, texts = found("gpu:h100x8*128", ("mesh.data", "1024"), ("train.batch", "1024"))
    text, good = texts["open files"]
    assert good and "needs 216; this machine allows 128: ulimit -n 216" in text
    monkeypatch.setattr(machine, "open_files", lambda: (64, 4096))
    _, texts = found("gpu:h100x8*128", ("mesh.data", "1024"), ("train.batch", "1024"))
    assert "raises the limit of 64 here by itself" in texts["open files"][0]


def test_each_host_needs_its_part_of_the_rows(found):
    _, texts = found("gpu:h100x8*4", ("mesh.data", "32"), ("train.batch", "64"))
    assert "; a step asks for 128, 32 on each host" in texts["loader"][0]
    assert "of memory to open both splits" in texts["index"][0]


def test_loaders_that_take_more_than_a_process_may_have_a_remedy(monkeypatch):
    monkeypatch.setattr(machine, "open_files", lambda: (1000, 4096))
    text, fits = hosts._index(1_000_000, 20, 8e9, 30)
    assert fits and text.endswith("of memory to open both splits, and 20 open files to read them")
    text, fits = hosts._index(1_000_000, 3000, 8e9, 30)
    assert not fits and "this process may open 1,000: ulimit -n 3030 before" in text
    text, fits = hosts._index(9_000_000_000, 20, 8e9, 30)
    assert not fits and "8.00 GB are available here: config.data with fewer rows" in text


def test_a_limit_of_open_files_below_those_of_the_loaders_is_a_problem_here(found, monkeypatch):
    """Each look at the open files of this process finds seven more than the one before."""
    monkeypatch.setattr(machine, "open_files", lambda: (20, 4096))
    for target, expected in (("", False), ("gpu:h100x8", True)):
        monkeypatch.setattr(hosts, "_open_files", iter(range(7, 100, 7)).__next__)
        _, texts = found(target)
        text, good = texts["index"]
        assert good is expected and "may open 20: ulimit -n 21 before" in text
