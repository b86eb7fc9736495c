"""The built-in demo: synthetic birds, made once, so that a first run needs no download.

The corpus is 600 recordings of 12 invented species, 480 to train on and 120 to test on. A recording is a pure function
of (this file, its number): one individual sings its species' song from beginning to end, with pauses under 2 s, so that
every 5 s crop holds it.

  grammar     a song is a sequence of runs; a run repeats one note (a sweep, whistle, buzz, rasp or harmonic stack) some
              times, with a gap, a pitch step and an acceleration between repetitions. Species share the range
              from 1 to 8 kHz: some differ mostly in the order of two notes or the direction of a sweep, some in tempo.
  individual  pitch, tempo and level differ between recordings, and a little between songs and notes.
  background  a tilted noise floor 6 to 26 dB under the singer, echoes, and by chance wind in gusts, drops of rain,
              mains hum, and up to two distant birds of other species, 14 to 26 dB quieter.
  duration    3 to 60 s, log-normal. The codecs that cost most, in bytes or time, hold shorter ones.
  codec       synthesised at the rate of the file, and handed out in turn within each species:
              OGG Vorbis 32 kHz mono (five of eight), MP3 44.1 kHz stereo, FLAC 48 kHz mono 16-bit and WAV 22.05 kHz
              mono 16-bit (one of eight each).

On disk it is what ``DatasetDict.save_to_disk`` of Hugging Face ``datasets`` writes:

    birds-v1-480+120-0123456789ab/           format version, sizes, hash of this file: a changed recipe is a new folder
      dataset_dict.json                      {"splits": ["train", "test"]}
      train/ test/
        data-0000k-of-0000n.arrow            Arrow IPC stream; columns audio: struct<bytes: binary, path: string> and
                                             ebird_code: int64; schema metadata "huggingface" = {"info": {"features":
                                             {"audio": Audio, "ebird_code": ClassLabel with the species' names}}}
        dataset_info.json                    the same features
        state.json                           the shards in order, and a fingerprint of their content

Recordings 0 … 479 are train and the rest test, so that no recording is in both. The folder appears by one rename of a
finished one: if it is there, it is whole. The same machine and library versions give the same bytes again: libsndfile
draws a random serial number for an OGG stream, so it is replaced by the recording's number.

How hard it is (``pytest -m slow tests/loaders/test_demo.py -s``): a linear classifier of each mel band's mean and
deviation over one crop reaches 78 % on the test recordings, the nearest class mean 50 %, chance 8 %.

``python -m loaders.demo`` makes the corpus, if it is not there, and says what is in it.
"""

import argparse
import collections
import concurrent.futures
import contextlib
import fcntl
import functools
import hashlib
import io
import json
import logging
import os
import shutil
import tempfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import pyarrow as pa
import soundfile

from loaders import base, machine

N_TRAIN, N_TEST = 480, 120
FORMAT_VERSION = 1
SEED = 20  # of every recording, beside its number
ROWS_PER_SHARD, ROWS_PER_BATCH = 80, 20

logger = logging.getLogger("jaxtrain")


class Note(NamedTuple):
    """One syllable: a tone along a curve of pitch, with modulations."""

    seconds: float
    hz: tuple[float, ...]  # pitch at equidistant times, interpolated in log frequency
    partials: tuple[float, ...] = (1.0,)  # amplitude of each harmonic
    am: float = 0.0  # Hz of amplitude modulation, all the way down: a buzz
    fm: tuple[float, float] = (0.0, 0.0)  # Hz and octaves of frequency modulation: a warble
    rasp: float = 0.0  # share of the tone that is multiplied by noise


class Run(NamedTuple):
    """One note some times in a row."""

    note: Note
    times: tuple[int, int] = (1, 1)  # fewest, most
    gap: float = 0.06  # s after each
    step: float = 1.0  # pitch ratio from one to the next
    rush: float = 1.0  # gap ratio from one to the next


class Species(NamedTuple):
    name: str
    songs: tuple[tuple[Run, ...], ...]  # one of these at a time, drawn at random
    pause: tuple[float, float]  # s between songs


_DOWN, _UP = Note(0.034, (6000, 3600)), Note(0.034, (3600, 6000))
_STEP = Note(0.13, (1.0, 1.04, 0.98))  # scaled by the runs that use it


