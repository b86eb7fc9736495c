"""The fMRI of a film's viewers by a trained autoencoder, as NIfTI in the scans' space."""

import gzip
import json
import pathlib
from collections.abc import Iterator
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
from loaders.film import foreign_files, multimodal
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
    source = source_lib.find(run, step)
    config = source.config(__package__)
    c = run_workload.model_section(config, giblet.Config)
    known = {
        name: value
        for name, value in (config.get("data") or {}).items()
        if name in multimodal.Config.__dataclass_fields__
    }
    # One row for each volume, for any viewers. The command line names the files.
    own = {
        "path": folder,
        "subjects": (),
        "average": True,
        "test_share": 0.0,
        "follow_links": links,
        "threads": 0,
    }
    data = config_lib.section(multimodal.Config, {**known, **own})
    for where, text in data.validate():
        raise DataError(f"data.{where} {text}")
    if problems := list(checks.under("model", c.validate_data(multimodal.dataset_info(data)))):
        raise DataError(f"{folder} does not fit {source.path}: {problems[0][0]} {problems[0][1]}")
    layout = stored_params.one_device()
    params = stored_params.read(source, giblet.make_specs(c), layout, ema=ema)
    running = stored_params.read(source, giblet.make_model_state(c), layout, model_state=True)
    return Predictor(c, params, running, layout, data, source.name(ema=ema))


def volumes(
    predictor: Predictor, *, batch: int = 16, first: int = 0
) -> Iterator[tuple[np.ndarray | None, np.ndarray]]:
    """Yield each volume's prediction, None before number ``first``, and the viewers' mean.

    Both are float32 [voxels]. Raises DataError.
    """
    c, layout, data = predictor.model, predictor.layout, predictor.data
    film = multimodal.open_film(data)
    abstract = {
        name: jax.ShapeDtypeStruct(
            (batch, *f.shape),
            f.dtype,
            sharding=layout.sharding(("batch", *(None,) * len(f.shape)), (batch, *f.shape)),
        )
        for name, f in multimodal.element_spec(data).items()
    }
    rows = feed.rows_for(abstract)
    loader = multimodal.make_loader(data, split="train", rows=rows, seed=0, in_order=True)

    @jax.jit
    def run(params: PyTree, running: PyTree, inputs: dict[str, jax.Array]) -> jax.Array:
        return giblet.forward(c, params, running, inputs, layout.shard)[0].fmri

    done = 0
    try:
        for _, host in loader:
            n = min(batch, film.n_volumes - done)
            if done + n > first:
                inputs = feed.put(
                    {name: host[name] for name in giblet.MODALITIES},
                    {n: abstract[n] for n in giblet.MODALITIES},
                    rows,
                )
                predicted = np.asarray(run(predictor.params, predictor.running, inputs), np.float32)
            for i in range(n):
                yield (
                    predicted[i] if done + i >= first else None,
                    np.asarray(host["fmri"][0][i], np.float32),
                )
            done += batch
    finally:
        loader.close()


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


def read_brain(folder: str, n_voxels: int, *, links: bool = False) -> Brain:
    """Return the mask of `jaxtrain prepare-giblet`. Raises DataError: none, or another."""
    place = files.inside(files.expanded(folder), MASK, links=links)
    with files.reading(place):
        image = foreign_files.nifti(place)
        if (
            len(image.shape) != 3
            or not 0 < int(np.prod(image.shape, dtype=np.float64)) <= MAX_VOXELS
        ):
            raise ValueError(f"its shape is {image.shape}")
        inside = np.asanyarray(image.dataobj) > 0
    if int(inside.sum()) != n_voxels:
        raise DataError(
            f"{place} has {int(inside.sum())} voxels, and the model predicts {n_voxels}; name the"
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
    import nibabel

    film = multimodal.open_film(predictor.data)
    header = nibabel.Nifti1Header()
    header.set_data_dtype(np.float32)
    header.set_data_shape((*brain.inside.shape, film.n_volumes))
    header.set_qform(brain.affine, int(brain.header["qform_code"]) or 1)
    header.set_sform(brain.affine, int(brain.header["sform_code"]) or 1)
    header.set_zooms((*brain.header.get_zooms()[:3], float(film.info["tr"])))
    header.set_xyzt_units("mm", "sec")
    header["magic"], header["vox_offset"] = b"n+1", 352
    sums = np.zeros((5, int(brain.inside.sum())))
    n, packed = 0, out.name.endswith(".gz")
    head = header.binaryblock + bytes(4)
    made_of = (
        predictor.name,
        predictor.data,
        json.dumps(film.info, sort_keys=True),
        brain.inside.tobytes(),
        head,
        batch,
    )
    with resumable.file(out, made_of) as file:
        if not file.n:
            file.write(_packed(head) if packed else head)
        kept = file.kept()
        next(kept, None)  # the header
        for y, t in volumes(predictor, batch=batch, first=max(0, file.n - 1)):
            if y is None:
                record = next(kept)
                grid = (
                    np.frombuffer(gzip.decompress(record) if packed else record, "<f4")
                    .reshape(brain.inside.shape[::-1])
                    .T
                )
                y = grid[brain.inside]
            else:
                record = np.ascontiguousarray(brain.volume(y).T).tobytes()  # x changes fastest
                file.write(_packed(record) if packed else record)
            y, t = y.astype(np.float64), t.astype(np.float64)
            sums += np.stack([y, t, y * y, t * t, y * t])
            n += 1
    y, t, yy, tt, yt = sums / max(n, 1)
    spread = np.sqrt(np.maximum(yy - y * y, 0) * np.maximum(tt - t * t, 0))
    return n, np.where(spread > 1e-12, (yt - y * t) / np.maximum(spread, 1e-12), 0.0)


def write_map(brain: Brain, values: np.ndarray, out: pathlib.Path) -> None:
    """Write a value for each voxel, float32 [x, y, z]. Raises OSError."""
    import nibabel

    content = nibabel.Nifti1Image(brain.volume(values.astype(np.float32)), brain.affine).to_bytes()
    with atomic_write.file(out) as file:
        file.write(_packed(content) if out.name.endswith(".gz") else content)


def _packed(content: bytes) -> bytes:
    """Return a member of a .gz file, the same at any time. Members in sequence are one file."""
    return gzip.compress(content, 4, mtime=0)
