"""A thread that ends a process whose run makes no progress, and names the process that hangs.

folder/alive-N.json    {"count": 12, "doing": "step 12", "time": 1760000000.0}, of process N
folder/stacks-N.txt    the stacks of all of its threads, if the watchdog ends it

Process N removes alive-N.json at its end.
"""

import contextlib
import faulthandler
import json
import logging
import os
import pathlib
import sys
import threading
import time
from collections.abc import Mapping
from typing import Any

log = logging.getLogger("jaxtrain")


class Watchdog:
    """A thread that ends a process whose run makes no progress.

    Every process reports its progress. Without a `beat` for ``timeout`` s (``start_timeout`` before
    the first one) it blames the process that is behind, or has stopped reporting, writes its own
    stacks, also to stderr, and exits with `EXIT_CODE`.
    """

    EXIT_CODE = 70

    def __init__(
        self, folder: str, *, process: int, processes: int, timeout: float, start_timeout: float
    ):
        self._folder = pathlib.Path(folder)
        self._folder.mkdir(parents=True, exist_ok=True)
        self._process, self._processes = process, processes
        self._timeout, self._start_timeout, self._limit = timeout, start_timeout, start_timeout
        self._count, self._doing, self._since = 0, "starting", time.monotonic()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)
        if timeout:
            self._report()
            self._thread.start()

    def beat(self, doing: str) -> None:
        self._count, self._doing, self._since, self._limit = (
            self._count + 1,
            doing,
            time.monotonic(),
            self._timeout,
        )

    def starting(self, doing: str) -> None:
        """Report progress before the first step, where ``start_timeout`` seconds may pass."""
        self.beat(doing)
        self._limit = self._start_timeout

    def close(self) -> None:
        self._closed.set()
        if self._thread.is_alive():
            self._thread.join()
        (self._folder / f"alive-{self._process}.json").unlink(missing_ok=True)

    def _run(self) -> None:
        pause = min(self._timeout / 10, 5.0)
        while not self._closed.wait(pause):
            self._report()
            if self._limit and time.monotonic() - self._since > self._limit:
                self._end(pause)

    def _report(self) -> None:
        path = self._folder / f"alive-{self._process}.json"
        temporary = path.with_suffix(".new")
        try:
            temporary.write_text(
                json.dumps({"count": self._count, "doing": self._doing, "time": time.time()})
            )
            temporary.replace(path)
        except OSError as error:  # a full disk must not end the run
            log.warning("the watchdog cannot write %s: %s", path, error)

    def _end(self, pause: float) -> None:
        reports = {}
        for process in range(self._processes):
            with contextlib.suppress(OSError, ValueError):
                reports[process] = json.loads((self._folder / f"alive-{process}.json").read_text())
        culprit = blame(reports, self._processes, time.time(), 3 * pause)
        text = f"no progress for {self._limit:g} s; {culprit}; ending process {self._process}"
        log.error(text)
        print(text, file=sys.stderr, flush=True)
        with open(self._folder / f"stacks-{self._process}.txt", "w") as file:
            faulthandler.dump_traceback(file, all_threads=True)
        faulthandler.dump_traceback(sys.stderr, all_threads=True)
        os._exit(self.EXIT_CODE)


def blame(
    reports: Mapping[int, Mapping[str, Any]], processes: int, now: float, timeout: float
) -> str:
    silent = [p for p in range(processes) if p not in reports or now - reports[p]["time"] > timeout]
    if silent:
        return "; ".join(
            (
                f"process {p} has been silent for {now - reports[p]['time']:.0f} s, at"
                f" {reports[p]['doing']}"
                if p in reports
                else f"process {p} has never sent a heartbeat"
            )
            for p in silent
        )
    least = min(report["count"] for report in reports.values())
    behind = [p for p, report in reports.items() if report["count"] == least]
    if len(behind) == processes and processes > 1:
        return f"all processes are at {reports[behind[0]]['doing']}"
    return "; ".join(f"process {p} is stuck at {reports[p]['doing']}" for p in behind)
