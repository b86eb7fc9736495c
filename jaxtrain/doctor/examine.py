"""The order of the doctor's checks: on this machine, and between the processes of a job."""

import socket
import tempfile
import time
from collections.abc import Sequence
from typing import Any

from jaxtrain.doctor import disk, host, in_subprocess, network, peers, software
from jaxtrain.doctor.check import FAIL, Check, Found, fail, ok, warn
from jaxtrain.doctor.output import Report
from jaxtrain.parallel import cluster
from jaxtrain.parallel.cluster import rendezvous
from loaders.io import machine

DEVICES, CONFIG, WRITING, DATA = 90.0, 60.0, 25.0, 60.0  # [s] for each group
WRITTEN = 4  # folders that a run writes to: TMPDIR, the cache, the workdir, the checkpoints
ITSELF = 30.0  # for the checks in this process, and for the start of a slower process
LOCAL = ITSELF + DEVICES + CONFIG + WRITTEN * WRITING + DATA  # of the slowest process
TOGETHER = 60.0  # for the checks of each other's ports and files
HANGS = "its file system hangs: see its server, and mount it again"
Overrides = Sequence[tuple[str, str]]
Facts = dict[str, Any]


def examine(source: str, overrides: Overrides, *, wait: float) -> Report:
    """Run all checks for a config ("" = none), and wait ``wait`` s for other processes."""
    began = time.monotonic()
    membership, found = _membership()
    several = not rendezvous.is_loopback(membership.coordinator.rpartition(":")[0] or "localhost")
    job = well = None
    try:
        if membership.processes > 1:
            job = peers.Peers(membership, wait=wait)
            several = job.several
    except cluster.ClusterError as error:
        remedy = "export JAXTRAIN_SECRET=$(openssl rand -hex 32); mpirun -x JAXTRAIN_SECRET"
        found.append(fail("processes", "secret", error.problems[0], remedy))
    except cluster.RendezvousError as error:
        found.append(peers.unmet(error, membership))
    until = time.monotonic() + LOCAL
    checks, facts = _alone(source, overrides, membership)
    found += [*checks, network.host_name(several_hosts=several)]
    try:
        well = _together(job, found, facts, until) if job else None
    except cluster.RendezvousError as error:
        found.append(peers.unmet(error, membership))
    seconds = time.monotonic() - began
    if job and well is not None:
        return Report(
            job.checks, job.hosts, membership.processes, seconds, membership.process == 0, well
        )
    own = [(membership.process, check) for check in found]
    hosts = {membership.process: socket.gethostname()}
    well = all(check.verdict != FAIL for check in found)
    return Report(own, hosts, membership.processes, seconds, True, well)


def _membership() -> tuple[cluster.Cluster, list[Check]]:
    """Return the place of this process among others, and findings on the launcher's variables."""
    try:
        found = cluster.find()
    except cluster.ClusterError as error:
        remedy = "correct these variables, or the launcher's options"
        return cluster.Cluster(), [fail("processes", "launcher", x, remedy) for x in error.problems]
    if found.note:
        remedy = "start the processes with srun, mpirun or the variables"
        return found, [warn("processes", "launcher", found.note, remedy)]
    return found, [ok("processes", "launcher", "one process")] if found.processes == 1 else []


def _alone(source: str, overrides: Overrides, membership: cluster.Cluster) -> Found:
    """Return the findings on this machine, and the facts that processes compare."""
    facts = software.facts()
    checks = [software.examine(facts), *host.examine(processes=membership.processes)]

    def look(group: str, asked: dict[str, Any], **bounds: Any) -> None:
        found, more = in_subprocess.examine(group, asked, **bounds)
        checks.extend(found)
        facts.update(more)

    remedy = "see dmesg and nvidia-smi; if a driver hangs, reset the device, or restart the host"
    look("devices", {"local": list(membership.local_devices)}, within=DEVICES, remedy=remedy)
    given = {"source": source, "overrides": [list(pair) for pair in overrides]}
    if source:
        here = facts.get("devices", {"count": 0, "kind": ""})
        look(
            "config",
            {**given, "count": here["count"] * membership.processes, "kind": here["kind"]},
            within=CONFIG,
            remedy=(
                f"see whether {source} itself, its workdir, or the file system of its data hangs"
            ),
            crashed=(
                f"correct {source}, or its workload or loader: something there ends the process"
            ),
        )
    found, facts["shared"] = _folders(facts, membership.process)
    checks += found
    if "config" in facts:
        asked = {**given, "process": membership.process, "processes": membership.processes}
        asked["wanted"] = facts.get("rows_per_second", 0.0)
        remedy = "see whether the data's file system answers"
        crashed = "the loader, or a package of its, ends the process: see the data, or report it"
        look("data", asked, within=DATA, remedy=remedy, crashed=crashed)
    return checks, facts


def _folders(facts: Facts, process: int) -> tuple[list[Check], str]:
    """Check the folders that a run writes to. Returns the shared one, "" if unusable here."""
    written = {"TMPDIR": tempfile.gettempdir(), "cache": str(machine.cache_folder())}
    shared, checks = "", list[Check]()
    if "workdir" in facts:
        written["workdir"] = shared = facts["workdir"]
        if facts["folder"]:
            written["checkpoints"] = shared = facts["folder"]
    for what, folder in written.items():
        asked: Facts = {"folder": folder, "what": what}
        if folder == shared and process == 0:
            asked["checkpoints"] = facts.get("checkpoints")
        found, _ = in_subprocess.examine("disk", asked, within=WRITING, remedy=HANGS)
        checks += found
        if folder == shared and ("://" in folder or any(x.verdict == FAIL for x in found)):
            shared = ""
    return checks, shared


def _together(job: peers.Peers, found: list[Check], facts: Facts, until: float) -> bool:
    """Hold the other rendezvous, and return whether nothing failed in any process.

    Process 0 waits ``until`` then for findings, others longer. Raises RendezvousError.
    """
    me = job.process
    listener = next(rendezvous.sockets([] if job.several else ["127.0.0.1"], 0))
    with listener, disk.shown(facts["shared"], job.token, me) as folder:
        place = {"machine": network.machine_id(), "port": listener.getsockname()[1]}
        own = {**place, "folder": folder, "facts": facts, "checks": [list(x) for x in found]}
        within = max(until - time.monotonic(), 1.0) + (TOGETHER if me else 0.0)
        plan = job.hold("the findings of each", own, job.found, within)
        more = list(network.ports(me, plan["places"]))
        if me in plan["shared"] and len(plan["shared"]) > 1:
            more.append(disk.see(folder, job.token, [0] if me else plan["shared"][1:]))
        seen = {"checks": [list(check) for check in more]}
        return bool(job.hold("the check of each other", seen, job.saw, TOGETHER))
