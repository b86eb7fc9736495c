"""The values in cells: numbers, times, dates, answers. A text that is none is an error."""

import re
from collections.abc import Iterable, Sequence
from datetime import date, datetime

# Of R, pandas and SQL, and of people.
MISSING = {
    "",
    "NA",
    "na",
    "N/A",
    "n/a",
    "<NA>",
    "NaN",
    "nan",
    "NAN",
    "NULL",
    "null",
    "Null",
    "None",
    "none",
    "NONE",
    "n.a.",
}
YES = {
    "1",
    "1.0",
    "true",
    "t",
    "yes",
    "y",
    "x",
    "present",
    "correct",
    "positive",
    "pos",
    "wahr",
    "vrai",
    "verdadero",
    "ja",
    "oui",
    "si",
    "sí",
    "✓",
    "✔",
}
NO = {
    "0",
    "0.0",
    "false",
    "f",
    "no",
    "n",
    "-",
    "absent",
    "not present",
    "incorrect",
    "negative",
    "neg",
    "falsch",
    "faux",
    "falso",
    "nein",
    "non",
}
OPEN = {
    "skip",
    "unknown",
    "unk",
    "unvalidated",
    "not validated",
    "(not validated)",
    "undefined",
    "pending",
    "unverified",
    "unchecked",
    "unreviewed",
    "not reviewed",
    "needs review",
    "needs id",
    "uncertain",
    "unsure",
    "---",
}
LETTERS = {"p": "yes", "a": "no"}  # of a column of presence and absence that holds nothing else
# Labels, without case and marks, that say that nothing was heard, and that it is not known who was.
NO_CALL = set(
    "none nocall nocalls nocalling noid nobird nobirds nobat nobats noanimal noanimals nospecies"
    " noevent noevents nolabel nosound nothing noisefree novocalization novocalisation keinvogel"
    " keinruf keineart aucun ninguno nichts rien nada".split()
)
UNKNOWN = set(
    "unknown unk unid unidentified undetermined unidentifiable unknownbird unknownbat"
    " unknownspecies unknowncall unbekannt inconnu inconnue desconocido desconocida indet".split()
)
SLASHED = re.compile(r"\s*(\d{1,2})[/-](\d{1,2})[/-]\d{4}(?!\d)")
CLOCK = r"(?:[T ,]+(?P<clock>.*))?"  # after a date
WORDED = (
    re.compile(r"(?P<d>\d{1,2})\.?[ -]+(?P<m>[^\W\d_]{3,10})\.?[ ,-]+(?P<y>\d{4})" + CLOCK),
    re.compile(r"(?P<m>[^\W\d_]{3,10})\.? (?P<d>\d{1,2}),? (?P<y>\d{4})" + CLOCK),
)
WORDS = 100  # different spellings of answers in a column, at most
# Words of columns of answers alone.
CONFIRMED = {
    "confirmed",
    "accepted",
    "verified",
    "approved",
    "valid",
    "validated",
    "tp",
    "true positive",
    "ok",
    "agree",
    "agreed",
    "richtig",
    "korrekt",
    "best\u00e4tigt",
    "akzeptiert",
    "g\u00fcltig",
    "confirm\u00e9",
    "accept\u00e9",
    "valid\u00e9",
    "correcto",
    "confirmado",
    "aceptado",
}
DENIED = {
    "rejected",
    "denied",
    "wrong",
    "invalid",
    "fp",
    "false positive",
    "discarded",
    "deleted",
    "disagree",
    "disagreed",
    "not ok",
    "nok",
    "not confirmed",
    "abgelehnt",
    "verworfen",
    "ung\u00fcltig",
    "nicht best\u00e4tigt",
    "rejet\u00e9",
    "refus\u00e9",
    "incorrecto",
    "rechazado",
}
SPLITS = {
    name: name
    for name in (
        "train",
        "test",
        "val",
        "valid",
        "validation",
        "dev",
        "eval",
        "evaluation",
        "holdout",
    )
}
SPLITS |= {
    **dict.fromkeys(("training", "tr", "trn"), "train"),
    **dict.fromkeys(("testing", "te", "tst"), "test"),
}
SPLITS |= {f"{name} set": kind for name, kind in SPLITS.items()}
TIME_WORDS = set(
    "s sec secs second seconds m min mins minute minutes h hr hour hours ms d day days am pm t z"
    " utc gmt to bis until and ca".split()
)
MONTHS = {
    name: n + 1 for n, name in enumerate("jan feb mar apr may jun jul aug sep oct nov dec".split())
}
# German, and by four letters French, and Spanish
MONTHS |= {"m\u00e4r": 3, "mrz": 3, "mai": 5, "okt": 10, "dez": 12}
MONTHS |= {
    "janv": 1,
    "f\u00e9vr": 2,
    "fevr": 2,
    "mars": 3,
    "avri": 4,
    "avr": 4,
    "juin": 6,
    "juil": 7,
    "ao\u00fbt": 8,
    "aout": 8,
    "d\u00e9ce": 12,
    "d\u00e9c": 12,
    "ener": 1,
    "ene": 1,
    "abri": 4,
    "abr": 4,
    "agos": 8,
    "ago": 8,
    "dici": 12,
    "dic": 12,
}


