"""Shards in object stores and on the web: gs://, s3://, hf:// and https:// through fsspec, with a bounded cache on disk.

Files are copied whole, several at once, before they are mapped. A copy that was interrupted resumes where it stopped, unless
the file has another tag since; a part that comes short is asked for again; where the store gives an MD5 or SHA-256, it is
compared. Copies lie in $JAXTRAIN_CACHE/shards (or ~/.cache/jaxtrain/shards), a folder for each address. The limit is
$JAXTRAIN_SHARDS_GB, 200 by default: beyond it, the address that was not used for longest is removed first, and none that a
process uses. Private stores need credentials, where fsspec's file systems look for them.
"""

import base64
import concurrent.futures
import contextlib
import fcntl
import hashlib
import json
import logging
import os
import pathlib
import shutil
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

from loaders import machine
from loaders.base import DataError

log = logging.getLogger("jaxtrain")
SCHEMES = ("gs", "s3", "hf", "https", "http")
EXTRAS = {"gs": "gcsfs", "s3": "s3fs", "hf": "huggingface_hub", "https": "aiohttp", "http": "aiohttp"}
SUFFIXES = (".arrow", ".parquet", "/state.json", "/index.json")
PART = 8 << 20  # [bytes] asked for at once
TRIES = 6  # of a part, with longer and longer waits between them
WAIT = 0.5  # [s] before the second try
AT_ONCE = 8  # files
LIMIT = 200  # [GB] unless $JAXTRAIN_SHARDS_GB says otherwise

_held: dict[str, Any] = {}  # folders that this process uses: their open lock


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


def fetch(address: str) -> str:
    """Copies the shards at an address, or what is missing of them. Returns the folder, glob or file of the copies.

    Raises:
      DataError: no file system for it is installed, there are no shards, they are larger than the cache may be, or a file
        cannot be had after several tries.
    """
    folder = _folder(address)
    if str(folder) in _held:
        return str(folder)
    folder.mkdir(parents=True, exist_ok=True)
    with _lock(folder):
        try:
            system, files = _list(address)
        except DataError as error:
            if not (folder / ".complete").is_file():
                raise
            log.warning("%s; the copy of before is used", error)  # without a network, too
            return _hold(folder)
        _make_room(folder, sum(file.size for file in files), address)
        (folder / ".address").write_text(address)
        (folder / ".complete").unlink(missing_ok=True)
        wanted = {file.name for file in files}
        for path in folder.rglob("*"):  # of a file that the store has no longer
            if path.is_file() and not path.name.startswith(".") and str(path.relative_to(folder)) not in wanted:
                path.unlink()
        with concurrent.futures.ThreadPoolExecutor(AT_ONCE) as pool:
            for done in [pool.submit(_copy, system, file, folder) for file in files]:
                done.result()
        (folder / ".complete").touch()
    return _hold(folder)


def _hold(folder: pathlib.Path) -> str:
    """Keeps a copy from being removed until this process ends, since it is mapped."""
    _held[str(folder)] = lock = open(folder / ".use")
    fcntl.flock(lock, fcntl.LOCK_SH)
    os.utime(folder / ".use")
    return str(folder)


def _folder(address: str) -> pathlib.Path:
    return machine.cache_folder("shards", hashlib.sha256(address.rstrip("/").encode()).hexdigest()[:24])


@contextlib.contextmanager
def _lock(folder: pathlib.Path) -> Iterator[None]:
    """One process copies an address; the others wait for it."""
    (folder / ".use").touch()
    with open(folder / ".copy", "w") as lock, open(folder / ".use") as use:
        fcntl.flock(lock, fcntl.LOCK_EX)
        fcntl.flock(use, fcntl.LOCK_SH)
        yield


def _list(address: str) -> tuple[Any, list[File]]:
    """The file system of an address, and its shards. Raises DataError."""
    scheme = address.partition("://")[0]
    try:
        import fsspec

        system, root = fsspec.core.url_to_fs(address)
        if address.endswith(SUFFIXES):
            paths = [root]
        elif any(sign in root for sign in "*?["):
            paths = system.glob(root)
        else:
            paths = system.find(root)
        about = {path: system.info(path) for path in sorted(paths) if path.endswith(SUFFIXES)}
    except ImportError as error:
        raise DataError(
            f"{address} needs {EXTRAS[scheme]}: pip install 'jaxtrain[remote]' {EXTRAS[scheme]} ({error})"
        ) from error
    except Exception as error:  # of whatever kind a file system's are
        raise DataError(f"{address} cannot be listed: {type(error).__name__}: {str(error)[:300]}") from error
    if not about:
        raise DataError(f"{address} holds no Arrow or Parquet shards")
    above = (
        os.path.commonpath([os.path.dirname(path) for path in about]) if len(about) > 1 else os.path.dirname(next(iter(about)))
    )
    files = []
    for path, info in about.items():
        name = os.path.relpath(path, above)
        if name.startswith(("..", "/")) or not isinstance(info.get("size"), int):
            raise DataError(f"{address}: the store gives no size of {path}, or a name that leads elsewhere")
        tag = str(
            info.get("ETag") or info.get("etag") or info.get("blob_id") or info.get("mtime") or info.get("LastModified") or ""
        )
        files.append(File(path, name, info["size"], f"{info['size']} {tag}", _digest(info)))
    return system, files


