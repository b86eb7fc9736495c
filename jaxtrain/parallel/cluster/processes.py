"""The processes of a run, joined: what they agree on, compare, gather and wait for."""

import hashlib
import importlib.metadata
import importlib.util
import json
import logging
import os
import pathlib
import re
import socket
import subprocess
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

import jaxtrain
from jaxtrain.config import Config, to_json
from jaxtrain.parallel.cluster import discover, notices, rendezvous
from jaxtrain.parallel.cluster.discover import Cluster
from jaxtrain.parallel.cluster.rendezvous import RendezvousError
from loaders.io import machine

log = logging.getLogger("jaxtrain")

# Packages whose versions must be equal in all processes, and which a checkpoint records, besides that of jaxtrain.
VERSIONED = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy")


def find() -> Cluster:
    """Returns the cluster that this machine's environment describes. Raises ClusterError."""
    gpus = len([name for name in _entries("/dev") if re.fullmatch(r"nvidia\d+", name)])
    return discover.from_environment(os.environ, gpus=gpus, metadata=notices.tpu_metadata(os.environ))


def initialize(membership: Cluster, config: Config, *, leave: Callable[[], Any] = lambda: False, refusal: str = "") -> None:
    """Joins the processes: first a roll call in which all must be present and identical, then JAX, with every value explicit.

    Args:
      leave: called repeatedly during the wait for others, which ends when it returns true.
      refusal: why process 0 cannot begin; the roll call says it to all.

    Raises:
      ClusterError: processes of several hosts have no JAXTRAIN_SECRET.
      RendezvousError: ``refusal``; processes, by number, are late, or differ (in the config, a package, the devices); the port
        is taken.
      Stopped: ``leave()`` returned true during the wait for others.
    """
    if membership.note:
        log.warning("%s", membership.note)
    if membership.processes == 1:
        return
    log.info(
        "process %d of %d (%s, on %s), coordinator %s",
        membership.process,
        membership.processes,
        membership.launcher,
        socket.gethostname(),
        membership.coordinator,
    )
    bounds = config.distributed
    secret = discover.secret_of(os.environ, membership.coordinator)
    rendezvous.meet(
        membership.coordinator,
        process=membership.process,
        processes=membership.processes,
        job=membership.job or f"the run in {os.path.abspath(config.workdir)}",
        facts={
            "config": json.loads(to_json(config)),
            "versions": versions(),
            # Not the extension: hosts that build it each for themselves need not have the same bytes.
            "the digest of jaxtrain's files": digest_of_files(),
            "launcher": membership.launcher,
            "gpus": len(membership.local_devices),
        },
        timeout=bounds.init_timeout,
        leave=leave,
        secret=secret,
        refusal=refusal,
    )
    host, _, port = membership.coordinator.rpartition(":")
    places = [host] if rendezvous.is_loopback(host) else rendezvous.addresses(host.strip("[]"), int(port))
    try:
        jax.distributed.initialize(
            coordinator_address=membership.coordinator,
            # JAX's own port has no secret: let it be where process 0 is reached, and nowhere else.
            coordinator_bind_address=_place(places[0], port) if membership.process == 0 and len(places) == 1 else None,
            num_processes=membership.processes,
            process_id=membership.process,
            local_device_ids=list(membership.local_devices),
            cluster_detection_method="deactivate",  # every value is given; JAX's guess would take the local rank for an ordinal
            initialization_timeout=bounds.init_timeout,
            heartbeat_timeout_seconds=bounds.heartbeat_timeout,
        )
    except Exception as error:
        raise RendezvousError(
            f"process {membership.process} of {membership.processes} could not join the run at "
            f"{membership.coordinator}: {error}"
        ) from error
    if problem := uneven(Counter(device.process_index for device in jax.devices()), membership.processes):
        raise RendezvousError(problem)
    if jax.default_backend() == "cpu":
        # Process 0 alone writes programs there, and a program has another key in each process (by the topology's fingerprint,
        # jax 0.10.2), so that process 0 alone would read one back. That was seen to run its collectives in another order than
        # one just compiled: the processes then wait for each other for ever.
        # `jaxtrain.compile.program_cache` keeps each process's.
        jax.config.update("jax_enable_compilation_cache", False)


def _place(host: str, port: str) -> str:
    return f"[{host}]:{port}" if ":" in host.strip("[]") and not host.startswith("[") else f"{host}:{port}"


def uneven(devices: Mapping[int, int], processes: int) -> str:
    """Names the processes that have another number of devices than most; "" when all have the same."""
    counts = [devices.get(process, 0) for process in range(processes)]
    usual = Counter(counts).most_common(1)[0][0]
    odd = [f"process {p} has {n}" for p, n in enumerate(counts) if n != usual]
    return f"the processes have different numbers of devices: {', '.join(odd)}, the others {usual}" if odd else ""


