"""This machine as a process sees it: cores, memory and its limits, /dev/shm, open files, temporary files."""

import contextlib
import os
import pathlib
import resource
import shutil
import tempfile
from collections.abc import Iterator, Mapping

from jaxtrain.doctor.check import Check, in_bytes, ok, warn
from jaxtrain.doctor.check import fail as failed
from loaders.io import machine

GROUP = "host"
FEW_CORES = 2  # srun gives a task one core, whose hyperthreads count as two
LITTLE_MEMORY = 2e9  # [bytes] with which no run begins well
SHARED_MEMORY = 1e9  # [bytes] of /dev/shm that NCCL's rings between the GPUs of a host may take
TEMPORARY = 1e9  # [bytes]
CONTAINERS = {"/.dockerenv": "Docker", "/run/.containerenv": "Podman", "/.singularity.d": "Apptainer"}


def examine(*, processes: int, gpus: int) -> Iterator[Check]:
    """Args: processes of the job; gpus of this machine."""
    yield _cores()
    yield _memory()
    yield from _address_space()
    yield from _file_size()
    yield _open_files(processes)
    yield _threads()
    yield from _threads_of_user()
    yield _shared_memory(gpus)
    yield _temporary()


def _cores(environment: Mapping[str, str] = os.environ) -> Check:
    used, there = machine.cores(), os.cpu_count() or 1
    text, asked = f"{used} of {there} cores", environment.get("SLURM_CPUS_PER_TASK", "")
    if asked.isdecimal() and used < int(asked):
        # Since SLURM 22.05 srun takes no --cpus-per-task from sbatch, and gives a task one core.
        text += f", and SLURM_CPUS_PER_TASK={asked}: an affinity mask or a quota leaves fewer"
        return warn(GROUP, "cores", text, f"srun --cpus-per-task={asked}, also where sbatch has it; --cpu-bind=cores or none")
    if used <= FEW_CORES and there >= 4 * used:
        remedy = "give the process more: srun --cpus-per-task=N --cpu-bind=none, mpirun --bind-to none, a container's limit"
        text += f": an affinity mask or a quota leaves {used}, and the loader decodes there"
        return warn(GROUP, "cores", text, remedy)
    return ok(GROUP, "cores", text)


