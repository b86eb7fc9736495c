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
from typing import Any, NamedTuple

import numpy as np

from loaders import _rust
from loaders.audio import remote
from loaders.audio.recordings import find
from loaders.base import DataError, narrowed
from loaders.io import atomic_write, checks, files, machine
from loaders.io import content as content_lib

CACHED_BYTES = 4 << 20  # of the shards of an index, below which the same is true
MAX_ROWS = 100_000  # whose recordings are in a fingerprint, evenly spaced
MAX_PROBED = 256  # rows that are asked whether their recordings are in shards
CACHED_SHARDS = 16  # fewer are indexed in less time than is worth a file
# a shard whose name has the name of its split
SHARD_NAME = re.compile(
    r"(?:.+-)?([A-Za-z]\w*?)(-\d{5}-of-\d{5}(-[0-9a-f]{16})?)?\.(arrow|parquet)"
)
Stats = tuple[tuple[str, int, int], ...]  # path, size and time of each shard


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
                row[self.of(i)] = 1
        return hot

    def of(self, i: int) -> np.ndarray:
        """Return the classes of a recording."""
        return self.classes[self.starts[i] : self.starts[i + 1]]


def find_shards(path: str, split: str, *, links: bool = False) -> list[pathlib.Path]:
    """Return the shards of a split at a path, in order; ``links`` in a folder may lead out of it.

    Raises DataError: there are none, or one is no regular file, or lies outside of its folder.
    """
    folder = files.expanded(path)
    if folder.is_file():
        if reason := find.how_to_index(folder):
            raise DataError(f"is {path!r}, which holds no Arrow or Parquet shards; {reason}")
        return [folder]
    if folder.is_dir():
        return _shards_in_folder(path, folder, split, links)
    if glob.has_magic(path):
        return _matching_shards(path, folder, links)
    raise DataError(f"is {path!r}, which does not exist{nearest(folder)}")


def _shards_in_folder(
    path: str, folder: pathlib.Path, split: str, links: bool
) -> list[pathlib.Path]:
    shards = shards_of_split(folder, split, links=links)
    if shards:
        return shards
    content = sorted(entry.name for entry in folder.iterdir())
    splits = splits_of(folder)
    if splits:
        raise DataError(
            f"is {path!r}, a folder without the split {split!r}; {checks.expected(split, splits)}"
        )
    if _shards(folder):
        raise DataError(
            f"is {path!r}, a folder that is not split, and the split {split!r} is asked for;"
            " use train"
        )
    reason = find.how_to_index(folder)
    if not reason:
        reason = f"it holds {', '.join(content[:5]) or 'nothing'}"
    raise DataError(f"is {path!r}, a folder without Arrow or Parquet shards; {reason}")


def _matching_shards(path: str, pattern: pathlib.Path, links: bool) -> list[pathlib.Path]:
    folder = next(parent for parent in pattern.parents if not glob.has_magic(str(parent)))
    matches = [match for match in files.matches(pattern) if not match.is_dir()]
    if matches:
        return _checked(folder, matches, links)
    if folder.is_dir():
        raise DataError(f"is {path!r}, which matches no file; {folder} exists")
    raise DataError(f"is {path!r}, which matches no file; {folder} does not exist{nearest(folder)}")


def splits_of(folder: pathlib.Path) -> list[str]:
    """Return the splits of a folder of shards, or none if it is not split or holds no shards."""
    names = set(_by_split(folder))
    for entry in folder.iterdir():
        if entry.is_dir() and entry.name != "data" and _shards(entry):
            names.add(entry.name)
    if not _shards(folder):
        names |= set(_by_split(folder / "data"))
    return sorted(names)


def nearest(path: pathlib.Path) -> str:
    """Return the remedy for a missing path: a sibling of a similar name, or its existing part."""
    path = path.absolute()
    while not path.parent.is_dir():
        path = path.parent
    parent = path.parent
    siblings = sorted(sibling.name for sibling in parent.iterdir())
    close_names = difflib.get_close_matches(path.name, siblings, n=1)
    if close_names:
        return f"; did you mean {str(parent / close_names[0])!r}?"
    listed = ", ".join(siblings[:5]) or "nothing"
    ellipsis = ", …" if len(siblings) > 5 else ""
    return f"; {parent} exists, and holds {listed}{ellipsis}"


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
    groups = _by_split(folder, split)
    if groups:
        return groups.get(split, [])
    if split not in ("train", "test") and not splits_of(folder):
        # of a folder that is not split, all of it is train or test, and nothing else
        return _in_data(folder, split)
    return _shards(folder) or _in_data(folder, split)


def _in_data(folder: pathlib.Path, split: str) -> list[pathlib.Path]:
    """Find shards in data/, named by their splits, where a repository of the Hub keeps them."""
    if _shards(folder):
        return []
    return _by_split(folder / "data", split).get(split, [])


