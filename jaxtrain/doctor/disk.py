"""A folder that a run writes to or reads: whether it can, how fast, how much fits, and whether all processes see the same."""

import contextlib
import errno
import fcntl
import itertools
import os
import pathlib
import resource
import secrets
import shutil
import time
from collections.abc import Iterator
from typing import Any

from jaxtrain.checkpoint import disk_usage
from jaxtrain.doctor.check import FAIL, Check, fail, in_bytes, ok, warn

GROUP = "disk"
WRITTEN = 64 << 20  # [bytes]
BLOCK = 4 << 20
ENOUGH = 5.0  # [s] of writing, or of reading
LEAST = 1 << 20  # [bytes] of a file of data whose reading is timed
LISTED = 1000  # files of a folder of data among which one is chosen
SLOW = 20e6  # [bytes/s]
LITTLE = 100e6  # [bytes] that the built-in data and compiled programs take in the cache, and a run's records in its workdir
INODES = 10_000
SEEN = 10.0  # [s] within which a new file must show on every host
LATE = 3.0
NETWORK = ("nfs", "lustre", "gpfs", "beegfs", "ceph", "glusterfs", "cifs", "smb", "9p", "afs", "fuse")
REMEDIES = {
    errno.EROFS: "it is mounted read-only: mount it again with rw, or choose another",
    errno.EACCES: "change its permissions, or choose a folder of your own",
    errno.EPERM: "change its permissions, or choose a folder of your own",
    errno.ENOSPC: "free some space or inodes there, or choose another disk",
    errno.EDQUOT: "your quota there is used up: free some space, or ask for more",
    errno.ESTALE: "the file server has lost it: mount it again",
    errno.EIO: "the disk or its server fails: see dmesg, and choose another",
}


def examine(
    *, folder: str, what: str, writes: bool, checkpoints: tuple[str, int, int] | None = None
) -> tuple[list[Check], dict[str, Any]]:
    """The checks of one folder.

    Args:
      what: its name for a person.
      writes: whether a run writes there.
      checkpoints: the folder of those that a plan will keep there, how many, and the bytes of each.
    """
    if "://" in folder:
        return list(_store(folder, what)), {}
    checks = list(_look(folder, what, writes=writes))
    if checkpoints and all(check.verdict != FAIL for check in checks):
        checks.append(room_for(*checkpoints))
    return checks, {}


def _look(folder: str, what: str, *, writes: bool) -> Iterator[Check]:
    try:
        place = nearest(folder)
        kind, options = mounted(place)
        usage, inodes = shutil.disk_usage(place), os.statvfs(place)
        if not writes:
            file = _largest(place)
            rate = _read(file, least=LEAST) if file else 0.0
            speed = f"; {os.path.basename(file)} reads {rate / 1e6:,.0f} MB/s" if rate else ""
            yield ok(GROUP, what, f"{folder} is on {_kind(kind)}{speed}")
            return
        if "ro" in options.split(","):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))
        scratch = os.path.join(place, f".doctor-{secrets.token_hex(8)}")
        os.mkdir(scratch)
        try:
            rates = _write(scratch)
            odd = list(_manners(scratch))
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
    except OSError as error:
        remedy = REMEDIES.get(error.errno or 0, "choose a folder that can be written")
        if error.errno == errno.EFBIG:
            limit, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
            remedy = f"a file may have {in_bytes(limit)} at most: ulimit -f unlimited, before the launcher's command"
        yield fail(GROUP, what, f"{folder} cannot be {'written' if writes else 'read'}: {error.strerror or error}", remedy)
        return
    speed = f"writes {rates[0] / 1e6:,.0f} MB/s, reads {rates[1] / 1e6:,.0f} MB/s"
    text = f"{folder} on {_kind(kind)}: {in_bytes(usage.free)} free, {speed}"
    if odd:
        yield fail(
            GROUP, what, f"{text}; {'; '.join(odd)}", "put it on a POSIX file system; an object store is named by its address"
        )
    elif usage.free < LITTLE:
        yield warn(
            GROUP, what, f"{text}; expected at least {in_bytes(LITTLE)}", "free some space there, or choose another disk"
        )
    elif rates[0] < SLOW:
        yield warn(
            GROUP, what, f"{text}; expected at least {SLOW / 1e6:g} MB/s", "choose another disk: saves wait for this one"
        )
    elif kind in ("tmpfs", "ramfs"):
        yield warn(GROUP, what, f"{text}, which a restart of the machine empties", "choose a disk for what should stay")
    else:
        yield ok(GROUP, what, text)
    if inodes.f_files and inodes.f_favail < INODES:
        text = f"{folder}: {inodes.f_favail:,} inodes are left; a checkpoint takes hundreds"
        yield warn(GROUP, f"{what}, inodes", text, "remove small files there, or choose another disk")