def _digest(info: dict[str, Any]) -> tuple[str, str]:
    """The checksum that a store gives: Google's MD5, Amazon's of a file that came in one part, the Hub's SHA-256."""
    if text := info.get("md5Hash"):
        return "md5", base64.b64decode(text).hex()
    lfs = info.get("lfs") or {}
    if sha := (lfs.get("sha256") if isinstance(lfs, dict) else getattr(lfs, "sha256", None)):
        return "sha256", sha
    tag = str(info.get("ETag", "")).strip('"')
    if len(tag) == 32 and "StorageClass" in info and all(sign in "0123456789abcdef" for sign in tag):
        return "md5", tag
    return "", ""


def _make_room(folder: pathlib.Path, needed: int, address: str) -> None:
    """Removes addresses that were not used for longest until the new one fits. Raises DataError where it cannot."""
    try:
        limit = float(os.environ.get("JAXTRAIN_SHARDS_GB", LIMIT)) * 1e9
    except ValueError:
        raise DataError(f"JAXTRAIN_SHARDS_GB is {os.environ['JAXTRAIN_SHARDS_GB']!r}; expected a number") from None
    remedy = "set JAXTRAIN_SHARDS_GB, or copy them by hand"
    if needed > limit:
        raise DataError(f"{address} holds {needed / 1e9:.1f} GB, and the cache may hold {limit / 1e9:.1f} GB; {remedy}")
    others = [other for other in folder.parent.iterdir() if other.is_dir() and other != folder]
    sizes = {other: sum(path.stat().st_size for path in other.rglob("*") if path.is_file()) for other in others}
    for other in sorted(others, key=lambda other: (other / ".use").stat().st_mtime if (other / ".use").exists() else 0.0):
        if sum(sizes.values()) + needed <= limit:
            break
        with contextlib.suppress(OSError), open(other / ".use", "a") as use:
            fcntl.flock(use, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(other)
            del sizes[other]
    if sum(sizes.values()) + needed > limit:
        used = sum(sizes.values()) / 1e9
        raise DataError(
            f"{address} holds {needed / 1e9:.1f} GB; runs use {used:.1f} GB of the cache's {limit / 1e9:.1f}; {remedy}"
        )


def _copy(system: Any, file: File, folder: pathlib.Path) -> None:
    """Copies a file, or the rest of it, and puts it in its place once it is whole. Raises DataError."""
    place = folder / file.name
    note = place.with_name(f".{place.name}.json")
    partial = place.with_name(f".{place.name}.partial")
    place.parent.mkdir(parents=True, exist_ok=True)
    before = json.loads(note.read_text()) if note.is_file() else {}
    if before.get("tag") == file.tag and place.is_file() and place.stat().st_size == file.size:
        return
    if before.get("tag") != file.tag:
        partial.unlink(missing_ok=True)
    note.write_text(json.dumps({"tag": file.tag}))
    with open(partial, "ab") as out:
        while (done := out.tell()) < file.size:
            out.write(_part(system, file, done, min(done + PART, file.size)))
    if file.digest[0]:
        with open(partial, "rb") as copied:
            found = hashlib.file_digest(copied, file.digest[0]).hexdigest()
        if found != file.digest[1]:
            partial.unlink()
            raise DataError(f"{file.path} came with the {file.digest[0]} {found}, and the store says {file.digest[1]}; rerun")
    partial.rename(place)


def _part(system: Any, file: File, start: int, end: int) -> bytes:
    """Bytes [start, end) of a file; tries again where they do not come, or come short. Raises DataError."""
    reason = ""
    for attempt in range(TRIES):
        if attempt:
            time.sleep(WAIT * 2 ** (attempt - 1))
        try:
            data = system.cat_file(file.path, start=start, end=end)
        except FileNotFoundError as error:
            raise DataError(f"{file.path} is no longer there; rerun the command") from error
        except Exception as error:  # of whatever kind a file system's are
            reason = f"{type(error).__name__}: {str(error)[:200]}"
            continue
        if len(data) == end - start:
            return data
        reason = f"{len(data)} of {end - start} bytes came"
    raise DataError(f"{file.path}: bytes from {start} on cannot be had after {TRIES} tries ({reason}); rerun to resume")
