"""Annotations to the rows of an index: checked, cut into windows, split."""

import bisect
import dataclasses
import hashlib
import math
import os
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

import numpy as np

from loaders.audio.recordings import grid, recorders, values
from loaders.audio.recordings.annotations import Annotation, Errors
from loaders.audio.recordings.class_names import Classes
from loaders.audio.recordings.headers import Header, same_bytes, same_sound
from loaders.base import DataError
from loaders.io import checks


class Part(NamedTuple):
    """A part of a recording that becomes a row, or one for each channel."""

    start: float
    end: float
    labels: tuple[int, ...]
    low: float | None
    high: float | None
    channel: int | None  # as a table states it


ROUNDING = 1e-3  # [s] by which a start may lie before its recording
TOLERANCE = 0.05  # [s] by which an end may lie after the recording's: tables round
SPLITS = ("recording", "site", "date", "column", "folder")
SAME = 0.001 + 1e-9  # [s] by which the times of one event in two tables differ at most
PARTIAL = ("channel", "low", "high")  # that one of two tables may leave out
SHORTEST = 0.001  # [s] of windows, and from one to the next


@dataclasses.dataclass(frozen=True)
class Options:
    """How annotations become rows."""

    # [s] of the windows that recordings are cut into; 0 = a row for each annotation
    windows: float = 0.0
    hop: float = 0.0  # [s] from window to window; 0 = their length
    # [s] of an event in a window that gives it its label, or the whole of a shorter event
    min_overlap: float = 0.25
    empty: bool = True  # [bool] windows without an event are rows, too
    channels: str = "mean"  # "mean", "each" as a row, "table": as it says, or a number
    min_count: int = 1  # [events] of a class, at least
    split: str = ""  # how recordings are split: see `Splitter`
    seed: int = 0  # of the split


@dataclasses.dataclass(slots=True)
class Row:
    """A row of the index. Times in s, frequencies in Hz."""

    path: str  # relative to the root
    start: float
    end: float
    channel: int  # -1: the mean
    labels: tuple[int, ...]
    low: float | None
    high: float | None
    header: Header
    about: Mapping[str, str]


@dataclasses.dataclass
class Plan:
    """The contents of an index: checked annotations by recording, in order, with its split."""

    names: list[str]  # of the classes
    events: dict[str, list[Annotation]]  # by the absolute path of the recording
    splits: dict[str, str]  # of each recording
    headers: Mapping[str, Header]
    root: str
    options: Options

    def rows(self, split: str) -> Iterator[Row]:
        """Yield the rows of a split, by recording and time."""
        numbers = {name: number for number, name in enumerate(self.names)}
        for path in sorted(self.events, key=lambda path: os.path.relpath(path, self.root)):
            if self.splits[path] == split:
                header = self.headers[path]
                events = self.events[path]
                yield from _rows(path, events, header, numbers, self.root, self.options)


