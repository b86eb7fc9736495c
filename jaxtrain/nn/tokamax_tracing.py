"""Tracing kernels of tokamax for a GPU that need not be here.

tokamax is a package of its own (Apache 2.0), in the extra of its name. It needs Python 3.12.
"""

import functools
import sys
from typing import Any, NamedTuple
from unittest import mock

from jax.extend import backend

from jaxtrain.parallel import one_device

PACKAGE = "tokamax"
HOPPER = ((9, 0), (10, 0))  # compute capabilities of the kernels in use, from and below


class Card(NamedTuple):
    """A GPU that a program is traced for on a host without one, as tokamax sees it."""

    compute_capability: str
    platform: str = "gpu"
    core_count: int = 132  # multiprocessors of an H100
    device_kind: str = "NVIDIA H100"


@functools.cache
def trace_for(capability: str) -> None:
    """Show a GPU of this capability to tokamax from now on, unless this host has one.

    It does not end with a call, since JAX traces parts of the kernels again when it differentiates
    a loop. All other packages are answered as before.
    """
    if one_device.host()[0] == "gpu":
        return
    card, answer = Card(capability), backend.get_default_device

    def default_device() -> Any:
        package = sys._getframe(1).f_globals.get("__name__", "").partition(".")[0]
        return card if package == PACKAGE else answer()

    mock.patch.object(backend, "get_default_device", default_device).start()
