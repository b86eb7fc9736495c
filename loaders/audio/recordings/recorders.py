"""Date, time, place and site in the file names of recorders, by their published forms.

Recorder, and the names that it writes:

    AudioMoth       20230501_053000.WAV, …T.WAV (triggered), 5E90A4D4.WAV (old)
    Song Meter      SITE_20160506_175304.wav, also $ or +, SITE_0+1_… (channels), …_000.wav (part)
    Frontier Labs   S20240815T095156.839419+1000_E20240815T100151.840193+1000_-31.51+143.13.wav
    BAR-LT          20190401T120000+1000_REC.flac, also with [-27.38 152.87]
    Swift           SITE_20190526_053000Z.flac, SITE_20190526_053000-0400.flac
    Arbimon         SITE-2015-06-01_08-30.flac
    others          a date and a time anywhere (2023-05-01T05-30-00Z), a date between separators
"""

import re
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta

_DATE = r"(?P<year>(?:19|20)\d\d)(?P<dash>[-_.]?)(?P<month>0[1-9]|1[0-2])(?P=dash)(?P<day>0[1-9]|[12]\d|3[01])"
_TIME = r"(?P<hour>[01]\d|2[0-3])(?P<colon>[-_:.]?)(?P<minute>[0-5]\d)(?P=colon)(?P<second>[0-5]\d)(?:[.,]\d+)?"
_ZONE = r"(?:_?(?P<zone>Z|[+-]\d{2}:?\d{2})(?!\d))?"
_PLACE = (
    r"(?P<latitude>[+-]?\d{1,2}\.\d+)(?P<between> ?,? ?)(?P<longitude>(?:(?<="
    r" )|(?<=,)|(?=[+-]))[+-]?\d{1,3}\.\d+)"
)
# In order: the first that is found in a name, from left to right.
FORMS = tuple(
    re.compile(form)
    for form in (
        rf"^(?:(?P<site>.+)_)?S{_DATE}T{_TIME}{_ZONE}_E\d{{8}}T[\d.+Z-]+(?:_{_PLACE})?",
        rf"(?<!\d){_DATE}T{_TIME}{_ZONE}(?=_).*\[{_PLACE}\]",
        (
            rf"(?:^(?P<site>.+?)(?:_(?:0\+1|0\+|\+1))?[_ -]|(?<!\d)){_DATE}[T_"
            rf" $+-]?{_TIME}{_ZONE}(?!\d)"
        ),
        rf"^(?P<site>.+)-{_DATE}_(?P<hour>[01]\d|2[0-3])-(?P<minute>[0-5]\d)(?P<second>)(?P<zone>)$",
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
        if found := form.search(stem):
            part = found.groupdict()
            day = f"{part['year']}-{part['month']}-{part['day']}"
            about = stamp(
                f"{day}T{part['hour']}:{part['minute']}:{part['second'] or '00'}{part['zone'] or ''}"
            )
            if about and (site := (part.get("site") or "").rstrip("_- ")):
                about["site"] = site
            if about and part.get("latitude"):
                about |= place(part["latitude"], part["longitude"])
            return about
    if found := _DAY.search(stem):
        return stamp(f"{found['year']}-{found['month']}-{found['day']}T00:00:00", clock=False)
    return {}


def stamp(text: str, clock: bool = True) -> dict[str, str]:
    """date "2023-05-01" and time "05:30:00+02:00" of an ISO 8601 text, or nothing."""
    try:
        when = datetime.fromisoformat(text)
    except ValueError:
        return {}
    zone = when.utcoffset()
    when -= timedelta(microseconds=when.microsecond)
    time = when.time().isoformat() + ("" if zone is None else when.isoformat()[19:])
    return {"date": when.date().isoformat()} | ({"time": time} if clock else {})


def differ(name: Mapping[str, str], header: Mapping[str, str]) -> bool:
    """Whether a name's and a header's begins are seconds apart, in local time and in UTC."""
    stated, kept = _when(name), _when(header)
    if not stated or not kept or "time" not in name:
        return False
    apart = [abs(stated.replace(tzinfo=None) - kept.replace(tzinfo=None))]
    if kept.tzinfo:  # a name without a zone may be in UTC
        apart.append(abs((stated if stated.tzinfo else stated.replace(tzinfo=UTC)) - kept))
    return min(apart) > timedelta(seconds=5)


def other_day(name: str, stated: str) -> str:
    """Return the date in a file's name if it is over a day from one stated elsewhere, or ""."""
    own, other = _when(from_name(name)), _when({"date": stated})
    far = own and other and abs(own.date() - other.date()) > timedelta(days=1)
    return own.date().isoformat() if own and far else ""


def _when(about: Mapping[str, str]) -> datetime | None:
    try:
        return datetime.fromisoformat(f"{about['date']}T{about.get('time', '00:00:00')}")
    except (KeyError, ValueError):
        return None


def place(latitude: str, longitude: str) -> dict[str, str]:
    """Latitude and longitude in degrees, or nothing if they are no place on Earth."""
    try:
        inside = abs(float(latitude)) <= 90 and abs(float(longitude)) <= 180
    except ValueError:
        return {}
    return {"latitude": str(float(latitude)), "longitude": str(float(longitude))} if inside else {}
