"""Text with columns between commas, semicolons, tabs or bars, in the encoding of its bytes."""

import csv
import io
import pathlib
import re
import unicodedata
from collections.abc import Iterable, Iterator, Mapping, Sequence

from loaders.audio.recordings import values
from loaders.audio.recordings.find import is_audio
from loaders.base import DataError
from loaders.io import files

LARGEST = 2 << 30  # [bytes] of a table
MARKS = (
    (b"\xff\xfe\0\0", "utf-32"),
    (b"\0\0\xfe\xff", "utf-32"),
    (b"\xef\xbb\xbf", "utf-8-sig"),
    (b"\xff\xfe", "utf-16"),
    (b"\xfe\xff", "utf-16"),
)
ENCODINGS = {"utf-8": "UTF-8", "utf-8-sig": "UTF-8", "cp1252": "Windows-1252", "utf-32": "UTF-32"}
# Letters of Windows-1252 by language. Others, or others together, are of another encoding: its Ÿ is
# the ü of Mac Roman.
LANGUAGES = tuple(
    map(
        set,
        "äöüßéáíóúñàçåãâô àâçèéêëîïôùûüœæ áéíñóúü àáâãçéêíóôõúü åäöæøéü áéíóúýðþæö àèéìòù"
        " àçèéíïòóúü".split(),
    )
)
HOW = "--encoding cp1250, cp1251, mac-roman, shift-jis, …"
# A character of several bytes in UTF-8.
_SEVERAL = re.compile(
    rb"[\xc3-\xdf][\x80-\xbf]|[\xe1-\xef][\x80-\xbf]{2}|[\xf0-\xf4][\x80-\xbf]{3}"
)


def text_of(path: pathlib.Path) -> str:
    """Return the text of a file. Raises DataError if it is no text."""
    return read_text(path)[0]


def read_text(path: pathlib.Path, stated: str = "") -> tuple[str, str]:
    """Return the text of a file, and its encoding: the stated one, or the one that its bytes tell.

    Raises DataError: it is no text, or no encoding fits.
    """
    try:
        if path.stat().st_size > LARGEST:
            raise DataError(
                f"{path} is larger than 2 GiB, more than a table of annotations; split it"
            )
        data = files.read(path, most=LARGEST)
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}") from error
    encoding = next((name for mark, name in MARKS if data.startswith(mark)), "")
    if not encoding and not stated and b"\0" in data[:4096]:
        zeros = [data[:4096][first::2].count(0) for first in (0, 1)]
        if min(zeros) or max(zeros) * 8 < len(data[:4096]):
            raise DataError(
                f"{path} is not text; name a table (CSV, TSV, Raven, Audacity), a folder, or"
                " metadata (JSON)"
            )
        encoding = "utf-16-be" if zeros[0] else "utf-16-le"
    for name in (stated or encoding,) if stated or encoding else ("utf-8", "cp1252"):
        try:
            text = data.decode(name)
        except LookupError:
            known = "for example cp1250, mac-roman, shift-jis"
            raise DataError(f"--encoding {name!r} is none that Python knows; {known}") from None
        except UnicodeDecodeError as error:
            line = data[: error.start].count(b"\n") + 1
            wrong = f"{path}:{line} holds the byte {data[error.start : error.start + 1].hex()}"
            if name == "utf-8" and _SEVERAL.search(data):
                break
            continue
        if name == "cp1252" and not stated and (odd := _not_western(text)):
            raise DataError(
                f"{path} is not in UTF-8, and in Windows-1252 it has {odd!r}; name it: {HOW}"
            )
        found = ENCODINGS.get(name, "UTF-16" if name == encoding else name)
        # which many bytes of other encodings are letters in, too
        if name == "cp1252" and not stated:
            word = next(
                word for word in re.findall(r"\w+", text) + ["\u2019"] if not word.isascii()
            )
            found = f"{found}, as in {word!r}; if that is no word, say --encoding"
        return text, found
    raise DataError(
        f"{wrong}, which its encoding does not have; save it as UTF-8, or name it: {HOW}"
    )


def _not_western(text: str) -> str:
    """Return a word that Windows-1252 cannot mean, such as SwainsonÕs of a Mac, or ""."""
    found = {
        letter
        for letter in text.lower()
        if letter > "\x7f" and letter.isalpha() and letter not in "ªº"
    }
    if not any(found <= language for language in LANGUAGES):
        return next((word for word in text.split() if found & set(word.lower())), "")
    for each in re.finditer(r"[^\x00-\x7f]", text):
        at, letter = each.start(), each[0]
        before, after = text[at - 1 : at], text[at + 1 : at + 2]
        kind = unicodedata.category(letter)
        capital = letter.isupper() and before.islower()
        sign = (
            kind in ("No", "Sk", "Sc", "Sm")
            and after.isalpha()
            or before.islower()
            and letter in "†‡‰¤¦¬¶¼¾¹"
        )
        inside = kind[0] in "PSN" and letter not in "’‘´·" and before.isalpha() and after.isalpha()
        if capital or sign or inside:
            rest = text[at + 1 :].split(maxsplit=1)[0] if after.strip() else ""
            return text[: at + 1].split()[-1] + rest
    return ""


