"""The names of classes, their order, and other names for them."""

import re
import unicodedata
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from loaders.audio.recordings import tables
from loaders.audio.recordings.annotations import Errors
from loaders.base import DataError
from loaders.io import files

# Between labels in a field: it is enough that it is there, that one part is a label of its own, or
# that all are.
SEPARATORS: Sequence[tuple[str, Callable[[Iterable[bool]], bool]]] = (
    *((text, lambda parts: True) for text in (";", "|", " / ", "\uff1b", "\u3001", "\uff0c")),
    *((text, any) for text in (" + ", " & ", " and ", ",", "/", "+")),
    *((text, all) for text in ("&", " ")),
)
# Parts that are labels by their form: scientific names, and codes such as PIPPIP.
WHOLE = re.compile("[A-Z][a-z]{2,} [a-z]{3,}|[A-Z]{4,6}")
CODE = re.compile("[a-z]{6}[0-9]?|[A-Z]{4}")  # of eBird and of the Bird Banding Laboratory


class Classes(NamedTuple):
    """names: in order. known: lower-case names and synonyms to classes; empty: all are."""

    names: Sequence[str]
    known: Mapping[str, str]

    def of(self, label: str) -> str | None:
        """Return the class of a label, or None if it is unknown."""
        return self.known.get(" ".join(label.split()).casefold()) if self.known else label


def read(path: str) -> Classes:
    """Read a file of a class a line: its name, then any synonyms, separated as in a table.

    Raises DataError: the file cannot be read, holds no class, or gives one name to two classes.
    """
    file = files.expanded(path)
    names: list[str] = []
    known: dict[str, str] = {}
    for number, line in enumerate(
        files.lines(unicodedata.normalize("NFC", tables.text_of(file))), 1
    ):
        if not line.strip() or line.startswith("#"):
            continue
        fields = [
            " ".join(field.split()).strip('"') for field in line.split(tables.separator(line))
        ]
        name = fields[0]
        if not name:
            raise DataError(
                f"{path}:{number} has no class before its synonyms; write NAME,SYNONYM,…"
            )
        names.append(name)
        for field in filter(None, fields):
            if known.setdefault(field.casefold(), name) != name:
                raise DataError(
                    f"{path}:{number} gives {field!r} to {name!r}, and line before to"
                    f" {known[field.casefold()]!r}"
                )
    if not names:
        raise DataError(f"{path} holds no class; write one a line: NAME,SYNONYM,…")
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise DataError(f"{path} holds the class {twice!r} twice; omit one of the lines")
    return Classes(names, known)


def refuse_joined(lines: Iterable[tuple[str, Sequence[str]]], errors: Errors) -> None:
    """Count the labels of (place, labels) that may be several, or are spelled in two ways."""
    names: dict[str, str] = {}
    for where, labels in lines:
        for label in labels:
            names.setdefault(label, where)
    folded: dict[str, str] = {}
    for name in names:
        if (other := folded.setdefault(_core(name), name)) != name:
            errors.add("similar-labels", f"{other!r} and {name!r}")
        elif (repaired := _repaired(name)) != name:
            errors.add("similar-labels", f"{name!r} may be {repaired!r}, read in a wrong encoding")
        elif "\ufffd" in name or re.search(
            r"[a-z][\u0370-\u04ff]|[\u0370-\u04ff][a-z]", name, re.IGNORECASE
        ):
            errors.add(
                "similar-labels",
                f"{ascii(name)} has a letter that was lost, or is of another alphabet",
            )
    recurring = {between: _recurring(names, between) for between, _ in SEPARATORS}
    # by the name of a column
    reported = {text for kind, text in errors.lines if kind == "joined-labels"}
    for name, where in names.items():
        if score := re.search(r"[^\W\d_][\s,:_(]+(0?\.\d+|1\.0+|\d+ ?%)\)?$", name):
            errors.add(
                "joined-labels", f"{where}: {name!r}; write {score[1]} into a column of its own"
            )
            continue
        for between, enough in SEPARATORS:
            parts = [part.strip() for part in name.split(between)]
            own = [part in names for part in parts]
            are_uniform = all(
                map(WHOLE.fullmatch if between != " " else CODE.fullmatch, parts)
            ) and (between != " " or any(own))
            if (
                all(parts)
                and len(parts) > 1
                and (enough(own) or are_uniform or recurring[between] & set(parts))
            ):
                numbers = [part for part in parts if re.fullmatch(r"[\d.]+%?", part)]
                remedy = f"split it with --separator {between!r}"
                if 0 < len(numbers) < len(parts):
                    remedy = f"write {numbers[0]} into a column of its own"
                text = f"{where}: {name!r}; {remedy}"
                if text not in reported:
                    errors.add("joined-labels", text)
                break


def _recurring(names: Iterable[str], between: str) -> set[str]:
    """Return parts that recur, elsewhere after a comma: "Bunting, Reed" is one label."""
    places: dict[str, set[int | str]] = {}
    for name in names if between in (",", "/", "+", " + ", "&") else ():
        for n, part in enumerate(name.split(between) if between in name else ()):
            places.setdefault(part.strip(), set()).add(n if between in ",/" else name)
    return {part for part, its in places.items() if len(its) > 1}


def _core(name: str) -> str:
    """Return the letters and digits of a label, by which two spellings of one are found."""
    text = unicodedata.normalize("NFKD", _repaired(name)).casefold()
    text = unicodedata.normalize("NFKC", re.sub(r"([a-z])[\u0300-\u036f]+", r"\1", text))
    return "".join(letter for letter in text if letter.isalnum()) or text


def _repaired(name: str) -> str:
    """Return a label that was written in UTF-8 and read in Windows-1252 or Latin-1 as it was."""
    for encoding in ("cp1252", "latin-1") if not name.isascii() else ():
        try:
            return name.encode(encoding).decode()
        except UnicodeError:
            continue
    return name
