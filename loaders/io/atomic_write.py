"""Files and folders that are complete or not there: they have another name until then.

An error of the disk has the name of the target. NumPy and others raise some without a name.
"""

import contextlib
import csv
import errno
import fcntl
import hashlib
import io
import logging
import os
import pathlib
import re
import shutil
import tempfile
import types
from collections.abc import Callable, Iterable, Iterator
from typing import IO, Any

import numpy as np

from loaders.io import files

log = logging.getLogger("jaxtrain")
NAME_MAX = 255  # [bytes] of a file's name
PATH_MAX = 4000  # [bytes] of a path, with some for files in it


class BusyError(OSError):
    """Another process writes the same file or folder now."""

    def __init__(self, path: object):
        super().__init__(errno.EBUSY, "another process writes it now", str(path))


@contextlib.contextmanager
def file(path: str | os.PathLike[str]) -> Iterator[IO[bytes]]:
    """Yield a file that takes the name ``path`` when the block ends well.

    It has a name, by which others may write it too. Raises OSError with the name ``path``, and
    BusyError if another process makes the file now.
    """
    path = pathlib.Path(path)
    partial = path.with_name(_partial(path.name))
    with naming(path), contextlib.ExitStack() as closing:
        _remove_left(partial, path)
        try:
            opened = partial.open("xb")  # never through a link that someone left there
        except FileExistsError as error:
            raise BusyError(path) from error
        except KeyboardInterrupt:  # perhaps after the file was made
            with contextlib.suppress(OSError):
                _remove_left(partial, path)
            raise
        with opened:
            status = os.fstat(opened.fileno())
            try:  # at once: an interrupt may come while the file is locked
                is_ours = _own(partial, path, closing)
                yield opened
                opened.close()
                if not is_ours():
                    raise BusyError(path)
                partial.replace(path)
            except BaseException:
                with contextlib.suppress(FileNotFoundError):
                    if os.path.samestat(os.stat(partial), status):
                        partial.unlink()
                raise


def _partial(name: str) -> str:
    readable = f".{name}.partial"
    if len(os.fsencode(readable)) <= NAME_MAX:
        return readable
    digest = hashlib.sha256(os.fsencode(name)).hexdigest()
    return f".{digest}.partial"


def _remove_left(partial: pathlib.Path, path: pathlib.Path) -> None:
    """Remove the file of a process that was killed. Raises BusyError if one still writes it."""
    if not os.path.lexists(partial):
        return
    with contextlib.ExitStack() as closing:
        with contextlib.suppress(PermissionError, FileNotFoundError):
            if partial.is_file() and not partial.is_symlink():
                _own(partial, path, closing)
        partial.unlink(missing_ok=True)


