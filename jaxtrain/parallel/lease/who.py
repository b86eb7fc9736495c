"""Who owns a folder: a process of a machine, as owner.json describes it, and whether it can still be alive."""

import dataclasses
import datetime
import json
import os
import pathlib
import re
import socket
import uuid

NAME = "owner.json"
BEAT = 10.0  # [s] between two signs of life
SILENCE = 60.0  # [s] without one after which an owner on another machine counts as dead
LIMIT = 1 << 16  # [bytes] of an owner.json that is read


class WorkdirError(RuntimeError):
    """A workdir that belongs to another run, or that went away while this one used it."""


@dataclasses.dataclass(frozen=True)
class Who:
    """A process that owns a folder, or wants to."""

    token: str  # of this one start: no two are equal
    host: str
    pid: int
    start: int  # clock ticks after boot at which the process began; 0 where /proc does not say
    boot: str  # the kernel's boot id, which no two machines share; "" where there is none
    namespace: str  # of process ids: the same number means another process in another container
    since: str  # UTC
    job: str = ""  # of SLURM
    restarts: int = 0  # how often SLURM has requeued it

    def to_json(self, **more: object) -> bytes:
        """Returns the content of owner.json, with ``more`` fields that only people read."""
        return json.dumps(dataclasses.asdict(self) | more).encode() + b"\n"

    def name(self) -> str:
        """Names the process in a message."""
        job = f", SLURM job {self.job}" if self.job else ""
        return f"process {self.pid} on {self.host}{job}, since {self.since}"


def here() -> Who:
    """Returns this process, with a new token."""
    job = os.environ.get("SLURM_JOB_ID", "")
    return Who(
        token=uuid.uuid4().hex,
        host=socket.gethostname(),
        pid=os.getpid(),
        start=_stat(os.getpid())[1],
        boot=_boot_id(),
        namespace=_namespace(),
        since=datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M:%S UTC"),
        job=job if _is_plain(job) else "",
        restarts=restarts(),
    )


def restarts() -> int:
    """How often SLURM has requeued this job; 0 where it does not say."""
    text = os.environ.get("SLURM_RESTART_COUNT", "")
    return int(text) if re.fullmatch("[0-9]{1,9}", text) else 0


def parse(content: bytes) -> Who | None:
    """Reads an owner.json; None when it is not one that this program has written."""
    try:
        fields = json.loads(content)
        known = {f.name: (f.type, fields[f.name]) for f in dataclasses.fields(Who)}
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    if any(type(value) is not kind for kind, value in known.values()):  # exactly: True is no process number
        return None
    who = Who(**{name: value for name, (_, value) in known.items()})
    plain = all(map(_is_plain, (who.host, who.since, who.job, who.boot, who.namespace)))
    return who if plain and re.fullmatch("[0-9a-f]{32}", who.token) and 0 < who.pid < 1 << 31 else None


def _is_plain(text: str) -> bool:
    return text.isprintable() and len(text) < 300


def is_gone(other: Who, me: Who) -> bool | None:
    """Whether the process no longer exists; None when only its silence can tell."""
    if other.job and other.job == me.job and other.restarts < me.restarts:
        return True  # SLURM starts a job again once it has ended everywhere
    if (other.boot, other.namespace) != (me.boot, me.namespace) or (not me.boot and other.host != me.host):
        return None
    return not _is_alive(other.pid, other.start)


def _is_alive(pid: int, start: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OverflowError:
        return False
    except PermissionError:
        pass  # another user's
    state, began = _stat(pid)
    if state in ("Z", "X"):  # killed, and its parent has not looked yet
        return False
    return not (start and began) or start == began  # else the number is another process's now


def _stat(pid: int) -> tuple[str, int]:
    """State and start [clock ticks after boot] of a process (proc(5): stat, fields 3 and 22); "", 0 where unknown."""
    try:
        fields = pathlib.Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
        return fields[0], int(fields[19])
    except (OSError, ValueError, IndexError):
        return "", 0


def _boot_id() -> str:
    try:
        return pathlib.Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def _namespace() -> str:
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def refusal(folder: str, other: Who | None, *, age: float | None, me: Who) -> WorkdirError:
    """The error for who finds a live owner: who it is, since when, and what frees the folder."""
    path = f"{folder.rstrip('/')}/{NAME}"
    heard = "" if age is None else f", last heard of {max(age, 0):.0f} s ago"
    if other is None:
        return WorkdirError(
            f"{folder} is in use: {path} is renewed by another run, and its content does not say which. End that run, or "
            "choose another config.workdir"
        )
    near = other.boot == me.boot and other.namespace == me.namespace
    end = f"kill {other.pid}" if near else f"kill {other.pid} on {other.host}"
    if other.job:
        end = f"scancel {other.job}"
    after = "as soon as that process has ended" if near else f"when that run ends, or {SILENCE:g} s after its last sign of life"
    return WorkdirError(
        f"{folder} is in use by another run: {other.name()}{heard}. Two runs would write over each other's records and "
        f"checkpoints: choose another config.workdir, or end that run by `{end}` (it saves first). The folder is free {after}"
    )
