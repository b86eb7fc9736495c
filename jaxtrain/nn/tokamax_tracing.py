"""Tracing kernels of tokamax for a GPU that need not be here.

tokamax is a package of its own (Apache 2.0), in the extra of its name. It needs Python 3.12.
"""

import contextlib
import threading
from collections.abc import Iterator
from typing import NamedTuple
from unittest import mock

from jax.extend import backend

from jaxtrain.parallel import one_device

PACKAGE = "tokamax"
HOPPER = ((9, 0), (10, 0))  # compute capabilities of the kernels in use, from and below
_PATCHING = threading.Lock()  # one thread at a time replaces JAX's default device


class Card(NamedTuple):
    """A GPU that a program is traced for on a host without one, as tokamax sees it."""

    compute_capability: str
    platform: str = "gpu"
    core_count: int = 132  # multiprocessors of an H100
    device_kind: str = "NVIDIA H100"


@contextlib.contextmanager
def traced_for(capability: str) -> Iterator[None]:
    """Trace as on a host with a GPU of this capability, unless this is one."""
    if one_device.host()[0] == "gpu":
        yield
        return
    card = Card(capability)
    with _PATCHING, mock.patch.object(backend, "get_default_device", lambda: card):
        yield
