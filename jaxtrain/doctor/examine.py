"""The order of the doctor's checks, in one process."""

import os
import socket
import tempfile
import time
from collections.abc import Sequence
from typing import Any

from jaxtrain.doctor import host, in_subprocess, software
from jaxtrain.doctor.check import Check, Findings, fail, ok, warn
from jaxtrain.doctor.output import Report
from jaxtrain.parallel import cluster
from jaxtrain.parallel.cluster import discover
from loaders.io import machine

DEVICES, CONFIG, WRITING, DATA = 90.0, 60.0, 25.0, 90.0  # [s] for each group
Overrides = Sequence[tuple[str, str]]


def examine(source: str, overrides: Overrides) -> Report:
    """Run all checks for a config ("" = none)."""
    began = time.monotonic()
    membership, checks = _membership()
    checks.append(software.examine())
    checks += host.examine(processes=membership.processes)
    devices = _devices(membership)
    checks += devices.checks
    config = Findings([], {})
    if source:
        config = _config(source, overrides, membership, devices.facts)
        checks += config.checks
    checks += _folders(config.facts)
    if config.facts:
        checks += _data(source, overrides, membership, config.facts)
    return Report(
        checks,
        membership.process,
        membership.processes,
        socket.gethostname(),
        time.monotonic() - began,
    )


def _membership() -> tuple[cluster.Cluster, list[Check]]:
    """Return the place of this process among others, and findings on the launcher's variables."""
    try:
        membership = cluster.find()
    except cluster.ClusterError as error:
        remedy = "correct these variables, or the launcher's options"
        checks = [fail("processes", "launcher", text, remedy) for text in error.problems]
        return cluster.Cluster(), checks
    if membership.note:
        remedy = "start the processes with srun, mpirun or the variables"
        return membership, [warn("processes", "launcher", membership.note, remedy)]
    if membership.processes == 1:
        return membership, [ok("processes", "launcher", "one process")]
    return membership, [_secret(membership)]


def _secret(membership: cluster.Cluster) -> Check:
    try:
        discover.secret_of(os.environ, membership.coordinator)
    except cluster.ClusterError as error:
        remedy = "export JAXTRAIN_SECRET=$(openssl rand -hex 32); mpirun -x JAXTRAIN_SECRET"
        return fail("processes", "secret", error.problems[0], remedy)
    text = f"{membership.processes} processes, with process 0 at {membership.coordinator}"
    return ok("processes", "launcher", f"{text} ({membership.launcher})")


def _devices(membership: cluster.Cluster) -> Findings:
    return in_subprocess.examine(
        "devices",
        {"local": list(membership.local_devices)},
        within=DEVICES,
        remedy=(
            "see dmesg and nvidia-smi; if a driver hangs, reset the device, or restart the host"
        ),
    )


def _config(
    source: str, overrides: Overrides, membership: cluster.Cluster, devices: dict[str, Any]
) -> Findings:
    arguments = {
        "source": source,
        "overrides": [list(pair) for pair in overrides],
        "count": devices.get("count", 0) * membership.processes,
        "kind": devices.get("kind", ""),
    }
    return in_subprocess.examine(
        "config",
        arguments,
        within=CONFIG,
        remedy=f"see whether {source} itself, its workdir, or the file system of its data hangs",
        crashed=f"correct {source}, or its workload or loader: something there ends the process",
    )


def _folders(config: dict[str, Any]) -> list[Check]:
    """Check the folders that a run writes to."""
    folders = {"TMPDIR": tempfile.gettempdir(), "cache": str(machine.cache_folder())}
    if config:
        folders["workdir"] = config["workdir"]
    if config.get("folder"):
        folders["checkpoints"] = config["folder"]
    checks = list[Check]()
    for name, folder in folders.items():
        arguments: dict[str, Any] = {"folder": folder, "what": name}
        if folder == (config.get("folder") or config.get("workdir")):
            arguments["checkpoints"] = config.get("checkpoints")
        remedy = "its file system hangs: see its server, and mount it again"
        checks += in_subprocess.examine("disk", arguments, within=WRITING, remedy=remedy).checks
    return checks


def _data(
    source: str, overrides: Overrides, membership: cluster.Cluster, config: dict[str, Any]
) -> list[Check]:
    arguments = {
        "source": source,
        "overrides": [list(pair) for pair in overrides],
        "process": membership.process,
        "processes": membership.processes,
        "wanted": config.get("rows_per_second", 0.0),
    }
    findings = in_subprocess.examine(
        "data",
        arguments,
        within=DATA,
        remedy="see whether the data's file system answers",
        crashed="the loader, or a package of its, ends the process: see the data, or report it",
    )
    return findings.checks
