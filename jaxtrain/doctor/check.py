"""One finding of the doctor."""

import re
import traceback
from typing import Any, NamedTuple

OK, WARN, FAIL = "ok", "warn", "fail"
LONGEST = 4000  # [characters] of a finding


class Check(NamedTuple):
    """What was looked at, what was found, and what to do about it."""

    group: str  # host, devices, disk, …
    name: str
    verdict: str  # OK, WARN or FAIL
    text: str  # one line
    remedy: str = ""  # one line; empty where the verdict is OK


def ok(group: str, name: str, text: str) -> Check:
    return Check(group, name, OK, _line(text))


def warn(group: str, name: str, text: str, remedy: str) -> Check:
    return Check(group, name, WARN, _line(text), remedy)


def fail(group: str, name: str, text: str, remedy: str) -> Check:
    return Check(group, name, FAIL, _line(text), remedy)


def from_json(found: Any) -> Check:
    """A check that came from another process. Raises ValueError for anything else."""
    if not isinstance(found, list) or len(found) != len(Check._fields) or not all(isinstance(x, str) for x in found):
        raise ValueError("this is no finding of the doctor")
    if found[2] not in (OK, WARN, FAIL):
        raise ValueError(f"the verdict {found[2]!r} is unknown")
    return Check(*found)


def raised(error: BaseException) -> str:
    """An error of somebody's code: its name, what it says, and the line where it was raised."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith("<")]
    at = f" ({frames[-1].filename}, line {frames[-1].lineno})" if frames and not isinstance(error, SyntaxError) else ""
    return f"{type(error).__name__}: {error}{at}"


def in_bytes(n: float) -> str:
    """A number of bytes for a person, in decimal units."""
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if n >= size:
            return f"{n / size:.3g} {unit}"
    return f"{n:.0f} B"


def _line(text: str) -> str:
    listed = re.sub(r"\n {2,}(?=\S)", "; ", re.sub(r":\n\s+", ": ", text))  # below a sentence, as errors list their reasons
    return " ".join(listed.split())[:LONGEST]
