"""owner.json in an object store: an object that is written on condition that nobody wrote it meanwhile."""

import logging
import time
from collections.abc import Callable
from typing import Any

from jaxtrain.parallel.lease import who
from jaxtrain.parallel.lease.who import NAME, Who, WorkdirError

log = logging.getLogger("jaxtrain")

PATIENCE = 60.0  # [s] for one answer of the store


class Store:
    """The claim of a process to a folder of a store."""

    def __init__(self, url: str, me: Who, leave: Callable[[], Any]):
        self._url, self._me, self._leave = f"{url.rstrip('/')}/", me, leave
        self._generation = b""  # of the object while it is ours
        self._beats, self._warned = 0, False
        self._kvstore: Any = None

    def take(self) -> None:
        """Makes this process the owner, after the silence of one that cannot be looked at. Raises WorkdirError."""
        import tensorstore as ts

        try:
            self._kvstore = ts.KvStore.open(self._url).result(timeout=PATIENCE)
            while not self._try():
                self._leave()
                time.sleep(0.2)
        except WorkdirError:
            raise
        except (OSError, ValueError, TimeoutError) as error:
            reason = str(error) or f"no answer within {PATIENCE:g} s"
            raise WorkdirError(f"{self._url}{NAME} cannot be written: {reason}; check config.checkpoint.folder") from error

    def _try(self) -> bool:
        found = self._read()
        if found.state != "value":
            return self._write(found.stamp.generation)
        other = who.parse(found.value[: who.LIMIT])
        if other and other.token == self._me.token:  # the answer to a write of ours was lost
            self._generation = found.stamp.generation
            return True
        gone = who.is_gone(other, self._me) if other else None
        if gone is False:
            raise who.refusal(self._url, other, age=None, me=self._me)
        if gone is None:
            name = other.name() if other else f"{self._url}{NAME}"
            log.info("%s belongs to %s: waiting %.0f s for a sign of life", self._url, name, who.SILENCE)
            until = time.monotonic() + who.SILENCE
            while time.monotonic() < until:
                self._leave()
                time.sleep(1)
                now = self._read()
                if now.state != "value" or who.parse(now.value[: who.LIMIT]) != other:
                    return False
                if now.stamp.generation != found.stamp.generation:
                    raise who.refusal(self._url, other, age=0, me=self._me)
        if not self._write(found.stamp.generation):
            return False
        log.warning("%s had an owner that is gone (%s); this run takes over", self._url, other.name() if other else "unnamed")
        return True

    def confirm(self) -> None:
        """Raises WorkdirError unless the folder is still this process's."""
        try:
            found = self._read()
        except (OSError, ValueError, TimeoutError) as error:
            log.warning("%s%s cannot be read: %s", self._url, NAME, error or "no answer")  # the save itself will tell more
            return
        other = who.parse(found.value[: who.LIMIT]) if found.state == "value" else None
        if other and other.token == self._me.token:
            return
        if found.state != "value" and self._write(found.stamp.generation):
            log.warning("%s%s was removed while its run goes on; it is written again", self._url, NAME)
            return
        raise WorkdirError(
            f"{self._url} was taken over by another run while this one was silent: {other.name() if other else 'unnamed'}. "
            "This run ends, and leaves it what is there"
        )

    def beat(self) -> None:
        """Says that the process is alive, by writing its object again."""
        try:
            if self._generation and not self._write(self._generation):
                self._own()
        except (OSError, ValueError, TimeoutError) as error:
            log.debug("%s%s cannot be written: %s", self._url, NAME, error)

    def release(self) -> None:
        """Removes owner.json if it is still this process's."""
        try:
            if self._generation and self._own():
                self._kvstore.write(NAME, None, if_equal=self._generation).result(timeout=PATIENCE)
        except (OSError, ValueError, TimeoutError) as error:
            log.debug("%s%s cannot be removed: %s", self._url, NAME, error)
        self._generation = b""

    def _own(self) -> bool:
        """Whether the object is ours; its generation is, where the answer to a write of ours was lost."""
        found = self._read()
        other = who.parse(found.value[: who.LIMIT]) if found.state == "value" else None
        self._generation = found.stamp.generation if other and other.token == self._me.token else b""
        return bool(self._generation)

    def _read(self) -> Any:
        return self._kvstore.read(NAME).result(timeout=PATIENCE)

    def _write(self, generation: bytes) -> bool:
        """Writes the object if it has still this generation. False when somebody else wrote it."""
        self._beats += 1
        stamp = self._kvstore.write(NAME, self._me.to_json(beats=self._beats), if_equal=generation).result(timeout=PATIENCE)
        if stamp.generation:
            self._generation = stamp.generation
        return bool(stamp.generation)
