"""Prepared recordings: the same rows as their source, the same bytes from each process, and an
error for every kind of damage."""

import fcntl
import hashlib
import io
import json
import pathlib
import re
import signal
import subprocess
import sys

import numpy as np
import pyarrow as pa
import pytest
import soundfile

from jaxtrain.workloads.bird.commands import index, prepare
from loaders import _rust, order
from loaders.audio import prepared
from loaders.audio.spectrogram import Config, make_loader
from loaders.base import DataError, Rows
from tests.support import corpus

RATE, CLIP, SEED = 32_000, 16_000, 3
CONFIG = dict(
    label="label", clip_seconds=0.5, n_frames=64, form="waveform", test_share=0.0, bad_budget=0.5
)
KINDS = [
    ("WAV", None, 32_000, 1),
    ("FLAC", None, 48_000, 2),
    ("OGG", "VORBIS", 22_050, 1),
    ("WAV", None, 44_100, 2),
] * 3


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Two shards of twelve recordings of several kinds. One is broken, and one is shorter than a
    crop."""
    encoded = []
    for k, (kind, subtype, rate, channels) in enumerate(KINDS):
        wave = corpus.noise(k, 0.3 if k == 4 else 1.0 + 0.2 * k, rate)
        encoded.append(
            corpus.encode(
                np.stack([wave, -0.5 * wave], 1) if channels == 2 else wave, rate, kind, subtype
            )
        )
    encoded[7] = b"RIFF, and then nothing"
    names, labels = [str(k) for k in range(12)], list(range(12))
    shards = [corpus.table(encoded[at : at + 6], labels[at : at + 6], names) for at in (0, 6)]
    return corpus.save_to_disk(tmp_path_factory.mktemp("shards"), shards)


def rows(path, n=3, **options):
    """n batches of training, in full: [index, label, epoch], the samples, and the loader's
    diagnostics."""
    config = Config(train=str(path), **{**CONFIG, **options})
    loader = make_loader(config, split="train", rows=Rows(8, ((0, 8),)), seed=SEED)
    try:
        batches = [next(loader)[1] for _ in range(n)]
        facts = loader.diagnostics()
    finally:
        loader.close()
    numbers = [
        np.stack([batch[name][0] for name in ("index", "label", "epoch")], 1) for batch in batches
    ]
    return (
        np.concatenate(numbers),
        np.concatenate([batch[config.form][0] for batch in batches]),
        facts,
    )


def tree(folder: pathlib.Path) -> dict[str, str]:
    found = (path for path in folder.rglob("*") if path.is_file())
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in found
    }


@pytest.mark.parametrize("packed", [False, True])
def test_rows_are_those_of_the_recordings_in_the_same_order(folder, tmp_path, packed):
    out = tmp_path / "out"
    counts = prepared.prepare(str(folder), out, prepared.Settings(packed=packed))
    assert (counts.made, counts.missing, len(counts.kept)) == (
        2,
        0,
        1,
    ) and "row 7 (1.wav)" in counts.kept[0]
    numbers, before, _ = rows(folder)
    again, after, facts = rows(out)
    np.testing.assert_array_equal(again, numbers)
    assert facts["bad"] == 1
    np.testing.assert_array_equal(rows(out, threads=2)[1], after)
    index = _rust.Index(sorted(folder.glob("*.arrow")))
    for (row, _, epoch), was, now in zip(numbers, before, after, strict=True):
        if row == 4:  # shorter than a crop: drawn at its own rate
            np.testing.assert_array_equal(now, was)
            continue
        wave, rate, n = _rust.decode(index.encoded(row))
        if rate == RATE:
            assert np.abs(now.astype(int) - was).max() <= 1
        start = order.crop_start(SEED, epoch, row, n - -(-CLIP * rate // RATE) + 1)
        at = (2 * start * RATE + rate) // (2 * rate)
        whole = _rust.resample(wave, rate, RATE) if rate != RATE else wave
        assert np.abs(now - 32_768 * whole[at : at + CLIP]).max() <= 1.01, (row, rate)
        assert np.sqrt(np.mean((now.astype(float) - was) ** 2)) < 0.9 * was.std(), (
            "at most half a sample apart"
        )
    # Spectrograms of recordings at the front end's rate differ only by rounding.
    same = numbers[:, 0] % 4 == 0
    old, new = (rows(path, form="spectrogram")[1][same] for path in (folder, out))
    assert np.abs(old - new).max() < 0.02


def test_a_prepared_recording_is_flac_that_others_read(folder, tmp_path):
    raw, packed = tmp_path / "raw", tmp_path / "packed"
    prepared.prepare(str(folder), raw, prepared.Settings())
    prepared.prepare(str(folder), packed, prepared.Settings(packed=True))
    tables = [
        pa.ipc.open_stream(path / "data-00000-of-00002.arrow").read_all() for path in (raw, packed)
    ]
    source = pa.ipc.open_stream(folder / "data-00000-of-00002.arrow").read_all()
    for rows_ in tables:
        assert rows_.schema.equals(source.schema, check_metadata=True) and rows_["label"].equals(
            source["label"]
        )
    for ours, theirs in zip(tables[0]["audio"], tables[1]["audio"], strict=True):
        (a, rate), (b, _) = (
            soundfile.read(io.BytesIO(x.as_py()["bytes"]), dtype="int16") for x in (ours, theirs)
        )
        np.testing.assert_array_equal(a, b)
        assert rate == RATE and a.ndim == 1


def test_any_number_of_processes_and_threads_make_the_same_bytes(folder, tmp_path):
    one, several = tmp_path / "one", tmp_path / "several"
    prepared.prepare(str(folder), one, prepared.Settings(packed=True), threads=2)
    command = [
        sys.executable,
        "-m",
        "jaxtrain",
        "prepare",
        str(folder),
        "--out",
        str(several),
        "--packed",
    ]
    subprocess.run([*command, "--part=1/2", "--threads=1"], check=True, capture_output=True)
    with pytest.raises(DataError, match="has not made all; run the same jaxtrain prepare again"):
        rows(several)
    left = several / ".data-00000-of-00002.arrow.partial"
    left.write_bytes(b"of a process that was killed")
    with left.open() as theirs:  # and by one that works
        fcntl.flock(theirs, fcntl.LOCK_EX)
        assert prepared.prepare(str(folder), several, prepared.Settings(packed=True)).missing == 1
    done = subprocess.run([*command, "--part=0/2"], check=True, capture_output=True, text=True)
    assert "1 prepared now, 1 before" in done.stdout, done
    assert tree(several) == tree(one)


def test_an_index_keeps_its_rows_and_parts(tmp_path):
    recordings = tmp_path / "recordings"
    wave = np.stack([corpus.noise(1, 4, 44_100), corpus.noise(2, 4, 44_100)], 1)
    for name, data in (
        ("a.wav", corpus.encode(wave, 44_100)),
        ("a.flac", corpus.encode(wave[:, 0], 44_100, "FLAC")),
    ):
        recordings.mkdir(exist_ok=True)
        (recordings / name).write_bytes(data)
    lines = [
        "file,start,end,label",
        *(f"{name},{at},{at + 1},{'xy'[at]}" for name in ("a.wav", "a.flac") for at in (0, 1)),
    ]
    (tmp_path / "labels.csv").write_text("\n".join(lines))
    jaxtrain = [sys.executable, "-m", "jaxtrain"]
    index, out = tmp_path / "index", tmp_path / "out"
    given = [
        "index",
        str(tmp_path / "labels.csv"),
        "--audio",
        str(recordings),
        "--out",
        str(index),
        "--channels=each",
    ]
    subprocess.run([*jaxtrain, *given], check=True, capture_output=True)
    done = subprocess.run(
        [*jaxtrain, "prepare", str(index), "--out", str(out)],
        check=True,
        capture_output=True,
        text=True,
    )
    assert "3 prepared now" in done.stdout, done  # both channels of one, and the other's only one
    names = sorted(path.name for path in (out / "audio").iterdir())
    assert names == ["a.0.flac", "a.1.flac", "a.flac"]
    numbers, before, _ = rows(index)
    again, after, _ = rows(out)
    np.testing.assert_array_equal(again, numbers)
    likeness = [np.corrcoef(was, now)[0, 1] for was, now in zip(before, after, strict=True)]
    # half a sample apart; a different channel or part would have none
    assert min(likeness) > 0.5, likeness


def test_an_index_that_cannot_be_read_is_refused_by_name(tmp_path, capsys):
    recordings, made = tmp_path / "recordings", tmp_path / "index"
    recordings.mkdir()
    for k, name in enumerate(("a.wav", "b.wav")):
        (recordings / name).write_bytes(corpus.wav(k))
    assert index.main([str(recordings), "--labels=none", "--out", str(made)]) == 0
    about = json.loads((made / "index.json").read_text())
    (made / "index.json").write_text(json.dumps(about | {"version": "0"}))
    assert prepare.main([str(made), "--out", str(tmp_path / "out")]) == 2
    assert "it is of version '0', and this jaxtrain reads '2'" in capsys.readouterr().err
    (made / "index.json").write_text(json.dumps(about))
    (recordings / "b.wav").unlink()
    assert prepare.main([str(made), "--out", str(tmp_path / "out")]) == 2
    told = capsys.readouterr().err.splitlines()[-1]
    assert told.startswith("error: ") and "b.wav" in told
    (shard,) = made.glob("data/*.parquet")
    data = bytearray(shard.read_bytes())
    data[4:80] = bytes(76)
    shard.write_bytes(data)
    assert prepare.main([str(made), "--out", str(tmp_path / "other")]) == 2
    told = capsys.readouterr().err.splitlines()[-1]
    assert told.startswith(f"error: {shard}")


def test_recordings_that_do_not_fit_are_refused_by_name(folder, tmp_path):
    out = tmp_path / "out"
    prepared.prepare(str(folder), out, prepared.Settings(sample_rate=24_000))
    with pytest.raises(
        DataError, match="prepared with sample_rate=24000, and data.sample_rate is 32000"
    ):
        rows(out)
    with pytest.raises(DataError, match="with other settings"):
        prepared.prepare(str(folder), out, prepared.Settings())
    with pytest.raises(DataError, match="is prepared already"):
        prepared.prepare(str(out), tmp_path / "twice", prepared.Settings())
    with pytest.raises(DataError, match="holds other things"):
        prepared.prepare(str(folder), folder, prepared.Settings())
    about = json.loads((out / prepared.NAME).read_text())
    (out / prepared.NAME).write_text(json.dumps(about | {"version": 0}))
    with pytest.raises(DataError, match="it is of version 0, and this jaxtrain reads 1"):
        prepared.prepare(str(folder), out, prepared.Settings(sample_rate=24_000))
    # A recording from elsewhere is refused with a message of its own.
    (out / prepared.NAME).unlink()
    with pytest.raises(DataError, match="was prepared at 24000 Hz .* the front end takes 32000 Hz"):
        rows(out)


def test_a_damaged_block_is_a_broken_recording(folder, tmp_path):
    out = tmp_path / "out"
    prepared.prepare(str(folder), out, prepared.Settings())
    shard = out / "data-00000-of-00002.arrow"
    data = bytearray(shard.read_bytes())
    values = pa.ipc.open_stream(bytes(data)).read_all()["audio"].chunk(0).field("bytes")
    value = values[5].as_py()
    first = bytes(data).index(value)
    for at in range(first + 500, first + len(value), 8_000):  # each block
        data[at] ^= 1
    shard.write_bytes(data)
    numbers, _, facts = rows(out)
    reasons = dict(facts["bad_list"])
    assert (
        set(reasons) == {5, 7}
        and "checksum does not match" in reasons[5]
        and str(shard) in reasons[5]
    )
    block, first, last = re.search(
        r"in block (\d+), which is samples (\d+) to (\d+); delete the file", reasons[5]
    ).groups()
    assert (int(first), int(last)) == (4096 * int(block), 4096 * int(block) + 4095)
    was, _, _ = rows(folder)
    assert 5 in was[:, 0] and 5 not in numbers[:, 0]
    np.testing.assert_array_equal(numbers[was[:, 0] != 5], was[was[:, 0] != 5])
    shard.unlink()  # the remedy
    with pytest.raises(
        DataError, match="lacks 1 of its 2 shards; run the same jaxtrain prepare again"
    ):
        rows(out)
    assert prepared.prepare(str(folder), out, prepared.Settings()).made == 1
    assert dict(rows(out)[2]["bad_list"]).keys() == {7}


@pytest.mark.parametrize("kind", ["shards", "index"])
def test_a_full_disk_leaves_nothing_half_made_and_is_continued(small_disk, tmp_path, capsys, kind):
    data = [corpus.encode(corpus.noise(k, 2, RATE), RATE) for k in range(4)]
    source = tmp_path / "source"
    if kind == "shards":
        corpus.save_to_disk(source, [corpus.table(data[at : at + 2], [0, 1]) for at in (0, 2)])
    else:
        (tmp_path / "wav").mkdir()
        for k, each in enumerate(data):
            (tmp_path / "wav" / f"{k}.wav").write_bytes(each)
        assert index.main([str(tmp_path / "wav"), "--labels=none", "--out", str(source)]) == 0
    prepared.prepare(str(source), tmp_path / "whole", prepared.Settings())
    disk = small_disk(450)  # of 512 kB
    out = disk / "out"
    capsys.readouterr()
    assert prepare.main([str(source), "--out", str(out), "--threads=1"]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert (
        error.startswith(f"error: {out}/")
        and "No space left on device; free some space, then rerun" in error
    ), error
    whole, made = tree(tmp_path / "whole"), tree(out)
    about = {prepared.NAME: made[prepared.NAME]}  # not complete yet
    assert 1 < len(made) < len(whole) and made == {name: whole[name] for name in made} | about
    with pytest.raises(DataError, match="has not made all; run the same jaxtrain prepare again"):
        rows(out, label="")
    subprocess.run(["mount", "-o", "remount,size=2000k", disk], check=True)
    assert prepare.main([str(source), "--out", str(out)]) == 0
    assert tree(out) == whole


def test_a_file_beyond_the_limit_is_named(folder, tmp_path):
    out = tmp_path / "out"
    command = f"ulimit -f 64; exec {sys.executable} -m jaxtrain prepare {folder} --out {out}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
    shard = out / "data-00000-of-00002.arrow"
    assert (done.returncode, done.stderr.splitlines()) == (
        2,
        [f"error: {shard}: File too large; name another path, or change its permissions"],
    )


def test_an_interrupted_command_continues_to_the_same_bytes(tmp_path):
    data = corpus.encode(corpus.noise(0, 10, 48_000), 48_000, "FLAC")
    source = corpus.save_to_disk(
        tmp_path / "source", [corpus.table([data] * n, [0] * n) for n in (1, 80)]
    )
    out = tmp_path / "out"
    command = [
        sys.executable,
        "-m",
        "jaxtrain",
        "prepare",
        str(source),
        "--out",
        str(out),
        "--threads=1",
    ]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as running:
        assert "data-00000" in running.stderr.readline()
        running.send_signal(signal.SIGINT)
        assert running.stderr.read() == "error: interrupted\n" and running.wait() == 130
    assert tree(out).keys() == {prepared.NAME, "data-00000-of-00002.arrow"}, (
        "it made none of the 80 rows that were left"
    )
    for folder in (out, tmp_path / "whole"):
        prepared.prepare(str(source), folder, prepared.Settings())
    assert tree(out) == tree(tmp_path / "whole")
