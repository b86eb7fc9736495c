"""The fMRI of a film's viewers, as files of a dataset: z-scored voxels of a mask."""

import math
import pathlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from loaders.film import foreign_files
from loaders.io import atomic_write, files, machine
from loaders.io.files import DataError

UNITS = {"sec": 1.0, "msec": 1e-3, "usec": 1e-6}  # [s] of a NIfTI header's time


def check(
    paths: Sequence[pathlib.Path], tr: float | None, volumes: int | None
) -> tuple[float, int, list[str]]:
    """Read the headers: TR [s], volumes to take, and the viewers' names. Raises DataError."""
    given: Any = "--tr"
    shapes, names = {}, [path.name.removesuffix(".gz").removesuffix(".nii") for path in paths]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise DataError(f"--fmri: the viewers {', '.join(twice)} are given twice")
    for path in paths:
        image = foreign_files.nifti(path)
        shape, axis = _over_time(path, image)
        if image.get_data_dtype().kind not in "iuf":
            raise DataError(f"{path} holds {image.get_data_dtype()}; expected real numbers")
        shapes[path] = shape
        _same_place(path, image, paths[0])
        with files.reading(path):
            units = image.header.get_xyzt_units()  # a code that stands for none is a KeyError
        unit = UNITS.get(units[1], 0.0)
        own_tr = unit * float(image.header.get_zooms()[axis])
        has_tr = 0 < own_tr < math.inf  # many writers leave 1 there, and no unit
        if tr is None and not has_tr:
            raise DataError(f"{path} does not say its TR with a unit; give --tr")
        tr, given = (own_tr, path) if tr is None else (tr, given)
        if has_tr and abs(own_tr - tr) > 1e-3:
            raise DataError(
                f"{path} has a TR of {own_tr:g} s, and {given} says {tr:g} s; omit --tr, or correct"
                " the header"
            )
    if len({shape[:3] for shape in shapes.values()}) > 1:
        raise DataError(
            f"--fmri: the grids differ: {', '.join(f'{p.name} {s[:3]}' for p, s in shapes.items())}"
        )
    lengths = {shape[3] for shape in shapes.values()}
    if volumes is None and len(lengths) > 1:
        listed = ", ".join(f"{p.name} {s[3]}" for p, s in shapes.items())
        raise DataError(
            f"--fmri: the numbers of volumes differ ({listed}); take the first ones of all with"
            f" --volumes={min(lengths)}"
        )
    if volumes and volumes > min(lengths):
        shortest = min(shapes, key=lambda path: shapes[path][3])
        raise DataError(f"--volumes={volumes}, and {shortest} has only {min(lengths)}")
    assert tr is not None  # given, or read from the first file
    return round(tr, 6), volumes or lengths.pop(), names


def offset(path: pathlib.Path) -> float:
    """Return the time at which a scan begins, by its header [s]; 0 if it does not say it."""
    header = foreign_files.nifti(path).header
    return UNITS.get(header.get_xyzt_units()[1], 0.0) * float(header["toffset"])


def _same_place(path: pathlib.Path, image: Any, first: pathlib.Path) -> None:
    """Raise DataError if voxels of ``image`` lie 0.1 voxels or more from the first viewer's."""
    other = foreign_files.nifti(first)
    if not all(int(x.header["qform_code"]) or int(x.header["sform_code"]) for x in (image, other)):
        return  # one of them has no position
    corners = np.array([*np.ndindex(2, 2, 2)]) * (np.array(image.shape[:3]) - 1)
    apart = corners @ (image.affine - other.affine)[:3, :3].T + (image.affine - other.affine)[:3, 3]
    if np.linalg.norm(apart, axis=1).max() > 0.1 * min(other.header.get_zooms()[:3]):
        raise DataError(
            f"{path} lies elsewhere in space than {first} (their affines differ); resample it to"
            " that grid, for example with nilearn.image.resample_to_img"
        )


