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

from jaxtrain.parallel.cluster import addresses
from loaders.io.checks import UserError

VARIABLES = ("JAXTRAIN_COORDINATOR", "JAXTRAIN_PROCESSES", "JAXTRAIN_PROCESS")
SLURM_STEP = (
    "STEP_ID",
    "STEP_NUM_TASKS",
    "STEP_NODELIST",
    "STEP_TASKS_PER_NODE",
    "PROCID",
    "LOCALID",
    "NODEID",
)
NUMBER = "[0-9]{1,9}"
HOST = r"[\w\[:][\w.:%\[\]-]{0,253}"  # a name or an address
MAX_JOB = 200  # [characters] of its name
MAX_NODES = 1_000_000
SECRET = "JAXTRAIN_SECRET"
MIN_SECRET = 16  # [characters] fewer could be found by trying
TPU_POD = "TPU pod"  # a launcher
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
    variables = {name: environment[name] for name in VARIABLES if environment.get(name)}
    try:
        cluster = (
            _open_mpi(environment, gpus)
            or _slurm(environment, gpus)
            or _tpu(environment, metadata or {})
            or Cluster()
        )
    except ClusterError:
        raise
    except (ValueError, IndexError, ZeroDivisionError) as error:
        listing = _list_launcher_variables(environment)
        text = f"the launcher's variables are not numbers, or too large ({error})"
        raise ClusterError([f"{text}: {listing}"]) from error
    if cluster.processes > 1 and set(variables) == {VARIABLES[0]}:
        cluster = cluster._replace(coordinator=_address(variables[VARIABLES[0]]))
    elif variables:
        cluster = _explicit(variables)
    _check(cluster)
    return cluster


def _list_launcher_variables(environment: Mapping[str, str]) -> str:
    launchers = re.compile("SLURM_(STEP|PROC|LOCAL|NODEID|GPUS)|OMPI|MEGA")
    names = [name for name in sorted(environment) if launchers.match(name)]
    return ", ".join(f"{name}={environment[name][:80]!r}" for name in names)


def _check(cluster: Cluster) -> None:
    launcher, job = cluster.launcher, cluster.job
    host = cluster.coordinator.rpartition(":")[0]
    problems = []
    if not 0 <= cluster.process < cluster.processes:
        process = f"process {cluster.process} of {cluster.processes}"
        problems.append(f"{process} does not exist; processes are numbered from 0")
    elif cluster.processes > 1 and not cluster.coordinator:
        remedy = "pass it on with mpirun -x JAXTRAIN_COORDINATOR=host:port"
        problems.append(f"{launcher} does not say where process 0 runs; {remedy}")
    if cluster.coordinator and not re.fullmatch(HOST, host):
        problems.append(f"{launcher}: {host[:80]!r} is not the name of a host for process 0")
    if len(job) > MAX_JOB or not job.isprintable():
        problems.append(f"{launcher}: {job[:80]!r} is not the name of a job")
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
    secret = environment.get(SECRET, "")
    host = coordinator.rpartition(":")[0]
    if secret == "none" or (not secret and addresses.is_loopback(host)):
        return ""
    if not secret:
        raise ClusterError(
            [
                f"{SECRET} is not set, and other machines can reach process 0 at {coordinator}."
                f" Set it to the same random text in all processes (export {SECRET}=$(openssl rand"
                f" -hex 32) before srun; mpirun -x {SECRET}),"
                " or to none in a network where everybody is trusted"
            ]
        )
    if len(secret) < MIN_SECRET:
        lengths = f"{len(secret)} characters; it needs at least {MIN_SECRET}"
        raise ClusterError([f"{SECRET} has {lengths}: openssl rand -hex 32"])
    return secret


def _explicit(variables: Mapping[str, str]) -> Cluster:
    names = ", ".join(variables)
    problems = []
    for name in VARIABLES:
        if name not in variables:
            problems.append(f"{name} is not set, although {names} is")
    numbers = []
    for name in VARIABLES[1:]:
        try:
            numbers.append(_number(variables.get(name, "0")))
        except ValueError as error:
            problems.append(f"{name}={error}")
    address = ""
    if VARIABLES[0] in variables:
        try:
            address = _address(variables[VARIABLES[0]])
        except ClusterError as error:
            problems += error.problems
    if problems:
        raise ClusterError(problems)
    processes, process = numbers
    coordinator = address if processes > 1 else ""
    return Cluster(processes, process, coordinator, launcher="JAXTRAIN variables")


def _address(text: str) -> str:
    host, _, port = text.rpartition(":")
    example = "for example 10.0.0.1:27508"
    is_host = bool(host)
    if ":" in host or "[" in host:
        is_host = host[0] == "[" and host[-1] == "]" and addresses.is_ipv6(host[1:-1])
        example = "an IPv6 address in brackets, for example [::1]:27508"
    if addresses.is_ipv6(host):
        example = f"[{host}]:{port}"
    elif addresses.is_ipv6(text):
        example = f"[{text}]:27508"
    if not is_host or not re.fullmatch(NUMBER, port) or not 0 < int(port) < 65536:
        problem = f"{VARIABLES[0]}={text[:80]!r} is not host:port"
        raise ClusterError([f"{problem}; write {example}"])
    return text


def _open_mpi(environment: Mapping[str, str], gpus: int) -> Cluster | None:
    names = [f"OMPI_COMM_WORLD_{key}" for key in ("SIZE", "RANK", "LOCAL_SIZE", "LOCAL_RANK")]
    if not all(environment.get(name, "").isdecimal() for name in names):
        return None
    size, rank, local_size, local_rank = (_number(environment[name]) for name in names)
    job = environment.get("PMIX_NAMESPACE") or environment.get("OMPI_MCA_ess_base_jobid", "")
    node = _Node(gpus, 0, local_size, local_rank)
    local_devices = _local_gpus(environment, node, f"process {rank} of {size}")
    coordinator = f"127.0.0.1:{_port(job)}" if 1 < size == local_size else ""
    return Cluster(size, rank, coordinator, local_devices, "Open MPI", job)


