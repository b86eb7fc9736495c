"""Tokens of documents, by memory map: packed by best fit, or windows of one long stream. Mixed from several sources.

A source is a folder that `jaxtrain tokens` wrote, or a text file, which is read as one document of characters (or bytes).
A folder holds the splits train/ and test/, or is itself the training split; a folder of one split holds

    tokens.json     {"format": 1, "dtype": "uint16", "vocab": 50257, "eos": 50256, "tokenizer": "tokenizer.json", "shards":
                    [{"name": "00000", "documents": n, "tokens": t, "bytes": b, "sha256": "…"}, …]}; eos, tokenizer: or null
    00000.tokens    uint16 or uint32 [t], little-endian: all documents of the shard, one after the other
    00000.docs      int64 [n + 1, 2], little-endian: where each document begins, in tokens and in bytes of text, and the end
    tokenizer.json  for Hugging Face ``tokenizers``

A row is one sequence of ``context`` positions. A document of t tokens is t - 1 predictions and takes as many positions: inputs
are its tokens 0 … t - 2, targets 1 … t - 1. So no position is spent on an end that predicts nothing, and no target belongs to
another document. Three ways to fill the rows (``packing``):

    best_fit  the documents of an epoch are permuted, and each ``window`` of them that follow each other is packed by itself:
              the longest document first, each into the fullest row that still has room (best fit decreasing; Ding et al. 2024,
              arXiv 2404.10830). A document is cut only where it is longer than the context, into whole rows and a rest that is
              packed like a document. Rows of a window are permuted. Attention and loss stay inside a document: ``segments``.
    concat    the stream of all documents is cut every ``context`` tokens, and those windows are permuted in each epoch.
    random    windows of that stream that begin anywhere, drawn for each row, as nanoGPT trains.

Batches are read ahead by grain's threads. What a row holds is a function of (seed, epoch, window): a window's number of rows
is what it packs into, so a seek packs the windows before it once, one or two microseconds a document (us/doc of
tools/packing_report.py), and nothing is ever stored.
"test" goes once through all sources in order: packed for best_fit, else windows side by side with a padded last one.

Padding, documents that are cut although they would fit, and tokens before a predicted one that it may look at, of the 7,222
paragraphs of tiny Shakespeare, as characters (python -m tools.packing_report input.txt --context 64 256 1024):

                        best_fit                     concat
    context    padding    cut  looks at    padding    cut  looks at
         64     0.78 %    0 %      29.1        0 %   27.7 %    27.3
        256     0.04 %    0 %      91.5        0 %   27.6 %    79.2
       1024     0.09 %    0 %     186.0        0 %   13.2 %   155.6
"""

import functools
import hashlib
import json
import pathlib
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import grain
import numpy as np

from loaders import _rust, checks, mixture, order
from loaders.base import DataError, Facts, Field, HostBatch, Rows

FORMAT = 1
PACKINGS = ("best_fit", "concat", "random")
TEXTS = ("characters", "bytes")
VERSION = 1  # changes whenever the same (seed, row number) would give another row
START, SHUFFLE = 64, 65  # what a hash is for
_ABOUTS = ("tokens.json", "train/tokens.json", "test/tokens.json")
ENDLESS = 1 << 40  # [batches] of a training split, which repeats, or ends as its policy says
KEPT_WINDOWS = 4  # packed windows that stay in memory: a batch may span two


@dataclass(frozen=True)
class Source:
    """Documents to read."""

    path: str = ""  # [path] folder of token files, or a text file
    test: str = ""  # [path] of what to test on; empty = test/ in the folder, else a share of path
    share: float = 1.0  # [1] of the rows, relative to the other sources


