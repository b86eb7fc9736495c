"""One HTML file of a run, or of several: curves, time, pictures, generations, trouble, configs.

Nothing is fetched when it is opened: the plotting library is in it, compressed. Curves are thinned
so that the whole stays small, and keep their peaks. All texts of a run are escaped, or reach the
script as JSON.
"""

import base64
import gzip
import importlib.resources
import json
import math
import re
import shlex
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from jaxtrain import config as config_lib
from jaxtrain.telemetry import goodput
from jaxtrain.telemetry.report import class_scores, compare, curves, media, timeline
from jaxtrain.telemetry.report import records as records_lib
from jaxtrain.telemetry.report import run as run_lib
from jaxtrain.telemetry.report import trace as trace_lib
from jaxtrain.telemetry.report.markup import duration, esc, identifier, number, short, table, title
from jaxtrain.telemetry.report.run import Run, RunError
from loaders.io import files
from loaders.io.checks import flatten

MAX_RUNS = 64
MAX_TRACES = 4
WARNINGS = 40  # lines of the logs that are shown
MAX_LOGS = 64  # processes whose logs are read
TAIL = 8 << 20  # [bytes] of all logs together
LOG = re.compile(r"process-(\d{1,7})\.log")
WARNING = re.compile(r"\S+ \S+ (?:WARNING|ERROR) (.+)")


def library() -> str:
    """Return the plotting library's code, compressed, as base64. Raises RunError: missing."""
    try:
        code = (importlib.resources.files("plotly") / "package_data" / "plotly.min.js").read_bytes()
    except (ModuleNotFoundError, FileNotFoundError) as error:
        raise RunError(
            "the page needs the package plotly, which is not installed: pip install"
            " 'jaxtrain[report]'; or make the page on a machine that has it, from a copy of the"
            " run's config.json, metrics.jsonl, goodput and pictures"
        ) from error
    return base64.b64encode(gzip.compress(code, 9, mtime=0)).decode()


