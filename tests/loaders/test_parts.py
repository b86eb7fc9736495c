"""Rows that are parts of recordings: their samples, channels, short clips, and windows of long
files."""

import io
import os
import pathlib
import re
import shutil

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import soundfile

from loaders import _rust
from loaders.audio.front_end import FrontEnd
from loaders.audio.recordings import store
from loaders.audio.spectrogram import Config, filter_bank, make_loader
from loaders.base import DataError, Rows
from tests.proofs.fuzz import av_encode
from tests.support import corpus, pipelines

RATE = 32_000


def write(folder: pathlib.Path, rows: list[dict], names=("a", "b")) -> pathlib.Path:
    """A shard of an index with rows {path, start, end, channel, label}."""
    kind = store.schema(list(names))
    full = {name: [row.get(name) for row in rows] for name in kind.names}
    full["audio"] = [{"bytes": None, "path": row["path"]} for row in rows]
    full["channel"] = [row.get("channel", -1) for row in rows]
    path = folder / "rows.parquet"
    pq.write_table(pa.table([pa.array(full[f.name], f.type) for f in kind], schema=kind), path)
    return path


def batch(index, n, *, train=False, epoch_of=0, **options):
    """The waveforms of a pipeline's first batch, int16 [n, samples], by the row of the index."""
    options = {"clip_samples": 3200, "n_frames": 16, "form": "waveform", "seed": 1, **options}
    pipeline = pipelines.make(
        index, rows=np.arange(n), batch=n, ranges=[(0, n)], train=train, **options
    )
    try:
        for _ in range(epoch_of + 1):
            _, fields = pipeline.next()
        diagnostics = pipeline.diagnostics()
    finally:
        pipeline.close()
    out = np.zeros_like(fields["waveform"][0])
    out[fields["index"][0]] = fields["waveform"][0]
    return out, fields, diagnostics


def ramp(n: int, channels: int = 1) -> np.ndarray:
    """int16 samples that encode their place: sample i of channel c is i % 10007 + 10007 c, with at
    most 2 channels."""
    return (np.arange(n)[:, None] % 10007 + 10007 * np.arange(channels)[None]).astype(np.int16)


@pytest.fixture
def ramps(tmp_path):
    """A recording of 1 s whose samples are their number, as WAV and FLAC, in mono and stereo."""
    for name, kind, channels in (("m.wav", "WAV", 1), ("s.wav", "WAV", 2), ("s.flac", "FLAC", 2)):
        (tmp_path / name).write_bytes(corpus.encode(ramp(RATE, channels), RATE, kind, "PCM_16"))
    return tmp_path


def test_a_part_is_cropped_inside_itself(ramps):
    index = _rust.Index([write(ramps, [dict(path="m.wav", start=0.25, end=0.5)])])
    (x,), _, _ = batch(index, 1)
    np.testing.assert_array_equal(x, ramp(RATE)[10_400:13_600, 0])  # the centre of [8000, 16000)
    firsts = set()
    for epoch in range(30):
        (x,), _, _ = batch(index, 1, train=True, epoch_of=epoch)
        first = int(x[0]) if x[0] >= 8000 else int(x[0]) + 10007
        np.testing.assert_array_equal(x, ramp(RATE)[first : first + 3200, 0])
        assert 8000 <= first and first + 3200 <= 16_000
        firsts.add(first)
    assert len(firsts) > 20


def test_a_crop_longer_than_its_part_holds_what_surrounds_it(ramps):
    rows = [dict(path="m.wav", start=s, end=e) for s, e in ((0.5, 0.51), (0.0, 0.01), (0.99, 1.0))]
    index = _rust.Index([write(ramps, rows)])
    middle, begin, end = batch(index, 3)[0]
    whole = ramp(RATE)[:, 0]
    np.testing.assert_array_equal(middle, whole[16_160 - 1600 : 16_160 + 1600])
    np.testing.assert_array_equal(begin, whole[:3200])
    np.testing.assert_array_equal(end, whole[-3200:])
    firsts = {
        int(batch(index, 3, train=True, epoch_of=epoch)[0][0][0]) + 10007 for epoch in range(12)
    }
    assert len(firsts) > 8 and 16_320 - 3200 <= min(firsts) and max(firsts) <= 16_000, (
        "the part is in every crop"
    )


