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


class Chat(Loader):
    """Conversations in buckets. Fields: those of `jaxtrain.workloads.audio_language`, and

    index, epoch  int32 [r]    the example's number (-1 in padding), passes of its bucket before
    weight        float32 [r]  0 for the padding of a bucket's ragged last batch, in "test"
    """

    def __init__(self, config: Config, *, split: str, rows: Rows, seed: int):
        self._config = config
        self._data = _splits(config)[split]
        self._tools = tools_of(
            config, config.test if split == "test" and config.test else config.manifest
        )
        sizes = [len(bucket.members) for bucket in self._data.buckets]
        self._batches = [-(-n // rows.batch) for n in sizes]  # of a pass, by bucket
        train = split == "train"
        if train and not sum(self._batches):
            raise DataError(f"{config.manifest} leaves no examples to train on")
        self._mixture = mixture.Mixture(sizes, seed=seed) if train else None
        self._n_labels = np.array(
            [[s.size.text_labels, s.n_audio] for s in self._data.examples]
        ).reshape(-1, 2)
        self._deal = functools.lru_cache(maxsize=1024)(self._make_deal)
        for i, bucket in enumerate(self._data.buckets):
            shape = bucket.shape
            log.info(
                "%s bucket %d of %d: %d places (%d of text, %d of sound), %d examples, %.0f %%"
                " full",
                split,
                i + 1,
                len(sizes),
                shape.places,
                shape.text,
                shape.audio,
                len(bucket.members),
                100 * bucket.fill(self._data.sizes),
            )
        super().__init__(
            *(_element_spec(self._tools, bucket.shape) for bucket in self._data.buckets),
            train=train,
            rows=rows,
            seed=seed,
            n_batches=sum(self._batches),
        )

    def bucket_at(self, position: int) -> int:
        return self._deal(position).bucket

    @functools.cached_property
    def fingerprint(self) -> str:
        digest = hashlib.sha256()
        for example in self._data.examples:
            digest.update(example.tokens.tobytes() + example.labels.tobytes())
            digest.update(repr((example.number, example.size, example.codes)).encode())
        return digest.hexdigest()[:16]

    @property
    def order(self) -> dict[str, Any]:
        return {
            "version": [VERSION, mixture.VERSION, order.VERSION],
            "batch": self._rows.batch,
            "delay": self._config.delay,
            "buckets": [list(bucket.shape) for bucket in self._data.buckets],
        }

    def diagnostics(self) -> dict[str, Any]:
        """Return unusable examples with the reason."""
        return {"bad": len(self._data.bad), "bad_list": self._data.bad}

    def _make_deal(self, position: int) -> "Deal":
        row = np.arange(self._rows.batch)
        if self._mixture is None:
            # Batches in mixed order, so that the first ones of a short evaluation are from all
            # buckets.
            position = int(order.permutation(0, 0, self.n_batches, np.array([position]))[0])
            bucket = int(np.searchsorted(np.cumsum(self._batches), position, side="right"))
            number = (position - sum(self._batches[:bucket])) * len(row) + row
            members = self._data.buckets[bucket].members
            return Deal(
                bucket,
                number,
                np.where(number < len(members), members[np.minimum(number, len(members) - 1)], -1),
            )
        buckets, before = self._mixture(np.array([position]))
        bucket, number = int(buckets[0]), int(before[0]) * len(row) + row
        members = self._data.buckets[bucket].members
        return Deal(
            bucket,
            number,
            members[order.epochs(self._seed + (bucket << 32), len(members), number)[1]],
        )

    def _batch(self, position: int) -> HostBatch:
        deal = self._deal(position)
        n_text, n_audio = self._n_labels[deal.example[deal.example >= 0]].sum(0)
        scale = chatml.label_scale(
            n_text, np.full(self._tools.codebooks, n_audio), self._rows.batch
        )
        batch = super()._batch(position)
        for part in batch["label_scale"]:
            part[:] = scale
        return batch

    def _part(self, position: int, row: np.ndarray) -> dict[str, np.ndarray]:
        deal = self._deal(position)
        bucket = self._data.buckets[deal.bucket]
        batch = self._empty(len(row), deal.bucket)
        padding = chatml.row(self._tools.blank(), bucket.shape, self._tools.pad)
        for i, (number, k) in enumerate(
            zip(deal.number[row].tolist(), deal.example[row].tolist(), strict=True)
        ):
            values = padding
            if k >= 0:
                example = self._data.examples[k]
                values = chatml.row(self._tools.laid_out(example), bucket.shape, self._tools.pad)
                batch["index"][i], batch["epoch"][i], batch["weight"][i] = (
                    example.number,
                    number // len(bucket.members),
                    1,
                )
            for name, x in values.items():
                batch[name][i] = x
        return batch


class Deal(NamedTuple):
    bucket: int
    number: np.ndarray  # int64 [batch]: each row's number in the bucket's order
    example: np.ndarray  # int64 [batch]: which example of the split, -1 for padding


def element_spec(config: Config) -> dict[str, Field]:
    """Return the fields of the largest bucket: name -> shape of one row, dtype."""
    return _element_spec(
        tools_of(config, config.manifest), _splits(config)["train"].buckets[-1].shape
    )


def dataset_info(config: Config) -> DatasetInfo:
    """Return the dataset info of the examples.

    vocab, codebooks, codebook_size, context (places of the longest bucket), n_train, n_test, n_bad,
    and buckets of the training split: (S, A, N, M, share of the batches) of each. Raises DataError.
    """
    tools, splits = tools_of(config, config.manifest), _splits(config)
    train = splits["train"]
    return {
        "vocab": tools.vocab,
        "codebooks": tools.codebooks,
        "codebook_size": tools.size,
        "context": max(bucket.shape.places for bucket in train.buckets),
        "buckets": tuple(
            (*bucket.shape, len(bucket.members) / len(train.examples)) for bucket in train.buckets
        ),
        "n_train": len(train.examples),
        "n_test": len(splits["test"].examples),
        "n_bad": len(train.bad),
    }


def make_loader(config: Config, *, split: str, rows: Rows, seed: int) -> Chat:
    """Return a loader of "train" or "test". Raises DataError: no examples, or too many bad ones."""
    return Chat(config, split=split, rows=rows, seed=seed)


def _element_spec(tools: Tools, shape: Shape) -> dict[str, Field]:
    integers = {
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
    return {
        **{name: Field(s, np.dtype(np.int32)) for name, s in integers.items()},
        "label_scale": Field((1 + tools.codebooks,), np.dtype(np.float32)),
        "weight": Field((), np.dtype(np.float32)),
    }


def _splits(config: Config) -> dict[str, Split]:
    """Both splits, made once in a process, and again when a file has changed. Raises DataError."""
    return _splits_once(config, stamps(config))


@functools.lru_cache(maxsize=2)
def _splits_once(config: Config, _: files.Stamps) -> dict[str, Split]:
    refuse_invalid(config)
    examples, bad = read_examples(config, config.manifest)
    if config.test:
        test, test_bad = read_examples(config, config.test)
    else:
        is_test = order.held_out(
            np.array([s.number for s in examples], np.int64), config.test_share
        )
        test, test_bad = [s for s, t in zip(examples, is_test, strict=True) if t], []
        examples = [s for s, t in zip(examples, is_test, strict=True) if not t]
    if not examples:
        raise DataError(
            f"{config.manifest} leaves no examples to train on" + (f"; {bad[0][1]}" if bad else "")
        )
    return {
        "train": _in_buckets(examples, bad, config.buckets),
        "test": _in_buckets(test, test_bad, config.buckets),
    }


def _in_buckets(examples: Sequence[Example], bad: Sequence[tuple[int, str]], n: int) -> Split:
    sizes = np.array([example.size for example in examples], np.int64).reshape(-1, 4)
    return Split(tuple(examples), sizes, make_buckets(sizes, n), tuple(bad))
