"""Examples to fit a head on: rows of embeddings with their known classes.

Labels are the embeddings' own, or a table with a line for each part of a recording: file, start,
end, label, and answer ("yes", "no", "skip"; without that column: yes). A row that holds at least
`OVERLAP` seconds of a part, or all of a shorter one, has its label: one "yes" counts more than any
"no". A row of some class is taken to have no other. A line without a label, or with 0 for all
classes, says that its part has none. Of an example with denials alone, nothing else is known.
"""

import os
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from jaxtrain.workloads.bird import inference
from jaxtrain.workloads.bird.inference import InferenceError
from jaxtrain.workloads.bird.inference.embeddings import Embeddings, Places
from loaders.audio.recordings import class_names, columns, lines, tables
from loaders.audio.recordings.annotations import Errors
from loaders.audio.recordings.find import Names
from loaders.io import files

OVERLAP = 0.25  # [s]
ANSWERS = {"yes": 1, "": 1, "no": 0, "skip": -1}
# where, file, start, end, label or "" for no class, answer
Part = tuple[str, str, float, float, str, int]


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
    """Return the labels that the embeddings have. Raises InferenceError."""
    names = folders[0].names
    rows, ys, groups = [], [], []
    for each in folders:
        if each.names != names:
            raise InferenceError(
                f"{each.folder} has other classes than {folders[0].folder}; embed both with the"
                " same labels"
            )
        if not each.has("labels" if each.metadata["multilabel"] else "label"):
            raise InferenceError(
                f"{each.folder} has no labels; name a table of them: --labels FILE"
            )
        y, known = each.labels()
        if y.shape[1] != len(names):
            raise InferenceError(
                f"{each.folder} has labels of {y.shape[1]} classes, and names for {len(names)};"
                " embed again"
            )
        rows.append(np.flatnonzero(known))
        ys.append(y[rows[-1]].astype(np.float32))
        groups.append(_groups(each, rows[-1]))
    y = np.concatenate(ys)
    if not len(y):
        raise InferenceError(
            f"{folders[0].folder} has no row with a label; name a table of them: --labels FILE"
        )
    return Examples(rows, y, np.ones_like(y), _numbers(groups), names)


def of_table(
    folders: Sequence[Embeddings],
    path: str,
    *,
    background: int = 0,
    seed: int = 0,
    reading: columns.Options | None = None,
    errors: Errors | None = None,
) -> Examples:
    """Return the rows that a table speaks of, and ``background`` others that have no class.

    ``errors`` takes the lines that speak of no row. Raises InferenceError: a table without the
    columns, with a line of no sense, or that names nothing of the embeddings.
    """
    errors = errors or Errors()
    parts = _read(path, reading or columns.Options(), errors)
    of_folders = [list(_matches(each.places(), each.root, parts, errors)) for each in folders]
    inference.refuse(errors)
    spoken = {part[0] for matches in of_folders for _, part in matches}
    for where, file, start, end, *_ in parts:
        if where not in spoken:
            times = f"[{start:g}, {end:g}) s of " if np.isfinite(end) else ""
            errors.add("absent-recording", f"{where}: {times}{file}")
    if not spoken:
        first = parts[0][1] if parts else "no file"
        raise InferenceError(
            f"{path} names {first!r} and others, and none of it is in {folders[0].folder}; check"
            " --labels"
        )
    names = tuple(sorted({label for where, _, _, _, label, _ in parts if where in spoken} - {""}))
    if not names:
        raise InferenceError(
            f"{path} has no label in any line about {folders[0].folder}; name its column:"
            " --label-column"
        )
    numbers = {name: i for i, name in enumerate(names)}
    rows, ys, knowns, groups = [], [], [], []
    rng = np.random.default_rng(seed)
    for at, (each, matches) in enumerate(zip(folders, of_folders, strict=True)):
        answers: dict[int, dict[str, int]] = defaultdict(dict)
        good = np.array(each.array("weight", 1)) > 0
        for row, (*_, label, answer) in matches:
            if good[row] and answer >= 0:
                answers[row][label] = max(answer, answers[row].get(label, 0))
        free = np.setdiff1d(np.flatnonzero(good), list(answers))
        share = background // len(folders) + (at < background % len(folders))
        drawn = np.sort(rng.permutation(free)[:share])
        found = np.array(sorted(answers), np.int64)
        y = np.zeros((len(found) + len(drawn), len(names)), np.float32)
        known = np.ones_like(y)
        for i, row in enumerate(found.tolist()):
            silent = answers[row].pop("", 0)
            asked = [numbers[label] for label in answers[row]]
            y[i, asked] = list(answers[row].values())
            if not y[i].any() and not silent:
                known[i] = 0
                known[i, asked] = 1
        rows.append(np.concatenate([found, drawn]).astype(np.int64))
        ys.append(y)
        knowns.append(known)
        groups.append(_groups(each, rows[-1]))
    return Examples(rows, np.concatenate(ys), np.concatenate(knowns), _numbers(groups), names)