def given(text: str) -> bool:
    return text not in MISSING


def number(text: str | None, comma: bool = True) -> float | None:
    """Return a number with a point, or a comma, or None for an empty field. Raises ValueError."""
    if text is None or (text := text.strip()) in MISSING:
        return None
    value = float(text.replace(",", ".") if comma and "," in text and "." not in text else text)
    if value != value or value in (float("inf"), float("-inf")) or "_" in text:
        raise ValueError(f"{text!r} is not a number")
    return value


def minutes(text: str) -> float | None:
    """Return a time in s of m:ss, or of what `seconds` reads. Raises ValueError."""
    found = re.fullmatch(r"(\d+):([0-5]?\d(?:[.,]\d+)?)", text.strip())
    return int(found[1]) * 60 + float(found[2].replace(",", ".")) if found else seconds(text)


def span(text: str) -> tuple[float, float] | None:
    """Return start and end of "0_5" or "00:05-00:10", None if empty. Raises ValueError."""
    if not given(text):
        return None
    time = r"(\d+(?:[.:]\d+)*) ?s?"
    between = r"-|\u2013|\u2014|_|to|\.\.+" + (r"|,|;" if text.strip()[0] in "[(" else "")
    found = re.fullmatch(rf"[\[(]? ?{time} ?(?:{between}) ?{time} ?[\])]?", text.strip())
    first, last = (minutes(found[1]), minutes(found[2])) if found else (None, None)
    if first is None or last is None or first >= last:
        raise ValueError(f"{text!r} is no range of times")
    return first, last


def seconds(text: str | None, scale: float = 1.0, comma: bool = True) -> float | None:
    """Return s of 12, 12 s, 500 ms, h:mm:ss or 0 days h:mm:ss, None if empty. Raises ValueError."""
    text = (text or "").strip()
    if ":" in text and (
        found := re.fullmatch(r"(?:(\d+) days? )?(\d+):([0-5]?\d):([0-5]?\d(?:[.,]\d+)?)", text)
    ):
        whole = int(found[1] or 0) * 86400 + int(found[2]) * 3600 + int(found[3]) * 60
        return whole + float(found[4].replace(",", "."))
    if found := re.fullmatch(r"([\d.,]+) ?(ms|s|secs?|seconds?|min|minutes?)", text, re.IGNORECASE):
        own = {"ms": 1e-3, "mi": 60.0}.get(found[2][:2].lower(), 1.0)
        if scale not in (1.0, own):
            raise ValueError(f"{text!r} has another unit than its column")
        text, scale = found[1], own
    value = number(text, comma)
    return None if value is None else round(value * scale, 9)


def _all(texts: Iterable[str], read: object) -> bool:
    found = [text for text in texts if given(text)]
    try:
        return bool(found) and all(read(text) is not None for text in found)  # type: ignore[operator]
    except ValueError:
        return False


