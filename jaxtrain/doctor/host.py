"""This machine as a process sees it: cores, memory, open files, threads, /dev/shm."""

import contextlib
import os
import pathlib
import resource
import shutil
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from jaxtrain.doctor.check import Check, fail, ok, warn
from jaxtrain.telemetry.console import in_bytes
from loaders.io import machine

GROUP = "host"
FEW_CORES = 2  # srun gives a task one core, whose hyperthreads count as two
MIN_MEMORY = 2e9  # [bytes] for the start of a run
SHARED_MEMORY = 1e9  # [bytes] of /dev/shm that NCCL's rings between the GPUs of a host may take


def examine(*, processes: int) -> Iterator[Check]:
    """Check this machine. ``processes`` is their number in the job."""
    yield _cores()
    yield _memory()
    yield _open_files(processes)
    yield _threads()
    n_gpus = sum(path.name.startswith("nvidia") for path in machine.accelerators())
    yield _shared_memory(n_gpus)


def _cores(environment: Mapping[str, str] = os.environ) -> Check:
    usable = machine.cores()
    installed = os.cpu_count() or 1
    text = f"{usable} of {installed} cores"
    requested = environment.get("SLURM_CPUS_PER_TASK", "")
    if requested.isdecimal() and usable < int(requested):
        # Since SLURM 22.05 srun takes no --cpus-per-task from sbatch, and gives a task one core.
        text += f", and SLURM_CPUS_PER_TASK={requested}: an affinity mask or a quota leaves fewer"
        remedy = (
            f"srun --cpus-per-task={requested}, also if sbatch has it; --cpu-bind=cores or none"
        )
        return warn(GROUP, "cores", text, remedy)
    if usable <= FEW_CORES and installed >= 4 * usable:
        text += f": an affinity mask or a quota leaves {usable}, and the loader decodes there"
        remedy = "srun --cpus-per-task=N --cpu-bind=none, mpirun --bind-to none, docker --cpus"
        return warn(GROUP, "cores", text, remedy)
    return ok(GROUP, "cores", text)


def _memory() -> Check:
    info = machine.meminfo()
    if "MemAvailable" not in info:  # macOS has no such file
        total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        text = f"{in_bytes(total)} in all; how much is available is not known here"
        return warn(GROUP, "memory", text, "see top, or vm_stat")
    total = info["MemTotal"]
    available = info["MemAvailable"]
    text = f"{in_bytes(available)} available of {in_bytes(total)}"
    limit, used = of_cgroup("memory", machine.cgroups())
    if limit < total:
        available = min(available, max(int(limit) - used, 0))
        text += f"; a limit of {in_bytes(limit)} (cgroup), of which {in_bytes(used)} are used"
    if available >= MIN_MEMORY:
        return ok(GROUP, "memory", text)
    remedy = (
        "end other programs, or ask for more:"
        " srun --mem=, docker run --memory=, resources.limits.memory of a pod"
    )
    return fail(GROUP, "memory", text, remedy)


class Quota(NamedTuple):
    limit: float  # infinite if there is none
    used: int


def of_cgroup(kind: str, folders: Iterable[pathlib.Path]) -> Quota:
    """Return the quota of "memory" or "pids" of the cgroup that leaves least."""
    tightest = Quota(float("inf"), 0)
    for folder in folders:
        with contextlib.suppress(OSError, ValueError):  # the root has none; "max" is no number
            limit = int((folder / f"{kind}.max").read_text())
            used = int((folder / f"{kind}.current").read_text())
            if limit - used < tightest.limit - tightest.used:
                tightest = Quota(limit, used)
    return tightest


def _open_files(processes: int) -> Check:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needs = 1000 + 4 * processes  # shards and checkpoints; connections of process 0
    text = f"{soft} may be open at once"
    if soft >= needs:
        return ok(GROUP, "open files", text)
    text += f"; {needs} are better"
    remedy = f"ulimit -n {max(65536, needs)}, or LimitNOFILE of the service (hard: {hard})"
    if soft < max(256, 4 * processes):
        return fail(GROUP, "open files", text, remedy)
    return warn(GROUP, "open files", text, remedy)


def _threads() -> Check:
    """Check that a container has enough threads for XLA, gRPC and the loader."""
    needs = 64 + 8 * machine.cores()
    limit, used = of_cgroup("pids", machine.cgroups())
    quota = f"leaves {limit - used:g}" if limit < float("inf") else "limits no"
    text = f"a container {quota} threads, and a run needs about {needs}"
    if limit - used >= needs:
        return ok(GROUP, "threads", text)
    return fail(GROUP, "threads", text, "docker run --pids-limit=-1, podPidsLimit of the kubelet")


def _shared_memory(gpus: int) -> Check:
    try:
        free = shutil.disk_usage("/dev/shm").free
        text = f"{in_bytes(free)} free"
    except OSError as error:
        free = 0
        text = f"it cannot be used: {error.strerror}"
    if gpus < 2:
        text += f"; NCCL needs it between two GPUs or more, and here are {gpus}"
        return ok(GROUP, "/dev/shm", text)
    text += f"; NCCL needs {in_bytes(SHARED_MEMORY)} between {gpus} GPUs"
    if free >= SHARED_MEMORY:
        return ok(GROUP, "/dev/shm", text)
    remedy = (
        "docker run --ipc=host (or --shm-size=16g), an emptyDir of medium Memory at /dev/shm;"
        " else NCCL_SHM_DISABLE=1"
    )
    if free:
        return warn(GROUP, "/dev/shm", text, remedy)
    return fail(GROUP, "/dev/shm", text, remedy)
