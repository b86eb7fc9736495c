"""Pages of real runs: each workload at a tiny size, and a run that was ended fourteen times before
its last step."""

import os
import pathlib
import re
import shutil
import signal

import pytest

from jaxtrain import cli
from tests.support import chromium, small_runs
from tests.support.processes import cluster, records, run, step_of, wait_for
from tests.support.reports import assert_drawn, data_of

pytest.importorskip("plotly")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not chromium.PROGRAM, reason="no Chromium is installed here"),
]
KILLS, EVERY = 14, 4
TOLD = {
    "tiny": "Classes",
    "trm": "Pictures",
    "lm": "Generations",
    "giblet": "Pictures",
    "higgs": "Gradients and parameters",
}


def page_of(workdir, folder):
    page = folder / "page.html"
    assert cli.main(["report", str(workdir), "--out", str(page)]) == 0 and page.stat().st_size < 5e6
    assert_drawn(page, folder)
    if keep := os.environ.get("PAGES"):
        shutil.copy(page, pathlib.Path(keep) / f"{folder.name}.html")
    return page.read_text()


@pytest.mark.parametrize("name", TOLD)
def test_every_workload_has_its_page(name, tmp_path, corpus):
    folder = getattr(small_runs, name)(tmp_path)
    source = f"tiny.py:{corpus}" if name == "tiny" else f"{name}.py"
    run(folder, source, "--config.metrics.every=1")
    workdir = folder / "runs" / name
    text = page_of(workdir, folder)
    sections = re.findall(r"<h2 [^>]*>(.*?)</h2>", text)
    assert {TOLD[name], "Results", "Speed", "Where the time went", "Configuration"} <= set(sections)
    charts = data_of(folder / "page.html")["charts"]
    for split in ("train", "test"):
        found = records(workdir, split)
        for metric in {name for record in found.values() for name in record} - {"step", "split"}:
            known = {s: r[metric] for s, r in found.items() if r.get(metric) is not None}
            if metric == "skipped" or not known:
                continue
            [curve] = [
                c
                for chart in charts
                if chart["title"] == metric
                for c in chart["curves"]
                if c["split"] == split
            ]
            assert dict(zip(curve["x"], curve["y"], strict=True)) == pytest.approx(
                known, rel=1e-4
            ), metric


def test_a_run_that_ended_fourteen_times(tmp_path):
    """The run is ended twelve times by SIGKILL and twice by SIGTERM. The page shows each end, with
    its reason, and the step of each resume."""
    trm = small_runs.trm(tmp_path)
    command = (
        trm,
        "trm.py",
        f"--config.train.steps={EVERY * (KILLS + 2)}",
        f"--config.checkpoint.every={EVERY}",
    )
    for i in range(1, KILLS + 1):
        saved = str(trm / "runs" / "trm" / "checkpoints" / str(EVERY * i))
        asked = i % 7 == 0
        sent, code = (signal.SIGTERM, 75) if asked else (signal.SIGKILL, -signal.SIGKILL)
        at = {"KILL_AT": str(EVERY * i + 2), "KILL_AFTER": saved, "KILL_SIGNAL": str(int(sent))}
        run(*command, code=code, **at)
    run(*command)
    text = page_of(trm / "runs" / "trm", trm)
    assert '<div class="card"><b>14</b><span>restarts</span>' in text
    ends = re.findall(r"<td>(killed; last heard of|ended by SIGTERM|ended)", text)
    assert ends == (["killed; last heard of"] * 6 + ["ended by SIGTERM"]) * 2 + ["ended"]
    first = [
        int(x)
        for x in re.findall(
            r'<td class="n">[^<]*</td><td class="n">(\d+)</td><td class="n">\d+</td><td>', text
        )
    ]
    assert (
        first[0] == 0
        and first == sorted(first)
        and all(EVERY * i <= x <= EVERY * i + 3 for i, x in enumerate(first))
    )
    [loss] = [chart for chart in data_of(trm / "page.html")["charts"] if chart["title"] == "loss"]
    assert loss["restarts"] == first[1:]


def test_every_process_of_a_live_run_is_traced(folder, corpus, capsys):
    """Each process traces its own next steps. None waits for the other's trace, and the page shows
    both."""
    both = cluster(
        folder,
        f"tiny.py:{corpus}",
        "--config.train.steps=100000",
        "--config.train.eval_every=0",
        processes=2,
    )
    workdir = folder / "runs" / "tiny"
    wait_for(lambda: step_of(workdir) >= 3, watch=both)
    assert cli.main(["profile", str(workdir), "--steps", "2", "--all"]) == 0
    told = capsys.readouterr().out
    names = re.findall(r"traces/(steps-\d{6}-\d{6}-process-\d)\n", told)
    assert [name[-1] for name in sorted(names, key=lambda name: name[-1])] == [
        "0",
        "1",
    ] and told.count("%  backward") == 2
    both[1].send_signal(signal.SIGTERM)
    outputs = [process.communicate(timeout=120)[0] for process in both]
    assert [process.returncode for process in both] == [75, 75], outputs
    text = page_of(workdir, folder)
    assert all(f"<h3>{name}</h3>" in text for name in names) and "of 2 processes" in text
