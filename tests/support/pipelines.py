"""Pipelines of the extension. Their settings are those of a config, or what a test names."""

import dataclasses
from typing import Any

import numpy as np

from loaders import _rust
from loaders.audio.spectrogram import Config, pipeline_settings

# A short recording lies at its start in training, where a test knows to find it.
CONFIG = Config(short="origin", threads=1)


def make(
    index: _rust.Index, *, rows: Any, batch: int, ranges: Any, seed: int, train: bool, **named: Any
) -> _rust.Pipeline:
    settings = pipeline_settings(
        CONFIG, np.asarray(rows, np.int64), batch, ranges, seed=seed, train=train
    )
    return _rust.Pipeline(index, dataclasses.replace(settings, **named))
