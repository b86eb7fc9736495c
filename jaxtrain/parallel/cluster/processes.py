"""The processes of a run: joining them, and their exchanges of small values."""

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

# Packages whose versions must be equal in all processes. A checkpoint records them.
VERSIONED = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy")


def find() -> Cluster:
    """Return the cluster that this machine's environment describes. Raises ClusterError."""
    gpus = sum(path.name.startswith("nvidia") for path in machine.accelerators())
    return discover.from_environment(
        os.environ, gpus=gpus, metadata=notices.tpu_metadata(os.environ)
    )


def await_peers(
    membership: Cluster,
    config: Config,
    *,
    leave: Callable[[], Any] = lambda: False,
    refusal: str = "",
) -> None:
    """Wait until all processes of a run are present, and compare them (`rendezvous.await_peers`).

    ``leave`` is called again and again during the wait, and ends it by returning true. With
    ``refusal``, the reason for which process 0 cannot begin, all processes raise it. Raises
    ClusterError: processes on several hosts have no JAXTRAIN_SECRET; RendezvousError: ``refusal``,
    a taken port, or processes, by number, that are late or differ; Stopped: ``leave()`` was true.
    """
    rendezvous.await_peers(
        membership.coordinator,
        process=membership.process,
        processes=membership.processes,
        job=membership.job or f"the run in {os.path.abspath(config.workdir)}",
        facts={
            "config": json.loads(to_json(config)),
            "versions": versions(),
            # The extension may differ, since each host may build it.
            "the digest of jaxtrain's files": digest_of_files(),
            "launcher": membership.launcher,
            "gpus": len(membership.local_devices),
        },
        timeout=config.distributed.init_timeout,
        leave=leave,
        secret=discover.secret_of(os.environ, membership.coordinator),
        refusal=refusal,
    )


def initialize(
    membership: Cluster,
    config: Config,
    *,
    leave: Callable[[], Any] = lambda: False,
    refusal: str = "",
) -> None:
    """Join the processes: first `await_peers`, with its arguments and errors, then JAX."""
    if membership.note:
        log.warning("%s", membership.note)
    if membership.processes == 1:
        return
    here, numbers = socket.gethostname(), f"process {membership.process} of {membership.processes}"
    log.info(
        "%s (%s, on %s), coordinator %s", numbers, membership.launcher, here, membership.coordinator
    )
    await_peers(membership, config, leave=leave, refusal=refusal)
    bounds = config.distributed
    host, _, port = membership.coordinator.rpartition(":")
    places = (
        [host]
        if rendezvous.is_loopback(host)
        else rendezvous.addresses(host.strip("[]"), int(port))
    )
    bind = None
    if membership.process == 0 and len(places) == 1:
        # JAX's own port has no secret, so it listens only where process 0 is reached.
        place = places[0].strip("[]")
        bind = f"[{place}]:{port}" if ":" in place else f"{place}:{port}"
    try:
        jax.distributed.initialize(
            coordinator_address=membership.coordinator,
            coordinator_bind_address=bind,
            num_processes=membership.processes,
            process_id=membership.process,
            local_device_ids=list(membership.local_devices),
            cluster_detection_method="deactivate",  # JAX would take the local rank for an ordinal
            initialization_timeout=bounds.init_timeout,
            heartbeat_timeout_seconds=bounds.heartbeat_timeout,
        )
    except Exception as error:
        raise RendezvousError(
            f"{numbers} could not join the run at {membership.coordinator}: {error}"
        ) from error
    if problem := uneven(
        Counter(device.process_index for device in jax.devices()), membership.processes
    ):
        raise RendezvousError(problem)
    if jax.default_backend() == "cpu":
        # Only process 0 would write programs there and read them back, since a program has another
        # key in each process (jax 0.10.2). A program that was read back may run its collectives in
        # another order than one just compiled, and the processes then wait for each other without
        # end. `jaxtrain.compile.program_cache` keeps the programs of each process.
        jax.config.update("jax_enable_compilation_cache", False)


def uneven(devices: Mapping[int, int], processes: int) -> str:
    """Name the processes that have another number of devices than most, or return ""."""
    counts = [devices.get(process, 0) for process in range(processes)]
    usual = Counter(counts).most_common(1)[0][0]
    odd = [f"process {p} has {n}" for p, n in enumerate(counts) if n != usual]
    return (
        f"the processes have different numbers of devices: {', '.join(odd)}, the others {usual}"
        if odd
        else ""
    )


