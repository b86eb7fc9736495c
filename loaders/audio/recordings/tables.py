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
from loaders.io import checks, files

MAX_BYTES = 2 << 30  # [bytes] of a table
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
ENCODING_OPTION = "--encoding cp1250, cp1251, mac-roman, shift-jis, …"
# A character of several bytes in UTF-8.
_SEVERAL_BYTES = re.compile(
    rb"[\xc3-\xdf][\x80-\xbf]|[\xe1-\xef][\x80-\xbf]{2}|[\xf0-\xf4][\x80-\xbf]{3}"
)


def text_of(path: pathlib.Path) -> str:
    """Return the text of a file. Raises DataError if it is no text."""
    return read_text(path)[0]


def read_text(path: pathlib.Path, stated: str = "") -> tuple[str, str]:
    """Return the text of a file, and its encoding: the stated one, or the one that its bytes tell.

    Raises DataError: it is no text, or no encoding fits.
    """
    data = _read_bytes(path)
    detected = next((name for mark, name in MARKS if data.startswith(mark)), "")
    if not detected and not stated and b"\0" in data[:4096]:
        detected = _utf_16_of(path, data[:4096])
    candidates = ["utf-8", "cp1252"]
    if stated or detected:
        candidates = [stated or detected]
    undecoded = ""
    for name in candidates:
        try:
            text = data.decode(name)
        except LookupError:
            raise DataError(
                f"--encoding {name!r} is none that Python knows; for example cp1250, mac-roman,"
                " shift-jis"
            ) from None
        except UnicodeDecodeError as error:
            line = data[: error.start].count(b"\n") + 1
            byte = data[error.start : error.start + 1]
            undecoded = f"{path}:{line} holds the byte {byte.hex()}"
            if name == "utf-8" and _SEVERAL_BYTES.search(data):
                break
            continue
        if name == "cp1252" and not stated:
            return text, _western_encoding(path, text)
        default = "UTF-16" if name == detected else name
        return text, ENCODINGS.get(name, default)
    raise DataError(
        f"{undecoded}, which its encoding does not have; save it as UTF-8, or name it:"
        f" {ENCODING_OPTION}"
    )


def _read_bytes(path: pathlib.Path) -> bytes:
    try:
        if path.stat().st_size > MAX_BYTES:
            raise DataError(
                f"{path} is larger than 2 GiB, more than a table of annotations; split it"
            )
        return files.read(path, most=MAX_BYTES)
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}") from error


def _utf_16_of(path: pathlib.Path, first_bytes: bytes) -> str:
    """Return the order of UTF-16's bytes without a mark. Raises DataError: they are no text."""
    even_zeros = first_bytes[0::2].count(0)
    odd_zeros = first_bytes[1::2].count(0)
    has_few_zeros = max(even_zeros, odd_zeros) * 8 < len(first_bytes)
    if has_few_zeros or (even_zeros and odd_zeros):
        raise DataError(
            f"{path} is not text; name a table (CSV, TSV, Raven, Audacity), a folder, or metadata"
            " (JSON)"
        )
    return "utf-16-be" if even_zeros else "utf-16-le"


def _western_encoding(path: pathlib.Path, text: str) -> str:
    """Return the encoding of a text in Windows-1252, with a word for the user to judge it by.

    Many bytes of other encodings are letters in it, too. Raises DataError: it has an odd word.
    """
    odd_word = _not_western(text)
    if odd_word:
        raise DataError(
            f"{path} is not in UTF-8, and in Windows-1252 it has {odd_word!r}; name it:"
            f" {ENCODING_OPTION}"
        )
    words = [*re.findall(r"\w+", text), "\u2019"]
    word = next(word for word in words if not word.isascii())
    return f"Windows-1252, as in {word!r}; if that is no word, say --encoding"


def _not_western(text: str) -> str:
    """Return a word that Windows-1252 cannot mean, such as SwainsonÕs of a Mac, or ""."""
    letters = {
        letter
        for letter in text.lower()
        if letter > "\x7f" and letter.isalpha() and letter not in "ªº"
    }
    if not any(letters <= language for language in LANGUAGES):
        return next((word for word in text.split() if letters & set(word.lower())), "")
    for match in re.finditer(r"[^\x00-\x7f]", text):
        if _is_odd(text, match.start()):
            word_start = text[: match.end()].split()[-1]
            following = text[match.end() :]
            word_end = following.split(maxsplit=1)[0] if following[:1].strip() else ""
            return word_start + word_end
    return ""


def _is_odd(text: str, position: int) -> bool:
    """Return whether a character stands between others as no language writes it."""
    letter = text[position]
    previous = text[position - 1 : position]
    following = text[position + 1 : position + 2]
    category = unicodedata.category(letter)
    if letter.isupper() and previous.islower():
        return True
    if category in ("No", "Sk", "Sc", "Sm") and following.isalpha():
        return True
    if letter in "†‡‰¤¦¬¶¼¾¹" and previous.islower():
        return True
    is_sign = category[0] in "PSN" and letter not in "’‘´·"
    return is_sign and previous.isalpha() and following.isalpha()


def stated_separator(line: str) -> str | None:
    """Return the separator that a first line states as Excel writes it, "sep=;", or None."""
    match = re.fullmatch(r"sep=([;,\t|])", line.strip('\r\n" '), re.IGNORECASE)
    return match[1] if match else None


def separator(header: str) -> str:
    """Return the separator that a header line has most of."""
    return max("\t;,|", key=header.count)