def _at(note: Note, hz: float) -> Note:
    return note._replace(hz=tuple(hz * ratio for ratio in note.hz))


SPECIES = (
    # Two whistles, high then low, and low then high.
    Species("mist_fifer", ((Run(Note(0.42, (4200, 4150))), Run(Note(0.42, (3300, 3250)))),), (0.7, 1.2)),
    Species("copper_fifer", ((Run(Note(0.42, (2500, 2450))), Run(Note(0.42, (3300, 3250)))),), (0.7, 1.2)),
    # The same sweep, slow (and lower) or fast, and its mirror image.
    Species("hill_rattler", ((Run(_at(_DOWN, 0.75), (8, 13), gap=0.11),),), (0.3, 0.7)),
    Species("reed_sprinkler", ((Run(_DOWN, (16, 30), gap=0.022),),), (0.4, 0.9)),
    Species("upland_zipper", ((Run(_UP, (16, 30), gap=0.022),),), (0.4, 0.9)),
    # Stairs of the same steps, down and up.
    Species("ember_tumbler", ((Run(_at(_STEP, 6800), (7, 9), gap=0.05, step=0.89),),), (0.5, 1.0)),
    Species("lantern_climber", ((Run(_at(_STEP, 2300), (7, 9), gap=0.05, step=1 / 0.89),),), (0.5, 1.0)),
    # Rough voices.
    Species(
        "saltmarsh_buzzer",
        ((Run(Note(0.55, (4300, 4000), (1, 0.5), am=95), (1, 2), gap=0.15),),),
        (0.5, 1.0),
    ),
    Species(
        "thorn_rasper",
        (
            (
                Run(Note(0.09, (3500, 3900), (1, 0.4), am=60, rasp=0.6), (2, 3), gap=0.05),
                Run(Note(0.4, (4200, 3400), (1, 0.4), am=60, rasp=0.6)),
            ),
        ),
        (0.4, 0.9),
    ),
    Species(
        "nasal_piper",
        ((Run(Note(0.16, (1150, 1250, 1050), (0.5, 0.8, 1, 0.8, 0.6, 0.4)), (2, 4), gap=0.09),),),
        (0.4, 1.0),
    ),
    # Richer syntax.
    Species(
        "glade_warbler",
        (
            (Run(Note(0.7, (3300, 4200), fm=(11, 0.22))), Run(Note(0.03, (4800, 3600)), (3, 5), gap=0.03)),
            (Run(Note(0.5, (4400, 3400), fm=(14, 0.18))), Run(Note(0.1, (2600, 5200)), (1, 2))),
        ),
        (0.4, 0.9),
    ),
    Species(
        "dusk_bouncer",
        ((Run(Note(0.045, (4700, 5500, 4400)), (10, 14), gap=0.26, rush=0.82),),),
        (0.5, 1.1),
    ),
)


class Codec(NamedTuple):
    suffix: str
    format: str
    subtype: str
    rate: int  # Hz
    channels: int
    median: float  # s, of a recording's duration
    kb_per_s: float  # measured; foretells the size of a corpus
    options: tuple[tuple[str, Any], ...] = ()


_OGG = Codec("ogg", "OGG", "VORBIS", 32000, 1, 8.2, 8.0, (("compression_level", 0.75),))
_MP3 = Codec("mp3", "MP3", "MPEG_LAYER_III", 44100, 2, 5.5, 12.0, (("compression_level", 0.8),))
_FLAC = Codec("flac", "FLAC", "PCM_16", 48000, 1, 4.8, 48.0)
_WAV = Codec("wav", "WAV", "PCM_16", 22050, 1, 4.8, 44.1)
CODECS = (_OGG, _MP3, _OGG, _FLAC, _OGG, _OGG, _WAV, _OGG)  # handed out in turn


class Recording(NamedTuple):
    number: int
    label: int  # index into SPECIES
    codec: Codec
    seconds: float

    @property
    def path(self) -> str:
        return f"{self.number:05d}-{SPECIES[self.label].name}.{self.codec.suffix}"


def recording(number: int) -> Recording:
    """What recording ``number`` is, without making it."""
    turn, label = divmod(number, len(SPECIES))
    codec = CODECS[(turn + label) % len(CODECS)]  # the turn shifts it: no species is bound to a codec
    seconds = codec.median * np.exp(0.6 * _rng(number, "duration").standard_normal())
    return Recording(number, label, codec, float(np.clip(seconds, 3.0, 60.0)))


