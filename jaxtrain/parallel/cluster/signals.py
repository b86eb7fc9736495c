"""Signals that ask a run to save and end."""

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from jaxtrain.parallel import supervised_attempt
from loaders.io import machine

CTRL_C = "Ctrl-C"
# [s] after the first signal, within which others belong to the same request: `timeout` sends its
# signal twice, and a terminal that closes its own and the shell's
SAME_REQUEST = 0.2
# [s] for a process whose supervisor passes on a signal that may have come to it as well
SAME_REQUEST_SUPERVISED = 3.0


class StopSignals:
    """The signals that ask the run to save and end. A second one ends the process at once.

    Ctrl-C is one of them: a KeyboardInterrupt could interrupt a library in a save. A thread waits
    for the second one, because Python calls no handler while the main thread computes or compiles.
    SIGHUP stays ignored under nohup, and SIGINT in a script's background job. In another thread
    than the main one, Python handles no signal.

    Attributes:
      asked: the name of the first signal, or "".
      notice: another reason, such as maintenance, or "".
    """

    def __init__(self, names: Sequence[str]):
        self.asked = ""
        self.notice = ""
        self._numbers = machine.signal_numbers(["SIGINT", *names])
        self._asked_at = 0.0
        self._same_request = SAME_REQUEST
        if supervised_attempt.from_environment().is_supervised:
            self._same_request = SAME_REQUEST_SUPERVISED
        self._at_once: Callable[[], None] | None = None
        self._previous_handlers: dict[int, Any] = {}
        self._is_main = threading.current_thread() is threading.main_thread()
        if not self._is_main:
            return
        reading, self._writing = os.pipe()
        os.set_blocking(self._writing, False)
        self._previous_pipe = signal.set_wakeup_fd(self._writing, warn_on_full_buffer=False)
        watch = threading.Thread(target=self._watch, args=(reading,), name="signals", daemon=True)
        watch.start()
        self.install()

    def install(self) -> None:
        """Handle the signals, also if a library has taken them since."""
        if not self._is_main:
            return
        for number in self._numbers:
            previous = signal.signal(number, self._handle)
            self._previous_handlers.setdefault(number, previous)

    def close(self) -> None:
        for number, handler in self._previous_handlers.items():
            # None = a handler that was not set from Python
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        if self._is_main:
            signal.set_wakeup_fd(self._previous_pipe)
            os.close(self._writing)  # which ends the thread

    def _handle(self, number: int, frame: Any) -> None:
        now = time.monotonic()
        if not self.asked:
            self.asked = _name(number)
            self._asked_at = now
        elif now - self._asked_at >= self._same_request:
            os._exit(128 + number)
        if self._at_once:
            self._at_once()

    def _watch(self, reading: int) -> None:
        """Read the number of each signal as it comes. The second one ends the process."""
        asked_at = None
        while byte := os.read(reading, 1):
            if byte[0] not in self._numbers:
                continue
            now = time.monotonic()
            if asked_at is None:
                asked_at = now
                line = f"\n{_name(byte[0])}: the run is being saved; a second one ends it at once\n"
                with contextlib.suppress(OSError):
                    os.write(2, line.encode())
            elif now - asked_at >= self._same_request:
                os._exit(128 + byte[0])
        os.close(reading)

    def ask(self, why: str) -> None:
        self.notice = self.notice or why

    def check(self) -> bool:
        """Whether a signal or a notice asked to stop."""
        return bool(self.asked or self.notice)

    @property
    def reason(self) -> str:
        return self.asked or self.notice or "another process"

    @property
    def interrupted(self) -> bool:
        return self.asked == CTRL_C

    @contextlib.contextmanager
    def at_once(self, action: Callable[[], None]) -> Iterator[None]:
        """Call ``action``, which raises, as soon as a signal comes, or has come before."""
        self._at_once = action
        try:
            if self.check():
                action()
            yield
        finally:
            self._at_once = None


def _name(number: int) -> str:
    return CTRL_C if number == signal.SIGINT else signal.Signals(number).name
