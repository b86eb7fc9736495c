"""This process among a run's: it owns the workdir, joins, may stop, is watched, has a console."""

import contextlib
import os
import types
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jaxtrain.checkpoint import checkpointer, run_identity
from jaxtrain.config import Config, ConfigError
from jaxtrain.parallel import cluster, jax_options, supervised_attempt
from jaxtrain.parallel.lease import Lease, LostWorkdirError, WorkdirError
from jaxtrain.telemetry import console as console_lib
from jaxtrain.telemetry import goodput
from jaxtrain.telemetry import trackers as trackers_lib
from jaxtrain.telemetry.trackers import Tracker
from loaders.io.checks import first_line


class Preempted(Exception):
    """A signal or a notice asked the run to end. It is saved; the same command resumes it.

    After Ctrl-C it is saved, too, and KeyboardInterrupt is raised.
    """


class ProcessContext:
    """A process that has joined its run, made by `join`.

    Process 0 has the console and the trackers, each has its log, and a watchdog waits for `beat`.
    The lease of the workdir is process 0's, for all processes: call `confirm`, or
    ``lease.confirm`` and `lose`, before anything is written.
    """

    def __init__(
        self,
        config: Config,
        *,
        processes: int,
        signals: cluster.StopSignals,
        lease: Lease,
        console: console_lib.Console,
        watchdog: cluster.Watchdog,
        clock: goodput.Clock,
        links: cluster.Links,
        trackers: Sequence[Tracker] = (),
    ):
        self._config = config
        self._processes = processes
        self._signals = signals
        self._lost: WorkdirError | None = None
        self._links = links
        self.lease = lease
        self.console = console
        self.beat = watchdog.beat
        self.starting = watchdog.starting
        self.clock = clock
        self.trackers = trackers

    @classmethod
    @contextlib.contextmanager
    def join(
        cls, config: Config, command: Mapping[str, Any] = types.MappingProxyType({})
    ) -> Iterator["ProcessContext"]:
        """Yield this process, once all have met. ``command``: how the run was launched.

        Raises WorkdirError: another run has the workdir; ClusterError: the environment describes no
        cluster that could work; ConfigError: a tracker cannot be used; RendezvousError: a process
        is late or differs from the others. A signal raises Preempted or KeyboardInterrupt.
        """
        clock = goodput.Clock()
        clock.switch(goodput.OTHERS)
        with contextlib.ExitStack() as stack:
            signals = cluster.StopSignals(config.preemption.signals)
            stack.enter_context(contextlib.closing(signals))
            notices = cluster.Notices(cluster.metadata_server(os.environ), signals.ask)
            stack.callback(notices.close)
            membership = cluster.find()
            lease = _make_lease(config, membership, signals)
            refusal = _take(lease, stack, config, membership)
            logs = os.path.join(config.workdir, "logs")
            console = console_lib.start_console(process=membership.process, folder=logs)
            stack.callback(console.finish)
            trackers: list[Tracker] = []
            if membership.process == 0 and not refusal:
                trackers = trackers_lib.make(config)
            stack.enter_context(trackers_lib.closing(trackers, signals.check))
            refusal = refusal or _connect(trackers, signals, config, membership)
            try:
                links = cluster.initialize(membership, config, leave=signals.check, refusal=refusal)
            except cluster.Stopped as error:
                raise _end(signals, f": {error}") from error
            stack.callback(links.close)
            signals.install()  # jax.distributed takes SIGTERM for itself

            def give_up(reason: str) -> None:
                links.report(reason)
                clock.close(reason)

            watchdog = cluster.Watchdog(
                logs,
                process=membership.process,
                processes=membership.processes,
                timeout=config.distributed.step_timeout,
                start_timeout=config.distributed.start_timeout,
                report=give_up,
            )
            stack.callback(watchdog.close)
            clock.open(
                config.workdir,
                process=membership.process,
                processes=membership.processes,
                facts=_facts(command, config) if membership.process == 0 else {},
            )
            links.on_loss(clock.close)
            clock.switch(goodput.MODEL)
            process = cls(
                config,
                processes=membership.processes,
                signals=signals,
                lease=lease,
                console=console,
                watchdog=watchdog,
                clock=clock,
                links=links,
                trackers=trackers,
            )
            with process._noting_the_end():
                yield process

    @contextlib.contextmanager
    def _noting_the_end(self) -> Iterator[None]:
        """Note why the run ends. Raise WorkdirError if it is because the workdir is lost."""
        try:
            yield
            if self._processes > 1:
                self.confirm()  # a workdir deleted after the last record is an error, too
        except OSError as error:
            lost = self._loss()  # as in `writing`, wherever it was
            self._report(lost or error)
            if lost:
                raise lost from error
            raise
        except BaseException as error:
            if isinstance(error, Preempted):  # all processes have saved, and end
                self.clock.close(first_line(error))
            else:
                self._report(error)
            raise
        self.clock.close("ended")

    def _report(self, error: BaseException) -> None:
        """Tell the other processes why this one ends, and note it."""
        self._links.report_error(error)
        self.clock.close(first_line(error))

    def _loss(self) -> WorkdirError | None:
        """Return the error of a workdir that is no longer the run's, or None."""
        try:
            with contextlib.suppress(OSError):
                self.lease.confirm()
        except WorkdirError as lost:
            return lost
        return None

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
            raise self._lost or LostWorkdirError(
                f"{self._config.workdir} was deleted, or another run took it over: process 0 of"
                " this run says which, in its log. This process ends, too"
            )

    @property
    def reason(self) -> str:
        return self._signals.reason

    def end(self, text: str) -> BaseException:
        """Return the exception that ends the run in all processes: its reason, then ``text``.

        All processes call it at once. It is KeyboardInterrupt if Ctrl-C came to one of them.
        """
        is_interrupted = any(cluster.gather(int(self._signals.interrupted)))
        return _end(self._signals, text, is_interrupted=is_interrupted)

    @contextlib.contextmanager
    def phase(self, name: str, doing: str = "") -> Iterator[None]:
        """Count the time of a part of the start as goodput's phase ``name``.

        The watchdog names ``doing``.
        A signal ends the only process of a run at once: no step is lost. Several processes agree
        to stop in their first step.
        """
        if doing:
            self.starting(doing)
        at_once: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
        if self._processes == 1:
            at_once = self._signals.at_once(self._leave)
        with self.clock.during(name), at_once:
            yield

    def _leave(self) -> None:
        raise _end(self._signals, " before its first step: nothing is lost")


