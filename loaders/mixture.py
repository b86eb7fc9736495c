"""The mixture of sources: which source an example comes from, and which of its examples.

The example's number alone decides.

Examples are numbered over the whole run: row r of global batch p is example s = p × batch + r, so
neither the batch nor the world size changes example s. They are dealt in blocks of `BLOCK`. Every
block holds each source's share of it, rounded to whole examples, in an order that a permutation of
(seed, block) shuffles. So after every block the realised shares are the wanted ones within 1 /
`BLOCK`, and every source hands out its examples 0, 1, 2, … in order, each once.

When a source has no more examples in its pass, one of `POLICIES` applies:

    repeat  it begins its next pass, in another permutation
    stop    it gives no more, and the others share its part from that example on
    error   DataError, with the source and the step
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from loaders import _rust, order
from loaders.base import DataError

BLOCK = 1 << 16
POLICIES = ("repeat", "stop", "error")
VERSION = 1  # changes whenever the same (seed, example) would come from another source
MIX = 48  # domain of the hash: two uses of the same numbers draw independently


class Phase(NamedTuple):
    """A part of the run from an example on, whose blocks hold ``quota[k]`` examples of source k."""

    start: int
    n_dealt: np.ndarray  # int64 [sources] examples that each source has given before it
    quota: np.ndarray  # int64 [sources], of sum BLOCK


class ShuffledBlock(NamedTuple):
    """The sources of a block's places."""

    key: int  # of `phase_key`
    source: np.ndarray  # int64 [BLOCK]
    rank: np.ndarray  # int64 [BLOCK] of the place among those of its source

    def places_until(self, source: int, n: int) -> int:
        """Return how many places hold the first ``n`` examples of a source."""
        if n == 0:
            return 0
        last = np.flatnonzero((self.source == source) & (self.rank == n - 1))[0]
        return int(last) + 1


