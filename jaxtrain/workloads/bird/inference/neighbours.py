"""Which windows of a table sound most like one of them, by the cosine of their embeddings."""

import os
from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from jaxtrain.workloads.bird.inference import InferenceError
from jaxtrain.workloads.bird.inference.embeddings import Embeddings

CHUNK = 1 << 16  # rows that are read together


class Neighbours:
    """The embeddings of windows, in memory: float32 [windows that have any, D]."""

    def __init__(self, folders: Sequence[Embeddings], windows: Sequence[tuple[str, float, float]]):
        """Find the row that holds most of each window: path, start and end [s].

        Raises InferenceError: the folders are of several encoders, or hold none of the windows.
        """
        # by path: start, end, folder, row
        found: dict[str, list[tuple[float, float, int, int]]] = defaultdict(list)
        for number, each in enumerate(folders):
            if each.encoder != folders[0].encoder:
                raise InferenceError(
                    f"{each.folder} is of another encoder than {folders[0].folder}; embed both by"
                    " one run"
                )
            lie, good = each.places(), np.asarray(each.array("weight", 1)) > 0
            ends = np.where(np.isnan(lie.end), np.inf, lie.end).tolist()
            starts = np.nan_to_num(lie.start).tolist()
            for row in np.flatnonzero(good).tolist():
                path = os.path.normpath(os.path.join(each.root, lie.paths[row]))
                found[path].append((starts[row], ends[row], number, row))
        rows = {path: np.array(sorted(those)) for path, those in found.items()}
        # [s] row of each recording
        longest = {path: (those[:, 1] - those[:, 0]).max() for path, those in rows.items()}
        self._windows = windows
        self._at = np.full(len(windows), -1)  # of each window: its place in `_unit`
        places: dict[tuple[int, int], int] = {}  # of each folder and row: its place in `_unit`
        for i, (path, start, end) in enumerate(windows):
            if path in rows:
                near = slice(*np.searchsorted(rows[path][:, 0], (start - longest[path], end)))
                some = rows[path][near]
                held = np.minimum(some[:, 1], end) - np.maximum(some[:, 0], start)
                if held.max(initial=0) > 0:
                    folder, row = some[held.argmax(), 2:].astype(int).tolist()
                    self._at[i] = places.setdefault((folder, row), len(places))
        if not places:
            raise InferenceError(
                f"{folders[0].folder} holds none of the windows; embed their recordings"
            )
        self._unit = np.empty((len(places), folders[0].array("mean", 2).shape[1]), np.float32)
        keys = np.array(list(places))  # in the order of their places
        for number, each in enumerate(folders):
            x, mine = each.array("mean", 2), np.flatnonzero(keys[:, 0] == number)
            if x.shape[1] != self._unit.shape[1]:
                raise InferenceError(
                    f"{each.folder} has other features than {folders[0].folder}; embed both by"
                    " one run"
                )
            mine = mine[np.argsort(keys[mine, 1])]  # in the order of the file
            for part in (mine[k : k + CHUNK] for k in range(0, len(mine), CHUNK)):
                self._unit[part] = x[keys[part, 1]]
        self._unit /= np.maximum(np.linalg.norm(self._unit, axis=1, keepdims=True), 1e-9)
        known, first = np.unique(self._at, return_index=True)
        self._window = first[known >= 0]  # of each row: the first window that has it

    @property
    def missing(self) -> int:
        """Windows that no folder holds."""
        return int((self._at < 0).sum())

    def near(self, number: int, n: int) -> list[tuple[int, float]]:
        """Return the ``n`` windows nearest to one that do not overlap it, with their cosine."""
        at = self._at[number]
        if at < 0:
            return []
        cosine = self._unit @ self._unit[at]
        path, start, end = self._windows[number]
        found: list[tuple[int, float]] = []
        for row in np.argsort(-cosine, kind="stable"):
            other = self._windows[self._window[row]]
            if other[0] != path or other[1] >= end or other[2] <= start:
                found.append((int(self._window[row]), float(cosine[row])))
            if len(found) == n:
                break
        return found
