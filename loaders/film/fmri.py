"""The fMRI of a film's viewers, as files of a dataset: z-scored voxels of a mask."""

import math
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from loaders.film import foreign_files
from loaders.io import atomic_write, files, machine
from loaders.io.files import DataError

UNITS = {"sec": 1.0, "msec": 1e-3, "usec": 1e-6}  # [s] of a NIfTI header's time
VOXELS_AT_ONCE = 4096  # that are z-scored together, in float64


class Scan(NamedTuple):
    """The shape of a scan, by its header."""

    grid: tuple[int, ...]  # x, y, z
    volumes: int
    time_axis: int  # the axis of the volumes


def check(
    paths: Sequence[pathlib.Path], tr: float | None, volumes: int | None
) -> tuple[float, int, list[str]]:
    """Read the headers: TR [s], volumes to take, and the viewers' names. Raises DataError."""
    names = [_viewer_name(path) for path in paths]
    repeated_names = sorted({name for name in names if names.count(name) > 1})
    if repeated_names:
        raise DataError(f"--fmri: the viewers {', '.join(repeated_names)} are given twice")
    tr_source: Any = "--tr"
    scans = {}
    for path in paths:
        image = foreign_files.nifti(path)
        scan = _scan(path, image)
        dtype = image.get_data_dtype()
        if dtype.kind not in "iuf":
            raise DataError(f"{path} holds {dtype}; expected real numbers")
        scans[path] = scan
        _check_place(path, image, paths[0])
        header_tr = _header_tr(path, image, scan.time_axis)
        if tr is None:
            if header_tr is None:
                raise DataError(f"{path} does not say its TR with a unit; give --tr")
            tr = header_tr
            tr_source = path
        if header_tr is not None and abs(header_tr - tr) > 1e-3:
            raise DataError(
                f"{path} has a TR of {header_tr:g} s, and {tr_source} says {tr:g} s; omit --tr, or"
                " correct the header"
            )
    assert tr is not None  # given, or read from the first file
    return round(tr, 6), _common_volumes(scans, volumes), names


def _viewer_name(path: pathlib.Path) -> str:
    name = path.name.removesuffix(".gz")
    return name.removesuffix(".nii")


def _header_tr(path: pathlib.Path, image: Any, time_axis: int) -> float | None:
    """Return a scan's TR [s]; None if its header does not say it with a unit."""
    with files.reading(path):
        units = image.header.get_xyzt_units()  # a code that stands for none is a KeyError
    _, time_unit = units
    unit = UNITS.get(time_unit, 0.0)  # many writers leave a TR of 1, and no unit
    zooms = image.header.get_zooms()
    tr = unit * float(zooms[time_axis])
    return tr if 0 < tr < math.inf else None


def _common_volumes(scans: Mapping[pathlib.Path, Scan], volumes: int | None) -> int:
    """Return how many volumes to take of each scan. Raises DataError: they do not fit together."""
    if len({scan.grid for scan in scans.values()}) > 1:
        grids = ", ".join(f"{path.name} {scan.grid}" for path, scan in scans.items())
        raise DataError(f"--fmri: the grids differ: {grids}")
    smallest_count = min(scan.volumes for scan in scans.values())
    largest_count = max(scan.volumes for scan in scans.values())
    if volumes is None and smallest_count < largest_count:
        counts = ", ".join(f"{path.name} {scan.volumes}" for path, scan in scans.items())
        raise DataError(
            f"--fmri: the numbers of volumes differ ({counts}); take the first ones of all with"
            f" --volumes={smallest_count}"
        )
    if volumes and volumes > smallest_count:
        shortest = min(scans, key=lambda path: scans[path].volumes)
        raise DataError(f"--volumes={volumes}, and {shortest} has only {smallest_count}")
    return volumes or smallest_count


def offset(path: pathlib.Path) -> float:
    """Return the time at which a scan begins, by its header [s]; 0 if it does not say it."""
    header = foreign_files.nifti(path).header
    _, time_unit = header.get_xyzt_units()
    return UNITS.get(time_unit, 0.0) * float(header["toffset"])


def _check_place(path: pathlib.Path, image: Any, first: pathlib.Path) -> None:
    """Raise DataError if voxels of ``image`` lie 0.1 voxels or more from the first viewer's."""
    first_image = foreign_files.nifti(first)
    if not _has_position(image) or not _has_position(first_image):
        return
    unit_corners = np.array([*np.ndindex(2, 2, 2)])
    last_voxel = np.array(image.shape[:3]) - 1
    corners = unit_corners * last_voxel
    affine_change = image.affine - first_image.affine
    matrix = affine_change[:3, :3]
    translation = affine_change[:3, 3]
    shifts = corners @ matrix.T + translation
    largest_shift = np.linalg.norm(shifts, axis=1).max()
    voxel_size = min(first_image.header.get_zooms()[:3])
    if largest_shift > 0.1 * voxel_size:
        raise DataError(
            f"{path} lies elsewhere in space than {first} (their affines differ); resample it to"
            " that grid, for example with nilearn.image.resample_to_img"
        )