def _slurm(environment: Mapping[str, str], gpus: int) -> Cluster | None:
    if not environment.get("SLURM_JOB_ID"):
        return None
    values = {name: environment.get(f"SLURM_{name}", "") for name in SLURM_STEP}
    if missing := [f"SLURM_{name}" for name, value in values.items() if not value]:
        job = _plain(environment["SLURM_JOB_ID"])
        unset = ", ".join(missing)
        return Cluster(
            note=(
                f"this process is not a task of a step of SLURM job {job} ({unset} not set),"
                " so the run has one process; start several with srun"
            )
        )
    tasks = _number(values["STEP_NUM_TASKS"])
    process = _number(values["PROCID"])
    restarts = environment.get("SLURM_RESTART_COUNT", "0")
    job = f"{environment['SLURM_JOB_ID']}.{values['STEP_ID']}.{restarts}"
    tasks_per_node = _tasks_per_node(values["STEP_TASKS_PER_NODE"])
    local_tasks = tasks_per_node[_number(values["NODEID"])]
    coordinator = ""
    host = "127.0.0.1" if local_tasks == tasks else first_host(values["STEP_NODELIST"])
    if tasks > 1:
        coordinator = f"{host}:{_port(job)}"
    node_name = _plain(environment.get("SLURMD_NODENAME", "its node"))
    allocated = _number(environment.get("SLURM_GPUS_ON_NODE") or "0")
    node = _Node(gpus, allocated, local_tasks, _number(values["LOCALID"]))
    name = f"process {process} of {tasks} (on {node_name})"
    local_devices = _local_gpus(environment, node, name)
    return Cluster(tasks, process, coordinator, local_devices, "SLURM", job)


def first_host(nodes: str) -> str:
    """Return the first host of a SLURM node list: node[003-007,12],gpu1 → node003."""
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])+", nodes)
    if not first:
        raise ClusterError([f"the SLURM node list {nodes[:80]!r} is empty"])
    return re.sub(r"\[(\w+)[^\]]*\]", r"\1", first[0])


def _tasks_per_node(text: str) -> list[int]:
    """Expand 2(x3),1 to [2, 2, 2, 1]."""
    tasks = list[int]()
    for number, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", text):
        n_nodes = _number(times or "1")
        if len(tasks) + n_nodes > MAX_NODES:
            raise ValueError(f"more than {MAX_NODES} nodes")
        tasks += n_nodes * [_number(number)]
    return tasks


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
    n_slices = _number(settings.get("MEGASCALE_NUM_SLICES") or "1")
    slice_id = _number(settings.get("MEGASCALE_SLICE_ID") or "0")
    leader = settings.get("MEGASCALE_COORDINATOR_ADDRESS")
    first = _tpu_host(leader) if leader else workers[0]
    process = slice_id * len(workers) + _number(worker)
    processes = n_slices * len(workers)
    if process >= processes:
        listed = f"{n_slices} × {len(workers)} are listed"
        text = f"TPU worker {worker} of slice {slice_id} does not exist: {listed}"
        raise ClusterError([text])
    coordinator = f"{first}:{TPU_PORT}" if processes > 1 else ""
    return Cluster(processes, process, coordinator, launcher=TPU_POD)


def _tpu_host(text: str) -> str:
    """Return the host of host, host:port or name:id:host, an IPv6 address in brackets."""
    text = text.strip()
    if text.startswith("["):
        return f"{text.partition(']')[0]}]"
    parts = text.split(":", 2)
    host = parts[2] if len(parts) == 3 else parts[0]
    for address in (text, host):
        if addresses.is_ipv6(address):
            return f"[{address}]"
    return host


class _Node(NamedTuple):
    """The GPUs and the tasks of a process's node."""

    gpus: int  # of the machine
    allocated: int  # GPUs that the launcher gave to the job on this node, 0 = unknown
    tasks: int
    task: int  # this process's number among the tasks


def _local_gpus(environment: Mapping[str, str], node: _Node, name: str) -> tuple[int, ...]:
    """Return the ordinals of a process's own GPUs among the visible ones, () = all.

    A local rank is not an ordinal: a process that was given only its own GPUs sees them numbered
    from 0.
    """
    gpus, tasks = node.gpus, node.tasks
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        hidden = ("", "-1", "NoDevFiles")
        gpus = sum(ordinal.strip() not in hidden for ordinal in visible.split(","))
    per_task = bool(environment.get("SLURM_GPUS_PER_TASK"))
    sees_own_alone = gpus < tasks or 0 < gpus < node.allocated or per_task
    if not sees_own_alone:  # it sees all GPUs of its node
        if gpus % tasks:
            text = f"{name} sees {gpus} GPUs, which the {tasks} tasks of its node cannot share"
            raise ClusterError([f"{text} evenly"])
        share = gpus // tasks
        first = node.task * share
        return tuple(range(first, first + share)) if tasks > 1 else ()
    if node.allocated > gpus * tasks:
        raise ClusterError(
            [
                f"{name} sees {gpus} of the {node.allocated} GPUs of its node, and the node has"
                f" {tasks} task(s): the rest would idle. GPUs are bound per task;"
                " use --gpus-per-node without --gpus-per-task and --gpu-bind, or a task per GPU"
            ]
        )
    return tuple(range(gpus)) if tasks > 1 else ()
