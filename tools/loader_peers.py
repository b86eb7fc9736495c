"""The peers of tools.bench_loader, each set up as its own documentation advises."""

import functools
import importlib.metadata
import math
import pathlib
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent import futures
from typing import Any, Literal, NamedTuple

import numpy as np
import pyarrow as pa
import soundfile

from loaders import _rust, base, order
from loaders.audio import front_end
from loaders.audio import spectrogram as ours
from loaders.io import atomic_write, machine

SEED = 7
FRONT_END = front_end.FrontEnd()
RATE, CLIP, N_FRAMES, N_MELS = (
    FRONT_END.sample_rate,
    5 * FRONT_END.sample_rate,
    512,
    FRONT_END.n_mels,
)
MARGIN = 0.05  # [s] that a resampler is given on each side of a crop
BATCH = 20
BUFFER = 10_000  # rows


class Peer(NamedTuple):
    # shard -> an object that is called with a Crop, or that has run(crops)
    make: Callable[..., Any]
    needs: tuple[str, ...] = ()  # modules, whose distributions have the same names
    env: Mapping[str, str] = {}
    one_process: bool = False  # for any number of threads


Place = tuple[str, int, int]  # path, start, rate of a Crop


class Crop(NamedTuple):
    row: int
    data: memoryview  # the encoded recording
    path: str  # a file with the same: libsndfile 1.2.2 sometimes reads nothing of an MP3 in memory
    start: int  # [samples] at the recording's rate
    rate: int  # [Hz] of the recording


def recordings(shard: pathlib.Path) -> list[memoryview]:
    batches = pa.ipc.open_stream(pa.memory_map(str(shard)))
    return [
        memoryview(data.as_buffer())
        for batch in batches
        for data in batch.column("audio").field("bytes")
    ]


