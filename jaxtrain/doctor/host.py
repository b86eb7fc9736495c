"""This machine as a process sees it: cores, memory, open files, threads, /dev/shm."""

import contextlib
import os
import pathlib
import resource
import shutil
from collections.abc import Iterable, Iterator, Mapping

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
    yield _shared_memory(sum(path.name.startswith("nvidia") for path in machine.accelerators()))


def _cores(environment: Mapping[str, str] = os.environ) -> Check:
    used, there = machine.cores(), os.cpu_count() or 1
    text, asked = f"{used} of {there} cores", environment.get("SLURM_CPUS_PER_TASK", "")
    if asked.isdecimal() and used < int(asked):
        # Since SLURM 22.05 srun takes no --cpus-per-task from sbatch, and gives a task one core.
        text += f", and SLURM_CPUS_PER_TASK={asked}: an affinity mask or a quota leaves fewer"
        return warn(
            GROUP,
            "cores",
            text,
            f"srun --cpus-per-task={asked}, also if sbatch has it; --cpu-bind=cores or none",
        )
    if used <= FEW_CORES and there >= 4 * used:
        text += f": an affinity mask or a quota leaves {used}, and the loader decodes there"
        remedy = "srun --cpus-per-task=N --cpu-bind=none, mpirun --bind-to none, docker --cpus"
        return warn(GROUP, "cores", text, remedy)
    return ok(GROUP, "cores", text)


def _memory() -> Check:
    info = machine.meminfo()
    if "MemAvailable" not in info:  # macOS has no such file
        total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        text = f"{in_bytes(total)} in all; how much is available is not known here"
        return warn(GROUP, "memory", text, "see top, or vm_stat")
    total, available = info["MemTotal"], info["MemAvailable"]
    text = f"{in_bytes(available)} available of {in_bytes(total)}"
    limit, used = of_cgroup("memory", machine.cgroups())
    if limit < total:
        available = min(available, max(int(limit) - used, 0))
        text += f"; a limit of {in_bytes(limit)} (cgroup), of which {in_bytes(used)} are used"
    if available >= MIN_MEMORY:
        return ok(GROUP, "memory", text)
    remedy = (
        "end other programs, or ask for more: srun --mem=, docker run --memory=,"
        " resources.limits.memory of a pod"
    )
    return fail(GROUP, "memory", text, remedy)


def of_cgroup(kind: str, folders: Iterable[pathlib.Path]) -> tuple[float, int]:
    """Return (limit, used) of "memory" or "pids" of the tightest cgroup. It may be infinite."""
    tightest: tuple[float, int] = float("inf"), 0
    for folder in folders:
        with contextlib.suppress(OSError, ValueError):  # the root has none; "max" is no number
            most, now = (int((folder / f"{kind}.{x}").read_text()) for x in ("max", "current"))
            tightest = min(tightest, (most, now), key=lambda found: found[0] - found[1])
    return tightest


def _open_files(processes: int) -> Check:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = 1000 + 4 * processes  # shards and checkpoints; connections of process 0
    if soft >= needed:
        return ok(GROUP, "open files", f"{soft} may be open at once")
    grade = fail if soft < max(256, 4 * processes) else warn
    remedy = f"ulimit -n {max(65536, needed)}, or LimitNOFILE of the service (hard: {hard})"
    return grade(GROUP, "open files", f"{soft} may be open at once; {needed} are better", remedy)


def _threads() -> Check:
    """Check that a container has enough threads for XLA, gRPC and the loader."""
    needed, (limit, used) = 64 + 8 * machine.cores(), of_cgroup("pids", machine.cgroups())
    free = f"leaves {limit - used:g}" if limit < float("inf") else "limits no"
    text = f"a container {free} threads, and a run needs about {needed}"
    if limit - used >= needed:
        return ok(GROUP, "threads", text)
    return fail(GROUP, "threads", text, "docker run --pids-limit=-1, podPidsLimit of the kubelet")


def _shared_memory(gpus: int) -> Check:
    try:
        free = shutil.disk_usage("/dev/shm").free
        text = f"{in_bytes(free)} free"
    except OSError as error:
        free, text = 0, f"it cannot be used: {error.strerror}"
    if gpus < 2:
        return ok(
            GROUP,
            "/dev/shm",
            f"{text}; NCCL needs it between two GPUs or more, and here are {gpus}",
        )
    text += f"; NCCL needs {in_bytes(SHARED_MEMORY)} between {gpus} GPUs"
    if free >= SHARED_MEMORY:
        return ok(GROUP, "/dev/shm", text)
    remedy = (
        "docker run --ipc=host (or --shm-size=16g), an emptyDir of medium Memory at /dev/shm; else"
        " NCCL_SHM_DISABLE=1"
    )
    return (warn if free else fail)(GROUP, "/dev/shm", text, remedy)
