"""Examples to fit a head on: rows of embeddings with their known classes.

Labels are the embeddings' own, or a table with a line for each part of a recording: file, start,
end, label, and answer ("yes", "no", "skip"; without that column: yes). A row that holds at least
`OVERLAP` seconds of a part, or all of a shorter one, has its label, or half as much if no row
does. A "yes" counts more than a "skip", and a "skip" more than a "no". A row of some class is taken
to have no other, but for those that were skipped, or of which it has a bit of a short call. A line
without a label, or with 0 for all classes, says that its part has none. Of an example with denials
alone, nothing else is known.
"""

import functools
import os
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from jaxtrain.workloads.bird import inference
from jaxtrain.workloads.bird.inference import InferenceError
from jaxtrain.workloads.bird.inference.embeddings import Embeddings
from loaders.audio.recordings import (
    class_names,
    columns,
    durations,
    grid,
    joined_files,
    label_words,
    lines,
    sources,
    tables,
)
from loaders.audio.recordings.annotations import Errors
from loaders.audio.recordings.find import Names
from loaders.io import files

OVERLAP = 0.25  # [s]
YES, NO, OPEN = 1, 0, -1
ANSWERS = {"yes": YES, "": YES, "no": NO, "skip": OPEN}
RANKS = {NO: 0, OPEN: 1, YES: 2}  # of several answers to a label of a row, the highest counts


class Part(NamedTuple):
    """The answer of a line of a table about a class and a part of a recording."""

    where: str  # the line, for messages
    file: str
    start: float  # [s]
    end: float  # [s], infinite if it is that of the recording
    label: str  # "" for no class
    answer: int  # of `ANSWERS`


class Match(NamedTuple):
    """A row, and a part that overlaps it."""

    row: int
    part: Part
    holds: bool  # enough of the part, so that its answer is about the row


class Examples(NamedTuple):
    """Rows of one or several folders, and their known classes."""

    rows: Sequence[np.ndarray]  # of each folder, int64, in order
    y: np.ndarray  # float32 [n, C]: 1 for a class that is there
    known: np.ndarray  # float32 [n, C]: 1 if that is known
    group: np.ndarray  # int64 [n]: the recording, by which rows are held out
    start: np.ndarray  # float64 [n] s in it, nan if it is not known
    end: np.ndarray
    names: tuple[str, ...]

    @property
    def recordings(self) -> np.ndarray:
        """The number of recordings with each class, int64 [C]."""
        counts = []
        for has_class in (self.y * self.known).T > 0:
            counts.append(len(np.unique(self.group[has_class])))
        return np.array(counts, np.int64)

    @property
    def apart(self) -> np.ndarray:
        """The number of rows with each class that do not overlap each other, int64 [C]."""
        counts = []
        for has_class in (self.y * self.known).T > 0:
            counts.append(self._n_apart(np.flatnonzero(has_class)))
        return np.array(counts, np.int64)

    def _n_apart(self, rows: np.ndarray) -> int:
        """Return how many rows can be chosen of which no two overlap."""
        order = rows[np.lexsort((self.end[rows], self.group[rows]))]
        count = 0
        latest = (-1, 0.0)  # group and end of the latest one that was chosen
        for row in order.tolist():
            group, start = int(self.group[row]), float(self.start[row])
            if group == latest[0] and start < latest[1] - grid.NEAR:
                continue
            count += 1
            latest = (group, float(self.end[row]))
        return count

    @property
    def exclusive(self) -> bool:
        """Whether every row has exactly one class, all of them known."""
        has_one_class = (self.y.sum(1) == 1).all()
        is_known = (self.known == 1).all()
        return self.y.shape[1] > 1 and bool(has_one_class and is_known)


