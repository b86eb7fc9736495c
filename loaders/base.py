"""The interface of a data loader, and the skeleton that all loaders share.

`LoaderModule` lists the attributes of a loader module, which ``config.loader`` names, e.g.
``loaders.audio.spectrogram``. Every error of the data is a `DataError`.
"""

import importlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, cast

import numpy as np

from loaders.io.checks import DataSection
from loaders.io.files import DataError as DataError  # which every loader raises

DatasetInfo = Mapping[str, Any]
# field -> one contiguous array for each of Rows.ranges
HostBatch = Mapping[str, Sequence[np.ndarray]]
ENDLESS = 1 << 40  # [batches] of a training split, which repeats


def refuse_invalid(config: Any) -> None:
    """Raise DataError for the first of ``config.validate()``."""
    for field, text in config.validate():
        raise DataError(f"data.{field} {text}")


def narrowed(values: Any, dtype: Any, of: str) -> np.ndarray:
    """Ids or counts as integers of ``dtype``.

    Raises DataError, which names ``of``, if one of them does not fit. NumPy's own casts wrap around
    modulo 2^16 or 2^32. So no other cast makes ids or counts narrower.
    """
    values, bounds = np.asarray(values), np.iinfo(dtype)
    if values.size and not (bounds.min <= values.min() and values.max() <= bounds.max):
        found = f"{values.min()} to {values.max()}"
        raise DataError(
            f"{of} are {found}; {np.dtype(dtype).name} holds {bounds.min} to {bounds.max}"
        )
    return np.asarray(values, dtype)


class Field(NamedTuple):
    """One array of a batch: the shape of one row (without the batch dimension) and its dtype."""

    shape: tuple[int, ...]
    dtype: np.dtype


class Rows(NamedTuple):
    """Which rows of the global batch this process reads.

    ``ranges`` holds [start, stop) pairs: the distinct row ranges of the local devices. Devices that
    hold the same rows (a model axis) share one range, so that every row is read once in a process.
    """

    batch: int
    ranges: tuple[tuple[int, int], ...]


class Population(NamedTuple):
    """The rows that a training split draws from, for `loaders.shuffle_stats`."""

    rows: np.ndarray  # int64 [n]: all values that "index" can have
    first_rows: np.ndarray  # int64 [shards]: the first row of each shard


