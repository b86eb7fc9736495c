"""`jaxtrain report`: the page agrees with the files, is drawn in a browser, fetches nothing, and
trusts no text of a run."""

import html
import json
import math
import re
import shutil

import numpy as np
import pytest
from PIL import Image

from jaxtrain import cli
from jaxtrain.telemetry.report import class_scores, compare
from jaxtrain.telemetry.report import records as records_lib
from tests.support import chromium
from tests.support.reports import assert_drawn, counted, data_of, make

pytest.importorskip("plotly")
EVIL = '</script><script>document.title="owned"</script><img src=x onerror=alert(1)>'
LINK = '<a href="https:evil.example">b'  # for plotly.js


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run with everything that a page can show, started three times, with texts that look like
    markup."""
    path = make(
        tmp_path_factory.mktemp("page") / "run",
        steps=5000,
        reached=10,
        end="",
        optim={"lr": 0.5, "name": EVIL},
        model={"class_names": ["owl", EVIL]},
    )
    make(path / "again", steps=5000, reached=40, end="ended by SIGTERM after step 40")
    # The command of the last start is known.
    head, rest = (path / "again" / "goodput" / "process-0.jsonl").read_text().split("\n", 1)
    head = json.loads(
        head
        # it began later, though one process made them all, whose start the system reports to the
        # 100th
        # of a second
    )
    head = json.dumps(
        {
            **head,
            "began": head["began"] + 0.5,
            "source": "birds.py:/data",
            "overrides": {"optim.lr": "0.5"},
        }
    )
    (path / "again" / "goodput" / "process-0.jsonl").write_text(f"{head}\n{rest}")
    for name in ("a", "b"):  # two more starts: of the same file
        with (path / "goodput" / "process-0.jsonl").open("ab") as file:
            content = (path / "again" / "goodput" / "process-0.jsonl").read_bytes()
            file.write(
                content.replace(
                    json.loads(content.split(b"\n")[0])["id"].encode(), name.encode() * 32
                )
            )
    shutil.rmtree(path / "again")
    with (path / "metrics.jsonl").open("w") as file:
        for step in range(1, 5001):
            loss = 4321.0 if step == 3333 else 3 / math.sqrt(step)
            record = {
                "loss": loss,
                "skipped": float(step == 3333),
                "mfu": 0.5,
                "data_wait_share": 0.125,
                EVIL: 1.5,
            }
            file.write(json.dumps({"step": step, "split": "train", **record}) + "\n")
            if step % 500 == 0:
                file.write(
                    json.dumps(
                        {"step": step, "split": "test", "loss": 2.0, "accuracy": step / 10_000}
                    )
                    + "\n"
                )
        file.write('{"step": 5001, "split": "tr')
    for step in (500, 1000):
        (path / "pictures").mkdir(exist_ok=True)
        Image.fromarray(np.full((8, 8), step // 10, np.uint8)).save(
            path / "pictures" / f"step{step:06}_restored_0.png"
        )
    (path / "generations.jsonl").write_text(
        "".join(json.dumps({"step": s, "text": EVIL, "score": 0.25}) + "\n" for s in (500, 1000))
    )
    for step in (500, 1000):  # a third of the owls is taken for the class with the malicious name
        counts, confusions = counted(
            np.array([0] * 30 + [1] * 20),
            np.array([0] * (20 + step // 100) + [1] * (30 - step // 100)),
            2,
        )
        with (path / "classes.jsonl").open("a") as file:
            file.write(json.dumps({"step": step, **class_scores.line(counts, confusions)}) + "\n")
    (path / "schedule.json").write_text(
        json.dumps({"step": [0, 2500, 5000], "lr": [1e-3, 5e-4, 0.0]})
    )
    (path / "logs").mkdir()
    log = "2026-01-01 00:00:00,000 WARNING step {} skipped: loss 4321; examples [7]\n"
    (path / "logs" / "process-0.log").write_text(
        log.format(3) + log.format(3333) + "2026-01-01 00:00:00,000 INFO fine\n"
    )
    (path / "logs" / "process-3.log").write_text(
        log.format(4) + "2026-01-02 00:00:00,000 WARNING x.ogg cannot be read: cut off\n"
    )
    return path


@pytest.fixture(scope="module")
def page(run):
    assert cli.main(["report", str(run), "--out", str(run.parent / "page.html")]) == 0
    return run.parent / "page.html"


@pytest.fixture(scope="module")
def sweep(tmp_path_factory):
    top = tmp_path_factory.mktemp("sweep")
    for i in range(12):
        optim = {"lr": 10.0**-i, "name": "ab"[i % 2], LINK: i}
        path = make(top / f"{i:03}", scores=[(100, {"accuracy": 0.08 * i})], optim=optim, seed=i)
        (path / "generations.jsonl").write_text(
            "".join(f'{{"step": {s}, "text": "at {s} of {i}"}}\n' for s in (50, 100))
        )
    assert (
        cli.main(
            ["report", *(str(top / f"{i:03}") for i in range(12)), "--out", str(top / "page.html")]
        )
        == 0
    )
    return top / "page.html"


def test_the_page_says_what_the_files_say(page):
    text = page.read_text()
    cards = {
        name: value
        for value, name in re.findall(r'<div class="card"><b>(.*?)</b><span>(.*?)</span>', text)
    }
    expected = {
        "steps": "5,000 / 5,000",
        "accuracy, last evaluation": "0.5",
        "best, at step 5,000": "0.5",
        "restarts": "2",
    }
    expected |= {
        "training loss at step 5,000": "0.04243",
        "MFU": "50.0%",
        "waiting for data": "12.5%",
    }
    assert expected.items() <= cards.items() and {"wall time", "goodput"} <= cards.keys()
    charts = {chart["title"]: chart["curves"] for chart in data_of(page)["charts"]}
    train, test = charts["loss"]
    assert (train["split"], test["split"]) == ("train", "test") and 1900 < len(
        train["x"]
    ) <= 2000, "thinned"
    assert (
        train["y"][train["x"].index(3333)] == 4321.0
        and train["x"][0] == 1
        and train["x"][-1] == 5000
    ), "and no peak lost"
    assert test["x"] == list(range(500, 5001, 500)) and charts["accuracy"][0]["y"] == [
        s / 10_000 for s in test["x"]
    ]
    assert charts["learning_rate"][0]["y"] == [1e-3, 5e-4, 0.0]
    for part in (
        "1 steps were skipped: 3333",
        "--step 3333",
        '<td class="n">3×</td><td class="n">0, 3</td>',
        (
            '<td class="n">1×</td><td class="n">3</td><td class="text code">2026-01-02 00:00:00,000'
            " WARNING x.ogg cannot be read"
        ),
        "examples [7]",
        "ended by SIGTERM after step 40",
        "Goodput is",
        "killed; last heard of",
        "config birds.py:/data",
        (
            '<td class="code">optim.lr</td><td class="code">0.5</td><td class="code'
            ' soft">0.0001</td><td>command</td>'
        ),
    ):
        assert part in text, part
    # Of 50 rows, 30 owls and 20 others, the answer was owl for 30: all of them right.
    assert "Of 50 rows <b>100.0%</b> were answered right (95 % interval 92.9% to 100.0%)" in text
    assert (
        "Of 50 rows <b>90.0%</b>" in text and "83% <span" in text and 'data-name="step 500"' in text
    )
    matrix = re.search(r'<table class="matrix">(.*?)</table>', text)[1]
    assert re.findall(r'<td class="(hit|miss)"[^>]*>(\d+)</td>', matrix) == [
        ("hit", "25"),
        ("miss", "5"),
        ("hit", "20"),
    ]
    assert text.count('src="data:image/png') == 2 and "Order of the examples" not in text, (
        "what there is, and no more"
    )


def test_the_page_is_one_file_and_escapes_every_text_of_a_run(page):
    text = page.read_text()
    assert len(text) < 5e6 and EVIL not in text and html.escape(EVIL) in text
    assert not re.search(
        r"""(src|href)=["']?(https?:)?//""", re.sub(r'id="library">.*?</script>', "", text)
    )
    assert EVIL in {chart["title"] for chart in data_of(page)["charts"]}, (
        "it reaches the script as data"
    )


