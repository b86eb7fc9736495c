"""Windows that people judge: their content on the page, and the table of answers.

The table has a line for each answer: file, start, end, label, answer, asked, score. The label of
"yes" is the class that is heard, that of "no" and "skip" is empty, and ``asked`` has the class of
the question. `jaxtrain fit` and `jaxtrain index` read it.
"""

import dataclasses
import io
import os
import pathlib
import threading
from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import soundfile

from jaxtrain.workloads.bird import inference
from jaxtrain.workloads.bird.inference import InferenceError, detections, embeddings
from jaxtrain.workloads.bird.inference.neighbours import Neighbours
from loaders import _rust
from loaders.audio import spectrogram
from loaders.audio.front_end import RATES, FrontEnd
from loaders.audio.recordings import columns, joined_files, lines, sources, tables
from loaders.audio.recordings.annotations import Errors
from loaders.audio.recordings.find import Finder
from loaders.io import atomic_write, checks, files

ANSWERS = ("yes", "no", "skip")
CONTEXT = 1.0  # [s] of sound before and after a window
LONGEST = 60.0  # [s] of a window that is played and drawn
RATE = 48_000  # [Hz] that a browser is given at most
PICTURE = 32_000  # [Hz] of a picture's sound, at least: lower rates would leave its low bands empty
NEIGHBOURS = 6
# Formats of which a part is read by a seek: a recording may be a day long.
SEEKABLE = (".wav", ".flac", ".ogg", ".oga", ".mp3", ".rf64", ".w64")
MAX_RECORDING = 4 << 30  # [bytes] of a recording that is decoded whole
MAX_NAME = 200  # [characters] of a class


class Item(NamedTuple):
    """A window to judge. Times in s."""

    path: str  # absolute
    name: str  # below the root
    start: float
    end: float
    label: str  # the claimed class, or ""
    score: float  # nan = none
    clock: str


class Answer(NamedTuple):
    """A line of the table of answers."""

    file: str
    start: str
    end: str
    label: str  # the class that is heard, or ""
    answer: str  # of `ANSWERS`
    asked: str  # the class of the question
    score: str

    @property
    def question(self) -> "Question":
        return Question(self.file, self.start, self.end, self.asked)


class Question(NamedTuple):
    """A window and its class, as the table of answers names them."""

    file: str
    start: str
    end: str
    label: str


