"""Shards of recordings: their places, and an index over them that is made without reading audio.

A path is one of

    a folder of ``datasets.save_to_disk``    its shards, in the order of state.json
    such a folder of several splits          its train/, and test/ unless ``test`` names another
    a folder that `jaxtrain index` wrote     its data/; index.json names the root of recordings
    a folder of ``*.arrow``, ``*.parquet``   by name, also in its data/; of several splits
                                             (``name-train-00000-of-00007.arrow``) the one wanted
    a glob, or one file                      by name
    an address gs://, s3://, hf://, https:// of any of these, copied first: `loaders.audio.remote`
    "demo"                                   the built-in corpus, made at its first use

Paths, labels and class names of 16 shards or more are kept in $JAXTRAIN_CACHE/index (or
~/.cache/jaxtrain/index) until a shard's name, size or time changes.
"""

import contextlib
import difflib
import functools
import glob
import hashlib
import os
import pathlib
import re
import stat
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from loaders import _rust
from loaders.audio import remote
from loaders.base import DataError, narrowed
from loaders.io import atomic_write, checks, files, machine

CACHED_BYTES = 4 << 20  # of the shards of an index, below which the same is true
# rows whose recordings are in a fingerprint, and [bytes] of each, of its middle
SAMPLED, SAMPLE = 256, 16 << 10
CACHED_SHARDS = 16  # fewer are indexed in less time than is worth a file


class ClassLists(NamedTuple):
    """The classes of all recordings: those of i are classes[starts[i] : starts[i + 1]]."""

    names: tuple[str, ...]
    starts: np.ndarray  # int64 [n + 1]
    classes: np.ndarray  # int32

    def hot(self, index: np.ndarray) -> np.ndarray:
        """Return recordings int [r], -1 for none -> uint8 [r, classes], 1 for its classes."""
        hot = np.zeros((len(index), len(self.names)), np.uint8)
        for row, i in zip(hot, index, strict=True):
            if i >= 0:
                row[self.classes[self.starts[i] : self.starts[i + 1]]] = 1
        return hot


def find_shards(path: str, split: str, *, links: bool = False) -> list[pathlib.Path]:
    """Return the shards of a split at a path, in order; ``links`` in a folder may lead out of it.

    Raises DataError: there are none, or one is no regular file, or lies outside of its folder.
    """
    folder = files.expanded(path)
    if folder.is_file():
        return [folder]
    if folder.is_dir():
        if shards := shards_of_split(folder, split, links=links):
            return shards
        content = sorted(p.name for p in folder.iterdir())
        if splits := splits_of(folder):
            raise DataError(
                f"is {path!r}, a folder without the split {split!r};"
                f" {checks.expected(split, splits)}"
            )
        if _shards(folder):
            raise DataError(
                f"is {path!r}, a folder that is not split, and the split {split!r} is asked for;"
                " use train"
            )
        listed = ", ".join(content[:5]) or "nothing"
        raise DataError(f"is {path!r}, a folder without Arrow or Parquet shards; it holds {listed}")
    if glob.has_magic(path):
        fixed = next(p for p in folder.parents if not glob.has_magic(str(p)))
        if matches := [p for p in files.matches(folder) if not p.is_dir()]:
            return _checked(fixed, matches, links)
        reason = f"{fixed} exists" if fixed.is_dir() else f"{fixed} does not exist{nearest(fixed)}"
        raise DataError(f"is {path!r}, which matches no file; {reason}")
    raise DataError(f"is {path!r}, which does not exist{nearest(folder)}")


def splits_of(folder: pathlib.Path) -> list[str]:
    """Return the splits of a folder of shards, or none if it is not split or holds no shards."""
    names = {
        *_by_split(folder),
        *(p.name for p in folder.iterdir() if p.is_dir() and p.name != "data" and _shards(p)),
    }
    if not _shards(folder):
        names |= set(_by_split(folder / "data"))
    return sorted(names)


