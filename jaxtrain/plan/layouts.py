"""The bytes of arrays by their layouts in a program's text, for TPUs padded to whole tiles.

    bf16[256,257,384]{2,0,1:T(8,128)(2,1)S(1)}     dimensions from the innermost, tile, memory space

The two innermost dimensions are multiples of the tile's in memory, here 256 rows and 384 columns.
Later tiles order the numbers inside of the first one. A memory space other than 0 is on the chip or
of the host (1: VMEM), and its arrays take no bytes of the device's memory.
https://openxla.org/xla/tiled_layout
"""

import functools
import math
import re
from typing import NamedTuple

_ARRAY = re.compile(
    r"\b(pred|bf16|[fsuc]\d+(?:e\d+m\d+\w*)?)\[([\d,<=]*)\](?:\{([\d,]*)(?::([^}]*))?\})?"
)


class Array(NamedTuple):
    dtype: str
    dims: tuple[int, ...]
    bits: int  # that it takes, with padding
    is_in_memory: bool  # of the device, not VMEM or the host's

    @property
    def bits_in_memory(self) -> int:
        return self.bits if self.is_in_memory else 0


@functools.lru_cache(maxsize=1 << 16)
def arrays(result: str) -> tuple[Array, ...]:
    """Return the arrays of an instruction's type, of a tuple all of them."""
    return tuple(_array(*match) for match in _ARRAY.findall(result))


def _array(dtype: str, sizes: str, order: str, tiles: str) -> Array:
    dims = _numbers(sizes)
    from_innermost = _numbers(order)
    in_order = list(dims)
    if len(from_innermost) == len(dims):
        in_order = [dims[axis] for axis in reversed(from_innermost)]
    first_tile = re.match(r"T\(([\d,]+)\)", tiles)
    if first_tile:
        in_order = _padded(in_order, _numbers(first_tile[1]))
    width = 8 if dtype == "pred" else _numbers(dtype)[0]
    space = re.search(r"S\((\d+)\)", tiles)
    return Array(dtype, dims, math.prod(in_order) * width, space is None or space[1] == "0")


def _padded(dims: list[int], tile: tuple[int, ...]) -> list[int]:
    """Round the innermost dimensions up to those of a tile, which may have more."""
    dims = [1] * (len(tile) - len(dims)) + dims
    first = len(dims) - len(tile)
    for axis, size in enumerate(tile, start=first):
        dims[axis] = -(-dims[axis] // size) * size
    return dims


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", text))
