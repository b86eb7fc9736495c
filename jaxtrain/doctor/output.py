"""The doctor's findings as lines for a person, or as JSON."""

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from jaxtrain.doctor.check import FAIL, OK, WARN, Check

MAX_SHOWN = 600  # [characters] of a finding in a line; JSON has all of it
GROUPS = ("processes", "software", "config", "host", "devices", "disk", "data")


class Report(NamedTuple):
    """The findings of one process."""

    checks: Sequence[Check]
    process: int
    processes: int  # of the job
    host: str
    seconds: float

    @property
    def failed(self) -> bool:
        return any(check.verdict == FAIL for check in self.checks)


def in_order(checks: Sequence[Check]) -> list[Check]:
    """Sort findings by their groups. Those of one group stay in their order."""
    return sorted(checks, key=lambda check: GROUPS.index(check.group))


def lines(report: Report) -> Iterator[str]:
    if report.processes > 1:
        yield f"process {report.process} of {report.processes}, on {report.host}"
    titles = [f"{check.group}: {check.name}" for check in report.checks]
    width = max(map(len, titles), default=0)
    for check in in_order(report.checks):
        yield _line(check, width)
    counts = Counter(check.verdict for check in report.checks)
    verdicts = f"{counts[OK]} ok, {counts[WARN]} warn, {counts[FAIL]} fail"
    yield f"{verdicts}, in {report.seconds:.0f} s"


def _line(check: Check, width: int) -> str:
    title = f"{check.group}: {check.name}"
    text = check.text[:MAX_SHOWN]
    if len(check.text) > MAX_SHOWN:
        text += " … (--json has the rest)"
    if check.remedy:
        text += f" → {check.remedy}"
    return f"{check.verdict:4}  {title:{width}}  {text}"


def as_json(report: Report) -> str:
    fields = {
        "ok": not report.failed,
        "process": report.process,
        "processes": report.processes,
        "host": report.host,
        "seconds": round(report.seconds, 1),
        "checks": [check._asdict() for check in in_order(report.checks)],
    }
    return json.dumps(fields, indent=1)
