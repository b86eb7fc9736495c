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
    hashed = np.zeros(1, np.uint64)
    for part in parts:
        hashed = mix((hashed ^ np.asarray(part, np.uint64)) + GOLDEN)
    return hashed


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
        is_in_epoch = epoch == e
        recording[is_in_epoch] = permute(seed, int(e), n, place[is_in_epoch])
    return epoch, recording


def once(n: int, number: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Draws of a test split of n recordings -> indices of draws < n, and their recordings.

    Both are int64 [m]. The order is always the same and mixed, so that the first batches are a fair
    sample. Past its end there is nothing.
    """
    draws = np.flatnonzero(number < n)
    if not draws.size:
        return draws, draws
    return draws, permutation(0, 0, n, number[draws])


def _permute(key: np.ndarray, n: int, i: np.ndarray) -> np.ndarray:
    rounds = np.arange(1, ROUNDS + 1, dtype=np.uint64)
    keys = mix(key + GOLDEN * rounds)
    a = np.uint64(math.isqrt(n - 1) + 1)
    b = np.uint64(-(-n // int(a)))
    place = np.array(i, np.uint64)
    is_beyond = np.ones(place.shape, bool)
    # a * b exceeds n by less than a: a place that lands there is permuted again
    while is_beyond.any():
        left, right = np.divmod(place[is_beyond], b)
        for turn, round_key in enumerate(keys):
            if turn % 2 == 0:
                left = (left + _below(round_key + right, a)) % a
            else:
                right = (right + _below(round_key + left, b)) % b
        place[is_beyond] = left * b + right
        is_beyond = place >= np.uint64(n)
    return place.astype(np.int64)


def block_stops(rows: np.ndarray, first_rows: np.ndarray, size: int) -> np.ndarray:
    """Return the ends of blocks, int64 [blocks]: runs of at most ``size`` rows of one shard.

    A block ends after the last of its ``rows``. ``rows`` must increase; ``first_rows`` are the
    first rows of the shards.
    """
    shard_ends = [*np.searchsorted(rows, first_rows[1:]), len(rows)]
    stops: list[int] = []
    start = 0
    for shard_end in shard_ends:
        while start < shard_end:
            start = min(start + size, int(shard_end))
            stops.append(start)
    return np.array(stops, np.int64)


def block_order(seed: int, epoch: int, stops: np.ndarray, window: int, i: np.ndarray) -> np.ndarray:
    """Places int64 [k] of an epoch -> recordings int64 [k], a bijection of [0, stops[-1]).

    The blocks are permuted, then the places of each ``window`` consecutive blocks are permuted
    among themselves.
    """
    n_blocks = len(stops)
    sizes = np.diff(stops, prepend=0)
    blocks = _permute(hash_of(BLOCK, seed, epoch), n_blocks, np.arange(n_blocks))
    starts = np.concatenate([[0], np.cumsum(sizes[blocks])])  # of each block in the permuted order
    window_of_place = (np.searchsorted(starts, i, side="right") - 1) // window
    place = np.empty(len(i), np.int64)
    for w in np.unique(window_of_place):
        start = starts[w * window]
        stop = starts[min((w + 1) * window, n_blocks)]
        is_inside = window_of_place == w
        key = hash_of(WINDOW, seed, epoch, int(w))
        place[is_inside] = start + _permute(key, int(stop - start), i[is_inside] - start)
    k = np.searchsorted(starts, place, side="right") - 1
    first_recordings = stops - sizes
    recordings: np.ndarray = first_recordings[blocks[k]] + place - starts[k]
    return recordings


def _below(x: np.ndarray, m: np.uint64) -> np.ndarray:
    """Return a number in [0, m) from a hash of x, for m < 2^32."""
    high_bits = mix(x) >> np.uint64(32)
    return (high_bits * m) >> np.uint64(32)


def crop_start(seed: int, epoch: int, recording: int, n_starts: int, view: int = 0) -> int:
    """Return a training crop's first sample, at the recording's rate, of ``n_starts`` ones."""
    hashed = hash_of(CROP, seed, epoch, recording, view)
    return int(hashed[0]) % n_starts


def held_out(recordings: np.ndarray, share: float) -> np.ndarray:
    """Row numbers int64 [n] -> bool [n]: recordings kept for testing, about ``share``.

    It depends on the row number alone, so recordings added at the end move no earlier one across
    the split.
    """
    bits = hash_of(SPLIT, recordings) >> np.uint64(11)
    return bits.astype(np.float64) < share * 2.0**53
