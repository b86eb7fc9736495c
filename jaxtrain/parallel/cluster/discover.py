"""Discovers the processes of a run in the environment that their launcher gave them: a pure function.

The first of these that the environment describes:

1. JAXTRAIN_COORDINATOR (host:port of process 0), JAXTRAIN_PROCESSES and JAXTRAIN_PROCESS.
2. Open MPI: OMPI_COMM_WORLD_*. On several hosts JAXTRAIN_COORDINATOR must be passed on (mpirun -x), unless Open MPI itself
   says where it was started.
3. A task of a SLURM job step: SLURM_STEP_*. Process 0 is on the step's first node. The port is derived from the
   job, the step and the count of restarts, below the ports that systems hand out (JAX takes the job id modulo 4096).
4. A TPU pod: TPU_WORKER_* and MEGASCALE_* (GKE), or the same from the metadata of a TPU VM
(`jaxtrain.parallel.cluster.notices`).
5. None of them: one process.

Processes of several hosts prove to each other that they belong together by JAXTRAIN_SECRET (`secret_of`), which their launcher
makes.
"""

import re
import zlib
from collections.abc import Mapping
from typing import NamedTuple

from jaxtrain.parallel.cluster import rendezvous

VARIABLES = ("JAXTRAIN_COORDINATOR", "JAXTRAIN_PROCESSES", "JAXTRAIN_PROCESS")
NUMBER = "[0-9]{1,9}"
HOST = r"[\w\[:][\w.:%\[\]-]{0,253}"  # or its address
LONGEST_JOB = 200  # [characters] of its name
MOST_NODES = 1_000_000
SECRET = "JAXTRAIN_SECRET"
SHORTEST = 16  # [characters] of a secret: fewer could be found by trying
TPU_PORT = 8482  # the one that JAX documents for pods, and that their firewalls leave open
PORTS = range(20_000, 32_000)  # below Linux's ephemeral ports, so that no other connection holds one by chance


class ClusterError(ValueError):
    """An environment that does not determine the processes of a run. The message lists every reason."""

    def __init__(self, problems: list[str]):
        self.problems = tuple(problems)
        super().__init__(
            "\n".join(["the environment does not determine the processes of the run:", *(f"  {p}" for p in problems)])
        )


class Cluster(NamedTuple):
    """The processes of a run."""

    processes: int = 1
    process: int = 0
    coordinator: str = ""  # host:port of process 0; "" when there is only one
    local_devices: tuple[int, ...] = ()  # which of the GPUs that this process sees are its own; () = all of them
    launcher: str = "one process"  # who started them
    job: str = ""  # the launcher's name for this start of the run, the same in all its processes
    note: str = ""  # what part of the environment was ignored, and why


def from_environment(environment: Mapping[str, str], *, gpus: int = 0, metadata: Mapping[str, str] | None = None) -> Cluster:
    """Returns the cluster that ``environment`` describes.

    Args:
      gpus: how many NVIDIA GPUs the machine has; CUDA_VISIBLE_DEVICES may hide some.
      metadata: of a TPU VM: agent-worker-number, worker-network-endpoints, tpu-env.

    Raises:
      ClusterError: the environment contradicts itself, or a process would see the wrong GPUs.
    """
    given = {name: environment[name] for name in VARIABLES if environment.get(name)}
    try:
        launched = _open_mpi(environment, gpus) or _slurm(environment, gpus) or _tpu(environment, metadata or {})
        launched = launched and _checked(launched)
    except ClusterError:
        raise
    except (ValueError, IndexError, ZeroDivisionError) as error:
        named = [
            f"{k}={v[:80]!r}"
            for k, v in sorted(environment.items())
            if re.match("SLURM_(STEP|PROC|LOCAL|NODEID|GPUS)|OMPI|MEGA", k)
        ]
        raise ClusterError([f"the launcher's variables are no numbers, or too large ({error}): {', '.join(named)}"]) from error
    if launched and launched.processes > 1 and set(given) == {VARIABLES[0]}:
        return _checked(launched._replace(coordinator=_address(given[VARIABLES[0]])))
    if given:
        return _checked(_explicit(given))
    if launched and launched.processes > 1 and not launched.coordinator:
        remedy = "pass it on with mpirun -x JAXTRAIN_COORDINATOR=host:port"
        raise ClusterError([f"{launched.launcher} does not say where process 0 runs; {remedy}"])
    return launched or Cluster()


def _checked(found: Cluster) -> Cluster:
    """The cluster. Raises ClusterError for one that cannot be, whoever's variables it is from."""
    host = found.coordinator.rpartition(":")[0]
    problems = []
    if not 0 <= found.process < found.processes:
        problems.append(f"process {found.process} of {found.processes} does not exist; processes are numbered from 0")
    if found.coordinator and not re.fullmatch(HOST, host):
        problems.append(f"{found.launcher}: {host[:80]!r}, where process 0 is to be, is no name of a host")
    if len(found.job) > LONGEST_JOB or not found.job.isprintable():
        problems.append(f"{found.launcher}: {found.job[:80]!r} is no name of a job")
    if problems:
        raise ClusterError(problems)
    return found


