"""Documents of random tokens, for tests of their rows."""

import numpy as np

from loaders.text import token_files, tokens

CONTEXT = 32


def corpus(folder, n=300, seed=0, vocab=1000, shards=3, longest=80):
    """Documents of random tokens. Two of them have a length without a prediction. Returns the
    documents."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(2, longest, n)
    lengths[[3, 47]] = (0, 1)
    documents = [rng.integers(0, vocab, k).astype(np.uint16) for k in lengths]
    folder.mkdir(parents=True)
    entries = []
    for i, part in enumerate(np.array_split(np.arange(n), shards)):
        mine = [documents[j] for j in part]
        entries.append(
            token_files.write_shard(folder, f"{i:05}", mine, [3 * len(d) for d in mine], np.uint16)
        )
    token_files.write_about(folder, vocab=vocab, eos=None, tokenizer=None, shards=entries)
    return documents


def config_of(path, **kwargs):
    return tokens.Config(
        **{
            "sources": (tokens.Source(str(path)),),
            "context": CONTEXT,
            "window": 64,
            "test_share": 0.0,
            **kwargs,
        }
    )
