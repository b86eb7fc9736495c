"""Arrays on disk, read without the program, the mesh or the devices that wrote them.

Both formats are read as path -> `Stored`, no more than is needed:

- a step directory of `jaxtrain.checkpoint` (any Orbax directory of arrays), by
  `jaxtrain.arrays.orbax_steps`: ``params/encoder/w_patch``, ``opt_state/0/count``;
- a folder of safetensors, by `jaxtrain.arrays.safetensors_reader`.

A path that ends in ``[i]`` is entry i of an array that is stacked along a first axis (`stack`).
"""

import contextlib
import functools
import math
import os
import pathlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple, TypeGuard

import numpy as np
import tensorstore as ts
from etils import epath

from jaxtrain.config import consistency
from jaxtrain.types import EXPORT_FILE
from loaders.io import files, machine
from loaders.io.checks import UserError

EXPORT = EXPORT_FILE
# of a step and of an export, in their metadata. It is raised if a reader of the old one would go
# wrong
FORMAT = 2
MODEL_STATE = "model_state/"  # prefix of the paths of model state, in a step and in an export
PATIENCE = 60.0  # [s] for one answer of a store
MAX_DIMENSIONS = 32  # of an array
Index = tuple[slice, ...]  # one slice per dimension; () = everything


class StoredError(UserError, ValueError):
    """Something that does not exist, or is in neither of the formats."""