def _shards(folder: pathlib.Path) -> list[pathlib.Path]:
    if (folder / "state.json").is_file():
        return [folder / name for name in _names_in_state(folder)]
    # cache-….arrow are results of datasets' map and filter, next to the data that they came from
    results = ("cache-", "tmp")
    shards = [path for path in folder.glob("*.arrow") if not path.name.startswith(results)]
    return sorted(shards or folder.glob("*.parquet"))


def _names_in_state(folder: pathlib.Path) -> list[str]:
    """Return the shards' names of a folder that ``datasets`` saved. Raises DataError."""
    state = folder / "state.json"
    try:
        content = files.read_json(files.inside(folder, state.name))
        names = [file["filename"] for file in content["_data_files"]]
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(f"has a broken {state}: {error!r}; save the dataset again") from error
    for name in names:
        if not isinstance(name, str) or not name or "\0" in name:
            raise DataError(f"has a broken {state}: it names {name!r}; save the dataset again")
    return names


def _by_split(folder: pathlib.Path, split: str = "train") -> dict[str, list[pathlib.Path]]:
    """Group a folder's shards by the split in their names: name-SPLIT[-00000-of-00007].arrow.

    Empty if no name has "train", "test" or ``split``: then the folder is not split.
    """
    groups: dict[str, list[pathlib.Path]] = {}
    if (folder / "state.json").is_file():
        return groups
    for shard in _shards(folder):
        match = SHARD_NAME.fullmatch(shard.name)
        shard_split = match[1] if match else ""
        groups.setdefault(shard_split, []).append(shard)
    is_split = any(name in groups for name in ("train", "test", split))
    return groups if is_split else {}


def has_split(folder: pathlib.Path, split: str) -> bool:
    """Whether a folder holds shards of this split besides others."""
    if _shards(folder / split) or split in _by_split(folder, split):
        return True
    return bool(_in_data(folder, split))


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
    recordings = pathlib.Path(os.path.normpath(folder / root))
    is_inside = recordings.resolve().is_relative_to(folder)
    if not is_inside and _noted_root(folder) != str(recordings):
        raise DataError(
            f"has {file}, whose recordings lie in {recordings}: outside of the index, which"
            " jaxtrain index did not make here. If you trust it, name that folder as"
            " data.audio_root, or run jaxtrain index again"
        )
    return recordings


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
    digest = hashlib.sha256(os.path.realpath(folder).encode()).hexdigest()
    return machine.cache_folder("indexes", digest[:32])


def label_column(shards: Sequence[pathlib.Path], label: str, multilabel: bool) -> str:
    """Return the column that ``label`` means: an index of ours has its own."""
    if not label or not index_file(shards[0]):
        return label
    return "labels" if multilabel else "label"


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

    is_corpus = make or demo.folder().is_dir()
    return str(demo.ensure() if is_corpus else demo_outline.birds())


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

            names = ["audio", label] if label else ["audio"]
            for path in shards:
                columnar.require(path, *names)
        hint = ""
        if "list" in str(error).lower():
            hint = "; if it holds lists of classes, set data.multilabel=true"
        raise DataError(f"{error}{hint}{remote.reasons()}") from error


def _root(shards: Sequence[pathlib.Path], audio_root: str) -> str | None:
    if audio_root:
        return os.path.expanduser(audio_root)
    file = index_file(shards[0])
    return str(index_root(file)) if file else None


def fingerprint(
    index: "_rust.Index", shards: Sequence[pathlib.Path], *, audio_root: str, links: bool = False
) -> str:
    """Return the index's fingerprint, with a digest of recordings as `content.known` gives it.

    These are files of their own, or shards that hold them. Of an address, the index tells the
    shards apart, and files that cannot be read are left out.
    """
    root = _root(shards, audio_root)
    parts_of: dict[str, content_lib.Parts] = {}
    in_shards = [row for row in _spaced(index.n_rows, MAX_PROBED) if index.part(row) is None]
    for i, shard in enumerate(shards):
        if in_shards and not remote.is_copy(shard):
            parts_of[f"shard {i} {shard.name}"] = [shard]
    folders: dict[str, pathlib.Path] = {}
    # a row without a part has its recording in its shard, or in the file that it names
    has_files = any(_recording(index, shards, row, root, links) for row in in_shards)
    if has_files or len(in_shards) < min(MAX_PROBED, index.n_rows):
        for row in _spaced(index.n_rows, MAX_ROWS):
            folders.setdefault(index.path(row) or "", _shard_of(index, shards, row).parent)
    names = sorted(folders)
    if len(names) > content_lib.MAX_FILES:
        names = [names[place] for place in _spaced(len(names), content_lib.MAX_SAMPLED)]
    for name in names:
        path = _file(folders[name], name, root, links)
        if path:
            parts_of[name] = [path]
    if not parts_of:
        return index.fingerprint
    digest = content_lib.fingerprint(content_lib.known(parts_of))
    return f"{index.fingerprint}-{digest}"


