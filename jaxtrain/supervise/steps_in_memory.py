"""Steps in memory: each process's parts of the last whole step, in shared memory of its host.

A supervised run with config.checkpoint.memory_every keeps them. A restart takes the newest step
that is whole: every process has its parts, or gets them from another process. That one has the
same parts, because the layout replicates them, or a copy (`partners`). Two steps have a place, so
that one is whole at any time:

    /dev/shm/jaxtrain-USER-RUN-PROCESS/     the supervisor's, which removes it at its end
      holder.json     the supervisor (`lease.Process`)
      0.bin, 1.bin    the parts of a step, one after the other
      0.json, 1.json  {"run": …, "step": 120, "parts": a digest of paths, places and types,
                      "bytes": …, "sha256": of the parts, "note": data, history and config}
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
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

from jaxtrain import specs
from jaxtrain.parallel import cluster, lease
from jaxtrain.supervise import partners
from jaxtrain.types import PyTree
from loaders.io import atomic_write
from loaders.io.checks import UserError

log = logging.getLogger("jaxtrain")

PARENT = pathlib.Path("/dev/shm")
HOLDER = "holder.json"
STEMS = ("0", "1")
PIECE = 16 << 20  # [bytes] that are sent to a process at once
ALIGNMENT = 64  # [bytes]
LEFT_BEHIND = 3600.0  # [s] that the memory of a supervisor that was killed waits for its successor
Index = tuple[tuple[int, int], ...]


class SharedMemoryError(UserError, RuntimeError):
    """Shared memory that is too small, or another user's."""


