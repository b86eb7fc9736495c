"""One finding of the doctor."""

import re
import traceback
from typing import Any, NamedTuple

OK, WARN, FAIL = "ok", "warn", "fail"
MAX_TEXT = 4000  # [characters] of a finding


class Check(NamedTuple):
    """The name of a check, its finding, and the remedy."""

    group: str  # host, devices, disk, …
    name: str
    verdict: str  # OK, WARN or FAIL
    text: str  # one line
    remedy: str = ""  # one line; empty if the verdict is OK


class Findings(NamedTuple):
    """The checks of a group, and facts for the groups after it."""

    checks: list[Check]
    facts: dict[str, Any]


def ok(group: str, name: str, text: str) -> Check:
    return Check(group, name, OK, _in_one_line(text))


def warn(group: str, name: str, text: str, remedy: str) -> Check:
    return Check(group, name, WARN, _in_one_line(text), remedy)


def fail(group: str, name: str, text: str, remedy: str) -> Check:
    return Check(group, name, FAIL, _in_one_line(text), remedy)


def from_json(value: Any) -> Check:
    """Parse a check that came from another process. Raises ValueError for anything else."""
    match value:
        case [str(), str(), "ok" | "warn" | "fail", str(), str()]:
            return Check(*value)
    raise ValueError("this is not a finding of the doctor")


def raised(error: BaseException) -> str:
    """Describe an error of a user's code: its name, its text, and the line that raised it."""
    description = f"{type(error).__name__}: {error}"
    frames = traceback.extract_tb(error.__traceback__)
    in_files = [frame for frame in frames if frame.filename[0] != "<"]
    # A SyntaxError names its line itself.
    if isinstance(error, SyntaxError) or not in_files:
        return description
    last = in_files[-1]
    return f"{description} ({last.filename}, line {last.lineno})"


def _in_one_line(text: str) -> str:
    # Errors list their reasons in lines below a sentence.
    text = re.sub(r":\n\s+", ": ", text)
    text = re.sub(r"\n {2,}(?=\S)", "; ", text)
    words = text.split()
    return " ".join(words)[:MAX_TEXT]
