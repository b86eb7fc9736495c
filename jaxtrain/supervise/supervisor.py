"""A supervisor: it starts one process of a run, again after each fault, in step with the others.

There is one for each process that a launcher would start, by the launcher's own variables. At every
start the supervisors come together at the coordinator's address (`rendezvous.vote`), report how
their processes have ended, and get the decision of process 0's supervisor:

    {"attempt": 2, "cause": "process 1 (node7) was killed by SIGKILL",
     "coordinator": "node6:23456", "run": "6f1c…", "code": 0, "text": ""}

The processes meet at that address, with a new port for each attempt. A code and a text end the run
for good. During an attempt the supervisors have `links`, by which the end of a process, or of a
supervisor, ends the attempt of all. `attempts` has the rules.
"""

import contextlib
import functools
import logging
import os
import pathlib
import queue
import random
import shutil
import signal
import socket
import sys
import time
import uuid
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from jaxtrain.config import Config
from jaxtrain.parallel import cluster, supervised_attempt
from jaxtrain.parallel.cluster import addresses, discover, rendezvous
from jaxtrain.parallel.cluster.links import Links, Loss
from jaxtrain.parallel.lease import Lease, WorkdirError
from jaxtrain.supervise import attempts, full_disk, steps_in_memory
from jaxtrain.supervise.attempts import Past, Report
from jaxtrain.supervise.warm_process import Ended, WarmProcess
from jaxtrain.telemetry import goodput
from jaxtrain.telemetry.report import run as run_lib
from loaders.io import atomic_write, machine

log = logging.getLogger("jaxtrain")

GRACE = 3.0  # [s] for a process to end by itself after another one has
KILLED = 10.0  # [s] for a killed process to end


class Stop(NamedTuple):
    """A signal to this supervisor, which it passes on."""

    number: int


class Lost(NamedTuple):
    """The end of a process, or of a supervisor, elsewhere."""

    attempt: int
    loss: Loss


class Outcome(NamedTuple):
    """The end of an attempt, as one supervisor sees it."""

    report: Report
    code: int | None = None  # with which the run ends for good


def run(config: Config, argv: Sequence[str]) -> int:
    """Train ``config`` in processes with ``argv``, and return the exit code of the whole run.

    Raises WorkdirError: another run has the workdir; ClusterError, RendezvousError: as a process of
    the run.
    """
    membership = cluster.find()
    events: queue.SimpleQueue[Any] = queue.SimpleQueue()
    with contextlib.ExitStack() as closing:
        signals = Signals(config, events)
        closing.callback(signals.close)
        # those of the config, the model among them, are here already
        names = dict.fromkeys([config.workload, config.loader, *sys.modules])
        modules = [name for name in names if _is_ours(name)]
        process = WarmProcess(argv, modules, events)
        closing.callback(process.close)
        supervisor = Supervisor(config, membership, process, signals, events)
        try:
            return supervisor.run()
        except rendezvous.Stopped as error:
            print(f"{error}; rerun the same command to resume", file=sys.stderr)
            return signals.code


def _is_ours(module: str) -> bool:
    """Whether a module touches no device when it is imported, as one of a user's own may."""
    return module.startswith(("jaxtrain.", "loaders."))


class Signals:
    """The signals to this supervisor, which go on to its process. After one, nothing is restarted.

    Attributes:
      first: the number of the first one, or 0.
    """

    def __init__(self, config: Config, events: "queue.SimpleQueue[Any]"):
        self._config = config
        self._events = events
        self.first = 0
        self._previous = {}
        for number in machine.signal_numbers(["SIGINT", *config.preemption.signals]):
            self._previous[number] = signal.signal(number, self._handle)

    def _handle(self, number: int, frame: Any) -> None:
        self.first = self.first or number
        self._events.put(Stop(number))

    def came(self) -> bool:
        return bool(self.first)

    @property
    def code(self) -> int:
        """The exit code of a run that a signal ends while no process runs."""
        if self.first == signal.SIGINT:
            return attempts.INTERRUPTED
        return self._config.preemption.exit_code

    def close(self) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)


