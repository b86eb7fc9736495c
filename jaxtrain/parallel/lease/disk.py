"""owner.json on a file system that one host has, or that several share.

A name in a folder is made by one process at most: link(2), or O_EXCL where there are no hard links. What a process holds is a
file of its own under the name owner.json; its time of change, set by the file system's own clock, is when it was last alive,
so that hosts whose clocks differ agree about it.

To replace the file of an owner that is gone, a process first makes the name owner.json.<hash of its content>, which only one
can; then it looks again; then it renames its own file over the old one. So of any number that found the same dead owner one
goes on, wherever they were delayed between the two looks. A process killed in between has left that name, and counts as an
owner that is gone: the right to replace it is taken in the same way.
"""

import contextlib
import errno
import hashlib
import logging
import os
import stat
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from jaxtrain.parallel.lease import who
from jaxtrain.parallel.lease.who import NAME, Who, WorkdirError

log = logging.getLogger("jaxtrain")

# What file systems without hard links answer.
NO_LINKS = (errno.EPERM, errno.EXDEV, errno.EMLINK, errno.ENOSYS, errno.EOPNOTSUPP)


RIVAL = 10.0  # [s] that another process may take to replace an owner that is gone


class Seen(NamedTuple):
    """An owner's file as it was read."""

    content: bytes
    changed: int  # [ns] its time of change


