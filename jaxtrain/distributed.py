"""Processes: how they meet, agree, are asked to stop, and are ended when one of them holds the others up."""

import contextlib
import faulthandler
import hashlib
import importlib.metadata
import json
import logging
import os
import pathlib
import re
import signal
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from jaxtrain import cluster, gce, rendezvous
from jaxtrain.cluster import Cluster
from jaxtrain.config import Config, to_json
from jaxtrain.rendezvous import RendezvousError

log = logging.getLogger("jaxtrain")

# What must be the same package everywhere, and what a checkpoint says it was written with.
VERSIONED = ("jaxtrain", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy")


def find() -> Cluster:
    """The cluster that this machine's environment speaks of. Raises ClusterError."""
    gpus = len([name for name in _entries("/dev") if re.fullmatch(r"nvidia\d+", name)])
    return cluster.find(os.environ, gpus=gpus, metadata=gce.tpu_metadata(os.environ))


def initialize(found: Cluster, config: Config, *, leave: Callable[[], Any] = lambda: False) -> None:
    """Joins the processes: a roll call in which all must come and be alike, then JAX, with every value explicit.

    Raises:
      RendezvousError: somebody is late, or differs (in the config, a package, the devices); the port is taken. By number.
      Stopped: ``leave()`` held while others were waited for.
    """
    if found.note:
        log.warning("%s", found.note)
    if found.processes == 1:
        return
    log.info(
        "process %d of %d (%s, on %s), coordinator %s",
        found.process,
        found.processes,
        found.launcher,
        socket.gethostname(),
        found.coordinator,
    )
    bounds = config.distributed
    rendezvous.meet(
        found.coordinator,
        process=found.process,
        processes=found.processes,
        job=found.job or f"the run in {os.path.abspath(config.workdir)}",
        facts={
            "config": json.loads(to_json(config)),
            "versions": versions(),
            "launcher": found.launcher,
            "gpus": len(found.local_devices),
        },
        timeout=bounds.init_timeout,
        leave=leave,
    )
    try:
        jax.distributed.initialize(
            coordinator_address=found.coordinator,
            num_processes=found.processes,
            process_id=found.process,
            local_device_ids=list(found.local_devices),
            cluster_detection_method="deactivate",  # all is said; JAX's guess would take the local rank for an ordinal
            initialization_timeout=bounds.init_timeout,
            heartbeat_timeout_seconds=bounds.heartbeat_timeout,
        )
    except Exception as error:
        raise RendezvousError(
            f"process {found.process} of {found.processes} could not join the run at {found.coordinator}: {error}"
        ) from error
    if problem := uneven(Counter(device.process_index for device in jax.devices()), found.processes):
        raise RendezvousError(problem)
    if jax.default_backend() == "cpu":
        # Process 0 alone keeps programs there, and one that is read back takes its collectives in another order than one just
        # compiled (jax 0.10.2): the processes then wait for each other for ever.
        jax.config.update("jax_enable_compilation_cache", False)


def uneven(devices: Mapping[int, int], processes: int) -> str:
    """Which processes have another number of devices than most; "" when all have the same."""
    counts = [devices.get(process, 0) for process in range(processes)]
    usual = Counter(counts).most_common(1)[0][0]
    odd = [f"process {p} has {n}" for p, n in enumerate(counts) if n != usual]
    return f"the processes have different numbers of devices: {', '.join(odd)}, the others {usual}" if odd else ""


def compare(texts: Mapping[str, str]) -> None:
    """Compares named texts over all processes, by their hashes. Raises RendezvousError: which process differs in which.

    Lines with callbacks to the host are left out, since they hold addresses.
    """
    if jax.process_count() == 1:
        return
    plain = [re.sub(r".*callback.*", "", text) for text in texts.values()]
    own = np.stack([np.frombuffer(hashlib.sha256(text.encode()).digest(), np.uint8) for text in plain])
    every = np.asarray(multihost_utils.process_allgather(own))  # [processes, texts, 32]
    told = [
        {"process": p, "facts": {f"{name}'s hash": bytes(row).hex()[:12] for name, row in zip(texts, rows, strict=True)}}
        for p, rows in enumerate(every)
    ]
    if problem := rendezvous.differences(told):
        raise RendezvousError(problem)


def versions() -> dict[str, str]:
    return {name: importlib.metadata.version(name) for name in VERSIONED}


def _entries(folder: str) -> list[str]:
    return os.listdir(folder) if os.path.isdir(folder) else []


def use_compilation_cache() -> None:
    """Keeps compiled programs between runs, unless JAX_COMPILATION_CACHE_DIR already says where."""
    if not jax.config.jax_compilation_cache_dir:
        base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
        jax.config.update(
            "jax_compilation_cache_dir", os.path.join(os.environ.get("JAXTRAIN_CACHE") or f"{base}/jaxtrain", "xla")
        )


def use_threads_for_host_devices() -> None:
    """Gives XLA's CPU client a thread for each of several host devices. Call it before the first device is touched.

    It runs independent collectives of one program at once on as many threads as there are cores (or NPROC says): with fewer
    threads than devices they can wait for each other for ever (seen with jax 0.10.2: 8 devices on 2 cores).
    """
    found = re.search(r"xla_force_host_platform_device_count=(\d+)", os.environ.get("XLA_FLAGS", ""))
    if found and int(found[1]) > 1:
        os.environ.setdefault("NPROC", str(max(4 * int(found[1]), os.cpu_count() or 1)))


def is_main() -> bool:
    """Whether this process writes what is written once: console, metrics, pictures."""
    return jax.process_index() == 0


def barrier(name: str) -> None:
    """Returns when every process has come here."""
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(name)


def agree(value: int) -> int:
    """What process 0 says, on all processes: one that looks at a file system may see it late."""
    if jax.process_count() == 1:
        return value
    return int(multihost_utils.broadcast_one_to_all(np.int32(value)))


def agree_on(values: Sequence[int]) -> list[int]:
    """Process 0's numbers, on all processes."""
    return [agree(values[i] if i < len(values) else 0) for i in range(agree(len(values)))]


def gather(value: int) -> list[int]:
    """Every process's number, by process, on all processes."""
    if jax.process_count() == 1:
        return [value]
    return [int(x) for x in multihost_utils.process_allgather(np.int32(value))]


class StopSignals:
    """Remembers that a signal asked the run to save and end. A second one ends the process there and then.

    Attributes:
      asked: the name of the signal, or "" so far.
      notice: what else has asked for the same, a notice of maintenance for example, or "".

    Ctrl-C is remembered too, until `check`: a KeyboardInterrupt anywhere could come in the middle of a library's save.
    """

    def __init__(self, names: Sequence[str]):
        self.asked = self.notice = ""
        self._interrupted = False
        self._numbers = [signal.SIGINT, *(getattr(signal, name) for name in names)]
        self._before: dict[int, Any] = {}
        self.install()

    @property
    def reason(self) -> str:
        return self.asked or self.notice or "another process"

    def install(self) -> None:
        """Takes the signals, also back from a library that took them since."""
        for number in self._numbers:
            before = signal.signal(number, self._handle)
            self._before.setdefault(number, before)

    def close(self) -> None:
        for number, before in self._before.items():
            signal.signal(number, before if before is not None else signal.SIG_DFL)

    def _handle(self, number: int, frame: Any) -> None:
        del frame
        if self.asked or self._interrupted:
            os._exit(128 + number)
        if number == signal.SIGINT:
            self._interrupted = True
        else:
            self.asked = signal.Signals(number).name

    def ask(self, why: str) -> None:
        """Asks for the same from elsewhere. The signal that usually follows is the first one then."""
        self.notice = self.notice or why

    def check(self) -> bool:
        """Whether a signal, or a notice, asked to stop. Raises KeyboardInterrupt after Ctrl-C."""
        if self._interrupted:
            raise KeyboardInterrupt
        return bool(self.asked or self.notice)


class Watchdog:
    """Ends a process whose run makes no progress, after naming the process that holds the others up.

    Every process tells in ``folder``/alive-N.json how far it is. One whose count of `beat`s has not moved for ``timeout``
    seconds (``start_timeout`` before the first one) compares: who is behind all others, or does not even tell that it is
    alive, is the one. All stacks of this process go to ``folder``/stacks-N.txt and stderr, and it exits with `EXIT_CODE`.
    """

    EXIT_CODE = 70

    def __init__(self, folder: str, *, process: int, processes: int, timeout: float, start_timeout: float):
        self._folder = pathlib.Path(folder)
        self._folder.mkdir(parents=True, exist_ok=True)
        self._process, self._processes = process, processes
        self._timeout, self._limit = timeout, start_timeout
        self._count, self._doing, self._since = 0, "starting", time.monotonic()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)
        if timeout:
            self._tell()
            self._thread.start()

    def beat(self, doing: str) -> None:
        """Progress was made, and ``doing`` comes next."""
        self._count, self._doing, self._since, self._limit = self._count + 1, doing, time.monotonic(), self._timeout

    def starting(self, doing: str) -> None:
        """Like `beat`, before the first step: what restores and compiles may take ``start_timeout`` seconds."""
        self._count, self._doing, self._since = self._count + 1, doing, time.monotonic()

    def close(self) -> None:
        self._closed.set()
        if self._thread.is_alive():
            self._thread.join()
        (self._folder / f"alive-{self._process}.json").unlink(missing_ok=True)

    def _run(self) -> None:
        pause = min(self._timeout / 10, 5.0)
        while not self._closed.wait(pause):
            self._tell()
            if self._limit and time.monotonic() - self._since > self._limit:
                self._end(pause)

    def _tell(self) -> None:
        path = self._folder / f"alive-{self._process}.json"
        temporary = path.with_suffix(".new")
        try:
            temporary.write_text(json.dumps({"count": self._count, "doing": self._doing, "time": time.time()}))
            temporary.replace(path)
        except OSError as error:  # a full disk must not end what it guards
            log.warning("the watchdog cannot write %s: %s", path, error)

    def _end(self, pause: float) -> None:
        told = {}
        for process in range(self._processes):
            with contextlib.suppress(OSError, ValueError):
                told[process] = json.loads((self._folder / f"alive-{process}.json").read_text())
        culprit = blame(told, self._processes, time.time(), 3 * pause)
        text = f"no progress for {self._limit:g} s; {culprit}; ending process {self._process}"
        log.error(text)
        print(text, file=sys.stderr, flush=True)
        with open(self._folder / f"stacks-{self._process}.txt", "w") as file:
            faulthandler.dump_traceback(file, all_threads=True)
        faulthandler.dump_traceback(sys.stderr, all_threads=True)
        os._exit(self.EXIT_CODE)


def blame(told: Mapping[int, Mapping[str, Any]], processes: int, now: float, silence: float) -> str:
    """Which processes hold the others up, from what each has told (count, doing, time)."""
    silent = [p for p in range(processes) if p not in told or now - told[p]["time"] > silence]
    if silent:
        return "; ".join(
            f"process {p} has been silent for {now - told[p]['time']:.0f} s, at {told[p]['doing']}" if p in told
            else f"process {p} has never told that it is alive"
            for p in silent
        )  # fmt: skip
    least = min(t["count"] for t in told.values())
    behind = [p for p, t in told.items() if t["count"] == least]
    if len(behind) == processes and processes > 1:
        return f"all processes are at {told[behind[0]]['doing']}"
    return "; ".join(f"process {p} is stuck at {told[p]['doing']}" for p in behind)