class Page:
    """A page of ``runs``. Raises RunError or FileError for files that cannot be read."""

    def __init__(self, runs: Sequence[Run], metric: str = ""):
        if len(runs) > MAX_RUNS:
            raise RunError(
                f"{len(runs)} runs are more than a page can hold; name at most {MAX_RUNS}"
            )
        self.runs = runs
        self.records = [records_lib.read(run.file("metrics.jsonl")) for run in runs]
        self.scores = [
            r.score(metric, of.splits.get("test", {}))
            for r, of in zip(runs, self.records, strict=True)
        ]
        self.charts: list[dict[str, Any]] = []
        self.notes = [
            f"{run.name}: {r.odd} lines of metrics.jsonl are no records, and are left out"
            for run, r in zip(runs, self.records, strict=True)
            if r.odd
        ]

    def html(self, *, plotly: str, every: float = 0.0, version: int = 0) -> str:
        """Return the whole page.

        ``plotly``: of `library`. ``every``: seconds after which the page asks its server whether
        there is another ``version``; 0 = never, it has none.
        """
        sections = [(name, text) for name, text in self._sections() if text]
        more = f" and {len(self.runs) - 4} more" if len(self.runs) > 4 else ""
        name = " · ".join(run.name for run in self.runs[:4]) + more
        data = json.dumps(
            {"runs": [run.name for run in self.runs], "charts": self.charts}, allow_nan=False
        )
        notes = "".join(f'<p class="notice">{esc(note)}</p>' for note in self.notes)
        tools = _tools(several=len(self.runs) > 1) if self.charts else ""
        live = f' data-every="{every:g}" data-version="{version}"' if every else ""
        plotly = plotly if self.charts else ""
        return document(
            name,
            self._header(name),
            sections,
            data=data,
            plotly=plotly,
            above=notes + tools,
            live=live,
        )

    def _sections(self) -> Iterator[tuple[str, str]]:
        several = len(self.runs) > 1
        if several:
            yield "Runs compared", compare.section(self.runs, self.scores, self.charts)
        drawn = dict(curves.section(self.runs, self.records, self.charts))
        for group in curves.GROUPS[:2]:
            yield group, drawn.pop(group, "")
        yield "Classes", "" if several else class_scores.section(self.runs[0])
        yield "Pictures", media.pictures(self.runs, self.notes)
        yield (
            "Generations",
            "".join(
                media.generations(run, i, of=len(self.runs)) for i, run in enumerate(self.runs)
            ),
        )
        yield (
            "Where the time went",
            "".join(timeline.section(run, several=several) for run in self.runs),
        )
        yield "Traced steps", "".join(self._traces(run) for run in self.runs)
        yield (
            "Spikes, skipped steps and warnings",
            "".join(self._trouble(i) for i in range(len(self.runs))),
        )
        yield from drawn.items()
        yield "Configuration", self._config(self.runs[0]) if len(self.runs) == 1 else ""

    def _header(self, name: str) -> str:
        if len(self.runs) > 1:
            return f"<h1>{esc(name)}</h1><p class='soft'>{len(self.runs)} runs</p>"
        run, score = self.runs[0], self.scores[0]
        workload = str(run.setting("workload", "")).rpartition(".")[2]
        data = run.setting("data.train") or run.setting("data.path") or run.setting("loader", "")
        about = [f"{workload} on {data}"] if workload else []
        if source := run.command[0]:
            about.append(f"config {source}")
        if run.starts:
            first = run.starts[0]
            about.append(
                f"started {time.strftime('%Y-%m-%d %H:%M', time.localtime(first.began))} on"
                f" {first.host}"
            )
            about.append(
                f"{len(run.processes)} processes" if len(run.processes) > 1 else "1 process"
            )
            if commit := run.starts[-1].facts.get("commit"):
                about.append(
                    f"commit {commit}".replace("-dirty", ", with changes that were not committed")
                )
        cards = [(f"{run.step:,} / {run.steps:,}" if run.steps else f"{run.step:,}", "steps")]
        if score:
            cards.append((number(score.last), f"{score.name}, last evaluation"))
            cards.append((number(score.best), f"best, at step {score.step:,}"))
        if "loss" in run.latest:
            cards.append(
                (
                    number(run_lib.number(run.latest["loss"])),
                    f"training loss at step {run.latest['step']:,}",
                )
            )
        if run.seconds:
            wall = sum(goodput.totals(run.starts).values())
            restarts = str(goodput.restarts(run.starts))
            share = f"{goodput.goodput(run.seconds):.1%}"
            cards += [(duration(wall), "wall time"), (share, "goodput"), (restarts, "restarts")]
        cores = run_lib.number(run.latest.get("cores_missing"))
        if cores >= 1:
            asked, given = (
                number(run_lib.number(run.latest.get(f"rows_{name}_per_second")))
                for name in ("asked", "given")
            )
            cards.append(
                (
                    f"{given} of {asked}",
                    f"rows/s from the loader: {number(cores)} more cores a process",
                )
            )
        for rate, text in (
            ("examples_per_second", "examples/s"),
            ("mfu", "MFU"),
            ("data_wait_share", "waiting for data"),
        ):
            if math.isfinite(value := run_lib.number(run.latest.get(rate))):
                cards.append(
                    (number(value) if rate == "examples_per_second" else f"{value:.1%}", text)
                )
        each = "".join(
            f'<div class="card"><b>{esc(value)}</b><span>{esc(text)}</span></div>'
            for value, text in cards
        )
        state = f'<span class="state {run.state}">{run.state}</span>'
        return (
            f"<h1>{esc(name)}</h1><p class='soft'>{state} · {esc(' · '.join(about))}</p><div"
            f" class='cards'>{each}</div>"
        )

    def _traces(self, run: Run) -> str:
        parts = []
        for folder in run.traces[-MAX_TRACES:]:
            try:
                trace = trace_lib.of_folder(folder)
            except files.FileError as error:
                self.notes.append(str(error))
                continue
            if trace:
                parts.append(
                    timeline.traced(
                        f"{run.name}: {folder.name}" if len(self.runs) > 1 else folder.name, trace
                    )
                )
        return "".join(parts)

    def _trouble(self, i: int) -> str:
        run, train = self.runs[i], self.records[i].splits.get("train", {})
        skipped = train.get("skipped")
        steps = (
            [int(s) for s in train["step"][np.nan_to_num(skipped) > 0]]
            if skipped is not None
            else []
        )
        shown = ", ".join(map(str, steps[:60])) + (" …" if len(steps) > 60 else "")
        text = f"<p>{len(steps)} steps were skipped: {shown}.</p>" if steps else ""
        text += _spikes(run, train, steps)
        if lines := _warnings(run):
            columns = [
                ("times", "n"),
                ("process", "n"),
                ("messages of the logs, the latest first", "text code"),
            ]
            few = (", ".join(map(str, of[:4])) + " …" * (len(of) > 4) for _, _, of in lines)
            text += table(
                columns,
                ((f"{n}×", of, esc(line)) for (line, n, _), of in zip(lines, few, strict=True)),
            )
        return title(run.name, len(self.runs) > 1) + text if text else ""

    def _config(self, run: Run) -> str:
        if not run.config:
            return ""
        given = flatten(run.config)
        usual = flatten(json.loads(config_lib.to_json(config_lib.Config())))
        sections = {name.partition(".")[0] for name in usual if "." in name}
        typed = run.command[1]
        changed = {
            name: value
            for name, value in given.items()
            if name in typed
            or (name.partition(".")[0] in sections and (name not in usual or usual[name] != value))
        }
        rows = (
            (
                esc(name),
                esc(short(value)),
                esc(short(usual.get(name))),
                "command" if name in typed else "",
            )
            for name, value in changed.items()
        )
        columns = [
            ("field", "code"),
            ("here", "code"),
            ("default", "code soft"),
            ("given by" if typed else "", ""),
        ]
        versions = run.starts[-1].facts.get("versions", {}) if run.starts else {}
        about = (
            ", ".join(f"{k} {v}" for k, v in versions.items()) if isinstance(versions, dict) else ""
        )
        whole = json.dumps(run.config, indent=1)
        return (
            (f"<p class='soft'>{esc(about)}</p>" if about else "")
            + (table(columns, rows) if changed else "")
            + f"<details><summary>all fields</summary><pre>{esc(whole[:60_000])}</pre></details>"
        )


