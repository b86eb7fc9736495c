"""The slices of TPUs that exist, by Google Cloud's pages of each version (2026).

v5e, v6e            of one host or more, up to 16 × 16 chips
v4, v5p, tpu7x      small ones of half a cube or less, then any sides that are multiples of 4, the
                    shortest first, up to the largest slice of the version

libtpu compiles for all of them, and for more: it refuses only sides that its hosts do not divide
(tests/plan/test_slices.py), so that it also has 32 × 32 chips of v5e.
"""

import math
from collections.abc import Iterator

PLANE = ((1, 1), (2, 2), (2, 4), (4, 4), (4, 8), (8, 8), (8, 16), (16, 16))
SMALL = ((2, 2, 1), (2, 2, 2), (2, 2, 4), (2, 4, 4))
CUBE = 4  # chips of a side of a cube, of which large slices are made
MAX_CHIPS = {"v4": 4096, "v5p": 6144, "tpu7x": 9216}
# Parts of a host of four chips, by Compute Engine's machine types.
PARTS = {"v5p": ((1, 1, 1), (2, 1, 1)), "tpu7x": ((1, 1, 1),)}
CHIPS_OF_HOST = 4  # on the side of libtpu, which has hosts of 2 × 2 chips
Sides = tuple[int, ...]


def existing(chip: str) -> list[Sides]:
    """List the slices of a version, those with the fewest chips first."""
    if chip not in MAX_CHIPS:
        return list(PLANE)
    slices: list[Sides] = [*PARTS.get(chip, ()), *SMALL, *_cubes(MAX_CHIPS[chip] // CUBE**3)]
    return sorted(slices, key=lambda sides: (math.prod(sides), sum(sides)))


def _cubes(count: int) -> Iterator[Sides]:
    """Yield the sides of up to ``count`` cubes."""
    for a in range(1, count + 1):
        if a**3 > count:
            return
        for b in range(a, count // a + 1):
            for c in range(b, count // (a * b) + 1):
                yield CUBE * a, CUBE * b, CUBE * c


def of_count(chip: str, n_chips: float) -> Sides | None:
    """Return the slice of so many chips with the most even sides, None if there is none."""
    return next((each for each in existing(chip) if math.prod(each) == n_chips), None)


def host_bounds(sides: Sides) -> Sides | None:
    """Return the sides of a host, as libtpu takes them, for a part of one. None: the usual ones."""
    if math.prod(sides) >= CHIPS_OF_HOST:
        return None
    return (*sides, 1)[:3]


def nearest(chip: str, n_chips: float) -> list[Sides]:
    """Return the slice of so many chips, or else the next smaller one and the next larger one."""
    slices = existing(chip)
    same = [each for each in slices if math.prod(each) == n_chips]
    if same:
        return same[:1]
    counts = sorted({math.prod(each) for each in slices})
    below = [count for count in counts if count < n_chips][-1:]
    above = [count for count in counts if count > n_chips][:1]
    # of as many chips the first one has the most even sides
    return [next(each for each in slices if math.prod(each) == n) for n in (*below, *above)]


def name(chip: str, sides: Sides) -> str:
    return f"tpu:{chip}:{'x'.join(map(str, sides))}"
