"""Examples to fit a head on: rows of embeddings with their known classes.

Labels are the embeddings' own, or a table (of detections, of annotations, of answers to them) with a line for each part of a
recording: file, start, end, label, and answer ("yes", "no", "skip"; without that column: yes). A row of the embeddings that
holds at least `OVERLAP` seconds of a part, or all of a shorter one, has its label. One that is given some class is taken to
have no other. Of an example with denials alone, nothing else is known.
"""

import os
import pathlib
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from jaxtrain.workloads.bird.inference import InferenceError
from jaxtrain.workloads.bird.inference.embeddings import Embeddings, Places
from loaders.audio.recordings import tables
from loaders.audio.recordings.sources import END, FILE, LABEL, START

OVERLAP = 0.25  # [s]
ANSWERS = {"yes": 1, "": 1, "no": 0, "skip": -1}


class Examples(NamedTuple):
    """Rows of one or several folders, and their known classes."""

    rows: Sequence[np.ndarray]  # of each folder, int64, in order
    y: np.ndarray  # float32 [n, C]: 1 for a class that is there
    known: np.ndarray  # float32 [n, C]: 1 if that is known
    group: np.ndarray  # int64 [n]: the recording, by which rows are held out
    names: tuple[str, ...]

    @property
    def exclusive(self) -> bool:
        """Whether every row has exactly one class, all of them known."""
        return self.y.shape[1] > 1 and bool((self.y.sum(1) == 1).all() and (self.known == 1).all())


def own(folders: Sequence[Embeddings]) -> Examples:
    """The labels that the embeddings have. Raises InferenceError."""
    names = folders[0].names
    rows, ys, groups = [], [], []
    for each in folders:
        if each.names != names:
            raise InferenceError(f"{each.folder} has other classes than {folders[0].folder}; embed both with the same labels")
        if not each.has("labels" if each.about["multilabel"] else "label"):
            raise InferenceError(f"{each.folder} has no labels; name a table of them: --labels FILE")
        y, known = each.labels()
        if y.shape[1] != len(names):
            raise InferenceError(f"{each.folder} has labels of {y.shape[1]} classes, and names for {len(names)}; embed again")
        rows.append(np.flatnonzero(known))
        ys.append(y[rows[-1]].astype(np.float32))
        groups.append(_groups(each, rows[-1]))
    y = np.concatenate(ys)
    if not len(y):
        raise InferenceError(f"{folders[0].folder} has no row with a label; name a table of them: --labels FILE")
    return Examples(rows, y, np.ones_like(y), _numbers(groups), names)


def of_table(folders: Sequence[Embeddings], path: str, *, background: int = 0, seed: int = 0) -> Examples:
    """The rows that a table speaks of, and ``background`` others, drawn by ``seed``, that are taken to have no class.

    Raises InferenceError: a table without the columns, with a line of no sense, or that names nothing of the embeddings.
    """
    parts = _read(path)
    names = tuple(sorted({label for _, _, _, label, _ in parts}))
    numbers = {name: i for i, name in enumerate(names)}
    rows, ys, knowns, groups, n_found = [], [], [], [], 0
    rng = np.random.default_rng(seed)
    for at, each in enumerate(folders):
        answers: dict[int, dict[int, int]] = defaultdict(dict)
        places = each.places()
        good = np.array(each.array("weight", 1)) > 0
        for row, label, answer in _matches(places, each.root, parts):
            n_found += 1
            if good[row] and answer >= 0:
                answers[row][numbers[label]] = answer
        free = np.setdiff1d(np.flatnonzero(good), list(answers))
        share = background // len(folders) + (at < background % len(folders))
        drawn = np.sort(rng.permutation(free)[:share])
        found = np.array(sorted(answers), np.int64)
        y = np.zeros((len(found) + len(drawn), len(names)), np.float32)
        known = np.ones_like(y)
        for i, row in enumerate(found.tolist()):
            for c, answer in answers[row].items():
                y[i, c] = answer
            if not y[i].any():
                known[i] = 0
                known[i, list(answers[row])] = 1
        rows.append(np.concatenate([found, drawn]).astype(np.int64))
        ys.append(y)
        knowns.append(known)
        groups.append(_groups(each, rows[-1]))
    if not n_found:
        first = parts[0][0] if parts else "no file"
        raise InferenceError(f"{path} names {first!r} and others, and none of it is in {folders[0].folder}; check --labels")
    return Examples(rows, np.concatenate(ys), np.concatenate(knowns), _numbers(groups), names)


