"""The windows of a table that sound most like one of them, by the cosine of their embeddings."""

import os
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from jaxtrain.workloads.bird.inference import InferenceError
from jaxtrain.workloads.bird.inference.embeddings import Embeddings

CHUNK = 1 << 16  # rows that are read together


class Window(NamedTuple):
    """A part of a recording. Times in s."""

    path: str  # absolute
    start: float
    end: float


class _Row(NamedTuple):
    """A row of a folder of embeddings."""

    start: float  # [s] of its recording
    end: float  # infinite if it is not known
    folder: int  # number of its folder
    number: int


class _Rows(NamedTuple):
    """The rows of a recording in all folders, by their start."""

    rows: Sequence[_Row]
    start: np.ndarray  # float64 [n] s
    end: np.ndarray
    longest: float  # [s] of a row

    @classmethod
    def of(cls, rows: Sequence[_Row]) -> "_Rows":
        start = np.array([row.start for row in rows])
        end = np.array([row.end for row in rows])
        return cls(rows, start, end, float((end - start).max()))


class Neighbours:
    """The embeddings of windows, in memory: float32 [windows that have any, D]."""

    def __init__(self, folders: Sequence[Embeddings], windows: Sequence[Window]):
        """Find the row that holds most of each window.

        Raises InferenceError: the folders are of several encoders, or hold none of the windows.
        """
        rows = _rows_by_recording(folders)
        self._windows = windows
        self._place = np.full(len(windows), -1)  # of each window in `_unit`
        places: dict[tuple[int, int], int] = {}  # of each folder and row in `_unit`
        for i, window in enumerate(windows):
            folder_and_row = _best_row(rows, window)
            if folder_and_row:
                self._place[i] = places.setdefault(folder_and_row, len(places))
        if not places:
            raise InferenceError(
                f"{folders[0].folder} holds none of the windows; embed their recordings"
            )
        self._unit = _unit_features(folders, list(places))
        used_places, first_window = np.unique(self._place, return_index=True)
        self._window = first_window[used_places >= 0]  # of each place: its first window

    @property
    def missing(self) -> int:
        """Windows that no folder holds."""
        return int((self._place < 0).sum())

    def near(self, number: int, n: int) -> list[tuple[int, float]]:
        """Return the ``n`` windows nearest to one that do not overlap it, with their cosine."""
        place = self._place[number]
        if place < 0:
            return []
        cosine = self._unit @ self._unit[place]
        window = self._windows[number]
        nearest: list[tuple[int, float]] = []
        for candidate in np.argsort(-cosine, kind="stable"):
            neighbour = int(self._window[candidate])
            if not _overlap(self._windows[neighbour], window):
                nearest.append((neighbour, float(cosine[candidate])))
            if len(nearest) == n:
                break
        return nearest


def _overlap(a: Window, b: Window) -> bool:
    return a.path == b.path and a.start < b.end and a.end > b.start


def _rows_by_recording(folders: Sequence[Embeddings]) -> dict[str, _Rows]:
    """Return the decoded rows by absolute path. Raises InferenceError: unlike encoders."""
    rows_by_path: dict[str, list[_Row]] = defaultdict(list)
    for number, folder in enumerate(folders):
        if folder.encoder != folders[0].encoder:
            raise InferenceError(
                f"{folder.folder} is of another encoder than {folders[0].folder}; embed both by"
                " one run"
            )
        places = folder.places()
        starts = np.nan_to_num(places.start).tolist()
        ends = np.where(np.isnan(places.end), np.inf, places.end).tolist()
        for row in np.flatnonzero(folder.decoded()).tolist():
            path = os.path.normpath(os.path.join(folder.root, places.paths[row]))
            rows_by_path[path].append(_Row(starts[row], ends[row], number, row))
    return {path: _Rows.of(sorted(rows)) for path, rows in rows_by_path.items()}


def _best_row(rows: Mapping[str, _Rows], window: Window) -> tuple[int, int] | None:
    """Return folder and row that hold most of a window, or None."""
    if window.path not in rows:
        return None
    candidates = rows[window.path]
    bounds = (window.start - candidates.longest, window.end)
    first, stop = np.searchsorted(candidates.start, bounds)
    end = np.minimum(candidates.end[first:stop], window.end)
    start = np.maximum(candidates.start[first:stop], window.start)
    overlap = end - start
    if overlap.max(initial=0) <= 0:
        return None
    best = candidates.rows[int(first + overlap.argmax())]
    return best.folder, best.number


def _unit_features(folders: Sequence[Embeddings], rows: list[tuple[int, int]]) -> np.ndarray:
    """Return the features of rows, (folder, row) each, with length 1: float32 [n, D]."""
    width = folders[0].array("mean", 2).shape[1]
    features = np.empty((len(rows), width), np.float32)
    folder_of, row_of = np.array(rows).T
    for number, folder in enumerate(folders):
        x = folder.array("mean", 2)
        if x.shape[1] != width:
            raise InferenceError(
                f"{folder.folder} has other features than {folders[0].folder}; embed both by"
                " one run"
            )
        places = np.flatnonzero(folder_of == number)
        in_file_order = places[np.argsort(row_of[places])]
        for first in range(0, len(in_file_order), CHUNK):
            chunk = in_file_order[first : first + CHUNK]
            features[chunk] = x[row_of[chunk]]
    features /= np.maximum(np.linalg.norm(features, axis=1, keepdims=True), 1e-9)
    return features
