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
        return float(sizes[self.members, :2].sum()) / max(self.shape.places * len(self.members), 1)


def make_buckets(sizes: np.ndarray, n: int) -> tuple[Bucket, ...]:
    """At most ``n`` buckets, short to long, of examples of ``sizes`` int64 [examples, 4].

    Without examples it is an empty one.
    """
    groups = partition(sizes, n) if len(sizes) else [np.zeros(0, np.int64)]
    return tuple(
        Bucket(Shape(*(int(x) for x in rounded(sizes[g].max(0, initial=1)))), g) for g in groups
    )


def rounded(x: np.ndarray) -> np.ndarray:
    """Return the next multiple of `ROUND`, at least one."""
    return -(-x.clip(1) // ROUND) * ROUND


def partition(sizes: np.ndarray, n: int) -> list[np.ndarray]:
    """At most ``n`` groups of examples, short to long, with the least padding.

    ``sizes`` int64 [examples, 4] (`Shape`). Each row is padded to its group's largest text and
    largest sound. Dynamic programming over the examples sorted by places.
    """
    by_length = np.argsort(sizes[:, :2].sum(1), kind="stable")
    text, audio = sizes[by_length, 0], sizes[by_length, 1]
    cuts = np.unique(np.linspace(0, len(sizes), min(CUTS, len(sizes)) + 1).round().astype(int))
    most = [np.maximum.reduceat(x, cuts[:-1]) for x in (text, audio)]
    m = len(cuts) - 1
    cost = np.full((m + 1, m + 1), np.inf)  # of a group from cut i to cut j
    for i in range(m):
        places = sum(rounded(np.maximum.accumulate(x[i:])) for x in most)
        cost[i, i + 1 :] = places * (cuts[i + 1 :] - cuts[i])
    best, last_cut = cost[0].copy(), np.zeros((n, m + 1), int)
    for k in range(1, n):
        costs = best[:, None] + cost
        better = costs.min(0)
        last_cut[k] = np.where(better < best, costs.argmin(0), -1)  # -1: fewer groups are as good
        best = np.minimum(best, better)
    ends, j = [m], m
    for k in range(n - 1, 0, -1):
        if last_cut[k][j] >= 0:
            j = int(last_cut[k][j])
            ends.append(j)
    edges = [0, *cuts[sorted(set(ends) - {0})]]
    return [np.sort(by_length[a:b]) for a, b in zip(edges[:-1], edges[1:], strict=True) if b > a]