def are_numbers(texts: Iterable[str]) -> bool:
    return _all(texts, number)


def are_spans(texts: Iterable[str]) -> bool:
    return _all(texts, span)


def are_clocks(texts: Iterable[str]) -> bool:
    """Whether all are times with a colon or a unit: 0:12, 0:00:12, 12 s, 1m12s, 1'12."""
    form = (
        r"\d+(:[0-5]?\d){1,2}([.,]\d+)?|(\d+ ?(m|min|['\u2032]) ?)?\d+([.,]\d+)?"
        r" ?(s|sec|\"|\u2033)|\d+['\u2032]\d\d"
    )
    found = [text.strip() for text in texts if given(text)]
    return bool(found) and all(re.fullmatch(form, text) for text in found)


def like_times(texts: Iterable[str]) -> bool:
    """Whether most begin with a number and have words of times alone: ca. 2, 12:00:02 AM."""
    found = [
        re.sub(r"^[^\w]*((ca|approx|about|at)\b[^\w]*)?", "", text.casefold())
        for text in texts
        if given(text)
    ]
    like = [
        text
        for text in found
        if text[:1].isdigit() and set(re.findall(r"[^\W\d_]+", text)) <= TIME_WORDS
    ]
    return 2 * len(like) >= len(found) > 0


def are_parts(files: Sequence[str], texts: Sequence[str]) -> bool:
    """Whether texts name recordings with a time: soundscape_123_5 of soundscape_123.ogg."""
    stems = [re.split(r"[/\\\\]", file)[-1].rpartition(".")[0] or file for file in files]
    pairs = zip(stems, texts, strict=True)
    return all(
        re.fullmatch(rf"{re.escape(stem)}([-_]\d+(\.\d+)?){{1,2}}(\.\w+)?", text)
        for stem, text in pairs
    )


def are_hours(texts: Sequence[str], dated: bool) -> bool:
    """Whether numbers are times of day such as 0530: one begins with 0, or the table has dates."""
    found = [text for text in texts if given(text)]
    written = all(re.fullmatch(r"([01]\d|2[0-3])[0-5]\d([0-5]\d)?", text) for text in found)
    return bool(found) and written and (dated or any(text[0] == "0" for text in found))


def are_times(texts: Iterable[str]) -> bool:
    return _all(texts, seconds)


def answer(text: str) -> bool | None:
    """Yes or no, None if it is neither."""
    folded = text.casefold()
    return True if folded in YES else False if folded in NO or not given(text) else None


def are_posneg(texts: Iterable[str]) -> bool:
    """Whether a column holds the words of DCASE alone: POS, NEG, UNK."""
    found = {text.casefold() for text in texts if given(text)}
    return bool(found) and found <= {"pos", "neg", "unk"}


def are_nearly_answers(texts: Sequence[str]) -> bool:
    """Whether a column may be one of yes and no: numbers, or answers in half of its cells."""
    found = list(filter(given, texts))
    return are_numbers(texts) or 0 < len(found) <= 2 * sum(
        answer(text) is not None for text in found
    )


def is_share(text: str) -> bool:
    try:
        return 0 <= (number(text) or 0) <= 1
    except ValueError:
        return False


def are_letters(texts: Iterable[str]) -> bool:
    """Whether a column holds P and A alone, for presence and absence."""
    return _words(texts) == set(LETTERS)


def verdict(text: str, letters: bool = False) -> str | None:
    """Return "yes", "no", "skip", "" of an empty field, or None; ``letters``: of P and A alone."""
    folded = text.casefold()
    if letters and folded in LETTERS:
        return LETTERS[folded]
    bare = " ".join(re.findall(r"[^\W_]+", folded))  # of true_positive
    folded = bare if bare in OPEN | CONFIRMED | DENIED else folded
    if not given(text):
        return ""
    if folded in OPEN:
        return "skip"
    found = True if folded in CONFIRMED else False if folded in DENIED else answer(text)
    return None if found is None else "yes" if found else "no"


def _words(texts: Iterable[str]) -> set[str]:
    found = set(texts)
    return {text.casefold() for text in found if given(text)} if len(found) <= WORDS else set()


