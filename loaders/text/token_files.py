"""Documents as files of tokens: written in shards, read by memory map.

A text file is read as one document. A folder holds the splits train/ and test/, or is itself the
training split. A folder of one split holds

    tokens.json     {"format": 1, "dtype": "uint16", "vocab": 50257, "eos": 50256, "ends": [50256],
                    "tokenizer": "tokenizer.json", "shards": [{"name": "00000", "documents": n,
                    "tokens": t, "bytes": b, "first_bytes": f, "sha256": "…"}, …]} vocab: the
                    largest id + 1; eos: added to every document, or null; ends: the ids that end a
                    text
    00000.tokens    uint16 or uint32 [t], little-endian: all documents of the shard, one after the
                    other
    00000.docs      int64 [n + 1, 2], little-endian: the begin of each document, in tokens and in
                    bytes of text, and the end
    tokenizer.json  for Hugging Face ``tokenizers``

tokens.json is written last: with it, the folder is complete.
"""

import functools
import hashlib
import json
import os
import pathlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from loaders import order
from loaders.base import DataError, narrowed
from loaders.io import atomic_write as whole
from loaders.io import files
from loaders.text.tokenizer import open_tokenizer

FORMAT = 1
ABOUTS = ("tokens.json", "train/tokens.json", "test/tokens.json")


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
    places = [files.expanded(p) / name for p in (path, test) for name in ("", *ABOUTS) if p]
    return _open_once(path, test, text, test_share, links, files.stamps(places))


@functools.lru_cache(maxsize=16)
def _open_once(
    path_name: str, test_name: str, text: str, test_share: float, links: bool, _: files.Stamps
) -> dict[str, Documents]:
    path, test = (files.expanded(name) for name in (path_name, test_name))
    inner_test = path / "test" if (path / "test" / "tokens.json").is_file() else None
    held_out = test if test_name else inner_test
    vocabulary = symbols(path) if path.is_file() and text == "characters" else ""
    folder = path / "train" if (path / "train" / "tokens.json").is_file() else path
    train = _read_text(path, vocabulary) if path.is_file() else _read_folder(folder, links)
    if held_out is not None:
        other = (
            _read_text(held_out, vocabulary) if path.is_file() else _read_folder(held_out, links)
        )
        if other.vocab != train.vocab:
            raise DataError(
                f"{held_out} has a vocabulary of {other.vocab}, and {path} one of {train.vocab}"
            )
        return {"train": train, "test": other}
    if path.is_file():  # as nanoGPT splits: the beginning is for training
        n = int(len(train.shards[0]) * (1 - test_share))
        return {
            "train": _piece(train, 0, n, path, text),
            "test": _piece(train, n, len(train.shards[0]), path, text),
        }
    is_test = order.held_out(np.arange(len(train.length)), test_share)
    sizes = _document_bytes(folder, links)
    return {
        name: train._replace(
            shard=train.shard[kept],
            start=train.start[kept],
            length=train.length[kept],
            n_bytes=int(sizes[kept].sum()),
            first_bytes=train.first_bytes * kept.mean() if kept.size else 0.0,
            digest=f"{train.digest} {test_share}",
        )
        for name, kept in (("train", ~is_test), ("test", is_test))
    }


def _piece(whole: Documents, begin: int, end: int, path: pathlib.Path, text: str) -> Documents:
    """Tokens ``begin`` … ``end`` of a text as its only document, or no document without tokens."""
    content = "" if text == "bytes" else _decoded(path)[begin:end]
    n_bytes, first = (
        (len(content.encode()), len(content[:1].encode()))
        if content
        else (end - begin, min(end - begin, 1))
    )
    only = np.arange(1 if end > begin else 0)
    return whole._replace(
        shard=only.astype(np.int32),
        start=only + begin,
        length=only + end - begin,
        n_bytes=n_bytes,
        digest=f"{whole.digest} {begin} {end}",
        first_bytes=first,
    )


def _read_text(path: pathlib.Path, vocabulary: str) -> Documents:
    """Return a text file as one document: of characters, or of bytes if ``vocabulary`` is empty."""
    content = _decoded(path)
    encoded = content.encode()
    if vocabulary:
        points = np.frombuffer(content.encode("utf-32-le"), np.uint32)
        known = np.array([ord(c) for c in vocabulary], np.uint32)
        tokens = np.searchsorted(known, points)
        if (strange := np.flatnonzero(known[np.minimum(tokens, len(known) - 1)] != points)).size:
            raise DataError(
                f"{path}: character {content[strange[0]]!r} at {strange[0]} is not in the training"
                " text"
            )
        tokens = narrowed(tokens, np.uint32, f"the symbols of {path}")
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


