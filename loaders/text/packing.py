"""Rows of tokens made of documents: packed by best fit, or cut from the stream of all documents.

A document of t tokens is t - 1 predictions and takes as many positions: inputs are its tokens 0 … t
- 2, targets 1 … t - 1. So no position is spent on an end that predicts nothing, and no target
belongs to another document.
"""

import logging
import threading
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from loaders import _rust, order
from loaders.base import DataError
from loaders.text.token_files import Documents

log = logging.getLogger("jaxtrain")
# [documents] of a row, of which cuDNN's kernel keeps a float32 number each, for each head and place
LIMITS = (32, 64, 128)
LITTLE, MUCH = 0.01, 0.05  # [share] of the places, padded because of a limit
# [places] of a row from which attention to all of them takes longer than all else, in a net of
# some 5,000 values a token
LONG = 1 << 16
START, SHUFFLE = 64, 65  # domains of the hashes: two uses of the same numbers draw independently
KEPT_WINDOWS = 4  # packed windows that stay in memory: a batch may span two


class Pieces(NamedTuple):
    """The pieces of documents that rows are made of, row by row."""

    document: np.ndarray  # int64 [pieces]
    offset: np.ndarray  # int64 [pieces] first input token within the document
    length: np.ndarray  # int64 [pieces] positions
    stops: np.ndarray  # int64 [rows] after the last piece of each row
    moved: int = 0  # pieces that are in further rows, since a row had too many
    added: int = 0  # rows that these took


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
        larger_rooms = self._rooms >> size
        if not larger_rooms:
            return 0
        lowest_bit = larger_rooms & -larger_rooms
        return size + lowest_bit.bit_length() - 1

    def count(self, room: int) -> int:
        return len(self._bins[room])

    def take(self, room: int, n: int) -> list[int]:
        """``n`` bins of this room, the latest ones."""
        bins = self._bins[room]
        latest = bins[-n:]
        del bins[-n:]
        if not bins:
            self._rooms ^= 1 << room
        return latest


