"""The rules of attempts: which ends are final, the cause of an end, when a run is given up.

An attempt is one start of all processes of a run. A process's end is final with these codes:

    0          the run has ended
    2          an error to fix
    130        Ctrl-C
    129 to 192 a second signal ended it before it saved
    config.preemption.exit_code      saved after a signal, for the scheduler

After every other end, all processes are started again, unless

1. the last config.supervise.idle attempts made no progress, or
2. config.supervise.restarts attempts ended within the last hour.

An attempt made progress if it reached a step that was new, or if the step that a restart resumes
from is later than before it. The second holds for steps that are made again because their records
were lost on a full disk, or their copies in memory with their hosts.

If a process of an attempt ends with the code `supervised_attempt.DISK` (a full disk), the attempt
does not count for rule 1. The supervisor of that process waits, each time in a row for twice as
long, at most for most of config.distributed.init_timeout. The wait ends once there is room again.
"""

import signal
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

from jaxtrain.config import Config
from jaxtrain.parallel.supervised_attempt import DISK

ENDED, USER_ERROR, LOST, INTERRUPTED = 0, 2, 70, 130
GIVEN_UP = 1
HOUR = 3600.0
FIRST_WAIT = 5.0  # [s] for a disk


class Report(NamedTuple):
    """A supervisor's report about its process, which all supervisors exchange."""

    attempt: int = -1  # the last one that it took part in
    cause: str = ""  # the end of its process; "" if it has started none yet
    rank: int = 9  # the lower, the less the end can be a consequence of another one
    run: str = ""  # the name of the run's steps in memory, once it has one
    of_disk: bool = False  # its process ended because a disk refused it
    host: str = ""
    in_memory: Sequence[Sequence[Any]] = ()  # `steps_in_memory.listed` there


class Past(NamedTuple):
    """An attempt that has ended."""

    attempt: int
    ended: float  # [s since 1970]
    step: int  # the highest one so far
    cause: str
    of_disk: bool = False
    kept: int = 0  # the step that a restart resumes from

    def __str__(self) -> str:
        when = time.strftime("%H:%M:%S UTC", time.gmtime(self.ended))
        return f"attempt {self.attempt}, until {when} at step {self.step}: {self.cause}"


def is_final(code: int, config: Config) -> bool:
    """Tell whether a process that ends with ``code`` is not to be started again."""
    clean = (ENDED, INTERRUPTED, config.preemption.exit_code)
    return code in (*clean, USER_ERROR) or 128 < code <= 192


def is_clean(code: int, config: Config) -> bool:
    """Tell whether the other processes end by themselves after one that ends with ``code``."""
    return code in (ENDED, INTERRUPTED, config.preemption.exit_code)


def describe(name: str, code: int, reason: str) -> str:
    """Say how a process has ended. ``reason``: its own last words, or ""."""
    if code < 0:
        return f"{name} was killed by {_signal_name(-code)}"
    if code == DISK:
        reason = reason or "a disk refused its files"
    return f"{name} ended with code {code}{f': {reason}' * bool(reason)}"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def rank_of(code: int) -> int:
    """Rank an end: a kill has its own cause, an error perhaps, and the end of links has another."""
    if code < 0:
        return 0
    return 3 if code == LOST else 1


def first_cause(reports: Sequence[Report]) -> str:
    """Return the cause of an attempt's end by the reports about all processes."""
    causes = [report for report in reports if report.cause]
    return min(causes, key=lambda report: report.rank).cause


def count_idle(past: Sequence[Past]) -> int:
    """Count the last attempts in a row without progress, and without those that a disk ended."""
    idle = 0
    best_step = kept = 0
    for attempt in past:
        has_progress = attempt.step > best_step or attempt.kept > kept
        idle = 0 if has_progress else idle + (not attempt.of_disk)
        best_step = max(best_step, attempt.step)
        kept = attempt.kept  # also an earlier one, if memory was lost
    return idle


def why_given_up(past: Sequence[Past], config: Config, now: float) -> str:
    """Return the rule by which a run is given up after ``past`` attempts, or ""."""
    rules = config.supervise
    idle = count_idle(past)
    if idle >= rules.idle:
        return f"{idle} attempts in a row made no progress (config.supervise.idle)"
    recent = sum(attempt.ended > now - HOUR for attempt in past)
    if recent > rules.restarts:
        return f"{rules.restarts} restarts within an hour (config.supervise.restarts)"
    return ""


def wait_for_disk(n: int, config: Config) -> float:
    """Return the longest wait [s] after ``n`` ends in a row because of a disk.

    The other supervisors wait for one that waits.
    """
    return float(min(FIRST_WAIT * 2 ** min(n - 1, 20), longest_wait(config)))


def longest_wait(config: Config) -> float:
    """Return the longest wait [s] for a disk, during which the other supervisors stay."""
    return 0.8 * config.distributed.init_timeout
