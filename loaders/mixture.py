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
    given: np.ndarray  # int64 [sources] examples that each source has given before
    quota: np.ndarray  # int64 [sources], of sum BLOCK


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
        self._seed, self._policy = int(order.hash_of(MIX, seed)[0]), policy
        self._sizes = np.asarray([0] * len(shares) if sizes is None else sizes, np.int64)
        self._block: tuple[int, np.ndarray, np.ndarray] | None = None
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
        source, number = np.zeros_like(example), np.zeros_like(example)
        starts = [phase.start for phase in self._phases]
        phase = np.searchsorted(starts, example, side="right") - 1
        for p in np.unique(phase):
            at = np.flatnonzero(phase == p)
            source[at], number[at] = self._deal(int(p), example[at] - starts[p])
        if self._policy == "error" and (over := np.flatnonzero(number >= self._sizes[source])).size:
            k = int(source[over[0]])
            raise DataError(
                f"source {k} has {self._sizes[k]} examples in a pass and is exhausted at example"
                f" {example[over[0]]} of all; lower its share, make the run shorter, or set"
                " exhausted='repeat' or 'stop'"
            )
        return source, number

    def _deal(self, p: int, place: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the sources and numbers of places counted from the start of phase ``p``."""
        phase = self._phases[p]
        if np.count_nonzero(phase.quota) == 1:
            only = int(np.argmax(phase.quota))
            return np.full_like(place, only), phase.given[only] + place
        block, inside = np.divmod(place, BLOCK)
        source, number = np.empty_like(place), np.empty_like(place)
        for b in np.unique(block):
            at = np.flatnonzero(block == b)
            sources, rank = self._shuffled(p, int(b))
            source[at] = sources[inside[at]]
            number[at] = rank[inside[at]] + phase.given[source[at]] + b * phase.quota[source[at]]
        return source, number

    def _shuffled(self, p: int, b: int) -> tuple[np.ndarray, np.ndarray]:
        """Return for each place of a block, the last of which is kept, source and rank in it."""
        phase, key = self._phases[p], phase_key(p, b)
        block = self._block  # read once: another thread may replace it
        if block is None or block[0] != key:
            places = _rust.permutation(self._seed, key, BLOCK, np.arange(BLOCK))
            source = np.searchsorted(np.cumsum(phase.quota), places, "right")
            rank = np.empty(BLOCK, np.int64)
            for k in np.flatnonzero(phase.quota):
                of_k = source == k
                rank[of_k] = np.arange(np.count_nonzero(of_k))
            self._block = block = (key, source, rank)
        return block[1:]

    def _end_phase(self) -> None:
        """End the last phase at the end of its first exhausted source, and begin the next one."""
        p, phase = len(self._phases) - 1, self._phases[-1]
        active = np.flatnonzero(phase.quota)
        left = self._sizes - phase.given
        whole = int((left[active] // phase.quota[active]).min())
        left = left - whole * phase.quota
        if len(active) == 1:
            length = whole * BLOCK + int(left[active[0]])
            given = phase.given + np.where(phase.quota > 0, self._sizes - phase.given, 0)
        else:
            source, rank = self._shuffled(p, whole)
            dry = [k for k in active if left[k] <= phase.quota[k]]
            inside = min(
                int(np.flatnonzero((source == k) & (rank == left[k] - 1))[0]) + 1 if left[k] else 0
                for k in dry
            )
            length = whole * BLOCK + inside
            given = (
                phase.given
                + whole * phase.quota
                + np.bincount(source[:inside], minlength=len(self.shares))
            )
        alive = given < self._sizes
        if not alive.any():
            self.ends = phase.start + length
            return
        self._phases.append(
            Phase(phase.start + length, given, quotas(np.where(alive, self.shares, 0)))
        )


def phase_key(p: int, b: int) -> int:
    """Return the number of block ``b`` of phase ``p`` that its permutation is drawn by."""
    return (p << 48) + b


def quotas(shares: np.ndarray) -> np.ndarray:
    """Return each source's examples in a block, int64 of sum BLOCK, at least one of a share."""
    exact = shares / shares.sum() * BLOCK
    quota: np.ndarray = np.maximum(np.floor(exact).astype(np.int64), shares > 0)
    while (missing := BLOCK - int(quota.sum())) != 0:
        step = 1 if missing > 0 else -1
        candidates = np.flatnonzero((shares > 0) & ((quota > 1) | (step > 0)))
        first = np.argsort(step * (quota - exact)[candidates], kind="stable")
        quota[candidates[first[: abs(missing)]]] += step
    return quota
