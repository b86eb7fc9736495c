"""Conversations with sound, from a manifest, in batches of a few shapes.

`loaders.chat.chatml` defines a manifest, and turns an example into tokens, columns of codes and
labels; `loaders.chat.chat_examples` reads them.

The rows of a batch have one of a few shapes (S text tokens, A columns, N and M labels): the buckets
into which the examples fall with the least padding (`loaders.buckets`). The bucket of a batch is
dealt by the buckets' shares (`loaders.mixture`); each bucket goes through its own examples in
permuted order, every example once before any comes again. All is a function of (seed, position,
row). "test" goes once through its examples, bucket by bucket in mixed order.

An example that cannot be used (not a conversation, missing or broken sound, no codes, longer than
``longest``) is left out, reported by its number, and counted against ``bad_budget``.
"""

import functools
import hashlib
import logging
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from loaders import mixture, order
from loaders.base import DataError, DatasetInfo, Field, HostBatch, Loader, Rows, refuse_invalid
from loaders.buckets import Bucket, Shape, make_buckets
from loaders.chat import chatml
from loaders.chat.chat_examples import Config, Example, Tools, read_examples, stamps, tools_of
from loaders.io import files

__all__ = ["Chat", "Config", "dataset_info", "element_spec", "make_loader"]

VERSION = 1  # changes whenever the same (seed, position, row) would give another example

log = logging.getLogger("jaxtrain")


class Split(NamedTuple):
    """The usable examples of a split, in buckets."""

    examples: tuple[Example, ...]
    sizes: np.ndarray  # int64 [examples, 4]: the `Shape` that each example needs
    buckets: tuple[Bucket, ...]
    bad: tuple[tuple[int, str], ...]  # (number, reason)

    def label_counts(self) -> np.ndarray:
        """Return the labels of each example: text, and one codebook, int64 [examples, 2]."""
        counts = [(example.size.text_labels, example.n_audio) for example in self.examples]
        return np.array(counts, np.int64).reshape(-1, 2)

    def log_buckets(self, name: str) -> None:
        """Log the shape of each bucket, and how full its rows are."""
        for i, bucket in enumerate(self.buckets):
            log.info(
                "%s bucket %d of %d: %d places (%d of text, %d of sound), %d examples, %.0f %%"
                " full",
                name,
                i + 1,
                len(self.buckets),
                bucket.shape.places,
                bucket.shape.text,
                bucket.shape.audio,
                len(bucket.members),
                100 * bucket.fill(self.sizes),
            )


