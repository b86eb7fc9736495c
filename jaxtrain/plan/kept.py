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
import pathlib
import tempfile
import zlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax

from loaders.io import files, machine

LIMIT = 1 << 29  # [bytes] of all files together; those that were not asked for longest are removed
MOST = 2 << 30  # [bytes] of a file that are unpacked
FOLDER = "plans"
COUNTED = {"tpu": "its peak"}  # platform -> how its answers are counted, where that is another way than it was


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
    counted = [COUNTED[devices[0].platform]] if devices[0].platform in COUNTED else []
    what = [devices[0].device_kind, placed, sorted(options.items()), versions, jax.__version__, surroundings, *counted]
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
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=".part-", delete=False) as file:
            part = pathlib.Path(file.name)
            try:
                file.write(gzip.compress(json.dumps(said._asdict()).encode(), 1))
            except OSError:
                part.unlink()
                raise
        part.rename(path)
        machine.trim(path.parent, LIMIT)
