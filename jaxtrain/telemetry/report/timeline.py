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
OTHER_MESH = (
    "<p>Attempts with another number of processes read the same batches on another mesh. Their sums"
    " have other last bits, so losses and digests differ from those of one mesh.</p>"
)
MAX_HOSTS = 300  # [characters] of their names
STARTS = (
    ("start", "n"),
    ("began", ""),
    ("lasted", "n"),
    ("from step", "n"),
    ("to step", "n"),
    ("how it ended", ""),
    ("host", ""),
)
RESTARTS = (
    ("attempt", "n"),
    ("began", ""),
    ("because", ""),
    ("until as far again", "n"),
    ("processes", "n"),
    ("on", ""),
)
PROCESSES = (
    ("process", "n"),
    ("host", ""),
    ("steps timed", "n"),
    ("ms a step", "n"),
    ("deviation", "n"),
    ("longest", "n"),
    ("of it its own", "n"),
    ("s waiting for data", "n"),
)
MAX_STARTS = 60  # that are drawn, the latest of them


def section(run: Run, *, several: bool) -> str:
    """Return the run's part of the page, or "" for a run without a record of its time."""
    if not run.processes:
        return ""
    is_of_several = len(run.processes) > 1
    of = f" of {len(run.processes)} processes" if is_of_several else ""
    total = duration(sum(run.seconds.values()))
    html = title(run.name, several)
    html += (
        f"<p>Goodput is <b>{goodput.goodput(run.seconds):.1%}</b>: so much of {total}{of} went into"
        " steps made for the first time.</p>"
    )
    html += _bar(run.seconds)
    if not several:
        html += _starts(run.starts, alive=run.is_alive)
        html += _restarts(run.starts)
    return html + _processes(run.processes)


def traced(name: str, trace: Trace) -> str:
    rows = ((f"{share:.1%}", f"{times:,}", esc(scope)) for scope, share, times in trace.scopes)
    columns = [("of the operations' time", "n"), ("times", "n"), ("scope in the program", "code")]
    seconds = {part: share * trace.seconds for part, share in trace.parts.items()}
    scopes = f"<details open><summary>by scope</summary>{table(columns, rows)}</details>"
    return f"<h3>{esc(name)}</h3>{_bar(seconds, TRACED)}{scopes}"


def _bar(seconds: Mapping[str, float], colours: Mapping[str, str] = COLOURS) -> str:
    total = sum(seconds.values()) or 1.0
    bar = key = ""
    labels = []
    for phase, taken in sorted(seconds.items(), key=lambda item: -item[1]):
        share = taken / total
        colour = f"background:{colours[phase]}"
        tip = f"{phase}: {duration(taken)}, {share:.1%}"
        labels.append(f"{phase} {share:.1%}")
        bar += f'<i style="width:{100 * share:.3f}%;{colour}" title="{tip}"></i>'
        key += (
            f'<span><i style="{colour}"></i>{phase} {duration(taken)} '
            f'<span class="soft">{share:.1%}</span></span>'
        )
    label = "; ".join(labels)
    return (
        f'<div class="bar" role="img" aria-label="{label}">{bar}</div><div class="key">{key}</div>'
    )


def _starts(starts: Sequence[goodput.Start], *, alive: bool) -> str:
    """Return a row for each start of a process, on an axis of wall time, and a table of them."""
    if len(starts) < 2:
        return ""
    drawn = starts[-MAX_STARTS:]
    rows = []
    for number, start in enumerate(drawn, len(starts) - len(drawn) + 1):
        began = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(start.began))
        lasted = duration(start.now - start.began)
        steps = [f"{start.first:,}", f"{start.step:,}"]
        ending = _ending(start, alive and start is starts[-1])
        rows.append([str(number), began, lasted, *steps, esc(ending), esc(start.host)])
    return _drawing(drawn) + table(STARTS, rows)


