"""Workdirs as runs leave them, made without a run, and the pages of reports in a browser."""

import json
import re
import subprocess

import numpy as np

from jaxtrain.telemetry import goodput
from tests.support import chromium


def make(path, *, steps=100, reached=100, scores=(), end="ended", **config):
    """A workdir as a run leaves it. With ``end`` None it has no goodput, as an older version wrote
    it."""
    path.mkdir(parents=True)
    (path / "config.json").write_text(
        json.dumps({"workdir": str(path), "train": {"steps": steps}, **config})
    )
    lines = [
        {"step": s, "split": "train", "loss": 1 / s, "eta_seconds": 65.0}
        for s in range(10, reached + 1, 10)
    ]
    lines += [{"step": s, "split": "test", "loss": 1.0, **record} for s, record in scores]
    (path / "metrics.jsonl").write_text(
        "".join(f"{json.dumps(x)}\n" for x in sorted(lines, key=lambda x: x["step"]))
    )
    if end is not None:
        clock = goodput.Clock()
        clock.open(str(path), process=0, processes=1, facts={"commit": "abc-dirty"})
        clock.steps(0)
        clock.read(reached, 0.0)
        clock.close(end)
    return path


def counted(own, answer, n):
    """The rows, right answers and answers of each class, and the confusions, as an evaluation
    counts them."""
    confusions = np.zeros((n, n))
    np.add.at(confusions, (own, answer), 1.0)
    return np.stack([confusions.sum(1), confusions.diagonal(), confusions.sum(0)]), confusions


def data_of(page):
    return json.loads(re.search(r'id="data">(.*?)</script>', page.read_text(), re.S)[1])


def assert_drawn(page, folder):
    """Opens a page in a browser. Every chart must have marks, and the console must be empty."""
    command = [
        chromium.PROGRAM,
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        f"--user-data-dir={folder / 'browser'}",
    ]
    command += [
        "--virtual-time-budget=20000",
        "--enable-logging=stderr",
        "--dump-dom",
        f"file://{page}#all",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert not [line for line in done.stderr.splitlines() if ":CONSOLE" in line], done.stderr
    assert not re.search(r"<(a|img)\b[^>]*(evil|onerror)", done.stdout), "names are texts"
    charts = data_of(page)["charts"]
    assert f'data-drawn="{len(charts)}"' in done.stdout and "<title>owned" not in done.stdout
    drawn = dict(
        re.findall(r'data-chart="(\d+)"(.*?)(?=data-chart="|</section>)', done.stdout, re.S)
    )
    assert len(drawn) == len(charts)
    for i, chart in enumerate(charts):
        expected = len(chart.get("curves", chart.get("names")))
        assert (
            len(re.findall(r'class="js-line"[^>]* d="M[^"]+[LCQ]|class="point"', drawn[str(i)]))
            >= expected
        ), chart["title"]
