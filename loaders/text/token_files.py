"""Documents as files of tokens: written in shards, read by memory map.

A text file is read as one document. A folder holds the splits train/ and test/, or is itself the
training split. A folder of one split holds

    tokens.json     {"format": 1, "dtype": "uint16", "vocab": 50257, "eos": 50256, "ends": [50256],
                    "tokenizer": "tokenizer.json", "shards": [{"name": "00000", "documents": n,
                    "tokens": t, "bytes": b, "first_bytes": f, "sha256": "…", "sample": "…"}, …]}
                    vocab: the largest id + 1; eos: added to every document, or null; ends: the ids
                    that end a text
    00000.tokens    uint16 or uint32 [t], little-endian: all documents of the shard, one after the
                    other
    00000.docs      int64 [n + 1, 2], little-endian: the begin of each document, in tokens and in
                    bytes of text, and the end
    tokenizer.json  for Hugging Face ``tokenizers``

tokens.json is written last: with it, the folder is complete. "sha256" is of both files of a shard,
and "sample" is `loaders.io.content.sample` of them. `compare` finds shards that have changed since.
"""

import functools
import hashlib
import json
import math
import os
import pathlib
import random
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from loaders import order
from loaders.base import DataError, narrowed
from loaders.io import atomic_write, files
from loaders.io import content as content_lib
from loaders.text.tokenizer import open_tokenizer

FORMAT = 1
METADATA_FILES = ("tokens.json", "train/tokens.json", "test/tokens.json")


class Documents(NamedTuple):
    shards: tuple[np.ndarray, ...]  # of tokens, memory maps
    shard: np.ndarray  # int32 [n]
    start: np.ndarray  # int64 [n] in its shard
    length: np.ndarray  # int64 [n] tokens
    n_bytes: int  # of text
    vocab: int
    digest: str
    ends: tuple[int, ...] = ()  # tokens that end a text
    first_bytes: float = 0.0  # of the first tokens of all documents, which nothing predicts

    def read(self, document: int, offset: int, count: int) -> np.ndarray:
        """``count`` tokens of a document, from its token ``offset`` on, as a view of the map."""
        start = self.start[document] + offset
        return self.shards[int(self.shard[document])][start : start + count]


def symbols(path: pathlib.Path) -> str:
    """Return the different characters of a text file, sorted: its vocabulary."""
    return "".join(sorted(set(_decoded(path))))


def _decoded(path: pathlib.Path) -> str:
    try:
        with files.regular(path) as file:
            return file.read().decode("utf-8-sig")
    except (files.FileError, UnicodeDecodeError) as error:
        raise DataError(
            f"{path}: cannot be read as UTF-8: {error}; a source is a text file or a folder of"
            " token files"
        ) from error


def open_splits(
    path: str, test: str, *, text: str, test_share: float, links: bool = False
) -> dict[str, Documents]:
    """Return the documents of "train" and "test", opened once, and again when a file has changed.

    ``path``: a folder of token files, or a text file. ``test``: the same to test on; empty = test/
    in the folder, else ``test_share`` of ``path``. ``text``: the tokens of a text file,
    "characters" or "bytes". ``test_share``: of the documents, or of a text the share at its end.
    ``links``: whether links in a folder may lead out of it. Raises DataError: files that cannot be
    read, or do not fit together.
    """
    folders = [files.expanded(name) for name in (path, test) if name]
    places = [folder / name for folder in folders for name in ("", *METADATA_FILES)]
    return _open_once(path, test, text, test_share, links, files.stamps(places))


