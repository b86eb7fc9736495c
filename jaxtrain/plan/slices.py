"""The slices of TPUs that exist, by Google Cloud's pages of each version (2026).

v5e, v6e            of one host or more, up to 16 × 16 chips
v4, v5p, tpu7x      small ones of half a cube or less, then any sides that are multiples of 4, the
                    shortest first, up to the largest slice of the version
"""

import itertools
import math
from collections.abc import Iterator

PLANE = ((1, 1), (2, 2), (2, 4), (4, 4), (4, 8), (8, 8), (8, 16), (16, 16))
SMALL = ((2, 2, 1), (2, 2, 2), (2, 2, 4), (2, 4, 4))
CUBE = 4  # chips of a side of a cube, of which large slices are made
MAX_CHIPS = {"v4": 4096, "v5p": 6144, "tpu7x": 9216}
ONE_CHIP = ("v5p", "tpu7x")  # are also sold as one chip
Sides = tuple[int, ...]


def existing(chip: str) -> list[Sides]:
    """List the slices of a version, those with the fewest chips first."""
    if chip not in MAX_CHIPS:
        return list(PLANE)
    slices: list[Sides] = [*SMALL, *_cubes(MAX_CHIPS[chip] // CUBE**3)]
    if chip in ONE_CHIP:
        slices.append((1, 1, 1))
    return sorted(slices, key=lambda sides: (math.prod(sides), max(sides)))


def _cubes(count: int) -> Iterator[Sides]:
    """Yield the sides of up to ``count`` cubes."""
    for a in range(1, count + 1):
        if a**3 > count:
            return
        for b in range(a, count // a + 1):
            for c in range(b, count // (a * b) + 1):
                yield CUBE * a, CUBE * b, CUBE * c


def nearest(chip: str, sides: Sides) -> list[Sides]:
    """Return the slices with as many chips as one that does not exist, else those around it."""
    n_chips = math.prod(sides)
    slices = existing(chip)
    same = [each for each in slices if math.prod(each) == n_chips]
    if same:
        return same[:1]
    below = [each for each in slices if math.prod(each) < n_chips]
    above = itertools.islice((each for each in slices if math.prod(each) > n_chips), 1)
    return [*below[-1:], *above]


def name(chip: str, sides: Sides) -> str:
    return f"tpu:{chip}:{'x'.join(map(str, sides))}"