def nearest(path: pathlib.Path) -> str:
    """Return the remedy for a missing path: a sibling of a similar name, or its existing part."""
    parent, missing = path.absolute().parent, path.name
    while not parent.is_dir():
        parent, missing = parent.parent, parent.name
    siblings = sorted(p.name for p in parent.iterdir())
    if close := difflib.get_close_matches(missing, siblings, n=1):
        return f"; did you mean {str(parent / close[0])!r}?"
    return (
        f"; {parent} exists, and holds"
        f" {', '.join(siblings[:5]) or 'nothing'}{', …' if len(siblings) > 5 else ''}"
    )


def shards_of_split(folder: pathlib.Path, split: str, *, links: bool = False) -> list[pathlib.Path]:
    """Return the shards of one split, or none. Raises DataError as `find_shards` does."""
    return _checked(folder, _of_split(folder, split), links)


def _checked(
    folder: pathlib.Path, shards: Sequence[pathlib.Path], links: bool
) -> list[pathlib.Path]:
    """Return the same shards. Raises DataError unless all are regular files in ``folder``."""
    for shard in shards:
        files.inside(folder.absolute(), str(shard.absolute()), links=links, remedy=files.LINKS)
        try:
            is_regular = stat.S_ISREG(shard.stat().st_mode)
        except OSError as error:
            why = (error.strerror or str(error)).lower()
            raise DataError(f"has {str(shard)[:200]}, which cannot be read: {why}") from error
        if not is_regular:
            raise DataError(
                f"has {shard}, which is no regular file; remove it, or name the shards with a glob"
            )
    return list(shards)


def _of_split(folder: pathlib.Path, split: str) -> list[pathlib.Path]:
    if any(_shards(folder / name) for name in ("train", "test", split)):
        return _shards(folder / split)
    if groups := _by_split(folder, split):
        return groups.get(split, [])
    if split not in ("train", "test") and not splits_of(folder):
        # of a folder that is not split, all of it is train or test, and nothing else
        return _in_data(folder, split)
    return _shards(folder) or _in_data(folder, split)


def _in_data(folder: pathlib.Path, split: str) -> list[pathlib.Path]:
    """Find shards in data/, named by their splits, where a repository of the Hub keeps them."""
    return _by_split(folder / "data", split).get(split, []) if not _shards(folder) else []


def _shards(folder: pathlib.Path) -> list[pathlib.Path]:
    state = folder / "state.json"
    if state.is_file():
        try:
            names = [
                file["filename"]
                for file in files.read_json(files.inside(folder, state.name))["_data_files"]
            ]
        except (ValueError, KeyError, TypeError) as error:
            raise DataError(f"has a broken {state}: {error!r}; save the dataset again") from error
        if wrong := [
            name for name in names if not isinstance(name, str) or not name or "\0" in name
        ]:
            raise DataError(f"has a broken {state}: it names {wrong[0]!r}; save the dataset again")
        return [folder / name for name in names]
    # cache-….arrow are results of datasets' map and filter, next to the data that they came from
    shards = [p for p in folder.glob("*.arrow") if not p.name.startswith(("cache-", "tmp"))]
    return sorted(shards or folder.glob("*.parquet"))


def _by_split(folder: pathlib.Path, split: str = "train") -> dict[str, list[pathlib.Path]]:
    """Group a folder's shards by the split in their names: name-SPLIT[-00000-of-00007].arrow.

    Empty if no name has "train", "test" or ``split``: then the folder is not split.
    """
    groups: dict[str, list[pathlib.Path]] = {}
    if (folder / "state.json").is_file():
        return groups
    for shard in _shards(folder):
        match = re.fullmatch(
            r"(?:.+-)?([A-Za-z]\w*?)(-\d{5}-of-\d{5}(-[0-9a-f]{16})?)?\.(arrow|parquet)", shard.name
        )
        groups.setdefault(match[1] if match else "", []).append(shard)
    return groups if {"train", "test", split} & set(groups) else {}


def has_split(folder: pathlib.Path, split: str) -> bool:
    """Whether a folder holds shards of this split besides others."""
    return bool(
        _shards(folder / split) or split in _by_split(folder, split) or _in_data(folder, split)
    )


def index_file(shard: pathlib.Path) -> pathlib.Path | None:
    """index.json of the index that a shard belongs to, or None for any other shard."""
    file = shard.parent.parent / "index.json"
    return file if shard.parent.name == "data" and file.is_file() else None


