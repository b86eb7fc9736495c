"""Checksums of a finished step directory: what was written is what is read.

    <step>/manifest.json
      {"algorithm": "sha256",
       "files": {"state/d/0f3a…": {"bytes": 1725, "hash": "<hex>"}, …},      every file below <step>, sorted, but this one
       "hash": "<hex>"}                                                      of the canonical JSON of the rest

Orbax makes a step directory whole by renaming it; the manifest is read off the disk after that, and appears by a rename of its
own. A SIGKILL in between leaves a whole step without a manifest: `verify` raises `NoManifest`, and who calls it decides to
verify by reading instead, and says so. So a missing manifest is never a reason to throw a step away, and a manifest that
disagrees with one byte always is. What the manifest cannot see is damage between the device and the first read of the disk.

SHA-256, because processors have instructions for it (2.7 times as fast as BLAKE2b on one with them), and because `sha256sum`
checks it without this program. Files that the manifest does not list are not read by Orbax either, and are left alone: network
file systems leave some.
"""

import concurrent.futures
import contextlib
import functools
import hashlib
import json
import os
from collections.abc import Iterator
from typing import Any

from etils import epath

NAME = "manifest.json"
ALGORITHM = "sha256"
PIECE = 4 << 20  # [bytes] held per file at a time; hashing one lets other threads run
THREADS = 8


class NoManifest(FileNotFoundError):
    """The step directory has no manifest: it was cut off after its commit, or is from another program."""


def write(step_dir: epath.PathLike) -> None:
    """Writes the manifest of a finished step directory. Call it in one process, after the commit.

    Reads every file once. Memory: `THREADS` × `PIECE`.
    """
    folder = epath.Path(step_dir)
    names = sorted(_files(folder))
    with concurrent.futures.ThreadPoolExecutor(THREADS) as pool:
        files = dict(zip(names, pool.map(functools.partial(_measure, folder), names), strict=True))
    # A dot in front: a kill before the rename leaves a file that `_files` does not list.
    temporary = folder / f".{NAME}.{os.getpid()}"
    with temporary.open("wb") as file:
        file.write(_encode(files))
        file.flush()
        with contextlib.suppress(AttributeError, OSError):  # an object store has neither descriptors nor torn files
            os.fsync(file.fileno())
    temporary.rename(folder / NAME)


def verify(step_dir: epath.PathLike) -> list[str]:
    """What is wrong with a step directory, one line per file, its name first; an empty list when every byte is as written.

    Raises:
      NoManifest: there is nothing to compare with.
    """
    folder = epath.Path(step_dir)
    try:
        raw = (folder / NAME).read_bytes()
    except FileNotFoundError as error:
        raise NoManifest(f"{folder} has no {NAME}") from error
    try:
        files = json.loads(raw)["files"]
        intact = _encode(files) == raw
    except Exception:  # noqa: BLE001  whatever a damaged text makes of itself
        intact = False
    if not intact:
        return [f"{NAME}: is damaged (it does not match its own hash), so that no other file can be vouched for"]
    with concurrent.futures.ThreadPoolExecutor(THREADS) as pool:
        found = pool.map(lambda item: _problem(folder, *item), files.items())
        return [problem for problem in found if problem]


def _problem(folder: epath.Path, name: str, expected: dict[str, Any]) -> str | None:
    path = folder / name
    try:
        length = path.stat().length
        if length != expected["bytes"]:
            return f"{name}: has {length} bytes, and {expected['bytes']} were written"
        found = _measure(folder, name)
    except FileNotFoundError:
        return f"{name}: is missing ({expected['bytes']} bytes were written)"
    except OSError as error:
        return f"{name}: cannot be read ({error})"
    if found != expected:
        return f"{name}: its {length} bytes are not those that were written ({ALGORITHM} differs)"
    return None


def _measure(folder: epath.Path, name: str) -> dict[str, Any]:
    digest, length = hashlib.new(ALGORITHM), 0
    with (folder / name).open("rb") as file:
        while piece := file.read(PIECE):
            digest.update(piece)
            length += len(piece)
    return {"bytes": length, "hash": digest.hexdigest()}


def _encode(files: dict[str, Any]) -> bytes:
    """The manifest's only spelling, so that every byte of it is checked."""
    body = {"algorithm": ALGORITHM, "files": files}
    digest = hashlib.new(ALGORITHM, json.dumps(body, sort_keys=True).encode()).hexdigest()
    return (json.dumps({**body, "hash": digest}, indent=1, sort_keys=True) + "\n").encode()


def _files(folder: epath.Path, prefix: str = "") -> Iterator[str]:
    """Every file below ``folder`` as a relative name, but hidden ones and the manifest."""
    for path in folder.iterdir():
        name = f"{prefix}{path.name}"
        if path.is_dir():
            yield from _files(path, f"{name}/")
        elif not path.name.startswith(".") and name != NAME:
            yield name
