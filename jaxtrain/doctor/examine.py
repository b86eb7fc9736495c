"""The order of the doctor's checks: the processes meet, each looks at its own machine, then all at what is between them."""

import os
import secrets
import socket
import time
from collections.abc import Sequence
from typing import Any

from jaxtrain.doctor import config, disk, host, network, software
from jaxtrain.doctor.apart import Apart
from jaxtrain.doctor.check import FAIL, Check, fail, from_json, ok, warn
from jaxtrain.doctor.meeting import Host, MeetingError, Visitor
from jaxtrain.doctor.report import Report
from jaxtrain.parallel import cluster
from jaxtrain.parallel.cluster import discover, rendezvous
from loaders.io import machine

# [s] that each group may take: those that read folders begin together, and all others come one after the other.
DEVICES, CONFIG, WRITING, READING, DATA = 90.0, 60.0, 25.0, 25.0, 60.0
WRITTEN = 3  # folders that a run writes to: the cache, the workdir, the checkpoints
ITSELF = 20.0  # for what a process looks at by itself, and for the start of a slower one
LOCAL = ITSELF + DEVICES + CONFIG + WRITTEN * WRITING + READING + DATA  # until the slowest has done its own checks
ROUND = 60.0  # for what follows: each measurement between two hosts, each look at the others' files
ANSWER = LOCAL + ROUND  # that process 0 is waited for, once all are there


