"""Rows of tokens made of documents: packed by best fit, or cut from the stream of all documents.

A document of t tokens is t - 1 predictions and takes as many positions: inputs are its tokens 0 … t
- 2, targets 1 … t - 1. So no position is spent on an end that predicts nothing, and no target
belongs to another document.
"""

import threading
from typing import NamedTuple

import numpy as np

from loaders import _rust, order
from loaders.base import DataError
from loaders.text.token_files import Documents

START, SHUFFLE = 64, 65  # domains of the hashes: two uses of the same numbers draw independently
KEPT_WINDOWS = 4  # packed windows that stay in memory: a batch may span two


class Placed(NamedTuple):
    """The pieces of documents that rows are made of, row by row."""

    document: np.ndarray  # int64 [pieces]
    offset: np.ndarray  # int64 [pieces] first input token within the document
    length: np.ndarray  # int64 [pieces] positions
    stops: np.ndarray  # int64 [rows] after the last piece of each row


class _OpenBins:
    """Bins by the room that they have left, of which an integer has a bit for each that occurs."""

    def __init__(self) -> None:
        self._bins: dict[int, list[int]] = {}  # room -> bins that have it
        self._rooms = 0  # bit r: there are bins of room r

    def put(self, room: int, bins: list[int]) -> None:
        if room and bins:
            self._bins.setdefault(room, []).extend(bins)
            self._rooms |= 1 << room

    def smallest_room(self, size: int) -> int:
        """Return the smallest room of at least ``size`` in a bin, or 0."""
        larger = self._rooms >> size
        return size + (larger & -larger).bit_length() - 1 if larger else 0

    def count(self, room: int) -> int:
        return len(self._bins[room])

    def take(self, room: int, n: int) -> list[int]:
        """``n`` bins of this room, the latest ones."""
        bins = self._bins[room]
        taken = bins[-n:]
        del bins[-n:]
        if not bins:
            self._rooms ^= 1 << room
        return taken


