"""Date, time, place and site in the file names of recorders, by their published forms.

Recorder, and the names that it writes:

    AudioMoth       20230501_053000.WAV, …T.WAV (triggered), 5E90A4D4.WAV (old)
    Song Meter      SITE_20160506_175304.wav, also $ or +, SITE_0+1_… (channels), …_000.wav (part)
    Frontier Labs   S20240815T095156.839419+1000_E20240815T100151.840193+1000_-31.51+143.13.wav
    BAR-LT          20190401T120000+1000_REC.flac, also with [-27.38 152.87]
    Swift           SITE_20190526_053000Z.flac, SITE_20190526_053000-0400.flac
    Arbimon         SITE-2015-06-01_08-30.flac
    SoundTrap       1678036994.210324221550.wav, SITE_671379494_181031200003Z.flac
    HARP            SITE_01_080804_230000.d100.x.wav, SITE_01_170716_180000_df100.x.wav
    WISPR           WISPR_241021_004352.wav, SITE_WISPR_241021_004352.wav
    others          a date and a time anywhere (2023-05-01T05-30-00Z), a date between separators
"""

import re
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta

_DATE = (
    r"(?P<year>(?:19|20)\d\d)(?P<dash>[-_.]?)"
    r"(?P<month>0[1-9]|1[0-2])(?P=dash)(?P<day>0[1-9]|[12]\d|3[01])"
)
_TIME = (
    r"(?P<hour>[01]\d|2[0-3])(?P<colon>[-_:.]?)"
    r"(?P<minute>[0-5]\d)(?P=colon)(?P<second>[0-5]\d)(?:[.,]\d+)?"
)
# A year of two digits is read in the forms of a few recorders alone: others write 010524 for May.
_SHORT_DATE = r"(?P<year>[0-6]\d)(?P<month>0[1-9]|1[0-2])(?P<day>0[1-9]|[12]\d|3[01])"
_SHORT_TIME = r"(?P<hour>[01]\d|2[0-3])(?P<minute>[0-5]\d)(?P<second>[0-5]\d)(?P<zone>Z)?"
_ZONE = r"(?:_?(?P<zone>Z|[+-]\d{2}:?\d{2})(?!\d))?"
_PLACE = (
    r"(?P<latitude>[+-]?\d{1,2}\.\d+)(?P<between> ?,? ?)"
    r"(?P<longitude>(?:(?<= )|(?<=,)|(?=[+-]))[+-]?\d{1,3}\.\d+)"
)
# In order: the first that is found in a name, from left to right.
FORMS = tuple(
    re.compile(form)
    for form in (
        rf"^(?:(?P<site>.+)_)?S{_DATE}T{_TIME}{_ZONE}_E\d{{8}}T[\d.+Z-]+(?:_{_PLACE})?",
        rf"(?<!\d){_DATE}T{_TIME}{_ZONE}(?=_).*\[{_PLACE}\]",
        # Of a begin and an end, the begin: a site is no date.
        rf"(?:(?<!\d)|^(?P<site>.+?)(?:_(?:0\+1|0\+|\+1))?[_ -])"
        rf"{_DATE}[T_ $+-]?{_TIME}{_ZONE}(?!\d)",
        rf"^(?P<site>.+)-{_DATE}_"
        r"(?P<hour>[01]\d|2[0-3])-(?P<minute>[0-5]\d)(?P<second>)(?P<zone>)$",
        rf"^(?P<site>(?:.+[_.])?(?:\d{{3,10}}(?=\.)|\d{{8,10}}(?=_)))[._]"
        rf"{_SHORT_DATE}{_SHORT_TIME}(?!\d)",
        rf"^(?:(?P<site>.+)[_-])?{_SHORT_DATE}_{_SHORT_TIME}(?:[._]df?\d+)*\.x$",
        rf"^(?:(?P<site>.+)[_-])?(?i:WISPR)\d?[_-]"
        rf"{_SHORT_DATE}[_-]{_SHORT_TIME}(?!\d)",
    )
)
_DAY = re.compile(rf"(?<![^\W_]){_DATE}(?![^\W_])")
_SECONDS = re.compile(r"[456][0-9A-F]{7}")  # since 1970, in hexadecimal


def from_name(name: str) -> dict[str, str]:
    """Date, time, site, latitude and longitude of a file name, as far as it has them."""
    stem = name.rpartition(".")[0]
    if _SECONDS.fullmatch(stem) and not re.fullmatch(r"\d+", stem):
        return stamp(datetime.fromtimestamp(int(stem, 16), UTC).isoformat())
    for form in FORMS:
        match = form.search(stem)
        if match:
            return _from_parts(match.groupdict())
    day = _DAY.search(stem)
    if day:
        return stamp(f"{day['year']}-{day['month']}-{day['day']}T00:00:00", clock=False)
    return {}


def _from_parts(part: Mapping[str, str | None]) -> dict[str, str]:
    """Return what the named groups of a form state, or nothing if their date is none."""
    year = f"20{part['year']}"[-4:]  # of one of two digits, in this century
    day = f"{year}-{part['month']}-{part['day']}"
    time = f"{part['hour']}:{part['minute']}:{part['second'] or '00'}{part['zone'] or ''}"
    facts = stamp(f"{day}T{time}")
    if not facts:
        return {}
    site = (part.get("site") or "").rstrip("_- ")
    if site:
        facts["site"] = site
    latitude, longitude = part.get("latitude"), part.get("longitude")
    if latitude and longitude:
        facts |= place(latitude, longitude)
    return facts


def stamp(text: str, clock: bool = True) -> dict[str, str]:
    """date "2023-05-01" and time "05:30:00+02:00" of an ISO 8601 text, or nothing."""
    try:
        when = datetime.fromisoformat(text)
    except ValueError:
        return {}
    date = when.date().isoformat()
    if not clock:
        return {"date": date}
    when -= timedelta(microseconds=when.microsecond)
    zone = "" if when.utcoffset() is None else when.isoformat()[19:]
    return {"date": date, "time": when.time().isoformat() + zone}


def differ(name: Mapping[str, str], header: Mapping[str, str]) -> bool:
    """Whether a name's and a header's begins are seconds apart, in local time and in UTC."""
    named = _when(name)
    in_header = _when(header)
    if not named or not in_header or "time" not in name:
        return False
    gap = abs(named.replace(tzinfo=None) - in_header.replace(tzinfo=None))
    if in_header.tzinfo:  # a name without a zone may be in UTC
        in_utc = named if named.tzinfo else named.replace(tzinfo=UTC)
        gap = min(gap, abs(in_utc - in_header))
    return gap > timedelta(seconds=5)


def other_day(name: str, stated: str) -> str:
    """Return the date in a file's name if it is over a day from one stated elsewhere, or ""."""
    named = _when(from_name(name))
    elsewhere = _when({"date": stated})
    if not named or not elsewhere or abs(named.date() - elsewhere.date()) <= timedelta(days=1):
        return ""
    return named.date().isoformat()


def _when(about: Mapping[str, str]) -> datetime | None:
    try:
        return datetime.fromisoformat(f"{about['date']}T{about.get('time', '00:00:00')}")
    except (KeyError, ValueError):
        return None


def place(latitude: str, longitude: str) -> dict[str, str]:
    """Latitude and longitude in degrees, or nothing if they are no place on Earth."""
    try:
        degrees = float(latitude), float(longitude)
    except ValueError:
        return {}
    is_on_earth = abs(degrees[0]) <= 90 and abs(degrees[1]) <= 180
    if not is_on_earth:
        return {}
    return {"latitude": str(degrees[0]), "longitude": str(degrees[1])}
