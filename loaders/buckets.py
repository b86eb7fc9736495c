"""Buckets: the few shapes that batches of examples of many lengths have.

They are chosen for the least padding.
"""

from typing import NamedTuple

import numpy as np

ROUND = 8  # numbers of places and labels are multiples of it
CUTS = 256  # lengths at which a bucket may end


class Shape(NamedTuple):
    """The sizes of a row, by their names part of `loaders.chat.chat_audio`'s fingerprint."""

    text: int  # S
    audio: int  # A
    text_labels: int  # N
    audio_labels: int  # M

    @property
    def places(self) -> int:
        return self.text + self.audio


class Bucket(NamedTuple):
    """The examples whose rows have one shape."""

    shape: Shape
    members: np.ndarray  # int64 [n]: which examples

    def fill(self, sizes: np.ndarray) -> float:
        """Return the share of places that are not padding. ``sizes`` int64 [examples, 4]."""
        n_filled = float(sizes[self.members, :2].sum())
        n_places = self.shape.places * len(self.members)
        return n_filled / max(n_places, 1)


def make_buckets(sizes: np.ndarray, n: int) -> tuple[Bucket, ...]:
    """At most ``n`` buckets, short to long, of examples of ``sizes`` int64 [examples, 4].

    Without examples it is an empty one.
    """
    groups = partition(sizes, n) if len(sizes) else [np.zeros(0, np.int64)]
    buckets = []
    for members in groups:
        largest = sizes[members].max(0, initial=1)
        shape = Shape(*round_up(largest).tolist())
        buckets.append(Bucket(shape, members))
    return tuple(buckets)


def round_up(counts: np.ndarray) -> np.ndarray:
    """Return the next multiple of `ROUND`, at least one."""
    return -(-counts.clip(1) // ROUND) * ROUND


def partition(sizes: np.ndarray, n: int) -> list[np.ndarray]:
    """At most ``n`` groups of examples, short to long, with the least padding.

    ``sizes`` int64 [examples, 4] (`Shape`). Each row is padded to its group's largest text and
    largest sound. Dynamic programming over the examples sorted by places.
    """
    by_length = np.argsort(sizes[:, :2].sum(1), kind="stable")
    n_ends = min(CUTS, len(sizes)) + 1
    cuts = np.unique(np.linspace(0, len(sizes), n_ends).round().astype(int))
    cost = _padded_places(sizes[by_length], cuts)
    edges = [0, *cuts[_cheapest_ends(cost, n)]]
    groups = [by_length[start:stop] for start, stop in zip(edges[:-1], edges[1:], strict=True)]
    return [np.sort(group) for group in groups if len(group)]


def _padded_places(sizes: np.ndarray, cuts: np.ndarray) -> np.ndarray:
    """Return the places, with padding, of a group of examples from cut i to cut j: [cuts, cuts].

    ``sizes`` are in the order of lengths. A group that does not end after it starts costs infinity.
    """
    max_text = np.maximum.reduceat(sizes[:, 0], cuts[:-1])
    max_audio = np.maximum.reduceat(sizes[:, 1], cuts[:-1])
    cost = np.full((len(cuts), len(cuts)), np.inf)
    for i in range(len(cuts) - 1):
        text = round_up(np.maximum.accumulate(max_text[i:]))
        audio = round_up(np.maximum.accumulate(max_audio[i:]))
        n_examples = cuts[i + 1 :] - cuts[i]
        cost[i, i + 1 :] = (text + audio) * n_examples
    return cost


def _cheapest_ends(cost: np.ndarray, n: int) -> list[int]:
    """Return the cuts at which the cheapest groups end, ascending: at most ``n`` groups."""
    last = len(cost) - 1
    best = cost[0].copy()
    last_cut = np.zeros((n, len(cost)), int)
    for k in range(1, n):
        costs = best[:, None] + cost
        cheapest = costs.min(0)
        last_cut[k] = np.where(cheapest < best, costs.argmin(0), -1)  # -1: fewer are as good
        best = np.minimum(best, cheapest)
    ends = {last}
    cut = last
    for k in range(n - 1, 0, -1):
        if last_cut[k][cut] >= 0:
            cut = int(last_cut[k][cut])
            ends.add(cut)
    return sorted(ends - {0})