def refuse_one_sided(given: Examples) -> None:
    """Raise InferenceError unless every class has rows with it and rows without it."""
    for c, name in enumerate(given.names):
        if not (given.y[:, c] * given.known[:, c]).any():
            raise InferenceError(
                f"the class {name!r} has no example; add one, or leave the class out"
            )
        if not ((1 - given.y[:, c]) * given.known[:, c]).any():
            raise InferenceError(
                f"the class {name!r} has no counter-example; add rows with another class, or"
                " --background 100"
            )


def _read(path: str, reading: columns.Options, errors: Errors) -> list[Part]:
    """Return the labels of each line. Raises InferenceError: a line that cannot be understood."""
    place = files.expanded(path)
    table = tables.Table(place, *tables.read_text(place, reading.encoding))
    layout = columns.find(table, reading)
    if not layout.used["file"] or not (
        layout.used["label"] or layout.classes or layout.used.get("genus")
    ):
        raise InferenceError(
            f"{path} has the columns {', '.join(table.columns)[:200]}; expected file, start, end,"
            " label"
        )
    found = []
    for line in lines.read(layout, reading, errors):
        denied = (layout.text(line.row, "asked"),) if line.answer in ("no", "skip") else ()
        labels = line.labels or tuple(filter(None, denied))
        answer = ANSWERS[line.answer]
        if not labels and line.answer != "skip":
            labels, answer = ("",), 1
        begin, stop = (line.start or 0.0), (float("inf") if line.end is None else line.end)
        if not 0 <= begin < stop:
            times = f"the times {begin:g} to {stop:g} s"
            raise InferenceError(
                f"{line.where}: {times} are no part of a recording; correct the line"
            )
        found += [(line.where, line.file, begin, stop, label, answer) for label in labels]
    class_names.refuse_joined([(part[0], (part[4],)) for part in found if part[4]], errors)
    inference.refuse(errors)
    return found


def _matches(
    places: Places, root: str, parts: Iterable[Part], errors: Errors
) -> Iterable[tuple[int, Part]]:
    """Yield the rows that hold enough of a part. A name of several recordings is an error."""
    by_path: dict[str, list[int]] = defaultdict(list)
    for row, name in enumerate(places.paths):
        by_path[name].append(row)
    names = Names(by_path)
    meant: dict[str, str] = {}
    for part in parts:
        where, file, start, end, _, _ = part
        if file not in meant:
            meant[file] = _recording(file, root, names, where, errors)
        for row in by_path.get(meant[file], ()):
            low, high = places.start[row], places.end[row]
            held = min(high, end) - max(low, start)
            if (
                np.isnan(low)
                or np.isnan(high)
                or held >= min(OVERLAP, end - start, high - low) - 1e-6
            ):
                yield row, part


def _recording(file: str, root: str, names: Names, where: str, errors: Errors) -> str:
    """Return the recording that a name means, or "". A name of several is an error."""
    name = file.replace("\\", "/")
    name = (
        os.path.relpath(name, root).replace(os.sep, "/") if root and os.path.isabs(name) else name
    )
    found = [name] if name in names.all else names.match(file)[0]
    if len(found) > 1:
        errors.add(
            "ambiguous-name", f"{where} names {file!r}, and there are {', '.join(found[:3])}"
        )
    elif found and (before := names.contradicted(found[0], file)):
        errors.add(
            "ambiguous-name",
            f"{where} names {file!r}, another line {before!r}, and there is {found[0]} alone",
        )
    return found[0] if len(found) == 1 else ""


def _groups(folder: Embeddings, rows: np.ndarray) -> list[str]:
    """Return the recording of each row, or a number of its own if the embeddings have none."""
    try:
        paths = folder.places().paths
    except InferenceError:
        paths = [""] * folder.n
    return [
        f"{folder.root}:{paths[row]}" if paths[row] else f"{folder.folder}:{row}"
        for row in rows.tolist()
    ]


def _numbers(groups: Sequence[Sequence[str]]) -> np.ndarray:
    return np.unique([name for each in groups for name in each], return_inverse=True)[1].astype(
        np.int64
    )
