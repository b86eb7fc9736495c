"""A tokenizer.json of Hugging Face, read in this module alone.

A file may say that texts are cut, padded or split at random. `open_tokenizer` switches that off: a text has all its tokens,
and the same ones every time. The vocabulary is the largest id + 1, since ids may have gaps and added tokens come last.

The token that ends a text is written in the files next to it, `ENDS`. It is never guessed from a token's name.

The name of a special token inside a text, for example <eos>, becomes that token, as Hugging Face does it. With
``specials=False`` it is split like any other text.
"""

import functools
import os
import pathlib
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from loaders.base import DataError
from loaders.io import files

# The files of a tokenizer, which go wherever it goes.
FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json", "vocab.txt",
    "merges.txt", "tokenizer.model", "spiece.model", "sentencepiece.bpe.model", "chat_template.jinja", "chat_template.json",
)  # fmt: skip
# The files that say which token ends a text, in the order of their weight: (file, field). A field may list several.
ENDS = (
    ("tokens.json", "ends"), ("tokens.json", "eos"), ("generation_config.json", "eos_token_id"),
    ("config.json", "eos_token_id"), ("tokenizer_config.json", "eos_token"), ("special_tokens_map.json", "eos_token"),
)  # fmt: skip


class Tokenizer(NamedTuple):
    """Text to ids and back."""

    path: pathlib.Path
    vocab: int  # the largest id + 1
    specials: dict[int, str]  # id -> the special token
    inner: Any  # tokenizers.Tokenizer

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the ids of each text, without any that the tokenizer would add around it."""
        return [ids for ids, _ in self.measured(texts)]

    def measured(self, texts: Sequence[str]) -> list[tuple[list[int], int]]:
        """Return the ids of each text, and the bytes of its first token, from the text's begin on."""
        found = self.inner.encode_batch(list(texts), add_special_tokens=False)
        ends = [one.offsets[0][1] if one.ids else 0 for one in found]
        return [(one.ids, len(text[:end].encode())) for one, text, end in zip(found, texts, ends, strict=True)]

    @property
    def added(self) -> list[str]:
        """The special tokens that Hugging Face's own libraries add around a text."""
        return [self.specials.get(i, str(i)) for i in self.inner.encode("", add_special_tokens=True).ids]

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ``ids``, without special tokens."""
        text: str = self.inner.decode(list(ids))
        return text

    def id_of(self, token: str) -> int | None:
        found: int | None = self.inner.token_to_id(token)
        return found

    def ends(self) -> tuple[int, ...]:
        """Return the ids that end a text, by the files next to the tokenizer; () if none says it. Raises DataError."""
        for name, field in ENDS:
            place = self.path.parent / name
            if place.is_file() and (said := files.read_json(files.inside(place.parent, name)).get(field)) not in (None, []):
                return tuple(self._end(x, f"{place}: {field}") for x in (said if isinstance(said, list) else [said]))
        return ()

    def _end(self, said: Any, where: str) -> int:
        token = said.get("content") if isinstance(said, dict) else said
        found = self.id_of(token) if isinstance(token, str) else token
        if type(found) is not int or not 0 <= found < self.vocab:
            raise DataError(f"{where} is {str(said)[:80]!r}, which is no token of {self.path}; fix it, or remove it there")
        return found


def open_tokenizer(path: str | os.PathLike[str], *, specials: bool = True) -> Tokenizer:
    """Open a tokenizer.json, once in a process.

    Args:
      specials: whether the names of special tokens inside texts become these tokens.

    Raises DataError: it is none, or the package tokenizers is missing.
    """
    place = pathlib.Path(path).expanduser()
    content = files.read(place, most=files.MOST_JSON)
    return _opened(place, content, specials)


@functools.lru_cache(maxsize=4)
def _opened(path: pathlib.Path, content: bytes, specials: bool) -> Tokenizer:
    try:
        import tokenizers
    except ImportError as error:
        raise DataError(f"to read {path}, the package tokenizers is missing; pip install 'jaxtrain[language]'") from error
    try:
        inner = tokenizers.Tokenizer.from_buffer(content)
        vocabulary = inner.get_vocab(with_added_tokens=True)
    except Exception as error:  # noqa: BLE001  it raises Exception itself
        raise DataError(f"{path} cannot be read as a tokenizer.json of Hugging Face: {files.said(error)}") from error
    if not vocabulary:
        raise DataError(f"{path} has no tokens; expected a tokenizer.json of Hugging Face")
    inner.no_truncation()
    inner.no_padding()
    if getattr(inner.model, "dropout", None):
        inner.model.dropout = None
    inner.encode_special_tokens = not specials
    named = {i: token.content for i, token in inner.get_added_tokens_decoder().items() if token.special}
    return Tokenizer(path, max(vocabulary.values()) + 1, named, inner)


def continuation(decode: Any, prompt: Iterable[int], new: Iterable[int], text: str = "") -> str:
    """Return the text that ``new`` ids add to a prompt, whose own text is ``text`` if it is whole.

    Decoded by themselves, they would lose the blank before their first word.
    """
    before = [*prompt]
    whole = decode([*before, *new])
    head = text if text and whole.startswith(text) else decode(before)
    return str(whole[len(os.path.commonprefix((head, whole))) :])
