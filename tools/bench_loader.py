"""The spectrogram loader compared with other ways to the same numbers, on this machine.

The result is a markdown table of samples/s.

    python -m tools.bench_loader  ours and every peer that is installed, about 10 minutes
    python -m tools.bench_loader --codecs ogg,wav --peers seek,torch --threads 1,2 --rounds 5

A sample is 5 s of a recording of 38 s on average, as float32 [512, 128]: crop, mono, 32 kHz, Kaldi
log-mel, normalised. All make the same crops of the same recordings in the same order, drawn by our
loader. The peers are given each crop's start, which ours has to find.

    whole         soundfile reads all of the recording, soxr resamples all, then the crop, then
                  kaldi-native-fbank
    datasets      a Hugging Face datasets Audio column, which decodes and resamples all, and
                  torchaudio's Kaldi fbank
    librosa       librosa.load(offset, duration), melspectrogram: the log-mel of a librosa user, not
                  Kaldi's
    torch         a torch DataLoader: soundfile seeks, torchaudio resamples and makes the fbank
    spdl          SPDL's FFmpeg: packets by time, mono and 32 kHz by its filters; then as seek
    grain         Grain's MapDataset and its reading threads around seek
    seek          soundfile seeks, soxr, scipy's float32 FFT and a BLAS product: as fast as NumPy
                  could be made
    seek-malloc   the same, with glibc set to keep freed memory, which saves its page faults

How it is measured. One process for each peer, pinned to one core, its libraries held to one thread.
For two threads two such processes, whose rates are added (ours and the DataLoader are one process
on two cores). They take turns, one pass over the recordings each, for some rounds, so that a drift
of the machine's speed meets all. Each rate is the median of its rounds, each ratio the median of
the ratios within a round. Shards are in the page cache. A pass of ours begins with empty queues.
Compare ratios, and only within one run; on a machine that has other work, with --clock=cpu.

The corpus is loaders.audio.demo's birds in longer recordings, one shard for each codec, made once
and kept next to the demo's.
"""

import argparse
import contextlib
import functools
import importlib.metadata
import importlib.util
import io
import json
import math
import os
import pathlib
import platform
import re
import statistics
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from concurrent import futures
from typing import IO, Any, NamedTuple, cast

import numpy as np
import pyarrow as pa
import soundfile

from loaders import base, order
from loaders.audio import demo, demo_birds, front_end, prepared
from loaders.audio import spectrogram as ours
from loaders.io import machine

SEED = 7
FRONT_END = front_end.FrontEnd()
RATE, CLIP, N_FRAMES, N_MELS = FRONT_END.sample_rate, 5 * FRONT_END.sample_rate, 512, FRONT_END.n_mels
MARGIN = 0.05  # [s] that a resampler is given on each side of a crop
BATCH = 20

# MP3 and WAV hold as many stereo recordings as mono ones, as archives of field recordings do.
CODECS = {
    "ogg": ("OGG 32k", demo_birds.Codec("ogg", "OGG", "VORBIS", 32000, 1, 30, 8.0, (("compression_level", 0.6),))),
    "mp3": (
        "MP3 44.1k",
        demo_birds.Codec(
            *("mp3", "MP3", "MPEG_LAYER_III", 44100, 2, 30, 16.0),
            (("bitrate_mode", "CONSTANT"), ("compression_level", 0.5)),
        ),
    ),
    "flac": ("FLAC 48k", demo_birds.Codec("flac", "FLAC", "PCM_16", 48000, 1, 30, 50.0)),
    "wav": ("WAV 44.1k", demo_birds.Codec("wav", "WAV", "PCM_16", 44100, 2, 30, 132.3)),
    # Nothing to decode and nothing to resample: here all agree up to rounding. The tests use it.
    "wav32": ("WAV 32k", demo_birds.Codec("wav", "WAV", "PCM_16", 32000, 1, 30, 64.0)),
    # These, as `jaxtrain prepare` writes them.
    "raw": ("prepared", demo_birds.Codec("wav", "WAV", "PCM_16", 32000, 1, 30, 64.0)),
    "packed": ("prepared, packed", demo_birds.Codec("wav", "WAV", "PCM_16", 32000, 1, 30, 64.0)),
}
PREPARED = ("raw", "packed")