def test_several_runs_are_ranked_and_compared(sweep):
    text = sweep.read_text()
    rows = re.findall(r"<tr><td><span[^>]*></span>(\d{3})</td>.*?</tr>", text)
    assert rows == [f"{i:03}" for i in reversed(range(12))]
    assert all(f"at 100 of {i}<" in text and f"at 50 of {i}<" not in text for i in range(12)), (
        "of many runs the last samples"
    )
    fields = re.findall(r"<th>([\w.]+)</th>", text)
    assert [field for field in fields if "." in field or field == "seed"] == [
        "optim.lr",
        "optim.name",
        "seed",
    ]
    data = data_of(sweep)
    [parallel] = [chart for chart in data["charts"] if chart.get("kind") == "parallel"]
    assert [axis["label"] for axis in parallel["dimensions"]] == [
        f"optim.{LINK}",
        "optim.lr",
        "optim.name",
        "seed",
        "best accuracy",
    ]
    assert parallel["dimensions"][1]["at"] == pytest.approx(np.linspace(1, 0, 12), abs=1e-3), (
        "a wide range is logarithmic"
    )
    assert {
        curve["run"] for chart in data["charts"] if "curves" in chart for curve in chart["curves"]
    } == set(range(12))


def test_pictures_that_have_no_room_are_reported_in_one_line(tmp_path):
    # 90 kB, and each run has two
    noise = np.random.default_rng(0).integers(0, 256, (300, 300), np.uint8)
    for i in range(12):
        path = make(tmp_path / f"{i:02}")
        (path / "pictures").mkdir()
        for kind in ("input", "restored"):
            Image.fromarray(noise).save(path / "pictures" / f"step000010_{kind}_0.png")
    assert (
        cli.main(
            [
                "report",
                *(str(tmp_path / f"{i:02}") for i in range(12)),
                "--out",
                str(tmp_path / "page.html"),
            ]
        )
        == 0
    )
    text = (tmp_path / "page.html").read_text()
    [note] = re.findall(r'<p class="notice">(.*?)</p>', text)
    shown = text.count('src="data:image/png')
    assert (
        "left out: 00: input, " in note
        and f"and {24 - shown - 8} more; the page of one run alone" in note
        and shown > 0
    )


