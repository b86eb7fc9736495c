"""The built-in film and its viewers, made once, so that the first multimodal run needs no download.

A film of 720 volumes of 1.5 s, 8 frames/s of 64 × 36 pixels. It shows 12 quantities between 0 and 1
that rise and fall within seconds. Each is the brightness of one coloured blob that sways about its
place; two of the audio codes follow each of four of them, and the text embeddings are a random
projection of all, plus noise.

Viewers share a linear-nonlinear map to 2,000 voxels: v = tanh(A a) for the mean a of the quantities
in the window before each volume. It is convolved with the haemodynamic response and z-scored. Noise
of the same variance, drawn for each viewer, is added, and the sum is z-scored again. So no
prediction correlates better than about 0.7 with the measurements.

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
from typing import NamedTuple

import numpy as np

from loaders.base import DataError
from loaders.film import film_files
from loaders.film.hrf import glover
from loaders.io import atomic_write, machine

TR = 1.5  # [s] between volumes
FPS = 8
AUDIO_RATE = 16.0  # [1/s] of codes
HEIGHT = 36
WIDTH = 64
VOLUMES = 720
VOXELS = 2000
VIEWERS = 4
QUANTITIES = 12
CODEBOOKS = 8
TEXT = 96  # values of an embedding
NOISE = 1.0  # standard deviation of each viewer's noise. The shared response has 1


class Sizes(NamedTuple):
    """The sizes and rates of a film of zeros."""

    picture: tuple[int, int]  # height, width
    fps: int
    audio_rate: float
    codebooks: int
    text: int  # values of an embedding
    viewers: int
    volumes: int
    voxels: int


def ensure() -> pathlib.Path:
    """Return the folder of the film, made if it is not there. Raises DataError."""
    return _ensure_folder(folder().name, make)


def folder() -> pathlib.Path:
    """Return the folder in which `ensure` makes the film. It need not exist."""
    return machine.cache_folder() / f"film-{_recipe_hash()}"


def ensure_blank(*, viewers: int, volumes: int, voxels: int) -> pathlib.Path:
    """Return a folder of the published shapes of Sherlock, all zeros. Raises DataError."""
    sizes = Sizes(
        picture=(90, 160),
        fps=25,
        audio_rate=75,
        codebooks=8,
        text=3072,
        viewers=viewers,
        volumes=volumes,
        voxels=voxels,
    )
    name = f"blank-{viewers}x{volumes}x{voxels}-{_recipe_hash()}"
    return _ensure_folder(name, functools.partial(_write_zeros, sizes=sizes))


def _recipe_hash() -> str:
    recipe = pathlib.Path(__file__).read_bytes()
    return hashlib.sha256(recipe).hexdigest()[:12]


def _ensure_folder(name: str, make: Callable[[pathlib.Path], None]) -> pathlib.Path:
    """Return the folder ``name`` of the cache, made if it is not there."""
    try:
        return atomic_write.once(machine.cache_folder(name), make)
    except OSError as error:
        raise DataError(
            f"cannot make {name} in {machine.cache_folder()}: {error};"
            " set JAXTRAIN_CACHE to a writable folder with 100 MB free"
        ) from error


def make(folder: pathlib.Path) -> None:
    """Write the film into an empty folder."""
    # The order in which these draw numbers belongs to the recipe.
    rng = np.random.default_rng(2026)
    seconds = VOLUMES * TR
    n_frames = round(seconds * FPS)
    levels = _draw_levels(rng, n_frames)
    np.save(folder / "video.npy", _paint_frames(rng, levels))
    np.save(folder / "audio.npy", _draw_codes(rng, levels))
    window_levels = _window_means(levels)
    np.save(folder / "text.npy", _embed_text(rng, window_levels))
    response = _shared_response(rng, window_levels)
    viewers = _viewer_names(VIEWERS)
    (folder / "fmri").mkdir()
    for viewer in viewers:
        noise = NOISE * rng.standard_normal(response.shape)
        measured = _z_scored(response + noise)
        np.save(folder / "fmri" / f"{viewer}.npy", measured.astype(np.float16))
    info = {"tr": TR, "fps": FPS, "audio_rate": AUDIO_RATE, "audio": "codes", "subjects": viewers}
    film_files.write(folder, info)


def make_outline(folder: pathlib.Path) -> None:
    """Write the film's shapes, all zeros: its dataset info before it is made."""
    sizes = Sizes(
        picture=(HEIGHT, WIDTH),
        fps=FPS,
        audio_rate=AUDIO_RATE,
        codebooks=CODEBOOKS,
        text=TEXT,
        viewers=VIEWERS,
        volumes=VOLUMES,
        voxels=VOXELS,
    )
    _write_zeros(folder, sizes)


def _viewer_names(n_viewers: int) -> list[str]:
    return [f"viewer-{number}" for number in range(1, n_viewers + 1)]


def _write_zeros(folder: pathlib.Path, sizes: Sizes) -> None:
    """Write a film of these sizes into an empty folder: sparse files, which take no space."""
    seconds = sizes.volumes * TR
    n_frames = round(seconds * sizes.fps)
    n_codes = round(seconds * sizes.audio_rate)
    _write_zero_array(folder / "video.npy", (n_frames, *sizes.picture, 3), "u1")
    _write_zero_array(folder / "audio.npy", (n_codes, sizes.codebooks), "<i2")
    _write_zero_array(folder / "text.npy", (sizes.volumes, sizes.text), "<f4")
    viewers = _viewer_names(sizes.viewers)
    (folder / "fmri").mkdir()
    for viewer in viewers:
        _write_zero_array(folder / f"fmri/{viewer}.npy", (sizes.volumes, sizes.voxels), "<f2")
    # Without checksums, for which all the zeros would be read.
    info = {
        "version": film_files.VERSION,
        "tr": TR,
        "fps": sizes.fps,
        "audio_rate": sizes.audio_rate,
        "audio": "codes",
        "subjects": viewers,
    }
    (folder / "dataset.json").write_text(json.dumps(info))


