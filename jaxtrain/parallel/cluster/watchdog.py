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
from collections.abc import Callable, Mapping
from typing import Any

log = logging.getLogger("jaxtrain")


class Watchdog:
    """A thread that ends a process whose run makes no progress.

    Every process reports its progress. Without a `beat` for ``timeout`` s (``start_timeout`` before
    the first one) it blames the process that is behind, or has stopped reporting, writes its own
    stacks, also to stderr, and exits with `EXIT_CODE`. ``report`` gets the reason before that.
    """

    EXIT_CODE = 70

    def __init__(
        self,
        folder: str,
        *,
        process: int,
        processes: int,
        timeout: float,
        start_timeout: float,
        report: Callable[[str], None] = lambda reason: None,
    ):
        self._folder = pathlib.Path(folder)
        self._folder.mkdir(parents=True, exist_ok=True)
        self._process = process
        self._processes = processes
        self._timeout = timeout
        self._start_timeout = start_timeout
        self._report_end = report
        self._limit = start_timeout
        self._count = 0
        self._doing = "starting"
        self._since = time.monotonic()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)
        if timeout:
            self._report()
            self._thread.start()

    def beat(self, doing: str) -> None:
        self._count += 1
        self._doing = doing
        self._since = time.monotonic()
        self._limit = self._timeout

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
        report = {"count": self._count, "doing": self._doing, "time": time.time()}
        try:
            temporary.write_text(json.dumps(report))
            temporary.replace(path)
        except OSError as error:  # a full disk must not end the run
            log.warning("the watchdog cannot write %s: %s", path, error)

    def _end(self, pause: float) -> None:
        reports = {}
        for process in range(self._processes):
            path = self._folder / f"alive-{process}.json"
            with contextlib.suppress(OSError, ValueError), path.open() as file:
                # by the file system's clock, as those of hosts differ, and of the open file: that
                # of a path may be an old one on NFS
                written = {"time": os.fstat(file.fileno()).st_mtime}
                reports[process] = json.load(file) | written
        now = max((report["time"] for report in reports.values()), default=0.0)
        culprit = blame(reports, self._processes, now, 3 * pause)
        reason = f"no progress for {self._limit:g} s; {culprit}"
        self._report_end(reason)
        text = f"{reason}; ending process {self._process}"
        log.error(text)
        print(text, file=sys.stderr, flush=True)
        with open(self._folder / f"stacks-{self._process}.txt", "w") as file:
            faulthandler.dump_traceback(file, all_threads=True)
        faulthandler.dump_traceback(sys.stderr, all_threads=True)
        os._exit(self.EXIT_CODE)


def blame(
    reports: Mapping[int, Mapping[str, Any]], processes: int, now: float, timeout: float
) -> str:
    """Name the processes that are silent for ``timeout`` s, else those behind the others."""
    silent = []
    for process in range(processes):
        report = reports.get(process)
        if report is None:
            silent.append(f"process {process} has never sent a heartbeat")
        elif (seconds := now - report["time"]) > timeout:
            doing = report["doing"]
            silent.append(f"process {process} has been silent for {seconds:.0f} s, at {doing}")
    if silent:
        return "; ".join(silent)
    least = min(report["count"] for report in reports.values())
    behind = [process for process, report in reports.items() if report["count"] == least]
    if len(behind) == processes and processes > 1:
        return f"all processes are at {reports[behind[0]]['doing']}"
    return "; ".join(
        f"process {process} is stuck at {reports[process]['doing']}" for process in behind
    )
