"""A supervised run that loses a host trains on without it, and takes it back. Real processes, each
of which stands for a host."""

import contextlib
from dataclasses import replace

import jax
import pytest

from jaxtrain import supervise
from jaxtrain.config import Config, Mesh, Train
from jaxtrain.parallel import cluster, supervised_attempt
from jaxtrain.parallel.cluster import discover
from jaxtrain.supervise import fewer
from tests.proofs import soak
from tests.support.supervised_hosts import MEMORY, Job
from tests.support.supervised_runs import (
    outputs_of,
    reaches,
    saves,
    starts,
)


def run_of(processes=4, devices=2, *, batch=48, accumulate=1, mesh=(-1, 1, 1), auto=()):
    config = Config(mesh=Mesh(*mesh), train=Train(batch=batch, accumulate=accumulate, auto=auto))
    return fewer.Run(config, processes, devices)


def test_fewer_processes_keep_the_batch_and_the_rows_that_a_device_has_at_once():
    assert run_of().split(4) == fewer.Split(8, 1, 1, 1)
    assert run_of().split(3) == fewer.Split(6, 1, 1, 2), "6 rows before, 4 twice: 8 do not fit"
    assert run_of(accumulate=2).split(2) == fewer.Split(4, 1, 1, 4)
    assert run_of(mesh=(2, 4, 1)).split(2) == fewer.Split(1, 4, 1, 2)
    assert run_of(mesh=(1, 8, 1)).split(2) == fewer.Split(1, 4, 1, 2)
    assert run_of(mesh=(1, 8, 1)).split(3) == fewer.Split(3, 2, 1, 2), "8 shards become 2"
    assert run_of(mesh=(1, 4, 2)).split(2) == fewer.Split(1, 2, 2, 2)
    arguments = run_of().split(2).overrides(run_of().config)
    assert "--config.mesh.data=4" in arguments and "--config.train.accumulate=2" in arguments
    auto = run_of(auto=("train.accumulate",))
    assert "accumulate" not in str(auto.split(2).overrides(auto.config)), "the plan chooses it"


def test_a_number_of_processes_that_cannot_go_on_names_those_that_can():
    run = run_of(batch=16)
    assert run.objection(2) == ""
    assert "train.batch=16 and the mesh cannot be split over 3 of 4 processes" in run.objection(3)
    assert run.objection(3).endswith("1, 2, 4 can")
    assert run_of(mesh=(-1, 1, 4)).objection(3).endswith("2, 4 can"), "4 places of model"


def test_the_hosts_of_a_tpu_slice_are_not_trained_without(monkeypatch):
    for name, value in (("WORKER_HOSTNAMES", "a,b"), ("WORKER_ID", "0")):
        monkeypatch.setenv(f"TPU_{name}", value)
    monkeypatch.setenv("JAX_PLATFORMS", "")
    config = Config()
    config = replace(config, supervise=replace(config.supervise, wait=60))
    with pytest.raises(cluster.ClusterError, match="wait is 60, but the hosts of a TPU slice"):
        supervise.run(config, [])


def test_the_last_process_of_a_node_sees_its_own_gpus_alone(monkeypatch):
    """JAX gives a process all GPUs, unless it joins others."""
    attempt = supervised_attempt.Attempt(3, members=[5], coordinator="")
    for name, value in attempt.to_environment().items():
        monkeypatch.setenv(name, value)
    whole = cluster.Cluster(8, 5, "a:1", (2, 3), "SLURM")
    monkeypatch.setattr(discover, "from_environment", lambda *given, **more: whole)
    membership = cluster.find()
    assert membership.processes == 1 and membership.local_devices == (2, 3)
    names = ("jax_cuda_visible_devices", "jax_rocm_visible_devices")
    before = {name: jax.config.values[name] for name in names}
    try:
        cluster.initialize(membership, Config()).close()
        assert [jax.config.values[name] for name in names] == ["2,3", "2,3"]
    finally:
        for name, value in before.items():
            jax.config.update(name, value)