def _write_zero_array(path: pathlib.Path, shape: tuple[int, ...], dtype: str) -> None:
    header = {"descr": dtype, "fortran_order": False, "shape": shape}
    n_bytes = math.prod(shape) * np.dtype(dtype).itemsize
    with path.open("wb") as file:
        np.lib.format.write_array_header_1_0(file, header)
        file.truncate(file.tell() + n_bytes)


def _draw_levels(rng: np.random.Generator, n_frames: int) -> np.ndarray:
    """Return the levels, [n_frames, QUANTITIES] in 0..1: a sigmoid of noise smoothed over 4 s."""
    span = round(4 * FPS)
    bump = np.hanning(2 * span + 1)
    noise = rng.standard_normal((n_frames + 2 * span, QUANTITIES))
    smooth_columns = [np.convolve(column, bump, "valid") for column in noise.T]
    smooth = np.stack(smooth_columns, axis=1)
    scaled = 2 * smooth / smooth.std(0)
    levels: np.ndarray = 1 / (1 + np.exp(-scaled))
    return levels


def _paint_frames(rng: np.random.Generator, levels: np.ndarray) -> np.ndarray:
    """Return the frames, uint8 [frames, HEIGHT, WIDTH, 3]."""
    n_frames = len(levels)
    seconds = np.arange(n_frames) / FPS
    frames = np.full((n_frames, HEIGHT, WIDTH, 3), 20.0, np.float32)
    y, x = np.mgrid[:HEIGHT, :WIDTH].astype(np.float32)
    for quantity in range(QUANTITIES):
        line, column = divmod(quantity, 4)
        sway = 2 * np.sin(seconds * rng.uniform(0.5, 2.0))
        centre_x = (column + 0.5) * WIDTH / 4 + sway
        centre_y = (line + 0.5) * HEIGHT / 3
        distance_x = x[None] - centre_x[:, None, None]
        distance_y = y[None] - centre_y
        squared_distance = distance_x**2 + distance_y**2
        blob = np.exp(-squared_distance / (2 * 4.0**2))
        brightness = levels[:, quantity, None, None] * blob
        colour = rng.uniform(60, 220, 3).astype(np.float32)
        frames += brightness[..., None].astype(np.float32) * colour
    noisy = frames + rng.normal(0, 4, frames.shape)
    return np.clip(noisy, 0, 255).astype(np.uint8)


def _draw_codes(rng: np.random.Generator, levels: np.ndarray) -> np.ndarray:
    """Return the audio codes, int16 [times, CODEBOOKS]."""
    n_codes = round(len(levels) / FPS * AUDIO_RATE)
    place_in_frames = np.arange(n_codes) * FPS / AUDIO_RATE
    frame_of_code = np.minimum(place_in_frames.astype(int), len(levels) - 1)
    quantity_of_codebook = np.arange(CODEBOOKS) % 4
    code_levels = levels[frame_of_code][:, quantity_of_codebook]
    noise = rng.normal(0, 60, code_levels.shape)
    codes = np.clip(1023 * code_levels + noise, 0, 1023)
    return np.ascontiguousarray(codes, np.int16)  # otherwise its memory order depends on its size


def _window_means(levels: np.ndarray) -> np.ndarray:
    """Return the mean of the quantities in each volume's window, [VOLUMES, QUANTITIES]."""
    frames_per_volume = round(TR * FPS)
    means = []
    for volume in range(VOLUMES):
        # A window is the frames before its volume. Before the first there is only the first frame.
        stop = volume * frames_per_volume
        start = max(stop - frames_per_volume, 0)
        window = levels[start : max(stop, 1)]
        means.append(window.mean(0))
    return np.stack(means)


def _embed_text(rng: np.random.Generator, window_levels: np.ndarray) -> np.ndarray:
    """Return the embeddings of text, float32 [VOLUMES, TEXT]."""
    projection = rng.standard_normal((QUANTITIES, TEXT))
    noise = rng.standard_normal((VOLUMES, TEXT))
    embeddings: np.ndarray = window_levels @ projection + 0.5 * noise
    return embeddings.astype(np.float32)


def _shared_response(rng: np.random.Generator, window_levels: np.ndarray) -> np.ndarray:
    """Return the response of a viewer without noise, [VOLUMES, VOXELS], z-scored."""
    weights = rng.standard_normal((QUANTITIES, VOXELS))
    drive = _z_scored(window_levels) @ weights
    activity = np.tanh(drive / 2)
    volumes = np.arange(VOLUMES)
    response = np.zeros_like(activity)
    for lag, weight in enumerate(glover(TR)):
        past_volumes = np.maximum(volumes - lag, 0)
        response += weight * activity[past_volumes]
    return _z_scored(response)


def _z_scored(x: np.ndarray) -> np.ndarray:
    centred = x - x.mean(0)
    scored: np.ndarray = centred / x.std(0)
    return scored


if __name__ == "__main__":
    print(ensure())