class Splitter:
    """Which split a recording is in.

    recording=0.2           a fifth, by a hash of names, is "test"; recording=test:0.2,valid:0.1
    site=0.2                the same for whole sites
    date=2024-05-01         from that day on, "test"
    column=NAME             a table's column names the split; column=fold:5: rows with 5 are "test"
    folder                  the first folder of a recording's name is its split
    """

    def __init__(self, text: str, seed: int):
        self.kind, _, self.value = text.partition("=")
        self.seed = seed
        self.column = ""  # that names the split; empty: none
        # its value that is the test split; empty: it holds names of splits
        self.test_value = ""
        if self.kind == "column":
            self.column, _, test_value = self.value.partition(":")
            self.test_value = values.split_of(test_value)
        if text and self.kind not in SPLITS:
            raise DataError(
                f"--split {text!r}: expected one of {', '.join(SPLITS)}; for example recording=0.2"
            )
        self.shares: list[tuple[str, float]] = []
        if self.kind in ("recording", "site"):
            self.shares = self._parsed_shares(text)
        if self.kind == "date" and not re.fullmatch(r"\d{4}-\d\d-\d\d", self.value):
            raise DataError(f"--split {text!r}: expected a day, for example date=2024-05-01")
        if self.kind == "column" and not self.value:
            raise DataError(f"--split {text!r} names no column; write column=NAME")

    def _parsed_shares(self, text: str) -> list[tuple[str, float]]:
        shares = []
        for part in self.value.split(","):
            name, _, share = part.rpartition(":")
            try:
                shares.append((name or "test", float(share)))
            except ValueError:
                raise DataError(
                    f"--split {text!r}: {part!r} is no share; write {self.kind}=0.2 or test:0.2"
                ) from None
        are_shares = all(0 < share < 1 for _, share in shares)
        if not are_shares or sum(share for _, share in shares) >= 1:
            raise DataError(
                f"--split {text!r}: shares must lie in (0, 1), and leave some to train on"
            )
        return shares

    def refuse_missed(self, stated: Iterable[str]) -> None:
        """Raise DataError if no line has the value that is the test split."""
        stated_values = sorted(set(stated))
        if self.test_value and stated_values and self.test_value not in stated_values:
            raise DataError(
                f"--split column={self.value}: no line has {self.test_value!r};"
                f" {checks.expected(self.test_value, stated_values)}"
            )

    def of(self, path: str, stated: str, about: Mapping[str, str]) -> str | None:
        """Return the split of a recording by its name, or None if the value is unknown."""
        if self.kind == "column":
            if not self.test_value or not stated:
                return stated or None
            return "test" if stated == self.test_value else "train"
        if self.kind == "folder":
            folder, slash, _ = path.partition("/")
            return folder if slash else None
        if self.kind == "date":
            if "date" not in about:
                return None
            return "test" if about["date"] >= self.value else "train"
        if self.kind in ("recording", "site"):
            key = path if self.kind == "recording" else about.get("site")
            return None if key is None else self._drawn(key)
        return stated or "train"

    def _drawn(self, key: str) -> str:
        """Draw a split by the shares, as a function of the seed and a name."""
        digest = hashlib.blake2b(f"{self.seed}:{key}".encode(), digest_size=8).digest()
        draw = int.from_bytes(digest, "big") / 2**64
        for split, share in self.shares:
            if draw < share:
                return split
            draw -= share
        return "train"