@pytest.mark.slow
def test_a_run_goes_on_without_a_lost_host_and_takes_it_back(folder, ending):
    job = Job(folder, ending, *MEMORY)
    reaches(folder, 3, job.watch)
    job.lose(1)
    job.goes_on(members=1)
    job.start(1)
    job.goes_on(members=2)
    outputs = job.end()
    assert "1 of 2 processes go on, with the same batches on mesh 1 × 1 × 1" in outputs[0]
    assert "process 1 (" in outputs[0] and "came back: all save, and go on together" in outputs[0]
    every_start = starts(folder)
    assert [start.processes for start in every_start] == [2, 1, 2]
    assert [len(start.facts["hosts"]) for start in every_start] == [2, 1, 2]
    assert "the supervisor of process 1" in every_start[1].facts["cause"]
    assert "came back" in every_start[2].facts["cause"]
    assert every_start[1].first > 0, "from memory: nothing was saved"
    assert every_start[2].first == every_start[1].step, "all was saved before it was taken back"


@pytest.mark.slow
def test_another_leads_after_process_0s_host_is_lost_and_that_one_follows_when_it_returns(
    folder, ending
):
    job = Job(folder, ending, *MEMORY)
    reaches(folder, 3, job.watch)
    job.lose(0)
    job.goes_on(members=1)
    job.start(0)
    job.goes_on(members=2)
    outputs = job.end()
    assert "leads: nothing answered at 127.0.0.1" in outputs[0], "of process 1's supervisor"
    assert "process 0 (" in outputs[0] and "came back: all save, and go on together" in outputs[0]
    assert [start.processes for start in starts(folder)] == [2, 1, 2]
    assert not list(job.workdir.glob("lease.json")), "the leader gave it back"


@pytest.mark.slow
def test_parts_of_a_lost_host_come_from_its_partner_and_are_put_together_on_a_smaller_mesh(
    folder, ending
):
    """Two hosts in network namespaces, each with half of the parameters. Nothing is on a disk."""
    hosts = soak.Hosts()
    if not hosts.real:
        pytest.skip("only root may make network namespaces")
    with contextlib.closing(hosts):
        halves = ("--config.mesh.fsdp=2", "--config.mesh.data=1")
        job = Job(folder, ending, *MEMORY, *halves, hosts=hosts)
        reaches(folder, 6, job.watch)
        job.lose(1)
        job.goes_on(members=1)
        assert not list((job.workdir / "checkpoints").glob("*/manifest.json"))
        job.start(1)
        job.goes_on(members=2)
        outputs = job.end()
    assert "on mesh 1 × 1 × 1, accumulate=2" in outputs[0]
    assert starts(folder)[1].first > 0, "from memory"


@pytest.mark.slow
def test_processes_that_cannot_share_the_batch_end_with_the_numbers_that_can(folder, ending):
    overrides = ("--config.train.batch=9", "--config.distributed.init_timeout=120")
    job = Job(folder, ending, *overrides, processes=3)
    saves(folder, job.watch)
    job.lose(2)
    outputs = outputs_of(job.watch)
    assert {supervisor.returncode for supervisor in job.watch} == {70}, outputs
    for output in outputs:
        assert "process 2 of 3 did not connect" in output, output
        assert "train.batch=9 and the mesh cannot be split over 2 of 3 processes" in output
        assert "1, 3 can" in output and "Rerun the same command to resume" in output


@pytest.mark.slow
def test_a_host_that_returns_with_another_config_is_refused_and_the_run_goes_on(folder, ending):
    job = Job(folder, ending)
    saves(folder, job.watch)
    job.lose(1)
    job.goes_on(members=1)
    other = job.start(1, "--config.optim.lr=0.5")
    output, _ = other.communicate(timeout=240)
    assert other.returncode == 2 and "config.optim.lr is 0.5, elsewhere" in output, output
    del job.supervisors[1]
    job.goes_on(members=1)
    job.end()
    assert [start.processes for start in starts(folder)] == [2, 1]
