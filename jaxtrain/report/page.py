"""One HTML file of a run, or of several: curves, time, pictures, samples, trouble, configs.

Nothing is fetched when it is opened: the plotting library is in it, compressed. Curves are thinned so that the whole stays
small, and keep their peaks. All texts of a run are escaped, or reach the script as JSON.
"""

import base64
import gzip
import html
import importlib.resources
import json
import math
import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from jaxtrain import config as config_lib
from jaxtrain import glossary, goodput
from jaxtrain.report import records as records_lib
from jaxtrain.report import run as run_lib
from jaxtrain.report import timeline
from jaxtrain.report import trace as trace_lib
from jaxtrain.report.run import Run, RunError
from loaders import files

POINTS = 110_000  # of all curves together: 1.6 MB
MOST_POINTS = 2000  # of a curve
PICTURES = 1_100_000  # [bytes] of all pictures together
MOST_RUNS = 64
MOST_TRACES = 4
WARNINGS = 40  # lines of the logs that are shown
RATES = ("steps_per_second", "samples_per_second", "mfu", "mfu_full_attention", "data_wait_share")
HIDDEN = ("step", "eta_seconds", "failures")
GROUPS = ("Results", "Losses and metrics", "Speed", "Gradients and parameters", "Saves", "Order of the recordings")


def esc(text: object) -> str:
    """Any text, for HTML."""
    return html.escape("".join(c if c.isprintable() or c in "\n\t" else "�" for c in str(text)))


def number(value: float | None) -> str:
    """A number as a page shows it."""
    return "–" if value is None or not math.isfinite(value) else f"{value:.4g}"


def duration(seconds: float) -> str:
    """For example 2 h 05 min."""
    if not math.isfinite(seconds):
        return "–"
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, s = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02} min" if hours else f"{minutes} min {s:02} s"


def library() -> str:
    """The plotting library's code, compressed, as base64. Raises RunError where it is not installed."""
    try:
        code = (importlib.resources.files("plotly") / "package_data" / "plotly.min.js").read_bytes()
    except (ModuleNotFoundError, FileNotFoundError) as error:
        raise RunError(
            "the page needs the package plotly, which is not installed: pip install 'jaxtrain[report]'; or make the page on a "
            "machine that has it, from a copy of the run's config.json, metrics.jsonl, goodput and pictures"
        ) from error
    return base64.b64encode(gzip.compress(code, 9, mtime=0)).decode()