def _has_position(image: Any) -> bool:
    header = image.header
    return bool(int(header["qform_code"]) or int(header["sform_code"]))


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
    first_image = foreign_files.nifti(paths[0])
    if mask:
        inside = _read_mask(mask, paths[0])
    else:
        inside = _vote_on_mask(paths, volumes)
    if not inside.any():
        raise DataError(f"{mask or 'the mask of voxels that vary'} holds no voxel")
    n_constant = 0
    for path, name in zip(paths, names, strict=True):
        scores, n_constant_here = _z_score_scan(path, inside, volumes, dtype)
        n_constant += n_constant_here
        atomic_write.save(folder / "fmri" / f"{name}.npy", scores)
    mask_image = nibabel.Nifti1Image(inside.astype(np.uint8), first_image.affine)
    nibabel.save(mask_image, folder / "mask.nii.gz")
    return n_constant


def _read_mask(path: pathlib.Path, first: pathlib.Path) -> np.ndarray:
    """Return bool [x, y, z]: the voxels above 0 in a NIfTI of two values. Raises DataError."""
    grid = foreign_files.nifti(first).shape[:3]
    image = foreign_files.nifti(path)
    if image.shape[3:] == (1,):
        image = image.slicer[..., 0]
    if image.shape[:3] != grid or len(image.shape) != 3:
        raise DataError(f"{path} has the shape {image.shape}, and the volumes {grid}")
    _check_place(path, image, first)
    with files.reading(path):
        labels = np.asanyarray(image.dataobj)
    kinds = np.unique(labels)
    if len(kinds) > 2 or not np.isfinite(kinds).all():
        raise DataError(
            f"{path} has {len(kinds)} different values, {kinds[0]:g} to {kinds[-1]:g}; a mask"
            " has two: save one of its labels, or the voxels above a threshold, as 0 and 1"
        )
    if len(kinds) == 2 and 0 not in kinds:
        raise DataError(
            f"{path} has the values {kinds[0]:g} and {kinds[-1]:g}, so it is unclear which"
            " voxels are inside; write those outside as 0"
        )
    inside: np.ndarray = labels > 0
    return inside


def _vote_on_mask(paths: Sequence[pathlib.Path], volumes: int) -> np.ndarray:
    """Return bool [x, y, z]: the voxels that vary in at least half of the viewers."""
    first_image = foreign_files.nifti(paths[0])
    votes = np.zeros(first_image.shape[:3])
    for path in paths:
        scan = read_volumes(path, volumes)
        is_finite = np.isfinite(scan).all(3)
        deviation = np.nan_to_num(scan, posinf=0, neginf=0).std(3)
        deviation[~is_finite] = 0
        threshold = np.percentile(deviation, 10)
        votes += deviation > threshold
    inside: np.ndarray = votes >= 0.5 * len(paths)
    return inside


def _z_score_scan(
    path: pathlib.Path, inside: np.ndarray, volumes: int, dtype: Any
) -> tuple[np.ndarray, int]:
    """Return z-scores [volumes, voxels], and how many voxels are constant. Raises DataError."""
    scan = read_volumes(path, volumes)
    voxels = np.ascontiguousarray(scan[inside].T)
    del scan  # the largest array of all
    is_broken = ~np.isfinite(voxels)
    n_broken = is_broken.any(0).sum()
    if n_broken:
        raise DataError(f"{path} has values that are not finite in {n_broken} voxels of the mask")
    scores = np.empty(voxels.shape, dtype)
    n_constant = 0
    for start in range(0, voxels.shape[1], VOXELS_AT_ONCE):
        columns = slice(start, start + VOXELS_AT_ONCE)
        values = voxels[:, columns].astype(np.float64)
        deviation = values.std(0)
        # The deviation of a constant is not 0 if its mean is rounded.
        varies = (values.min(0) < values.max(0)) & (deviation > 0)
        n_constant += int((~varies).sum())
        centred = values - values.mean(0)
        divisor = np.where(varies, deviation, 1)
        scores[:, columns] = np.where(varies, centred / divisor, 0)
    return scores, n_constant


def _scan(path: pathlib.Path, image: Any) -> Scan:
    """Return the shape of a scan. Raises DataError: it has more axes than space and time."""
    shape = image.shape
    long_axes = [axis for axis in range(3, len(shape)) if shape[axis] > 1]
    if len(shape) < 4 or len(long_axes) > 1 or min(shape) < 1:
        raise DataError(
            f"{path} has the shape {shape}; expected x, y, z and time: choose one of the"
            " scans in it, for example with nibabel's image.slicer[..., 0]"
        )
    time_axis = long_axes[0] if long_axes else 3
    return Scan(shape[:3], shape[time_axis], time_axis)


def read_volumes(path: pathlib.Path, n_volumes: int) -> np.ndarray:
    """Return the first volumes: float32 [x, y, z, volumes], or float64 if the file has that."""
    image = foreign_files.nifti(path)
    scan = _scan(path, image)
    dtype = np.float64 if image.get_data_dtype().itemsize > 4 else np.float32
    n_values = math.prod(scan.grid) * n_volumes
    n_bytes = n_values * np.dtype(dtype).itemsize
    most_bytes = machine.most_memory()
    if n_bytes > most_bytes:
        raise DataError(
            f"{path} takes {n_bytes:,} bytes for {n_volumes} volumes,"
            f" and this machine has {most_bytes:,}; take fewer: --volumes"
        )
    n_further_axes = len(image.shape) - 3
    selection: list[Any] = [slice(None)] * 3 + [0] * n_further_axes
    selection[scan.time_axis] = slice(n_volumes)
    with files.reading(path):
        return np.asanyarray(image.dataobj[tuple(selection)], dtype)