def are_verdicts(texts: Iterable[str]) -> bool:
    """Whether all are verdicts on labels, some in words used for nothing else: rejected, FP."""
    found = _words(texts)
    own = any(verdict(text) == "no" and answer(text) is None for text in found)
    return own and all(verdict(text) is not None for text in found)


def are_answers(texts: Iterable[str], both: bool = False) -> bool:
    """Whether a column holds yes and no alone, some of them open, and both if asked for."""
    found = _words(texts)
    closed = found - OPEN
    stated = {answer(text) for text in closed}
    return (
        bool(closed) and None not in stated and (not both or len(stated) == 2 or bool(found & OPEN))
    )


def are_splits(texts: Sequence[str], train: bool = False) -> bool:
    """Whether all are names of splits, and one of them is train if that is asked for."""
    found = {SPLITS.get(text.casefold()) for text in texts}
    return bool(found) and None not in found and ("train" in found or not train)


def split_of(text: str) -> str:
    """Return the name of a split in one spelling, and 5 for a fold 5.0."""
    return SPLITS.get(text.casefold(), whole(text))


def says_none(label: str) -> bool:
    """Whether a label says that there is no call: nocall, NoID, No bird, (none)."""
    return _letters(label) in NO_CALL


def says_unknown(label: str) -> bool:
    """Whether a label says that the call could not be named: unknown, Unid., ????."""
    return _letters(label) in UNKNOWN or (bool(label) and not label.strip("? ()"))


def _letters(label: str) -> str:
    return re.sub(r"[\W_]+", "", label.casefold())


def is_sheet_error(text: str) -> bool:
    """Whether a cell holds an error of a spreadsheet: #REF!, #N/A, #NOM?, #¡VALOR!."""
    return (
        text[:1] == "#"
        and re.fullmatch(r"#[\u00a1\u00bf]?(?:[^\W\d_]+/?\d?[!?]|N/?[ADV])", text) is not None
    )


def degrees(text: str, negative: str) -> float:
    """Return degrees of 51.1, 51,1, 51.1N or 51°06'36"N. Below 0: ``negative``, S or W.

    Raises ValueError: it is no number of degrees, or no place on Earth.
    """
    if re.fullmatch(r"[+-]?\d+(\.\d*)?([eE][+-]?\d+)?", text):
        text = f"{float(text):f}"
    letters = re.findall(r"[A-Z]", text.upper())
    allowed = ("N", "S") if negative == "S" else ("E", "W")
    numbers = re.findall(r"[+-]?\d+(?:[.,]\d+)?", text.replace("\u2212", "-"))
    rest = re.sub(
        r"[+-]?\d+(?:[.,]\d+)?|[A-Za-z\u00b0\u00ba'\u2019\u2032\"\u201d\u2033: ]",
        "",
        text.replace("\u2212", "-"),
    )
    if (
        rest
        or not 0 < len(numbers) < 4
        or len(letters) > 1
        or any(letter not in allowed for letter in letters)
    ):
        raise ValueError(f"{text!r} is no number of degrees")
    parts = [abs(float(each.replace(",", "."))) for each in numbers]
    value = sum(part / 60.0**n for n, part in enumerate(parts))
    below = numbers[0][0] == "-" or letters == [negative]
    if value > (90 if negative == "S" else 180) or any(part >= 60 for part in parts[1:]):
        raise ValueError(f"{text!r} is no place on Earth")
    return round(-value if below else value, 9)


def whole(text: str) -> str:
    """Return a whole number as it is counted: "5" for 5.0, which pandas makes of it."""
    return text.partition(".")[0] if "." in text and re.fullmatch(r"-?\d+\.0+", text) else text


