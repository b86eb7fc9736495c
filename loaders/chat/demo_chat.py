"""Conversations without a download, to plan with: a tokenizer of bytes, a silent manifest."""

import json
import os
import pathlib
from typing import Any

import numpy as np

from loaders.chat import chatml
from loaders.io import atomic_write, machine

EXAMPLES = 256
CODEBOOKS = 8
FRAME_RATE = 25  # [1/s]
SECONDS = (3, 15)  # fewest and most of an answer
WORDS = (8, 40)  # fewest and most of a question


def tokenizer(path: str | os.PathLike[str]) -> None:
    """Write a tokenizer.json of 256 bytes and the special tokens. Needs the package tokenizers."""
    import tokenizers

    letters = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    ids = {letter: i for i, letter in enumerate(letters)}
    bytewise = tokenizers.Tokenizer(tokenizers.models.BPE(ids, []))
    bytewise.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytewise.decoder = tokenizers.decoders.ByteLevel()
    bytewise.add_special_tokens([*chatml.SPECIAL, chatml.RECIPIENT])
    bytewise.save(str(path))


def blank() -> dict[str, str]:
    """Return the section ``data`` for 256 answers of 3 to 15 s of silence, made at first use."""
    cache = machine.cache_folder("blank-chat-v1")
    folder = atomic_write.once(cache, _make_blank)
    return {
        "manifest": str(folder / "manifest.json"),
        "tokenizer": str(folder / "tokenizer.json"),
        "codes": str(folder / "codes.npz"),
    }


def _make_blank(folder: pathlib.Path) -> None:
    rng = np.random.default_rng(0)
    examples: list[dict[str, Any]] = []
    codes: dict[str, Any] = {}
    for i in range(EXAMPLES):
        n_words = rng.integers(*WORDS)
        seconds = rng.uniform(*SECONDS)
        n_times = round(FRAME_RATE * seconds)
        codes[f"{i}"] = np.zeros((CODEBOOKS, n_times), np.int16)
        audio = {"type": "audio", "audio_url": f"{i}"}
        question = {"role": "user", "content": "word " * n_words}
        answer = {"role": "assistant", "content": [audio]}
        examples.append({"messages": [question, answer]})
    manifest = json.dumps(examples)
    (folder / "manifest.json").write_text(manifest)
    np.savez_compressed(folder / "codes.npz", **codes)
    tokenizer(folder / "tokenizer.json")
