"""The processes of a run are read from an environment."""

import json

import pytest

from jaxtrain.parallel import lease
from jaxtrain.parallel.cluster import discover
from jaxtrain.parallel.cluster.discover import (
    PORTS,
    Cluster,
    ClusterError,
    first_host,
    from_environment,
)

C, N, I = "JAXTRAIN_COORDINATOR", "JAXTRAIN_PROCESSES", "JAXTRAIN_PROCESS"


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, (1, 0, "")),
        ({"HOME": "/root", C: "", N: "", I: ""}, (1, 0, "")),
        ({C: "10.0.0.1:27508", N: "4", I: "0"}, (4, 0, "10.0.0.1:27508")),
        ({C: "node-7:1", N: "4", I: "3"}, (4, 3, "node-7:1")),
        ({C: "[::1]:27508", N: "2", I: "1"}, (2, 1, "[::1]:27508")),
        ({C: "localhost:27508", N: "1", I: "0"}, (1, 0, "")),
    ],
)
def test_an_explicit_environment(environment, expected):
    found = from_environment(environment)
    assert (
        found.processes,
        found.process,
        found.coordinator,
    ) == expected and not found.local_devices


@pytest.mark.parametrize(
    ("environment", "told"),
    [
        ({C: "h:1"}, [N, I]),
        ({N: "2"}, [C, I]),
        ({I: "0"}, [C, N]),
        ({C: "h:1", I: "0"}, [N]),
        ({C: "h:1", N: "2", I: "2"}, ["process 2 of 2"]),
        ({C: "h:1", N: "0", I: "0"}, ["process 0 of 0"]),
        ({C: "h:1", N: "two", I: "-1"}, [f"{N}='two'", f"{I}='-1'"]),
        ({C: "h", N: "2", I: "0"}, [f"{C}='h' is not host:port"]),
        ({C: ":80", N: "2", I: "0"}, ["not host:port"]),
        ({C: "h:70000", N: "2", I: "0"}, ["not host:port"]),
        ({C: "::1:27508", N: "2", I: "0"}, ["not host:port; write [::1]:27508"]),
        ({C: "fd00::a", N: "2", I: "0"}, ["not host:port; write [fd00::a]:27508"]),
        (
            {C: "[node]:80", N: "2", I: "0"},
            ["an IPv6 address in brackets, for example [::1]:27508"],
        ),
        ({C: "h:", N: "x"}, [I, "not host:port", f"{N}='x'"]),
    ],
)
def test_an_explicit_environment_that_is_invalid_is_reported_whole(environment, told):
    with pytest.raises(ClusterError) as error:
        from_environment(environment)
    assert len(error.value.problems) == len(told)
    for part in told:
        assert part in str(error.value)


def slurm(
    process: int = 0,
    *,
    tasks: int = 4,
    per_node: str = "1(x4)",
    nodes: str = "node[007-010]",
    **more: str,
) -> dict[str, str]:
    """The variables of a task of srun: a real step of SLURM 22.05, changed to other numbers."""
    local = int(per_node.partition("(")[0])
    return {
        "SLURM_JOB_ID": "4711",
        "SLURM_NTASKS": str(tasks),
        "SLURM_JOB_NODELIST": f"login1,{nodes}",
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NUM_TASKS": str(tasks),
        "SLURM_STEP_NODELIST": nodes,
        "SLURM_STEP_TASKS_PER_NODE": per_node,
        "SLURM_PROCID": str(process),
        "SLURM_LOCALID": str(process % local),
        "SLURM_NODEID": str(process // local),
        "SLURMD_NODENAME": "node008",
        **more,
    }


def test_a_slurm_step_has_its_first_node_as_coordinator_and_a_port_of_its_own():
    found = [from_environment(slurm(i)) for i in range(4)]
    assert [(c.processes, c.process, c.launcher) for c in found] == [
        (4, i, "SLURM") for i in range(4)
    ]
    assert len({c.coordinator for c in found}) == 1
    host, port = found[0].coordinator.split(":")
    assert host == "node007" and int(port) in PORTS
    others = [
        from_environment(slurm(**{k: v}))
        for k, v in (("SLURM_STEP_ID", "1"), ("SLURM_RESTART_COUNT", "1"), ("SLURM_JOB_ID", "8807"))
    ]
    assert len({c.coordinator for c in [found[0], *others]}) == 4, (
        "steps, restarts, and jobs 4096 apart do not meet"
    )
    assert len({c.job for c in [found[0], *others]}) == 4


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("node7", "node7"),
        ("node7,other[1-3]", "node7"),
        ("node[001-003,7]", "node001"),
        ("node[12,001]", "node12"),
        ("r[1-2]n[03-04],x", "r1n03"),
        ("gpu-a[2-4].cluster.org,b", "gpu-a2.cluster.org"),
        ("node[1-1000000000]", "node1"),
    ],
)
def test_first_host(nodes, first):
    assert first_host(nodes) == first


