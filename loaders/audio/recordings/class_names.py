"""The names of classes, their order, and other names for them."""

import csv
import re
import unicodedata
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Set
from typing import NamedTuple

from loaders.audio.recordings import tables
from loaders.audio.recordings.annotations import Errors
from loaders.base import DataError
from loaders.io import files

# Between labels in a field: it is enough that it is there, that one part is a label of its own, or
# that all are.
SEPARATORS: Mapping[str, Callable[[Iterable[bool]], bool]] = {
    **dict.fromkeys((";", "|", " / ", "\uff1b", "\u3001", "\uff0c"), lambda parts: True),
    **dict.fromkeys((" + ", " & ", " and ", ",", "/", "+"), any),
    **dict.fromkeys(("&", " "), all),
}
# Parts that are labels by their form: scientific names, and codes such as PIPPIP.
WHOLE = re.compile("[A-Z][a-z]{2,} [a-z]{3,}|[A-Z]{4,6}")
# A Latin letter next to a Greek or a Cyrillic one.
TWO_ALPHABETS = re.compile(r"[a-z][\u0370-\u04ff]|[\u0370-\u04ff][a-z]", re.IGNORECASE)
CODE = re.compile("[a-z]{6}[0-9]?|[A-Z]{4}")  # of eBird and of the Bird Banding Laboratory


class Classes(NamedTuple):
    """The names of classes, in order."""

    names: Sequence[str]
    by_synonym: Mapping[str, str]  # from names and synonyms, in lower case; empty: all are known

    def of(self, label: str) -> str | None:
        """Return the class of a label, or None if it is unknown."""
        if not self.by_synonym:
            return label
        return self.by_synonym.get(" ".join(label.split()).casefold())


def read(path: str, known: Collection[str] = (), *, synonyms: bool = True) -> Classes:
    """Read a file of a class a line: its name, then any ``synonyms``, separated as in a table.

    A name with a separator is in quotes, or is all of its line and one of the ``known`` names.
    Raises DataError: the file cannot be read, holds no class, gives one name to two classes, or
    has synonyms that nothing reads.
    """
    file = files.expanded(path)
    names: list[str] = []
    by_synonym: dict[str, str] = {}
    text = unicodedata.normalize("NFC", tables.text_of(file))
    for number, line in enumerate(files.lines(text), 1):
        if not line.strip() or line.startswith("#"):
            continue
        fields = _fields(line)
        bare_line = " ".join(line.split())
        if bare_line in known:
            fields = [bare_line]
        name = fields[0]
        if not name:
            raise DataError(
                f"{path}:{number} has no class before its synonyms; write NAME,SYNONYM,…"
            )
        if not synonyms and any(fields[1:]):
            raise DataError(
                f"{path}:{number} is {bare_line!r}; expected one name: write it in quotes if the"
                f' separator is a part of it, "{bare_line}", or omit what follows {name!r}'
            )
        names.append(name)
        for synonym in filter(None, fields):
            class_name = by_synonym.setdefault(synonym.casefold(), name)
            if class_name != name:
                raise DataError(
                    f"{path}:{number} gives {synonym!r} to {name!r}, and line before to"
                    f" {class_name!r}"
                )
    if not names:
        raise DataError(f"{path} holds no class; write one a line: NAME,SYNONYM,…")
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise DataError(f"{path} holds the class {twice!r} twice; omit one of the lines")
    return Classes(names, by_synonym)


def _fields(line: str) -> list[str]:
    """Return the name and the synonyms of a line, each of which may be in quotes."""
    without_quoted = re.sub(r'"[^"]*"', "", line)
    separator = tables.separator(without_quoted)
    (cells,) = csv.reader([line], delimiter=separator, skipinitialspace=True)
    return [" ".join(cell.split()).strip('"') for cell in cells]


def split_names(text: str, known: Collection[str]) -> list[str]:
    """Return the names between commas, of which those in quotes or ``known`` may have some.

    Raises DataError: a quote does not end.
    """
    try:
        (cells,) = csv.reader([text], skipinitialspace=True, strict=True)
    except (ValueError, csv.Error):
        raise DataError(f"{text[:80]!r} has a quote that does not end; end it") from None
    if '"' in text:
        return list(filter(None, map(str.strip, cells)))
    parts = text.split(",")
    names = []
    start = 0
    while start < len(parts):
        stop = len(parts)
        while stop > start + 1 and ",".join(parts[start:stop]).strip() not in known:
            stop -= 1
        names.append(",".join(parts[start:stop]).strip())
        start = stop
    return list(filter(None, names))


