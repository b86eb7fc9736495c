"""What a compiler said of a program, kept beneath the cache: the same program, for the same chips, is compiled once.

A program is known by its text before compilation, the devices, the options and the versions of what compiles it
(`key`); JAX's own cache has no place for programs of chips that are not here. A file that cannot be read, or was damaged, is
compiled for anew, and one that cannot be written costs nothing but the next compilation.
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

LIMIT = 1 << 29  # [bytes] of all files together; those that were not asked for longest are removed
MOST = 2 << 30  # [bytes] of a file that are unpacked
FOLDER = "plans"


class Said(NamedTuple):
    """A compiler's answer."""

    arguments: int  # [bytes] on one device
    temporaries: int
    peak: int
    seconds: float  # that compiling took
    text: str | None  # of the compiled program; None: it cannot be read
    refusal: str = ""  # why there is no program: it does not fit


KINDS = (int, int, int, int | float, str | None, str)  # of its entries


def key(program: str, devices: Sequence[Any], options: Mapping[str, Any], versions: str) -> str:
    """Hexadecimal: what decides the compiler's answer. ``program``: as lowered; ``versions``: of the compilers."""
    placed = [(device.id, getattr(device, "coords", None), device.process_index) for device in devices]
    surroundings = [os.environ.get(name, "") for name in ("XLA_FLAGS", "LIBTPU_INIT_ARGS")]
    what = [devices[0].device_kind, placed, sorted(options.items()), versions, jax.__version__, surroundings]
    return hashlib.sha256(json.dumps(what, default=str).encode() + b"\0" + program.encode()).hexdigest()


def find(name: str) -> Said | None:
    """What was said of the program of this key."""
    path = machine.cache_folder(FOLDER, f"{name}.json.gz")
    try:
        unpacker = zlib.decompressobj(wbits=31)
        text = unpacker.decompress(files.read(path, most=LIMIT), MOST)
        said = Said(**files.parse(text.decode(), str(path)))
        if not unpacker.eof or not all(map(isinstance, said, KINDS)) or not min(said[:4]) >= 0:
            return None
        os.utime(path)
    except (OSError, ValueError, TypeError, zlib.error):  # none, or no whole one
        return None
    return said


def keep(name: str, said: Said) -> None:
    """Writes it, whole or not at all."""
    path = machine.cache_folder(FOLDER, f"{name}.json.gz")
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_write.file(path) as file:
            file.write(gzip.compress(json.dumps(said._asdict()).encode(), 1))
        machine.trim(path.parent, LIMIT)