class Part(NamedTuple):
    """A part of an array that this process holds."""

    path: str
    bounds: Index
    shape: tuple[int, ...]
    dtype: str
    offset: int  # in the file
    size: int  # [bytes]


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
    """

    def __init__(self, folder: str, run: str, parts: PyTree):
        self.folder = pathlib.Path(folder)
        self._run = run
        self._abstract = parts
        self._parts = list(_parts_of(parts))
        end = self._parts[-1]
        self._size = end.offset + end.size
        layout = [part._replace(offset=0) for part in self._parts]
        self._layout = hashlib.sha256(json.dumps(layout).encode()).hexdigest()
        self._stem = STEMS[0]  # of the step that is written next
        self._receiver: partners.Receiver | None = None
        self._partner: partners.Address | None = None
        self._secret = b""
        self._pool = concurrent.futures.ThreadPoolExecutor(1, "memory")
        self._writing: concurrent.futures.Future[None] | None = None

    def reserve(self) -> None:
        """Allocate both places. Raises SharedMemoryError, with the bytes that are needed."""
        needed = len(STEMS) * self._size
        for stem in STEMS:
            descriptor = os.open(self._bin(stem), os.O_RDWR | os.O_CREAT, 0o600)
            try:
                os.posix_fallocate(descriptor, 0, max(self._size, 1))
            except OSError as error:
                free = os.statvfs(self.folder)
                raise SharedMemoryError(
                    f"config.checkpoint.memory_every needs {needed:,} bytes of shared memory for"
                    f" each process, and as much again for each copy of another one, and"
                    f" {free.f_bavail * free.f_frsize:,} are left in {self.folder.parent}:"
                    f" {error.strerror}. Enlarge it (mount -o remount,size=…; --shm-size of a"
                    " container), or set it to 0"
                ) from error
            finally:
                os.close(descriptor)

    def find_partner(self, coordinator: str, secret: str) -> None:
        """Agree on the process on another host that takes copies of this one's steps."""
        process = jax.process_index()
        host = partners.own_host(coordinator, is_coordinator=process == 0)
        reports = cluster.gather_texts(json.dumps([self._layout, host]))
        layouts, hosts = zip(*map(json.loads, reports), strict=True)
        chosen = partners.choose(layouts, hosts)
        address: Sequence[Any] = ()
        if process in chosen:
            self._receiver = partners.Receiver(self.folder, self._run, secret.encode(), host)
            address = self._receiver.address
        addresses = cluster.gather_texts(json.dumps(address))
        partner = chosen[process]
        if partner >= 0:
            self._partner = partners.Address(*json.loads(addresses[partner]))
            self._secret = secret.encode()
            log.info("process %d takes copies of steps in memory", partner)

    def save(self, step: int, parts: PyTree, note: Mapping[str, Any]) -> None:
        """Copy a computed step. Its checksum is computed behind the steps that follow.

        It takes the place of the older step, or of the newer one if that is not whole everywhere.
        """
        if all(cluster.gather(int(self._is_written()))):
            self._stem = _other(self._stem)
        self._json(self._stem).unlink(missing_ok=True)
        with self._mapped(self._stem, self._size, writable=True) as content:
            for part, data in zip(self._parts, _local_data(parts), strict=True):
                target = content[part.offset : part.offset + part.size]
                target[:] = np.ascontiguousarray(data).reshape(-1).view(np.uint8)
        header = {"run": self._run, "step": step, "parts": self._layout, "bytes": self._size}
        header["note"] = dict(note)
        self._writing = self._pool.submit(self._seal, self._stem, header)

    def _is_written(self) -> bool:
        """Wait for the save before. Whether it is whole here."""
        if not self._writing:
            return False
        writing, self._writing = self._writing, None
        try:
            writing.result()
        except OSError as error:
            log.warning("a step in memory is not whole: %s", error)
            return False
        return True

    def _seal(self, stem: str, header: dict[str, Any]) -> None:
        header["sha256"] = self._hash(stem, self._size)
        atomic_write.write(self._json(stem), json.dumps(header))
        if not self._partner:
            return
        name = f"copy-{jax.process_index()}-{stem}"
        try:
            with self._mapped(stem, self._size, writable=False) as content:
                partners.send(self._partner, self._secret, name, header, content.data)
        except (OSError, TimeoutError) as error:
            log.warning("the copy of step %d did not arrive: %s", header["step"], error)

    def newest(self, above: int, note: Mapping[str, Any]) -> Found | None:
        """Return the newest step above one that is whole in memory, with this part in its note.

        A step of another run, layout or note is left out, and so is one that fails its checksum.
        """
        headers = self._headers(above, note)
        has = sorted(headers)
        report = json.dumps({"parts": self._layout, "has": has})
        reports = [json.loads(text) for text in cluster.gather_texts(report)]
        steps = {step for each in reports for step, _ in each["has"]}
        for step in sorted(steps, reverse=True):
            if not _is_whole(step, reports):
                continue
            if restored := self._read(step, headers, reports):
                return restored
            log.warning("step %d in memory fails its checksum, and is skipped", step)
        return None

    def _headers(
        self, above: int, note: Mapping[str, Any]
    ) -> dict[tuple[int, str], dict[str, Any]]:
        """(Step, parts) -> header, of this run's steps above one that are here, also copies."""
        headers = {}
        for path in sorted(self.folder.glob("*.json"), reverse=True):
            if path.name == HOLDER:
                continue
            with contextlib.suppress(OSError, ValueError, KeyError, AttributeError):
                header = json.loads(path.read_text())
                of_note = all(header["note"].get(name) == value for name, value in note.items())
                if header["run"] == self._run and of_note and header["step"] > above:
                    headers[header["step"], header["parts"]] = header | {"stem": path.stem}
        return headers

    def _is_sound(self, header: Mapping[str, Any]) -> bool:
        with contextlib.suppress(OSError, ValueError):
            return bool(self._hash(header["stem"], header["bytes"]) == header["sha256"])
        return False

    def _read(
        self,
        step: int,
        headers: Mapping[tuple[int, str], dict[str, Any]],
        reports: Sequence[Mapping[str, Any]],
    ) -> Found | None:
        """Return a whole step, or None if parts of it fail their checksum.

        Processes without their parts of the step get them from another one.
        """
        own = headers.get((step, self._layout))
        stem = STEMS[0]
        if own and own["stem"] in STEMS:
            stem = own["stem"]
        needed = {r["parts"] for r in reports if [step, r["parts"]] not in r["has"]}
        for layout in sorted(needed):
            source = _source(step, layout, reports)
            texts = cluster.gather_texts(json.dumps(headers.get((step, layout))))
            header = json.loads(texts[source])
            takes = layout == self._layout and own is None
            self._send(source, header, stem if takes else "")
            if takes:
                own = header | {"stem": stem}
        is_sound = own is not None and self._is_sound(own)
        if not all(cluster.gather(int(is_sound))):
            return None
        assert own
        if own["stem"] in STEMS:
            self._stem = _other(own["stem"])
        with self._mapped(own["stem"], self._size, writable=False) as content:
            parts = self._arrays(content)
        return Found(step, parts, own["note"])

    def _send(self, source: int, header: Mapping[str, Any], stem: str) -> None:
        """Send parts that process ``source`` has to all. Those with a ``stem`` store them."""
        is_source = jax.process_index() == source
        size = int(header["bytes"])
        if stem:
            self.reserve()
            self._json(stem).unlink(missing_ok=True)
        with contextlib.ExitStack() as closing:
            content = np.zeros(0, np.uint8)
            if is_source:
                mapped = self._mapped(header["stem"], size, writable=False)
                content = closing.enter_context(mapped)
            elif stem:
                content = closing.enter_context(self._mapped(stem, size, writable=True))
            for start in range(0, size, PIECE):
                part = content[start : start + PIECE]
                piece = np.zeros(PIECE, np.uint8)
                if is_source:
                    piece[: len(part)] = part
                sent = np.asarray(multihost_utils.broadcast_one_to_all(piece, is_source=is_source))
                if stem:
                    part[:] = sent[: len(part)]

    def _arrays(self, content: np.ndarray) -> PyTree:
        """Return the arrays, on their devices, from the parts of this process."""
        by_place = {}
        for part in self._parts:
            data = content[part.offset : part.offset + part.size].copy()
            by_place[part.path, part.bounds] = data.view(jnp.dtype(part.dtype)).reshape(part.shape)
        leaves = []
        names = specs.paths(self._abstract)
        for path, x in zip(names, jax.tree.leaves(self._abstract), strict=True):
            pieces = _Pieces(path, x.shape, by_place)
            leaves.append(jax.make_array_from_callback(x.shape, x.sharding, pieces))
        return jax.tree.unflatten(jax.tree.structure(self._abstract), leaves)

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
        access = mmap.ACCESS_WRITE if writable else mmap.ACCESS_READ
        with open(self._bin(stem), "r+b" if writable else "rb") as file:
            if os.fstat(file.fileno()).st_size < size:
                raise ValueError(f"{file.name} is cut short")
            yield np.frombuffer(mmap.mmap(file.fileno(), 0, access=access), np.uint8)[:size]

    def _bin(self, stem: str) -> pathlib.Path:
        return self.folder / f"{stem}.bin"

    def _json(self, stem: str) -> pathlib.Path:
        return self.folder / f"{stem}.json"