def stated_separator(line: str) -> str | None:
    """Return the separator that a first line states as Excel writes it, "sep=;", or None."""
    found = re.fullmatch(r"sep=([;,\t|])", line.strip('\r\n" '), re.IGNORECASE)
    return found[1] if found else None


def separator(header: str) -> str:
    """Return the separator that a header line has most of."""
    return max("\t;,|", key=header.count)


class Table:
    """A table. A column is found in any case, without blanks, points and underscores."""

    def __init__(self, path: pathlib.Path, text: str, encoding: str = "UTF-8"):
        """Open the table. Raises DataError: a quoted field does not end."""
        self.path, self.encoding = path, encoding
        lines = re.split(r"\r\n|\r|\n", text.strip("\ufeff"))
        stated = stated_separator(lines[0]) if lines else None
        # the line of the header, and lines with comments
        n, self.comments = int(bool(stated)), list[int]()
        while n + 1 < len(lines) and (not lines[n].strip() or lines[n].startswith("#")):
            between = stated or separator(lines[n])
            if 0 < lines[n].count(between) == lines[n + 1].count(between) or re.match(
                "# *YTID", lines[n]
            ):
                break  # AudioSet's header is its last comment
            self.comments += [n + 1] if lines[n].strip() else []
            n += 1
        after = n + 1  # a name in quotes may have several lines
        while (
            after < min(len(lines), n + 20) and sum(line.count('"') for line in lines[n:after]) % 2
        ):
            after += 1
        header = " ".join(lines[n:after]).lstrip("# ")
        self.separator = stated or separator(header)
        self.columns = _unique(next(self._reader([header], 0), (0, []))[1])
        self.wrong: list[str] = []  # lines with too many or too few cells
        self._rows = list(self._read(lines[after:], after))

    def _reader(self, lines: Sequence[str], before: int) -> Iterator[tuple[int, list[str]]]:
        text = io.StringIO("\n".join(lines))
        reader = csv.reader(text, delimiter=self.separator, skipinitialspace=True, strict=True)
        begins = before + 1
        try:
            for cells in reader:
                yield begins, cells
                begins = before + reader.line_num + 1
        except csv.Error as error:  # a quote that does not end would take other lines into its cell
            raise DataError(
                f"{self.path}:{begins} cannot be read as a line of a table: {error}"
            ) from error

    def _read(self, lines: Sequence[str], before: int) -> Iterator[tuple[int, Mapping[str, str]]]:
        rows = []
        for number, cells in self._reader(lines, before):
            if (
                cells
                and cells[0].startswith("#")
                and not is_audio(cells[0])
                and not values.is_sheet_error(cells[0])
            ):
                self.comments.append(number)
            elif any(cell.strip() for cell in cells):
                rows.append((number, [cell.strip() for cell in cells]))
        longer = (
            rows
            and all(len(cells) == len(self.columns) + 1 for _, cells in rows)
            and any(c[-1] for _, c in rows)
        )
        if (
            longer
            and len({c[0] for _, c in rows}) == len(rows)
            and _plain(self.columns[0]) != "selection"
        ):
            self.columns = ["", *self.columns]  # R's names of rows, without a name of their own
        n = len(self.columns)
        for number, cells in rows:
            while len(cells) > n and not cells[-1]:
                cells.pop()
            if len(cells) != n:
                self.wrong.append(
                    f"{self.path}:{number} has {len(cells)} cells, and the header {n}"
                )
            else:
                yield number, dict(zip(self.columns, cells, strict=True))

    def find(self, *names: str) -> str | None:
        """Return the first column that has one of these names, or None."""
        known = {_plain(name): name for name in reversed(self.columns)}
        return next((known[_plain(name)] for name in names if _plain(name) in known), None)

    def rows(self) -> Sequence[tuple[int, Mapping[str, str]]]:
        """Return each line's number and values by column, of no empty, comment or wrong lines."""
        return self._rows

    def values(self, column: str) -> list[str]:
        return [row[column] for _, row in self._rows]


def read(path: pathlib.Path) -> Table:
    """Read a table in which every line counts. Raises DataError."""
    table = Table(path, *read_text(path))
    if table.wrong:
        raise DataError(f"{table.wrong[0]}; correct the line")
    return table


def _plain(name: str) -> str:
    return re.sub(r"[\W_]+", "", unicodedata.normalize("NFC", name)).casefold()


def _unique(names: Iterable[str]) -> list[str]:
    """Names of columns in the form of labels. Later ones of one name get a number, as of pandas."""
    found: list[str] = []
    for given in names:
        name = " ".join(unicodedata.normalize("NFC", given.strip().strip('"')).split())
        n = found.count(name)
        found.append(f"{name}.{n}" if n and name else name if not n else f"unnamed.{len(found)}")
    return found
