"""Shards of recordings: where they lie, and an index over them that is made without reading audio.

A path is one of

    a folder that ``datasets.save_to_disk`` wrote      its shards, in the order that state.json gives
    such a folder of several splits                    its train/; and its test/, unless ``test`` names another
    a folder of ``*.arrow``, as in the datasets cache  by name; with several splits (``name-train-00000-of-00007.arrow``),
                                                       those of "train", and of "test"
    a folder of ``*.parquet``, as the Hub stores them  the same, also where they lie in its data/
    a glob, or one file                                by name
    "demo"                                             the built-in corpus, made at its first use

Paths, labels and class names are kept for corpora of 16 shards or more in $JAXTRAIN_CACHE/index (or ~/.cache/jaxtrain/index)
until a shard's name, size or time changes. Of 528,422 rows in 690 shards on a local disk (python -m tools.index_scale): 7.3 s
without it if no file is in memory, 0.14 s if all are, 0.2 s from its 14 MB in either case, and 19 MB resident.
"""

import difflib
import functools
import glob
import json
import os
import pathlib
import re
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from loaders import _rust, machine
from loaders.base import DataError

CACHED_SHARDS = 16  # fewer are indexed in less time than is worth a file


class ClassLists(NamedTuple):
    """The classes of all recordings of an index: those of recording i are classes[starts[i] : starts[i + 1]]."""

    names: tuple[str, ...]
    starts: np.ndarray  # int64 [n + 1]
    classes: np.ndarray  # int64

    def hot(self, index: np.ndarray) -> np.ndarray:
        """Recordings int [r], -1 for none -> uint8 [r, classes], 1 for each class of a recording."""
        hot = np.zeros((len(index), len(self.names)), np.uint8)
        for row, i in zip(hot, index, strict=True):
            if i >= 0:
                row[self.classes[self.starts[i] : self.starts[i + 1]]] = 1
        return hot


def find_shards(path: str, split: str) -> list[pathlib.Path]:
    """The shards of ``split`` ("train" or "test") at a path, in order. See the module's docstring.

    Raises:
      DataError: there are no shards; the message names what is there instead.
    """
    folder = pathlib.Path(path).expanduser()
    if folder.is_file():
        return [folder]
    if folder.is_dir():
        if shards := shards_of_split(folder, split):
            return shards
        content = sorted(p.name for p in folder.iterdir())
        if splits := sorted({*_by_split(folder), *(name for name in content if _shards(folder / name))}):
            raise DataError(f"is {path!r}, a folder without the split {split!r}; it has {', '.join(splits)}")
        listed = ", ".join(content[:5]) or "nothing"
        raise DataError(f"is {path!r}, a folder without Arrow or Parquet shards; it holds {listed}")
    if glob.has_magic(path):
        if matches := sorted(p for p in map(pathlib.Path, glob.glob(str(folder), recursive=True)) if p.is_file()):
            return matches
        fixed = next(p for p in folder.parents if not glob.has_magic(str(p)))
        reason = f"{fixed} exists" if fixed.is_dir() else f"{fixed} does not exist{nearest(fixed)}"
        raise DataError(f"is {path!r}, which matches no file; {reason}")
    raise DataError(f"is {path!r}, which does not exist{nearest(folder)}")


def nearest(path: pathlib.Path) -> str:
    """The remedy for a missing path: a sibling with a similar name, or the part of the path that exists."""
    parent, missing = path.absolute().parent, path.name
    while not parent.is_dir():
        parent, missing = parent.parent, parent.name
    siblings = sorted(p.name for p in parent.iterdir())
    if close := difflib.get_close_matches(missing, siblings, n=1):
        return f"; did you mean {str(parent / close[0])!r}?"
    return f"; {parent} exists, and holds {', '.join(siblings[:5]) or 'nothing'}{', …' if len(siblings) > 5 else ''}"


def shards_of_split(folder: pathlib.Path, split: str) -> list[pathlib.Path]:
    """A folder's shards of one split; none if it holds other splits only."""
    if any(_shards(folder / name) for name in ("train", "test")):
        return _shards(folder / split)
    if groups := _by_split(folder):
        return groups.get(split, [])
    return _shards(folder) or _in_data(folder, split)


def _in_data(folder: pathlib.Path, split: str) -> list[pathlib.Path]:
    """A repository of the Hub keeps its shards in data/, named by their splits."""
    return _by_split(folder / "data").get(split, []) if not _shards(folder) else []