def nearest(folder: str) -> str:
    """The folder, or the one above it that exists. Raises OSError: one on the way that is a file."""
    path = pathlib.Path(folder).expanduser().absolute()
    found = next(p for p in (path, *path.parents) if os.path.lexists(p))
    if not found.is_dir():
        if found == path:
            return str(found)
        raise NotADirectoryError(errno.ENOTDIR, f"{found} is no folder")
    return str(found)


def mounted(path: str, table: str = "/proc/self/mounts") -> tuple[str, str]:
    """Type and options of the file system that holds a path; "" where they cannot be told."""
    best = ("", "", "")
    real = os.path.realpath(path)
    with contextlib.suppress(OSError):
        for line in pathlib.Path(table).read_text().splitlines():
            parts = line.split()
            at = parts[1].encode().decode("unicode_escape")
            if (real == at or real.startswith(f"{at.rstrip('/')}/")) and len(at) >= len(best[0]):
                best = (at, parts[2], parts[3])
    return best[1:]


def _kind(kind: str) -> str:
    return f"{kind or 'a disk'} ({'shared by hosts' if kind.startswith(NETWORK) else 'of this host'})"


def _write(scratch: str) -> tuple[float, float]:
    """(written, read) [bytes/s]: at most `WRITTEN`, and a tenth of what is free; synced, then read from the disk."""
    path, block = os.path.join(scratch, "data"), os.urandom(BLOCK)
    most = max(min(WRITTEN, shutil.disk_usage(scratch).free // 10), BLOCK)
    began, size = time.perf_counter(), 0
    with open(path, "wb", buffering=0) as file:
        while size < most and time.perf_counter() - began < ENOUGH:
            size += file.write(block)
        os.fsync(file.fileno())
        written = size / (time.perf_counter() - began)
    return written, _read(path)


def _read(path: str, *, least: int = 0) -> float:
    """[bytes/s] of at most `WRITTEN` of a file, from the disk where the system lets go of what it holds of it.

    0 where it has fewer than ``least`` bytes, whose rate would be that of its opening. Raises OSError.
    """
    size = 0
    with open(path, "rb", buffering=0) as file:
        if os.fstat(file.fileno()).st_size < least:
            return 0.0
        with contextlib.suppress(OSError, AttributeError):  # macOS has none
            os.posix_fadvise(file.fileno(), 0, WRITTEN, os.POSIX_FADV_DONTNEED)
        began = time.perf_counter()
        while size < WRITTEN and time.perf_counter() - began < ENOUGH and (data := file.read(BLOCK)):
            size += len(data)
    return size / max(time.perf_counter() - began, 1e-9)


def _largest(place: str) -> str:
    """The file itself, or of a folder the largest of its first `LISTED` files; "" where there is none. Raises OSError."""
    if not os.path.isdir(place):
        return place if os.path.isfile(place) else ""
    with os.scandir(place) as entries:
        files = [(entry.stat().st_size, entry.path) for entry in itertools.islice(entries, LISTED) if entry.is_file()]
    return max(files, default=(0, ""))[1]


def _manners(scratch: str) -> Iterator[str]:
    """What a checkpoint relies on, and this file system does not do."""
    old, new, folder = (os.path.join(scratch, name) for name in ("old", "new", "folder"))
    for path, text in ((old, b"old"), (new, b"new")):
        pathlib.Path(path).write_bytes(text)
    os.rename(new, old)
    if pathlib.Path(old).read_bytes() != b"new" or os.path.exists(new):
        yield "a rename over a file does not replace it"
    os.mkdir(folder)
    os.rename(folder, f"{folder}-renamed")
    if not os.path.isdir(f"{folder}-renamed"):
        yield "a folder cannot be renamed"
    try:
        handle = os.open(scratch, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
    except OSError as error:
        yield f"a folder cannot be synced ({error.strerror})"
    try:
        with open(old, "rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        yield f"files cannot be locked ({error.strerror})"


def _store(url: str, what: str) -> Iterator[Check]:
    """A folder of an object store: an object is written, read and deleted."""
    import tensorstore as ts

    name, began = f".doctor-{secrets.token_hex(8)}", time.perf_counter()
    try:
        store = ts.KvStore.open(f"{url.rstrip('/')}/").result(timeout=20)
        store.write(name, b"doctor").result(timeout=20)
        found = store.read(name).result(timeout=20).value
        store.delete_range(ts.KvStore.KeyRange(name, f"{name}\0")).result(timeout=20)
    except (OSError, ValueError, TimeoutError) as error:
        remedy = "check its name, this machine's credentials, and the way to it"
        yield fail(GROUP, what, f"{url} cannot be written: {str(error) or 'no answer within 20 s'}", remedy)
        return
    if found == b"doctor":
        yield ok(GROUP, what, f"{url}: an object was written, read and deleted in {time.perf_counter() - began:.1f} s")
    else:
        yield fail(GROUP, what, f"{url} returned something else than was written", "choose another store")


def room_for(folder: str, checkpoints: int, each: int) -> Check:
    """Whether the checkpoints of a plan fit: so many, of ``each`` bytes, together with those that are there."""
    needed, there = checkpoints * each, disk_usage.held(folder, checkpoints - 1, each)
    free = shutil.disk_usage(nearest(folder)).free
    text = f"{checkpoints} checkpoints of {in_bytes(each)} need {in_bytes(needed)}"
    text += f"{f', of which {in_bytes(there)} are there' if there else ''}; {folder} has {in_bytes(free)} free"
    if needed - there > free:
        remedy = (
            "free some space, lower config.checkpoint.keep, or set config.checkpoint.folder or config.workdir to another disk"
        )
        return fail(GROUP, "room", text, remedy)
    return ok(GROUP, "room", text)


class Shared:
    """A folder where the checkpoints go, in which process 0 shows files to the others, and looks for theirs."""

    def __init__(self, folder: str, token: str):
        self.path = os.path.join(nearest(folder), f".doctor-{token}")

    def make(self) -> None:
        os.mkdir(self.path)
        self._lock = open(os.path.join(self.path, "lock"), "wb")  # noqa: SIM115  # held until `remove`
        with contextlib.suppress(OSError):
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def remove(self) -> None:
        self._lock.close()
        shutil.rmtree(self.path, ignore_errors=True)

    def look(self, process: int) -> dict[str, Any]:
        """What a process sees: after how many seconds, None = never, and whether it is locked. Leaves a file of its own."""
        seconds = _wait_for([os.path.join(self.path, "lock")])
        locked = None
        if seconds is not None:
            with contextlib.suppress(OSError):
                with open(os.path.join(self.path, "lock"), "r+b") as file:
                    try:
                        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                        locked = False
                    except BlockingIOError:
                        locked = True
                pathlib.Path(self.path, str(process)).touch()
        return {"seconds": seconds, "locked": locked}

    def missing(self, processes: list[int]) -> list[int]:
        """Whose files do not show here within `SEEN`."""
        _wait_for([os.path.join(self.path, str(p)) for p in processes])
        return [p for p in processes if not os.path.exists(os.path.join(self.path, str(p)))]


def _wait_for(paths: list[str]) -> float | None:
    """Seconds until all are there; None = not within `SEEN`. A client may answer from its cache for a while."""
    began = time.monotonic()
    while time.monotonic() - began < SEEN:
        with contextlib.suppress(OSError):
            there = set(os.listdir(os.path.dirname(paths[0]))) if paths else set()
            if all(os.path.basename(path) in there for path in paths):
                return time.monotonic() - began
        time.sleep(0.05)
    return None


def judge_shared(folder: str, seen: dict[int, dict[str, Any]], missing: list[int], hosts: dict[int, str]) -> Iterator[Check]:
    """The finding of `Shared`: what other processes saw of process 0's files, and whose files process 0 misses."""
    blind = [p for p, found in seen.items() if found["seconds"] is None]
    remedy = (
        "name a folder on a file system that all hosts share as config.workdir, or config.checkpoint.folder in an object store"
    )
    if blind:
        who = ", ".join(f"process {p} ({hosts[p]})" for p in blind[:8])
        yield fail(GROUP, "shared", f"{who} does not see what process 0 writes into {folder} within {SEEN:g} s", remedy)
    elif missing:
        text = f"process 0 does not see what {', '.join(f'process {p} ({hosts[p]})' for p in missing[:8])} writes into {folder}"
        yield fail(GROUP, "shared", text, remedy)
    elif (slowest := max(found["seconds"] for found in seen.values())) > LATE:
        text = f"a new file in {folder} shows on other hosts after {slowest:.1f} s"
        yield warn(GROUP, "shared", text, "lower its caches of names: mount NFS with lookupcache=positive, actimeo=3")
    elif unlocked := [p for p, found in seen.items() if found["locked"] is False]:
        who = ", ".join(f"process {p} ({hosts[p]})" for p in unlocked[:8])
        text = f"{who} may lock a file in {folder} that process 0 has locked"
        yield warn(GROUP, "shared", text, "mount it with locks between hosts: NFS 4, or Lustre with flock")
    else:
        yield ok(GROUP, "shared", f"all processes see {folder}: a new file after {1e3 * slowest:.0f} ms; locks hold")