class Loader:
    """An endless (train) or finite (test) stream of batches, a pure function of its position.

    A subclass defines `_part` (the rows of one range), or `_batch` if ranges are not made one by
    one. It also sets `fingerprint` and `order`, by which a checkpoint recognises its data. All else
    has a default here.

    Attributes:
      buckets: the kinds of batches there are, each a mapping name -> Field, the largest last. A
        program is compiled for each. Every batch holds exactly the fields of its bucket. "weight"
        (float32, ()) is 1 for a valid row and 0 for the padding of a ragged last batch, or for a
        recording of "test" that cannot be decoded.
      n_batches: batches in one pass over the split (rounded up), after which a "test" loader stops.
      0 for an empty split.
      population: the rows that "index" is drawn from, if the run logs the quality of its shuffling,
      else None.
    """

    population: Population | None = None

    def __init__(
        self,
        *buckets: Mapping[str, Field],
        train: bool,
        rows: Rows,
        seed: int,
        n_batches: int,
        threads: int = 0,
        ahead: int = 0,
    ):
        """``threads`` keep ``ahead`` batches ready. With 0, `next` makes its batch itself."""
        self.buckets: Sequence[Mapping[str, Field]] = buckets
        self.n_batches = n_batches
        self._train, self._rows, self._seed = train, rows, seed
        self._position, self._closed = 0, False
        self._threads, self._ahead = threads, ahead
        self._reading: Any = None  # the iterator of a grain dataset, from the first next or seek on

    @property
    def element_spec(self) -> Mapping[str, Field]:
        """The fields of the largest bucket."""
        return self.buckets[-1]

    def bucket_at(self, position: int) -> int:
        """Return the bucket of global batch number ``position``, by its position alone."""
        return 0

    def __iter__(self) -> "Loader":
        return self

    def __next__(self) -> tuple[int, HostBatch]:
        """Return the position *after* this batch, and this process's rows of it."""
        if self._closed or (not self._train and self._position >= self.n_batches):
            raise StopIteration
        if self._ahead and self._reading is None:
            self.seek(self._position)
        batch = next(self._reading) if self._ahead else self._batch(self._position)
        self._position += 1
        return self._position, batch

    def seek(self, position: int) -> None:
        """Continues with global batch number ``position``."""
        self._stop_reading()
        self._position = position
        n = ENDLESS if self._train else self.n_batches
        if self._ahead and position < n:
            import grain  # takes a second, which loaders that read nothing ahead need not spend

            options = grain.ReadOptions(num_threads=self._threads, prefetch_buffer_size=self._ahead)
            batches = grain.MapDataset.range(n).map(lambda number: self._batch(int(number)))
            self._reading = iter(batches.to_iter_dataset(options))
            self._reading.set_state({"next_index": position})

    def state(self, position: int) -> dict[str, Any]:
        """Return a checkpoint's state, as JSON: position, seed, fingerprints of data and order."""
        return {
            "position": position,
            "seed": self._seed,
            "fingerprint": self.fingerprint,
            "order": self.order,
        }

    if TYPE_CHECKING:  # a subclass has them as attributes or properties

        @property
        def fingerprint(self) -> str:
            """A digest of the data: another one when they change, the same when they move."""

        @property
        def order(self) -> dict[str, Any]:
            """Everything but the seed and the data that decides the order of rows, as JSON."""

    def diagnostics(self) -> dict[str, Any]:
        """Return counters: queue depth, bad recordings by id, "slowest" stage if known."""
        return {}

    def close(self) -> None:
        """Stop the workers. A wait in ``__next__`` in another thread ends with StopIteration."""
        self._closed = True
        self._stop_reading()

    def _stop_reading(self) -> None:
        if self._reading is not None:
            self._reading.close()
            self._reading = None

    def _batch(self, position: int) -> HostBatch:
        """Return this process's rows of a global batch, range by range, perhaps in a thread."""
        parts = [self._part(position, np.arange(start, stop)) for start, stop in self._rows.ranges]
        fields = self.buckets[self.bucket_at(position)]
        if missing := sorted(name for name in fields if any(name not in part for part in parts)):
            raise DataError(
                f"the loader {type(self).__qualname__} made batch {position} without its field"
                f" {missing[0]!r}"
            )
        for name, field in fields.items():
            for part, (start, stop) in zip(parts, self._rows.ranges, strict=True):
                found, expected = (
                    (part[name].dtype, part[name].shape),
                    (field.dtype, (stop - start, *field.shape)),
                )
                if found != expected:
                    raise DataError(
                        f"the loader {type(self).__qualname__} made batch {position} with its field"
                        f" {name!r} as {found[0]} {list(found[1])}; element_spec() declares"
                        f" {expected[0]} {list(expected[1])}"
                    )
        return {name: [part[name] for part in parts] for name in fields}

    def _part(self, position: int, row: np.ndarray) -> dict[str, np.ndarray]:
        """Return the rows ``row``, int64 [r], of global batch number ``position``."""
        raise NotImplementedError

    def _empty(self, n: int, bucket: int = -1) -> dict[str, np.ndarray]:
        """``n`` rows of padding: zeros, and -1 for "index"."""
        batch = {
            name: np.zeros((n, *field.shape), field.dtype)
            for name, field in self.buckets[bucket].items()
        }
        if "index" in batch:
            batch["index"][:] = -1
        return batch


class LoaderModule(Protocol):
    """The attributes of a loader module. ``config`` is an instance of its ``Config``."""

    Config: type[DataSection]
    """A frozen dataclass: the section ``data`` of a config. Its ``validate()`` reads no data."""

    def element_spec(self, config: Any) -> Mapping[str, Field]:
        """Return the field name -> shape and dtype of a row."""

    def dataset_info(self, config: Any) -> DatasetInfo:
        """Return the dataset info (class names, row counts), read without decoding."""

    def make_loader(self, config: Any, *, split: str, rows: Rows, seed: int) -> Loader:
        """Open the split "train" or "test"."""


def module(name: str) -> LoaderModule:
    """Import a loader module by its dotted name. Raises ImportError."""
    return cast(LoaderModule, importlib.import_module(name))
