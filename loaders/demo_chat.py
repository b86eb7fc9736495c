"""Conversations with sound that need no download: a tokenizer of bytes, and a manifest of silence to plan with."""

import json
import os

import numpy as np

from loaders import chatml, machine

BLANK = dict(samples=256, codebooks=8, seconds=(3, 15), words=(8, 40))
FRAME_RATE = 25


def tokenizer(path: str | os.PathLike) -> None:
    """Writes a tokenizer.json of 256 bytes and the special tokens. Needs the package tokenizers."""
    import tokenizers

    letters = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    made = tokenizers.Tokenizer(tokenizers.models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    made.add_special_tokens([*chatml.SPECIAL, chatml.RECIPIENT])
    made.save(str(path))


def blank() -> dict[str, str]:
    """Section ``data`` of 256 spoken answers of 3 to 15 s without content, made at the first use."""
    folder = machine.cache_folder("blank-chat-v1")
    files = {"manifest": "manifest.json", "tokenizer": "tokenizer.json", "codes": "codes.npz"}
    if not folder.is_dir():
        rng = np.random.default_rng(0)
        partial = folder.with_name(f"{folder.name}.{os.getpid()}")
        partial.mkdir(parents=True, exist_ok=True)
        samples, codes = [], {}
        for i in range(BLANK["samples"]):
            words, seconds = rng.integers(*BLANK["words"]), rng.uniform(*BLANK["seconds"])
            codes[f"{i}"] = np.zeros((BLANK["codebooks"], round(FRAME_RATE * seconds)), np.int16)
            audio = [{"type": "audio", "audio_url": f"{i}"}]
            messages = [{"role": "user", "content": "word " * words}, {"role": "assistant", "content": audio}]
            samples.append({"messages": messages})
        (partial / files["manifest"]).write_text(json.dumps(samples))
        np.savez_compressed(partial / files["codes"], **codes)
        tokenizer(partial / files["tokenizer"])
        try:
            partial.rename(folder)
        except OSError:  # another process was faster
            pass
    return {name: str(folder / file) for name, file in files.items()}
