"""Shards in object stores and on the web, through fsspec, with a bounded cache on disk.

Addresses begin with gs://, s3://, hf:// or https://. Files are copied in parts, several at once,
first the parts that a reader waits for. Training begins with the headers of Arrow shards, but waits
for whole Parquet shards. An interrupted copy resumes at its end, unless the file has another tag
since. A part that comes short is requested again. An MD5 or SHA-256 of the store is compared when
the file is whole. Copies lie in $JAXTRAIN_CACHE/shards (or ~/.cache/jaxtrain/shards), a folder for
each address. Beyond $JAXTRAIN_SHARDS_GB, 200 by default, the address that was not used for longest
is removed first, and none that a process uses. Credentials are those of fsspec's file systems.

The caches of fsspec 2026.9 do not serve here, since none has a bound. Its ``filecache`` copies
whole files alone, keeps nothing of an interrupted one, and takes no lock against other processes.
Its ``blockcache`` notes a block before its bytes arrive, and saves these notes when the file is
closed. It writes through a mapping, so that a full disk kills the process.
"""

import base64
import contextlib
import errno
import fcntl
import hashlib
import html
import json
import logging
import os
import pathlib
import re
import threading
import time
import urllib.parse
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from loaders.audio import remote_cache
from loaders.audio.remote_cache import ABSENT, FAILED, HEAD, PRESENT, WANTED, neighbours
from loaders.base import DataError
from loaders.io import files as files_lib
from loaders.io import machine

log = logging.getLogger("jaxtrain")
SCHEMES = ("gs", "s3", "hf", "https", "http")
EXTRAS = {
    "gs": "gcsfs",
    "s3": "s3fs",
    "hf": "huggingface_hub",
    "https": "aiohttp",
    "http": "aiohttp",
}
SUFFIXES = (".arrow", ".parquet", "/state.json", "/index.json")
PART = 1 << 20  # [bytes] of a file that are there or not
TOGETHER = 8  # parts asked for at once
POLL = 0.01  # [s] between looks at the copies
MAX_ANSWER = 64 << 20  # [bytes] of a server's answer: a page of links, or parts of a file
MAX_PAGES = 1000  # of links
LINK = re.compile(r"""\bhref=["']([^"'<>\s]{1,2000})["']""", re.I)
LONGEST_NAME = 240  # [bytes] that a file system takes, with the endings of `neighbours`
TRIES = 6  # of a part, with longer and longer waits between them
WAIT = 0.5  # [s] before the second try
TAGS = ("ETag", "etag", "blob_id", "mtime", "LastModified")  # of a file, as stores name them
AT_ONCE = 8  # files

_held: dict[str, Any] = {}  # folders that this process uses: their open lock
_copies: dict[str, "_Copy"] = {}  # folders that this process copies
_beginning = threading.Lock()


class File(NamedTuple):
    """A file of a store."""

    path: str  # as its file system names it
    name: str  # relative to the address
    size: int
    tag: str  # that changes when the file does
    digest: tuple[str, str]  # ("md5" or "sha256", hexadecimal), or empty


def is_remote(path: str) -> bool:
    """Whether a path is an address of a store."""
    return path.partition("://")[0] in SCHEMES and "://" in path


def is_complete(address: str) -> bool:
    """Whether all of an address was copied before."""
    return (_folder(address) / ".complete").is_file()


def fetch(address: str, *, wait: bool = True) -> str:
    """Copy the missing shards at an address. Return the folder, glob or file of the copies.

    Without ``wait`` copies come while the process works, and an index that is opened with
    ``copying`` (`is_copying`) waits for the parts that it reads.

    Raises DataError: no file system for it is installed, there are no shards, they are larger than
    the cache may be, or a file cannot be copied after several tries.
    """
    folder = _folder(address)
    with _beginning:
        if str(folder) not in _held:
            _begin(address, folder)
    copy = _copies.get(str(folder))
    if copy:
        copy.wait(texts=not wait)
    return str(folder)


def is_copy(path: pathlib.Path) -> bool:
    """Whether a file lies in the copy of an address, whole or not."""
    with contextlib.suppress(FileNotFoundError):  # there is no home for any
        return path.is_relative_to(machine.cache_folder("shards"))
    return False


def is_copying(path: pathlib.Path) -> bool:
    """Whether a file lies in a copy that this process has begun, and that may not be whole."""
    copies = [_copies[str(folder)] for folder in path.parents if str(folder) in _copies]
    return any(not copy.done or copy.error for copy in copies)


def reasons() -> str:
    """Return the reason why copies of this process cannot continue, as "; …", or ""."""
    return "".join(f"; {copy.error}" for copy in _copies.values() if copy.error)


