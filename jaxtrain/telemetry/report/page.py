"""One HTML file of a run, or of several: curves, time, pictures, generations, trouble, configs.

Nothing is fetched when it is opened: the plotting library is in it, compressed. Curves are thinned
so that the whole stays small, and keep their peaks. All texts of a run are escaped, or reach the
script as JSON.
"""

import base64
import collections
import gzip
import importlib.resources
import json
import math
import re
import shlex
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from jaxtrain import config as config_lib
from jaxtrain.telemetry import console, goodput
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
        self.scores = []
        self.notes = []
        for run, records in zip(runs, self.records, strict=True):
            self.scores.append(run.score(metric, records.splits.get("test", {})))
            if records.odd:
                self.notes.append(
                    f"{run.name}: {records.odd} lines of metrics.jsonl are no records, and are left"
                    " out"
                )
        self.charts: list[dict[str, Any]] = []

    def html(self, *, plotly: str, every: float = 0.0, version: int = 0) -> str:
        """Return the whole page.

        ``plotly``: of `library`. ``every``: seconds after which the page asks its server whether
        there is another ``version``; 0 = never, it has none.
        """
        sections = [(name, text) for name, text in self._sections() if text]
        names = [run.name for run in self.runs]
        title = " · ".join(names[:4])
        if len(names) > 4:
            title += f" and {len(names) - 4} more"
        data = json.dumps({"runs": names, "charts": self.charts}, allow_nan=False)
        above = "".join(f'<p class="notice">{esc(note)}</p>' for note in self.notes)
        if self.charts:
            above += _tools(several=len(names) > 1)
        return document(
            title,
            self._header(title),
            sections,
            data=data,
            plotly=plotly if self.charts else "",
            above=above,
            live=f' data-every="{every:g}" data-version="{version}"' if every else "",
        )

    def _sections(self) -> Iterator[tuple[str, str]]:
        n_runs = len(self.runs)
        several = n_runs > 1
        if several:
            yield "Runs compared", compare.section(self.runs, self.scores, self.charts)
        groups = dict(curves.section(self.runs, self.records, self.charts))
        for group in curves.GROUPS[:2]:
            yield group, groups.pop(group, "")
        if not several:
            yield "Classes", class_scores.section(self.runs[0])
        yield "Pictures", media.pictures(self.runs, self.notes)
        generations = [media.generations(run, i, of=n_runs) for i, run in enumerate(self.runs)]
        yield "Generations", "".join(generations)
        times = [timeline.section(run, several=several) for run in self.runs]
        yield "Where the time went", "".join(times)
        yield "Traced steps", "".join(map(self._traces, self.runs))
        trouble = "".join(map(self._trouble, range(n_runs)))
        yield "Spikes, skipped steps and warnings", trouble
        yield from groups.items()
        if not several:
            yield "Configuration", _configuration(self.runs[0])

    def _header(self, name: str) -> str:
        if len(self.runs) > 1:
            return f"<h1>{esc(name)}</h1><p class='soft'>{len(self.runs)} runs</p>"
        run = self.runs[0]
        cards = ""
        for value, text in [*_progress(run, self.scores[0]), *_speed(run)]:
            cards += f'<div class="card"><b>{esc(value)}</b><span>{esc(text)}</span></div>'
        state = f'<span class="state {run.state}">{run.state}</span>'
        return (
            f"<h1>{esc(name)}</h1><p class='soft'>{state} · {esc(' · '.join(_origin(run)))}</p><div"
            f" class='cards'>{cards}</div>"
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
                several = len(self.runs) > 1
                name = f"{run.name}: {folder.name}" if several else folder.name
                parts.append(timeline.traced(name, trace))
        return "".join(parts)

    def _trouble(self, i: int) -> str:
        run = self.runs[i]
        train = self.records[i].splits.get("train", {})
        steps: list[int] = []
        if "skipped" in train:
            is_skipped = np.nan_to_num(train["skipped"]) > 0
            steps = [int(step) for step in train["step"][is_skipped]]
        text = ""
        if steps:
            listed = ", ".join(map(str, steps[:60]))
            ending = " …" if len(steps) > 60 else ""
            text = f"<p>{len(steps)} steps were skipped: {listed}{ending}.</p>"
        text += _spikes(run, train, steps)
        rows = []
        for line, times, processes in _warnings(run):
            numbers = ", ".join(map(str, processes[:4]))
            if len(processes) > 4:
                numbers += " …"
            rows.append((f"{times}×", numbers, esc(line)))
        if rows:
            messages = "messages of the logs, the latest first"
            text += table([("times", "n"), ("process", "n"), (messages, "text code")], rows)
        return title(run.name, len(self.runs) > 1) + text if text else ""


def _origin(run: Run) -> list[str]:
    """Describe what a run trains on what, and when and where it was started."""
    parts = []
    workload = str(run.setting("workload", "")).rpartition(".")[2]
    if workload:
        data = run.setting("data.train") or run.setting("data.path") or run.setting("loader", "")
        parts.append(f"{workload} on {data}")
    source, _ = run.command
    if source:
        parts.append(f"config {source}")
    if run.starts:
        first = run.starts[0]
        began = time.strftime("%Y-%m-%d %H:%M", time.localtime(first.began))
        parts.append(f"started {began} on {first.host}")
        n_processes = len(run.processes)
        parts.append(f"{n_processes} processes" if n_processes > 1 else "1 process")
        commit = run.starts[-1].facts.get("commit")
        if commit:
            text = f"commit {commit}"
            parts.append(text.replace("-dirty", ", with changes that were not committed"))
    return parts


def _progress(run: Run, score: run_lib.Score | None) -> Iterator[tuple[str, str]]:
    """Yield (value, meaning) of the numbers that say how far a run is, and how good."""
    step = f"{run.step:,}"
    yield f"{step} / {run.steps:,}" if run.steps else step, "steps"
    if score:
        yield number(score.last), f"{score.name}, last evaluation"
        yield number(score.best), f"best, at step {score.step:,}"
    if "loss" in run.latest:
        loss = number(run_lib.number(run.latest["loss"]))
        yield loss, f"training loss at step {run.latest['step']:,}"
    if run.seconds:
        yield duration(sum(goodput.totals(run.starts).values())), "wall time"
        yield f"{goodput.goodput(run.seconds):.1%}", "goodput"
        yield str(goodput.restarts(run.starts)), "restarts"


def _speed(run: Run) -> Iterator[tuple[str, str]]:
    """Yield (value, meaning) of the newest record's rates."""
    cores = run_lib.number(run.latest.get("cores_missing"))
    if cores >= 1:
        asked = number(run_lib.number(run.latest.get("rows_asked_per_second")))
        supplied = number(run_lib.number(run.latest.get("rows_given_per_second")))
        text = f"rows/s from the loader: {number(cores)} more cores a process"
        yield f"{supplied} of {asked}", text
    examples = run_lib.number(run.latest.get("examples_per_second"))
    if math.isfinite(examples):
        yield number(examples), "examples/s"
    mfu = run_lib.number(run.latest.get("mfu"))
    if math.isfinite(mfu):
        yield f"{mfu:.1%}", f"MFU{console.above_peak(mfu)}"
    waiting = run_lib.number(run.latest.get("data_wait_share"))
    if math.isfinite(waiting):
        yield f"{waiting:.1%}", "waiting for data"


def _configuration(run: Run) -> str:
    """Return the fields of a config that are no defaults, and all of it folded away."""
    if not run.config:
        return ""
    _, overrides = run.command
    rows = []
    for name, value, default in _changed(run.config, overrides):
        origin = "command" if name in overrides else ""
        rows.append((esc(name), esc(short(value)), esc(short(default)), origin))
    columns = [("field", "code"), ("here", "code"), ("default", "code soft")]
    columns.append(("given by" if overrides else "", ""))
    html = ""
    versions = run.starts[-1].facts.get("versions", {}) if run.starts else {}
    if versions and isinstance(versions, dict):
        listed = ", ".join(f"{name} {version}" for name, version in versions.items())
        html += f"<p class='soft'>{esc(listed)}</p>"
    if rows:
        html += table(columns, rows)
    text = json.dumps(run.config, indent=1)
    return html + f"<details><summary>all fields</summary><pre>{esc(text[:60_000])}</pre></details>"


def _changed(
    config: Mapping[str, Any], overrides: Collection[str]
) -> Iterator[tuple[str, Any, Any]]:
    """Yield (field, value, default) of fields that a command set, or that are no defaults."""
    defaults = flatten(json.loads(config_lib.to_json(config_lib.Config())))
    sections = {name.partition(".")[0] for name in defaults if "." in name}
    for name, value in flatten(config).items():
        is_default = name in defaults and defaults[name] == value
        is_of_every_run = name.partition(".")[0] in sections
        if name in overrides or (is_of_every_run and not is_default):
            yield name, value, defaults.get(name)


def _spikes(run: Run, train: Mapping[str, np.ndarray], skipped: Sequence[int]) -> str:
    command = f"jaxtrain replay {shlex.quote(str(run.path))} --step"
    rows = []
    with_spikes = set()
    for step, loss, usual in records_lib.spikes(train):
        with_spikes.add(step)
        numbers = (number(loss), number(usual))
        rows.append((f"{step:,}", "loss far above usual", *numbers, esc(f"{command} {step}")))
    for step in skipped[:20]:
        if step not in with_spikes:
            rows.append((f"{step:,}", "skipped", "", "", esc(f"{command} {step}")))
    columns = [
        ("step", "n"),
        ("", ""),
        ("loss", "n"),
        ("usual", "n"),
        ("for a page about it", "code"),
    ]
    return table(columns, rows) if rows else ""


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
    links = body = ""
    for section, text in sections:
        anchor = identifier(section)
        links += f'<a href="#{anchor}">{esc(section)}</a>'
        heading = f'<h2 id="{anchor}">{esc(section)}</h2>'
        body += f'<section aria-labelledby="{anchor}">{heading}{text}</section>'
    assets = importlib.resources.files("jaxtrain.telemetry.report") / "assets"
    css = (assets / "report.css").read_text()
    js = (assets / "report.js").read_text()
    policy = f"{POLICY}; connect-src 'self'" if live else POLICY
    credit = " Curves by plotly.js, MIT licence." if plotly else ""
    made = time.strftime("%Y-%m-%d %H:%M:%S %Z")
    data = data.replace("<", "\\u003c")
    notice = LIVE if live else ""
    return (
        f'<!doctype html><html lang="en"{live}><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}"><title>{esc(name)}</title>'
        f"<style>{css}</style></head><body><header>{header}"
        f'{notice}<nav aria-label="Sections">{links}</nav></header><main>{above}{body}</main>'
        f"<footer>Made by jaxtrain on {made}.{credit}</footer>"
        f'<script type="application/json" id="data">{data}</script>'
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
    logs = {}
    for path in (run.path / "logs").glob("process-*.log"):
        log = LOG.fullmatch(path.name)
        if log:
            logs[int(log[1])] = path
    n_bytes = TAIL // max(min(len(logs), MAX_LOGS), 1)
    newest: dict[str, str] = {}  # text without numbers -> its newest line
    times: collections.Counter[str] = collections.Counter()
    processes: dict[str, set[int]] = collections.defaultdict(set)
    for process in sorted(logs)[:MAX_LOGS]:
        text = run.tail(f"logs/{logs[process].name}", n_bytes)
        for line in files.lines(text.decode(errors="replace")):
            warning = WARNING.match(line)
            if warning:
                kind = re.sub(r"\d+(\.\d+)?", "#", warning[1])
                newest[kind] = max(newest.get(kind, ""), line[:400])
                times[kind] += 1
                processes[kind].add(process)
    warnings = [(line, times[kind], sorted(processes[kind])) for kind, line in newest.items()]
    return sorted(warnings, reverse=True)[:WARNINGS]
