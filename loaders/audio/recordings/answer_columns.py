"""Columns that say whether the label of a line holds, by their names, and the verdicts of cells.

A cell may deny its label, doubt it, or be blank because nobody has checked it yet.
"""

import enum
import functools
from collections.abc import Sequence

from loaders.audio.recordings import answer_words, column_names, values

YES, NO, SKIP = "yes", "no", "skip"
OPPOSITES = {YES: NO, NO: YES}


class Kind(enum.Enum):
    """The verdict of a column on a label, by the name of the column."""

    HOLDS = "that it holds"  # verified, correct
    FAILS = "that it does not hold"  # rejected, false positive
    CHECKED = "who has checked it, or when"  # verified by, review date
    CERTAINTY = "how certain it is"
    SCORE = "how certain it is, as a number"  # of a program, unless its cells are words
    DOUBT = "how uncertain it is"  # uncertain, doubt, identification qualifier


@functools.lru_cache(1 << 10)
def kind_of(name: str) -> Kind | None:
    """Return what a column says by its name, or None if it says nothing of its labels."""
    plain_name = column_names.plain(name)
    if plain_name in column_names.DENYING:
        return Kind.FAILS
    parts = set(column_names.words(name))
    if plain_name in column_names.CHECKERS or _names_checks(parts):
        return Kind.CHECKED
    if column_names.may_deny(name):
        return Kind.HOLDS
    if not parts.isdisjoint(column_names.DOUBT) or plain_name in column_names.QUALIFIERS:
        return Kind.DOUBT
    if not parts.isdisjoint(column_names.CERTAINTY) or plain_name in column_names.QUALITIES:
        return Kind.CERTAINTY
    return None if parts.isdisjoint(column_names.CONFIDENCE) else Kind.SCORE


def _names_checks(parts: set[str]) -> bool:
    """Return whether words of a name are of a check, and of its person or day."""
    if parts.isdisjoint(column_names.OF_CHECKS):
        return False
    return any(map(column_names.CHECK.match, parts))


class AnswerColumn:
    """The verdicts of one column: "yes", "no", "skip" if it leaves them open, or None."""

    def __init__(self, name: str, texts: Sequence[str]):
        """``texts``: the cells, which together say what P and A, 1 and 2 are."""
        self._name = name
        self._texts = texts
        self._letters = values.are_letters(texts)
        self.kind = kind_of(name)
        self._is_graded = self.kind is Kind.SCORE or not _are_yes_and_no(texts)

    def verdict(self, text: str) -> str | None:
        """Return the verdict of a cell on its label, or None if no command can read it."""
        if not values.given(text):
            return YES if self.kind in (Kind.FAILS, Kind.DOUBT) else SKIP
        is_absent = column_names.is_absent(self._name, text)
        if is_absent is not None:
            return NO if is_absent else YES
        if self.kind is Kind.CHECKED:
            return SKIP if _is_blank_name(text) else YES
        if self.kind is Kind.DOUBT:
            return self._doubt(text)
        if self.kind in (Kind.CERTAINTY, Kind.SCORE):
            return self._certainty(text)
        verdict = values.verdict(text, self._letters)
        if self.kind is Kind.FAILS and verdict:
            return OPPOSITES.get(verdict, verdict)
        return verdict

    def _certainty(self, text: str) -> str | None:
        if self._is_graded and values.are_numbers([text]):
            return None
        degree = answer_words.degree(text)
        if degree is not None:
            return YES if degree > 0 else SKIP
        verdict = values.verdict(text)
        is_denied = text.casefold() in answer_words.DENIED
        return SKIP if verdict == NO and not is_denied else verdict

    def _doubt(self, text: str) -> str | None:
        """Return the verdict of a cell about doubt: low, no and certain are a yes."""
        if self._is_graded and values.are_numbers([text]):
            return None
        if answer_words.says_open(text):
            return SKIP
        degree = answer_words.degree(text)
        if degree is not None:
            is_certain = degree == answer_words.SURE or degree == answer_words.LOW
            return YES if is_certain else SKIP
        return YES if values.answer(text) is False else SKIP

    def doubtful(self) -> list[str]:
        """Return the cells that deny their label or leave it open, if it is such a column.

        Of one that says how certain labels are, cells that no command reads are left out.
        """
        verdicts = [self.verdict(text) for text in self._texts]
        is_filled = map(values.given, self._texts)
        pairs = zip(verdicts, is_filled, strict=True)
        if not any(verdict and filled for verdict, filled in pairs):
            return []
        accepted: set[str | None] = {YES}
        if self.grades:
            accepted.add(None)
        cells = zip(self._texts, verdicts, strict=True)
        return [text for text, verdict in cells if verdict not in accepted]

    @property
    def grades(self) -> bool:
        """Whether the column says how certain labels are."""
        return self.kind in (Kind.CERTAINTY, Kind.SCORE, Kind.DOUBT)

    def likeness(self) -> str:
        """Return what a column is whose cells no command reads as answers, or ""."""
        unread_cells = [text for text in self._texts if self.verdict(text) is None]
        if self.kind is None or not unread_cells:
            return ""
        if self.kind is Kind.SCORE and values.are_numbers(map(_without_percent, unread_cells)):
            return ""
        return "a degree of certainty" if self.grades else "an answer"


def _are_yes_and_no(texts: Sequence[str]) -> bool:
    """Return whether the numbers of a column are 0 and 1."""
    for text in set(filter(values.given, texts)):
        if values.are_numbers([text]) and values.number(text) not in (0, 1):
            return False
    return True


def _is_blank_name(text: str) -> bool:
    """Return whether a cell names nobody, and no day: "-", "not yet", "nobody"."""
    if answer_words.is_open(text) or values.answer(text) is False:
        return True
    return column_names.plain(text) in answer_words.NO_PERSON


def _without_percent(text: str) -> str:
    return text.rstrip("% ")
