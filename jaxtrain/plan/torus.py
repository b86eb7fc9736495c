"""The links of a slice of TPUs that an exchange between places of a mesh takes.

The chips of a slice have coordinates along its sides, and JAX gives them to the places of a mesh. A
side is a row of links, or a ring of them if it is closed. Along each side, the members of a group
can send

    both ways      if they are a whole ring
    one way        if they are a part of it, or a row
    a share of it  if others are between them, which have links of their own to share

Gathers, scatters and sums send along all sides of their group at once. An all-to-all is bound by
the links at the middle of its longest side: half of all values cross it. Permutes go along one side
after the other, the short way, or both ways if these are equal. The link with the most of them has
the longest time. Which side is first is the compiler's, so the best order counts.
"""

import collections
import dataclasses
import functools
import itertools
from collections.abc import Iterator, Sequence

import numpy as np

from jaxtrain.parallel import layout
from jaxtrain.plan.target import Target

Place = tuple[int, ...]  # the coordinates of a chip
Way = tuple[int, int]  # a side, and 1 or -1 along it


@dataclasses.dataclass(frozen=True)  # NumPy would take a tuple for an array
class _Chip:
    """The attributes by which JAX gives a device its place in a mesh."""

    coords: Place
    core_on_chip: int
    device_kind: str
    platform: str = "tpu"


class Torus:
    """One slice. Places are numbered as in the mesh: those of the last axis first."""

    def __init__(self, places: Sequence[Place], sides: Sequence[int], closed: Sequence[bool]):
        self.places, self._sides, self._closed = places, sides, closed
        self.routed = functools.lru_cache(maxsize=1024)(self._routed)

    def ways(self, group: Sequence[int]) -> set[Way]:
        """Return the links that a group takes, of any exchange but a permute."""
        return {(side, step) for side, _, _ in self._along(group) for step in (1, -1)}

    def links(self, group: Sequence[int]) -> float:
        """Return how many links a member of a group sends over at once, 0 = it has one chip."""
        return sum(n_links for _, _, n_links in self._along(group))

    def crossing(self, group: Sequence[int]) -> float:
        """Return the times that a link takes for all values of a member, in an all-to-all."""
        return max((n / (4 * n_links) for _, n, n_links in self._along(group)), default=0.0)

    def _along(self, group: Sequence[int]) -> Iterator[tuple[int, int, float]]:
        """Yield the sides of a group, its chips along each, and the links of each in one way."""
        places = np.array([self.places[place] for place in group])
        for side, length in enumerate(self._sides):
            along = np.unique(places[:, side])
            if len(along) > 1:
                gaps = [*np.diff(along).tolist()]
                if self._closed[side]:
                    gaps.append(int(length - along[-1] + along[0]))
                apart = min(gaps)
                is_ring = self._closed[side] and len(along) * apart == length
                yield side, len(along), (2 if is_ring else 1) / apart

    def _routed(self, pairs: tuple[tuple[int, int], ...]) -> tuple[float, frozenset[Way]]:
        """Return the most values that one link passes on in a permute, and the ways it takes."""
        best: tuple[float, frozenset[Way]] = (np.inf, frozenset())
        for order in itertools.permutations(range(len(self._sides))):
            loads: dict[tuple[Place, Way], float] = collections.defaultdict(float)
            for source, target in pairs:
                for link, load in self._route(self.places[source], self.places[target], order):
                    loads[link] += load
            found = max(loads.values(), default=0.0), frozenset(way for _, way in loads)
            best = min(best, found, key=lambda each: each[0])
        return best

    def _route(
        self, place: Place, target: Place, order: Sequence[int]
    ) -> Iterator[tuple[tuple[Place, Way], float]]:
        """Yield the links between two chips, each with the share of a value that it passes on."""
        for side in order:
            length, distance = self._sides[side], target[side] - place[side]
            ways = [(1 if distance > 0 else -1, abs(distance), 1.0)]
            if self._closed[side] and distance:
                forwards = distance % length
                ways = [(1, forwards, 1.0), (-1, length - forwards, 1.0)]
                if 2 * forwards == length:
                    ways = [(step, hops, 0.5) for step, hops, _ in ways]
                else:
                    ways = [min(ways, key=lambda way: way[1])]
            for step, hops, share in ways:
                for i in range(hops):
                    at = (place[side] + step * i) % length
                    yield ((*place[:side], at, *place[side + 1 :]), (side, step)), share
            place = (*place[:side], target[side], *place[side + 1 :])


@functools.lru_cache(maxsize=256)
def torus_of(target: Target, mesh: tuple[int, int, int]) -> Torus | None:
    """Return a slice of a target with the places of a (data, fsdp, model) mesh.

    None for other devices, and for a mesh that JAX does not place on such slices.
    """
    sides = target.sides
    if not sides or mesh[0] % target.slices:
        return None
    chip = target.known_chip
    chips = [
        _Chip((*place, 0, 0)[:3], core, chip.kind)
        for *reversed_place, core in np.ndindex(*reversed(sides), chip.devices)
        for place in [tuple(reversed(reversed_place))]
    ]
    try:
        arranged = layout.arranged((mesh[0] // target.slices, *mesh[1:]), chips)
    except NotImplementedError:
        return None
    places = [chip.coords[: len(sides)] for chip in arranged.flat]
    return Torus(places, sides, [target.is_closed(n) for n in sides])
