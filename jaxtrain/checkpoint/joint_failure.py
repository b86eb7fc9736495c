"""A save that fails in one process fails in all of them, and no process waits for it.

Orbax has two barriers in a save: all have written, and process 0 has committed. A thread that
failed comes to neither, so the other processes would wait there until a watchdog ends the job,
regardless of config.checkpoint.on_error. Orbax makes the last calls of a save, which mark its end,
in any case. There the failed process says why, and comes to the barriers that it has left out.
Every process comes to each barrier once, and looks after each whether another process has failed.

Before the first barrier each process measures the files that it wrote, which can fail as a write.
"""

import sys
import threading
from collections.abc import Callable

import jax
import orbax.checkpoint as ocp

from loaders.io.checks import first_line

# parts of Orbax's names for them
WRITTEN, COMMITTED = "written", "committed"
PHASES = {"async_write_complete": WRITTEN, "async_commit_complete": COMMITTED}


class OtherFailedError(RuntimeError):
    """Another process could not do its part of a save."""


class SaveBarrier:
    """Waits at Orbax's barriers of several processes, as its BarrierSyncFn.

    ``measure``: is called once this process has written its part of a save.
    """

    def __init__(self, measure: Callable[[], None]) -> None:
        self._measure = measure
        self._wait = ocp.multihost.get_barrier_sync_fn()
        self._client = ocp.multihost.get_jax_distributed_client()
        self._lock = threading.Lock()
        self._n_saves = 0  # started so far, the same on all processes
        self._saving_thread = 0  # its id, of this save
        # phases of this save whose barrier this process has not passed yet
        self._open_phases: list[str] = []

    def start(self) -> None:
        with self._lock:
            self._n_saves += 1
            self._saving_thread = threading.get_ident()
            self._open_phases = list(PHASES.values())

    def __call__(self, *, key: str, timeout_ms: int) -> None:
        """Wait for all processes. Raises OtherFailedError if one failed in this phase."""
        for name, phase in PHASES.items():
            if name in key:
                if phase == WRITTEN and phase in self._open_phases:
                    self._measure()
                self._end_phase(phase, timeout_ms)
                self._raise_failure_of_others()
                return
        # Orbax marks the end of a save in a `finally` of its own thread. The saving thread may be
        # handling an error, too.
        error = sys.exc_info()[1] if threading.get_ident() != self._saving_thread else None
        if error and self._open_phases:
            if not isinstance(error, OtherFailedError):
                self._report(error)
            for phase in tuple(self._open_phases):
                self._end_phase(phase, timeout_ms)
        self._wait(key=key, timeout_ms=timeout_ms)

    def _report(self, error: BaseException) -> None:
        """Tell the other processes why this one failed."""
        me = jax.process_index()
        reason = f"process {me}: {first_line(error)}"
        self._client.key_value_set(f"{self._folder()}{me}", reason, allow_overwrite=True)

    def _raise_failure_of_others(self) -> None:
        reports = self._client.key_value_dir_get(self._folder())
        if reports:
            raise OtherFailedError("; ".join(reason for _, reason in reports))

    def _folder(self) -> str:
        return f"jaxtrain/run/checkpoint_manager/{self._n_saves}/"

    def _end_phase(self, phase: str, timeout_ms: int) -> None:
        """Wait for all at the end of a phase, unless another thread of it does, or did."""
        with self._lock:
            if phase not in self._open_phases:
                return
            self._open_phases.remove(phase)
        self._wait(key=f"{self._folder()}{phase}", timeout_ms=timeout_ms)