def waveform(rec: Recording) -> np.ndarray:
    """The sound of a recording: float32 (frames, channels) in [-1, 1] at ``rec.codec.rate``."""
    rng, rate = _rng(rec.number, "waveform"), rec.codec.rate
    n = round(rec.seconds * rate)
    song_n = sing(SPECIES[rec.label], n, rate, rng)
    song_n /= np.sqrt(np.square(song_n).sum() / max(np.count_nonzero(song_n), 1))
    for _ in range(rng.choice(3, p=(0.45, 0.35, 0.2))):
        other = SPECIES[(rec.label + rng.integers(1, len(SPECIES))) % len(SPECIES)]
        far_n = _echo(sing(other, n, rate, rng), 3, 0.7, rate, rng)
        far_n /= np.sqrt(np.square(far_n).sum() / max(np.count_nonzero(far_n), 1))
        song_n += np.float32(_gain(rng, -26, -14)) * far_n
    song_n = _echo(song_n, 2, 0.25, rate, rng)
    noise_m = background(n, rate, rng)
    if rec.codec.channels == 1:
        mix_nc = (song_n + noise_m[:n])[:, None]
    else:  # the singer stands to one side; late noise is as good as other noise
        late_n = np.roll(noise_m, round(rng.uniform(0.01, 0.03) * rate))[:n]
        mix_nc = np.stack([song_n + noise_m[:n], rng.uniform(0.6, 1.0) * song_n + late_n], axis=1)
        if rng.random() < 0.5:
            mix_nc = mix_nc[:, ::-1]
    return np.ascontiguousarray(mix_nc * np.float32(_gain(rng, -18, -6) / np.abs(mix_nc).max()))


def sing(species: Species, n: int, rate: int, rng: np.random.Generator) -> np.ndarray:
    """``n`` samples of one individual that sings throughout: float32, zero in the gaps, peak about 1."""
    out_n = np.zeros(n, np.float32)
    pitch = 2 ** np.clip(rng.normal(0, 0.08), -0.20, 0.20)
    tempo = 2 ** np.clip(rng.normal(0, 0.15), -0.30, 0.30)  # of durations: above 1 is slow
    at = rng.uniform(0, 0.6) * rate
    while at < n:
        song_pitch, song_level = pitch * 2 ** rng.normal(0, 0.015), _gain(rng, -4, 0)
        for run in species.songs[rng.integers(len(species.songs))]:
            gap = run.gap
            for i in range(rng.integers(run.times[0], run.times[1] + 1)):
                ratio = song_pitch * run.step**i * 2 ** rng.normal(0, 0.01)
                note_m = np.float32(song_level * _gain(rng, -2, 0)) * _tone(run.note, ratio, tempo, rate, rng)
                start = round(at)
                out_n[start : start + len(note_m)] += note_m[: max(n - start, 0)]
                at += len(note_m) + tempo * gap * rng.uniform(0.95, 1.05) * rate
                gap *= run.rush
        at += tempo * rng.uniform(*species.pause) * rate
    return out_n


