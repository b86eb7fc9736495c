"""From a loader's rows to sharded device arrays, a few batches ahead of the step."""

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jaxtrain.types import Batch
from loaders.base import Loader, Rows

_END = object()


def rows_for(batch: Mapping[str, jax.ShapeDtypeStruct]) -> Rows:
    """Return the rows that this process reads, by the sharding (law 2), not by a process index."""
    ranges_of = {name: _row_ranges(x.sharding, x.shape) for name, x in batch.items()}
    x = next(iter(batch.values()))
    ranges = _row_ranges(x.sharding, x.shape)
    if any(field_ranges != ranges for field_ranges in ranges_of.values()):
        raise ValueError(
            "all fields of a batch must be split over rows in the same way, and they are split as"
            f" {ranges_of}"
        )
    return Rows(x.shape[0], tuple(sorted(ranges)))


def rows_of_one(batch: Mapping[str, jax.ShapeDtypeStruct]) -> Rows:
    """Return the first device's rows alone, to try a loader without the mesh."""
    x = next(iter(batch.values()))
    return Rows(x.shape[0], ((0, x.sharding.shard_shape(x.shape)[0]),))


def measure(loader: Loader, seconds: float) -> float:
    """Read batches for so many seconds, one at least, and return the rows/s."""
    loader.seek(0)
    next(loader)  # so that threads and caches are warm
    rows = 0
    seconds_passed = 0.0
    began = time.perf_counter()
    for _, batch in loader:
        field = next(iter(batch.values()))
        rows += sum(len(part) for part in field)
        seconds_passed = time.perf_counter() - began
        if seconds_passed >= seconds:
            break
    return rows / seconds_passed if seconds_passed else 0.0


def put(
    host: Mapping[str, Sequence[np.ndarray]], batch: Mapping[str, jax.ShapeDtypeStruct], rows: Rows
) -> Batch:
    """Make global arrays of this process's rows, split as ``batch`` is; other dimensions are free.

    Each device's rows are one contiguous array: nothing is copied on the host.
    """
    place_of_range = {rows_of_part: i for i, rows_of_part in enumerate(rows.ranges)}
    arrays = {}
    for name, x in batch.items():
        host_parts = host[name]
        shape = (x.shape[0], *host_parts[0].shape[1:])
        parts = []
        for device, index in x.sharding.addressable_devices_indices_map(shape).items():
            host_part = host_parts[place_of_range[_rows(index, x.shape[0])]]
            part = host_part[(slice(None), *index[1:])]
            parts.append(jax.device_put(part, device))
        arrays[name] = jax.make_array_from_single_device_arrays(shape, x.sharding, parts)
    return arrays


def blank(batch: Mapping[str, jax.ShapeDtypeStruct]) -> Batch:
    """Return a batch of zeros, for a step that will be skipped."""

    def zeros(x: jax.ShapeDtypeStruct) -> jax.Array:
        # From the host: a program that makes them would wait behind those being compiled.
        host = np.broadcast_to(np.zeros((), x.dtype), x.shape)
        return jax.make_array_from_callback(x.shape, x.sharding, host.__getitem__)

    return {name: zeros(x) for name, x in batch.items()}


def local_rows(x: jax.Array) -> np.ndarray:
    """Return this process's rows of an array, each once, in order. Waits for the device."""
    parts = {}
    for shard in x.addressable_shards:
        start = shard.index[0].start or 0
        parts[start] = np.asarray(shard.data)
    return np.concatenate([parts[start] for start in sorted(parts)])


def local_values(x: jax.Array) -> list[Any]:
    values: list[Any] = local_rows(x).tolist()
    return values


class Feed:
    """Iterates over (position after the batch, batch), made by a thread ``depth`` batches ahead.

    The copies of batch n + 1 overlap step n. The position travels with its batch, because the
    thread is ahead of it. ``waited``: seconds that the consumer has waited for batches.
    """

    def __init__(
        self,
        loader: Loader,
        batch: Mapping[str, jax.ShapeDtypeStruct],
        rows: Rows,
        *,
        depth: int = 2,
    ):
        self.waited = 0.0
        self._queue: queue.Queue[Any] = queue.Queue(maxsize=depth)
        self._stop = threading.Event()
        self._loader = loader
        self._thread = threading.Thread(
            target=self._run, args=(batch, rows), name="feed", daemon=True
        )
        self._thread.start()

    def __iter__(self) -> Iterator[tuple[int, Batch]]:
        return self

    def __next__(self) -> tuple[int, Batch]:
        item = self.next(unless=lambda: False)
        assert item is not None  # it waits for as long as it takes
        return item

    def next(self, *, unless: Callable[[], Any]) -> tuple[int, Batch] | None:
        """Fetch the next batch. Return None if ``unless()`` holds while the loader is stalled."""
        start = time.perf_counter()
        item = None
        while item is None:
            try:
                item = self._queue.get(timeout=0.1)
            except queue.Empty:
                if unless():
                    break
        self.waited += time.perf_counter() - start
        if isinstance(item, BaseException):
            self._queue.put(item)  # the last item stays for later calls
            raise item
        if item is _END:
            self._queue.put(item)
            raise StopIteration
        return item

    def close(self) -> None:
        """Stop the thread and the loader. Batches already handed out stay valid."""
        self._stop.set()
        self._loader.close()
        deadline = time.monotonic() + 5  # a loader that hangs must not keep the process from ending
        while self._thread.is_alive() and time.monotonic() < deadline:
            with contextlib.suppress(queue.Empty):
                self._queue.get(timeout=0.05)  # lets the thread see the stop
        with self._queue.mutex:
            self._queue.queue.clear()
        self._queue.put(_END)  # releases a consumer that still waits

    def _run(self, batch: Mapping[str, jax.ShapeDtypeStruct], rows: Rows) -> None:
        try:
            while not self._stop.is_set():
                position, host = next(self._loader)
                self._queue.put((position, put(host, batch, rows)))
                del host  # the slab belongs to the device arrays now
            self._queue.put(_END)
        except StopIteration:
            self._queue.put(_END)
        except BaseException as error:  # noqa: BLE001  the consumer raises it
            self._queue.put(error)


def _row_ranges(sharding: jax.sharding.Sharding, shape: tuple[int, ...]) -> set[tuple[int, int]]:
    """Return the ranges of rows that this process's devices hold."""
    indices: Any = sharding.addressable_devices_indices_map(shape).values()
    return {_rows(index, shape[0]) for index in indices}


def _rows(index: tuple[slice, ...], n: int) -> tuple[int, int]:
    start, stop, _ = index[0].indices(n)
    return start, stop
