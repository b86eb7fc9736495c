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
from loaders.audio.recordings import columns, lines, sources, tables
from loaders.audio.recordings.annotations import Errors
from loaders.audio.recordings.find import Finder
from loaders.io import atomic_write, files

COLUMNS = ("file", "start", "end", "label", "answer", "asked", "score")
ANSWERS = ("yes", "no", "skip")
CONTEXT = 1.0  # [s] of sound before and after a window
LONGEST = 60.0  # [s] of a window that is played and drawn
RATE = 48_000  # [Hz] that a browser is given at most
PICTURE = 32_000  # [Hz] of a picture's sound, at least: lower rates would leave its low bands empty
NEIGHBOURS = 6
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


class Session:
    """The windows of a table in their order, and the answers. Safe for several threads."""

    def __init__(
        self, items: Sequence[Item], out: pathlib.Path, neighbours: Neighbours | None = None
    ):
        """Read earlier answers from ``out``. Raises InferenceError."""
        self.items, self._out, self._neighbours = items, out, neighbours
        self._lock = threading.Lock()
        self._answers: dict[tuple[str, str, str, str], dict[str, str]] = {}
        self._at = {self._key(item): i for i, item in enumerate(items)}
        self._by_recording: dict[str, list[int]] = defaultdict(list)
        for i in sorted(range(len(items)), key=lambda i: items[i].start):
            self._by_recording[items[i].name].append(i)
        if out.exists():
            table = tables.read(out)
            if table.columns != list(COLUMNS):
                raise InferenceError(f"--out {out} is no table of answers; name a new file")
            for _, row in table.rows():
                self._answers[row["file"], row["start"], row["end"], row["asked"]] = dict(row)
        named = [item.label for item in items] + [each["label"] for each in self._answers.values()]
        self.labels = sorted(set(named) - {""})

    @staticmethod
    def _key(item: Item) -> tuple[str, str, str, str]:
        return item.name, detections.seconds(item.start), detections.seconds(item.end), item.label

    def about(self, number: int) -> dict[str, Any]:
        """Return the content of the page for a window. Raises IndexError."""
        item = self.items[number]
        nearby = sorted(
            self._by_recording[item.name], key=lambda i: abs(self.items[i].start - item.start)
        )
        similar = self._neighbours.near(number, NEIGHBOURS) if self._neighbours else ()
        return {
            **self._brief(number),
            "file": item.name,
            "end": item.end,
            "clock": item.clock,
            "nearby": [
                self._brief(i)
                for i in sorted(nearby[1 : NEIGHBOURS + 1], key=lambda i: self.items[i].start)
            ],
            "similar": [{**self._brief(i), "cosine": round(cosine, 3)} for i, cosine in similar],
        }

    def _brief(self, number: int) -> dict[str, Any]:
        item = self.items[number]
        found = self._answers.get(self._key(item), {})
        return {
            "number": number,
            "start": item.start,
            "label": item.label,
            "score": None if np.isnan(item.score) else item.score,
            "answer": found.get("answer", ""),
            "said": found.get("label", ""),
        }

    def counts(self) -> dict[str, int]:
        with self._lock:
            kinds = [self._answers[key]["answer"] for key in self._at if key in self._answers]
        return {"items": len(self.items), **{kind: kinds.count(kind) for kind in ANSWERS}}

    def first_open(self) -> int:
        """Return the first window without an answer, or the last one."""
        with self._lock:
            return next(
                (i for i, item in enumerate(self.items) if self._key(item) not in self._answers),
                len(self.items) - 1,
            )

    def answer(self, number: int, answer: str, label: str = "") -> None:
        """Note an answer and write the table. Raises InferenceError, IndexError, OSError."""
        if answer not in ANSWERS:
            raise InferenceError(
                f"the answer is {answer[:20]!r}; expected one of: {', '.join(ANSWERS)}"
            )
        label = " ".join(label.split())
        if len(label) > MAX_NAME or any(ord(c) < 32 for c in label):
            raise InferenceError(f"the class has {len(label)} characters; use at most {MAX_NAME}")
        item = self.items[number]
        named = (label or item.label) if answer == "yes" else ""
        if answer == "yes" and not named:
            raise InferenceError("nothing says which class it is; name one")
        score = "" if np.isnan(item.score) else f"{item.score:.4f}"
        row = dict(
            zip(COLUMNS, (*self._key(item)[:3], named, answer, item.label, score), strict=True)
        )
        with self._lock:
            before = self._answers.pop(self._key(item), None)
            self._answers[self._key(item)] = row
            try:
                rows = [[each[name] for name in COLUMNS] for each in self._answers.values()]
                atomic_write.write_csv(self._out, [COLUMNS, *rows])
            except OSError:
                self._answers.pop(self._key(item))
                if before:
                    self._answers[self._key(item)] = before
                raise
            if named and named not in self.labels:
                self.labels = sorted([*self.labels, named])


