"""The values in cells: numbers, times, dates, answers. A text that is none is an error."""

import math
import re
from collections.abc import Callable, Iterable, Sequence
from datetime import date, datetime

from loaders.audio.recordings.answer_words import (
    CERTAIN,
    CONFIRMED,
    DENIED,
    JUDGEMENTS,
    NO,
    YES,
    is_open,
    says_open,
)


def _split(words: str) -> set[str]:
    return set(words.split(", "))


# Of R, pandas and SQL, and of people.
MISSING = {""} | _split(
    "NA, na, N/A, n/a, <NA>, NaN, nan, NAN, NULL, null, Null, None, none, NONE, n.a."
)
LETTERS = {"p": "yes", "a": "no"}  # of a column of presence and absence that holds nothing else
SLASHED = re.compile(r"\s*(\d{1,2})[/-](\d{1,2})[/-]\d{4}(?!\d)")
CLOCK = r"(?:[T ,_]+(?P<clock>.*))?"  # after a date
# A begin, and an end that has a date of its own.
INTERVAL = re.compile(
    r"(.*\d[Z\"']?)\s*(?:/|\u2013|\u2014|\bto\b|-|_)\s*(?:19|20)\d\d[-/.]?\d\d[-/.]?\d\d(?!\d).*"
)
WORDED = (
    re.compile(r"(?P<d>\d{1,2})\.?[ -]+(?P<m>[^\W\d_]{3,10})\.?[ ,-]+(?P<y>\d{4})" + CLOCK),
    re.compile(r"(?P<m>[^\W\d_]{3,10})\.? (?P<d>\d{1,2}),? (?P<y>\d{4})" + CLOCK),
)
WORDS = 100  # different spellings of answers in a column, at most
SPLIT_NAMES = "train test val valid validation dev eval evaluation holdout".split()
SPLITS = dict(zip(SPLIT_NAMES, SPLIT_NAMES, strict=True))
SPLITS |= {
    **dict.fromkeys(("training", "tr", "trn"), "train"),
    **dict.fromkeys(("testing", "te", "tst"), "test"),
}
SPLITS |= {f"{name} set": kind for name, kind in SPLITS.items()}
TIME_WORDS = set(
    "s sec secs second seconds m min mins minute minutes h hr hour hours ms d day days am pm t z"
    " utc gmt to bis until and ca".split()
)
ENGLISH_MONTHS = "jan feb mar apr may jun jul aug sep oct nov dec".split()
MONTHS = {name: month for month, name in enumerate(ENGLISH_MONTHS, start=1)}
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
# h:mm:ss, and the days that pandas writes before it
CLOCK_TIME = re.compile(r"(?:(\d+) days? )?(\d+):([0-5]?\d):([0-5]?\d(?:[.,]\d+)?)")
TIME_WITH_UNIT = re.compile(r"([\d.,]+) ?(ms|s|secs?|seconds?|min|minutes?)", re.IGNORECASE)
TIME_OF_DAY = re.compile(
    r"(?P<hour>\d{1,2})[:h.](?P<minute>\d\d)(?:[:.](?P<second>\d\d)(?:[.,]\d+)?)?"
    r" ?(?P<half>[AaPp])?\.?[Mm]?\.?(?: ?(?P<zone>Z|UTC|[+-]\d\d:?\d\d))?(?:/.*)?"
)
ANGLE = r"[+-]?\d+(?:[.,]\d+)?"
# marks and letters that may stand around the numbers of an angle
ANGLE_MARKS = r"[A-Za-z\u00b0\u00ba'\u2019\u2032\"\u201d\u2033: ]"


def given(text: str) -> bool:
    return text not in MISSING


def number(text: str | None, comma: bool = True) -> float | None:
    """Return a number with a point, or a comma, or None for an empty field. Raises ValueError."""
    if text is None:
        return None
    text = text.strip()
    if text in MISSING:
        return None
    has_decimal_comma = comma and "," in text and "." not in text
    value = float(text.replace(",", ".") if has_decimal_comma else text)
    if not math.isfinite(value) or "_" in text:
        raise ValueError(f"{text!r} is not a number")
    return value


def minutes(text: str) -> float | None:
    """Return a time in s of m:ss, or of what `seconds` reads. Raises ValueError."""
    clock = re.fullmatch(r"(\d+):([0-5]?\d(?:[.,]\d+)?)", text.strip())
    if clock is None:
        return seconds(text)
    return int(clock[1]) * 60 + _with_point(clock[2])


def _with_point(digits: str) -> float:
    return float(digits.replace(",", "."))


