"""The built-in film and its viewers, made once, so that the first multimodal run needs no download.

A film of 720 volumes of 1.5 s, 8 frames/s of 64 × 36 pixels. It shows 12 quantities between 0 and 1
that rise and fall within seconds. Each is the brightness of one coloured blob that sways about its
place; two of the audio codes follow each of four of them, and the text embeddings are a random
projection of all, plus noise.

Viewers share a linear-nonlinear map to 2,000 voxels (`voxels`): v = tanh(A a) for the mean a of the
quantities in the window before each volume. It is convolved with the haemodynamic response and
z-scored. Noise of the same variance, drawn for each viewer, is added, and the sum is z-scored
again. So no prediction correlates better than about 0.7 with the measurements.

The folder has the format of `loaders.film.film_files`. It is a pure function of this file, and
appears by one rename. `ensure_blank` makes a folder of the published shapes that holds only zeros.

``python -m loaders.film.demo_film`` makes the film if it is not there, and prints its folder.
"""

import functools
import hashlib
import json
import math
import pathlib
from collections.abc import Callable

import numpy as np

from loaders.base import DataError
from loaders.film import film_files
from loaders.film.hrf import glover
from loaders.io import atomic_write, machine

TR, FPS, AUDIO_RATE = 1.5, 8, 16.0
HEIGHT, WIDTH = 36, 64
VOLUMES, VOXELS, VIEWERS = 720, 2000, 4
QUANTITIES, CODEBOOKS, TEXT = 12, 8, 96
NOISE = 1.0  # standard deviation of each viewer's noise. The shared response has 1


def ensure() -> pathlib.Path:
    """Return the folder of the film, made if it is not there. Raises DataError."""
    return _ensure_folder(folder().name, make)


def folder() -> pathlib.Path:
    """Return the folder in which `ensure` makes the film. It need not exist."""
    return machine.cache_folder() / f"film-{_recipe_hash()}"


def ensure_blank(*, viewers: int, volumes: int, voxels: int) -> pathlib.Path:
    """Return a folder of the published shapes of Sherlock, all zeros. Raises DataError."""
    name, sizes = (
        f"blank-{viewers}x{volumes}x{voxels}-{_recipe_hash()}",
        dict(viewers=viewers, volumes=volumes, voxels=voxels),
    )
    published = functools.partial(
        _write_zeros, picture=(90, 160), fps=25, audio_rate=75, codebooks=8, text=3072
    )
    return _ensure_folder(name, functools.partial(published, **sizes))


def _recipe_hash() -> str:
    return hashlib.sha256(pathlib.Path(__file__).read_bytes()).hexdigest()[:12]


def _ensure_folder(name: str, make: Callable[[pathlib.Path], None]) -> pathlib.Path:
    """Return the folder ``name`` of the cache, made if it is not there."""
    try:
        return atomic_write.once(machine.cache_folder(name), make)
    except OSError as error:
        remedy = "set JAXTRAIN_CACHE to a writable folder with 100 MB free"
        raise DataError(
            f"cannot make {name} in {machine.cache_folder()}: {error}; {remedy}"
        ) from error


def make(folder: pathlib.Path) -> None:
    (folder / "fmri").mkdir()
    rng = np.random.default_rng(2026)
    n_frames = round(VOLUMES * TR * FPS)
    happens = quantities(rng, n_frames)
    np.save(folder / "video.npy", film(rng, happens))
    np.save(folder / "audio.npy", codes(rng, happens))
    # A volume's window is the frames before it. Before the first volume there is only the first
    # frame.
    ends = np.arange(VOLUMES) * round(TR * FPS)
    window = np.stack(
        [happens[max(end - round(TR * FPS), 0) : max(end, 1)].mean(0) for end in ends]
    )
    projected = window @ rng.standard_normal((QUANTITIES, TEXT)) + 0.5 * rng.standard_normal(
        (VOLUMES, TEXT)
    )
    np.save(folder / "text.npy", projected.astype(np.float32))
    shared, names = voxels(rng, window), [f"viewer-{i + 1}" for i in range(VIEWERS)]
    for name in names:
        measured = shared + NOISE * rng.standard_normal(shared.shape)
        np.save(folder / "fmri" / f"{name}.npy", z_scored(measured).astype(np.float16))
    info = {"tr": TR, "fps": FPS, "audio_rate": AUDIO_RATE, "audio": "codes", "subjects": names}
    film_files.write(folder, info)


