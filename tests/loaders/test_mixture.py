"""Shares are kept, every example of a source comes once and in order, and the next source depends
on the example's number alone."""

import numpy as np
import pytest

from loaders.base import DataError
from loaders.mixture import BLOCK, Mixture, quotas

SHARES = (5.0, 3.0, 0.5, 1.5)


def test_shares_are_kept_and_samples_handed_out_in_order():
    mixture = Mixture(SHARES, seed=3)
    np.testing.assert_allclose(mixture.shares, [0.5, 0.3, 0.05, 0.15])
    source, number = mixture(np.arange(3 * BLOCK))
    for k, share in enumerate(mixture.shares):
        np.testing.assert_array_equal(number[source == k], np.arange((source == k).sum()))
        for n in (BLOCK, 2 * BLOCK, 3 * BLOCK):
            assert abs((source[:n] == k).mean() - share) <= 1 / BLOCK
        # mixed within a block, not one source after the other
        assert abs((source[:1000] == k).mean() - share) < 0.05
    assert (source[:BLOCK] != source[BLOCK : 2 * BLOCK]).any()
    assert (Mixture(SHARES, seed=4)(np.arange(BLOCK))[0] != source[:BLOCK]).any()


@pytest.mark.parametrize("policy", ["repeat", "stop"])
def test_any_part_alone_is_the_part_of_the_whole(policy):
    sizes = (90_000, 100_000, 700, 40_000)
    whole = Mixture(SHARES, seed=0, policy=policy, sizes=sizes)(np.arange(3 * BLOCK))
    rng = np.random.default_rng(0)
    for _ in range(5):
        example = np.sort(rng.integers(0, 3 * BLOCK, 50))
        part = Mixture(SHARES, seed=0, policy=policy, sizes=sizes)(example)
        for x, y in zip(part, whole, strict=True):
            np.testing.assert_array_equal(x, y[example])


def test_a_source_that_stops_leaves_its_share_to_the_others():
    sizes = np.array((90_000, 70_000, 700, 40_000))
    mixture = Mixture(SHARES, seed=0, policy="stop", sizes=sizes)
    assert mixture.ends == sizes.sum()
    source, number = mixture(np.arange(mixture.ends))
    for k, size in enumerate(sizes):
        np.testing.assert_array_equal(number[source == k], np.arange(size))
    last = np.flatnonzero(source == 2)[-1]
    assert 12_000 < last < 16_000  # its 700 examples at one of 20
    after = source[last + 1 : last + 1 + BLOCK]
    np.testing.assert_allclose(
        [(after == k).mean() for k in range(4)], np.array([5, 3, 0, 1.5]) / 9.5, atol=0.002
    )
    with pytest.raises(
        DataError, match="all sources are exhausted after 200700 examples, but example 200700"
    ):
        mixture(np.array([mixture.ends]))


def test_a_source_that_must_not_run_dry_is_named():
    mixture = Mixture((1, 1), seed=0, policy="error", sizes=(10**9, 300))
    mixture(np.arange(500))
    with pytest.raises(
        DataError, match="source 1 has 300 examples in a pass and is exhausted at example"
    ):
        mixture(np.arange(700))


def test_one_source_is_itself():
    for policy, sizes in (("repeat", None), ("stop", (1000,))):
        source, number = Mixture((7,), seed=0, policy=policy, sizes=sizes)(np.arange(5, 1000))
        assert not source.any()
        np.testing.assert_array_equal(number, np.arange(5, 1000))


@pytest.mark.parametrize("shares", [(), (1, 0), (1, -1), (1, float("nan"))])
def test_invalid_shares_are_refused(shares):
    with pytest.raises(DataError, match="shares are"):
        Mixture(shares, seed=0)


def test_quotas_fill_a_block_for_any_shares():
    rng = np.random.default_rng(0)
    for _ in range(200):
        shares = rng.random(rng.integers(1, 40)) ** rng.integers(1, 30)
        quota = quotas(shares / shares.sum())
        assert quota.sum() == BLOCK and (quota > 0).all()
