"""The fMRI of a film's viewers by a trained autoencoder, as NIfTI in the scans' space."""

import gzip
import json
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxtrain import config as config_lib
from jaxtrain.arrays import run_workload, stored_params
from jaxtrain.arrays import source as source_lib
from jaxtrain.data import feed
from jaxtrain.parallel.layout import Layout
from jaxtrain.types import PyTree
from jaxtrain.workloads.giblet import model as giblet
from loaders.base import DataError
from loaders.film import film_files, foreign_files, multimodal
from loaders.io import atomic_write, checks, files, resumable

MASK = "mask.nii.gz"
MAX_VOXELS = 1 << 31  # [voxels] of a grid


class Predictor(NamedTuple):
    """A model with its parameters and running statistics, and how its data were read."""

    model: giblet.Config
    params: PyTree
    running: PyTree
    layout: Layout
    data: multimodal.Config
    name: str  # of the step, and its parameters


def load(
    run: str, folder: str, *, step: int | None = None, ema: bool = False, links: bool = False
) -> Predictor:
    """Read a run of this workload for the film in a folder of `jaxtrain prepare-giblet`.

    Raises StoredError, WarmStartError, ConfigError, and DataError if the film has another shape.
    """
    source = source_lib.find_best(run, step)
    config = source.config(__package__)
    c = run_workload.model_section(config, giblet.Config)
    data = _film_config(config.get("data") or {}, folder, links=links)
    for where, text in data.validate():
        raise DataError(f"data.{where} {text}")
    info = multimodal.dataset_info(data)
    model_problems = c.validate_data(info)
    problems = list(checks.under("model", model_problems))
    if problems:
        where, text = problems[0]
        raise DataError(f"{folder} does not fit {source.path}: {where} {text}")
    layout = stored_params.one_device()
    params = stored_params.read(source, giblet.make_specs(c), layout, ema=ema)
    running = stored_params.read(source, giblet.make_model_state(c), layout, model_state=True)
    return Predictor(c, params, running, layout, data, source.name(ema=ema))


def _film_config(trained: Mapping[str, Any], folder: str, *, links: bool) -> multimodal.Config:
    """Return the config of a training run's loader, for one row of each volume of a folder."""
    fields = {}
    for name, value in trained.items():
        if name in multimodal.Config.__dataclass_fields__:
            fields[name] = value
    # For any viewers. The command line names the files.
    fields |= {
        "path": folder,
        "subjects": (),
        "average": True,
        "test_share": 0.0,
        "follow_links": links,
        "threads": 0,
    }
    config: multimodal.Config = config_lib.section(multimodal.Config, fields)
    return config


def volumes(
    predictor: Predictor, *, batch: int = 16, first: int = 0
) -> Iterator[tuple[np.ndarray | None, np.ndarray]]:
    """Yield each volume's prediction, None before number ``first``, and the viewers' mean.

    Both are float32 [voxels]. Raises DataError.
    """
    c, layout, data = predictor.model, predictor.layout, predictor.data
    film = multimodal.open_film(data)
    abstract = _abstract_batch(predictor, batch)
    abstract_inputs = {name: abstract[name] for name in giblet.MODALITIES}
    rows = feed.rows_for(abstract)
    loader = multimodal.make_loader(data, split="train", rows=rows, seed=0, in_order=True)

    @jax.jit
    def run(params: PyTree, running: PyTree, inputs: dict[str, jax.Array]) -> jax.Array:
        outputs, _ = giblet.forward(c, params, running, inputs, layout.shard)
        return outputs.fmri

    n_read = 0
    try:
        for _, host in loader:
            n = min(batch, film.n_volumes - n_read)
            if n_read + n > first:
                inputs = feed.put(host, abstract_inputs, rows)
                fmri = run(predictor.params, predictor.running, inputs)
                predicted = np.asarray(fmri, np.float32)
            measured = host["fmri"][0]
            for i in range(n):
                volume = None
                if n_read + i >= first:
                    volume = predicted[i]
                yield volume, np.asarray(measured[i], np.float32)
            n_read += batch
    finally:
        loader.close()


def _abstract_batch(predictor: Predictor, batch: int) -> dict[str, jax.ShapeDtypeStruct]:
    """Return the shapes of a batch of the loader, split over its rows."""
    layout = predictor.layout
    abstract = {}
    for name, field in multimodal.element_spec(predictor.data).items():
        shape = (batch, *field.shape)
        axes = ("batch", *(None,) * len(field.shape))
        sharding = layout.sharding(axes, shape)
        abstract[name] = jax.ShapeDtypeStruct(shape, field.dtype, sharding=sharding)
    return abstract


class Brain(NamedTuple):
    """The places of voxels."""

    inside: np.ndarray  # bool [x, y, z]
    header: Any  # nibabel's, with its affine
    affine: np.ndarray

    def volume(self, values: np.ndarray) -> np.ndarray:
        """Values of voxels, float32 [voxels], in the grid: [x, y, z], 0 outside."""
        grid = np.zeros(self.inside.shape, np.float32)
        grid[self.inside] = values
        return grid

    def to_bytes(self, values: np.ndarray) -> bytes:
        """Return the volume as in a file: x changes fastest."""
        grid_zyx = self.volume(values).T
        return np.ascontiguousarray(grid_zyx).tobytes()

    def from_bytes(self, content: bytes) -> np.ndarray:
        """Return the values of voxels from `to_bytes`."""
        shape_zyx = self.inside.shape[::-1]
        grid = np.frombuffer(content, "<f4").reshape(shape_zyx).T
        values: np.ndarray = grid[self.inside]
        return values


