"""The annotations of a source, and the list of errors in it."""

import dataclasses
import pathlib
import unicodedata
from collections import Counter
from collections.abc import Iterable, Mapping

from loaders.base import DataError
from loaders.io import atomic_write, checks

REFUSE, DROP, KEEP = "refuse", "drop", "keep"
SHOWN = 3  # examples of a kind that are printed

# Kind -> what it is, what is done about it without an option, and whether it may be kept.
KINDS: Mapping[str, tuple[str, str, bool]] = {
    "absent-recording": (
        "a line about a recording, or a part of one, that the embeddings do not have",
        DROP,
        False,
    ),
    "missing-file": ("a table names a recording that is not there", REFUSE, False),
    "ambiguous-name": ("several files have the name that a table gives", REFUSE, False),
    "other-folder": (
        "a name with a folder in which the recording does not lie; kept: the only one of this name",
        KEEP,
        True,
    ),
    "no-permission": ("a file or folder that may not be read", REFUSE, False),
    "link-circle": ("a folder that is a link to one that it lies in", DROP, False),
    "odd-name": ("a file name that is not UTF-8", REFUSE, False),
    "outside-root": ("a recording that does not lie below the root", REFUSE, False),
    "link-outside": (
        "a link out of the root; name a --root that holds what it leads to, too",
        REFUSE,
        False,
    ),
    "empty-file": ("a recording of 0 bytes", REFUSE, False),
    "unreadable-file": ("a recording that no decoder reads", REFUSE, False),
    "truncated-file": (
        "a recording that ends before its header says; kept: as far as it goes",
        REFUSE,
        True,
    ),
    "stale-header": ("a recording longer than its header says; kept: all of it", KEEP, True),
    "not-finite": (
        (
            "a recording with samples that are NaN, infinite or too large; kept: rows that hold"
            " some are left out in training, and counted"
        ),
        REFUSE,
        True,
    ),
    "opposite-channels": (
        "two channels that cancel; kept: their mean is almost silent, so say --channels 0",
        KEEP,
        True,
    ),
    "bad-row": (
        (
            "no number or name where one belongs, a name that --labels does not match, or no such"
            " channel; dropped: windows of its recording without a label are left out, too"
        ),
        REFUSE,
        False,
    ),
    "bad-date": ("a date or a time of day that is none", REFUSE, False),
    "no-times": (
        "a line without times in a table that has some; kept: the whole recording has its label",
        REFUSE,
        True,
    ),
    "reversed-times": ("an end that is not after its start", REFUSE, False),
    "outside-recording": (
        (
            "a start after the recording's end, or before 0; dropped: windows of its recording"
            " without a label are left out, too"
        ),
        REFUSE,
        False,
    ),
    "beyond-end": ("an end after the recording's end; kept: cut there", REFUSE, True),
    "beyond-nyquist": (
        "a frequency above half of its recording's sample rate; kept: cut there",
        KEEP,
        True,
    ),
    "odd-band": (
        (
            "a lowest frequency above the highest, or below 0; kept: exchanged, from 0; dropped:"
            " the line has none"
        ),
        KEEP,
        True,
    ),
    "other-duration": (
        "a duration that is not the end minus the start; kept: the end counts",
        KEEP,
        True,
    ),
    "unclear-unit": (
        "frequencies without a unit that are as low as those in kHz; kept: in Hz",
        KEEP,
        True,
    ),
    "between-windows": (
        "an event of which no window holds half: --hop is longer than --windows",
        DROP,
        False,
    ),
    "overlapping-times": (
        "two events of one class that overlap in a recording; dropped: the later one",
        KEEP,
        True,
    ),
    "duplicate-row": ("a line that says what another said; dropped: all but one", DROP, False),
    "conflicting-labels": (
        "a whole recording under several labels; kept: it has all of them",
        REFUSE,
        True,
    ),
    "shared-times": (
        "parts with the same times under several labels; kept: one row with all of them",
        KEEP,
        True,
    ),
    "unknown-label": ("a label that is in no line of --classes", REFUSE, False),
    "rare-label": ("a label with fewer events than --min-count", DROP, True),
    "duplicate-content": (
        "recordings with the same bytes; dropped: all but the first by name",
        REFUSE,
        True,
    ),
    "float-range": (
        "a recording of floats far beyond [-1, 1], as integers have; kept: as they are, so louder",
        KEEP,
        True,
    ),
    "time-expansion": (
        "a recording whose header or table states another time expansion than it is read with",
        KEEP,
        True,
    ),
    "other-time": (
        "a recording whose header or table has another time than its name; kept: not the name's",
        KEEP,
        True,
    ),
    "no-label": (
        (
            "a line without a label, or whose label says that there is none: nocall; kept: without"
            " a class"
        ),
        KEEP,
        True,
    ),
    "negative-folder": (
        (
            "a recording in a folder such as -wren, in which BirdNET takes what wren is not; kept:"
            " without a class; --labels '(?P<label>[^/]+)/[^/]+$' makes classes of all folders"
        ),
        KEEP,
        True,
    ),
    "open-label": (
        "a label that says unknown, or is in doubt: ????, wren?, cf. wren, TBD; kept: as a class",
        KEEP,
        True,
    ),
    "denied-label": (
        (
            "a label that says what is not there, such as no wren; kept: as a class; dropped:"
            " windows that hold it are left out. Where none of the classes is, write nocall"
        ),
        REFUSE,
        True,
    ),
    "joined-labels": ("a label that may be several; kept: as one", REFUSE, True),
    "similar-labels": (
        (
            "labels that differ in case, blanks or marks alone, or were read in a wrong encoding;"
            " --classes makes them one"
        ),
        KEEP,
        True,
    ),
    "open-class": (
        (
            "a line that says unknown of one of its classes, or nothing next to a 0 of others;"
            " dropped: it and the windows that hold it; kept: as if it were absent"
        ),
        DROP,
        True,
    ),
    "odd-channel": ("a channel that is no number, L or R; kept: of the mean of all", KEEP, True),
    "no-channel": (
        (
            "a line without a channel, with --channels table; kept: of the mean; name its column:"
            " --channel-column"
        ),
        REFUSE,
        True,
    ),
    "odd-place": ("a latitude or longitude that is none; kept: without it", KEEP, True),
    "no-split": (
        (
            "a line without a split in a table that has some; kept: in train; or say --split-column"
            " none"
        ),
        REFUSE,
        True,
    ),
    "unused-column": ("a column that looks like times or labels, and is not used", KEEP, True),
    "other-encoding": ("a table that is not in UTF-8", KEEP, True),
    "comment-line": ("a line that begins with #", DROP, False),
    "unanswered": (
        (
            "a line whose answer is none: skip, unsure, not validated, blank; windows that hold"
            " it alone are left out. --answer-column none takes all labels as they are"
        ),
        DROP,
        False,
    ),
    "no-events": ("a table without events: windows of its recording have no class", KEEP, True),
    "no-table": ("a recording next to tables, none of which is about it", DROP, False),
    "hidden-file": (
        "a recording in a hidden folder or a bin, or whose name begins with a point",
        DROP,
        False,
    ),
    "unread-table": (
        "annotations next to recordings; name the table, or its export as CSV, as a source",
        DROP,
        False,
    ),
    "unread-sound": (
        "a file that looks like sound, an archive or a project; convert, rename or unpack it",
        DROP,
        False,
    ),
    "other-file": ("a file next to recordings that is neither sound nor a table", DROP, False),
    "leaking-recording": (
        "one recording, or the same sound in other bytes, in several splits; dropped: from train",
        REFUSE,
        True,
    ),
}


