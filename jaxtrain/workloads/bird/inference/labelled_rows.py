"""Examples to fit a head on: rows of embeddings with their known classes.

Labels are the embeddings' own, or a table with a line for each part of a recording: file, start,
end, label, and answer ("yes", "no", "skip"; without that column: yes). A row that holds at least
`OVERLAP` seconds of a part, or all of a shorter one, has its label: one "yes" counts more than any
"no". A row of some class is taken to have no other. A line without a label, or with 0 for all
classes, says that its part has none. Of an example with denials alone, nothing else is known.
"""

import os
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from jaxtrain.workloads.bird import inference
from jaxtrain.workloads.bird.inference import InferenceError
from jaxtrain.workloads.bird.inference.embeddings import Embeddings
from loaders.audio.recordings import class_names, columns, lines, tables
from loaders.audio.recordings.annotations import Errors
from loaders.audio.recordings.find import Names
from loaders.io import files

OVERLAP = 0.25  # [s]
ANSWERS = {"yes": 1, "": 1, "no": 0, "skip": -1}


class Part(NamedTuple):
    """The answer of a line of a table about a class and a part of a recording."""

    where: str  # the line, for messages
    file: str
    start: float  # [s]
    end: float  # [s], infinite if it is that of the recording
    label: str  # "" for no class
    answer: int  # of `ANSWERS`


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
        has_one_class = (self.y.sum(1) == 1).all()
        is_known = (self.known == 1).all()
        return self.y.shape[1] > 1 and bool(has_one_class and is_known)


def own(folders: Sequence[Embeddings]) -> Examples:
    """Return the labels that the embeddings have. Raises InferenceError."""
    names = folders[0].names
    rows, ys, groups = [], [], []
    for folder in folders:
        if folder.names != names:
            raise InferenceError(
                f"{folder.folder} has other classes than {folders[0].folder}; embed both with the"
                " same labels"
            )
        if not folder.has("labels" if folder.metadata["multilabel"] else "label"):
            raise InferenceError(
                f"{folder.folder} has no labels; name a table of them: --labels FILE"
            )
        y, is_known = folder.labels()
        if y.shape[1] != len(names):
            raise InferenceError(
                f"{folder.folder} has labels of {y.shape[1]} classes, and names for {len(names)};"
                " embed again"
            )
        known_rows = np.flatnonzero(is_known)
        rows.append(known_rows)
        ys.append(y[known_rows].astype(np.float32))
        groups += _recordings(folder, known_rows)
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
    matches = [list(_matches(folder, parts, errors)) for folder in folders]
    inference.refuse(errors)
    matched_lines = {part.where for of_folder in matches for _, part in of_folder}
    for part in parts:
        if part.where not in matched_lines:
            has_end = np.isfinite(part.end)
            times = f"[{part.start:g}, {part.end:g}) s of " if has_end else ""
            errors.add("absent-recording", f"{part.where}: {times}{part.file}")
    if not matched_lines:
        first = parts[0].file if parts else "no file"
        raise InferenceError(
            f"{path} names {first!r} and others, and none of it is in {folders[0].folder}; check"
            " --labels"
        )
    labels = {part.label for part in parts if part.where in matched_lines}
    names = tuple(sorted(labels - {""}))
    if not names:
        raise InferenceError(
            f"{path} has no label in any line about {folders[0].folder}; name its column:"
            " --label-column"
        )
    rows, ys, knowns, groups = [], [], [], []
    rng = np.random.default_rng(seed)
    for number, (folder, of_folder) in enumerate(zip(folders, matches, strict=True)):
        is_decoded = folder.decoded()
        answers = _answers(of_folder, is_decoded)
        unlabelled = np.setdiff1d(np.flatnonzero(is_decoded), list(answers))
        n_background = background // len(folders)
        if number < background % len(folders):
            n_background += 1
        background_rows = np.sort(rng.permutation(unlabelled)[:n_background])
        labelled_rows = np.array(sorted(answers), np.int64)
        y, known = _targets([answers[row] for row in labelled_rows.tolist()], names)
        y_background = np.zeros((len(background_rows), y.shape[1]), np.float32)
        folder_rows = np.concatenate([labelled_rows, background_rows]).astype(np.int64)
        rows.append(folder_rows)
        ys += [y, y_background]
        knowns += [known, np.ones_like(y_background)]
        groups += _recordings(folder, folder_rows)
    return Examples(rows, np.concatenate(ys), np.concatenate(knowns), _numbers(groups), names)


def _answers(
    matches: Iterable[tuple[int, Part]], is_decoded: np.ndarray
) -> dict[int, dict[str, int]]:
    """Return the answer, 0 or 1, to each label of a row. One "yes" counts more than any "no"."""
    answers: dict[int, dict[str, int]] = defaultdict(dict)
    for row, part in matches:
        if is_decoded[row] and part.answer >= 0:
            earlier = answers[row].get(part.label, 0)
            answers[row][part.label] = max(part.answer, earlier)
    return answers


