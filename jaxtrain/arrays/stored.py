"""Reads arrays on disk without the program, the mesh or the devices that wrote them.

Both formats are read as path -> `Stored`, no more than is needed:

- a step directory of `jaxtrain.checkpoint` (any Orbax directory of arrays):
  ``params/encoder/w_patch``, ``opt_state/0/count``;
- a folder of safetensors: eight bytes, the length n of the header, little-endian; n bytes of JSON,
  name -> dtype, shape, data_offsets; then the arrays, row-major, little-endian.
  ``model.safetensors.index.json`` says which file holds which name. Dots in names become slashes of
  paths. The file `EXPORT` next to them, which tools/orbax_to_safetensors.py writes, gives the paths
  themselves: {"paths": {name: path}, "shapes": {path: shape of those that were reshaped}, …}.

A path that ends in ``[i]`` is entry i of an array that is stacked along a first axis (`stack`).
"""

import contextlib
import functools
import logging
import math
import os
import pathlib
import re
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple, TypeGuard

import jax
import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
import tensorstore as ts
from etils import epath

from jaxtrain.arrays import quiet_orbax
from jaxtrain.config import consistency
from jaxtrain.types import EXPORT_FILE
from loaders.io import files, machine
from loaders.io.checks import UserError

EXPORT = EXPORT_FILE
# of a step and of an export, in their metadata. It is raised if a reader of the old one would go
# wrong
FORMAT = 2
MODEL_STATE = "model_state/"  # prefix of the paths of model state, in a step and in an export
WHOLE, INDEX = "model.safetensors", "model.safetensors.index.json"
log = logging.getLogger("jaxtrain")
CHUNK = 64 << 20  # [bytes] that are written, and later read and decoded, together
MAX_HEADER = 100_000_000  # [bytes] of a file of safetensors: the format's own bound
PATIENCE = 60.0  # [s] for one answer of a store
LARGE = 256 << 20  # [bytes] of a file of a checkpoint whose size is looked into
MAX_CHUNKS = 1_000_000  # of an array
MAX_DIMENSIONS = 32  # of an array
Index = tuple[slice, ...]  # one slice per dimension; () = everything