def _restarts(starts: Sequence[goodput.Start]) -> str:
    """Return the restarts of a supervised run with their causes, or "" without one."""
    restarts = goodput.supervised_restarts(starts)
    if not restarts:
        return ""
    rows = []
    for restart in restarts[-MAX_STARTS:]:
        began = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(restart.began))
        row = [str(restart.attempt), began, esc(restart.cause), duration(restart.seconds)]
        hosts = ", ".join(dict.fromkeys(restart.hosts))
        rows.append([*row, str(restart.processes), esc(hosts[:MAX_HOSTS])])
    costs = ""
    for cause, seconds in list(goodput.seconds_by_cause(starts).items())[:3]:
        costs += f"{'; ' * bool(costs)}{duration(seconds)} because {esc(cause)}"
    total = duration(sum(restart.seconds for restart in restarts))
    text = f"<p>Restarts by its supervisor took {total}: {costs}.</p>"
    if len({start.processes for start in starts}) > 1:
        text += OTHER_MESH
    return text + table(RESTARTS, rows)


def _drawing(starts: Sequence[goodput.Start]) -> str:
    """Draw each start as a row on an axis of wall time."""
    begin = starts[0].began
    seconds = max(start.now for start in starts) - begin
    scale = WIDTH / max(seconds, 1e-9)
    bars = ""
    for row, start in enumerate(starts):
        x = (start.began - begin) * scale
        for phase in goodput.PHASES:
            taken = start.seconds.get(phase, 0.0)
            if not taken:
                continue
            place = f'x="{x:.2f}" y="{row * ROW + 3}" width="{max(taken * scale, 0.3):.2f}"'
            tip = f"<title>{phase}: {duration(taken)}</title>"
            bars += f'<rect {place} height="{ROW - 6}" fill="{COLOURS[phase]}">{tip}</rect>'
            x += taken * scale
    height = len(starts) * ROW
    axis = ""
    for k, anchor in enumerate(("start", "middle", "middle", "middle", "end")):
        place = f'x="{WIDTH * k / 4:.0f}" y="{height + 14}" text-anchor="{anchor}"'
        axis += f"<text {place}>{duration(seconds * k / 4)}</text>"
    return (
        f'<svg class="starts" viewBox="0 0 {WIDTH} {height + 20}" role="img"'
        f' aria-label="{len(starts)} starts of the run on the axis of the wall time; the table'
        f' below has them">{bars}{axis}</svg>'
    )


def _ending(start: goodput.Start, alive: bool) -> str:
    if start.end:
        return start.end
    heard = time.strftime("%H:%M:%S", time.localtime(start.now))
    state = "trains" if alive else "killed"
    return f"{state}; last heard of at {heard}, at: {start.phase}"


def _processes(processes: Mapping[int, Sequence[goodput.Start]]) -> str:
    """Return the spread of the step's time between processes, and who holds the others up."""
    newest = {process: starts[-1] for process, starts in processes.items() if starts[-1].timed}
    if not newest:
        return ""
    slow = goodput.straggler(processes)
    note = ""
    if slow:
        note = (
            f'<p class="notice">Process {slow.process} on {esc(slow.host)} holds the others up: it'
            f" prepares a step for {1e3 * slow.own:.0f} ms before it waits for its devices.</p>"
        )
    rows = []
    for process in sorted(newest, key=lambda process: -newest[process].own)[:32]:
        start = newest[process]
        seconds = (start.total / start.timed, start.deviation, start.longest, start.own)
        times = [f"{1e3 * s:.1f}" if math.isfinite(s) else "–" for s in seconds]
        waited = f"{start.seconds.get(goodput.WAIT, 0.0):.1f}"
        rows.append([str(process), esc(start.host), f"{start.timed:,}", *times, waited])
    explanation = (
        "Of the newest start. A step's own part is what a process does before it waits for its"
        " devices: reading its data, and calling the program."
    )
    return f"{note}{table(PROCESSES, rows)}<p class='soft'>{explanation}</p>"
