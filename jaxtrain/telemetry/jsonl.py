"""Files of one JSON object per line that a run appends to, resumes, and never dies of.

A kill, a full disk or another program can leave a line there that is no record. Such lines are
moved to a file of the same name with ``.odd`` at its end, and reported. The rest is read.
"""

import errno
import json
import logging
import os
import pathlib
import stat
from collections.abc import Callable, Sequence
from typing import Any

from jaxtrain.parallel.lease import WorkdirError
from loaders.io import atomic_write

log = logging.getLogger("jaxtrain")

# an object of a line -> the reason why it is no record, or ""
Check = Callable[[dict[str, Any]], str]


def record_problem(record: dict[str, Any]) -> str:
    """Check a record of metrics.jsonl: a step, a split, and numbers."""
    if problem := step_problem(record):
        return problem
    if type(record.get("split")) is not str:
        return "it has no split"
    for name, value in record.items():
        if name != "split" and type(value) not in (int, float, type(None)):
            return f"its {name!r} is no number"
    return ""


def step_problem(record: dict[str, Any]) -> str:
    """Check a line of generations.jsonl: a step, and anything else."""
    step = record.get("step")
    if type(step) is not int or step < 0:
        return "it has no step"
    return ""


def read(
    path: pathlib.Path, problem: Check
) -> tuple[list[tuple[dict[str, Any], bytes]], list[tuple[bytes, str]]]:
    """Return the records of a file with their lines, and the other lines with the reason for each.

    Raises WorkdirError: ``path`` is a link, a pipe, a folder or else what no run writes.
    """
    try:
        with opened(path, "rb") as file:
            lines = file.read().split(b"\n")
    except FileNotFoundError:
        return [], []
    if not lines[-1]:  # after the last newline
        lines.pop()
    records = []
    odd = []
    for number, line in enumerate(lines, start=1):
        record, reason = _parse(line, problem)
        if record is None:
            odd.append((line, f"line {number}: {reason}"))
        else:
            records.append((record, line))
    return records, odd


def rewrite(
    path: pathlib.Path, lines: Sequence[bytes], odd: Sequence[tuple[bytes, str]] = ()
) -> None:
    """Replace a file by ``lines``, atomically, after ``odd`` ones were appended to its .odd."""
    if odd:
        aside = path.with_name(f"{path.name}.odd")
        with opened(aside) as file:
            file.write(b"".join(line + b"\n" for line, _ in odd))
        reasons = [reason for _, reason in odd[:3]]
        if len(odd) > 3:
            reasons.append("…")
        text = "%s: %d lines are no records and were moved to %s (%s)"
        log.warning(text, path, len(odd), aside.name, "; ".join(reasons))
    with atomic_write.file(path) as file:
        file.write(b"".join(line + b"\n" for line in lines))


def opened(path: pathlib.Path, mode: str = "ab") -> Any:
    """Open a regular file, to append unbuffered or to read. Raises WorkdirError for others."""

    def opener(name: str, flags: int) -> int:
        return os.open(name, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)

    try:
        file = open(path, mode, buffering=0, opener=opener)
        if stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            return file
        file.close()
    except OSError as error:
        if error.errno not in (errno.ELOOP, errno.ENXIO, errno.EISDIR, errno.ESPIPE):
            raise
    raise WorkdirError(
        f"{path} is a link, a folder or a device; expected the file of a run's records. Move it, or"
        " set another config.workdir"
    )


class Appended:
    """A file to append to. What a full disk refuses waits in memory until a flush."""

    def __init__(self, path: pathlib.Path):
        self._path = path
        self.file = opened(path)
        self.waiting = b""
        self._warned = False

    @classmethod
    def open(cls, path: str) -> "Appended":
        """Open a file for tensorboardX, which puts a prefix before its path."""
        return cls(pathlib.Path(path.removeprefix("appended:")))

    def write(self, data: bytes) -> None:
        self.waiting += data

    def is_there(self) -> bool:
        """Whether nobody has removed or replaced the file."""
        return is_there(self._path, self.file.fileno())

    def flush(self) -> None:
        try:
            while self.waiting:
                n_written = self.file.write(self.waiting)
                self.waiting = self.waiting[n_written:]
            self._warned = False
        except OSError as error:
            if not self._warned:
                log.error(
                    "%s cannot be written (%s); records are kept in memory until it can",
                    self._path,
                    error.strerror,
                )
            self._warned = True

    def close(self) -> None:
        self.flush()
        if self.waiting:
            log.error("%d bytes of %s were never written", len(self.waiting), self._path)
        self.file.close()


def is_there(path: pathlib.Path, file: int) -> bool:
    """Whether ``path`` still names the open ``file``."""
    try:
        return os.path.samestat(os.stat(path, follow_symlinks=False), os.fstat(file))
    except FileNotFoundError:
        return False


def _parse(line: bytes, problem: Check) -> tuple[dict[str, Any] | None, str]:
    try:
        record = json.loads(line.decode())
    except UnicodeDecodeError:
        return None, "it is not UTF-8"
    except (ValueError, RecursionError):
        return None, "it is not JSON, or cut short"
    if type(record) is not dict:
        return None, "it is no object"
    reason = problem(record)
    return (None, reason) if reason else (record, "")