def test_a_part_of_slurms_variables_is_one_process_with_a_reason():
    whole = slurm(3)
    step = (
        "SLURM_STEP_ID",
        "SLURM_STEP_NUM_TASKS",
        "SLURM_STEP_NODELIST",
        "SLURM_STEP_TASKS_PER_NODE",
    )
    # salloc
    shell = {
        k: v
        for k, v in whole.items()
        if k not in (*step, "SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID")
    }
    batch = {k: v for k, v in whole.items() if k not in step}  # the batch script, outside srun
    # the last one is left by pam_slurm_adopt
    for environment in (shell, batch, {"SLURM_JOB_ID": "4711"}):
        found = from_environment(environment)
        assert (found.processes, found.coordinator) == (1, "")
        assert "4711" in found.note and "SLURM_STEP_ID" in found.note and "srun" in found.note
    assert from_environment(slurm(tasks=1, per_node="1", nodes="n")) == Cluster(
        launcher="SLURM", job="4711.0.0"
    )


def test_a_coordinator_alone_overrides_what_slurm_says():
    assert from_environment(slurm(2, **{C: "10.0.0.9:1234"})).coordinator == "10.0.0.9:1234"
    assert from_environment(slurm(2, **{C: "h:1", N: "2", I: "1"}))[:3] == (2, 1, "h:1")


FOUR = {"tasks": 8, "per_node": "4(x2)", "nodes": "a[1-2]"}


@pytest.mark.parametrize(
    ("environment", "gpus", "own"),
    [
        (slurm(1), 0, ()),
        (slurm(1), 8, ()),  # one task on a node has all GPUs
        (slurm(1, CUDA_VISIBLE_DEVICES="0,1,2,3", SLURM_GPUS_ON_NODE="4"), 8, ()),
        (slurm(6, **FOUR), 8, (4, 5)),  # four tasks see eight GPUs: two for each
        (slurm(6, CUDA_VISIBLE_DEVICES="0,1,2,3", SLURM_GPUS_ON_NODE="4", **FOUR), 8, (2,)),
        # bound: ordinal 0, not local rank 2
        (slurm(6, CUDA_VISIBLE_DEVICES="2", SLURM_GPUS_ON_NODE="4", **FOUR), 8, (0,)),
        (slurm(6, CUDA_VISIBLE_DEVICES="0,1", SLURM_GPUS_ON_NODE="8", **FOUR), 8, (0, 1)),
        (
            slurm(6, CUDA_VISIBLE_DEVICES="GPU-5f,GPU-6a", SLURM_GPUS_PER_TASK="2", **FOUR),
            8,
            (0, 1),
        ),
        (slurm(6, CUDA_VISIBLE_DEVICES="", **FOUR), 8, ()),
    ],
)
def test_local_devices_come_from_what_is_visible(environment, gpus, own):
    assert from_environment(environment, gpus=gpus).local_devices == own


