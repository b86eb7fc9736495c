"""A cache of compilers' figures, so that the same program for the same chips is compiled once.

The key of a program is made of its text before compilation, the devices, the options and the
versions of the compilers. JAX's own cache does not take programs for chips that are not here. If a
file cannot be read, is damaged or cannot be written, the program is compiled again.
"""

import contextlib
import gzip
import hashlib
import json
import os
import zlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax

from loaders.io import atomic_write, files, machine

LIMIT = 1 << 29  # [bytes] of all files together; the least recently used are removed
MAX_UNPACKED = 2 << 30  # [bytes] of a file
FOLDER = "plans"


class Figures(NamedTuple):
    arguments: int  # [bytes] on one device
    temporaries: int
    peak: int
    seconds: float  # of compilation
    text: str | None  # of the compiled program; None = it cannot be read
    refusal: str = ""  # the compiler's message if the program does not fit


KINDS = (int, int, int, int | float, str | None, str)  # of its entries


def key(program: str, devices: Sequence[Any], options: Mapping[str, Any], versions: str) -> str:
    """Hash what decides the figures: ``program`` (lowered text), compilers' ``versions``."""
    places = [
        (device.id, getattr(device, "coords", None), device.process_index) for device in devices
    ]
    surroundings = [os.environ.get(name, "") for name in ("XLA_FLAGS", "LIBTPU_INIT_ARGS")]
    decides = [
        devices[0].device_kind,
        places,
        sorted(options.items()),
        versions,
        jax.__version__,
        surroundings,
    ]
    content = json.dumps(decides, default=str).encode() + b"\0" + program.encode()
    return hashlib.sha256(content).hexdigest()


def find(name: str) -> Figures | None:
    path = machine.cache_folder(FOLDER, f"{name}.json.gz")
    try:
        unpacker = zlib.decompressobj(wbits=31)
        text = unpacker.decompress(files.read(path, most=LIMIT), MAX_UNPACKED)
        figures = Figures(**files.parse(text.decode(), str(path)))
        if not unpacker.eof or not all(map(isinstance, figures, KINDS)):
            return None
        if not min(figures[:4]) >= 0:  # also NaN
            return None
        os.utime(path)
    except (OSError, ValueError, TypeError, zlib.error):  # missing, or damaged
        return None
    return figures


def keep(name: str, figures: Figures) -> None:
    path = machine.cache_folder(FOLDER, f"{name}.json.gz")
    content = json.dumps(figures._asdict()).encode()
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_write.file(path) as file:
            file.write(gzip.compress(content, 1))
        machine.trim(path.parent, LIMIT)