def _targets(
    answers: Sequence[Mapping[str, int]], names: Sequence[str]
) -> tuple[np.ndarray, np.ndarray]:
    """Return classes and whether they are known, float32 [n, C] each, of the answers of rows."""
    numbers = {name: i for i, name in enumerate(names)}
    y = np.zeros((len(answers), len(names)), np.float32)
    known = np.ones_like(y)
    for i, of_row in enumerate(answers):
        answered = [label for label in of_row if label]
        classes = [numbers[label] for label in answered]
        y[i, classes] = [of_row[label] for label in answered]
        says_silent = of_row.get("", 0)
        if not y[i].any() and not says_silent:
            known[i] = 0
            known[i, classes] = 1
    return y, known


def refuse_one_sided(examples: Examples) -> None:
    """Raise InferenceError unless every class has rows with it and rows without it."""
    has_example = (examples.y * examples.known).any(0)
    has_counter_example = ((1 - examples.y) * examples.known).any(0)
    for c, name in enumerate(examples.names):
        if not has_example[c]:
            raise InferenceError(
                f"the class {name!r} has no example; add one, or leave the class out"
            )
        if not has_counter_example[c]:
            raise InferenceError(
                f"the class {name!r} has no counter-example; add rows with another class, or"
                " --background 100"
            )


def _read(path: str, reading: columns.Options, errors: Errors) -> list[Part]:
    """Return the labels of each line. Raises InferenceError: a line that cannot be understood."""
    place = files.expanded(path)
    text, encoding = tables.read_text(place, reading.encoding)
    table = tables.Table(place, text, encoding)
    layout = columns.find(table, reading)
    if not layout.by_meaning["file"] or not layout.has_labels():
        raise InferenceError(
            f"{path} has the columns {', '.join(table.columns)[:200]}; expected file, start, end,"
            " label"
        )
    parts: list[Part] = []
    for line in lines.read(layout, reading, errors):
        start = line.start or 0.0
        end = float("inf") if line.end is None else line.end
        if not 0 <= start < end:
            raise InferenceError(
                f"{line.where}: the times {start:g} to {end:g} s are no part of a recording;"
                " correct the line"
            )
        labels = line.labels
        answer = ANSWERS[line.answer]
        if not labels and line.answer in ("no", "skip"):
            asked_class = layout.text(line.row, "asked")
            labels = (asked_class,) if asked_class else ()
        if not labels and line.answer != "skip":
            labels = ("",)
            answer = 1
        parts += [Part(line.where, line.file, start, end, label, answer) for label in labels]
    lines_and_labels = [(part.where, (part.label,)) for part in parts if part.label]
    class_names.refuse_joined(lines_and_labels, errors)
    inference.refuse(errors)
    return parts


def _matches(
    folder: Embeddings, parts: Iterable[Part], errors: Errors
) -> Iterator[tuple[int, Part]]:
    """Yield the rows that hold enough of a part. A name of several recordings is an error."""
    places = folder.places()
    rows_by_path: dict[str, list[int]] = defaultdict(list)
    for row, path in enumerate(places.paths):
        rows_by_path[path].append(row)
    names = Names(rows_by_path)
    recordings: dict[str, str] = {}  # by the name that the table has for them
    for part in parts:
        if part.file not in recordings:
            recordings[part.file] = _recording(part, folder.root, names, errors)
        for row in rows_by_path.get(recordings[part.file], ()):
            start = places.start[row]
            end = places.end[row]
            if np.isnan(start) or np.isnan(end):
                yield row, part
                continue
            overlap = min(end, part.end) - max(start, part.start)
            if overlap >= min(OVERLAP, part.end - part.start, end - start) - 1e-6:
                yield row, part


def _recording(part: Part, root: str, names: Names, errors: Errors) -> str:
    """Return the recording that a part's name means, or "". A name of several is an error."""
    where = part.where
    file = part.file
    name = file.replace("\\", "/")
    if root and os.path.isabs(name):
        name = os.path.relpath(name, root).replace(os.sep, "/")
    candidates = [name] if name in names.all else names.match(file)[0]
    if len(candidates) > 1:
        listed = ", ".join(candidates[:3])
        errors.add("ambiguous-name", f"{where} names {file!r}, and there are {listed}")
    elif candidates and (other_name := names.contradicted(candidates[0], file)):
        errors.add(
            "ambiguous-name",
            f"{where} names {file!r}, another line {other_name!r}, and there is {candidates[0]}"
            " alone",
        )
    return candidates[0] if len(candidates) == 1 else ""


def _recordings(folder: Embeddings, rows: np.ndarray) -> list[str]:
    """Return the recording of each row, or a number of its own if the embeddings have none."""
    try:
        paths = folder.places().paths
    except InferenceError:
        paths = [""] * folder.n
    recordings = []
    for row in rows.tolist():
        path = paths[row]
        recordings.append(f"{folder.root}:{path}" if path else f"{folder.folder}:{row}")
    return recordings


def _numbers(groups: Sequence[str]) -> np.ndarray:
    _, numbers = np.unique(groups, return_inverse=True)
    return numbers.astype(np.int64)
