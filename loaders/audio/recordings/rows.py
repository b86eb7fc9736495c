"""Annotations to the rows of an index: checked, cut into windows, split."""

import dataclasses
import hashlib
import math
import os
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from loaders.audio.recordings import recorders, values
from loaders.audio.recordings.annotations import Annotation, Errors
from loaders.audio.recordings.class_names import Classes
from loaders.audio.recordings.headers import Header, same_bytes
from loaders.base import DataError
from loaders.io import checks

# Start and end, classes, low and high frequency, channel.
Part = tuple[float, float, tuple[int, ...], float | None, float | None, int | None]
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
                yield from _rows(
                    path, self.events[path], self.headers[path], numbers, self.root, self.options
                )


class Splitter:
    """Which split a recording is in.

    recording=0.2           a fifth, by a hash of names, is "test"; recording=test:0.2,valid:0.1
    site=0.2                the same for whole sites
    date=2024-05-01         from that day on, "test"
    column=NAME             a table's column names the split; column=fold:5: rows with 5 are "test"
    folder                  the first folder of a recording's name is its split
    """

    def __init__(self, text: str, seed: int):
        self.kind, _, value = text.partition("=")
        self.value, self.seed = value, seed
        self.shares: list[tuple[str, float]] = []
        column, _, wanted = value.partition(":") if self.kind == "column" else ("", "", "")
        self.column = column  # that names the split; empty: none
        # its value that is the test split; empty: it holds names of splits
        self.wanted = values.split_of(wanted)
        if text and self.kind not in SPLITS:
            raise DataError(
                f"--split {text!r}: expected one of {', '.join(SPLITS)}; for example recording=0.2"
            )
        if self.kind in ("recording", "site"):
            for part in value.split(","):
                name, _, share = part.rpartition(":")
                try:
                    self.shares.append((name or "test", float(share)))
                except ValueError:
                    raise DataError(
                        f"--split {text!r}: {part!r} is no share; write {self.kind}=0.2 or test:0.2"
                    ) from None
            if (
                any(not 0 < share < 1 for _, share in self.shares)
                or sum(share for _, share in self.shares) >= 1
            ):
                raise DataError(
                    f"--split {text!r}: shares must lie in (0, 1), and leave some to train on"
                )
        if self.kind == "date" and not re.fullmatch(r"\d{4}-\d\d-\d\d", value):
            raise DataError(f"--split {text!r}: expected a day, for example date=2024-05-01")
        if self.kind == "column" and not value:
            raise DataError(f"--split {text!r} names no column; write column=NAME")

    def refuse_missed(self, stated: Iterable[str]) -> None:
        """Raise DataError if no line has the value that is the test split."""
        found = sorted(set(stated))
        if self.wanted and found and self.wanted not in found:
            raise DataError(
                f"--split column={self.value}: no line has {self.wanted!r};"
                f" {checks.expected(self.wanted, found)}"
            )

    def of(self, path: str, stated: str, about: Mapping[str, str]) -> str | None:
        """Return the split of a recording by its name, or None if the value is unknown."""
        if self.kind == "column":
            if not self.wanted or not stated:
                return stated or None
            return "test" if stated == self.wanted else "train"
        if self.kind == "folder":
            return path.split("/")[0] if "/" in path else None
        if self.kind == "date":
            return ("test" if about["date"] >= self.value else "train") if "date" in about else None
        if self.kind in ("recording", "site"):
            key = path if self.kind == "recording" else about.get("site")
            if key is None:
                return None
            digest = hashlib.blake2b(f"{self.seed}:{key}".encode(), digest_size=8).digest()
            place = int.from_bytes(digest, "big") / 2**64
            for name, share in self.shares:
                if place < share:
                    return name
                place -= share
            return "train"
        return stated or "train"


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
    events: dict[str, list[Annotation]] = defaultdict(list)
    below = os.path.join(root, "")
    nothing: dict[str, Annotation] = {}  # recordings that a table without events is about
    outside: set[str] = set()  # recordings that are left out, and counted once
    for each in annotations:
        header = headers.get(each.path)
        wrong = None
        if not each.path.startswith(below):
            wrong = ("outside-root", f"{each.path} is not below {root}")
        elif (
            options.channels.isdecimal()
            and header is not None
            and int(options.channels) >= header.channels
        ):
            wrong = (
                "bad-row",
                (
                    f"{each.path} has {header.channels} channels, and no channel {options.channels}"
                    " from 0"
                ),
            )
        if wrong and each.path not in outside:
            outside.add(each.path)
            errors.add(*wrong)
        if wrong or header is None:
            continue
        if each.nothing:
            nothing.setdefault(each.path, each)
            events[each.path] += []
        elif checked := _checked(each, header, classes, options, errors):
            events[each.path].append(checked)
    for path, each in nothing.items():
        if not events[path]:
            errors.add("no-events", each.where)
    events = {
        path: _without_doubles(path, found, options, errors) for path, found in events.items()
    }
    for group in same_bytes({path: headers[path] for path in events}):
        if not errors.add("duplicate-content", f"{', '.join(group[:4])} hold the same bytes"):
            for path in group[1:]:
                events.pop(path, None)
    names = _classes(events, classes, options, errors)
    known = set(names)
    splits: dict[str, str] = {}
    kept: dict[str, list[Annotation]] = {}
    unknown = []
    for path, found in events.items():
        inside = os.path.relpath(path, root).replace(os.sep, "/")
        about = {**headers[path].about, **found[0].about} if found else headers[path].about
        for each in found:
            stated = each.about.get("date", "")
            if own := recorders.other_day(os.path.basename(path), stated):
                errors.add(
                    "other-time",
                    f"{each.where} says {stated}, and the name {os.path.basename(path)} {own}",
                )
                break
        decided = {
            splitter.of(inside, each.split, about)
            for each in found or filter(None, [nothing.get(path)])
        }
        if None in decided:
            unknown.append(path)
        decided.discard(None)
        if len(decided) > 1:
            text = f"{path} is in the splits {', '.join(sorted(map(str, decided)))}"
            if not errors.add("leaking-recording", text):
                found = [
                    each for each in found if splitter.of(inside, each.split, about) != "train"
                ]
                decided.discard("train")
        for each in found:
            each.labels = tuple(label for label in each.labels if label in known)
        # A recording in several splits that is kept is there in each of them.
        for split in sorted(map(str, decided)):
            name = path if len(decided) == 1 else f"{path}\0{split}"
            kept[name] = [each for each in found if splitter.of(inside, each.split, about) == split]
            splits[name] = split
    if unknown:
        what = {
            "site": "a site",
            "date": "a date",
            "column": "a split in its column",
            "folder": "a folder",
        }[splitter.kind]
        raise DataError(
            f"--split {splitter.kind}: {len(unknown)} recordings have no {what[2:]}, for example"
            f" {unknown[0]}"
        )
    for split in sorted(set(splits.values())):
        if not re.fullmatch(r"[A-Za-z]\w*", split):
            expected = "expected letters, digits and _: for folds, use --split column=fold:5"
            raise DataError(f"the split {split!r} is no name; {expected}")
    splitter.refuse_missed(each.split for found in events.values() for each in found)
    return Plan(
        names,
        kept,
        splits,
        {path: headers[path.partition("\0")[0]] for path in kept},
        root,
        options,
    )


