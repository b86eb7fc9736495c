"""The loader's compiled core (rust/).

Arrays are numpy's; waits release the GIL, and waits for data answer Ctrl-C.
"""

import os
from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from loaders.audio.pipeline_settings import PipelineSettings

ORDER_VERSION: int  # of the permutation and of the crops; equals loaders.order.VERSION
STAGES: list[str]  # keys of Pipeline.diagnostics()["seconds"]

def build_profile() -> Literal["release", "debug"]:
    """Return how the extension was compiled: "release", or "debug", which is many times slower."""

def delay_abort() -> None:
    """Let a thread that aborts wait for 1 s before the process ends.

    A library may abort because another process of the run has died. The thread that is about to
    name that process then still does so. Calls after the first have no effect. Raises OSError: the
    system refuses.
    """

def decode(
    data: bytes, start: int = 0, length: int | None = None, channel: int | None = None
) -> tuple[NDArray[np.float32], int, int]:
    """Decode a recording, or a part of it, to mono.

    The format is recognised by its content: plain samples (WAV, W64, AIFF, CAF, AU), FLAC, MP3, OGG
    Vorbis or OGG Opus (always decoded to 48 kHz), and more slowly M4A (AAC, ALAC), CAF with ALAC
    and WAV with ADPCM. The samples are [start, start + length); length=None decodes to the end.
    channel=None: the mean of all channels.

    Returns (wave, rate, frames): float32 [length], at the recording's own sample rate;
    that rate in Hz; the number of samples per channel in the whole recording.
    Raises ValueError for an unknown format, damaged audio, a rate outside [1000, 768000] Hz, a
    range outside the recording, or one of more than 2^30 samples.
    """

def recording_info(path: str | os.PathLike[str]) -> tuple[int, int, int, bool]:
    """Read what the headers of a recording state.

    Returns (rate, frames, channels, slow): the sample rate in Hz; the exact number of samples per
    channel; the number of channels; whether its format is decoded several times slower. The file is
    mapped, and only the parts of it that say where it ends are read.
    Raises OSError for a file that cannot be opened, and ValueError for an unknown format or damaged
    headers.
    """

def recording_doubts(path: str | os.PathLike[str]) -> tuple[int, bool]:
    """Look for what is odd about a recording that can be read.

    Returns (stated, cancels): the number of samples per channel that its header states, 0 if none,
    which differs from recording_info's if the file was cut short or its header never brought up to
    date (2^63 − 1 if none is stated, and the file ends inside a page or frame); whether its two
    channels cancel each other at a few places that are decoded. Raises what recording_info raises.
    """

def recording_peak(path: str | os.PathLike[str]) -> float:
    """Look for samples of a recording of floats that floats do not have.

    Returns the largest at a few places, 0 for any other recording. Floats lie in [-1, 1], but for
    those that a wrong writer copied from integers. Raises OSError for a file that cannot be opened.
    """

def recording_fault(path: str | os.PathLike[str], start: float, end: float) -> str | None:
    """Say why a part of a recording cannot be decoded.

    The part is [start, end) s. None: it can be decoded.
    Raises what recording_info raises.
    """

def recording_beyond(path: str | os.PathLike[str]) -> tuple[int, int]:
    """Count the samples of a recording of floats that no spectrogram can be made of.

    Returns how many samples (of any channel) are NaN, infinite or beyond 1e12, and the first one.
    All of the file is read. Other formats than floats have none.
    Raises what recording_info raises.
    """

def recording_sound(path: str | os.PathLike[str]) -> int | None:
    """Return a number for the sound of a recording, the same for its copies without loss.

    It is of samples at a few places, as 16 bits. None: these do not vary, or cannot be decoded.
    Numbers are comparable within a process. Raises what recording_info raises.
    """