def plan(
    annotations: Iterable[Annotation],
    headers: Mapping[str, Header],
    classes: Classes | None,
    root: str,
    options: Options,
    splitter: Splitter,
    errors: Errors,
) -> Plan:
    """Check annotations, and decide classes and splits. Errors are counted.

    Raises DataError: recordings whose decisive value for the split is unknown.
    """
    events, without_events = _checked_by_recording(
        annotations, headers, classes, root, options, errors
    )
    for path, annotation in without_events.items():
        if not events[path]:
            errors.add("no-events", annotation.where)
    events = {
        path: _without_doubles(path, of_recording, options, errors)
        for path, of_recording in events.items()
    }
    for group in same_bytes({path: headers[path] for path in events}):
        if not errors.add("duplicate-content", f"{', '.join(group[:4])} hold the same bytes"):
            for path in group[1:]:
                events.pop(path, None)
    if options.hop > options.windows:
        _count_between_windows(events, headers, options, errors)
    names = _class_names(events, classes, options, errors)
    known_names = set(names)
    splits: dict[str, str] = {}
    events_of_rows: dict[str, list[Annotation]] = {}
    without_value = []  # recordings whose decisive value for the split is unknown
    for path, of_recording in events.items():
        name = os.path.relpath(path, root).replace(os.sep, "/")
        about = headers[path].about
        if of_recording:
            about = {**about, **of_recording[0].about}
        _note_other_day(path, of_recording, errors)
        annotations_of_split: dict[str, list[Annotation]] = {}
        if not of_recording and path in without_events:
            stated = without_events[path].split
            annotations_of_split[splitter.of(name, stated, about) or ""] = []
        anywhere = []  # lines with errors, which are of the splits that the others state
        for annotation in of_recording:
            if annotation.unanswered and not annotation.split:
                anywhere.append(annotation)
                continue
            split = splitter.of(name, annotation.split, about) or ""
            annotations_of_split.setdefault(split, []).append(annotation)
        for annotations_there in annotations_of_split.values():
            annotations_there += anywhere
        if annotations_of_split.pop("", None) is not None:
            without_value.append(path)
        if len(annotations_of_split) > 1:
            text = f"{path} is in the splits {', '.join(sorted(annotations_of_split))}"
            if not errors.add("leaking-recording", text):
                annotations_of_split.pop("train", None)
        for annotation in of_recording:
            annotation.labels = tuple(label for label in annotation.labels if label in known_names)
        # A recording in several splits that is kept is there in each of them.
        for split in sorted(annotations_of_split):
            key = path if len(annotations_of_split) == 1 else f"{path}\0{split}"
            events_of_rows[key] = annotations_of_split[split]
            splits[key] = split
    if without_value:
        _refuse_without_value(splitter.kind, without_value)
    for split in sorted(set(splits.values())):
        if not re.fullmatch(r"[A-Za-z]\w*", split):
            expected = "expected letters, digits and _: for folds, use --split column=fold:5"
            raise DataError(f"the split {split!r} is no name; {expected}")
    splitter.refuse_missed(
        annotation.split for of_recording in events.values() for annotation in of_recording
    )
    _leave_out_leaking_sound(events_of_rows, splits, headers, errors)
    headers_of_rows = {key: headers[key.partition("\0")[0]] for key in events_of_rows}
    return Plan(names, events_of_rows, splits, headers_of_rows, root, options)


def _leave_out_leaking_sound(
    events_of_rows: dict[str, list[Annotation]],
    splits: dict[str, str],
    headers: Mapping[str, Header],
    errors: Errors,
) -> None:
    """Count recordings of other splits' sound in other bytes, and drop those refused from train."""
    split_of = {path: split for path, split in splits.items() if "\0" not in path}
    headers_of = {path: headers[path] for path in split_of}
    for group in same_sound(headers_of, split_of):
        if len({split_of[path] for path in group}) == 1:
            continue
        listed = ", ".join(f"{path} ({split_of[path]})" for path in group[:4])
        if errors.add("leaking-recording", f"{listed} have the same sound"):
            continue
        for path in group:
            if split_of[path] == "train":
                del events_of_rows[path]
                del splits[path]


def _checked_by_recording(
    annotations: Iterable[Annotation],
    headers: Mapping[str, Header],
    classes: Classes | None,
    root: str,
    options: Options,
    errors: Errors,
) -> tuple[dict[str, list[Annotation]], dict[str, Annotation]]:
    """Return valid annotations by recording, and recordings that a table says have no event."""
    events: dict[str, list[Annotation]] = defaultdict(list)
    without_events: dict[str, Annotation] = {}
    left_out: set[str] = set()  # recordings that are counted once
    for annotation in annotations:
        path = annotation.path
        header = headers.get(path)
        problem = _recording_problem(path, header, root, options)
        if problem and path not in left_out:
            left_out.add(path)
            errors.add(*problem)
        if problem or header is None:
            continue
        if annotation.nothing:
            without_events.setdefault(path, annotation)
            events[path] += []
            continue
        checked = _checked(annotation, header, classes, options, errors)
        if checked:
            events[path].append(checked)
    return _without_unanswered(events, options), without_events


