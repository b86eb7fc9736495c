"""Finds the processes of a run in the environment that their launcher set: a pure function.

The first of these that the environment describes:

1. JAXTRAIN_COORDINATOR (host:port of process 0), JAXTRAIN_PROCESSES and JAXTRAIN_PROCESS.
2. Open MPI: OMPI_COMM_WORLD_*. On several hosts JAXTRAIN_COORDINATOR must be passed on (mpirun -x).
3. A task of a SLURM job step: SLURM_STEP_*. Process 0 is on the step's first node. The port is
   derived from the job, the step and the count of restarts. (JAX takes the job id modulo 4096.)
4. A TPU pod: TPU_WORKER_* and MEGASCALE_* (GKE), or the same from the metadata of a TPU VM
   (`jaxtrain.parallel.cluster.notices`).
5. None of them: one process.

Processes on several hosts authenticate to each other by JAXTRAIN_SECRET (`secret_of`), which their
launcher makes.
"""

import re
import zlib
from collections.abc import Mapping
from typing import NamedTuple

from jaxtrain.parallel.cluster import rendezvous
from loaders.io.checks import UserError

VARIABLES = ("JAXTRAIN_COORDINATOR", "JAXTRAIN_PROCESSES", "JAXTRAIN_PROCESS")
NUMBER = "[0-9]{1,9}"
HOST = r"[\w\[:][\w.:%\[\]-]{0,253}"  # or its address
MAX_JOB = 200  # [characters] of its name
MAX_NODES = 1_000_000
SECRET = "JAXTRAIN_SECRET"
MIN_SECRET = 16  # [characters] fewer could be found by trying
TPU_PORT = 8482  # JAX documents it for pods, and their firewalls leave it open
# Below Linux's ephemeral ports, so that no other connection holds one by chance.
PORTS = range(20_000, 32_000)


class ClusterError(UserError, ValueError):
    """An environment that does not determine a run's processes. The message has all reasons."""

    def __init__(self, problems: list[str]):
        self.problems = tuple(problems)
        head = "the environment does not determine the processes of the run:"
        super().__init__("\n".join([head, *(f"  {p}" for p in problems)]))


class Cluster(NamedTuple):
    """The processes of a run."""

    processes: int = 1
    process: int = 0
    coordinator: str = ""  # host:port of process 0; "" if it is the only one
    local_devices: tuple[int, ...] = ()  # of the visible GPUs, those of this process; () = all
    launcher: str = "one process"
    job: str = ""  # the launcher's name for this start of the run, the same in all its processes
    note: str = ""  # the part of the environment that was ignored, and why


def from_environment(
    environment: Mapping[str, str], *, gpus: int = 0, metadata: Mapping[str, str] | None = None
) -> Cluster:
    """Return the cluster that ``environment`` describes.

    ``gpus``: the machine's NVIDIA GPUs, which CUDA_VISIBLE_DEVICES may hide. ``metadata``: of a TPU
    VM. Raises ClusterError: the environment contradicts itself, or a process would see wrong GPUs.
    """
    given = {name: environment[name] for name in VARIABLES if environment.get(name)}
    try:
        found = _open_mpi(environment, gpus) or _slurm(environment, gpus)
        found = found or _tpu(environment, metadata or {}) or Cluster()
    except ClusterError:
        raise
    except (ValueError, IndexError, ZeroDivisionError) as error:
        launchers = re.compile("SLURM_(STEP|PROC|LOCAL|NODEID|GPUS)|OMPI|MEGA")
        named = (f"{k}={v[:80]!r}" for k, v in sorted(environment.items()) if launchers.match(k))
        text = f"the launcher's variables are not numbers, or too large ({error})"
        raise ClusterError([f"{text}: {', '.join(named)}"]) from error
    if found.processes > 1 and set(given) == {VARIABLES[0]}:
        found = found._replace(coordinator=_address(given[VARIABLES[0]]))
    elif given:
        found = _explicit(given)
    _check(found)
    return found


def _check(found: Cluster) -> None:
    host = found.coordinator.rpartition(":")[0]
    problems = []
    if not 0 <= found.process < found.processes:
        problems.append(
            f"process {found.process} of {found.processes} does not exist; processes are numbered"
            " from 0"
        )
    elif found.processes > 1 and not found.coordinator:
        remedy = "pass it on with mpirun -x JAXTRAIN_COORDINATOR=host:port"
        problems.append(f"{found.launcher} does not say where process 0 runs; {remedy}")
    if found.coordinator and not re.fullmatch(HOST, host):
        problems.append(f"{found.launcher}: {host[:80]!r} is not the name of a host for process 0")
    if len(found.job) > MAX_JOB or not found.job.isprintable():
        problems.append(f"{found.launcher}: {found.job[:80]!r} is not the name of a job")
    if problems:
        raise ClusterError(problems)


