"""A small corpus of conversations with sound, for tests."""

import base64
import functools
import json
import pathlib

import numpy as np
import soundfile

from loaders import _rust
from loaders.chat import chat_audio, chat_examples, codec, demo_chat

SIZE = 16  # codes of each of the two codebooks
DECODE = _rust.decode


@functools.cache
def rvq() -> codec.Rvq:
    rng = np.random.default_rng(0)
    waves = [wave(i, 2.0) + 0.1 * rng.normal(size=64_000).astype("f4") for i in range(3)]
    x = np.concatenate([codec.vectors(w, 32_000) for w in waves])
    return codec.train(x, codebooks=2, size=SIZE, components=8, rounds=3)


def wave(i: int, seconds: float) -> np.ndarray:
    t = np.arange(int(32_000 * seconds)) / 32_000
    return (0.5 * np.sin(2 * np.pi * 300 * (i + 1) * t)).astype("f4")


def says(url: str, **part) -> dict:
    audio = {"type": "audio", "audio_url": url, **part}
    return {
        "messages": [{"role": "user", "content": "play"}, {"role": "assistant", "content": [audio]}]
    }


def hears(url: str, answer: str, **part) -> dict:
    audio = {"type": "audio", "audio_url": url, **part}
    return {
        "messages": [
            {"role": "user", "content": ["what? ", audio]},
            {"role": "assistant", "content": answer},
        ]
    }


def corpus(folder: pathlib.Path, *, n: int, **changes) -> chat_audio.Config:
    """``n`` examples that share three recordings. Every other one has a sound in its answer, and
    the others in their prompt."""
    rvq().save(folder / "codec.npz")
    for i in range(3):
        soundfile.write(folder / f"{i}.wav", wave(i, 0.8 + 0.4 * i), 32_000)
    examples = []
    for i in range(n):
        url, part = f"{i % 3}.wav", {"duration": 0.2 + 0.1 * (i % 5)}
        examples.append(says(url, **part) if i % 2 else hears(url, "x" * (1 + i % 7), **part))
    (folder / "manifest.json").write_text(json.dumps(examples))
    demo_chat.tokenizer(folder / "tokenizer.json")
    return chat_audio.Config(
        manifest=str(folder / "manifest.json"),
        tokenizer=str(folder / "tokenizer.json"),
        codec=str(folder / "codec.npz"),
        **{"test_share": 0.2, **changes},
    )


def forget() -> None:
    """Clears this process's caches of manifests and files."""
    for cached in (chat_audio._splits_once, chat_examples._tools_once):
        cached.cache_clear()


def base64_of(path: pathlib.Path) -> str:
    return base64.b64encode(path.read_bytes()).decode()


def loudness(examples: np.ndarray, rate: int) -> np.ndarray:
    """A custom codec: two codebooks of levels, 25 a second."""
    n = -(-len(examples) * 25 // rate)
    level = [np.abs(part).mean() for part in np.array_split(examples, n)]
    return np.stack([np.minimum(np.array(level) * 20, SIZE - 1), np.arange(n) % SIZE]).astype(int)