def _other(stem: str) -> str:
    return STEMS[STEMS.index(stem) - 1]


class _Pieces:
    """The parts of one array that are here, by their place."""

    def __init__(
        self,
        path: str,
        shape: tuple[int, ...],
        by_place: Mapping[tuple[str, Index], np.ndarray],
    ):
        self._path = path
        self._shape = shape
        self._by_place = by_place

    def __call__(self, index: tuple[slice, ...] | None) -> np.ndarray:
        assert index is not None
        return self._by_place[self._path, _as_numbers(index, self._shape)]


def _is_whole(step: int, reports: Sequence[Mapping[str, Any]]) -> bool:
    """Whether each process's parts of a step are somewhere."""
    present = {parts for each in reports for number, parts in each["has"] if number == step}
    return all(each["parts"] in present for each in reports)


def _source(step: int, layout: str, reports: Sequence[Mapping[str, Any]]) -> int:
    """Return the first process that has these parts of a step."""
    for process, each in enumerate(reports):
        if [step, layout] in each["has"]:
            return process
    raise AssertionError("the step is not whole")


def _parts_of(tree: PyTree) -> Iterator[Part]:
    """Yield the parts of abstract arrays that this process's devices hold, each once."""
    offset = 0
    for path, x in zip(specs.paths(tree), jax.tree.leaves(tree), strict=True):
        indices = x.sharding.addressable_devices_indices_map(x.shape).values()
        for index in sorted({_as_numbers(index, x.shape) for index in indices}):
            shape = tuple(stop - start for start, stop in index)
            size = int(np.prod(shape, dtype=np.int64)) * x.dtype.itemsize
            yield Part(path, index, shape, jnp.dtype(x.dtype).name, offset, size)
            offset += -(-size // ALIGNMENT) * ALIGNMENT


def _local_data(tree: PyTree) -> Iterator[np.ndarray]:
    """Yield the parts of arrays in the order of `_parts_of`. All copies begin at once."""
    shards = []
    for x in jax.tree.leaves(tree):
        by_index = {}
        for shard in x.addressable_shards:
            by_index[_as_numbers(shard.index, x.shape)] = shard.data
        shards += [by_index[index] for index in sorted(by_index)]
    for data in shards:
        data.copy_to_host_async()
    for data in shards:
        yield np.asarray(data)


def _as_numbers(index: tuple[slice, ...], shape: Sequence[int]) -> Index:
    bounds = [part.indices(size) for part, size in zip(index, shape, strict=True)]
    return tuple((start, stop) for start, stop, _ in bounds)
