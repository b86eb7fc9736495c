"""The wall time of a run, drawn: its shares, its starts on one axis, and its processes."""

import math
import time
from collections.abc import Mapping, Sequence

from jaxtrain.telemetry import goodput
from jaxtrain.telemetry.report.markup import duration, esc, table, title
from jaxtrain.telemetry.report.run import Run
from jaxtrain.telemetry.report.trace import Trace

COLOURS = {
    goodput.STEPS: "#2f8f6b",
    goodput.AGAIN: "#c9a227",
    goodput.WAIT: "#d1662b",
    goodput.SAVES: "#5a55c4",
    goodput.EVALUATION: "#3b8ea5",
    goodput.COMPILATION: "#8e6bb0",
    goodput.RESTORE: "#7b8fd0",
    goodput.INDEX: "#b58a5a",
    goodput.IMPORTS: "#7f8c99",
    goodput.OTHERS: "#a4adb6",
    goodput.MODEL: "#93a1ad",
    goodput.PLAN: "#b3bcc5",
    goodput.ENDING: "#6b7680",
    goodput.QUEUE: "#d9c7a3",
    goodput.STOPPED: "#b8432f",
}
TRACED = {
    "forward": "#2f8f6b",
    "backward": "#2f6fb3",
    "optimizer": "#8e6bb0",
    "guard and metrics": "#3b8ea5",
    "collectives": "#d1662b",
    "other operations": "#a4adb6",
    "gaps": "#b8432f",
}
WIDTH, ROW = 1000, 20
STARTS = (
    ("start", "n"),
    ("began", ""),
    ("lasted", "n"),
    ("from step", "n"),
    ("to step", "n"),
    ("how it ended", ""),
    ("host", ""),
)
MAX_STARTS = 60  # that are drawn, the latest of them


def section(run: Run, *, several: bool) -> str:
    """Return the run's part of the page, or "" for a run without a record of its time."""
    if not run.processes:
        return ""
    seconds = run.seconds
    whole, share = sum(seconds.values()), goodput.goodput(seconds)
    of = f" of {len(run.processes)} processes" if len(run.processes) > 1 else ""
    head = (
        f"<p>Goodput is <b>{share:.1%}</b>: so much of {duration(whole)}{of} went into steps made"
        " for the first time.</p>"
    )
    return (
        title(run.name, several)
        + head
        + _bar(seconds)
        + ("" if several else _starts(run.starts, alive=run.is_alive))
        + _processes(run.processes)
    )


def traced(name: str, trace: Trace) -> str:
    rows = ((f"{share:.1%}", f"{times:,}", esc(scope)) for scope, share, times in trace.scopes)
    columns = [("of the operations' time", "n"), ("times", "n"), ("scope in the program", "code")]
    seconds = {part: share * trace.seconds for part, share in trace.parts.items()}
    return (
        f"<h3>{esc(name)}</h3>{_bar(seconds, TRACED)}<details open><summary>by"
        f" scope</summary>{table(columns, rows)}</details>"
    )


def _bar(seconds: Mapping[str, float], colours: Mapping[str, str] = COLOURS) -> str:
    whole = sum(seconds.values()) or 1.0
    parts = sorted(seconds.items(), key=lambda item: -item[1])
    label = "; ".join(f"{phase} {s / whole:.1%}" for phase, s in parts)
    bar = "".join(
        f'<i style="width:{100 * s / whole:.3f}%;background:{colours[phase]}" title="{phase}:'
        f' {duration(s)}, {s / whole:.1%}"></i>'
        for phase, s in parts
    )
    key = "".join(
        f'<span><i style="background:{colours[phase]}"></i>{phase} {duration(s)} '
        f'<span class="soft">{s / whole:.1%}</span></span>'
        for phase, s in parts
    )
    return (
        f'<div class="bar" role="img" aria-label="{label}">{bar}</div><div class="key">{key}</div>'
    )


def _starts(starts: Sequence[goodput.Start], *, alive: bool) -> str:
    """Return a row for each start of a process, on an axis of wall time, and a table of them."""
    if len(starts) < 2:
        return ""
    drawn = starts[-MAX_STARTS:]
    begin, end = drawn[0].began, max(start.now for start in drawn)
    scale = WIDTH / max(end - begin, 1e-9)
    rows = []
    for y, start in enumerate(drawn):
        x = (start.began - begin) * scale
        for phase in goodput.PHASES:
            if s := start.seconds.get(phase, 0.0):
                tip = f"{phase}: {duration(s)}"
                rows.append(
                    f'<rect x="{x:.2f}" y="{y * ROW + 3}" width="{max(s * scale, 0.3):.2f}"'
                    f' height="{ROW - 6}" fill="{COLOURS[phase]}"><title>{tip}</title></rect>'
                )
                x += s * scale
    height = len(drawn) * ROW
    axis = "".join(
        f'<text x="{WIDTH * k / 4:.0f}" y="{height + 14}"'
        f' text-anchor="{("start", "middle", "middle", "middle", "end")[k]}">'
        f"{duration((end - begin) * k / 4)}</text>"
        for k in range(5)
    )
    svg = (
        f'<svg class="starts" viewBox="0 0 {WIDTH} {height + 20}" role="img"'
        f' aria-label="{len(drawn)} starts of the run on the axis of the wall time; the table below'
        f' has them">{"".join(rows)}{axis}</svg>'
    )
    cells = []
    for i, start in list(enumerate(starts, start=1))[-MAX_STARTS:]:
        began = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(start.began))
        lasted = duration(start.now - start.began)
        ended = _ending(start, alive and start is starts[-1])
        cells.append(
            [
                str(i),
                began,
                lasted,
                f"{start.first:,}",
                f"{start.step:,}",
                esc(ended),
                esc(start.host),
            ]
        )
    return svg + table(STARTS, cells)


def _ending(start: goodput.Start, alive: bool) -> str:
    heard = (
        f"last heard of at {time.strftime('%H:%M:%S', time.localtime(start.now))}, at:"
        f" {start.phase}"
    )
    return start.end or (f"trains; {heard}" if alive else f"killed; {heard}")


def _processes(processes: Mapping[int, Sequence[goodput.Start]]) -> str:
    """Return the spread of the step's time between processes, and who holds the others up."""
    newest = {p: each[-1] for p, each in processes.items() if each[-1].timed}
    if not newest:
        return ""
    slow = goodput.straggler(processes)
    note = (
        f'<p class="notice">Process {slow.process} on {esc(slow.host)} holds the others up: it'
        f" prepares a step for {1e3 * slow.own:.0f} ms before it waits for its devices.</p>"
        if slow
        else ""
    )
    rows = []
    for p in sorted(newest, key=lambda p: -newest[p].own)[:32]:
        s = newest[p]
        seconds = (s.total / s.timed, s.deviation, s.longest, s.own)
        times = [f"{1e3 * each:.1f}" if math.isfinite(each) else "–" for each in seconds]
        rows.append(
            [str(p), esc(s.host), f"{s.timed:,}", *times, f"{s.seconds.get(goodput.WAIT, 0.0):.1f}"]
        )
    names = (
        "steps timed",
        "ms a step",
        "deviation",
        "longest",
        "of it its own",
        "s waiting for data",
    )
    columns = [("process", "n"), ("host", ""), *((name, "n") for name in names)]
    about = (
        "Of the newest start. A step's own part is what a process does before it waits for its"
        " devices: reading its data, and calling the program."
    )
    return f"{note}{table(columns, rows)}<p class='soft'>{about}</p>"