def best_fit(lengths: np.ndarray, capacity: int) -> tuple[np.ndarray, int]:
    """Best fit decreasing: int64 [n] lengths -> int64 [n] the bin of each, and the number of bins.

    The longest first, each into the bin with the least room that suffices.
    """
    by_length = np.argsort(-lengths, kind="stable")
    sizes, counts = np.unique(lengths, return_counts=True)
    bins_by_length: list[int] = []  # the bin of each length, in the order of by_length
    open_bins = _OpenBins()
    n_bins = 0
    for size, n_left in zip(sizes[::-1].tolist(), counts[::-1].tolist(), strict=True):
        while n_left:
            room = open_bins.smallest_room(size)
            if room:
                n_per_bin = min(room // size, n_left)
                n_full = n_left // n_per_bin
                bins = open_bins.take(room, min(open_bins.count(room), n_full))
            else:
                room = capacity
                n_per_bin = min(room // size, n_left)
                bins = list(range(n_bins, n_bins + n_left // n_per_bin))
                n_bins += len(bins)
            for i in bins:
                bins_by_length += [i] * n_per_bin
            n_left -= n_per_bin * len(bins)
            open_bins.put(room - n_per_bin * size, bins)
    bin_of = np.empty(len(lengths), np.int64)
    bin_of[by_length] = bins_by_length
    return bin_of, n_bins


def limit_of(
    lengths: Sequence[np.ndarray], shares: Sequence[float], context: int, window: int
) -> int:
    """Return how many documents a row of ``context`` positions may have, unless a config says.

    It is the smallest of `LIMITS` that pads at most `LITTLE`. The largest may pad `MUCH`, and in
    long rows as much as attention to all places would take. If it pads more, the limit is
    ``context``, which limits nothing, and which cuDNN's kernel refuses. A window of each source is
    packed to know it. The order of rows depends on it. So it is a function of the documents, never
    of the devices.

    ``lengths``: int64 [n] tokens of the documents of each source. ``shares``: of the rows.
    """
    samples = []
    for of_source in lengths:
        n = len(of_source)
        chosen = order.permutation(0, 0, max(n, 1), np.arange(min(n, window)))
        samples.append(of_source[chosen])
    most = dict.fromkeys(LIMITS, LITTLE)
    most[LIMITS[-1]] = max(MUCH, context / (context + LONG))
    for limit, share in most.items():
        padded = [_padded(sample, context, limit) for sample in samples]
        if np.average(padded, weights=shares) <= share:
            return min(limit, context)
    return context


def _padded(lengths: np.ndarray, context: int, limit: int) -> float:
    """Return the share of a window's places that are padding because of a limit."""
    pieces = pack(lengths, context, limit)
    return pieces.added / max(len(pieces.stops), 1)


def limited(lengths: np.ndarray, capacity: int, limit: int) -> tuple[np.ndarray, int, int, int]:
    """Pack by `best_fit`, at most ``limit`` items in a bin. The shortest are packed once more.

    Returns the bin of each, the number of bins, how many items were packed again, and how many bins
    that took.
    """
    bin_of, n_bins = best_fit(lengths, capacity)
    n_unlimited = n_bins
    moved = _beyond(bin_of, lengths, limit)
    n_moved = len(moved)
    while len(moved):
        bins, n_further = best_fit(lengths[moved], capacity)
        bin_of[moved] = n_bins + bins
        n_bins += n_further
        moved = moved[_beyond(bins, lengths[moved], limit)]
    return bin_of, n_bins, n_moved, n_bins - n_unlimited


def _beyond(bin_of: np.ndarray, lengths: np.ndarray, limit: int) -> np.ndarray:
    """Return the items after the ``limit`` longest ones of their bin."""
    by_bin = np.lexsort((-lengths, bin_of))
    _, counts = np.unique(bin_of, return_counts=True)
    first = np.repeat(np.cumsum(counts) - counts, counts)
    place_in_bin = np.arange(len(by_bin)) - first
    return np.sort(by_bin[place_in_bin >= limit])


def pack(lengths: np.ndarray, context: int, limit: int) -> Pieces:
    """Pack documents of ``lengths`` tokens into rows of ``context`` positions.

    A longer document is cut into whole rows and a rest. A row has at most ``limit`` pieces.
    Documents of the result index ``lengths``.
    """
    n_pairs = np.maximum(lengths - 1, 0)
    n_pieces = -(-n_pairs // context)
    document = np.repeat(np.arange(len(lengths)), n_pieces)
    first_piece = np.cumsum(n_pieces) - n_pieces
    piece_in_document = np.arange(len(document)) - first_piece[document]
    offset = piece_in_document * context
    length = np.minimum(context, n_pairs[document] - offset)
    bins, n_bins, n_moved, n_added = limited(length, context, limit)
    by_bin = np.argsort(bins, kind="stable")
    stops = np.cumsum(np.bincount(bins, minlength=n_bins))
    return Pieces(document[by_bin], offset[by_bin], length[by_bin], stops, n_moved, n_added)


class Packed:
    """Rows of documents packed window by window. A seek packs those before it once, to count."""

    def __init__(
        self,
        documents: Documents,
        context: int,
        window: int,
        *,
        limit: int,
        seed: int,
        shuffle: bool,
    ):
        """``limit``: of the documents of a row."""
        self._documents = documents
        self._context = context
        self._window = window
        self._limit = limit
        self._seed = seed
        self._shuffle = shuffle
        self._n_windows = -(-len(documents.length) // window)
        self._ends: list[int] = []  # row number after window w of epoch e, at e n_windows + w
        self._packed_windows: dict[int, Pieces] = {}
        self._lock = threading.Lock()  # of the two above: batches are read by several threads
        # documents of the windows packed so far that are in further rows, as a row had too many
        self.moved = 0
        self._added = 0  # rows that these took
        self._warned = False

    def n_rows(self) -> int:
        """Rows of the first pass."""
        if not self._n_windows:
            return 0
        while len(self._ends) < self._n_windows:
            self._pack_window(len(self._ends))
        return self._ends[self._n_windows - 1]

    def fill(self, batch: dict[str, np.ndarray], at: np.ndarray, number: np.ndarray) -> None:
        """Write the rows ``number`` of this source into a batch's places ``at``, both int64 [k]."""
        for row, i in zip(at.tolist(), number.tolist(), strict=True):
            with self._lock:
                while not self._ends or self._ends[-1] <= i:
                    self._pack_window(len(self._ends))
                w = int(np.searchsorted(self._ends, i, side="right"))
                pieces = self._pack_window(w)
                first_row = self._ends[w - 1] if w else 0
            self._fill_row(batch, row, pieces, i - first_row)
            batch["epoch"][row] = w // self._n_windows

    def _pack_window(self, w: int) -> Pieces:
        """Return the rows of window ``w`` of all epochs. The next in line is added to `_ends`."""
        if w in self._packed_windows:
            return self._packed_windows[w]
        epoch, window = divmod(w, self._n_windows)
        n_documents = len(self._documents.length)
        start = window * self._window
        documents = np.arange(start, min(start + self._window, n_documents))
        if self._shuffle:
            documents = _rust.permutation(self._seed, epoch, n_documents, documents)
        pieces = pack(self._documents.length[documents], self._context, self._limit)
        n_rows = len(pieces.stops)
        if self._shuffle and n_rows:
            row_seed = int(order.hash_of(SHUFFLE, self._seed, w)[0])
            rows = order.permutation(row_seed, 0, n_rows, np.arange(n_rows))
            pieces = _reordered(pieces, rows)
        pieces = pieces._replace(document=documents[pieces.document])
        self._packed_windows[w] = pieces
        # else all are needed: rows are asked for in mixed order
        while self._shuffle and len(self._packed_windows) > KEPT_WINDOWS:
            oldest = next(iter(self._packed_windows))
            del self._packed_windows[oldest]
        if w == len(self._ends):
            previous_end = self._ends[-1] if w else 0
            self._ends.append(previous_end + n_rows)
            self._count_moved(pieces)
            if window == self._n_windows - 1:
                self._report_moved(epoch)
        return pieces

    def _count_moved(self, pieces: Pieces) -> None:
        """Count the documents of a window that were moved. Warn once if that pads many places."""
        self.moved += pieces.moved
        self._added += pieces.added
        padded = pieces.added / max(len(pieces.stops), 1)
        if padded > LITTLE and not self._warned:
            self._warned = True
            log.warning(
                "%.1f %% of the places are padding, since a row has at most %d documents, and %d of"
                " %d went into further rows; raise data.documents, or set it to 0 to choose it by"
                " the documents",
                100 * padded,
                self._limit,
                pieces.moved,
                len(pieces.length),
            )

    def _report_moved(self, epoch: int) -> None:
        """Log the documents that were moved up to the end of an epoch."""
        if not self.moved:
            return
        log.info(
            "up to the end of epoch %d, %d documents went into further rows, since a row has at"
            " most %d (data.documents): %.2f %% of %d rows",
            epoch,
            self.moved,
            self._limit,
            100 * self._added / max(self._ends[-1], 1),
            self._ends[-1],
        )

    def _fill_row(
        self, batch: dict[str, np.ndarray], row: int, pieces: Pieces, number: int
    ) -> None:
        """Write row ``number`` of a window into row ``row`` of a batch."""
        stop = int(pieces.stops[number])
        start = int(pieces.stops[number - 1]) if number else 0
        place = 0
        for segment, k in enumerate(range(start, stop), 1):
            n = int(pieces.length[k])
            tokens = self._documents.read(pieces.document[k], pieces.offset[k], n + 1)
            span = slice(place, place + n)
            batch["tokens"][row, span] = tokens[:-1]
            batch["targets"][row, span] = tokens[1:]
            batch["positions"][row, span] = np.arange(n)
            batch["segments"][row, span] = segment
            place += n
        batch["mask"][row, :place] = 1
        batch["index"][row] = pieces.document[start]


def _reordered(pieces: Pieces, rows: np.ndarray) -> Pieces:
    sizes = np.diff(pieces.stops, prepend=0)
    starts = pieces.stops - sizes
    new_sizes = sizes[rows]
    new_stops = np.cumsum(new_sizes)
    new_starts = new_stops - new_sizes
    moves = np.repeat(starts[rows] - new_starts, new_sizes)
    k = np.arange(len(pieces.length)) + moves
    moved = pieces._replace(document=pieces.document[k], offset=pieces.offset[k])
    return moved._replace(length=pieces.length[k], stops=new_stops)


class Windows:
    """Rows of the stream of all documents, one after the other, across their boundaries."""

    def __init__(self, documents: Documents, context: int, *, seed: int, packing: str, train: bool):
        self._documents = documents
        self._context = context
        self._seed = seed
        self._random = train and packing == "random"
        self._train = train
        self._ends = np.cumsum(documents.length)  # of each document in the stream
        self._n_tokens = int(self._ends[-1]) if len(self._ends) else 0
        if train and self._n_tokens <= context:
            raise DataError(
                f"the source has {self._n_tokens} tokens to train on, too few for a context of"
                f" {context}"
            )

    def n_rows(self) -> int:
        """Rows of one pass: whole windows in training. In testing the last one may be padded."""
        n_pairs = self._n_tokens - 1
        if self._train:
            return n_pairs // self._context
        return -(-max(n_pairs, 0) // self._context)

    def fill(self, batch: dict[str, np.ndarray], at: np.ndarray, number: np.ndarray) -> None:
        epoch, start = self._starts(number)
        for row, first, e in zip(at.tolist(), start.tolist(), epoch.tolist(), strict=True):
            tokens = self._stream(first, min(self._context + 1, self._n_tokens - first))
            n = len(tokens) - 1
            batch["tokens"][row, :n] = tokens[:-1]
            batch["targets"][row, :n] = tokens[1:]
            batch["positions"][row, :n] = np.arange(n)
            batch["segments"][row, :n] = 1
            batch["mask"][row, :n] = 1
            batch["index"][row] = self._document_at(first)
            batch["epoch"][row] = e

    def _starts(self, number: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the epoch and the first token in the stream of each row."""
        n_rows = self.n_rows()
        epoch, window = np.divmod(number, max(n_rows, 1))
        if self._random:
            draws = order.hash_of(START, self._seed, number)
            n_starts = np.uint64(self._n_tokens - self._context)
            return epoch, (draws % n_starts).astype(np.int64)
        if self._train:
            _, window = order.epochs(self._seed, n_rows, number, _rust.permutation)
        return epoch, window * self._context

    def _document_at(self, place: int) -> int:
        return int(np.searchsorted(self._ends, place, side="right"))

    def _stream(self, start: int, count: int) -> np.ndarray:
        """``count`` tokens of the stream from place ``start`` on."""
        parts = []
        document = self._document_at(start)
        while count:
            length = int(self._documents.length[document])
            offset = start - int(self._ends[document]) + length
            part = self._documents.read(document, offset, min(count, length - offset))
            parts.append(part)
            start += len(part)
            count -= len(part)
            document += 1
        return np.concatenate(parts)
