"""Checksums of a finished step directory, by which a reader recognises damage.

    <step>/manifest.json
      {"algorithm": "sha256",
       "files": {"state/d/0f3a…": {"bytes": 1725, "hash": "<hex>"}, …},
       "hash": "<hex>"}

"files" are all below <step>, sorted, but `UNLISTED`. The last "hash" is of the canonical JSON of
the rest.

Orbax completes a step directory by renaming it. The manifest is computed from the files on disk
right before, so that a step is never complete without one, however the run is killed. Before, each
process of several measures the files that it wrote (`measure`), and process 0 takes their hashes
over. A reader of several processes compares a part of the files in each (`verify`). Steps of
other programs have none: `verify` raises `NoManifest`, and its caller decides to read the step
unverified, and says so. So a missing manifest is never a reason to reject a step, and one that
disagrees with a byte always is. A file that cannot be read is tried again for some seconds, and is
then damage. Damage before the first read of the disk cannot be seen.

SHA-256, because processors have instructions for it (2.7 times as fast as BLAKE2b on one with
them), and because `sha256sum` checks it without this program. Files that the manifest does not list
are ignored: network file systems leave some, and of the two that Orbax writes at the commit itself,
with the time, no value that is restored depends.
"""

import concurrent.futures
import contextlib
import hashlib
import json
import logging
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from etils import epath

from jaxtrain.arrays import stored
from loaders.io import files
from loaders.io.checks import first_line

log = logging.getLogger("jaxtrain")

T = TypeVar("T")
NAME = "manifest.json"
# files of the step's own folder that are not listed
UNLISTED = (NAME, "_CHECKPOINT_METADATA", "commit_success.txt")
ALGORITHM = "sha256"
PIECE = 4 << 20  # [bytes] held per file at a time. Other threads run while one is hashed
THREADS = 8
PAUSES = (0.5, 2.0, 5.0)  # [s] before a file that could not be read is read again
OF_PROCESS = "state/ocdbt.process_{}"  # the folder in which Orbax writes the arrays of a process


class NoManifest(FileNotFoundError):
    """The step directory has no manifest: another program wrote it."""


class Problem(NamedTuple):
    """The difference of a file to its entry."""

    text: str = ""
    may_pass: bool = False  # it could not be read now


def measure(step_dir: epath.PathLike, process: int) -> None:
    """Measure the files that a process wrote, and leave their hashes for `write` in process 0.

    Call it once these files are complete, and before process 0 calls `write`.
    """
    folder = epath.Path(step_dir)
    prefix = OF_PROCESS.format(process)
    item, own = prefix.split("/")
    measured = {}
    for written in folder.glob(f"{item}*/{own}"):  # Orbax renames the item afterwards
        names = sorted(_files(written))
        for name, entry in _measure_all(written, names).items():
            measured[f"{prefix}/{name}"] = {**entry, "time": _time(written / name)}
    if not measured:
        return
    (folder / _note(process)).unlink(missing_ok=True)  # of an attempt that was killed
    _put(folder, _note(process), json.dumps(measured).encode())


def write(step_dir: epath.PathLike, processes: int = 1) -> None:
    """Write the manifest of a step directory, in one process, once every other file is written.

    ``processes``: how many may have called `measure`. Files that changed since are measured again.
    """
    folder = epath.Path(step_dir)
    names = sorted(_files(folder))
    known: dict[str, dict[str, Any]] = {}
    for process in range(processes):
        known |= _known(folder, process)
    unknown = [name for name in names if name not in known]
    measured = _measure_all(folder, unknown) | {n: known[n] for n in names if n in known}
    _put(folder, NAME, _encode(measured))
    for process in range(processes):
        (folder / _note(process)).unlink(missing_ok=True)


def verify(step_dir: epath.PathLike, part: int = 0, parts: int = 1) -> list[str]:
    """List the damage of a step directory, a line per file, its name first. Raises NoManifest.

    With ``parts`` only the files of one part are read, which have about as many bytes in each.
    """
    folder = epath.Path(step_dir)
    damage = f"{NAME}: is damaged ({{}}), so that no other file can be verified"
    try:
        raw = _content(folder)
        listed = files.parse(raw.decode(), NAME)["files"]
        is_intact = all(_is_entry(name, entry) for name, entry in listed.items())
        is_intact = is_intact and _encode(listed) == raw
    except (files.FileError, stored.StoredError) as error:
        if files.is_missing(error):
            raise NoManifest(f"{folder} has no {NAME}") from error
        return [damage.format(error)]
    except Exception:  # noqa: BLE001  a damaged text may fail in any way
        is_intact = False
    if not is_intact:
        return [damage.format("it does not match its own hash")]
    names = _of_part(listed, part, parts)
    found: dict[str, Problem] = {}
    with concurrent.futures.ThreadPoolExecutor(THREADS) as pool:
        for pause in (0.0, *PAUSES):
            time.sleep(pause)
            problems = pool.map(lambda name: _problem(folder, name, listed[name]), names)
            found |= zip(names, problems, strict=True)
            names = [name for name in names if found[name].may_pass]
            if not names:
                break
            log.warning("%s: %s", folder, found[names[0]].text)
    return [problem.text for problem in found.values() if problem.text]