@functools.lru_cache(maxsize=16)
def _open_once(
    path_name: str, test_name: str, text: str, test_share: float, links: bool, _: files.Stamps
) -> dict[str, Documents]:
    path = files.expanded(path_name)
    test_path: pathlib.Path | None = None
    if test_name:
        test_path = files.expanded(test_name)
    elif (path / "test" / "tokens.json").is_file():
        test_path = path / "test"
    is_text = path.is_file()
    vocabulary = symbols(path) if is_text and text == "characters" else ""
    if is_text:
        train = _read_text(path, vocabulary)
    else:
        folder = path / "train" if (path / "train" / "tokens.json").is_file() else path
        train = _read_folder(folder, links)
    if test_path is not None:
        test = _read_text(test_path, vocabulary) if is_text else _read_folder(test_path, links)
        if test.vocab != train.vocab:
            raise DataError(
                f"{test_path} has a vocabulary of {test.vocab}, and {path} one of {train.vocab}"
            )
        return {"train": train, "test": test}
    if is_text:  # as nanoGPT splits: the beginning is for training
        n_tokens = len(train.shards[0])
        n_train = int(n_tokens * (1 - test_share))
        return {
            "train": _piece(train, 0, n_train, path, text),
            "test": _piece(train, n_train, n_tokens, path, text),
        }
    is_test = order.held_out(np.arange(len(train.length)), test_share)
    sizes = _document_bytes(folder, links)
    return {
        "train": _some_documents(train, ~is_test, sizes, test_share),
        "test": _some_documents(train, is_test, sizes, test_share),
    }


def _some_documents(
    documents: Documents, is_chosen: np.ndarray, sizes: np.ndarray, test_share: float
) -> Documents:
    """Return the documents of a split, whose texts have ``sizes`` bytes, int64 [n]."""
    share = is_chosen.mean() if is_chosen.size else 0.0
    return documents._replace(
        shard=documents.shard[is_chosen],
        start=documents.start[is_chosen],
        length=documents.length[is_chosen],
        n_bytes=int(sizes[is_chosen].sum()),
        first_bytes=documents.first_bytes * share,
        digest=f"{documents.digest} {test_share}",
    )


def _piece(document: Documents, start: int, stop: int, path: pathlib.Path, text: str) -> Documents:
    """Tokens [start, stop) of a text as its only document, or no document without tokens."""
    content = "" if text == "bytes" else _decoded(path)[start:stop]
    if content:
        n_bytes = len(content.encode())
        first_bytes = len(content[:1].encode())
    else:
        n_bytes = stop - start
        first_bytes = min(n_bytes, 1)
    number = np.arange(1 if stop > start else 0)
    return document._replace(
        shard=number.astype(np.int32),
        start=number + start,
        length=number + stop - start,
        n_bytes=n_bytes,
        digest=f"{document.digest} {start} {stop}",
        first_bytes=first_bytes,
    )


def _read_text(path: pathlib.Path, vocabulary: str) -> Documents:
    """Return a text file as one document: of characters, or of bytes if ``vocabulary`` is empty."""
    content = _decoded(path)
    encoded = content.encode()
    if vocabulary:
        tokens = _characters(path, content, vocabulary)
    else:
        tokens = np.frombuffer(encoded, np.uint8)
    digest = hashlib.sha256(encoded + vocabulary.encode()).hexdigest()
    return Documents(
        shards=(tokens,),
        shard=np.zeros(1, np.int32),
        start=np.zeros(1, np.int64),
        length=np.full(1, len(tokens), np.int64),
        n_bytes=len(encoded),
        vocab=len(vocabulary) or 256,
        digest=digest,
    )


def _characters(path: pathlib.Path, content: str, vocabulary: str) -> np.ndarray:
    """Return the number of each character in a sorted vocabulary. Raises DataError."""
    points = np.frombuffer(content.encode("utf-32-le"), np.uint32)
    vocabulary_points = np.array([ord(character) for character in vocabulary], np.uint32)
    tokens = np.searchsorted(vocabulary_points, points)
    nearest_points = vocabulary_points[np.minimum(tokens, len(vocabulary) - 1)]
    unknown = np.flatnonzero(nearest_points != points)
    if unknown.size:
        place = unknown[0]
        raise DataError(
            f"{path}: character {content[place]!r} at {place} is not in the training text"
        )
    return narrowed(tokens, np.uint32, f"the symbols of {path}")