class Mixture:
    """Deals examples to sources.

    Attributes:
      shares: float64 [sources], of sum 1.
      ends: with "stop", the first example that no source has; None if there is no end.
    """

    def __init__(
        self,
        shares: Sequence[float],
        *,
        seed: int,
        policy: str = "repeat",
        sizes: Sequence[int] | None = None,
    ):
        """``sizes``: examples in one pass of each source, needed unless the policy is "repeat".

        Raises DataError for shares that are not positive numbers.
        """
        weights = np.asarray(shares, np.float64)
        if not weights.size or not np.isfinite(weights).all() or (weights <= 0).any():
            raise DataError(
                f"the sources' shares are {weights.tolist()}; each must be a positive number"
            )
        self.shares = weights / weights.sum()
        self._seed = int(order.hash_of(MIX, seed)[0])
        self._policy = policy
        if sizes is None:
            sizes = [0] * len(shares)
        self._sizes = np.asarray(sizes, np.int64)
        self._last_block: ShuffledBlock | None = None
        self._phases = [Phase(0, np.zeros(len(weights), np.int64), quotas(self.shares))]
        self.ends: int | None = None
        while policy == "stop" and self.ends is None:
            self._end_phase()

    def __call__(self, example: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return examples int64 [k] -> their sources, and their numbers within these, int64 [k].

        Raises DataError past the end of a source with "error", and past the end of all with "stop".
        """
        example = np.asarray(example, np.int64)
        if self.ends is not None and example.size and example.max() >= self.ends:
            raise DataError(
                f"all sources are exhausted after {self.ends} examples, but example {example.max()}"
                " is needed; make the run shorter, or set exhausted='repeat'"
            )
        source = np.zeros_like(example)
        number = np.zeros_like(example)
        starts = [phase.start for phase in self._phases]
        phase = np.searchsorted(starts, example, side="right") - 1
        for p in np.unique(phase):
            at = np.flatnonzero(phase == p)
            source[at], number[at] = self._deal(int(p), example[at] - starts[p])
        if self._policy == "error":
            self._refuse_exhausted(example, source, number)
        return source, number

    def _refuse_exhausted(
        self, example: np.ndarray, source: np.ndarray, number: np.ndarray
    ) -> None:
        beyond_end = np.flatnonzero(number >= self._sizes[source])
        if not beyond_end.size:
            return
        first = beyond_end[0]
        k = int(source[first])
        raise DataError(
            f"source {k} has {self._sizes[k]} examples in a pass and is exhausted at example"
            f" {example[first]} of all; lower its share, make the run shorter, or set"
            " exhausted='repeat' or 'stop'"
        )

    def _deal(self, p: int, place: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the sources and numbers of places counted from the start of phase ``p``."""
        phase = self._phases[p]
        if np.count_nonzero(phase.quota) == 1:
            only = int(np.argmax(phase.quota))
            return np.full_like(place, only), phase.n_dealt[only] + place
        block, inside = np.divmod(place, BLOCK)
        source = np.empty_like(place)
        number = np.empty_like(place)
        for b in np.unique(block):
            at = np.flatnonzero(block == b)
            shuffled = self._shuffle(p, int(b))
            source[at] = shuffled.source[inside[at]]
            n_before_block = phase.n_dealt + b * phase.quota
            number[at] = shuffled.rank[inside[at]] + n_before_block[source[at]]
        return source, number

    def _shuffle(self, p: int, b: int) -> "ShuffledBlock":
        """Return block ``b`` of phase ``p``, the last of which is remembered."""
        key = phase_key(p, b)
        block = self._last_block  # read once: another thread may replace it
        if block is not None and block.key == key:
            return block
        quota = self._phases[p].quota
        places = _rust.permutation(self._seed, key, BLOCK, np.arange(BLOCK))
        source = np.searchsorted(np.cumsum(quota), places, "right")
        rank = np.empty(BLOCK, np.int64)
        for k in np.flatnonzero(quota):
            is_of_source = source == k
            rank[is_of_source] = np.arange(np.count_nonzero(is_of_source))
        self._last_block = block = ShuffledBlock(key, source, rank)
        return block

    def _end_phase(self) -> None:
        """End the last phase at the end of its first exhausted source, and begin the next one."""
        phase = self._phases[-1]
        active = np.flatnonzero(phase.quota)
        n_left = self._sizes - phase.n_dealt
        n_blocks = int((n_left[active] // phase.quota[active]).min())
        n_left_in_block = n_left - n_blocks * phase.quota
        if len(active) == 1:
            length = n_blocks * BLOCK + int(n_left_in_block[active[0]])
            n_dealt = phase.n_dealt + np.where(phase.quota > 0, n_left, 0)
        else:
            block = self._shuffle(len(self._phases) - 1, n_blocks)
            exhausted = [int(k) for k in active if n_left_in_block[k] <= phase.quota[k]]
            n_places = min(block.places_until(k, n_left_in_block[k]) for k in exhausted)
            length = n_blocks * BLOCK + n_places
            of_block = np.bincount(block.source[:n_places], minlength=len(self.shares))
            n_dealt = phase.n_dealt + n_blocks * phase.quota + of_block
        has_more = n_dealt < self._sizes
        if not has_more.any():
            self.ends = phase.start + length
            return
        quota = quotas(np.where(has_more, self.shares, 0))
        self._phases.append(Phase(phase.start + length, n_dealt, quota))


def phase_key(p: int, b: int) -> int:
    """Return the number of block ``b`` of phase ``p`` that its permutation is drawn by."""
    return (p << 48) + b


def quotas(shares: np.ndarray) -> np.ndarray:
    """Return each source's examples in a block, int64 of sum BLOCK, at least one of a share."""
    exact = shares / shares.sum() * BLOCK
    quota: np.ndarray = np.maximum(np.floor(exact).astype(np.int64), shares > 0)
    while (n_missing := BLOCK - int(quota.sum())) != 0:
        step = 1 if n_missing > 0 else -1
        can_change = (shares > 0) & ((quota > 1) | (step > 0))
        candidates = np.flatnonzero(can_change)
        excess = (quota - exact)[candidates]
        by_excess = candidates[np.argsort(step * excess, kind="stable")]
        quota[by_excess[: abs(n_missing)]] += step
    return quota
