"""Sound files as recorders, phones and editors leave them.

They are read to the same length as by libsndfile and ffmpeg, or they are refused by name, and the
message has a command that converts them.
"""

import io
import itertools
import pathlib
import shutil
import struct
import subprocess

import numpy as np
import pytest
import soundfile

from jaxtrain import cli
from loaders import _rust
from loaders.audio.recordings import windows
from tests.support import corpus

HERE = pathlib.Path(__file__).parents[1] / "data" / "field"
RATE, N = 44_100, 11_027
REMEDY = "convert it: ffmpeg -i OLD NEW.flac"
FFMPEG = shutil.which("ffmpeg")
needs_ffmpeg = pytest.mark.skipif(
    not FFMPEG, reason="there is no ffmpeg to encode and compare with"
)


def tones(channels: int = 1, n: int = N, rate: int = RATE) -> np.ndarray:
    t = np.arange(n) / rate
    return np.stack(
        [
            0.3 * np.sin(2 * np.pi * f * t * (1 + 0.2 * t))
            for f in (440, 1000, 1500, 700, 300, 200)[:channels]
        ],
        1,
    )


def ffmpeg(path: pathlib.Path, channels: int) -> np.ndarray:
    """The recording as ffmpeg decodes it: the mean of its channels."""
    command = ["ffmpeg", "-v", "error", "-i", str(path), "-f", "f32le", "-"]
    out = subprocess.run(command, capture_output=True, timeout=60, check=True).stdout
    return np.frombuffer(out, "<f4").reshape(-1, channels).mean(1)


# ---- all formats that libsndfile and ffmpeg write
# ----------------------------------------------------------------------

READ = {
    "AIFF": {"PCM_S8", "PCM_U8", "PCM_16", "PCM_24", "PCM_32", "FLOAT", "DOUBLE", "ULAW", "ALAW"},
    "AU": {"PCM_S8", "PCM_16", "PCM_24", "PCM_32", "FLOAT", "DOUBLE", "ULAW", "ALAW"},
    "CAF": {"PCM_S8", "PCM_16", "PCM_24", "PCM_32", "FLOAT", "DOUBLE", "ULAW", "ALAW"},
    "FLAC": {"PCM_S8", "PCM_16", "PCM_24"},
    "MP3": {"MPEG_LAYER_III"},
    "OGG": {"VORBIS", "OPUS"},
    "RF64": {"PCM_U8", "PCM_16", "PCM_24", "PCM_32", "FLOAT", "DOUBLE", "ULAW", "ALAW"},
    "W64": {"PCM_U8", "PCM_16", "PCM_24", "PCM_32", "FLOAT", "DOUBLE", "ULAW", "ALAW"},
    "WAV": {
        "PCM_U8",
        "PCM_16",
        "PCM_24",
        "PCM_32",
        "FLOAT",
        "DOUBLE",
        "ULAW",
        "ALAW",
        "IMA_ADPCM",
        "MS_ADPCM",
    },
    "WAVEX": {"PCM_U8", "PCM_16", "PCM_24", "PCM_32", "FLOAT", "DOUBLE", "ULAW", "ALAW"},
}


@pytest.mark.parametrize("channels", [1, 2])
@pytest.mark.parametrize("kind", [each for each in soundfile.available_formats() if each != "RAW"])
def test_a_format_of_libsndfile_is_read_to_its_length_or_refused(tmp_path, kind, channels):
    path = tmp_path / "a"
    for subtype in soundfile.available_subtypes(kind):
        rate = 48_000 if subtype == "OPUS" else RATE
        try:
            soundfile.write(path, tones(channels), rate, format=kind, subtype=subtype)
        # the format does not have this number of channels
        except (soundfile.LibsndfileError, ValueError):
            continue
        try:
            wave, found, frames = _rust.decode(path.read_bytes())
        except ValueError as error:
            assert REMEDY in str(error) or str(error).startswith("not a WAV"), (
                kind,
                subtype,
                error,
            )
            assert subtype not in READ.get(kind, ()), (kind, subtype, error)
            continue
        expected, _ = soundfile.read(path, always_2d=True)
        assert (found, frames) == (rate, len(expected)), (kind, subtype)
        lossy = 2e-2 if "ADPCM" in subtype else 1e-4
        assert abs(wave - expected.mean(1)).max() < lossy, (kind, subtype)