def _plain(name: str) -> str:
    return name[:80] if name.isprintable() else ascii(name[:80])


def _number(text: str) -> int:
    if not re.fullmatch(NUMBER, text):
        raise ValueError(f"{text[:80]!r} is not a number of at most 9 digits")
    return int(text)


def secret_of(environment: Mapping[str, str], coordinator: str) -> str:
    """Return the secret that the processes of a run share, or "" if they need or want none.

    Raises ClusterError for a short one, or none if others reach ``coordinator`` [host:port].
    """
    given = environment.get(SECRET, "")
    if given == "none" or (not given and rendezvous.is_loopback(coordinator.rpartition(":")[0])):
        return ""
    if not given:
        text = (
            f"{SECRET} is not set, and other machines can reach process 0 at {coordinator}. Set it"
            " to the same random "
        )
        text += (
            f"text in all processes (export {SECRET}=$(openssl rand -hex 32) before srun; mpirun -x"
            f" {SECRET}), "
        )
        raise ClusterError([f"{text}or to none in a network where everybody is trusted"])
    if len(given) < MIN_SECRET:
        text = (
            f"{SECRET} has {len(given)} characters; it needs at least {MIN_SECRET}: openssl rand"
            " -hex 32"
        )
        raise ClusterError([text])
    return given


def _explicit(given: Mapping[str, str]) -> Cluster:
    named = ", ".join(given)
    problems = [
        f"{name} is not set, although {named} is" for name in VARIABLES if name not in given
    ]
    address, numbers = "", []
    for name in VARIABLES[1:]:
        try:
            numbers.append(_number(given.get(name, "0")))
        except ValueError as error:
            problems.append(f"{name}={error}")
    try:
        address = _address(given[VARIABLES[0]]) if VARIABLES[0] in given else ""
    except ClusterError as error:
        problems += error.problems
    if problems:
        raise ClusterError(problems)
    processes, process = numbers
    return Cluster(
        processes, process, address if processes > 1 else "", launcher="JAXTRAIN variables"
    )


def _address(text: str) -> str:
    host, _, port = text.rpartition(":")
    if not host or not re.fullmatch(NUMBER, port) or not 0 < int(port) < 65536:
        raise ClusterError(
            [f"{VARIABLES[0]}={text[:80]!r} is not host:port; write for example 10.0.0.1:27508"]
        )
    return text


def _open_mpi(environment: Mapping[str, str], gpus: int) -> Cluster | None:
    names = [f"OMPI_COMM_WORLD_{key}" for key in ("SIZE", "RANK", "LOCAL_SIZE", "LOCAL_RANK")]
    if not all(environment.get(name, "").isdecimal() for name in names):
        return None
    size, rank, local_size, local_rank = (_number(environment[name]) for name in names)
    job = environment.get("PMIX_NAMESPACE") or environment.get("OMPI_MCA_ess_base_jobid", "")
    name = f"process {rank} of {size}"
    own = _own_gpus(environment, gpus, 0, local_size, local_rank, name)
    coordinator = f"127.0.0.1:{_port(job)}" if 1 < size == local_size else ""
    return Cluster(size, rank, coordinator, own, "Open MPI", job)


def _slurm(environment: Mapping[str, str], gpus: int) -> Cluster | None:
    if not environment.get("SLURM_JOB_ID"):
        return None
    names = (
        "STEP_ID",
        "STEP_NUM_TASKS",
        "STEP_NODELIST",
        "STEP_TASKS_PER_NODE",
        "PROCID",
        "LOCALID",
        "NODEID",
    )
    values = {name: environment.get(f"SLURM_{name}", "") for name in names}
    if missing := [f"SLURM_{name}" for name, value in values.items() if not value]:
        job = _plain(environment["SLURM_JOB_ID"])
        note = (
            f"this process is not a task of a step of SLURM job {job} ({', '.join(missing)} not"
            " set), so the run has "
        )
        return Cluster(note=f"{note}one process; start several with srun")
    tasks, process = _number(values["STEP_NUM_TASKS"]), _number(values["PROCID"])
    restarts = environment.get("SLURM_RESTART_COUNT", "0")
    job = f"{environment['SLURM_JOB_ID']}.{values['STEP_ID']}.{restarts}"
    local = _tasks_per_node(values["STEP_TASKS_PER_NODE"])[_number(values["NODEID"])]
    host = "127.0.0.1" if local == tasks else first_host(values["STEP_NODELIST"])
    node = _plain(environment.get("SLURMD_NODENAME", "its node"))
    name = f"process {process} of {tasks} (on {node})"
    allocated = _number(environment.get("SLURM_GPUS_ON_NODE") or "0")
    own = _own_gpus(environment, gpus, allocated, local, _number(values["LOCALID"]), name)
    return Cluster(tasks, process, f"{host}:{_port(job)}" if tasks > 1 else "", own, "SLURM", job)


