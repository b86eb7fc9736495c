"""Tokens of documents, by memory map: packed by best fit, or windows of one long stream.

Mixed from several sources. A source is a folder that `jaxtrain tokens` wrote, or a text file, which
is read as one document of characters (or bytes). `loaders.text.token_files` has the format of a
folder.

A row is one sequence of ``context`` positions, made of documents by `loaders.text.packing`. There
are three ways (``packing``):

    best_fit  the documents of an epoch are permuted, and each ``window`` of them that follow each
              other is packed by itself: the longest document first, each into the fullest row that
              can still take it (best fit decreasing; Ding et al. 2024, arXiv 2404.10830). Only a
              document longer than the context is cut. Rows of a window are permuted. Attention and
              loss stay inside a document: ``segments``.
    concat    the stream of all documents is cut every ``context`` tokens, and those windows are
              permuted in each epoch.
    random    windows of that stream that begin anywhere, drawn for each row, as nanoGPT trains.

Batches are read ahead by grain's threads. A row is a function of (seed, epoch, window). A window's
number of rows is only known when it is packed. So a seek packs the windows before it once, at one
or two microseconds a document. Nothing is stored. "test" goes
once through all sources, which take turns by their shares: packed if packing is best_fit, in a
mixed order that is always the same, else window after window with a padded last one.

The table has the share of padding, the share of documents that are cut though they would fit, and
the mean number of tokens that a prediction sees. The documents are the 7,222 paragraphs of tiny
Shakespeare as characters.

                        best_fit                     concat
    context    padding    cut   attends    padding    cut   attends
         64     0.78 %    0 %      29.1        0 %   27.7 %    27.3
        256     0.04 %    0 %      91.5        0 %   27.6 %    79.2
       1024     0.09 %    0 %     186.0        0 %   13.2 %   155.6
"""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from loaders import mixture, order
from loaders.base import DataError, DatasetInfo, Field, HostBatch, Loader, Rows, refuse_invalid
from loaders.io import checks, files
from loaders.text.packing import Packed, Windows
from loaders.text.token_files import Documents, open_splits, symbols
from loaders.text.tokenizer import open_tokenizer

PACKINGS = ("best_fit", "concat", "random")
TEXTS = ("characters", "bytes")
REMAKE = "make the tokens again with `jaxtrain tokens`"
VERSION = 1  # changes whenever the same (seed, row number) would give another row


@dataclass(frozen=True)
class Source:
    """Documents to read."""

    path: str = ""  # [path] folder of token files, or a text file
    test: str = ""  # [path] of the test data; empty = test/ in the folder, else a share of path
    share: float = 1.0  # [1] of the rows, relative to the other sources


@dataclass(frozen=True)
class Config(checks.DataSection):
    # the fingerprint and the order have those that change a row
    on_resume = checks.OnResume(checks.FREE)

    sources: tuple[Source, ...] = ()  # [sources] of the rows
    context: int = 1024  # [tokens] of a row
    packing: str = "best_fit"  # [name] best_fit, concat or random
    window: int = 16_384  # [documents] that are packed among themselves
    # [name] of the tokens of a text file: characters (vocabulary: those in the file) or bytes
    text: str = "characters"
    # [share] kept for testing without a path for it: of the documents, or the end of a text
    test_share: float = 0.1
    follow_links: bool = False  # [bool] links in a folder of token files may lead out of it
    threads: int = 2  # [threads] that read batches ahead
    ahead: int = 4  # [batches] that are read ahead
    # [name] when a source has been read once: repeat, stop (the others take its share), error
    exhausted: str = "repeat"

    def validate(self) -> Iterator[tuple[str, str]]:
        if not self.sources:
            yield "sources", "is empty; name at least one, for example ({'path': 'corpus'},)"
        for i, source in enumerate(self.sources):
            for name in ("path", "test"):
                path = getattr(source, name)
                if (path or name == "path") and not files.expanded(path).exists():
                    yield (
                        f"sources[{i}].{name}",
                        f"is {path!r}, which does not exist; `jaxtrain tokens` makes token files",
                    )
            yield from checks.under(f"sources[{i}]", checks.positive(source, "share"))
        yield from checks.choice(self, PACKINGS, "packing")
        yield from checks.choice(self, TEXTS, "text")
        yield from checks.choice(self, mixture.POLICIES, "exhausted")
        yield from checks.at_least(self, 1, "context", "window", "ahead")
        yield from checks.threads(self, least=1)
        yield from checks.within(self, "[0, 1)", "test_share")
        if self.packing == "random" and self.exhausted != "repeat":
            yield (
                "exhausted",
                f"is {self.exhausted!r}, but random windows never exhaust a source; use 'repeat'",
            )