def _without_unanswered(
    events: Mapping[str, list[Annotation]], options: Options
) -> dict[str, list[Annotation]]:
    """Remove unanswered lines, except with windows, and recordings that have no other lines."""
    answered = {}
    for path, annotations in events.items():
        of_recording = [annotation for annotation in annotations if not annotation.unanswered]
        if annotations and not of_recording:
            continue
        answered[path] = annotations if options.windows else of_recording
    return answered


def _recording_problem(
    path: str, header: Header | None, root: str, options: Options
) -> tuple[str, str] | None:
    """Return the kind of error of a recording, and a text, or None."""
    if not path.startswith(os.path.join(root, "")):
        return "outside-root", f"{path} is not below {root}"
    channel = options.channels
    if header is not None and channel.isdecimal() and int(channel) >= header.channels:
        return "bad-row", f"{path} has {header.channels} channels, and no channel {channel} from 0"
    return None


def _note_other_day(path: str, annotations: Iterable[Annotation], errors: Errors) -> None:
    """Count the first line whose date is not the one in the recording's name."""
    name = os.path.basename(path)
    for annotation in annotations:
        stated = annotation.about.get("date", "")
        day = recorders.other_day(name, stated)
        if day:
            text = f"{annotation.where} says {stated}, and the name {name} {day}"
            errors.add("other-time", text)
            return


def _refuse_without_value(kind: str, paths: Sequence[str]) -> NoReturn:
    values = {"site": "site", "date": "date", "column": "split in its column", "folder": "folder"}
    raise DataError(
        f"--split {kind}: {len(paths)} recordings have no {values[kind]}, for example {paths[0]}"
        f"{checks.more(len(paths))}",
        listed=paths,
    )


def leads_out(path: str, root: str) -> str:
    """Return the target of a path below ``root`` if links lead out of there, else ""."""
    target = os.path.realpath(path)
    return "" if target.startswith(os.path.join(os.path.realpath(root), "")) else target


def _checked(
    annotation: Annotation,
    header: Header,
    classes: Classes | None,
    options: Options,
    errors: Errors,
) -> Annotation | None:
    """Return an annotation with its classes, inside its recording, or None if it is wrong.

    A line that is dropped although it says where something is, is unanswered there: a window that
    holds it is not one without a class.
    """
    where = annotation.where or annotation.path
    start, end = annotation.start, annotation.end
    if start is not None and end is not None:
        times = f"{where}: [{start:g}, {end:g}) s"
        if end <= start:
            moment = (
                ""
                if end < start
                else "; a moment needs a length: --end-column none --duration-column 1s"
            )
            errors.add("reversed-times", f"{times}{moment}")
            return _unanswered(annotation, end, start, header)
        if -ROUNDING < start < 0:
            start = annotation.start = 0.0
        times += f" of a recording of {header.seconds:.3f} s"
        if start < 0 or start >= header.seconds:
            errors.add("outside-recording", times)
            return _anywhere(annotation)
        if end > header.seconds + TOLERANCE and not errors.add("beyond-end", times):
            return _unanswered(annotation, start, end, header)
        annotation = dataclasses.replace(annotation, end=min(end, header.seconds))
    annotation = _with_band(annotation, where, errors)
    annotation = _within_rate(annotation, where, header, errors)
    labels = []
    for label in annotation.labels:
        name = classes.of(label) if classes else label
        if name is None:
            errors.add("unknown-label", f"{where}: {label!r}")
        else:
            labels.append(name)
    if annotation.labels and not labels:
        return None
    if options.channels == "table" and not _has_its_channel(annotation, header, errors):
        if start is None or end is None:
            return None
        return _unanswered(annotation, start, end, header)
    return dataclasses.replace(annotation, labels=tuple(dict.fromkeys(labels)))