class Session:
    """The windows of a table in their order, and the answers. Safe for several threads."""

    def __init__(
        self, items: Sequence[Item], out: pathlib.Path, neighbours: Neighbours | None = None
    ):
        """Read earlier answers from ``out``. Raises InferenceError."""
        self.items = items
        self._out = out
        self._neighbours = neighbours
        self._lock = threading.Lock()
        self._questions = {self._question(item) for item in items}
        self._by_recording: dict[str, list[int]] = defaultdict(list)
        for number in sorted(range(len(items)), key=self._start):
            self._by_recording[items[number].name].append(number)
        self._answers: dict[Question, Answer] = {}
        if out.exists():
            table = tables.read(out)
            if table.columns != list(Answer._fields):
                raise InferenceError(f"--out {out} is no table of answers; name a new file")
            for _, row in table.rows():
                earlier = Answer(**row)
                self._answers[earlier.question] = earlier
        labels = {item.label for item in items}
        labels |= {answer.label for answer in self._answers.values()}
        self.labels = sorted(labels - {""})

    @staticmethod
    def _question(item: Item) -> Question:
        start = detections.seconds(item.start)
        end = detections.seconds(item.end)
        return Question(item.name, start, end, item.label)

    def _start(self, number: int) -> float:
        return self.items[number].start

    def about(self, number: int) -> dict[str, Any]:
        """Return the content of the page for a window. Raises IndexError."""
        item = self.items[number]
        nearest_first = sorted(
            self._by_recording[item.name], key=lambda i: abs(self._start(i) - item.start)
        )
        nearby = sorted(nearest_first[1 : NEIGHBOURS + 1], key=self._start)
        similar = self._neighbours.near(number, NEIGHBOURS) if self._neighbours else ()
        return {
            **self._brief(number),
            "file": item.name,
            "end": item.end,
            "clock": item.clock,
            "nearby": [self._brief(i) for i in nearby],
            "similar": [{**self._brief(i), "cosine": round(cosine, 3)} for i, cosine in similar],
        }

    def _brief(self, number: int) -> dict[str, Any]:
        item = self.items[number]
        answer = self._answers.get(self._question(item))
        return {
            "number": number,
            "start": item.start,
            "label": item.label,
            "score": None if np.isnan(item.score) else item.score,
            "answer": answer.answer if answer else "",
            "said": answer.label if answer else "",
        }

    def counts(self) -> dict[str, int]:
        """Return the number of windows, and of those with each answer."""
        with self._lock:
            answered = self._questions & self._answers.keys()
            answers = [self._answers[question].answer for question in answered]
        counts = {kind: answers.count(kind) for kind in ANSWERS}
        return {"items": len(self.items), **counts}

    def first_open(self) -> int:
        """Return the first window without an answer, or the last one."""
        with self._lock:
            for number, item in enumerate(self.items):
                if self._question(item) not in self._answers:
                    return number
        return len(self.items) - 1

    def answer(self, number: int, answer: str, label: str = "") -> None:
        """Note an answer and write the table. Raises InferenceError, IndexError, OSError."""
        if answer not in ANSWERS:
            raise InferenceError(
                f"the answer is {answer[:20]!r}; expected one of: {', '.join(ANSWERS)}"
            )
        label = " ".join(label.split())
        if len(label) > MAX_NAME or any(ord(c) < 32 for c in label):
            raise InferenceError(f"the class has {len(label)} characters; use at most {MAX_NAME}")
        if label and lines.labels(label, "") != (label,):
            raise InferenceError(
                f"the class {label[:MAX_NAME]!r} would be read as"
                f" {', '.join(lines.labels(label, '')) or 'none'}; write it in another way"
            )
        item = self.items[number]
        heard = ""
        if answer == "yes":
            heard = label or item.label
            if not heard:
                raise InferenceError("nothing says which class it is; name one")
        question = self._question(item)
        row = Answer(
            file=question.file,
            start=question.start,
            end=question.end,
            label=heard,
            answer=answer,
            asked=question.label,
            score="" if np.isnan(item.score) else f"{item.score:.4f}",
        )
        with self._lock:
            earlier = self._answers.pop(question, None)
            self._answers[question] = row
            try:
                atomic_write.write_csv(self._out, [Answer._fields, *self._answers.values()])
            except OSError:
                self._answers.pop(question)
                if earlier:
                    self._answers[question] = earlier
                raise
            if heard and heard not in self.labels:
                self.labels = sorted([*self.labels, heard])