def refuse_one_sided(given: Examples) -> None:
    """Raise InferenceError unless every class has rows with it and rows without it."""
    for c, name in enumerate(given.names):
        if not (given.y[:, c] * given.known[:, c]).any():
            raise InferenceError(f"the class {name!r} has no example; add one, or leave the class out")
        if not ((1 - given.y[:, c]) * given.known[:, c]).any():
            raise InferenceError(f"the class {name!r} has no counter-example; add rows with another class, or --background 100")


def _read(path: str) -> list[tuple[str, float, float, str, int]]:
    """file, start, end, label, answer of each line."""
    place = pathlib.Path(path).expanduser()
    table = tables.Table(place, tables.text_of(place))
    file, start, end = table.find(*FILE), table.find(*START), table.find(*END)
    label, answer, asked = table.find(*LABEL), table.find("answer"), table.find("asked")
    if not file or not label:
        raise InferenceError(f"{path} has the columns {', '.join(table.columns)[:200]}; expected file, start, end, label")
    found = []
    for number, row in table.rows():
        where = f"{path}:{number}"
        try:
            times = [tables.number(row.get(column or "")) for column in (start, end)]
        except ValueError:
            raise InferenceError(f"{where}: its times are no numbers; correct the line") from None
        word = row.get(answer or "", "").casefold()
        if word not in ANSWERS:
            raise InferenceError(f"{where}: the answer is {word!r}; expected yes, no or skip")
        name = row.get(label) or (row.get(asked, "") if asked and word in ("no", "skip") else "")
        if name:
            begin, stop = (times[0] or 0.0), (float("inf") if times[1] is None else times[1])
            if not 0 <= begin < stop:
                raise InferenceError(f"{where}: the times {begin:g} to {stop:g} s are no part of a recording; correct the line")
            found.append((row.get(file, ""), begin, stop, name, ANSWERS[word]))
    return found


def _matches(places: Places, root: str, parts: Iterable[tuple[str, float, float, str, int]]) -> Iterable[tuple[int, str, int]]:
    """The rows that hold enough of a part, with its label and answer."""
    by_path: dict[str, list[int]] = defaultdict(list)
    for row, name in enumerate(places.paths):
        by_path[name].append(row)
    by_name: dict[str, set[str]] = defaultdict(set)
    for name in by_path:
        by_name[name.rpartition("/")[2]].add(name)
    for file, start, end, label, answer in parts:
        name = file.replace("\\", "/")
        name = os.path.relpath(name, root).replace(os.sep, "/") if root and os.path.isabs(name) else name
        if name not in by_path:
            alike = by_name[name.rpartition("/")[2]]
            name = next(iter(alike)) if len(alike) == 1 else name
        for row in by_path.get(name, ()):
            low, high = places.start[row], places.end[row]
            if np.isnan(low) or np.isnan(high):
                yield row, label, answer
            elif min(high, end) - max(low, start) >= min(OVERLAP, end - start, high - low) - 1e-6:
                yield row, label, answer


def _groups(folder: Embeddings, rows: np.ndarray) -> list[str]:
    """The recording of each row, or a number of its own if the embeddings have none."""
    try:
        paths = folder.places().paths
    except InferenceError:
        return [f"{folder.folder}:{row}" for row in rows.tolist()]
    return [f"{folder.root}:{paths[row]}" if paths[row] else f"{folder.folder}:{row}" for row in rows.tolist()]


def _numbers(groups: Sequence[Sequence[str]]) -> np.ndarray:
    return np.unique([name for each in groups for name in each], return_inverse=True)[1].astype(np.int64)
