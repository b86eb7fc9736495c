"""Rows of a batch as a person reads them: each document's text."""

from collections.abc import Mapping, Sequence
from typing import Any

from jaxtrain.types import Example
from jaxtrain.workloads.language.text import CodecError, make_codec


def examples(config: Any, carry: Any, batch: Mapping[str, Any], position: int) -> Sequence[Example]:
    """Decode the documents of each row, or their tokens if the data name no tokenizer."""
    c = config.model
    try:
        decode = make_codec(c.tokenizer, c.symbols, c.vocab).decode
    except CodecError:
        decode = lambda ids: " ".join(map(str, ids))  # noqa: E731
    found = []
    for tokens, segments in zip(batch["tokens"], batch["segments"], strict=True):
        documents = [decode(tokens[segments == k].tolist()) for k in range(1, segments.max(initial=0) + 1)]
        found.append(Example(text="\n¶ ".join(documents)))
    return found
