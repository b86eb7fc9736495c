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
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from loaders.base import DataError
from loaders.io import files

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


class Tokenizer(NamedTuple):
    path: pathlib.Path
    vocab: int  # the largest id + 1
    specials: dict[int, str]  # id -> the special token
    inner: Any  # tokenizers.Tokenizer

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the ids of each text, without any that the tokenizer would add around it."""
        return [ids for ids, _ in self.measured(texts)]

    def measured(self, texts: Sequence[str]) -> list[tuple[list[int], int]]:
        """Return the ids of each text, and the bytes of its first token, from the text's begin."""
        found = self.inner.encode_batch(list(texts), add_special_tokens=False)
        ends = [one.offsets[0][1] if one.ids else 0 for one in found]
        return [
            (one.ids, len(text[:end].encode()))
            for one, text, end in zip(found, texts, ends, strict=True)
        ]

    @property
    def added(self) -> list[str]:
        """The special tokens that Hugging Face's own libraries add around a text."""
        return [
            self.specials.get(i, str(i)) for i in self.inner.encode("", add_special_tokens=True).ids
        ]

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ``ids``, without special tokens."""
        text: str = self.inner.decode(list(ids))
        return text

    def id_of(self, token: str) -> int | None:
        found: int | None = self.inner.token_to_id(token)
        return found

    def ends(self) -> tuple[int, ...]:
        """Return the ids that end a text by the files next to it, or (). Raises DataError."""
        for name, field in () if _is_beside_another(self.path) else ENDS:
            place = self.path.parent / name
            about = files.read_json(files.inside(place.parent, name)) if place.is_file() else {}
            inner = about.get("text_config") if name == "config.json" else None
            stated = about.get(field, inner.get(field) if isinstance(inner, dict) else None)
            if stated not in (None, []):
                return tuple(
                    self._end(x, f"{place}: {field}")
                    for x in (stated if isinstance(stated, list) else [stated])
                )
        return ()

    def _end(self, stated: Any, where: str) -> int:
        token = stated.get("content") if isinstance(stated, dict) else stated
        found = self.id_of(token) if isinstance(token, str) else token
        if type(found) is not int or not 0 <= found < self.vocab:
            raise DataError(
                f"{where} is {str(stated)[:80]!r}, which is no token of {self.path}; fix it, or"
                " remove it there"
            )
        return found


def open_tokenizer(path: str | os.PathLike[str], *, specials: bool = True) -> Tokenizer:
    """Open a tokenizer.json, once in a process. Raises DataError.

    ``specials``: whether the names of special tokens inside texts become these tokens.
    """
    place = files.expanded(path)
    content = files.read(place, most=files.MAX_JSON)
    return _opened(
        place, content, specials, () if _is_beside_another(place) else tuple(_listed(place.parent))
    )


def read_files(place: pathlib.Path, *, links: bool = False) -> dict[str, bytes]:
    """Read a tokenizer's files by their names, of which the first becomes tokenizer.json.

    ``place``: that file, or the folder of a tokenizer.json. ``links``: whether links may lead out
    of the folder. Raises DataError.
    """
    if not place.exists():
        return {}
    folder, own = (place, place / FILES[0]) if place.is_dir() else (place.parent, place)
    names = [name for name in FILES[1:] if (folder / name).is_file()]
    names += sorted(str(found.relative_to(folder)) for found in folder.glob(TEMPLATES))
    if _is_beside_another(own):
        if names:
            print(
                f"{own} lies beside another tokenizer.json, whose are {', '.join(names)}; they are"
                " left out",
                file=sys.stderr,
            )
        names = []
    sources = {name: name for name in names} | ({FILES[0]: own.name} if own.is_file() else {})
    return {
        name: files.read(files.inside(folder, source, links=links), most=files.MAX_JSON)
        for name, source in sources.items()
    }


def _is_beside_another(path: pathlib.Path) -> bool:
    """Whether another tokenizer.json lies next to a tokenizer, so that companions are not its."""
    other = path.parent / FILES[0]
    if path.name == FILES[0] or not (path.is_file() and other.is_file()):
        return False
    return files.read(other, most=files.MAX_JSON) != files.read(path, most=files.MAX_JSON)


class _Added(NamedTuple):
    where: str
    id: int
    content: str
    special: bool
    flags: tuple[tuple[str, bool], ...] = ()  # further ones of tokenizers.AddedToken


def _listed(folder: pathlib.Path) -> Iterator[_Added]:
    """Yield added tokens of tokenizer_config.json or added_tokens.json. Raises DataError."""
    about, special_map, older = (
        files.read_json(files.inside(folder, name)) if (folder / name).is_file() else {}
        for name in ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")
    )
    listed = about.get("added_tokens_decoder")
    where = str(folder / ("added_tokens.json" if listed is None else "tokenizer_config.json"))
    if listed is None:
        named = [
            x
            for each in {**about, **special_map}.values()
            for x in (each if isinstance(each, list) else [each])
        ]
        specials = [x.get("content") if isinstance(x, dict) else x for x in named]
        listed = {
            i: {"content": content, "special": content in specials} for content, i in older.items()
        }
    try:
        found = [
            _Added(where, int(i), x["content"], bool(x.get("special")), _flags(x))
            for i, x in listed.items()
        ]
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        raise DataError(
            f"{where} lists no tokens by their ids: {error!r}; save the tokenizer again"
        ) from error
    if wrong := [one for one in found if not isinstance(one.content, str) or not one.content]:
        raise DataError(f"{where} lists {str(wrong[0].content)[:80]!r} as a token; expected a text")
    yield from sorted(found, key=lambda one: one.id)


def _flags(fields: Mapping[str, Any]) -> tuple[tuple[str, bool], ...]:
    return tuple(
        (name, bool(fields[name]))
        for name in ("lstrip", "rstrip", "single_word", "normalized")
        if name in fields
    )


def _add(inner: Any, path: pathlib.Path, listed: Sequence[_Added]) -> None:
    """Add the tokens of a companion. Raises DataError if the two files differ about an id."""
    import tokenizers

    there = {token.content: repr(token) for token in inner.get_added_tokens_decoder().values()}
    made = [
        tokenizers.AddedToken(one.content, special=one.special, **dict(one.flags)) for one in listed
    ]
    new = [
        token
        for one, token in zip(listed, made, strict=True)
        if one.content not in there or (one.flags and repr(token) != there[one.content])
    ]
    for special, group in itertools.groupby(new, key=lambda token: token.special):
        (inner.add_special_tokens if special else inner.add_tokens)([*group])
    for one in listed:
        if (found := inner.token_to_id(one.content)) != one.id:
            raise DataError(
                f"{one.where} lists the token {one.content[:80]!r} as {one.id}, and by {path} it is"
                f" {found}; save the tokenizer again, so that both agree"
            )


@functools.lru_cache(maxsize=4)
def _opened(
    path: pathlib.Path, content: bytes, specials: bool, listed: tuple[_Added, ...]
) -> Tokenizer:
    try:
        import tokenizers
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
    _add(inner, path, listed)
    vocabulary = inner.get_vocab(with_added_tokens=True)
    if not vocabulary:
        raise DataError(f"{path} has no tokens; expected a tokenizer.json of Hugging Face")
    inner.no_truncation()
    inner.no_padding()
    if getattr(inner.model, "dropout", None):
        inner.model.dropout = None
    inner.encode_special_tokens = not specials
    named = {
        i: token.content for i, token in inner.get_added_tokens_decoder().items() if token.special
    }
    return Tokenizer(path, max(vocabulary.values()) + 1, named, inner)


def continuation(decode: Any, prompt: Iterable[int], new: Iterable[int], text: str = "") -> str:
    """Return the text that ``new`` ids add to a prompt, whose own text is ``text`` if it is whole.

    Decoded by themselves, they would lose the blank before their first word.
    """
    before = [*prompt]
    whole = decode([*before, *new])
    head = text if text and whole.startswith(text) else decode(before)
    return str(whole[len(os.path.commonprefix((head, whole))) :])