@contextlib.contextmanager
def shared(path: pathlib.Path) -> Iterator[pathlib.Path]:
    """Yield a name of this process for a file that is named ``path`` when the block ends well.

    Other processes may write the same bytes at the same time. Raises OSError with that name.
    """
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    with naming(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            partial.unlink(missing_ok=True)  # never through a link that someone left there
            yield partial
            partial.replace(path)
        finally:
            partial.unlink(missing_ok=True)


def refuse_unwritable(path: str | os.PathLike[str], *, folder: bool) -> None:
    """Raise OSError if a folder, or a file, ``path`` could not be made, before any work."""
    target = pathlib.Path(os.path.abspath(files.expanded(path)))
    existing = target
    while not os.path.lexists(existing) and existing != existing.parent:
        existing = existing.parent
    if not folder and target.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if not existing.is_dir() and (folder or existing != target):
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(existing))
    parent = existing if existing.is_dir() else existing.parent
    if not os.access(parent, os.W_OK | os.X_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
    names = list(target.parts)
    if folder:
        names.append(f".{target.name}.partial")
    longest_name = max(len(os.fsencode(name)) for name in names)
    if longest_name > NAME_MAX or len(os.fsencode(target)) > PATH_MAX:
        raise OSError(errno.ENAMETOOLONG, os.strerror(errno.ENAMETOOLONG), str(path))


def save(path: str | os.PathLike[str], array: np.ndarray, *, after: bytes = b"") -> None:
    """Write a .npy file, and bytes that its readers stop before. Raises OSError with its name.

    Given a system's file, numpy.save would not see that its last part was never written.
    """
    with file(path) as opened:
        np.save(types.SimpleNamespace(write=opened.write), array)
        opened.write(after)


def write(path: str | os.PathLike[str], text: str) -> None:
    """Write a text file. Raises OSError with its name."""
    with file(path) as opened:
        opened.write(text.encode())


@contextlib.contextmanager
def table(path: str | os.PathLike[str], *, errors: str = "strict") -> Iterator[Any]:
    """Yield a writer of the rows of a CSV in UTF-8, which is there when the block ends well."""
    with file(path) as raw:
        text = io.TextIOWrapper(
            raw, encoding="utf-8", errors=errors, newline="", write_through=True
        )
        yield csv.writer(text, lineterminator="\n")
        text.flush()
        text.detach()


def write_csv(
    path: str | os.PathLike[str], rows: Iterable[Iterable[object]], *, errors: str = "strict"
) -> None:
    """Write a CSV in UTF-8. Raises OSError with its name."""
    with table(path, errors=errors) as lines:
        lines.writerows(rows)


@contextlib.contextmanager
def folder(path: pathlib.Path, *, replace: bool = False) -> Iterator[pathlib.Path]:
    """Yield a folder that takes the name ``path`` when the block ends well.

    ``replace``: whether a folder with that name is replaced. If not, it must be missing or empty.
    Raises OSError if another process makes it now.
    """
    partial = path.with_name(f".{path.name}.partial")
    with alone(partial, path):
        try:
            for leftover in partial.iterdir():  # of a command that was killed
                _remove(leftover)
            yield partial
            old = path.with_name(f".{path.name}.old")
            if path.exists() and replace:
                shutil.rmtree(old, ignore_errors=True)
                path.rename(old)
            elif path.exists():
                path.rmdir()
            partial.rename(path)
            if replace:
                shutil.rmtree(old, ignore_errors=True)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise


def _remove(path: pathlib.Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def once(folder: pathlib.Path, make: Callable[[pathlib.Path], object]) -> pathlib.Path:
    """Return a folder whose name decides its content, filled by ``make`` if it is not there.

    Of several processes one makes it, and the others wait. Raises OSError.
    """
    if folder.is_dir():
        return folder
    cache = folder.parent
    kind = folder.name.partition("-")[0]
    cache.mkdir(parents=True, exist_ok=True)
    # never removed: another process may be waiting for this very file
    with open(cache / f"{kind}.lock", "w") as lock:
        is_locked = _wait(lock, folder)
        if folder.is_dir():
            return folder
        if is_locked:
            for leftover in cache.glob(f"{kind}-*.tmp-*"):  # of processes that are dead
                shutil.rmtree(leftover)
        partial = pathlib.Path(tempfile.mkdtemp(prefix=f"{folder.name}.tmp-", dir=cache))
        try:
            make(partial)
            partial.chmod(0o755)  # mkdtemp's is private, and a cache may be shared
            partial.rename(folder)
        except OSError:
            if not folder.is_dir():
                raise
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    return folder


def _wait(lock: IO[str], folder: pathlib.Path) -> bool:
    """Take a lock, which its holder's death releases. Return False if there are no locks."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        log.info("waiting for another process that is making %s", folder)
        fcntl.flock(lock, fcntl.LOCK_EX)
    except OSError:
        return False
    return True


@contextlib.contextmanager
def alone(folder: pathlib.Path, path: pathlib.Path | None = None) -> Iterator[None]:
    """Make a folder, and lock it. Raises OSError, named ``path``, if another process has it."""
    with naming(path or folder), contextlib.ExitStack() as closing:
        folder.mkdir(parents=True, exist_ok=True)
        _own(folder, path or folder, closing)
        yield


def _own(
    partial: pathlib.Path, path: pathlib.Path, closing: contextlib.ExitStack
) -> Callable[[], bool]:
    """Lock a file or folder until ``closing`` ends, or this process does.

    Return whether it is still there, which a file system without locks does not promise.
    Raises BusyError if another process has it.
    """
    # Over NFS, a lock needs the right to write.
    opened = os.open(partial, os.O_RDONLY if partial.is_dir() else os.O_RDWR)
    closing.callback(os.close, opened)

    def is_ours() -> bool:
        try:
            return os.path.samestat(os.stat(partial), os.fstat(opened))
        except FileNotFoundError:
            return False

    try:
        fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise BusyError(path) from error
    except OSError:
        return is_ours  # a file system without locks
    if not is_ours():
        raise BusyError(path)
    return is_ours


@contextlib.contextmanager
def naming(path: str | os.PathLike[str]) -> Iterator[None]:
    """Give errors of a full disk, or of a file beyond a limit, the name ``path``."""
    try:
        yield
    except Exception as error:
        if isinstance(error, OSError) and error.errno == errno.EFBIG:
            raise OSError(errno.EFBIG, os.strerror(errno.EFBIG), str(path)) from error
        if not is_full(error):
            raise
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path)) from error


def is_full(error: BaseException) -> bool:
    """Whether a disk or a quota was full, also if a library says so in words alone."""
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return True
    # NumPy: "1024 requested and 512 written". TensorStore and Arrow quote the system.
    sentences = r"No space left on device|Disk quota exceeded|\d+ requested and \d+ written"
    return bool(re.search(sentences, str(error)))