class IndexErrors(DataError):
    """Errors that no option says to drop or keep."""


@dataclasses.dataclass(slots=True)
class Annotation:
    """One line of a source: a recording, or a part of it, and its labels."""

    path: str  # of the recording, absolute
    start: float | None = None  # [s]; None: the whole recording
    end: float | None = None  # [s]
    labels: tuple[str, ...] = ()
    low: float | None = None  # [Hz]
    high: float | None = None  # [Hz]
    channel: int | None = None  # from 0; None: the mean
    split: str = ""
    where: str = ""  # the table and its line, for messages
    # recording, site, date, time, latitude, longitude, time_expansion
    about: Mapping[str, str] = dataclasses.field(default_factory=dict)
    nothing: bool = False  # the recording has no events, and gives windows alone
    is_name: bool = False  # its labels are names of classes, whatever marks they have
    unanswered: bool = False  # nobody has said what it is: neither a class nor none
    # one of its classes may be there, so windows that hold it are no examples of other lines either
    hides_others: bool = False

    def __str__(self) -> str:
        text = self.path
        if self.start is None or self.end is None:
            text += " whole"
        else:
            text += f" [{self.start:g}, {self.end:g}) s"
        text += f": {', '.join(self.labels) or 'no label'}"
        if self.low is not None and self.high is not None:
            text += f", {self.low:g} to {self.high:g} Hz"
        if self.about:
            text += "; " + ", ".join(f"{key} {value}" for key, value in self.about.items())
        return shown(text)


def shown(text: str) -> str:
    """Return a text in one line: lone accents, odd blanks and invisible characters escaped.

    Two names that differ then look different, although a terminal shows them alike.
    """

    if text.isascii() and text.isprintable():
        return text
    return "".join(map(_escaped, text))


