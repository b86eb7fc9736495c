"""What the trainer asks of a data loader.

A loader module (``config.loader`` names it, e.g. ``loaders.spectrogram``) offers

    Config                                   frozen dataclass; becomes the ``data`` section of the config. Its ``problems()``
                                             yields (field, what is wrong and the remedy) without reading data
    fields(config) -> {name: Field}          what a row of a batch holds
    facts(config) -> Facts                   what the data itself decides (class names, row counts), read without decoding
    make_loader(config, *, split, rows, seed) -> Loader        ``split`` is "train" or "test"

All that can be wrong with the data is a `DataError`.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

Facts = Mapping[str, Any]
HostBatch = Mapping[str, Sequence[np.ndarray]]  # field -> one contiguous array for each of Rows.ranges


class DataError(ValueError):
    """Data that cannot be used as configured. The message names the path, the value and the remedy."""


class Field(NamedTuple):
    """One array of a batch: the shape of one row (without the batch dimension) and its dtype."""

    shape: tuple[int, ...]
    dtype: np.dtype


class Rows(NamedTuple):
    """Which rows of the global batch this process reads.

    ``ranges`` holds [start, stop) pairs: the distinct row ranges of the local devices. Devices that hold the same rows
    (a model axis) share one range, so that every row is read once in a process.
    """

    batch: int
    ranges: tuple[tuple[int, int], ...]


class Population(NamedTuple):
    """What a training split is drawn from; by this `loaders.mixing` judges how well it is shuffled."""

    rows: np.ndarray  # int64 [n]: all that "index" can be
    first_rows: np.ndarray  # int64 [shards]: the first row of each shard


class Loader(Protocol):
    """An endless (train) or finite (test) stream of batches, at every moment a pure function of its position.

    Attributes:
      fields: name -> Field. Every batch holds exactly these. "weight" (float32, ()) is 1 for a row that counts and 0
        for one that does not: the padding of a ragged last batch, a recording that cannot be decoded in "test".
      n_batches: batches in one pass over the split (ceiling), which is where a "test" loader stops; 0 for an empty split.

    One whose batches hold "index" may have an attribute ``population`` (`Population`): the run then logs how its order mixes.

    A loader whose batches have several shapes also offers ``shapes``, a sequence of such mappings of which ``fields`` is the
    largest and last, and ``shape_at(position)``: which of them global batch number ``position`` has, by its position alone. For
    each of them a program is compiled.
    """

    fields: Mapping[str, Field]
    n_batches: int

    def seek(self, position: int) -> None:
        """Goes on with global batch number ``position``."""

    def state(self, position: int) -> dict[str, Any]:
        """What a checkpoint must hold to continue here, as JSON: position, seed, fingerprints of the data and its order."""

    def __next__(self) -> tuple[int, HostBatch]:
        """The position *after* this batch, and this process's rows of it."""

    def diagnostics(self) -> dict[str, Any]:
        """Counters for people: queue depth, bad recordings by id; "slowest", where known: the stage that takes most time."""

    def close(self) -> None:
        """Stops the workers. A wait in ``__next__`` in another thread ends with StopIteration."""
