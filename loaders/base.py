"""The interface of a data loader, and the skeleton that all loaders share.

`LoaderModule` lists the attributes of a loader module, which ``config.loader`` names, e.g.
``loaders.audio.spectrogram``. Every error of the data is a `DataError`. `fingerprint` digests
arrays and files, for the attribute of a loader of that name.
"""

import importlib
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, cast

import numpy as np

from loaders.io.checks import DataSection
from loaders.io.content import fingerprint as fingerprint  # for loaders of one's own
from loaders.io.files import DataError as DataError  # which every loader raises

DatasetInfo = Mapping[str, Any]
# field -> one contiguous array for each of Rows.ranges
HostBatch = Mapping[str, Sequence[np.ndarray]]
ENDLESS = 1 << 40  # [batches] of a training split, which repeats


def refuse_invalid(config: Any) -> None:
    """Raise DataError for the first of ``config.validate()``."""
    for field, problem in config.validate():
        raise DataError(f"data.{field} {problem}")


def narrowed(values: Any, dtype: Any, of: str) -> np.ndarray:
    """Ids or counts as integers of ``dtype``.

    Raises DataError, which names ``of``, if one of them does not fit. NumPy's own casts wrap around
    modulo 2^16 or 2^32. So no other cast makes ids or counts narrower.
    """
    values = np.asarray(values)
    bounds = np.iinfo(dtype)
    if not values.size:
        return np.asarray(values, dtype)
    smallest, largest = values.min(), values.max()
    if smallest < bounds.min or largest > bounds.max:
        name = np.dtype(dtype).name
        raise DataError(
            f"{of} are {smallest} to {largest}; {name} holds {bounds.min} to {bounds.max}"
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
        self._train = train
        self._rows = rows
        self._seed = seed
        self._threads = threads
        self._ahead = ahead
        self._position = 0
        self._closed = False
        # The iterator of a grain dataset, from the first next or seek on.
        self._batches_ahead: Any = None

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
        is_past_end = not self._train and self._position >= self.n_batches
        if self._closed or is_past_end:
            raise StopIteration
        if not self._ahead:
            batch = self._batch(self._position)
        else:
            if self._batches_ahead is None:
                self.seek(self._position)
            batch = next(self._batches_ahead)
        self._position += 1
        return self._position, batch

    def seek(self, position: int) -> None:
        """Continues with global batch number ``position``."""
        self._stop_reading()
        self._position = position
        n_batches = ENDLESS if self._train else self.n_batches
        if not self._ahead or position >= n_batches:
            return
        import grain  # takes a second, which loaders that read nothing ahead need not spend

        options = grain.ReadOptions(num_threads=self._threads, prefetch_buffer_size=self._ahead)
        numbers = grain.MapDataset.range(n_batches)
        batches = numbers.map(lambda number: self._batch(int(number)))
        self._batches_ahead = iter(batches.to_iter_dataset(options))
        self._batches_ahead.set_state({"next_index": position})

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

    def doubts(self) -> Sequence[str]:
        """Return what is odd about the data of a training split, a sentence each."""
        return ()

    def sources(self) -> Iterable[tuple[str, int, str]]:
        """Return name, bytes and digest of the files that the rows come from, if they are known.

        A run notes them: what it was trained on is no evidence for it.
        """
        return ()

    def compare_content(self, seconds: float) -> str:
        """Read the data whole, or for ``seconds``, and compare them with recorded digests.

        Return a line about it, or "" if nothing is recorded. Raises DataError: they differ.
        """
        return ""

    def close(self) -> None:
        """Stop the workers. A wait in ``__next__`` in another thread ends with StopIteration."""
        self._closed = True
        self._stop_reading()

    def _stop_reading(self) -> None:
        if self._batches_ahead is not None:
            self._batches_ahead.close()
            self._batches_ahead = None

    def _batch(self, position: int) -> HostBatch:
        """Return this process's rows of a global batch, range by range, perhaps in a thread."""
        fields = self.buckets[self.bucket_at(position)]
        parts = []
        for start, stop in self._rows.ranges:
            part = self._part(position, np.arange(start, stop))
            self._check_part(part, position, stop - start, fields)
            parts.append(part)
        return {name: [part[name] for part in parts] for name in fields}

    def _check_part(
        self,
        part: Mapping[str, np.ndarray],
        position: int,
        n_rows: int,
        fields: Mapping[str, Field],
    ) -> None:
        """Raise DataError if a range's rows of a batch are not as its bucket declares them."""
        start = f"the loader {type(self).__qualname__} made batch {position}"
        missing = sorted(fields.keys() - part.keys())
        if missing:
            raise DataError(f"{start} without its field {missing[0]!r}")
        for name, field in fields.items():
            array = part[name]
            shape = (n_rows, *field.shape)
            if (array.dtype, array.shape) != (field.dtype, shape):
                raise DataError(
                    f"{start} with its field {name!r} as {array.dtype} {list(array.shape)};"
                    f" element_spec() declares {field.dtype} {list(shape)}"
                )

    def _part(self, position: int, row: np.ndarray) -> dict[str, np.ndarray]:
        """Return the rows ``row``, int64 [r], of global batch number ``position``."""
        raise NotImplementedError

    def _empty(self, n: int, bucket: int = -1) -> dict[str, np.ndarray]:
        """``n`` rows of padding: zeros, and -1 for "index"."""
        fields = self.buckets[bucket].items()
        batch = {name: np.zeros((n, *field.shape), field.dtype) for name, field in fields}
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