def compare(texts: Mapping[str, str]) -> None:
    """Compare named texts between all processes, by their hashes. Raises RendezvousError by name.

    Lines with callbacks to the host are left out, since they hold addresses.
    """
    if jax.process_count() == 1:
        return
    plain = [
        "\n".join(line for line in text.split("\n") if "callback" not in line)
        for text in texts.values()
    ]
    own = np.stack(
        [np.frombuffer(hashlib.sha256(text.encode()).digest(), np.uint8) for text in plain]
    )
    every = np.asarray(multihost_utils.process_allgather(own))  # [processes, texts, 32]
    reports = [
        {
            "process": p,
            "facts": {
                f"{name}'s hash": bytes(row).hex()[:12]
                for name, row in zip(texts, rows, strict=True)
            },
        }
        for p, rows in enumerate(every)
    ]
    if problem := rendezvous.differences(reports):
        raise RendezvousError(problem)


def versions() -> dict[str, str]:
    """Return the versions of the packages that decide a run's numbers: jaxtrain and `VERSIONED`."""
    return {"jaxtrain": jaxtrain.__version__} | {
        name: importlib.metadata.version(name) for name in VERSIONED
    }


def devices() -> str:
    """Describe the devices of all processes, for example "8 × NVIDIA H100 of 2 processes"."""
    found = jax.devices()
    kinds = " and ".join(sorted({device.device_kind for device in found}))
    return (
        f"{len(found)} × {kinds} of {jax.process_count()} process{'es' * (jax.process_count() > 1)}"
    )


def of_cpus() -> dict[str, int]:
    """Return the numbers of cores and threads, which decide the last bits on CPUs, else {}."""
    if jax.default_backend() != "cpu":
        return {}
    return {
        "cores": machine.cores(),
        "threads": int(os.environ.get("NPROC") or machine.schedulable()),
    }


def digest_of_files() -> str:
    """Hash the Python files, as two installations of one version or commit may differ."""
    here = pathlib.Path(jaxtrain.__file__).resolve().parents[1]
    named = [
        path.relative_to(here)
        for package in ("jaxtrain", "loaders")
        for path in (here / package).rglob("*.py")
    ]
    # Names that begin with "." are of editors, and are not imported.
    named = sorted(
        path
        for path in named
        if not any(part.startswith(".") for part in path.parts) and (here / path).is_file()
    )
    digest = hashlib.sha256()
    for path in named:
        digest.update(
            f"{path.as_posix()} {hashlib.sha256((here / path).read_bytes()).hexdigest()}\n".encode()
        )
    return digest.hexdigest()[:12]


def digest_of_extension() -> str:
    """Hash the compiled extension, or return "" without one."""
    spec = importlib.util.find_spec("loaders._rust")
    return (
        hashlib.sha256(pathlib.Path(spec.origin).read_bytes()).hexdigest()[:12]
        if spec and spec.origin
        else ""
    )


def commit() -> str:
    """Return the checkout's commit with "-dirty" if files differ, "" for an installed package."""
    git = ["git", "-C", os.path.dirname(os.path.abspath(jaxtrain.__file__))]
    try:
        if subprocess.run(
            [*git, "ls-files", "--error-unmatch", "__init__.py"], capture_output=True, timeout=5
        ).returncode:
            return ""  # a package inside another checkout, or none
        done = subprocess.run(
            [*git, "describe", "--always", "--dirty", "--abbrev=12"], capture_output=True, timeout=5
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.decode(errors="replace").strip()[:80]


def use_compilation_cache() -> None:
    """Keep compiled programs between runs, beneath the cache or in JAX_COMPILATION_CACHE_DIR."""
    options: Any = jax.config  # jax adds its options as it is imported
    if not options.jax_compilation_cache_dir:
        options.update("jax_compilation_cache_dir", str(machine.cache_folder("xla")))


def use_threads_for_host_devices(threads: int = 0) -> None:
    """Give XLA's CPU client a thread for each of several host devices, before JAX makes them.

    It runs independent collectives of one program at once on NPROC threads, by default one for each
    core. With fewer threads than devices they can wait for each other without end (jax 0.10.2, 8
    devices on 2 cores). ``threads``: of a run that is made again, unless too few for these devices.
    """
    found = re.search(
        r"xla_force_host_platform_device_count=(\d+)", os.environ.get("XLA_FLAGS", "")
    )
    count = int(found[1]) if found else 1
    if threads and (count == 1 or threads >= 4 * count):
        os.environ["NPROC"] = str(threads)
    elif count > 1:
        os.environ.setdefault("NPROC", str(max(4 * count, os.cpu_count() or 1)))


def is_main() -> bool:
    """Tell whether this process writes the files of the whole run: console, metrics, pictures."""
    return jax.process_index() == 0


def barrier(name: str) -> None:
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(name)


def agree(value: int) -> int:
    """Return process 0's value on all processes, which may see another state of a file system."""
    return (
        value
        if jax.process_count() == 1
        else int(multihost_utils.broadcast_one_to_all(np.int32(value)))
    )


def agree_on(values: Sequence[int]) -> list[int]:
    return [agree(values[i] if i < len(values) else 0) for i in range(agree(len(values)))]


def gather(value: int) -> list[int]:
    if jax.process_count() == 1:
        return [value]
    return [int(x) for x in multihost_utils.process_allgather(np.int32(value))]