def _read_folder(folder: pathlib.Path, links: bool) -> Documents:
    metadata = _read_metadata(folder, links)
    if "ends" not in metadata:
        _refuse_small_vocabulary(folder, metadata["vocab"])
    entries = metadata["shards"]
    dtype = np.dtype(metadata["dtype"]).newbyteorder("<")
    shards: list[np.ndarray] = []
    shard_numbers: list[np.ndarray] = []
    starts: list[np.ndarray] = []
    lengths: list[np.ndarray] = []
    for i, entry in enumerate(entries):
        path = files.inside(folder, f"{entry['name']}.tokens", links=links, remedy=files.LINKS)
        if not path.exists():
            expected = entry["tokens"] * dtype.itemsize
            raise DataError(
                f"{path} does not exist, but tokens.json names {expected} bytes; make the tokens"
                " again"
            )
        first_tokens = _read_index(folder, entry, links)[:, 0]
        shards.append(_mapped(folder, path.name, dtype, entry["tokens"], links))
        shard_numbers.append(np.full(len(first_tokens) - 1, i, np.int32))
        starts.append(first_tokens[:-1])
        lengths.append(np.diff(first_tokens))
    digests = "".join(entry["sha256"] for entry in entries)
    n_bytes = sum(entry["bytes"] for entry in entries)
    n_tokens = sum(entry["tokens"] for entry in entries)
    first_bytes = 0
    for entry in entries:
        # Folders without that number: as many as of any token.
        estimate = entry["documents"] * n_bytes / max(n_tokens, 1)
        first_bytes += entry.get("first_bytes", estimate)
    eos = metadata.get("eos")
    ends = metadata.get("ends", [] if eos is None else [eos])
    return Documents(
        shards=tuple(shards),
        shard=_joined(shard_numbers),
        start=_joined(starts),
        length=_joined(lengths),
        n_bytes=n_bytes,
        vocab=metadata["vocab"],
        digest=hashlib.sha256(digests.encode()).hexdigest(),
        ends=tuple(ends),
        first_bytes=first_bytes,
    )


def _refuse_small_vocabulary(folder: pathlib.Path, vocab: int) -> None:
    """Raise DataError if a folder's tokenizer.json, where it can be read, has more tokens."""
    try:
        tokenizer_vocab = open_tokenizer(folder / "tokenizer.json").vocab
    except DataError:
        return
    if vocab < tokenizer_vocab:
        raise DataError(
            f"{folder}: tokens.json has a vocabulary of {vocab}, and its tokenizer.json"
            f" one of {tokenizer_vocab}: ids may be stored as others; make the tokens again with"
            " `jaxtrain tokens`"
        )


def _document_bytes(folder: pathlib.Path, links: bool) -> np.ndarray:
    """Return the bytes of text of each document, int64 [n]."""
    sizes = []
    for entry in _read_metadata(folder, links)["shards"]:
        first_bytes = _read_index(folder, entry, links)[:, 1]
        sizes.append(np.diff(first_bytes))
    return _joined(sizes)


def _joined(parts: Sequence[np.ndarray]) -> np.ndarray:
    return np.concatenate(parts) if parts else np.empty(0, np.int64)


def _read_metadata(folder: pathlib.Path, links: bool) -> dict[str, Any]:
    path = folder / "tokens.json"
    if not path.exists():
        names = sorted(entry.name for entry in folder.iterdir()) if folder.is_dir() else []
        content = ", ".join(names[:5]) or "nothing"
        raise DataError(
            f"{folder} has no tokens.json; it holds {content}. Make token files with"
            " `jaxtrain tokens`, which also completes an interrupted folder"
        )
    metadata = files.read_json(files.inside(folder, path.name, links=links, remedy=files.LINKS))
    version = metadata.get("format")
    if version != FORMAT:
        raise DataError(f"{path} has format {version!r}; expected {FORMAT}: make the tokens again")
    if not _is_complete(metadata):
        raise DataError(f"{path} does not describe token files; make the tokens again")
    return metadata


