"""The values in a table's cells: numbers, times, dates, answers. A text that is none is an error, never another value."""

import re
from collections.abc import Iterable, Sequence
from datetime import date, datetime

MISSING = {"", "NA", "N/A", "<NA>", "NaN", "nan", "NULL", "null", "None"}  # of R, pandas and SQL
YES = {"1", "1.0", "true", "t", "yes", "y", "x", "present", "correct", "positive", "pos"}
NO = {"0", "0.0", "false", "f", "no", "n", "-", "absent", "not present", "incorrect", "negative", "neg"}
OPEN = {"skip", "unknown", "unk", "unvalidated", "not validated", "(not validated)", "undefined"}
MONTHS = "jan feb mar apr may jun jul aug sep oct nov dec".split()


def given(text: str) -> bool:
    """Whether a cell holds anything."""
    return text not in MISSING


def number(text: str | None, comma: bool = True) -> float | None:
    """Return a number with a point, or with a comma if the table allows it, or None for an empty field. Raises ValueError."""
    if text is None or (text := text.strip()) in MISSING:
        return None
    value = float(text.replace(",", ".") if comma and "," in text and "." not in text else text)
    if value != value or value in (float("inf"), float("-inf")) or "_" in text:
        raise ValueError(f"{text!r} is not a number")
    return value


def seconds(text: str | None, scale: float = 1.0, comma: bool = True) -> float | None:
    """Return a time in s of a number, or of h:mm:ss; None for an empty field. Raises ValueError."""
    if text and ":" in text and (found := re.fullmatch(r"(\d+):([0-5]?\d):([0-5]?\d(?:[.,]\d+)?)", text.strip())):
        return int(found[1]) * 3600 + int(found[2]) * 60 + float(found[3].replace(",", "."))
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


def are_times(texts: Iterable[str]) -> bool:
    return _all(texts, seconds)


def answer(text: str) -> bool | None:
    """Yes or no, None if it is neither."""
    folded = text.casefold()
    return True if folded in YES else False if folded in NO or not given(text) else None


def are_answers(texts: Iterable[str]) -> bool:
    """Whether a column holds nothing but yes and no, and some of them."""
    return _all(texts, answer)


def whole(text: str) -> str:
    """Return a whole number as it is counted: "5" for 5.0, which pandas makes of 5 next to an empty field."""
    return text.partition(".")[0] if "." in text and re.fullmatch(r"-?\d+\.0+", text) else text


class Dates:
    """The dates of a column, which together decide whether the day or the month is first."""

    def __init__(self, texts: Sequence[str], order: str = ""):
        """Find the order of days and months.

        Raises ValueError: nothing tells, and ``order`` ("day-first", "month-first") is empty.
        """
        pairs = [(int(found[1]), int(found[2])) for text in texts if (found := self._slashed(text))]
        day_first, month_first = any(a > 12 for a, _ in pairs), any(b > 12 for _, b in pairs)
        if day_first and month_first:
            one = next(text for text in texts if (found := self._slashed(text)) and int(found[1]) > 12)
            two = next(text for text in texts if (found := self._slashed(text)) and int(found[2]) > 12)
            raise ValueError(f"{one!r} has its day first, and {two!r} its month; write 2024-05-23")
        if not (day_first or month_first or order) and (odd := next((p for p in pairs if p[0] != p[1]), None)):
            text = next(text for text in texts if (found := self._slashed(text)) and (int(found[1]), int(found[2])) == odd)
            raise ValueError(f"{text!r} and all others may have day or month first; say --dates day-first or month-first")
        stated = "day-first" if day_first else "month-first" if month_first else order
        if order and stated != order:
            raise ValueError(f"--dates is {order}, and the column is {stated}")
        self._day_first = stated != "month-first"

    @staticmethod
    def _slashed(text: str) -> re.Match[str] | None:
        return re.match(r"\s*(\d{1,2})[/-](\d{1,2})[/-]\d{4}(?!\d)", text)

    def read(self, text: str) -> tuple[str, str]:
        """Date "2024-05-23" and time of day of a text, "" if it has none. Raises ValueError: it is none, or is impossible."""
        text = text.strip()
        if re.fullmatch(r"\d{4}[-/]\d\d[-/]00|0000.*|\d{4}[-/]00[-/]00", text):  # xeno-canto's unknown days
            return "", ""
        try:
            day, rest = self._split(text)
        except ValueError as error:
            raise ValueError(str(error) if "write" in str(error) else f"{text!r} is no date: {error}") from None
        return day.isoformat(), time_of_day(rest) if rest else ""

    def _split(self, text: str) -> tuple[date, str]:
        clock = r"(?:[T ,]+(.*))?"
        if found := re.fullmatch(r"(\d{4})([-/.])(\d{1,2})\2(\d{1,2})" + clock, text):
            return date(int(found[1]), int(found[3]), int(found[4])), found[5] or ""
        if found := re.fullmatch(r"((?:19|20)\d\d)(\d\d)(\d\d)" + clock, text):
            return date(int(found[1]), int(found[2]), int(found[3])), found[4] or ""
        if found := re.fullmatch(r"(\d{1,2})\.(\d{1,2})\.(\d{4})" + clock, text):
            return date(int(found[3]), int(found[2]), int(found[1])), found[4] or ""
        if found := re.fullmatch(r"(\d{1,2})([/-])(\d{1,2})\2(\d{4})" + clock, text):
            day, month = (found[1], found[3]) if self._day_first else (found[3], found[1])
            return date(int(found[4]), int(month), int(day)), found[5] or ""
        for form in (
            r"(?P<d>\d{1,2})[ -]+(?P<m>[A-Za-z]{3,9})\.?[ ,-]+(?P<y>\d{4})",
            r"(?P<m>[A-Za-z]{3,9})\.? (?P<d>\d{1,2}),? (?P<y>\d{4})",
        ):
            found = re.fullmatch(form + clock, text)
            if found and (name := found["m"][:3].casefold()) in MONTHS:
                return date(int(found["y"]), MONTHS.index(name) + 1, int(found["d"])), found[4] or ""
        raise ValueError(f"{text!r} is no date; write 2024-05-23")


def time_of_day(text: str) -> str:
    """Return a time of day as 05:30:00, with its zone if it has one. Raises ValueError."""
    found = re.fullmatch(
        r"(\d{1,2})[:h.](\d\d)(?:[:.](\d\d)(?:[.,]\d+)?)? ?([AaPp])?\.?[Mm]?\.?(?: ?(Z|UTC|[+-]\d\d:?\d\d))?(?:/.*)?",
        text.strip(),
    )
    if not found or (found[4] and not 1 <= int(found[1]) <= 12):
        raise ValueError(f"{text!r} is no time of day; write 05:30:00")
    hour = int(found[1]) % 12 + 12 * (found[4] in ("P", "p")) if found[4] else int(found[1])
    zone = {"Z": "+00:00", "UTC": "+00:00"}.get(found[5] or "", found[5] or "")
    return datetime.fromisoformat(f"2000-01-01T{hour:02d}:{found[2]}:{found[3] or '00'}{zone}").timetz().isoformat()