def number(step_dir: epath.PathLike) -> int:
    """Return 31 bits of the content of the manifest, 0 if there is none.

    Raises FileError or StoredError: it cannot be read.
    """
    try:
        content = _content(epath.Path(step_dir))
    except (files.FileError, stored.StoredError) as error:
        if files.is_missing(error):
            return 0
        raise
    digest = hashlib.new(ALGORITHM, content).digest()
    return 1 + int.from_bytes(digest[:4], "big") % (2**31 - 1)


def _content(folder: epath.Path) -> bytes:
    """Return the content of the manifest. Raises FileError or StoredError."""
    return patiently(lambda: files.read(stored.inside(folder, NAME), most=files.MAX_JSON))


def patiently(read: Callable[[], T]) -> T:
    """Read files, again after `PAUSES` for errors that may pass. Raises the last one."""
    for pause in PAUSES:
        try:
            return read()
        except (OSError, files.FileError, stored.StoredError) as error:
            if not files.may_pass(error):
                raise
            log.warning("%s; it is read again in %g s", first_line(error), pause)
        time.sleep(pause)
    return read()


def _of_part(listed: Mapping[str, dict[str, Any]], part: int, parts: int) -> list[str]:
    """List the files whose middle byte, of all files in a row, is in one of equal parts.

    The files of a process that saved are next to each other, so that as many processes that restore
    have most of theirs, and read them once.
    """
    total = sum(entry["bytes"] for entry in listed.values()) or 1
    names = []
    before = 0
    for name in sorted(listed, key=_place):
        size = listed[name]["bytes"]
        if min(parts - 1, parts * (2 * before + size) // (2 * total)) == part:
            names.append(name)
        before += size
    return names


def _place(name: str) -> tuple[int, str]:
    match = re.match(OF_PROCESS.format(r"(\d{1,9})/"), name)
    return (int(match[1]) if match else -1), name


def _note(process: int) -> str:
    # With a dot in front `_files` does not list it, and if it stays nobody reads it.
    return f".{NAME}.of-{process}"


def _known(folder: epath.Path, process: int) -> dict[str, dict[str, Any]]:
    """Return the entries of a process's files that it measured, and that are as they were then."""
    known = {}
    # Without a note that can be read, as in another program's folder, all files are measured.
    with contextlib.suppress(OSError, ValueError, LookupError, TypeError, AttributeError):
        text = (folder / _note(process)).read_text()
        for name, entry in json.loads(text).items():
            path = folder / name
            is_same = path.stat().length == entry["bytes"] and _time(path) == entry.pop("time")
            if is_same and _is_entry(name, entry):
                known[name] = entry
    return known


def _time(path: epath.Path) -> int:
    """Return the time of a file's last change, as exactly as its file system tells it."""
    text = os.fspath(path)
    return int(path.stat().mtime) if "://" in text else os.stat(text).st_mtime_ns


def _measure_all(folder: epath.Path, names: Sequence[str]) -> dict[str, dict[str, Any]]:
    with concurrent.futures.ThreadPoolExecutor(THREADS) as pool:
        entries = pool.map(_measure, [folder / name for name in names])
        return dict(zip(names, entries, strict=True))


def _put(folder: epath.Path, name: str, content: bytes) -> None:
    """Write a file whole or not at all."""
    # A dot in front: a kill before the rename leaves a file that `_files` does not list.
    temporary = folder / f".{name}.{os.getpid()}"
    with temporary.open("wb") as file:
        file.write(content)
        file.flush()
        # an object store has neither descriptors nor torn files
        with contextlib.suppress(AttributeError, OSError):
            os.fsync(file.fileno())
    temporary.rename(folder / name)


def _is_entry(name: str, entry: dict[str, Any]) -> bool:
    return name.isprintable() and type(entry["bytes"]) is int and type(entry["hash"]) is str


def _problem(folder: epath.Path, name: str, expected: dict[str, Any]) -> Problem:
    """Compare a file with its entry."""
    try:
        path = stored.inside(folder, name)
        length = path.stat().length
        if length != expected["bytes"]:
            return Problem(f"{name}: has {length} bytes, and {expected['bytes']} were written")
        actual = _measure(path)
    except (OSError, files.FileError, stored.StoredError) as error:
        if files.is_missing(error):
            return Problem(f"{name}: is missing ({expected['bytes']} bytes were written)")
        return Problem(f"{name}: cannot be read ({error})", files.may_pass(error))
    if actual != expected:
        return Problem(
            f"{name}: its {length} bytes are not those that were written ({ALGORITHM} differs)"
        )
    return Problem()


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
