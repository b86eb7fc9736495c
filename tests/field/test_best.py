"""Short evaluations cover all sources and agree with the full ones."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxtrain import config as config_lib
from jaxtrain.checkpoint import Checkpointer, History
from loaders.base import Rows
from loaders.text import token_files, tokens
from tests.support import toy_task


def rows_of(config, *, batch, n=None):
    loader = tokens.make_loader(config, split="test", rows=Rows(batch, ((0, batch),)), seed=0)
    loader.seek(0)
    batches = [next(loader)[1] for _ in range(n or loader.n_batches)]
    return {
        name: np.concatenate([b[name][0] for b in batches])
        for name in ("source", "tokens", "weight", "index")
    }


@pytest.fixture
def sources(tmp_path):
    for name, letter, n in (("a", "a", 400), ("b", "b", 100), ("c", "c", 6)):
        (tmp_path / f"{name}.txt").write_text(f"{letter}{letter.upper()}" * 10 * n)
    paths = [str(tmp_path / f"{name}.txt") for name in "abc"]
    shares = (1.0, 2.0, 1.0)
    sources = tuple(
        tokens.Source(path, path, share) for path, share in zip(paths, shares, strict=True)
    )
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


def test_a_short_evaluation_is_like_the_whole_one(tmp_path):
    """Best fit packs the longest documents first, and a corpus may be sorted."""
    length = np.sort(np.random.default_rng(0).integers(2, 60, 40_000))
    documents = [np.full(n, n, np.uint16) for n in length]
    (tmp_path / "a").mkdir()
    shard = token_files.write_shard(tmp_path / "a", "00000", documents, length.tolist(), np.uint16)
    token_files.write_about(tmp_path / "a", vocab=64, eos=None, tokenizer=None, shards=[shard])
    config = tokens.Config(
        sources=(tokens.Source(str(tmp_path / "a")),),
        context=64,
        packing="best_fit",
        test_share=0.99,
    )
    whole, short = rows_of(config, batch=64), rows_of(config, batch=64, n=4)
    again = rows_of(config, batch=64, n=4)
    assert all((short[name] == again[name]).all() for name in short)
    assert abs(mean_of(short) / mean_of(whole) - 1) < 0.1
    documents = np.unique(whole["index"][whole["weight"] > 0])
    assert len(documents) > 3000 and sorted(map(bytes, short["tokens"])) != sorted(
        map(bytes, whole["tokens"][-256:])
    )


def test_the_best_of_other_evaluations_is_not_compared_with(tmp_path, caplog):
    planned, record = toy_task.planned(), {"loss": 1.0}
    for step, batches in ((1, 0), (2, 0), (3, 2)):
        train, checkpoint = (
            config_lib.Train(eval_batches=batches),
            config_lib.Checkpoint(best="-loss"),
        )
        ours = Checkpointer(
            config_lib.Config(workdir=str(tmp_path / "w"), train=train, checkpoint=checkpoint),
            toy_task.TASK,
        )
        assert bool(ours.restore(planned, {"position": 0})) == (step > 1)
        assert ("config.train.eval_batches: 0 saved, 2 now" in caplog.text) == (batches > 0)
        ours.save(
            step,
            jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), planned.state),
            {"position": 0},
            History(),
        )
        ours.score(step, record)
        record = {"loss": record["loss"] + 1}
        ours.close()
    assert json.loads((tmp_path / "w" / "best.json").read_text())["step"] == 3


def mean_of(rows):
    return rows["tokens"][rows["tokens"] > 0].mean()