# The name, the arguments of ffmpeg, the number of samples by which lengths may differ (ffmpeg keeps
# the padding of AAC), and the name of the format in a refusal.
ENCODED = [
    ("a.m4a", ["-c:a", "aac"], 1024, ""),
    ("a.mov", ["-c:a", "aac"], 1024, ""),
    ("a.3gp", ["-c:a", "aac"], 1024, ""),
    ("low.m4a", ["-c:a", "aac", "-ar", "8000"], 1024, ""),
    ("cut.m4a", ["-c:a", "aac", "-ss", "0.2"], 1024, ""),
    ("alac.m4a", ["-c:a", "alac"], 0, ""),
    ("alac.caf", ["-c:a", "alac"], 0, ""),
    ("sowt.mov", ["-c:a", "pcm_s16le"], 0, ""),
    ("float.mov", ["-c:a", "pcm_f32le"], 0, ""),
    ("pcm.caf", ["-c:a", "pcm_s24be"], 0, ""),
    ("sowt.aiff", ["-c:a", "pcm_s16le"], 0, ""),
    ("a.au", [], 0, ""),
    ("a.w64", [], 0, ""),
    ("rf64.wav", ["-rf64", "always"], 0, ""),
    ("bext.wav", ["-write_bext", "1"], 0, ""),
    ("vbr.mp3", ["-c:a", "libmp3lame", "-q:a", "5"], 0, ""),
    ("plain.mp3", ["-c:a", "libmp3lame", "-write_xing", "0"], 0, ""),
    ("a.opus", ["-c:a", "libopus", "-ar", "48000"], 0, ""),
    ("a.ogg", ["-c:a", "libvorbis"], 128, ""),
    ("in24.mov", ["-c:a", "pcm_s24be"], 0, "in24"),
    ("five.m4a", ["-c:a", "aac", "-ac", "6"], 0, "AAC of more than 2 channels"),
    ("empty_moov.mp4", ["-c:a", "aac", "-movflags", "frag_keyframe+empty_moov"], 0, "fragmented"),
    (
        "moof.mp4",
        ["-c:a", "aac", "-movflags", "frag_keyframe+default_base_moof", "-frag_duration", "50000"],
        0,
        "fragmented",
    ),
    ("flac.mp4", ["-c:a", "flac", "-strict", "-2"], 0, "fLaC"),
    ("opus.mp4", ["-c:a", "libopus", "-ar", "48000"], 0, "Opus"),
    ("a.aac", ["-c:a", "aac"], 0, "AAC in ADTS"),
    ("layer2.mp3", ["-c:a", "mp2", "-f", "mp2"], 0, "MPEG layer II"),
    ("a.ac3", ["-c:a", "ac3"], 0, "AC-3"),
    ("a.wma", ["-c:a", "wmav2"], 0, "Windows Media"),
    ("a.webm", ["-c:a", "libopus", "-ar", "48000"], 0, "WebM"),
    ("a.avi", [], 0, "AVI"),
    ("a.ts", ["-c:a", "aac"], 0, "transport stream"),
    ("a.wv", [], 0, "WavPack"),
    ("mp3.wav", ["-c:a", "libmp3lame"], 0, "MP3"),
    ("flac.ogg", ["-c:a", "flac"], 0, "FLAC in OGG"),
]


@needs_ffmpeg
@pytest.mark.parametrize(
    "name, arguments, slack, refused", ENCODED, ids=[each[0] for each in ENCODED]
)
def test_a_format_of_ffmpeg_is_read_to_its_length_or_refused(
    tmp_path, name, arguments, slack, refused
):
    path = tmp_path / name
    raw = [
        "ffmpeg",
        "-v",
        "error",
        "-f",
        "f32le",
        "-ar",
        str(RATE),
        "-ac",
        "2",
        "-i",
        "-",
        *arguments,
        str(path),
    ]
    made = subprocess.run(
        raw,
        input=tones(2, 22_051).astype("<f4").tobytes(),
        capture_output=True,
        timeout=60,
        check=False,
    )
    if made.returncode:
        pytest.skip(f"this ffmpeg does not write it: {made.stderr.decode()[-80:]}")
    if refused:
        with pytest.raises(ValueError, match=rf"{refused}.*{REMEDY}"):
            _rust.recording_info(path)
        return
    expected = ffmpeg(path, 2)
    wave, _, frames = _rust.decode(path.read_bytes())
    n = min(frames, len(expected))
    assert abs(len(expected) - frames) <= slack
    assert abs(wave[:n] - expected[:n]).mean() < 2e-3
    assert _rust.recording_info(path)[1] == frames


def cut_files(kind: str, folder: pathlib.Path) -> dict[str, bytes]:
    """Recordings of noise in every supported coding of a format."""
    wave = np.stack([corpus.noise(seed, 60_000 / RATE, RATE) for seed in range(2)], 1)
    found = {}
    for subtype in READ.get(kind, ()):
        for channels in (1, 2) if "ADPCM" in subtype else (2,):
            found[f"{subtype} {channels}"] = corpus.encode(
                wave[:, :channels], 48_000 if subtype == "OPUS" else RATE, kind, subtype
            )
    for name, arguments, _, refused in ENCODED if kind == "ffmpeg" and FFMPEG else ():
        for more in (
            ([], ["-movflags", "faststart"])
            if name.endswith(("m4a", "mov")) and not refused
            else ([],) * (not refused)
        ):
            command = [
                "ffmpeg",
                "-v",
                "error",
                "-y",
                "-f",
                "f32le",
                "-ar",
                str(RATE),
                "-ac",
                "2",
                "-i",
                "-",
                *arguments,
                *more,
            ]
            path = folder / name
            data = wave.astype("<f4").tobytes()
            if not subprocess.run(
                [*command, str(path)], input=data, capture_output=True, timeout=60, check=False
            ).returncode:
                found[f"{name} {' '.join(more)}"] = path.read_bytes()
    return found