def _with_band(annotation: Annotation, where: str, errors: Errors) -> Annotation:
    """Return an annotation whose lowest frequency is neither above its highest nor below 0."""
    stated = [frequency for frequency in (annotation.low, annotation.high) if frequency is not None]
    if not stated or (stated == sorted(stated) and stated[0] >= 0):
        return annotation
    text = f"{where}: {' to '.join(f'{frequency:g}' for frequency in stated)} Hz"
    if not errors.add("odd-band", text) or max(stated) <= 0:
        return dataclasses.replace(annotation, low=None, high=None)
    low, high = annotation.low, annotation.high
    if low is not None and high is not None:
        low, high = min(stated), max(stated)
    if low is not None:
        low = max(low, 0.0)
    return dataclasses.replace(annotation, low=low, high=high)


def _within_rate(annotation: Annotation, where: str, header: Header, errors: Errors) -> Annotation:
    """Return an annotation whose band ends at half of its recording's sample rate."""
    most = header.rate / 2
    low, high = annotation.low, annotation.high
    stated = [frequency for frequency in (low, high) if frequency is not None]
    if not stated or max(stated) <= most:
        return annotation
    text = f"{where}: {max(stated):g} Hz of a recording that ends at {most:g} Hz"
    is_kept = errors.add("beyond-nyquist", text)
    if not is_kept or min(stated) >= most:
        return dataclasses.replace(annotation, low=None, high=None)
    if high is not None:
        high = min(high, most)
    return dataclasses.replace(annotation, low=low, high=high)


def _anywhere(annotation: Annotation) -> Annotation:
    """Return a dropped line of which nobody knows where in its recording it is."""
    return dataclasses.replace(
        annotation, start=None, end=None, labels=(), channel=None, unanswered=True
    )


def _unanswered(
    annotation: Annotation, start: float, end: float, header: Header
) -> Annotation | None:
    """Return a dropped line as one of which nobody knows the answer, or None outside."""
    start = max(start, 0.0)
    end = min(max(end, start + SHORTEST), header.seconds)
    if start >= end:
        return None
    return dataclasses.replace(
        annotation, start=start, end=end, labels=(), channel=None, unanswered=True
    )


def _has_its_channel(annotation: Annotation, header: Header, errors: Errors) -> bool:
    channel = annotation.channel
    if channel is None:
        if header.channels == 1:
            return True
        where = annotation.where or annotation.path
        return errors.add("no-channel", f"{where}: a recording with {header.channels}")
    if channel >= header.channels:
        text = f"{annotation.where}: channel {channel + 1} of a recording with {header.channels}"
        errors.add("bad-row", text)
        return False
    return True


def _without_doubles(
    path: str, events: list[Annotation], options: Options, errors: Errors
) -> list[Annotation]:
    """Return a recording's annotations by time, without doubles, conflicts and overlaps."""
    distinct: dict[tuple[Any, ...], list[Annotation]] = {}
    for annotation in sorted(events, key=_order):
        statement = (annotation.labels, annotation.unanswered, annotation.split)
        earlier = distinct.setdefault(statement, [])
        place = _place_of_double(earlier, annotation)
        if place is None:
            earlier.append(annotation)
            continue
        double = earlier[place]
        text = f"{annotation.where or path} says what {double.where or path} says"
        errors.add("duplicate-row", text)
        missing = [name for name in PARTIAL if getattr(double, name) is None]
        values_of_it = {name: getattr(annotation, name) for name in missing}
        earlier[place] = dataclasses.replace(double, **values_of_it)
    flat = [annotation for annotations in distinct.values() for annotation in annotations]
    events = sorted(flat, key=_order)
    if not options.windows:
        events = list(_merged(path, events, options, errors))
    separate = _without_overlaps(path, events, errors)
    if options.windows:
        return separate
    return [annotation for annotation in separate if not annotation.unanswered]


def _place_of_double(earlier: Sequence[Annotation], annotation: Annotation) -> int | None:
    """Return the place of an annotation that says the same, from the end, or None."""
    for place in range(len(earlier) - 1, -1, -1):
        if _is_same(earlier[place], annotation):
            return place
        if (earlier[place].start or 0.0) < (annotation.start or 0.0) - SAME:
            return None
    return None