def span(text: str) -> tuple[float, float] | None:
    """Return start and end of "0_5" or "00:05-00:10", None if empty. Raises ValueError."""
    if not given(text):
        return None
    bare = text.strip()
    time = r"(\d+(?:[.:]\d+)*) ?s?"
    between = r"-|\u2013|\u2014|_|to|\.\.+"
    if bare.startswith(("[", "(")):
        between += r"|,|;"
    times = re.fullmatch(rf"[\[(]? ?{time} ?(?:{between}) ?{time} ?[\])]?", bare)
    if times:
        start = minutes(times[1])
        end = minutes(times[2])
        if start is not None and end is not None and start < end:
            return start, end
    raise ValueError(f"{text!r} is no range of times")


def seconds(text: str | None, scale: float = 1.0, comma: bool = True) -> float | None:
    """Return s of 12, 12 s, 500 ms, h:mm:ss or 0 days h:mm:ss, None if empty. Raises ValueError."""
    text = (text or "").strip()
    if ":" in text and (clock := CLOCK_TIME.fullmatch(text)):
        days = int(clock[1] or 0)
        full_minutes = days * 1440 + int(clock[2]) * 60 + int(clock[3])
        return full_minutes * 60 + _with_point(clock[4])
    if time := TIME_WITH_UNIT.fullmatch(text):
        unit = time[2][:2].lower()
        unit_scale = {"ms": 1e-3, "mi": 60.0}.get(unit, 1.0)
        if scale not in (1.0, unit_scale):
            raise ValueError(f"{text!r} has another unit than its column")
        text = time[1]
        scale = unit_scale
    value = number(text, comma)
    return None if value is None else round(value * scale, 9)


def _filled(texts: Iterable[str]) -> list[str]:
    return list(filter(given, texts))


def _can_read_all(texts: Iterable[str], read: Callable[[str], object]) -> bool:
    filled_texts = _filled(texts)
    try:
        return bool(filled_texts) and None not in map(read, filled_texts)
    except ValueError:
        return False


def are_numbers(texts: Iterable[str]) -> bool:
    return _can_read_all(texts, number)


def are_spans(texts: Iterable[str]) -> bool:
    return _can_read_all(texts, span)


def are_clocks(texts: Iterable[str]) -> bool:
    """Whether all are times with a colon or a unit: 0:12, 0:00:12, 12 s, 1m12s, 1'12."""
    form = re.compile(
        r"\d+(:[0-5]?\d){1,2}([.,]\d+)?|(\d+ ?(m|min|['\u2032]) ?)?\d+([.,]\d+)?"
        r" ?(s|sec|\"|\u2033)|\d+['\u2032]\d\d"
    )
    filled_texts = [text.strip() for text in _filled(texts)]
    return bool(filled_texts) and all(map(form.fullmatch, filled_texts))


def like_times(texts: Iterable[str]) -> bool:
    """Whether most begin with a number and have words of times alone: ca. 2, 12:00:02 AM."""
    filled_texts = _filled(texts)
    n_times = sum(map(_is_like_time, filled_texts))
    return 2 * n_times >= len(filled_texts) > 0


def _is_like_time(text: str) -> bool:
    bare = re.sub(r"^[^\w]*((ca|approx|about|at)\b[^\w]*)?", "", text.casefold())
    return bare[:1].isdigit() and set(re.findall(r"[^\W\d_]+", bare)) <= TIME_WORDS


def are_parts(files: Sequence[str], texts: Sequence[str]) -> bool:
    """Whether texts name recordings with a time: soundscape_123_5 of soundscape_123.ogg."""
    for file, text in zip(files, texts, strict=True):
        file_name = re.split(r"[/\\\\]", file)[-1]
        stem = re.escape(file_name.rpartition(".")[0] or file)
        if not re.fullmatch(rf"{stem}([-_]\d+(\.\d+)?){{1,2}}(\.\w+)?", text):
            return False
    return True


def are_hours(texts: Sequence[str], dated: bool) -> bool:
    """Whether numbers are times of day such as 0530: one begins with 0, or the table has dates."""
    filled_texts = _filled(texts)
    if not filled_texts or not (dated or any(text[0] == "0" for text in filled_texts)):
        return False
    time_of_day = re.compile(r"([01]\d|2[0-3])[0-5]\d([0-5]\d)?")
    return all(map(time_of_day.fullmatch, filled_texts))


def are_times(texts: Iterable[str]) -> bool:
    return _can_read_all(texts, seconds)


def answer(text: str) -> bool | None:
    """Yes or no, None if it is neither."""
    folded = text.casefold()
    if folded in YES:
        return True
    if folded in NO or not given(text):
        return False
    return None


def are_posneg(texts: Iterable[str]) -> bool:
    """Whether a column holds the words of DCASE alone: POS, NEG, UNK."""
    folded_texts = set(map(str.casefold, _filled(texts)))
    return bool(folded_texts) and folded_texts <= {"pos", "neg", "unk"}


