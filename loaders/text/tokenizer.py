"""A tokenizer.json of Hugging Face, read in this module alone.

A file may say that texts are cut, padded or split at random. `open_tokenizer` switches that off: a
text has all its tokens, and the same ones every time. The vocabulary is the largest id + 1, since
ids may have gaps and added tokens come last.

The token that ends a text is written in the files next to it, `ENDS`. It is never guessed from a
token's name. Tokens that only these files have are added, as Hugging Face does it. If another
tokenizer.json lies there, the files are that one's.

The name of a special token inside a text, for example <eos>, becomes that token, as Hugging Face
does it. With ``specials=False`` it is split like any other text.
"""

import functools
import itertools
import os
import pathlib
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from loaders.base import DataError
from loaders.io import files, machine

# The files of a tokenizer, which go wherever it goes.
FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "tokenizer.model",
    "spiece.model",
    "sentencepiece.bpe.model",
    "chat_template.jinja",
    "chat_template.json",
)
TEMPLATES = "additional_chat_templates/*.jinja"  # which go with them
# The files that say which token ends a text, in the order of their weight: (file, field). A field
# may list several.
ENDS = (
    ("tokens.json", "ends"),
    ("tokens.json", "eos"),
    ("generation_config.json", "eos_token_id"),
    ("config.json", "eos_token_id"),
    ("tokenizer_config.json", "eos_token"),
    ("special_tokens_map.json", "eos_token"),
)

BEGIN = 64  # [characters] of a text in which the place of its first token is looked for
SURE = 4  # tokens that are the same in a text and in its begin, if the first one ends there


