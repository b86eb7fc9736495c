"""The wall time of a run, drawn: its shares, its starts on one axis, and its processes."""

import math
import time
from collections.abc import Mapping, Sequence

from jaxtrain.telemetry import goodput
from jaxtrain.telemetry.report.markup import duration, esc, title
from jaxtrain.telemetry.report.run import Run
from jaxtrain.telemetry.report.trace import Trace

COLOURS = {
    goodput.STEPS: "#2f8f6b", goodput.AGAIN: "#c9a227", goodput.WAIT: "#d1662b", goodput.SAVES: "#5a55c4",
    goodput.EVALUATION: "#3b8ea5", goodput.COMPILATION: "#8e6bb0", goodput.RESTORE: "#7b8fd0", goodput.INDEX: "#b58a5a",
    goodput.IMPORTS: "#7f8c99", goodput.OTHERS: "#a4adb6", goodput.MODEL: "#93a1ad", goodput.PLAN: "#b3bcc5",
    goodput.ENDING: "#6b7680", goodput.QUEUE: "#d9c7a3", goodput.STOPPED: "#b8432f",
}  # fmt: skip
TRACED = {
    "forward": "#2f8f6b", "backward": "#2f6fb3", "optimizer": "#8e6bb0", "guard and metrics": "#3b8ea5",
    "collectives": "#d1662b", "other operations": "#a4adb6", "gaps": "#b8432f",
}  # fmt: skip
WIDTH, ROW = 1000, 20
MOST_STARTS = 60  # that are drawn, the latest of them


def section(run: Run, *, several: bool) -> str:
    """Return the run's part of the page, or "" for a run without a record of its time."""
    if not run.processes:
        return ""
    seconds = run.seconds
    whole, share = sum(seconds.values()), goodput.goodput(seconds)
    of = f" of {len(run.processes)} processes" if len(run.processes) > 1 else ""
    head = f"<p>Goodput is <b>{share:.1%}</b>: so much of {duration(whole)}{of} went into steps made for the first time.</p>"
    return (
        title(run.name, several)
        + head
        + _bar(seconds)
        + ("" if several else _starts(run.starts, alive=run.is_alive))
        + _processes(run.processes)
    )


def traced(name: str, trace: Trace) -> str:
    """Return the time of traced steps, by the parts of a step and by scopes."""
    rows = "".join(
        f'<tr><td class="n">{share:.1%}</td><td class="n">{times:,}</td><td class="code">{esc(scope)}</td></tr>'
        for scope, share, times in trace.scopes
    )
    seconds = {part: share * trace.seconds for part, share in trace.parts.items()}
    return (
        f"<h3>{esc(name)}</h3>{_bar(seconds, TRACED)}<details open><summary>by scope</summary><div class='scroll'><table><tr>"
        "<th class='n'>of the operations' time</th><th class='n'>times</th><th>scope in the program</th></tr>"
        f"{rows}</table></div></details>"
    )


def _bar(seconds: Mapping[str, float], colours: Mapping[str, str] = COLOURS) -> str:
    whole = sum(seconds.values()) or 1.0
    parts = sorted(seconds.items(), key=lambda item: -item[1])
    label = "; ".join(f"{phase} {s / whole:.1%}" for phase, s in parts)
    bar = "".join(
        f'<i style="width:{100 * s / whole:.3f}%;background:{colours[phase]}" title="{phase}: {duration(s)}, '
        f'{s / whole:.1%}"></i>'
        for phase, s in parts
    )
    key = "".join(
        f'<span><i style="background:{colours[phase]}"></i>{phase} {duration(s)} '
        f'<span class="soft">{s / whole:.1%}</span></span>'
        for phase, s in parts
    )
    return f'<div class="bar" role="img" aria-label="{label}">{bar}</div><div class="key">{key}</div>'