def index_root(file: pathlib.Path) -> pathlib.Path:
    """Return the folder that the recordings' names in an index are relative to. Raises DataError.

    One outside of the index counts if `jaxtrain index` made it here: others could name any folder.
    """
    try:
        root = files.read_json(files.inside(file.parent, file.name))["root"]
        if not isinstance(root, str) or "\0" in root:
            raise TypeError(f"root is {root!r}")
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(
            f"has a broken {file}: {error!r}; run jaxtrain index again, or set audio_root"
        ) from error
    folder = pathlib.Path(os.path.realpath(file.parent))
    found = pathlib.Path(os.path.normpath(folder / root))
    if not found.resolve().is_relative_to(folder) and _noted_root(folder) != str(found):
        raise DataError(
            f"has {file}, whose recordings lie in {found}: outside of the index, which jaxtrain"
            " index did not make here. If you trust it, name that folder as data.audio_root, or"
            " run jaxtrain index again"
        )
    return found


def note_root(folder: pathlib.Path, root: str) -> None:
    """Remember, for this user, that an index was made here with recordings below ``root``."""
    # Without the note, training asks for data.audio_root.
    with contextlib.suppress(OSError), atomic_write.shared(_note_of(folder)) as place:
        place.write_text(root)


def _noted_root(folder: pathlib.Path) -> str:
    try:
        return files.read_text(_note_of(folder), most=files.MAX_JSON)
    except files.FileError:
        return ""


def _note_of(folder: pathlib.Path) -> pathlib.Path:
    return machine.cache_folder(
        "indexes", hashlib.sha256(os.path.realpath(folder).encode()).hexdigest()[:32]
    )


def label_column(shards: Sequence[pathlib.Path], label: str, multilabel: bool) -> str:
    """Return the column that ``label`` means: an index of ours has its own."""
    return ("labels" if multilabel else "label") if label and index_file(shards[0]) else label


def resolve(path: str, *, make: bool = True, wait: bool = True) -> str:
    """Return a path on disk: of the corpus for "demo", or of a copy of a store's address.

    Args:
      make: whether to make a missing corpus. If not, its outline without sound is used.
      wait: until all of an address is copied. If not, only `open_index` may read it, as it comes.

    Raises DataError: an address whose shards cannot be copied (`loaders.audio.remote`).
    """
    if remote.is_remote(path):
        return remote.fetch(path, wait=wait)
    if path != "demo":
        return path
    # They import encoders, which nothing else here needs.
    from loaders.audio import demo, demo_outline

    return str(demo.ensure() if make or demo.folder().is_dir() else demo_outline.birds())


def open_index(
    shards: Sequence[pathlib.Path], *, label: str, audio_root: str, links: bool = False
) -> "_rust.Index":
    """Return the index of shards, made once in a process, and again when a file has changed.

    Args:
      label: the column of class labels; empty = none.
      audio_root: the folder of recordings that are not in the shards, below which they must lie;
        empty = the root that index.json names, or each shard's own folder.
      links: whether links may lead out of that folder.

    Raises DataError: shards that cannot be used.
    """
    try:
        return _index_once(_stats(shards), label, _root(shards, audio_root), links)
    except (ValueError, OSError) as error:
        if "no column" in str(error):
            from loaders.io import columnar

            for path in shards:
                columnar.require(path, "audio", *([label] if label else []))
        hint = (
            "; if it holds lists of classes, set data.multilabel=true"
            if "list" in str(error).lower()
            else ""
        )
        raise DataError(f"{error}{hint}{remote.reasons()}") from error


def _root(shards: Sequence[pathlib.Path], audio_root: str) -> str | None:
    if not audio_root and (file := index_file(shards[0])):
        return str(index_root(file))
    return os.path.expanduser(audio_root) or None


