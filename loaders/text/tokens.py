"""Tokens of documents, by memory map: packed by best fit, or windows of one long stream.

Mixed from several sources. A source is a folder that `jaxtrain tokens` wrote, or a text file, which
is read as one document of characters (or bytes). `loaders.text.token_files` has the format of a
folder.

A row is one sequence of ``context`` positions, made of documents by `loaders.text.packing`. There
are three ways (``packing``):

    best_fit  the documents of an epoch are permuted, and each ``window`` of them that follow each
              other is packed by itself: the longest document first, each into the fullest row that
              can still take it (best fit decreasing; Ding et al. 2024, arXiv 2404.10830). Only a
              document longer than the context is cut. A row has at most ``documents`` of them,
              by default as many as leave little padding (`loaders.text.packing.limit_of`).
              Rows of a window are permuted. Attention and loss stay inside a document:
              ``segments``.
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
import pathlib
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from loaders import mixture, order
from loaders.base import DataError, DatasetInfo, Field, HostBatch, Loader, Rows, refuse_invalid
from loaders.io import checks, files
from loaders.text import token_files
from loaders.text import tokenizer as tokenizer_lib
from loaders.text.packing import Packed, Windows, limit_of
from loaders.text.token_files import Documents, open_splits, symbols

PACKINGS = ("best_fit", "concat", "random")
TEXTS = ("characters", "bytes")
TABLES = (".jsonl", ".ndjson", ".parquet", ".arrow")  # files of rows, for `jaxtrain tokens`
REMAKE = "make the tokens again with `jaxtrain tokens`"
VERSION = 1  # changes whenever the same (seed, row number) would give another row


@dataclass(frozen=True)
class Source:
    """Documents to read."""

    path: str = ""  # [path] folder of token files, or a text file
    test: str = ""  # [path] test data; empty = test/ in the folder, else a share of path
    share: float = 1.0  # [1] share of the rows, relative to the other sources


@dataclass(frozen=True)
class Config(checks.DataSection):
    # the fingerprint and the order have those that change a row
    on_resume = checks.OnResume(checks.FREE)

    sources: tuple[Source, ...] = ()  # [sources] documents that rows are made of
    context: int = 1024  # [tokens] length of a row
    # [name] how documents become rows: best_fit, concat or random
    packing: str = "best_fit"
    window: int = 16_384  # [documents] number of documents that are packed among themselves
    # [documents] most documents of a packed row, of which further ones go into other rows; 0 = 32,
    # 64 or 128 by the documents, or without a limit if each of these pads too many places
    documents: int = 0
    # [name] the tokens of a text file: its characters, or bytes. The vocabulary of characters is
    # that of the training text
    text: str = "characters"
    # [share] share kept for testing if no path names test data: of the documents, or of a text
    # its end
    test_share: float = 0.1
    follow_links: bool = False  # [bool] whether links in a folder of token files may lead out of it
    threads: int = 2  # [threads] threads that read batches ahead
    ahead: int = 4  # [batches] number of batches that are read ahead
    # [name] reaction to a source that has been read once: repeat, stop (the others take its
    # share) or error
    exhausted: str = "repeat"

    def validate(self) -> Iterator[tuple[str, str]]:
        if not self.sources:
            yield "sources", "is empty; name at least one, for example ({'path': 'corpus'},)"
        for i, source in enumerate(self.sources):
            paths = {"path": source.path}
            if source.test:
                paths["test"] = source.test
            for name, path in paths.items():
                if not files.expanded(path).exists():
                    yield (
                        f"sources[{i}].{name}",
                        f"is {path!r}, which does not exist; `jaxtrain tokens` makes token files",
                    )
                elif pathlib.PurePath(path).suffix.lower() in TABLES:
                    yield (
                        f"sources[{i}].{name}",
                        f"is {path!r}, whose rows are no text; make token files of them: jaxtrain"
                        f" tokens corpus/train {path} --tokenizer=tokenizer.json",
                    )
            yield from checks.under(f"sources[{i}]", checks.positive(source, "share"))
        yield from checks.choice(self, PACKINGS, "packing")
        yield from checks.choice(self, TEXTS, "text")
        yield from checks.choice(self, mixture.POLICIES, "exhausted")
        yield from checks.at_least(self, 1, "context", "window", "ahead")
        yield from checks.not_negative(self, "documents")
        if self.documents and self.packing != "best_fit":
            yield (
                "documents",
                f"is {self.documents}, and a row of packing={self.packing!r} is one piece of the"
                " stream; omit it, or set packing to 'best_fit'",
            )
        yield from checks.threads(self, least=1)
        yield from checks.within(self, "[0, 1)", "test_share")
        if self.packing == "random" and self.exhausted != "repeat":
            yield (
                "exhausted",
                f"is {self.exhausted!r}, but random windows never exhaust a source; use 'repeat'",
            )

    def settled(self, order: Mapping[str, Any] | None) -> "Config":
        """Return the section with a number for ``documents``, as in ``order`` if it is given."""
        if self.documents or self.packing != "best_fit":
            return self
        if order is not None and order.get("packing") == self.packing:
            return replace(self, documents=order.get("documents", self.context))
        return replace(self, documents=limit(self))


class RowList(NamedTuple):
    """The rows of a pass over "test", in order."""

    source: np.ndarray  # int64 [rows]
    number: np.ndarray  # int64 [rows] of the row in its source


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
        train = split == "train"
        self._config = config
        self._limit = limit(config)
        self._documents = [_open(source, config)[split] for source in config.sources]
        self._folders = []
        for source in config.sources:
            self._folders += token_files.folders_of(source.path, source.test, split)
        for folder in self._folders:
            token_files.compare(folder, links=config.follow_links)
        self._streams: list[Packed | Windows] = []
        for k, documents in enumerate(self._documents):
            if train and not (documents.length > 1).any():
                raise DataError(
                    f"sources[{k}].path={config.sources[k].path} has no document of two tokens to"
                    " train on"
                )
            source_seed = seed + (k << 32)  # sources draw independently
            self._streams.append(_make_stream(documents, config, self._limit, source_seed, train))
        self._mixture: mixture.Mixture | None = None
        self._test_rows = RowList(np.empty(0, np.int64), np.empty(0, np.int64))
        if train:
            self._mixture = self._make_mixture(seed)
            n_rows = 0  # as full rows
            for documents in self._documents:
                n_tokens = int(documents.length.sum())
                n_rows += -(-n_tokens // config.context)
        else:
            self._test_rows = self._mix_test_rows()
            n_rows = len(self._test_rows.source)
        # rows of each source, by this process
        self._delivered = np.zeros(len(self._streams), np.int64)
        self._epoch = np.zeros(len(self._streams), np.int64)
        super().__init__(
            element_spec(config),
            train=train,
            rows=rows,
            seed=seed,
            n_batches=-(-n_rows // rows.batch),
            threads=config.threads,
            ahead=config.ahead,
        )

    def _make_mixture(self, seed: int) -> mixture.Mixture:
        config = self._config
        shares = [source.share for source in config.sources]
        sizes = None
        if config.exhausted != "repeat":
            sizes = [stream.n_rows() for stream in self._streams]
        return mixture.Mixture(shares, seed=seed, policy=config.exhausted, sizes=sizes)

    def _mix_test_rows(self) -> "RowList":
        """Return the rows of all sources in their shares: the first batches are of all of them."""
        numbers = []
        due = []
        for stream, source in zip(self._streams, self._config.sources, strict=True):
            number = np.arange(stream.n_rows())
            due.append((number + 0.5) / source.share)
            if self._config.packing == "best_fit":  # whose first rows are the longest documents
                number = order.permutation(0, 0, max(len(number), 1), number)
            numbers.append(number)
        turn = np.argsort(np.concatenate(due), kind="stable")
        sizes = [len(number) for number in numbers]
        source_of_row = np.repeat(np.arange(len(numbers)), sizes)
        return RowList(source_of_row[turn], np.concatenate(numbers)[turn])

    def __next__(self) -> tuple[int, HostBatch]:
        position, batch = super().__next__()
        ranges = zip(batch["source"], batch["epoch"], batch["weight"], strict=True)
        for source, epoch, weight in ranges:
            is_valid = weight > 0
            for k in np.unique(source[is_valid]):
                is_of_source = (source == k) & is_valid
                self._delivered[k] += np.count_nonzero(is_of_source)
                self._epoch[k] = max(self._epoch[k], int(epoch[is_of_source].max()))
        return position, batch

    @property
    def fingerprint(self) -> str:
        digests = "".join(documents.digest for documents in self._documents)
        return hashlib.sha256(digests.encode()).hexdigest()[:16]

    @property
    def order(self) -> dict[str, Any]:
        config = self._config
        settings: dict[str, Any] = {
            "version": [VERSION, mixture.VERSION, order.VERSION],
            "batch": self._rows.batch,
            "context": config.context,
            "packing": config.packing,
            "shares": [source.share for source in config.sources],
        }
        if config.packing == "best_fit":
            settings["window"] = config.window
            if self._limit < config.context:  # else it limits nothing
                settings["documents"] = self._limit
        if config.exhausted != "repeat":
            settings["exhausted"] = config.exhausted
        return settings

    def compare_content(self, seconds: float) -> str:
        deadline = time.monotonic() + seconds
        n_read = n_shards = 0
        for folder in self._folders:
            links = self._config.follow_links
            read, shards = token_files.compare_all(folder, links=links, deadline=deadline)
            n_read += read
            n_shards += shards
        if not n_shards:
            return ""
        return f"{n_read} of {n_shards} shards were read whole, and are as tokens.json records"

    def diagnostics(self) -> dict[str, Any]:
        """Return share of rows, passes before, and documents moved to further rows, by source."""
        n_delivered = max(self._delivered.sum(), 1)
        return {
            "share": (self._delivered / n_delivered).tolist(),
            "wanted_share": self._mixture.shares.tolist() if self._mixture else None,
            "epoch": self._epoch.tolist(),
            "moved_documents": [getattr(stream, "moved", 0) for stream in self._streams],
        }

    def _part(self, position: int, row: np.ndarray) -> dict[str, np.ndarray]:
        # counted over the whole run, or in "test" over the whole split
        place = position * self._rows.batch + row
        batch = self._empty(len(place))
        if self._mixture:
            source, number = self._mixture(place)
            valid = np.arange(len(place))
        else:
            valid = np.flatnonzero(place < len(self._test_rows.source))
            source = self._test_rows.source[place[valid]]
            number = self._test_rows.number[place[valid]]
        for k in np.unique(source):
            is_of_source = source == k
            self._streams[k].fill(batch, valid[is_of_source], number[is_of_source])
        largest = max(batch[name].max(initial=0) for name in ("tokens", "targets"))
        vocab = self._documents[0].vocab
        if largest >= vocab:
            raise DataError(
                f"a token is not below the vocabulary of {vocab} that tokens.json names; {REMAKE}"
            )
        batch["source"][valid] = source
        batch["weight"][valid] = 1
        return batch


def _make_stream(
    documents: Documents, config: Config, most: int, seed: int, train: bool
) -> Packed | Windows:
    if config.packing == "best_fit":
        return Packed(
            documents,
            config.context,
            config.window,
            limit=most,
            seed=seed,
            shuffle=train,
        )
    return Windows(documents, config.context, seed=seed, packing=config.packing, train=train)


def limit(config: Config) -> int:
    """Return the most documents that a row may have. Raises DataError."""
    if config.packing != "best_fit":
        return 1  # a row is one piece of the stream
    if config.documents:
        return config.documents
    lengths = [_open(source, config)["train"].length for source in config.sources]
    shares = [source.share for source in config.sources]
    return limit_of(lengths, shares, config.context, config.window)


def element_spec(config: Config) -> dict[str, Field]:
    """Return the fields of a batch: name -> shape of one row, dtype."""
    row = Field((config.context,), np.dtype(np.int32))
    scalar = Field((), np.dtype(np.int32))
    return {
        "tokens": row,
        "targets": row,
        "positions": row,
        "segments": row,
        "mask": Field((config.context,), np.dtype(np.float32)),
        "source": scalar,
        "index": scalar,
        "epoch": scalar,
        "weight": Field((), np.dtype(np.float32)),
    }


def dataset_info(config: Config) -> DatasetInfo:
    """Return the dataset info of the documents.

    - vocab, context, documents (most of a row).
    - bytes_per_token, of those that are predicted, of test, else of train.
    - n_train, n_test: documents by source; ends: tokens that end a text.
    - tokenizer: path of the first source's tokenizer.json, or "".
    - symbols: of a text of characters, symbol i is token i, or "".

    Raises DataError: files that cannot be read, or sources with different vocabularies.
    """
    splits = [_open(source, config) for source in config.sources]
    train = [documents["train"] for documents in splits]
    test = [documents["test"] for documents in splits]
    vocabs = {documents.vocab for documents in train}
    if len(vocabs) > 1:
        raise DataError(
            f"the sources have different vocabularies: {sorted(vocabs)}; make their tokens with one"
            " tokenizer"
        )
    _refuse_other_tokens(config)
    path = files.expanded(config.sources[0].path)
    folder = path / "train" if (path / "train").is_dir() else path
    tokenizer = folder / "tokenizer.json"
    is_characters = path.is_file() and config.text == "characters"
    ends = [end for documents in train for end in documents.ends]
    return {
        "vocab": vocabs.pop(),
        "context": config.context,
        "documents": limit(config),
        "bytes_per_token": _bytes_per_token([d for d in test if len(d.length)] or train),
        "n_train": tuple(len(documents.length) for documents in train),
        "n_test": tuple(len(documents.length) for documents in test),
        "ends": tuple(dict.fromkeys(ends)),
        "tokenizer": str(tokenizer) if tokenizer.is_file() else "",
        "symbols": symbols(path) if is_characters else "",
    }


def _bytes_per_token(splits: list[Documents]) -> float:
    """Return the mean number of bytes of a token that is predicted."""
    n_bytes = sum(documents.n_bytes - documents.first_bytes for documents in splits)
    n_tokens = 0
    for documents in splits:
        has_first = documents.length > 0
        n_tokens += int((documents.length - has_first).sum())
    return n_bytes / max(n_tokens, 1)


def _refuse_other_tokens(config: Config) -> None:
    """Raise DataError if two folders or texts, those to test on included, differ in their tokens.

    A folder without a tokenizer.json is left out.
    """
    first: tuple[str, dict[int, str]] | None = None
    for source in config.sources:
        for name, tokens in _vocabularies(source, config):
            if first is None:
                first = name, tokens
            elif tokens != first[1]:
                difference = tokenizer_lib.difference(first[1], tokens)
                raise DataError(
                    f"{first[0]} and {name} have other tokens for one id; make their tokens with"
                    f" one tokenizer: {difference or 'one has ids that the other lacks'}"
                )


def _vocabularies(source: Source, config: Config) -> Iterator[tuple[str, dict[int, str]]]:
    """Yield (name, token of each id) of each folder of a source, if something there tells it."""
    path = files.expanded(source.path)
    if path.is_file():
        if config.text == "characters":
            yield source.path, dict(enumerate(symbols(path)))
        return
    folders = [path, path / "train", path / "test"]
    if source.test:
        folders[2:] = [files.expanded(source.test)]
    for folder in folders:
        tokenizer = folder / "tokenizer.json"
        if tokenizer.is_file():
            yield str(tokenizer), tokenizer_lib.token_ids(tokenizer)


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