class Stored(NamedTuple):
    shape: tuple[int, ...]
    dtype: np.dtype
    read: Callable[[Index], np.ndarray]
    keys: tuple[str | int, ...]  # its path in the tree, with numbers as indices into lists
    chunk: tuple[int, ...]  # shape of the part that is read and decoded together
    sharding: str = ""  # as saved, for people to read

    @property
    def n_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def pieces(self, limit: int = 64 << 20) -> Iterator[Index]:
        """Yield slices along the first axis, of whole chunks and about ``limit`` bytes each."""
        if self.n_bytes <= limit or not self.shape:
            yield ()
            return
        n_rows = self.shape[0]
        rows = max(1, limit * n_rows // self.n_bytes)
        rows = -(-rows // self.chunk[0]) * self.chunk[0]
        for start in range(0, n_rows, rows):
            first = slice(start, min(start + rows, n_rows))
            yield (first, *everything(self.shape[1:]))


def everything(shape: Iterable[int]) -> Index:
    """Return the slices that select a whole array."""
    return tuple(slice(0, n) for n in shape)


def check_format(meta: Mapping[str, Any], place: Any) -> None:
    """Raise StoredError if metadata at ``place`` are of another format than this version reads."""
    number = meta.get("format")
    if meta.get("config") and number != FORMAT:
        older = "from before formats had numbers" if number is None else f"of format {number!r:.20}"
        raise StoredError(
            f"{place} is {older}, and this version reads format {FORMAT}; read it with the version"
            " that wrote it"
        )


def read_object(folder: epath.Path, name: str) -> dict[str, Any]:
    """Return the object of a regular JSON file in ``folder``. Raises StoredError."""
    with file_errors():
        return files.read_json(inside(folder, name))


def inside(folder: epath.Path, name: Any) -> epath.Path:
    """Return the path of a file that another one names in a folder. Raises StoredError outside."""
    if "://" in os.fspath(folder):  # an object store has no links
        if not isinstance(name, str) or name.startswith("/") or ".." in name.split("/"):
            raise StoredError(
                f"{folder} has a file that names {str(name)[:80]!r}, which leads out of it"
            )
        return folder / name
    with file_errors():
        return files.checked_as(files.inside(pathlib.Path(folder), name), epath.Path)


@contextlib.contextmanager
def file_errors() -> Iterator[None]:
    """Raise a FileError as a StoredError."""
    try:
        yield
    except files.FileError as error:
        raise StoredError(str(error)) from error


def place_of(path: epath.PathLike) -> epath.Path:
    """Return a path of a file system or a store. Raises StoredError: the store is out of reach."""
    address = os.fspath(path)
    problem = consistency.unreachable(address)
    if problem:
        raise StoredError(f"{path} {problem}")
    if "://" in address:
        _ask(address.rstrip("/") + "/")
        return epath.Path(path)
    return epath.Path(files.expanded(path))


@functools.cache
def _ask(url: str) -> None:
    """Raise StoredError unless a store answers, without the long attempts of `epath`."""
    try:
        store = ts.KvStore.open(url).result(timeout=PATIENCE)
        store.read("state").result(timeout=PATIENCE)
    except (OSError, ValueError, TimeoutError) as error:
        reason = str(error) or f"no answer within {PATIENCE:g} s"
        raise StoredError(
            f"{url} cannot be read: {reason}; check the address, the network and your access to it"
        ) from error


def is_address(path: str) -> bool:
    """Whether a path is a store's or on the web, also etils.epath's /gs/bucket."""
    return "://" in path or "://" in os.fspath(absolute(path))


def absolute(path: epath.PathLike) -> epath.Path:
    """Make a path absolute: Orbax and tensorstore ignore the working directory."""
    expanded = os.path.expanduser(os.fspath(path))
    return epath.Path(expanded if "://" in expanded else os.path.abspath(expanded))


def check_name(name: str, source: epath.Path) -> None:
    """Raise StoredError for an array's name that could pass for other lines of a report."""
    if not name.isprintable():
        raise StoredError(
            f"{source} has an array with the name {name[:80]!r}; expected printable characters"
        )


def check_memory(array: str, n_bytes: int) -> None:
    """Raise StoredError if a read does not fit in memory: zeros take no space in a file."""
    memory = machine.most_memory()
    if n_bytes > memory:
        raise StoredError(
            f"{array}: to read it takes {n_bytes:,} bytes, and this machine has {memory:,}"
        )


def is_shape(value: Any) -> TypeGuard[list[int]]:
    """Whether a value of a file is a list of sizes."""
    if not isinstance(value, list) or len(value) > MAX_DIMENSIONS:
        return False
    return all(isinstance(n, int) and not isinstance(n, bool) and 0 <= n < 2**63 for n in value)


def stack(arrays: Mapping[str, Stored]) -> dict[str, Stored]:
    """Stack ``x[0]`` … ``x[n-1]`` to ``x`` [n, …]. Raises StoredError: a gap, unlike entries."""
    stacked: dict[str, Stored] = {}
    entries_of: dict[str, dict[int, Stored]] = {}
    for path, array in arrays.items():
        entry = re.fullmatch(r"(.*)\[(0|[1-9][0-9]{0,8})\]", path)
        if entry:
            entries_of.setdefault(entry[1], {})[int(entry[2])] = array
        else:
            stacked[path] = array
    for path, entries in entries_of.items():
        kinds = {(entry.shape, entry.dtype) for entry in entries.values()}
        is_complete = sorted(entries) == list(range(len(entries)))
        if not is_complete or len(kinds) != 1 or path in stacked:
            raise StoredError(
                f"{path}[…] cannot be stacked: entries {str(sorted(entries))[:200]} of"
                f" {str(sorted(map(str, kinds)))[:200]}"
                f"{', next to an array of that name' if path in stacked else ''}"
            )
        ((shape, dtype),) = kinds
        read = functools.partial(_read_stack, [entries[i] for i in range(len(entries))])
        keys = tuple(path.split("/"))
        stacked[path] = Stored((len(entries), *shape), dtype, read, keys, chunk=(1, *shape))
    return stacked


def _read_stack(entries: list[Stored], index: Index) -> np.ndarray:
    selected = entries[index[0]] if index else entries
    return np.stack([entry.read(index[1:]) for entry in selected])


def fold(array: Stored, shape: tuple[int, ...]) -> Stored:
    """Reshape an array without reading it. Raises StoredError if the sizes differ.

    If a dimension is split, only the needed rows are read. If several are joined, all is.
    """
    if math.prod(array.shape) != math.prod(shape):
        raise StoredError(
            f"{list(array.shape)} and {list(shape)} do not have equally many elements"
        )
    groups = list(_equal_groups(array.shape, shape))
    chunk: tuple[int, ...] = ()
    if shape:
        keeps_rows = bool(array.chunk) and shape[0] == array.shape[0]
        chunk = (array.chunk[0] if keeps_rows else 1, *shape[1:])
    read = functools.partial(_read_folded, array, tuple(shape), groups)
    return array._replace(shape=tuple(shape), read=read, chunk=chunk)


class _Group(NamedTuple):
    """Ranges of dimensions of two shapes that have equally many elements."""

    source: slice
    target: slice


def _read_folded(
    array: Stored, shape: tuple[int, ...], groups: Iterable[_Group], index: Index
) -> np.ndarray:
    index = index or everything(shape)
    outer: list[slice] = []  # of the source
    inner: list[slice] = []  # of the part that is read
    shape_read: list[int] = []  # of that part, in the target's dimensions
    for group in groups:
        source_shape, target_shape = array.shape[group.source], shape[group.target]
        slices = []
        for part, n in zip(index[group.target], target_shape, strict=True):
            start, stop, _ = part.indices(n)
            slices.append(slice(start, stop))
        if len(source_shape) == 1 and slices:  # a dimension is split, or stays
            first, row = slices[0], math.prod(target_shape[1:])
            outer.append(slice(first.start * row, first.stop * row))
            inner += [slice(None), *slices[1:]]
            shape_read += [first.stop - first.start, *target_shape[1:]]
        else:
            outer += everything(source_shape)
            inner += slices
            shape_read += target_shape
    return array.read(tuple(outer)).reshape(shape_read)[tuple(inner)]


def _equal_groups(source: tuple[int, ...], target: tuple[int, ...]) -> Iterator[_Group]:
    """Yield the shortest ranges of dimensions of two shapes that have equally many elements."""
    i = j = 0
    while i < len(source) or j < len(target):
        first_i, first_j = i, j
        m = n = 1  # elements of the two ranges
        while True:
            if i < len(source) and (m <= n or j == len(target)):
                m *= source[i]
                i += 1
            elif j < len(target):
                n *= target[j]
                j += 1
            is_end = (i, j) == (len(source), len(target))
            if m == n and (is_end or (i > first_i and j > first_j)):
                break
        yield _Group(slice(first_i, i), slice(first_j, j))


def nest(leaves: Iterable[tuple[tuple[str | int, ...], Any]]) -> Any:
    """Build a tree from (keys, leaf). Raises StoredError for a path within another."""
    leaves = list(leaves)
    if [keys for keys, _ in leaves] == [()]:
        return leaves[0][1]
    groups: dict[str | int, list[Any]] = {}
    for keys, leaf in leaves:
        if not keys:
            raise StoredError(
                "an array has the path of a folder of other arrays, or two have one path"
            )
        groups.setdefault(keys[0], []).append((keys[1:], leaf))
    tree = {key: nest(group) for key, group in groups.items()}
    is_list = bool(tree) and all(isinstance(key, int) for key in tree)
    return list(tree.values()) if is_list else tree