def test_recordings_that_are_slower_than_life(tmp_path):
    """A file of 25.6 kHz, expanded ten times, gives the bytes of one of 256 kHz. Times of rows
    refer to the file."""
    rate, form = 256_000, {"form": "float32", "clip_samples": 12_800, "n_frames": 48}
    wave = (8000 * corpus.noise(3, 0.2, rate)).astype(np.int16)
    bank = filter_bank(
        FrontEnd(sample_rate=rate, window_ms=4.0, hop_ms=1.0, f_min=9_900.0, n_mels=32)
    )
    out = []
    for times, name in ((1, "life.wav"), (10, "slow.wav")):
        (tmp_path / name).write_bytes(corpus.encode(wave, rate // times, "WAV", "PCM_16"))
        index = _rust.Index(
            [write(tmp_path, [dict(path=name, start=0.05 * times, end=0.15 * times)])]
        )
        pipeline = pipelines.make(
            index,
            rows=np.arange(1),
            batch=1,
            ranges=[(0, 1)],
            train=False,
            seed=0,
            bank=bank,
            time_expansion=times,
            **form,
        )
        out.append(pipeline.next()[1]["spectrogram"][0])
        pipeline.close()
    assert out[0].shape == (1, 48, 32)
    np.testing.assert_array_equal(out[0].view("u4"), out[1].view("u4"))
    expected = _rust.front_end(wave[12_800:38_400] / np.float32(32768), rate, 12_800, 48, bank=bank)
    np.testing.assert_array_equal(out[0][0], expected)
    index = _rust.Index([write(tmp_path, [dict(path="slow.wav", start=0.0, end=1.0)])])
    _, fields, diagnostics = batch(index, 1, bad_budget=1.0, time_expansion=0.001)
    assert fields["weight"][
        0
    ] == 0 and "has 25600 Hz, of which time_expansion = 0.001 makes 26" in str(
        diagnostics["bad_list"]
    )


def test_or_silence(ramps):
    index = _rust.Index([write(ramps, [dict(path="m.wav", start=0.5, end=0.51)])])
    (x,), _, _ = batch(index, 1, silence=True)
    expected = np.zeros(3200, np.int16)
    expected[1440:1760] = ramp(RATE)[16_000:16_320, 0]
    np.testing.assert_array_equal(x, expected)


def test_resampling_knows_no_sound_from_outside_a_part_that_silence_surrounds(tmp_path):
    wave = np.zeros(16_000, np.float32)
    wave[:8000] = 0.9 * np.sign(np.sin(np.arange(8000)))
    (tmp_path / "a.wav").write_bytes(corpus.encode(wave, 16_000))
    index = _rust.Index([write(tmp_path, [dict(path="a.wav", start=0.5, end=0.55)])])
    assert not batch(index, 1, silence=True)[0].any()
    assert batch(index, 1)[0].any(), "what surrounds it is heard otherwise"


def test_channels(ramps):
    rows = [
        dict(path=p, start=0.25, end=0.5, channel=c)
        for p in ("s.wav", "s.flac")
        for c in (-1, 0, 1)
    ]
    index = _rust.Index([write(ramps, rows)])
    out = batch(index, 6)[0].astype(int)
    left = ramp(RATE)[10_400:13_600, 0].astype(int)
    for mean, first, second in (out[:3], out[3:]):
        np.testing.assert_array_equal(first, left)
        np.testing.assert_array_equal(second, left + 10007)
        assert abs(mean - (left + 10007 / 2)).max() <= 0.5
    assert [index.part(i)[2] for i in range(3)] == [-1, 0, 1]
    # A row without a channel takes the pipeline's channel.
    np.testing.assert_array_equal(batch(index, 1, channel=1)[0][0], left + 10007)


@pytest.mark.parametrize(
    "kind, subtype",
    [("MP3", None), ("OGG", "VORBIS"), ("OGG", "OPUS"), ("FLAC", "PCM_24"), ("WAV", "FLOAT")],
)
def test_each_channel_is_that_of_a_whole_decode(kind, subtype):
    rate = 48_000
    wave = np.stack([corpus.noise(i, 1.5, rate) for i in (1, 2)], 1)
    wave[: rate // 2, 1] = wave[: rate // 2, 0]  # so that the stereo coding has an effect
    data = corpus.encode(wave, rate, kind, subtype)
    mean, _, n = _rust.decode(data)
    first, second = (_rust.decode(data, 0, None, c)[0] for c in (0, 1))
    np.testing.assert_allclose((first + second) / 2, mean, atol=1e-5)
    part = _rust.decode(data, 20_000, 9000, 1)[0]
    np.testing.assert_allclose(part, second[20_000:29_000], atol=1e-5)
    theirs, _ = corpus.decoded(data, dtype="float32")
    assert abs(second[2000:-2000] - theirs[2000 : len(second) - 2000, 1]).max() < 2e-3
    assert abs(first - second)[rate:].mean() > 0.01
    with pytest.raises(ValueError, match="channel 2 does not exist: the recording has 2"):
        _rust.decode(data, 0, None, 2)


def test_a_part_beyond_its_recording_is_a_bad_row(ramps):
    index = _rust.Index(
        [
            write(
                ramps,
                [dict(path="m.wav", start=3.0, end=4.0), dict(path="m.wav", start=0.0, end=9.0)],
            )
        ]
    )
    _, fields, diagnostics = batch(index, 2, bad_budget=1.0)
    assert fields["weight"][0].tolist() == [0.0, 1.0]
    assert (
        "is the part [3, 4) s of a recording of 1.000 s, which holds no sample"
        in diagnostics["bad_list"][0][1]
    )


@pytest.mark.parametrize(
    "short, train, expected",
    [
        ("origin", True, {0}),
        ("origin", False, {1440}),
        ("start", False, {0}),
        ("start", True, {0}),
        ("centre", True, {1440}),
        ("random", False, {1440}),
        ("random", True, None),
    ],
)
def test_where_a_short_recording_lies(tmp_path, short, train, expected):
    (tmp_path / "a.wav").write_bytes(corpus.encode(np.full(320, 0.5, np.float32), RATE))
    index = _rust.Index([write(tmp_path, [dict(path="a.wav", start=0.0, end=0.01)])])
    found = set()
    for epoch in range(24 if train else 1):
        (x,), _, _ = batch(index, 1, train=train, short=short, epoch_of=epoch)
        places = np.flatnonzero(x)
        assert len(places) == 320 and places[-1] - places[0] == 319
        found.add(int(places[0]))
    assert found == expected if expected else len(found) > 15 and max(found) <= 2880


def test_a_short_recording_repeats(ramps):
    (ramps / "t.wav").write_bytes(corpus.encode(ramp(500), RATE, "WAV", "PCM_16"))
    index = _rust.Index([write(ramps, [dict(path="t.wav", start=0.0, end=500 / RATE)])])
    (x,), _, _ = batch(index, 1, repeat=True, short="start")
    np.testing.assert_array_equal(x, np.resize(ramp(500)[:, 0], 3200))
    (x,), _, _ = batch(index, 1, repeat=True, short="random", train=True)
    np.testing.assert_array_equal(np.diff(x) % 500, 1)


def test_the_place_of_a_short_recording_is_named_in_the_order(ramps):
    write(ramps, [dict(path="m.wav", start=0.0, end=0.1, label=0)])
    config = Config(
        train=str(ramps / "rows.parquet"),
        label="label",
        test_share=0.0,
        threads=1,
        allow_debug_build=True,
    )
    states = {}
    for short in ("random", "origin"):
        loader = make_loader(
            Config(**{**config.__dict__, "short": short}),
            split="train",
            rows=Rows(1, ((0, 1),)),
            seed=0,
        )
        states[short] = loader.state(0)["order"]
        loader.close()
    assert config.short == "random"
    assert states["random"]["short"] == "random" and states["origin"]["short"] == "origin"


def test_the_fingerprint_follows_the_recordings_and_not_their_folder(ramps, tmp_path):
    shard = write(
        ramps,
        [dict(path=path, start=0.0, end=0.5) for path in ("m.wav", "s.wav", "m.wav", "gone.wav")],
    )

    def fingerprint(folder):
        config = Config(
            train=str(folder / shard.name),
            label="",
            test_share=0.0,
            threads=1,
            allow_debug_build=True,
        )
        loader = make_loader(config, split="train", rows=Rows(1, ((0, 1),)), seed=0)
        loader.close()
        return loader.fingerprint, loader.state(0)["order"]

    first = fingerprint(ramps)
    moved = tmp_path / "moved"
    shutil.copytree(ramps, moved, ignore=shutil.ignore_patterns("moved"))
    assert fingerprint(moved) == first
    content = (moved / "m.wav").read_bytes()
    noise = np.random.default_rng(0).bytes(len(content) - 44)
    (moved / "m.wav").write_bytes(content[:44] + noise)
    other = fingerprint(moved)
    assert other[0] != first[0] and other[1] == first[1]


def test_the_cache_holds_parts(ramps, tmp_path):
    rows = [
        dict(path=p, start=i / 10, end=i / 10 + 0.1, channel=c, label=i % 2)
        for i, (p, c) in enumerate([("m.wav", -1), ("s.wav", 1)] * 3)
    ]
    shard = write(ramps, rows)
    first = _rust.Index([shard], label="label", cache=tmp_path / "cache")
    (file,) = (tmp_path / "cache").iterdir()
    again = _rust.Index([shard], label="label", cache=tmp_path / "cache")
    for index in (first, again):
        assert [index.part(i) for i in range(6)] == [
            (r["start"], r["end"], r["channel"]) for r in rows
        ]
        assert index.paths() == [r["path"] for r in rows] and index.labels.tolist() == [0, 1] * 3
    assert first.fingerprint == again.fingerprint
    damaged = file.read_bytes()
    file.write_bytes(damaged[:-20] + bytes(20))
    assert (
        _rust.Index([shard], label="label", cache=tmp_path / "cache").fingerprint
        == first.fingerprint
    )


def test_recordings_are_found_by_their_name(ramps):
    index = _rust.Index(
        [write(ramps, [dict(path=p, start=0.0, end=0.5) for p in ("m.wav", "s.wav", "m.wav")])]
    )
    rows, found = index.rows_named({"m.wav", "other.wav"})
    assert rows.tolist() == [0, 2] and found == 1
    # an id is a file's name without folder and ending
    rows, found = index.rows_named({"m", "s.wav", "wav", "s"})
    assert rows.tolist() == [0, 1, 2] and found == 2


def test_a_shard_of_another_version_is_refused(ramps):
    shard = write(ramps, [dict(path="m.wav", start=0.0, end=0.5)])
    table = pq.read_table(shard)
    pq.write_table(
        table.replace_schema_metadata({**table.schema.metadata, b"jaxtrain.index": b"99"}), shard
    )
    with pytest.raises(
        ValueError, match="another version of jaxtrain index.*run jaxtrain index again"
    ):
        _rust.Index([shard])


def test_a_row_without_a_recording_is_refused(ramps):
    shard = write(ramps, [dict(path=None, start=0.0, end=0.5)])
    with pytest.raises(ValueError, match="row 0 of this shard names no recording"):
        _rust.Index([shard])


def test_events_read_as_clips_are_an_error(tmp_path):
    """As in BirdSet's test set, a row's recording appears several times, and rows state when their
    event begins."""
    rows = corpus.table([corpus.wav(0)] * 3, [0, 1, 0])
    for paths, starts, is_wrong in (
        (["a", "a", "b"], [0.0, 4.0, 2.0], True),
        (["a", "b", "c"], [0.0, 4.0, 2.0], False),
        (["a", "a", "b"], [None, None, None], False),
    ):
        table = rows.append_column("filepath", pa.array(paths)).append_column(
            "start_time", pa.array(starts, pa.float64())
        )
        table = table.append_column(
            "end_time", pa.array([None if s is None else s + 1 for s in starts], pa.float64())
        )
        folder = tmp_path / f"{is_wrong}{starts[0]}"
        folder.mkdir()
        pq.write_table(table, folder / "x-test-00000-of-00001.parquet")
        pq.write_table(rows, folder / "x-train-00000-of-00001.parquet")
        config = Config(train=str(folder), label="label", allow_debug_build=True)
        found = dict(config.validate())
        assert ("train" in found) == is_wrong
        if is_wrong:
            assert "test_split='test_5s'" in found["train"] and "start_time" in found["train"]


def test_any_split_by_name(tmp_path):
    for split, n in (("train", 3), ("test_5s", 2), ("valid", 1)):
        corpus.write(
            tmp_path / f"{split}-00000-of-00001.arrow",
            corpus.table([corpus.wav(i) for i in range(n)], [0] * n),
        )
    config = Config(
        train=str(tmp_path), label="label", test_split="test_5s", allow_debug_build=True
    )
    assert not list(config.validate())
    loader = make_loader(config, split="test", rows=Rows(4, ((0, 4),)), seed=0)
    assert loader.n_batches == 1 and next(loader)[1]["weight"][0].sum() == 2
    loader.close()
    wrong = dict(
        Config(
            train=str(tmp_path), label="label", test_split="test5s", allow_debug_build=True
        ).validate()
    )
    assert "expected one of: test_5s, train, valid; did you mean 'test_5s'?" in wrong["test_split"]
    with pytest.raises(
        DataError,
        match=(
            "without the split 'vald'; expected one of: test_5s, train, valid; did you mean 'valid'"
        ),
    ):
        from loaders.audio import shards

        shards.find_shards(str(tmp_path), "vald")


@pytest.mark.parametrize("channels", [1, 2])
def test_adpcm_whose_steps_run_away_is_damaged_and_not_noise(channels):
    t = np.arange(8000) / 16_000
    file = io.BytesIO()
    # the largest steps that an encoder makes
    loud = np.sign(np.sin(2 * np.pi * 440 * t))[:, None].repeat(channels, 1)
    soundfile.write(file, loud, 16_000, format="WAV", subtype="MS_ADPCM")
    whole = bytearray(file.getvalue())
    assert len(_rust.decode(bytes(whole))[0]) >= 8000
    begin = whole.index(b"data") + 8
    whole[begin + 7 * channels : begin + 100] = b"\x88" * (100 - 7 * channels)
    with pytest.raises(ValueError, match="WAV: a packet cannot be decoded; the file is damaged"):
        _rust.decode(bytes(whole))


@pytest.mark.parametrize(
    "codec, container, form, loss",
    [
        ("aac", "mp4", "fltp", 0.03),
        ("alac", "mp4", "s16p", 1e-4),
        ("alac", "caf", "s16p", 1e-4),
        ("adpcm_ima_wav", "wav", "s16p", 0.02),
        ("adpcm_ms", "wav", "s16", 0.02),
    ],
)
def test_other_formats_are_read_more_slowly_and_counted(tmp_path, codec, container, form, loss):
    pytest.importorskip("av")
    rate, n = 44_100, 100_000
    t = np.arange(n) / rate
    wave = np.stack(
        [0.3 * np.sin(2 * np.pi * f * t * (1 + 0.2 * t)) for f in (440, 1000)], 1
    ).astype(np.float32)
    data = av_encode(codec, container, wave, rate, form)
    whole, found, frames = _rust.decode(data)
    assert found == rate and n <= frames < n + 3000, (
        "no encoder's delay is left, and at most its last block's padding"
    )
    assert abs(whole[3000 : n - 3000] - wave[3000 : n - 3000].mean(1)).mean() < loss
    second = _rust.decode(data, 0, None, 1)[0]
    assert abs(second[3000 : n - 3000] - wave[3000 : n - 3000, 1]).mean() < loss
    # AAC fills bands with noise that is drawn at each decoding
    noise = 1e-2 if codec == "aac" else 0.0
    for start, length in ((1, 1000), (33_333, 5000), (frames - 2000, 2000)):
        np.testing.assert_allclose(
            _rust.decode(data, start, length)[0], whole[start : start + length], atol=noise
        )
    (tmp_path / "a.bin").write_bytes(data)
    assert _rust.recording_info(tmp_path / "a.bin") == (rate, frames, 2, True)
    index = _rust.Index([write(tmp_path, [dict(path="a.bin", start=0.5, end=1.5)])])
    assert batch(index, 1)[2]["slow_rows"] == 1
    # damaged files raise an error or end early, and nothing worse happens
    for cut in (10, 100, len(data) // 2):
        try:
            _rust.decode(data[:cut])
        except ValueError as error:
            assert str(error)


def riff(
    data: bytes, size: int, tag: bytes = b"RIFF", ds64: bytes = b"", rate: int = 8000
) -> bytes:
    """A WAV of 16-bit mono whose data chunk states ``size``."""
    fmt = (
        b"fmt \x10\0\0\0\1\0\1\0"
        + rate.to_bytes(4, "little")
        + (2 * rate).to_bytes(4, "little")
        + b"\2\0\x10\0"
    )
    return tag + b"\xff\xff\xff\xffWAVE" + ds64 + fmt + b"data" + size.to_bytes(4, "little") + data


@pytest.mark.parametrize("tag", [b"RF64", b"BW64"])
@pytest.mark.parametrize("size", [0xFFFFFFFF, 0])
def test_sizes_of_64_bits(tag, size):
    data = np.arange(1000, dtype="<i2").tobytes()
    ds64 = b"ds64\x1c\0\0\0" + bytes(8) + (1500).to_bytes(8, "little") + bytes(12)
    wave, _, frames = _rust.decode(riff(data, size, tag, ds64))
    assert frames == 750 and (wave * 32768 == np.arange(750)).all()


@pytest.mark.parametrize("kind", ["RF64", "wrapped"])
def test_beyond_4_gib(tmp_path, kind):
    """A sparse file of 5 GiB whose header has 64 bits, or the lower 32 bits of its size."""
    n = 5 << 30
    ds64 = (
        b"ds64\x1c\0\0\0" + bytes(8) + n.to_bytes(8, "little") + bytes(12)
        if kind == "RF64"
        else b""
    )
    head = riff(
        b"", 0xFFFFFFFF if ds64 else n % (1 << 32), b"RF64" if ds64 else b"RIFF", ds64, RATE
    )
    with open(tmp_path / "a.wav", "wb") as file:
        file.write(head)
        file.truncate(len(head) + n)
        file.seek(len(head) + n - 2 * 6400)
        file.write(np.full(6400, 1000, "<i2").tobytes())
    assert _rust.recording_info(tmp_path / "a.wav") == (RATE, n // 2, 1, False)
    end = n / 2 / RATE
    index = _rust.Index(
        [
            write(
                tmp_path,
                [
                    dict(path="a.wav", start=end - 0.1, end=end),
                    dict(path="a.wav", start=1.0, end=1.1),
                ],
            )
        ]
    )
    late, early = batch(index, 2)[0]
    assert (late == 1000).all() and not early.any()


@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="no /proc here")
def test_the_windows_of_a_long_file_do_not_pile_up_in_memory(tmp_path):
    """A mapped file counts as far as it was read. Little of half an hour stays after it is read
    from end to end."""
    n = 200 << 20
    with open(tmp_path / "a.wav", "wb") as file:
        file.write(riff(b"", n, rate=RATE))
        file.truncate(44 + n)
    rows = [dict(path="a.wav", start=5.0 * k, end=5.0 * k + 5) for k in range(640)]
    index = _rust.Index([write(tmp_path, rows)])
    options = dict(clip_samples=5 * RATE, n_frames=512, form="waveform", seed=1)
    pipeline = pipelines.make(
        index, rows=np.arange(640), batch=8, ranges=[(0, 8)], train=False, threads=2, **options
    )

    def mapped():
        return (
            int(re.search(r"RssFile:\s+(\d+)", pathlib.Path("/proc/self/status").read_text())[1])
            >> 10
        )  # noqa: E731

    before = mapped()
    held = [(pipeline.next(), mapped())[1] - before for _ in range(80)]
    pipeline.close()
    assert max(held) < 60, f"{max(held)} MiB of 200"


@pytest.mark.parametrize(
    "kind, mode",
    [("WAV", None), ("FLAC", None), ("OGG", None), ("MP3", "CONSTANT"), ("MP3", "VARIABLE")],
)
def test_windows_of_a_long_file_equal_slices_of_a_whole_decode(tmp_path, kind, mode):
    """A recording of a hundred seconds (tools/bench_windows.py has two hours). MP3 with a variable
    bit rate gets a seek table on the way."""
    rate, seconds = 32_000, 100
    swell = np.repeat(np.random.default_rng(0).uniform(0.001, 0.3, seconds * 10), rate // 10)
    wave = (np.random.default_rng(1).standard_normal(rate * seconds) * swell * 0.3).astype(
        np.float32
    )
    path = tmp_path / "long"
    options = {"bitrate_mode": mode, "compression_level": 0.9} if mode else {}
    with soundfile.SoundFile(path, "w", rate, 1, format=kind, **options) as file:
        # With more at once, libsndfile's Vorbis encoder overflows its stack.
        for part in wave.reshape(seconds, rate):
            file.write(part)
    data = path.read_bytes()
    if mode == "VARIABLE":  # without the tag that would state the number of frames
        data = data.replace(b"Xing", b"XXXX", 1)
        path.write_bytes(data)
    whole, _, frames = _rust.decode(data)
    starts = [0.0, 7.3, 83.4567, 91.9, 98.0, 61.0, 61.0]
    index = _rust.Index(
        [write(tmp_path, [dict(path="long", start=s, end=s + 1.0) for s in starts])]
    )
    out = batch(index, len(starts), clip_samples=RATE, n_frames=128, threads=2)[0]
    for s, x in zip(starts, out, strict=True):
        first = round(s * rate)
        expected = np.clip(np.rint(whole[first : first + RATE] * 32768), -32768, 32767)
        assert abs(x - expected).max() <= (0 if kind in ("WAV", "FLAC") else 1), s