def background(n: int, rate: int, rng: np.random.Generator) -> np.ndarray:
    """At least ``n`` samples of noise (a length that suits the FFT), relative to a singer with an RMS of 1."""
    shift = max((n - 1).bit_length() - 4, 0)
    m = -(-n >> shift) << shift
    hz_k = np.fft.rfftfreq(m, 1 / rate).astype(np.float32)

    def coloured(shape_k: np.ndarray, source_k: np.ndarray) -> np.ndarray:
        return np.fft.irfft(shape_k * source_k, m)

    def white() -> np.ndarray:
        return rng.standard_normal(2 * len(hz_k), np.float32).view(np.complex64)

    tilt_k = (1 + hz_k / 300) ** -rng.uniform(0.6, 1.2) / (1 + (hz_k / 8000) ** 4)
    in_band = 2 * np.sqrt(np.square(tilt_k[(hz_k > 1500) & (hz_k < 8000)]).sum()) / m  # RMS where the birds are
    out_m = coloured(tilt_k * np.float32(_gain(rng, -26, -6) / in_band), white())
    t_m = np.arange(m, dtype=np.float32) / rate
    if rng.random() < 0.4:  # wind: rumble below some 300 Hz, in gusts
        rumble_m = coloured(1 / (1 + (hz_k / rng.uniform(80, 250)) ** 2), white())
        knots = np.arange(0, t_m[-1] + 0.7, 0.7)
        gusts_m = np.interp(t_m, knots, rng.uniform(0, 1, len(knots)))
        out_m += rumble_m * np.float32(_gain(rng, -15, 0) / rumble_m.std()) * gusts_m.astype(np.float32)
    if rng.random() < 0.3:  # rain: drops that ring broadly about some 4 kHz
        drops_m = np.zeros(m, np.float32)
        count = rng.poisson(rng.uniform(30, 200) * m / rate)
        drops_m[rng.integers(0, m, count)] = rng.exponential(1, count)
        ring_k = np.exp(-np.square((hz_k - rng.uniform(2500, 5500)) / 1500))
        rain_m = coloured(ring_k, np.fft.rfft(drops_m))
        out_m += rain_m * np.float32(_gain(rng, -22, -8) / rain_m.std())
    if rng.random() < 0.3:  # mains hum and its harmonics
        mains = 2 * np.pi * rng.choice([50, 60])
        level = _gain(rng, -30, -12)
        for harmonic in (1, 2, 3, 5):
            out_m += np.float32(level / harmonic) * np.sin(np.float32(mains * harmonic) * t_m + np.float32(harmonic))
    return out_m


def encode(rec: Recording, samples: np.ndarray) -> bytes:
    """The file of a recording."""
    file = io.BytesIO()
    codec = rec.codec
    with soundfile.SoundFile(
        file, "w", codec.rate, codec.channels, codec.subtype, format=codec.format, **dict(codec.options)
    ) as sink:
        for start in range(0, len(samples), 1 << 16):  # libvorbis keeps a whole write on the stack
            sink.write(samples[start : start + (1 << 16)])
    return _with_serial(file.getvalue(), rec.number) if codec.format == "OGG" else file.getvalue()


def ensure(cache_dir: Path | None = None, *, n_train: int = N_TRAIN, n_test: int = N_TEST) -> Path:
    """The folder of the corpus, which is made if it is not there.

    Any number of processes may call this at once: one makes the corpus, the others wait for it.

    Args:
      cache_dir: where corpora are kept; by default $JAXTRAIN_CACHE, $XDG_CACHE_HOME/jaxtrain or ~/.cache/jaxtrain.
      n_train, n_test: recordings in each split.

    Raises:
      base.DataError: the corpus cannot be written there.
    """
    cache_dir = machine.cache_folder() if cache_dir is None else Path(cache_dir)
    corpus = cache_dir / f"birds-v{FORMAT_VERSION}-{n_train}+{n_test}-{_recipe_hash()}"
    if corpus.is_dir():
        return corpus
    try:
        cache_dir.mkdir(parents=True, exist_ok=True)
        with _only_one(cache_dir / "birds.lock") as locked:
            if not corpus.is_dir():
                if locked:  # then whoever left these is dead
                    for left in cache_dir.glob("birds-*.tmp-*"):
                        shutil.rmtree(left)
                _make(corpus, n_train, n_test)
    except OSError as error:
        remedy = "set JAXTRAIN_CACHE to a folder that can be written and has 100 MB free"
        raise base.DataError(f"cannot make the demo corpus in {cache_dir}: {error}; {remedy}") from error
    return corpus


def features() -> dict[str, Any]:
    """The columns, as ``datasets`` describes them."""
    names = [species.name for species in SPECIES]
    return {"audio": {"_type": "Audio"}, "ebird_code": {"names": names, "_type": "ClassLabel"}}


def schema() -> pa.Schema:
    audio = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    metadata = {"huggingface": json.dumps({"info": {"features": features()}})}
    return pa.schema([("audio", audio), ("ebird_code", pa.int64())], metadata=metadata)


