"""Shares are kept, every sample of a source comes once and in order, and the next source depends on
the sample's number alone."""

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
        assert abs((source[:1000] == k).mean() - share) < 0.05  # mixed within a block, not one source after the other
    assert (source[:BLOCK] != source[BLOCK : 2 * BLOCK]).any()
    assert (Mixture(SHARES, seed=4)(np.arange(BLOCK))[0] != source[:BLOCK]).any()


def test_any_part_alone_is_the_part_of_the_whole():
    whole = Mixture(SHARES, seed=0)(np.arange(3 * BLOCK))
    rng = np.random.default_rng(0)
    for _ in range(5):
        sample = np.sort(rng.integers(0, 3 * BLOCK, 50))
        for x, y in zip(Mixture(SHARES, seed=0)(sample), whole, strict=True):
            np.testing.assert_array_equal(x, y[sample])


def test_one_source_is_itself():
    source, number = Mixture((7,), seed=0)(np.arange(5, 1000))
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
