"""Reads a folder of safetensors, ours or anybody's, array by array.

A file is eight bytes, the length n of the header, little-endian; n bytes of JSON, name -> dtype,
shape, data_offsets; then the arrays, row-major, little-endian. ``model.safetensors.index.json``
says which file holds which name. Dots in names become slashes of paths. The file `EXPORT` next to
them, which `jaxtrain export` writes, gives the paths themselves: {"paths": {name: path}, "shapes":
{path: shape of those that were reshaped}, …}.
"""

import functools
import logging
import math
import os
from collections.abc import Mapping
from typing import Any

import ml_dtypes
import numpy as np
from etils import epath

from jaxtrain.arrays import stored
from jaxtrain.arrays.stored import EXPORT, Index, Stored, StoredError
from loaders.io import files

log = logging.getLogger("jaxtrain")
WHOLE, INDEX = "model.safetensors", "model.safetensors.index.json"
MAX_HEADER = 100_000_000  # [bytes] of a file of safetensors: the format's own bound

# The types of safetensors that numpy with ml_dtypes has.
DTYPES = {
    "F64": np.dtype("<f8"),
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "I64": np.dtype("<i8"),
    "I32": np.dtype("<i4"),
    "I16": np.dtype("<i2"),
    "I8": np.dtype("i1"),
    "U64": np.dtype("<u8"),
    "U32": np.dtype("<u4"),
    "U16": np.dtype("<u2"),
    "U8": np.dtype("u1"),
    "BOOL": np.dtype("?"),
}


def is_safetensors(path: str | os.PathLike[str]) -> bool:
    """Whether ``path`` is, or holds, a safetensors file. Raises StoredError: unreadable."""
    place = stored.place_of(path)
    if place.name.endswith(".safetensors"):
        return True
    return place.is_dir() and any(place.glob("*.safetensors"))


def open_safetensors(path: epath.PathLike) -> dict[str, Stored]:
    """Open every array of a folder of safetensors (or of one such file). Only the headers are read.

    Raises StoredError: no such file; a header at odds with itself or the index; an unknown type.
    """
    folder = stored.place_of(path)
    if not folder.is_dir():
        return _open_file(folder, {})
    export = stored.read_object(folder, EXPORT) if (folder / EXPORT).exists() else {}
    paths, shapes = export.get("paths", {}), export.get("shapes", {})
    if not isinstance(paths, dict) or not all(isinstance(path, str) for path in paths.values()):
        raise StoredError(f"{folder / EXPORT}: 'paths' must give a path for each name")
    if not isinstance(shapes, dict) or not all(map(stored.is_shape, shapes.values())):
        raise StoredError(f"{folder / EXPORT}: 'shapes' must give a list of sizes for each path")
    _refuse_codes(folder)
    arrays: dict[str, Stored] = {}
    file_of: dict[str, str] = {}
    for file, indexed_names in _files(folder).items():
        arrays_of_file = _open_file(stored.inside(folder, file), paths)
        if indexed_names is not None:
            indexed_paths = {_path(name, paths) for name in indexed_names}
            _compare_with_index(folder, file, arrays_of_file, indexed_paths)
        twice = sorted(arrays.keys() & arrays_of_file.keys())
        if twice:
            raise StoredError(
                f"{folder}: {twice[0]} is in {file_of[twice[0]]} and in {file}; remove the file"
                " that is not meant"
            )
        arrays |= arrays_of_file
        file_of |= dict.fromkeys(arrays_of_file, file)
    stacked = stored.stack(arrays)
    for path, array in stacked.items():
        if path in shapes:
            stacked[path] = stored.fold(array, tuple(shapes[path]))
    return stacked


def _path(name: str, paths: Mapping[str, str]) -> str:
    """Return the path of a parameter by its name in a file."""
    return paths.get(name) or name.replace(".", "/")


def _compare_with_index(
    folder: epath.Path, file: str, arrays: Mapping[str, Stored], indexed: set[str]
) -> None:
    """Raise StoredError if a file holds other arrays than the index says."""
    differing = sorted(indexed ^ arrays.keys())
    if differing:
        verb = "lacks" if differing[0] in indexed else "holds, too"
        raise StoredError(
            f"{folder / INDEX} does not fit {file}, which {verb}: {differing[0][:200]}; one of the"
            " two is of another model"
        )


def _files(folder: epath.Path) -> dict[str, list[str] | None]:
    """Return the files of a folder's model, each with its names by the index, None without one.

    As transformers does, `WHOLE` comes first, and other files next to it are not read.
    """
    present = sorted(file.name for file in folder.glob("*.safetensors"))
    names_of: dict[str, list[str] | None]
    if (folder / INDEX).exists():
        names_of = dict(_read_index(folder))
        if WHOLE in present and WHOLE not in names_of:
            raise StoredError(
                f"{folder} holds {WHOLE}, and {INDEX} names other files; remove what is not meant"
            )
    else:
        names_of = dict.fromkeys([WHOLE] if WHOLE in present else present)
    if not names_of:
        raise StoredError(f"{folder} holds no *.safetensors")
    unread = [file for file in present if file not in names_of]
    if unread:
        _warn_of_unread(str(folder), ", ".join(names_of), ", ".join(unread))
    return names_of


