"""Files from elsewhere for a film's dataset: NIfTI and arrays, and the libraries that read them."""

import gzip
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
        return machine.package(name)
    except ImportError as error:
        raise DataError(
            f"needs the package {name}; install it with: pip install 'jaxtrain[giblet]'"
        ) from error


def only_array(path: pathlib.Path) -> np.ndarray:
    """Return the array of a .npy, or the one of two dimensions or more of an npz."""
    with files.reading(path):
        if zipfile.is_zipfile(path):
            arrays = files.arrays(path, most=machine.most_memory())
        else:
            arrays = {path.name: np.array(files.array(path))}
    candidates = [array for array in arrays.values() if array.ndim >= 2]
    if len(candidates) > 1:
        # A codec's scale, a single number, may be among them.
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
    is_packed = name.endswith(".gz")
    try:
        with files.regular(path) as file:
            file_size = os.fstat(file.fileno()).st_size
            source = gzip.GzipFile(fileobj=file) if is_packed else file
            first_bytes = source.read(540)
        image_class = _image_class(path, first_bytes, nibabel)
        header_class = image_class.header_class
        header = header_class(first_bytes[: header_class.template_dtype.itemsize])
        _check_claims(path, header, file_size, is_packed=is_packed)
        values = ArrayProxy(os.fspath(path), header.copy())
        return image_class(values, header.get_best_affine(), header)
    except files.FileError:
        raise
    except Exception as error:  # noqa: BLE001  a broken file may raise anything in nibabel and zlib
        raise files.FileError(f"{path} cannot be read: {files.reason(error)}") from error


def _image_class(path: pathlib.Path, first_bytes: bytes, nibabel: Any) -> Any:
    """Return nibabel's class of the file's version of NIfTI. Raises FileError."""
    # The header's own length, in the byte order of the machine that wrote it.
    length_bytes = first_bytes[:4]
    lengths = (int.from_bytes(length_bytes, "little"), int.from_bytes(length_bytes, "big"))
    magic = b""
    image_class = nibabel.Nifti1Image
    if 348 in lengths:
        magic = first_bytes[344:348]
    elif 540 in lengths:
        magic = first_bytes[4:12]
        image_class = nibabel.Nifti2Image
    if magic.startswith(b"ni"):
        raise files.FileError(
            f"{path} is a header whose values lie in another file; save both as one .nii.gz"
        )
    if not magic.startswith(b"n+"):
        raise files.FileError(
            f"{path} does not begin as a NIfTI file does; save the scan again as .nii.gz"
        )
    return image_class


def _check_claims(path: pathlib.Path, header: Any, file_size: int, *, is_packed: bool) -> None:
    """Raise FileError if a file of ``file_size`` bytes cannot hold the values its header claims."""
    shape = header.get_data_shape()
    offset = int(header.get_data_offset())
    if not 0 <= offset <= MAX_HEADER or min(shape, default=0) < 0:
        raise files.FileError(
            f"{path} cannot be read: its header claims the shape {shape}, {offset:,} bytes from"
            " its beginning"
        )
    if is_packed:
        most_bytes = file_size * MAX_GROWTH
        limit = f"its {file_size:,} bytes cannot unpack to more than {most_bytes:,}"
    else:
        most_bytes = file_size
        limit = f"it has {file_size:,}"
    n_values = math.prod(shape)
    dtype = header.get_data_dtype()
    claimed_bytes = offset + n_values * dtype.itemsize
    if claimed_bytes > most_bytes:
        raise files.FileError(
            f"{path} cannot be read: its header claims {claimed_bytes:,} bytes, shape {shape}, and"
            f" {limit}"
        )
