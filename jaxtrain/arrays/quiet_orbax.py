"""Silence late errors of a save that has failed: the disk's answers to threads that nobody waits for.

Orbax closes its event loop at the first write that fails. TensorStore's threads report the others to that loop, and Python
prints a traceback of each ("Event loop is closed"), past all logging. The failure itself is raised and reported
when the run waits for the save.
"""

import asyncio.base_events
import functools
import logging
import sys
import types
from collections.abc import Callable
from typing import Any

log = logging.getLogger("jaxtrain")


def keep_quiet() -> None:
    """Log such reports as details, from here on, instead of printing them. All else that is unraisable is shown as before."""
    if not isinstance(sys.unraisablehook, functools.partial) or sys.unraisablehook.func is not _show:
        sys.unraisablehook = functools.partial(_show, sys.unraisablehook)


def _show(before: Callable[[Any], Any], unraisable: Any) -> None:
    late = unraisable.exc_type is RuntimeError and str(unraisable.exc_value) == "Event loop is closed"
    if late and unraisable.object is None and _in_asyncio_alone(unraisable.exc_traceback):
        log.debug("a write of a save that failed has ended")
    else:
        before(unraisable)


def _in_asyncio_alone(trace: types.TracebackType | None) -> bool:
    """Whether no Python code but asyncio's was running: a thread of TensorStore's own called it."""
    while trace:
        if trace.tb_frame.f_code.co_filename != asyncio.base_events.__file__:
            return False
        trace = trace.tb_next
    return True