def _spaced(n: int, most: int) -> list[int]:
    """Return the numbers below ``n``, or evenly spaced ones if they are more than ``most``."""
    numbers = np.unique(np.linspace(0, n - 1, min(n, most)).astype(int))
    return [int(number) for number in numbers]


def _shard_of(index: "_rust.Index", shards: Sequence[pathlib.Path], row: int) -> pathlib.Path:
    return shards[int(np.searchsorted(index.first_rows, row, side="right")) - 1]


def _recording(
    index: "_rust.Index", shards: Sequence[pathlib.Path], row: int, root: str | None, links: bool
) -> pathlib.Path | None:
    """Return the file that a row names, if there is one."""
    return _file(_shard_of(index, shards, row).parent, index.path(row) or "", root, links)


def _file(folder: pathlib.Path, name: str, root: str | None, links: bool) -> pathlib.Path | None:
    """Return a recording below the root, or else below its shard's folder, if it is there."""
    if not name:
        return None
    with contextlib.suppress(files.FileError, OSError):
        path = files.inside(pathlib.Path(root or folder), name, links=links)
        if path.is_file():
            return path
    return None


def read_class_lists(shards: Sequence[pathlib.Path], label: str) -> ClassLists:
    """Return the classes of every recording, of a column of lists. Raises DataError."""
    return _class_lists_once(_stats(shards), label)


def _stats(shards: Sequence[pathlib.Path]) -> Stats:
    stats = []
    try:
        for path in shards:
            status = path.stat()
            stats.append((str(path), status.st_size, files.changed_ns(status)))
    except OSError as error:
        raise DataError(f"{error.filename}: {error.strerror}") from error
    return tuple(stats)


@functools.lru_cache(maxsize=4)
def _class_lists_once(stats: Stats, label: str) -> ClassLists:
    import pyarrow.compute as pc  # which nothing else here needs

    from loaders.io import columnar

    chunks = []
    names = None
    for path, _, _ in stats:
        column, names = columnar.read(pathlib.Path(path), label)
        if names is not None and not _are_names(names):
            raise DataError(
                f"{path}: column {label!r} has classes without names; cast it to a list of"
                " ClassLabel again"
            )
        if not columnar.is_list(column.type):
            raise DataError(
                f"{path}: column {label!r} holds {column.type}; data.multilabel=true needs lists of"
                " int64 classes"
            )
        chunks += column.chunks
    first_path = stats[0][0]
    if names is None:
        raise DataError(
            f"{first_path}: column {label!r} names no classes; cast it to a list of ClassLabel and"
            " save it again"
        )
    lengths = [np.zeros(1, np.int64)]
    values = [np.zeros(0, np.int64)]
    for chunk in chunks:
        chunk_lengths = pc.fill_null(pc.list_value_length(chunk), 0)
        chunk_values = pc.list_flatten(chunk)
        if chunk_values.null_count:
            raise DataError(
                f"{first_path}: column {label!r} has a list with a null; save it without"
            )
        lengths.append(chunk_lengths.to_numpy(zero_copy_only=False))
        values.append(chunk_values.to_numpy(zero_copy_only=False).astype(np.int64))
    starts = np.cumsum(np.concatenate(lengths), dtype=np.int64)
    classes = np.concatenate(values)
    if len(classes) and not 0 <= classes.min() <= classes.max() < len(names):
        raise DataError(
            f"{first_path}: column {label!r} has classes {classes.min()} to {classes.max()}, but"
            f" names for {len(names)} only"
        )
    classes = narrowed(classes, np.int32, f"the classes of {label!r}")
    return ClassLists(tuple(names), starts, classes)


def _are_names(names: Any) -> bool:
    return isinstance(names, list) and all(isinstance(name, str) for name in names)


@functools.lru_cache(maxsize=4)
def _index_once(stats: Stats, label: str, root: str | None, links: bool) -> "_rust.Index":
    paths = [path for path, _, _ in stats]
    # Shards of an index are read when it is opened.
    n_bytes_to_read = 0
    if index_file(pathlib.Path(paths[0])):
        n_bytes_to_read = sum(size for _, size, _ in stats)
    is_large = n_bytes_to_read >= CACHED_BYTES or len(stats) >= CACHED_SHARDS
    cache = machine.cache_folder("index") if is_large else None
    copying = any(remote.is_copying(pathlib.Path(path)) for path in paths)
    return _rust.Index(
        paths, label=label or None, root=root, cache=cache, links=links, copying=copying
    )
