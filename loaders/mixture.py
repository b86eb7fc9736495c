"""The mixture of sources: which source a sample comes from, and which of its samples.

The sample's number alone decides. Samples are numbered over the whole run: row r of global batch p
is sample s = p × batch + r, so neither the batch nor the world size changes sample s. They are
dealt in blocks of `BLOCK`. Every block holds each source's share of it, rounded to whole samples,
in an order that a permutation of (seed, block) shuffles. So after every block the realised shares
are the wanted ones within 1 / `BLOCK`, and every source hands out its samples 0, 1, 2, … in order,
each once. A source that has been read once begins its next pass, in another permutation.
"""

from collections.abc import Sequence

import numpy as np

from loaders import _rust, order
from loaders.base import DataError

BLOCK = 1 << 16
VERSION = 1  # changes whenever the same (seed, sample) would come from another source
MIX = 48  # domain of the hash: two uses of the same numbers draw independently


class Mixture:
    """Deals samples to sources, whose ``shares`` are float64 [sources], of sum 1."""

    def __init__(self, shares: Sequence[float], *, seed: int):
        """Raise DataError for shares that are not positive numbers."""
        weights = np.asarray(shares, np.float64)
        if not weights.size or not np.isfinite(weights).all() or (weights <= 0).any():
            raise DataError(f"the sources' shares are {weights.tolist()}; each must be a positive number")
        self.shares = weights / weights.sum()
        self._seed, self._quota = int(order.hash_of(MIX, seed)[0]), quotas(self.shares)
        self._block: tuple[int, np.ndarray, np.ndarray] | None = None

    def __call__(self, sample: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return samples int64 [k] -> their sources, and their numbers within these, int64 [k]."""
        sample = np.asarray(sample, np.int64)
        if len(self.shares) == 1:
            return np.zeros_like(sample), sample
        block, inside = np.divmod(sample, BLOCK)
        source, number = np.empty_like(sample), np.empty_like(sample)
        for b in np.unique(block):
            at = np.flatnonzero(block == b)
            sources, rank = self._shuffled(int(b))
            source[at] = sources[inside[at]]
            number[at] = rank[inside[at]] + b * self._quota[source[at]]
        return source, number

    def _shuffled(self, b: int) -> tuple[np.ndarray, np.ndarray]:
        """Return for each place of a block, the last of which is kept, source and rank in it."""
        block = self._block  # read once: another thread may replace it
        if block is None or block[0] != b:
            places = _rust.permutation(self._seed, b, BLOCK, np.arange(BLOCK))
            source = np.searchsorted(np.cumsum(self._quota), places, "right")
            rank = np.empty(BLOCK, np.int64)
            for k in range(len(self.shares)):
                of_k = source == k
                rank[of_k] = np.arange(np.count_nonzero(of_k))
            self._block = block = (b, source, rank)
        return block[1:]


def quotas(shares: np.ndarray) -> np.ndarray:
    """Return each source's samples in a block, int64 of sum BLOCK, at least one of a share."""
    exact = shares / shares.sum() * BLOCK
    quota = np.maximum(np.floor(exact).astype(np.int64), shares > 0)
    while (missing := BLOCK - int(quota.sum())) != 0:
        step = 1 if missing > 0 else -1
        candidates = np.flatnonzero((shares > 0) & ((quota > 1) | (step > 0)))
        first = np.argsort(step * (quota - exact)[candidates], kind="stable")
        quota[candidates[first[: abs(missing)]]] += step
    return quota
