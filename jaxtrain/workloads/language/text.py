"""Text to tokens and back, for prompts: by a tokenizer.json, by a list of characters, or as bytes."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from loaders.base import DataError


class CodecError(DataError):
    """A text that the vocabulary has no tokens for."""


class Codec(NamedTuple):
    encode: Callable[[str], list[int]]  # raises CodecError
    decode: Callable[[Sequence[int]], str]
    end: int  # token that ends a document; -1 = none


def make_codec(tokenizer: str | None, symbols: str | None, vocab: int | None) -> Codec:
    """Make a codec from a model's settings of these names. Raises CodecError."""
    if tokenizer and tokenizer != "bytes":
        return _of_file(tokenizer)
    if symbols:
        return _of_symbols(symbols)
    if vocab != 256 and tokenizer != "bytes":
        raise CodecError(
            'text cannot be turned into tokens: the data name no tokenizer; set tokenizer to a tokenizer.json, or to "bytes"'
        )

    def decode(ids: Sequence[int]) -> str:
        return bytes(i for i in ids if i < 256).decode(errors="replace")

    return Codec(lambda text: _not_empty(list(text.encode()), text), decode, -1)


def _of_file(path: str) -> Codec:
    try:
        import tokenizers  # not needed to train

        tokenizer = tokenizers.Tokenizer.from_file(path)
    except Exception as error:  # tokenizers raises plain Exceptions
        raise CodecError(f"{path} cannot be read as a tokenizer.json: {error}") from error
    ends = [tokenizer.token_to_id(t) for t in ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>")]
    end = next((i for i in ends if i is not None), -1)
    return Codec(lambda text: _not_empty(tokenizer.encode(text, add_special_tokens=False).ids, text), tokenizer.decode, end)


def _of_symbols(symbols: str) -> Codec:
    place = {symbol: i for i, symbol in enumerate(symbols)}

    def encode(text: str) -> list[int]:
        if unknown := sorted(set(text) - set(place)):
            raise CodecError(f"{text!r} has the characters {unknown}, and no token of the data stands for them")
        return _not_empty([place[x] for x in text], text)

    return Codec(encode, lambda ids: "".join(symbols[i] for i in ids if i < len(symbols)), -1)


def _not_empty(ids: list[int], text: str) -> list[int]:
    if not ids:
        raise CodecError(f"{text!r} has no tokens, and a continuation must begin with one")
    return ids