@pytest.mark.parametrize(
    ("environment", "told"),
    [
        (
            slurm(1, CUDA_VISIBLE_DEVICES="0", SLURM_GPUS_ON_NODE="8"),
            "sees 1 of the 8 GPUs of its node",
        ),
        (
            slurm(1, CUDA_VISIBLE_DEVICES="0", SLURM_GPUS_ON_NODE="8", **FOUR),
            "4 task(s): the rest would idle",
        ),
        (slurm(1, CUDA_VISIBLE_DEVICES="0,1,2,3,4,5", **FOUR), "sees 6 GPUs, which the 4 tasks"),
    ],
)
def test_gpus_that_would_idle_are_an_error_that_names_the_process(environment, told):
    with pytest.raises(ClusterError, match="process 1 of .* \\(on node008\\)") as error:
        from_environment(environment, gpus=8)
    assert told in str(error.value)


def mpi(rank: int, *, size: int, local: int, **more: str) -> dict[str, str]:
    names = {"SIZE": size, "RANK": rank, "LOCAL_SIZE": local, "LOCAL_RANK": rank % local}
    return {
        **{f"OMPI_COMM_WORLD_{k}": str(v) for k, v in names.items()},
        "PMIX_NAMESPACE": "prterun-host-1@1",
        **more,
    }


def test_open_mpi():
    here = from_environment(mpi(1, size=2, local=2), gpus=4)
    assert (
        here[:2] == (2, 1)
        and here.coordinator.startswith("127.0.0.1:")
        and here.local_devices == (2, 3)
    )
    with pytest.raises(ClusterError, match="mpirun -x JAXTRAIN_COORDINATOR=host:port"):
        from_environment(mpi(3, size=4, local=2))
    assert from_environment(mpi(3, size=4, local=2, **{C: "h:5"}))[:3] == (4, 3, "h:5")
    assert from_environment(mpi(0, size=1, local=1))[:3] == (1, 0, "")
    # mpirun's own helpers are tasks of a SLURM step; its ranks count
    inside = slurm(0, tasks=2, per_node="1(x2)")
    assert from_environment({**inside, **mpi(3, size=4, local=4)})[:2] == (4, 3)


def test_tpu_pods():
    gke = {"TPU_WORKER_HOSTNAMES": "w-0.svc,w-1.svc", "TPU_WORKER_ID": "1"}
    assert from_environment(gke)[:3] == (2, 1, "w-0.svc:8482")
    assert from_environment({**gke, "JAX_PLATFORMS": "cpu"}) == Cluster()
    slices = {
        "MEGASCALE_NUM_SLICES": "2",
        "MEGASCALE_SLICE_ID": "1",
        "MEGASCALE_COORDINATOR_ADDRESS": "s-0.svc:8080",
    }
    assert from_environment({**gke, **slices})[:3] == (4, 3, "s-0.svc:8482")
    assert from_environment({"TPU_WORKER_HOSTNAMES": "localhost", "TPU_WORKER_ID": "0"})[:3] == (
        1,
        0,
        "",
    )
    vm = {
        "worker-network-endpoints": "unknown:unknown:10.164.0.2,unknown:unknown:10.164.0.3",
        "agent-worker-number": "1",
    }
    assert from_environment({}, metadata=vm)[:3] == (2, 1, "10.164.0.2:8482")
    for hosts in ("fd00::1,fd00::2", "[fd00::1]:8080,[fd00::2]:8080", "n:0:fd00::1,n:1:fd00::2"):
        pod = {"TPU_WORKER_HOSTNAMES": hosts, "TPU_WORKER_ID": "1"}
        assert from_environment(pod)[:3] == (2, 1, "[fd00::1]:8482")
    vm = {"worker-network-endpoints": "10.0.0.2,10.0.0.3", "agent-worker-number": "0"}
    several = "ACCELERATOR_TYPE: 'v4-16'\nMEGASCALE_NUM_SLICES: '2'\nMEGASCALE_SLICE_ID: '1'\n"
    several += "MEGASCALE_COORDINATOR_ADDRESS: '10.0.0.9'\n"
    assert from_environment({}, metadata={**vm, "tpu-env": several})[:3] == (4, 2, "10.0.0.9:8482")
    with pytest.raises(ClusterError, match="TPU worker 2 of slice 0"):
        from_environment({**gke, "TPU_WORKER_ID": "2"})


