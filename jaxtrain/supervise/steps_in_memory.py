"""Steps in memory: each process's parts of the last whole step, in shared memory of its host.

A supervised run with config.checkpoint.memory_every keeps them, and a restart takes the newest step
that is whole: every process has its parts, or another process has the same ones, as those of
parameters that the layout replicates. Two steps have a place, so that one is whole at any time:

    /dev/shm/jaxtrain-USER-RUN-PROCESS/     the supervisor's, which removes it at its end
      holder.json     the supervisor (`lease.Process`)
      0.bin, 1.bin    the parts of a step, one after the other
      0.json, 1.json  {"run": …, "step": 120, "parts": a digest of paths, places and types,
                      "bytes": …, "sha256": of the parts, "note": data, history and config}

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
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

from jaxtrain import specs
from jaxtrain.parallel import cluster, lease
from jaxtrain.types import PyTree
from loaders.io import atomic_write
from loaders.io.checks import UserError

log = logging.getLogger("jaxtrain")

PARENT = pathlib.Path("/dev/shm")
HOLDER = "holder.json"
PLACES = (0, 1)
PIECE = 16 << 20  # [bytes] that are sent to a process at once
ALIGNMENT = 64  # [bytes]
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

    Remove those of this user's supervisors that have ended. Raises SharedMemoryError.
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
        holder = lease.parse((folder / HOLDER).read_bytes())
    except OSError:
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
        self._place = 0  # of the step that is written next
        self._pool = concurrent.futures.ThreadPoolExecutor(1, "memory")
        self._writing: concurrent.futures.Future[None] | None = None

    def reserve(self) -> None:
        """Allocate both places. Raises SharedMemoryError, with the bytes that are needed."""
        needed = len(PLACES) * self._size
        for place in PLACES:
            descriptor = os.open(self._bin(place), os.O_RDWR | os.O_CREAT, 0o600)
            try:
                os.posix_fallocate(descriptor, 0, max(self._size, 1))
            except OSError as error:
                free = os.statvfs(self.folder)
                raise SharedMemoryError(
                    f"config.checkpoint.memory_every needs {needed:,} bytes of shared memory for"
                    f" each process, and {free.f_bavail * free.f_frsize:,} are left in"
                    f" {self.folder.parent}: {error.strerror}. Enlarge it (mount -o"
                    " remount,size=…; --shm-size of a container), or set it to 0"
                ) from error
            finally:
                os.close(descriptor)

    def save(self, step: int, parts: PyTree, note: Mapping[str, Any]) -> None:
        """Copy a computed step. Its checksum is computed behind the steps that follow.

        It takes the place of the older step, or of the newer one if that is not whole everywhere.
        """
        if all(cluster.gather(int(self._is_written()))):
            self._place = PLACES[self._place - 1]
        self._json(self._place).unlink(missing_ok=True)
        with self._mapped(self._place, writable=True) as content:
            for part, data in zip(self._parts, _local_data(parts), strict=True):
                target = content[part.offset : part.offset + part.size]
                target[:] = np.ascontiguousarray(data).reshape(-1).view(np.uint8)
        header = {"run": self._run, "step": step, "parts": self._layout, "bytes": self._size}
        header["note"] = dict(note)
        self._writing = self._pool.submit(self._seal, self._place, header)

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

    def _seal(self, place: int, header: dict[str, Any]) -> None:
        header["sha256"] = self._hash(place)
        atomic_write.write(self._json(place), json.dumps(header))

    def newest(self, above: int, note: Mapping[str, Any]) -> Found | None:
        """Return the newest step above one that is whole in memory, with this part in its note.

        A step of another run, layout or note is left out, and so is one that fails its checksum.
        """
        headers = self._headers(note)
        steps = [step for step in headers if step > above]
        report = json.dumps({"parts": self._layout, "steps": sorted(steps)})
        reports = [json.loads(text) for text in cluster.gather_texts(report)]
        for step in sorted({step for each in reports for step in each["steps"]}, reverse=True):
            if not _is_whole(step, reports):
                continue
            is_sound = step not in headers or self._check(headers[step])
            if all(cluster.gather(int(is_sound))):
                if restored := self._read(step, headers.get(step), reports):
                    return restored
            log.warning("step %d in memory fails its checksum, and is skipped", step)
        return None

    def _headers(self, note: Mapping[str, Any]) -> dict[int, dict[str, Any]]:
        """Step -> header, of the steps of this run that are here."""
        headers = {}
        for place in PLACES:
            with contextlib.suppress(OSError, ValueError, KeyError, AttributeError):
                header = json.loads(self._json(place).read_text())
                of_run = header["run"] == self._run and header["parts"] == self._layout
                of_note = all(header["note"].get(name) == value for name, value in note.items())
                if of_run and of_note and header["bytes"] == self._size:
                    headers[int(header["step"])] = header | {"place": place}
        return headers

    def _check(self, header: Mapping[str, Any]) -> bool:
        with contextlib.suppress(OSError, ValueError):
            return bool(self._hash(header["place"]) == header["sha256"])
        return False

    def _read(
        self,
        step: int,
        header: Mapping[str, Any] | None,
        reports: Sequence[Mapping[str, Any]],
    ) -> Found | None:
        """Return a whole step, or None if a process did not get it as it was sent.

        Processes without a ``header`` of the step get their parts from another one.
        """
        place = header["place"] if header else 0
        headers = [json.loads(text) for text in cluster.gather_texts(json.dumps(header))]
        is_sound = True
        for layout in sorted({r["parts"] for r in reports if step not in r["steps"]}):
            source = _source(step, layout, reports)
            takes = layout == self._layout and header is None
            self._send(source, place, takes=takes)
            if takes:
                is_sound = self._hash(place) == headers[source]["sha256"]
        if not all(cluster.gather(int(is_sound))):
            return None
        self._place = PLACES[place - 1]
        with self._mapped(place, writable=False) as content:
            parts = self._arrays(content)
        note = next(each for each in headers if each)["note"]
        return Found(step, parts, note)

    def _send(self, source: int, place: int, *, takes: bool) -> None:
        """Send the parts of process ``source`` to all. Those that take them have room for them."""
        is_source = jax.process_index() == source
        if takes:
            self.reserve()
            self._json(place).unlink(missing_ok=True)
        size = cluster.gather(-(-self._size // PIECE))[source]
        with contextlib.ExitStack() as closing:
            content = np.zeros(0, np.uint8)
            if is_source or takes:
                content = closing.enter_context(self._mapped(place, writable=takes))
            for start in range(0, size * PIECE, PIECE):
                part = content[start : start + PIECE]
                piece = np.zeros(PIECE, np.uint8)
                if is_source:
                    piece[: len(part)] = part
                sent = np.asarray(multihost_utils.broadcast_one_to_all(piece, is_source=is_source))
                if takes:
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

    def _hash(self, place: int) -> str:
        with self._mapped(place, writable=False) as content:
            return hashlib.sha256(content.data).hexdigest()

    @contextlib.contextmanager
    def _mapped(self, place: int, *, writable: bool) -> Iterator[np.ndarray]:
        access = mmap.ACCESS_WRITE if writable else mmap.ACCESS_READ
        with open(self._bin(place), "r+b" if writable else "rb") as file:
            if os.fstat(file.fileno()).st_size < self._size:
                raise ValueError(f"{file.name} is cut short")
            yield np.frombuffer(mmap.mmap(file.fileno(), 0, access=access), np.uint8)[: self._size]

    def _bin(self, place: int) -> pathlib.Path:
        return self.folder / f"{place}.bin"

    def _json(self, place: int) -> pathlib.Path:
        return self.folder / f"{place}.json"


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
    present = {each["parts"] for each in reports if step in each["steps"]}
    return all(each["parts"] in present for each in reports)


def _source(step: int, layout: str, reports: Sequence[Mapping[str, Any]]) -> int:
    """Return the first process that has these parts of a step."""
    for process, each in enumerate(reports):
        if each["parts"] == layout and step in each["steps"]:
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
