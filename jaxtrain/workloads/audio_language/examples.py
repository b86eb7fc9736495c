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
    voice = chat_examples.open_codec(config.data) if config.data.codec else None
    found = []
    for text, codes, slot in zip(batch["text"], batch["codes"], batch["slot"], strict=True):
        n = len(text)
        columns = [codes[i - n] for i in slot.tolist() if i >= n]
        sound = None
        if (
            isinstance(voice, codec_lib.Rvq)
            and columns
            and len(whole := _codes(np.stack(columns), tools)[0])
        ):
            mel = voice.decode(_codes(np.stack(columns), tools))
            sound = (codec_lib.sound(mel), codec_lib.RATE) if len(whole) else None
        found.append(
            Example(text=tools.tokenizer.decode(text[text != tools.pad].tolist()), sound=sound)
        )
    return found


def _codes(columns_jk: np.ndarray, tools: chat_examples.Tools) -> np.ndarray:
    """Join the codes of a row's recordings, one after the other, without spare columns."""
    codes = chatml.undelayed(columns_jk, delay=tools.delay)
    return codes[:, ((codes >= 0) & (codes < tools.size)).all(0)]
