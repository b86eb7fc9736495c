"""The console: a progress line below the log, the log file of each process, and start times."""

import logging
import math
import os
import re
import shutil
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TextIO

# [share] of the time spent waiting for data, from which on the loader's slowest stage is named
WORTH_NAMING = 0.05

CLEAR = "\r\x1b[2K"  # clears the line of a terminal
# Characters that steer a terminal or order text, and halves of them, as in odd names of files.
STEERING = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
)


def plain(text: str) -> str:
    """Escape control characters of ``text`` (\\u001b), except a carriage return at its beginning.

    A name in a file from elsewhere may hold anything.
    """
    start = "\r" if text.startswith("\r") else ""
    rest_of_line = text.removeprefix("\r")
    return start + STEERING.sub(lambda match: f"\\u{ord(match[0]):04x}", rest_of_line)


class Plain:
    """A stream to which text is written `plain`. ``stream`` is the one below it."""

    def __init__(self, stream: TextIO):
        self.stream = stream

    def write(self, text: str) -> int:
        self.stream.write(plain(text))
        return len(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


class Console:
    """One progress line, rewritten in place on a terminal, and printed now and then elsewhere.

    A message is printed above it.
    """

    def __init__(self, stream: TextIO | None = None, *, every: float = 10.0):
        if stream is None:
            # The stream below a `Plain` one: the escapes that clear a line are ours.
            stream = sys.stderr.stream if isinstance(sys.stderr, Plain) else sys.stderr
        self._stream = stream
        self._live = stream.isatty()
        self._every = 0.1 if self._live else every  # [s] between lines
        self._line = ""
        self._shown = ""
        self._printed = -math.inf  # [s] when, by the monotonic clock

    def progress(self, line: str, *, passing: bool = False) -> None:
        """Show a line, unless the last one was shown just now.

        ``passing``: it belongs to an interlude, such as an evaluation. The line before it comes
        back with the next message.
        """
        line = plain(line)
        if self._live:  # a line that wraps could not be cleared
            line = line[: shutil.get_terminal_size().columns - 1]
        if not passing:
            self._line = line
        if time.monotonic() - self._printed >= self._every:
            self._print(line)

    def finish(self) -> None:
        """Leaves the last progress line on the screen."""
        if self._line:
            if self._live or self._shown != self._line:
                self._print(self._line)
            if self._live:
                self._stream.write("\n")
            self._stream.flush()
        self._line = ""
        self._shown = ""

    def _print(self, line: str) -> None:
        self._printed = time.monotonic()
        self._shown = line
        self._stream.write(f"{CLEAR}{line}" if self._live else line + "\n")
        self._stream.flush()

    def message(self, text: str) -> None:
        text = f"{plain(text)}\n"
        if self._live and (self._line or self._shown):
            text = f"{CLEAR}{text}{self._line}"
        self._stream.write(text)
        self._stream.flush()


class ConsoleHandler(logging.Handler):
    """Print log records above the progress line, without a failed save's (`_is_of_a_save`)."""

    def __init__(self, console: Console):
        super().__init__()
        self._console = console
        self.setFormatter(logging.Formatter("%(message)s"))

    def emit(self, record: logging.LogRecord) -> None:
        if _is_of_a_save(record):
            return
        prefix = "" if record.levelno <= logging.INFO else f"{record.levelname.lower()}: "
        self._console.message(prefix + self.format(record))


def _is_of_a_save(record: logging.LogRecord) -> bool:
    """Whether Orbax or its event loop met the error: several come with one save.

    They are in the log files. The save's own failure is reported by its waiter.
    """
    is_of_orbax = f"{os.sep}orbax{os.sep}" in record.pathname
    return record.levelno >= logging.ERROR and (record.name == "asyncio" or is_of_orbax)


def start_console(*, process: int = 0, folder: str = "") -> Console:
    """Route logging through a console, which only process 0 has.

    It takes ours from INFO on, and everybody's from WARNING on.
    With ``folder``, every process also logs into ``folder``/process-N.log, with the time.
    """
    console = Console() if process == 0 else Console(open(os.devnull, "w"))
    root = logging.getLogger()
    # Ours replace older ones, and the plain handler that some library has set up.
    for handler in list(root.handlers):
        if isinstance(handler, ConsoleHandler | LogFile) or type(handler) is logging.StreamHandler:
            root.removeHandler(handler)
            handler.close()
    root.addHandler(ConsoleHandler(console))
    if folder:
        root.addHandler(LogFile(folder, process))
    logging.getLogger("jaxtrain").setLevel(logging.INFO)
    logging.captureWarnings(True)
    return console


class LogFile(logging.FileHandler):
    """``folder``/process-N.log."""

    def __init__(self, folder: str, process: int):
        os.makedirs(folder, exist_ok=True)
        super().__init__(os.path.join(folder, f"process-{process}.log"))
        self.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))

    def format(self, record: logging.LogRecord) -> str:
        return plain(super().format(record))

    def emit(self, record: logging.LogRecord) -> None:
        """Write the line, or lose it if the file cannot be opened."""
        try:
            super().emit(record)  # opens the file again, if a thread still logs after it was closed
        except OSError:
            self.handleError(record)

    def handleError(self, record: logging.LogRecord) -> None:
        """Lose lines of this file if the disk is full or the workdir moved, without tracebacks."""