class Tokenizer(NamedTuple):
    path: pathlib.Path
    vocab: int  # the largest id + 1
    specials: dict[int, str]  # id -> the special token
    inner: Any  # tokenizers.Tokenizer

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the ids of each text, without any that the tokenizer would add around it."""
        return [ids for ids, _ in self.measured(texts)]

    def measured(self, texts: Sequence[str]) -> list[tuple[list[int], int]]:
        """Return the ids of each text, and the bytes of its first token, from the text's begin.

        Places in the text cost a tenth of the time, so they are found for its begin alone.
        """
        encodings = self.inner.encode_batch_fast(list(texts), add_special_tokens=False)
        begins = [text[:BEGIN] for text in texts]
        placed = self.inner.encode_batch(begins, add_special_tokens=False)
        measured = []
        for text, encoding, begin in zip(texts, encodings, placed, strict=True):
            ids = encoding.ids
            is_sure = len(text) <= BEGIN or len(ids) >= SURE and begin.ids[:SURE] == ids[:SURE]
            whole = begin if is_sure else self.inner.encode(text, add_special_tokens=False)
            # not `offsets`, which makes a pair of every token
            first = whole.token_to_chars(0) if ids else None
            n_bytes = len(text[: first[1]].encode()) if first else 0
            measured.append((ids, n_bytes))
        return measured

    @property
    def added(self) -> list[str]:
        """The special tokens that Hugging Face's own libraries add around a text."""
        ids = self.inner.encode("", add_special_tokens=True).ids
        return [self.specials.get(i, str(i)) for i in ids]

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ``ids``, without special tokens."""
        text: str = self.inner.decode(list(ids))
        return text

    def id_of(self, token: str) -> int | None:
        token_id: int | None = self.inner.token_to_id(token)
        return token_id

    def ends(self) -> tuple[int, ...]:
        """Return the ids that end a text by the files next to it, or (). Raises DataError."""
        if _is_beside_another(self.path):
            return ()
        folder = self.path.parent
        for name, field in ENDS:
            content = _read_companion(folder, name)
            stated = content.get(field)
            if field not in content and name == "config.json":
                text_config = content.get("text_config")
                stated = text_config.get(field) if isinstance(text_config, dict) else None
            if stated not in (None, []):
                tokens = stated if isinstance(stated, list) else [stated]
                return tuple(self._end(token, f"{folder / name}: {field}") for token in tokens)
        return ()

    def _end(self, stated: Any, where: str) -> int:
        """Return the id of a token that a file states as an id, a text or an added token."""
        token = stated.get("content") if isinstance(stated, dict) else stated
        token_id = self.id_of(token) if isinstance(token, str) else token
        if type(token_id) is not int or not 0 <= token_id < self.vocab:
            raise DataError(
                f"{where} is {str(stated)[:80]!r}, which is no token of {self.path}; fix it, or"
                " remove it there"
            )
        return token_id


def open_tokenizer(path: str | os.PathLike[str], *, specials: bool = True) -> Tokenizer:
    """Open a tokenizer.json, once in a process. Raises DataError.

    ``specials``: whether the names of special tokens inside texts become these tokens.
    """
    place = files.expanded(path)
    content = files.read(place, most=files.MAX_JSON)
    added_tokens: tuple[_AddedToken, ...] = ()
    if not _is_beside_another(place):
        added_tokens = _read_added_tokens(place.parent)
    return _open_once(place, content, specials, added_tokens)


def token_ids(path: str | os.PathLike[str]) -> dict[int, str]:
    """Return the token of each id of a tokenizer.json. Raises DataError."""
    vocabulary = open_tokenizer(path).inner.get_vocab(with_added_tokens=True)
    return {token_id: token for token, token_id in vocabulary.items()}


def difference(theirs: Mapping[int, str], ours: Mapping[int, str]) -> str:
    """Describe how the ids that two vocabularies have in common differ, or return ""."""
    common = sorted(theirs.keys() & ours.keys())
    unlike = [token_id for token_id in common if theirs[token_id] != ours[token_id]]
    if not unlike:
        return ""
    first = unlike[0]
    return (
        f"id {first} is {theirs[first]!r:.80} there and {ours[first]!r:.80} here"
        f" ({len(unlike):,} of {len(common):,} ids differ)"
    )


def read_files(place: pathlib.Path, *, links: bool = False) -> dict[str, bytes]:
    """Read a tokenizer's files by their names, of which the first becomes tokenizer.json.

    ``place``: that file, or the folder of a tokenizer.json. ``links``: whether links may lead out
    of the folder. Raises DataError.
    """
    if not place.exists():
        return {}
    tokenizer = place / FILES[0] if place.is_dir() else place
    folder = tokenizer.parent
    names = [name for name in FILES[1:] if (folder / name).is_file()]
    names += sorted(str(template.relative_to(folder)) for template in folder.glob(TEMPLATES))
    if _is_beside_another(tokenizer):
        if names:
            print(
                f"{tokenizer} lies beside another tokenizer.json, whose are {', '.join(names)};"
                " they are left out",
                file=sys.stderr,
            )
        names = []
    sources = {name: name for name in names}
    if tokenizer.is_file():
        sources[FILES[0]] = tokenizer.name
    contents = {}
    for name, source in sources.items():
        path = files.inside(folder, source, links=links)
        contents[name] = files.read(path, most=files.MAX_JSON)
    return contents


def _is_beside_another(path: pathlib.Path) -> bool:
    """Whether another tokenizer.json lies next to a tokenizer, so that companions are not its."""
    neighbour = path.parent / FILES[0]
    if path.name == FILES[0] or not (path.is_file() and neighbour.is_file()):
        return False
    return files.read(neighbour, most=files.MAX_JSON) != files.read(path, most=files.MAX_JSON)


class _AddedToken(NamedTuple):
    where: str
    id: int
    content: str
    special: bool
    flags: tuple[tuple[str, bool], ...] = ()  # further ones of tokenizers.AddedToken


def _read_companion(folder: pathlib.Path, name: str) -> dict[str, Any]:
    """Return the content of a file next to a tokenizer, empty if there is none."""
    if not (folder / name).is_file():
        return {}
    return files.read_json(files.inside(folder, name))


def _read_added_tokens(folder: pathlib.Path) -> tuple[_AddedToken, ...]:
    """Return added tokens of tokenizer_config.json or added_tokens.json. Raises DataError."""
    config = _read_companion(folder, "tokenizer_config.json")
    special_map = _read_companion(folder, "special_tokens_map.json")
    ids = _read_companion(folder, "added_tokens.json")
    where = str(folder / "tokenizer_config.json")
    by_id = config.get("added_tokens_decoder")
    if by_id is None:
        where = str(folder / "added_tokens.json")
        specials = _stated_tokens({**config, **special_map})
        by_id = {}
        for content, token_id in ids.items():
            by_id[token_id] = {"content": content, "special": content in specials}
    try:
        tokens = [_added_token(where, token_id, fields) for token_id, fields in by_id.items()]
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        raise DataError(
            f"{where} lists no tokens by their ids: {error!r}; save the tokenizer again"
        ) from error
    for token in tokens:
        if not isinstance(token.content, str) or not token.content:
            raise DataError(
                f"{where} lists {str(token.content)[:80]!r} as a token; expected a text"
            )
    return tuple(sorted(tokens, key=lambda token: token.id))


def _stated_tokens(content: Mapping[str, Any]) -> list[Any]:
    """Return all tokens that the fields of a file name, each by its text or as an added token."""
    tokens = []
    for value in content.values():
        for stated in value if isinstance(value, list) else [value]:
            tokens.append(stated.get("content") if isinstance(stated, dict) else stated)
    return tokens


def _added_token(where: str, token_id: Any, fields: Mapping[str, Any]) -> _AddedToken:
    names = ("lstrip", "rstrip", "single_word", "normalized")
    flags = tuple((name, bool(fields[name])) for name in names if name in fields)
    is_special = bool(fields.get("special"))
    return _AddedToken(where, int(token_id), fields["content"], is_special, flags)


def _add(inner: Any, path: pathlib.Path, added_tokens: Sequence[_AddedToken]) -> None:
    """Add the tokens of a companion. Raises DataError if the two files differ about an id."""
    import tokenizers

    existing = {token.content: repr(token) for token in inner.get_added_tokens_decoder().values()}
    new_tokens = []
    for listed in added_tokens:
        token = tokenizers.AddedToken(listed.content, special=listed.special, **dict(listed.flags))
        has_other_flags = bool(listed.flags) and repr(token) != existing.get(listed.content)
        if listed.content not in existing or has_other_flags:
            new_tokens.append(token)
    for special, group in itertools.groupby(new_tokens, key=lambda token: token.special):
        add = inner.add_special_tokens if special else inner.add_tokens
        add(list(group))
    for listed in added_tokens:
        token_id = inner.token_to_id(listed.content)
        if token_id != listed.id:
            raise DataError(
                f"{listed.where} lists the token {listed.content[:80]!r} as {listed.id}, and by"
                f" {path} it is {token_id}; save the tokenizer again, so that both agree"
            )


@functools.lru_cache(maxsize=4)
def _open_once(
    path: pathlib.Path, content: bytes, specials: bool, added_tokens: tuple[_AddedToken, ...]
) -> Tokenizer:
    try:
        tokenizers = machine.package("tokenizers")
    except ImportError as error:
        raise DataError(
            f"to read {path}, the package tokenizers is missing; pip install 'jaxtrain[language]'"
        ) from error
    try:
        inner = tokenizers.Tokenizer.from_buffer(content)
    except Exception as error:  # noqa: BLE001  it raises Exception itself
        raise DataError(
            f"{path} cannot be read as a tokenizer.json of Hugging Face: {files.reason(error)}"
        ) from error
    _add(inner, path, added_tokens)
    vocabulary = inner.get_vocab(with_added_tokens=True)
    if not vocabulary:
        raise DataError(f"{path} has no tokens; expected a tokenizer.json of Hugging Face")
    inner.no_truncation()
    inner.no_padding()
    if getattr(inner.model, "dropout", None):
        inner.model.dropout = None
    inner.encode_special_tokens = not specials
    special_tokens = {}
    for token_id, token in inner.get_added_tokens_decoder().items():
        if token.special:
            special_tokens[token_id] = token.content
    return Tokenizer(path, max(vocabulary.values()) + 1, special_tokens, inner)


def continuation(decode: Any, prompt: Iterable[int], new: Iterable[int], text: str = "") -> str:
    """Return the text that ``new`` ids add to a prompt, whose own text is ``text`` if it is whole.

    Decoded by themselves, they would lose the blank before their first word.
    """
    prompt_ids = list(prompt)
    full_text = decode([*prompt_ids, *new])
    if not text or not full_text.startswith(text):
        text = decode(prompt_ids)
    shared = os.path.commonprefix((text, full_text))
    return str(full_text[len(shared) :])
