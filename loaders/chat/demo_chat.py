"""Conversations without a download, to plan with: a tokenizer of bytes, a silent manifest."""

import json
import os
import pathlib
from typing import Any

import numpy as np

from loaders.chat import chatml
from loaders.io import atomic_write, machine

EXAMPLES, CODEBOOKS = 256, 8
SECONDS, WORDS = (3, 15), (8, 40)  # fewest and most
FRAME_RATE = 25


def tokenizer(path: str | os.PathLike[str]) -> None:
    """Write a tokenizer.json of 256 bytes and the special tokens. Needs the package tokenizers."""
    import tokenizers

    letters = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    bytewise = tokenizers.Tokenizer(
        tokenizers.models.BPE({letter: i for i, letter in enumerate(letters)}, [])
    )
    bytewise.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytewise.decoder = tokenizers.decoders.ByteLevel()
    bytewise.add_special_tokens([*chatml.SPECIAL, chatml.RECIPIENT])
    bytewise.save(str(path))


def blank() -> dict[str, str]:
    """Return the section ``data`` for 256 answers of 3 to 15 s of silence, made at first use."""
    folder = atomic_write.once(machine.cache_folder("blank-chat-v1"), _make_blank)
    files = {"manifest": "manifest.json", "tokenizer": "tokenizer.json", "codes": "codes.npz"}
    return {name: str(folder / file) for name, file in files.items()}


def _make_blank(folder: pathlib.Path) -> None:
    rng = np.random.default_rng(0)
    examples: list[dict[str, Any]] = []
    codes: dict[str, Any] = {}
    for i in range(EXAMPLES):
        words, seconds = rng.integers(*WORDS), rng.uniform(*SECONDS)
        codes[f"{i}"] = np.zeros((CODEBOOKS, round(FRAME_RATE * seconds)), np.int16)
        audio = [{"type": "audio", "audio_url": f"{i}"}]
        messages = [
            {"role": "user", "content": "word " * words},
            {"role": "assistant", "content": audio},
        ]
        examples.append({"messages": messages})
    (folder / "manifest.json").write_text(json.dumps(examples))
    np.savez_compressed(folder / "codes.npz", **codes)
    tokenizer(folder / "tokenizer.json")