class Chat(Loader):
    """Conversations in buckets. Fields: those of `jaxtrain.workloads.audio_language`, and

    index, epoch  int32 [r]    the example's number (-1 in padding), passes of its bucket before
    weight        float32 [r]  0 for the padding of a bucket's ragged last batch, in "test"
    """

    def __init__(self, config: Config, *, split: str, rows: Rows, seed: int):
        self._config = config
        self._data = _splits(config)[split]
        manifest = config.manifest
        if split == "test" and config.test:
            manifest = config.test
        self._tools = tools_of(config, manifest)
        sizes = [len(bucket.members) for bucket in self._data.buckets]
        self._batches = [-(-n // rows.batch) for n in sizes]  # of a pass, by bucket
        is_train = split == "train"
        self._mixture = None
        if is_train:
            if not sum(self._batches):
                raise DataError(f"{config.manifest} leaves no examples to train on")
            self._mixture = mixture.Mixture(sizes, seed=seed)
        self._n_labels = self._data.label_counts()
        self._deal = functools.lru_cache(maxsize=1024)(self._make_deal)
        self._data.log_buckets(split)
        specs = [_element_spec(self._tools, bucket.shape) for bucket in self._data.buckets]
        n_batches = sum(self._batches)
        super().__init__(*specs, train=is_train, rows=rows, seed=seed, n_batches=n_batches)

    def bucket_at(self, position: int) -> int:
        return self._deal(position).bucket

    @functools.cached_property
    def fingerprint(self) -> str:
        digest = hashlib.sha256()
        for example in self._data.examples:
            digest.update(example.tokens.tobytes())
            digest.update(example.labels.tobytes())
            size_and_codes = repr((example.number, example.size, example.codes))
            digest.update(size_and_codes.encode())
        return digest.hexdigest()[:16]

    @property
    def order(self) -> dict[str, Any]:
        shapes = [list(bucket.shape) for bucket in self._data.buckets]
        return {
            "version": [VERSION, mixture.VERSION, order.VERSION],
            "batch": self._rows.batch,
            "delay": self._config.delay,
            "buckets": shapes,
        }

    def diagnostics(self) -> dict[str, Any]:
        """Return unusable examples with the reason."""
        return {"bad": len(self._data.bad), "bad_list": self._data.bad}

    def _make_deal(self, position: int) -> "Deal":
        """Return the examples of a global batch."""
        if self._mixture is None:
            return self._make_test_deal(position)
        buckets, earlier_batches = self._mixture(np.array([position]))
        bucket = int(buckets[0])
        number = self._numbers(int(earlier_batches[0]))
        members = self._data.buckets[bucket].members
        bucket_seed = self._seed + (bucket << 32)
        _, permuted = order.epochs(bucket_seed, len(members), number)
        return Deal(bucket, number, members[permuted])

    def _make_test_deal(self, position: int) -> "Deal":
        """Return the examples of a batch of "test", and padding after a bucket's last one.

        Batches are in mixed order, so that the first ones of a short evaluation are from all
        buckets.
        """
        permuted = order.permutation(0, 0, self.n_batches, np.array([position]))
        batch = int(permuted[0])
        ends = np.cumsum(self._batches)
        bucket = int(np.searchsorted(ends, batch, side="right"))
        first_batch = sum(self._batches[:bucket])
        number = self._numbers(batch - first_batch)
        members = self._data.buckets[bucket].members
        last = len(members) - 1
        example = members[np.minimum(number, last)]
        return Deal(bucket, number, np.where(number <= last, example, -1))

    def _numbers(self, batch: int) -> np.ndarray:
        """Return the numbers, in a bucket's order, of the rows of its batch ``batch``."""
        n_rows = self._rows.batch
        return batch * n_rows + np.arange(n_rows)

    def _batch(self, position: int) -> HostBatch:
        deal = self._deal(position)
        examples = deal.example[deal.example >= 0]
        n_text, n_audio = self._n_labels[examples].sum(0)
        n_of_codebooks = np.full(self._tools.codebooks, n_audio)
        scale = chatml.label_scale(n_text, n_of_codebooks, self._rows.batch)
        batch = super()._batch(position)
        for part in batch["label_scale"]:
            part[:] = scale
        return batch

    def _part(self, position: int, row: np.ndarray) -> dict[str, np.ndarray]:
        deal = self._deal(position)
        bucket = self._data.buckets[deal.bucket]
        batch = self._empty(len(row), deal.bucket)
        padding = chatml.row(self._tools.blank(), bucket.shape, self._tools.pad)
        for i, k in enumerate(row.tolist()):
            number = int(deal.example[k])
            fields = padding
            if number >= 0:
                example = self._data.examples[number]
                laid = self._tools.laid_out(example)
                fields = chatml.row(laid, bucket.shape, self._tools.pad)
                batch["index"][i] = example.number
                batch["epoch"][i] = deal.number[k] // len(bucket.members)
                batch["weight"][i] = 1
            for name, values in fields.items():
                batch[name][i] = values
        return batch


class Deal(NamedTuple):
    """The examples of a global batch, which are of one bucket."""

    bucket: int
    number: np.ndarray  # int64 [batch]: each row's number in the bucket's order
    example: np.ndarray  # int64 [batch]: which example of the split, -1 for padding


def element_spec(config: Config) -> dict[str, Field]:
    """Return the fields of the largest bucket: name -> shape of one row, dtype."""
    tools = tools_of(config, config.manifest)
    largest = _splits(config)["train"].buckets[-1]
    return _element_spec(tools, largest.shape)


def dataset_info(config: Config) -> DatasetInfo:
    """Return the dataset info of the examples.

    vocab, codebooks, codebook_size, context (places of the longest bucket), n_train, n_test, n_bad,
    and buckets of the training split: (S, A, N, M, share of the batches) of each. Raises DataError.
    """
    tools = tools_of(config, config.manifest)
    splits = _splits(config)
    train = splits["train"]
    context = max(bucket.shape.places for bucket in train.buckets)
    buckets = []
    for bucket in train.buckets:
        share = len(bucket.members) / len(train.examples)
        buckets.append((*bucket.shape, share))
    return {
        "vocab": tools.vocab,
        "codebooks": tools.codebooks,
        "codebook_size": tools.size,
        "context": context,
        "buckets": tuple(buckets),
        "n_train": len(train.examples),
        "n_test": len(splits["test"].examples),
        "n_bad": len(train.bad),
    }


def make_loader(config: Config, *, split: str, rows: Rows, seed: int) -> Chat:
    """Return a loader of "train" or "test". Raises DataError: no examples, or too many bad ones."""
    return Chat(config, split=split, rows=rows, seed=seed)


def _element_spec(tools: Tools, shape: Shape) -> dict[str, Field]:
    integer_shapes = {
        "text": (shape.text,),
        "codes": (shape.audio, tools.codebooks),
        "place": (shape.places,),
        "slot": (shape.places,),
        "text_at": (shape.text_labels,),
        "text_target": (shape.text_labels,),
        "audio_at": (shape.audio_labels,),
        "audio_target": (shape.audio_labels, tools.codebooks),
        "index": (),
        "epoch": (),
    }
    int32 = np.dtype(np.int32)
    float32 = np.dtype(np.float32)
    spec = {name: Field(row_shape, int32) for name, row_shape in integer_shapes.items()}
    spec["label_scale"] = Field((1 + tools.codebooks,), float32)
    spec["weight"] = Field((), float32)
    return spec


def _splits(config: Config) -> dict[str, Split]:
    """Both splits, made once in a process, and again when a file has changed. Raises DataError."""
    return _splits_once(config, stamps(config))


@functools.lru_cache(maxsize=2)
def _splits_once(config: Config, _: files.Stamps) -> dict[str, Split]:
    refuse_invalid(config)
    examples, bad = read_examples(config, config.manifest)
    test_bad: list[tuple[int, str]] = []
    if config.test:
        test_examples, test_bad = read_examples(config, config.test)
    else:
        examples, test_examples = _held_out(examples, config.test_share)
    if not examples:
        reason = f"; {bad[0][1]}" if bad else ""
        raise DataError(f"{config.manifest} leaves no examples to train on{reason}")
    return {
        "train": _in_buckets(examples, bad, config.buckets),
        "test": _in_buckets(test_examples, test_bad, config.buckets),
    }


def _held_out(examples: Sequence[Example], share: float) -> tuple[list[Example], list[Example]]:
    """Return examples to train on, and about ``share`` of all to test on, by their numbers."""
    numbers = np.array([example.number for example in examples], np.int64)
    is_test = order.held_out(numbers, share)
    splits: tuple[list[Example], list[Example]] = ([], [])
    for example, held_out in zip(examples, is_test, strict=True):
        splits[int(held_out)].append(example)
    return splits


def _in_buckets(examples: Sequence[Example], bad: Sequence[tuple[int, str]], n: int) -> Split:
    sizes = np.array([example.size for example in examples], np.int64).reshape(-1, 4)
    buckets = make_buckets(sizes, n)
    return Split(tuple(examples), sizes, buckets, tuple(bad))
