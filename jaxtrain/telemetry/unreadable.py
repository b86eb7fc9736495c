"""Examples that the loader cannot use: each is logged once with its reason, and all are counted."""

import logging
from collections.abc import Mapping
from typing import Any

log = logging.getLogger("jaxtrain")
MAX_LOGGED = 10  # of those that were met since the last look


class Unreadable:
    """Those of one split, for example "to train on"."""

    def __init__(self, use: str):
        self._use = use
        self._count = 0
        self._first = ""

    def look(self, diagnostics: Mapping[str, Any]) -> None:
        """Log the ones that are new among a loader's ``bad``, of which ``bad_list`` has reasons."""
        count = diagnostics.get("bad", 0)
        new = count - self._count
        if new <= 0:
            return
        reasons = [reason for _, reason in diagnostics.get("bad_list", ())[self._count :]]
        for reason in reasons[:MAX_LOGGED]:
            log.warning("an example %s cannot be used: %s", self._use, reason)
        unlisted = new - min(len(reasons), MAX_LOGGED)
        if unlisted:
            log.warning("and %d more examples %s", unlisted, self._use)
        self._first = self._first or next(iter(reasons), "")
        self._count = count

    def close(self) -> None:
        """Log how many there were."""
        if self._count:
            log.warning(
                "%d examples %s could not be used, for example %s",
                self._count,
                self._use,
                self._first or "one without a reason",
            )