def read(
    given: str,
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
    path = files.expanded(given)
    if path.is_dir():
        root = root or sources.root_of(path)
        path = path / "detections.csv"
    if not path.is_file():
        raise InferenceError(
            f"{path} does not exist; name a folder of `jaxtrain detect`, or a table of `jaxtrain"
            " search`"
        )
    reading, errors = reading or columns.Options(), errors or Errors()
    reading = dataclasses.replace(reading, optional=bool(label))
    table = tables.Table(path, *tables.read_text(path, reading.encoding))
    layout = columns.find(table, reading)
    if not all(layout.used[meaning] for meaning in ("file", "start")):
        raise InferenceError(
            f"{path} has the columns {', '.join(table.columns)[:200]}; expected file, start and end"
        )
    roots: dict[str, str] = {}
    finders: dict[str, Finder] = {}
    rows = []
    for line in lines.read(layout, reading, errors):
        if line.start is None or line.end is None or not 0 <= line.start < line.end:
            raise InferenceError(
                f"{line.where}: the times {line.start} to {line.end} s are no part of a recording"
            )
        folder, of = root, layout.text(line.row, "embeddings")
        if not folder and of:
            if of not in roots:
                roots[of] = embeddings.read(of).root
            folder = roots[of]
        folder = os.path.abspath(folder or path.parent)
        place = os.path.normpath(os.path.join(folder, line.file))
        if not os.path.isfile(place):
            finder = finders.setdefault(folder, Finder(pathlib.Path(folder), Errors()))
            place = finder.find(line.file, path, line.where) or place
        clock, score = (
            layout.text(line.row, "clock"),
            detections.number_of(layout.text(line.row, "score")),
        )
        names = [name for name in line.labels or (label,) if not label or name == label]
        rows += [(place, line.start, line.end, name, score, clock) for name in names]
    inference.refuse(errors)
    if not rows:
        raise InferenceError(
            f"{path} has no line{f' of the class {label!r}' if label else ''} to review"
        )
    tops = set(roots.values()) - {""}
    top = os.path.abspath(files.expanded(root or (tops.pop() if len(tops) == 1 else "")) or ".")
    if not root and not roots:
        top = os.path.commonpath([os.path.dirname(row[0]) for row in rows])
    for place in sorted({row[0] for row in rows}):
        inside = os.path.join(os.path.realpath(top), "")
        if not os.path.realpath(place).startswith(inside):
            raise InferenceError(
                f"{path} names {place}, which is not below {top}; name the folder of the"
                " recordings: --root"
            )
        if not os.path.isfile(place):
            raise InferenceError(
                f"{path} names {place}, which is not there; name the folder of the recordings:"
                " --root"
            )
    items = [
        Item(row[0], os.path.relpath(row[0], top).replace(os.sep, "/"), *row[1:]) for row in rows
    ]
    return ordered(items, order)


def ordered(items: Sequence[Item], order: str) -> list[Item]:
    """Return windows in an order: as they are, best, least certain, or of recordings in turn."""
    if order == "table":
        return list(items)
    if order == "best":
        return sorted(items, key=lambda item: -np.nan_to_num(item.score))
    unsure = sorted(items, key=lambda item: abs(np.nan_to_num(item.score) - 0.5))
    if order == "uncertain":
        return unsure
    seen: Counter[tuple[str, str]] = Counter()
    turns = []
    for item in unsure:
        turns.append(seen[item.label, item.name])
        seen[item.label, item.name] += 1
    return [unsure[i] for i in np.argsort(turns, kind="stable")]


def wave(item: Item) -> tuple[np.ndarray, int, float]:
    """Return sound around a window, float32 [n], rate, and begin [s]. Raises InferenceError."""
    try:
        if item.path.lower().endswith((".wav", ".flac", ".ogg", ".oga", ".mp3", ".rf64", ".w64")):
            # by its seek: a recording may be a day long
            with soundfile.SoundFile(item.path) as file:
                rate, n = file.samplerate, file.frames
                first, length = _part(item, rate, n)
                file.seek(first)
                x = file.read(length, dtype="float32", always_2d=True).mean(1)
        else:
            content = files.read(pathlib.Path(item.path), most=MAX_RECORDING)
            _, rate, n = spectrogram.decode(content, 0, 0)
            first, length = _part(item, rate, n)
            x = spectrogram.decode(content, first, length)[0]
    except (OSError, ValueError, RuntimeError) as error:
        raise InferenceError(f"{item.name}: {str(error)[:200]}") from error
    return np.nan_to_num(x).astype(np.float32), rate, item.start - first / rate


def _part(item: Item, rate: int, n: int) -> tuple[int, int]:
    first = max(0, round((item.start - CONTEXT) * rate))
    last = min(n, round((min(item.end, item.start + LONGEST) + CONTEXT) * rate))
    if first >= last:
        raise ValueError(f"it has {n / rate:.3f} s, and the window begins at {item.start:g} s")
    return first, last - first


def sound(item: Item) -> bytes:
    """Return a WAV of 16 bits of `wave`, as loud as it can be. Raises InferenceError."""
    x, rate, _ = wave(item)
    if rate > RATE:
        x, rate = _rust.resample(np.ascontiguousarray(x), rate, RATE), RATE
    file = io.BytesIO()
    soundfile.write(
        file,
        0.9 * x / max(float(np.abs(x).max(initial=0)), 1e-4),
        rate,
        format="WAV",
        subtype="PCM_16",
    )
    return file.getvalue()


def picture(item: Item) -> bytes:
    """Return a PNG of the log-mel spectrogram of `wave`, with lines at the window's begin and end.

    It has all frequencies, also those that the encoder does not see. Raises InferenceError.
    """
    from PIL import Image

    x, rate, begins = wave(item)
    of = FrontEnd(sample_rate=min(max(rate, PICTURE), RATES[1]))
    seconds = max(len(x) / rate, 2 * of.window_ms / 1e3)
    n_frames = of.n_clip_frames(round(seconds * of.sample_rate))
    mel = spectrogram.front_end(x, rate, clip_seconds=seconds, n_frames=n_frames, of=of)
    low, high = np.percentile(mel, [20, 99.7])
    grey = np.clip((mel - low) / max(high - low, 1e-3), 0, 1)
    grey = (255 * (1 - grey.T[::-1])).astype(np.uint8)
    for at in (begins, begins + min(item.end - item.start, LONGEST)):
        column = round(at * of.sample_rate / of.hop)
        if 0 < column < grey.shape[1] - 1:
            grey[::4, column] = 128
    file = io.BytesIO()
    Image.fromarray(grey).resize((min(1200, max(300, 2 * grey.shape[1])), 256)).save(file, "PNG")
    return file.getvalue()