def first_host(nodes: str) -> str:
    """Return the first host of a SLURM node list: node[003-007,12],gpu1 → node003."""
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])+", nodes)
    if not first:
        raise ClusterError([f"the SLURM node list {nodes[:80]!r} is empty"])
    return re.sub(r"\[(\w+)[^\]]*\]", r"\1", first[0])


def _tasks_per_node(text: str) -> list[int]:
    """Expand 2(x3),1 to [2, 2, 2, 1]."""
    groups = re.findall(r"(\d+)(?:\(x(\d+)\))?", text)
    found = [(_number(n), _number(times or "1")) for n, times in groups]
    if sum(times for _, times in found) > MAX_NODES:
        raise ValueError(f"more than {MAX_NODES} nodes")
    return [n for n, times in found for _ in range(times)]


def _port(job: str) -> int:
    return PORTS[zlib.crc32(job.encode()) % len(PORTS)]


def _tpu(environment: Mapping[str, str], metadata: Mapping[str, str]) -> Cluster | None:
    platforms = environment.get("JAX_PLATFORMS", "")
    if platforms and "tpu" not in platforms:
        return None
    # Lines of tpu-env are NAME: 'value'.
    lines = re.findall(r"^(\w+): *'?([^'\n]*)'?$", metadata.get("tpu-env", ""), re.MULTILINE)
    settings = dict(lines) | dict(environment)
    hosts = settings.get("TPU_PROCESS_ADDRESSES") or settings.get("TPU_WORKER_HOSTNAMES") or ""
    worker = settings.get("TPU_WORKER_ID", "")
    if listed := metadata.get("worker-network-endpoints"):  # host,… or name:id:address,…
        hosts, worker = listed, metadata.get("agent-worker-number", "")
    if not hosts or not worker.isdecimal():
        return None
    workers = [_tpu_host(host) for host in hosts.split(",")]
    slices = _number(settings.get("MEGASCALE_NUM_SLICES") or "1")
    own = _number(settings.get("MEGASCALE_SLICE_ID") or "0")
    leader = settings.get("MEGASCALE_COORDINATOR_ADDRESS")
    first = _tpu_host(leader) if leader else workers[0]
    process, processes = own * len(workers) + _number(worker), slices * len(workers)
    if process >= processes:
        raise ClusterError(
            [
                f"TPU worker {worker} of slice {own} does not exist: {slices} × {len(workers)} are"
                " listed"
            ]
        )
    return Cluster(
        processes, process, f"{first}:{TPU_PORT}" if processes > 1 else "", launcher="TPU pod"
    )


def _tpu_host(text: str) -> str:
    parts = text.strip().split(":")
    return parts[2] if len(parts) == 3 else parts[0]


def _own_gpus(
    environment: Mapping[str, str], gpus: int, allocated: int, tasks: int, task: int, name: str
) -> tuple[int, ...]:
    """Return the ordinals of a process's own GPUs among the visible ones, () = all.

    ``task`` is one of ``tasks`` on a node with ``allocated`` GPUs (0 = unknown). A local rank is
    not an ordinal: a process that was given only its own GPUs sees them numbered from 0.
    """
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        hidden = ("", "-1", "NoDevFiles")
        gpus = sum(name.strip() not in hidden for name in visible.split(","))
    per_task = bool(environment.get("SLURM_GPUS_PER_TASK"))
    if not (gpus < tasks or 0 < gpus < allocated or per_task):  # each task sees all of its node
        if gpus % tasks:
            raise ClusterError(
                [
                    f"{name} sees {gpus} GPUs, which the {tasks} tasks of its node cannot share"
                    " evenly"
                ]
            )
        each = gpus // tasks
        return tuple(range(task * each, (task + 1) * each)) if tasks > 1 else ()
    if allocated > gpus * tasks:
        text = (
            f"{name} sees {gpus} of the {allocated} GPUs of its node, and the node has {tasks}"
            " task(s): the rest would "
        )
        text += (
            "idle. GPUs are bound per task; use --gpus-per-node without --gpus-per-task and"
            " --gpu-bind, or a task per GPU"
        )
        raise ClusterError([text])
    return tuple(range(gpus)) if tasks > 1 else ()