# The types of safetensors that numpy with ml_dtypes has.
DTYPES = {
    code: np.dtype(kind)
    for code, kind in {
        "F64": "<f8",
        "F32": "<f4",
        "F16": "<f2",
        "BF16": ml_dtypes.bfloat16,
        "F8_E4M3": ml_dtypes.float8_e4m3fn,
        "F8_E5M2": ml_dtypes.float8_e5m2,
        "I64": "<i8",
        "I32": "<i4",
        "I16": "<i2",
        "I8": "i1",
        "U64": "<u8",
        "U32": "<u4",
        "U16": "<u2",
        "U8": "u1",
        "BOOL": "?",
    }.items()
}


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
        rows = max(1, limit * self.shape[0] // self.n_bytes)
        rows = -(-rows // self.chunk[0]) * self.chunk[0]
        for start in range(0, self.shape[0], rows):
            yield (
                slice(start, min(start + rows, self.shape[0])),
                *(slice(0, n) for n in self.shape[1:]),
            )


def find_step(run: epath.PathLike, step: int | None = None) -> epath.Path:
    """Find the step directory ``run``, or the newest (or ``step``) of a workdir.

    Raises StoredError, with the steps that exist.
    """
    run = _absolute(place_of(run))
    if _item(run) is not None:
        if step is None or run.name == str(step):
            return run
        raise StoredError(
            f"step {step} is given for {run}, which is a step directory itself; omit the step, or"
            " name the workdir"
        )
    folder = run / "checkpoints" if (run / "checkpoints").is_dir() else run
    steps = (
        sorted(int(p.name) for p in folder.iterdir() if p.name.isdecimal())
        if folder.is_dir()
        else []
    )
    if not steps:
        raise StoredError(
            f"{run} {'holds no step' if run.exists() else 'does not exist'}; expected a run's"
            " workdir, a step directory of it, or a folder of `jaxtrain export`"
        )
    if step is not None and step not in steps:
        raise StoredError(
            f"{folder} holds no step {step}; expected one of: {', '.join(map(str, steps))}"
        )
    return folder / str(steps[-1] if step is None else step)


def open_step(step_dir: epath.PathLike) -> dict[str, Stored]:
    """Open the arrays of a step in tree order, and read only the tree. Raises StoredError."""
    folder = _item(_absolute(step_dir))
    if folder is None:
        raise StoredError(f"{step_dir} is not a step directory: it holds no _METADATA of arrays")
    check_files(folder)
    # of the arrays that a damaged tree names, all but the first error come after that one is raised
    quiet_orbax.keep_quiet()
    try:
        # The handler: an Orbax Checkpointer requires files that only a complete step has.
        metadata = ocp.PyTreeCheckpointHandler().metadata(folder)
    except Exception as error:
        raise StoredError(f"the tree of arrays in {folder} cannot be read: {error}") from error
    context = ts.Context({"cache_pool": {"total_bytes_limit": 16 << 20}})
    indexed = (folder / "manifest.ocdbt").exists()
    # empty subtrees have none
    arrays = [(keys, leaf) for keys, leaf in _leaves(metadata.tree) if hasattr(leaf, "shape")]
    for keys, leaf in arrays:
        inside(folder, leaf.name)
        _check_name("/".join(map(str, keys)), folder)
    found = {}
    for keys, leaf in arrays:
        shape, dtype, path = tuple(leaf.shape), np.dtype(leaf.dtype), "/".join(map(str, keys))
        chunk = (
            tuple(leaf.storage.chunk_shape) if leaf.storage and leaf.storage.chunk_shape else shape
        )
        n_chunks = math.prod(-(-n // max(c, 1)) for n, c in zip(shape, chunk, strict=False))
        if n_chunks > MAX_CHUNKS:
            raise StoredError(
                f"{folder}: {path} {list(shape)} is in {n_chunks:,} chunks; at most {MAX_CHUNKS:,}"
                " are read"
            )
        array = _array(
            folder, leaf.name, zarr3=bool(metadata.use_zarr3), indexed=indexed, context=context
        )
        read = functools.partial(_read_array, array, f"{folder}: {path}", shape, dtype)
        found[path] = Stored(shape, dtype, read, keys, chunk, _describe(leaf.sharding))
    return found


def read_json(step_dir: epath.PathLike, item: str) -> dict[str, Any] | None:
    """Read ``data`` or ``meta`` of a step, or return None without it. Raises StoredError."""
    folder = epath.Path(step_dir)
    return (
        read_object(folder, f"{item}/metadata") if (folder / item / "metadata").exists() else None
    )


def check_format(meta: Mapping[str, Any], place: Any) -> None:
    """Raise StoredError if metadata at ``place`` are of another format than this version reads."""
    if meta.get("config") and (found := meta.get("format")) != FORMAT:
        older = "from before formats had numbers" if found is None else f"of format {found!r:.20}"
        raise StoredError(
            f"{place} is {older}, and this version reads format {FORMAT}; read it with the version"
            " that wrote it"
        )


def read_object(folder: epath.Path, name: str) -> dict[str, Any]:
    """Return the object of a regular JSON file in ``folder``. Raises StoredError."""
    with _as_stored():
        return files.read_json(inside(folder, name))


def inside(folder: epath.Path, name: Any) -> epath.Path:
    """Return the path of a file that another one names in a folder. Raises StoredError outside."""
    if "://" in os.fspath(folder):  # an object store has no links
        if not isinstance(name, str) or name.startswith("/") or ".." in name.split("/"):
            raise StoredError(
                f"{folder} has a file that names {str(name)[:80]!r}, which leads out of it"
            )
        return folder / name
    with _as_stored():
        return files.checked_as(files.inside(pathlib.Path(folder), name), epath.Path)


@contextlib.contextmanager
def _as_stored() -> Iterator[None]:
    try:
        yield
    except files.FileError as error:
        raise StoredError(str(error)) from error


def check_files(folder: epath.Path) -> None:
    """Raise StoredError unless all below a folder is a regular file or a folder, inside of it.

    Orbax and tensorstore open any file there, and would wait for a pipe. They read most files
    whole, and end the process if one does not fit in memory; a sparse file may have any size.
    """
    if "://" in os.fspath(folder):
        return
    for where, folders, names in os.walk(folder):
        for name in (*folders, *names):
            path = inside(folder, os.path.relpath(os.path.join(where, name), folder))
            try:
                found = os.stat(path)
            except OSError as error:
                raise StoredError(f"{path} cannot be read: {error.strerror}") from error
            if not (stat.S_ISREG(found.st_mode) or stat.S_ISDIR(found.st_mode)):
                raise StoredError(f"{path} is a pipe or a device; expected files and folders alone")
            if (
                found.st_size > LARGE
                and stat.S_ISREG(found.st_mode)
                and found.st_size > (most := _most_bytes(path, folder))
            ):
                raise StoredError(
                    f"{path} has {found.st_size:,} bytes, and its contents take at most"
                    f" {int(most):,}"
                )


def _most_bytes(path: epath.Path, folder: epath.Path) -> float:
    """Return the largest size of a file in ``folder`` that tensorstore reads whole, else infinity.

    OCDBT's data files, of which it reads a part, and files of other programs are not bounded.
    """
    if (
        path.name.startswith(("manifest.", "_", ".z", "zarr.json"))
        or path.parent.name == "array_metadatas"
    ):
        return LARGE  # they describe arrays, in kilobytes
    for place in path.parents:
        if (place / ".zarray").exists():
            about = read_object(place, ".zarray")
            kind = re.fullmatch("[<>|][a-zA-Z]([0-9]{1,3})", str(about.get("dtype")))
            needed = _elements(about.get("chunks")) * (int(kind[1]) if kind else 16)
            return needed + needed // 64 + LARGE  # incompressible data get a little longer
        if (place / "zarr.json").exists():
            grid = read_object(place, "zarr.json").get("chunk_grid")
            grid = grid.get("configuration") if isinstance(grid, dict) else None
            n = _elements(grid.get("chunk_shape") if isinstance(grid, dict) else None)
            # a file of chunks and their places, which may have an element each
            return 80 * n + LARGE
        if place == folder:
            break
    return math.inf


def _elements(shape: Any) -> int:
    return math.prod(shape) if _is_shape(shape) else 0  # which tensorstore does not read either


def open_safetensors(path: epath.PathLike) -> dict[str, Stored]:
    """Open every array of a folder of safetensors (or of one such file). Only the headers are read.

    Raises StoredError: no such file; a header at odds with itself or the index; an unknown type.
    """
    folder = place_of(path)
    if not folder.is_dir():
        return _open_file(folder, {})
    export = read_object(folder, EXPORT) if (folder / EXPORT).exists() else {}
    paths, shapes = export.get("paths", {}), export.get("shapes", {})
    if not isinstance(paths, dict) or not all(isinstance(path, str) for path in paths.values()):
        raise StoredError(f"{folder / EXPORT}: 'paths' must give a path for each name")
    if not isinstance(shapes, dict) or not all(_is_shape(shape) for shape in shapes.values()):
        raise StoredError(f"{folder / EXPORT}: 'shapes' must give a list of sizes for each path")
    _refuse_codes(folder)
    found: dict[str, Stored] = {}
    origin: dict[str, str] = {}
    for name, expected in _files(folder).items():
        arrays = _open_file(inside(folder, name), paths)
        there = {paths.get(x) or x.replace(".", "/") for x in expected or ()}
        if expected is not None and (wrong := sorted(there ^ arrays.keys())):
            where = "lacks" if wrong[0] in there else "holds, too"
            raise StoredError(
                f"{folder / INDEX} does not fit {name}, which {where}: {wrong[0][:200]}; one of the"
                " two is of another model"
            )
        if twice := sorted(found.keys() & arrays.keys()):
            raise StoredError(
                f"{folder}: {twice[0]} is in {origin[twice[0]]} and in {name}; remove the file that"
                " is not meant"
            )
        found |= arrays
        origin |= dict.fromkeys(arrays, name)
    return {
        path: fold(array, tuple(shapes[path])) if path in shapes else array
        for path, array in stack(found).items()
    }


def _files(folder: epath.Path) -> dict[str, list[str] | None]:
    """Return the files of a folder's model, each with its names by the index, None without one.

    As transformers does, `WHOLE` comes first, and other files next to it are not read.
    """
    there = sorted(file.name for file in folder.glob("*.safetensors"))
    if (folder / INDEX).exists():
        names = read_object(folder, INDEX).get("weight_map")
        if not isinstance(names, dict) or not all(isinstance(name, str) for name in names.values()):
            raise StoredError(f"{folder / INDEX}: 'weight_map' must give a file for each name")
        found: dict[str, list[str] | None] = {
            file: [n for n in names if names[n] == file] for file in sorted(set(names.values()))
        }
        if missing := [str(folder / name) for name in found if not inside(folder, name).exists()]:
            raise StoredError(f"{folder / INDEX} names {', '.join(missing)}, which is missing")
        if WHOLE in there and WHOLE not in found:
            raise StoredError(
                f"{folder} holds {WHOLE}, and {INDEX} names other files; remove what is not meant"
            )
    else:
        found = dict.fromkeys([WHOLE] if WHOLE in there else there)
    if not found:
        raise StoredError(f"{folder} holds no *.safetensors")
    if spared := [name for name in there if name not in found]:
        _tell_spared(str(folder), ", ".join(found), ", ".join(spared))
    return found


@functools.lru_cache(maxsize=64)
def _tell_spared(folder: str, found: str, spared: str) -> None:
    log.warning("%s: %s is read; not read: %s", folder, found, spared)


def _refuse_codes(folder: epath.Path) -> None:
    """Raise StoredError for arrays that are no model's numbers: quantised ones, an adapter's."""
    about = read_object(folder, "config.json") if (folder / "config.json").exists() else {}
    for name in ("quantization_config", "compression_config"):
        if kind := about.get(name):
            method = kind.get("quant_method") if isinstance(kind, dict) else kind
            raise StoredError(
                f"{folder / 'config.json'}: {name} is set ({str(method)[:40]}), so that the arrays"
                " are codes, not numbers; take the weights that were not quantised"
            )
    if (folder / "adapter_config.json").exists():
        raise StoredError(
            f"{folder} holds adapter_config.json, an adapter of peft, which is added to the weights"
            " elsewhere; merge it with its base model there, and take that folder"
        )


def is_safetensors(path: str | os.PathLike[str]) -> bool:
    """Whether ``path`` is, or holds, a safetensors file. Raises StoredError: unreadable."""
    place = place_of(path)
    return place.name.endswith(".safetensors") or (
        place.is_dir() and any(place.glob("*.safetensors"))
    )


def stack(stored: Mapping[str, Stored]) -> dict[str, Stored]:
    """Stack ``x[0]`` … ``x[n-1]`` to ``x`` [n, …]. Raises StoredError: a gap, unlike entries."""
    whole: dict[str, Stored] = {}
    parts: dict[str, dict[int, Stored]] = {}
    for path, array in stored.items():
        entry = re.fullmatch(r"(.*)\[(0|[1-9][0-9]{0,8})\]", path)
        if entry:
            parts.setdefault(entry[1], {})[int(entry[2])] = array
        else:
            whole[path] = array
    for path, entries in parts.items():
        kinds = {(s.shape, s.dtype) for s in entries.values()}
        if sorted(entries) != list(range(len(entries))) or len(kinds) != 1 or path in whole:
            raise StoredError(
                f"{path}[…] cannot be stacked: entries {str(sorted(entries))[:200]} of"
                f" {str(sorted(map(str, kinds)))[:200]}"
                f"{', next to an array of that name' if path in whole else ''}"
            )
        ((shape, dtype),) = kinds
        read = functools.partial(_read_stack, [entries[i] for i in range(len(entries))])
        whole[path] = Stored(
            (len(entries), *shape), dtype, read, tuple(path.split("/")), (1, *shape)
        )
    return whole


def fold(array: Stored, shape: tuple[int, ...]) -> Stored:
    """Reshape an array without reading it. Raises StoredError if the sizes differ.

    If a dimension is split, only the needed rows are read. If several are joined, all is.
    """
    if math.prod(array.shape) != math.prod(shape):
        raise StoredError(
            f"{list(array.shape)} and {list(shape)} do not have equally many elements"
        )
    groups = list(_equal_groups(array.shape, shape))

    def read(index: Index) -> np.ndarray:
        index = index or tuple(slice(0, n) for n in shape)
        outer: list[slice] = []  # of the source
        inner: list[slice] = []  # of the read part
        seen: list[int] = []  # its shape, in the target's dimensions
        for (a, b), (c, d) in groups:
            first, *rest = [
                slice(*i.indices(n)[:2]) for i, n in zip(index[c:d], shape[c:d], strict=True)
            ] or [slice(0, 1)]
            if b - a == 1 and d > c:
                step = math.prod(shape[c + 1 : d])
                outer.append(slice(first.start * step, first.stop * step))
                inner += [slice(None), *rest]
                seen += [first.stop - first.start, *shape[c + 1 : d]]
            else:
                outer += [slice(0, n) for n in array.shape[a:b]]
                inner += [first, *rest][: d - c]
                seen += shape[c:d]
        return array.read(tuple(outer)).reshape(seen)[tuple(inner)]

    chunk = (
        (array.chunk[0] if array.chunk and shape and shape[0] == array.shape[0] else 1, *shape[1:])
        if shape
        else ()
    )
    return array._replace(shape=tuple(shape), read=read, chunk=chunk)


def _equal_groups(
    a: tuple[int, ...], b: tuple[int, ...]
) -> Iterator[tuple[tuple[int, int], tuple[int, int]]]:
    """Yield the shortest ranges of dimensions of two shapes that have equally many elements."""
    i = j = 0
    while i < len(a) or j < len(b):
        start, m, n = (i, j), 1, 1
        while True:
            if i < len(a) and (m <= n or j == len(b)):
                m, i = m * a[i], i + 1
            elif j < len(b):
                n, j = n * b[j], j + 1
            if (
                m == n
                and (i, j) != start
                and (i > start[0] and j > start[1] or (i, j) == (len(a), len(b)))
            ):
                break
        yield (start[0], i), (start[1], j)


def in_chunks(tree: Any) -> Any:
    """Return how to save arrays: in chunks, as a device's part may be large for a reader."""
    return jax.tree.map(lambda _: ocp.SaveArgs(chunk_byte_size=CHUNK), tree)


def nest(leaves: Iterable[tuple[tuple[str | int, ...], Any]]) -> Any:
    """Build a tree from (keys, leaf). Raises StoredError for a path within another."""
    leaves = list(leaves)
    if [keys for keys, _ in leaves] == [()]:
        return leaves[0][1]
    if any(not keys for keys, _ in leaves):
        raise StoredError("an array has the path of a folder of other arrays, or two have one path")
    groups: dict[str | int, list[Any]] = {}
    for keys, leaf in leaves:
        groups.setdefault(keys[0], []).append((keys[1:], leaf))
    tree = {key: nest(group) for key, group in groups.items()}
    return list(tree.values()) if tree and all(isinstance(key, int) for key in tree) else tree


def place_of(path: epath.PathLike) -> epath.Path:
    """Return a path of a file system or a store. Raises StoredError: the store is out of reach."""
    text = os.fspath(path)
    if why := consistency.unreachable(text):
        raise StoredError(f"{path} {why}")
    if "://" in text:
        _ask(text.rstrip("/") + "/")
    return epath.Path(path if "://" in text else files.expanded(path))


@functools.cache
def _ask(url: str) -> None:
    """Raise StoredError unless a store answers, without the long attempts of `epath`."""
    try:
        ts.KvStore.open(url).result(timeout=PATIENCE).read("state").result(timeout=PATIENCE)
    except (OSError, ValueError, TimeoutError) as error:
        reason = str(error) or f"no answer within {PATIENCE:g} s"
        raise StoredError(
            f"{url} cannot be read: {reason}; check the address, the network and your access to it"
        ) from error


def is_address(path: str) -> bool:
    """Whether a path is a store's or on the web, also etils.epath's /gs/bucket."""
    return "://" in path or "://" in os.fspath(_absolute(path))


def _absolute(path: epath.PathLike) -> epath.Path:
    """Make a path absolute: Orbax and tensorstore ignore the working directory."""
    text = os.path.expanduser(os.fspath(path))
    return epath.Path(text if "://" in text else os.path.abspath(text))


def _item(folder: epath.Path) -> epath.Path | None:
    """Find the arrays of a step: in ``state``, as here, or in ``default``, as elsewhere."""
    return next(
        (p for p in (folder / "state", folder / "default", folder) if (p / "_METADATA").exists()),
        None,
    )


def _leaves(tree: Any, keys: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[str | int, ...], Any]]:
    if isinstance(tree, Mapping):
        for key, value in tree.items():
            yield from _leaves(value, (*keys, key))
    elif isinstance(tree, list | tuple):
        for i, value in enumerate(tree):
            yield from _leaves(value, (*keys, i))
    else:
        yield keys, tree


def _array(
    folder: epath.Path, name: str, *, zarr3: bool, indexed: bool, context: ts.Context
) -> Callable[[], ts.TensorStore]:
    """Open an array of an Orbax item, once, in one OCDBT store if ``indexed``, else a folder."""
    path = f"{os.fspath(folder)}/" if indexed else f"{os.fspath(folder)}/{name}/"
    # The folder alone decides: an array's name is its maker's.
    place: Any = path if "://" in os.fspath(folder) else {"driver": "file", "path": path}
    kvstore = {"driver": "ocdbt", "base": place, "path": f"{name}/"} if indexed else place
    spec = {"driver": "zarr3" if zarr3 else "zarr", "kvstore": kvstore}
    return functools.cache(lambda: ts.open(spec, open=True, read=True, context=context).result())


def _read_array(
    array: Callable[[], ts.TensorStore],
    name: str,
    shape: tuple[int, ...],
    dtype: np.dtype,
    index: Index,
) -> np.ndarray:
    """Read slices of an array. Raises StoredError: it differs from its tree, or is too large."""
    opened = array()
    if tuple(opened.shape) != shape or opened.dtype.numpy_dtype != dtype:
        raise StoredError(
            f"{name} is {opened.dtype.name} {list(opened.shape)}; its tree says {dtype}"
            f" {list(shape)}"
        )
    part = opened[index] if index else opened
    needed = (
        part.size + math.prod(n or 1 for n in opened.chunk_layout.read_chunk.shape or shape)
    ) * dtype.itemsize
    _check_memory(f"{name} {list(shape)}", needed)
    return np.asarray(part.read().result())


def _check_memory(what: str, needed: int) -> None:
    """Raise StoredError if a read does not fit in memory: zeros take no space in a file."""
    if needed > (memory := machine.most_memory()):
        raise StoredError(
            f"{what}: to read it takes {needed:,} bytes, and this machine has {memory:,}"
        )


def _describe(sharding: Any) -> str:
    """``(·, fsdp, model) on data 1 × fsdp 2 × model 2``."""
    spec = getattr(sharding, "partition_spec", None)
    if spec is None:
        return "" if sharding is None else type(sharding).__name__.removesuffix("Metadata")
    parts = [
        "·" if part is None else part if isinstance(part, str) else "+".join(part) for part in spec
    ]
    mesh = " × ".join(
        f"{name} {size}" for name, size in zip(sharding.axis_names, sharding.shape, strict=True)
    )
    return f"({', '.join(parts)}) on {mesh}" if parts else f"whole on {mesh}"


def _open_file(path: epath.Path, paths: Mapping[str, str]) -> dict[str, Stored]:
    try:
        with files.regular(path) as file:
            size = path.stat().length
            length = int.from_bytes(file.read(8), "little")
            if not 2 <= length <= min(size - 8, MAX_HEADER):
                raise StoredError(
                    f"{path}: a header of {length} bytes does not fit in a file of {size}"
                )
            header = files.parse(file.read(length).decode(), f"{path}: the header")
    except (files.FileError, UnicodeDecodeError) as error:
        raise StoredError(
            f"{path}: {error}" if isinstance(error, UnicodeDecodeError) else str(error)
        ) from error
    arrays: dict[str, Stored] = {}
    # [bytes] not yet used by an array: else a small file could claim any number of arrays
    left = size - 8 - length
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        entry = entry if isinstance(entry, dict) else {}
        kind, sizes, place = (entry.get(key) for key in ("dtype", "shape", "data_offsets"))
        if not isinstance(kind, str) or kind not in DTYPES:
            raise StoredError(
                f"{path}: {name} is {str(kind)[:40]}; expected one of: {', '.join(DTYPES)}"
            )
        if not (_is_shape(sizes) and _is_shape(place) and len(place) == 2):
            found = f"the shape {str(sizes)[:80]} at bytes {str(place)[:80]}"
            raise StoredError(f"{path}: {name} has {found}; expected lists of sizes")
        shape, dtype, (start, stop) = tuple(sizes), DTYPES[kind], place
        if (
            stop - start != math.prod(shape) * dtype.itemsize
            or not 0 <= start <= stop <= size - 8 - length
        ):
            raise StoredError(
                f"{path}: {name} {shape} {kind} does not fit bytes {start} to {stop} of the file"
            )
        left -= stop - start
        if left < 0:
            raise StoredError(
                f"{path}: its arrays have more bytes than the file, so that some lie in each"
                " other's place"
            )
        where = paths.get(name) or name.replace(".", "/")
        _check_name(where, path)
        if where in arrays:
            raise StoredError(
                f"{path}: {name[:200]} has the path {where[:200]}, which another array has, too"
            )
        read = functools.partial(_read_file, path, 8 + length + start, shape, dtype)
        # Row by row, so that a large table is read in pieces.
        arrays[where] = Stored(
            shape, dtype, read, tuple(where.split("/")), (1, *shape[1:]) if shape else ()
        )
    return arrays


def _check_name(name: str, source: epath.Path) -> None:
    """Raise StoredError for an array's name that could pass for other lines of a report."""
    if not name.isprintable():
        raise StoredError(
            f"{source} has an array with the name {name[:80]!r}; expected printable characters"
        )


def _read_file(
    path: epath.Path, offset: int, shape: tuple[int, ...], dtype: np.dtype, index: Index
) -> np.ndarray:
    first, last, _ = index[0].indices(shape[0]) if index else (0, shape[0] if shape else 1, 1)
    row = math.prod(shape[1:]) * dtype.itemsize
    _check_memory(f"{path}: an array {list(shape)}", (last - first) * row)
    with _as_stored(), files.regular(path) as file:
        file.seek(offset + first * row)
        content = file.read((last - first) * row)
    if len(content) != (last - first) * row:
        raise StoredError(f"{path} was cut off since it was opened")
    rows = np.ndarray((last - first, *shape[1:]) if shape else (), dtype, buffer=content)
    return rows[(slice(None), *index[1:])] if index else rows


def _is_shape(value: Any) -> TypeGuard[list[int]]:
    return (
        isinstance(value, list)
        and len(value) <= MAX_DIMENSIONS
        and all(isinstance(n, int) and not isinstance(n, bool) and 0 <= n < 2**63 for n in value)
    )


def _read_stack(entries: list[Stored], index: Index) -> np.ndarray:
    return np.stack([entry.read(index[1:]) for entry in (entries[index[0]] if index else entries)])
