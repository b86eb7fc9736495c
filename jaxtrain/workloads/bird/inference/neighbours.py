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


class _Rows(NamedTuple):
    """The rows of a recording in all folders, by their start."""

    start: np.ndarray  # float64 [n] s
    end: np.ndarray  # infinite if it is not known
    folder: list[int]  # number of each row's folder
    row: list[int]
    longest: float  # [s] of a row


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
    spans: dict[str, list[tuple[float, float, int, int]]] = defaultdict(list)
    for number, folder in enumerate(folders):
        if folder.encoder != folders[0].encoder:
            raise InferenceError(
                f"{folder.folder} is of another encoder than {folders[0].folder}; embed both by"
                " one run"
            )
        places = folder.places()
        is_decoded = np.asarray(folder.array("weight", 1)) > 0
        starts = np.nan_to_num(places.start).tolist()
        ends = np.where(np.isnan(places.end), np.inf, places.end).tolist()
        for row in np.flatnonzero(is_decoded).tolist():
            path = os.path.normpath(os.path.join(folder.root, places.paths[row]))
            spans[path].append((starts[row], ends[row], number, row))
    rows = {}
    for path, of_recording in spans.items():
        start, end, folder_number, row_number = zip(*sorted(of_recording), strict=True)
        starts, ends = np.array(start), np.array(end)
        longest = float((ends - starts).max())
        rows[path] = _Rows(starts, ends, list(folder_number), list(row_number), longest)
    return rows


def _best_row(rows: Mapping[str, _Rows], window: Window) -> tuple[int, int] | None:
    """Return folder and row that hold most of a window, or None."""
    if window.path not in rows:
        return None
    of_recording = rows[window.path]
    bounds = (window.start - of_recording.longest, window.end)
    first, stop = np.searchsorted(of_recording.start, bounds)
    end = np.minimum(of_recording.end[first:stop], window.end)
    overlap = end - np.maximum(of_recording.start[first:stop], window.start)
    if overlap.max(initial=0) <= 0:
        return None
    best = int(first + overlap.argmax())
    return of_recording.folder[best], of_recording.row[best]


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