class Table:
    """A table. A column is found in any case, without blanks, points and underscores."""

    def __init__(self, path: pathlib.Path, text: str, encoding: str = "UTF-8"):
        """Open the table. Raises DataError: a quoted field does not end."""
        self.path = path
        self.encoding = encoding
        self.comments: list[int] = []  # numbers of lines
        self.wrong: list[str] = []  # lines with too many or too few cells
        self.wrong_rows: list[tuple[int, Mapping[str, str]]] = []  # as far as they have cells
        lines = re.split(r"\r\n|\r|\n", text.strip("\ufeff"))
        stated = stated_separator(lines[0])
        header_start = self._skip_comments(lines, stated)
        header_end = _header_end(lines, header_start)
        header = " ".join(lines[header_start:header_end]).lstrip("# ")
        self.separator = stated or separator(header)
        _, header_cells = next(self._cells([header], 0), (0, []))
        self.columns = _unique(header_cells)
        self._rows = list(self._read(lines[header_end:], header_end))

    def _skip_comments(self, lines: Sequence[str], stated: str | None) -> int:
        """Return the index of the header's line. Note the comments before it."""
        index = 1 if stated else 0
        while index + 1 < len(lines):
            line = lines[index]
            is_blank = not line.strip()
            if not is_blank and not line.startswith("#"):
                break
            between = stated or separator(line)
            n_separators = line.count(between)
            if n_separators and n_separators == lines[index + 1].count(between):
                break
            if re.match("# *YTID", line):
                break  # AudioSet's header is its last comment
            if not is_blank:
                self.comments.append(index + 1)
            index += 1
        return index

    def _cells(self, lines: Sequence[str], n_before: int) -> Iterator[tuple[int, list[str]]]:
        """Yield the number and cells of each line, of which others are before the first."""
        text = io.StringIO("\n".join(lines))
        reader = csv.reader(text, delimiter=self.separator, skipinitialspace=True, strict=True)
        number = n_before + 1
        try:
            for cells in reader:
                yield number, cells
                number = n_before + reader.line_num + 1
        except csv.Error as error:  # a quote that does not end would take other lines into its cell
            raise DataError(
                f"{self.path}:{number} cannot be read as a line of a table: {error}"
            ) from error

    def _read(self, lines: Sequence[str], n_before: int) -> Iterator[tuple[int, Mapping[str, str]]]:
        rows = []
        for number, padded_cells in self._cells(lines, n_before):
            cells = [cell.strip() for cell in padded_cells]
            if padded_cells and _is_comment(padded_cells[0]):
                self.comments.append(number)
            elif any(cells):
                rows.append((number, cells))
        if self._has_row_names(rows):
            self.columns = ["", *self.columns]
        n_columns = len(self.columns)
        for number, cells in rows:
            while len(cells) > n_columns and not cells[-1]:
                cells.pop()
            if len(cells) == n_columns:
                yield number, dict(zip(self.columns, cells, strict=True))
            else:
                self.wrong.append(
                    f"{self.path}:{number} has {len(cells)} cells, and the header {n_columns}"
                )
                padded_cells = [*cells, *[""] * n_columns][:n_columns]
                row = dict(zip(self.columns, padded_cells, strict=True))
                self.wrong_rows.append((number, row))

    def _has_row_names(self, rows: Sequence[tuple[int, list[str]]]) -> bool:
        """Return whether rows begin with R's names, which have no name in the header."""
        row_names: set[str] = set()
        last_cells: set[str] = set()
        for _, cells in rows:
            if len(cells) != len(self.columns) + 1:
                return False
            row_names.add(cells[0])
            last_cells.add(cells[-1])
        if not any(last_cells) or len(row_names) < len(rows):
            return False
        return _plain(self.columns[0]) != "selection"

    def find(self, *names: str) -> str | None:
        """Return the first column that has one of these names, or None."""
        columns_by_name = {_plain(column): column for column in reversed(self.columns)}
        for name in names:
            if _plain(name) in columns_by_name:
                return columns_by_name[_plain(name)]
        return None

    def rows(self) -> Sequence[tuple[int, Mapping[str, str]]]:
        """Return each line's number and values by column, of no empty, comment or wrong lines."""
        return self._rows

    def values(self, column: str) -> list[str]:
        return [row[column] for _, row in self._rows]


def read(path: pathlib.Path) -> Table:
    """Read a table in which every line counts. Raises DataError."""
    table = Table(path, *read_text(path))
    if table.wrong:
        rest = checks.more(len(table.wrong))
        raise DataError(f"{table.wrong[0]}; correct the line{rest}", listed=table.wrong)
    return table


def _header_end(lines: Sequence[str], start: int) -> int:
    """Return the index after the header: a name in quotes may have several lines."""
    end = start + 1
    while end < min(len(lines), start + 20):
        n_quotes = "".join(lines[start:end]).count('"')
        if n_quotes % 2 == 0:
            break
        end += 1
    return end


def _is_comment(cell: str) -> bool:
    """Return whether a line with this first cell is a comment."""
    return cell.startswith("#") and not is_audio(cell) and not values.is_sheet_error(cell)


def _plain(name: str) -> str:
    return re.sub(r"[\W_]+", "", unicodedata.normalize("NFC", name)).casefold()


def _unique(names: Iterable[str]) -> list[str]:
    """Names of columns in the form of labels. Later ones of one name get a number, as of pandas."""
    unique_names: list[str] = []
    for stated_name in names:
        unquoted = stated_name.strip().strip('"')
        name = " ".join(unicodedata.normalize("NFC", unquoted).split())
        n_same = unique_names.count(name)
        if n_same and name:
            name = f"{name}.{n_same}"
        elif n_same:
            name = f"unnamed.{len(unique_names)}"
        unique_names.append(name)
    return unique_names
