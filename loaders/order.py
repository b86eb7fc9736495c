"""The order of the data, as pure functions: the readable reference for rust/core/src/order.rs.

Example number s = position * batch + row is place i = s % n of epoch s // n, and holds recording
``rows[permutation(seed, epoch, n, i)]``. Nothing is remembered between calls, so resuming, a change
of world size and any number of reading threads are the same operation. That is the global order:
every row anywhere in an epoch.

The block order is for file systems with slow scattered reads. Runs of at most ``block_rows``
neighbouring rows of a shard are permuted as a whole, then the rows of each ``block_window`` runs
among themselves. So only a few hundred runs are needed next, which are read ahead one window at a
time. It is a pure function of the place as well. The price is that the rows of a batch share
shards: docs/results/loader.md has how much, and chi2_shard and acf_shard of a run's metrics say it
for its own data. A window of 256 runs of 8 rows holds 2,048 rows, in XCL 1.9 GB. Two windows are
requested at most.

The permutation is a Feistel network over the mixed-radix digits of the place, for any n, not only
powers of two (Black and Rogaway, "Ciphers with arbitrary finite domains", 2002). Its round function
is splitmix64's output function.
"""

import math
from collections.abc import Callable

import numpy as np

# changes whenever the same (seed, epoch, place) would give another recording or another crop
VERSION = 1

ROUNDS = 8
GOLDEN = np.uint64(0x9E3779B97F4A7C15)  # 2^64 / golden ratio, the increment of splitmix64
# domains of the hashes: two uses of the same numbers draw independently
ORDER, CROP, SPLIT, BLOCK, WINDOW = 1, 2, 3, 4, 5


def mix(x: np.ndarray) -> np.ndarray:
    """Apply splitmix64's output function, a bijection of uint64 (Steele, Lea and Flood, 2014)."""
    bits = np.asarray(x, np.uint64)
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return bits ^ (bits >> np.uint64(31))


def hash_of(*parts: int | np.ndarray) -> np.ndarray:
    """Return the uint64 hash of integers below 2^64, which broadcast against each other."""
    h = np.zeros(1, np.uint64)
    for part in parts:
        h = mix((h ^ np.asarray(part, np.uint64)) + GOLDEN)
    return h


def permutation(seed: int, epoch: int, n: int, i: np.ndarray) -> np.ndarray:
    """Return recordings int64 [k] of places [0, n), a bijection for each (seed, epoch)."""
    return _permute(hash_of(ORDER, seed, epoch), n, i)


def epochs(
    seed: int,
    n: int,
    number: np.ndarray,
    permute: Callable[[int, int, int, np.ndarray], np.ndarray] = permutation,
) -> tuple[np.ndarray, np.ndarray]:
    """Draws ``number``, int64 [k], of an endless order -> int64 [k] epochs and recordings.

    The order is of n recordings. Every recording is drawn once before any comes again. ``permute``:
    `permutation`, or the extension's.
    """
    epoch, place = np.divmod(number, n)
    recording = np.empty_like(place)
    for e in np.unique(epoch):
        recording[epoch == e] = permute(seed, int(e), n, place[epoch == e])
    return epoch, recording


def once(n: int, number: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Draws of a test split of n recordings -> indices of draws < n, and their recordings.

    Both are int64 [m]. The order is always the same and mixed, so that the first batches are a fair
    sample. Past its end there is nothing.
    """
    there = np.flatnonzero(number < n)
    return there, permutation(0, 0, n, number[there]) if there.size else there


def _permute(key: np.ndarray, n: int, i: np.ndarray) -> np.ndarray:
    keys = mix(key + GOLDEN * np.arange(1, ROUNDS + 1, dtype=np.uint64))
    a = np.uint64(math.isqrt(n - 1) + 1)
    b = np.uint64(-(-n // int(a)))
    place = np.array(i, np.uint64)
    walking = np.ones(place.shape, bool)
    # a * b exceeds n by less than a: a place that lands there is permuted again
    while walking.any():
        l, r = np.divmod(place[walking], b)
        for turn, key in enumerate(keys):
            if turn % 2 == 0:
                l = (l + _below(key + r, a)) % a
            else:
                r = (r + _below(key + l, b)) % b
        place[walking] = l * b + r
        walking = place >= np.uint64(n)
    return place.astype(np.int64)


def block_stops(rows: np.ndarray, first_rows: np.ndarray, size: int) -> np.ndarray:
    """Return the ends of blocks, int64 [blocks]: runs of at most ``size`` rows of one shard.

    A block ends after the last of its ``rows``. ``rows`` must increase; ``first_rows`` are the
    first rows of the shards.
    """
    ends = [*np.searchsorted(rows, first_rows[1:]), len(rows)]
    stops: list[int] = []
    for end in ends:
        while (begin := stops[-1] if stops else 0) < end:
            stops.append(min(begin + size, int(end)))
    return np.array(stops, np.int64)


def block_order(seed: int, epoch: int, stops: np.ndarray, window: int, i: np.ndarray) -> np.ndarray:
    """Places int64 [k] of an epoch -> recordings int64 [k], a bijection of [0, stops[-1]).

    The blocks are permuted, then the places of each ``window`` consecutive blocks are permuted
    among themselves.
    """
    sizes = np.diff(stops, prepend=0)
    blocks = _permute(hash_of(BLOCK, seed, epoch), len(stops), np.arange(len(stops)))
    starts = np.concatenate([[0], np.cumsum(sizes[blocks])])  # of each block in the permuted order
    number = (np.searchsorted(starts, i, side="right") - 1) // window
    place = np.empty(len(i), np.int64)
    for w in np.unique(number):
        start, stop = starts[w * window], starts[min((w + 1) * window, len(stops))]
        inside = number == w
        place[inside] = start + _permute(
            hash_of(WINDOW, seed, epoch, int(w)), int(stop - start), i[inside] - start
        )
    k = np.searchsorted(starts, place, side="right") - 1
    recordings: np.ndarray = (stops - sizes)[blocks[k]] + place - starts[k]
    return recordings


def _below(x: np.ndarray, m: np.uint64) -> np.ndarray:
    """Return a number in [0, m) from a hash of x, for m < 2^32."""
    return ((mix(x) >> np.uint64(32)) * m) >> np.uint64(32)


def crop_start(seed: int, epoch: int, recording: int, n_starts: int, view: int = 0) -> int:
    """Return a training crop's first sample, at the recording's rate, of ``n_starts`` ones."""
    return int(hash_of(CROP, seed, epoch, recording, view)[0]) % n_starts


def held_out(recordings: np.ndarray, share: float) -> np.ndarray:
    """Row numbers int64 [n] -> bool [n]: recordings kept for testing, about ``share``.

    It depends on the row number alone, so recordings added at the end move no earlier one across
    the split.
    """
    return (hash_of(SPLIT, recordings) >> np.uint64(11)).astype(np.float64) < share * 2.0**53
