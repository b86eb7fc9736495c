"""A folder that a run writes to: its speed and its free space."""

import errno
import os
import secrets
import shutil
import tempfile
import time
from typing import Any

from jaxtrain.checkpoint import disk_usage
from jaxtrain.doctor.check import FAIL, Check, Findings, fail, ok, warn
from jaxtrain.telemetry.console import in_bytes
from loaders.io import files

GROUP = "disk"
WRITTEN = 64 << 20  # [bytes]
SLOW = 20e6  # [bytes/s]
MIN_FREE = 100e6  # [bytes] for the cache's data and programs, and a run's records in its workdir
PERMISSIONS = "change its permissions, or choose a folder of your own"
REMEDIES = {
    errno.EROFS: "it is mounted read-only: mount it again with rw, or choose another",
    errno.EACCES: PERMISSIONS,
    errno.EPERM: PERMISSIONS,
    errno.ENOSPC: "free some space or inodes there, or choose another disk",
    errno.EDQUOT: "your quota there is used up: free some space, or ask for more",
    errno.ESTALE: "the file server has lost it: mount it again",
    errno.EIO: "the disk or its server fails: see dmesg, and choose another",
    errno.EFBIG: "files are limited: ulimit -f unlimited, before the launcher's command",
}
OTHER = "choose a folder on a POSIX file system that can be written"


def examine(*, folder: str, what: str, checkpoints: Any = None) -> Findings:
    """Check the folder ``what``. ``checkpoints``: their folder, number in a plan, bytes of each."""
    if "://" in folder:
        return Findings([_check_store(folder, what)], {})
    try:
        checks = [_check_folder(folder, what)]
    except OSError as error:
        text = f"{folder} cannot be written: {error.strerror or error}"
        checks = [fail(GROUP, what, text, REMEDIES.get(error.errno or 0, OTHER))]
    if checkpoints and checks[0].verdict != FAIL:
        checks.append(free_space(*checkpoints))
    return Findings(checks, {})


def _check_folder(folder: str, what: str) -> Check:
    """Write to the folder, as a checkpoint does. Raises OSError."""
    existing = nearest(folder)
    free = shutil.disk_usage(existing).free
    rate = _try_to_write(existing)
    text = f"{folder} has {in_bytes(free)} free, and takes {rate / 1e6:,.0f} MB/s"
    if free < MIN_FREE:
        text += f"; expected at least {in_bytes(MIN_FREE)}"
        return warn(GROUP, what, text, "free some space there, or choose another disk")
    if rate < SLOW:
        text += f"; expected at least {SLOW / 1e6:g} MB/s"
        return warn(GROUP, what, text, "choose another disk: saves wait for this one")
    return ok(GROUP, what, text)


def _try_to_write(folder: str) -> float:
    """Write, rename and sync in a folder. Returns the speed [bytes/s]. Raises OSError."""
    temporary_folder = tempfile.TemporaryDirectory(
        prefix=".doctor-", dir=folder, ignore_cleanup_errors=True
    )
    with temporary_folder as temporary:
        rate = disk_usage.write(os.path.join(temporary, "data"), WRITTEN)
        os.mkdir(os.path.join(temporary, "folder"))
        for old, new in (("data", "renamed"), ("folder", "moved")):
            os.rename(os.path.join(temporary, old), os.path.join(temporary, new))
        handle = os.open(temporary, os.O_RDONLY)
        os.fsync(handle)
        os.close(handle)
    return rate


def nearest(folder: str) -> str:
    """Return the folder, or the first above it that exists. Raises OSError if that is a file."""
    path = files.expanded(folder).absolute()
    existing = next(p for p in (path, *path.parents) if os.path.lexists(p))
    if existing != path and not existing.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, f"{existing} is not a folder")
    return str(existing)


def _check_store(url: str, what: str) -> Check:
    import tensorstore as ts

    name = f".doctor-{secrets.token_hex(8)}"
    began = time.perf_counter()
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


def free_space(folder: str, checkpoints: int, n_bytes: int) -> Check:
    """Check that a plan's checkpoints, of ``n_bytes`` each, fit together with existing ones."""
    from jaxtrain import plan  # here: it takes seconds to import

    text, fits = plan.free_space(folder, checkpoints, n_bytes)
    if fits:
        return ok(GROUP, "free space", text)
    remedy = (
        "free some space, lower config.checkpoint.keep, or set config.checkpoint.folder"
        " or config.workdir to another disk"
    )
    return fail(GROUP, "free space", text, remedy)