class Tokens(Loader):
    """Rows of tokens from several sources. Fields, r rows for each range, with 0 outside documents:

    tokens, targets  int32 [r, context]    a token, and the one after it in its document
    positions        int32 [r, context]    from 0 in each document, or in a stream's window
    segments         int32 [r, context]    0 for padding, 1, 2, … for the documents of a row
    mask             float32 [r, context]  1 for places with a target
    source           int32 [r]
    index, epoch     int32 [r]             the row's first document (-1 in padding), passes before
    weight           float32 [r]           0 for the padding of a ragged last batch
    """

    def __init__(self, config: Config, *, split: str, rows: Rows, seed: int):
        self._config = config
        self._documents = [_open(source, config)[split] for source in config.sources]
        train = split == "train"
        self._streams: list[Packed | Windows] = []
        for k, documents in enumerate(self._documents):
            source_seed = seed + (k << 32)  # sources draw independently
            if train and not (documents.length > 1).any():
                raise DataError(
                    f"sources[{k}].path={config.sources[k].path} has no document of two tokens to"
                    " train on"
                )
            self._streams.append(
                Packed(documents, config.context, config.window, seed=source_seed, shuffle=train)
                if config.packing == "best_fit"
                else Windows(
                    documents, config.context, seed=source_seed, packing=config.packing, train=train
                )
            )
        self._mixture: mixture.Mixture | None = None
        if train:
            sizes = (
                None
                if config.exhausted == "repeat"
                else [stream.n_rows() for stream in self._streams]
            )
            shares = [source.share for source in config.sources]
            self._mixture = mixture.Mixture(shares, seed=seed, policy=config.exhausted, sizes=sizes)
            # as full rows
            n = sum(
                -(-int(documents.length.sum()) // config.context) for documents in self._documents
            )
        else:
            # Rows of all sources in their shares, so that the first batches are of all of them.
            numbers = [np.arange(stream.n_rows()) for stream in self._streams]
            if config.packing == "best_fit":  # whose first rows are the longest documents
                numbers = [order.permutation(0, 0, max(len(each), 1), each) for each in numbers]
            due = [
                (np.arange(len(each)) + 0.5) / source.share
                for each, source in zip(numbers, config.sources, strict=True)
            ]
            turn = np.argsort(np.concatenate(due), kind="stable")
            self._number = np.concatenate(numbers)[turn]
            self._source = np.repeat(np.arange(len(numbers)), [len(number) for number in numbers])[
                turn
            ]
            n = len(turn)
        # rows of each source, by this process
        self._delivered = np.zeros(len(self._streams), np.int64)
        self._epoch = np.zeros(len(self._streams), np.int64)
        super().__init__(
            element_spec(config),
            train=train,
            rows=rows,
            seed=seed,
            n_batches=-(-n // rows.batch),
            threads=config.threads,
            ahead=config.ahead,
        )

    def __next__(self) -> tuple[int, HostBatch]:
        position, batch = super().__next__()
        for source, epoch, weight in zip(
            *(batch[k] for k in ("source", "epoch", "weight")), strict=True
        ):
            for k in np.unique(source[weight > 0]):
                chosen = (source == k) & (weight > 0)
                self._delivered[k] += np.count_nonzero(chosen)
                self._epoch[k] = max(self._epoch[k], int(epoch[chosen].max()))
        return position, batch

    @property
    def fingerprint(self) -> str:
        return hashlib.sha256(
            "".join(documents.digest for documents in self._documents).encode()
        ).hexdigest()[:16]

    @property
    def order(self) -> dict[str, Any]:
        config = self._config
        return {
            "version": [VERSION, mixture.VERSION, order.VERSION],
            "batch": self._rows.batch,
            "context": config.context,
            "packing": config.packing,
            "shares": [source.share for source in config.sources],
            **({"window": config.window} if config.packing == "best_fit" else {}),
            **({"exhausted": config.exhausted} if config.exhausted != "repeat" else {}),
        }

    def diagnostics(self) -> dict[str, Any]:
        """Return share of rows and passes before, by source."""
        return {
            "share": (self._delivered / max(self._delivered.sum(), 1)).tolist(),
            "wanted_share": self._mixture.shares.tolist() if self._mixture else None,
            "epoch": self._epoch.tolist(),
        }

    def _part(self, position: int, row: np.ndarray) -> dict[str, np.ndarray]:
        # counted over the whole run, or in "test" over the whole split
        place = position * self._rows.batch + row
        batch = self._empty(len(place))
        if self._mixture:
            source, number = self._mixture(place)
            valid = np.arange(len(place))
        else:
            valid = np.flatnonzero(place < len(self._source))
            source, number = self._source[place[valid]], self._number[place[valid]]
        for k in np.unique(source):
            self._streams[k].fill(batch, valid[source == k], number[source == k])
        if (
            max(batch[name].max(initial=0) for name in ("tokens", "targets"))
            >= self._documents[0].vocab
        ):
            raise DataError(
                f"a token is not below the vocabulary of {self._documents[0].vocab} that"
                f" tokens.json names; {REMAKE}"
            )
        batch["source"][valid], batch["weight"][valid] = source, 1
        return batch


def element_spec(config: Config) -> dict[str, Field]:
    """Return the fields of a batch: name -> shape of one row, dtype."""
    row, scalar = Field((config.context,), np.dtype(np.int32)), Field((), np.dtype(np.int32))
    return {
        **{name: row for name in ("tokens", "targets", "positions", "segments")},
        "mask": Field((config.context,), np.dtype(np.float32)),
        **{name: scalar for name in ("source", "index", "epoch")},
        "weight": Field((), np.dtype(np.float32)),
    }


def dataset_info(config: Config) -> DatasetInfo:
    """Return the dataset info of the documents.

    - vocab, context; bytes_per_token, of those that are predicted, of test, else of train.
    - n_train, n_test: documents by source; ends: tokens that end a text.
    - tokenizer: path of the first source's tokenizer.json, or "".
    - symbols: of a text of characters, symbol i is token i, or "".

    Raises DataError: files that cannot be read, or sources with different vocabularies.
    """
    splits = [_open(source, config) for source in config.sources]
    measured = [s["test"] for s in splits if len(s["test"].length)] or [s["train"] for s in splits]
    first = files.expanded(config.sources[0].path)
    folder = first / "train" if (first / "train").is_dir() else first
    vocabs = {s["train"].vocab for s in splits}
    if len(vocabs) > 1:
        raise DataError(
            f"the sources have different vocabularies: {sorted(vocabs)}; make their tokens with one"
            " tokenizer"
        )
    if len({table for source in config.sources if (table := _table(source, config))}) > 1:
        paths = " and ".join(source.path for source in config.sources)
        raise DataError(
            f"{paths} have other tokens for one id; make their tokens with one tokenizer"
        )
    return {
        "vocab": vocabs.pop(),
        "context": config.context,
        "bytes_per_token": (
            sum(d.n_bytes - d.first_bytes for d in measured)
            / max(sum(int((d.length - (d.length > 0)).sum()) for d in measured), 1)
        ),
        "n_train": tuple(len(s["train"].length) for s in splits),
        "n_test": tuple(len(s["test"].length) for s in splits),
        "ends": tuple(dict.fromkeys(end for s in splits for end in s["train"].ends)),
        "tokenizer": (
            str(folder / "tokenizer.json") if (folder / "tokenizer.json").is_file() else ""
        ),
        "symbols": symbols(first) if first.is_file() and config.text == "characters" else "",
    }


def _table(source: Source, config: Config) -> str:
    """Return a digest of the token of each id of a source, or "" if nothing tells it."""
    path = files.expanded(source.path)
    if path.is_file():
        return symbols(path) if config.text == "characters" else ""
    found = [
        place / "tokenizer.json"
        for place in (path, path / "train")
        if (place / "tokenizer.json").is_file()
    ]
    return (
        hashlib.sha256(
            repr(sorted(open_tokenizer(found[0]).inner.get_vocab().items())).encode()
        ).hexdigest()
        if found
        else ""
    )


def make_loader(config: Config, *, split: str, rows: Rows, seed: int) -> Tokens:
    """Return a loader of ``split``, "train" or "test".

    Raises DataError: unreadable files, different vocabularies, in ``next`` an exhausted source.
    """
    refuse_invalid(config)
    dataset_info(config)
    return Tokens(config, split=split, rows=rows, seed=seed)


def _open(source: Source, config: Config) -> dict[str, Documents]:
    return open_splits(
        source.path,
        source.test,
        text=config.text,
        test_share=config.test_share,
        links=config.follow_links,
    )