class Peer(NamedTuple):
    make: Callable[..., Any]  # shard -> an object that is called with a Sample, or that has run(samples)
    needs: tuple[str, ...] = ()  # modules, whose distributions have the same names
    env: Mapping[str, str] = {}
    one_process: bool = False  # for any number of threads


class Sample(NamedTuple):
    """One crop to make."""

    row: int
    data: memoryview  # the encoded recording
    start: int  # [samples] at the recording's rate
    rate: int  # [Hz] of the recording


# -------------------------------------------------------------------------------
# corpus


def make_corpus(codec: str, *, n: int, seconds: float, folder: pathlib.Path | None = None) -> pathlib.Path:
    """Return the shard with ``n`` recordings of ``seconds`` on average, made if it is missing."""
    if codec in PREPARED:
        source = make_corpus("wav32", n=n, seconds=seconds, folder=folder)
        out = source.with_name(f"{source.stem}-{codec}")
        prepared.prepare(str(source), out, prepared.Settings(packed=codec == "packed"))
        return out / "data-00000-of-00001.arrow"
    recipe = zlib.crc32(pathlib.Path(demo_birds.__file__).read_bytes() + repr(CODECS[codec]).encode())
    shard = (folder or machine.cache_folder()) / f"bench-v1-{codec}-{n}x{seconds:g}s-{recipe:08x}.arrow"
    if shard.is_file():
        return shard
    print(f"making {shard}, once", file=sys.stderr)
    shard.parent.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(SEED)
    spread_n = np.clip(np.exp(0.72 * rng.standard_normal(n)), 0.15, 4.0)
    spread_n *= seconds / spread_n.mean()

    def encoded(number: int) -> bytes:
        kind = CODECS[codec][1]
        kind = kind._replace(channels=1 + number % 2) if kind.channels == 2 else kind
        # The lengths come out exactly as asked for, whatever the demo would draw.
        rec = demo_birds.Recording(number, number % len(demo_birds.SPECIES), kind, float(spread_n[number]))
        return demo_birds.encode(rec, demo_birds.waveform(rec))

    # Under another name until it is whole.
    with tempfile.TemporaryDirectory(dir=shard.parent) as temporary:
        made = pathlib.Path(temporary) / shard.name
        with pa.ipc.new_stream(str(made), demo.schema()) as sink, futures.ThreadPoolExecutor(machine.cores()) as pool:
            for number, data in enumerate(pool.map(encoded, range(n))):
                audio = {"bytes": data, "path": f"{number:05d}.{CODECS[codec][1].suffix}"}
                columns = {"audio": [audio], "ebird_code": [number % len(demo_birds.SPECIES)]}
                sink.write_batch(pa.RecordBatch.from_pydict(columns, demo.schema()))
        made.replace(shard)
    return shard


def recordings(shard: pathlib.Path) -> list[memoryview]:
    """Return the encoded recordings, as views of the mapped file."""
    batches = pa.ipc.open_stream(pa.memory_map(str(shard)))
    return [memoryview(data.as_buffer()) for batch in batches for data in batch.column("audio").field("bytes")]