def leads_out(path: str, root: str) -> str:
    """Return the target of a path below ``root`` if links lead out of there, else ""."""
    led = os.path.realpath(path)
    return "" if led.startswith(os.path.join(os.path.realpath(root), "")) else led


def _checked(
    each: Annotation, header: Header, classes: Classes | None, options: Options, errors: Errors
) -> Annotation | None:
    where = each.where or each.path
    if each.start is not None and each.end is not None:
        times = f"{where}: [{each.start:g}, {each.end:g}) s"
        if each.end <= each.start:
            errors.add("reversed-times", times)
            return None
        if -ROUNDING < each.start < 0:
            each.start = 0.0
        times += f" of a recording of {header.seconds:.3f} s"
        if each.start < 0 or each.start >= header.seconds:
            errors.add("outside-recording", times)
            return None
        if each.end > header.seconds + TOLERANCE and not errors.add("beyond-end", times):
            return None
        each = dataclasses.replace(each, end=min(each.end, header.seconds))
    labels = []
    for label in each.labels:
        name = classes.of(label) if classes else label
        if name is None:
            errors.add("unknown-label", f"{where}: {label!r}")
        else:
            labels.append(name)
    if each.labels and not labels:
        return None
    if options.channels == "table" and each.channel is None and header.channels > 1:
        if not errors.add("no-channel", f"{where}: a recording with {header.channels}"):
            return None
    if options.channels == "table" and each.channel is not None and each.channel >= header.channels:
        errors.add(
            "bad-row",
            f"{each.where}: channel {each.channel + 1} of a recording with {header.channels}",
        )
        return None
    return dataclasses.replace(each, labels=tuple(dict.fromkeys(labels)))


def _without_doubles(
    path: str, events: list[Annotation], options: Options, errors: Errors
) -> list[Annotation]:
    """Return a recording's annotations by time, without doubles, conflicts and overlaps."""
    seen: dict[tuple[Any, ...], list[Annotation]] = {}
    for each in sorted(events, key=_order):
        near = seen.setdefault((each.labels, each.split), [])
        at = len(near) - 1
        while at >= 0 and not _is_same(near[at], each):
            is_near = (near[at].start or 0.0) >= (each.start or 0.0) - SAME
            at = at - 1 if is_near else -1
        if at < 0:
            near.append(each)
            continue
        other = near[at]
        errors.add("duplicate-row", f"{each.where or path} says what {other.where or path} says")
        missing = [name for name in PARTIAL if getattr(other, name) is None]
        near[at] = dataclasses.replace(other, **{name: getattr(each, name) for name in missing})
    events = sorted((each for several in seen.values() for each in several), key=_order)
    if not options.windows:
        events = list(_merged(path, events, options, errors))
    last: dict[str, float] = {}
    kept = []
    for each in events:
        early = [
            label
            for label in each.labels
            if each.start is not None and each.start < last.get(label, 0.0)
        ]
        if early and not errors.add(
            "overlapping-times", f"{each.where or path}: {early[0]!r} again at {each.start:g} s"
        ):
            continue
        for label in each.labels:
            last[label] = max(last.get(label, 0.0), each.end or math.inf)
        kept.append(each)
    return kept


