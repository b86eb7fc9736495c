"""The recordings of the built-in demo: invented birds that sing, synthesised and encoded.

A recording is a pure function of (this file, its number): one individual sings its species' song
from beginning to end, with pauses under 2 s, so that every 5 s crop holds it.

  grammar     a song is a sequence of runs. A run repeats one note (a sweep, whistle, buzz, rasp or
              harmonic stack) some times, with a gap, a pitch step and an acceleration between
              repetitions. Species share the range from 1 to 8 kHz: some differ mostly in the order
              of two notes or the direction of a sweep, some in tempo.
  individual  pitch, tempo and level differ between recordings, and a little between songs and
              notes.
  background  a tilted noise floor 6 to 26 dB under the singer, echoes, and by chance wind in gusts,
              drops of rain, mains hum, and up to two distant birds of other species, 14 to 26 dB
              quieter.
  duration    3 to 60 s, log-normal, and shorter for codecs with most bytes or time.
  codec       synthesised at the rate of the file, and handed out in turn within each species:
              OGG Vorbis 32 kHz mono (five of eight), MP3 44.1 kHz stereo, FLAC 48 kHz mono 16-bit
              and WAV 22.05 kHz mono 16-bit (one of eight each).
"""

import io
import zlib
from typing import Any, NamedTuple

import numpy as np
import soundfile

SEED = 20  # of every recording, together with its number


class Note(NamedTuple):
    """One syllable: a tone along a curve of pitch, with modulations."""

    seconds: float
    hz: tuple[float, ...]  # pitch at equidistant times, interpolated in log frequency
    partials: tuple[float, ...] = (1.0,)  # amplitude of each harmonic
    am: float = 0.0  # Hz of amplitude modulation of full depth: a buzz
    fm: tuple[float, float] = (0.0, 0.0)  # Hz and octaves of frequency modulation: a warble
    rasp: float = 0.0  # share of the tone that is multiplied by noise


class Run(NamedTuple):
    """One note, repeated."""

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
    Species(
        "mist_fifer", ((Run(Note(0.42, (4200, 4150))), Run(Note(0.42, (3300, 3250)))),), (0.7, 1.2)
    ),
    Species(
        "copper_fifer",
        ((Run(Note(0.42, (2500, 2450))), Run(Note(0.42, (3300, 3250)))),),
        (0.7, 1.2),
    ),
    # The same sweep, slow (and lower) or fast, and its mirror image.
    Species("hill_rattler", ((Run(_at(_DOWN, 0.75), (8, 13), gap=0.11),),), (0.3, 0.7)),
    Species("reed_sprinkler", ((Run(_DOWN, (16, 30), gap=0.022),),), (0.4, 0.9)),
    Species("upland_zipper", ((Run(_UP, (16, 30), gap=0.022),),), (0.4, 0.9)),
    # Stairs of the same steps, down and up.
    Species("ember_tumbler", ((Run(_at(_STEP, 6800), (7, 9), gap=0.05, step=0.89),),), (0.5, 1.0)),
    Species(
        "lantern_climber", ((Run(_at(_STEP, 2300), (7, 9), gap=0.05, step=1 / 0.89),),), (0.5, 1.0)
    ),
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
            (
                Run(Note(0.7, (3300, 4200), fm=(11, 0.22))),
                Run(Note(0.03, (4800, 3600)), (3, 5), gap=0.03),
            ),
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
    kb_per_s: float  # measured, to predict the size of a corpus
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
    """Return the properties of recording ``number``, without its sound."""
    turn, label = divmod(number, len(SPECIES))
    # shifted by the turn, so that no species is bound to a codec
    codec = CODECS[(turn + label) % len(CODECS)]
    seconds = codec.median * np.exp(0.6 * _rng(number, "duration").standard_normal())
    return Recording(number, label, codec, float(np.clip(seconds, 3.0, 60.0)))


def waveform(rec: Recording) -> np.ndarray:
    """Return the sound of a recording: float32 (frames, channels) in ±1 at ``rec.codec.rate``."""
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
    else:  # the singer is on one side, and delayed noise serves as different noise
        late_n = np.roll(noise_m, round(rng.uniform(0.01, 0.03) * rate))[:n]
        mix_nc = np.stack([song_n + noise_m[:n], rng.uniform(0.6, 1.0) * song_n + late_n], axis=1)
        if rng.random() < 0.5:
            mix_nc = mix_nc[:, ::-1]
    return np.ascontiguousarray(mix_nc * np.float32(_gain(rng, -18, -6) / np.abs(mix_nc).max()))


def sing(species: Species, n: int, rate: int, rng: np.random.Generator) -> np.ndarray:
    """``n`` samples of one individual that sings without end: float32, 0 in gaps, peak about 1."""
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
                note_m = np.float32(song_level * _gain(rng, -2, 0)) * _tone(
                    run.note, ratio, tempo, rate, rng
                )
                start = round(at)
                out_n[start : start + len(note_m)] += note_m[: max(n - start, 0)]
                at += len(note_m) + tempo * gap * rng.uniform(0.95, 1.05) * rate
                gap *= run.rush
        at += tempo * rng.uniform(*species.pause) * rate
    return out_n