def samples(shard: pathlib.Path, epoch: int) -> list[Sample]:
    """Return the crops of an epoch, in the order of `loaders.audio.spectrogram` with seed SEED."""
    data = recordings(shard)
    drawn = []
    for row in order.permutation(SEED, epoch, len(data), np.arange(len(data))):
        info = soundfile.info(io.BytesIO(data[row]))
        surplus = info.frames - -(-CLIP * info.samplerate // RATE)
        start = order.crop_start(SEED, epoch, int(row), surplus + 1) if surplus >= 0 else 0
        drawn.append(Sample(int(row), data[row], start, info.samplerate))
    return drawn


# -------------------------------------------------------------------------------
# peers


def mono(x_n: np.ndarray) -> np.ndarray:
    """float32 [n] or [n, channels] -> float32 [n].

    Of two channels, faster than a mean over so short an axis.
    """
    if x_n.ndim == 1:
        return x_n
    return x_n[:, 0] if x_n.shape[1] == 1 else (x_n[:, 0] + x_n[:, 1]) * np.float32(1 / 2)


def clip(x_n: np.ndarray) -> np.ndarray:
    """Exactly 5 s, with silence behind."""
    return x_n[:CLIP] if len(x_n) >= CLIP else np.pad(x_n, (0, CLIP - len(x_n)))


def normalised(x_fm: np.ndarray) -> np.ndarray:
    """log-mel [frames, 128] -> [512, 128], padded with the minimum."""
    out_fm = np.full((N_FRAMES, N_MELS), x_fm.min(), np.float32)
    out_fm[: len(x_fm)] = x_fm
    out_fm += 7.2
    out_fm /= 8.86
    return out_fm


def read_crop(s: Sample, resample: Callable[[np.ndarray, int], np.ndarray]) -> np.ndarray:
    """float32 [160000]: soundfile seeks to the crop and reads it.

    There is a margin if it is to be resampled.
    """
    with soundfile.SoundFile(io.BytesIO(s.data)) as file:
        if s.rate == RATE:
            file.seek(s.start)
            return clip(mono(file.read(CLIP, dtype="float32")))
        # The crop begins at a whole sample after resampling if what comes before it is a multiple
        # of this.
        grid = s.rate // math.gcd(s.rate, RATE)
        margin = round(MARGIN * s.rate)
        lead = min(margin, s.start) // grid * grid
        file.seek(s.start - lead)
        wave_n = mono(file.read(lead + CLIP * s.rate // RATE + margin, dtype="float32"))
    return clip(resample(wave_n, s.rate)[lead * RATE // s.rate :])


class Whole:
    def __init__(self, shard: pathlib.Path):
        import kaldi_native_fbank
        import soxr

        options = kaldi_native_fbank.FbankOptions()
        options.frame_opts.samp_freq = RATE
        options.frame_opts.dither = 0
        options.frame_opts.window_type = "hanning"
        options.mel_opts.num_bins = N_MELS
        options.mel_opts.low_freq = 20
        options.use_energy = False
        self.fbank = functools.partial(kaldi_native_fbank.OnlineFbank, options)
        self.resample = soxr.resample

    def __call__(self, s: Sample) -> np.ndarray:
        wave_n, rate = soundfile.read(io.BytesIO(s.data), dtype="float32")
        wave_n = mono(wave_n)
        if rate != RATE:
            wave_n = self.resample(wave_n, rate, RATE)
        start = round(s.start * RATE / rate)
        fbank = self.fbank()
        fbank.accept_waveform(RATE, clip(wave_n[start : start + CLIP]).tolist())
        return normalised(np.stack([fbank.get_frame(i) for i in range(fbank.num_frames_ready)]))


def torchaudio_fbank(wave_n: np.ndarray) -> np.ndarray:
    import torch
    from torchaudio.compliance import kaldi

    with torch.inference_mode():
        return kaldi.fbank(
            torch.from_numpy(np.ascontiguousarray(wave_n))[None],
            sample_frequency=RATE,
            num_mel_bins=N_MELS,
            window_type="hanning",
            htk_compat=True,
            use_energy=False,
            dither=0.0,
        ).numpy()


class Datasets:
    def __init__(self, shard: pathlib.Path):
        import datasets
        import torch

        torch.set_num_threads(1)
        self.rows = datasets.Dataset.from_file(str(shard)).cast_column("audio", datasets.Audio(sampling_rate=RATE))

    def __call__(self, s: Sample) -> np.ndarray:
        wave_n = np.asarray(self.rows[s.row]["audio"]["array"], np.float32)
        wave_n = wave_n.mean(0) if wave_n.ndim > 1 else wave_n
        start = round(s.start * RATE / s.rate)
        return normalised(torchaudio_fbank(clip(wave_n[start : start + CLIP])))


class Librosa:
    def __init__(self, shard: pathlib.Path):
        import librosa

        self.load, self.melspectrogram = librosa.load, librosa.feature.melspectrogram

    def __call__(self, s: Sample) -> np.ndarray:
        wave_n, _ = self.load(io.BytesIO(s.data), sr=RATE, offset=s.start / s.rate, duration=CLIP / RATE)
        mels_mf = self.melspectrogram(
            y=clip(wave_n),
            sr=RATE,
            n_fft=1024,
            win_length=FRONT_END.window,
            hop_length=FRONT_END.hop,
            n_mels=N_MELS,
            fmin=20,
            htk=True,
            norm=None,
        )
        frames = FRONT_END.n_clip_frames(CLIP)
        return normalised(np.log(np.maximum(mels_mf.T[:frames], np.finfo(np.float32).eps)))


class TorchCrops:
    """A torch Dataset whose indices are crops: (row, start, rate)."""

    def __init__(self, shard: pathlib.Path):
        self.data = recordings(shard)
        self.resamplers: dict[int, Any] = {}

    def __getitem__(self, crop: tuple[int, int, int]) -> Any:
        import torch

        row, start, rate = crop
        wave_n = read_crop(Sample(row, self.data[row], start, rate), self.resample)
        return torch.from_numpy(normalised(torchaudio_fbank(wave_n)))

    def resample(self, wave_n: np.ndarray, rate: int) -> np.ndarray:
        import torch
        import torchaudio

        if rate not in self.resamplers:
            self.resamplers[rate] = torchaudio.transforms.Resample(rate, RATE)
        with torch.inference_mode():
            return self.resamplers[rate](torch.from_numpy(wave_n)[None])[0].numpy()


class Torch:
    """With one thread the DataLoader works in its own process.

    With more it has as many workers, which stay.
    """

    def __init__(self, shard: pathlib.Path, threads: int):
        import torch

        torch.set_num_threads(1)
        self.crops: list[tuple[int, int, int]] = []  # what a pass is to make: the sampler, filled again before each
        workers = {"num_workers": threads, "persistent_workers": True} if threads > 1 else {}
        self.loader = torch.utils.data.DataLoader(TorchCrops(shard), sampler=self.crops, batch_size=BATCH // threads, **workers)

    def run(self, crops: Sequence[Sample]) -> tuple[list[np.ndarray], float]:
        begin = time.perf_counter()
        self.crops[:] = [(s.row, s.start, s.rate) for s in crops]
        out = [batch.numpy() for batch in self.loader]
        return out, time.perf_counter() - begin


class Seek:
    def __init__(self, shard: pathlib.Path):
        import scipy.fft
        import soxr

        self.rfft = scipy.fft.rfft
        self.resample = lambda wave_n, rate: soxr.resample(wave_n, rate, RATE)
        self.window_n = np.hanning(FRONT_END.window).astype(np.float32)
        self.padded_fn = np.zeros((N_FRAMES, 1024), np.float32)
        mel = 1127 * np.log1p(np.arange(512) * RATE / 1024 / 700)
        low, high = 1127 * np.log1p(np.array([20, RATE / 2]) / 700)
        step = (high - low) / (N_MELS + 1)
        place_km = (mel[:, None] - low) / step - np.arange(N_MELS)
        self.bands_km = np.maximum(0, np.minimum(place_km, 2 - place_km)).astype(np.float32)

    def __call__(self, s: Sample) -> np.ndarray:
        return self.spectrogram(read_crop(s, self.resample))

    def spectrogram(self, wave_n: np.ndarray) -> np.ndarray:
        frames_fn = np.lib.stride_tricks.sliding_window_view(wave_n, FRONT_END.window)[:: FRONT_END.hop]
        frames_fn = frames_fn - frames_fn.mean(1, keepdims=True)
        windowed_fn = self.padded_fn[: len(frames_fn), : FRONT_END.window]
        # The first sample's own rule does not matter: the window is 0 there.
        np.multiply(frames_fn[:, :-1], np.float32(-0.97), out=windowed_fn[:, 1:])
        windowed_fn[:, 1:] += frames_fn[:, 1:]
        windowed_fn *= self.window_n
        spectrum_fk = self.rfft(self.padded_fn[: len(frames_fn)])[:, :512]
        power_fk = spectrum_fk.real**2
        power_fk += spectrum_fk.imag**2
        return normalised(np.log(np.maximum(power_fk @ self.bands_km, np.finfo(np.float32).eps)))


class Spdl(Seek):
    def __call__(self, s: Sample) -> np.ndarray:
        spdl_io: Any = importlib.import_module("spdl.io")

        # The demuxer finds the packets of the crop, and the filter trims it to the sample, as
        # SPDL's documentation has it.
        span = s.start / s.rate, s.start / s.rate + CLIP / RATE
        trim = spdl_io.get_audio_filter_desc(sample_rate=RATE, num_channels=1, timestamp=span, num_frames=CLIP)
        return self.spectrogram(clip(spdl_io.to_numpy(spdl_io.load_audio(bytes(s.data), span, filter_desc=trim))[0]))


class Grain:
    def __init__(self, shard: pathlib.Path, threads: int):
        self.one, self.threads = Seek(shard), threads

    def run(self, crops: Sequence[Sample]) -> tuple[list[np.ndarray], float]:
        import grain.python as grain

        begin = time.perf_counter()
        options = grain.ReadOptions(num_threads=self.threads, prefetch_buffer_size=2 * BATCH)
        rows = grain.MapDataset.source(crops).map(self.one).batch(BATCH).to_iter_dataset(options)
        return list(rows), time.perf_counter() - begin


class Each:
    """A peer that makes one sample at a time, as a loader of batches."""

    def __init__(self, make: Callable[[pathlib.Path], Callable[[Sample], np.ndarray]], shard: pathlib.Path):
        self.one = make(shard)

    def run(self, crops: Sequence[Sample]) -> tuple[list[np.ndarray], float]:
        begin = time.perf_counter()
        out = []
        for first in range(0, len(crops), BATCH):
            some = crops[first : first + BATCH]
            out.append(np.empty((len(some), N_FRAMES, N_MELS), np.float32))
            for row_fm, crop in zip(out[-1], some, strict=True):
                row_fm[:] = self.one(crop)
        return out, time.perf_counter() - begin


class Ours:
    def __init__(self, shard: pathlib.Path, threads: int):
        config = ours.Config(train=str(shard), test_share=0.0, threads=threads, short="origin")
        n = ours.facts(config)["n_train"]
        self.batch = math.gcd(n, BATCH)  # so that an epoch is whole batches
        self.n_batches = n // self.batch
        rows = base.Rows(batch=self.batch, ranges=((0, self.batch),))
        self.loader = ours.make_loader(config, split="train", rows=rows, seed=SEED)

    def run(self, epoch: int, n: int) -> tuple[list[np.ndarray], float]:
        """Return the first ``n`` samples of an epoch.

        Seeking throws away batches made ahead: the clock sees all work.
        """
        begin = time.perf_counter()
        self.loader.seek(epoch * self.n_batches)
        out = [next(self.loader)[1]["spectrogram"][0] for _ in range(-(-n // self.batch))]
        return out, time.perf_counter() - begin


PEERS = {
    "whole": Peer(Whole, ("soxr", "kaldi_native_fbank")),
    "datasets": Peer(Datasets, ("datasets", "torch", "torchaudio", "torchcodec")),
    "librosa": Peer(Librosa, ("librosa", "soxr")),
    "torch": Peer(Torch, ("torch", "torchaudio"), one_process=True),
    "spdl": Peer(Spdl, ("spdl.io", "scipy", "soxr")),
    "grain": Peer(Grain, ("grain", "scipy", "soxr"), one_process=True),
    "seek": Peer(Seek, ("scipy", "soxr")),
    "seek-malloc": Peer(
        Seek, ("scipy", "soxr"), {"MALLOC_MMAP_THRESHOLD_": str(1 << 30), "MALLOC_TRIM_THRESHOLD_": str(1 << 32)}
    ),
}
OURS = Peer(Ours, one_process=True)


def missing(name: str) -> list[str]:
    """Modules that a peer needs and this Python does not have."""
    return [module for module in PEERS[name].needs if importlib.util.find_spec(module.partition(".")[0]) is None]


# -------------------------------------------------------------------------------
# processes


def child(name: str, shard: str, pinned: str) -> None:
    """Be one peer, in a process of its own.

    Reads requests from stdin, one in each line, and answers on stdout.

    {"epoch": 1, "part": [0, 2]}                    -> {"n": samples, "wall": s, "cpu": s}    every
                                                    second crop, from 0 on
    {"epoch": 0, "part": [0, 1], "n": 8, "to": F}   -> the same; F holds the first 8 samples
    """
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # libraries print there
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, json.loads(pinned))
    threads, path = len(json.loads(pinned)), pathlib.Path(shard)
    peer = OURS if name == "ours" else PEERS[name]
    loader: Any = peer.make(path, threads) if peer.one_process else Each(peer.make, path)
    for line in sys.stdin:
        request = json.loads(line)
        first, step = request["part"]
        crops = samples(path, request["epoch"])[first : request.get("n") : step]
        begin = time.process_time()
        out, seconds = loader.run(request["epoch"], len(crops)) if name == "ours" else loader.run(crops)
        cpu = time.process_time() - begin
        if "to" in request:
            np.save(request["to"], np.concatenate(out)[: len(crops)])
        print(json.dumps({"n": len(crops), "wall": seconds, "cpu": cpu / threads}), file=answers, flush=True)


class PeerError(RuntimeError):
    """A peer that cannot be measured here."""


class Running:
    """The processes of one peer, for every number of threads that is to be measured."""

    def __init__(self, name: str, shard: pathlib.Path, threads: Sequence[int]):
        self.name, self.of = name, dict[int, list[subprocess.Popen[str]]]()
        single = {f"{library}_NUM_THREADS": "1" for library in ("OMP", "MKL", "OPENBLAS", "NUMBA", "SOXR")}
        env = os.environ | single | {"MKL_THREADING_LAYER": "SEQUENTIAL", "HF_HUB_OFFLINE": "1"}
        peer = OURS if name == "ours" else PEERS[name]

        def start(pinned: Sequence[int]) -> subprocess.Popen[str]:
            command = [sys.executable, "-m", "tools.bench_loader", "child", name, str(shard), json.dumps(list(pinned))]
            pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
            return subprocess.Popen(command, env={**env, **peer.env}, cwd=pathlib.Path(__file__).parents[1], **pipes)

        if peer.one_process:
            self.of = {n: [start(cores()[:n])] for n in threads}
        else:  # fewer threads are some of these
            each = [start([core]) for core in cores()[: max(threads)]]
            self.of = {n: each[:n] for n in threads}

    def rate(self, threads: int, *, clock: str = "wall", **request: Any) -> float:
        """Samples/s, of all processes together. Raises PeerError."""
        processes = self.of[threads]
        for k, process in enumerate(processes):
            with contextlib.suppress(BrokenPipeError):  # then there is no answer either
                print(json.dumps(request | {"part": [k, len(processes)]}), file=process.stdin, flush=True)
        lines = [cast(IO[str], process.stdout).readline() for process in processes]
        if not all(lines):
            raise PeerError(f"{self.name} ended early; its output is above")
        return sum(answer["n"] / answer[clock] for answer in map(json.loads, lines))

    def close(self) -> None:
        for process in dict.fromkeys(process for some in self.of.values() for process in some):
            with contextlib.suppress(BrokenPipeError):
                process.communicate()


# -------------------------------------------------------------------------------
# measurement


def difference(name: str, shard: pathlib.Path, n: int) -> float:
    """Mean |peer - ours| of the first ``n`` samples, in units of the normalised spectrogram.

    Bands from 120 on are left out: there lies the edge of every resampler's filter, and no two have
    the same.
    """
    out = []
    for each in ("ours", name):
        with tempfile.TemporaryDirectory() as folder, contextlib.closing(Running(each, shard, [1])) as running:
            running.rate(1, epoch=0, n=n, to=f"{folder}/out.npy")
            out.append(np.load(f"{folder}/out.npy")[..., :120])
    return float(np.abs(out[0] - out[1]).mean())


def measure(
    peers: Sequence[str], shard: pathlib.Path, *, threads: Sequence[int], rounds: int, clock: str
) -> dict[str, dict[str, list[float]]]:
    """Return number of threads -> peer -> samples/s of each round.

    All wait at the same time: who works has the machine alone.
    """
    with contextlib.ExitStack() as stack:
        running = [stack.enter_context(contextlib.closing(Running(name, shard, threads))) for name in peers]
        turns = [(each, n) for n in threads for each in running]
        for each, n in turns:
            each.rate(n, epoch=0, n=BATCH)  # plans and filters are made at their first use
        rates: dict[str, dict[str, list[float]]] = {str(n): {name: [] for name in peers} for n in threads}
        for round_ in range(rounds):
            first = round_ % len(turns)
            for each, n in turns[first:] + turns[:first]:  # nobody is always last
                rates[str(n)][each.name].append(each.rate(n, epoch=round_, clock=clock))
    return rates


def cores() -> list[int]:
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))


def ratio(rates: Mapping[str, Sequence[float]], a: str, b: str) -> float:
    return statistics.median(x / y for x, y in zip(rates[a], rates[b], strict=True))


def table(results: Mapping[str, Mapping[str, Mapping[str, Sequence[float]]]]) -> str:
    """codec -> threads -> peer -> rates, as markdown: one table for each number of threads."""
    lines, codecs = [], list(results)
    head = [CODECS[codec][0] for codec in codecs]
    for threads in results[codecs[0]]:
        of = {codec: results[codec][threads] for codec in codecs}
        middle = {codec: {name: statistics.median(r) for name, r in rates.items()} for codec, rates in of.items()}
        lines += [
            f"| samples/s, {threads} thread{'s' * (threads != '1')} | {' | '.join(head)} |",
            "|---|" + "---:|" * len(head),
        ]
        for name in of[codecs[0]]:
            lines.append(f"| {name} | {' | '.join(f'{middle[codec][name]:.0f}' for codec in codecs)} |")
        if len(of[codecs[0]]) > 1:
            best = {codec: max((name for name in m if name != "ours"), key=m.__getitem__) for codec, m in middle.items()}
            cells = [f"**{ratio(of[codec], 'ours', best[codec]):.2f}** × {best[codec]}" for codec in codecs]
            lines.append(f"| ours / best peer | {' | '.join(cells)} |")
        lines.append("")
    one, *others = results[codecs[0]]
    for more in others:
        pairs = {codec: {n: rates["ours"] for n, rates in results[codec].items()} for codec in codecs}
        cells = [f"{CODECS[codec][0]} {ratio(pairs[codec], more, one):.2f}" for codec in codecs]
        lines.append(f"Ours, {more} threads / {one}: {', '.join(cells)}.")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else list(argv)
    if argv[:1] == ["child"]:
        child(*argv[1:])
        return 0
    summary, _, rest = (__doc__ or "").partition("\n")
    parser = argparse.ArgumentParser(
        prog="tools.bench_loader", description=summary, epilog=rest, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = [codec for codec in CODECS if codec not in ("wav32", *PREPARED)]
    parser.add_argument("--codecs", default=",".join(names), help=f"of {', '.join(CODECS)} (default: %(default)s)")
    parser.add_argument("--peers", default="all", help=f"of {', '.join(PEERS)}; or all, or none (default: all)")
    parser.add_argument("--threads", default="1,2", help="numbers of threads, one table each (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="passes of each peer (default: %(default)s)")
    parser.add_argument("--recordings", type=int, default=100, help="in a corpus, which is a pass (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=38.0, help="of a recording, on average (default: %(default)s)")
    parser.add_argument("--folder", type=pathlib.Path, help=f"of the corpora (default: {machine.cache_folder()})")
    parser.add_argument(
        "--clock",
        choices=("wall", "cpu"),
        default="wall",
        help="cpu: seconds that a core worked for the peer, for a machine that has other work too (default: %(default)s)",
    )
    args = parser.parse_args(argv)

    codecs, threads = args.codecs.split(","), [int(n) for n in args.threads.split(",")]
    chosen = {"all": list(PEERS), "none": []}.get(args.peers, args.peers.split(","))
    for value, allowed in ((codecs, CODECS), (chosen, PEERS)):
        if unknown := sorted(set(value) - set(allowed)):
            parser.error(f"{', '.join(unknown)}: unknown; expected some of: {', '.join(allowed)}")
    if min(threads) < 1 or max(threads) > len(cores()):
        parser.error(f"--threads {args.threads}: this process may use {len(cores())} cores, and each thread is pinned to one")
    if args.rounds < 1 or args.recordings < 2 * max(threads):
        parser.error("at least 1 round, and 2 recordings for each thread")

    skipped = {name: missing(name) for name in chosen if missing(name)}
    if args.clock == "cpu" and max(threads) > 1 and "torch" in chosen:
        skipped["torch"] = ["the time of a DataLoader's workers is not its own; use --clock=wall, or --threads=1"]
    peers = [name for name in chosen if name not in skipped]
    results: dict[str, dict[str, dict[str, list[float]]]] = {}
    differences: dict[str, dict[str, float]] = {}
    for codec in codecs:
        shard = make_corpus(codec, n=args.recordings, seconds=args.seconds, folder=args.folder)
        for name in list(peers):
            try:
                differences.setdefault(name, {})[codec] = difference(name, shard, min(args.recordings, BATCH))
            except PeerError as error:  # a library that is there and does not work, as torchcodec without FFmpeg
                skipped[name] = [str(error)]
                peers.remove(name)
        print(f"{CODECS[codec][0]}: {args.rounds} rounds", file=sys.stderr)
        results[codec] = measure(["ours", *peers], shard, threads=threads, rounds=args.rounds, clock=args.clock)
    for of in results.values():
        for rates in of.values():
            for name in skipped:  # one that failed on a later codec
                rates.pop(name, None)

    print(table(results))
    if peers:
        print("\nMean |difference| to ours, in units of the normalised spectrogram, bands below 120:")
        for name in peers:
            print(f"  {name:12}" + "".join(f"  {codec} {value:.1e}" for codec, value in differences[name].items()))
    for name, why in skipped.items():
        modules = [re.sub("[._]", "-", module) for module in why if " " not in module]
        remedy = f"pip install {' '.join(modules)}" if modules else why[0]
        print(f"\nskipped: {name}: {remedy}")
    modules = sorted({"numpy", "soundfile"}.union(*(PEERS[name].needs for name in peers)))
    versions = [f"{name} {importlib.metadata.version(name)}" for name in (re.sub("[._]", "-", module) for module in modules)]
    print(f"\nPython {platform.python_version()}, {', '.join(versions)}; {platform.platform()}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
