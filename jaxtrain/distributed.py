"""Processes: from the environment to a `Cluster` (a pure function), then an explicit `jax.distributed.initialize`."""

import logging
import os
from collections.abc import Mapping
from typing import NamedTuple

import jax
from jax.experimental import multihost_utils

from jaxtrain.config import ConfigError, Distributed

log = logging.getLogger("jaxtrain")

VARIABLES = ("JAXTRAIN_COORDINATOR", "JAXTRAIN_PROCESSES", "JAXTRAIN_PROCESS")


class Cluster(NamedTuple):
    """The processes of a run. ``coordinator`` is "" when there is only one."""

    coordinator: str  # host:port of process 0
    processes: int
    process: int


def cluster(environment: Mapping[str, str]) -> Cluster:
    """Reads JAXTRAIN_COORDINATOR (host:port), JAXTRAIN_PROCESSES and JAXTRAIN_PROCESS; none of them: one process.

    Raises ConfigError when only some are set, or when they make no sense together.
    """
    values = {name: environment.get(name, "") for name in VARIABLES}
    if not any(values.values()):
        return Cluster("", 1, 0)
    problems = [
        ("distributed", f"needs the variable {name}, since {_listed(values)} is set") for name, v in values.items() if not v
    ]
    numbers = {}
    for name in VARIABLES[1:]:
        if values[name] and not values[name].isdecimal():
            problems.append(("distributed", f"{name}={values[name]!r} is no number"))
        numbers[name] = int(values[name]) if values[name].isdecimal() else 0
    host, _, port = values[VARIABLES[0]].rpartition(":")
    if values[VARIABLES[0]] and not (host and port.isdecimal()):
        problems.append(("distributed", f"{VARIABLES[0]}={values[VARIABLES[0]]!r} is no host:port, for example 10.0.0.1:27508"))
    found = Cluster(values[VARIABLES[0]], numbers[VARIABLES[1]], numbers[VARIABLES[2]])
    if not problems and not 0 <= found.process < found.processes:
        problems.append(("distributed", f"process {found.process} of {found.processes} does not exist; they count from 0"))
    if problems:
        raise ConfigError(problems)
    return found


def initialize(found: Cluster, config: Distributed) -> None:
    """Joins the processes, with every value explicit. Raises RuntimeError, naming the rank and the coordinator."""
    if found.processes == 1:
        return
    log.info("process %d of %d, coordinator %s", found.process, found.processes, found.coordinator)
    try:
        jax.distributed.initialize(
            coordinator_address=found.coordinator,
            num_processes=found.processes,
            process_id=found.process,
            initialization_timeout=config.init_timeout,
            heartbeat_timeout_seconds=config.heartbeat_timeout,
        )
    except Exception as error:
        raise RuntimeError(
            f"process {found.process} of {found.processes} could not join the run at {found.coordinator} within "
            f"{config.init_timeout} s: {error}"
        ) from error


def use_compilation_cache() -> None:
    """Keeps compiled programs between runs, unless JAX_COMPILATION_CACHE_DIR already says where."""
    if not jax.config.jax_compilation_cache_dir:
        base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
        jax.config.update(
            "jax_compilation_cache_dir", os.path.join(os.environ.get("JAXTRAIN_CACHE") or f"{base}/jaxtrain", "xla")
        )


def is_main() -> bool:
    """Whether this process writes what is written once: console, metrics, pictures."""
    return jax.process_index() == 0


def barrier(name: str) -> None:
    """Returns when every process has come here."""
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(name)


def _listed(values: Mapping[str, str]) -> str:
    return ", ".join(name for name, value in values.items() if value)
