"""Writes arrays as files of safetensors, streamed: the header follows from shapes alone."""

import hashlib
import json
import math
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxtrain.arrays.safetensors_reader import DTYPES
from jaxtrain.arrays.stored import Stored, StoredError

CODES = {dtype: code for code, dtype in DTYPES.items()}


class Entry(NamedTuple):
    """One array of the export: a whole parameter, or an entry of its first axis."""

    name: str
    path: str  # of the parameter, or path[i] for entry i
    shape: tuple[int, ...]
    dtype: np.dtype

    @property
    def n_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def split(entries: Sequence[Entry], limit: int) -> list[list[Entry]]:
    """Divide entries into files, in order, as many to a file as fit, header included."""
    shards: list[list[Entry]] = []
    size = limit  # [bytes] of the last shard
    for entry in entries:
        # [bytes] of data, and at most so many of the header
        size_of_entry = entry.n_bytes + 200 + len(entry.name)
        if not shards or size + size_of_entry > limit:
            shards.append([])
            size = 0
        shards[-1].append(entry)
        size += size_of_entry
    return shards


def content(
    arrays: Mapping[str, Stored], entries: Mapping[str, Sequence[Entry]]
) -> Iterator[memoryview]:
    """Yield the bytes of all arrays, in order: layers of a stack follow each other already."""
    for path, entries_of_path in entries.items():
        array = arrays[path]
        dtype = entries_of_path[0].dtype
        for index in array.pieces():
            # No name for the piece: it would live on while the next one is read.
            yield _bytes(rounded(np.ascontiguousarray(array.read(index)), dtype, path))


def _bytes(x: np.ndarray) -> memoryview:
    return x.reshape(-1).view(np.uint8).data


def rounded(x: np.ndarray, dtype: np.dtype, path: str) -> np.ndarray:
    """``x`` in another dtype. Raises StoredError if a finite number becomes infinite."""
    with np.errstate(over="ignore"):
        converted = x.astype(dtype, copy=False)
    if converted.dtype == x.dtype:
        return converted
    is_lost = ~np.isfinite(converted) & np.isfinite(x)
    if is_lost.any():
        largest = float(np.abs(x[is_lost].astype("f8")).max())
        raise StoredError(
            f"{path} holds {largest:.4g}, which {np.dtype(dtype).name} cannot hold; choose another"
            " --dtype: bf16, f32"
        )
    return converted


def write_shards(
    folder: pathlib.Path,
    shards: Mapping[str, Sequence[Entry]],
    content: Iterator[memoryview],
    framework: str,
) -> dict[str, str]:
    """Write the entries of each file, and return the digests of the files."""
    digests = {}
    piece = memoryview(b"")
    for name, shard in shards.items():
        digest = hashlib.sha256()
        with (folder / name).open("wb") as file:
            head = header(shard, framework)
            file.write(head)
            digest.update(head)
            missing = sum(entry.n_bytes for entry in shard)
            while missing:
                if not piece:
                    piece = next(content)
                n = min(missing, len(piece))
                file.write(piece[:n])
                digest.update(piece[:n])
                missing -= n
                # an empty view would keep its array
                piece = piece[n:] if n < len(piece) else memoryview(b"")
        digests[name] = digest.hexdigest()
    return digests


def header(entries: Sequence[Entry], framework: str) -> bytes:
    """Return the header of a file. ``framework``: "flax" is Hugging Face's word for JAX."""
    tree: dict[str, Any] = {"__metadata__": {"format": framework}}
    offset = 0
    for entry in entries:
        if entry.dtype not in CODES:
            raise StoredError(
                f"{entry.path} is {entry.dtype.name}, which safetensors does not have; choose"
                " another with --dtype"
            )
        end = offset + entry.n_bytes
        tree[entry.name] = {
            "dtype": CODES[entry.dtype],
            "shape": list(entry.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    encoded = json.dumps(tree, separators=(",", ":")).encode()
    encoded += b" " * (
        -len(encoded) % 8
    )  # the format's own padding: data begin at eight's multiple
    return len(encoded).to_bytes(8, "little") + encoded