def _plain(name: str) -> str:
    """A name as it may be in a message."""
    return name[:80] if name.isprintable() else ascii(name[:80])


def _number(text: str) -> int:
    """A number that is not negative. Raises ValueError."""
    if not re.fullmatch(NUMBER, text):
        raise ValueError(f"{text[:80]!r} is not a number of at most 9 digits")
    return int(text)


def secret_of(environment: Mapping[str, str], coordinator: str) -> str:
    """Returns the secret by which the processes of a run know each other; "" = none is needed, or none wanted.

    Raises:
      ClusterError: ``coordinator`` [host:port] can be reached from other machines, and there is no secret, or a short one.
    """
    given = environment.get(SECRET, "")
    if given == "none" or (not given and rendezvous.is_loopback(coordinator.rpartition(":")[0])):
        return ""
    if not given:
        raise ClusterError(
            [
                f"{SECRET} is not set, and others than this run can reach its process 0 at {coordinator}. Set it to the same "
                f"random text in all processes (export {SECRET}=$(openssl rand -hex 32) before srun; mpirun -x {SECRET}), or "
                "to none in a network where everybody is trusted"
            ]
        )
    if len(given) < SHORTEST:
        raise ClusterError([f"{SECRET} has {len(given)} characters; it needs at least {SHORTEST}: openssl rand -hex 32"])
    return given


def _explicit(given: Mapping[str, str]) -> Cluster:
    problems = [f"{name} is not set, although {', '.join(given)} is" for name in VARIABLES if name not in given]
    numbers = {}
    for name in VARIABLES[1:]:
        is_number = re.fullmatch(NUMBER, given.get(name, "")) is not None
        if name in given and not is_number:
            problems.append(f"{name}={given[name][:80]!r} is not a number of at most 9 digits")
        numbers[name] = int(given[name]) if is_number else 0
    try:
        address = _address(given[VARIABLES[0]]) if VARIABLES[0] in given else ""
    except ClusterError as error:
        problems += error.problems
    processes, process = numbers.values()
    if problems:
        raise ClusterError(problems)
    return Cluster(processes, process, address if processes > 1 else "", launcher="JAXTRAIN variables")


def _address(text: str) -> str:
    host, _, port = text.rpartition(":")
    if not host or not re.fullmatch(NUMBER, port) or not 0 < int(port) < 65536:
        raise ClusterError([f"{VARIABLES[0]}={text[:80]!r} is not host:port; write for example 10.0.0.1:27508"])
    return text


def _open_mpi(environment: Mapping[str, str], gpus: int) -> Cluster | None:
    names = {key: f"OMPI_COMM_WORLD_{key}" for key in ("SIZE", "RANK", "LOCAL_SIZE", "LOCAL_RANK")}
    if not all(environment.get(name, "").isdecimal() for name in names.values()):
        return None
    size, rank, local_size, local_rank = (_number(environment[name]) for name in names.values())
    uri = environment.get("OMPI_MCA_orte_hnp_uri", "")  # 1531576320.0;tcp://10.96.0.1,10.148.0.1:34911
    job = environment.get("PMIX_NAMESPACE") or uri.partition(";")[0] or environment.get("OMPI_MCA_ess_base_jobid", "")
    launched_at = re.search(r"tcp://([^,:]+)|tcp6://(\[[^\],]+)", uri)
    host = ""
    if local_size == size:
        host = "127.0.0.1"
    elif launched_at:
        host = launched_at[1] or f"{launched_at[2]}]"
    own = _own_gpus(environment, gpus, 0, local_size, local_rank, f"process {rank} of {size}")
    coordinator = f"{host}:{_port(job)}" if host and size > 1 else ""
    return Cluster(size, rank, coordinator, own, "Open MPI", job)


