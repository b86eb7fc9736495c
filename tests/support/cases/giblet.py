"""The autoencoder in a small size."""

import functools

import numpy as np

from jaxtrain import config as config_lib
from jaxtrain.workloads.giblet import loss as giblet_loss
from jaxtrain.workloads.giblet import model as giblet
from tests.support.cases import Case

SMALL = giblet.Config(
    n_frames=4,
    height=4,
    width=8,
    codebooks=2,
    audio_frames=8,
    n_text=24,
    n_voxels=41,
    audio="codes",
    video_widths=(32, 24, 16),
    audio_widths=(16, 8),
    text_widths=(16, 8),
    trunk_widths=(40, 32),
    bottleneck=16,
    head_width=32,
    decoder_widths=(32, 24, 24, 16),
    decode_video_widths=(16, 32),
    decode_audio_widths=(16, 16),
    decode_text_widths=(16, 16),
    dtype="float32",
    normalised=True,
)
ROWS = 16


def random_batch(c, seed):
    rng = np.random.default_rng(seed)
    return {
        "video": rng.integers(0, 256, (ROWS, c.inputs["video"]), dtype="u1"),
        "audio": rng.integers(0, 1024, (ROWS, c.inputs["audio"]), dtype="i2"),
        "text": rng.standard_normal((ROWS, c.n_text), "f4"),
        "fmri": rng.standard_normal((ROWS, c.n_voxels), "f4"),
        **{name: np.arange(ROWS, dtype="i4") for name in ("index", "volume")},
        "weight": np.ones(ROWS, "f4"),
    }


CASE = Case(
    giblet_loss, SMALL, config_lib.Optim(lr=1e-3, eps=1e-3), functools.partial(random_batch, SMALL)
)
# Dropout, batch statistics, losses that are normalised over the batch, moments of each voxel at an
# evaluation.
MATRIX = {"giblet": CASE}