def best_fit(lengths: np.ndarray, capacity: int) -> tuple[np.ndarray, int]:
    """Best fit decreasing: int64 [n] lengths -> int64 [n] the bin of each, and the number of bins.

    The longest first, each into the bin with the least room that suffices.
    """
    by_length = np.argsort(-lengths, kind="stable")
    sizes, counts = np.unique(lengths, return_counts=True)
    chosen: list[int] = []  # the bin of each length, in the order of by_length
    free, opened = _OpenBins(), 0
    for size, left in zip(sizes[::-1].tolist(), counts[::-1].tolist(), strict=True):
        while left:
            if room := free.smallest_room(size):
                each = room // size
                if n := min(free.count(room), left // each):
                    bins = free.take(room, n)
                else:
                    bins, each = free.take(room, 1), left
            else:
                room, each = capacity, min(capacity // size, left)
                bins = list(range(opened, opened + left // each))
                opened += len(bins)
            for i in bins:
                chosen += [i] * each
            left -= each * len(bins)
            free.put(room - each * size, bins)
    placed = np.empty(len(lengths), np.int64)
    placed[by_length] = chosen
    return placed, opened


def pack(lengths: np.ndarray, context: int) -> Placed:
    """Pack documents of ``lengths`` tokens into rows of ``context`` positions.

    A longer document is cut into whole rows and a rest. Documents of the result index ``lengths``.
    """
    pairs = np.maximum(lengths - 1, 0)
    n_pieces = -(-pairs // context)
    document = np.repeat(np.arange(len(lengths)), n_pieces)
    offset = (
        np.arange(len(document)) - np.repeat(np.cumsum(n_pieces) - n_pieces, n_pieces)
    ) * context
    length = np.minimum(context, pairs[document] - offset)
    bins, n_bins = best_fit(length, context)
    by_bin = np.argsort(bins, kind="stable")
    stops = np.cumsum(np.bincount(bins, minlength=n_bins))
    return Placed(document[by_bin], offset[by_bin], length[by_bin], stops)


class Packed:
    """Rows of documents packed window by window. A seek packs those before it once, to count."""

    def __init__(
        self, documents: Documents, context: int, window: int, *, seed: int, shuffle: bool
    ):
        self._documents, self._context, self._window, self._seed, self._shuffle = (
            documents,
            context,
            window,
            seed,
            shuffle,
        )
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
        """Write the rows ``number`` of this source into a batch's places ``at``, both int64 [k]."""
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
                span = slice(used, used + n)
                batch["tokens"][row, span], batch["targets"][row, span] = tokens[:-1], tokens[1:]
                batch["positions"][row, span], batch["segments"][row, span] = (
                    np.arange(n),
                    k - begin + 1,
                )
                used += n
            batch["mask"][row, :used] = 1
            batch["index"][row], batch["epoch"][row] = placed.document[begin], w // self._n_windows

    def _placed(self, w: int) -> Placed:
        """Return the rows of window ``w`` of all epochs. The next in line is added to `_ends`."""
        if w not in self._kept:
            epoch, window = divmod(w, self._n_windows)
            n = len(self._documents.length)
            chosen = np.arange(window * self._window, min((window + 1) * self._window, n))
            if self._shuffle:
                chosen = _rust.permutation(self._seed, epoch, n, chosen)
            placed = pack(self._documents.length[chosen], self._context)
            if self._shuffle and len(placed.stops):
                placed = _reordered(
                    placed,
                    order.permutation(
                        int(order.hash_of(SHUFFLE, self._seed, w)[0]),
                        0,
                        len(placed.stops),
                        np.arange(len(placed.stops)),
                    ),
                )
            self._kept[w] = placed._replace(document=chosen[placed.document])
            # else all are needed: rows are asked for in mixed order
            while self._shuffle and len(self._kept) > KEPT_WINDOWS:
                del self._kept[next(iter(self._kept))]
            if w == len(self._ends):
                self._ends.append((self._ends[-1] if w else 0) + len(placed.stops))
        return self._kept[w]


def _reordered(placed: Placed, rows: np.ndarray) -> Placed:
    sizes = np.diff(placed.stops, prepend=0)
    stops = np.cumsum(sizes[rows])
    pieces = np.arange(len(placed.length)) + np.repeat(
        (placed.stops - sizes)[rows] - (stops - sizes[rows]), sizes[rows]
    )
    return Placed(placed.document[pieces], placed.offset[pieces], placed.length[pieces], stops)


class Windows:
    """Rows of the stream of all documents, one after the other, across their boundaries."""

    def __init__(self, documents: Documents, context: int, *, seed: int, packing: str, train: bool):
        self._documents, self._context, self._seed, self._random = (
            documents,
            context,
            seed,
            train and packing == "random",
        )
        self._ends = np.cumsum(documents.length)  # of each document in the stream
        self._tokens = int(self._ends[-1]) if len(self._ends) else 0
        self._train = train
        if train and self._tokens <= context:
            raise DataError(
                f"the source has {self._tokens} tokens to train on, too few for a context of"
                f" {context}"
            )

    def n_rows(self) -> int:
        """Rows of one pass: whole windows in training. In testing the last one may be padded."""
        return (
            (self._tokens - 1) // self._context
            if self._train
            else -(-max(self._tokens - 1, 0) // self._context)
        )

    def fill(self, batch: dict[str, np.ndarray], at: np.ndarray, number: np.ndarray) -> None:
        n, context = self.n_rows(), self._context
        epoch, start = np.divmod(number, max(n, 1))
        if self._random:
            draws = order.hash_of(START, self._seed, number)
            start = (draws % np.uint64(self._tokens - context)).astype(np.int64)
        elif self._train:
            start = order.epochs(self._seed, n, number, _rust.permutation)[1] * context
        else:
            start = start * context
        for row, begin, e in zip(at.tolist(), start.tolist(), epoch.tolist(), strict=True):
            tokens = self._stream(begin, min(context + 1, self._tokens - begin))
            used = len(tokens) - 1
            batch["tokens"][row, :used], batch["targets"][row, :used] = tokens[:-1], tokens[1:]
            batch["positions"][row, :used] = np.arange(used)
            batch["segments"][row, :used] = batch["mask"][row, :used] = 1
            batch["index"][row], batch["epoch"][row] = (
                np.searchsorted(self._ends, begin, side="right"),
                e,
            )

    def _stream(self, begin: int, count: int) -> np.ndarray:
        """``count`` tokens of the stream from place ``begin`` on."""
        parts, document = [], int(np.searchsorted(self._ends, begin, side="right"))
        while count:
            offset = begin - int(self._ends[document]) + int(self._documents.length[document])
            parts.append(
                self._documents.read(
                    document, offset, min(count, int(self._documents.length[document]) - offset)
                )
            )
            begin, count, document = begin + len(parts[-1]), count - len(parts[-1]), document + 1
        return np.concatenate(parts)
