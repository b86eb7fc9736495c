"""Runs the benchmark in its smallest form: its output, and that the compared results are the same
thing."""

import re

import numpy as np
import pytest

from loaders.audio import demo_birds
from tools import bench_loader as bench_loader
from tools import loader_peers

needs_seek = pytest.mark.skipif(
    bool(bench_loader.missing("seek")), reason="scipy and soxr are not installed"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("corpora")


@needs_seek
def test_the_table_has_every_peer_codec_and_ratio_and_the_peers_agree(folder, capfd):
    arguments = [
        "--codecs=wav32,ogg",
        "--peers=seek,buffer",
        "--threads=1",
        "--rounds=2",
        "--recordings=4",
        "--seconds=6",
    ]
    assert bench_loader.main([*arguments, f"--folder={folder}"]) == 0
    lines = capfd.readouterr().out.splitlines()
    assert lines[0] == "| examples/s, 1 thread | WAV 32k | OGG 32k |"
    assert lines[1] == "|---|---:|---:|"
    assert re.fullmatch(r"\| ours \| \d+ \| \d+ \|", lines[2])
    assert re.fullmatch(r"\| seek \(scipy [\d.]+, soxr [\d.]+\) \| \d+ \| \d+ \|", lines[3])
    assert re.fullmatch(r"\| buffer \| \d+ \| \d+ \|", lines[4])
    assert re.fullmatch(r"\| ours / best peer( \| \*\*[\d.]+\*\* × (seek|buffer)){2} \|", lines[5])

    agreement = re.findall(r"\n  (seek|buffer) +wav32 (\S+)  ogg (\S+)", "\n".join(lines))
    # Float32 log-mel of another transform; one sample too early or late would be 1e-2.
    assert len(agreement) == 2 and all(
        float(value) < 1e-5 for _, *values in agreement for value in values
    )
    assert re.search(
        r"Python 3\.\d+\.\d+, numpy \S+, scipy \S+, soundfile \S+, soxr \S+;", lines[-1]
    )


def test_a_corpus_has_the_lengths_that_were_asked_for_and_is_made_once(folder):
    shard = bench_loader.make_corpus("wav", n=4, seconds=3, folder=folder)
    made = shard.stat().st_mtime_ns
    assert bench_loader.make_corpus("wav", n=4, seconds=3, folder=folder).stat().st_mtime_ns == made
    assert not list(folder.glob("tmp*")), "a shard that is half made"
    sizes = [len(data) for data in loader_peers.recordings(shard)]
    # 16 bits, mono and stereo by turns
    seconds = sum(size / (2 * (1 + k % 2) * 44100) for k, size in enumerate(sizes))
    assert seconds == pytest.approx(4 * 3, rel=0.01)


def test_an_epoch_is_every_recording_once_and_crops_lie_inside(folder):
    shard = bench_loader.make_corpus("wav32", n=4, seconds=6, folder=folder)
    crops = loader_peers.crops(shard, 3)
    assert sorted(crop.row for crop in crops) == [0, 1, 2, 3]
    for crop in crops:
        frames = (len(crop.data) - 44) // 2
        assert crop.start == 0 or crop.start + loader_peers.CLIP <= frames


def test_a_peer_that_is_not_installed_is_skipped_with_the_remedy(folder, capfd, monkeypatch):
    monkeypatch.setitem(
        bench_loader.PEERS, "whole", loader_peers.Peer(loader_peers.Whole, ("no_such_module",))
    )
    arguments = [
        "--codecs=wav32",
        "--peers=whole",
        "--threads=1",
        "--rounds=1",
        "--recordings=4",
        "--seconds=6",
    ]
    assert bench_loader.main([*arguments, f"--folder={folder}"]) == 0
    out = capfd.readouterr().out
    assert "skipped: whole: pip install no-such-module" in out
    assert "| ours |" in out and "best peer" not in out


@pytest.mark.parametrize(
    "arguments", [["--codecs=ape"], ["--peers=nobody"], ["--threads=4096"], ["--recordings=1"]]
)
def test_bad_arguments_list_the_allowed_values(arguments, capsys):
    with pytest.raises(SystemExit):
        bench_loader.main(arguments)
    error = capsys.readouterr().err
    assert "expected some of" in error or "may use" in error or "at least" in error


def test_ratios_are_taken_within_rounds():
    # A machine that becomes three times slower after the first round.
    rates = {"ours": [300.0, 100.0, 90.0], "seek": [100.0, 33.0, 30.0], "whole": [30.0, 10.0, 9.0]}
    text = bench_loader.table(
        {"ogg": {"1": rates, "2": {name: [2 * x for x in xs] for name, xs in rates.items()}}}
    )
    assert "**3.00** × seek" in text
    assert "Ours, 2 threads / 1: OGG 32k 2.00." in text
    assert "| examples/s, 2 threads | OGG 32k |" in text
    assert "| ours | 100 |" in text


def test_the_demo_still_has_what_the_corpora_are_made_of():
    wave = demo_birds.waveform(demo_birds.Recording(0, 0, bench_loader.CODECS["wav"][1], 3.0))
    assert wave.shape == (3 * 44100, 2) and np.abs(wave).max() <= 1
