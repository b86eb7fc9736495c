"""The data of a run: its two loaders, and the stream of sharded batches of one of them."""

import dataclasses
import hashlib
import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jaxtrain.assembly import Assembly
from jaxtrain.data import feed
from jaxtrain.step import state
from jaxtrain.telemetry import goodput
from jaxtrain.types import Batch
from loaders import base

log = logging.getLogger("jaxtrain")


@dataclasses.dataclass(frozen=True)
class Item:
    """A batch for one step."""

    step: int  # batches read once it is taken, which is the step's number as people count, from 1
    index: int  # the step's number as programs count, from 0, unchanged if no new batch came
    bucket: int
    arrays: Batch

    @property
    def is_first(self) -> bool:
        """Whether it is the first batch of the whole run."""
        return self.step == 1 and self.index == 0


class Data:
    """A context with the loaders ``train`` and ``test``, and their abstract batches.

    ``buckets`` and ``test_buckets`` are the abstract batches, ``batch`` is one of any bucket, and
    ``rows`` are those that this process reads.
    """

    def __init__(self, assembly: Assembly):
        config = assembly.config
        make_loader = base.module(config.loader).make_loader
        self.batch = assembly.abstract.batch
        self.rows = feed.rows_for(self.batch)
        self.train = make_loader(config.data, split="train", rows=self.rows, seed=config.seed)
        self.test = make_loader(config.data, split="test", rows=self.rows, seed=config.seed)
        _refuse_other_types(config.loader, self.train)
        for doubt in self.train.doubts():
            log.warning("%s", doubt)
        self._test_fingerprint = self.test.fingerprint if self.test.n_batches else ""
        if not self.test.n_batches:
            log.warning(
                "the data have no test split: nothing is evaluated (docs/data.md shows how to make"
                " one)"
            )
        self.buckets = _abstract_batches(assembly, self.train)
        self.test_buckets = _abstract_batches(assembly, self.test)

    def __enter__(self) -> "Data":
        return self

    def __exit__(self, *exception: object) -> None:
        self.train.close()
        self.test.close()

    def read(self, position: int) -> Mapping[str, Sequence[np.ndarray]]:
        """Read this process's rows of one training batch. No `Stream` may be reading."""
        self.train.seek(position)
        return next(self.train)[1]

    def test_batches(self, n: int) -> Iterator[tuple[int, Batch]]:
        """Bucket and batch of the first ``n`` of the test split."""
        self.test.seek(0)
        for i in range(n):
            bucket = self.test.bucket_at(i)
            yield bucket, feed.put(next(self.test)[1], self.batch, self.rows)

    def state(self, position: int) -> dict[str, Any]:
        """Return the data's part of a checkpoint at ``position``, as JSON."""
        return {**self.train.state(position), "test": self._test_fingerprint}

    def fingerprints(self) -> dict[str, Any]:
        """Return the dataset info and order as JSON, which resumed runs and all processes share."""
        return self.train.state(0)

    def digest(self) -> str:
        """Return a short digest of `fingerprints`, for the record of a start."""
        fingerprints = json.dumps(self.fingerprints(), sort_keys=True)
        return hashlib.sha256(fingerprints.encode()).hexdigest()[:16]


class Stream:
    """A context that reads the training batches behind ``step``, ahead of the loop.

    All processes make it at once. ``offset``: batches of other data that the run has read before:
    the loader's position is the step less this.
    """

    def __init__(self, data: Data, clock: goodput.Clock, *, step: int, offset: int):
        self._train = data.train
        self._clock = clock
        self._step = step
        self._offset = offset
        data.train.seek(step - offset)
        self._feed = feed.Feed(data.train, data.batch, data.rows)
        self._latest = [feed.blank(batch) for batch in data.buckets]

    def __enter__(self) -> "Stream":
        return self

    def __exit__(self, *exception: object) -> None:
        self._feed.close()

    def next(self, *, unless: Callable[[], Any]) -> Item:
        """Return the batch of the next step.

        If there is none yet and ``unless()`` holds, return an old batch of the bucket that is due,
        so that this process can take part in the step in which all agree to stop.
        """
        index = self._step
        bucket = self._train.bucket_at(index - self._offset)
        phase = self._clock.switch(goodput.WAIT)
        new_batch = self._feed.next(unless=unless)
        self._clock.switch(phase)
        if new_batch:
            position, self._latest[bucket] = new_batch
            self._step = position + self._offset
            index = self._step - 1
        return Item(self._step, index, bucket, self._latest[bucket])

    @property
    def waited(self) -> float:
        """Seconds that the loop has waited for batches."""
        return self._feed.waited


def _refuse_other_types(module: str, loader: object) -> None:
    """Raise DataError if the loader of ``module`` lacks an attribute of `loaders.base.Loader`."""
    required = ("buckets", "fingerprint", "order")
    missing = [name for name in required if not hasattr(loader, name)]
    if missing:
        raise base.DataError(
            f"config.loader is {module!r}, whose make_loader gives a {type(loader).__name__}"
            f" without {missing[0]!r}; expected a loaders.base.Loader, as in docs/your-model.md"
        )


def _abstract_batches(
    assembly: Assembly, loader: base.Loader
) -> list[dict[str, jax.ShapeDtypeStruct]]:
    """Return the abstract batch of each bucket of a loader."""
    rows = assembly.config.train.batch
    return [
        state.make_batch(assembly.task, assembly.layout, fields, rows) for fields in loader.buckets
    ]
