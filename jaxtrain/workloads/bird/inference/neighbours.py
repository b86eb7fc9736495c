"""Which windows of a table sound most like one of them, by the cosine of their embeddings."""

import bisect
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
        rows: dict[str, list[tuple[float, float, int, int]]] = defaultdict(list)  # by path: start, end, folder, row
        for number, each in enumerate(folders):
            if each.encoder != folders[0].encoder:
                raise InferenceError(f"{each.folder} is of another encoder than {folders[0].folder}; embed both by one run")
            places, good = each.places(), np.asarray(each.array("weight", 1)) > 0
            ends = np.where(np.isnan(places.end), np.inf, places.end).tolist()
            starts = np.nan_to_num(places.start).tolist()
            for row in np.flatnonzero(good).tolist():
                path = os.path.normpath(os.path.join(each.root, places.paths[row]))
                rows[path].append((starts[row], ends[row], number, row))
        longest: dict[str, float] = {}  # [s] row of each recording
        for path, those in rows.items():
            those.sort()
            longest[path] = max(high - low for low, high, _, _ in those)
        self._windows = windows
        self._at = np.full(len(windows), -1)  # of each window: its place in `_unit`
        found: dict[tuple[int, int], int] = {}
        for i, (path, start, end) in enumerate(windows):
            if (best := _most(rows.get(path, ()), longest.get(path, 0.0), start, end)) is not None:
                self._at[i] = found.setdefault(best, len(found))
        if not found:
            raise InferenceError(f"{folders[0].folder} holds none of the windows; embed their recordings")
        self._unit = np.empty((len(found), folders[0].array("mean", 2).shape[1]), np.float32)
        keys = np.array(list(found))  # in the order of their places
        for number, each in enumerate(folders):
            x, mine = each.array("mean", 2), np.flatnonzero(keys[:, 0] == number)
            if x.shape[1] != self._unit.shape[1]:
                raise InferenceError(f"{each.folder} has other features than {folders[0].folder}; embed both by one run")
            mine = mine[np.argsort(keys[mine, 1])]  # in the order of the file
            for part in (mine[k : k + CHUNK] for k in range(0, len(mine), CHUNK)):
                self._unit[part] = x[keys[part, 1]]
        self._unit /= np.maximum(np.linalg.norm(self._unit, axis=1, keepdims=True), 1e-9)
        self._window = np.full(len(found), -1)  # of each row: the first that has it
        order = np.arange(len(windows))[::-1]
        self._window[self._at[order[self._at[order] >= 0]]] = order[self._at[order] >= 0]

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
        take = min(len(cosine), 4 * n + 16)
        while True:
            some = np.argpartition(-cosine, take - 1)[:take]
            found.clear()
            for row in some[np.argsort(-cosine[some], kind="stable")].tolist():
                other = self._windows[self._window[row]]
                if other[0] != path or other[1] >= end or other[2] <= start:
                    found.append((int(self._window[row]), float(cosine[row])))
            if len(found) >= n or take == len(cosine):
                return found[:n]
            take = min(len(cosine), 4 * take)


def _most(rows: Sequence[tuple[float, float, int, int]], longest: float, start: float, end: float) -> tuple[int, int] | None:
    """Return folder and number of the row, of those by start, that holds most of a window."""
    best, most = None, 0.0
    for low, high, folder, row in rows[bisect.bisect_left(rows, (start - longest,)) :]:
        if low >= end:
            break
        if (held := min(high, end) - max(low, start)) > most:
            best, most = (folder, row), held
    return best