def _is_complete(metadata: dict[str, Any]) -> bool:
    ends = metadata.get("ends", [])
    if not isinstance(ends, list) or not all(map(_is_count, ends)):
        return False
    if not _is_count(metadata.get("eos") or 0) or not _is_count(metadata.get("vocab")):
        return False
    shards = metadata.get("shards")
    is_readable = metadata.get("dtype") in ("uint16", "uint32")
    return is_readable and isinstance(shards, list) and all(map(_is_entry, shards))


def _is_entry(entry: Any) -> bool:
    """Whether a value describes a shard."""
    if not isinstance(entry, dict):
        return False
    counts = [entry.get(name) for name in ("documents", "tokens", "bytes")]
    names = [entry.get(name) for name in ("name", "sha256")]
    has_names = all(type(name) is str for name in names)
    return has_names and all(map(_is_count, [*counts, entry.get("first_bytes", 0)]))


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**60


def _read_index(folder: pathlib.Path, entry: dict[str, Any], links: bool) -> np.ndarray:
    """Return the begins of a shard's documents, int64 [n + 1, 2]. Raises DataError."""
    name = f"{entry['name']}.docs"
    n_numbers = 2 * (entry["documents"] + 1)
    index = _mapped(folder, name, np.dtype("<i8"), n_numbers, links).reshape(-1, 2)
    has_ends = index[-1].tolist() == [entry["tokens"], entry["bytes"]]
    if index[0].any() or not has_ends or (np.diff(index, axis=0) < 0).any():
        raise DataError(
            f"{folder / name} does not hold the {entry['documents']} documents that tokens.json"
            " names; make the tokens again"
        )
    return index


def _mapped(folder: pathlib.Path, name: str, dtype: np.dtype, n: int, links: bool) -> np.ndarray:
    """Map ``n`` numbers, which must be all of a file. Raises DataError."""
    path = files.inside(folder, name, links=links, remedy=files.LINKS)
    with files.regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        expected = n * dtype.itemsize
        if size != expected:
            raise DataError(
                f"{path} has {size} bytes, but tokens.json names {expected} bytes; make"
                " the tokens again"
            )
        return np.memmap(file, dtype, "r") if size else np.empty(0, dtype)


def folders_of(path: str, test: str, split: str) -> list[pathlib.Path]:
    """Return the folder of token files that a split is read from, or none for a text file.

    The arguments are those of `open_splits`.
    """
    place = files.expanded(path)
    if place.is_file():
        return []
    if split == "test" and test:
        return [files.expanded(test)]
    if split == "test" and (place / "test" / "tokens.json").is_file():
        return [place / "test"]
    return [place / "train" if (place / "train" / "tokens.json").is_file() else place]


def compare(folder: pathlib.Path, *, links: bool = False) -> None:
    """Compare the shards of a folder with tokens.json, as far as a start can afford.

    Shards that have not changed since they were compared on this machine are not read. Of the
    others, `WHOLE` bytes of `loaders.io.content` are read whole, and the rest are sampled.

    Raises DataError: a shard has other bytes.
    """
    entries = {entry["name"]: entry for entry in _read_metadata(folder, links)["shards"]}
    cache = content_lib.Cache({name: _parts(folder, entries[name], links) for name in entries})
    budget = content_lib.WHOLE
    names = []
    sampled = []
    unread = set(cache.unread())
    for name in entries:
        if name in unread:
            budget -= cache.size(name)
        if name in unread and budget < 0:
            sampled.append(name)
        else:
            names.append(name)
    for name, digest in cache.digests(names).items():
        if digest != entries[name]["sha256"]:
            raise _changed(folder, name)
    for name in sampled:
        recorded = entries[name].get("sample")
        if recorded and content_lib.sample(_parts(folder, entries[name], links)) != recorded:
            raise _changed(folder, name)


