"""A random forest on MFCC, on the same rows and the same split as a run.

    python -m tools.bench forest --config=folder:index [--seeds 3] [--config.data.label=label …]

It is a baseline that takes seconds: the accuracy on the split "test" of 500 trees, from the mean
and standard deviation over time of 20 coefficients and of their differences. The coefficients are
the cosine transform of the spectrograms that the run's loader makes, with each row cropped as in an
evaluation.
"""

import argparse
import sys
import time
from collections.abc import Sequence

import numpy as np
import scipy.fft

from jaxtrain import config as config_lib
from jaxtrain.config import command_line
from loaders.audio import spectrogram
from loaders.base import Rows

COEFFICIENTS = 20
TREES = 500
BATCH = 32


def mfcc(x_fw: np.ndarray) -> np.ndarray:
    """Return mean and standard deviation of a spectrogram's cepstra, and of their differences."""
    cepstra = scipy.fft.dct(x_fw, axis=-1, norm="ortho")[:, :COEFFICIENTS]
    changes = np.diff(cepstra, axis=0)
    return np.concatenate([cepstra.mean(0), cepstra.std(0), changes.mean(0), changes.std(0)])


def features(config: spectrogram.Config, split: str) -> tuple[np.ndarray, np.ndarray]:
    """Return the features [n, 80] and the class [n] of a split's rows that have one class."""
    rows = Rows(BATCH, ((0, BATCH),))
    loader = spectrogram.Spectrograms(config, split=split, rows=rows, seed=0, in_order=True)
    x, y = [], []
    try:
        for _ in range(loader.n_batches):
            _, batch = next(loader)
            (clips,), (labels,), (weights,) = batch["spectrogram"], batch["label"], batch["weight"]
            is_used = (weights > 0) & (labels >= 0)
            x += [mfcc(np.asarray(clip, np.float32)) for clip in clips[is_used]]
            y.append(labels[is_used])
    finally:
        loader.close()
    return np.stack(x), np.concatenate(y)


def accuracy(
    train: tuple[np.ndarray, np.ndarray], test: tuple[np.ndarray, np.ndarray], seed: int
) -> float:
    """Return the share of ``test`` that a forest on ``train`` gets right."""
    from sklearn import ensemble

    forest = ensemble.RandomForestClassifier(TREES, random_state=seed)
    forest.fit(*train)
    return float(forest.score(*test))


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="tools.bench forest",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--seeds", type=int, default=3)
    args, of_config = parser.parse_known_args(argv)
    arguments = command_line.parse_args(of_config)
    config = config_lib.load(arguments.source, arguments.overrides)
    began = time.perf_counter()
    train, test = features(config.data, "train"), features(config.data, "test")
    found = [accuracy(train, test, seed) for seed in range(args.seeds)]
    seconds = time.perf_counter() - began
    each = ", ".join(f"{100 * x:.1f}" for x in found)
    print(f"a forest on MFCC: {100 * np.mean(found):.1f} % ({each}) of {len(test[1])} rows")
    print(f"{len(train[1])} rows to train on, {seconds:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
