"""The processes of a run: joining them, and their exchanges of small values."""

import contextlib
import hashlib
import importlib.metadata
import json
import logging
import os
import pathlib
import re
import socket
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

import jaxtrain
from jaxtrain.config import Config, to_json
from jaxtrain.parallel import chips, jax_options, supervised_attempt
from jaxtrain.parallel.cluster import addresses, discover, links, notices, rendezvous
from jaxtrain.parallel.cluster.discover import Cluster
from jaxtrain.parallel.cluster.links import Links
from jaxtrain.parallel.cluster.rendezvous import RendezvousError
from loaders.io import machine

log = logging.getLogger("jaxtrain")

PACKAGES = ("jaxtrain", "loaders")  # of this repository
# Packages whose versions must be equal in all processes. A checkpoint records them.
VERSIONED = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy")
SHARES_OF_GPUS = ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION")  # the newer first
SERVICE = 5.0  # [s] for process 0's JAX to listen
SERVICE_POLL = 0.01  # [s]


def find() -> Cluster:
    """Return the cluster that this machine's environment describes. Raises ClusterError.

    In an attempt of a supervisor it is that of the processes that take part.
    """
    gpus = sum(path.name.startswith("nvidia") for path in machine.accelerators())
    metadata = notices.tpu_metadata(os.environ)
    membership = discover.from_environment(os.environ, gpus=gpus, metadata=metadata)
    attempt = supervised_attempt.from_environment()
    if not attempt.members:
        return membership
    return membership._replace(
        processes=len(attempt.members),
        process=attempt.members.index(membership.process),
        coordinator=attempt.coordinator,
    )


def facts_of(membership: Cluster, config: Config) -> dict[str, Any]:
    """Return the facts that have to be equal in all processes of a run."""
    return {
        "config": json.loads(to_json(config)),
        "versions": versions(),
        "environment": jax_options.recorded(),
        # The extension may differ, since each host may build it.
        "the digest of jaxtrain's files": digest_of_files(),
        "launcher": membership.launcher,
        "gpus": len(membership.local_devices),
    }


def await_peers(
    membership: Cluster,
    config: Config,
    *,
    leave: Callable[[], Any] = lambda: False,
    refusal: str = "",
) -> list[links.Peer]:
    """Wait until all processes of a run are present, and compare them (`rendezvous.await_peers`).

    ``leave`` is called again and again during the wait, and ends it by returning true. With
    ``refusal``, the reason for which process 0 cannot begin, all processes raise it. Raises
    ClusterError: processes on several hosts have no JAXTRAIN_SECRET; RendezvousError: ``refusal``,
    a taken port, or processes, by number, that are late or differ; Stopped: ``leave()`` was true.
    """
    return rendezvous.await_peers(
        membership,
        job=membership.job or f"the run in {os.path.abspath(config.workdir)}",
        facts=facts_of(membership, config),
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
) -> Links:
    """Join the processes: first `await_peers`, with its arguments and errors, then JAX.

    The links that are returned have to be closed when this process leaves the run. Raises
    JaxOptionError: no run is possible with the options of JAX here, or JAX finds no device.
    """
    jax_options.require()  # a config's file may have set some
    if membership.note:
        log.warning("%s", membership.note)
    if membership.processes == 1:
        # the last of several processes of a node, whose GPUs are not its own
        jax_options.see_only(membership.local_devices)
        jax_options.devices()
        return Links(0, [])
    name = f"process {membership.process} of {membership.processes}"
    host = socket.gethostname()
    coordinator = membership.coordinator
    log.info("%s (%s, on %s), coordinator %s", name, membership.launcher, host, coordinator)
    peers = await_peers(membership, config, leave=leave, refusal=refusal)
    connected = Links(membership.process, peers)
    # Gloo and JAX's service abort a process if another one has died. The links name that one.
    machine.delay_abort()
    _reach_without_proxy(coordinator)
    if membership.process != 0:
        _await_service(coordinator)
    try:
        jax.distributed.initialize(
            coordinator_address=coordinator,
            coordinator_bind_address=_bind_address(membership),
            num_processes=membership.processes,
            process_id=membership.process,
            local_device_ids=list(membership.local_devices),
            cluster_detection_method="deactivate",  # JAX would take the local rank for an ordinal
            initialization_timeout=config.distributed.init_timeout,
            heartbeat_timeout_seconds=config.distributed.heartbeat_timeout,
        )
        all_devices = jax_options.devices()
    except jax_options.JaxOptionError as error:
        connected.report_error(error)
        raise
    except Exception as error:
        connected.report(f"it could not join the run at {coordinator}")
        raise RendezvousError(f"{name} could not join the run at {coordinator}: {error}") from error
    device_counts = Counter(device.process_index for device in all_devices)
    if problem := uneven(device_counts, membership.processes):
        connected.close()
        raise RendezvousError(problem)
    if jax.default_backend() == "cpu":
        # Only process 0 would write programs there and read them back, since a program has another
        # key in each process (jax 0.10.2). A program that was read back may run its collectives in
        # another order than one just compiled, and the processes then wait for each other without
        # end. `jaxtrain.compile.program_cache` keeps the programs of each process.
        jax.config.update("jax_enable_compilation_cache", False)
    return connected