def _make(corpus: Path, n_train: int, n_test: int) -> None:
    splits = {"train": range(n_train), "test": range(n_train, n_train + n_test)}
    recs = [recording(number) for number in range(n_train + n_test)]
    mb = sum(rec.seconds * rec.codec.kb_per_s for rec in recs) / 1000
    logger.info(
        "making the demo corpus, once: %d recordings of %d species, %.0f min of sound, about %.0f MB, in %s",
        *(len(recs), len(SPECIES), sum(rec.seconds for rec in recs) / 60, mb, corpus),
    )
    folder = Path(tempfile.mkdtemp(prefix=f"{corpus.name}.tmp-", dir=corpus.parent))
    # Threads are enough: numpy and the encoders do their work without the GIL.
    pool = concurrent.futures.ThreadPoolExecutor(machine.cores())
    try:
        files = pool.map(lambda rec: encode(rec, waveform(rec)), recs)
        for split, numbers in splits.items():
            _write_split(folder / split, [recs[i] for i in numbers], files)
        _write_json(folder / "dataset_dict.json", {"splits": list(splits)})
        folder.chmod(0o755)  # mkdtemp's is private, and a cache may be shared
        try:
            folder.rename(corpus)
        except OSError:
            if not corpus.is_dir():  # where locks do not work, another may have been faster, and theirs is as good
                raise
    finally:
        pool.shutdown(cancel_futures=True)
        shutil.rmtree(folder, ignore_errors=True)