@dataclass(frozen=True)
class Config(checks.DataSection):
    sources: tuple[Source, ...] = ()  # [sources] what rows are mixed from
    context: int = 1024  # [tokens] of a row
    packing: str = "best_fit"  # [name] best_fit, concat or random
    window: int = 16_384  # [documents] that are packed among themselves
    text: str = "characters"  # [name] what a token of a text file is: characters (vocabulary: those in the file) or bytes
    test_share: float = 0.1  # [share] kept for testing where no path holds any: of the documents, or the end of a text
    threads: int = 2  # [threads] that read batches ahead
    ahead: int = 4  # [batches] that are read ahead
    exhausted: str = "repeat"  # [name] when a source has been read once: repeat, stop (the others take its share), error

    def problems(self) -> Iterator[tuple[str, str]]:
        if not self.sources:
            yield "sources", "is empty; name at least one, for example ({'path': 'corpus'},)"
        for i, source in enumerate(self.sources):
            for name in ("path", "test"):
                path = getattr(source, name)
                if (path or name == "path") and not pathlib.Path(path).expanduser().exists():
                    yield f"sources[{i}].{name}", f"is {path!r}, which does not exist; `jaxtrain tokens` makes token files"
            yield from checks.under(f"sources[{i}]", checks.positive(source, "share"))
        yield from checks.choice(self, PACKINGS, "packing")
        yield from checks.choice(self, TEXTS, "text")
        yield from checks.choice(self, mixture.POLICIES, "exhausted")
        yield from checks.at_least(self, 1, "context", "window", "threads", "ahead")
        yield from checks.within(self, "[0, 1)", "test_share")
        if self.packing == "random" and self.exhausted != "repeat":
            yield "exhausted", f"is {self.exhausted!r}, but random windows never exhaust a source; use 'repeat'"


class Documents(NamedTuple):
    """One split of one source."""

    shards: tuple[np.ndarray, ...]  # of tokens, memory maps
    shard: np.ndarray  # int32 [n]
    start: np.ndarray  # int64 [n] in its shard
    length: np.ndarray  # int64 [n] tokens
    n_bytes: int  # of text
    vocab: int
    digest: str

    def read(self, document: int, offset: int, count: int) -> np.ndarray:
        start = self.start[document] + offset
        return self.shards[self.shard[document]][start : start + count]


class Placed(NamedTuple):
    """The pieces of a window's documents, row by row."""

    document: np.ndarray  # int64 [pieces]
    offset: np.ndarray  # int64 [pieces] first input token within the document
    length: np.ndarray  # int64 [pieces] positions
    stops: np.ndarray  # int64 [rows] after the last piece of each row


