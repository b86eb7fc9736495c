"""The settings of the Rust pipeline, which reads them by their names.

They have no defaults here: `loaders.audio.spectrogram.pipeline_settings` makes them of a config.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, kw_only=True, eq=False)
class PipelineSettings:
    """Everything that a pipeline must know besides the index: see ``Settings`` in rust/python."""

    rows: NDArray[np.int64]  # [n] rows of the index that this split uses
    batch: int  # [rows] of the global batch
    # [start, stop) of the global batch that this process reads, each
    ranges: Sequence[tuple[int, int]]
    seed: int  # in [0, 2^64)
    # True for permuted, endless batches of random crops; False for one pass in order over the
    # centre crops
    train: bool
    # A _rust.FilterBank: the front end, at whose rate crops are taken. The stub of _rust imports
    # this module, which therefore cannot import the type.
    bank: object
    # times slower than life that recordings are: their rate is this times that of their headers
    time_expansion: float
    clip_samples: int  # of a crop, at the rate of the front end
    n_frames: int  # of a spectrogram, at least those of a crop
    views: int  # crops of one recording in each row
    # What a row holds of a crop: its spectrogram, the same as bfloat16 (which NumPy has as uint16),
    # or its samples
    form: Literal["float32", "bfloat16", "waveform"]
    # of recordings whose row names none; None for the mean of all
    channel: int | None
    # Where samples that are fewer than a crop lie in it: "origin" (at the start in training, in the
    # centre in testing), "start", "centre", or "random" (anywhere in training, in the centre in
    # testing)
    short: Literal["origin", "start", "centre", "random"]
    repeat: bool  # they are surrounded by themselves, not by silence
    # A part that is shorter than a crop is surrounded by silence, and not by the recording that it
    # is a part of
    silence: bool
    # (rows of a block, blocks of a window) of the block order in training; None for a permutation
    # of all rows
    block: tuple[int, int] | None
    threads: int  # that decode
    depth: int  # [batches] that may be finished and queued
    # Share of the recordings that may be unusable: max(1, bad_budget * n) of them, or none for 0
    bad_budget: float