class Page:
    """A page of ``runs``. Raises RunError or FileError for files that cannot be read."""

    def __init__(self, runs: Sequence[Run], metric: str = ""):
        if len(runs) > MOST_RUNS:
            raise RunError(f"{len(runs)} runs are more than a page can hold; name at most {MOST_RUNS}")
        self.runs = runs
        self.records = [records_lib.read(run.file("metrics.jsonl")) for run in runs]
        self.scores = [r.score(metric, of.splits.get("test", {})) for r, of in zip(runs, self.records, strict=True)]
        self.charts: list[dict[str, Any]] = []
        self.notes = [f"{run.name}: {r.odd} lines of metrics.jsonl are no records, and are left out"
                      for run, r in zip(runs, self.records, strict=True) if r.odd]  # fmt: skip

    def html(self, *, plotly: str, every: float = 0.0, version: int = 0) -> str:
        """The whole page.

        Args:
          plotly: of `library`.
          every: seconds after which the page asks its server whether there is another ``version``; 0 = never, it has none.
        """
        sections = [(name, text) for name, text in self._sections() if text]
        links = "".join(f'<a href="#{_id(name)}">{esc(name)}</a>' for name, _ in sections)
        title = " · ".join(run.name for run in self.runs[:4]) + (
            f" and {len(self.runs) - 4} more" if len(self.runs) > 4 else ""
        )
        body = "".join(
            f'<section aria-labelledby="{_id(n)}"><h2 id="{_id(n)}">{esc(n)}</h2>{text}</section>' for n, text in sections
        )
        data = json.dumps({"runs": [run.name for run in self.runs], "charts": self.charts}, allow_nan=False)
        own = importlib.resources.files("jaxtrain.report") / "assets"
        css, js = ((own / name).read_text() for name in ("report.css", "report.js"))
        live = f' data-every="{every:g}" data-version="{version}"' if every else ""
        policy = f"{POLICY}; connect-src 'self'" if every else POLICY
        notes = "".join(f'<p class="notice">{esc(note)}</p>' for note in self.notes)
        return (
            f'<!doctype html><html lang="en"{live}><head><meta charset="utf-8">'
            '<meta name="viewport" content="width=device-width, initial-scale=1">'
            f'<meta http-equiv="Content-Security-Policy" content="{policy}"><title>{esc(title)}</title>'
            f"<style>{css}</style></head><body><header>{self._header(title)}"
            f'{LIVE if every else ""}<nav aria-label="Sections">{links}</nav></header><main>'
            f"{notes}{_tools(several=len(self.runs) > 1) if self.charts else ''}{body}</main>"
            f"<footer>Made by jaxtrain on {time.strftime('%Y-%m-%d %H:%M:%S %Z')}. Curves by plotly.js, MIT licence.</footer>"
            f'<script type="application/json" id="data">{data.replace("<", chr(92) + "u003c")}</script>'
            f'<script type="application/octet-stream" id="library">{plotly if self.charts else ""}</script>'
            f"<script>{js}</script></body></html>"
        )

    def _sections(self) -> Iterator[tuple[str, str]]:
        if len(self.runs) > 1:
            yield "Runs compared", self._compared()
        curves = dict(self._curves())
        for group in GROUPS[:2]:
            yield group, curves.pop(group, "")
        yield "Pictures", self._pictures()
        yield "Samples", "".join(self._samples(i) for i in range(len(self.runs)))
        yield "Where the time went", "".join(timeline.section(run, several=len(self.runs) > 1) for run in self.runs)
        yield "Traced steps", "".join(self._traces(run) for run in self.runs)
        yield "Skipped steps and warnings", "".join(self._trouble(i) for i in range(len(self.runs)))
        yield from curves.items()
        yield "Configuration", self._config(self.runs[0]) if len(self.runs) == 1 else ""

    def _header(self, title: str) -> str:
        if len(self.runs) > 1:
            return f"<h1>{esc(title)}</h1><p class='soft'>{len(self.runs)} runs</p>"
        [run] = self.runs
        score, share = self.scores[0], goodput.goodput(run.seconds)
        workload = str(run.setting("workload", "")).rpartition(".")[2]
        data = run.setting("data.train") or run.setting("data.path") or run.setting("loader", "")
        about = [f"{workload} on {data}"] if workload else []
        if run.starts:
            first = run.starts[0]
            about.append(f"begun {time.strftime('%Y-%m-%d %H:%M', time.localtime(first.began))} on {first.host}")
            about.append(f"{len(run.processes)} processes" if len(run.processes) > 1 else "1 process")
            if commit := run.starts[-1].facts.get("commit"):
                about.append(f"commit {commit}".replace("-dirty", ", with changes that were not committed"))
        cards = [(f"{run.step:,} / {run.steps:,}" if run.steps else f"{run.step:,}", "steps")]
        if score:
            cards += [
                (number(score.last), f"{score.name}, last evaluation"),
                (number(score.best), f"best, at step {score.step:,}"),
            ]
        if "loss" in run.latest:
            cards.append((number(run_lib.number(run.latest["loss"])), f"training loss at step {run.latest['step']:,}"))
        if run.seconds:
            wall = sum(goodput.totals(run.starts).values())
            cards += [(duration(wall), "wall time"), (f"{share:.1%}", "goodput"), (str(len(run.starts) - 1), "restarts")]
        for name, text in (("samples_per_second", "samples/s"), ("mfu", "MFU"), ("data_wait_share", "waiting for data")):
            value = run_lib.number(run.latest.get(name))
            if math.isfinite(value):
                cards.append((number(value) if name == "samples_per_second" else f"{value:.1%}", text))
        each = "".join(f'<div class="card"><b>{esc(value)}</b><span>{esc(text)}</span></div>' for value, text in cards)
        state = f'<span class="state {run.state}">{run.state}</span>'
        return f"<h1>{esc(title)}</h1><p class='soft'>{state} · {esc(' · '.join(about))}</p><div class='cards'>{each}</div>"

    def _curves(self) -> Iterator[tuple[str, str]]:
        found: dict[tuple[str, str], list[tuple[int, str, np.ndarray, np.ndarray]]] = {}
        for i, records in enumerate(self.records):
            for split, columns in records.splits.items():
                for name, values in columns.items():
                    if name in HIDDEN or (split == "data" and name.endswith("_expected")):
                        continue
                    if np.isfinite(values).any() and (name != "skipped" or np.nansum(values)):
                        curves = found.setdefault((name, "" if split in ("train", "test") else split), [])
                        curves.append((i, split, columns["step"], values))
                        if f"{name}_expected" in columns:
                            curves.append((i, "expected", columns["step"], columns[f"{name}_expected"]))
        for i, run in enumerate(self.runs):
            if rates := _schedule(run):
                found.setdefault(("learning_rate", ""), []).append((i, "schedule", *rates))
        most = max(min(MOST_POINTS, POINTS // max(sum(map(len, found.values())), 1)), 24)
        groups: dict[str, list[tuple[str, str]]] = {}
        tested = {place for place, curves in found.items() if any(split == "test" for _, split, _, _ in curves)}
        for place in sorted(found, key=lambda place: (place[0] != "loss", place[0] != "learning_rate", place[0])):
            name, split = place
            group = _group(name, split, place in tested)
            drawn: list[dict[str, Any]] = []
            for i, of, step, values in sorted(found[place], key=lambda c: (c[0], c[1] != "train")):
                x, y = records_lib.thinned(step, values, most)
                drawn.append({"run": i, "split": of, "x": [int(s) for s in x], "y": [float(f"{v:.5g}") for v in y]})
            restarts = sorted({s.first for s in self.runs[0].starts if s.first}) if len(self.runs) == 1 else []
            title = f"{name} ({split})" if split not in ("", "data", "save") else name
            self.charts.append({"title": title, "curves": drawn, "restarts": restarts})
            groups.setdefault(group, []).append((self._figure(title, name, split, drawn), name))
        for group in GROUPS:
            if figures := groups.get(group):
                plain = [text for text, name in figures if not re.match(r"(grad|update|param)_norm_(?!before$|after$)", name)]
                inner = [text for text, name in figures if text not in plain]
                more = (
                    f"<details><summary>{len(inner)} norms of parts of the model</summary>{_grid(inner)}</details>"
                    if inner
                    else ""
                )
                yield group, (_grid(plain) if plain else "") + more

    def _figure(self, title: str, name: str, split: str, curves: Sequence[Mapping[str, Any]]) -> str:
        workload = str(self.runs[0].setting("workload", ""))
        meaning = glossary.meaning(name, workload=workload, split=split or "train")
        meaning = "of the schedule, as optim.lr and its warm-up and decay give it" if name == "learning_rate" else meaning
        told = [
            f"{self.runs[c['run']].name + ' ' if len(self.runs) > 1 else ''}{c['split']} from {number(c['y'][0])} "
            f"to {number(c['y'][-1])} at step {c['x'][-1]}, between {number(min(c['y']))} and {number(max(c['y']))}"
            for c in curves[:8]
        ]
        label = f"{title} by step: {'; '.join(told)}"
        last = ", ".join(f"{c['split']} {number(c['y'][-1])}" for c in curves) if len(self.runs) == 1 else ""
        return (
            f'<figure><h3>{esc(title)} <span class="soft">{esc(last)}</span></h3><p class="meaning">{esc(meaning)}</p>'
            f'<div class="chart" tabindex="0" role="img" data-chart="{len(self.charts) - 1}" aria-label="{esc(label)}"></div>'
            "</figure>"
        )

    def _compared(self) -> str:
        differ = run_lib.differences({str(i): run.config for i, run in enumerate(self.runs)})
        scores = self.scores
        known = [score for score in scores if score and score.name == next((s.name for s in scores if s), "")]
        order = list(range(len(self.runs)))
        if known:
            order.sort(key=lambda i: -known[0].sign * scores[i].best if scores[i] else math.inf)  # type: ignore[union-attr]
        fields = list(differ)[:40]
        head = "".join(f"<th>{esc(field)}</th>" for field in fields)
        name = esc(known[0].name) if known else "score"
        rows = "".join(
            f'<tr><td><span class="swatch run{i % 8}"></span>{esc(self.runs[i].name)}</td><td>{self.runs[i].state}</td>'
            f'<td class="n">{self.runs[i].step:,}</td><td class="n">{number(s.best) if (s := scores[i]) else "–"}</td>'
            f'<td class="n">{number(s.last) if s else "–"}</td>'
            + "".join(f'<td class="code">{esc(_short(differ[field][str(i)]))}</td>' for field in fields)
            + "</tr>"
            for i in order
        )
        table = (
            f'<div class="scroll"><table><tr><th>run</th><th>state</th><th class="n">step</th><th class="n">best {name}</th>'
            f'<th class="n">last</th>{head}</tr>{rows}</table></div>'
        )
        more = f"<p class='soft'>{len(differ) - 40} more fields differ.</p>" if len(differ) > 40 else ""
        none = "" if differ else "<p class='soft'>Their configs are equal.</p>"
        return f"<p>Ranked by {name}.</p>{table}{more}{none}" + self._parallel(differ, scores)

    def _parallel(self, differ: Mapping[str, Mapping[str, Any]], scores: Sequence[run_lib.Score | None]) -> str:
        """Parallel coordinates of the fields that a sweep varied, and the score."""
        name, sign = next(((s.name, s.sign) for s in scores if s), ("", 1))
        chosen = [i for i, score in enumerate(scores) if score and score.name == name]
        if len(chosen) < 3:
            return ""
        dimensions = [_axis(field, [row[str(i)] for i in chosen]) for field, row in list(differ.items())[:12]]
        if not dimensions:
            return ""
        dimensions.append(_axis(f"best {name}", [s.best for i in chosen if (s := scores[i])]))
        names = [self.runs[i].name for i in chosen]
        self.charts.append({"kind": "parallel", "title": "sweep", "dimensions": dimensions, "names": names, "sign": sign})
        return (
            "<figure><h3>What the runs varied, and what came of it</h3><p class='meaning'>A line is a run: the darker, "
            "the better; green are the best.</p>"
            f"<div class='chart tall' tabindex='0' role='img' data-chart='{len(self.charts) - 1}' "
            f"aria-label='parallel coordinates of {len(names)} runs; the table above has the same numbers'></div></figure>"
        )

    def _pictures(self) -> str:
        found = [(run, records_lib.pictures(run.path / "pictures")) for run in self.runs]
        kinds = sum(len(kinds) for _, kinds in found)
        parts, left = [], PICTURES
        for run, by_kind in found:
            for k, (kind, by_step) in enumerate(by_kind.items()):
                budget, sets = left // max(kinds, 1), []
                kinds -= 1
                steps = list(by_step)
                images: dict[int, list[str]] = {}
                for most in (12, 6, 3, 2, 1):  # so many steps of them as there is room for
                    for each in (8, 4, 2):
                        chosen = records_lib.spread(steps, most) if most > 1 else steps[-1:]
                        images = {step: _images(run, by_step[step][:each], kind, step) for step in chosen}
                        if sum(len(text) for row in images.values() for text in row) <= budget:
                            break
                    else:
                        continue
                    break
                else:
                    self.notes.append(f"{run.name}: the pictures of {kind!r} are too large for the page")
                    continue
                left -= sum(len(text) for row in images.values() for text in row)
                for step, row in images.items():
                    name = "as the run began" if step < 0 else f"step {step:,}"
                    sets.append(f'<div class="pictures" data-name="{esc(name)}">{"".join(row)}</div>')
                which = f"{_id(run.name)}-{k}"
                label = f"{run.name}: {kind}" if len(self.runs) > 1 else kind
                parts.append(
                    f"<h3>{esc(label)}</h3>" + _slider(which, len(sets), label) + f'<div id="{which}">{"".join(sets)}</div>'
                )
        return "".join(parts)

    def _samples(self, i: int) -> str:
        run = self.runs[i]
        by_step = records_lib.samples(run.path / "samples.jsonl", steps=10, each=12)
        if not by_step:
            return ""
        sets = []
        for step, rows in by_step.items():
            names = list(dict.fromkeys(name for row in rows for name in row))
            head = "".join(f"<th>{esc(name)}</th>" for name in names)
            lines = "".join(
                "<tr>" + "".join(f'<td class="text">{esc(row.get(n, ""))}</td>' for n in names) + "</tr>" for row in rows
            )
            sets.append(f'<div class="scroll" data-name="step {step:,}"><table><tr>{head}</tr>{lines}</table></div>')
        which = f"samples-{i}"
        return _title(run, self.runs) + _slider(which, len(sets), "samples") + f'<div id="{which}">{"".join(sets)}</div>'

    def _traces(self, run: Run) -> str:
        found = sorted(path for path in (run.path / "traces").glob("steps-*") if path.is_dir() and not path.is_symlink())
        parts = []
        for folder in found[-MOST_TRACES:]:
            try:
                trace = trace_lib.of_folder(folder)
            except files.FileError as error:
                self.notes.append(str(error))
                continue
            if trace:
                parts.append(timeline.traced(f"{run.name}: {folder.name}" if len(self.runs) > 1 else folder.name, trace))
        return "".join(parts)

    def _trouble(self, i: int) -> str:
        run, train = self.runs[i], self.records[i].splits.get("train", {})
        skipped = train.get("skipped")
        steps = [int(s) for s in train["step"][np.nan_to_num(skipped) > 0]] if skipped is not None else []
        text = (
            f"<p>{len(steps)} steps were skipped: {esc(', '.join(map(str, steps[:60])))}{' …' if len(steps) > 60 else ''}.</p>"
            if steps
            else ""
        )
        lines = _warnings(run)
        if lines:
            shown = "".join(
                f'<tr><td class="n">{count}×</td><td class="text code">{esc(line)}</td></tr>' for line, count in lines
            )
            head = '<th class="n">times</th><th>what the log of process 0 says, the latest first</th>'
            text += f'<div class="scroll"><table><tr>{head}</tr>{shown}</table></div>'
        return _title(run, self.runs) + text if text else ""

    def _config(self, run: Run) -> str:
        if not run.config:
            return ""
        given = run_lib.flatten(run.config)
        usual = run_lib.flatten(json.loads(config_lib.to_json(config_lib.Config())))
        sections = {name.partition(".")[0] for name in usual if "." in name}
        changed = {
            name: value
            for name, value in given.items()
            if name.partition(".")[0] in sections and (name not in usual or usual[name] != value)
        }
        rows = "".join(
            f'<tr><td class="code">{esc(name)}</td><td class="code">{esc(_short(value))}</td>'
            f'<td class="code soft">{esc(_short(usual.get(name)))}</td></tr>'
            for name, value in changed.items()
        )
        head = "<th>field</th><th>here</th><th>default</th>"
        table = f'<div class="scroll"><table><tr>{head}</tr>{rows}</table></div>' if rows else ""
        versions = run.starts[-1].facts.get("versions", {}) if run.starts else {}
        about = ", ".join(f"{k} {v}" for k, v in versions.items()) if isinstance(versions, dict) else ""
        whole = json.dumps(run.config, indent=1)
        return (
            (f"<p class='soft'>{esc(about)}</p>" if about else "")
            + table
            + f"<details><summary>all fields</summary><pre>{esc(whole[:60_000])}</pre></details>"
        )


LIVE = '<p class="soft" id="live" aria-live="off">live</p>'
# Were a text of a run ever taken for markup, it could still load nothing.
POLICY = "default-src 'none'; img-src data: blob:; style-src 'unsafe-inline'; script-src 'unsafe-inline'"


def _tools(*, several: bool) -> str:
    """What stays above the curves."""
    key = "lines: train, dotted: test" if several else '<i class="swatch run0"></i>train <i class="swatch run1"></i>test'
    return (
        '<div class="tools"><label><input type="checkbox" id="log"> logarithmic</label><label>smoothing '
        '<input type="range" id="smooth" min="0" max="0.95" step="0.05" value="0.3"> '
        f'<span id="smooth-value" class="soft">30 %</span></label><span>{key}</span>'
        '<span class="soft">drag to zoom, double-click for all; on a chart with the focus: arrows, + − 0</span></div>'
    )


def _axis(label: str, values: Sequence[Any]) -> dict[str, Any]:
    """An axis of parallel coordinates: where each value stands between 0 and 1, logarithmic where values span much."""
    texts = [_short(value) for value in values]
    if all(type(v) in (int, float) and math.isfinite(run_lib.number(v)) for v in values):
        x = np.array([run_lib.number(v) for v in values])
        x = np.log(x) if x.min() > 0 and x.max() / x.min() > 30 else x
        at = (x - x.min()) / (x.max() - x.min()) if x.max() > x.min() else np.full(len(x), 0.5)
        ends = sorted({int(at.argmin()), int(at.argmax()), *([int(np.abs(at - 0.5).argmin())] if len(set(texts)) < 6 else [])})
    else:
        names = sorted(set(texts))
        at = np.array([names.index(text) / max(len(names) - 1, 1) for text in texts])
        ends = [texts.index(name) for name in names[:12]]
    return {"label": label, "at": [round(float(a), 4) for a in at], "texts": texts,
            "ticks": [[round(float(at[i]), 4), texts[i][:24]] for i in ends]}  # fmt: skip


def _grid(figures: Iterable[str]) -> str:
    return f'<div class="charts">{"".join(figures)}</div>'


def _title(run: Run, runs: Sequence[Run]) -> str:
    return f"<h3>{esc(run.name)}</h3>" if len(runs) > 1 else ""


def _slider(which: str, n: int, label: str) -> str:
    """What chooses one of ``n`` sets below it."""
    kind = "range" if n > 1 else "hidden"
    value = f'min="0" max="{n - 1}" value="{n - 1}"'
    tag = f'<input class="wide" type="{kind}" {value} data-steps="{which}" aria-label="step of {esc(label)}">'
    return f'<p>{tag} <span id="{which}-value" class="soft" aria-live="polite"></span></p>'


def _images(run: Run, names: Sequence[str], kind: str, step: int) -> list[str]:
    found = []
    for k, name in enumerate(names):
        try:
            content = files.read(run.file(f"pictures/{name}"), most=PICTURES)
        except (files.FileError, OSError):
            continue  # removed since the folder was listed, or a link that leads elsewhere
        alt = f"{kind} {k + 1}" + (f" at step {step}" if step >= 0 else "")
        if content.startswith(b"\x89PNG"):
            found.append(f'<img alt="{esc(alt)}" src="data:image/png;base64,{base64.b64encode(content).decode()}">')
    return found


def _schedule(run: Run) -> tuple[np.ndarray, np.ndarray] | None:
    """Steps and learning rates of schedule.json; None where there is none that can be read."""
    try:
        found = files.read_json(run.file("schedule.json"))
        step, rate = ([run_lib.number(x) for x in found[name][:5000]] for name in ("step", "lr"))
    except (files.FileError, OSError, KeyError, TypeError):
        return None
    known = [(s, r) for s, r in zip(step, rate, strict=False) if math.isfinite(s) and math.isfinite(r) and 0 <= s < 1 << 53]
    return (np.array([s for s, _ in known]), np.array([r for _, r in known])) if known else None


def _warnings(run: Run) -> list[tuple[str, int]]:
    """Warnings and errors of process 0's log, the latest first, each once, with how often it came."""
    try:
        text = files.read(run.file("logs/process-0.log"), most=256 << 20)[-(4 << 20) :].decode(errors="replace")
    except (files.FileError, OSError):
        return []
    counts: dict[str, tuple[str, int]] = {}
    for line in text.splitlines():
        if found := re.match(r"\S+ \S+ (?:WARNING|ERROR) (.+)", line):
            alike = re.sub(r"\d+(\.\d+)?", "#", found[1])
            counts[alike] = (line[:400], counts.pop(alike, ("", 0))[1] + 1)
    return list(reversed(counts.values()))[:WARNINGS]


def _group(name: str, split: str, tested: bool) -> str:
    if split == "save":
        return "Saves"
    if split:
        return "Order of the recordings"
    if name in RATES:
        return "Speed"
    if re.match(r"(grad|update|param)_norm", name) or name == "skipped":
        return "Gradients and parameters"
    return "Results" if tested or name in ("loss", "learning_rate") else "Losses and metrics"


def _id(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-") or "section"


def _short(value: object) -> str:
    text = value if isinstance(value, str) else f"{value:.6g}" if type(value) is float else json.dumps(value)
    return text if len(text) <= 120 else text[:117] + "…"