@pytest.mark.parametrize("which", ["page", "sweep"])
@pytest.mark.skipif(not chromium.PROGRAM, reason="no Chromium is installed here")
def test_a_browser_draws_every_chart_without_an_error(which, request, tmp_path):
    assert_drawn(request.getfixturevalue(which), tmp_path)


def test_odd_lines_cost_themselves_and_both_parsers_agree(tmp_path):
    path = tmp_path / "metrics.jsonl"
    good = [
        {"step": s, "split": "train", "loss": s / 7, "norm": None if s % 3 else 2}
        for s in range(1, 300)
    ]
    good += [{"step": 9, "split": "test", "accuracy": 1}]
    path.write_text("".join(json.dumps(r) + "\n" for r in good))
    fast = records_lib.read(path)
    assert records_lib._parsed_by_arrow(path.read_bytes()) is not None and (
        fast.lines,
        fast.odd,
    ) == (
        300,
        0,
    )
    odd = b'nonsense\n{"step": -1, "split": "train"}\n{"step": 3, "split": "train", "l\xff": 1}\n'
    path.write_bytes(odd + path.read_bytes() + b'{"step": 3, "split": "train", "loss": "x"}\n{"st')
    slow = records_lib.read(path)
    assert (slow.lines, slow.odd) == (300, 4) and slow.splits.keys() == fast.splits.keys()
    for split, columns in fast.splits.items():
        for name, values in columns.items():
            np.testing.assert_array_equal(values, slow.splits[split][name])


def test_numbers_without_end_and_samples_without_bottom_are_shown_as_such(tmp_path):
    path = make(tmp_path / "run", steps=10, reached=1)
    with (path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 1, "split": "data", "spread": 1.0, "spread_expected": 1e999}\n')
    # It is read up to some depth, and no further.
    (path / "generations.jsonl").write_text(
        "".join(f'{{"step": {n}, "x": {"[" * n}{"]" * n}}}\n' for n in range(1, 1000))
    )
    assert cli.main(["report", str(path), "--out", str(tmp_path / "page.html")]) == 0
    [chart] = [
        chart for chart in data_of(tmp_path / "page.html")["charts"] if chart["title"] == "spread"
    ]
    assert [curve["split"] for curve in chart["curves"]] == ["data"]
    assert compare._axis("x", [-1.7e308, 1.7e308, 0.0])["at"] == [0.0, 1.0, 0.5]


@pytest.mark.parametrize("n", [1, 10, 11, 57, 5000])
def test_a_thinned_curve_keeps_its_ends_and_every_peak(n):
    rng = np.random.default_rng(n)
    x, y = np.arange(n) * 3, rng.normal(size=n)
    y[rng.integers(n, size=n // 5)] = np.nan
    y[n // 2] = 1e9
    steps, values = records_lib.thinned(x, y, 10)
    known = np.flatnonzero(np.isfinite(y))
    assert (
        len(steps) <= 10
        and steps[0] == x[known[0]]
        and steps[-1] == x[known[-1]]
        and np.all(np.diff(steps) > 0)
    )
    assert values.max() == np.nanmax(y) and values.min() == np.nanmin(y)
    np.testing.assert_array_equal(values, y[steps // 3])


def test_a_folder_that_is_no_run_is_named(tmp_path, capsys):
    for path, text in (
        (tmp_path / "none", "does not exist; expected a run's workdir"),
        (tmp_path, "holds neither config.json"),
    ):
        assert cli.main(["report", str(path), "--out", str(tmp_path / "x.html")]) == 2
        assert text in capsys.readouterr().err and not (tmp_path / "x.html").exists()


def test_a_workload_of_the_users_own_explains_its_metrics_if_it_is_named(
    tmp_path, monkeypatch, capsys
):
    value = (
        "from jaxtrain.telemetry.glossary import Entry\nfrom jaxtrain.workload import Workload\n"
    )
    value += (
        'WORKLOAD = Workload(None, None, glossary=(Entry("loss", "loss", "a sum of squares of'
        ' ours"),))\n'
    )
    (tmp_path / "own_squares.py").write_text(value)
    monkeypatch.syspath_prepend(tmp_path)
    run, out = make(tmp_path / "run", workload="own_squares"), tmp_path / "report.html"
    assert cli.main(["report", str(run), "--out", str(out)]) == 0
    assert (
        "with --workload own_squares they have" in capsys.readouterr().out
        and "of ours" not in out.read_text()
    )
    assert cli.main(["--workload", "own_squares", "report", str(run), "--out", str(out)]) == 0
    assert (
        "own_squares" not in capsys.readouterr().out
        and "a sum of squares of ours" in out.read_text()
    )