def background(n: int, rate: int, rng: np.random.Generator) -> np.ndarray:
    """Return at least ``n`` samples of noise, as the FFT likes, to a singer with an RMS of 1."""
    shift = max((n - 1).bit_length() - 4, 0)
    m = -(-n >> shift) << shift
    hz_k = np.fft.rfftfreq(m, 1 / rate).astype(np.float32)

    def coloured(shape_k: np.ndarray, source_k: np.ndarray) -> np.ndarray:
        return np.fft.irfft(shape_k * source_k, m)

    def white() -> np.ndarray:
        return rng.standard_normal(2 * len(hz_k), np.float32).view(np.complex64)

    tilt_k = (1 + hz_k / 300) ** -rng.uniform(0.6, 1.2) / (1 + (hz_k / 8000) ** 4)
    # RMS in the birds' band
    in_band = 2 * np.sqrt(np.square(tilt_k[(hz_k > 1500) & (hz_k < 8000)]).sum()) / m
    out_m = coloured(tilt_k * np.float32(_gain(rng, -26, -6) / in_band), white())
    t_m = np.arange(m, dtype=np.float32) / rate
    if rng.random() < 0.4:  # wind: rumble below some 300 Hz, in gusts
        rumble_m = coloured(1 / (1 + (hz_k / rng.uniform(80, 250)) ** 2), white())
        knots = np.arange(0, t_m[-1] + 0.7, 0.7)
        gusts_m = np.interp(t_m, knots, rng.uniform(0, 1, len(knots)))
        out_m += (
            rumble_m * np.float32(_gain(rng, -15, 0) / rumble_m.std()) * gusts_m.astype(np.float32)
        )
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
            out_m += np.float32(level / harmonic) * np.sin(
                np.float32(mains * harmonic) * t_m + np.float32(harmonic)
            )
    return out_m


def encode(rec: Recording, samples: np.ndarray) -> bytes:
    """Encode a recording: the bytes of its file."""
    file = io.BytesIO()
    codec = rec.codec
    with soundfile.SoundFile(
        file,
        "w",
        codec.rate,
        codec.channels,
        codec.subtype,
        format=codec.format,
        **dict(codec.options),
    ) as sink:
        for start in range(0, len(samples), 1 << 16):  # libvorbis keeps a whole write on the stack
            sink.write(samples[start : start + (1 << 16)])
    return _with_serial(file.getvalue(), rec.number) if codec.format == "OGG" else file.getvalue()


def _rng(number: int, purpose: str) -> np.random.Generator:
    return np.random.default_rng([SEED, number, zlib.crc32(purpose.encode())])


def _gain(rng: np.random.Generator, low_db: float, high_db: float) -> float:
    return float(10 ** (rng.uniform(low_db, high_db) / 20))


def _tone(
    note: Note, pitch: float, tempo: float, rate: int, rng: np.random.Generator
) -> np.ndarray:
    n = round(note.seconds * tempo * rate)
    t_n = np.arange(n) / rate
    hz_n = pitch * np.exp(np.interp(t_n, np.linspace(0, t_n[-1], len(note.hz)), np.log(note.hz)))
    if note.fm[1]:
        hz_n *= 2 ** (note.fm[1] * np.sin(2 * np.pi * note.fm[0] / tempo * t_n))
    # summed in double, a sine needs no more
    phase_n = (np.cumsum(hz_n) * (2 * np.pi / rate)).astype(np.float32)
    top, out_n = hz_n.max(), np.zeros(n, np.float32)
    for k, amplitude in enumerate(note.partials, 1):
        if k * top < 0.45 * rate:  # no partial aliases at any codec's rate
            out_n += np.float32(amplitude) * np.sin(np.float32(k) * phase_n)
    out_n /= np.float32(sum(note.partials))
    if note.am:
        out_n *= 0.5 - 0.5 * np.cos(
            np.float32(2 * np.pi * note.am / tempo) * t_n.astype(np.float32)
        )
    if note.rasp:
        out_n *= np.float32(1 - note.rasp) + np.float32(note.rasp) * rng.standard_normal(
            n, np.float32
        )
    n_edge = min(round(0.008 * rate), n // 2)
    edge = (0.5 - 0.5 * np.cos(np.pi * (np.arange(n_edge) + 0.5) / n_edge)).astype(np.float32)
    out_n[:n_edge] *= edge
    out_n[n - n_edge :] *= edge[::-1]
    return out_n


def _echo(
    x_n: np.ndarray, n_taps: int, level: float, rate: int, rng: np.random.Generator
) -> np.ndarray:
    out_n = x_n.copy()
    for delay in np.round(rng.uniform(0.02, 0.15, n_taps) * rate).astype(int):
        out_n[delay:] += np.float32(level * rng.uniform(0.3, 1.0)) * x_n[:-delay]
    return out_n


_REVERSED_BITS = bytes(int(f"{byte:08b}"[::-1], 2) for byte in range(256))


def _with_serial(ogg: bytes, serial: int) -> bytes:
    """Return an OGG file with another serial number, and its pages' checksums (RFC 3533, 6)."""
    out, at = bytearray(ogg), 0
    while at < len(out):
        n_segments = out[at + 26]
        end = at + 27 + n_segments + sum(out[at + 27 : at + 27 + n_segments])
        out[at + 14 : at + 18] = serial.to_bytes(4, "little")
        out[at + 22 : at + 26] = bytes(4)  # the checksum counts as zero in itself
        # OGG's CRC-32 has zlib's polynomial with the bits the other way round, from 0 and not
        # inverted.
        crc = zlib.crc32(bytes(out[at:end]).translate(_REVERSED_BITS), 0xFFFFFFFF) ^ 0xFFFFFFFF
        out[at + 22 : at + 26] = crc.to_bytes(4, "big").translate(_REVERSED_BITS)
        at = end
    return bytes(out)