def progress_line(
    step: int,
    steps: int,
    loss: float,
    rates: Mapping[str, float],
    *,
    terms: Mapping[str, float] | None = None,
    slowest: str | None = None,
) -> str:
    """Return the text of the progress line.

    ``terms``: of the loss, by the metrics' names. ``slowest``: the loader's slowest stage, which is
    named after a long wait.
    """
    loss_text = f"loss {loss:.4f}"
    if terms:
        values = [f"{name.removesuffix('_loss')} {value:.4f}" for name, value in terms.items()]
        loss_text += f" = {' + '.join(values)}"
    waiting = f"waiting for data {rates['data_wait_share']:.0%}"
    reasons = _reasons_of_waiting(rates, slowest)
    if reasons and rates["data_wait_share"] >= WORTH_NAMING:
        waiting += f" ({'; '.join(reasons)})"
    mfu = f"{rates['mfu']:.1%}{above_peak(rates['mfu'])}"
    if "mfu_documents" in rates:
        mfu += f" (by documents {rates['mfu_documents']:.1%})"
    pace = f"{rates['examples_per_second']:.1f} examples/s  MFU {mfu}"
    left = f"{duration(rates['eta_seconds'])} left"
    return f"step {step}/{steps}  {loss_text}  {pace}  {waiting}  {left}"


def longest_line(steps: int, seconds: float, *, every: int, patience: int, metric: str) -> str:
    """Return the text of how long a run that may end by patience takes at most.

    ``steps``: the rest of the run. ``seconds``: of one step. ``every``: steps between evaluations.
    """
    minutes = max(1, math.ceil(steps * seconds / 60))
    return (
        f"at most {steps:,} more steps, {minutes:,} min at {seconds:.3g} s each; the run ends"
        f" earlier if {metric} makes no progress in {patience} evaluations, one every"
        f" {every:,} steps"
    )


def above_peak(mfu: float) -> str:
    """Return the words for an MFU that no device can reach, or "" for any other."""
    if mfu > 1:
        return " (above 100%: Task.flops is too high, or the measured peak too low)"
    return ""


def _reasons_of_waiting(rates: Mapping[str, float], slowest: str | None) -> list[str]:
    reasons = []
    if slowest:
        reasons.append(f"most in {slowest}")
    if "rows_asked_per_second" in rates:
        demand = f"steps take {rates['rows_asked_per_second']:,.0f} rows/s"
        supply = f"the loader gives {rates['rows_given_per_second']:,.0f}"
        cores = rates["cores_missing"]
        if cores:
            supply += f": {cores:.0f} more core{'s' * (cores != 1)} for each process"
        reasons.append(f"{demand}, {supply}")
    return reasons


def in_bytes(n: float, form: str = ".3g") -> str:
    """Write a number of bytes in decimal units, for example 1.2 GB. ``form``: of the number."""
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if abs(n) >= size:
            return f"{n / size:{form}} {unit}"
    return f"{n:.0f} B"


def columns(rows: Sequence[Sequence[str]], right: Sequence[int] = ()) -> Iterator[str]:
    """Yield the lines of a table, whose columns ``right`` are numbers."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = []
        for i, cell in enumerate(row):
            cells.append(cell.rjust(widths[i]) if i in right else cell.ljust(widths[i]))
        yield "  ".join(cells).rstrip()


def duration(seconds: float) -> str:
    """Format a duration as 2:05:07, or "?" without one."""
    if not math.isfinite(seconds):
        return "?"
    minutes, full_seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{full_seconds:02}"