def _spikes(run: Run, train: Mapping[str, np.ndarray], skipped: Sequence[int]) -> str:
    rows = [
        (step, number(loss), number(usual), "loss")
        for step, loss, usual in records_lib.spikes(train)
    ]
    known = {row[0] for row in rows}
    rows += [(step, "", "", "skipped") for step in skipped[:20] if step not in known]
    if not rows:
        return ""
    command = f"jaxtrain replay {shlex.quote(str(run.path))} --step"
    words = {"loss": "loss far above usual", "skipped": "skipped"}
    columns = [
        ("step", "n"),
        ("", ""),
        ("loss", "n"),
        ("usual", "n"),
        ("for a page about it", "code"),
    ]
    return table(
        columns,
        (
            (f"{step:,}", words[kind], *shown, esc(f"{command} {step}"))
            for step, *shown, kind in rows
        ),
    )


LIVE = '<p class="soft" id="live" aria-live="off">live</p>'
# Were a text of a run ever taken for markup, it could still load nothing.
POLICY = (
    "default-src 'none'; img-src data: blob:; media-src data:; style-src 'unsafe-inline';"
    " script-src 'unsafe-inline'"
)


def document(
    name: str,
    header: str,
    sections: Sequence[tuple[str, str]],
    *,
    data: str = "{}",
    plotly: str = "",
    above: str = "",
    live: str = "",
) -> str:
    """Put a page together from its header and its sections.

    ``data``: JSON of its charts, which need the library ``plotly``. ``above``: markup before the
    sections. ``live``: attributes by which its script asks its server for another version; "" = it
    has none.
    """
    links = "".join(f'<a href="#{identifier(name)}">{esc(name)}</a>' for name, _ in sections)
    body = "".join(
        f'<section aria-labelledby="{identifier(n)}"><h2'
        f' id="{identifier(n)}">{esc(n)}</h2>{text}</section>'
        for n, text in sections
    )
    own = importlib.resources.files("jaxtrain.telemetry.report") / "assets"
    css, js = ((own / name).read_text() for name in ("report.css", "report.js"))
    policy = f"{POLICY}; connect-src 'self'" if live else POLICY
    curves = " Curves by plotly.js, MIT licence." if plotly else ""
    return (
        f'<!doctype html><html lang="en"{live}><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}"><title>{esc(name)}</title>'
        f"<style>{css}</style></head><body><header>{header}"
        f"{LIVE if live else ''}<nav"
        f' aria-label="Sections">{links}</nav></header><main>{above}{body}</main>'
        f"<footer>Made by jaxtrain on {time.strftime('%Y-%m-%d %H:%M:%S %Z')}.{curves}</footer>"
        f'<script type="application/json" id="data">{data.replace("<", chr(92) + "u003c")}</script>'
        f'<script type="application/octet-stream" id="library">{plotly}</script>'
        f"<script>{js}</script></body></html>"
    )


def _tools(*, several: bool) -> str:
    key = (
        "lines: train, dotted: test"
        if several
        else '<i class="swatch run0"></i>train <i class="swatch run1"></i>test'
    )
    return (
        '<div class="tools"><label><input type="checkbox" id="log">'
        ' logarithmic</label><label>smoothing <input type="range" id="smooth" min="0" max="0.95"'
        ' step="0.05" value="0.3"> <span id="smooth-value" class="soft">30'
        f' %</span></label><span>{key}</span><span class="soft">drag to zoom, double-click for all;'
        " on a chart with the focus: arrows, + − 0</span></div>"
    )


def _warnings(run: Run) -> list[tuple[str, int, list[int]]]:
    """Warnings and errors, each once, the latest first: newest text, times, processes."""
    found: dict[str, tuple[str, int, set[int]]] = {}
    logs = {
        int(m[1]): path
        for path in (run.path / "logs").glob("process-*.log")
        if (m := LOG.fullmatch(path.name))
    }
    for process in sorted(logs)[:MAX_LOGS]:
        text = run.tail(f"logs/{logs[process].name}", TAIL // min(len(logs), MAX_LOGS))
        for line in files.lines(text.decode(errors="replace")):
            if warning := WARNING.match(line):
                kind = re.sub(r"\d+(\.\d+)?", "#", warning[1])
                newest, count, of = found.get(kind, ("", 0, set()))
                found[kind] = max(newest, line[:400]), count + 1, of | {process}
    return sorted(((line, count, sorted(of)) for line, count, of in found.values()), reverse=True)[
        :WARNINGS
    ]