class Dates:
    """The dates of a column, which together decide whether the day or the month is first."""

    def __init__(self, texts: Sequence[str], order: str = ""):
        """Find the order of days and months, or ``order``. Raises ValueError: nothing tells."""
        found = [
            (text, int(each[1]), int(each[2])) for text in texts if (each := SLASHED.match(text))
        ]
        day_first = next((text for text, first, _ in found if first > 12), None)
        month_first = next((text for text, _, second in found if second > 12), None)
        if day_first and month_first:
            raise ValueError(
                f"{day_first!r} has its day first, and {month_first!r} its month; write 2024-05-23"
            )
        odd = next((text for text, first, second in found if first != second), None)
        if odd and not (day_first or month_first or order):
            raise ValueError(
                f"{odd!r} and all others may have day or month first; say --dates day-first or"
                " month-first"
            )
        stated = "day-first" if day_first else "month-first" if month_first else order
        if order and stated != order:
            raise ValueError(f"--dates is {order}, and the column is {stated}")
        day, month, year = r"(?P<d>\d{1,2})", r"(?P<m>\d{1,2})", r"(?P<y>\d{4})"
        dotted = (day, month) if order != "month-first" else (month, day)
        slashed = (day, month) if stated != "month-first" else (month, day)
        forms = (
            rf"{year}(?P<mark>[-/.]){month}(?P=mark){day}",
            r"(?P<y>(?:19|20)\d\d)(?P<m>\d\d)(?P<d>\d\d)",
            rf"{dotted[0]}\.{dotted[1]}\.{year}",
            rf"{slashed[0]}(?P<mark>[/-]){slashed[1]}(?P=mark){year}",
        )
        self._forms = [re.compile(form + CLOCK) for form in forms]

    def read(self, text: str) -> tuple[str, str]:
        """Return date "2024-05-23" and time of day of a text, "" for none. Raises ValueError."""
        text = whole(text.strip())  # 20240523.0
        # xeno-canto's unknown days
        if re.fullmatch(r"\d{4}[-/]\d\d[-/]00|0000.*|\d{4}[-/]00[-/]00", text):
            return "", ""
        try:
            day, rest = self._split(text)
        except ValueError as error:
            raise ValueError(
                str(error) if "write" in str(error) else f"{text!r} is no date: {error}"
            ) from None
        return day.isoformat(), time_of_day(rest) if rest else ""

    def _split(self, text: str) -> tuple[date, str]:
        for form in self._forms:
            if found := form.fullmatch(text):
                return date(int(found["y"]), int(found["m"]), int(found["d"])), found["clock"] or ""
        for form in WORDED:
            found = form.fullmatch(text)
            name = found["m"].casefold() if found else ""
            if found and (month := MONTHS.get(name[:4]) or MONTHS.get(name[:3])):
                return date(int(found["y"]), month, int(found["d"])), found["clock"] or ""
        raise ValueError(f"{text!r} is no date; write 2024-05-23")


def has_day(text: str) -> bool:
    """Whether a text begins with a date, as far as its form goes."""
    return re.match(r"\s*(\d{4}[-/.]\d|\d{1,2}([-/.])\d{1,2}\2\d{4})", text) is not None


def time_of_day(text: str) -> str:
    """Return a time of day as 05:30:00, with its zone if it has one. Raises ValueError."""
    text = re.sub(
        r"^\s*([012]\d)([0-5]\d)([0-5]\d)?\s*$",
        lambda each: ":".join(filter(None, each.groups())),
        text,
    )
    found = re.fullmatch(
        r"(\d{1,2})[:h.](\d\d)(?:[:.](\d\d)(?:[.,]\d+)?)? ?([AaPp])?\.?[Mm]?\.?(?:"
        r" ?(Z|UTC|[+-]\d\d:?\d\d))?(?:/.*)?",
        text.strip(),
    )
    if not found or (found[4] and not 1 <= int(found[1]) <= 12):
        raise ValueError(f"{text!r} is no time of day; write 05:30:00")
    hour = int(found[1]) % 12 + 12 * (found[4] in ("P", "p")) if found[4] else int(found[1])
    zone = {"Z": "+00:00", "UTC": "+00:00"}.get(found[5] or "", found[5] or "")
    return (
        datetime.fromisoformat(f"2000-01-01T{hour:02d}:{found[2]}:{found[3] or '00'}{zone}")
        .timetz()
        .isoformat()
    )
