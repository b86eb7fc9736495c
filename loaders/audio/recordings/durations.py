"""Durations in tables that have ends, too: the ends count, and a difference is counted."""

from collections.abc import Callable, Iterable, Mapping, Sequence

from loaders.audio.recordings import values
from loaders.audio.recordings.annotations import Errors
from loaders.audio.recordings.columns import Layout, Options, fixed_length
from loaders.audio.recordings.lines import Line

TOLERANCE = 0.05  # [s] by which programs round times


def report(
    layout: Layout,
    options: Options,
    lines: Iterable[Line],
    seconds: Callable[[Line], float],
    errors: Errors,
) -> None:
    """Count the lines whose duration is not their end minus their start.

    ``seconds``: the length of a line's recording, 0 if it is not known. A duration that is this
    length is no error.
    """
    name = layout.durations
    length_of_all = fixed_length(layout.table, options) if layout.column("end") else None
    if not name and length_of_all is None:
        return
    timed_lines = [line for line in lines if line.start is not None and line.end is not None]
    tolerance = _tolerance(layout, timed_lines)
    seconds_by_file: dict[str, float] = {}
    for line in timed_lines:
        duration = _duration(layout, line.row) if name else length_of_all
        length = (line.end or 0.0) - (line.start or 0.0)
        if duration is None or abs(duration - length) <= tolerance:
            continue
        if line.file not in seconds_by_file:
            seconds_by_file[line.file] = seconds(line)
        if abs(duration - seconds_by_file[line.file]) > max(0.5, tolerance):
            shown_name = name or options.duration_column
            text = f"{line.where}: {shown_name!r} is {duration:g} s, and end - start {length:g} s"
            errors.add("other-duration", text)


def _duration(layout: Layout, row: Mapping[str, str]) -> float | None:
    name = layout.durations
    try:
        return values.seconds(row[name], layout.scales.get(name, 1.0))
    except ValueError:
        return None  # of a figure that nothing depends on


def _tolerance(layout: Layout, lines: Sequence[Line]) -> float:
    """Return the difference that rounding may make [s], by the digits of the columns."""
    names = [layout.column("start"), layout.column("end"), layout.durations]
    steps = []
    for name in filter(None, names):
        digits = [len(line.row[name].replace(",", ".").partition(".")[2]) for line in lines]
        steps.append(10.0 ** -max(digits, default=0) * layout.scales.get(name, 1.0))
    has_one_step = max(steps) == min(steps)
    return max(TOLERANCE, max(steps) * (0.5 if has_one_step else 1.0)) + 1e-9
