"""Short evaluations are of all sources."""

import numpy as np
import pytest

from loaders.base import Rows
from loaders.text import tokens


def rows_of(config, *, batch, n=None):
    loader = tokens.make_loader(config, split="test", rows=Rows(batch, ((0, batch),)), seed=0)
    loader.seek(0)
    batches = [next(loader)[1] for _ in range(n or loader.n_batches)]
    return {name: np.concatenate([b[name][0] for b in batches]) for name in ("source", "tokens", "weight", "index")}


@pytest.fixture
def sources(tmp_path):
    for name, letter, n in (("a", "a", 400), ("b", "b", 100), ("c", "c", 6)):
        (tmp_path / f"{name}.txt").write_text(f"{letter}{letter.upper()}" * 10 * n)
    paths = [str(tmp_path / f"{name}.txt") for name in "abc"]
    shares = (1.0, 2.0, 1.0)
    sources = tuple(tokens.Source(path, path, share) for path, share in zip(paths, shares, strict=True))
    return tokens.Config(sources=sources, context=20, packing="concat", text="bytes")


def test_a_short_evaluation_draws_from_all_sources_in_their_shares(sources):
    for n in (1, 2):
        found = rows_of(sources, batch=8, n=n)
        assert np.bincount(found["source"]).tolist() == [2 * n, 4 * n, 2 * n], "1 : 2 : 1"
        again = rows_of(sources, batch=8, n=n)
        assert all((found[name] == again[name]).all() for name in found)
    whole = rows_of(sources, batch=8)
    counts = np.bincount(whole["source"][whole["weight"] > 0])
    assert counts.tolist() == [400, 100, 6]  # all of 8,000, 2,000 and 120 bytes, once
    assert len({bytes(row) for row in whole["tokens"]}) > 3
