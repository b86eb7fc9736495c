"""Processes: how they meet, agree, are asked to stop, and are ended when one of them holds the others up."""

import contextlib
import faulthandler
import json
import logging
import os
import pathlib
import re
import signal
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
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


def _listed(values: Mapping[str, str]) -> str:
    return ", ".join(name for name, value in values.items() if value)


def agree(value: int) -> int:
    """What process 0 says, on all processes: one that looks at a file system may see it late."""
    if jax.process_count() == 1:
        return value
    return int(multihost_utils.broadcast_one_to_all(np.int32(value)))


def agree_on(values: Sequence[int]) -> list[int]:
    """Process 0's numbers, on all processes."""
    return [agree(values[i] if i < len(values) else 0) for i in range(agree(len(values)))]


class StopSignals:
    """Remembers that a signal asked the run to save and end. A second one ends the process there and then.

    Attributes:
      asked: the name of the signal, or "" so far.

    Ctrl-C is remembered too, until `check`: a KeyboardInterrupt anywhere could come in the middle of a library's save.
    """

    def __init__(self, names: Sequence[str]):
        self.asked = ""
        self._interrupted = False
        self._numbers = [signal.SIGINT, *(getattr(signal, name) for name in names)]
        self._before: dict[int, Any] = {}
        self.install()

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

    def check(self) -> bool:
        """Whether a signal asked to stop. Raises KeyboardInterrupt after Ctrl-C."""
        if self._interrupted:
            raise KeyboardInterrupt
        return bool(self.asked)


class Watchdog:
    """Ends a process whose run makes no progress, after naming the process that holds the others up.

    Every process tells in ``folder``/alive-N.json how far it is. One whose count of `beat`s has not moved for ``timeout``
    seconds compares: who is behind all others, or does not even tell that it is alive, is the one. All stacks of this process
    go to ``folder``/stacks-N.txt and stderr, and it exits with `EXIT_CODE`.
    """

    EXIT_CODE = 70

    def __init__(self, folder: str, *, process: int, processes: int, timeout: float):
        self._folder = pathlib.Path(folder)
        self._folder.mkdir(parents=True, exist_ok=True)
        self._process, self._processes, self._timeout = process, processes, timeout
        self._count, self._doing, self._since = 0, "starting", time.monotonic()
        self._armed = False
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)
        if timeout:
            self._tell()
            self._thread.start()

    def beat(self, doing: str) -> None:
        """Progress was made, and ``doing`` comes next. Counting begins with the first call: what compiles may take its time."""
        self._count, self._doing, self._since, self._armed = self._count + 1, doing, time.monotonic(), True

    def close(self) -> None:
        self._closed.set()
        if self._thread.is_alive():
            self._thread.join()
        (self._folder / f"alive-{self._process}.json").unlink(missing_ok=True)

    def _run(self) -> None:
        pause = min(self._timeout / 10, 5.0)
        while not self._closed.wait(pause):
            self._tell()
            if self._armed and time.monotonic() - self._since > self._timeout:
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
        text = f"no progress for {self._timeout:g} s; {culprit}; ending process {self._process}"
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