def _without_overlaps(path: str, events: list[Annotation], errors: Errors) -> list[Annotation]:
    """Count events of a class that begin before its last one ended, and drop those refused."""
    ends: dict[str, float] = {}  # of each class
    separate = []
    for annotation in events:
        start = annotation.start
        early = []
        if start is not None:
            early = [label for label in annotation.labels if start < ends.get(label, 0.0)]
        if early:
            text = f"{annotation.where or path}: {early[0]!r} again at {start:g} s"
            if not errors.add("overlapping-times", text):
                separate.append(dataclasses.replace(annotation, labels=(), unanswered=True))
                continue
        for label in annotation.labels:
            ends[label] = max(ends.get(label, 0.0), annotation.end or math.inf)
        separate.append(annotation)
    return separate


def _count_between_windows(
    events: Mapping[str, Sequence[Annotation]],
    headers: Mapping[str, Header],
    options: Options,
    errors: Errors,
) -> None:
    """Count the events in the gaps between windows."""
    for path, annotations in events.items():
        spans = grid.spans(headers[path].seconds, options.windows, options.hop)
        for annotation in annotations:
            if _windows_holding(annotation, spans, options) == []:
                times = f"[{annotation.start:g}, {annotation.end:g}) s"
                errors.add("between-windows", f"{annotation.where or path}: {times}")


def _is_same(one: Annotation, other: Annotation) -> bool:
    """Whether two annotations of the same labels agree in all that both state, as tables round."""
    are_of_one_table = one.where.rpartition(":")[0] == other.where.rpartition(":")[0]
    tolerance = 0.0 if are_of_one_table else SAME
    for a, b in ((one.start, other.start), (one.end, other.end)):
        if (a is None) != (b is None):
            return False
        if a is not None and b is not None and abs(a - b) > tolerance:
            return False
    pairs = [(getattr(one, name), getattr(other, name)) for name in PARTIAL]
    return all(a is None or b is None or a == b for a, b in pairs)


def _merged(
    path: str, events: list[Annotation], options: Options, errors: Errors
) -> Iterator[Annotation]:
    """Yield one annotation for those of the same times, with the classes of all."""
    at_place: dict[tuple[Any, ...], list[Annotation]] = defaultdict(list)
    for annotation in events:
        channel = annotation.channel if options.channels == "table" else None
        place = (annotation.start, annotation.end, channel, annotation.split)
        at_place[place].append(annotation)
    for annotations in at_place.values():
        first = annotations[0]
        if len({annotation.labels for annotation in annotations}) == 1:
            yield from annotations
            continue
        all_labels = [label for annotation in annotations for label in annotation.labels]
        labels = tuple(dict.fromkeys(all_labels))
        kind = "conflicting-labels" if first.start is None else "shared-times"
        if errors.add(kind, f"{first.where or path}: {', '.join(labels)}"):
            low = _limit(min, [annotation.low for annotation in annotations])
            high = _limit(max, [annotation.high for annotation in annotations])
            yield dataclasses.replace(first, labels=labels, low=low, high=high)


def _limit(choose: Callable[[list[float]], float], frequencies: list[float | None]) -> float | None:
    """Return the lowest or highest frequency, or None if one of them is not stated."""
    stated = [frequency for frequency in frequencies if frequency is not None]
    return choose(stated) if len(stated) == len(frequencies) else None


def _order(annotation: Annotation) -> tuple[Any, ...]:
    start = -1.0 if annotation.start is None else annotation.start
    end = math.inf if annotation.end is None else annotation.end
    channel = -1 if annotation.channel is None else annotation.channel
    return start, end, channel, annotation.labels