def examine(source: str, overrides: Sequence[tuple[str, str]], *, wait: float) -> Report:
    """Looks at everything, and returns what this process has to report.

    Args:
      source, overrides: the config of the run ("" = none).
      wait: seconds for the other processes to come.
    """
    began, found = time.monotonic(), []
    membership = cluster.Cluster()
    try:
        membership = cluster.find()
        if membership.note:
            found.append(
                warn("processes", "launcher", membership.note, "start the processes with srun, mpirun or the variables")
            )
        elif membership.processes == 1:
            found.append(ok("processes", "launcher", "one process"))
    except cluster.ClusterError as error:
        remedy = "correct these variables, or the launcher's options"
        found += [fail("processes", "launcher", problem, remedy) for problem in error.problems]
    meeting = None
    if membership.processes > 1:
        meeting, problem = _meet(membership, wait)
        found += [problem] if problem else []
    hosts = {membership.process: socket.gethostname()}
    try:
        token = meeting.share(secrets.token_hex(network.TOKEN // 2)) if meeting else ""
        met = time.monotonic()
        own, facts = _alone(source, overrides, membership)
        found += own
        if meeting:
            return _together(meeting, membership, found, facts, token, began=began, met=met)
        here = membership.coordinator.rpartition(":")[0]  # "" of one process alone
        found += network.names(several_hosts=bool(here) and not rendezvous.is_loopback(here))
        found += network.interfaces(os.environ, "")
    except MeetingError as error:
        found.append(fail("processes", "meeting", str(error), error.remedy))
    finally:
        if meeting:
            meeting.close()
    well = not any(check.verdict == FAIL for check in found)
    checks = [(membership.process, check) for check in found]
    return Report(checks, hosts, membership.processes, time.monotonic() - began, True, well)


def _meet(membership: cluster.Cluster, wait: float) -> tuple[Host | Visitor | None, Check | None]:
    """The meeting, or what is in its way."""
    coordinator, job = membership.coordinator, membership.job
    try:
        secret = discover.secret_of(os.environ, coordinator)
        if membership.process == 0:
            return Host(coordinator, processes=membership.processes, job=job, secret=secret, wait=wait), None
        return Visitor(
            coordinator,
            process=membership.process,
            processes=membership.processes,
            job=job,
            secret=secret,
            wait=wait,
            answer=wait + ANSWER,
        ), None
    except cluster.ClusterError as error:
        remedy = "export JAXTRAIN_SECRET=$(openssl rand -hex 32) before srun; mpirun -x JAXTRAIN_SECRET; the same on all hosts"
        return None, fail("processes", "secret", error.problems[0], remedy)
    except MeetingError as error:
        text, remedy = str(error), error.remedy
        if membership.process == 0:
            port = int(coordinator.rpartition(":")[2])
            owner = network.port_owner(port)
            text += f"; {owner} listens there" if owner else ""
            remedy = "end it, or choose another port: JAXTRAIN_COORDINATOR=HOST:PORT"
        return None, fail("processes", "meeting", text, remedy)


def _alone(
    source: str, overrides: Sequence[tuple[str, str]], membership: cluster.Cluster
) -> tuple[list[Check], dict[str, Any]]:
    """What a process finds on its own machine, and facts that the others compare."""
    given = {"source": source, "overrides": [list(pair) for pair in overrides]}
    gpus = len([name for name in os.listdir("/dev") if name.startswith("nvidia") and name[6:].isdecimal()])
    facts = software.facts()
    checks = [software.examine(facts), *host.examine(processes=membership.processes, gpus=gpus)]
    remedy = "see dmesg and nvidia-smi; a driver that hangs needs a reset of the device, or a restart of the host"
    found, more = Apart("devices", {"local": list(membership.local_devices)}).result(within=DEVICES, remedy=remedy)
    checks, facts = checks + found, facts | more
    if source:
        here = facts.get("devices", {"count": 0, "kind": ""})
        asked = {**given, "count": here["count"] * membership.processes, "kind": here["kind"]}
        remedy = f"see whether {source} itself, its workdir, or the file system of its data hangs"
        crashed = f"correct {source}, or the workload and loader that it names: something there ends the process"
        looking = Apart("config", asked, environment=config.ENVIRONMENT)
        found, more = looking.result(within=CONFIG, remedy=remedy, crashed=crashed)
        checks, facts = checks + found, facts | (more if "workdir" in more else config.typed(overrides))
    found, more = _folders(facts, membership.process)
    checks, facts = checks + found, facts | more
    if "config" in facts:
        asked = {**given, "process": membership.process, "processes": membership.processes}
        asked["wanted"] = facts.get("rows_per_second", 0.0)
        crashed = "the loader, or a package that it uses, ends the process: look at the data, or report it"
        found, more = Apart("data", asked).result(
            within=DATA, remedy="see whether the data's file system answers", crashed=crashed
        )
        checks, facts = checks + found, facts | more
    return checks, facts


def _folders(facts: dict[str, Any], process: int) -> tuple[list[Check], dict[str, Any]]:
    """What is found of the folders that a run writes to, one after the other, and of those that it reads.

    A fact is the folder of the checkpoints that the processes must share, "shared", where it can be used on this host.
    """
    written, shared = [(str(machine.cache_folder()), "cache")], ""
    if "workdir" in facts:
        written += [(facts["workdir"], "workdir"), *([(facts["folder"], "checkpoints")] if facts["folder"] else [])]
        shared = written[-1][0]
    checks: list[Check] = []
    for folder, what in written:
        asked = {"folder": folder, "what": what, "writes": True}
        if folder == shared and process == 0:
            asked["checkpoints"] = facts.get("checkpoints")
        found, _ = Apart("disk", asked).result(within=WRITING, remedy=_hangs(folder))
        checks += found
        if folder == shared and ("://" in folder or any(check.verdict == FAIL for check in found)):
            shared = ""
    reads = facts.get("reads", {}).items()
    reading = [(folder, Apart("disk", {"folder": folder, "what": f"data.{name}", "writes": False})) for name, folder in reads]
    for folder, looking in reading:
        checks += looking.result(within=READING, remedy=_hangs(folder))[0]
    return checks, {"shared": shared}


def _hangs(folder: str) -> str:
    return f"the file system of {folder} hangs: see its server, and mount it again"


def _together(
    meeting: Host | Visitor,
    membership: cluster.Cluster,
    found: list[Check],
    facts: dict[str, Any],
    token: str,
    *,
    began: float,
    met: float,
) -> Report:
    """What the processes find between them, who ``began``, and ``met``, at these times. Raises MeetingError: process 0 went."""
    me, coordinator = membership.process, membership.coordinator.rpartition(":")[0].strip("[]")
    if isinstance(meeting, Host):
        here = rendezvous.addresses(coordinator, 0) or [""]
        at, address = here[0], coordinator
    else:
        at = address = meeting.address
    listener = network.Listener(at, token.encode())
    try:
        place = {"host": network.host_id(), "name": socket.gethostname(), "address": address, "port": listener.port}
        first = meeting.gather({"facts": facts, **place}, within=max(met + LOCAL - time.monotonic(), 1.0))
        plan = meeting.share(_plan(first, membership) if isinstance(meeting, Host) else None)
        places = {int(p): x for p, x in plan["places"].items()}
        several = len({x["host"] for x in places.values()}) > 1
        found += network.names(several_hosts=several)
        found += network.interfaces(os.environ, "" if rendezvous.is_loopback(at) else at)
        if isinstance(meeting, Host):
            found += network.measured(plan["stations"], plan["rounds"])
        for pairs in plan["rounds"]:
            for a, b in pairs:
                if a == me and b in places:
                    found += _measure(a, b, places, token)
            meeting.share(meeting.gather(None, within=ROUND) and None)
        found += _shared(meeting, plan, token, me, can_look=facts["shared"] == plan["shared"])
    finally:
        listener.close()
    reports = meeting.gather([list(check) for check in found], within=ROUND)
    if not isinstance(meeting, Host):
        well = bool(meeting.share())
        return Report([(me, check) for check in found], {me: place["name"]}, membership.processes, 0.0, False, well)
    checks = [(p, from_json(check)) for p, own in reports.items() for check in own]
    checks += [(0, check) for check in _compared(first)]
    checks += [(0, check) for check in _present(meeting, membership, reports, first)]
    well = not any(check.verdict == FAIL for _, check in checks)
    meeting.share(well)
    names = {p: x["name"] for p, x in first.items()}
    return Report(checks, names, membership.processes, time.monotonic() - began, True, well)


def _plan(first: dict[int, Any], membership: cluster.Cluster) -> dict[str, Any]:
    """What all do next: one process of each host measures (two, if there is one host), in rounds; and the folder to look at."""
    places = {p: {name: x[name] for name in ("host", "name", "address", "port")} for p, x in first.items()}
    by_host: dict[str, int] = {}
    for p, x in sorted(places.items()):
        by_host.setdefault(x["host"], p)
    stations = list(by_host.values()) if len(by_host) > 1 else sorted(places)[:2]
    rounds = network.rounds(stations) if len(stations) > 1 else []
    return {"places": places, "stations": len(stations), "rounds": rounds, "shared": first[0]["facts"]["shared"]}


def _measure(a: int, b: int, places: dict[int, Any], token: str) -> list[Check]:
    there = places[b]
    who = f"process {a} ({places[a]['name']}) to {b} ({there['name']})"
    try:
        return list(network.judge(who, network.measure(there["address"], there["port"], token.encode())))
    except OSError as error:
        return [network.unreached(who, there["address"], there["port"], error)]


def _shared(meeting: Host | Visitor, plan: dict[str, Any], token: str, me: int, *, can_look: bool) -> list[Check]:
    """Whether all processes see the folder of process 0's checkpoints.

    A process for which that folder failed, or which has another one, is left out (not ``can_look``): it has said so, and
    would hang where its server is gone.
    """
    if not plan["shared"]:
        return []
    try:
        shared = disk.Shared(plan["shared"], token[:16]) if can_look else None
    except OSError:
        shared = None  # this process cannot see the folder at all
    if not isinstance(meeting, Host):
        if meeting.share():
            looked = shared.look(me) if shared else {"seconds": None, "locked": None}
            meeting.gather(looked if can_look else None, within=ROUND)
            meeting.share()
        return []
    try:
        if shared:
            shared.make()
    except OSError:
        shared = None  # which the check of the folder has named
    meeting.share(shared is not None)
    if not shared:
        return []
    try:
        seen = {p: looked for p, looked in meeting.gather(None, within=ROUND).items() if looked}
        hosts = {int(p): x["name"] for p, x in plan["places"].items()}
        missing = shared.missing([p for p, x in seen.items() if x["seconds"] is not None]) if seen else []
        return list(disk.judge_shared(plan["shared"], seen, missing, hosts)) if seen else []
    finally:
        shared.remove()
        meeting.share(None)


def _compared(first: dict[int, Any]) -> list[Check]:
    reports = [{"process": p, "host": x["name"], "facts": x["facts"]} for p, x in sorted(first.items())]
    return list(software.compare(reports))


def _present(meeting: Host, membership: cluster.Cluster, reports: dict[int, Any], first: dict[int, Any]) -> list[Check]:
    """Who never came, who went, and who was sent away."""
    port = membership.coordinator
    remedy = f"see what they print: each that cannot reach process 0 at {port} says why"
    checks = [
        fail("processes", "refused", text, "give every job a port of its own, and every process its number")
        for text in meeting.refused
    ]
    never = [p for p in range(membership.processes) if p not in meeting.met]
    gone = sorted(set(meeting.met) - set(reports))
    if never:
        text = f"process {', '.join(map(str, never[:16]))} of {membership.processes} did not come"
        checks.append(fail("processes", "present", text, f"start it; {remedy}"))
    if gone:
        named = ", ".join(f"process {p} ({first[p]['name'] if p in first else 'of an unknown host'})" for p in gone[:16])
        checks.append(fail("processes", "present", f"{named} came, and did not answer to the end", "see what it printed"))
    if not never and not gone:
        text = f"all {membership.processes} processes met at {port} ({membership.launcher})"
        checks.append(ok("processes", "present", text))
    return checks