def resample(wave: NDArray[np.float32], source_rate: int, target_rate: int) -> NDArray[np.float32]:
    """Resample a waveform from source_rate to target_rate (Hz), without delay.

    Returns float32 [round(n * target_rate / source_rate)] for n input samples.
    Raises ValueError for a rate outside [1000, 768000] Hz, and for more than 2^30 samples.
    """

class FilterBank:
    """The tables of a front end: of waveforms at sample_rate (Hz), Kaldi's log-mel energies.

    window, hop: samples of a frame, and from one to the next. n_mels: bands, from f_min to f_max
    (Hz). mean, std: a model reads (x - mean) / (2 std).

    Raises ValueError for a rate outside [1000, 768000] Hz, a window outside [16, 32768], a hop
    outside [1, 2^20], n_mels outside [1, 4096], frequencies that do not increase from 0 to half the
    rate, and a mean or std that is no number.
    """

    def __init__(
        self,
        *,
        sample_rate: int = 32_000,
        window: int = 800,
        hop: int = 320,
        n_mels: int = 128,
        f_min: float = 20.0,
        f_max: float = 16_000.0,
        mean: float = -7.2,
        std: float = 4.43,
    ) -> None: ...

def fbank(
    wave: NDArray[np.float32], *, bank: FilterBank | None = None, normalise: bool = False
) -> NDArray[np.float32]:
    """Compute the Kaldi-compatible log-mel spectrogram of a waveform at the filter bank's rate.

    Returns float32 [1 + (n - window) // hop, n_mels] for n samples: natural log of the energy.
    bank=None: FilterBank(). normalise=True returns float32 [512, n_mels] as the model reads it:
    padded with the spectrogram's minimum, then (x - mean) / (2 std).
    Raises ValueError for samples that make no frame and, with normalise=True, more than 512.
    """

def front_end(
    wave: NDArray[np.float32],
    rate: int,
    clip_samples: int,
    n_frames: int,
    *,
    bank: FilterBank | None = None,
) -> NDArray[np.float32]:
    """Compute the spectrogram that the pipeline makes of this recording in a test split.

    It has one view.

    wave: float32 [n] at rate (Hz). clip_samples: length of the clip at the rate of the filter bank,
    taken from the recording's centre, or the whole recording centred between zeros where it is
    shorter. bank=None: FilterBank().

    Returns float32 [n_frames, n_mels], normalised.
    Raises ValueError for a rate outside [1000, 768000] Hz, a clip of no frames or of more than
    n_frames, more than 2^30 values, and NaN or huge samples.
    """

def permutation(seed: int, epoch: int, n: int, i: NDArray[np.int64]) -> NDArray[np.int64]:
    """Map places of an epoch to recordings: a bijection of [0, n).

    i: int64 [k], each in [0, n). Returns int64 [k].
    Raises IndexError for a place outside [0, n), and ValueError unless 1 <= n < 2^62.
    """