def are_nearly_answers(texts: Sequence[str]) -> bool:
    """Whether a column may be one of yes and no: numbers, or answers in half of its cells."""
    if are_numbers(texts):
        return True
    filled_texts = _filled(texts)
    n_answers = sum(answer(text) is not None for text in filled_texts)
    return 0 < len(filled_texts) <= 2 * n_answers


def is_share(text: str) -> bool:
    try:
        return 0 <= (number(text) or 0) <= 1
    except ValueError:
        return False


def are_letters(texts: Iterable[str]) -> bool:
    """Whether a column holds P and A alone, for presence and absence."""
    return _spellings(texts) == set(LETTERS)


def verdict(text: str, letters: bool = False) -> str | None:
    """Return "yes", "no", "skip", "" of an empty field, or None; ``letters``: of P and A alone."""
    folded = text.casefold()
    if letters and folded in LETTERS:
        return LETTERS[folded]
    if not given(text):
        return ""
    if is_open(text):
        return "skip"
    bare = " ".join(re.findall(r"[^\W_]+", folded))  # of true_positive
    judgement = bare if bare in JUDGEMENTS else folded
    if judgement in CONFIRMED or folded in CERTAIN:
        return "yes"
    if judgement in DENIED:
        return "no"
    is_yes = answer(text)
    if is_yes is None:
        return None
    return "yes" if is_yes else "no"


def _spellings(texts: Iterable[str]) -> set[str]:
    """Return the different cells without case, or none if there are too many for answers."""
    spellings = set(texts)
    if len(spellings) > WORDS:
        return set()
    return set(map(str.casefold, _filled(spellings)))


def are_verdicts(texts: Iterable[str]) -> bool:
    """Whether all are verdicts on labels, some in words used for nothing else: rejected, FP.

    Confirmed is such a word next to an answer that is none, such as pending.
    """
    verdicts = {text: verdict(text) for text in _spellings(texts)}
    if None in verdicts.values():
        return False
    own_verdicts = {verdicts[text] for text in verdicts if answer(text) is None}
    return "no" in own_verdicts or {"yes", "skip"} <= own_verdicts


def are_answers(texts: Iterable[str], both: bool = False) -> bool:
    """Whether a column holds yes and no alone, some of them open, and both if asked for."""
    spellings = _spellings(texts)
    closed = {text for text in spellings if not says_open(text)}
    answers = set(map(answer, closed))
    if not closed or None in answers:
        return False
    return not both or len(answers) == 2 or len(closed) < len(spellings)


def are_splits(texts: Sequence[str], train: bool = False) -> bool:
    """Whether all are names of splits, and one of them is train if that is asked for."""
    splits = {SPLITS.get(text.casefold()) for text in texts}
    if not splits or None in splits:
        return False
    return "train" in splits or not train


def split_of(text: str) -> str:
    """Return the name of a split in one spelling, and 5 for a fold 5.0."""
    return SPLITS.get(text.casefold(), whole(text))


def is_sheet_error(text: str) -> bool:
    """Whether a cell holds an error of a spreadsheet: #REF!, #N/A, #NOM?, #¡VALOR!."""
    if not text.startswith("#"):
        return False
    return bool(re.fullmatch(r"#[\u00a1\u00bf]?(?:[^\W\d_]+/?\d?[!?]|N/?[ADV])", text))


def degrees(text: str, negative: str) -> float:
    """Return degrees of 51.1, 51,1, 51.1N or 51°06'36"N. Below 0: ``negative``, S or W.

    Raises ValueError: it is no number of degrees, or no place on Earth.
    """
    if re.fullmatch(r"[+-]?\d+(\.\d*)?([eE][+-]?\d+)?", text):
        text = f"{float(text):f}"
    letters = re.findall(r"[A-Z]", text.upper())
    with_minus = text.replace("\u2212", "-")
    numbers = re.findall(ANGLE, with_minus)
    odd_marks = re.sub(rf"{ANGLE}|{ANGLE_MARKS}", "", with_minus)
    is_angle = not odd_marks and 1 <= len(numbers) <= 3
    directions = (["N"], ["S"]) if negative == "S" else (["E"], ["W"])
    if not is_angle or (letters and letters not in directions):
        raise ValueError(f"{text!r} is no number of degrees")
    parts = [abs(_with_point(digits)) for digits in numbers]
    # degrees, minutes and seconds
    value = sum(part / 60.0**power for power, part in enumerate(parts))
    largest = 90 if negative == "S" else 180
    if value > largest or any(part >= 60 for part in parts[1:]):
        raise ValueError(f"{text!r} is no place on Earth")
    is_below = numbers[0].startswith("-") or letters == [negative]
    return round(-value if is_below else value, 9)


def whole(text: str) -> str:
    """Return a whole number as it is counted: "5" for 5.0, which pandas makes of it."""
    return text.partition(".")[0] if "." in text and re.fullmatch(r"-?\d+\.0+", text) else text


