"""Files from elsewhere for a film's dataset: errors of the reading libraries, and arrays."""

import importlib
import pathlib
import zipfile
from typing import Any

import numpy as np

from loaders.io import files, machine
from loaders.io.files import DataError


def package(name: str) -> Any:
    """Return a package of the extra `giblet`. Raises DataError: it is missing."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise DataError(f"needs the package {name}; install it with: pip install 'jaxtrain[giblet]'") from error


def only_array(path: pathlib.Path) -> np.ndarray:
    """Return the array of a .npy, or the one of two dimensions or more of an npz."""
    with files.reading(path):
        packed = zipfile.is_zipfile(path)
        arrays = files.arrays(path, most=machine.most_memory()) if packed else {path.name: np.array(files.array(path))}
    candidates = [array for array in arrays.values() if array.ndim >= 2]
    if len(candidates) > 1:
        candidates = [array for array in candidates if array.size > 1]  # a codec's scale may be there
    if len(candidates) != 1:
        shapes = ", ".join(f"{name} {array.shape}" for name, array in arrays.items())
        raise DataError(f"{path} holds {shapes or 'nothing'}; expected one array of two dimensions")
    return candidates[0]