def _read_index(folder: epath.Path) -> dict[str, list[str]]:
    """Return the names of each file in an index. Raises StoredError: a file is missing."""
    file_of = stored.read_object(folder, INDEX).get("weight_map")
    if not isinstance(file_of, dict) or not all(isinstance(f, str) for f in file_of.values()):
        raise StoredError(f"{folder / INDEX}: 'weight_map' must give a file for each name")
    names_of: dict[str, list[str]] = {file: [] for file in sorted(set(file_of.values()))}
    for name, file in file_of.items():
        names_of[file].append(name)
    missing = [str(folder / file) for file in names_of if not stored.inside(folder, file).exists()]
    if missing:
        raise StoredError(f"{folder / INDEX} names {', '.join(missing)}, which is missing")
    return names_of


@functools.lru_cache(maxsize=64)  # once for a folder
def _warn_of_unread(folder: str, files: str, unread: str) -> None:
    log.warning("%s: %s is read; not read: %s", folder, files, unread)


def _refuse_codes(folder: epath.Path) -> None:
    """Raise StoredError for arrays that are no model's numbers: quantised ones, an adapter's."""
    path = folder / "config.json"
    config = stored.read_object(folder, "config.json") if path.exists() else {}
    for name in ("quantization_config", "compression_config"):
        section = config.get(name)
        if section:
            method = section.get("quant_method") if isinstance(section, dict) else section
            raise StoredError(
                f"{path}: {name} is set ({str(method)[:40]}), so that the arrays are codes, not"
                " numbers; take the weights that were not quantised"
            )
    if (folder / "adapter_config.json").exists():
        raise StoredError(
            f"{folder} holds adapter_config.json, an adapter of peft, which is added to the weights"
            " elsewhere; merge it with its base model there, and take that folder"
        )


def _open_file(path: epath.Path, paths: Mapping[str, str]) -> dict[str, Stored]:
    header, start_of_data, data_bytes = _read_header(path)
    arrays: dict[str, Stored] = {}
    # [bytes] not yet used by an array: else a small file could claim any number of arrays
    unused = data_bytes
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        shape, dtype, (start, stop) = _parse_entry(path, name, entry, data_bytes)
        unused -= stop - start
        if unused < 0:
            raise StoredError(
                f"{path}: its arrays have more bytes than the file, so that some lie in each"
                " other's place"
            )
        array_path = _path(name, paths)
        stored.check_name(array_path, path)
        if array_path in arrays:
            raise StoredError(
                f"{path}: {name[:200]} has the path {array_path[:200]}, which another array has,"
                " too"
            )
        arrays[array_path] = Stored(
            shape,
            dtype,
            functools.partial(_read_file, path, start_of_data + start, shape, dtype),
            tuple(array_path.split("/")),
            # Row by row, so that a large table is read in pieces.
            chunk=(1, *shape[1:]) if shape else (),
        )
    return arrays


def _read_header(path: epath.Path) -> tuple[dict[str, Any], int, int]:
    """Return the header of a file, where its data begin, and how many bytes they are."""
    try:
        with files.regular(path) as file:
            size = path.stat().length
            length = int.from_bytes(file.read(8), "little")
            if not 2 <= length <= min(size - 8, MAX_HEADER):
                raise StoredError(
                    f"{path}: a header of {length} bytes does not fit in a file of {size}"
                )
            header = files.parse(file.read(length).decode(), f"{path}: the header")
    except files.FileError as error:
        raise StoredError(str(error)) from error
    except UnicodeDecodeError as error:
        raise StoredError(f"{path}: {error}") from error
    return header, 8 + length, size - 8 - length


def _parse_entry(
    path: epath.Path, name: str, entry: Any, data_bytes: int
) -> tuple[tuple[int, ...], np.dtype, list[int]]:
    """Return an entry's shape, type and place in the data. Raises StoredError: they disagree."""
    if not isinstance(entry, dict):
        entry = {}
    code, sizes, place = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
    if not isinstance(code, str) or code not in DTYPES:
        raise StoredError(
            f"{path}: {name} is {str(code)[:40]}; expected one of: {', '.join(DTYPES)}"
        )
    if not (stored.is_shape(sizes) and stored.is_shape(place) and len(place) == 2):
        raise StoredError(
            f"{path}: {name} has the shape {str(sizes)[:80]} at bytes {str(place)[:80]}; expected"
            " lists of sizes"
        )
    shape, dtype = tuple(sizes), DTYPES[code]
    start, stop = place
    is_size_right = stop - start == math.prod(shape) * dtype.itemsize
    if not is_size_right or not 0 <= start <= stop <= data_bytes:
        raise StoredError(
            f"{path}: {name} {shape} {code} does not fit bytes {start} to {stop} of the file"
        )
    return shape, dtype, place


def _read_file(
    path: epath.Path, offset: int, shape: tuple[int, ...], dtype: np.dtype, index: Index
) -> np.ndarray:
    first, last = 0, shape[0] if shape else 1
    if index:
        first, last, _ = index[0].indices(shape[0])
    row_bytes = math.prod(shape[1:]) * dtype.itemsize
    n_bytes = (last - first) * row_bytes
    stored.check_memory(f"{path}: an array {list(shape)}", n_bytes)
    with stored.file_errors(), files.regular(path) as file:
        file.seek(offset + first * row_bytes)
        content = file.read(n_bytes)
    if len(content) != n_bytes:
        raise StoredError(f"{path} was cut off since it was opened")
    shape_read = (last - first, *shape[1:]) if shape else ()
    rows = np.ndarray(shape_read, dtype, buffer=content)
    return rows[(slice(None), *index[1:])] if index else rows