def fingerprint(
    index: "_rust.Index", shards: Sequence[pathlib.Path], *, audio_root: str, links: bool = False
) -> str:
    """Return the index's fingerprint, with a digest of recordings that are files of their own.

    It covers sizes and some bytes of up to SAMPLED files, evenly spaced, that can be read.
    """
    digest, known = hashlib.sha256(), set()
    root = _root(shards, audio_root)
    for row in np.unique(
        np.linspace(0, index.n_rows - 1, min(SAMPLED, index.n_rows)).astype(int)
    ).tolist():
        shard = shards[int(np.searchsorted(index.first_rows, row, side="right")) - 1]
        if index.part(row) is None or (name := index.path(row)) in known:
            continue
        known.add(name)
        with contextlib.suppress(files.FileError):
            with files.regular(
                files.inside(pathlib.Path(root or shard.parent), name, links=links)
            ) as file:
                size = os.fstat(file.fileno()).st_size
                file.seek(max(size - SAMPLE, 0) // 2)
                content = file.read(SAMPLE)
            digest.update(
                f"{name} {size} {hashlib.sha256(content).hexdigest()}\n".encode(
                    errors="surrogateescape"
                )
            )
    return f"{index.fingerprint}-{digest.hexdigest()[:16]}" if known else index.fingerprint


def read_class_lists(shards: Sequence[pathlib.Path], label: str) -> ClassLists:
    """Return the classes of every recording, of a column of lists. Raises DataError."""
    return _class_lists_once(_stats(shards), label)


def _stats(shards: Sequence[pathlib.Path]) -> tuple[tuple[str, int, int], ...]:
    try:
        return tuple(
            (str(path), (found := path.stat()).st_size, found.st_mtime_ns) for path in shards
        )
    except OSError as error:
        raise DataError(f"{error.filename}: {error.strerror}") from error


@functools.lru_cache(maxsize=4)
def _class_lists_once(stats: tuple[tuple[str, int, int], ...], label: str) -> ClassLists:
    import pyarrow.compute as pc  # which nothing else here needs

    from loaders.io import columnar

    lists, names = [], None
    for path, _, _ in stats:
        column, names = columnar.read(pathlib.Path(path), label)
        if names is not None and not (
            isinstance(names, list) and all(isinstance(name, str) for name in names)
        ):
            raise DataError(
                f"{path}: column {label!r} has classes without names; cast it to a list of"
                " ClassLabel again"
            )
        if not columnar.is_list(column.type):
            raise DataError(
                f"{path}: column {label!r} holds {column.type}; data.multilabel=true needs lists of"
                " int64 classes"
            )
        lists += column.chunks
    if names is None:
        raise DataError(
            f"{stats[0][0]}: column {label!r} names no classes; cast it to a list of ClassLabel and"
            " save it again"
        )
    lengths = [
        pc.fill_null(pc.list_value_length(chunk), 0).to_numpy(zero_copy_only=False)
        for chunk in lists
    ]
    parts = [pc.list_flatten(chunk) for chunk in lists]
    if any(part.null_count for part in parts):
        raise DataError(f"{stats[0][0]}: column {label!r} has a list with a null; save it without")
    values = [part.to_numpy(zero_copy_only=False).astype(np.int64) for part in parts]
    classes = np.concatenate([np.zeros(0, np.int64), *values])
    if len(classes) and not 0 <= classes.min() <= classes.max() < len(names):
        raise DataError(
            f"{stats[0][0]}: column {label!r} has classes {classes.min()} to {classes.max()}, but"
            f" names for {len(names)} only"
        )
    starts = np.cumsum(np.concatenate([np.zeros(1, np.int64), *lengths]), dtype=np.int64)
    return ClassLists(
        tuple(names), starts, narrowed(classes, np.int32, f"the classes of {label!r}")
    )


@functools.lru_cache(maxsize=4)
def _index_once(
    stats: tuple[tuple[str, int, int], ...], label: str, root: str | None, links: bool
) -> "_rust.Index":
    # Shards of an index are read when it is opened.
    large = (
        index_file(pathlib.Path(stats[0][0])) and sum(size for _, size, _ in stats) >= CACHED_BYTES
    )
    cache = machine.cache_folder("index") if large or len(stats) >= CACHED_SHARDS else None
    paths = [path for path, _, _ in stats]
    copying = any(remote.is_copying(pathlib.Path(path)) for path in paths)
    return _rust.Index(
        paths, label=label or None, root=root, cache=cache, links=links, copying=copying
    )
