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
WRITE = 1 << 16  # [frames] at once: libvorbis keeps a whole write on the stack


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


def _at(note: Note, hz: float) -> Note:
    return note._replace(hz=tuple(hz * ratio for ratio in note.hz))


# Two whistles, high then low, and low then high.
_HIGH_WHISTLE = Run(Note(0.42, (4200, 4150)))
_MIDDLE_WHISTLE = Run(Note(0.42, (3300, 3250)))
_LOW_WHISTLE = Run(Note(0.42, (2500, 2450)))
_MIST_FIFER = Species("mist_fifer", ((_HIGH_WHISTLE, _MIDDLE_WHISTLE),), (0.7, 1.2))
_COPPER_FIFER = Species("copper_fifer", ((_LOW_WHISTLE, _MIDDLE_WHISTLE),), (0.7, 1.2))

# The same sweep, slow (and lower) or fast, and its mirror image.
_DOWN = Note(0.034, (6000, 3600))
_UP = Note(0.034, (3600, 6000))
_RATTLE = Run(_at(_DOWN, 0.75), (8, 13), gap=0.11)
_HILL_RATTLER = Species("hill_rattler", ((_RATTLE,),), (0.3, 0.7))
_FALLING_TRILL = Run(_DOWN, (16, 30), gap=0.022)
_RISING_TRILL = Run(_UP, (16, 30), gap=0.022)
_REED_SPRINKLER = Species("reed_sprinkler", ((_FALLING_TRILL,),), (0.4, 0.9))
_UPLAND_ZIPPER = Species("upland_zipper", ((_RISING_TRILL,),), (0.4, 0.9))

# Stairs of the same steps, down and up.
_STEP = Note(0.13, (1.0, 1.04, 0.98))  # scaled by the runs that use it
_STAIRS_DOWN = Run(_at(_STEP, 6800), (7, 9), gap=0.05, step=0.89)
_STAIRS_UP = Run(_at(_STEP, 2300), (7, 9), gap=0.05, step=1 / 0.89)
_EMBER_TUMBLER = Species("ember_tumbler", ((_STAIRS_DOWN,),), (0.5, 1.0))
_LANTERN_CLIMBER = Species("lantern_climber", ((_STAIRS_UP,),), (0.5, 1.0))

# Rough voices.
_BUZZ = Run(Note(0.55, (4300, 4000), (1, 0.5), am=95), (1, 2), gap=0.15)
_SALTMARSH_BUZZER = Species("saltmarsh_buzzer", ((_BUZZ,),), (0.5, 1.0))
_SHORT_RASP = Run(Note(0.09, (3500, 3900), (1, 0.4), am=60, rasp=0.6), (2, 3), gap=0.05)
_LONG_RASP = Run(Note(0.4, (4200, 3400), (1, 0.4), am=60, rasp=0.6))
_THORN_RASPER = Species("thorn_rasper", ((_SHORT_RASP, _LONG_RASP),), (0.4, 0.9))
_NASAL_PARTIALS = (0.5, 0.8, 1, 0.8, 0.6, 0.4)
_PIPE = Run(Note(0.16, (1150, 1250, 1050), _NASAL_PARTIALS), (2, 4), gap=0.09)
_NASAL_PIPER = Species("nasal_piper", ((_PIPE,),), (0.4, 1.0))

# Richer syntax.
_RISING_WARBLE = Run(Note(0.7, (3300, 4200), fm=(11, 0.22)))
_CHIPS = Run(Note(0.03, (4800, 3600)), (3, 5), gap=0.03)
_FALLING_WARBLE = Run(Note(0.5, (4400, 3400), fm=(14, 0.18)))
_UPSWEEPS = Run(Note(0.1, (2600, 5200)), (1, 2))
_WARBLER_SONGS = ((_RISING_WARBLE, _CHIPS), (_FALLING_WARBLE, _UPSWEEPS))
_GLADE_WARBLER = Species("glade_warbler", _WARBLER_SONGS, (0.4, 0.9))
_BOUNCE = Run(Note(0.045, (4700, 5500, 4400)), (10, 14), gap=0.26, rush=0.82)
_DUSK_BOUNCER = Species("dusk_bouncer", ((_BOUNCE,),), (0.5, 1.1))