def _shards(folder: pathlib.Path) -> list[pathlib.Path]:
    """The shards directly in a folder: those that state.json lists, or by name."""
    state = folder / "state.json"
    if state.is_file():
        try:
            return [folder / file["filename"] for file in json.loads(state.read_text())["_data_files"]]
        except (ValueError, KeyError, TypeError) as error:
            raise DataError(f"has a broken {state}: {error!r}; save the dataset again") from error
    # cache-….arrow are results of datasets' map and filter, next to the data that they came from
    shards = [p for p in folder.glob("*.arrow") if not p.name.startswith(("cache-", "tmp"))]
    return sorted(shards or folder.glob("*.parquet"))


def _by_split(folder: pathlib.Path) -> dict[str, list[pathlib.Path]]:
    """Shards of a folder by split: name-SPLIT.arrow, name-SPLIT-00000-of-00007.arrow, SPLIT-00000-of-00007.parquet.

    Empty if no name has "train" or "test" in it: then the folder is not split, whatever else has a dash in its name.
    """
    groups: dict[str, list[pathlib.Path]] = {}
    if (folder / "state.json").is_file():
        return groups
    for shard in _shards(folder):
        match = re.fullmatch(r"(?:.+-)?([A-Za-z]\w*?)(-\d{5}-of-\d{5}(-[0-9a-f]{16})?)?\.(arrow|parquet)", shard.name)
        groups.setdefault(match[1] if match else "", []).append(shard)
    return groups if {"train", "test"} & set(groups) else {}


def has_test_split(folder: pathlib.Path) -> bool:
    """Whether a folder holds shards of the split "test" besides others."""
    return bool(_shards(folder / "test") or "test" in _by_split(folder) or _in_data(folder, "test"))


def resolve(path: str) -> str:
    """The folder of the built-in corpus for "demo", made at its first use; any other path unchanged."""
    if path != "demo":
        return path
    from loaders import demo  # imports encoders, which nothing else here needs

    return str(demo.ensure())


def open_index(shards: Sequence[pathlib.Path], *, label: str, audio_root: str) -> "_rust.Index":
    """The index of shards, made once in a process, and again when a file has changed.

    Args:
      label: the column of class labels; empty: none.
      audio_root: the folder of recordings that are not in the shards; empty: each shard's own.

    Raises:
      DataError: shards that cannot be used.
    """
    try:
        return _index_once(_stats(shards), label, os.path.expanduser(audio_root) or None)
    except (ValueError, OSError) as error:
        hint = "; if it holds lists of classes, set data.multilabel=true" if "list" in str(error).lower() else ""
        raise DataError(f"{error}{hint}") from error


def read_class_lists(shards: Sequence[pathlib.Path], label: str) -> ClassLists:
    """The classes of every recording, of a column of lists; audio is not read. Raises DataError."""
    return _class_lists_once(_stats(shards), label)


def _stats(shards: Sequence[pathlib.Path]) -> tuple[tuple[str, int, int], ...]:
    """By this a process knows that it has read these files before."""
    return tuple((str(path), (stat := path.stat()).st_size, stat.st_mtime_ns) for path in shards)


@functools.lru_cache(maxsize=4)
def _class_lists_once(stats: tuple[tuple[str, int, int], ...], label: str) -> ClassLists:
    from loaders import columnar  # imports pyarrow, which nothing else here needs

    columns, names = [], None
    for path, _, _ in stats:
        column, names = columnar.read(pathlib.Path(path), label)
        if not columnar.is_list(column.type):
            raise DataError(f"{path}: column {label!r} holds {column.type}; data.multilabel=true needs lists of int64 classes")
        columns.append(column)
    if names is None:
        raise DataError(f"{stats[0][0]}: column {label!r} names no classes; cast it to a list of ClassLabel and save it again")
    rows = [row or [] for column in columns for row in column.to_pylist()]
    classes = np.array([number for row in rows for number in row], np.int64)
    if len(classes) and not 0 <= classes.min() <= classes.max() < len(names):
        raise DataError(f"{stats[0][0]}: column {label!r} has class {classes.max()}, but names for {len(names)} classes only")
    return ClassLists(tuple(names), np.cumsum([0, *map(len, rows)]), classes)


@functools.lru_cache(maxsize=4)
def _index_once(stats: tuple[tuple[str, int, int], ...], label: str, root: str | None) -> "_rust.Index":
    cache = machine.cache_folder("index") if len(stats) >= CACHED_SHARDS else None
    return _rust.Index([path for path, _, _ in stats], label=label or None, root=root, cache=cache)