def block_order(
    seed: int, epoch: int, stops: NDArray[np.int64], window: int, i: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Map places of an epoch to recordings in the block order; see loaders.order.block_order.

    stops: int64 [blocks], the end (exclusive) of each block. window: blocks whose recordings are
    permuted together.
    i: int64 [k], places of the epoch. Returns int64 [k].
    Raises IndexError for a place outside the epoch, and ValueError for stops that decrease or a
    window of 0.
    """

def sudoku_solve(
    boards: NDArray[np.uint8], *, limit: int = 2, threads: int = 1
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.uint8]]:
    """Solve sudoku boards, counting their solutions.

    boards: uint8 [n, 16, 36 or 81], row by row, 0 for a blank.

    Returns (solutions, guesses, first): int64 [n], the number of solutions, at most limit; int64
    [n], the guesses that the search made, 0 where forced cells alone solve the board; uint8 [n,
    cells], the first solution, zeros where a board has none.
    Raises ValueError for boards of another size, and for more than 1024 threads.
    """

def sudoku_generate(
    n: int,
    *,
    side: int = 9,
    seed: int = 0,
    start: int = 0,
    blanks: tuple[int, int] = (0, 81),
    threads: int = 1,
) -> tuple[NDArray[np.uint8], NDArray[np.uint8], NDArray[np.int64]]:
    """Generate sudoku puzzles with one solution each: numbers start to start + n - 1 of a seed.

    side: 4, 6 or 9. blanks: the fewest and the most; each puzzle's number is drawn between them,
    and is smaller where removing another digit would allow a second solution.

    Returns (boards, solutions, guesses): uint8 [n, side * side], 0 for a blank; uint8 [n, side *
    side]; int64 [n], the guesses that the solver makes.
    Raises ValueError for another side, more than 2^24 puzzles, numbers beyond 2^64, and more than
    1024 threads.
    """

def sudoku_grade(
    boards: NDArray[np.uint8], *, threads: int = 1
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Grade sudoku boards by the steps that they need, and count guesses without a solution.

    boards: as of `sudoku_solve`.

    Returns (grades, backtracks): int64 [n], 0 singles, 1 pairs, 2 chains, 3 guesses, defined in
    rust/core/src/sudoku_grades.rs; int64 [n], of the guesses that `sudoku_solve` counts.
    Raises ValueError for boards of another size, and for more than 1024 threads.
    """

def sudoku_invariant(boards: NDArray[np.uint8], *, threads: int = 1) -> NDArray[np.uint64]:
    """Hash sudoku boards so that symmetric copies of a board have the same number.

    boards: as of `sudoku_solve`. Symmetries: digits renamed, bands and rows in them, stacks and
    columns in them permuted, transposed.

    Returns uint64 [n].
    Raises ValueError for boards of another size, digits above the side, and more than 1024 threads.
    """

class Index:
    """A row index over Arrow IPC and Parquet shards, built without reading audio.

    shards: paths of the shards, in order. audio: the column of recordings, a struct of bytes and
    path. label: the column of int64 class labels; None for no labels. root: the folder that the
    paths of recordings without bytes are relative to; None for the folder of each shard. cache: a
    folder that keeps the index until the name, size or modification time of a shard changes; None
    for no cache. links: whether links may lead out of root, below which every named file must lie.
    copying: whether the shards may still be copied; what is not there of them is waited for.

    Raises OSError for a shard that cannot be opened. Raises ValueError for a shard that is damaged
    or compressed, a column that is missing or of another type, a label outside its class names, and
    classes that differ from those of the first shard.
    """

    def __init__(
        self,
        shards: Sequence[str | os.PathLike[str]],
        *,
        audio: str = "audio",
        label: str | None = None,
        root: str | os.PathLike[str] | None = None,
        cache: str | os.PathLike[str] | None = None,
        links: bool = False,
        copying: bool = False,
    ) -> None: ...
    @property
    def n_rows(self) -> int:
        """The number of rows in all shards."""

    @property
    def class_names(self) -> list[str] | None:
        """The names of the ClassLabel in the schema's metadata; None where it names none."""

    @property
    def labels(self) -> NDArray[np.int64]:
        """The class of each row, int64 [n_rows]; -1 where it is null, or without a label column."""

    @property
    def fingerprint(self) -> str:
        """A hash that changes with the data or their order, but not when their folder moves."""

    @property
    def first_rows(self) -> NDArray[np.int64]:
        """The first row of each shard, int64 [n_shards]."""

    def encoded(self, row: int) -> bytes:
        """Return a row's encoded recording: the shard's bytes, or the file at its path if null.

        Raises IndexError for a row that does not exist, and ValueError for a row without audio.
        """

    def path(self, row: int) -> str | None:
        """Return the name that the recording of a row was stored under; None where it is null.

        Raises IndexError for a row that does not exist.
        """

    def paths(self) -> list[str | None]:
        """Return path(row) of every row."""

    def rows_named(self, names: set[str]) -> tuple[NDArray[np.int64], int]:
        """Return the rows of the recordings that were stored under one of the names.

        A name is a path, or an id: the path's file without folder and ending.
        Returns (rows, found): int64 [k]; how many of the names are those of a recording.
        """

    def part(self, row: int) -> tuple[float, float, int] | None:
        """Return where in its recording a row lies.

        Returns (start, end, channel): seconds, and -1 for the mean of the channels;
        None for a row that is its whole recording.

        Raises IndexError for a row that does not exist.
        """

    def prepare(
        self,
        row: int,
        *,
        rate: int,
        time_expansion: float = 1.0,
        channel: int | None = None,
        packed: bool = False,
        out: str | os.PathLike[str] | None = None,
        stop: Callable[[], bool] | None = None,
    ) -> tuple[bytes, int]:
        """Prepare the recording of a row: mono at `rate` Hz, 16 bits, in quickly decoded blocks.

        The blocks are FLAC.

        time_expansion, channel: as in PipelineSettings; the channel that the row names is ignored.
        packed: without loss, instead of samples as they are. out: an empty file to fill; None to
        return the bytes. stop: is called now and then, and ends the work by returning True.

        Returns (bytes, clipped): those of the recording, none with out; and how many samples
        exceeded full scale.

        Raises IndexError for a row that does not exist, ValueError for a recording that cannot be
        decoded whole, OSError for a file that cannot be written, and InterruptedError after stop.
        """

    def __len__(self) -> int: ...

class Pipeline:
    """Batches of spectrograms or waveforms by worker threads; the position decides the order.

    index: where the recordings are. settings: everything else, read by the names of its fields.

    The threads start at once and wait for the first seek or next.
    Raises ValueError for settings that contradict each other, IndexError for rows that are not in
    the index, AttributeError or TypeError for a setting that is missing or of another type.
    """

    def __init__(self, index: Index, settings: PipelineSettings) -> None: ...
    def seek(self, position: int) -> None:
        """Continue with global batch number position, also after the end of a test split.

        Raises ValueError for a position whose examples cannot be numbered in 64 bits.
        """

    def next(self) -> tuple[int, dict[str, list[NDArray[Any]]]]:
        """Wait for the next batch.

        Returns (position, fields). position: the number of the batch after this one. fields: for
        each field a list of arrays, one for each range, of r rows:

        spectrogram  float32 (uint16 for form="bfloat16") [r, n_frames, mels], or [r, views,
                     n_frames, mels] when views > 1
        waveform     int16 [r, clip_samples], or [r, views, clip_samples], instead of spectrogram
                     for form="waveform": the samples times 32768, rounded to nearest even and
                     clipped
        label        int32 [r], the class, -1 where it is null
        index        int32 [r], the recording's row in the index, -1 where the last batch of a test
                     split is padded
        epoch        int32 [r]
        weight       float32 [r], 1 for a valid row and 0 for padding or an unusable recording

        The arrays are read-only, contiguous, aligned to 64 bytes, and own their memory.
        Raises StopIteration after the end of a test split and after close. Raises RuntimeError,
        from then on, when more recordings are unusable than bad_budget allows. KeyboardInterrupt is
        raised within a tenth of a second.
        """

    def diagnostics(self) -> dict[str, Any]:
        """Return counters that show where time and memory go.

        queued: batches that are complete. threads: worker threads. slabs: batch buffers that exist.
        rows: rows written. bad, bad_allowed: distinct recordings that were unusable, and how many
        may be. bad_list: (row of the index, reason) of the first hundred. seconds: by stage, summed
        over the workers; "wait" is the consumer's. slowest: the workers' stage with the most
        seconds; None before any work. bytes_ahead: bytes requested from the system in advance
        (block order). slow_rows: rows of formats that symphonia reads (M4A, CAF with ALAC, ADPCM),
        several times slower.
        """

    def close(self) -> None:
        """Stop the workers. A next that waits in another thread raises StopIteration."""
