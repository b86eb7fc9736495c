"""Files from elsewhere for a film's dataset: NIfTI and arrays, and the libraries that read them."""

import gzip
import importlib
import math
import os
import pathlib
import zipfile
from typing import Any

import numpy as np

from loaders.io import files, machine
from loaders.io.files import DataError

MAX_GROWTH = 1032  # by which deflate packs at best: 258 bytes in two bits
MAX_HEADER = 64 << 20  # [bytes] before the values of a NIfTI file, extensions included


def package(name: str) -> Any:
    """Return a package of the extra `giblet`. Raises DataError: it is missing."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise DataError(
            f"needs the package {name}; install it with: pip install 'jaxtrain[giblet]'"
        ) from error


def only_array(path: pathlib.Path) -> np.ndarray:
    """Return the array of a .npy, or the one of two dimensions or more of an npz."""
    with files.reading(path):
        packed = zipfile.is_zipfile(path)
        arrays = (
            files.arrays(path, most=machine.most_memory())
            if packed
            else {path.name: np.array(files.array(path))}
        )
    candidates = [array for array in arrays.values() if array.ndim >= 2]
    if len(candidates) > 1:
        # a codec's scale may be there
        candidates = [array for array in candidates if array.size > 1]
    if len(candidates) != 1:
        shapes = ", ".join(f"{name} {array.shape}" for name, array in arrays.items())
        raise DataError(f"{path} holds {shapes or 'nothing'}; expected one array of two dimensions")
    return candidates[0]


def nifti(path: pathlib.Path) -> Any:
    """Return a NIfTI image whose values are not read yet. Raises FileError.

    A header is believed as far as its file could hold the claimed values. nibabel takes memory for
    them, and reads all bytes between header and values. So a file's first bytes are looked at here,
    and no extension of a header is read.
    """
    nibabel = package("nibabel")
    from nibabel.arrayproxy import ArrayProxy

    name = path.name.lower()
    if not name.endswith((".nii", ".nii.gz")):
        raise files.FileError(f"{path} is no NIfTI file by its name; expected .nii or .nii.gz")
    packed = name.endswith(".gz")
    try:
        with files.regular(path) as file:
            size = os.fstat(file.fileno()).st_size
            head = (gzip.GzipFile(fileobj=file) if packed else file).read(540)
        lengths = {int.from_bytes(head[:4], order) for order in ("little", "big")}
        kinds: Any = (
            (348, head[344:348], nibabel.Nifti1Image),
            (540, head[4:12], nibabel.Nifti2Image),
        )
        magic, kind = next(
            ((magic, kind) for n, magic, kind in kinds if n in lengths), (b"", kinds[0][2])
        )
        if magic.startswith(b"ni"):
            raise files.FileError(
                f"{path} is a header whose values lie in another file; save both as one .nii.gz"
            )
        if not magic.startswith(b"n+"):
            raise files.FileError(
                f"{path} does not begin as a NIfTI file does; save the scan again as .nii.gz"
            )
        header: Any = kind.header_class(head[: kind.header_class.template_dtype.itemsize])
        shape, offset = header.get_data_shape(), int(header.get_data_offset())
        if not 0 <= offset <= MAX_HEADER or min(shape, default=0) < 0:
            raise files.FileError(
                f"{path} cannot be read: its header claims the shape {shape}, {offset:,} bytes from"
                " its beginning"
            )
        claimed, most = (
            offset + math.prod(shape) * header.get_data_dtype().itemsize,
            size * (MAX_GROWTH if packed else 1),
        )
        if claimed > most:
            holds = (
                f"its {size:,} bytes cannot unpack to more than {most:,}"
                if packed
                else f"it has {size:,}"
            )
            raise files.FileError(
                f"{path} cannot be read: its header claims {claimed:,} bytes, shape {shape}, and"
                f" {holds}"
            )
        return kind(ArrayProxy(os.fspath(path), header.copy()), header.get_best_affine(), header)
    except files.FileError:
        raise
    except Exception as error:  # noqa: BLE001  nibabel and zlib raise what they like for a broken file
        raise files.FileError(f"{path} cannot be read: {files.reason(error)}") from error
