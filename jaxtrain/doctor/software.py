"""What must be the same in all processes, and what this installation lacks."""

import os
import platform
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jaxtrain import cluster
from jaxtrain.cluster import rendezvous
from jaxtrain.doctor.check import Check, fail, ok, warn

GROUP = "software"
# What steers compilers and communication; a process's own place in the job is not among it.
STEERS = ("XLA_", "NCCL_", "LIBTPU_", "JAX_", "GLOO_")
OWN = (
    "JAX_COORDINATOR",
    "JAX_PROCESS",
    "JAX_LOCAL",
    "JAX_NUM",
    "NCCL_SOCKET_IFNAME",
    "GLOO_SOCKET_IFNAME",
    "JAX_COMPILATION_CACHE",
)
# Topic -> (whether a difference is an error, the remedy).
TOPICS: dict[str, tuple[bool, str]] = {
    "packages": (True, "install the same wheels on every host: pip install with one constraints file, or one image"),
    "commit": (True, "bring the checkouts to one commit: git pull, on every host"),
    "python": (False, "use one version of Python and one kind of processor everywhere"),
    "config": (True, "start all processes with the same --config and overrides, from the same file"),
    "environment": (False, "set these variables alike in all processes: mpirun -x NAME, srun --export=ALL"),
    "devices": (True, "give every process as many devices, of one kind"),
    "data": (True, "bring the same data to every host, then rerun; a checkpoint would refuse one of them"),
}


def facts() -> dict[str, Any]:
    """By topic; config, devices and data are added by those who find them."""
    return {
        "packages": cluster.versions(),
        "commit": cluster.commit(),
        "python": {"version": ".".join(platform.python_version_tuple()[:2]), "machine": platform.machine()},
        "environment": {k: v[:500] for k, v in sorted(os.environ.items()) if k.startswith(STEERS) and not k.startswith(OWN)},
    }


def examine(found: Mapping[str, Any]) -> Check:
    """What is installed, of `facts`. What is missing ends every command before it begins: `jaxtrain.commands.installation`."""
    packages, commit = found["packages"], found["commit"]
    text = f"jaxtrain {packages['jaxtrain']}{f' ({commit})' if commit else ''}, jax {packages['jax']}"
    return ok(GROUP, "installation", f"{text}, Python {sys.version.split()[0]}")


def compare(reports: Sequence[Mapping[str, Any]]) -> Iterator[Check]:
    """Args: reports: {"process", "host", "facts": {topic: …}} of all processes."""
    same = []
    for topic, (is_error, remedy) in TOPICS.items():
        known = [dict(report, facts={topic: report["facts"][topic]}) for report in reports if topic in report["facts"]]
        if len(known) < 2:
            continue
        if problem := rendezvous.differences(known):
            text = "; ".join(line.strip() for line in problem.splitlines()[1:])
            yield (fail if is_error else warn)(GROUP, f"same {topic}", text, remedy)
        else:
            same.append(topic)
    if same:
        yield ok(GROUP, "the same", f"{', '.join(same)}, in all {len(reports)} processes")
