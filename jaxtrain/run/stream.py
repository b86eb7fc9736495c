"""The data of a run: its two loaders, and the stream of sharded batches of one of them."""

import dataclasses
import hashlib
import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

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
    """A context, whose loaders ``train`` and ``test`` begin to read at `start`.

    ``buckets`` and ``test_buckets`` are their abstract batches, ``rows`` those that this process
    reads, and ``offset`` batches of other data: the loader's position is the step less this.
    """

    def __init__(self, assembly: Assembly, clock: goodput.Clock):
        self._clock = clock
        config, abstract = assembly.config, assembly.abstract
        module = base.module(config.loader)
        self._batch, self._steps = abstract.batch, config.train.steps
        self.rows, self.offset = feed.rows_for(abstract.batch), 0
        self.train = module.make_loader(
            config.data, split="train", rows=self.rows, seed=config.seed
        )
        self.test = module.make_loader(config.data, split="test", rows=self.rows, seed=config.seed)
        if missing := [
            name for name in ("buckets", "fingerprint", "order") if not hasattr(self.train, name)
        ]:
            text = (
                f"config.loader is {config.loader!r}, whose make_loader gives a"
                f" {type(self.train).__name__}"
            )
            raise base.DataError(
                f"{text} without {missing[0]!r}; expected a loaders.base.Loader, as in"
                " docs/your-model.md"
            )
        if not self.test.n_batches:
            log.warning(
                "the data have no test split: nothing is evaluated (docs/data.md shows how to make"
                " one)"
            )
        self.buckets, self.test_buckets = (
            [
                state.make_batch(assembly.task, assembly.layout, fields, config.train.batch)
                for fields in loader.buckets
            ]
            for loader in (self.train, self.test)
        )
        self._stream: feed.Feed | None = None  # from `start` on

    def __enter__(self) -> "Data":
        return self

    def __exit__(self, *exception: object) -> None:
        if self._stream:
            self._stream.close()
        else:
            self.train.close()
        self.test.close()

    def read(self, position: int) -> Mapping[str, Sequence[np.ndarray]]:
        """Read this process's rows of one training batch, before `start`."""
        self.train.seek(position)
        return next(self.train)[1]

    def start(self, step: int, offset: int) -> None:
        """Begins to read the batches behind ``step``. Called by all processes at once."""
        self.offset, self._step = offset, step
        self.train.seek(step - offset)
        self._stream = feed.Feed(self.train, self._batch, self.rows)
        self._latest = [feed.blank(batch) for batch in self.buckets]

    def bucket_of(self, index: int) -> int:
        """Return the bucket of the batch for step number ``index``, the first being 0."""
        return self.train.bucket_at(index - self.offset)

    def next(self, *, unless: Callable[[], Any]) -> Item:
        """Return the batch of the next step.

        If there is none yet and ``unless()`` holds, return an old batch of the bucket that is due,
        so that this process can take part in the step in which all agree to stop.
        """
        index = self._step
        bucket = self.bucket_of(index)
        assert self._stream is not None
        before = self._clock.switch(goodput.WAIT)
        item = self._stream.next(unless=unless)
        self._clock.switch(before)
        if item:
            position, self._latest[bucket] = item
            self._step = position + self.offset
            index = self._step - 1
        return Item(self._step, index, bucket, self._latest[bucket])

    def test_batches(self, n: int) -> Iterator[tuple[int, Batch]]:
        """Bucket and batch of the first ``n`` of the test split."""
        self.test.seek(0)
        for i in range(n):
            yield self.test.bucket_at(i), feed.put(next(self.test)[1], self._batch, self.rows)

    def state(self, step: int) -> dict[str, Any]:
        """Return the data's part of a checkpoint of ``step``, as JSON."""
        return self.train.state(step - self.offset)

    def fingerprints(self) -> dict[str, Any]:
        """Return the dataset info and order as JSON, which resumed runs and all processes share."""
        return self.train.state(0)

    def digest(self) -> str:
        """Return a short digest of `fingerprints`, for the record of a start."""
        return hashlib.sha256(json.dumps(self.fingerprints(), sort_keys=True).encode()).hexdigest()[
            :16
        ]

    @property
    def waited(self) -> float:
        """Seconds that the loop has waited for batches."""
        assert self._stream is not None
        return self._stream.waited
