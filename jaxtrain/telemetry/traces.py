"""Traces of chosen steps by JAX's profiler: those of a config, or the next ones on request.

workdir/traces/steps-000100-000103-process-0/ is read by Perfetto (its *.trace.json.gz), XProf and
`jaxtrain report`. A live run is asked by workdir/profile.json, ``{"id": "…", "steps": 3, "all":
false}``, which `jaxtrain profile` writes: a thread looks for it, so that the loop reads no file.
"""

import contextlib
import logging
import os
import pathlib
import re
import shutil
import threading
from collections.abc import Sequence

import jax

from loaders.io import files

log = logging.getLogger("jaxtrain")

REQUEST = "profile.json"
FOLDER = "traces"
LOOK = 1.0  # [s] between looks for a request
MAX_STEPS = 1000  # of a trace, which holds every operation of every step


class Traces:
    """Begins a trace behind a step, and ends it behind another, where the caller waits."""

    def __init__(self, workdir: str, steps: Sequence[int], *, process: int):
        """Trace process 0 in ``steps``, the first and the last; empty = only on request."""
        self._workdir = pathlib.Path(workdir)
        self._process = process
        self._first = 0
        self._last = 0
        if steps and process == 0:
            self._first = steps[0]
            self._last = steps[1]
        self._running: pathlib.Path | None = None
        self._requested_steps = 0
        self._last_request, _, _ = self._request()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="traces", daemon=True)
        self._thread.start()

    def is_due(self, step: int) -> bool:
        """Whether a trace begins or ends behind ``step``. Called at every step."""
        if self._running:
            return step >= self._last
        return step + 1 == self._first or bool(self._requested_steps)

    def turn(self, step: int) -> None:
        """Begin the trace that is due behind ``step``, or end it. If it fails, the run goes on."""
        if self._running:
            self._end(step)
            return
        if self._requested_steps:
            self._first = step + 1
            self._last = step + self._requested_steps
            self._requested_steps = 0
        self._running = self._workdir / FOLDER / f".steps-process-{self._process}"
        options = jax.profiler.ProfileOptions()
        options.python_tracer_level = 0  # Python's work between two steps takes little time
        try:
            shutil.rmtree(self._running, ignore_errors=True)
            jax.profiler.start_trace(str(self._running), profiler_options=options)
        except (OSError, RuntimeError) as error:
            log.error("steps %d to %d cannot be traced: %s", self._first, self._last, error)
            self._running = None
            self._first = 0

    def _end(self, step: int) -> None:
        assert self._running
        partial = self._running
        steps = f"{self._first:06}-{step:06}"
        final = partial.with_name(f"steps-{steps}-process-{self._process}")
        self._running = None
        self._first = 0
        try:
            jax.profiler.stop_trace()
            shutil.rmtree(final, ignore_errors=True)
            partial.rename(final)
        except (OSError, RuntimeError) as error:
            log.error("the trace of steps up to %d cannot be written: %s", step, error)
        else:
            log.info("steps %s are traced in %s", steps, final)

    def close(self, step: int) -> None:
        """End a running trace after ``step``."""
        self._closed.set()
        self._thread.join()
        if self._running:
            self._end(step)

    def _run(self) -> None:
        while not self._closed.wait(LOOK):
            name, steps, in_every_process = self._request()
            if name and name != self._last_request:
                self._last_request = name
                if in_every_process or self._process == 0:
                    self._requested_steps = steps

    def _request(self) -> tuple[str, int, bool]:
        """Id, number of steps, whether for every process; "", 0, False without a request."""
        path = self._workdir / REQUEST
        if not os.path.lexists(path):
            return "", 0, False
        with contextlib.suppress(files.FileError, OSError):
            request = files.read_json(files.inside(self._workdir, REQUEST), most=1000)
            name = request.get("id")
            steps = request.get("steps")
            if type(name) is not str or not re.fullmatch("[0-9a-f]{32}", name):
                return "", 0, False
            if type(steps) is int and 1 <= steps <= MAX_STEPS:
                return name, steps, request.get("all") is True
        return "", 0, False
