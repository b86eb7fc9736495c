"""The goal of the loader's threads, and the bytes of a row."""

import json
import pathlib
import types

import pytest

from tools import bench_feeding

ROOT = pathlib.Path(__file__).parents[2]


def by_threads(**rates):
    return {n[1:]: {"threads": {"rows_per_cpu_second": rate}} for n, rate in rates.items()}


@pytest.mark.parametrize(
    ("rates", "physical", "expected"),
    [
        ({"n1": 500.0, "n8": 460.0, "n16": 300.0}, 8, "0.92 of one thread's on 8 physical"),
        ({"n1": 500.0, "n8": 460.0}, 8, "goal 0.90: reached"),
        ({"n1": 500.0, "n8": 440.0}, 8, "goal 0.90: missed"),
        ({"n1": 500.0, "n16": 440.0}, 8, "not compared with the goal: 1 and 8 threads"),
        ({"n1": 500.0}, 1, "not compared with the goal"),
    ],
)
def test_threads_are_held_to_the_goal_on_physical_cores(rates, physical, expected):
    """Second hyperthreads share a core's arithmetic: the goal is not for them."""
    share = bench_feeding.of_one_thread(by_threads(**rates), physical)
    assert expected in bench_feeding.result(share, physical)


def test_the_numbers_have_the_physical_cores_and_the_goal(tmp_path, monkeypatch, capsys):
    ways = {"rows_per_second": 1.0, "rows_per_cpu_second": 500.0}
    ways |= {"faults_per_row": 0.0, "waits_per_row": 0.0}
    each = dict.fromkeys(("threads", "processes", "digests"), ways)
    found = {"1": each, "2": each}
    monkeypatch.setattr(bench_feeding, "measure", lambda *_: found)
    monkeypatch.setattr(bench_feeding, "n_physical", lambda _: 2)
    corpora = types.SimpleNamespace(
        CODECS=bench_feeding.bench_loader.CODECS,
        cores=lambda: [0, 1, 2, 3],
        make_corpus=lambda codec, n, seconds: "shard",
    )
    monkeypatch.setattr(bench_feeding, "bench_loader", corpora)
    out = tmp_path / "x.json"
    arguments = ["--codecs=wav", "--forms=waveform", "--threads=1,2", f"--out={out}"]
    assert bench_feeding.main(arguments) == 0
    written = json.loads(out.read_text())
    assert (written["cores"], written["physical"], written["goal"]) == (4, 2, 0.9)
    assert written["of_one_thread"] == {"wav waveform": 1.0} and written["rows"]
    assert "wav waveform: 1.00 of one thread's on 2 physical cores" in capsys.readouterr().out


def test_the_page_has_the_bytes_of_a_row_and_their_rate():
    page = (ROOT / "docs" / "results" / "loader.md").read_text()
    for form, name in (("waveform", "16-bit samples"), ("spectrogram", "float32 spectrogram")):
        n = bench_feeding.bytes_of_row(form)
        line = next(line for line in page.splitlines() if line.startswith(f"| {name}"))
        rate = 10_000 * n
        assert f"| {n:,} |" in line and f"| {rate / 1e9:.2f} GB/s |" in line, line
        assert f"{rate / 32.8e9:.0%}".replace("%", " %") in line, "of a copy as measured"