def _is_same(one: Annotation, other: Annotation) -> bool:
    """Whether two annotations of the same labels agree in all that both state, as tables round."""
    most = 0.0 if one.where.rpartition(":")[0] == other.where.rpartition(":")[0] else SAME
    for a, b in ((one.start, other.start), (one.end, other.end)):
        if (a is None) != (b is None) or (a is not None and b is not None and abs(a - b) > most):
            return False
    pairs = [(getattr(one, name), getattr(other, name)) for name in PARTIAL]
    return all(a is None or b is None or a == b for a, b in pairs)


def _merged(
    path: str, events: list[Annotation], options: Options, errors: Errors
) -> Iterator[Annotation]:
    places: dict[tuple[Any, ...], list[Annotation]] = defaultdict(list)
    for each in events:
        places[
            each.start, each.end, each.channel if options.channels == "table" else None, each.split
        ].append(each)
    for several in places.values():
        if len({each.labels for each in several}) == 1:
            yield from several
            continue
        labels = tuple(dict.fromkeys(label for each in several for label in each.labels))
        kind = "conflicting-labels" if several[0].start is None else "shared-times"
        if errors.add(kind, f"{several[0].where or path}: {', '.join(labels)}"):
            low, high = [each.low for each in several], [each.high for each in several]
            band = (None if None in low else min(low), None if None in high else max(high))  # type: ignore[type-var]
            yield dataclasses.replace(several[0], labels=labels, low=band[0], high=band[1])


def _order(each: Annotation) -> tuple[Any, ...]:
    times = (-1.0 if each.start is None else each.start, math.inf if each.end is None else each.end)
    return (*times, -1 if each.channel is None else each.channel, each.labels)


def _classes(
    events: dict[str, list[Annotation]], classes: Classes | None, options: Options, errors: Errors
) -> list[str]:
    counts = Counter(label for found in events.values() for each in found for label in each.labels)
    rare = {label for label, count in counts.items() if count < options.min_count}
    about = {
        label: f"{label!r} has {counts[label]}, of {options.min_count}" for label in sorted(rare)
    }
    dropped = {label for label, text in about.items() if not errors.add("rare-label", text)}
    if dropped:
        for path, found in list(events.items()):
            events[path] = [each for each in found if not each.labels or set(each.labels) - dropped]
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
    about = header.about | {
        key: value for each in events[:1] for key, value in each.about.items() if value
    }

    def part(each: Annotation) -> Part:
        end = header.seconds if each.end is None else each.end
        return (
            each.start or 0.0,
            end,
            tuple(sorted(numbers[x] for x in each.labels)),
            each.low,
            each.high,
            each.channel,
        )

    parts = (
        windows_of(events, header.seconds, numbers, options)
        if options.windows
        else map(part, events)
    )
    for start, end, labels, low, high, channel in parts:
        for one in _channels(channel, header.channels, options.channels):
            yield Row(name, start, end, one, labels, low, high, header, about)


def _channels(stated: int | None, n: int, option: str) -> Sequence[int]:
    if option == "each":
        return range(n) if n > 1 else (-1,)
    if option.isdecimal():
        return (int(option),)
    return (stated if option == "table" and stated is not None else -1,)


def windows_of(
    events: list[Annotation], seconds: float, numbers: Mapping[str, int], options: Options
) -> Iterator[Part]:
    """Windows of a recording, the last one at its end, with the classes that overlap each."""
    length, hop = options.windows, options.hop or options.windows
    starts = [0.0]
    if seconds > length:
        n = int((seconds - length) / hop + 1e-9) + 1
        starts = [round(k * hop, 6) for k in range(n)]
        if starts[-1] + length < seconds - 1e-6:
            starts.append(round(seconds - length, 6))
    found: dict[int, set[int]] = defaultdict(set)  # of windows with events
    throughout: set[int] = set()
    for each in events:
        labels = {numbers[label] for label in each.labels}
        if each.start is None or each.end is None:
            throughout |= labels
            continue
        least = min(options.min_overlap, each.end - each.start, length) - 1e-9
        first = max(0, int((each.start - length) / hop) - 1)
        for k in range(first, len(starts)):
            if starts[k] >= each.end:
                break
            if min(each.end, starts[k] + length) - max(each.start, starts[k]) >= least:
                found[k] |= labels
    for k, start in enumerate(starts):
        window = found.get(k, set()) | throughout
        if window or options.empty:
            yield (
                start,
                min(round(start + length, 6), seconds),
                tuple(sorted(window)),
                None,
                None,
                None,
            )