def _class_names(
    events: dict[str, list[Annotation]], classes: Classes | None, options: Options, errors: Errors
) -> list[str]:
    """Return the names of the classes, without rare ones, whose annotations are removed."""
    counts: Counter[str] = Counter()
    for annotations in events.values():
        for annotation in annotations:
            counts.update(annotation.labels)
    dropped = set()
    for label in sorted(counts):
        if counts[label] < options.min_count:
            text = f"{label!r} has {counts[label]}, of {options.min_count}"
            if not errors.add("rare-label", text):
                dropped.add(label)
    if dropped:
        for path, annotations in list(events.items()):
            events[path] = [a for a in annotations if not a.labels or set(a.labels) - dropped]
            if not events[path] and not options.windows:
                del events[path]
    names: Sequence[str] = classes.names if classes else sorted(counts)
    return [name for name in names if name not in dropped]


def _rows(
    path: str,
    events: list[Annotation],
    header: Header,
    numbers: Mapping[str, int],
    root: str,
    options: Options,
) -> Iterator[Row]:
    name = os.path.relpath(path.partition("\0")[0], root).replace(os.sep, "/")
    about = dict(header.about)
    if events:
        about |= {key: value for key, value in events[0].about.items() if value}
    if options.windows:
        parts = windows_of(events, header.seconds, numbers, options)
    else:
        parts = (_part(annotation, header, numbers) for annotation in events)
    for part in parts:
        for channel in _channels(part.channel, header.channels, options.channels):
            yield Row(
                name,
                part.start,
                part.end,
                channel,
                part.labels,
                part.low,
                part.high,
                header,
                about,
            )


def _part(annotation: Annotation, header: Header, numbers: Mapping[str, int]) -> Part:
    end = header.seconds if annotation.end is None else annotation.end
    labels = tuple(sorted(numbers[label] for label in annotation.labels))
    start = annotation.start or 0.0
    return Part(start, end, labels, annotation.low, annotation.high, annotation.channel)


def _channels(stated: int | None, n: int, option: str) -> Sequence[int]:
    if option == "each":
        return range(n) if n > 1 else (-1,)
    if option.isdecimal():
        return (int(option),)
    return (stated if option == "table" and stated is not None else -1,)


def windows_of(
    events: list[Annotation], seconds: float, numbers: Mapping[str, int], options: Options
) -> Iterator[Part]:
    """Windows of a recording, the last one at its end, with the classes that each holds."""
    spans = grid.spans(seconds, options.windows, options.hop or options.windows)
    labels_of: dict[int, set[int]] = defaultdict(set)  # window with events -> classes
    throughout: set[int] = set()
    unanswered: set[int] = set()  # windows
    hidden: set[int] = set()
    for annotation in events:
        labels = {numbers[label] for label in annotation.labels}
        windows = _windows_holding(annotation, spans, options)
        if annotation.unanswered:
            left_out = hidden if annotation.hides_others else unanswered
            left_out.update(range(len(spans)) if windows is None else windows)
        elif windows is None:
            throughout |= labels
        else:
            for k in windows:
                labels_of[k] |= labels
    for k, (start, end) in enumerate(spans):
        if k in hidden:
            continue
        labels = labels_of.get(k, set()) | throughout
        if labels or (options.empty and k not in unanswered):
            yield Part(start, end, tuple(sorted(labels)), None, None, None)


def _windows_holding(
    annotation: Annotation, spans: Sequence[tuple[float, float]], options: Options
) -> list[int] | None:
    """Return the numbers of the windows that hold an event, or None if it is without times."""
    start, end = annotation.start, annotation.end
    if start is None or end is None:
        return None
    # Windows are in the order of their starts, and of their ends.
    first = bisect.bisect_right(spans, start, key=lambda span: span[1])
    stop = bisect.bisect_left(spans, end, key=lambda span: span[0])
    near = np.array(spans[first:stop], np.float64).reshape(-1, 2)
    holds = grid.holding(near[:, 0], near[:, 1], (start, end), options.min_overlap)
    return (first + np.flatnonzero(holds)).tolist()