def _read_folder(folder: pathlib.Path, links: bool) -> Documents:
    about = _read_about(folder, links)
    if "ends" not in about and about["vocab"] < (needed := _vocabulary(folder)):
        raise DataError(
            f"{folder}: tokens.json has a vocabulary of {about['vocab']}, and its tokenizer.json"
            f" one of {needed}: ids may be stored as others; make the tokens again with `jaxtrain"
            " tokens`"
        )
    shards, shard, start, length = [], [], [], []
    dtype = np.dtype(about["dtype"]).newbyteorder("<")
    for i, entry in enumerate(about["shards"]):
        path = files.inside(folder, f"{entry['name']}.tokens", links=links, remedy=files.LINKS)
        if not path.exists():
            expected = entry["tokens"] * dtype.itemsize
            raise DataError(
                f"{path} does not exist, but tokens.json names {expected} bytes; make the tokens"
                " again"
            )
        index = _read_index(folder, entry, links)[:, 0]
        shards.append(_mapped(folder, path.name, dtype, entry["tokens"], links))
        shard.append(np.full(len(index) - 1, i, np.int32))
        start.append(index[:-1])
        length.append(np.diff(index))
    digest = hashlib.sha256(
        "".join(entry["sha256"] for entry in about["shards"]).encode()
    ).hexdigest()
    n_bytes, n_tokens = (
        sum(entry[kind] for entry in about["shards"]) for kind in ("bytes", "tokens")
    )
    # Folders without that number: as many as of any token.
    firsts = [
        entry.get("first_bytes", entry["documents"] * n_bytes / max(n_tokens, 1))
        for entry in about["shards"]
    ]
    joined = [np.concatenate(x) if x else np.empty(0, np.int64) for x in (shard, start, length)]
    ends = about.get("ends", [] if about.get("eos") is None else [about["eos"]])
    return Documents(
        tuple(shards),
        joined[0],
        joined[1],
        joined[2],
        n_bytes,
        about["vocab"],
        digest,
        tuple(ends),
        sum(firsts),
    )


def _vocabulary(folder: pathlib.Path) -> int:
    """Return the vocabulary of a folder's tokenizer.json; 0 if it cannot be read here."""
    try:
        return open_tokenizer(folder / "tokenizer.json").vocab
    except DataError:
        return 0


def _document_bytes(folder: pathlib.Path, links: bool) -> np.ndarray:
    """Return the bytes of text of each document, int64 [n]."""
    parts = [
        np.diff(_read_index(folder, entry, links)[:, 1])
        for entry in _read_about(folder, links)["shards"]
    ]
    return np.concatenate(parts) if parts else np.empty(0, np.int64)


def _read_about(folder: pathlib.Path, links: bool) -> dict[str, Any]:
    path = folder / "tokens.json"
    if not path.exists():
        content = ", ".join(sorted(p.name for p in folder.iterdir())[:5]) if folder.is_dir() else ""
        raise DataError(
            f"{folder} has no tokens.json; it holds {content or 'nothing'}. Make token files with"
            " `jaxtrain tokens`, which also completes an interrupted folder"
        )
    about = files.read_json(files.inside(folder, path.name, links=links, remedy=files.LINKS))
    if about.get("format") != FORMAT:
        raise DataError(
            f"{path} has format {about.get('format')!r}; expected {FORMAT}: make the tokens again"
        )
    if not _is_complete(about):
        raise DataError(f"{path} does not describe token files; make the tokens again")
    return about


def _is_complete(about: dict[str, Any]) -> bool:
    def whole(x: Any) -> bool:
        return isinstance(x, int) and not isinstance(x, bool) and 0 <= x < 2**60

    def complete(entry: Any) -> bool:
        sizes, texts = ("documents", "tokens", "bytes"), ("name", "sha256")
        return (
            isinstance(entry, dict)
            and all(whole(entry.get(k)) for k in sizes)
            and whole(entry.get("first_bytes", 0))
            and all(type(entry.get(k)) is str for k in texts)
        )

    shards = about.get("shards")
    ends = [
        about.get("eos") or 0,
        *(found if isinstance(found := about.get("ends", []), list) else [None]),
    ]
    is_known = about.get("dtype") in ("uint16", "uint32") and all(
        map(whole, [about.get("vocab"), *ends])
    )
    return is_known and isinstance(shards, list) and all(map(complete, shards))


def _read_index(folder: pathlib.Path, entry: dict[str, Any], links: bool) -> np.ndarray:
    """Return the begins of a shard's documents, int64 [n + 1, 2]. Raises DataError."""
    name = f"{entry['name']}.docs"
    index = _mapped(folder, name, np.dtype("<i8"), 2 * (entry["documents"] + 1), links).reshape(
        -1, 2
    )
    ends = (entry["tokens"], entry["bytes"])
    if index[0].any() or tuple(index[-1].tolist()) != ends or (np.diff(index, axis=0) < 0).any():
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
        if size != n * dtype.itemsize:
            raise DataError(
                f"{path} has {size} bytes, but tokens.json names {n * dtype.itemsize} bytes; make"
                " the tokens again"
            )
        return np.memmap(file, dtype, "r") if size else np.empty(0, dtype)


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
    index[1:, 0] = np.cumsum([len(d) for d in documents])
    index[1:, 1] = np.cumsum(sizes)
    tokens = np.concatenate(
        [narrowed(d, dtype, f"the tokens of {folder / name}") for d in documents]
        or [np.empty(0, dtype)]
    )
    raw = tokens.astype(np.dtype(dtype).newbyteorder("<"), copy=False).tobytes()
    for suffix, content in (("tokens", raw), ("docs", index.tobytes())):
        with whole.file(folder / f"{name}.{suffix}") as file:
            file.write(content)
    digest = hashlib.sha256(raw + index.tobytes()).hexdigest()
    return {
        "name": name,
        "documents": len(documents),
        "tokens": len(tokens),
        "bytes": int(index[-1, 1]),
        **({} if firsts is None else {"first_bytes": sum(firsts)}),
        "sha256": digest,
    }


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
    about = {
        "format": FORMAT,
        "dtype": str(token_dtype(vocab)),
        "vocab": vocab,
        "eos": eos,
        "ends": list(ends),
        "tokenizer": tokenizer,
        "shards": list(shards),
    }
    whole.write(folder / "tokens.json", json.dumps(about, indent=1) + "\n")


def token_dtype(vocab: int) -> np.dtype:
    """Return the smallest dtype of files that holds ``vocab`` tokens."""
    return np.dtype(np.uint16 if vocab <= 1 << 16 else np.uint32)
