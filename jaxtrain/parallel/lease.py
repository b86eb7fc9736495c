"""The lease of a workdir: while one run holds it, no other run writes there.

``lease.json`` names its holder, which renews it every 10 s. TensorStore writes it, on disks and in
object stores, on condition that nobody else wrote it since it was read. A contender

- is refused if the holder lives on this machine, or renews its lease,
- takes over at once if the holder has ended here, or was an earlier start of the same SLURM job,
- takes over from another machine or container after 60 s without a renewal (the lease timeout):
  a holder that was paused for longer finds the other lease when it confirms its own, and ends.

A supervisor (`jaxtrain.supervise`) holds the lease for its processes, which know it by its token.
Its lease also has a note: the address at which other supervisors of the run find it.
"""

import contextlib
import errno
import json
import logging
import os
import pathlib
import stat
import tempfile
import threading
import time
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from loaders.io import atomic_write, files
from loaders.io.checks import FatalError, UserError

log = logging.getLogger("jaxtrain")

NAME = "lease.json"
RENEWAL = 10.0  # [s] between two renewals
LEASE_TIMEOUT = 60.0  # [s] without a renewal, after which a lease from elsewhere has expired
STORE_TIMEOUT = 60.0  # [s] for one answer of an object store
ENDED = ("Z", "X")  # states of a process that has ended, also if its parent does not wait for it


class WorkdirError(UserError, RuntimeError):
    """A workdir that another run holds, or that cannot be used."""


class LostWorkdirError(WorkdirError, FatalError):
    """A workdir that another run took over, or that was deleted while this run wrote to it."""


class Process(NamedTuple):
    """A process that holds a lease, or a contender."""

    token: str  # unique to this start
    host: str
    pid: int
    start: str  # [clock ticks after boot] "" if unknown
    machine: str  # in which a process id names one process: boot id and namespace, else the host
    since: str  # UTC
    job: int  # of SLURM; 0 without one
    restarts: int  # of that job

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}, since {self.since}"

    def has_ended(self, me: "Process") -> bool | None:
        """Tell whether this process has ended. None if only the lease timeout can tell."""
        if self.job and self.job == me.job and self.restarts < me.restarts:
            return True  # SLURM requeues a job once it has ended everywhere
        if self.machine != me.machine:
            return None
        try:
            os.kill(self.pid, 0)
        except OSError as error:
            return not isinstance(error, PermissionError)  # another user's process is alive
        state, start = state_of(self.pid)
        # A killed process is a zombie until its parent waits for it. Then its id may be reused.
        return state in ENDED or bool(start and self.start and start != self.start)


def this_process() -> Process:
    """Describe this process, with a new token."""
    token, host, pid, machine = os.urandom(16).hex(), os.uname().nodename, os.getpid(), ""
    with contextlib.suppress(OSError):
        boot = pathlib.Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        machine = f"{boot} {os.readlink('/proc/self/ns/pid')}"
    job, since = (
        (slurm("SLURM_JOB_ID"), slurm("SLURM_RESTART_COUNT")),
        time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime()),
    )
    return Process(token, host, pid, state_of(pid)[1], machine or host, since, *job)


def state_of(pid: int) -> tuple[str, str]:
    """Return state and start of a process (proc(5): stat, fields 3 and 22), "" if unknown."""
    with contextlib.suppress(OSError):
        fields = pathlib.Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
        return fields[0].decode(), fields[19].decode()
    return "", ""


def slurm(name: str) -> int:
    """Return a number that SLURM sets in the environment, 0 without one."""
    text = os.environ.get(name, "")
    return int(text) if text.isascii() and text.isdecimal() and len(text) < 12 else 0


def parse(content: bytes) -> Process:
    """Read the holder from a lease. If the content is not that of a lease, its pid is 0."""
    with contextlib.suppress(ValueError, KeyError, TypeError, RecursionError):
        fields, kinds = json.loads(content), Process.__annotations__
        values = [fields[name] for name, kind in kinds.items() if type(fields[name]) is kind]
        holder = Process(*values)
        if "".join(map(str, holder)).isprintable() and 0 < holder.pid < 1 << 31:
            return holder
    return Process("", "an unknown host", 0, "", "", "an unknown time", 0, 0)