def make_outline(folder: pathlib.Path) -> None:
    """Write the film's shapes, all zeros: its dataset info before it is made."""
    sizes = dict(viewers=VIEWERS, volumes=VOLUMES, voxels=VOXELS, codebooks=CODEBOOKS, text=TEXT)
    _write_zeros(folder, picture=(HEIGHT, WIDTH), fps=FPS, audio_rate=AUDIO_RATE, **sizes)


def _write_zeros(
    folder: pathlib.Path,
    *,
    picture: tuple[int, int],
    fps: int,
    audio_rate: float,
    codebooks: int,
    text: int,
    viewers: int,
    volumes: int,
    voxels: int,
) -> None:
    """Write a film of these shapes into an empty folder: sparse files, which take no space."""
    streams = {
        "video": ((round(volumes * TR * fps), *picture, 3), "u1"),
        "audio": ((round(volumes * TR * audio_rate), codebooks), "<i2"),
        "text": ((volumes, text), "<f4"),
    }
    (folder / "fmri").mkdir()
    names = [f"viewer-{i + 1}" for i in range(viewers)]
    measured = {f"fmri/{name}": ((volumes, voxels), "<f2") for name in names}
    for name, (shape, dtype) in {**streams, **measured}.items():
        with (folder / f"{name}.npy").open("wb") as file:
            np.lib.format.write_array_header_1_0(
                file, {"descr": dtype, "fortran_order": False, "shape": shape}
            )
            file.truncate(file.tell() + math.prod(shape) * np.dtype(dtype).itemsize)
    # Without checksums, for which all the zeros would be read.
    rates = {"tr": TR, "fps": fps, "audio_rate": audio_rate}
    info = {"version": film_files.VERSION, **rates, "audio": "codes", "subjects": names}
    (folder / "dataset.json").write_text(json.dumps(info))


def quantities(rng: np.random.Generator, n: int) -> np.ndarray:
    """Return the quantities, [n, QUANTITIES] in 0..1: noise, smoothed over 4 s, a sigmoid."""
    span = round(4 * FPS)
    bump = np.hanning(2 * span + 1)
    white = rng.standard_normal((n + 2 * span, QUANTITIES))
    smooth = np.stack([np.convolve(x, bump, "valid") for x in white.T], axis=1)
    levels: np.ndarray = 1 / (1 + np.exp(-2 * smooth / smooth.std(0)))
    return levels


def film(rng: np.random.Generator, happens: np.ndarray) -> np.ndarray:
    """Return the frames, uint8 [n, HEIGHT, WIDTH, 3]."""
    n = len(happens)
    frames = np.full((n, HEIGHT, WIDTH, 3), 20.0, np.float32)
    y, x = np.mgrid[:HEIGHT, :WIDTH].astype(np.float32)
    for k in range(QUANTITIES):
        column, line = k % 4, k // 4
        sway = 2 * np.sin(np.arange(n) / FPS * rng.uniform(0.5, 2.0))
        cx, cy = (column + 0.5) * WIDTH / 4 + sway, (line + 0.5) * HEIGHT / 3
        blob = np.exp(-((x[None] - cx[:, None, None]) ** 2 + (y[None] - cy) ** 2) / (2 * 4.0**2))
        colour = rng.uniform(60, 220, 3).astype(np.float32)
        frames += (happens[:, k, None, None] * blob)[..., None].astype(np.float32) * colour
    return np.clip(frames + rng.normal(0, 4, frames.shape), 0, 255).astype(np.uint8)


def codes(rng: np.random.Generator, happens: np.ndarray) -> np.ndarray:
    """Return the audio codes, int16 [times, CODEBOOKS]."""
    times = np.arange(round(len(happens) / FPS * AUDIO_RATE)) * FPS / AUDIO_RATE
    level = happens[np.minimum(times.astype(int), len(happens) - 1)][:, np.arange(CODEBOOKS) % 4]
    noisy = np.clip(1023 * level + rng.normal(0, 60, level.shape), 0, 1023)
    return np.ascontiguousarray(noisy, np.int16)  # otherwise its memory order depends on its size


def voxels(rng: np.random.Generator, window: np.ndarray) -> np.ndarray:
    """Return the response of a viewer without noise, [VOLUMES, VOXELS], z-scored."""
    a = (window - window.mean(0)) / window.std(0)
    response = np.tanh(a @ rng.standard_normal((QUANTITIES, VOXELS)) / 2)
    kernel = glover(TR)
    return z_scored(
        sum(h * response[np.maximum(np.arange(VOLUMES) - k, 0)] for k, h in enumerate(kernel))
    )


def z_scored(x: np.ndarray) -> np.ndarray:
    scored: np.ndarray = (x - x.mean(0)) / x.std(0)
    return scored


if __name__ == "__main__":
    print(ensure())