@pytest.mark.parametrize("kind", [*READ, "ffmpeg"])
def test_a_file_that_was_cut_anywhere_is_read_as_far_as_it_goes_and_reported_or_refused(
    tmp_path, kind
):
    path = tmp_path / "cut"
    for name, data in cut_files(kind, tmp_path).items():
        whole = _rust.decode(data)[0]
        path.write_bytes(data)
        assert _rust.recording_doubts(path)[0] <= len(whole), name
        for size in (
            len(data) - 1,
            len(data) - 10,
            len(data) * 9 // 10,
            len(data) // 2,
            100,
            60,
            20,
        ):
            path.write_bytes(data[:size])
            try:
                _, frames, *_ = _rust.recording_info(path)
            except ValueError as error:
                assert not str(error).startswith("not a") or size <= 100, (name, size, error)
                continue
            wave = _rust.decode(data[:size])[0]  # of its whole length
            assert frames == len(wave) < len(whole) and _rust.recording_doubts(path)[0] > frames, (
                name,
                size,
            )
            # a page of Ogg: up to a second
            assert size < len(data) - 10 or len(whole) - frames < 48_000, (name, size)
            assert abs(wave - whole[:frames]).max() < 1e-4, (name, size)


# ---- headers of WAV and others
# -------------------------------------------------------------------------------

SAMPLES = np.random.default_rng(0).integers(-20_000, 20_000, 5000).astype("<i2")
CHUNK = b"LIST\x0c\0\0\0INFOIART\0\0\0\0"
ZEROS = bytes(8192)
TAG = b"TAG" + bytes(5000)


def wav(
    stated: int | None,
    data: bytes,
    after: bytes = b"",
    tag: int = 1,
    bits: int = 16,
    block: int | None = None,
) -> bytes:
    block = bits // 8 if block is None else block
    form = struct.pack("<HHIIHH", tag, 1, RATE, RATE * block, block, bits)
    stated = len(data) if stated is None else stated
    return (
        b"RIFF"
        + struct.pack("<I", (36 + stated) & 0xFFFFFFFF)
        + b"WAVEfmt \x10\0\0\0"
        + form
        + b"data"
        + struct.pack("<I", stated)
        + data
        + after
    )


