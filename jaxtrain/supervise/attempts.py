"""The rules of attempts: which ends are final, the cause of an end, when a run is given up.

An attempt is one start of all processes of a run. A process's end is final with these codes:

    0          the run has ended
    2          an error to fix, in the first attempt before its first step
    78         an error after which a run must not go on by itself (`supervised_attempt.FATAL`)
    130        Ctrl-C
    129 to 192 a second signal ended it before it saved
    config.preemption.exit_code      saved after a signal, for the scheduler

After every other end, all processes are started again, unless

1. the last config.supervise.idle attempts made no progress, or
2. more than config.supervise.restarts attempts ended within the last hour, or
3. full disks have ended attempts for 12 hours, and none of them made progress.

An attempt made progress if it reached a step that was new, or if the step that a restart resumes
from is later than before it. The second holds for steps that are made again because their records
were lost on a full disk, or their copies in memory with their hosts. Until the run reaches a new
step, it holds once for each of them.

After the first step an error to fix may be of one host alone: a device or a mount is not there. So
it is tried again, and rule 1 ends it. With config.supervise.wait a supervisor that was taken back
ends alone if its process ends with 2 before a step, and the others go on without it.

An error by which a supervisor cannot start its process counts as that process's end.

If a process of an attempt ends with the code `supervised_attempt.DISK` (a full disk), the attempt
does not count for the rules 1 and 2. The supervisor of that process votes with the others, and
waits before it starts its process, each time in a row for twice as long, at most for most of
config.distributed.init_timeout. The wait ends once there is room again. No other error of a disk
is waited for.
"""

import signal
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

from jaxtrain.config import Config
from jaxtrain.parallel.supervised_attempt import DISK, FATAL, USER_ERROR, is_of_disk
from loaders.io.checks import UserError

ENDED, FAILED, LOST, INTERRUPTED = 0, 1, 70, 130
GIVEN_UP = 1
HOUR = 3600.0
FIRST_WAIT = 5.0  # [s] for a disk
LONGEST_FULL = 12 * HOUR  # [s] of attempts that a full disk ends: somebody may sleep at first


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


def is_final(code: int, config: Config, *, has_trained: bool) -> bool:
    """Tell whether a process that ends with ``code`` is not to be started again.

    ``has_trained``: whether this is a later attempt than the first, or the first one made a step.
    """
    if code == USER_ERROR:
        return not has_trained
    return is_clean(code, config) or code == FATAL or 128 < code <= 192


def code_of(error: Exception) -> int:
    """Return the exit code of a process that could not be started, by its supervisor's error."""
    if is_of_disk(error):
        return DISK
    return USER_ERROR if isinstance(error, UserError) else FAILED


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


def _without_progress(past: Sequence[Past]) -> list[Past]:
    """Return the last attempts in a row without progress."""
    idle: list[Past] = []
    best_step = kept = again = 0
    for attempt in past:
        if attempt.step > best_step:
            best_step, again, idle = attempt.step, 0, []
        elif attempt.kept > max(kept, again):
            again, idle = attempt.kept, []
        else:
            idle.append(attempt)
        kept = attempt.kept  # also an earlier one, if memory was lost
    return idle


def count_idle(past: Sequence[Past]) -> int:
    """Count the last attempts in a row without progress, and without those that a disk ended."""
    return sum(not attempt.of_disk for attempt in _without_progress(past))


def why_given_up(past: Sequence[Past], config: Config, now: float) -> str:
    """Return the rule by which a run is given up after ``past`` attempts, or ""."""
    rules = config.supervise
    idle = count_idle(past)
    if idle >= rules.idle:
        return f"{idle} attempts in a row made no progress (config.supervise.idle)"
    recent = sum(end.ended > now - HOUR and not end.of_disk for end in past)
    if recent > rules.restarts:
        return f"{rules.restarts} restarts within an hour (config.supervise.restarts)"
    full_since = next((end.ended for end in _without_progress(past) if end.of_disk), now)
    if now - full_since > LONGEST_FULL:
        return f"full disks have ended its attempts for {LONGEST_FULL / HOUR:.0f} h"
    return ""


def wait_for_disk(n: int, config: Config) -> float:
    """Return the longest wait [s] after ``n`` ends in a row because of a disk.

    The processes of the other supervisors wait for that of one that waits.
    """
    return float(min(FIRST_WAIT * 2 ** min(n - 1, 20), longest_wait(config)))


def longest_wait(config: Config) -> float:
    """Return the longest wait [s] for a disk, during which the other processes stay."""
    return 0.8 * config.distributed.init_timeout