def best_fit(lengths: np.ndarray, capacity: int) -> tuple[np.ndarray, int]:
    """Best fit decreasing: int64 [n] lengths in 1 … capacity -> int64 [n] the bin of each, and the number of bins.

    The longest first, each into the bin with the least room that suffices. Rooms are the bits of one integer, so that the
    next one is a shift away, and equal lengths go to equal rooms together.
    """
    by_length = np.argsort(-lengths, kind="stable")
    sizes, counts = np.unique(lengths, return_counts=True)
    bins: list[int] = []  # in the order of by_length
    free: dict[int, list[int]] = {}  # room -> bins that have it
    rooms = opened = 0  # bit r of rooms: free[r] is not empty

    def give(room: int, ids: list[int]) -> None:
        nonlocal rooms
        if room and ids:
            free.setdefault(room, []).extend(ids)
            rooms |= 1 << room

    for size, left in zip(sizes[::-1].tolist(), counts[::-1].tolist(), strict=True):
        while left:
            if larger := rooms >> size:
                room = size + (larger & -larger).bit_length() - 1
                there, each = free[room], room // size
                if taken := min(len(there), left // each):
                    ids = there[-taken:]
                    del there[-taken:]
                else:
                    ids, each = [there.pop()], left
                if not there:
                    rooms ^= 1 << room
            else:
                room, each = capacity, min(capacity // size, left)
                ids = list(range(opened, opened + left // each))
                opened += len(ids)
            for i in ids:
                bins += [i] * each
            left -= each * len(ids)
            give(room - each * size, ids)
    placed = np.empty(len(lengths), np.int64)
    placed[by_length] = bins
    return placed, opened


def pack(lengths: np.ndarray, context: int) -> Placed:
    """Documents of ``lengths`` tokens, in rows of ``context`` positions. Numbers in `Placed` are places in ``lengths``."""
    pairs = np.maximum(lengths - 1, 0)
    n_pieces = -(-pairs // context)
    document = np.repeat(np.arange(len(lengths)), n_pieces)
    offset = (np.arange(len(document)) - np.repeat(np.cumsum(n_pieces) - n_pieces, n_pieces)) * context
    length = np.minimum(context, pairs[document] - offset)
    bins, n_bins = best_fit(length, context)
    by_bin = np.argsort(bins, kind="stable")
    stops = np.cumsum(np.bincount(bins, minlength=n_bins))
    return Placed(document[by_bin], offset[by_bin], length[by_bin], stops)


class Packed:
    """Rows of documents packed by best fit; see the module's docstring."""

    def __init__(self, documents: Documents, context: int, window: int, *, seed: int, shuffle: bool):
        self._documents, self._context, self._window, self._seed, self._shuffle = documents, context, window, seed, shuffle
        self._n_windows = -(-len(documents.length) // window)
        self._ends: list[int] = []  # row number after window w of epoch e, at e n_windows + w
        self._kept: dict[int, Placed] = {}
        self._lock = threading.Lock()  # of the two above: batches are read by several threads

    def n_rows(self) -> int:
        """Rows of the first pass."""
        while len(self._ends) < self._n_windows:
            self._placed(len(self._ends))
        return self._ends[self._n_windows - 1] if self._n_windows else 0

    def fill(self, batch: dict[str, np.ndarray], at: np.ndarray, number: np.ndarray) -> None:
        for row, i in zip(at.tolist(), number.tolist(), strict=True):
            with self._lock:
                while not self._ends or self._ends[-1] <= i:
                    self._placed(len(self._ends))
                w = int(np.searchsorted(self._ends, i, side="right"))
                placed, first = self._placed(w), self._ends[w - 1] if w else 0
            stop = int(placed.stops[i - first])
            begin = int(placed.stops[i - first - 1]) if i > first else 0
            used = 0
            for k in range(begin, stop):
                n = int(placed.length[k])
                tokens = self._documents.read(placed.document[k], placed.offset[k], n + 1)
                here = slice(used, used + n)
                batch["tokens"][row, here], batch["targets"][row, here] = tokens[:-1], tokens[1:]
                batch["positions"][row, here], batch["segments"][row, here] = np.arange(n), k - begin + 1
                used += n
            batch["mask"][row, :used] = 1
            batch["index"][row], batch["epoch"][row] = placed.document[begin], w // self._n_windows

    def _placed(self, w: int) -> Placed:
        """Window ``w`` counted over all epochs; the next one in line is counted, too."""
        if w not in self._kept:
            epoch, window = divmod(w, self._n_windows)
            n = len(self._documents.length)
            chosen = np.arange(window * self._window, min((window + 1) * self._window, n))
            if self._shuffle:
                chosen = _rust.permutation(self._seed, epoch, n, chosen)
            placed = pack(self._documents.length[chosen], self._context)
            if self._shuffle and len(placed.stops):
                placed = _reordered(placed, order.permutation(
                    int(order.hash_of(SHUFFLE, self._seed, w)[0]), 0, len(placed.stops), np.arange(len(placed.stops))
                ))  # fmt: skip
            self._kept[w] = placed._replace(document=chosen[placed.document])
            while len(self._kept) > KEPT_WINDOWS:
                del self._kept[next(iter(self._kept))]
            if w == len(self._ends):
                self._ends.append((self._ends[-1] if w else 0) + len(placed.stops))
        return self._kept[w]


def _reordered(placed: Placed, rows: np.ndarray) -> Placed:
    """The same with row rows[i] at place i."""
    sizes = np.diff(placed.stops, prepend=0)
    stops = np.cumsum(sizes[rows])
    pieces = np.arange(len(placed.length)) + np.repeat((placed.stops - sizes)[rows] - (stops - sizes[rows]), sizes[rows])
    return Placed(placed.document[pieces], placed.offset[pieces], placed.length[pieces], stops)


class Windows:
    """Rows of the stream of all documents, one after the other, across their boundaries."""

    def __init__(self, documents: Documents, context: int, *, seed: int, packing: str, train: bool):
        self._documents, self._context, self._seed, self._random = documents, context, seed, train and packing == "random"
        self._ends = np.cumsum(documents.length)  # of each document in the stream
        self._tokens = int(self._ends[-1]) if len(self._ends) else 0
        self._train = train
        if train and self._tokens <= context:
            raise DataError(f"the source has {self._tokens} tokens to train on, too few for a context of {context}")

    def n_rows(self) -> int:
        """Of one pass: whole windows in training; in testing the last one may be padded."""
        return (self._tokens - 1) // self._context if self._train else -(-max(self._tokens - 1, 0) // self._context)

    def fill(self, batch: dict[str, np.ndarray], at: np.ndarray, number: np.ndarray) -> None:
        n, context = self.n_rows(), self._context
        epoch, start = np.divmod(number, max(n, 1))
        if self._random:
            draws = order.hash_of(START, self._seed, number)
            start = (draws % np.uint64(self._tokens - context)).astype(np.int64)
        elif self._train:
            for e in np.unique(epoch):
                start[epoch == e] = _rust.permutation(self._seed, int(e), n, start[epoch == e]) * context
        else:
            start = start * context
        for row, begin, e in zip(at.tolist(), start.tolist(), epoch.tolist(), strict=True):
            tokens = self._stream(begin, min(context + 1, self._tokens - begin))
            used = len(tokens) - 1
            batch["tokens"][row, :used], batch["targets"][row, :used] = tokens[:-1], tokens[1:]
            batch["positions"][row, :used] = np.arange(used)
            batch["segments"][row, :used] = batch["mask"][row, :used] = 1
            batch["index"][row], batch["epoch"][row] = np.searchsorted(self._ends, begin, side="right"), e

    def _stream(self, begin: int, count: int) -> np.ndarray:
        parts, document = [], int(np.searchsorted(self._ends, begin, side="right"))
        while count:
            offset = begin - int(self._ends[document]) + int(self._documents.length[document])
            parts.append(self._documents.read(document, offset, min(count, int(self._documents.length[document]) - offset)))
            begin, count, document = begin + len(parts[-1]), count - len(parts[-1]), document + 1
        return np.concatenate(parts)


@dataclass(frozen=True)
class _Batches:
    """What grain asks of a source."""

    read: Callable[[int], HostBatch]
    n: int

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, position: int) -> HostBatch:
        return self.read(int(position))


class Tokens:
    """A `loaders.base.Loader`. Fields, r rows for each range; what no document covers is 0:

    tokens, targets  int32 [r, context]    a token, and the one after it in its document
    positions        int32 [r, context]    from 0 in each document (in a window of a stream: in the window)
    segments         int32 [r, context]    0 padding, 1, 2, … the documents of a row
    mask             float32 [r, context]  1 where a target counts
    source           int32 [r]
    index, epoch     int32 [r]             the row's first document in its source and split (-1 in padding), passes before
    weight           float32 [r]           0 for the padding of a ragged last batch
    """

    def __init__(self, config: Config, *, split: str, rows: Rows, seed: int):
        self.fields = fields(config)
        self._config, self._rows, self._seed, self._train = config, rows, seed, split == "train"
        self._documents = [_splits(source, config.text, config.test_share)[split] for source in config.sources]
        self._streams: list[Packed | Windows] = []
        for k, documents in enumerate(self._documents):
            own = seed + (k << 32)  # sources draw independently
            if self._train and not (documents.length > 1).any():
                raise DataError(f"sources[{k}].path={config.sources[k].path} has no document of two tokens to train on")
            if config.packing == "best_fit":
                self._streams.append(Packed(documents, config.context, config.window, seed=own, shuffle=self._train))
            else:
                self._streams.append(Windows(documents, config.context, seed=own, packing=config.packing, train=self._train))
        self.n_batches = 0
        if self._train:
            sizes = None if config.exhausted == "repeat" else [stream.n_rows() for stream in self._streams]
            shares = [source.share for source in config.sources]
            self._mixture = mixture.Mixture(shares, seed=seed, policy=config.exhausted, sizes=sizes)
            self.n_batches = -(-sum(len(d.length) for d in self._documents) // rows.batch)
        else:
            self._starts = np.cumsum([0, *(stream.n_rows() for stream in self._streams)])
            self.n_batches = -(-int(self._starts[-1]) // rows.batch)
        self._read = np.zeros((len(self._streams), 2), np.int64)  # rows and tokens of each source, by this process
        self._epoch = np.zeros(len(self._streams), np.int64)
        self._position, self._closed = 0, False
        self._batches: grain.DatasetIterator | None = None  # from the first next or seek on

    def __iter__(self) -> "Tokens":
        return self

    def __next__(self) -> tuple[int, HostBatch]:
        if self._closed or (not self._train and self._position >= self.n_batches):
            raise StopIteration
        if self._batches is None:
            self.seek(self._position)
        batch = next(self._batches)
        for source, epoch, mask, weight in zip(*(batch[k] for k in ("source", "epoch", "mask", "weight")), strict=True):
            for k in np.unique(source[weight > 0]):
                own = (source == k) & (weight > 0)
                self._read[k] += np.count_nonzero(own), int(mask[own].sum())
                self._epoch[k] = max(self._epoch[k], int(epoch[own].max()))
        self._position += 1
        return self._position, batch

    def seek(self, position: int) -> None:
        """Batches are a function of their position: grain reads them ahead from there, by threads."""
        self._stop_reading()
        batches = grain.MapDataset.source(_Batches(self._batch, ENDLESS if self._train else self.n_batches))
        options = grain.ReadOptions(num_threads=self._config.threads, prefetch_buffer_size=self._config.ahead)
        self._batches = iter(batches.to_iter_dataset(options))
        self._batches.set_state({"next_index": position})
        self._position = position

    def state(self, position: int) -> dict[str, Any]:
        config = self._config
        how = {
            "version": [VERSION, mixture.VERSION, order.VERSION],
            "batch": self._rows.batch,
            "context": config.context,
            "packing": config.packing,
            "shares": [source.share for source in config.sources],
        }
        if config.packing == "best_fit":
            how["window"] = config.window
        if config.exhausted != "repeat":
            how["exhausted"] = config.exhausted
        digest = hashlib.sha256("".join(documents.digest for documents in self._documents).encode()).hexdigest()[:16]
        return {"position": position, "seed": self._seed, "fingerprint": digest, "order": how}

    def diagnostics(self) -> dict[str, Any]:
        """By source, of the rows that this process has read: share, passes begun, share of padding; documents never read."""
        rows, tokens = self._read.T
        return {
            "share": (rows / max(rows.sum(), 1)).tolist(),
            "wanted_share": self._mixture.shares.tolist() if self._train else None,
            "epoch": self._epoch.tolist(),
            "padding": (1 - tokens / np.maximum(rows * self._config.context, 1)).tolist(),
            "too_short": [int((documents.length < 2).sum()) for documents in self._documents],
        }

    def close(self) -> None:
        self._closed = True
        self._stop_reading()

    def _stop_reading(self) -> None:
        if self._batches is not None:
            self._batches.close()
            self._batches = None

    def _batch(self, position: int) -> HostBatch:
        parts = [self._part(position * self._rows.batch + np.arange(start, stop)) for start, stop in self._rows.ranges]
        return {name: [part[name] for part in parts] for name in self.fields}

    def _part(self, place: np.ndarray) -> dict[str, np.ndarray]:
        """The rows of these places, counted over the whole run (of a test: over the whole split)."""
        batch = {name: np.zeros((len(place), *field.shape), field.dtype) for name, field in self.fields.items()}
        batch["index"][:] = -1
        if self._train:
            source, number = self._mixture(place)
            there = np.arange(len(place))
        else:
            there = np.flatnonzero(place < self._starts[-1])
            source = np.searchsorted(self._starts, place[there], side="right") - 1
            number = place[there] - self._starts[source]
        for k in np.unique(source):
            at = there[source == k]
            self._streams[k].fill(batch, at, number[source == k])
        batch["source"][there], batch["weight"][there] = source, 1
        return batch


def fields(config: Config) -> dict[str, Field]:
    """Field -> shape of one row, dtype."""
    row, scalar = Field((config.context,), np.dtype(np.int32)), Field((), np.dtype(np.int32))
    return {
        **{name: row for name in ("tokens", "targets", "positions", "segments")},
        "mask": Field((config.context,), np.dtype(np.float32)),
        **{name: scalar for name in ("source", "index", "epoch")},
        "weight": Field((), np.dtype(np.float32)),
    }


def facts(config: Config) -> Facts:
    """vocab; context; bytes_per_token of the test split (of train, where there is none); n_train, n_test: documents by source;
    tokenizer: path of the first source's tokenizer.json, or ""; symbols: of a text of characters, symbol i is token i, or "".
    """
    splits = [_splits(source, config.text, config.test_share) for source in config.sources]
    measured = [s["test"] for s in splits if len(s["test"].length)] or [s["train"] for s in splits]
    first = pathlib.Path(config.sources[0].path).expanduser()
    folder = first / "train" if (first / "train").is_dir() else first
    vocabs = {s["train"].vocab for s in splits}
    if len(vocabs) > 1:
        raise DataError(f"the sources have different vocabularies: {sorted(vocabs)}; make their tokens with one tokenizer")
    return {
        "vocab": vocabs.pop(),
        "context": config.context,
        "bytes_per_token": sum(d.n_bytes for d in measured) / max(sum(int(d.length.sum()) for d in measured), 1),
        "n_train": tuple(len(s["train"].length) for s in splits),
        "n_test": tuple(len(s["test"].length) for s in splits),
        "tokenizer": str(folder / "tokenizer.json") if (folder / "tokenizer.json").is_file() else "",
        "symbols": symbols(first) if first.is_file() and config.text == "characters" else "",
    }


def make_loader(config: Config, *, split: str, rows: Rows, seed: int) -> Tokens:
    """A loader of ``split``, "train" or "test". Raises DataError for what cannot be read, and for texts that differ in their
    vocabulary; in ``next``: for a source that is exhausted and must not be."""
    for field, text in config.problems():
        raise DataError(f"data.{field} {text}")
    facts(config)
    return Tokens(config, split=split, rows=rows, seed=seed)


def symbols(path: pathlib.Path) -> str:
    """The characters of a text, sorted: the vocabulary of a text file."""
    return "".join(sorted(set(_text(path))))


def _text(path: pathlib.Path) -> str:
    try:
        return path.read_bytes().decode()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(
            f"{path}: cannot be read as UTF-8: {error}; a source is a text file or a folder of token files"
        ) from error


def _splits(source: Source, text: str, test_share: float) -> dict[str, Documents]:
    files = [pathlib.Path(p).expanduser() / name for p in (source.path, source.test) for name in ("", *_ABOUTS) if p]
    stamps = tuple((stat.st_size, stat.st_mtime_ns) for stat in (file.stat() for file in files if file.is_file()))
    return _open(source, text, test_share, stamps)


@functools.lru_cache(maxsize=16)
def _open(source: Source, text: str, test_share: float, stamps: tuple) -> dict[str, Documents]:
    """Facts and two loaders read the same files: they are opened once, and again when one changed (``stamps``)."""
    path, test = (pathlib.Path(p).expanduser() for p in (source.path, source.test))
    beside = path / "test" if (path / "test" / "tokens.json").is_file() else None
    held_out = test if source.test else beside
    if path.is_file():
        vocabulary = symbols(path) if text == "characters" else ""
        train = _read_text(path, vocabulary)
    else:
        train = _read_folder(path / "train" if (path / "train" / "tokens.json").is_file() else path)
    if held_out is not None:
        other = _read_text(held_out, vocabulary) if path.is_file() else _read_folder(held_out)
        if other.vocab != train.vocab:
            raise DataError(f"{held_out} has a vocabulary of {other.vocab}, and {path} one of {train.vocab}")
        return {"train": train, "test": other}
    if path.is_file():  # as nanoGPT splits: the beginning is for training
        n = int(len(train.shards[0]) * (1 - test_share))
        return {"train": _piece(train, 0, n, path, text), "test": _piece(train, n, len(train.shards[0]), path, text)}
    held = order.held_out(np.arange(len(train.length)), test_share)
    sizes = _document_bytes(path / "train" if (path / "train" / "tokens.json").is_file() else path)
    return {
        name: train._replace(
            shard=train.shard[kept],
            start=train.start[kept],
            length=train.length[kept],
            n_bytes=int(sizes[kept].sum()),
            digest=f"{train.digest} {test_share}",
        )
        for name, kept in (("train", ~held), ("test", held))
    }


def _piece(whole: Documents, begin: int, end: int, path: pathlib.Path, text: str) -> Documents:
    """Tokens ``begin`` … ``end`` of a text as its one document; none when there are none."""
    n_bytes = end - begin if text == "bytes" else len(_text(path)[begin:end].encode())
    only = np.arange(1 if end > begin else 0)
    return whole._replace(
        shard=only.astype(np.int32), start=only + begin, length=only + end - begin, n_bytes=n_bytes,
        digest=f"{whole.digest} {begin} {end}",
    )  # fmt: skip


def _read_text(path: pathlib.Path, vocabulary: str) -> Documents:
    """One document of characters, or without a vocabulary of bytes."""
    content = _text(path)
    encoded = content.encode()
    if vocabulary:
        points = np.frombuffer(content.encode("utf-32-le"), np.uint32)
        known = np.array([ord(c) for c in vocabulary], np.uint32)
        tokens = np.searchsorted(known, points)
        if (strange := np.flatnonzero(known[np.minimum(tokens, len(known) - 1)] != points)).size:
            raise DataError(f"{path}: character {content[strange[0]]!r} at {strange[0]} is not in the training text")
        tokens = tokens.astype(np.uint32)
    else:
        tokens = np.frombuffer(encoded, np.uint8)
    digest = hashlib.sha256(encoded + vocabulary.encode()).hexdigest()
    one = np.ones(1, np.int64)
    return Documents((tokens,), np.zeros(1, np.int32), 0 * one, one * len(tokens), len(encoded), len(vocabulary) or 256, digest)


def _read_folder(folder: pathlib.Path) -> Documents:
    about = _about(folder)
    shards, shard, start, length = [], [], [], []
    for i, entry in enumerate(about["shards"]):
        index = _index(folder, entry)[:, 0]
        tokens = folder / f"{entry['name']}.tokens"
        dtype = np.dtype(about["dtype"]).newbyteorder("<")
        size = tokens.stat().st_size if tokens.is_file() else -1
        if size != entry["tokens"] * dtype.itemsize:
            there = f"has {size} bytes" if size >= 0 else "does not exist"
            raise DataError(f"{tokens} {there}, and tokens.json speaks of {entry['tokens'] * dtype.itemsize}; make it again")
        shards.append(np.memmap(tokens, dtype, "r") if size else np.empty(0, dtype))
        shard.append(np.full(len(index) - 1, i, np.int32))
        start.append(index[:-1])
        length.append(np.diff(index))
    digest = hashlib.sha256("".join(entry["sha256"] for entry in about["shards"]).encode()).hexdigest()
    n_bytes = sum(entry["bytes"] for entry in about["shards"])
    joined = (np.concatenate(x) if x else np.empty(0, np.int64) for x in (shard, start, length))
    return Documents(tuple(shards), *joined, n_bytes, about["vocab"], digest)


def _document_bytes(folder: pathlib.Path) -> np.ndarray:
    """int64 [n]: bytes of text of each document."""
    parts = [np.diff(_index(folder, entry)[:, 1]) for entry in _about(folder)["shards"]]
    return np.concatenate(parts) if parts else np.empty(0, np.int64)


def _about(folder: pathlib.Path) -> dict[str, Any]:
    path = folder / "tokens.json"
    try:
        about = json.loads(path.read_text())
    except FileNotFoundError as error:
        inside = ", ".join(sorted(p.name for p in folder.iterdir())[:5]) if folder.is_dir() else "not there"
        raise DataError(
            f"{folder} has no tokens.json; it holds {inside or 'nothing'}. `jaxtrain tokens` makes token files, and "
            "resumes where it was interrupted"
        ) from error
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: {error}") from error
    if about.get("format") != FORMAT:
        raise DataError(f"{path} has format {about.get('format')!r}, and {FORMAT} is read here; make the tokens again")
    return about


def _index(folder: pathlib.Path, entry: dict[str, Any]) -> np.ndarray:
    path = folder / f"{entry['name']}.docs"
    shape = (entry["documents"] + 1, 2)
    try:
        return np.memmap(path, "<i8", "r", shape=shape)
    except (OSError, ValueError) as error:
        raise DataError(f"{path} does not hold the {shape[0] - 1} documents that tokens.json speaks of: {error}") from error


def lengths(folder: pathlib.Path) -> np.ndarray:
    """int64 [n]: tokens of each document of a folder of token files."""
    return _read_folder(folder).length


def write_shard(folder: pathlib.Path, name: str, documents: Sequence[np.ndarray], sizes: Sequence[int], dtype: Any) -> dict:
    """Writes one shard and returns its entry for tokens.json. ``sizes``: bytes of text of each document."""
    index = np.zeros((len(documents) + 1, 2), "<i8")
    index[1:, 0] = np.cumsum([len(d) for d in documents])
    index[1:, 1] = np.cumsum(sizes)
    tokens = np.concatenate([np.asarray(d, dtype) for d in documents]) if documents else np.empty(0, dtype)
    raw = tokens.astype(np.dtype(dtype).newbyteorder("<"), copy=False).tobytes()
    for suffix, content in (("tokens", raw), ("docs", index.tobytes())):
        temporary = folder / f".{name}.{suffix}.part"
        temporary.write_bytes(content)
        temporary.replace(folder / f"{name}.{suffix}")
    digest = hashlib.sha256(raw + index.tobytes()).hexdigest()
    return {
        "name": name,
        "documents": len(documents),
        "tokens": len(tokens),
        "bytes": int(index[-1, 1]),
        "sha256": digest,
    }


def write_about(folder: pathlib.Path, *, vocab: int, eos: int | None, tokenizer: str | None, shards: Sequence[dict]) -> None:
    """Writes tokens.json, after which the folder is complete."""
    about = {
        "format": FORMAT,
        "dtype": str(token_dtype(vocab)),
        "vocab": vocab,
        "eos": eos,
        "tokenizer": tokenizer,
        "shards": list(shards),
    }
    temporary = folder / ".tokens.json.part"
    temporary.write_text(json.dumps(about, indent=1) + "\n")
    temporary.replace(folder / "tokens.json")


def token_dtype(vocab: int) -> np.dtype:
    return np.dtype(np.uint16 if vocab <= 1 << 16 else np.uint32)