def _make_lease(config: Config, membership: cluster.Cluster, signals: cluster.StopSignals) -> Lease:
    """Return the lease of the folders that the run writes to. Process 0 holds it."""

    def leave() -> None:
        if signals.check():
            raise _end(signals, f" while it waited for {config.workdir}")

    folders = []
    if membership.process == 0:
        folders = [folder for folder in (config.workdir, config.checkpoint.folder) if folder]
    return Lease(folders, leave=leave, token=supervised_attempt.from_environment().lease)


def _take(
    lease: Lease, stack: contextlib.ExitStack, config: Config, membership: cluster.Cluster
) -> str:
    """Take the lease until ``stack`` is closed. Return the refusal, for all processes."""
    try:
        stack.enter_context(lease)
        folder = run_identity.folder_elsewhere(config)
        if folder and membership.process == 0:
            run_identity.claim(config.workdir, folder)
    except WorkdirError as error:
        if membership.processes == 1:
            raise
        return str(error)
    return ""


def _connect(
    trackers: Sequence[Tracker],
    signals: cluster.StopSignals,
    config: Config,
    membership: cluster.Cluster,
) -> str:
    """Connect the trackers of a run with steps to make. Return the refusal, for all processes."""
    if checkpointer.newest_step(config) >= config.train.steps:
        return ""  # of a run that has ended, a late record connects them
    try:
        trackers_lib.connect(trackers, signals.check)
    except ConfigError as error:
        if membership.processes == 1:
            raise
        return str(error)
    return ""


def _facts(command: Mapping[str, Any], config: Config) -> dict[str, Any]:
    """Return the facts of a start, for the report and for replays."""
    attempt = supervised_attempt.from_environment()
    supervised: dict[str, Any] = {}
    if attempt.is_supervised:
        hosts = list(attempt.hosts)
        supervised = {"attempt": attempt.attempt, "cause": attempt.cause, "hosts": hosts}
    mesh = config.mesh  # of this attempt, which may be of fewer processes than the next
    sizes = {"data": mesh.data, "fsdp": mesh.fsdp, "model": mesh.model}
    split: dict[str, Any] = {"mesh": sizes}
    if "train.accumulate" not in config.train.auto:
        split["accumulate"] = config.train.accumulate
    return {
        **supervised,
        **split,
        "versions": cluster.versions(),
        "commit": cluster.commit(),
        "devices": cluster.devices(),
        "environment": jax_options.recorded(),
        **cluster.of_cpus(),
        **command,
    }


def _end(
    signals: cluster.StopSignals, text: str, *, is_interrupted: bool = False
) -> Preempted | KeyboardInterrupt:
    """Return the exception of a run that ends as asked. Ctrl-C has Python's own."""
    if is_interrupted or signals.interrupted:
        return KeyboardInterrupt(f"ended by {cluster.CTRL_C}{text}")
    return Preempted(f"ended by {signals.reason}{text}")
