"""Reads the arrays of a step directory, of `jaxtrain.checkpoint` or any of Orbax."""

import functools
import math
import os
import re
import stat
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import tensorstore as ts
from etils import epath

from jaxtrain.arrays import quiet_orbax, stored
from jaxtrain.arrays.stored import Index, Stored, StoredError
from loaders.io.checks import first_line

CHUNK = 64 << 20  # [bytes] that are written, and later read and decoded, together
LARGE = 256 << 20  # [bytes] of a file of a checkpoint whose size is looked into
MAX_CHUNKS = 1_000_000  # of an array


def find_step(run: epath.PathLike, step: int | None = None) -> epath.Path:
    """Find the step directory ``run``, or the newest (or ``step``) of a workdir.

    Raises StoredError, with the steps that exist.
    """
    run = stored.absolute(stored.place_of(run))
    if _item(run) is not None:
        if step is None or run.name == str(step):
            return run
        raise StoredError(
            f"step {step} is given for {run}, which is a step directory itself; omit the step, or"
            " name the workdir"
        )
    folder = run / "checkpoints"
    if not folder.is_dir():
        folder = run
    steps = steps_in(folder)
    if not steps:
        raise StoredError(
            f"{run} {'holds no step' if run.exists() else 'does not exist'}; expected a run's"
            " workdir, a step directory of it, or a folder of `jaxtrain export`"
        )
    if step is None:
        step = steps[-1]
    elif step not in steps:
        raise StoredError(
            f"{folder} holds no step {step}; expected one of: {', '.join(map(str, steps))}"
        )
    return folder / str(step)


def best_step(run: epath.PathLike) -> int | None:
    """Return the best step of a workdir by its config.checkpoint.best, or None if it keeps none.

    `jaxtrain.checkpoint.history` has the form of its best.json. Raises StoredError.
    """
    run = stored.absolute(stored.place_of(run))
    if _item(run) is not None or not (run / "best.json").exists():
        return None
    step = stored.read_object(run, "best.json").get("step")
    folder = run / "checkpoints"
    kept = steps_in(folder if folder.is_dir() else run)
    return step if type(step) is int and step in kept else None


def steps_in(folder: epath.Path) -> list[int]:
    """Return the steps that a folder of checkpoints lists, in order."""
    if not folder.is_dir():
        return []
    return sorted(int(path.name) for path in folder.iterdir() if path.name.isdecimal())


def open_step(step_dir: epath.PathLike) -> dict[str, Stored]:
    """Open the arrays of a step in tree order, and read only the tree. Raises StoredError."""
    folder = _item(stored.absolute(step_dir))
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
    leaves = {}
    for keys, leaf in _leaves(metadata.tree):
        if hasattr(leaf, "shape"):  # an empty subtree has none
            stored.inside(folder, leaf.name)
            stored.check_name("/".join(map(str, keys)), folder)
            leaves[keys] = leaf
    context = ts.Context({"cache_pool": {"total_bytes_limit": 16 << 20}})
    is_indexed = (folder / "manifest.ocdbt").exists()
    arrays = {}
    for keys, leaf in leaves.items():
        path = "/".join(map(str, keys))
        shape = tuple(leaf.shape)
        dtype = np.dtype(leaf.dtype)
        chunk = shape
        if leaf.storage and leaf.storage.chunk_shape:
            chunk = tuple(leaf.storage.chunk_shape)
        _check_chunks(f"{folder}: {path}", shape, chunk)
        array = _open_array(
            folder,
            leaf.name,
            zarr3=bool(metadata.use_zarr3),
            is_indexed=is_indexed,
            context=context,
        )
        read = functools.partial(_read_array, array, f"{folder}: {path}", shape, dtype)
        arrays[path] = Stored(shape, dtype, read, keys, chunk, _describe(leaf.sharding))
    return arrays