def test_processes_of_several_hosts_need_a_secret_and_those_of_one_do_not():
    needed = "10.0.0.1:27508"
    assert (
        discover.secret_of({}, "127.0.0.1:1")
        == discover.secret_of({}, "[::1]:1")
        == discover.secret_of({}, "localhost:1")
        == ""
    )
    assert discover.secret_of({"JAXTRAIN_SECRET": "x" * 16}, needed) == "x" * 16
    assert discover.secret_of({"JAXTRAIN_SECRET": "x" * 16}, "127.0.0.1:1") == "x" * 16
    assert discover.secret_of({"JAXTRAIN_SECRET": "none"}, needed) == ""
    for given, reason in (({}, "is not set"), ({"JAXTRAIN_SECRET": "hunter2"}, "at least 16")):
        with pytest.raises(ClusterError, match=reason) as error:
            discover.secret_of(given, needed)
        assert "openssl rand" in str(error.value) and "hunter2" not in str(error.value)


STEP = {
    "SLURM_JOB_ID": "1",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_NODELIST": "a[1-2]",
    "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "0",
}


@pytest.mark.parametrize(
    "changes",
    [
        {"SLURM_STEP_NUM_TASKS": "two"},
        {"SLURM_PROCID": "9" * 5000},
        {"SLURM_NODEID": "7"},
        {"SLURM_STEP_TASKS_PER_NODE": "1(x999999999999)"},
        {"SLURM_STEP_TASKS_PER_NODE": "none"},
        {"SLURM_GPUS_ON_NODE": "1e30"},
        {"SLURM_STEP_NUM_TASKS": "nan"},
        {"SLURM_STEP_NUM_TASKS": "0"},
        {"SLURM_PROCID": "-1"},
        {"SLURM_PROCID": "2"},
        {"SLURM_NODEID": "-1"},
        {"SLURM_STEP_NODELIST": "a\nb[1-2]"},
        {"SLURM_STEP_NODELIST": "-h"},
        {"SLURM_STEP_ID": "\x1b[31m"},
        {"SLURM_RESTART_COUNT": "9" * 5000},
        {"JAXTRAIN_PROCESSES": "9" * 5000, "JAXTRAIN_PROCESS": "0", "JAXTRAIN_COORDINATOR": "a:1"},
        {
            "JAXTRAIN_PROCESSES": "2",
            "JAXTRAIN_PROCESS": "0",
            "JAXTRAIN_COORDINATOR": "a:" + "9" * 5000,
        },
    ],
    ids=lambda changes: str(changes)[:50],
)
def test_variables_that_are_invalid_are_one_message(changes):
    with pytest.raises(discover.ClusterError) as raised:
        discover.from_environment({**STEP, **changes})
    [problem] = raised.value.problems
    assert problem.isprintable() and len(problem) < 700


def test_a_job_with_an_odd_name_is_one_process_with_a_printable_reason():
    assert (
        "SLURM job 'a\\nb'" in (note := from_environment({"SLURM_JOB_ID": "a\nb"}).note)
        and note.isprintable()
    )


@pytest.mark.parametrize("text", ["9" * 5000, "1e30", "-1", "nan", "٣\n", ""])
def test_a_lease_can_be_read_whatever_slurm_says(monkeypatch, text):
    monkeypatch.setenv("SLURM_RESTART_COUNT", text)
    monkeypatch.setenv("SLURM_JOB_ID", f"{text}\n")
    me = lease.this_process()
    assert lease.parse(json.dumps(me._asdict()).encode()) == me and not me.job and not me.restarts