def read(
    source: str,
    *,
    root: str = "",
    order: str = "table",
    label: str = "",
    reading: columns.Options | None = None,
    errors: Errors | None = None,
) -> list[Item]:
    """Return the windows of a table with file, start, end and label, in an order.

    It may be one of `jaxtrain detect` or `jaxtrain search`.

    ``root``: the folder that every recording must lie below; empty: of a search, that of its
    embeddings; else the nearest that holds all. ``label``: of these alone, or the class of all rows
    of a table without labels. ``errors`` takes lines without a window. Raises InferenceError: a
    table without the columns, or that names recordings that are not there or not below the root.
    """
    path = files.expanded(source)
    if path.is_dir():
        root = root or sources.root_of(path)
        path = path / "detections.csv"
    if not path.is_file():
        raise InferenceError(
            f"{path} does not exist; name a folder of `jaxtrain detect`, or a table of `jaxtrain"
            " search`"
        )
    errors = errors or Errors()
    reading = dataclasses.replace(reading or columns.Options(), optional=bool(label))
    text, encoding = tables.read_text(path, reading.encoding)
    table = tables.Table(path, text, encoding)
    layout = columns.find(table, reading)
    if not layout.by_meaning["file"] or not layout.by_meaning["start"]:
        raise InferenceError(
            f"{path} has the columns {', '.join(table.columns)[:200]}; expected file, start and end"
        )
    places = _Places(path, root)
    items = []
    wrong_lines = []
    read_lines = [line for line in lines.read(layout, reading, errors) if not line.is_dropped]

    def seconds(line: lines.Line) -> float:
        folder = layout.text(line.row, "embeddings")
        return joined_files.seconds_of(places.find(line.file, folder, line.where))

    joined_files.refuse(layout, reading, read_lines, seconds)
    for line in read_lines:
        if line.start is None or line.end is None or not 0 <= line.start < line.end:
            wrong_lines.append(
                f"{line.where}: the times {line.start} to {line.end} s are no part of a recording"
            )
            continue
        recording = places.find(line.file, layout.text(line.row, "embeddings"), line.where)
        clock = layout.text(line.row, "clock")
        score = detections.number_of(layout.text(line.row, "score"))
        for name in line.labels or (label,):
            if not label or name == label:
                items.append(Item(recording, "", line.start, line.end, name, score, clock))
    if wrong_lines:
        rest = checks.more(len(wrong_lines))
        raise InferenceError(f"{wrong_lines[0]}{rest}", listed=wrong_lines)
    inference.refuse(errors)
    if not items:
        of_class = f" of the class {label!r}" if label else ""
        raise InferenceError(f"{path} has no line{of_class} to review")
    recordings = sorted({item.path for item in items})
    top = places.top(recordings)
    for recording in recordings:
        _refuse_outside(recording, top, path)
    below_top = []
    for item in items:
        name = os.path.relpath(item.path, top).replace(os.sep, "/")
        below_top.append(item._replace(name=name))
    return ordered(below_top, order)


class _Places:
    """Finds the recordings that a table names."""

    def __init__(self, table: pathlib.Path, root: str):
        self._table = table
        self._root = root
        self._roots: dict[str, str] = {}  # by folder of embeddings
        self._finders: dict[str, Finder] = {}  # by root

    def find(self, file: str, embeddings_folder: str, where: str) -> str:
        """Return the path of a recording. Raises InferenceError."""
        root = self._root
        if not root and embeddings_folder:
            if embeddings_folder not in self._roots:
                self._roots[embeddings_folder] = embeddings.read(embeddings_folder).root
            root = self._roots[embeddings_folder]
        folder = os.path.abspath(root or self._table.parent)
        path = os.path.normpath(os.path.join(folder, file))
        if os.path.isfile(path):
            return path
        if folder not in self._finders:
            self._finders[folder] = Finder(pathlib.Path(folder), Errors())
        return self._finders[folder].find(file, self._table, where) or path

    def top(self, recordings: Sequence[str]) -> str:
        """Return the folder that every recording must lie below."""
        if not self._root and not self._roots:
            return os.path.commonpath([os.path.dirname(path) for path in recordings])
        root = self._root
        roots = set(self._roots.values()) - {""}
        if not root and len(roots) == 1:
            root = roots.pop()
        return os.path.abspath(files.expanded(root) or ".")


def _refuse_outside(recording: str, top: str, table: pathlib.Path) -> None:
    real_top = os.path.join(os.path.realpath(top), "")
    if not os.path.realpath(recording).startswith(real_top):
        raise InferenceError(
            f"{table} names {recording}, which is not below {top}; name the folder of the"
            " recordings: --root"
        )
    if not os.path.isfile(recording):
        raise InferenceError(
            f"{table} names {recording}, which is not there; name the folder of the recordings:"
            " --root"
        )


