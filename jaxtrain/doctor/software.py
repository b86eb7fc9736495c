"""The software of a process, and the facts that must be the same in all processes."""

import os
import platform
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from jaxtrain.doctor.check import Check, fail, ok, warn
from jaxtrain.parallel import cluster
from jaxtrain.parallel.cluster import rendezvous

GROUP = "software"
# Variables that steer compilers and communication, without a process's own place in the job.
STEERS = ("XLA_", "NCCL_", "LIBTPU_", "JAX_")
OWN = ("JAX_COORDINATOR", "JAX_PROCESS", "JAX_LOCAL", "JAX_NUM", "JAX_COMPILATION", "NCCL_SOCKET")
Grade = Callable[[str, str, str, str], Check]
# By topic: the verdict if it differs, the verdict if some processes lack it, the remedy.
TOPICS: dict[str, tuple[Grade, Grade, str]] = {
    "packages": (
        fail,
        fail,
        "install the same wheels on every host: one constraints file, one image",
    ),
    "commit": (fail, fail, "bring the checkouts to one commit: git pull, on every host"),
    # Wheels of one version may be other builds, and a checkout may be edited.
    "files of jaxtrain": (
        fail,
        fail,
        "install the same wheel on all hosts, or see git diff on each",
    ),
    "extension of jaxtrain": (
        warn,
        warn,
        "install the same wheel, unless each host built it itself",
    ),
    "python": (warn, warn, "use one version of Python and one kind of processor everywhere"),
    "config": (fail, fail, "start all processes with the same --config and overrides"),
    "workdir": (fail, fail, "start all processes in one folder, or set config.workdir to /a/path"),
    "environment": (warn, warn, "set the same in all processes: mpirun -x, srun --export=ALL"),
    "devices": (fail, fail, "give every process as many devices, of one kind"),
    # A host without data may make or copy them later.
    "data": (fail, warn, "bring the same data to every host: a checkpoint would refuse others"),
}


def facts() -> dict[str, Any]:
    """Return the facts by topic. Other groups add config, workdir, devices and data."""
    checkout = cluster.commit()
    steering = (name for name in sorted(os.environ) if name.startswith(STEERS))
    return {
        "packages": cluster.versions(),
        "checkout": checkout,
        "commit": checkout.removesuffix("-dirty"),  # the files say whether edits are the same
        "files of jaxtrain": cluster.digest_of_files(),
        "extension of jaxtrain": cluster.digest_of_extension(),
        "python": {"version": "{}.{}".format(*sys.version_info), "machine": platform.machine()},
        "environment": {x: os.environ[x][:500] for x in steering if not x.startswith(OWN)},
    }


def examine(found: Mapping[str, Any]) -> Check:
    packages, commit = found["packages"], found["checkout"]
    text = f"jaxtrain {packages['jaxtrain']}{f' ({commit})' if commit else ''}"
    text += f", jax {packages['jax']}, Python {platform.python_version()}"
    return ok(GROUP, "installation", text)


def compare(reports: Sequence[Mapping[str, Any]]) -> Iterator[Check]:
    """Compare the facts of all processes. ``reports`` has {"process", "host", "facts"} of each."""
    same = []
    for topic, (differs, lacks, remedy) in TOPICS.items():
        known = [{**x, "facts": {topic: x["facts"][topic]}} for x in reports if topic in x["facts"]]
        lacking = [x for x in reports if topic not in x["facts"]]
        if known and lacking:
            named = ", ".join(f"process {x['process']} ({x['host']})" for x in lacking[:8])
            text = (
                f"{named} {'has' if len(lacking) == 1 else 'have'} none; known of {len(known)} of"
                f" {len(reports)} processes"
            )
            yield lacks(GROUP, f"same {topic}", text, remedy)
        if problem := rendezvous.differences(known):
            yield differs(
                GROUP,
                f"same {topic}",
                "; ".join(line.strip() for line in problem.splitlines()[1:]),
                remedy,
            )
        elif known and not lacking:
            same.append(topic)
    if same:
        yield ok(GROUP, "the same", f"{', '.join(same)}, in all {len(reports)} processes")
