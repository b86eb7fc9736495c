"""Checksums of a finished step directory, by which a reader recognises damage.

    <step>/manifest.json
      {"algorithm": "sha256",
       "files": {"state/d/0f3a…": {"bytes": 1725, "hash": "<hex>"}, …},
       "hash": "<hex>"}

"files" are all below <step>, sorted, but `UNLISTED`. The last "hash" is of the canonical JSON of
the rest.

Orbax completes a step directory by renaming it. The manifest is computed from the files on disk
right before, so that a step is never complete without one, however the run is killed. Steps of
other programs have none: `verify` raises `NoManifest`, and its caller decides to read the step
unverified, and says so. So a missing manifest is never a reason to reject a step, and one that
disagrees with a byte always is. Damage before the first read of the disk cannot be seen.

SHA-256, because processors have instructions for it (2.7 times as fast as BLAKE2b on one with
them), and because `sha256sum` checks it without this program. Files that the manifest does not list
are ignored: network file systems leave some, and of the two that Orbax writes at the commit itself,
with the time, no value that is restored depends.
"""

import concurrent.futures
import contextlib
import hashlib
import json
import os
from collections.abc import Iterator
from typing import Any

from etils import epath

from jaxtrain.arrays import stored
from loaders.io import files

NAME = "manifest.json"
# files of the step's own folder that are not listed
UNLISTED = (NAME, "_CHECKPOINT_METADATA", "commit_success.txt")
ALGORITHM = "sha256"
PIECE = 4 << 20  # [bytes] held per file at a time. Other threads run while one is hashed
THREADS = 8


class NoManifest(FileNotFoundError):
    """The step directory has no manifest: another program wrote it."""


def write(step_dir: epath.PathLike) -> None:
    """Write the manifest of a step directory, in one process, once every other file is written."""
    folder = epath.Path(step_dir)
    names = sorted(_files(folder))
    with concurrent.futures.ThreadPoolExecutor(THREADS) as pool:
        entries = pool.map(_measure, [folder / name for name in names])
        measured = dict(zip(names, entries, strict=True))
    # A dot in front: a kill before the rename leaves a file that `_files` does not list.
    temporary = folder / f".{NAME}.{os.getpid()}"
    with temporary.open("wb") as file:
        file.write(_encode(measured))
        file.flush()
        # an object store has neither descriptors nor torn files
        with contextlib.suppress(AttributeError, OSError):
            os.fsync(file.fileno())
    temporary.rename(folder / NAME)


def verify(step_dir: epath.PathLike) -> list[str]:
    """List the damage of a step directory, a line per file, its name first. Raises NoManifest."""
    folder = epath.Path(step_dir)
    if not (folder / NAME).exists():
        raise NoManifest(f"{folder} has no {NAME}")
    damage = f"{NAME}: is damaged ({{}}), so that no other file can be verified"
    try:
        raw = files.read(stored.inside(folder, NAME), most=files.MAX_JSON)
        listed = files.parse(raw.decode(), NAME)["files"]
        is_intact = all(_is_entry(name, entry) for name, entry in listed.items())
        is_intact = is_intact and _encode(listed) == raw
    except (files.FileError, stored.StoredError) as error:
        return [damage.format(error)]
    except Exception:  # noqa: BLE001  a damaged text may fail in any way
        is_intact = False
    if not is_intact:
        return [damage.format("it does not match its own hash")]
    with concurrent.futures.ThreadPoolExecutor(THREADS) as pool:
        results = pool.map(lambda item: _problem(folder, *item), listed.items())
        return [problem for problem in results if problem]


def _is_entry(name: str, entry: dict[str, Any]) -> bool:
    return name.isprintable() and type(entry["bytes"]) is int and type(entry["hash"]) is str


def _problem(folder: epath.Path, name: str, expected: dict[str, Any]) -> str | None:
    try:
        path = stored.inside(folder, name)
        if not path.exists():
            raise FileNotFoundError(name)
        length = path.stat().length
        if length != expected["bytes"]:
            return f"{name}: has {length} bytes, and {expected['bytes']} were written"
        actual = _measure(path)
    except FileNotFoundError:
        return f"{name}: is missing ({expected['bytes']} bytes were written)"
    except (OSError, files.FileError, stored.StoredError) as error:
        return f"{name}: cannot be read ({error})"
    if actual != expected:
        return f"{name}: its {length} bytes are not those that were written ({ALGORITHM} differs)"
    return None


def digest_of(path: epath.Path) -> str:
    return str(_measure(path)["hash"])


def _measure(path: epath.Path) -> dict[str, Any]:
    digest = hashlib.new(ALGORITHM)
    length = 0
    with files.regular(path) as file:
        while piece := file.read(PIECE):
            digest.update(piece)
            length += len(piece)
    return {"bytes": length, "hash": digest.hexdigest()}


def _encode(listed: dict[str, Any]) -> bytes:
    """Encode a manifest in its only valid form, so that every byte of it is checked."""
    body = {"algorithm": ALGORITHM, "files": listed}
    digest = hashlib.new(ALGORITHM, json.dumps(body, sort_keys=True).encode()).hexdigest()
    return (json.dumps({**body, "hash": digest}, indent=1, sort_keys=True) + "\n").encode()


def _files(folder: epath.Path, prefix: str = "") -> Iterator[str]:
    """Every file below ``folder`` as a relative name, but hidden ones and `UNLISTED`."""
    for path in folder.iterdir():
        name = f"{prefix}{path.name}"
        if path.is_dir():
            yield from _files(path, f"{name}/")
        elif not path.name.startswith(".") and name not in UNLISTED:
            yield name