def _write_split(folder: Path, recs: list[Recording], files: Iterator[bytes]) -> None:
    folder.mkdir()
    n_shards = min(max(-(-len(recs) // ROWS_PER_SHARD), 2), len(recs))  # two, so that every reader meets several
    names = [f"data-{k:05d}-of-{n_shards:05d}.arrow" for k in range(n_shards)]
    digest = hashlib.sha256()
    for k, name in enumerate(names):
        rows = recs[k * len(recs) // n_shards : (k + 1) * len(recs) // n_shards]
        with _synced(folder / name) as file, pa.ipc.new_stream(file, schema()) as sink:
            for start in range(0, len(rows), ROWS_PER_BATCH):
                batch = rows[start : start + ROWS_PER_BATCH]
                audio = [{"bytes": next(files), "path": rec.path} for rec in batch]
                for row in audio:
                    digest.update(row["path"].encode() + row["bytes"])
                columns = {"audio": audio, "ebird_code": [rec.label for rec in batch]}
                sink.write_batch(pa.RecordBatch.from_pydict(columns, schema()))
    info = {"citation": "", "description": "", "features": features(), "homepage": "", "license": ""}
    _write_json(folder / "dataset_info.json", info)
    state = {
        "_data_files": [{"filename": name} for name in names],
        "_fingerprint": digest.hexdigest()[:16],
        "_format_columns": None,
        "_format_kwargs": {},
        "_format_type": None,
        "_output_all_columns": False,
        "_split": folder.name,
    }
    _write_json(folder / "state.json", state)


def _write_json(path: Path, value: Any) -> None:
    with _synced(path) as file:
        file.write(json.dumps(value, indent=2).encode())


@contextlib.contextmanager
def _synced(path: Path) -> Iterator[BinaryIO]:
    with open(path, "wb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())  # before the rename: a power cut must not leave a whole name with half a file


@contextlib.contextmanager
def _only_one(lock: Path) -> Iterator[bool]:
    """Holds the lock, which the kernel drops when its holder dies. Yields False on a file system without locks."""
    with open(lock, "w") as file:  # stays there: who removes a lock file may remove one that another waits for
        try:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                logger.info("waiting for another process that is making a demo corpus in %s", lock.parent)
                fcntl.flock(file, fcntl.LOCK_EX)
        except OSError:
            yield False
        else:
            yield True


@functools.cache
def _recipe_hash() -> str:
    return hashlib.sha256(Path(__file__).read_bytes()).hexdigest()[:12]


def _rng(number: int, what: str) -> np.random.Generator:
    return np.random.default_rng([SEED, number, zlib.crc32(what.encode())])


def _gain(rng: np.random.Generator, low_db: float, high_db: float) -> float:
    return float(10 ** (rng.uniform(low_db, high_db) / 20))


def _tone(note: Note, pitch: float, tempo: float, rate: int, rng: np.random.Generator) -> np.ndarray:
    n = round(note.seconds * tempo * rate)
    t_n = np.arange(n) / rate
    hz_n = pitch * np.exp(np.interp(t_n, np.linspace(0, t_n[-1], len(note.hz)), np.log(note.hz)))
    if note.fm[1]:
        hz_n *= 2 ** (note.fm[1] * np.sin(2 * np.pi * note.fm[0] / tempo * t_n))
    phase_n = (np.cumsum(hz_n) * (2 * np.pi / rate)).astype(np.float32)  # summed in double, a sine needs no more
    top, out_n = hz_n.max(), np.zeros(n, np.float32)
    for k, amplitude in enumerate(note.partials, 1):
        if k * top < 0.45 * rate:  # no partial folds back, whatever the codec's rate
            out_n += np.float32(amplitude) * np.sin(np.float32(k) * phase_n)
    out_n /= np.float32(sum(note.partials))
    if note.am:
        out_n *= 0.5 - 0.5 * np.cos(np.float32(2 * np.pi * note.am / tempo) * t_n.astype(np.float32))
    if note.rasp:
        out_n *= np.float32(1 - note.rasp) + np.float32(note.rasp) * rng.standard_normal(n, np.float32)
    n_edge = min(round(0.008 * rate), n // 2)
    edge = (0.5 - 0.5 * np.cos(np.pi * (np.arange(n_edge) + 0.5) / n_edge)).astype(np.float32)
    out_n[:n_edge] *= edge
    out_n[n - n_edge :] *= edge[::-1]
    return out_n


def _echo(x_n: np.ndarray, n_taps: int, level: float, rate: int, rng: np.random.Generator) -> np.ndarray:
    out_n = x_n.copy()
    for delay in np.round(rng.uniform(0.02, 0.15, n_taps) * rate).astype(int):
        out_n[delay:] += np.float32(level * rng.uniform(0.3, 1.0)) * x_n[:-delay]
    return out_n


_REVERSED_BITS = bytes(int(f"{byte:08b}"[::-1], 2) for byte in range(256))


def _with_serial(ogg: bytes, serial: int) -> bytes:
    """The same OGG file with another stream serial number, and the page checksums that go with it (RFC 3533, 6)."""
    out, at = bytearray(ogg), 0
    while at < len(out):
        n_segments = out[at + 26]
        end = at + 27 + n_segments + sum(out[at + 27 : at + 27 + n_segments])
        out[at + 14 : at + 18] = serial.to_bytes(4, "little")
        out[at + 22 : at + 26] = bytes(4)  # the checksum counts as zero in itself
        # OGG's CRC-32 has zlib's polynomial with the bits the other way round, from 0 and not inverted.
        crc = zlib.crc32(bytes(out[at:end]).translate(_REVERSED_BITS), 0xFFFFFFFF) ^ 0xFFFFFFFF
        out[at + 22 : at + 26] = crc.to_bytes(4, "big").translate(_REVERSED_BITS)
        at = end
    return bytes(out)


def describe(corpus: Path) -> str:
    """A table of each split, read from the shards: recordings, codecs and minutes of each species."""
    suffixes = ("ogg", "mp3", "flac", "wav")
    lines = []
    for split in ("train", "test"):
        total = collections.Counter()
        per_species = collections.defaultdict(collections.Counter)
        for shard in sorted((corpus / split).glob("*.arrow")):
            for row in pa.ipc.open_stream(shard.read_bytes()).read_all().to_pylist():
                file, suffix = row["audio"]["bytes"], row["audio"]["path"].rpartition(".")[2]
                facts = {"n": 1, suffix: 1, "seconds": soundfile.info(io.BytesIO(file)).duration, "bytes": len(file)}
                per_species[SPECIES[row["ebird_code"]].name].update(facts)
                total.update(facts)
        lines.append(f"{split:18} recordings" + "".join(f"{suffix:>6}" for suffix in suffixes) + "   minutes      MB")
        for name, c in [*sorted(per_species.items()), ("all", total)]:
            codecs = "".join(f"{c[suffix]:6}" for suffix in suffixes)
            lines.append(f"{name:18} {c['n']:10}{codecs}{c['seconds'] / 60:10.1f}{c['bytes'] / 1e6:8.1f}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m loaders.demo", description="Make the demo corpus and describe it.")
    parser.add_argument("cache_dir", nargs="?", type=Path, help=f"where to keep it (default: {machine.cache_folder()})")
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    corpus = ensure(parser.parse_args().cache_dir)
    print(f"{corpus}\n{describe(corpus)}")


if __name__ == "__main__":
    main()