def refuse_joined(
    lines: Iterable[tuple[str, Sequence[str]]], errors: Errors, whole: Collection[str] = ()
) -> None:
    """Count the labels of (place, labels) that may be several, or are spelled in two ways.

    ``whole``: those that are names of one class each.
    """
    names: dict[str, str] = {}  # by label, the first place that has it
    for where, labels in lines:
        for label in labels:
            names.setdefault(label, where)
    _count_similar(names, errors)
    recurring = {between: _recurring(names, between) for between in SEPARATORS}
    # Some are known already from the name of their column.
    reported = {text for kind, text in errors.lines if kind == "joined-labels"}
    for name, where in names.items():
        if name in whole:
            continue
        score = re.search(r"[^\W\d_][\s,:_(]+(0?\.\d+|1\.0+|\d+ ?%)\)?$", name)
        if score:
            text = f"{where}: {name!r}; write {score[1]} into a column of its own"
            errors.add("joined-labels", text)
            continue
        for between in SEPARATORS:
            parts = [part.strip() for part in name.split(between)]
            if _are_labels(parts, between, names, recurring[between]):
                text = f"{where}: {name!r}; {_remedy(parts, between)}"
                if text not in reported:
                    errors.add("joined-labels", text)
                break


def _count_similar(names: Iterable[str], errors: Errors) -> None:
    """Count the labels that are spelled in two ways, or were read in a wrong encoding."""
    first_spellings: dict[str, str] = {}
    for name in names:
        first_spelling = first_spellings.setdefault(_core(name), name)
        repaired = _repaired(name)
        if first_spelling != name:
            errors.add("similar-labels", f"{first_spelling!r} and {name!r}")
        elif repaired != name:
            errors.add("similar-labels", f"{name!r} may be {repaired!r}, read in a wrong encoding")
        elif "\ufffd" in name or TWO_ALPHABETS.search(name):
            errors.add(
                "similar-labels",
                f"{ascii(name)} has a letter that was lost, or is of another alphabet",
            )


def _are_labels(
    parts: Sequence[str], between: str, names: Collection[str], recurring: Set[str]
) -> bool:
    """Return whether the parts of a label are labels themselves."""
    if len(parts) < 2 or not all(parts):
        return False
    are_names = [part in names for part in parts]
    is_enough = SEPARATORS[between]
    if is_enough(are_names) or not recurring.isdisjoint(parts):
        return True
    if between == " ":
        return any(are_names) and all(map(CODE.fullmatch, parts))
    return all(map(WHOLE.fullmatch, parts))


def _remedy(parts: Sequence[str], between: str) -> str:
    """Return what to do about a label of several parts, one of which may be a number."""
    numbers = [part for part in parts if re.fullmatch(r"[\d.]+%?", part)]
    if 0 < len(numbers) < len(parts):
        return f"write {numbers[0]} into a column of its own"
    return f"split it with --separator {between!r}, or keep it as one name: --separator none"


def _recurring(names: Iterable[str], between: str) -> set[str]:
    """Return parts that recur, elsewhere after a comma: "Bunting, Reed" is one label."""
    if between not in (",", "/", "+", " + ", "&"):
        return set()
    places: dict[str, set[int | str]] = {}  # where a part stands, or the labels that it is in
    for name in names:
        if between in name:
            for position, part in enumerate(name.split(between)):
                place = position if between in (",", "/") else name
                places.setdefault(part.strip(), set()).add(place)
    return {part for part in places if len(places[part]) > 1}


def _core(name: str) -> str:
    """Return the letters and digits of a label, by which two spellings of one are found."""
    text = unicodedata.normalize("NFKD", _repaired(name)).casefold()
    text = unicodedata.normalize("NFKC", re.sub(r"([a-z])[\u0300-\u036f]+", r"\1", text))
    return "".join(letter for letter in text if letter.isalnum()) or text


def _repaired(name: str) -> str:
    """Return a label that was written in UTF-8 and read in Windows-1252 or Latin-1 as it was."""
    if name.isascii():
        return name
    for encoding in ("cp1252", "latin-1"):
        try:
            return name.encode(encoding).decode()
        except UnicodeError:
            continue
    return name
