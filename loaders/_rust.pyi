"""The compiled extension (rust/). All arrays are numpy; every wait releases the GIL and answers Ctrl-C."""

import os
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

ORDER_VERSION: int  # of the permutation and of the crops; equals loaders.order.VERSION
STAGES: list[str]  # keys of diagnostics()["seconds"]

def build_profile() -> Literal["release", "debug"]:
    """How the extension was compiled. "debug" is many times slower."""

def decode(data: bytes, start: int = 0, length: int | None = None) -> tuple[NDArray[np.float32], int, int]:
    """Encoded audio -> (mono float32 [length], sample rate in Hz, frames in the whole recording).

    WAV, FLAC, MP3, OGG Vorbis and OGG Opus (always 48 kHz), told apart by their content. ``length`` None decodes from
    ``start`` to the end.
    Raises ValueError: broken or unknown audio, or samples that the recording does not have.
    """

def resample(wave: NDArray[np.float32], source_rate: int, target_rate: int) -> NDArray[np.float32]:
    """float32 [n] -> float32 [round(n * target_rate / source_rate)], without delay. Rates in Hz; ValueError for 0."""

def fbank(wave: NDArray[np.float32], *, normalise: bool = False) -> NDArray[np.float32]:
    """float32 [n] at 32 kHz -> Kaldi log-mel, float32 [1 + (n - 800) // 320, 128], in ln(energy).

    normalise=True -> [512, 128] as the model sees it: the clip's mean removed, padded with the clip's minimum, and
    (x + 7.2) / 8.86. Raises ValueError: fewer than 800 samples; more than 512 frames to normalise.
    """

def front_end(wave: NDArray[np.float32], rate: int, clip_samples: int, n_frames: int) -> NDArray[np.float32]:
    """float32 [n] at ``rate`` Hz -> [n_frames, 128], as the pipeline makes a row of one view of a test split.

    ``clip_samples`` at 32 kHz. ValueError for a rate of 0, a clip that does not make 1 to n_frames frames, samples of nan.
    """

def permutation(seed: int, epoch: int, n: int, i: NDArray[np.int64]) -> NDArray[np.int64]:
    """Places int64 [k] in [0, n) of an epoch -> recordings int64 [k]: a bijection. IndexError for a place outside."""

def block_order(seed: int, epoch: int, stops: NDArray[np.int64], window: int, i: NDArray[np.int64]) -> NDArray[np.int64]:
    """Places int64 [k] of an epoch -> recordings int64 [k] in the block order; see `loaders.order.block_order`.

    ``stops`` [blocks]: after the last recording of each block. IndexError for a place outside, ValueError for stops that
    decrease or a window of 0.
    """

def sudoku_solve(
    boards: NDArray[np.uint8], *, limit: int = 2, threads: int = 1
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.uint8]]:
    """uint8 [n, 16 or 81], 0 for a blank -> solutions [n], up to ``limit``; guesses [n] of the search; a solution [n, cells].

    A board without a solution gets zeros. 0 guesses: forced cells alone solve it. ValueError for boards of another size.
    """

def sudoku_generate(
    n: int, *, side: int = 9, seed: int = 0, start: int = 0, blanks: tuple[int, int] = (0, 81), threads: int = 1
) -> tuple[NDArray[np.uint8], NDArray[np.uint8], NDArray[np.int64]]:
    """Puzzles number start … start + n - 1 of a seed, each with one solution: boards and solutions [n, side²], guesses [n].

    ``blanks``: fewest and most; the number is drawn between them, and is smaller where no more can be dug. ``side``: 4 or 9.
    """

