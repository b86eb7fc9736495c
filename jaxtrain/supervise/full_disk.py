"""A wait for room on a full disk."""

import contextlib
import logging
import os
import tempfile
import time
from collections.abc import Callable, Sequence

log = logging.getLogger("jaxtrain")

ROOM = 1 << 20  # [bytes] that a file of a run may need
POLL = 1.0  # [s]


def wait(folders: Sequence[str], seconds: float, leave: Callable[[], bool]) -> None:
    """Wait for some seconds, until ``leave`` returns true, or until a full disk has room again.

    Folders in object stores count as having room.
    """
    is_full = not _have_room(folders)
    log.warning(
        "a disk refused this run's files (%s): it is tried again in %.0f s%s",
        ", ".join(folders),
        seconds,
        ", or once there is room" if is_full else "",
    )
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and not leave():
        time.sleep(min(POLL, max(deadline - time.monotonic(), 0.0)))
        if is_full and _have_room(folders):
            return


def _have_room(folders: Sequence[str]) -> bool:
    for folder in folders:
        if "://" in folder:
            continue
        try:
            with tempfile.TemporaryFile(dir=folder) as file, contextlib.suppress(AttributeError):
                os.posix_fallocate(file.fileno(), 0, ROOM)
        except OSError:
            return False
    return True
