"""Text to tokens and back, for prompts: by a tokenizer.json, a list of characters, or as bytes."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from jaxtrain.types import Example
from loaders.base import DataError
from loaders.io import files
from loaders.text import tokenizer as tokenizer_lib


class CodecError(DataError):
    """A text that the vocabulary has no tokens for."""


class Codec(NamedTuple):
    encode: Callable[[str], list[int]]  # raises CodecError
    decode: Callable[[Sequence[int]], str]
    ends: tuple[int, ...] = ()  # tokens that end a text

    def continuation(
        self, prompt: Sequence[int], new: Sequence[int], text: str = ""
    ) -> tuple[str, int, bool]:
        """Return what ``new`` tokens add to a prompt, their number, and if one of `ends` came."""
        n = next((i for i, token in enumerate(new) if token in self.ends), len(new))
        return tokenizer_lib.continuation(self.decode, prompt, new[:n], text), n, n < len(new)


def make_codec(
    tokenizer: str | None, symbols: str | None, vocab: int | None, ends: Sequence[int] | None = None
) -> Codec:
    """Make a codec from a model's settings of these names.

    Args:
      ends: None for those that the tokenizer's own files name.

    Raises CodecError.
    """
    if tokenizer and tokenizer != "bytes":
        try:
            opened = tokenizer_lib.open_tokenizer(tokenizer)
            end_ids = opened.ends() if ends is None else tuple(ends)
        except DataError as error:
            raise CodecError(str(error)) from error
        return Codec(
            lambda text: _not_empty(opened.encode([text])[0], text), opened.decode, end_ids
        )
    if symbols:
        return _of_symbols(symbols)
    if vocab != 256 and tokenizer != "bytes":
        raise CodecError(
            "text cannot be turned into tokens: the data name no tokenizer; set tokenizer to a"
            ' tokenizer.json, or to "bytes"'
        )

    def decode(ids: Sequence[int]) -> str:
        return bytes(i for i in ids if i < 256).decode(errors="replace")

    return Codec(lambda text: _not_empty(list(text.encode()), text), decode)


class Vocabulary(NamedTuple):
    name: str  # of the tokenizer.json, or of what takes its place
    tokens: Mapping[int, str]  # by their ids


def vocabulary_of(model: Mapping[str, Any], folder: str = "") -> Vocabulary | None:
    """Return the tokens of a section ``model``, or None if no file here tells them.

    Args:
      folder: of weights, whose tokenizer.json comes first.

    Raises DataError: a tokenizer.json that cannot be read.
    """
    tokenizer, symbols = model.get("tokenizer"), model.get("symbols")
    for path in (f"{folder}/tokenizer.json" if folder else "", tokenizer):
        if path and files.expanded(path).is_file():
            return Vocabulary(str(path), tokenizer_lib.token_ids(path))
    if symbols:
        return Vocabulary(f"{len(symbols)} characters", dict(enumerate(symbols)))
    if tokenizer == "bytes" or not tokenizer and model.get("vocab") == 256:
        return Vocabulary("bytes", {i: f"byte {i}" for i in range(256)})
    return None


def other_tokens(config: Any, source: Mapping[str, Any], place: str) -> Iterator[str]:
    """Yield why weights were trained on other tokens than those of a section ``model``.

    Args:
      source: the config of the weights' run, or {}.
      place: its step directory, or the folder of safetensors.
    """
    model = source.get("model") or {}
    try:
        theirs = vocabulary_of(model if isinstance(model, Mapping) else {}, place)
        fields = {name: getattr(config, name) for name in ("tokenizer", "symbols", "vocab")}
        ours = vocabulary_of(fields)
    except DataError as error:
        yield str(error)
        return
    if theirs is None or ours is None:
        return
    difference = tokenizer_lib.difference(theirs.tokens, ours.tokens)
    if difference:
        yield (
            f"its tokens are those of {theirs.name}, and this run's are those of {ours.name}:"
            f" {difference}; make the data's tokens with the former, or set"
            " config.warm_start.other_front_end=true to train the embedding anew"
        )


def examples(
    config: Any, model_state: Any, batch: Mapping[str, Any], position: int
) -> Sequence[Example]:
    """Decode the documents of each row, or write their tokens if the data name no tokenizer."""
    c = config.model
    try:
        decode = make_codec(c.tokenizer, c.symbols, c.vocab).decode
    except CodecError:
        decode = lambda ids: " ".join(map(str, ids))  # noqa: E731
    rows = []
    for tokens, segments in zip(batch["tokens"], batch["segments"], strict=True):
        numbers = range(1, segments.max(initial=0) + 1)
        documents = [decode(tokens[segments == number].tolist()) for number in numbers]
        rows.append(Example(text="\n¶ ".join(documents)))
    return rows


def _of_symbols(symbols: str) -> Codec:
    place = {symbol: i for i, symbol in enumerate(symbols)}

    def encode(text: str) -> list[int]:
        if unknown := sorted(set(text) - set(place)):
            raise CodecError(
                f"{text!r} has the characters {unknown}, and no token of the data stands for them"
            )
        return _not_empty([place[x] for x in text], text)

    return Codec(encode, lambda ids: "".join(symbols[i] for i in ids if i < len(symbols)))


def _not_empty(ids: list[int], text: str) -> list[int]:
    if not ids:
        raise CodecError(f"{text!r} has no tokens, and a continuation must begin with one")
    return ids
