"""What is odd about splits of recordings, for a person: classes and tests without evidence."""

from collections.abc import Iterable, Sequence

import numpy as np

MAX_LISTED = 10  # names in a sentence


def of_classes(names: Sequence[str], n_train: np.ndarray, n_test: np.ndarray) -> list[str]:
    """Name the classes without a row to train on, of the rows with each class, int64 [C] each."""
    missing = np.flatnonzero(n_train == 0)
    if not len(missing) or not n_train.any():
        return []
    listed = []
    for c in missing.tolist():
        tested = f" ({n_test[c]} to test on)" if n_test[c] else ""
        listed.append(f"{names[c]!r}{tested}")
    verb = "has" if len(missing) == 1 else "have"
    return [f"{len(missing)} of {len(names)} classes {verb} no row to train on: {_joined(listed)}"]


def of_recordings(train: Iterable[str], test: Iterable[str]) -> list[str]:
    """Name the recordings that are trained and tested on."""
    test_names = set(test)
    shared = sorted(test_names.intersection(train))
    if not shared:
        return []
    return [
        f"{len(shared)} of {len(test_names)} recordings to test on are trained on, too, so that"
        f" their evaluation is no evidence: {_joined(shared)}"
    ]


def _joined(names: Sequence[str]) -> str:
    more = f" and {len(names) - MAX_LISTED} more" if len(names) > MAX_LISTED else ""
    return ", ".join(names[:MAX_LISTED]) + more
