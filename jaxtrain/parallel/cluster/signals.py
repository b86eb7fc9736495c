"""Signals that ask a run to save and end."""

import os
import signal
from collections.abc import Sequence
from typing import Any


class StopSignals:
    """The signals that ask the run to save and end. A second one ends the process at once.

    ``asked`` is the signal's name and ``notice`` another reason, such as maintenance, "" before it.
    Ctrl-C is remembered until `check`: a KeyboardInterrupt could interrupt a library in a save.
    """

    def __init__(self, names: Sequence[str]):
        self.asked = ""
        self.notice = ""
        self._interrupted = False
        self._numbers = [signal.SIGINT, *(getattr(signal, name) for name in names)]
        self._previous_handlers: dict[int, Any] = {}
        self.install()

    @property
    def reason(self) -> str:
        return self.asked or self.notice or "another process"

    def install(self) -> None:
        """Handle the signals, also if a library has taken them since."""
        for number in self._numbers:
            previous = signal.signal(number, self._handle)
            self._previous_handlers.setdefault(number, previous)

    def close(self) -> None:
        for number, handler in self._previous_handlers.items():
            # None = a handler that was not set from Python
            signal.signal(number, signal.SIG_DFL if handler is None else handler)

    def _handle(self, number: int, frame: Any) -> None:
        if self.asked or self._interrupted:
            os._exit(128 + number)
        if number == signal.SIGINT:
            self._interrupted = True
        else:
            self.asked = signal.Signals(number).name

    def ask(self, why: str) -> None:
        self.notice = self.notice or why

    def check(self) -> bool:
        """Whether a signal or a notice asked to stop. Raises KeyboardInterrupt after Ctrl-C."""
        if self._interrupted:
            raise KeyboardInterrupt
        return bool(self.asked or self.notice)