class Dates:
    """The dates of a column, which together decide whether the day or the month is first."""

    def __init__(self, texts: Sequence[str], order: str = ""):
        """Find the order of days and months, or ``order``. Raises ValueError: nothing tells."""
        column_order = _order_of(texts, order)
        if order and column_order != order:
            raise ValueError(f"--dates is {order}, and the column is {column_order}")
        day = r"(?P<d>\d{1,2})"
        month = r"(?P<m>\d{1,2})"
        year = r"(?P<y>\d{4})"
        dotted = (month, day) if order == "month-first" else (day, month)
        slashed = (month, day) if column_order == "month-first" else (day, month)
        forms = (
            rf"{year}(?P<mark>[-/.]){month}(?P=mark){day}",
            r"(?P<y>(?:19|20)\d\d)(?P<m>\d\d)(?P<d>\d\d)",
            rf"{dotted[0]}\.{dotted[1]}\.{year}",
            rf"{slashed[0]}(?P<mark>[/-]){slashed[1]}(?P=mark){year}",
        )
        self._forms = [re.compile(form + CLOCK) for form in forms]

    def read(self, text: str) -> tuple[str, str]:
        """Return date "2024-05-23" and time of day of a text, "" for none.

        Of a begin and an end, those of the begin. Raises ValueError.
        """
        text = whole(text.strip())  # 20240523.0
        if interval := INTERVAL.fullmatch(text):
            text = interval[1]
        # xeno-canto's unknown days
        if re.fullmatch(r"\d{4}[-/]\d\d[-/]00|0000.*|\d{4}[-/]00[-/]00", text):
            return "", ""
        try:
            day, clock = self._split(text)
        except ValueError as error:
            message = str(error)
            if "write" not in message:
                message = f"{text!r} is no date: {error}"
            raise ValueError(message) from None
        return day.isoformat(), time_of_day(clock) if clock else ""

    def _split(self, text: str) -> tuple[date, str]:
        """Return the day of a text and its clock. Raises ValueError."""
        for form in self._forms:
            if match := form.fullmatch(text):
                day = date(int(match["y"]), int(match["m"]), int(match["d"]))
                return day, match["clock"] or ""
        for form in WORDED:
            match = form.fullmatch(text)
            month = _month_of(match["m"]) if match else None
            if match and month:
                day = date(int(match["y"]), month, int(match["d"]))
                return day, match["clock"] or ""
        raise ValueError(f"{text!r} is no date; write 2024-05-23")


def _order_of(texts: Sequence[str], order: str) -> str:
    """Return the order of days and months in slashed dates, ``order`` if no date tells.

    Raises ValueError: two dates contradict each other, or nothing tells.
    """
    day_first = ""
    month_first = ""
    ambiguous = ""
    for text in texts:
        match = SLASHED.match(text)
        if match is None:
            continue
        if int(match[1]) > 12:
            day_first = day_first or text
        if int(match[2]) > 12:
            month_first = month_first or text
        if int(match[1]) != int(match[2]):
            ambiguous = ambiguous or text
    if day_first and month_first:
        raise ValueError(
            f"{day_first!r} has its day first, and {month_first!r} its month; write 2024-05-23"
        )
    if day_first:
        return "day-first"
    if month_first:
        return "month-first"
    if ambiguous and not order:
        raise ValueError(
            f"{ambiguous!r} and all others may have day or month first; say --dates day-first or"
            " month-first"
        )
    return order


def _month_of(word: str) -> int | None:
    name = word.casefold()
    return MONTHS.get(name[:4]) or MONTHS.get(name[:3])


def has_day(text: str) -> bool:
    """Whether a text begins with a date, as far as its form goes."""
    return re.match(r"\s*(\d{4}[-/.]\d|\d{1,2}([-/.])\d{1,2}\2\d{4})", text) is not None


def time_of_day(text: str) -> str:
    """Return a time of day as 05:30:00, with its zone if it has one. Raises ValueError."""
    if digits := re.fullmatch(r"\s*([012]\d)([0-5]\d)([0-5]\d)?\s*", text):
        text = ":".join(filter(None, digits.groups()))
    clock = TIME_OF_DAY.fullmatch(text.strip())
    if clock is None or (clock["half"] and not 1 <= int(clock["hour"]) <= 12):
        raise ValueError(f"{text!r} is no time of day; write 05:30:00")
    hour = int(clock["hour"])
    if clock["half"]:
        hour %= 12
        if clock["half"] in ("P", "p"):
            hour += 12
    second = clock["second"] or "00"
    zone = clock["zone"] or ""
    if zone in ("Z", "UTC"):
        zone = "+00:00"
    moment = datetime.fromisoformat(f"2000-01-01T{hour:02d}:{clock['minute']}:{second}{zone}")
    return moment.timetz().isoformat()