class Index:
    """A row index over Arrow IPC and Parquet shards, made without reading audio. rust/src/source.rs has the formats."""

    def __init__(
        self,
        shards: Sequence[str | os.PathLike[str]],
        *,
        audio: str = "audio",
        label: str | None = None,
        root: str | os.PathLike[str] | None = None,
        cache: str | os.PathLike[str] | None = None,
    ) -> None:
        """``audio``: a column of struct<bytes, path>. ``label``: a column of int64, or None for no labels.

        ``root``: the folder of recordings whose bytes are null and whose path is not; None = the shard's own. ``cache``: a
        folder where the index is kept until a shard's name, size or time changes; None = nowhere.

        Raises OSError for a shard that cannot be opened, and ValueError for one that is broken, compressed, without one of
        the columns or with another type, with a label outside its class names, or with other classes than the first.
        """

    @property
    def n_rows(self) -> int: ...
    @property
    def class_names(self) -> list[str] | None:
        """Of the ClassLabel in the schema's metadata, where there is one."""

    @property
    def labels(self) -> NDArray[np.int64]:
        """[n_rows], -1 where null, all -1 without a label column."""

    @property
    def fingerprint(self) -> str:
        """Changes when the data or their order do, and not when their folder moves."""

    @property
    def first_rows(self) -> NDArray[np.int64]:
        """[n_shards]: the first row of each."""

    def encoded(self, row: int) -> bytes:
        """The recording as it lies in the shard, or in the file that its path names where it is null there.

        Raises IndexError, and ValueError where there is neither.
        """

    def path(self, row: int) -> str | None:
        """The name under which the recording was stored."""

    def paths(self) -> list[str | None]:
        """`path` of all rows."""

    def __len__(self) -> int: ...

class Pipeline:
    """Batches of spectrograms by ``threads`` workers, in an order that is a function of the position alone."""

    def __init__(
        self,
        index: Index,
        *,
        rows: NDArray[np.int64],  # [n]: the rows of the index that this split uses
        batch: int,  # rows of the global batch
        ranges: Sequence[tuple[int, int]],  # [start, stop) of the global batch that this process reads
        seed: int,  # in [0, 2^64)
        train: bool,  # permuted, endless, random crops; or in order, once, centre crops
        sample_rate: int = 32_000,  # Hz
        clip_samples: int = 160_000,  # at sample_rate
        n_frames: int = 512,  # of a row; at least those of a clip
        views: int = 1,  # crops of one recording in a row
        form: Literal["float32", "bfloat16", "waveform"] = "float32",  # of a row; bfloat16 is given as uint16
        block: tuple[int, int] | None = None,  # the block order: rows of a block, blocks of a window
        threads: int = 1,
        depth: int = 2,  # finished batches that may wait
        bad_budget: float = 0.01,  # share of the recordings that may fail: max(1, budget * n), or 0 if it is 0
    ) -> None:
        """Starts threads, which wait for the first seek or next. Raises ValueError or IndexError for a senseless plan."""

    def seek(self, position: int) -> None:
        """Goes on with global batch number ``position``, also after the end of a test split."""

    def next(self) -> tuple[int, dict[str, list[NDArray[Any]]]]:
        """The position after this batch, and for each field one array for each range, r rows long.

        spectrogram float32 (uint16 of form "bfloat16") [r, n_frames, 128], or [r, views, n_frames, 128] when views > 1; of form
        "waveform" instead waveform int16 [r, clip_samples], or [r, views, clip_samples]: 32768 times the samples that the
        filter bank would take, rounded to nearest even and clipped; label, index, epoch int32 [r]; weight float32 [r]. Arrays
        are read-only, contiguous, aligned to 64 bytes, and own their memory.

        Raises StopIteration after the end of a test split or close(), and RuntimeError, for good, when more recordings
        fail than the budget allows. KeyboardInterrupt comes through within a tenth of a second.
        """

    def diagnostics(self) -> dict[str, Any]:
        """queued, filling, depth: batches. threads. slabs, slab_bytes: buffers that exist, and the size of each.

        rows: written so far. bad, bad_allowed: distinct recordings that failed, and that may. bad_list: (row of the index,
        reason) of the first hundred. seconds: by stage, of all workers together; "wait" is the consumer's. slowest: the
        workers' stage with the most of them, None before any work. bytes_recordings: of the recordings that were opened;
        bytes_used: the share of them that the crops needed; bytes_ahead: asked of the system in advance (block order).
        faults: page faults of the workers that waited for the disk or the network (0 where the system does not count).
        """

    def close(self) -> None:
        """Stops the workers. A wait in ``next`` in another thread ends with StopIteration."""
