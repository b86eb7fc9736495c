"""The doctor's findings as lines for a person, or as JSON."""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from jaxtrain.doctor.check import FAIL, OK, WARN, Check

MAX_SHOWN = 600  # [characters] of a finding in a line; JSON has all of it
GROUPS = ("processes", "software", "config", "host", "devices", "disk", "data", "network")


class Report(NamedTuple):
    """The findings: of all processes at process 0, else of the process itself."""

    checks: Sequence[tuple[int, Check]]  # by process
    hosts: Mapping[int, str]  # name of each process's host
    processes: int  # of the job
    seconds: float
    speaks: bool  # whether this process prints it
    well: bool  # whether nothing failed in any process


def merged(checks: Sequence[tuple[int, Check]]) -> list[tuple[list[int], Check]]:
    """List findings once with their processes, by group. ok ones share the first one's text."""
    found: dict[tuple[str, ...], tuple[list[int], Check]] = {}
    for process, check in checks:
        processes, _ = found.setdefault(
            check[:3] if check.verdict == OK else tuple(check), ([], check)
        )
        if process not in processes:
            processes.append(process)
    rank = {name: i for i, name in enumerate(GROUPS)}
    return sorted(found.values(), key=lambda x: (rank.get(x[1].group, len(rank)), min(x[0])))


def lines(report: Report) -> Iterator[str]:
    if report.processes > 1:
        by_host: dict[str, list[int]] = {}
        for process, host in sorted(report.hosts.items()):
            by_host.setdefault(host, []).append(process)
        named = ", ".join(f"{numbers(each)} on {host}" for host, each in by_host.items())
        yield f"{len(report.hosts)} of {report.processes} processes: {named}"
    rows = merged(report.checks)
    width = max((len(f"{check.group}: {check.name}") for _, check in rows), default=0)
    for processes, check in rows:
        where = f"[{numbers(processes)}] " if report.processes > 1 else ""
        remedy = f" → {check.remedy}" if check.remedy else ""
        rest = " … (--json has the rest)" if len(check.text) > MAX_SHOWN else ""
        text = f"{check.text[:MAX_SHOWN]}{rest}"
        yield f"{check.verdict:4}  {f'{check.group}: {check.name}':{width}}  {where}{text}{remedy}"
    n = {verdict: sum(x.verdict == verdict for _, x in rows) for verdict in (OK, WARN, FAIL)}
    yield f"{n[OK]} ok, {n[WARN]} warn, {n[FAIL]} fail, in {report.seconds:.0f} s"


def as_json(report: Report) -> str:
    hosts = {str(process): host for process, host in sorted(report.hosts.items())}
    head = {
        "ok": report.well,
        "processes": report.processes,
        "hosts": hosts,
        "seconds": round(report.seconds, 1),
    }
    checks = [{**x._asdict(), "processes": sorted(p)} for p, x in merged(report.checks)]
    return json.dumps({**head, "checks": checks}, indent=1)


def numbers(processes: Sequence[int]) -> str:
    """Write [0, 1, 2, 3, 7] as 0-3,7."""
    runs: list[list[int]] = []
    for p in sorted(processes):
        if runs and p == runs[-1][1] + 1:
            runs[-1][1] = p
        else:
            runs.append([p, p])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)