@pytest.mark.parametrize("stated", [0, 44, 2000, 0xFFFFFFFF, 0x7FFFFFFF, None])
@pytest.mark.parametrize(
    "after", [b"", CHUNK, CHUNK + ZEROS, TAG], ids=["end", "chunk", "zeros", "tag"]
)
def test_samples_behind_a_stale_header_are_read_and_chunks_are_not(tmp_path, stated, after):
    (tmp_path / "a.wav").write_bytes(wav(stated, SAMPLES.tobytes(), after))
    wave, _, frames = _rust.decode((tmp_path / "a.wav").read_bytes())
    assert np.array_equal(wave[:5000] * 32768, SAMPLES)
    # The bytes after the data are recognised only if the header says where the data end.
    assert frames == 5000 + (0 if stated is None else len(after) // 2)
    says = {None: 5000, 0xFFFFFFFF: 0}.get(stated, (stated or 0) // 2)
    assert _rust.recording_doubts(tmp_path / "a.wav") == (says, False)


def test_a_recording_without_samples_stays_empty():
    with pytest.raises(ValueError, match="holds no audio"):
        _rust.decode(wav(0, b"", CHUNK))


@pytest.mark.parametrize("block, bits", [(1, 16), (0, 16), (2, 12)])
def test_a_wrong_block_is_read_as_others_read_it(block, bits):
    assert np.array_equal(
        _rust.decode(wav(None, SAMPLES.tobytes(), bits=bits, block=block))[0] * 32768, SAMPLES
    )


def test_24_bits_in_4_bytes_lie_at_either_end():
    values = np.random.default_rng(1).integers(-(1 << 23), 1 << 23, 3000).astype("<i4")
    for data in ((values << 8).astype("<i4"), values):
        wave, _, frames = _rust.decode(wav(None, data.tobytes(), bits=24, block=4))
        assert frames == 3000 and np.array_equal(wave, values / np.float32(1 << 23))
    floats = (values / 7).astype("<f4").tobytes()
    with pytest.raises(ValueError, match="floats of 24 bits"):
        _rust.decode(wav(None, floats, bits=24, block=4))


def test_open_lengths_of_caf_and_au_go_to_the_end():
    big = SAMPLES.astype(">i2").tobytes()
    desc = struct.pack(">d4s5I", RATE, b"lpcm", 0, 2, 1, 1, 16)
    caf = (
        b"caff\0\x01\0\0desc"
        + struct.pack(">q", 32)
        + desc
        + b"data"
        + struct.pack(">q", -1)
        + bytes(4)
        + big
    )
    au = b".snd" + struct.pack(">5I", 24, 0xFFFFFFFF, 3, RATE, 1) + big
    for data in (caf, au):
        assert np.array_equal(_rust.decode(data)[0] * 32768, SAMPLES)


@pytest.mark.parametrize(
    "data, name",
    [
        (
            b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n",
            "a Git LFS pointer.*git lfs pull",
        ),
        (b"<!DOCTYPE html><title>404</title>", "a web page"),
        (bytes(9000), "a file of zeros"),
        (b"PK\x03\x04" + bytes(100), "a ZIP archive"),
        (b"WAac" + bytes(100), "a WAC recording.*Kaleidoscope"),
    ],
)
def test_files_that_are_no_sound_are_named(data, name):
    with pytest.raises(ValueError, match=name):
        _rust.decode(data)


# ---- joined files
# -------------------------------------------------------------------------------


def opus(seed: int, seconds: float, channels: int = 1) -> bytes:
    wave = corpus.noise(seed, seconds, 48_000)
    return corpus.encode(np.stack([wave] * channels, 1), 48_000, "OGG", "OPUS")


def slices_agree(data: bytes, tolerance: float = 1e-5) -> None:
    whole, _, frames = _rust.decode(data)
    for start, length in (
        (0, 100),
        (frames // 3 - 500, 2000),
        (frames // 2 - 5000, 10_000),
        (frames - 1000, 1000),
    ):
        np.testing.assert_allclose(
            _rust.decode(data, start, length)[0], whole[start : start + length], atol=tolerance
        )


@pytest.mark.parametrize(
    "make",
    [
        lambda i: opus(i, 1.0 + i / 10),
        lambda i: corpus.encode(corpus.noise(i, 1 + i / 10, RATE), RATE, "OGG"),
    ],
)
def test_chained_ogg_is_read_whole(make):
    parts = [make(0), make(1), make(0)]  # the last one has the serial number of the first
    whole, _, frames = _rust.decode(b"".join(parts))
    np.testing.assert_array_equal(whole, np.concatenate([_rust.decode(part)[0] for part in parts]))
    assert len(whole) == frames
    slices_agree(b"".join(parts))
    twice, _, frames = _rust.decode(parts[0] * 2)
    assert frames == 2 * len(_rust.decode(parts[0])[0])


def test_a_long_chain_of_one_serial_number_is_found():
    """Beyond a MiB not every page is read: the page numbers are compared at a few places."""
    part = corpus.encode(corpus.noise(0, 20.0, RATE), RATE, "OGG")
    data = part * (-(-(1 << 20) // len(part)) + 1)
    assert _rust.decode(data, 0, 1)[2] == len(data) // len(part) * _rust.decode(part, 0, 1)[2]


@pytest.mark.parametrize(
    "data, what",
    [
        (
            lambda: opus(0, 1.0) + opus(1, 1.0, 2),
            r"number of channels changes from 1 to 2 after 1.000 s \(joined files\)",
        ),
        (
            lambda: b"".join(
                corpus.encode(corpus.noise(0, 1, rate), rate, "OGG") for rate in (RATE, 16_000)
            ),
            "rate changes from 44100 to 16000 Hz after 1.000 s",
        ),
        (
            lambda: b"".join(
                corpus.encode(corpus.noise(0, 1, rate), rate, "MP3") for rate in (RATE, 16_000)
            ),
            "rate changes from 44100 to 16000 Hz after 1.0",
        ),
    ],
    ids=["opus", "vorbis", "mp3"],
)
def test_joined_files_of_several_rates_are_refused(data, what):
    with pytest.raises(ValueError, match=rf"{what}.*{REMEDY}"):
        _rust.decode(data())


@pytest.mark.parametrize("mode", ["CONSTANT", "VARIABLE"])
def test_joined_mp3s_are_read_whole(tmp_path, mode):
    """The first frame states the length of the first part alone."""
    parts = []
    for seed in range(3):
        file = io.BytesIO()
        wave = corpus.noise(seed, 2.0, 22_050)
        soundfile.write(file, wave, 22_050, format="MP3", bitrate_mode=mode, compression_level=0.5)
        parts.append(file.getvalue())
    data = b"".join(parts)
    path = tmp_path / "joined.mp3"
    path.write_bytes(data)
    frames = _rust.decode(data)[2]
    assert 0 <= frames / 22_050 - 6.0 < 0.3, (
        "the parts, and the delay and padding of the encoder between them"
    )
    if FFMPEG:
        extra = len(ffmpeg(path, 1)) - frames
        assert extra in (0, 2 * 576), (
            "which decodes the first frames of the later parts, that hold no sound"
        )
    slices_agree(data)


# ---- M4A
# -------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["explicit", "compatible", "implicit"])
def test_he_aac_is_refused_by_name(kind):
    """A decoder of plain AAC leaves out the upper half of the band, whether the header announces it
    or not."""
    with pytest.raises(ValueError, match=f"M4A: HE-AAC cannot be read here; {REMEDY}"):
        _rust.recording_info(HERE / f"he_aac_{kind}.m4a")


@needs_ffmpeg
def test_an_m4a_that_was_cut_short_is_damaged(tmp_path):
    path = tmp_path / "a.m4a"
    command = ["ffmpeg", "-v", "error", "-f", "lavfi", "-i", "anoisesrc=d=2:r=44100", "-c:a", "aac"]
    subprocess.run([*command, "-movflags", "faststart", str(path)], check=True, timeout=60)
    data = path.read_bytes()
    for damaged, why in (
        (data[: len(data) // 2], "ends before its stated length"),
        (data[data.index(b"mdat") - 4 :], "QuickTime"),
    ):
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match=why):
            _rust.recording_info(path)


# ---- commands
# -------------------------------------------------------------------------------


def test_index_and_detect_say_the_same_of_a_file(tmp_path, capsys):
    folder = tmp_path / "rec"
    folder.mkdir()
    shutil.copy(HERE / "he_aac_implicit.m4a", folder)
    tone = 0.3 * np.sin(np.arange(24_000) / 7)
    (folder / "inverted.wav").write_bytes(corpus.encode(np.stack([tone, -tone], 1), 8000))
    (folder / "stale.wav").write_bytes(wav(44, SAMPLES.tobytes() * 4))
    assert (
        cli.main(["index", str(folder), "--labels", "none", "--out", str(tmp_path / "index")]) == 2
    )
    refused = capsys.readouterr().err
    assert (
        cli.main(
            ["index", str(folder), "--out", str(tmp_path / "index"), "--on", "unreadable-file=drop"]
        )
        == 0
    )
    assert "train: 2 rows of 2 recordings" in capsys.readouterr().out
    errors = windows.lenient()
    cut = windows.cut([str(folder)], seconds=1.0, hop=1.0, errors=errors)
    assert [each.name for each in cut.recordings] == ["inverted.wav", "stale.wav"]
    for kind, text in (
        ("unreadable-file", f"he_aac_implicit.m4a: M4A: HE-AAC cannot be read here; {REMEDY}"),
        ("opposite-channels", "inverted.wav"),
        ("stale-header", "stale.wav holds 0.454 s; its header states 0.000 s"),
    ):
        assert kind in refused and text in refused
        assert any(kind == found and text in said for found, said in errors.lines)


# ---- public reports
# -------------------------------------------------------------------------------
# Files made as each report describes them; docs/results/field-sound.md lists the reports.

FMT = struct.pack("<HHIIHH", 1, 1, RATE, 2 * RATE, 2, 16)
DATA = SAMPLES.tobytes()


def riff(*chunks: tuple[bytes, bytes], size: int | None = None) -> bytes:
    body = b"".join(
        name + struct.pack("<I", len(data)) + data + b"\0" * (len(data) & 1)
        for name, data in chunks
    )
    return b"RIFF" + struct.pack("<I", 4 + len(body) if size is None else size) + b"WAVE" + body


def float_wav() -> bytes:
    fmt = struct.pack("<HHIIHH", 3, 1, 96_000, 4 * 96_000, 4, 32)
    return riff(
        (b"bext", bytes(602)),
        (b"iXML", b"<x/>"),
        (b"fmt ", fmt),
        (b"data", (SAMPLES / 32768).astype("<f4").tobytes()),
    )


def mp3(wave: np.ndarray = SAMPLES / 32768) -> bytes:
    return corpus.encode(np.tile(wave, 5).astype(np.float32), RATE, "MP3")


def id3(size: int) -> bytes:
    return b"ID3\x04\0\0" + bytes(size >> shift & 127 for shift in (21, 14, 7, 0)) + bytes(size)


def flac() -> bytes:
    return corpus.encode(SAMPLES / np.float32(32768), RATE, "FLAC")


WHOLE = {
    "librosa/librosa#876": lambda: wav(138, DATA),
    "librosa/librosa#749": lambda: wav(
        None, DATA, b"PAD " + struct.pack("<I", 30_000) + bytes(30_000)
    ),
    "lhotse-speech/lhotse#913": lambda: wav(0x7FFFFFFF, DATA),
    "kyutai-labs/sphn#20": lambda: wav(0xFFFFFFFF, DATA),
    "JamesHeinrich/getID3#468": lambda: b"RIFF\0\0\0\0" + wav(0, DATA)[8:],
    "pdeljanov/Symphonia#380": lambda: riff(
        (b"fmt ", FMT), (b"data", DATA), size=4 + 24 + len(DATA)
    ),
    "pdeljanov/Symphonia#327": lambda: b"RIFF\xff\xff\xff\xff" + wav(0xFFFFFFFF, DATA)[8:],
    "pdeljanov/Symphonia#247": lambda: riff(
        (b"fmt ", struct.pack("<HHIIHH", 3, 1, RATE, 4 * RATE, 4, 32) + bytes(24)),
        (b"data", (SAMPLES / 32768).astype("<f4").tobytes()),
    ),
    "meta-pytorch/torchcodec#1378": lambda: (
        corpus.encode(SAMPLES / 32768, RATE, "WAV", "PCM_24") + CHUNK
    ),
    "ruuda/hound#14": lambda: riff((b"fmt ", FMT + bytes(24)), (b"data", DATA)),
    "libsndfile/libsndfile#86": lambda: riff((b"fmt ", FMT), (b"smpl", bytes(32)), (b"data", DATA)),
    "libsndfile/libsndfile#370": lambda: riff(
        (b"fmt ", FMT), (b"LIST", bytes(393_164)), (b"data", DATA)
    ),
    "FFmpeg/FFmpeg#13": lambda: riff((b"bext", bytes(603)), (b"fmt ", FMT), (b"data", DATA)),
    "mpruett/audiofile#3": lambda: riff((b"fmt ", FMT), (b"data", DATA), (b"ID3 ", bytes(9000))),
    "quodlibet/mutagen#630": lambda: id3(1000) + wav(None, DATA),
    "Mattk70/Chirpity-Electron#85": float_wav,
    "xiph/flac, ID3 before fLaC": lambda: id3(1000) + flac(),
}


@pytest.mark.parametrize("make", WHOLE.values(), ids=WHOLE)
def test_a_reported_file_is_read_whole(make):
    wave, _, frames = _rust.decode(make())
    assert frames == 5000 and np.array_equal(wave * 32768, SAMPLES)


@pytest.mark.parametrize(
    "head",
    [id3(300_000), id3(10) + id3(2000)],
    ids=["birdnet-team/BirdNET-Analyzer#65", "two tags"],
)
def test_an_mp3_behind_large_tags_is_read_whole(head):
    data = mp3()
    assert np.array_equal(_rust.decode(head + data)[0], _rust.decode(data)[0])


NAMED = {
    "QutEcoacoustics/emu#67": (lambda: wav(0, b""), "WAV: the recording holds no audio"),
    "birdnet-team/BirdNET-Analyzer#745": (lambda: bytes(100_000), "a file of zeros"),
    "librosa/librosa#686": (lambda: b"RIFF\0\0\0\0AVI LIST" + bytes(100), f"AVI: .*{REMEDY}"),
    "supercollider/supercollider#3137": (lambda: wav(None, DATA, tag=0x55), f"MP3 .*{REMEDY}"),
    "mackron/dr_libs#210": (lambda: b"RIFX" + riff((b"fmt ", FMT))[4:], f"RIFX .*{REMEDY}"),
    "mbunkus/mkvtoolnix#953": (lambda: flac() * 2, "FLAC: several files, joined byte by byte"),
    "copy /b of WAV": (lambda: wav(None, DATA) * 2, "WAV: several files, joined byte by byte"),
}


@pytest.mark.parametrize("make, name", NAMED.values(), ids=NAMED)
def test_a_reported_file_is_refused_by_name(tmp_path, make, name):
    (tmp_path / "a").write_bytes(make())
    with pytest.raises(ValueError, match=name):
        _rust.recording_info(tmp_path / "a")


@pytest.mark.parametrize("others", [[1.0], [0.4], [1.7], [1.0, 1.0], [1.0] * 4, [0.5, 0.8]])
def test_joined_flac_of_any_length_is_found(tmp_path, others):
    parts = [
        corpus.encode(corpus.noise(i, seconds, RATE), RATE, "FLAC")
        for i, seconds in enumerate([1.0, *others])
    ]
    (tmp_path / "a").write_bytes(b"".join(parts))
    with pytest.raises(ValueError, match="joined byte by byte"):
        _rust.recording_info(tmp_path / "a")
    (tmp_path / "a").write_bytes(parts[0][: len(parts[0]) * 2 // 3])
    assert _rust.recording_doubts(tmp_path / "a")[0] == RATE, (
        "one that was cut short is read as far as it goes"
    )


def test_recordings_that_were_cut_short_are_reported(tmp_path, capsys):
    """A full card cuts recordings short in this way (QutEcoacoustics/emu#329,
    lhotse-speech/lhotse#1228)."""
    folder = tmp_path / "rec"
    folder.mkdir()
    noise = corpus.noise(0, 4.0, RATE)
    for kind in ("WAV", "FLAC", "MP3", "AIFF", "AU", "CAF", "W64"):
        data = corpus.encode(noise, RATE, kind)
        (folder / f"a.{kind.lower()}").write_bytes(data[: len(data) * 2 // 3])
    assert cli.main(["index", str(folder), "--out", str(tmp_path / "index")]) == 2
    assert "truncated-file: 7 (refused)" in capsys.readouterr().err


@needs_ffmpeg
@pytest.mark.parametrize(
    "name, sources, refused",
    [
        ("high.m4a", ["sine=d=1:r=96000"], ""),  # a rate that the description of MP4 cannot hold
        ("late.mp4", ["sine=d=1"], ""),  # sound that begins later
        ("two.m4a", ["sine=d=2", "sine=d=1"], "several tracks of sound"),
    ],
)
def test_m4a_of_several_tracks_and_rates(tmp_path, name, sources, refused):
    path = tmp_path / name
    offset = ["-itsoffset", "1"] if name == "late.mp4" else []
    inputs = [each for source in sources for each in (*offset, "-f", "lavfi", "-i", source)]
    maps = [each for i in range(len(sources)) for each in ("-map", str(i))]
    subprocess.run(
        ["ffmpeg", "-v", "error", *inputs, *maps, "-c:a", "aac", str(path)], check=True, timeout=60
    )
    if refused:
        with pytest.raises(ValueError, match=refused):
            _rust.recording_info(path)
        return
    rate, frames, *_ = _rust.recording_info(path)
    assert abs(len(ffmpeg(path, 1)) - frames) <= 1024 and frames >= rate


def test_channels_that_cancel_are_found_in_any_number(tmp_path):
    tone = tones()[:, 0]
    for channels, cancels in (
        ([tone, -tone] * 2, True),
        ([tone, -0.5 * tone], False),
        ([tone, tone], False),
        ([tone], False),
    ):
        (tmp_path / "a.flac").write_bytes(corpus.encode(np.stack(channels, 1), RATE, "FLAC"))
        assert _rust.recording_doubts(tmp_path / "a.flac") == (N, cancels)


# ---- several recordings in one file, and streams that look like another
# ----------------------------------------------------------------------


def ogg_tracks(*parts: bytes) -> bytes:
    """The parts next to each other: the first pages of all, and then one of each in turn."""
    of_parts = [[b"OggS\0" + page for page in part.split(b"OggS\0")[1:]] for part in parts]
    first = b"".join(of_part[0] for of_part in of_parts)
    turns = itertools.zip_longest(*(of_part[1:] for of_part in of_parts), fillvalue=b"")
    return first + b"".join(page for turn in turns for page in turn)


def box(name: bytes, *content: bytes) -> bytes:
    body = b"".join(content)
    return struct.pack(">I", 8 + len(body)) + name + body


def m4a_tracks(n: int) -> bytes:
    handler = box(b"hdlr", bytes(8), b"soun", bytes(12))
    return box(b"ftyp", b"M4A ") + box(b"moov", box(b"trak", box(b"mdia", handler)) * n)


def esds(object_type: int, long: bool = False) -> bytes:
    """A description of a stream: of MP3, 0x6B of MPEG 1 and 0x69 of MPEG 2."""
    length = b"\x80\x80\x80" if long else b""
    decoder = b"\4" + length + b"\x0d" + bytes([object_type, 0x15]) + bytes(11)
    stream = b"\0\1\0" + decoder + b"\6" + length + b"\1\2"
    return box(b"esds", bytes(4), b"\3", length, bytes([len(stream)]), stream)


def m4a_of(codec: bytes, *description: bytes) -> bytes:
    """An M4A of one track of 44.1 kHz, of which ``codec`` is the kind of its samples."""
    sound = bytes(6) + b"\0\1" + bytes(8) + struct.pack(">HHIHH", 2, 16, 0, 44_100, 0)
    entry = box(codec, sound, *description)
    table = box(b"stbl", box(b"stsd", bytes(4), b"\0\0\0\1", entry))
    handler = box(b"hdlr", bytes(8), b"soun", bytes(12))
    media = box(b"mdia", handler, box(b"minf", table))
    return box(b"ftyp", b"M4A ") + box(b"moov", box(b"trak", media)) + box(b"mdat", bytes(100))


def layers(header: bytes, size: int, false: bytes = b"") -> bytes:
    """Frames of MPEG audio, in each of which a header of layer III seems to begin."""
    frame = header + bytes(100) + false
    return (frame + bytes(size - len(frame))) * 20


FALSE = b"\xff\xfb\xb4\x00"  # 192 kbit/s at 48 kHz, of which a frame has 576 bytes
LAYER_II = b"\xff\xfd\xa4\x00"  # the same, of layer II
TRACKS = "several tracks of sound .2; -map 0:a:0 takes the first. cannot be read here"
MP3 = "MP3 inside MP4 .-c copy NEW.mp3 takes it out as it is. cannot be read here; convert it"
CONTAINERS = {
    "lewton#86: Vorbis and Opus": (lambda: ogg_tracks(vorbis(), opus(0, 0.5)), f"OGG: {TRACKS}"),
    "the second is FLAC": (
        lambda: ogg_tracks(vorbis(), b"OggS\0\2" + bytes(20) + b"\1\5\x7fFLAC"),
        f"OGG: {TRACKS}",
    ),
    "in a later link": (lambda: vorbis() + ogg_tracks(vorbis(), opus(0, 0.5)), f"OGG: {TRACKS}"),
    "a later link of Speex": (
        lambda: vorbis() + b"OggS\0\2" + bytes(20) + b"\1\x08Speex   ",
        "OGG: Speex cannot be read here",
    ),
    "M4A": (lambda: m4a_tracks(2), f"M4A: {TRACKS}"),
    "MP3 in M4A": (lambda: m4a_of(b"mp4a", esds(0x6B)), f"M4A: {MP3}"),
    "MP3 of 22 kHz in M4A": (lambda: m4a_of(b"mp4a", esds(0x69, long=True)), f"M4A: {MP3}"),
    "MP3 in MOV": (lambda: m4a_of(b".mp3"), f"M4A: {MP3}"),
    "MP3 of Windows in MOV": (lambda: m4a_of(b"ms\0\x55"), f"M4A: {MP3}"),
    "AC-3 in MP4": (lambda: m4a_of(b"mp4a", esds(0xA5)), "M4A: AC-3 inside MP4 cannot be read"),
    "Opus in MP4": (lambda: m4a_of(b"Opus"), "M4A: Opus inside MP4 cannot be read"),
    "Symphonia#96: layer II": (lambda: layers(LAYER_II, 576, FALSE), "MPEG layer II: this format"),
    "layer II after a tag": (
        lambda: id3(1000) + layers(LAYER_II, 576, FALSE),
        "MPEG layer II: this format",
    ),
    "layer II after junk": (
        lambda: bytes(range(200)) + layers(LAYER_II, 576, FALSE),
        "MPEG layer II: this format",
    ),
    "layer I": (
        lambda: layers(b"\xff\xff\xc4\x00", 384, b"\xff\xfb\x94\x00"),
        "MPEG layer I: this format",
    ),
    "two chunks of a WAV": (
        lambda: riff((b"fmt ", FMT), (b"data", DATA), (b"data", DATA)),
        "WAV: its several chunks of samples cannot be read here",
    ),
    "two chunks of an AIFF": (
        lambda: (
            (aiff := corpus.encode(SAMPLES / 32768, RATE, "AIFF")) + aiff[aiff.index(b"SSND") :]
        ),
        "AIFF: its several chunks of samples cannot be read here",
    ),
    "MP3 in AVI": (lambda: b"RIFF\0\0\0\0AVI LIST" + bytes(100) + mp3(), "AVI: this format"),
    "MP3 in a ZIP archive": (lambda: b"PK\x03\x04" + bytes(60) + mp3(), "a ZIP archive"),
    "MP3 in a tar archive": (
        lambda: bytes(257) + b"ustar" + bytes(250) + mp3(),
        "a tar archive",
    ),
    "MP3 in Flash video": (lambda: b"FLV\x01" + bytes(60) + mp3(), "Flash video: this format"),
}


@pytest.mark.parametrize("make, name", CONTAINERS.values(), ids=CONTAINERS)
def test_a_file_that_would_be_read_in_part_or_wrongly_is_refused_by_name(tmp_path, make, name):
    (tmp_path / "a").write_bytes(make())
    with pytest.raises(ValueError, match=name):
        _rust.recording_info(tmp_path / "a")


def vorbis() -> bytes:
    return corpus.encode(corpus.noise(0, 0.5, RATE), RATE, "OGG")


@pytest.mark.parametrize("kind", ["MP3", "WAV", "FLAC", "OGG"])
def test_a_recording_is_known_by_its_content(tmp_path, kind):
    data = corpus.encode(corpus.noise(0, 0.5, RATE), RATE, kind)
    for name in ("a.wav", "a.mp3", "a.ogg"):
        (tmp_path / name).write_bytes(data)
        assert _rust.recording_info(tmp_path / name)[0] == RATE


def test_junk_before_an_mp3_is_skipped():
    junk = corpus.noise(0, 1.0, 8000).tobytes()[:20_000]
    assert np.array_equal(_rust.decode(junk + mp3())[0], _rust.decode(mp3())[0])


@pytest.mark.parametrize(
    "kind, subtype, scale, divisor",
    [
        ("WAV", "FLOAT", 32768, 32768),
        ("WAV", "DOUBLE", 8388608, 8388608),
        ("AIFF", "FLOAT", 100, 128),
        ("CAF", "FLOAT", 3e4, 32768),
        ("WAV", "FLOAT", 4.0, 0),  # loud, as recorders with floats allow
        ("WAV", "PCM_16", 0.9, 0),
    ],
)
def test_floats_in_the_range_of_integers_are_named(tmp_path, capsys, kind, subtype, scale, divisor):
    wave = corpus.noise(0, 1.0, RATE).astype(np.float64)
    wave *= scale / np.abs(wave).max()
    folder = tmp_path / "rec"
    folder.mkdir()
    soundfile.write(folder / f"a.{kind.lower()}", wave, RATE, subtype=subtype)
    argv = ["index", str(folder), "--labels", "none", "--out", str(tmp_path / "index")]
    said = []
    for _ in range(2):  # the second reads the header of the first
        assert cli.main(argv) == 0
        said.append(capsys.readouterr().err)
    errors = windows.lenient()
    windows.cut([str(folder)], seconds=1.0, hop=1.0, errors=errors)
    said += [text for _, text in errors.lines]
    if not divisor:
        assert "float-range" not in "".join(said) and len(said) == 2
        return
    assert len(said) == 3
    for text in said:
        assert f"; divide them by {divisor} if they were integers" in text