def ordered(items: Sequence[Item], order: str) -> list[Item]:
    """Return windows in an order: as they are, best, least certain, or of recordings in turn."""
    if order == "table":
        return list(items)
    if order == "best":
        return sorted(items, key=lambda item: -np.nan_to_num(item.score))
    least_certain_first = sorted(items, key=lambda item: abs(np.nan_to_num(item.score) - 0.5))
    if order == "uncertain":
        return least_certain_first
    n_earlier: Counter[tuple[str, str]] = Counter()
    turns = []
    for item in least_certain_first:
        turns.append(n_earlier[item.label, item.name])
        n_earlier[item.label, item.name] += 1
    return [least_certain_first[i] for i in np.argsort(turns, kind="stable")]


def wave(item: Item) -> tuple[np.ndarray, int, float]:
    """Return sound around a window, float32 [n], rate, and begin [s]. Raises InferenceError."""
    try:
        if item.path.lower().endswith(SEEKABLE):
            with soundfile.SoundFile(item.path) as file:
                rate = file.samplerate
                first, length = _part(item, rate, file.frames)
                file.seek(first)
                x = file.read(length, dtype="float32", always_2d=True).mean(1)
        else:
            content = files.read(pathlib.Path(item.path), most=MAX_RECORDING)
            _, rate, n_samples = spectrogram.decode(content, 0, 0)
            first, length = _part(item, rate, n_samples)
            x = spectrogram.decode(content, first, length)[0]
    except (OSError, ValueError, RuntimeError) as error:
        raise InferenceError(f"{item.name}: {str(error)[:200]}") from error
    return np.nan_to_num(x).astype(np.float32), rate, item.start - first / rate


def _part(item: Item, rate: int, n_samples: int) -> tuple[int, int]:
    """Return the first sample and the number of samples to show. Raises ValueError."""
    end = min(item.end, item.start + LONGEST)
    first = max(0, round((item.start - CONTEXT) * rate))
    last = min(n_samples, round((end + CONTEXT) * rate))
    if first >= last:
        raise ValueError(
            f"it has {n_samples / rate:.3f} s, and the window begins at {item.start:g} s"
        )
    return first, last - first


def sound(item: Item) -> bytes:
    """Return a WAV of 16 bits of `wave`, as loud as it can be. Raises InferenceError."""
    x, rate, _ = wave(item)
    if rate > RATE:
        x = _rust.resample(np.ascontiguousarray(x), rate, RATE)
        rate = RATE
    loudest = float(np.abs(x).max(initial=0))
    x = 0.9 * x / max(loudest, 1e-4)
    file = io.BytesIO()
    soundfile.write(file, x, rate, format="WAV", subtype="PCM_16")
    return file.getvalue()


def picture(item: Item) -> bytes:
    """Return a PNG of the log-mel spectrogram of `wave`, with lines at the window's begin and end.

    It has all frequencies, also those that the encoder does not see. Raises InferenceError.
    """
    from PIL import Image

    x, rate, begin = wave(item)
    settings = FrontEnd(sample_rate=min(max(rate, PICTURE), RATES[1]))
    seconds = max(len(x) / rate, 2 * settings.window_ms / 1e3)
    n_frames = settings.n_clip_frames(round(seconds * settings.sample_rate))
    mel = spectrogram.front_end(x, rate, clip_seconds=seconds, n_frames=n_frames, of=settings)
    low, high = np.percentile(mel, [20, 99.7])
    loudness = np.clip((mel - low) / max(high - low, 1e-3), 0, 1)
    grey = (255 * (1 - loudness.T[::-1])).astype(np.uint8)
    width = grey.shape[1]
    for time in (begin, begin + min(item.end - item.start, LONGEST)):
        column = round(time * settings.sample_rate / settings.hop)
        if 0 < column < width - 1:
            grey[::4, column] = 128
    size = (min(1200, max(300, 2 * width)), 256)
    file = io.BytesIO()
    Image.fromarray(grey).resize(size).save(file, "PNG")
    return file.getvalue()