def _memory() -> Check:
    info = meminfo()
    total = float(info.get("MemTotal", 0) or os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    limit, used = cgroup_memory()
    if "MemAvailable" not in info:  # macOS has no such file
        return warn(
            GROUP, "memory", f"{in_bytes(total)} in all; how much is available is not known here", "see top, or vm_stat"
        )
    available = float(info["MemAvailable"])
    text = f"{in_bytes(available)} available of {in_bytes(total)}"
    if limit < total:
        available = min(available, max(limit - used, 0))
        text += f"; a limit of {in_bytes(limit)} (cgroup), of which {in_bytes(used)} are used"
    if available < LITTLE_MEMORY:
        remedy = "end what uses it, or ask for more: srun --mem=, docker run --memory=, resources.limits.memory of a pod"
        return failed(GROUP, "memory", text, remedy)
    return ok(GROUP, "memory", f"{text}{_container()}")


def meminfo(path: str = "/proc/meminfo") -> dict[str, int]:
    """Bytes by name; empty where there is no such file."""
    try:
        lines = pathlib.Path(path).read_text().splitlines()
    except OSError:
        return {}
    return {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines if line.endswith("kB")}


def cgroup_memory(membership: str = "/proc/self/cgroup", mount: str = "/sys/fs/cgroup") -> tuple[float, int]:
    """(limit, used) [bytes] of the tightest cgroup that this process is in; infinite where there is none."""
    try:
        lines = pathlib.Path(membership).read_text().splitlines()
    except OSError:
        lines = []
    tightest = (float("inf"), 0)
    for line in lines:
        number, controllers, name = line.split(":", 2)
        if number == "0":
            root, most, now = pathlib.Path(mount), "memory.max", "memory.current"
        elif "memory" in controllers.split(","):
            root, most, now = pathlib.Path(mount, "memory"), "memory.limit_in_bytes", "memory.usage_in_bytes"
        else:
            continue
        folder = root / name.lstrip("/")
        while folder.is_relative_to(root):  # a limit of any ancestor binds
            try:
                found = int((folder / most).read_text()), int((folder / now).read_text())
                tightest = min(tightest, found, key=lambda x: x[0] - x[1])
            except (OSError, ValueError):  # the root has no such file; "max" is no number
                pass
            folder = folder.parent
    return tightest


def _container() -> str:
    found = [name for path, name in CONTAINERS.items() if os.path.exists(path)]
    if "KUBERNETES_SERVICE_HOST" in os.environ:
        found.append("Kubernetes")
    return f"; in a container ({', '.join(found)})" if found else ""


def _address_space() -> Iterator[Check]:
    limited = False
    for what, kind, letter in (("address space", resource.RLIMIT_AS, "v"), ("data segment", resource.RLIMIT_DATA, "d")):
        limit, _ = resource.getrlimit(kind)
        if limit != resource.RLIM_INFINITY:
            text = f"the {what} is limited to {in_bytes(limit)}; what is mapped and not used yet counts, though it is no memory"
            yield warn(GROUP, what, text, f"ulimit -{letter} unlimited, before the launcher's command")
            limited = True
    if not limited:
        yield ok(GROUP, "ulimit", "limits neither the address space nor the data segment")


def _file_size() -> Iterator[Check]:
    limit, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    if limit != resource.RLIM_INFINITY:
        text = f"a file may have {in_bytes(limit)} at most; those of checkpoints and of the cache may have more"
        yield warn(GROUP, "file size", text, "ulimit -f unlimited, before the launcher's command")


def _open_files(processes: int) -> Check:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = 1000 + 4 * processes  # shards and checkpoints; connections of process 0
    text = f"{soft} may be open at once"
    if soft < 256 or soft < 4 * processes:
        return failed(
            GROUP, "open files", text, f"ulimit -n {max(65536, needed)}, or LimitNOFILE of the service (hard: {hard})"
        )
    if soft < needed:
        return warn(GROUP, "open files", f"{text}; {needed} are better", f"ulimit -n 65536 (the hard limit is {hard})")
    return ok(GROUP, "open files", text)


def _threads(mount: str = "/sys/fs/cgroup") -> Check:
    """XLA, gRPC, the loader and Orbax start threads by the number of cores."""
    folder = pathlib.Path(mount)
    needed = _needed_threads()
    try:
        free = int((folder / "pids.max").read_text()) - int((folder / "pids.current").read_text())
    except (OSError, ValueError):
        free = None
    if free is None:
        return ok(GROUP, "threads", "not limited by a container")
    text = f"the container may start {free} more threads, and a run needs about {needed}"
    if free < needed:
        return failed(GROUP, "threads", text, "docker run --pids-limit=-1, podPidsLimit of the kubelet")
    return ok(GROUP, "threads", text)


def _needed_threads() -> int:
    return 64 + 8 * machine.cores()


def _threads_of_user(mount: str = "/proc") -> Iterator[Check]:
    """The limit counts all of the user's threads on this machine; the system's administrator has none."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    if limit == resource.RLIM_INFINITY or not os.getuid():
        return
    used, needed = 0, _needed_threads()
    for folder in pathlib.Path(mount).glob("[0-9]*"):
        with contextlib.suppress(OSError, ValueError, KeyError):  # it has ended
            fields = dict(line.split(":\t", 1) for line in (folder / "status").read_text().splitlines() if ":\t" in line)
            if fields["Uid"].split()[0] == str(os.getuid()):
                used += int(fields["Threads"])
    text = f"{limit} may run for this user, of which {used} do; a run needs about {needed}"
    if limit - used < needed:
        yield warn(GROUP, "user's threads", text, "ulimit -u unlimited, before the launcher's command; or limits.conf (nproc)")
    else:
        yield ok(GROUP, "user's threads", text)


def _shared_memory(gpus: int) -> Check:
    remedy = "docker run --ipc=host (or --shm-size=16g), an emptyDir of medium Memory at /dev/shm; else NCCL_SHM_DISABLE=1"
    try:
        free = shutil.disk_usage("/dev/shm").free
        text = f"{in_bytes(free)} free"
    except OSError as error:
        free, text = 0, f"it cannot be used: {error.strerror}"
    if gpus < 2:
        return ok(GROUP, "/dev/shm", f"{text}; NCCL needs it between two GPUs or more, and here are {gpus}")
    text += f"; NCCL needs {in_bytes(SHARED_MEMORY)} between {gpus} GPUs"
    if not free:
        return failed(GROUP, "/dev/shm", text, remedy)
    return ok(GROUP, "/dev/shm", text) if free >= SHARED_MEMORY else warn(GROUP, "/dev/shm", text, remedy)


def _temporary() -> Check:
    remedy = "free some space there, or set TMPDIR to a folder with more"
    try:
        folder = tempfile.gettempdir()
        with tempfile.NamedTemporaryFile(dir=folder) as file:
            file.write(b"\0" * 65536)
            file.flush()
        free = shutil.disk_usage(folder).free
    except OSError as error:
        return failed(GROUP, "temporary files", f"none can be written: {error.strerror or error}", remedy)
    text = f"{folder} has {in_bytes(free)} free"
    return ok(GROUP, "temporary files", text) if free >= TEMPORARY else warn(GROUP, "temporary files", text, remedy)
