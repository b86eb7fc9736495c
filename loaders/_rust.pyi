"""The compiled extension (rust/). All arrays are numpy; every wait releases the GIL and answers Ctrl-C."""

from collections.abc import Sequence
from typing import Any

import numpy as np

def build_profile() -> str:
    """"release" or "debug"."""

def decode(data: bytes, start: int = 0, length: int | None = None) -> tuple[np.ndarray, int, int]:
    """Encoded audio -> (mono float32 [length], sample rate in Hz, frames in the whole recording).

    WAV, FLAC, MP3 and OGG Vorbis, told apart by their content. Raises ValueError.
    """

def resample(wave: np.ndarray, source_rate: int, target_rate: int) -> np.ndarray:
    """float32 [n] -> float32 [round(n * target_rate / source_rate)], without delay."""

def fbank(wave: np.ndarray, *, normalise: bool = False) -> np.ndarray:
    """float32 [n] at 32 kHz -> Kaldi log-mel float32 [frames, 128]; normalise=True -> [512, 128] as the model sees it."""

def permutation(seed: int, epoch: int, n: int, i: np.ndarray) -> np.ndarray:
    """int64 [k] places in the epoch -> int64 [k] recordings."""

class Index:
    """A row index over Arrow IPC stream or file shards, made without reading audio."""

    def __init__(self, shards: Sequence[str], *, audio: str = "audio", label: str | None = None) -> None: ...
    n_rows: int
    class_names: list[str] | None  # of the ClassLabel in the schema's metadata
    labels: np.ndarray             # int64 [n_rows], -1 where null; all -1 without a label column
    fingerprint: str               # changes when the data or their order do
    def encoded(self, row: int) -> bytes: ...
    def path(self, row: int) -> str | None: ...

class Pipeline:
    def __init__(
        self,
        index: Index,
        *,
        rows: np.ndarray,                    # int64 [n]: the rows of the index that this split uses
        batch: int,
        ranges: Sequence[tuple[int, int]],
        seed: int,
        train: bool,
        sample_rate: int = 32000,
        clip_samples: int = 160000,
        n_frames: int = 512,
        threads: int = 1,
        depth: int = 2,                      # finished batches that may wait
        bad_budget: float = 0.01,
    ) -> None: ...
    def seek(self, position: int) -> None: ...
    def next(self) -> tuple[int, dict[str, list[np.ndarray]]]:
        """spectrogram float32 [r, n_frames, 128], label, index, epoch int32 [r], weight float32 [r] for each range."""
    def diagnostics(self) -> dict[str, Any]: ...
    def close(self) -> None: ...
