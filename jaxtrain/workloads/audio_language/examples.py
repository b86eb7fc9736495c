"""Rows of a batch for people: the text, and the sound of the codes if the run has a codec."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxtrain.types import Example
from loaders.chat import chat_examples, chatml
from loaders.chat import codec as codec_lib


def examples(
    config: Any, model_state: Any, batch: Mapping[str, Any], position: int
) -> Sequence[Example]:
    """Decode the conversation of each row."""
    tools = chat_examples.tools_of(config.data, config.data.manifest)
    codec = None
    if config.data.codec:
        codec = chat_examples.open_codec(config.data)
    conversations = []
    rows = zip(batch["text"], batch["codes"], batch["slot"], strict=True)
    for tokens, columns, slots in rows:
        text = tools.tokenizer.decode(tokens[tokens != tools.pad].tolist())
        sound = None
        if isinstance(codec, codec_lib.Rvq):
            column_slots = slots[slots >= len(tokens)]
            codes = _codes(columns[column_slots - len(tokens)], tools)
            sound = _sound(codes, codec)
        conversations.append(Example(text=text, sound=sound))
    return conversations


def _codes(columns_jk: np.ndarray, tools: chat_examples.Tools) -> np.ndarray:
    """Join the codes [K, T] of a row's recordings, one after the other, without spare columns."""
    codes_kt = chatml.undelayed(columns_jk, delay=tools.delay)
    is_code_kt = (codes_kt >= 0) & (codes_kt < tools.size)
    return codes_kt[:, is_code_kt.all(0)]


def _sound(codes_kt: np.ndarray, codec: codec_lib.Rvq) -> tuple[np.ndarray, int] | None:
    """Return samples and their rate [Hz], or None without codes."""
    if not codes_kt.shape[1]:
        return None
    log_mel = codec.decode(codes_kt)
    return codec_lib.sound(log_mel), codec_lib.RATE