SPECIES = (
    _MIST_FIFER,
    _COPPER_FIFER,
    _HILL_RATTLER,
    _REED_SPRINKLER,
    _UPLAND_ZIPPER,
    _EMBER_TUMBLER,
    _LANTERN_CLIMBER,
    _SALTMARSH_BUZZER,
    _THORN_RASPER,
    _NASAL_PIPER,
    _GLADE_WARBLER,
    _DUSK_BOUNCER,
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
    deviation = _rng(number, "duration").standard_normal()
    seconds = codec.median * np.exp(0.6 * deviation)
    return Recording(number, label, codec, float(np.clip(seconds, 3.0, 60.0)))


def waveform(rec: Recording) -> np.ndarray:
    """Return the sound of a recording: float32 (frames, channels) in ±1 at ``rec.codec.rate``."""
    rng = _rng(rec.number, "waveform")
    rate = rec.codec.rate
    n = round(rec.seconds * rate)
    song_n = sing(SPECIES[rec.label], n, rate, rng)
    song_n /= _rms_of_sound(song_n)
    n_distant = rng.choice(3, p=(0.45, 0.35, 0.2))
    for _ in range(n_distant):
        distant_label = (rec.label + rng.integers(1, len(SPECIES))) % len(SPECIES)
        distant_n = sing(SPECIES[distant_label], n, rate, rng)
        distant_n = _echo(distant_n, 3, 0.7, rate, rng)
        distant_n /= _rms_of_sound(distant_n)
        song_n += np.float32(_gain(rng, -26, -14)) * distant_n
    song_n = _echo(song_n, 2, 0.25, rate, rng)
    noise_m = background(n, rate, rng)
    near_n = song_n + noise_m[:n]
    if rec.codec.channels == 1:
        mix_nc = near_n[:, None]
    else:  # the singer is on one side, and delayed noise serves as different noise
        delay = round(rng.uniform(0.01, 0.03) * rate)
        far_n = rng.uniform(0.6, 1.0) * song_n + np.roll(noise_m, delay)[:n]
        mix_nc = np.stack([near_n, far_n], axis=1)
        if rng.random() < 0.5:
            mix_nc = mix_nc[:, ::-1]
    gain = _gain(rng, -18, -6) / np.abs(mix_nc).max()
    return np.ascontiguousarray(mix_nc * np.float32(gain))


def _rms_of_sound(x_n: np.ndarray) -> Any:
    """Return the root mean square of the samples that are not silent."""
    n_sounding = max(np.count_nonzero(x_n), 1)
    return np.sqrt(np.square(x_n).sum() / n_sounding)


def sing(species: Species, n: int, rate: int, rng: np.random.Generator) -> np.ndarray:
    """``n`` samples of one individual that sings without end: float32, 0 in gaps, peak about 1."""
    out_n = np.zeros(n, np.float32)
    pitch = 2 ** np.clip(rng.normal(0, 0.08), -0.20, 0.20)
    tempo = 2 ** np.clip(rng.normal(0, 0.15), -0.30, 0.30)  # of durations: above 1 is slow
    at = rng.uniform(0, 0.6) * rate
    while at < n:
        song_pitch = pitch * 2 ** rng.normal(0, 0.015)
        song_level = _gain(rng, -4, 0)
        song = species.songs[rng.integers(len(species.songs))]
        for run in song:
            gap = run.gap
            least, most = run.times
            n_notes = rng.integers(least, most + 1)
            for i in range(n_notes):
                note_pitch = song_pitch * run.step**i * 2 ** rng.normal(0, 0.01)
                level = np.float32(song_level * _gain(rng, -2, 0))
                note_m = level * _tone(run.note, note_pitch, tempo, rate, rng)
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
    t_m = np.arange(m, dtype=np.float32) / rate
    out_m = _noise_floor(hz_k, m, rng)
    if rng.random() < 0.4:
        out_m += _wind(hz_k, t_m, rng)
    if rng.random() < 0.3:
        out_m += _rain(hz_k, m, rate, rng)
    if rng.random() < 0.3:
        _add_mains_hum(out_m, t_m, rng)
    return out_m


def _white(hz_k: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    return rng.standard_normal(2 * len(hz_k), np.float32).view(np.complex64)


def _noise_floor(hz_k: np.ndarray, m: int, rng: np.random.Generator) -> np.ndarray:
    low_k = (1 + hz_k / 300) ** -rng.uniform(0.6, 1.2)
    high_k = 1 + (hz_k / 8000) ** 4
    tilt_k = low_k / high_k
    is_in_birds_band = (hz_k > 1500) & (hz_k < 8000)
    rms_in_band = 2 * np.sqrt(np.square(tilt_k[is_in_birds_band]).sum()) / m
    gain = np.float32(_gain(rng, -26, -6) / rms_in_band)
    return np.fft.irfft(tilt_k * gain * _white(hz_k, rng), m)


def _wind(hz_k: np.ndarray, t_m: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Return rumble below some 300 Hz, in gusts."""
    low_k = 1 / (1 + (hz_k / rng.uniform(80, 250)) ** 2)
    rumble_m = np.fft.irfft(low_k * _white(hz_k, rng), len(t_m))
    knots = np.arange(0, t_m[-1] + 0.7, 0.7)
    gusts_m = np.interp(t_m, knots, rng.uniform(0, 1, len(knots)))
    gain = np.float32(_gain(rng, -15, 0) / rumble_m.std())
    wind_m: np.ndarray = rumble_m * gain * gusts_m.astype(np.float32)
    return wind_m


def _rain(hz_k: np.ndarray, m: int, rate: int, rng: np.random.Generator) -> np.ndarray:
    """Return drops that ring broadly about some 4 kHz."""
    drops_m = np.zeros(m, np.float32)
    count = rng.poisson(rng.uniform(30, 200) * m / rate)
    drops_m[rng.integers(0, m, count)] = rng.exponential(1, count)
    ring_k = np.exp(-np.square((hz_k - rng.uniform(2500, 5500)) / 1500))
    rain_m = np.fft.irfft(ring_k * np.fft.rfft(drops_m), m)
    return rain_m * np.float32(_gain(rng, -22, -8) / rain_m.std())


def _add_mains_hum(out_m: np.ndarray, t_m: np.ndarray, rng: np.random.Generator) -> None:
    """Add the hum of the mains and its harmonics."""
    mains = 2 * np.pi * rng.choice([50, 60])
    level = _gain(rng, -30, -12)
    for harmonic in (1, 2, 3, 5):
        phase_m = np.float32(mains * harmonic) * t_m + np.float32(harmonic)
        out_m += np.float32(level / harmonic) * np.sin(phase_m)


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
        for start in range(0, len(samples), WRITE):
            sink.write(samples[start : start + WRITE])
    content = file.getvalue()
    return _with_serial(content, rec.number) if codec.format == "OGG" else content


def _rng(number: int, purpose: str) -> np.random.Generator:
    return np.random.default_rng([SEED, number, zlib.crc32(purpose.encode())])


def _gain(rng: np.random.Generator, low_db: float, high_db: float) -> float:
    return float(10 ** (rng.uniform(low_db, high_db) / 20))


def _tone(
    note: Note, pitch: float, tempo: float, rate: int, rng: np.random.Generator
) -> np.ndarray:
    n = round(note.seconds * tempo * rate)
    t_n = np.arange(n) / rate
    knots = np.linspace(0, t_n[-1], len(note.hz))
    hz_n = pitch * np.exp(np.interp(t_n, knots, np.log(note.hz)))
    fm_hz, fm_octaves = note.fm
    if fm_octaves:
        octaves_n = fm_octaves * np.sin(2 * np.pi * fm_hz / tempo * t_n)
        hz_n *= 2**octaves_n
    # summed in double, a sine needs no more
    phase_n = (np.cumsum(hz_n) * (2 * np.pi / rate)).astype(np.float32)
    highest = hz_n.max()
    out_n = np.zeros(n, np.float32)
    for k, amplitude in enumerate(note.partials, 1):
        if k * highest < 0.45 * rate:  # no partial aliases at any codec's rate
            out_n += np.float32(amplitude) * np.sin(np.float32(k) * phase_n)
    out_n /= np.float32(sum(note.partials))
    if note.am:
        am_phase_n = np.float32(2 * np.pi * note.am / tempo) * t_n.astype(np.float32)
        out_n *= 0.5 - 0.5 * np.cos(am_phase_n)
    if note.rasp:
        noise_n = rng.standard_normal(n, np.float32)
        out_n *= np.float32(1 - note.rasp) + np.float32(note.rasp) * noise_n
    n_edge = min(round(0.008 * rate), n // 2)
    edge_phase = np.pi * (np.arange(n_edge) + 0.5) / n_edge
    edge = (0.5 - 0.5 * np.cos(edge_phase)).astype(np.float32)
    out_n[:n_edge] *= edge
    out_n[n - n_edge :] *= edge[::-1]
    return out_n


def _echo(
    x_n: np.ndarray, n_taps: int, level: float, rate: int, rng: np.random.Generator
) -> np.ndarray:
    out_n = x_n.copy()
    delays = np.round(rng.uniform(0.02, 0.15, n_taps) * rate).astype(int)
    for delay in delays:
        gain = np.float32(level * rng.uniform(0.3, 1.0))
        out_n[delay:] += gain * x_n[:-delay]
    return out_n


_REVERSED_BITS = bytes(int(f"{byte:08b}"[::-1], 2) for byte in range(256))


def _with_serial(ogg: bytes, serial: int) -> bytes:
    """Return an OGG file with another serial number, and its pages' checksums (RFC 3533, 6)."""
    out = bytearray(ogg)
    at = 0
    while at < len(out):
        n_segments = out[at + 26]
        body = at + 27 + n_segments
        end = body + sum(out[at + 27 : body])
        out[at + 14 : at + 18] = serial.to_bytes(4, "little")
        out[at + 22 : at + 26] = bytes(4)  # the checksum counts as zero in itself
        # OGG's CRC-32 has zlib's polynomial with the bits the other way round, begins with 0, and
        # is not inverted.
        page = bytes(out[at:end]).translate(_REVERSED_BITS)
        crc = zlib.crc32(page, 0xFFFFFFFF) ^ 0xFFFFFFFF
        out[at + 22 : at + 26] = crc.to_bytes(4, "big").translate(_REVERSED_BITS)
        at = end
    return bytes(out)
