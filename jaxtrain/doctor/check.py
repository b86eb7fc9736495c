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


Found = tuple[list[Check], dict[str, Any]]  # and facts for other checks


def ok(group: str, name: str, text: str) -> Check:
    return Check(group, name, OK, _line(text))


def warn(group: str, name: str, text: str, remedy: str) -> Check:
    return Check(group, name, WARN, _line(text), remedy)


def fail(group: str, name: str, text: str, remedy: str) -> Check:
    return Check(group, name, FAIL, _line(text), remedy)


def from_json(found: Any) -> Check:
    """Parse a check that came from another process. Raises ValueError for anything else."""
    match found:
        case [str(), str(), "ok" | "warn" | "fail", str(), str()]:
            return Check(*found)
    raise ValueError("this is not a finding of the doctor")


def raised(error: BaseException) -> str:
    """Describe an error of a user's code: its name, its text, and the line that raised it."""
    frames = [x for x in traceback.extract_tb(error.__traceback__) if x.filename[0] != "<"]
    at = f" ({frames[-1].filename}, line {frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {error}{'' if isinstance(error, SyntaxError) else at}"


def _line(text: str) -> str:
    # Errors list their reasons in lines below a sentence.
    return " ".join(re.sub(r"\n {2,}(?=\S)", "; ", re.sub(r":\n\s+", ": ", text)).split())[
        :MAX_TEXT
    ]
