"""Steps in memory: each process's parts of the last whole step, in shared memory of its host.

A supervised run with config.checkpoint.memory_every keeps them. A restart takes the newest step
that is whole: every process has its parts, or gets them from other processes. Those have the same
parts, because the layout replicates them, or a copy (`partners`), or on another mesh all parts
that overlap with them. Two steps have a place, so that one is whole at any time:

    /dev/shm/jaxtrain-USER-RUN-PROCESS/     the supervisor's, which removes it at its end
      holder.json     the supervisor (`lease.Process`)
      0.bin, 1.bin    the parts of a step, one after the other
      0.json, 1.json  {"run": …, "attempt": 2, "step": 120, "table": the parts, "parts": its digest,
                      "whole": a digest of those of all processes, "bytes": …, "sha256": of the
                      parts, "note": data, history and config}
      copy-3-0.bin …  the same of process 3, on another host

A .json is removed before its .bin changes, and is written last. A step that is in memory alone is
lost with its hosts, and does not count as saved.
"""

import concurrent.futures
import contextlib
import hashlib
import json
import logging
import mmap
import os
import pathlib
import shutil
import stat
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.experimental import multihost_utils

from jaxtrain.parallel import cluster, lease
from jaxtrain.supervise import partners
from jaxtrain.supervise import parts as parts_lib
from jaxtrain.supervise.parts import Part
from jaxtrain.types import PyTree
from loaders.io import atomic_write
from loaders.io.checks import UserError

log = logging.getLogger("jaxtrain")

PARENT = pathlib.Path("/dev/shm")
HOLDER = "holder.json"
STEMS = ("0", "1")
WRITTEN, RECORDED = 1, 2  # answers of a process before a step is copied
# All pages of a place are read or written: mapping them at once takes half the time. Python's mmap
# would hold the lock of all threads for it (until 3.11), and madvise does for a piece.
POPULATE_READ, POPULATE_WRITE = 22, 23  # madvise(2), since Linux 5.14
PIECE = 16 << 20  # [bytes] that are mapped, or sent to a process, at once
LEFT_BEHIND = 3600.0  # [s] that the memory of a supervisor that was killed waits for its successor
Moment = tuple[int, int]  # step and attempt: on another mesh a step has other bits


class SharedMemoryError(UserError, RuntimeError):
    """Shared memory that is too small, or another user's."""


class Found(NamedTuple):
    """A step in memory, with its arrays."""

    step: int
    parts: PyTree
    note: dict[str, Any]


def folder_of(run: str, process: int, parent: pathlib.Path = PARENT) -> pathlib.Path:
    """Make the folder of a process in shared memory, for this user alone.

    Remove folders whose supervisors ended an hour ago or earlier. Raises SharedMemoryError.
    """
    prefix = f"jaxtrain-{os.getuid()}-"
    folder = parent / f"{prefix}{run[:16]}-{process}"
    me = lease.this_process()
    try:
        for other in parent.glob(f"{prefix}*"):
            if other != folder and _is_left_behind(other, me):
                shutil.rmtree(other, ignore_errors=True)
        with contextlib.suppress(FileExistsError):
            folder.mkdir(mode=0o700)
        status = folder.lstat()
        is_ours = stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid()
        if not is_ours or status.st_mode & 0o077:
            raise SharedMemoryError(f"{folder} is not a folder of this user alone; remove it")
        atomic_write.write(folder / HOLDER, json.dumps(me._asdict()))
    except OSError as error:
        raise SharedMemoryError(
            f"{folder} cannot be made: {error.strerror}; mount shared memory at {parent}, or set"
            " config.checkpoint.memory_every to 0"
        ) from error
    return folder


def _is_left_behind(folder: pathlib.Path, me: lease.Process) -> bool:
    try:
        newest = max(path.stat().st_mtime for path in folder.iterdir())
        holder = lease.parse((folder / HOLDER).read_bytes())
    except (OSError, ValueError):
        return False
    if newest > time.time() - LEFT_BEHIND:
        return False
    return bool(holder.pid and holder.has_ended(me))


