"""Shards in object stores and on the web, through fsspec, with a bounded cache on disk.

Addresses begin with gs://, s3://, hf:// or https://. Files are copied in parts, several at once,
first the parts that a reader waits for. Training begins with the headers of Arrow shards, but waits
for whole Parquet shards. An interrupted copy resumes at its end, unless the file has another tag
since. A part that comes short is requested again. An MD5 or SHA-256 of the store is compared when
the file is whole. Copies lie in $JAXTRAIN_CACHE/shards (or ~/.cache/jaxtrain/shards), a folder for
each address. Beyond $JAXTRAIN_SHARDS_GB, 200 by default, the address that was not used for longest
is removed first, and none that a process uses. Credentials are those of fsspec's file systems.
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
    if copy := _copies.get(str(folder)):
        copy.wait(texts=not wait)
    return str(folder)


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
            try:
                system, files = _list(address)
            except DataError as error:
                if not (folder / ".complete").is_file():
                    raise
                log.warning("%s; the copy of before is used", error)  # without a network, too
                return
            budget = remote_cache.DiskBudget(folder, sum(file.size for file in files), address)
            (folder / ".address").write_text(address)
            wanted = {file.name for file in files}
            for path in folder.rglob("*"):  # of a file that the store has no longer
                if (
                    path.is_file()
                    and not path.name.startswith(".")
                    and str(path.relative_to(folder)) not in wanted
                ):
                    path.unlink()
            missing = [file for file in files if _prepare(file, folder)]
            missing.sort(key=lambda file: not file.name.endswith(".json"))
            if not missing:
                (folder / ".complete").touch()
                return
            (folder / ".complete").unlink(missing_ok=True)
        except BaseException:
            _held.pop(str(folder)).close()
            raise
    log.info(
        "%s: %d of %d files are copied to %s, while the run begins",
        address,
        len(missing),
        len(files),
        folder,
    )
    _copies[str(folder)] = _Copy(system, missing, folder, budget)


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
    return machine.cache_folder(
        "shards", hashlib.sha256(address.rstrip("/").encode()).hexdigest()[:24]
    )


def _list(address: str) -> tuple[Any, list[File]]:
    scheme = address.partition("://")[0]
    try:
        import fsspec

        on_web = scheme in ("http", "https")
        system, root = fsspec.core.url_to_fs(address, **({"get_client": _client} if on_web else {}))
        if address.endswith(SUFFIXES):
            paths = [root]
        elif any(sign in root for sign in "*?["):
            paths = system.glob(root)
        else:
            paths = _linked(system, root) if on_web else system.find(root)
        about = {path: system.info(path) for path in sorted(paths) if path.endswith(SUFFIXES)}
    except ImportError as error:
        extra = EXTRAS[scheme]
        raise DataError(
            f"{address} needs {extra}: pip install 'jaxtrain[remote]' {extra} ({error})"
        ) from error
    except DataError:
        raise
    except Exception as error:  # file systems raise many kinds
        raise DataError(
            f"{address} cannot be listed: {type(error).__name__}: {str(error)[:300]}"
        ) from error
    if not about:
        raise DataError(f"{address} holds no Arrow or Parquet shards")
    above = os.path.commonpath([os.path.dirname(path) for path in about])
    files = []
    for path, info in about.items():
        name = os.path.relpath(path, above)
        odd = (
            not name.isprintable()
            or max(len(os.fsencode(part)) for part in name.split("/")) > LONGEST_NAME
        )
        if (
            odd
            or name.startswith(("..", "/"))
            or not isinstance(size := info.get("size"), int)
            or size < 0
        ):
            raise DataError(
                f"{address}: the store gives no size of {path[:300]!r}, or a name that no file"
                " should have"
            )
        tags = ("ETag", "etag", "blob_id", "mtime", "LastModified")
        tag = next((str(info[each]) for each in tags if info.get(each)), "")
        files.append(File(path, name, size, f"{size} {tag}", _digest(info)))
    names = {file.name for file in files}
    if both := next(
        (name for name in names if not names.isdisjoint(map(str, pathlib.PurePath(name).parents))),
        "",
    ):
        raise DataError(f"{address} has {both[:300]}, which lies in another file; name one of them")
    return system, files


async def _client(**options: Any) -> Any:
    """Return a web client that reads answers of bounded length alone."""
    import aiohttp

    class Answer(aiohttp.ClientResponse):
        async def read(self) -> bytes:
            if self._body is None:
                parts, left = [], MAX_ANSWER
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
    pages, found = [top], {top: None}
    for page in pages:  # which grow
        if len(pages) > MAX_PAGES:
            raise DataError(
                f"{root} has more than {MAX_PAGES} pages of links; name one of its folders"
            )
        text = system.cat_file(root if page == top else page).decode(errors="replace")
        for link in LINK.findall(text):
            url = urllib.parse.urljoin(page, html.unescape(link)).partition("#")[0]
            if url.startswith(top) and url not in found:
                found[url] = None
                if url.endswith("/"):
                    pages.append(url)
    return list(found)


def _digest(info: dict[str, Any]) -> tuple[str, str]:
    """Return a store's checksum: Google's MD5, Amazon's of one part, the Hub's SHA-256."""
    if text := info.get("md5Hash"):
        return "md5", base64.b64decode(text).hex()
    lfs = info.get("lfs") or {}
    if sha := (lfs.get("sha256") if isinstance(lfs, dict) else getattr(lfs, "sha256", None)):
        return "sha256", sha
    tag = str(info.get("ETag", "")).strip('"')
    if (
        len(tag) == 32
        and "StorageClass" in info
        and all(sign in "0123456789abcdef" for sign in tag)
    ):
        return "md5", tag
    return "", ""


def _prepare(file: File, folder: pathlib.Path) -> bool:
    """Make room for a copy, unless it is there whole. Return whether something of it is missing."""
    place, note, parts = folder / file.name, *neighbours(folder / file.name)
    place.parent.mkdir(parents=True, exist_ok=True)
    before: dict[str, Any] = {}
    with contextlib.suppress(files_lib.FileError):  # none, or one that a kill cut short
        before = files_lib.read_json(note)
    is_same = before == {"tag": file.tag} and place.is_file() and place.stat().st_size == file.size
    if is_same and not parts.exists():
        return False
    n = -(-file.size // PART)
    if (
        is_same
        and (found := parts.read_bytes())[:HEAD] == PART.to_bytes(HEAD, "little")
        and len(found) == HEAD + n
    ):
        return True
    # another file, which someone may have mapped, stays as it is under no name
    for path in (note, place, parts):
        path.unlink(missing_ok=True)
    if n:
        parts.write_bytes(PART.to_bytes(HEAD, "little") + bytes(n))
    with open(place, "wb") as made:
        made.truncate(file.size)
    note.write_text(json.dumps({"tag": file.tag}))
    return bool(n)


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
        self._system, self._files, self._folder, self._budget = system, files, folder, budget
        self._parts: dict[File, np.memmap] = {}
        self._taken: set[tuple[File, int]] = set()
        self._lock, self._done = threading.Lock(), threading.Event()
        threading.Thread(target=self._run, name="copy of shards", daemon=True).start()

    @property
    def done(self) -> bool:
        return self._done.is_set()

    def wait(self, *, texts: bool = False) -> None:
        """Wait for all files, or only for the indexes of the others. Raises DataError."""
        named = [
            neighbours(self._folder / file.name)[1]
            for file in self._files
            if file.name.endswith(".json")
        ]
        while not self._done.wait(POLL if texts else None):
            if not any(parts.exists() for parts in named):
                return
        if self.error:
            _copies.pop(str(self._folder), None)  # the next attempt begins again
            if held := _held.pop(str(self._folder), None):
                held.close()
            raise self.error

    def _run(self) -> None:
        try:
            with _locked(self._folder / ".copy"):
                for file in self._files:
                    place, (_, parts) = (
                        self._folder / file.name,
                        neighbours(self._folder / file.name),
                    )
                    if not parts.exists():  # another process has ended it
                        continue
                    self._parts[file] = np.memmap(parts, np.uint8, "r+", HEAD)
                    # of an attempt that failed, or was killed
                    self._parts[file][self._parts[file] != PRESENT] = ABSENT
                    if (self._parts[file] == PRESENT).all():
                        self._end(file, place)
                threads = [threading.Thread(target=self._work, daemon=True) for _ in range(AT_ONCE)]
                for thread in threads:
                    thread.start()
                for thread in threads:
                    thread.join()
                if not self.error:
                    (self._folder / ".complete").touch()
        except Exception as error:  # noqa: BLE001  a full disk, too: the waiting threads must learn of it
            self._fail(error)
        finally:
            self._done.set()

    def _work(self) -> None:
        try:
            while not self.error and (job := self._next()):
                file, first, last = job
                start, end = first * PART, min(last * PART, file.size)
                data, place = _part(self._system, file, start, end), self._folder / file.name
                self._budget.take(len(data))
                with open(place, "r+b") as out:
                    out.seek(start)
                    out.write(data)
                    out.flush()
                    # Before it is noted, for a crash of the machine. macOS has fsync alone.
                    getattr(os, "fdatasync", os.fsync)(out.fileno())
                with self._lock:
                    self._parts[file][first:last] = PRESENT
                    is_whole = bool((self._parts[file] == PRESENT).all())
                if is_whole:
                    self._end(file, place)
        except Exception as error:  # noqa: BLE001
            self._fail(error)

    def _next(self) -> tuple[File, int, int] | None:
        with self._lock:
            for state in (WANTED, ABSENT):
                for file, parts in self._parts.items():
                    for first in np.flatnonzero(parts == state).tolist():
                        if (file, first) in self._taken:
                            continue
                        last, most = first + 1, min(first + TOGETHER, len(parts))
                        while (
                            last < most and parts[last] == state and (file, last) not in self._taken
                        ):
                            last += 1
                        self._taken |= {(file, part) for part in range(first, last)}
                        return file, first, last
        return None

    def _end(self, file: File, place: pathlib.Path) -> None:
        note, parts = neighbours(place)
        if file.digest[0]:
            with open(place, "rb") as copied:
                found = hashlib.file_digest(copied, file.digest[0]).hexdigest()
            if found != file.digest[1]:
                self._parts[file][:] = FAILED  # for its readers
                for path in (note, place, parts):
                    path.unlink()
                kind, stated = file.digest
                raise DataError(
                    f"{file.path} came with the {kind} {found}, and the store says {stated}; rerun"
                )
        parts.unlink()

    def _fail(self, error: Exception) -> None:
        with self._lock:
            full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
            remedy = "free some space, then rerun to resume" if full else "rerun to resume"
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
