"""The parts of a state's arrays that one process holds, and the same state from parts of others."""

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxtrain import specs
from jaxtrain.types import PyTree

ALIGNMENT = 64  # [bytes]
Index = tuple[tuple[int, int], ...]  # start and stop of each dimension


class Part(NamedTuple):
    """A part of an array that a process holds."""

    path: str
    bounds: Index
    shape: tuple[int, ...]
    dtype: str
    offset: int  # in the bytes of all parts
    size: int  # [bytes]

    @classmethod
    def of(cls, fields: Sequence[Any]) -> "Part":
        """Return a part that was read from JSON."""
        path, bounds, shape, *last = fields
        return cls(path, tuple((start, stop) for start, stop in bounds), tuple(shape), *last)

    def view(self, content: np.ndarray) -> np.ndarray:
        """Return this part of the bytes of all, as an array."""
        data = content[self.offset : self.offset + self.size]
        return data.view(jnp.dtype(self.dtype)).reshape(self.shape)


class Filling:
    """The parts of this process, which are filled from parts of other processes."""

    def __init__(self, parts: Sequence[Part]):
        self._parts = parts
        self._filled: list[set[Index]] = [set() for _ in parts]
        end = parts[-1]
        self.content = np.zeros(end.offset + end.size, np.uint8)

    def take(self, data: np.ndarray, parts: Sequence[Part]) -> None:
        """Copy everything that ``data``, the bytes of ``parts``, has of this process's parts."""
        by_path: dict[str, list[Part]] = {}
        for part in parts:
            by_path.setdefault(part.path, []).append(part)
        for target, filled in zip(self._parts, self._filled, strict=True):
            for source in by_path.get(target.path, ()):
                bounds = _overlap(target.bounds, source.bounds)
                if _count(bounds) and source.dtype == target.dtype:
                    values = source.view(data)[_within(bounds, source.bounds)]
                    target.view(self.content)[_within(bounds, target.bounds)] = values
                    filled.add(bounds)

    @property
    def is_whole(self) -> bool:
        """Whether all parts are filled, by parts of one layout: they do not overlap."""
        for part, filled in zip(self._parts, self._filled, strict=True):
            if sum(map(_count, filled)) != _count(part.bounds):
                return False
        return True


def _overlap(first: Index, second: Index) -> Index:
    bounds = []
    for (start, stop), (other_start, other_stop) in zip(first, second, strict=True):
        low = max(start, other_start)
        bounds.append((low, max(low, min(stop, other_stop))))
    return tuple(bounds)


def _within(bounds: Index, outer: Index) -> tuple[slice, ...]:
    pairs = zip(bounds, outer, strict=True)
    return tuple(slice(start - low, stop - low) for (start, stop), (low, _) in pairs)


def _count(bounds: Index) -> int:
    return math.prod(stop - start for start, stop in bounds)


def of(tree: PyTree) -> Iterator[Part]:
    """Yield the parts of abstract arrays that this process's devices hold, each once."""
    offset = 0
    for path, x in zip(specs.paths(tree), jax.tree.leaves(tree), strict=True):
        indices = x.sharding.addressable_devices_indices_map(x.shape).values()
        for index in sorted({_as_numbers(index, x.shape) for index in indices}):
            shape = tuple(stop - start for start, stop in index)
            size = int(np.prod(shape, dtype=np.int64)) * x.dtype.itemsize
            yield Part(path, index, shape, jnp.dtype(x.dtype).name, offset, size)
            offset += -(-size // ALIGNMENT) * ALIGNMENT


def data_of(tree: PyTree) -> Iterator[np.ndarray]:
    """Yield the data of the parts in the order of `of`. All copies begin at once."""
    shards = []
    for x in jax.tree.leaves(tree):
        by_index = {}
        for shard in x.addressable_shards:
            by_index[_as_numbers(shard.index, x.shape)] = shard.data
        shards += [by_index[index] for index in sorted(by_index)]
    for data in shards:
        data.copy_to_host_async()
    for data in shards:
        yield np.asarray(data)


def arrays(abstract: PyTree, content: np.ndarray) -> PyTree:
    """Return the arrays, on their devices, from the bytes of this process's parts."""
    by_place = {}
    for part in of(abstract):
        by_place[part.path, part.bounds] = part.view(content).copy()
    leaves = []
    for path, x in zip(specs.paths(abstract), jax.tree.leaves(abstract), strict=True):
        pieces = _Pieces(path, x.shape, by_place)
        leaves.append(jax.make_array_from_callback(x.shape, x.sharding, pieces))
    return jax.tree.unflatten(jax.tree.structure(abstract), leaves)


class _Pieces:
    """The parts of one array that are here, by their place."""

    def __init__(
        self, path: str, shape: tuple[int, ...], by_place: dict[tuple[str, Index], np.ndarray]
    ):
        self._path = path
        self._shape = shape
        self._by_place = by_place

    def __call__(self, index: tuple[slice, ...] | None) -> np.ndarray:
        assert index is not None
        return self._by_place[self._path, _as_numbers(index, self._shape)]


def _as_numbers(index: tuple[slice, ...], shape: Sequence[int]) -> Index:
    bounds = [part.indices(size) for part, size in zip(index, shape, strict=True)]
    return tuple((start, stop) for start, stop, _ in bounds)
