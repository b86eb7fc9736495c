"""The column of a table that says which split a line is in."""

from collections.abc import Collection

from loaders.audio.recordings import values
from loaders.audio.recordings.column_names import SPLIT, meaning_of, plain, words
from loaders.audio.recordings.tables import Table
from loaders.base import DataError


def choose(table: Table, used: dict[str, list[str]], classes: Collection[str]) -> None:
    """Keep a column of splits, by its name or its values.

    Raises DataError: a column tells test lines apart in other words: they would be trained on.
    """
    taken = {name for meaning, several in used.items() if meaning != "split" for name in several} | set(classes)
    named = used.get("split", [])
    others = [name for name in table.columns if name not in taken and name not in named and not meaning_of(name)]
    texts = {name: list(filter(values.given, table.values(name))) for name in (*named, *others)}
    fits = [name for name, its in texts.items() if values.are_splits(its, train=name not in named)]
    used["split"] = fits[:1] or [name for name in named if plain(name) == "split"]
    for name, its in texts.items() if not used["split"] else ():
        if name in named and any(text.casefold() in values.SPLITS for text in its):
            odd = next(text for text in its if text.casefold() not in values.SPLITS)
            raise DataError(
                f"{table.path}: {name!r} holds splits, and {odd!r}; to split by it: --split-column {name!r}, or "
                "--split-column none"
            )
        if SPLIT & set(words(name)) and values.are_answers(its, both=True):
            of_test = next((text for text in its if values.answer(text) != bool({"train", "training"} & set(words(name)))), "1")
            raise DataError(
                f"{table.path}: {name!r} may tell recordings to test on; to split by it: --split column={name}:{of_test}, or "
                "--split-column none"
            )