def compare(texts: Mapping[str, str]) -> None:
    """Compares named texts between all processes, by their hashes. Raises RendezvousError, with who differs in which text.

    Lines with callbacks to the host are left out, since they hold addresses.
    """
    if jax.process_count() == 1:
        return
    plain = ["\n".join(line for line in text.split("\n") if "callback" not in line) for text in texts.values()]
    own = np.stack([np.frombuffer(hashlib.sha256(text.encode()).digest(), np.uint8) for text in plain])
    every = np.asarray(multihost_utils.process_allgather(own))  # [processes, texts, 32]
    reports = [
        {"process": p, "facts": {f"{name}'s hash": bytes(row).hex()[:12] for name, row in zip(texts, rows, strict=True)}}
        for p, rows in enumerate(every)
    ]
    if problem := rendezvous.differences(reports):
        raise RendezvousError(problem)


def versions() -> dict[str, str]:
    """Versions of the packages that decide a run's numbers: jaxtrain's own, and of `VERSIONED` as they are installed."""
    return {"jaxtrain": jaxtrain.__version__} | {name: importlib.metadata.version(name) for name in VERSIONED}


def digest_of_files() -> str:
    """Of the Python files of jaxtrain and loaders, which two installations of one version or commit may not share."""
    here = pathlib.Path(jaxtrain.__file__).resolve().parents[1]
    named = [path.relative_to(here) for package in ("jaxtrain", "loaders") for path in (here / package).rglob("*.py")]
    # What begins with "." was left by an editor, and is imported by nobody.
    named = sorted(path for path in named if not any(part.startswith(".") for part in path.parts) and (here / path).is_file())
    digest = hashlib.sha256()
    for path in named:
        digest.update(f"{path.as_posix()} {hashlib.sha256((here / path).read_bytes()).hexdigest()}\n".encode())
    return digest.hexdigest()[:12]


def digest_of_extension() -> str:
    """Of the compiled extension; "" where there is none."""
    spec = importlib.util.find_spec("loaders._rust")
    return hashlib.sha256(pathlib.Path(spec.origin).read_bytes()).hexdigest()[:12] if spec and spec.origin else ""


def commit() -> str:
    """The commit of jaxtrain's checkout, with "-dirty" behind it where files differ from it; "" for an installed package."""
    here = os.path.dirname(os.path.abspath(jaxtrain.__file__))
    git = ["git", "-C", here]
    try:
        if subprocess.run([*git, "ls-files", "--error-unmatch", "__init__.py"], capture_output=True, timeout=5).returncode:
            return ""  # a package inside somebody's other checkout, or none
        told = subprocess.run([*git, "describe", "--always", "--dirty", "--abbrev=12"], capture_output=True, timeout=5)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return told.stdout.decode(errors="replace").strip()[:80]


def _entries(folder: str) -> list[str]:
    return os.listdir(folder) if os.path.isdir(folder) else []


def use_compilation_cache() -> None:
    """Keeps compiled programs between runs, unless JAX_COMPILATION_CACHE_DIR already says where."""
    options: Any = jax.config  # jax adds its options as it is imported
    if not options.jax_compilation_cache_dir:
        options.update("jax_compilation_cache_dir", str(machine.cache_folder("xla")))


def use_threads_for_host_devices() -> None:
    """Gives XLA's CPU client a thread for each of several host devices. Call it before the first device is touched.

    It runs independent collectives of one program at once on as many threads as there are cores (or NPROC says): with fewer
    threads than devices they can wait for each other for ever (seen with jax 0.10.2: 8 devices on 2 cores).
    """
    count = re.search(r"xla_force_host_platform_device_count=(\d+)", os.environ.get("XLA_FLAGS", ""))
    if count and int(count[1]) > 1:
        os.environ.setdefault("NPROC", str(max(4 * int(count[1]), os.cpu_count() or 1)))


def is_main() -> bool:
    """Whether this process is the one that writes what is written once: console, metrics, pictures."""
    return jax.process_index() == 0


def barrier(name: str) -> None:
    """Returns when every process has reached it."""
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(name)


def agree(value: int) -> int:
    """Returns process 0's value on all processes, which may not see the same state of a file system yet."""
    if jax.process_count() == 1:
        return value
    return int(multihost_utils.broadcast_one_to_all(np.int32(value)))


def agree_on(values: Sequence[int]) -> list[int]:
    """Returns process 0's numbers on all processes."""
    return [agree(values[i] if i < len(values) else 0) for i in range(agree(len(values)))]


def gather(value: int) -> list[int]:
    """Returns every process's number, in the order of the processes, on all processes."""
    if jax.process_count() == 1:
        return [value]
    return [int(x) for x in multihost_utils.process_allgather(np.int32(value))]