class Supervisor:
    """One of the supervisors of a run. Process 0's holds the lease of the workdir and decides."""

    def __init__(
        self,
        config: Config,
        membership: cluster.Cluster,
        process: WarmProcess,
        signals: Signals,
        events: "queue.SimpleQueue[Any]",
    ):
        self._config = config
        self._membership = membership
        self._process = process
        self._signals = signals
        self._events = events
        self._host = socket.gethostname()
        self._name = f"process {membership.process} ({self._host})"
        self._past: list[Past] = []
        self._closing = contextlib.ExitStack()
        self._lease: Lease | None = None
        self._refusals = 0  # ends of the process in a row because a disk refused it

    def run(self) -> int:
        with self._closing as closing:
            refusal = self._take_lease(closing)
            report = Report()
            while True:
                decision, links = self._agree(report, refusal)
                if decision["code"]:
                    print(f"error: {decision['text']}", file=sys.stderr)
                    return int(decision["code"])
                with contextlib.closing(links):
                    outcome = self._attempt(decision, links)
                    if outcome.code is not None:
                        links.close(code=1)
                        return outcome.code
                report = outcome.report
                self._await_disk(report)

    def _take_lease(self, closing: contextlib.ExitStack) -> str:
        """Take the lease of the workdir for the processes. Return the refusal, for all."""
        if self._membership.process:
            return ""
        lease = Lease(self._folders(), leave=self._leave)
        try:
            self._enter(lease, closing)
        except WorkdirError as error:
            if self._membership.processes == 1:
                raise
            return str(error)
        self._lease = lease
        return ""

    def _enter(self, lease: Lease, closing: contextlib.ExitStack) -> None:
        """Take the lease, if need be after a wait for room: its holder may have been killed."""
        longest = attempts.longest_wait(self._config)
        deadline = time.monotonic() + longest
        while True:
            try:
                closing.enter_context(lease)
                return
            except OSError as error:
                if not atomic_write.is_full(error) or time.monotonic() > deadline:
                    raise
                full_disk.wait(self._folders(), longest, self._signals.came)
                self._leave()

    def _folders(self) -> list[str]:
        config = self._config
        return [folder for folder in (config.workdir, config.checkpoint.folder) if folder]

    def _await_disk(self, report: Report) -> None:
        """Wait after an end because of a disk, as `attempts` says."""
        self._refusals = self._refusals + 1 if report.of_disk else 0
        if report.of_disk:
            seconds = attempts.wait_for_disk(self._refusals, self._config)
            full_disk.wait(self._folders(), seconds, self._signals.came)

    def _leave(self) -> None:
        if self._signals.came():
            raise rendezvous.Stopped(
                f"it was asked to stop while it waited for {self._config.workdir}"
            )

    def _agree(self, report: Report, refusal: str) -> tuple[Mapping[str, Any], Links]:
        """Return process 0's decision after all reports, and the links of the coming attempt."""
        membership, config = self._membership, self._config
        if membership.processes == 1:
            self._leave()
            return self._decide([report]), Links(0, [])
        job = membership.job or f"the run in {os.path.abspath(config.workdir)}"
        try:
            outcome = rendezvous.vote(
                membership,
                rendezvous.Vote(report, self._decide),
                job=f"the supervisors of {job}",
                facts={"launcher": membership.launcher},
                timeout=config.distributed.init_timeout,
                leave=self._signals.came,
                secret=discover.secret_of(os.environ, membership.coordinator),
                refusal=refusal,
            )
        except rendezvous.Stopped:
            raise
        except rendezvous.RendezvousError as error:
            if report.attempt < 0:
                raise
            text = f"{error}, after {report.cause}. Rerun the same command to resume"
            return {"code": attempts.LOST, "text": text}, Links(0, [])
        decision: Mapping[str, Any] = outcome.verdict.decision
        note_loss = functools.partial(self._note_loss, int(decision["attempt"]))
        name = "the supervisor of process"
        links = Links(membership.process, outcome.peers, name=name, on_end=note_loss)
        if membership.process == 0 and len(outcome.peers) < membership.processes - 1:
            loss = Loss(f"{name} 1 or higher ended as the attempt began")
            links.report_loss(loss)  # the others have no connection that shows it
            note_loss(loss)
        return decision, links

    def _note_loss(self, attempt: int, loss: Loss) -> None:
        self._events.put(Lost(attempt, loss))

    def _decide(self, reports: Sequence[Any]) -> dict[str, Any]:
        """Decide on the next attempt, or on the end, as process 0's supervisor."""
        each = [Report(*report) for report in reports]
        attempt = max(report.attempt for report in each)
        cause = ""
        text = ""
        if attempt >= 0:
            cause = attempts.first_cause(each)
            step = run_lib.Run(pathlib.Path(self._config.workdir), "").step
            of_disk = any(report.of_disk for report in each)
            past = Past(attempt, time.time(), step, cause, of_disk)
            self._past.append(past)
            if rule := attempts.why_given_up(self._past, self._config, time.time()):
                text = "\n  ".join([f"the run is given up: {rule}", *map(str, self._past)])
            else:
                log.warning("%s; attempt %d begins", past, attempt + 1)
        return {
            "attempt": attempt + 1,
            "cause": cause,
            "coordinator": self._free_address(),
            "run": next((report.run for report in each if report.run), uuid.uuid4().hex),
            "code": attempts.GIVEN_UP if text else 0,
            "text": text,
        }

    def _starts(self) -> list[goodput.Start]:
        """Return the starts of this supervisor's process, as they are recorded."""
        name = f"process-{self._membership.process}.jsonl"
        try:
            return goodput.starts(pathlib.Path(self._config.workdir, goodput.FOLDER, name))
        except (OSError, WorkdirError):
            return []

    def _free_address(self) -> str:
        """Return an address of process 0 with a port on which nothing listens."""
        host = self._membership.coordinator.rpartition(":")[0]
        if not host:
            return ""
        places = addresses.on_this_machine(host.strip("[]"), 0)
        while True:
            port = random.choice(discover.PORTS)
            with contextlib.suppress(OSError), contextlib.ExitStack() as closing:
                for listener in addresses.listeners(places, port):
                    closing.enter_context(listener)
                return f"{host}:{port}"

    def _attempt(self, decision: Mapping[str, Any], links: Links) -> Outcome:
        """Start the process, and wait until it has ended."""
        number = int(decision["attempt"])
        token = self._lease.token if self._lease else ""
        folder = self._memory_folder(decision["run"])
        attempt = supervised_attempt.Attempt(
            number, decision["cause"], token, decision["run"], folder
        )
        environment = attempt.to_environment()
        if decision["coordinator"]:
            environment[discover.VARIABLES[0]] = decision["coordinator"]
        began = time.time()
        self._process.start(environment)
        code, loss = self._wait(number)
        last_words = ""
        for start in self._starts():
            if start.began >= began - 1:
                last_words = start.end
        cause = attempts.describe(self._name, code, last_words)
        rank, of_disk = attempts.rank_of(code), code == supervised_attempt.DISK
        report = Report(number, cause, rank, decision["run"], of_disk)
        if loss:
            report = report._replace(cause=loss.reason, rank=report.rank + 1)
        return Outcome(report, self._final(code, cause, loss, links))

    def _memory_folder(self, run: str) -> str:
        """Return the folder of the run's steps in memory, which is removed at the end."""
        if not self._config.checkpoint.memory_every:
            return ""
        folder = steps_in_memory.folder_of(run, self._membership.process)
        self._closing.callback(shutil.rmtree, folder, ignore_errors=True)
        return str(folder)

    def _wait(self, attempt: int) -> tuple[int, Loss | None]:
        """Return the process's exit code, and the loss that ended the attempt before, if any."""
        loss: Loss | None = None
        deadline = float("inf")
        while True:
            timeout = max(deadline - time.monotonic(), 0) if loss else None
            try:
                event = self._events.get(timeout=timeout)
            except queue.Empty:
                self._process.signal(signal.SIGKILL)
                deadline = time.monotonic() + KILLED
                continue
            if isinstance(event, Ended):
                return event.code, loss
            if isinstance(event, Stop):
                self._process.signal(event.number)
            elif loss is None and event.attempt == attempt:
                loss = event.loss
                deadline = time.monotonic() + GRACE

    def _final(self, code: int, cause: str, loss: Loss | None, links: Links) -> int | None:
        """Return the code with which the run ends for good, if it does, and tell the others."""
        if loss and loss.code:
            print(f"error: {loss.reason}", file=sys.stderr)
            return loss.code
        if self._signals.came() and code < 0:
            code = 128 - code
        final: int | None = None
        if self._signals.came() or (not loss and attempts.is_final(code, self._config)):
            final = code
        elif links.have_left:
            final = attempts.LOST
        if not loss and not attempts.is_clean(code, self._config):
            links.report_loss(Loss(cause, final or 0))
        return final
