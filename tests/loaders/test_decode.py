"""The Rust decoders against libsndfile (python-soundfile), for whole recordings and for crops of
them."""

import io
import pathlib
import shutil
import struct
import subprocess

import numpy as np
import pyarrow as pa
import pytest
import soundfile

from loaders import _rust
from tests.support import corpus

HERE = pathlib.Path(__file__).parents[1] / "data" / "decode"
# how far a crop of MP3, Vorbis or Opus may be from the slice of the whole; WAV and FLAC are exact
LOSSY = 1e-5


def song(rate: int, n: int, channels: int) -> np.ndarray:
    """float32 [n, channels]: sweeps with pauses over noise, each channel its own."""
    t = np.arange(n) / rate
    rng = np.random.default_rng(rate + channels)
    shape = np.maximum(np.sin(2 * np.pi * 1.7 * t + np.arange(channels)[:, None]), 0)
    tones = np.sin(2 * np.pi * (rate / 20 + rate / 20 * np.sin(5 * t)) * t)
    return (0.4 * shape * tones + 0.02 * rng.standard_normal((channels, n))).T.astype(np.float32)


def reference(data: bytes) -> tuple[np.ndarray, int]:
    wave, rate = corpus.decoded(data, dtype="float64", always_2d=True)
    return wave.mean(axis=1), rate


def check(data: bytes, crop_tolerance: float, tolerance: float = 1e-4, crops: int = 20) -> None:
    """Whole recordings: content, length and alignment are libsndfile's. Crops are slices of the
    whole recording."""
    expected, expected_rate = reference(data)
    whole, rate, frames = _rust.decode(data)
    assert (rate, frames, len(whole)) == (expected_rate, len(expected), len(expected))
    assert np.abs(whole - expected).max() <= tolerance
    rng = np.random.default_rng(len(data))
    starts = [0, frames - 1, *rng.integers(0, frames, crops)]
    for start in map(int, starts):
        length = int(rng.integers(1, frames - start + 1))
        crop, *facts = _rust.decode(data, start, length)
        assert facts == [rate, frames]
        assert np.abs(crop - whole[start : start + length]).max() <= crop_tolerance


@pytest.mark.parametrize("channels", [1, 2])
@pytest.mark.parametrize("rate", [8000, 16000, 22050, 24000, 32000, 44100, 48000])
@pytest.mark.parametrize("kind", ["OGG", "MP3", "FLAC", "WAV"])
def test_a_recording_equals_libsndfiles(kind, rate, channels):
    data = corpus.encode(song(rate, 3 * rate + 17, channels), rate, kind)
    check(data, LOSSY if kind in ("OGG", "MP3") else 0)


@pytest.mark.parametrize(
    "kind, subtype, rate, channels",
    [
        ("WAV", "PCM_U8", 22050, 2),
        ("WAV", "PCM_24", 96000, 1),
        ("WAV", "PCM_32", 192000, 2),
        ("WAV", "FLOAT", 44100, 6),
        ("WAV", "DOUBLE", 44100, 1),
        ("WAVEX", "PCM_16", 48000, 6),
        ("RF64", "PCM_16", 32000, 1),
        ("FLAC", "PCM_S8", 8000, 1),
        ("FLAC", "PCM_24", 96000, 2),
        ("FLAC", "PCM_24", 192000, 1),
        ("FLAC", "PCM_16", 44100, 6),
        ("OGG", "VORBIS", 48000, 6),
        ("OGG", "VORBIS", 192000, 1),
    ],
)
def test_every_sample_format_and_channel_count(kind, subtype, rate, channels):
    data = corpus.encode(song(rate, rate + 11, channels), rate, kind, subtype)
    check(data, LOSSY if kind == "OGG" else 0, crops=6)


@pytest.mark.parametrize("n", [1, 2, 63, 576, 1105, 1152, 1153, 5000])
@pytest.mark.parametrize("kind", ["OGG", "MP3", "FLAC", "WAV"])
def test_short_recordings(kind, n):
    check(corpus.encode(song(32000, n, 1), 32000, kind), LOSSY if kind in ("OGG", "MP3") else 0)


