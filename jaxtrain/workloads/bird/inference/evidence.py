"""The recordings that a score is of: those that were trained on are no evidence for others."""

from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np

from jaxtrain.workloads.bird.inference.embeddings import Embeddings

Recordings = dict[str, bool | None]  # whether the run was trained on each, None: not known


class Evidence(NamedTuple):
    """The number of recordings that a score is of, and of those among them that flatter it."""

    recordings: int
    trained: int | None  # at least, that the run was trained on. None: that is not known
    shared: int = 0  # the classifier was fitted on them, too

    def about(self) -> dict[str, Any]:
        """Return it for a file of results."""
        return {
            "recordings": self.recordings,
            "the run was trained on": self.trained,
            "the classifier was fitted on": self.shared,
        }

    def lines(self) -> list[str]:
        """Return the sentences that a reader of the score needs."""
        lines = []
        if self.trained is None:
            lines.append(
                "it is not known whether the run was trained on these recordings, or on files that"
                " they were converted from"
            )
        elif self.trained:
            lines.append(
                f"no evidence: the run was trained on {self.trained} of these"
                f" {self.recordings} recordings"
            )
        if self.shared:
            lines.append(
                f"no evidence: {self.shared} of these {self.recordings} recordings are among those"
                " that the classifier was fitted on"
            )
        return lines


def recordings_of(folder: Embeddings, rows: np.ndarray | None = None) -> Recordings:
    """Return the recordings of some rows, or of all, copies once."""
    names = folder.recordings()
    trained = folder.trained()
    numbers = range(folder.n) if rows is None else rows.tolist()
    return {names[row]: trained[row] for row in numbers}


def of(tested: Recordings, fitted: Iterable[str] = ()) -> Evidence:
    """Return the evidence of recordings that are tested, of which some were ``fitted`` on, too."""
    trained: int | None = sum(map(bool, tested.values()))
    if not trained and None in tested.values():
        trained = None
    return Evidence(len(tested), trained, len(tested.keys() & set(fitted)))
