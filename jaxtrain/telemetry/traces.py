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

REQUEST, FOLDER = "profile.json", "traces"
LOOK = 1.0  # [s] between looks for a request
MAX_STEPS = 1000  # of a trace, which holds every operation of every step


class Traces:
    """Begins a trace behind a step, and ends it behind another, where the caller waits."""

    def __init__(self, workdir: str, steps: Sequence[int], *, process: int):
        """Trace process 0 in ``steps``, the first and the last; empty = only on request."""
        self._workdir, self._process = pathlib.Path(workdir), process
        self._first, self._last = (steps[0], steps[1]) if steps and process == 0 else (0, 0)
        self._running: pathlib.Path | None = None
        self._asked, self._seen = 0, self._request()[0]
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="traces", daemon=True)
        self._thread.start()

    def is_due(self, step: int) -> bool:
        """Whether a trace begins or ends behind ``step``. Called at every step."""
        if self._running:
            return step >= self._last
        return step + 1 == self._first or bool(self._asked)

    def turn(self, step: int) -> None:
        """Begin the trace that is due behind ``step``, or end it. If it fails, the run goes on."""
        if self._running:
            self._end(step)
            return
        if self._asked:
            self._first, self._last, self._asked = step + 1, step + self._asked, 0
        self._running = self._workdir / FOLDER / f".steps-process-{self._process}"
        options = jax.profiler.ProfileOptions()
        options.python_tracer_level = 0  # Python's work between two steps takes little time
        try:
            shutil.rmtree(self._running, ignore_errors=True)
            jax.profiler.start_trace(str(self._running), profiler_options=options)
        except (OSError, RuntimeError) as error:
            log.error("steps %d to %d cannot be traced: %s", self._first, self._last, error)
            self._running, self._first = None, 0

    def _end(self, step: int) -> None:
        assert self._running
        made, self._running = self._running, None
        final = made.with_name(f"steps-{self._first:06}-{step:06}-process-{self._process}")
        self._first = 0
        try:
            jax.profiler.stop_trace()
            shutil.rmtree(final, ignore_errors=True)
            made.rename(final)
        except (OSError, RuntimeError) as error:
            log.error("the trace of steps up to %d cannot be written: %s", step, error)
        else:
            log.info(
                "steps %s are traced in %s",
                final.name.split("-process")[0].removeprefix("steps-"),
                final,
            )

    def close(self, step: int) -> None:
        """End a running trace after ``step``."""
        self._closed.set()
        self._thread.join()
        if self._running:
            self._end(step)

    def _run(self) -> None:
        while not self._closed.wait(LOOK):
            name, steps, everyone = self._request()
            if name and name != self._seen:
                self._seen = name
                if everyone or self._process == 0:
                    self._asked = steps

    def _request(self) -> tuple[str, int, bool]:
        """Id, number of steps, whether for every process; "", 0, False without a request."""
        path = self._workdir / REQUEST
        if not os.path.lexists(path):
            return "", 0, False
        with contextlib.suppress(files.FileError, OSError):
            asked = files.read_json(files.inside(self._workdir, REQUEST), most=1000)
            name, steps = asked.get("id"), asked.get("steps")
            if (
                type(name) is str
                and re.fullmatch("[0-9a-f]{32}", name)
                and type(steps) is int
                and 1 <= steps <= MAX_STEPS
            ):
                return name, steps, asked.get("all") is True
        return "", 0, False
