"""A supervisor: it starts one process of a run, again after each fault, in step with the others.

There is one for each process that a launcher would start, by the launcher's own variables. At every
start the supervisors come together at the coordinator's address (`rendezvous.vote`), report how
their processes have ended, and get the decision of the one that leads (`leader`), at first process
0's:

    {"attempt": 2, "cause": "process 1 (node7) was killed by SIGKILL", "members": [0, 1],
     "hosts": ["node6", "node7"], "argv": [], "coordinator": "node6:23456", "run": "6f1c…",
     "idle": 0, "code": 0, "text": ""}

The processes meet at that address, with a new port for each attempt. A code and a text end the run
for good. During an attempt the supervisors have `links`, by which the end of a process, or of a
supervisor, ends the attempt of all. `attempts` has the rules.

With config.supervise.wait the members may be fewer than all, and argv has their mesh (`fewer`). One
that returns waits at the leader's address (`waiting_room`). Then the leader asks its process to
stop. All processes save, and the next attempt has one member more.
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
import tempfile
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from jaxtrain.config import Config
from jaxtrain.parallel import cluster
from jaxtrain.parallel.cluster import addresses, discover, rendezvous, waiting_room
from jaxtrain.parallel.cluster.links import Links, Loss
from jaxtrain.parallel.lease import Lease, WorkdirError
from jaxtrain.parallel.supervised_attempt import DISK, FATAL, USER_ERROR, Attempt
from jaxtrain.supervise import attempts, fewer, full_disk, steps_in_memory
from jaxtrain.supervise.attempts import Past, Report
from jaxtrain.supervise.leader import Leader
from jaxtrain.supervise.warm_process import Ended, WarmProcess
from jaxtrain.telemetry import goodput
from jaxtrain.telemetry.report import run as run_lib
from loaders.io import atomic_write, machine
from loaders.io.checks import UserError

log = logging.getLogger("jaxtrain")

SAVING = 600.0  # [s] for the processes to save and end when a host has returned
KILLED = 10.0  # [s] for a killed process to end


class Stop(NamedTuple):
    """A signal to this supervisor, which it passes on."""

    number: int


class Lost(NamedTuple):
    """The end of a process, or of a supervisor, elsewhere."""

    attempt: int
    loss: Loss


class Back(NamedTuple):
    """The return of hosts, which ends an attempt without them once it has saved."""

    attempt: int
    loss: Loss


class Outcome(NamedTuple):
    """The end of an attempt, as one supervisor sees it."""

    report: Report
    code: int | None = None  # with which this supervisor ends
    is_alone: bool = False  # the others go on


def run(config: Config, argv: Sequence[str]) -> int:
    """Train ``config`` in processes with ``argv``, and return the exit code of the whole run.

    Raises WorkdirError: another run has the workdir; ClusterError, RendezvousError: as a process of
    the run.
    """
    membership = cluster.find()
    if config.supervise.wait and membership.launcher == discover.TPU_POD:
        problem = f"config.supervise.wait is {config.supervise.wait}, but the hosts of a TPU slice"
        raise cluster.ClusterError([f"{problem} only compute together; set it to 0"])
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
    def saves(self) -> int:
        """The number of a signal after which a process saves and ends."""
        return next(iter(machine.signal_numbers(self._config.preemption.signals)), signal.SIGINT)

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
    """One of the supervisors of a run."""

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
        self._job = membership.job or f"the run in {os.path.abspath(config.workdir)}"
        self._expected = set(range(membership.processes))  # whose return is waited for
        self._led_by = 0
        changes = config.supervise.wait > 0
        self._leader = Leader(membership, self._folders(), self._job, changes=changes)

    def run(self) -> int:
        with self._closing as closing:
            refusal = self._take_lease(closing)
            report = Report(host=self._host)
            while True:
                decision, links = self._agree(report, refusal)
                if decision["code"]:
                    print(f"error: {decision['text']}", file=sys.stderr)
                    return int(decision["code"])
                with contextlib.closing(links), self._reporting(links):
                    self._await_disk(report, links)
                    outcome = self._attempt(decision, links, is_new=report.attempt < 0)
                    if outcome.code is not None:
                        links.close(code=0 if outcome.is_alone else 1)
                        return outcome.code
                report = outcome.report

    @contextlib.contextmanager
    def _reporting(self, links: Links) -> Iterator[None]:
        """Tell the others why this supervisor ends. Its links' end alone would mean no loss."""
        try:
            yield
        except Exception as error:
            code = self._signals.code if isinstance(error, rendezvous.Stopped) else 0
            links.report_loss(Loss(f"the supervisor of {self._name} ended: {error}", code))
            raise

    def _take_lease(self, closing: contextlib.ExitStack) -> str:
        """Take the lease of the workdir for the processes. Return the refusal, for all."""
        if not self._leader.is_here:
            return ""
        lease = self._leader.make_lease(self._leave)
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

    def _await_disk(self, report: Report, links: Links) -> None:
        """Wait after an end because of a disk, as `attempts` says, while no other process ends."""
        self._refusals = self._refusals + 1 if report.of_disk else 0
        if report.of_disk:
            seconds = attempts.wait_for_disk(self._refusals, self._config)
            folders = [*self._folders(), tempfile.gettempdir()]
            full_disk.wait(folders, seconds, lambda: self._signals.came() or links.has_loss)
            self._leave()

    def _leave(self) -> None:
        if self._signals.came():
            raise rendezvous.Stopped(
                f"it was asked to stop while it waited for {self._config.workdir}"
            )

    def _agree(self, report: Report, refusal: str) -> tuple[Mapping[str, Any], Links]:
        """Return the leader's decision after all reports, and the links of the coming attempt."""
        membership = self._membership
        if membership.processes == 1:
            self._leave()
            return self._decide({0: report}), Links(0, [])
        try:
            outcome = self._vote(report, refusal)
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
        members = decision["members"]
        self._expected = set(members)
        self._led_by = members[0]
        peers = outcome.peers
        if not self._leader.is_here:
            peers = [peer._replace(process=members[0]) for peer in peers]
        # The leader is the first member, and sends on what the others report.
        links = Links(members.index(membership.process), peers, name=name, on_end=note_loss)
        if self._leader.is_here and len(peers) < len(members) - 1:
            loss = Loss(f"{name} {members[1]} or higher ended as the attempt began")
            links.report_loss(loss)  # the others have no connection that shows it
            note_loss(loss)
        return decision, links

    def _vote(self, report: Report, refusal: str) -> rendezvous.Outcome:
        """Meet the others at the leader's address, or become the leader if nothing answers there.

        Raises as `rendezvous.vote` does.
        """
        config, leader = self._config, self._leader
        timeout = config.distributed.init_timeout
        deadline = time.monotonic() + timeout
        wait = config.supervise.wait
        may_lead = wait > 0 and (report.attempt >= 0 or not self._membership.process)
        while True:
            address = leader.address()
            ballot = rendezvous.Vote(
                report,
                self._decide,
                self._objection if wait else None,
                leads=leader.is_here,
                where=leader.address,
                patience=min(wait, timeout) if may_lead else None,
            )
            try:
                return rendezvous.vote(
                    self._membership._replace(coordinator=address),
                    ballot,
                    job=f"the supervisors of {self._job}",
                    facts=cluster.facts_of(self._membership, config),
                    timeout=timeout,
                    leave=self._signals.came,
                    secret=discover.secret_of(os.environ, self._membership.coordinator),
                    refusal=refusal,
                )
            except rendezvous.UnreachableError:
                if not may_lead or time.monotonic() > deadline:
                    raise
            enter = functools.partial(self._enter, closing=self._closing)
            self._lease = leader.succeed(enter, self._leave)
            if self._lease:
                self._expected.discard(self._led_by)
                log.warning("%s leads: nothing answered at %s", self._name, address)

    def _note_loss(self, attempt: int, loss: Loss) -> None:
        self._events.put(Lost(attempt, loss))

    def _objection(self, reports: Mapping[int, Any], seconds: float) -> str:
        """Return why the supervisors that have come do not go on without the others, or ""."""
        if all(Report(*report).attempt < 0 for report in reports.values()):
            return "the run has not begun"
        wait = self._config.supervise.wait
        if seconds < wait and not self._expected <= reports.keys():
            return f"they wait for {wait} s (config.supervise.wait)"
        whole = self._whole_run()
        if not whole:
            return "no attempt has recorded its devices yet"
        return whole.objection(len(reports))

    def _whole_run(self) -> fewer.Run | None:
        """Return the run with the devices of each process, as an attempt has recorded them."""
        for start in reversed(self._starts()):
            count = str(start.facts.get("devices", "")).partition(" ")[0]
            if count.isdecimal() and start.processes:
                devices = int(count) // start.processes
                return fewer.Run(self._config, self._membership.processes, devices)
        return None

    def _split(self, members: int) -> list[str]:
        """Return the arguments by which fewer processes than all train. Name them in the log."""
        whole = self._whole_run()
        if members == self._membership.processes or not whole:
            return []
        split = whole.split(members)
        assert split
        log.warning(
            "%d of %d processes go on, with the same batches on %s: sums have other last bits",
            members,
            self._membership.processes,
            split,
        )
        return split.overrides(self._config)

    def _decide(self, reports: Mapping[int, Any]) -> dict[str, Any]:
        """Decide on the next attempt, or on the end, as the leader."""
        own = self._membership.process
        members = [own, *(process for process in reports if process != own)]
        each = [Report(*reports[process]) for process in members]
        attempt = max(report.attempt for report in each)
        cause = ""
        text = ""
        if attempt >= 0:
            cause = attempts.first_cause(each)
            of_disk = any(report.of_disk for report in each)
            kept = self._kept_step(each)
            past = Past(attempt, time.time(), self._step(), cause, of_disk, kept)
            self._past.append(past)
            if rule := attempts.why_given_up(self._past, self._config, time.time()):
                text = "\n  ".join([f"the run is given up: {rule}", *map(str, self._past)])
            else:
                log.warning("%s; attempt %d begins", past, attempt + 1)
        return {
            "attempt": attempt + 1,
            "cause": cause,
            "coordinator": self._free_address(len(each)),
            "members": members,
            "hosts": [report.host for report in each],
            "argv": self._split(len(each)),
            "run": next((report.run for report in each if report.run), uuid.uuid4().hex),
            "idle": attempts.count_idle(self._past),
            "code": attempts.GIVEN_UP if text else 0,
            "text": text,
        }

    def _starts(self, process: int = 0) -> list[goodput.Start]:
        """Return the starts of a process, by its number in the attempt, as they are recorded."""
        name = f"process-{process}.jsonl"
        try:
            return goodput.starts(pathlib.Path(self._config.workdir, goodput.FOLDER, name))
        except (OSError, WorkdirError):
            return []

    def _free_address(self, members: int) -> str:
        """Return an address of this host with a port on which nothing listens."""
        host = self._leader.address().rpartition(":")[0]
        if members == 1:
            return ""
        places = addresses.on_this_machine(host.strip("[]"), 0)
        while True:
            port = random.choice(discover.PORTS)
            with contextlib.suppress(OSError), contextlib.ExitStack() as closing:
                for listener in addresses.listeners(places, port):
                    closing.enter_context(listener)
                return f"{host}:{port}"

    def _attempt(self, decision: Mapping[str, Any], links: Links, *, is_new: bool) -> Outcome:
        """Start the process, and wait until it has ended. ``is_new``: it is this one's first."""
        number, began = int(decision["attempt"]), time.time()
        loss, folder, last_words, made_steps = None, "", "", False
        try:
            folder = self._memory_folder(decision["run"])
            attempt = self._start(decision, folder)
        except (OSError, UserError) as error:
            code, last_words = attempts.code_of(error), str(error)
            print(f"error: {error}", file=sys.stderr)
        else:
            with self._waiting_room(attempt):
                code, loss = self._wait(number, links)
            for start in self._starts(attempt.members.index(self._membership.process)):
                if start.began >= began - 1 and start.host == self._host:
                    last_words, made_steps = start.end, start.step > start.first
        cause = attempts.describe(self._name, code, last_words)
        rank, of_disk = attempts.rank_of(code), code == DISK
        listed = steps_in_memory.listed(folder, decision["run"]) if folder else ()
        report = Report(number, cause, rank, decision["run"], of_disk, self._host, listed)
        if loss and not of_disk:
            report = report._replace(cause=loss.reason, rank=report.rank + 1)
        if self._is_alone(code, loss, is_back=is_new and number > 0 and not made_steps):
            links.report_loss(Loss(cause))
            return Outcome(report, code, is_alone=True)
        has_trained = number > 0 or made_steps
        return Outcome(report, self._final(code, cause, loss, links, has_trained=has_trained))

    def _start(self, decision: Mapping[str, Any], folder: str) -> Attempt:
        attempt = Attempt(
            decision["attempt"],
            decision["cause"],
            self._lease.token if self._lease else "",
            decision["run"],
            folder,
            decision["coordinator"],
            decision["members"],
            decision["hosts"],
            decision["idle"],
        )
        self._process.start(attempt.to_environment(), decision["argv"])
        return attempt

    def _is_alone(self, code: int, loss: Loss | None, *, is_back: bool) -> bool:
        """Whether the others go on without this supervisor, which they have just taken back."""
        may_go_on = self._config.supervise.wait > 0 and self._membership.processes > 1
        is_own = not loss and not self._signals.came()
        return is_back and may_go_on and is_own and code == USER_ERROR

    def _memory_folder(self, run: str) -> str:
        """Return the folder of the run's steps in memory, which is removed at the end."""
        if not self._config.checkpoint.memory_every:
            return ""
        folder = steps_in_memory.folder_of(run, self._membership.process)
        self._closing.callback(shutil.rmtree, folder, ignore_errors=True)
        return str(folder)

    @contextlib.contextmanager
    def _waiting_room(self, attempt: Attempt) -> Iterator[None]:
        """Receive supervisors that come during an attempt, as the leader."""
        membership = self._membership
        if not self._leader.is_here or membership.processes == 1:
            yield
            return
        membership = membership._replace(coordinator=self._leader.address())
        room = waiting_room.WaitingRoom(
            membership,
            job=f"the supervisors of {self._job}",
            facts=lambda: cluster.facts_of(membership, self._config),
            secret=discover.secret_of(os.environ, membership.coordinator),
            members=attempt.members,
            on_arrival=functools.partial(self._take_back, attempt, self._step()),
        )
        with contextlib.closing(room):
            yield

    def _take_back(self, attempt: Attempt, first: int, hosts: Mapping[int, str]) -> None:
        """End an attempt that has made a step after ``first``, if it can go on with ``hosts``."""
        whole = self._whole_run()
        if self._expected >= hosts.keys() or not whole or self._step() <= first:
            return
        if whole.objection(len(attempt.members) + len(hosts)):
            return
        self._expected |= hosts.keys()
        names = " and ".join(f"process {number} ({host})" for number, host in hosts.items())
        log.warning("%s came back: all save, and go on together", names)
        self._events.put(Back(attempt.attempt, Loss(f"{names} came back", grace=SAVING)))

    def _step(self) -> int:
        return run_lib.Run(pathlib.Path(self._config.workdir), "").step

    def _kept_step(self, reports: Sequence[Report]) -> int:
        """Return the step that a restart resumes from: the newest one in memory, or saved."""
        in_memory = steps_in_memory.newest_whole([report.in_memory for report in reports])
        run = run_lib.Run(pathlib.Path(self._config.workdir), "")
        return max(in_memory, run.saved_step or 0)

    def _wait(self, attempt: int, links: Links) -> tuple[int, Loss | None]:
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
            elif event.attempt == attempt and (loss is None or event.loss.grace < loss.grace):
                loss = event.loss
                deadline = time.monotonic() + loss.grace
                if isinstance(event, Back):
                    links.report_loss(loss)
                    self._process.signal(self._signals.saves)

    def _final(
        self, code: int, cause: str, loss: Loss | None, links: Links, *, has_trained: bool
    ) -> int | None:
        """Return the code with which the run ends for good, if it does, and tell the others."""
        if loss and loss.code:
            print(f"error: {loss.reason}", file=sys.stderr)
            return loss.code
        if self._signals.came() and code < 0:
            code = 128 - code
        final: int | None = None
        is_final = attempts.is_final(code, self._config, has_trained=has_trained)
        if self._signals.came() or (is_final and not loss):
            final = USER_ERROR if code == FATAL else code
        elif links.have_left:
            final = attempts.LOST
        if not loss and not attempts.is_clean(code, self._config):
            links.report_loss(Loss(cause, final or 0))
        return final
