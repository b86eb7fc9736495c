"""The bird encoder in a small size, with every objective."""

from dataclasses import replace

import numpy as np

from jaxtrain import config as config_lib
from jaxtrain.workloads.bird import augment, masked
from jaxtrain.workloads.bird import model as bird
from jaxtrain.workloads.bird.objectives.diet import Diet
from jaxtrain.workloads.bird.objectives.lejepa import Lejepa
from jaxtrain.workloads.bird.objectives.mae import Mae
from jaxtrain.workloads.bird.objectives.supervised import Supervised
from jaxtrain.workloads.bird.objectives.teacher import Teacher
from jaxtrain.workloads.bird.settings import Mask
from tests.support.cases import Case

TINY = bird.Config(n_classes=5, n_frames=64, n_mels=32, embed=32, depth=2, heads=4, dtype="float32")
DECODER = masked.Decoder(16, 1, 2)
EVERY = replace(
    TINY,
    depth=2,
    heads=4,
    n_registers=1,
    views=2,
    n_recordings=300,
    pool="patches",
    mask=Mask(0.5, 2),
    mae=Mae(0.7, DECODER),
    teacher=Teacher(0.6, 0.5, DECODER),
    lejepa=Lejepa(0.5, hidden=32),
    diet=Diet(0.4, rank=8),
    supervised=Supervised(0.3, label_smoothing=0.1),
    augment=augment.Augment(mixup=0.5, gain=0.1),
)
ROWS = 32


def every_batch(seed, rows=ROWS):
    rng = np.random.default_rng(seed)
    return {
        "spectrogram": rng.normal(size=(rows, 2, 64, 32)).astype("f4"),
        "label": rng.integers(-1, 5, rows, dtype="i4"),  # -1: without a label
        "index": rng.permutation(300)[:rows].astype("i4"),
        "epoch": np.full(rows, seed, "i4"),
        "weight": (np.arange(rows) % 5 != 3).astype("f4"),
    }


CASE = Case(bird, EVERY, config_lib.Optim(lr=0.01, schedule="constant", eps=1e-3), every_batch)
# Eight devices along "model" need eight heads.
WIDE = replace(EVERY, heads=8, mae=Mae(), teacher=Teacher())
PREDICTOR = masked.Decoder(16, 1, 8)
MASKED = replace(
    WIDE,
    mae=replace(EVERY.mae, decoder=PREDICTOR),
    teacher=replace(EVERY.teacher, decoder=PREDICTOR),
)
MATRIX = {
    # SIGReg and batch norm over the global batch, mixup, masks, dropped layers, recordings in
    # parts.
    "bird": CASE._replace(model=WIDE),
    # The same with decoders and a teacher.
    "bird_masked": CASE._replace(model=MASKED),
}
