"""A folder that a run writes to: its speed, its free space, and whether all processes share it."""

import contextlib
import errno
import os
import pathlib
import secrets
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from typing import Any

from jaxtrain.doctor.check import FAIL, Check, Found, fail, ok, warn
from jaxtrain.telemetry.console import in_bytes
from loaders.io import files

GROUP = "disk"
WRITTEN = 64 << 20  # [bytes]
BLOCK = 4 << 20
ENOUGH = 5.0  # [s] of writing
SLOW = 20e6  # [bytes/s]
MIN_FREE = 100e6  # [bytes] for the cache's data and programs, and a run's records in its workdir
SEEN = 10.0  # [s] for a new file to show on every host
REMEDIES = {
    errno.EROFS: "it is mounted read-only: mount it again with rw, or choose another",
    **dict.fromkeys(
        (errno.EACCES, errno.EPERM), "change its permissions, or choose a folder of your own"
    ),
    errno.ENOSPC: "free some space or inodes there, or choose another disk",
    errno.EDQUOT: "your quota there is used up: free some space, or ask for more",
    errno.ESTALE: "the file server has lost it: mount it again",
    errno.EIO: "the disk or its server fails: see dmesg, and choose another",
    errno.EFBIG: "files are limited: ulimit -f unlimited, before the launcher's command",
}
OTHER = "choose a folder on a POSIX file system that can be written"


def examine(*, folder: str, what: str, checkpoints: Any = None) -> Found:
    """Check the folder ``what``. ``checkpoints``: their folder, number in a plan, bytes of each."""
    if "://" in folder:
        return [_store(folder, what)], {}
    try:
        checks = [_written(folder, what)]
    except OSError as error:
        text = f"{folder} cannot be written: {error.strerror or error}"
        checks = [fail(GROUP, what, text, REMEDIES.get(error.errno or 0, OTHER))]
    if checkpoints and all(check.verdict != FAIL for check in checks):
        checks.append(free_space(*checkpoints))
    return checks, {}


def _written(folder: str, what: str) -> Check:
    """Write to the folder, as a checkpoint does. Raises OSError."""
    place = nearest(folder)
    free = shutil.disk_usage(place).free
    with tempfile.TemporaryDirectory(
        prefix=".doctor-", dir=place, ignore_cleanup_errors=True
    ) as name:
        rate = _write(os.path.join(name, "data"))
        os.mkdir(os.path.join(name, "folder"))
        for old, new in (("data", "renamed"), ("folder", "moved")):
            os.rename(os.path.join(name, old), os.path.join(name, new))
        handle = os.open(name, os.O_RDONLY)
        os.fsync(handle)
        os.close(handle)
    text = f"{folder} has {in_bytes(free)} free, and takes {rate / 1e6:,.0f} MB/s"
    for is_low, least, remedy in (
        (free < MIN_FREE, in_bytes(MIN_FREE), "free some space there, or choose another disk"),
        (rate < SLOW, f"{SLOW / 1e6:g} MB/s", "choose another disk: saves wait for this one"),
    ):
        if is_low:
            return warn(GROUP, what, f"{text}; expected at least {least}", remedy)
    return ok(GROUP, what, text)


def _write(path: str) -> float:
    """Write and sync a file of at most `WRITTEN`, and a tenth of the free space: [bytes/s]."""
    most = max(min(WRITTEN, shutil.disk_usage(os.path.dirname(path)).free // 10), BLOCK)
    block, size, began = os.urandom(BLOCK), 0, time.perf_counter()
    with open(path, "wb", buffering=0) as file:
        while size < most and time.perf_counter() - began < ENOUGH:
            size += file.write(block)
        os.fsync(file.fileno())
    return size / (time.perf_counter() - began)


def nearest(folder: str) -> str:
    """Return the folder, or the first above it that exists. Raises OSError if that is a file."""
    path = files.expanded(folder).absolute()
    found = next(p for p in (path, *path.parents) if os.path.lexists(p))
    if found != path and not found.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, f"{found} is not a folder")
    return str(found)


def _store(url: str, what: str) -> Check:
    import tensorstore as ts

    name, began = f".doctor-{secrets.token_hex(8)}", time.perf_counter()
    try:
        store = ts.KvStore.open(f"{url.rstrip('/')}/").result(timeout=20)
        store.write(name, b"doctor").result(timeout=20)
        store.read(name).result(timeout=20)
        store.delete_range(ts.KvStore.KeyRange(name, f"{name}\0")).result(timeout=20)
    except (OSError, ValueError, TimeoutError) as error:
        text = f"{url} cannot be written: {str(error) or 'no answer within 20 s'}"
        return fail(GROUP, what, text, "check its name, the credentials, and the way to it")
    seconds = time.perf_counter() - began
    return ok(GROUP, what, f"{url}: an object was written, read and deleted in {seconds:.1f} s")


def free_space(folder: str, checkpoints: int, each: int) -> Check:
    """Check that the checkpoints of a plan, of ``each`` bytes, fit together with existing ones."""
    from jaxtrain import plan  # here: it takes seconds to import

    text, fits = plan.free_space(folder, checkpoints, each)
    if fits:
        return ok(GROUP, "free space", text)
    remedy = "free some space, lower config.checkpoint.keep, or set config.checkpoint.folder"
    return fail(GROUP, "free space", text, f"{remedy} or config.workdir to another disk")


@contextlib.contextmanager
def shown(folder: str, token: str, process: int) -> Iterator[str]:
    """Show other processes a file in the folder of the checkpoints: yields the folder, or ""."""
    path = None
    with contextlib.suppress(OSError):  # the check of this folder has failed
        if folder:
            made = pathlib.Path(_path(folder, token, process))
            made.touch(exist_ok=False)
            path = made
    try:
        yield folder if path else ""
    finally:
        if path:
            path.unlink(missing_ok=True)


def see(folder: str, token: str, processes: Sequence[int]) -> Check:
    """Look for the files that ``processes`` show in a folder, until `SEEN`."""
    began, unseen, seconds = time.monotonic(), list(processes), 0.0
    while unseen and seconds <= SEEN:
        with contextlib.suppress(OSError):  # a client may answer from its cache for a while
            there = set(os.listdir(nearest(folder)))
            unseen = [p for p in unseen if os.path.basename(_path(folder, token, p)) not in there]
        seconds = time.monotonic() - began
        if unseen:
            time.sleep(0.05)
    if unseen:
        named = ", ".join(map(str, unseen[:16]))
        text = f"a new file of process {named} in {folder} does not show here within {SEEN:g} s"
        remedy = (
            "put config.workdir on a file system that all hosts share, or config.checkpoint.folder"
            " in an object store"
        )
        return fail(GROUP, "shared", text, remedy)
    return ok(
        GROUP,
        "shared",
        f"a new file of another process in {folder} shows here after {1e3 * seconds:.0f} ms",
    )


def _path(folder: str, token: str, process: int) -> str:
    return os.path.join(nearest(folder), f".doctor-{token}-{process}")