class Memory:
    """This process's steps in memory. All processes call its methods at once.

    Args:
      folder: of the process, made by its supervisor.
      run: the name of the run.
      parts: the abstract arrays, with their shardings.
      attempt: the number of this start of the run.
    """

    def __init__(self, folder: str, run: str, parts: PyTree, attempt: int = 0):
        self.folder = pathlib.Path(folder)
        self._run = run
        self._attempt = attempt
        self._abstract = parts
        self._parts = list(parts_lib.of(parts))
        end = self._parts[-1]
        self._size = end.offset + end.size
        layout = [part._replace(offset=0) for part in self._parts]
        self._layout = hashlib.sha256(json.dumps(layout).encode()).hexdigest()
        self._whole = ""  # the digest of all processes' layouts
        self._stem = STEMS[0]  # of the step that is written next
        self._receiver: partners.Receiver | None = None
        self._partner: partners.Address | None = None
        self._secret = b""
        self._pool = concurrent.futures.ThreadPoolExecutor(1, "memory")
        self._writing: concurrent.futures.Future[bool] | None = None
        self._is_copied = True  # whether the last copy arrived, if there is a partner

    def reserve(self) -> None:
        """Allocate both places. Raises SharedMemoryError, with the bytes that are needed."""
        self._allocate({stem: self._size for stem in STEMS})

    def _allocate(self, sizes: Mapping[str, int]) -> None:
        """Allocate places [bytes]."""
        for stem, size in sizes.items():
            descriptor = os.open(self._bin(stem), os.O_RDWR | os.O_CREAT, 0o600)
            try:
                os.posix_fallocate(descriptor, 0, max(size, 1))
            except OSError as error:
                free = os.statvfs(self.folder)
                raise SharedMemoryError(
                    f"config.checkpoint.memory_every needs {sum(sizes.values()):,} bytes of shared"
                    f" memory for {', '.join(sizes)} of each process (0 and 1 are its own steps,"
                    " and copies are those of processes on another host), and"
                    f" {free.f_bavail * free.f_frsize:,} are left in {self.folder.parent}:"
                    f" {error.strerror}. Enlarge it (mount -o remount,size=…; --shm-size of a"
                    " container), or set it to 0"
                ) from error
            finally:
                os.close(descriptor)

    def find_partner(self, coordinator: str, secret: str) -> None:
        """Agree on the process on another host that takes copies of this one's steps.

        Raises SharedMemoryError: there is no room for the copies of others.
        """
        process = jax.process_index()
        host = partners.own_host(coordinator)
        report = [self._layout, host, self._copies(), self._size]
        reports = [json.loads(text) for text in cluster.gather_texts(json.dumps(report))]
        layouts, hosts, copies, sizes = zip(*reports, strict=True)
        chosen = partners.choose(layouts, hosts)
        address: Sequence[Any] = ()
        if process in chosen:
            senders = [sender for sender, partner in enumerate(chosen) if partner == process]
            self._allocate({stem: sizes[sender] for sender in senders for stem in copies[sender]})
            self._receiver = partners.Receiver(self.folder, self._run, secret.encode(), host)
            address = self._receiver.address
        addresses = cluster.gather_texts(json.dumps(address))
        partner = chosen[process]
        if partner >= 0:
            self._partner = partners.Address(*json.loads(addresses[partner]))
            self._secret = secret.encode()
            log.info("process %d takes copies of steps in memory", partner)

    def _copies(self) -> list[str]:
        """Return the places of copies elsewhere, by the number that this process always has."""
        number = self.folder.name.rpartition("-")[2]  # also on another mesh
        return [f"copy-{number}-{stem}" for stem in STEMS]

    def save(
        self, step: int, parts: PyTree, note: Mapping[str, Any], *, recorded: bool = True
    ) -> None:
        """Copy a computed step. Its checksum is computed behind the steps that follow.

        It takes the place of the older step, or of the newer one if that is not whole everywhere,
        or its copy did not arrive. If two copies in a row do not, it is the older one's again.
        ``recorded``: whether a restart may resume from it. All processes have to agree.
        """
        answers = cluster.gather(WRITTEN * self._is_written() + RECORDED * recorded)
        if all(answer & WRITTEN for answer in answers):
            self._stem = _other(self._stem)
        if not all(answer & RECORDED for answer in answers):
            return
        self._json(self._stem).unlink(missing_ok=True)
        with self._mapped(self._stem, self._size, writable=True) as content:
            for part, data in zip(self._parts, parts_lib.data_of(parts), strict=True):
                target = content[part.offset : part.offset + part.size]
                target[:] = np.ascontiguousarray(data).reshape(-1).view(np.uint8)
        self._whole = self._whole or _whole(cluster.gather_texts(self._layout))
        header = {"run": self._run, "attempt": self._attempt, "step": step}
        header |= {"parts": self._layout, "whole": self._whole, "bytes": self._size}
        header |= {"note": dict(note), "table": self._parts}
        self._writing = self._pool.submit(self._seal, self._stem, header)

    def _is_written(self) -> bool:
        """Wait for the save before. Whether it is whole here, and the older one may go."""
        if not self._writing:
            return False
        writing, self._writing = self._writing, None
        try:
            return writing.result()
        except OSError as error:
            log.warning("a step in memory is not whole: %s", error)
            return False

    def _seal(self, stem: str, header: dict[str, Any]) -> bool:
        """Complete a step, and send its copy. Return whether the older step may go."""
        with self._mapped(stem, self._size, writable=False) as content:
            header["sha256"] = hashlib.sha256(content.data).hexdigest()
            atomic_write.write(self._json(stem), json.dumps(header))
            if not self._partner:
                return True
            name = self._copies()[STEMS.index(stem)]
            try:
                partners.send(self._partner, self._secret, name, header, content.data)
            except OSError as error:
                log.warning("the copy of step %d did not arrive: %s", header["step"], error)
                # A partner that is lost for long would leave an old step as the only whole one.
                was_copied, self._is_copied = self._is_copied, False
                return not was_copied
            self._is_copied = True
            return True

    def newest(self, note: Mapping[str, Any]) -> Found | None:
        """Return the newest step that is whole in memory, with this part in its note.

        A step of another run or note is left out, and so is one that fails its checksum.
        """
        headers = _headers(self.folder, self._run, note)
        report = json.dumps({"parts": self._layout, "has": _keys(headers)})
        reports = [json.loads(text) for text in cluster.gather_texts(report)]
        for moment, sources in _whole_moments([each["has"] for each in reports]):
            if restored := self._read(moment, headers, reports, sources):
                return restored
            log.warning("step %d in memory fails its checksum, and is skipped", moment[0])
        return None

    def _is_sound(self, header: Mapping[str, Any]) -> bool:
        with contextlib.suppress(OSError, ValueError):
            return bool(self._hash(header["stem"], header["bytes"]) == header["sha256"])
        return False

    def _read(
        self,
        moment: Moment,
        headers: Mapping[tuple[int, int, str], Any],
        reports: Sequence[Mapping[str, Any]],
        sources: Mapping[str, int],
    ) -> Found | None:
        """Return a whole step, or None if parts of it fail their checksum.

        Processes without their parts of the step get them from ``sources``.
        """
        own = headers.get((*moment, self._layout))
        # The restored step stays until the next is whole, also as a copy: it has the same place
        # everywhere, because all processes go to their other one together.
        held = [int(header["stem"][-1]) for key, header in headers.items() if key[:2] == moment]
        place = max(cluster.gather(max(held, default=-1)))
        self._stem = _other(STEMS[place])
        lacking = {
            each["parts"]
            for each in reports
            if not any([*moment, each["parts"]] == has[:3] for has in each["has"])
        }
        # On another mesh nobody has these parts, and all of the step are sent.
        needed = lacking if lacking <= sources.keys() else sources.keys()
        filling = parts_lib.Filling(self._parts)
        is_sound = own is None or self._is_sound(own)
        note = own["note"] if own else {}
        for layout in sorted(needed):
            header, data = self._receive(sources[layout], headers.get((*moment, layout)))
            if own is None:
                is_sound &= hashlib.sha256(data.data).hexdigest() == header["sha256"]
                filling.take(data, [Part.of(fields) for fields in header["table"]])
                note = header["note"]
        is_sound &= own is not None or filling.is_whole
        if not all(cluster.gather(int(is_sound))):
            return None
        if own is None:
            return Found(moment[0], parts_lib.arrays(self._abstract, filling.content), note)
        with self._mapped(own["stem"], self._size, writable=False) as content:
            return Found(moment[0], parts_lib.arrays(self._abstract, content), note)

    def _receive(self, source: int, header: Any) -> tuple[Any, np.ndarray]:
        """Return the header and the bytes of parts that process ``source`` sends to all."""
        is_source = jax.process_index() == source
        text = json.dumps(header) if is_source else ""
        header = json.loads(cluster.gather_texts(text)[source])
        size = int(header["bytes"])
        data = np.zeros(size, np.uint8)
        if is_source:
            with self._mapped(header["stem"], size, writable=False) as content:
                data[:] = content
        for start in range(0, size, PIECE):
            piece = data[start : start + PIECE]
            piece[:] = multihost_utils.broadcast_one_to_all(piece, is_source=is_source)
        return header, data

    def close(self) -> None:
        """Wait for the save in flight."""
        self._pool.shutdown()
        if self._receiver:
            self._receiver.close()

    def _hash(self, stem: str, size: int) -> str:
        with self._mapped(stem, size, writable=False) as content:
            return hashlib.sha256(content.data).hexdigest()

    @contextlib.contextmanager
    def _mapped(self, stem: str, size: int, *, writable: bool) -> Iterator[np.ndarray]:
        protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        with open(self._bin(stem), "r+b" if writable else "rb") as file:
            if os.fstat(file.fileno()).st_size < size:
                raise ValueError(f"{file.name} is cut short")
            place = mmap.mmap(file.fileno(), 0, flags=mmap.MAP_SHARED, prot=protection)
            with contextlib.suppress(OSError):  # an older kernel maps them one by one
                for start in range(0, size, PIECE):
                    advice = POPULATE_WRITE if writable else POPULATE_READ
                    place.madvise(advice, start, min(PIECE, size - start))
            yield np.frombuffer(place, np.uint8)[:size]

    def _bin(self, stem: str) -> pathlib.Path:
        return self.folder / f"{stem}.bin"

    def _json(self, stem: str) -> pathlib.Path:
        return self.folder / f"{stem}.json"


