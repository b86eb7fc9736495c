"""The attempt of a process that a supervisor started (`jaxtrain.supervise`): JAXTRAIN_SUPERVISOR.

The variable is JSON: {"attempt": 2, "cause": "process 1 (node7) was killed by SIGKILL", "lease":
"…", "run": "…", "memory": "/dev/shm/…", "coordinator": "node6:23456", "members": [0, 2], "hosts":
[…], "idle": 0}. Without a supervisor there is none, and `from_environment` returns attempt -1.
"""

import errno
import json
import os
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from loaders.io.checks import FatalError, UserError

VARIABLE = "JAXTRAIN_SUPERVISOR"
# The exit code of a supervised process that met a full disk, which may pass (EX_IOERR of sysexits).
DISK = 74
USER_ERROR = 2
# The one of an error after which supervisors must not go on, although the run has begun.
FATAL = 78
OWN = (USER_ERROR, FATAL)  # the supervisors have to know them before the other processes end


class Attempt(NamedTuple):
    """One start of all processes by their supervisors."""

    attempt: int = -1
    cause: str = ""  # of the end of the attempt before
    lease: str = ""  # the token of the supervisor that holds the workdir
    run: str = ""  # the name of the run's steps in memory
    memory: str = ""  # their folder; "" without config.checkpoint.memory_every
    coordinator: str = ""  # host:port at which the processes meet; "" if there is only one
    members: Sequence[int] = ()  # the launcher's numbers of the processes that take part
    hosts: Sequence[str] = ()  # theirs
    idle: int = 0  # attempts in a row before this one that made no progress

    @property
    def is_supervised(self) -> bool:
        return self.attempt >= 0

    def to_environment(self) -> dict[str, str]:
        return {VARIABLE: json.dumps(self._asdict())}


def from_environment(environment: Mapping[str, str] = os.environ) -> Attempt:
    """Return the attempt that the supervisor of this process began."""
    text = environment.get(VARIABLE, "")
    return Attempt(**json.loads(text)) if text else Attempt()


def is_of_disk(error: BaseException) -> bool:
    """Tell whether a process ends with ``error`` because a disk was full."""
    if isinstance(error, UserError):
        return error.is_of_disk
    return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)


def code_of(error: BaseException) -> int:
    """Return the exit code of a supervised process that ends with ``error``, 0 = it has none."""
    if not from_environment().is_supervised:
        return 0
    if isinstance(error, FatalError):
        return FATAL
    if is_of_disk(error):
        return DISK
    return USER_ERROR if isinstance(error, UserError) else 0