def _begin(address: str, folder: pathlib.Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with _locked(folder / ".begin"):
        _hold(folder)
        try:
            copy = _begin_held(address, folder)
        except BaseException:
            _held.pop(str(folder)).close()
            raise
    if copy:
        _copies[str(folder)] = copy


def _begin_held(address: str, folder: pathlib.Path) -> "_Copy | None":
    """Begin to copy what is missing in a folder that this process holds, if anything is."""
    complete = folder / ".complete"
    try:
        system, files = _list(address)
    except DataError as error:
        if not complete.is_file():
            raise
        log.warning("%s; the copy of before is used", error)  # without a network, too
        return None
    n_bytes = sum(file.size for file in files)
    budget = remote_cache.DiskBudget(folder, n_bytes, address)
    (folder / ".address").write_text(address)
    _remove_other_files(folder, {file.name for file in files})
    missing = [file for file in files if _prepare(file, folder)]
    missing.sort(key=lambda file: not file.name.endswith(".json"))
    if not missing:
        complete.touch()
        return None
    complete.unlink(missing_ok=True)
    log.info(
        "%s: %d of %d files are copied to %s, while the run begins",
        address,
        len(missing),
        len(files),
        folder,
    )
    return _Copy(system, missing, folder, budget)


def _remove_other_files(folder: pathlib.Path, names: set[str]) -> None:
    """Remove copies of files that the store has no longer."""
    for path in folder.rglob("*"):
        is_hidden = path.name.startswith(".")
        if path.is_file() and not is_hidden and str(path.relative_to(folder)) not in names:
            path.unlink()


def _hold(folder: pathlib.Path) -> None:
    """Keep a copy from being removed until this process ends, since it is mapped."""
    (folder / ".use").touch()
    _held[str(folder)] = lock = open(folder / ".use")
    fcntl.flock(lock, fcntl.LOCK_SH)
    os.utime(folder / ".use")


@contextlib.contextmanager
def _locked(path: pathlib.Path) -> Iterator[None]:
    with open(path, "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _folder(address: str) -> pathlib.Path:
    digest = hashlib.sha256(address.rstrip("/").encode()).hexdigest()
    return machine.cache_folder("shards", digest[:24])


def _list(address: str) -> tuple[Any, list[File]]:
    """Return the file system of an address, and its shards. Raises DataError."""
    try:
        system, info_by_path = _list_by_fsspec(address)
    except ImportError as error:
        extra = EXTRAS[address.partition("://")[0]]
        raise DataError(
            f"{address} needs {extra}: pip install 'jaxtrain[remote]' {extra} ({error})"
        ) from error
    except DataError:
        raise
    except Exception as error:  # file systems raise many kinds
        raise DataError(
            f"{address} cannot be listed: {type(error).__name__}: {str(error)[:300]}"
        ) from error
    if not info_by_path:
        raise DataError(f"{address} holds no Arrow or Parquet shards")
    top = os.path.commonpath([os.path.dirname(path) for path in info_by_path])
    files = [_file(address, path, info, top) for path, info in info_by_path.items()]
    _refuse_files_in_files(address, files)
    return system, files


def _list_by_fsspec(address: str) -> tuple[Any, dict[str, dict[str, Any]]]:
    fsspec = machine.package("fsspec")
    on_web = address.startswith(("http://", "https://"))
    options = {"get_client": _client} if on_web else {}
    system, root = fsspec.core.url_to_fs(address, **options)
    if address.endswith(SUFFIXES):
        paths = [root]
    elif any(sign in root for sign in "*?["):
        paths = system.glob(root)
    elif on_web:
        paths = _linked(system, root)
    else:
        paths = system.find(root)
    return system, {path: system.info(path) for path in sorted(paths) if path.endswith(SUFFIXES)}


def _file(address: str, path: str, info: dict[str, Any], top: str) -> File:
    """Return a file as its store describes it. Raises DataError for what no file should have."""
    name = os.path.relpath(path, top)
    size = info.get("size")
    longest_name = max(len(os.fsencode(part)) for part in name.split("/"))
    is_name = name.isprintable() and longest_name <= LONGEST_NAME
    if not is_name or name.startswith(("..", "/")) or not isinstance(size, int) or size < 0:
        raise DataError(
            f"{address}: the store gives no size of {path[:300]!r}, or a name that no file"
            " should have"
        )
    stated_tags = [str(info[key]) for key in TAGS if info.get(key)]
    tag = stated_tags[0] if stated_tags else ""
    return File(path, name, size, f"{size} {tag}", _digest(info))


def _refuse_files_in_files(address: str, files: Sequence[File]) -> None:
    names = {file.name for file in files}
    for name in names:
        parents = map(str, pathlib.PurePath(name).parents)
        if not names.isdisjoint(parents):
            raise DataError(
                f"{address} has {name[:300]}, which lies in another file; name one of them"
            )


async def _client(**options: Any) -> Any:
    """Return a web client that reads answers of bounded length alone."""
    import aiohttp

    class Answer(aiohttp.ClientResponse):
        async def read(self) -> bytes:
            if self._body is None:
                parts = []
                left = MAX_ANSWER
                async for part in self.content.iter_any():
                    left -= len(part)
                    if left < 0:
                        self.close()
                        raise aiohttp.ClientPayloadError(f"more than {MAX_ANSWER:,} bytes come")
                    parts.append(part)
                self._body = b"".join(parts)
            return await super().read()

    return aiohttp.ClientSession(response_class=Answer, **options)


def _linked(system: Any, root: str) -> list[str]:
    """Return the addresses that pages below one link to. Raises DataError: too many pages."""
    top = root.rstrip("/") + "/"
    pages = [top]
    addresses = {top: None}  # in their order
    for page in pages:  # which grow
        if len(pages) > MAX_PAGES:
            raise DataError(
                f"{root} has more than {MAX_PAGES} pages of links; name one of its folders"
            )
        answer = system.cat_file(root if page == top else page)
        for link in LINK.findall(answer.decode(errors="replace")):
            url, _, _ = urllib.parse.urljoin(page, html.unescape(link)).partition("#")
            if not url.startswith(top) or url in addresses:
                continue
            addresses[url] = None
            if url.endswith("/"):
                pages.append(url)
    return list(addresses)


def _digest(info: dict[str, Any]) -> tuple[str, str]:
    """Return a store's checksum: Google's MD5, Amazon's of one part, the Hub's SHA-256."""
    if info.get("md5Hash"):
        return "md5", base64.b64decode(info["md5Hash"]).hex()
    lfs = info.get("lfs") or {}
    sha256 = lfs.get("sha256") if isinstance(lfs, dict) else getattr(lfs, "sha256", None)
    if sha256:
        return "sha256", sha256
    tag = str(info.get("ETag", "")).strip('"')
    if "StorageClass" in info and re.fullmatch("[0-9a-f]{32}", tag):
        return "md5", tag
    return "", ""


def _prepare(file: File, folder: pathlib.Path) -> bool:
    """Make room for a copy, unless it is there whole. Return whether something of it is missing."""
    place = folder / file.name
    note, parts = neighbours(place)
    place.parent.mkdir(parents=True, exist_ok=True)
    n_parts = -(-file.size // PART)
    head = PART.to_bytes(HEAD, "little")
    if _is_copy_of(file, place):
        if not parts.exists():
            return False
        states = parts.read_bytes()
        if states[:HEAD] == head and len(states) == HEAD + n_parts:
            return True
    # another file, which someone may have mapped, stays as it is under no name
    for path in (note, place, parts):
        path.unlink(missing_ok=True)
    if n_parts:
        parts.write_bytes(head + bytes(n_parts))
    with open(place, "wb") as opened:
        opened.truncate(file.size)
    note.write_text(json.dumps({"tag": file.tag}))
    return bool(n_parts)


def _is_copy_of(file: File, place: pathlib.Path) -> bool:
    """Whether a copy, perhaps in part, is of this file and not of an earlier one."""
    note, _ = neighbours(place)
    try:
        content = files_lib.read_json(note)
    except files_lib.FileError:  # none, or one that a kill cut short
        return False
    is_same_tag = content == {"tag": file.tag}
    return is_same_tag and place.is_file() and place.stat().st_size == file.size


class _Job(NamedTuple):
    """Parts of a file that are requested together."""

    file: File
    first: int
    stop: int


class _Copy:
    """Threads that copy missing parts, requested ones first, of one process at a time."""

    def __init__(
        self,
        system: Any,
        files: Sequence[File],
        folder: pathlib.Path,
        budget: remote_cache.DiskBudget,
    ):
        self.error: DataError | None = None
        self._system = system
        self._files = files
        self._folder = folder
        self._budget = budget
        self._parts: dict[File, np.memmap] = {}
        self._requested: set[tuple[File, int]] = set()
        self._lock = threading.Lock()
        self._done = threading.Event()
        threading.Thread(target=self._run, name="copy of shards", daemon=True).start()

    @property
    def done(self) -> bool:
        return self._done.is_set()

    def wait(self, *, texts: bool = False) -> None:
        """Wait for all files, or only for the indexes of the others. Raises DataError."""
        parts_of_texts = []
        for file in self._files:
            if file.name.endswith(".json"):
                _, parts = neighbours(self._folder / file.name)
                parts_of_texts.append(parts)
        while not self._done.wait(POLL if texts else None):
            are_whole = not any(parts.exists() for parts in parts_of_texts)
            # A file that is refused vanishes after its error is set.
            if are_whole and not self.error:
                return
        if self.error:
            _copies.pop(str(self._folder), None)  # the next attempt begins again
            use = _held.pop(str(self._folder), None)
            if use:
                use.close()
            raise self.error

    def _run(self) -> None:
        try:
            with _locked(self._folder / ".copy"):
                for file in self._files:
                    self._open_parts(file)
                threads = [threading.Thread(target=self._work, daemon=True) for _ in range(AT_ONCE)]
                for thread in threads:
                    thread.start()
                for thread in threads:
                    thread.join()
                if not self.error:
                    (self._folder / ".complete").touch()
        # A full disk, too: the waiting threads must learn of it.
        except Exception as error:  # noqa: BLE001
            self._fail(error)
        finally:
            self._done.set()

    def _open_parts(self, file: File) -> None:
        """Map a file's list of parts, unless another process has ended the file."""
        place = self._folder / file.name
        _, path = neighbours(place)
        if not path.exists():
            return
        parts = np.memmap(path, np.uint8, "r+", HEAD)
        self._parts[file] = parts
        parts[parts != PRESENT] = ABSENT  # of an attempt that failed, or was killed
        if (parts == PRESENT).all():
            self._end(file, place)

    def _work(self) -> None:
        try:
            while not self.error and (job := self._next()):
                self._copy_parts(job)
        except Exception as error:  # noqa: BLE001
            self._fail(error)

    def _copy_parts(self, job: "_Job") -> None:
        file = job.file
        place = self._folder / file.name
        start = job.first * PART
        end = min(job.stop * PART, file.size)
        data = _part(self._system, file, start, end)
        self._budget.take(len(data))
        with open(place, "r+b") as out:
            out.seek(start)
            out.write(data)
            out.flush()
            # Before it is noted, for a crash of the machine. macOS has fsync alone.
            getattr(os, "fdatasync", os.fsync)(out.fileno())
        with self._lock:
            parts = self._parts[file]
            parts[job.first : job.stop] = PRESENT
            is_whole = bool((parts == PRESENT).all())
        if is_whole:
            self._end(file, place)

    def _next(self) -> "_Job | None":
        """Return the next parts to copy, or None if all were requested."""
        with self._lock:
            for state in (WANTED, ABSENT):
                for file, parts in self._parts.items():
                    for first in np.flatnonzero(parts == state).tolist():
                        if (file, first) not in self._requested:
                            return self._request(file, first, state)
        return None

    def _request(self, file: File, first: int, state: int) -> "_Job":
        """Note a part and those after it as requested, as far as they have the same state."""
        parts = self._parts[file]
        limit = min(first + TOGETHER, len(parts))
        stop = first + 1
        while stop < limit and parts[stop] == state and (file, stop) not in self._requested:
            stop += 1
        self._requested |= {(file, part) for part in range(first, stop)}
        return _Job(file, first, stop)

    def _end(self, file: File, place: pathlib.Path) -> None:
        note, parts = neighbours(place)
        kind, stated = file.digest
        if kind:
            with open(place, "rb") as copied:
                digest = hashlib.file_digest(copied, kind).hexdigest()
            if digest != stated:
                error = DataError(
                    f"{file.path} came with the {kind} {digest}, and the store says {stated}; rerun"
                )
                self._parts[file][:] = FAILED  # for its readers
                self._fail(error)
                for path in (note, place, parts):
                    path.unlink()
                raise error
        parts.unlink()

    def _fail(self, error: Exception) -> None:
        with self._lock:
            is_full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
            remedy = "free some space, then rerun to resume" if is_full else "rerun to resume"
            if not isinstance(error, DataError):
                error = DataError(f"{self._folder} cannot be copied: {error}; {remedy}")
            self.error = self.error or error
            for parts in self._parts.values():
                parts[parts != PRESENT] = FAILED


def _part(system: Any, file: File, start: int, end: int) -> bytes:
    """Read bytes [start, end) of a file, in several tries if need be. Raises DataError."""
    reason = ""
    for attempt in range(TRIES):
        if attempt:
            time.sleep(WAIT * 2 ** (attempt - 1))
        try:
            data: bytes = system.cat_file(file.path, start=start, end=end)
        except FileNotFoundError as error:
            raise DataError(f"{file.path} is no longer there; rerun the command") from error
        except Exception as error:  # file systems raise many kinds
            reason = f"{type(error).__name__}: {str(error)[:200]}"
            continue
        if len(data) == end - start:
            return data
        reason = f"{len(data)} of {end - start} bytes came"
    raise DataError(
        f"{file.path}: bytes from {start} on cannot be had after {TRIES} tries ({reason}); rerun to"
        " resume"
    )