def write(
    folder: pathlib.Path,
    paths: Sequence[pathlib.Path],
    names: Sequence[str],
    mask: pathlib.Path | None,
    volumes: int,
    dtype: Any,
) -> int:
    """Write fmri/<viewer>.npy and mask.nii.gz. Return how many voxels are constant in a viewer."""
    nibabel = foreign_files.package("nibabel")
    first = foreign_files.nifti(paths[0])
    if mask:
        image = foreign_files.nifti(mask)
        if image.shape[3:] == (1,):
            image = image.slicer[..., 0]
        if image.shape[:3] != first.shape[:3] or len(image.shape) != 3:
            raise DataError(
                f"{mask} has the shape {image.shape}, and the volumes {first.shape[:3]}"
            )
        _same_place(mask, image, paths[0])
        with files.reading(mask):
            found = np.asanyarray(image.dataobj)
        if len(kinds := np.unique(found)) > 2 or not np.isfinite(kinds).all():
            raise DataError(
                f"{mask} has {len(kinds)} different values, {kinds[0]:g} to {kinds[-1]:g}; a mask"
                " has two: save one of its labels, or the voxels above a threshold, as 0 and 1"
            )
        if len(kinds) == 2 and 0 not in kinds:
            raise DataError(
                f"{mask} has the values {kinds[0]:g} and {kinds[-1]:g}, so it is unclear which"
                " voxels are inside; write those outside as 0"
            )
        inside = found > 0
    else:
        votes = np.zeros(first.shape[:3])
        for path in paths:
            x = read_volumes(path, volumes)
            spread = np.where(np.isfinite(x).all(3), np.nan_to_num(x, posinf=0, neginf=0).std(3), 0)
            votes += spread > np.percentile(spread, 10)
        inside = votes >= 0.5 * len(paths)
    if not inside.any():
        raise DataError(f"{mask or 'the mask of voxels that vary'} holds no voxel")
    constant = 0
    for path, name in zip(paths, names, strict=True):
        x = np.ascontiguousarray(read_volumes(path, volumes)[inside].T)  # [volumes, voxels]
        if not np.isfinite(x).all():
            raise DataError(
                f"{path} has values that are not finite in {(~np.isfinite(x)).any(0).sum()} voxels"
                " of the mask"
            )
        z = np.empty(x.shape, dtype)
        for start in range(0, x.shape[1], 4096):  # in float64, of some voxels at a time
            some = x[:, start : start + 4096].astype(np.float64)
            deviation = some.std(0)
            # a constant's is not 0 if its mean is rounded
            varies = (some.min(0) < some.max(0)) & (deviation > 0)
            constant += int((~varies).sum())
            z[:, start : start + 4096] = np.where(
                varies, (some - some.mean(0)) / np.where(varies, deviation, 1), 0
            )
        atomic_write.save(folder / "fmri" / f"{name}.npy", z)
    nibabel.save(nibabel.Nifti1Image(inside.astype(np.uint8), first.affine), folder / "mask.nii.gz")
    return constant


def _over_time(path: pathlib.Path, image: Any) -> tuple[tuple[int, ...], int]:
    """Return the shape [x, y, z, time] of a scan, and its axis of time. Raises DataError."""
    long = [axis for axis in range(3, len(image.shape)) if image.shape[axis] > 1]
    if len(image.shape) < 4 or len(long) > 1 or min(image.shape) < 1:
        raise DataError(
            f"{path} has the shape {image.shape}; expected x, y, z and time: choose one of the"
            " scans in it, for example with nibabel's image.slicer[..., 0]"
        )
    axis = long[0] if long else 3
    return (*image.shape[:3], image.shape[axis]), axis


def read_volumes(path: pathlib.Path, n: int) -> np.ndarray:
    """float32 [x, y, z, n], or float64 if the file has that."""
    image = foreign_files.nifti(path)
    shape, axis = _over_time(path, image)
    part = tuple(
        slice(None) if i < 3 else slice(n) if i == axis else 0 for i in range(len(image.shape))
    )
    dtype = np.float64 if image.get_data_dtype().itemsize > 4 else np.float32
    if (size := math.prod(shape[:3]) * n * np.dtype(dtype).itemsize) > (
        most := machine.most_memory()
    ):
        raise DataError(
            f"{path} takes {size:,} bytes for {n} volumes, and this machine has {most:,}; take"
            " fewer: --volumes"
        )
    with files.reading(path):
        return np.asanyarray(image.dataobj[part], dtype)