def read_brain(folder: str, n_voxels: int, *, links: bool = False) -> Brain:
    """Return the mask of `jaxtrain prepare-giblet`. Raises DataError: none, or another."""
    place = files.inside(files.expanded(folder), MASK, links=links)
    with files.reading(place):
        image = foreign_files.nifti(place)
        size = int(np.prod(image.shape, dtype=np.float64))
        if len(image.shape) != 3 or not 0 < size <= MAX_VOXELS:
            raise ValueError(f"its shape is {image.shape}")
        inside = np.asanyarray(image.dataobj) > 0
    n_inside = int(inside.sum())
    if n_inside != n_voxels:
        raise DataError(
            f"{place} has {n_inside} voxels, and the model predicts {n_voxels}; name the"
            " folder of its mask: --mask"
        )
    return Brain(inside, image.header, image.affine)


def write(
    predictor: Predictor, brain: Brain, out: pathlib.Path, *, batch: int = 16
) -> tuple[int, np.ndarray]:
    """Write ``out``, float32 [x, y, z, volumes], volume by volume, after an earlier attempt's.

    `loaders.io.resumable` says how it is resumed. Returns the number of volumes, and Pearson's r of
    prediction and measurement over them, float64 [voxels], 0 if either is constant. Raises
    DataError, OSError.
    """
    film = multimodal.open_film(predictor.data)
    header = _header(brain, film)
    made_of = (
        predictor.name,
        predictor.data,
        json.dumps(film.info, sort_keys=True),
        brain.inside.tobytes(),
        header,
        batch,
    )
    n_voxels = int(brain.inside.sum())
    sums = np.zeros((5, n_voxels))  # of y, t, y², t² and y t: predicted y, measured t
    n = 0
    with resumable.file(out, made_of) as file:
        if not file.n:
            packed = _packed(header, out)
            file.write(packed)
        earlier = file.kept()
        next(earlier, None)  # the header
        n_earlier = max(0, file.n - 1)
        for y, t in volumes(predictor, batch=batch, first=n_earlier):
            if y is None:
                packed = next(earlier)
                content = _unpacked(packed, out)
                y = brain.from_bytes(content)
            else:
                content = brain.to_bytes(y)
                packed = _packed(content, out)
                file.write(packed)
            y = y.astype(np.float64)
            t = t.astype(np.float64)
            sums += np.stack([y, t, y * y, t * t, y * t])
            n += 1
    means = sums / max(n, 1)
    return n, _correlation(means)


def _header(brain: Brain, film: film_files.Film) -> bytes:
    """Return the bytes before the first volume: float32 in the scans' space."""
    import nibabel

    header = nibabel.Nifti1Header()
    header.set_data_dtype(np.float32)
    header.set_data_shape((*brain.inside.shape, film.n_volumes))
    qform_code = int(brain.header["qform_code"]) or 1
    sform_code = int(brain.header["sform_code"]) or 1
    header.set_qform(brain.affine, qform_code)
    header.set_sform(brain.affine, sform_code)
    tr = float(film.info["tr"])
    voxel_size = brain.header.get_zooms()[:3]
    header.set_zooms((*voxel_size, tr))
    header.set_xyzt_units("mm", "sec")
    header["magic"] = b"n+1"
    header["vox_offset"] = 352
    block: bytes = header.binaryblock
    return block + bytes(4)


def _correlation(means: np.ndarray) -> np.ndarray:
    """Return Pearson's r of y and t, 0 if one is constant, from means of y, t, y², t² and y t."""
    y, t, yy, tt, yt = means
    var_y = yy - y * y
    var_y = np.maximum(var_y, 0)
    var_t = tt - t * t
    var_t = np.maximum(var_t, 0)
    spread = np.sqrt(var_y * var_t)
    covariance = yt - y * t
    r = covariance / np.maximum(spread, 1e-12)
    varies = spread > 1e-12
    return np.where(varies, r, 0.0)


def write_map(brain: Brain, values: np.ndarray, out: pathlib.Path) -> None:
    """Write a value for each voxel, float32 [x, y, z]. Raises OSError."""
    import nibabel

    values = values.astype(np.float32)
    volume = brain.volume(values)
    image = nibabel.Nifti1Image(volume, brain.affine)
    packed = _packed(image.to_bytes(), out)
    with atomic_write.file(out) as file:
        file.write(packed)


def _packed(content: bytes, out: pathlib.Path) -> bytes:
    """Return the content, or as a member of a .gz file, the same at any time.

    Members in sequence are one file.
    """
    if not out.name.endswith(".gz"):
        return content
    return gzip.compress(content, 4, mtime=0)


def _unpacked(content: bytes, out: pathlib.Path) -> bytes:
    if not out.name.endswith(".gz"):
        return content
    return gzip.decompress(content)