@pytest.mark.parametrize("mode", ["CONSTANT", "AVERAGE", "VARIABLE"])
@pytest.mark.parametrize("level", [0.0, 0.9])
def test_mp3_bit_rates(mode, level):
    file = io.BytesIO()
    wave = song(44100, 100_000, 2)
    soundfile.write(file, wave, 44100, format="MP3", bitrate_mode=mode, compression_level=level)
    check(file.getvalue(), LOSSY)


def test_mp3_clicks_that_switch_the_blocks_of_one_channel():
    rng = np.random.default_rng(1)
    wave = 0.2 * song(44100, 150_000, 2)
    for at in rng.integers(0, 149_000, 60):
        wave[at : at + 40, rng.integers(0, 2)] += 0.7 * rng.standard_normal(40)
    check(corpus.encode(wave, 44100, "MP3"), LOSSY)


@pytest.mark.parametrize(
    "name", ["vorbis_32k_mono.ogg", "mp3_44k_stereo.mp3", "flac_48k_stereo.flac"]
)
def test_the_kept_recordings(name):
    check((HERE / name).read_bytes(), 0 if name.endswith("flac") else LOSSY)


def test_esc10_equals_libsndfile():
    shards = sorted(corpus.ESC10.glob("*/*.arrow"))
    if not shards:
        pytest.skip("ESC-10 is only beside a checkout that has ../shared")
    for shard in shards:
        with pa.memory_map(str(shard)) as source:
            for batch in pa.ipc.open_stream(source):
                for row in batch.column("audio").to_pylist()[::8]:
                    check(row["bytes"], LOSSY, crops=4)


def test_tags_before_and_after_the_audio_are_passed_over():
    for kind in ("MP3", "FLAC"):
        data = corpus.encode(song(32000, 20000, 1), 32000, kind)
        expected, *facts = _rust.decode(data)
        id3v2 = b"ID3\x04\0\0" + bytes([0, 0, 2, 1]) + bytes(257)
        id3v1 = b"TAG" + bytes(range(125))
        got, *tagged = _rust.decode(id3v2 + data + id3v1)
        assert tagged == facts
        np.testing.assert_array_equal(got, expected)


def frames_of(mp3: bytes) -> list[int]:
    """Offsets of the frames of an MPEG 1 layer III file."""
    bit_rates = [0, 32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320]
    at, found = 0, []
    while at + 4 <= len(mp3):
        (word,) = struct.unpack(">I", mp3[at : at + 4])
        assert word >> 21 == 0x7FF
        found.append(at)
        at += 144 * bit_rates[word >> 12 & 15] * 1000 // [44100, 48000, 32000][word >> 10 & 3] + (
            word >> 9 & 1
        )
    return found


def test_an_mp3_without_a_xing_frame_is_counted_frame_by_frame():
    data = corpus.encode(song(44100, 100_000, 2), 44100, "MP3")
    tagged, *_ = _rust.decode(data)
    frames = frames_of(data)
    bare = data[frames[1] :]
    whole, rate, n = _rust.decode(bare)
    assert (rate, n) == (44100, (len(frames) - 1) * 1152)
    # Libsndfile only estimates this length. Its decoded samples are the same.
    expected, _ = reference(bare)
    np.testing.assert_allclose(whole[: len(expected)], expected, atol=1e-4)
    # LAME's delay of 576 samples and the decoder's own 529.
    np.testing.assert_allclose(whole[1105 : 1105 + len(tagged)], tagged, atol=1e-6)
    for start in (0, 1, 40_000, n - 5000):
        np.testing.assert_allclose(
            _rust.decode(bare, start, 5000)[0], whole[start : start + 5000], atol=LOSSY
        )


def mp3(wave: np.ndarray, rate: int, mode: str) -> bytes:
    file = io.BytesIO()
    soundfile.write(file, wave, rate, format="MP3", bitrate_mode=mode, compression_level=0.3)
    return file.getvalue()