def compare_all(
    folder: pathlib.Path, *, links: bool = False, deadline: float = math.inf
) -> tuple[int, int]:
    """Read the shards of a folder whole, in a random order, until a time of `time.monotonic`.

    Return how many were read, of how many. Raises DataError: a shard has other bytes.
    """
    entries = _read_metadata(folder, links)["shards"]
    random.shuffle(entries)
    for i, entry in enumerate(entries):
        if time.monotonic() > deadline:
            return i, len(entries)
        if content_lib.whole(_parts(folder, entry, links)) != entry["sha256"]:
            raise _changed(folder, entry["name"])
    return len(entries), len(entries)


def _parts(folder: pathlib.Path, entry: dict[str, Any], links: bool) -> list[pathlib.Path]:
    """Return the files of a shard, in the order of its digest."""
    names = (f"{entry['name']}.tokens", f"{entry['name']}.docs")
    return [files.inside(folder, name, links=links, remedy=files.LINKS) for name in names]


def _changed(folder: pathlib.Path, name: str) -> DataError:
    return DataError(
        f"{folder / name}.tokens or .docs is not the file that tokens.json records: its sha256"
        " differs, so it was changed or damaged since; put it back, or make the tokens again in a"
        " new folder"
    )


def lengths(folder: pathlib.Path) -> np.ndarray:
    """Return the number of tokens of each document of a folder of token files, int64 [n]."""
    return _read_folder(folder, links=False).length


def write_shard(
    folder: pathlib.Path,
    name: str,
    documents: Sequence[np.ndarray],
    sizes: Sequence[int],
    dtype: Any,
    firsts: Sequence[int] | None = None,
) -> dict[str, Any]:
    """Write one shard and return its entry for tokens.json.

    ``sizes``: bytes of text of each document. ``firsts``: those of its first token.
    """
    index = np.zeros((len(documents) + 1, 2), "<i8")
    index[1:, 0] = np.cumsum([len(document) for document in documents])
    index[1:, 1] = np.cumsum(sizes)
    source = f"the tokens of {folder / name}"
    parts = [narrowed(document, dtype, source) for document in documents]
    tokens = np.concatenate(parts or [np.empty(0, dtype)])
    raw_tokens = tokens.astype(np.dtype(dtype).newbyteorder("<"), copy=False).tobytes()
    raw_index = index.tobytes()
    with atomic_write.file(folder / f"{name}.tokens") as file:
        file.write(raw_tokens)
    with atomic_write.file(folder / f"{name}.docs") as file:
        file.write(raw_index)
    entry: dict[str, Any] = {
        "name": name,
        "documents": len(documents),
        "tokens": len(tokens),
        "bytes": int(index[-1, 1]),
    }
    if firsts is not None:
        entry["first_bytes"] = sum(firsts)
    entry["sha256"] = hashlib.sha256(raw_tokens + raw_index).hexdigest()
    entry["sample"] = content_lib.sample(_parts(folder, entry, links=False))
    return entry


def write_about(
    folder: pathlib.Path,
    *,
    vocab: int,
    eos: int | None,
    tokenizer: str | None,
    shards: Sequence[dict[str, Any]],
    ends: Sequence[int] = (),
) -> None:
    """Write tokens.json, after which the folder is complete."""
    metadata = {
        "format": FORMAT,
        "dtype": str(token_dtype(vocab)),
        "vocab": vocab,
        "eos": eos,
        "ends": list(ends),
        "tokenizer": tokenizer,
        "shards": list(shards),
    }
    atomic_write.write(folder / "tokens.json", json.dumps(metadata, indent=1) + "\n")


def token_dtype(vocab: int) -> np.dtype:
    """Return the smallest dtype of files that holds ``vocab`` tokens."""
    return np.dtype(np.uint16 if vocab <= 1 << 16 else np.uint32)
