"""What must be the same in all processes, and what this installation lacks."""

import os
import platform
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from jaxtrain.doctor.check import Check, fail, ok, warn
from jaxtrain.parallel import cluster
from jaxtrain.parallel.cluster import rendezvous

GROUP = "software"
# What steers compilers and communication; a process's own place in the job is not among it.
STEERS = ("XLA_", "NCCL_", "LIBTPU_", "JAX_")
OWN = ("JAX_COORDINATOR", "JAX_PROCESS", "JAX_LOCAL", "JAX_NUM", "NCCL_SOCKET_IFNAME", "JAX_COMPILATION_CACHE")
Judge = Callable[[str, str, str, str], Check]


class Topic(NamedTuple):
    """What must be the same in all processes."""

    differs: Judge  # how bad a difference is
    lacks: Judge  # how bad it is that some processes have none
    remedy: str


TOPICS = {
    "packages": Topic(fail, fail, "install the same wheels on every host: pip install with one constraints file, or one image"),
    "commit": Topic(fail, fail, "bring the checkouts to one commit: git pull, on every host"),
    # Of one version and commit, a wheel may be another build, and a checkout may have been edited.
    "files of jaxtrain": Topic(
        fail, fail, "install the same wheel on all hosts, or bring the checkouts to the same state: git status, git diff"
    ),
    # Hosts that build it each for themselves need not have the same bytes.
    "extension of jaxtrain": Topic(warn, warn, "install the same wheel on all hosts, unless each built it from these files"),
    "python": Topic(warn, warn, "use one version of Python and one kind of processor everywhere"),
    "config": Topic(fail, fail, "start all processes with the same --config and overrides, from the same file"),
    "workdir": Topic(fail, fail, "start all processes in the same folder, or set config.workdir to a path that begins with /"),
    "environment": Topic(warn, warn, "set these variables alike in all processes: mpirun -x NAME, srun --export=ALL"),
    "devices": Topic(fail, fail, "give every process as many devices, of one kind"),
    # A host that has not made or copied its data yet has none.
    "data": Topic(fail, warn, "bring the same data to every host, then rerun; a checkpoint would refuse one of them"),
}


def facts() -> dict[str, Any]:
    """By topic; config, workdir, devices and data are added by those who find them."""
    checkout = cluster.commit()
    return {
        "packages": cluster.versions(),
        "checkout": checkout,
        "commit": checkout.removesuffix("-dirty"),  # whether what differs from it is the same, the files say
        "files of jaxtrain": cluster.digest_of_files(),
        "extension of jaxtrain": cluster.digest_of_extension(),
        "python": {"version": ".".join(platform.python_version_tuple()[:2]), "machine": platform.machine()},
        "environment": {k: v[:500] for k, v in sorted(os.environ.items()) if k.startswith(STEERS) and not k.startswith(OWN)},
    }


def examine(found: Mapping[str, Any]) -> Check:
    """What is installed, of `facts`. What is missing ends every command before it begins: `jaxtrain.commands.installation`."""
    packages, commit = found["packages"], found["checkout"]
    text = f"jaxtrain {packages['jaxtrain']}{f' ({commit})' if commit else ''}, jax {packages['jax']}"
    return ok(GROUP, "installation", f"{text}, Python {sys.version.split()[0]}")


def compare(reports: Sequence[Mapping[str, Any]]) -> Iterator[Check]:
    """Args: reports: {"process", "host", "facts": {topic: …}} of all processes."""
    same = []
    for topic, (differs, lacks, remedy) in TOPICS.items():
        known = [dict(report, facts={topic: report["facts"][topic]}) for report in reports if topic in report["facts"]]
        lacking = [f"process {report['process']} ({report['host']})" for report in reports if topic not in report["facts"]]
        if known and lacking:
            more = f" and {len(lacking) - 8} others" if len(lacking) > 8 else ""
            who = f"{', '.join(lacking[:8])}{more} {'has' if len(lacking) == 1 else 'have'} none"
            yield lacks(GROUP, f"same {topic}", f"{who}; known of {len(known)} of {len(reports)} processes", remedy)
        if len(known) < 2:
            continue
        if problem := rendezvous.differences(known):
            text = "; ".join(line.strip() for line in problem.splitlines()[1:])
            yield differs(GROUP, f"same {topic}", text, remedy)
        elif not lacking:
            same.append(topic)
    if same:
        yield ok(GROUP, "the same", f"{', '.join(same)}, in all {len(reports)} processes")