@pytest.mark.parametrize("mode", ["CONSTANT", "AVERAGE", "VARIABLE"])
def test_a_sound_xing_tag_says_the_length_so_that_nothing_after_the_crop_is_read(mode):
    data = mp3(song(44100, 200_000, 2), 44100, mode)
    whole, _, n = _rust.decode(data)
    assert n == 200_000
    if mode == "CONSTANT":  # only the tag and the last frame differ
        blank = bytearray(len(data))
        for part in (slice(0, 2000), slice(len(data) // 10, len(data) // 3), slice(-2000, None)):
            blank[part] = data[part]
        np.testing.assert_array_equal(
            _rust.decode(bytes(blank), 30_000, 20_000)[0], whole[30_000:50_000]
        )
        return
    blank = data[: len(data) // 2] + bytes(len(data) - len(data) // 2)
    crop, _, frames = _rust.decode(blank, 30_000, 20_000)
    assert frames == n
    np.testing.assert_array_equal(crop, whole[30_000:50_000])
    with pytest.raises(ValueError, match="end before the stated length"):
        _rust.decode(blank, 190_000)


@pytest.mark.parametrize("mode", ["CONSTANT", "VARIABLE"])
def test_a_xing_tag_that_lies_is_not_believed(mode):
    data = mp3(song(44100, 100_000, 2), 44100, mode)
    whole, _, n = _rust.decode(data)
    at = data.index(b"Xing" if mode == "VARIABLE" else b"Info")
    frames, size = struct.unpack(">II", data[at + 8 : at + 16])
    assert frames == len(frames_of(data)) - 1
    for words in (
        (frames * 5, size),
        (frames + 7, size),
        (0xFFFFFFFF, size),
        (frames, size * 2),
        (frames, 7),
    ):
        lie = data[: at + 8] + struct.pack(">II", *words) + data[at + 16 :]
        got, _, found = _rust.decode(lie)
        # The tag's length includes the padding at the end.
        assert n <= found <= frames * 1152
        np.testing.assert_array_equal(got[:n], whole)
    # The file is truncated, or followed by a whole other recording: its length in bytes shows this.
    assert _rust.decode(data[: len(data) // 2])[2] < 0.55 * n
    assert _rust.decode(data + data)[2] >= n


def test_a_vbri_tag_says_the_length():
    data = mp3(song(44100, 200_000, 2), 44100, "VARIABLE")
    frames = frames_of(data)
    whole, _, n = _rust.decode(data[frames[1] :])  # all frames are walked
    each, sizes = 20, np.diff([*frames[1:], len(data)])
    table = [int(sizes[i : i + each].sum()) for i in range(0, len(sizes), each)]
    fields = (1, 0, 75, len(data), len(sizes), len(table), 1, 2, each)
    vbri = b"VBRI" + struct.pack(">HHHIIHHHH", *fields) + struct.pack(f">{len(table)}H", *table)
    tag = data[:36] + vbri
    tagged = tag.ljust(frames[1], b"\0") + data[frames[1] :]
    assert len(tag) <= frames[1]
    np.testing.assert_array_equal(_rust.decode(tagged)[0], whole)
    blank = tagged[: len(data) // 2] + bytes(len(data) - len(data) // 2)
    crop, _, found = _rust.decode(blank, 30_000, 20_000)
    assert found == n
    np.testing.assert_array_equal(crop, whole[30_000:50_000])
    for at, lie in ((50, b"\0\0\1\0"), (46, b"\0\0\1\0"), (64, b"\1\1")):
        np.testing.assert_array_equal(
            _rust.decode(tagged[:at] + lie + tagged[at + len(lie) :])[0], whole
        )


def test_tags_after_an_mp3_are_no_frames():
    data = mp3(song(44100, 60_000, 2), 44100, "CONSTANT")
    expected, *facts = _rust.decode(data)
    item = b"\xff\xfb\x90\x00" * 500  # bytes that an index must not take for frames
    footer = b"APETAGEX" + struct.pack("<IIII", 2000, len(item) + 32, 1, 0) + bytes(8)
    for tags in (item + footer, b"TAG" + bytes(125), item + footer + b"TAG" + bytes(125)):
        got, *found = _rust.decode(data + tags)
        assert found == facts
        np.testing.assert_array_equal(got, expected)


def test_a_damaged_mp3_frame_is_silent_and_moves_nothing():
    data = mp3(song(44100, 200_000, 2), 44100, "CONSTANT")
    whole, _, n = _rust.decode(data)
    frames = frames_of(data)
    for k in (len(frames) // 2, len(frames) // 2 + 1, 3 * len(frames) // 4):
        at = frames[k]
        broken = data[:at] + b"\0\0\0\0" + data[at + 4 :]
        got, _, found = _rust.decode(broken)
        assert found == n
        for part in (slice(0, 1152 * k - 5000), slice(1152 * k + 5000, None)):
            np.testing.assert_allclose(got[part], whole[part], atol=LOSSY)
        crop = _rust.decode(broken, 1152 * k - 8000, 20_000)[0]
        np.testing.assert_allclose(crop, got[1152 * k - 8000 :][:20_000], atol=LOSSY)


def test_an_mp3_of_a_changing_rate_that_lost_a_frame_is_read_to_its_end():
    data = mp3(song(44100, 300_000, 2), 44100, "VARIABLE")
    whole, _, n = _rust.decode(data)
    at = frames_of(data)[100]
    got, _, found = _rust.decode(data[:at] + b"\0\0\0\0" + data[at + 4 :])
    assert found == n
    np.testing.assert_allclose(got[: 98 * 1152], whole[: 98 * 1152], atol=LOSSY)
    np.testing.assert_allclose(
        got[105 * 1152 : -3 * 1152], whole[106 * 1152 : -2 * 1152], atol=LOSSY
    )


@pytest.mark.parametrize("rate", [44100, 48000, 32000])
@pytest.mark.parametrize("joint", [0, 1, 2, 3], ids=["plain", "intensity", "middle-side", "both"])
def test_mp3_stereo_modes(joint, rate):
    """Intensity stereo, which no encoder at hand writes.

    A frame stays valid with the mode's bits set to it: the right channel's scale factors are then
    positions. Libsndfile makes NaN of positions that no encoder would write. FFmpeg does not.
    """
    rng = np.random.default_rng(joint)
    wave = 0.3 * song(rate, 60_000, 2)
    # The right channel's upper bands must be empty at times. If all of it were empty, its positions
    # would be left out.
    wave[:, 1] *= np.repeat(rng.choice([0.02, 0.1, 1], 60), 1000)
    for at in rng.integers(0, 59_000, 20):
        wave[at : at + 40] += 0.5 * rng.standard_normal((40, 2)).astype(np.float32)
    data = bytearray(mp3(wave, rate, "CONSTANT"))
    for at in frames_of(bytes(data))[1:]:
        data[at + 3] = data[at + 3] & 0x0F | 0x40 | joint << 4
    if joint in (0, 2):
        check(bytes(data), LOSSY)
        return
    if not shutil.which("ffmpeg"):
        pytest.skip("there is no ffmpeg to compare with")
    command = ["ffmpeg", "-v", "error", "-f", "mp3", "-i", "-", "-f", "f32le", "-"]
    found = subprocess.run(command, input=bytes(data), capture_output=True, check=True).stdout
    expected = np.frombuffer(found, np.float32).reshape(-1, 2).mean(axis=1)
    whole, _, n = _rust.decode(bytes(data))
    np.testing.assert_allclose(whole, expected[:n], atol=1e-5)
    for start in (5000, 30_000, n - 3000):
        np.testing.assert_allclose(
            _rust.decode(bytes(data), start, 3000)[0], whole[start : start + 3000], atol=LOSSY
        )


@pytest.mark.parametrize("kind", ["OGG", "MP3", "FLAC", "WAV"])
@pytest.mark.parametrize("share", [0.3, 0.77])
def test_a_truncated_recording_ends_early(kind, share):
    data = corpus.encode(song(44100, 200_000, 2), 44100, kind)
    whole, *_ = _rust.decode(data)
    cut = data[: int(len(data) * share)]
    got, rate, frames = _rust.decode(cut)
    assert rate == 44100 and frames == len(got)
    assert abs(frames - share * len(whole)) < 0.15 * len(whole)
    np.testing.assert_allclose(got, whole[:frames], atol=LOSSY)
    start = frames // 2
    np.testing.assert_allclose(_rust.decode(cut, start)[0], got[start:], atol=LOSSY)


def test_vorbis_cut_out_of_a_longer_stream_begins_at_its_first_sample():
    # Pages 0 and 1 hold the headers. If some of the pages after them are missing, positions do not
    # begin at 0.
    data = (HERE / "vorbis_32k_mono.ogg").read_bytes()
    pages = [i for i in range(len(data)) if data.startswith(b"OggS\0", i)]
    check(data[: pages[2]] + data[pages[5] :], LOSSY)


@pytest.mark.parametrize(
    "data, message",
    [
        (b"", "empty"),
        (b"RIFF\x04\0\0\0WAVE", "no data chunk"),
        (b"OggS" + bytes(100), "cut off"),
        (b"fLaC" + bytes(3), "cut off"),
        (b"\x89PNG\r\n\x1a\n" + bytes(1000), "not a WAV, FLAC, MP3, OGG, AIFF, CAF or M4A"),
        # The first frame of a FLAC file begins as those of AAC in ADTS do.
        (
            b"\xff\xf8" + (HERE / "flac_48k_stereo.flac").read_bytes().split(b"\xff\xf8", 1)[1],
            "not a WAV, FLAC",
        ),
        (corpus.encode(np.zeros(0, np.float32), 8000), "no audio"),
        (corpus.encode(np.array([0, np.nan, 0], np.float32), 8000, "WAV", "FLOAT"), "non-finite"),
    ],
    # The files have names: libsndfile writes the time [s] of creation into a float WAV, and workers
    # must collect the same names.
    ids=[
        "empty",
        "no-chunk",
        "ogg-cut-off",
        "flac-cut-off",
        "png",
        "flac-frames",
        "no-samples",
        "nan",
    ],
)
def test_a_recording_that_cannot_be_decoded_names_the_reason(data, message):
    with pytest.raises(ValueError, match=message):
        _rust.decode(data)


def opus(wave: np.ndarray, rate: int = 48_000, level: float = 0.3) -> bytes:
    file = io.BytesIO()
    soundfile.write(file, wave, rate, format="OGG", subtype="OPUS", compression_level=level)
    return file.getvalue()


def pages(ogg: bytes) -> list[bytes]:
    found = []
    while ogg:
        lacing = ogg[27 : 27 + ogg[26]]
        size = 27 + len(lacing) + sum(lacing)
        found.append(ogg[:size])
        ogg = ogg[size:]
    return found


def sealed(page: bytes) -> bytes:
    """The page with the correct checksum (RFC 3533, 6)."""
    page = bytearray(page)
    page[22:26] = bytes(4)
    crc = 0
    for byte in page:
        crc ^= byte << 24
        for _ in range(8):
            crc = (crc << 1 ^ (0x04C11DB7 if crc >> 31 else 0)) & 0xFFFFFFFF
    page[22:26] = struct.pack("<I", crc)
    return bytes(page)


@pytest.mark.parametrize("channels", [1, 2, 3, 6, 8])
@pytest.mark.parametrize("level", [0.0, 0.5])
def test_opus_equals_libsndfiles(level, channels):
    check(opus(song(48_000, 130_017, channels), level=level), LOSSY)


@pytest.mark.parametrize("n", [1, 2, 959, 960, 961, 5000])
def test_short_opus(n):
    check(opus(song(48_000, n, 1)), LOSSY)


@pytest.mark.parametrize("level", [0.9, 1.0], ids=["hybrid", "speech"])
def test_crops_of_opus_speech_that_lasts(level):
    """The speech coder's memory of a tone does not fade, so the decoding of a crop cannot begin
    just before the crop."""
    t = np.arange(8 * 48_000) / 48_000
    tone = sum(0.1 * np.sin(2 * np.pi * f * t) for f in (220, 277, 330, 1760)).astype(np.float32)
    check(opus(tone, level=level), LOSSY, crops=40)


@pytest.mark.parametrize("rate", [8000, 16000, 24000])
def test_opus_is_decoded_at_48_khz_whatever_was_encoded(rate):
    data = opus(song(rate, 2 * rate, 1), rate)
    whole, found, frames = _rust.decode(data)
    expected, at = corpus.decoded(data, dtype="float32")  # libsndfile decodes at the encoder's rate
    assert (found, frames, at) == (48_000, 2 * 48_000, rate)
    down = _rust.resample(whole, 48_000, rate)
    assert np.corrcoef(down[1000:-1000], expected[1000:-1000])[0, 1] > 0.98


def test_opus_gain_is_applied():
    data = opus(song(48_000, 50_000, 2))
    first, *others = pages(data)
    at = first.index(b"OpusHead") + 16
    check(sealed(first[:at] + struct.pack("<h", -1500) + first[at + 2 :]) + b"".join(others), LOSSY)


def test_opus_cut_out_of_a_longer_stream_and_truncated():
    data = opus(song(48_000, 5 * 48_000, 1))
    head, tags, *audio = pages(data)
    whole, _, frames = _rust.decode(data)
    late = head + tags + b"".join(audio[2:])
    crop, _, n = _rust.decode(late)
    (granule,) = struct.unpack("<q", audio[1][6:14])
    assert n == frames - granule
    np.testing.assert_allclose(crop[48_000:], whole[granule + 48_000 :], atol=LOSSY)
    cut = data[: len(data) * 2 // 3]
    part, _, n = _rust.decode(cut)
    assert 0.4 * frames < n < 0.7 * frames
    np.testing.assert_array_equal(part, whole[:n])
    np.testing.assert_allclose(_rust.decode(cut, n - 5000)[0], whole[n - 5000 : n], atol=LOSSY)


def test_opus_with_unusual_channels_is_named():
    first, *others = pages(opus(song(48_000, 5000, 3)))
    at = first.index(b"OpusHead")
    for offset, value, message in (
        (18, 255, "channel mapping"),
        (21, 1, "unusual order"),
        (8, 16, "later version"),
        (9, 9, "valid"),
    ):
        odd = bytearray(first)
        odd[at + offset] = value
        with pytest.raises(ValueError, match=message):
            _rust.decode(sealed(odd) + b"".join(others))


def test_damage_inside_the_crop_is_an_error_and_outside_is_not():
    for kind in ("OGG", "FLAC"):
        data = bytearray(corpus.encode(song(32000, 160_000, 1), 32000, kind))
        whole, *_ = _rust.decode(bytes(data))
        data[len(data) // 2] ^= 0x10
        broken = bytes(data)
        with pytest.raises(ValueError, match="checksum|decoded|begin"):
            _rust.decode(broken)
        for start in (0, 140_000):
            np.testing.assert_allclose(
                _rust.decode(broken, start, 10_000)[0], whole[start : start + 10_000], atol=LOSSY
            )


def test_a_lying_length_costs_no_memory():
    flac = bytearray(corpus.encode(np.zeros(5000, np.float32), 32000, "FLAC"))
    flac[21] |= 0x0F  # STREAMINFO's 36-bit sample count: now 64 billion
    flac[22:26] = b"\xff\xff\xff\xff"
    assert _rust.decode(bytes(flac))[2] == 5000
    wav = bytearray(corpus.encode(np.zeros(5000, np.float32), 32000, "WAV", "PCM_16"))
    at = wav.index(b"data") + 4
    wav[at : at + 4] = struct.pack("<I", 0xFFFFFFF0)
    assert _rust.decode(bytes(wav))[2] == 5000


def test_a_flac_of_silence_costs_only_what_is_asked_for():
    # A frame of a constant has a few bytes for 4096 samples: ten minutes at 96 kHz decode to 230
    # MB.
    long = corpus.encode(np.zeros(600 * 96000, np.float32), 96000, "FLAC")
    assert len(long) < 1e6
    crop, _, frames = _rust.decode(long, 50_000_000, 1000)
    assert frames == 57_600_000 and len(crop) == 1000 and not crop.any()