class Disk:
    """The claim of a process to a folder."""

    def __init__(self, folder: str, me: Who, leave: Callable[[], Any]):
        self._folder, self._me, self._leave = folder, me, leave
        self._path, self._content = os.path.join(folder, NAME), me.to_json()
        self._file: int | None = None  # open while the folder is ours
        self._inode: tuple[int, int] | None = None
        self._warned = False
        self._rival_since: float | None = None

    def take(self) -> None:
        """Makes this process the owner, after the silence of one that cannot be looked at. Raises WorkdirError."""
        try:
            os.makedirs(self._folder, exist_ok=True)
            while not self._try():
                self._leave()
                time.sleep(0.05)
            self._file = os.open(self._path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
            found = os.stat(self._folder)
            self._inode = found.st_dev, found.st_ino
            self._sweep()
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):  # reported as any other full disk
                raise
            raise WorkdirError(
                f"{error.filename or self._path} could not be written: {error.strerror}; change its permissions, or choose "
                "another config.workdir"
            ) from error

    def _try(self) -> bool:
        """One attempt. False when something changed meanwhile."""
        found = self._read(self._path)
        if found is None:
            with self._own_file() as own:
                return self._make(own, self._path)
        other = who.parse(found.content)
        gone = who.is_gone(other, self._me) if other else None
        if gone is False:
            raise who.refusal(self._folder, other, age=self._age(found), me=self._me)
        if gone is None and not self._is_silent(found, other):
            return False
        with self._own_file() as own, self._right_to_replace(found.content, own) as granted:
            if not granted:
                return False
            if gone is None:
                time.sleep(1)  # a file system between hosts may have shown what was there a moment ago
            if self._read(self._path) != found:
                return False
            os.rename(own, self._path)
        log.warning(
            "%s had an owner that is gone (%s); this run takes over", self._folder, other.name() if other else "unnamed"
        )
        return self._is_mine(self._path)

    def confirm(self) -> None:
        """Raises WorkdirError unless the folder is still there, and still this process's."""
        try:
            found = self._read(self._path)
        except OSError as error:
            if not self._warned:
                log.warning("%s cannot be read: %s", self._path, error.strerror)
            self._warned = True
            return
        if found is None:
            self._restore()
        elif found.content != self._content:
            other = who.parse(found.content)
            raise WorkdirError(
                f"{self._folder} was taken over by another run while this one was silent: "
                f"{other.name() if other else self._path}. This run ends, and leaves it what is there"
            )

    def _restore(self) -> None:
        """Makes an owner.json again that somebody removed; raises WorkdirError when the folder itself went away."""
        try:
            found = os.stat(self._folder)
        except FileNotFoundError:
            found = None
        if not found or (found.st_dev, found.st_ino) != self._inode:
            raise WorkdirError(
                f"{self._folder} was deleted or moved while the run wrote to it, and what it had written with it; rerun the "
                "same command to begin again, or move the folder back to resume"
            )
        with contextlib.suppress(OSError), self._own_file() as own:
            if self._make(own, self._path):
                log.warning("%s was removed while its run goes on; it is written again", self._path)
                before, self._file = self._file, os.open(self._path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
                if before is not None:
                    os.close(before)

    def beat(self) -> None:
        """Says that the process is alive, by its file's time of change."""
        assert self._file is not None
        with contextlib.suppress(OSError):
            os.utime(self._file)

    def release(self) -> None:
        """Removes owner.json if it is still this process's."""
        if self._file is None:
            return
        with contextlib.suppress(OSError, WorkdirError), self._right_to_replace(self._content, self._path) as granted:
            if granted and self._is_mine(self._path):
                os.unlink(self._path)
        os.close(self._file)
        self._file = None

    def _is_mine(self, path: str) -> bool:
        found = self._read(path)
        return found is not None and found.content == self._content

    def _is_silent(self, found: Seen, other: Who | None) -> bool:
        """Waits until the owner has been silent for `who.SILENCE`. False when it went; raises WorkdirError when it is alive."""
        age = self._age(found)
        if age >= who.SILENCE:
            return True
        age = max(age, 0.0)  # a clock that was set back: its silence counts from now
        name = other.name() if other else self._path
        wait = who.SILENCE - age
        log.info(
            "%s belongs to %s, last heard of %.0f s ago: waiting up to %.0f s for a sign of life", self._folder, name, age, wait
        )
        until = time.monotonic() + wait
        while time.monotonic() < until:
            self._leave()
            time.sleep(0.5)
            now = self._read(self._path)
            if now is None or now.content != found.content:
                return False
            if now.changed != found.changed:
                raise who.refusal(self._folder, other, age=self._age(now), me=self._me)
        return True

    @contextlib.contextmanager
    def _right_to_replace(self, content: bytes, own: str) -> Iterator[bool]:
        """Whether this process alone may replace the owner's file with this content; others get False until the end.

        Raises WorkdirError when a rival has held that right for `RIVAL` seconds: one that is about to become the owner.
        """
        held: list[str] = []
        try:
            yield self._win(NAME, content, own, held)
        finally:
            for path in reversed(held):
                with contextlib.suppress(OSError):
                    os.unlink(path)

    def _win(self, holds: str, content: bytes, own: str, held: list[str]) -> bool:
        """Whether this process alone may replace ``content`` under the name ``holds``; ``held`` gets the names that say so."""
        name = f"{NAME}.{hashlib.sha256(holds.encode() + content).hexdigest()[:16]}"
        path = os.path.join(self._folder, name)
        if self._make(own, path):
            held.append(path)
            return True
        rival = self._read(path)
        if rival is None:
            return False  # it is done
        other = who.parse(rival.content)
        gone = who.is_gone(other, self._me) if other else None
        if gone or (gone is None and self._age(rival) >= who.SILENCE):
            if not self._win(name, rival.content, own, held):
                return False
            held.append(path)
            return True
        self._rival_since = self._rival_since or time.monotonic()
        if time.monotonic() - self._rival_since > RIVAL:
            raise who.refusal(self._folder, other, age=self._age(rival), me=self._me)
        return False

    @contextlib.contextmanager
    def _own_file(self) -> Iterator[str]:
        """A file with this process's content under a name of its own."""
        path = f"{self._path}.{self._me.token}"
        try:
            with open(path, "wb") as file:
                file.write(self._content)
            yield path
        finally:
            with contextlib.suppress(OSError):
                os.unlink(path)

    def _make(self, own: str, path: str) -> bool:
        """Gives the file ``own`` the name ``path`` too. False when there is one already, of another process."""
        try:
            os.link(own, path)
        except FileExistsError:
            return self._is_mine(path)  # an NFS server may have done it, and its answer was lost
        except OSError as error:
            if error.errno not in NO_LINKS:
                raise
            try:
                with open(path, "xb") as file:
                    file.write(self._content)
            except FileExistsError:
                return False
        return True

    def _age(self, found: Seen) -> float:
        """Seconds since the owner was last alive, by the file system's clock."""
        path = f"{self._path}.{self._me.token}.now"  # a file of this moment
        try:
            with open(path, "wb") as file:
                os.utime(file.fileno())
                now = os.fstat(file.fileno()).st_mtime_ns
        finally:
            with contextlib.suppress(OSError):
                os.unlink(path)
        return (now - found.changed) / 1e9

    def _sweep(self) -> None:
        """Removes what processes that were killed while they looked have left."""
        for entry in os.scandir(self._folder):
            if entry.name.startswith(f"{NAME}."):
                with contextlib.suppress(OSError):
                    if self._age(Seen(b"", entry.stat(follow_symlinks=False).st_mtime_ns)) > 10 * who.SILENCE:
                        os.unlink(entry.path)

    def _read(self, path: str) -> Seen | None:
        """Reads an owner's file; None when there is none. Raises WorkdirError for what this program does not make."""
        try:
            file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            if error.errno == errno.ELOOP:
                raise _odd(path, "a symbolic link") from error
            if error.errno == errno.ENXIO:
                raise _odd(path, "a socket") from error
            raise
        try:
            about = os.fstat(file)
            if not stat.S_ISREG(about.st_mode):
                raise _odd(path, "a folder" if stat.S_ISDIR(about.st_mode) else "no regular file")
            if about.st_size > who.LIMIT:
                raise _odd(path, f"a file of {about.st_size} bytes")
            return Seen(os.read(file, who.LIMIT), about.st_mtime_ns)
        finally:
            os.close(file)


def _odd(path: str, kind: str) -> WorkdirError:
    return WorkdirError(
        f"{path} is {kind}, where a run keeps the name of its owner; remove it, or choose another config.workdir"
    )