def own(folders: Sequence[Embeddings], errors: Errors | None = None) -> Examples:
    """Return the labels that the embeddings have, without a class such as nocall.

    ``errors`` takes that class. Raises InferenceError.
    """
    names = folders[0].names
    rows, ys = [], []
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
    y = np.concatenate(ys)
    if not len(y):
        raise InferenceError(
            f"{folders[0].folder} has no row with a label; name a table of them: --labels FILE"
        )
    calls = [c for c, name in enumerate(names) if not label_words.says_none(name)]
    for name in filter(label_words.says_none, names):
        errors = errors or Errors()
        errors.add("no-label", f"{folders[0].folder}: the class {name!r} has rows without a class")
    call_names = tuple(names[c] for c in calls)
    y = y[:, calls]
    return _examples(folders, rows, y, np.ones_like(y), call_names)


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
    parts = _read(path, reading or columns.Options(), errors, _Lengths(folders).of)
    matches = [list(_matches(folder, parts, errors)) for folder in folders]
    inference.refuse(errors)
    matched_lines = set()
    for of_folder in matches:
        matched_lines |= {match.part.where for match in of_folder if match.holds}
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
    labels = set()
    for part in parts:
        if part.where in matched_lines and part.answer != OPEN:
            labels.add(part.label)
    names = tuple(sorted(labels - {""}))
    if not names:
        raise InferenceError(
            f"{path} has no label in any line about {folders[0].folder} that has an answer; name"
            " its column: --label-column"
        )
    rows, ys, knowns = [], [], []
    rng = np.random.default_rng(seed)
    for number, (folder, of_folder) in enumerate(zip(folders, matches, strict=True)):
        is_decoded = folder.decoded()
        answers = _answers(of_folder, is_decoded)
        named_rows = sorted({match.row for match in of_folder})
        unlabelled = np.setdiff1d(np.flatnonzero(is_decoded), named_rows)
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
    return _examples(folders, rows, np.concatenate(ys), np.concatenate(knowns), names)


def _answers(matches: Iterable[Match], is_decoded: np.ndarray) -> dict[int, dict[str, int]]:
    """Return the answer to each label of the rows that have any but open ones."""
    answers: dict[int, dict[str, int]] = defaultdict(dict)
    for row, part, holds in matches:
        if not is_decoded[row]:
            continue
        answer = part.answer
        if not holds:
            # a bit of a short call: the row neither has the class nor lacks it
            if answer != YES or part.end - part.start >= 2 * OVERLAP:
                continue
            answer = OPEN
        of_row = answers[row]
        of_row[part.label] = max(answer, of_row.get(part.label, NO), key=RANKS.__getitem__)
    return {row: of_row for row, of_row in answers.items() if set(of_row.values()) != {OPEN}}


def _targets(
    answers: Sequence[Mapping[str, int]], names: Sequence[str]
) -> tuple[np.ndarray, np.ndarray]:
    """Return classes and whether they are known, float32 [n, C] each, of the answers of rows."""
    numbers = {name: i for i, name in enumerate(names)}
    y = np.zeros((len(answers), len(names)), np.float32)
    known = np.ones_like(y)
    for i, of_row in enumerate(answers):
        answer_of = {numbers[label]: of_row[label] for label in of_row if label in numbers}
        for c, answer in answer_of.items():
            y[i, c] = answer == YES
        no_class = of_row.get("", NO)
        if no_class == OPEN or not (y[i].any() or no_class == YES):
            known[i] = 0
        for c, answer in answer_of.items():
            known[i, c] = answer != OPEN
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


class _Lengths:
    """The lengths of recordings, as far as the rows of embeddings reach."""

    def __init__(self, folders: Sequence[Embeddings]):
        self._folders = folders

    @functools.cached_property
    def _ends(self) -> dict[str, float]:
        ends: dict[str, float] = {}
        for folder in self._folders:
            places = folder.places()
            for path, end in zip(places.paths, places.end.tolist(), strict=True):
                if end > ends.get(path, 0.0):
                    ends[path] = end
        return ends

    @functools.cached_property
    def _names(self) -> Names:
        return Names(self._ends)

    def of(self, line: lines.Line) -> float:
        """Return the length of a line's recording [s], or 0 if it is not known."""
        candidates, _ = self._names.match(line.file)
        return self._ends[candidates[0]] if len(candidates) == 1 else 0.0