def _check_chunks(name: str, shape: tuple[int, ...], chunk: tuple[int, ...]) -> None:
    """Raise StoredError for an array of more chunks than are read."""
    n_chunks = math.prod(-(-n // max(c, 1)) for n, c in zip(shape, chunk, strict=False))
    if n_chunks > MAX_CHUNKS:
        raise StoredError(
            f"{name} {list(shape)} is in {n_chunks:,} chunks; at most {MAX_CHUNKS:,} are read"
        )


def read_json(step_dir: epath.PathLike, item: str) -> dict[str, Any] | None:
    """Read ``data`` or ``meta`` of a step, or return None without it. Raises StoredError."""
    folder = epath.Path(step_dir)
    if not (folder / item / "metadata").exists():
        return None
    return stored.read_object(folder, f"{item}/metadata")


def check_files(folder: epath.Path) -> None:
    """Raise StoredError unless all below a folder is a regular file or a folder, inside of it.

    Orbax and tensorstore open any file there, and would wait for a pipe. They read most files
    whole, and end the process if one does not fit in memory; a sparse file may have any size.
    """
    if "://" in os.fspath(folder):
        return
    for parent, folders, names in os.walk(folder):
        for name in (*folders, *names):
            _check_file(folder, os.path.relpath(os.path.join(parent, name), folder))


def _check_file(folder: epath.Path, name: str) -> None:
    path = stored.inside(folder, name)
    try:
        status = os.stat(path)
    except OSError as error:
        raise StoredError(f"{path} cannot be read: {error.strerror}") from error
    if stat.S_ISDIR(status.st_mode):
        return
    if not stat.S_ISREG(status.st_mode):
        raise StoredError(f"{path} is a pipe or a device; expected files and folders alone")
    if status.st_size > LARGE:
        most = _most_bytes(path, folder)
        if status.st_size > most:
            raise StoredError(
                f"{path} has {status.st_size:,} bytes, and its contents take at most {int(most):,}"
            )


def _most_bytes(path: epath.Path, folder: epath.Path) -> float:
    """Return the largest size of a file in ``folder`` that tensorstore reads whole, else infinity.

    OCDBT's data files, of which it reads a part, and files of other programs are not bounded.
    """
    is_description = path.name.startswith(("manifest.", "_", ".z", "zarr.json"))
    if is_description or path.parent.name == "array_metadatas":
        return LARGE  # they describe arrays, in kilobytes
    for place in path.parents:
        if (place / ".zarray").exists():
            array = stored.read_object(place, ".zarray")
            dtype = re.fullmatch("[<>|][a-zA-Z]([0-9]{1,3})", str(array.get("dtype")))
            n_bytes = _elements(array.get("chunks")) * (int(dtype[1]) if dtype else 16)
            return n_bytes + n_bytes // 64 + LARGE  # incompressible data get a little longer
        if (place / "zarr.json").exists():
            grid = stored.read_object(place, "zarr.json").get("chunk_grid")
            grid = grid.get("configuration") if isinstance(grid, dict) else None
            n = _elements(grid.get("chunk_shape") if isinstance(grid, dict) else None)
            # a file of chunks and their places, which may have an element each
            return 80 * n + LARGE
        if place == folder:
            break
    return math.inf


def _elements(shape: Any) -> int:
    """Return the elements of a shape in a file, 0 if tensorstore does not read it either."""
    return math.prod(shape) if stored.is_shape(shape) else 0


def in_chunks(tree: Any) -> Any:
    """Return how to save arrays: in chunks, as a device's part may be large for a reader."""
    return jax.tree.map(lambda _: ocp.SaveArgs(chunk_byte_size=CHUNK), tree)


def _item(folder: epath.Path) -> epath.Path | None:
    """Find the arrays of a step: in ``state``, as here, or in ``default``, as elsewhere."""
    for path in (folder / "state", folder / "default", folder):
        if (path / "_METADATA").exists():
            return path
    return None


def _leaves(tree: Any, keys: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[str | int, ...], Any]]:
    if isinstance(tree, Mapping):
        for key, value in tree.items():
            yield from _leaves(value, (*keys, key))
    elif isinstance(tree, list | tuple):
        for i, value in enumerate(tree):
            yield from _leaves(value, (*keys, i))
    else:
        yield keys, tree


def _open_array(
    folder: epath.Path, name: str, *, zarr3: bool, is_indexed: bool, context: ts.Context
) -> Callable[[], ts.TensorStore]:
    """Open an array of an Orbax item, once, in one OCDBT store if indexed, else in a folder."""
    path = f"{os.fspath(folder)}/" if is_indexed else f"{os.fspath(folder)}/{name}/"
    # The folder alone decides: an array's name is its maker's.
    place: Any = path if "://" in os.fspath(folder) else {"driver": "file", "path": path}
    kvstore = {"driver": "ocdbt", "base": place, "path": f"{name}/"} if is_indexed else place
    spec = {"driver": "zarr3" if zarr3 else "zarr", "kvstore": kvstore}
    return functools.cache(lambda: ts.open(spec, open=True, read=True, context=context).result())


def _read_array(
    array: Callable[[], ts.TensorStore],
    name: str,
    shape: tuple[int, ...],
    dtype: np.dtype,
    index: Index,
) -> np.ndarray:
    """Read slices of an array. Raises StoredError: it is damaged, no array of its tree, too large.

    Checksums may be missing, so that nothing else has noticed the damage.
    """
    try:
        opened = array()
    except ValueError as error:
        raise StoredError(f"{name} cannot be read: {first_line(error)}") from error
    if tuple(opened.shape) != shape or opened.dtype.numpy_dtype != dtype:
        raise StoredError(
            f"{name} is {opened.dtype.name} {list(opened.shape)}; its tree says {dtype}"
            f" {list(shape)}"
        )
    part = opened[index] if index else opened
    chunk_shape = opened.chunk_layout.read_chunk.shape or shape
    n_elements = part.size + math.prod(n or 1 for n in chunk_shape)
    stored.check_memory(f"{name} {list(shape)}", n_elements * dtype.itemsize)
    try:
        return np.asarray(part.read().result())
    except ValueError as error:
        raise StoredError(f"{name} cannot be read: {first_line(error)}") from error


def _describe(sharding: Any) -> str:
    """``(·, fsdp, model) on data 1 × fsdp 2 × model 2``."""
    if sharding is None:
        return ""
    spec = getattr(sharding, "partition_spec", None)
    if spec is None:
        return type(sharding).__name__.removesuffix("Metadata")
    axes = []
    for part in spec:
        if part is None:
            axes.append("·")
        else:
            axes.append(part if isinstance(part, str) else "+".join(part))
    sizes = zip(sharding.axis_names, sharding.shape, strict=True)
    mesh = " × ".join(f"{name} {size}" for name, size in sizes)
    return f"({', '.join(axes)}) on {mesh}" if axes else f"whole on {mesh}"