def crops(shard: pathlib.Path, epoch: int) -> list[Crop]:
    """Return the crops of an epoch, in the order of `loaders.audio.spectrogram` with seed SEED."""
    data = recordings(shard)
    drawn = []
    for row in order.permutation(SEED, epoch, len(data), np.arange(len(data))):
        _, rate, frames = _rust.decode(bytes(data[row]), 0, 1)
        surplus = frames - -(-CLIP * rate // RATE)
        start = order.crop_start(SEED, epoch, int(row), surplus + 1) if surplus >= 0 else 0
        drawn.append(
            Crop(int(row), data[row], str(shard.with_suffix("") / f"{row:05d}"), start, rate)
        )
    return drawn


def unpack(shard: pathlib.Path) -> None:
    """Write each recording to a file of its own, in a folder next to the shard."""
    folder = shard.with_suffix("")
    if not folder.is_dir():
        with atomic_write.folder(folder) as partial:
            for row, data in enumerate(recordings(shard)):
                (partial / f"{row:05d}").write_bytes(data)


def mono(x_n: np.ndarray) -> np.ndarray:
    """float32 [n] or [n, channels] -> float32 [n], faster than a mean over so short an axis."""
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


def read_crop(
    path: str, start: int, rate: int, resample: Callable[[np.ndarray, int], np.ndarray]
) -> np.ndarray:
    """float32 [160000]: soundfile seeks and reads, with a margin if the crop is resampled."""
    with soundfile.SoundFile(path) as file:
        if rate == RATE:
            file.seek(start)
            return clip(mono(file.read(CLIP, dtype="float32")))
        # The crop begins at a whole sample after resampling if its lead is a multiple of this.
        grid = rate // math.gcd(rate, RATE)
        margin = round(MARGIN * rate)
        lead = min(margin, start) // grid * grid
        file.seek(start - lead)
        wave_n = mono(file.read(lead + CLIP * rate // RATE + margin, dtype="float32"))
    return clip(resample(wave_n, rate)[lead * RATE // rate :])


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

    def __call__(self, s: Crop) -> np.ndarray:
        wave_n, rate = soundfile.read(s.path, dtype="float32")
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
        fbank_tf: np.ndarray = kaldi.fbank(
            torch.from_numpy(np.ascontiguousarray(wave_n))[None],
            sample_frequency=RATE,
            num_mel_bins=N_MELS,
            window_type="hanning",
            htk_compat=True,
            use_energy=False,
            dither=0.0,
        ).numpy()
        return fbank_tf


class Datasets:
    def __init__(self, shard: pathlib.Path):
        import datasets
        import torch

        torch.set_num_threads(1)
        self.rows = datasets.Dataset.from_file(str(shard)).cast_column(
            "audio", datasets.Audio(sampling_rate=RATE)
        )

    def __call__(self, s: Crop) -> np.ndarray:
        wave_n = np.asarray(self.rows[s.row]["audio"]["array"], np.float32)
        wave_n = wave_n.mean(0) if wave_n.ndim > 1 else wave_n
        start = round(s.start * RATE / s.rate)
        return normalised(torchaudio_fbank(clip(wave_n[start : start + CLIP])))


class Librosa:
    def __init__(self, shard: pathlib.Path):
        import librosa

        self.load, self.melspectrogram = librosa.load, librosa.feature.melspectrogram

    def __call__(self, s: Crop) -> np.ndarray:
        wave_n, _ = self.load(s.path, sr=RATE, offset=s.start / s.rate, duration=CLIP / RATE)
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
    """A torch Dataset whose indices are crops."""

    def __init__(self) -> None:
        self.resamplers: dict[int, Any] = {}

    def __getitem__(self, crop: Place) -> Any:
        import torch

        wave_n = read_crop(*crop, self.resample)
        return torch.from_numpy(normalised(torchaudio_fbank(wave_n)))

    def resample(self, wave_n: np.ndarray, rate: int) -> np.ndarray:
        import torch
        import torchaudio

        if rate not in self.resamplers:
            self.resamplers[rate] = torchaudio.transforms.Resample(rate, RATE)
        with torch.inference_mode():
            resampled_n: np.ndarray = self.resamplers[rate](torch.from_numpy(wave_n)[None])[
                0
            ].numpy()
            return resampled_n


class Torch:
    """With one thread the DataLoader works in its own process.

    With more it has as many workers, which stay.
    """

    def __init__(self, shard: pathlib.Path, threads: int):
        import torch

        torch.set_num_threads(1)
        # what a pass is to make: the sampler, filled again before each
        self.crops: list[Place] = []
        workers = {"num_workers": threads, "persistent_workers": True} if threads > 1 else {}
        self.loader = torch.utils.data.DataLoader(
            TorchCrops(), sampler=self.crops, batch_size=BATCH // threads, **workers
        )

    def run(self, crops: Sequence[Crop]) -> list[np.ndarray]:
        self.crops[:] = [(s.path, s.start, s.rate) for s in crops]
        return [batch.numpy() for batch in self.loader]


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

    def __call__(self, s: Crop) -> np.ndarray:
        return self.spectrogram(read_crop(s.path, s.start, s.rate, self.resample))

    def spectrogram(self, wave_n: np.ndarray) -> np.ndarray:
        frames_fn = np.lib.stride_tricks.sliding_window_view(wave_n, FRONT_END.window)[
            :: FRONT_END.hop
        ]
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
    def __call__(self, s: Crop) -> np.ndarray:
        spdl_io: Any = importlib.import_module("spdl.io")

        # The demuxer finds the packets of the crop, and the filter trims it to the sample, as
        # SPDL's documentation has it.
        span = s.start / s.rate, s.start / s.rate + CLIP / RATE
        trim = spdl_io.get_audio_filter_desc(
            sample_rate=RATE, num_channels=1, timestamp=span, num_frames=CLIP
        )
        return self.spectrogram(
            clip(spdl_io.to_numpy(spdl_io.load_audio(bytes(s.data), span, filter_desc=trim))[0])
        )


class TorchCodec(Seek):
    """Its AudioDecoder reads, mixes and resamples a range of seconds.

    The clock of MP3 begins after the encoder's delay.
    """

    def __init__(self, shard: pathlib.Path):
        import torch
        from torchcodec.decoders import AudioDecoder

        super().__init__(shard)
        torch.set_num_threads(1)
        self.decoder, self.tensor = (
            AudioDecoder,
            functools.partial(torch.frombuffer, dtype=torch.uint8),
        )

    def __call__(self, s: Crop) -> np.ndarray:
        decoder = self.decoder(self.tensor(s.data), sample_rate=RATE, num_channels=1)
        start = s.start / s.rate + (decoder.metadata.begin_stream_seconds_from_header or 0)
        return self.spectrogram(
            clip(decoder.get_samples_played_in_range(start, start + CLIP / RATE).data[0].numpy())
        )


class Lhotse:
    """A cut of a recording, whose features are computed as it is loaded."""

    def __init__(self, shard: pathlib.Path):
        import lhotse
        import torch

        torch.set_num_threads(1)
        config = {
            "num_filters": N_MELS,
            "low_freq": 20.0,
            "high_freq": 0.0,
            "window_type": "hanning",
            "snip_edges": True,
        }
        self.fbank = lhotse.Fbank(
            lhotse.FbankConfig(
                sampling_rate=RATE, energy_floor=float(np.finfo(np.float32).eps), **config
            )
        )
        self.recording = lhotse.Recording.from_file

    def __call__(self, s: Crop) -> np.ndarray:
        recording = self.recording(s.path)
        start = s.start / s.rate
        cut = recording.to_cut().truncate(
            offset=start, duration=min(CLIP / RATE, recording.duration - start)
        )
        cut = cut.to_mono(mono_downmix=True) if recording.num_channels > 1 else cut
        cut = cut.resample(RATE) if s.rate != RATE else cut
        wave_n = clip(cut.load_audio().reshape(-1))
        return normalised(self.fbank.extract(wave_n, RATE)[: FRONT_END.n_clip_frames(CLIP)])


class Buffer:
    """Threads make spectrograms of whole recordings, and batches come from a shuffle buffer.

    It is the design of the Rust loader that ours replaced, made of our own compiled parts.
    """

    def __init__(self, shard: pathlib.Path, threads: int):
        self.threads = threads

    def one(self, s: Crop) -> np.ndarray:
        wave_n, rate, _ = _rust.decode(bytes(s.data))
        wave_n = _rust.resample(wave_n, rate, RATE) if rate != RATE else wave_n
        start = round(s.start * RATE / rate)
        return _rust.fbank(clip(wave_n[start : start + CLIP]), normalise=True)

    def run(self, crops: Sequence[Crop]) -> list[np.ndarray]:
        buffer, numbers, batches, draw = (
            list[tuple[int, np.ndarray]](),
            list[int](),
            list[np.ndarray](),
            random.Random(SEED),
        )

        def draw_batch() -> None:
            rows = []
            for _ in range(min(BATCH, len(buffer))):
                at = draw.randrange(len(buffer))
                buffer[at], buffer[-1] = buffer[-1], buffer[at]
                rows.append(buffer.pop())
            numbers.extend(number for number, _ in rows)
            batches.append(np.stack([row_fm for _, row_fm in rows]))

        with futures.ThreadPoolExecutor(self.threads) as pool:
            for row in enumerate(pool.map(self.one, crops)):
                buffer.append(row)
                if len(buffer) == BUFFER:
                    draw_batch()
        while buffer:
            draw_batch()
        rows = [row_fm[None] for batch in batches for row_fm in batch]
        return [rows[i] for i in np.argsort(numbers)]  # as asked for: the tool compares rows


class Grain:
    def __init__(self, shard: pathlib.Path, threads: int):
        self.one, self.threads = Seek(shard), threads

    def run(self, crops: Sequence[Crop]) -> list[np.ndarray]:
        import grain.python as grain

        options = grain.ReadOptions(num_threads=self.threads, prefetch_buffer_size=2 * BATCH)
        rows = grain.MapDataset.source(crops).map(self.one).batch(BATCH).to_iter_dataset(options)
        return list(rows)


class Each:
    """A peer that makes one crop at a time, as a loader of batches."""

    def __init__(
        self, make: Callable[[pathlib.Path], Callable[[Crop], np.ndarray]], shard: pathlib.Path
    ):
        self.one = make(shard)

    def run(self, crops: Sequence[Crop]) -> list[np.ndarray]:
        out = []
        for first in range(0, len(crops), BATCH):
            some = crops[first : first + BATCH]
            out.append(np.empty((len(some), N_FRAMES, N_MELS), np.float32))
            for row_fm, crop in zip(out[-1], some, strict=True):
                row_fm[:] = self.one(crop)
        return out


class Ours:
    def __init__(
        self,
        shard: pathlib.Path,
        threads: int,
        form: Literal["spectrogram", "waveform"] = "spectrogram",
    ):
        self.form = form
        config = ours.Config(
            train=str(shard), test_share=0.0, threads=threads, short="origin", form=form
        )
        n = ours.dataset_info(config)["n_train"]
        self.batch = math.gcd(n, BATCH)  # so that an epoch is whole batches
        self.n_batches = n // self.batch
        rows = base.Rows(batch=self.batch, ranges=((0, self.batch),))
        self.loader = ours.make_loader(config, split="train", rows=rows, seed=SEED)

    def run(self, epoch: int, n: int) -> list[np.ndarray]:
        """Return the first ``n`` crops of an epoch.

        Seeking throws away batches made ahead: the clock sees all work.
        """
        self.loader.seek(epoch * self.n_batches)
        return [next(self.loader)[1][self.form][0] for _ in range(-(-n // self.batch))]


PEERS = {
    "whole": Peer(Whole, ("soxr", "kaldi_native_fbank")),
    "datasets": Peer(Datasets, ("datasets", "torch", "torchaudio", "torchcodec")),
    "librosa": Peer(Librosa, ("librosa", "soxr")),
    "torch": Peer(Torch, ("torch", "torchaudio"), one_process=True),
    "buffer": Peer(Buffer, one_process=True),
    "lhotse": Peer(Lhotse, ("lhotse", "torch", "torchaudio")),
    "torchcodec": Peer(TorchCodec, ("torchcodec", "torch", "scipy", "soxr")),
    "spdl": Peer(Spdl, ("spdl.io", "scipy", "soxr")),
    "grain": Peer(Grain, ("grain", "scipy", "soxr"), one_process=True),
    "seek": Peer(Seek, ("scipy", "soxr")),
    "seek-malloc": Peer(
        Seek,
        ("scipy", "soxr"),
        {"MALLOC_MMAP_THRESHOLD_": str(1 << 30), "MALLOC_TRIM_THRESHOLD_": str(1 << 32)},
    ),
}
OURS = Peer(Ours, one_process=True)


def missing(name: str) -> list[str]:
    return [
        module for module in PEERS[name].needs if not machine.has_package(module.partition(".")[0])
    ]


def versions(modules: Iterable[str]) -> list[str]:
    names = dict.fromkeys(module.replace(".", "-").replace("_", "-") for module in modules)
    return [f"{name} {importlib.metadata.version(name)}" for name in names]
