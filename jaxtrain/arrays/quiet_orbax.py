"""Three defects of Orbax and etils, repaired: late errors of a save, brackets, old listings.

`etils.epath`, by which Orbax lists its own files, takes the whole path of a folder as a pattern, so
that it finds nothing in ``runs/betas=[0.9, 0.95]``. Importing this module makes it take the
folder's name as it is.

gcsfs, by which etils reads gs://, keeps the listing of a folder for ever, and its version 2026.10.1
tells by it what exists. A process that has listed a folder then sees nothing that another one
writes there. From the import of this module on it lists again.

Late errors are the disk's answers to threads that nobody waits for. Orbax closes its event loop at
the first write that fails. TensorStore's threads report the others to that loop, and Python prints
a traceback of each ("Event loop is closed"), past all logging. The failure itself is raised and
reported when the run waits for the save.
"""

import asyncio.base_events
import functools
import glob
import logging
import os
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

from etils import epath

log = logging.getLogger("jaxtrain")


def keep_quiet() -> None:
    """Log such reports as details from here on. Others of what is unraisable are shown."""
    hook = sys.unraisablehook
    is_ours = isinstance(hook, functools.partial) and hook.func is _show
    if not is_ours:
        sys.unraisablehook = functools.partial(_show, hook)


PATH = type(epath.Path("."))


def _find(
    folder: Any, pattern: str, *, find: Callable[[Any, str], Iterator[Any]] = PATH.glob
) -> Iterator[Any]:
    path = os.fspath(folder)
    escaped = glob.escape(path)
    if "://" in path or escaped == path:
        return find(folder, pattern)
    return map(PATH, glob.glob(f"{escaped}/{pattern}"))


PATH.glob = _find


def _list_again() -> None:
    option = "use_listings_cache"
    if fsspec := sys.modules.get("fsspec"):
        fsspec.config.conf.setdefault("gs", {}).setdefault(option, False)
    else:  # it reads this when it is imported, and an empty one is false
        os.environ.setdefault(f"FSSPEC_GS_{option.upper()}", "")


_list_again()


def _show(hook: Callable[[Any], Any], unraisable: Any) -> None:
    is_late = (
        unraisable.exc_type is RuntimeError and str(unraisable.exc_value) == "Event loop is closed"
    )
    if is_late and unraisable.object is None and _in_asyncio_alone(unraisable.exc_traceback):
        log.debug("a write of a save that failed has ended")
    else:
        hook(unraisable)


def _in_asyncio_alone(trace: types.TracebackType | None) -> bool:
    """Whether no Python code but asyncio's was running: a thread of TensorStore's own called it."""
    while trace:
        if trace.tb_frame.f_code.co_filename != asyncio.base_events.__file__:
            return False
        trace = trace.tb_next
    return True