def _slurm(environment: Mapping[str, str], gpus: int) -> Cluster | None:
    if not environment.get("SLURM_JOB_ID"):
        return None
    names = ("STEP_ID", "STEP_NUM_TASKS", "STEP_NODELIST", "STEP_TASKS_PER_NODE", "PROCID", "LOCALID", "NODEID")
    values = {name: environment.get(f"SLURM_{name}", "") for name in names}
    if missing := [f"SLURM_{name}" for name, value in values.items() if not value]:
        note = f"this process is not a task of a step of SLURM job {_plain(environment['SLURM_JOB_ID'])} "
        return Cluster(note=note + f"({', '.join(missing)} not set), so the run has one process; start several with srun")
    tasks, process = _number(values["STEP_NUM_TASKS"]), _number(values["PROCID"])
    job = f"{environment['SLURM_JOB_ID']}.{values['STEP_ID']}.{environment.get('SLURM_RESTART_COUNT', '0')}"
    local = _tasks_per_node(values["STEP_TASKS_PER_NODE"])[_number(values["NODEID"])]
    host = "127.0.0.1" if local == tasks else first_host(values["STEP_NODELIST"])
    name = f"process {process} of {tasks} (on {_plain(environment.get('SLURMD_NODENAME', 'its node'))})"
    allocated = _number(environment.get("SLURM_GPUS_ON_NODE") or "0")
    own = _own_gpus(environment, gpus, allocated, local, _number(values["LOCALID"]), name)
    return Cluster(tasks, process, f"{host}:{_port(job)}" if tasks > 1 else "", own, "SLURM", job)


def first_host(nodes: str) -> str:
    """Returns the first host of a SLURM node list: node[003-007,12],gpu1 → node003."""
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])+", nodes)
    if not first:
        raise ClusterError([f"the SLURM node list {nodes[:80]!r} is empty"])
    return re.sub(r"\[(\w+)[^\]]*\]", r"\1", first[0])


def _tasks_per_node(text: str) -> list[int]:
    """2(x3),1 → [2, 2, 2, 1]"""
    found = [(_number(n), _number(times or "1")) for n, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", text)]
    if sum(times for _, times in found) > MOST_NODES:
        raise ValueError(f"more than {MOST_NODES} nodes")
    return [n for n, times in found for _ in range(times)]


def _port(job: str) -> int:
    return PORTS[zlib.crc32(job.encode()) % len(PORTS)]


def _tpu(environment: Mapping[str, str], metadata: Mapping[str, str]) -> Cluster | None:
    platforms = environment.get("JAX_PLATFORMS", "")
    if platforms and "tpu" not in platforms:
        return None
    # Lines of tpu-env are NAME: 'value'.
    settings = dict(re.findall(r"^(\w+): *'?([^'\n]*)'?$", metadata.get("tpu-env", ""), re.MULTILINE)) | dict(environment)
    hosts = settings.get("TPU_PROCESS_ADDRESSES") or settings.get("TPU_WORKER_HOSTNAMES") or ""
    worker = settings.get("TPU_WORKER_ID", "")
    if metadata.get("worker-network-endpoints"):  # host,host or name:id:address,name:id:address
        hosts, worker = metadata["worker-network-endpoints"], metadata.get("agent-worker-number", "")
    if not hosts or not worker.isdecimal():
        return None
    workers = [_tpu_host(host) for host in hosts.split(",")]
    slices, own = _number(settings.get("MEGASCALE_NUM_SLICES") or "1"), _number(settings.get("MEGASCALE_SLICE_ID") or "0")
    leader = settings.get("MEGASCALE_COORDINATOR_ADDRESS")
    first = _tpu_host(leader) if leader else workers[0]
    process, processes = own * len(workers) + _number(worker), slices * len(workers)
    if process >= processes:
        raise ClusterError([f"TPU worker {worker} of slice {own} does not exist: {slices} × {len(workers)} are listed"])
    return Cluster(processes, process, f"{first}:{TPU_PORT}" if processes > 1 else "", launcher="TPU pod")


def _tpu_host(text: str) -> str:
    parts = text.strip().split(":")
    return parts[2] if len(parts) == 3 else parts[0]


def _own_gpus(environment: Mapping[str, str], gpus: int, allocated: int, tasks: int, task: int, name: str) -> tuple[int, ...]:
    """Returns the ordinals of a process's own GPUs among those that it sees.

    ``task`` is one of ``tasks`` on a node with ``allocated`` GPUs (0 = not known). A local rank is not an ordinal: a process
    that was given only its own GPUs sees them numbered from 0.
    """
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        gpus = len([name for name in visible.split(",") if name.strip() not in ("", "-1", "NoDevFiles")])
    bound = gpus < tasks or 0 < gpus < allocated or bool(environment.get("SLURM_GPUS_PER_TASK"))
    if not bound:
        if gpus % tasks:
            raise ClusterError([f"{name} sees {gpus} GPUs, which the {tasks} tasks of its node cannot share evenly"])
        return tuple(range(task * gpus // tasks, (task + 1) * gpus // tasks)) if tasks > 1 else ()
    if allocated > gpus * tasks:
        raise ClusterError(
            [
                f"{name} sees {gpus} of the {allocated} GPUs of its node, and the node has {tasks} task(s): the rest would "
                "idle. GPUs are bound per task; use --gpus-per-node without --gpus-per-task and --gpu-bind, or a task per GPU"
            ]
        )
    return tuple(range(gpus)) if tasks > 1 else ()