def _read(
    path: str,
    reading: columns.Options,
    errors: Errors,
    seconds: Callable[[lines.Line], float],
) -> list[Part]:
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
    own_names = sources.classes_of(place)
    read_lines = list(lines.read(layout, reading, errors))
    joined_files.refuse(layout, reading, read_lines, seconds)
    durations.report(layout, reading, read_lines, seconds, errors)
    for line in read_lines:
        start = line.start or 0.0
        end = float("inf") if line.end is None else line.end
        if not 0 <= start < end:
            raise InferenceError(
                f"{line.where}: the times {start:g} to {end:g} s are no part of a recording;"
                " correct the line"
            )
        if (line.answer == "skip" or line.open_classes) and not line.is_dropped:
            errors.add("unanswered", line.where)
        if not _is_kept(line, own_names, errors):
            continue
        for label, answer in _answers_of(line, layout):
            parts.append(Part(line.where, line.file, start, end, label, answer))
    lines_and_labels = [(part.where, (part.label,)) for part in parts if part.label]
    whole = own_names
    if layout.by_meaning.get("asked") or reading.separator == columns.NO_SEPARATOR:
        whole = {part.label for part in parts}  # as jaxtrain review writes them
    class_names.refuse_joined(lines_and_labels, errors, whole)
    inference.refuse(errors)
    return parts


def _is_kept(line: lines.Line, own_names: Collection[str], errors: Errors) -> bool:
    """Count a line whose labels say none, not or unknown, as in an index.

    ``own_names``: of classes of a run that the table is of.
    """
    none = [label for label in line.labels if label_words.says_none(label)]
    if none and not errors.add("no-label", f"{line.where}: {none[0]!r}"):
        return False
    denials = list(filter(label_words.denies, set(line.labels).difference(own_names)))
    if denials and not errors.add("denied-label", f"{line.where}: {denials[0]!r}"):
        return False
    unknown = [label for label in line.labels if label_words.says_unknown(label)]
    return not unknown or errors.add("open-label", f"{line.where}: {unknown[0]!r}")


def _answers_of(line: lines.Line, layout: columns.Layout) -> list[tuple[str, int]]:
    """Return the labels of a line, "" for no class, and the answer to each."""
    labels = tuple(label for label in line.labels if not label_words.says_none(label))
    answer = ANSWERS[line.answer]
    if line.labels and not labels and answer == NO:
        return []  # that there is no call is denied, and not said which one there is
    if not labels and answer != YES:
        asked_class = layout.text(line.row, "asked")
        labels = (asked_class,) if asked_class else ()
    answers = [(label, answer) for label in labels]
    answers += [(name, OPEN) for name in line.open_classes]
    if not labels:
        # of classes in columns, the line says no of the others, if there are any
        has_closed = len(line.open_classes) < max(1, len(layout.classes))
        answers.append(("", YES if answer != OPEN and has_closed else OPEN))
    return answers


def _matches(folder: Embeddings, parts: Iterable[Part], errors: Errors) -> Iterator[Match]:
    """Yield the rows that overlap a part. A name of several recordings is an error."""
    places = folder.places()
    rows_by_path: dict[str, list[int]] = defaultdict(list)
    for row, path in enumerate(places.paths):
        rows_by_path[path].append(row)
    names = Names(rows_by_path)
    recordings: dict[str, str] = {}  # by the name that the table has for them
    for part in parts:
        if part.file not in recordings:
            recordings[part.file] = _recording(part, folder.root, names, errors)
        rows = np.array(rows_by_path.get(recordings[part.file], ()), np.int64)
        start, end = places.start[rows], places.end[rows]
        holds = grid.holding(start, end, (part.start, part.end), OVERLAP)
        overlaps = np.minimum(end, part.end) - np.maximum(start, part.start) > grid.NEAR
        is_whole = np.isnan(start) | np.isnan(end)  # its recording, as far as is known
        for i in np.flatnonzero(holds | overlaps | is_whole).tolist():
            yield Match(int(rows[i]), part, bool(holds[i] or is_whole[i]))


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


def _examples(
    folders: Sequence[Embeddings],
    rows: Sequence[np.ndarray],
    y: np.ndarray,
    known: np.ndarray,
    names: tuple[str, ...],
) -> Examples:
    """Return the examples with their places in recordings, of which copies are one."""
    recordings: list[str] = []
    starts, ends = [], []
    for folder, folder_rows in zip(folders, rows, strict=True):
        of_rows = folder.recordings()
        recordings += [of_rows[row] for row in folder_rows.tolist()]
        start, end = folder.times()
        starts.append(start[folder_rows])
        ends.append(end[folder_rows])
    _, group = np.unique(recordings, return_inverse=True)
    start, end = np.concatenate(starts), np.concatenate(ends)
    return Examples(rows, y, known, group.astype(np.int64), start, end, names)