def _await_service(coordinator: str) -> None:
    """Wait until process 0's JAX listens: gRPC would wait for a second after a refusal."""
    deadline = time.monotonic() + SERVICE
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError):
            socket.create_connection(rendezvous.host_and_port(coordinator), SERVICE).close()
            return
        time.sleep(SERVICE_POLL)


def _reach_without_proxy(coordinator: str) -> None:
    """Let gRPC connect to the coordinator itself, whatever proxies the environment names.

    gRPC takes grpc_proxy, https_proxy or http_proxy, and the exceptions of no_grpc_proxy, or of
    no_proxy if there is no such variable.
    """
    host, _, _ = coordinator.rpartition(":")
    exceptions = os.environ.get("no_grpc_proxy") or os.environ.get("no_proxy", "")
    hosts = [*exceptions.split(","), host.strip("[]")]
    os.environ["no_grpc_proxy"] = ",".join(filter(None, hosts))


def _bind_address(membership: Cluster) -> str | None:
    """Return the address at which process 0's JAX listens. None = every interface.

    JAX's own port has no secret, so it listens only where process 0 is reached.
    """
    host, _, port = membership.coordinator.rpartition(":")
    if addresses.is_loopback(host):
        reached_at = [host]
    else:
        reached_at = addresses.on_this_machine(host.strip("[]"), int(port))
    if membership.process != 0 or len(reached_at) != 1:
        return None
    address = reached_at[0].strip("[]")
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"


def uneven(devices: Mapping[int, int], processes: int) -> str:
    """Name the processes that have another number of devices than most, or return ""."""
    counts = [devices.get(process, 0) for process in range(processes)]
    usual, _ = Counter(counts).most_common(1)[0]
    odd = [f"process {p} has {count}" for p, count in enumerate(counts) if count != usual]
    if not odd:
        return ""
    counts_of_odd = ", ".join(odd)
    return f"the processes have different numbers of devices: {counts_of_odd}, the others {usual}"


def compare(texts: Mapping[str, str]) -> None:
    """Compare named texts between all processes, by their hashes. Raises RendezvousError by name.

    Lines with callbacks to the host are left out, since they hold addresses.
    """
    if jax.process_count() == 1:
        return
    hashes = [hashlib.sha256(_without_callbacks(text)).digest() for text in texts.values()]
    hash_rows = np.stack([np.frombuffer(digest, np.uint8) for digest in hashes])
    every = np.asarray(multihost_utils.process_allgather(hash_rows))  # [processes, texts, 32]
    reports = []
    for process, rows in enumerate(every):
        facts = {}
        for name, row in zip(texts, rows, strict=True):
            facts[f"{name}'s hash"] = bytes(row).hex()[:12]
        reports.append({"process": process, "facts": facts})
    if problem := rendezvous.differences(reports):
        raise RendezvousError(problem)


def _without_callbacks(text: str) -> bytes:
    lines = [line for line in text.split("\n") if "callback" not in line]
    return "\n".join(lines).encode()


def versions() -> dict[str, str]:
    """Return the versions of the packages that decide a run's numbers: jaxtrain and `VERSIONED`."""
    packages = {name: importlib.metadata.version(name) for name in VERSIONED}
    return {"jaxtrain": jaxtrain.__version__, **packages}


def devices() -> str:
    """Describe the devices of all processes, for example "8 × NVIDIA H100 of 2 processes"."""
    every_device = jax.devices()
    kinds = " and ".join(sorted({device.device_kind for device in every_device}))
    processes = "1 process"
    if jax.process_count() > 1:
        processes = f"{jax.process_count()} processes"
    return f"{len(every_device)} × {kinds} of {processes}"


def of_cpus() -> dict[str, int]:
    """Return the numbers of cores and threads, which decide the last bits on CPUs, else {}."""
    if jax.default_backend() != "cpu":
        return {}
    threads = os.environ.get("NPROC") or machine.schedulable()
    return {"cores": machine.cores(), "threads": int(threads)}