def note_in(folder: str) -> dict[str, Any]:
    """Return the note in the lease of a folder, {} if there is none or it cannot be read."""
    import tensorstore as ts

    path = folder if "://" in folder else os.path.realpath(files.expanded(folder))
    spec: Any = f"{path.rstrip('/')}/"
    if "://" not in folder:
        spec = {"driver": "file", "path": spec}
    try:
        store: Any = ts.KvStore.open(spec).result(STORE_TIMEOUT)
        note = json.loads(store.read(NAME).result(STORE_TIMEOUT).value or b"{}").get("note")
    except (OSError, ValueError, AttributeError):
        return {}
    return note if isinstance(note, dict) else {}


class Folder:
    """A folder on a disk or in an object store, and its lease."""

    def __init__(self, name: str, me: Process, choose: str, token: str, note: Mapping[str, Any]):
        self.name = name
        self._note = dict(note)
        self._token = token
        self.path = f"{name.rstrip('/')}/{NAME}"
        self.is_disk = "://" not in name
        self._me = me
        self._ours = b""
        self._choose = choose

    def take(self, leave: Callable[[], Any]) -> None:
        import tensorstore as ts

        spec: Any = f"{self.name.rstrip('/')}/"
        try:
            if self.is_disk:
                os.makedirs(self.name, exist_ok=True)
                spec = {"driver": "file", "path": spec}
            self._store: Any = ts.KvStore.open(spec).result(STORE_TIMEOUT)
            if self._token:
                self._share()
            else:
                while not self._write(self._wait(leave)):
                    time.sleep(0.1)
            if self.is_disk:  # while it is open, its inode is given to no other folder
                self._folder = os.open(self.name, os.O_RDONLY)
        except (OSError, ValueError) as error:
            if atomic_write.is_full(error):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), self.path) from error
            raise WorkdirError(
                f"{self.path} cannot be written: {str(error) or 'no answer'}; check permissions, "
                "config.workdir and config.checkpoint.folder"
            ) from error

    def _share(self) -> None:
        """Take the lease that this process's supervisor holds as its own."""
        holder, self._ours = self._read()
        if not holder or holder.token != self._token:
            raise LostWorkdirError(
                f"{self.path} is not that of this process's supervisor any more:"
                f" {holder or 'it is gone'}. Rerun the same command to resume"
            )
        self._me = holder

    def _wait(self, leave: Callable[[], Any]) -> bytes:
        """Return the version of the lease once there is no holder, or it has ended."""
        holder, version = self._read()
        ended = holder.has_ended(self._me) if holder else True
        age = 0.0  # by the file system's clock, as those of hosts differ
        with contextlib.suppress(FileNotFoundError), tempfile.TemporaryFile(dir=self.name) as now:
            age = max(os.fstat(now.fileno()).st_mtime - os.stat(self.path).st_mtime, 0.0)
        until = time.monotonic() + LEASE_TIMEOUT - age
        if ended is None:
            log.info("%s is held by %s: waiting for a sign of life", self.name, holder)
        while ended is None and time.monotonic() < until:
            leave()
            time.sleep(0.5)
            holder_now, version_now = self._read()
            ended = None if version_now == version else holder_now != holder
        if holder and ended is False:
            end = f"scancel {holder.job}"
            if not holder.job:
                host = f" on {holder.host}" * (holder.machine != self._me.machine)
                end = f"kill {holder.pid}{host}"
            heard = f", last heard of {age:.0f} s ago" * self.is_disk
            raise WorkdirError(
                f"{self.name} is in use by another run: {holder}{heard}. Two of them would write"
                f" over each other's files: choose another {self._choose}, or end that"
                f" run{f' by `{end}`' * bool(holder.pid)} (it saves first)"
            )
        if holder:
            log.warning("%s: %s has ended; this run takes over", self.name, holder)
        return version

    def confirm(self) -> None:
        try:
            folder = os.stat(self.name) if os.path.isdir(self.name) else None
            if self.is_disk and not (folder and os.path.samestat(folder, os.fstat(self._folder))):
                raise LostWorkdirError(
                    f"{self.name} was deleted or moved while the run wrote to it; rerun the same "
                    "command to begin again, or move the folder back to resume"
                )
            holder, version = self._read()
            if not holder and self._write(version):
                log.warning("%s was removed while its run goes on: written again", self.path)
            elif holder != self._me:
                raise LostWorkdirError(
                    f"{self.name} was taken over by another run while this one was silent: "
                    f"{holder or 'unnamed'}. This run ends, and leaves it what is there"
                )
        except (OSError, ValueError) as error:
            log.warning("%s cannot be read: %s", self.path, error)

    def renew(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            if self.is_disk:
                os.utime(self.path)  # also on a full disk
            elif self._ours:
                self._write(self._ours)

    def release(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            if self.is_disk:
                os.close(self._folder)
            holder, version = self._read()
            if holder == self._me and not self._token:
                self._store.write(NAME, None, if_equal=version).result(STORE_TIMEOUT)

    def _read(self) -> tuple[Process | None, bytes]:
        """Return the holder and TensorStore's generation, which changes with each renewal."""
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            status = os.lstat(self.path)
            if not stat.S_ISREG(status.st_mode) or status.st_size > 1 << 16:
                raise ValueError("it is not a lease; remove it")
        answer = self._store.read(NAME).result(STORE_TIMEOUT)
        holder = parse(answer.value) if answer.state == "value" else None
        return holder, answer.stamp.generation

    def _write(self, version: bytes) -> bool:
        """Write the lease if it still has this version. False if another process wrote it."""
        fields = {"renewed": time.time(), "note": self._note}
        content = json.dumps(self._me._asdict() | fields).encode()
        stamp = self._store.write(NAME, content, if_equal=version).result(STORE_TIMEOUT)
        holder: Process | None = self._me
        version = stamp.generation
        if not version:
            holder, version = self._read()
        self._ours = version if holder == self._me else b""  # also if an answer was lost before
        return bool(self._ours)


class Lease:
    """A context: this process holds ``folders`` (paths, URLs of object stores) for its run.

    Entering raises WorkdirError, with the remedy, if another run holds one. ``leave`` is called
    while another lease expires, and may raise. ``choose`` names a folder for the message.
    ``token``: of the supervisor that holds the folders for this process, if there is one. ``note``:
    for readers of the lease.
    """

    def __init__(
        self,
        folders: Sequence[str],
        *,
        leave: Callable[[], Any] = lambda: None,
        choose: str = "config.workdir",
        token: str = "",
        note: Mapping[str, Any] = types.MappingProxyType({}),
    ):
        me, self._leave, self._closed = this_process(), leave, threading.Event()
        self.token = me.token
        paths = [f if "://" in f else os.path.realpath(files.expanded(f)) for f in folders]
        self._folders = [Folder(path, me, choose, token, note) for path in dict.fromkeys(paths)]
        self._thread = threading.Thread(target=self._renew, name="lease", daemon=True)

    def __enter__(self) -> "Lease":
        with contextlib.ExitStack() as releases:
            for folder in self._folders:
                folder.take(self._leave)
                releases.callback(folder.release)
            self._thread.start()
            self._releases = releases.pop_all()
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        self._closed.set()
        self._thread.join()
        with self._releases:
            if kind is None:
                self.confirm()  # a run whose files were deleted at its end did not end well

    def confirm(self, *, saving: bool = False) -> None:
        """Raise WorkdirError if a folder was lost or deleted. Stores are asked if ``saving``."""
        for folder in self._folders:
            if saving or folder.is_disk:
                folder.confirm()

    def _renew(self) -> None:
        while not self._closed.wait(RENEWAL):
            for folder in self._folders:
                folder.renew()