def _escaped(character: str) -> str:
    kind = unicodedata.category(character)
    is_odd_blank = kind == "Zs" and character != " "
    is_mark = kind.startswith("M")
    if is_mark or is_odd_blank or kind in ("Cc", "Cf", "Zl", "Zp"):
        return ascii(character)[1:-1]
    return character


class Errors:
    """Every error by its kind, and the action for each kind."""

    def __init__(self, policies: Iterable[str] = ()):
        """``policies``: "KIND=drop", "KIND=keep", "KIND=refuse" or "all=…". Raises DataError."""
        self._policy = {kind: policy for kind, (_, policy, _) in KINDS.items()}
        for text in policies:
            kind, _, policy = text.partition("=")
            if kind != "all" and kind not in KINDS:
                raise DataError(
                    f"--on names the error {kind!r}; {checks.expected(kind, [*KINDS, 'all'])}"
                )
            if policy not in (REFUSE, DROP, KEEP):
                raise DataError(
                    f"--on {text!r} says to {policy!r} it;"
                    f" {checks.expected(policy, (REFUSE, DROP, KEEP))}"
                )
            if policy == KEEP and kind != "all" and not KINDS[kind][2]:
                raise DataError(
                    f"--on {text!r} cannot be: {KINDS[kind][0]}; expected one of: {REFUSE}, {DROP}"
                )
            for name in KINDS if kind == "all" else (kind,):
                _, _, may_be_kept = KINDS[name]
                if policy != KEEP or may_be_kept:
                    self._policy[name] = policy
        self.counts: Counter[str] = Counter()
        self.lines: list[tuple[str, str]] = []

    def add(self, kind: str, text: str) -> bool:
        """Count an error, in one line of text. Return whether its row is kept."""
        self.counts[kind] += 1
        self.lines.append((kind, shown(text)))
        return self._policy[kind] == KEEP

    def policy(self, kind: str) -> str:
        return self._policy[kind]

    def report(self) -> list[str]:
        """Return a line for each kind, with its count, and a few examples below it."""
        lines = []
        actions = {REFUSE: "refused", DROP: "dropped", KEEP: "kept"}
        for kind, (meaning, _, _) in KINDS.items():
            count = self.counts[kind]
            if not count:
                continue
            lines.append(f"{kind}: {count} ({actions[self._policy[kind]]}): {meaning}")
            examples = [text for kind_of_line, text in self.lines if kind_of_line == kind]
            lines += [f"    {text}" for text in examples[:SHOWN]]
            if len(examples) > SHOWN:
                lines.append(f"    and {len(examples) - SHOWN} more")
        return lines

    def listed(self) -> list[str]:
        """Return a line for each error."""
        return [f"{kind}: {text}" for kind, text in self.lines]

    @property
    def hint(self) -> str:
        """The option that lists the errors that `report` leaves out, or ""."""
        n_most = max(self.counts.values(), default=0)
        return "; --errors FILE lists every one" if n_most > SHOWN else ""

    def save(self, path: pathlib.Path, *, always: bool = False) -> None:
        """Write the list as a CSV in place of an earlier one. An empty one: if ``always``."""
        if self.lines or always:
            atomic_write.write_csv(path, [("kind", "text"), *self.lines], errors="backslashreplace")
        else:
            path.unlink(missing_ok=True)

    def refused(self) -> list[str]:
        """Return the kinds that were met and are refused."""
        return [kind for kind in KINDS if self.counts[kind] and self._policy[kind] == REFUSE]

    def summary(self, listed: str = "") -> str:
        """Return the count of each kind, in a line, and the name of the list."""
        counts = [f"{self.counts[kind]} {kind}" for kind in KINDS if self.counts[kind]]
        if not counts:
            return "nothing passed over"
        text = ", ".join(counts)
        return f"{text}, listed in {listed}" if listed else text

    @property
    def serious(self) -> int:
        """How many errors are of kinds that an index refuses, unless --on has another answer."""
        return sum(n for kind, n in self.counts.items() if KINDS[kind][1] == REFUSE)

    def refuse(self) -> None:
        """Raise IndexErrors if a refused kind was met."""
        kinds = self.refused()
        if not kinds:
            return
        count = sum(self.counts[kind] for kind in kinds)
        errors, them = ("1 error", "it") if count == 1 else (f"{count} errors", "them")
        remedy = " ".join(f"--on {kind}=drop" for kind in kinds)
        raise IndexErrors(
            f"{errors} in the sources, and nothing was written; correct {them}, or add"
            f" {remedy}{self.hint}"
        )
