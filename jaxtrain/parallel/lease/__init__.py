"""One owner of a workdir: the run that writes there, so that no second one writes between its records.

    with Owner([workdir, "gs://bucket/run/checkpoints"]) as owner:
        owner.confirm()    before every record, sample and picture
        owner.confirm(saving=True)    before a save

folder/owner.json names the owner: host, process, boot, start, SLURM job (`who`). It is made by an atomic operation of the
medium (`disk`: a hard link; `store`: a conditional write), lives for as long as the run, and its age tells when the run was
last alive: a thread renews it every 10 s. Who finds one that is there:

- is refused where the process that it names lives on this machine, or renews it;
- takes over at once where that process is gone from this machine, or was an earlier start of the same SLURM job;
- takes over from another machine, or from a container of this one, after 60 s of silence.

A process that was paused for so long finds another's name there when it confirms, and ends: of all that think they own a
folder, one passes `Owner.confirm`.
"""

import logging
import os
import threading
import types
from collections.abc import Callable, Sequence
from typing import Any

from jaxtrain.parallel.lease.disk import Disk
from jaxtrain.parallel.lease.store import Store
from jaxtrain.parallel.lease.who import BEAT, Who, WorkdirError, here

__all__ = ["Owner", "WorkdirError"]

log = logging.getLogger("jaxtrain")


class Owner:
    """A context: this process owns ``folders`` while it is entered.

    Args:
      folders: paths, and URLs of object stores; made where they do not exist. Of several processes the first one owns them
        for all; the others name none.
      leave: called during a wait for another owner's silence; it may raise.

    Entering raises:
      WorkdirError: another run has one of the folders; the message says who, since when, and what frees it.
    """

    def __init__(self, folders: Sequence[str], *, leave: Callable[[], Any] = lambda: None):
        me = here()
        self._claims = [_claim(folder, me, leave) for folder in _different(folders)]
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="owner", daemon=True)

    def __enter__(self) -> "Owner":
        held: list[Disk | Store] = []
        try:
            for claim in self._claims:
                claim.take()
                held.append(claim)
        except BaseException:
            for claim in held:
                claim.release()
            raise
        if held:
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: types.TracebackType | None
    ) -> None:
        self._closed.set()
        if self._claims:
            self._thread.join()
        try:
            if kind is None:
                self.confirm()  # what was deleted behind the last record is no run that ended well
        finally:
            for claim in self._claims:
                claim.release()

    def confirm(self, *, saving: bool = False) -> None:
        """Returns if the folders are still this run's. On a disk it reads a small file; in a store only before a save.

        Raises WorkdirError: another run took one over, or one was deleted.
        """
        for claim in self._claims:
            if saving or isinstance(claim, Disk):
                claim.confirm()

    def _run(self) -> None:
        while not self._closed.wait(BEAT):
            for claim in self._claims:
                claim.beat()


def _claim(folder: str, me: Who, leave: Callable[[], Any]) -> Disk | Store:
    return Store(folder, me, leave) if "://" in folder else Disk(folder, me, leave)


def _different(folders: Sequence[str]) -> list[str]:
    """The folders, each once however it is spelt; a disk's as absolute paths with their links resolved."""
    return list(dict.fromkeys(f if "://" in f else os.path.realpath(os.path.expanduser(f)) for f in folders))