def _starts(starts: Sequence[goodput.Start], *, alive: bool) -> str:
    """Return a row for each start of a process, on an axis of wall time, and a table of them."""
    if len(starts) < 2:
        return ""
    drawn = starts[-MOST_STARTS:]
    begin, end = drawn[0].began, max(start.now for start in drawn)
    scale = WIDTH / max(end - begin, 1e-9)
    rows = []
    for y, start in enumerate(drawn):
        x = (start.began - begin) * scale
        for phase in goodput.PHASES:
            if s := start.seconds.get(phase, 0.0):
                tip = f"{phase}: {duration(s)}"
                rows.append(
                    f'<rect x="{x:.2f}" y="{y * ROW + 3}" width="{max(s * scale, 0.3):.2f}" height="{ROW - 6}" '
                    f'fill="{COLOURS[phase]}"><title>{tip}</title></rect>'
                )
                x += s * scale
    height = len(drawn) * ROW
    axis = "".join(
        f'<text x="{WIDTH * k / 4:.0f}" y="{height + 14}" text-anchor="{("start", "middle", "middle", "middle", "end")[k]}">'
        f"{duration((end - begin) * k / 4)}</text>"
        for k in range(5)
    )
    svg = (
        f'<svg class="starts" viewBox="0 0 {WIDTH} {height + 20}" role="img" aria-label="{len(drawn)} starts of the run on the '
        f'axis of the wall time; the table below has them">{"".join(rows)}{axis}</svg>'
    )
    lines = "".join(
        f'<tr><td class="n">{i + 1}</td><td>{time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(s.began))}</td>'
        f'<td class="n">{duration(s.now - s.began)}</td><td class="n">{s.first:,}</td><td class="n">{s.step:,}</td>'
        f"<td>{esc(_ending(s, alive and s is starts[-1]))}</td><td>{esc(s.host)}</td></tr>"
        for i, s in list(enumerate(starts))[-MOST_STARTS:]
    )
    head = (
        '<th class="n">start</th><th>began</th><th class="n">lasted</th><th class="n">from step</th><th class="n">to step</th>'
    )
    return f'{svg}<div class="scroll"><table><tr>{head}<th>how it ended</th><th>host</th></tr>{lines}</table></div>'


def _ending(start: goodput.Start, alive: bool) -> str:
    heard = f"last heard of at {time.strftime('%H:%M:%S', time.localtime(start.now))}, at: {start.phase}"
    return start.end or (f"trains; {heard}" if alive else f"killed; {heard}")


def _processes(processes: Mapping[int, Sequence[goodput.Start]]) -> str:
    """Return the spread of the step's time between processes, and who holds the others up."""
    newest = {p: each[-1] for p, each in processes.items() if each[-1].timed}
    if not newest:
        return ""
    slow = goodput.straggler(processes)
    note = (
        f'<p class="notice">Process {slow.process} on {esc(slow.host)} holds the others up: it prepares a step for '
        f"{1e3 * slow.own:.0f} ms before it waits for its devices.</p>"
        if slow
        else ""
    )
    chosen = sorted(newest, key=lambda p: -newest[p].own)[:32]

    def ms(s: float) -> str:
        return f"{1e3 * s:.1f}" if math.isfinite(s) else "–"

    rows = "".join(
        f'<tr><td class="n">{p}</td><td>{esc(s.host)}</td><td class="n">{s.timed:,}</td>'
        f'<td class="n">{ms(s.total / s.timed)}</td>'
        f'<td class="n">{ms(s.deviation)}</td><td class="n">{ms(s.longest)}</td><td class="n">{ms(s.own)}</td>'
        f'<td class="n">{s.seconds.get(goodput.WAIT, 0.0):.1f}</td></tr>'
        for p in chosen
        if (s := newest[p])
    )
    head = "".join(
        f'<th class="n">{name}</th>'
        for name in ("steps timed", "ms a step", "deviation", "longest", "of it its own", "s waiting for data")
    )
    return (
        f'{note}<div class="scroll"><table><tr><th class="n">process</th><th>host</th>{head}</tr>{rows}</table></div>'
        "<p class='soft'>Of the newest start. A step's own part is what a process does before it waits for its devices: "
        "reading its data, and calling the program.</p>"
    )
