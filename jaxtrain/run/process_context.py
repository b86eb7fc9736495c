"""This process among a run's: it owns the workdir, joins, may stop, is watched, has a console."""

import contextlib
import os
import types
from collections.abc import Iterator, Mapping
from typing import Any

from jaxtrain.checkpoint import run_identity
from jaxtrain.config import Config
from jaxtrain.parallel import cluster
from jaxtrain.parallel.lease import Lease, WorkdirError
from jaxtrain.telemetry import console as console_lib
from jaxtrain.telemetry import goodput
from loaders.io.checks import first_line


class Preempted(Exception):
    """A signal or a notice asked the run to end. It is saved; the same command resumes it."""


class ProcessContext:
    """A context.

    Entered, the processes have met: process 0 has the console, each has its log, and a watchdog
    waits for `beat`. The lease of the workdir is process 0's, for all processes: call `confirm`, or
    ``lease.confirm`` and `lose`, before anything is written.

    Entering raises WorkdirError: another run has the workdir; ClusterError: the environment
    describes no cluster that could work; RendezvousError: a process is late or differs from the
    others; Preempted: a signal came while others were waited for.
    """

    def __init__(self, config: Config, command: Mapping[str, Any] = types.MappingProxyType({})):
        """``command``: how the run was launched, stored for the report."""
        self._config, self._command = config, command
        self.clock = goodput.Clock()
        self._processes = 1
        self._lost: WorkdirError | None = None
        self._closing = contextlib.ExitStack()

    def __enter__(self) -> "ProcessContext":
        config = self._config
        self.clock.switch(goodput.OTHERS)
        with contextlib.ExitStack() as stack:
            self._signals = stack.enter_context(
                contextlib.closing(cluster.StopSignals(config.preemption.signals))
            )
            stack.callback(
                cluster.Notices(cluster.metadata_server(os.environ), self._signals.ask).close
            )
            membership = cluster.find()
            self._processes = membership.processes
            in_use = self._own(stack, membership)
            logs = os.path.join(config.workdir, "logs")
            self.console = console_lib.start_console(process=membership.process, folder=logs)
            stack.callback(self.console.finish)
            try:
                cluster.initialize(membership, config, leave=self._signals.check, refusal=in_use)
            except cluster.Stopped as error:
                raise Preempted(f"ended by {self._signals.reason}: {error}") from error
            self._signals.install()  # jax.distributed takes SIGTERM for itself
            bounds, place = (
                config.distributed,
                {"process": membership.process, "processes": membership.processes},
            )
            self._watchdog = cluster.Watchdog(
                logs, **place, timeout=bounds.step_timeout, start_timeout=bounds.start_timeout
            )
            self.beat, self.starting = self._watchdog.beat, self._watchdog.starting
            stack.callback(self._watchdog.close)
            facts: dict[str, Any] = {}
            if membership.process == 0:
                facts = {
                    "versions": cluster.versions(),
                    "commit": cluster.commit(),
                    "devices": cluster.devices(),
                }
                facts |= {**cluster.of_cpus(), **self._command}
            self.clock.open(config.workdir, **place, facts=facts)
            self.clock.switch(goodput.MODEL)
            self._closing = stack.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: types.TracebackType | None,
    ) -> None:
        try:
            if kind is None and self._processes > 1:
                self.confirm()  # a workdir deleted after the last record is an error, too
            elif isinstance(error, OSError):
                with contextlib.suppress(OSError):
                    self.lease.confirm()  # as in `writing`, wherever it was
        except WorkdirError as lost:
            self.clock.close(_in_words(lost))
            self._closing.__exit__(type(lost), lost, lost.__traceback__)
            raise
        self.clock.close(_in_words(error))
        self._closing.__exit__(kind, error, trace)

    def _own(self, stack: contextlib.ExitStack, membership: cluster.Cluster) -> str:
        """Take the lease of the workdir, in process 0. Return the refusal, for all processes."""
        config = self._config
        folders = [folder for folder in (config.workdir, config.checkpoint.folder) if folder]
        self.lease = Lease(folders if membership.process == 0 else [], leave=self._leave)
        try:
            stack.enter_context(self.lease)
            if config.checkpoint.folder and membership.process == 0:
                run_identity.claim(config.workdir, config.checkpoint.folder)
        except WorkdirError as error:
            if membership.processes == 1:
                raise
            return str(error)
        return ""

    def _leave(self) -> None:
        if self._signals.check():
            raise Preempted(
                f"ended by {self._signals.reason} while it waited for {self._config.workdir}"
            )

    def stopping(self) -> bool:
        return self._signals.check()

    @property
    def has_lost(self) -> bool:
        return self._lost is not None

    def lose(self, error: WorkdirError) -> None:
        """End the run: process 0 has lost the workdir. Raises ``error`` if it is the only process.

        Else all stop at one step, and `confirm`: they wait in collectives.
        """
        if self._processes == 1:
            raise error
        self._lost = self._lost or error
        self._signals.ask("process 0, which lost the workdir")

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        """Yield a context in which process 0 writes. Without the workdir the run ends (`lose`)."""
        try:
            yield
        except WorkdirError as error:
            self.lose(error)
        except OSError:
            try:
                self.lease.confirm()  # a file that is not there names only itself
            except WorkdirError as error:
                self.lose(error)
            else:
                raise

    def confirm(self, *, saving: bool = False) -> None:
        """Raise WorkdirError in all processes at once if the workdir is no longer the run's."""
        try:
            if not self._lost:
                self.lease.confirm(saving=saving)
        except WorkdirError as error:
            self._lost = error
        if cluster.agree(self.has_lost):
            raise self._lost or WorkdirError(
                f"{self._config.workdir} was deleted, or another run took it over: process 0 of"
                " this run says which, in its log. This process ends, too"
            )

    @property
    def reason(self) -> str:
        return self._signals.reason

    @contextlib.contextmanager
    def phase(self, name: str, doing: str = "") -> Iterator[None]:
        """Count the time here as goodput's phase ``name``. The watchdog names ``doing``."""
        if doing:
            self.starting(doing)
        with self.clock.during(name):
            yield


def _in_words(error: BaseException | None) -> str:
    """One line that says why a run ended."""
    if error is None:
        return "ended"
    return "interrupted" if isinstance(error, KeyboardInterrupt) else first_line(error)