def _other(stem: str) -> str:
    return STEMS[STEMS.index(stem) - 1]


def _whole(layouts: Sequence[str]) -> str:
    """Return the digest of the parts of all processes."""
    return hashlib.sha256(json.dumps(sorted(set(layouts))).encode()).hexdigest()


def listed(folder: str | os.PathLike[str], run: str) -> list[list[Any]]:
    """List the steps of a run in a folder: step, attempt, parts, and the digest of all parts."""
    return _keys(_headers(pathlib.Path(folder), run, {}))


def newest_whole(has: Sequence[Sequence[Sequence[Any]]]) -> int:
    """Return the newest step that is whole somewhere by the lists of all folders, 0 = none."""
    return next((step for (step, _), _ in _whole_moments(has)), 0)


def _headers(
    folder: pathlib.Path, run: str, note: Mapping[str, Any]
) -> dict[tuple[int, int, str], Any]:
    """(Step, attempt, parts) -> header, of a run's steps in a folder, also copies."""
    headers = {}
    for path in sorted(folder.glob("*.json"), reverse=True):
        if path.name == HOLDER:
            continue
        with contextlib.suppress(OSError, ValueError, KeyError, AttributeError):
            header = json.loads(path.read_text())
            of_note = all(header["note"].get(name) == value for name, value in note.items())
            if header["run"] == run and of_note:
                key = header["step"], header["attempt"], header["parts"]
                headers[key] = header | {"stem": path.stem}
    return headers


def _keys(headers: Mapping[tuple[int, int, str], Any]) -> list[list[Any]]:
    return [[*key, header["whole"]] for key, header in sorted(headers.items())]


def _whole_moments(
    has: Sequence[Sequence[Sequence[Any]]],
) -> Iterator[tuple[Moment, dict[str, int]]]:
    """Yield the steps that are whole somewhere, the newest first, with their `_sources`."""
    moments = {(step, attempt) for each in has for step, attempt, *_ in each}
    for moment in sorted(moments, reverse=True):
        if sources := _sources(moment, has):
            yield moment, sources


def _sources(moment: Moment, has: Sequence[Sequence[Sequence[Any]]]) -> dict[str, int]:
    """Parts of a step -> the first process that has them, {} if some are nowhere."""
    sources: dict[str, int] = {}
    expected = set()
    for process, listed_there in enumerate(has):
        for *of, layout, whole in listed_there:
            if tuple(of) == moment:
                sources.setdefault(layout, process)
                expected.add(whole)
    return sources if expected == {_whole(list(sources))} else {}