def digest_of_files() -> str:
    """Hash the Python files, as two installations of one version or commit may differ."""
    root = pathlib.Path(jaxtrain.__file__).resolve().parents[1]
    paths = [path for package in PACKAGES for path in (root / package).rglob("*.py")]
    names = [path.relative_to(root) for path in paths if path.is_file()]
    digest = hashlib.sha256()
    for name in sorted(names):
        # Names that begin with "." are of editors, and are not imported.
        if any(part.startswith(".") for part in name.parts):
            continue
        of_file = hashlib.sha256((root / name).read_bytes()).hexdigest()
        digest.update(f"{name.as_posix()} {of_file}\n".encode())
    return digest.hexdigest()[:12]


def commit() -> str:
    """Return the checkout's commit with "-dirty" if files differ, "" for an installed package."""
    git = ["git", "-C", os.path.dirname(os.path.abspath(jaxtrain.__file__))]
    is_tracked = [*git, "ls-files", "--error-unmatch", "__init__.py"]
    describe = [*git, "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        if subprocess.run(is_tracked, capture_output=True, timeout=5).returncode:
            return ""  # a package inside another checkout, or none
        output = subprocess.run(describe, capture_output=True, timeout=5).stdout
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return output.decode(errors="replace").strip()[:80]


def start_jax() -> None:
    """Refuse options of JAX that nothing runs with, and keep compiled programs between runs.

    The programs are kept beneath the cache, or in JAX_COMPILATION_CACHE_DIR. A process takes 0.92
    of a GPU's memory, if the environment says nothing else. Raises JaxOptionError.
    """
    jax_options.require()
    take_gpu_memory(os.environ)
    options: Any = jax.config  # jax adds its options as it is imported
    if not options.jax_compilation_cache_dir:
        options.update("jax_compilation_cache_dir", str(machine.cache_folder("xla")))


def take_gpu_memory(environ: MutableMapping[str, str]) -> None:
    """Set the share of a GPU's memory that JAX takes. By its own default that is three quarters."""
    if not any(environ.get(name) for name in SHARES_OF_GPUS):
        environ[SHARES_OF_GPUS[0]] = str(chips.GPU_SHARE)


def leave_devices() -> None:
    """Let this process compute on the CPU alone, even if a config's file touches a device."""
    options: Any = jax.config  # jax adds its options as it is imported
    options.update("jax_platforms", "cpu")


def use_threads_for_host_devices(threads: int = 0) -> None:
    """Give XLA's CPU client a thread for each of several host devices, before JAX makes them.

    It runs independent collectives of one program at once on NPROC threads, by default one for each
    core. With fewer threads than devices they can wait for each other without end (jax 0.10.2, 8
    devices on 2 cores). ``threads``: of a run that is made again, unless too few for these devices.
    """
    options: Any = jax.config  # jax adds its options as it is imported
    n_devices = max(options.jax_num_cpu_devices, 1)  # -1 = as the flag says
    flags = os.environ.get("XLA_FLAGS", "")
    if match := re.search(r"xla_force_host_platform_device_count=(\d+)", flags):
        n_devices = max(n_devices, int(match[1]))
    if threads and (n_devices == 1 or threads >= 4 * n_devices):
        os.environ["NPROC"] = str(threads)
    elif n_devices > 1:
        os.environ.setdefault("NPROC", str(max(4 * n_devices, os.cpu_count() or 1)))


def is_main() -> bool:
    """Tell whether this process writes the files of the whole run: console, metrics, pictures."""
    return jax.process_index() == 0


def barrier(name: str) -> None:
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(name)


def agree(value: int) -> int:
    """Return process 0's value on all processes, which may see another state of a file system."""
    if jax.process_count() == 1:
        return value
    return int(multihost_utils.broadcast_one_to_all(np.int32(value)))


def agree_on(values: Sequence[int]) -> list[int]:
    """Return process 0's values on all processes."""
    agreed = []
    for i in range(agree(len(values))):
        agreed.append(agree(values[i] if i < len(values) else 0))
    return agreed


def gather_texts(text: str) -> list[str]:
    """Return the texts of all processes, by their numbers."""
    if jax.process_count() == 1:
        return [text]
    content = text.encode()
    padded = np.zeros(max(gather(len(content))), np.uint8)
    padded[: len(content)] = np.frombuffer(content, np.uint8)
    every = np.asarray(multihost_utils.process_allgather(padded))  # [processes, bytes]
    return [bytes(row).rstrip(b"\0").decode() for row in every]


def gather(value: int) -> list[int]:
    """Return the values of all processes, by their numbers."""
    if jax.process_count() == 1:
        return [value]
    every = multihost_utils.process_allgather(np.int32(value))
    return [int(x) for x in every]
