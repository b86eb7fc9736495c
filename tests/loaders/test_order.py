import numpy as np
import pytest

from loaders import _rust, order

SIZES = [1, 2, 3, 4, 5, 7, 8, 9, 63, 64, 65, 1023, 1024, 1025, 65535, 65536, 65537, 528_422]


@pytest.mark.parametrize("n", SIZES)
def test_rust_and_the_reference_agree_on_a_bijection(n):
    i = np.arange(n)
    for seed, epoch in ((0, 0), (0, 1), (2**64 - 1, 2**40)):
        found = _rust.permutation(seed, epoch, n, i)
        np.testing.assert_array_equal(found, order.permutation(seed, epoch, n, i))
        np.testing.assert_array_equal(np.sort(found), i)


def test_places_are_independent_of_each_other():
    i = np.array([528_421, 0, 77])
    np.testing.assert_array_equal(
        _rust.permutation(5, 2, 528_422, i), order.permutation(5, 2, 528_422, np.arange(528_422))[i]
    )
    most = (1 << 62) - 1
    assert (_rust.permutation(0, 0, most, np.array([0, 1, most // 2, most - 1])) < most).all()


def test_order_is_pinned():
    """Checkpoints rely on these numbers: if they change, VERSION must change in order.py and in
    order.rs."""
    assert order.VERSION == _rust.ORDER_VERSION == 1
    assert _rust.permutation(42, 3, 10, np.arange(10)).tolist() == [4, 0, 5, 1, 8, 9, 7, 3, 2, 6]
    assert [order.crop_start(42, 3, recording, 1000) for recording in range(5)] == [
        506,
        699,
        333,
        584,
        797,
    ]
    assert np.flatnonzero(order.held_out(np.arange(100), 0.05)).tolist() == [
        12,
        14,
        22,
        29,
        33,
        35,
        73,
        93,
        94,
    ]


@pytest.mark.parametrize("n", [1000, 4096, 528_422])
def test_order_looks_random(n):
    i = np.arange(n)
    first, second = (_rust.permutation(1, epoch, n, i) for epoch in (0, 1))
    bound = 5 / np.sqrt(n)  # five standard deviations of a correlation of independent numbers
    for lag in (1, 2, 64):
        assert abs(np.corrcoef(first[lag:], first[:-lag])[0, 1]) < bound
    assert abs(np.corrcoef(first, second)[0, 1]) < bound
    assert abs(np.corrcoef(first, i)[0, 1]) < bound
    assert (first == second).sum() < 12  # Poisson with mean 1
    # The shards of a batch, which a shuffle buffer gets wrong: 2048 rows against 64 shards,
    # chi-square with 63 degrees of freedom.
    shards = np.bincount(first[: n // 4] * 64 // n, minlength=64)
    mean = n / 4 / 64
    assert ((shards - mean) ** 2 / mean).sum() < 63 + 5 * np.sqrt(2 * 63)


def test_every_order_of_few_recordings_occurs_equally_often():
    orders = [tuple(_rust.permutation(9, epoch, 4, np.arange(4))) for epoch in range(4800)]
    counts = np.unique(orders, axis=0, return_counts=True)[1]
    assert len(counts) == 24
    assert ((counts - 200) ** 2 / 200).sum() < 23 + 5 * np.sqrt(2 * 23)


SHARDS = np.array([0, 0, 130, 131, 600, 1000])


@pytest.mark.parametrize(
    ("size", "window"), [(1, 1), (16, 4), (16, 1), (5000, 3), (5, 1000), (32, 64)]
)
def test_the_block_order_is_a_bijection_that_the_reference_knows(size, window):
    rows = np.setdiff1d(np.arange(1100), np.arange(3, 1100, 7))
    stops = order.block_stops(rows, SHARDS, size)
    i = np.arange(len(rows))
    for seed, epoch in ((0, 0), (0, 1), (2**64 - 1, 2**40)):
        found = _rust.block_order(seed, epoch, stops, window, i)
        np.testing.assert_array_equal(found, order.block_order(seed, epoch, stops, window, i))
        np.testing.assert_array_equal(np.sort(found), i)
        places = np.array([len(rows) - 1, 0, 77])
        np.testing.assert_array_equal(
            _rust.block_order(seed, epoch, stops, window, places), found[places]
        )


def test_blocks_are_contiguous_within_one_shard():
    rows = np.setdiff1d(np.arange(1100), np.arange(3, 1100, 7))
    stops = order.block_stops(rows, SHARDS, 32)
    for begin, end in zip([0, *stops[:-1]], stops, strict=True):
        assert 0 < end - begin <= 32
        assert len(set(np.searchsorted(SHARDS, rows[begin:end], side="right"))) == 1


def test_a_window_of_the_block_order_holds_whole_blocks():
    """The bytes to read ahead form runs: of 40 blocks of 25 rows, each 8 come together, in a
    different order each epoch."""
    stops = np.arange(25, 1001, 25)
    first, second = (_rust.block_order(7, epoch, stops, 8, np.arange(1000)) for epoch in (0, 1))
    windows = [set(window // 25) for window in first.reshape(5, 200)]
    assert [len(blocks) for blocks in windows] == [8] * 5
    assert windows != [set(window // 25) for window in second.reshape(5, 200)]
    # rows of a block do not follow each other
    assert abs(np.corrcoef(first[1:], first[:-1])[0, 1]) < 0.2


def test_the_block_order_is_pinned():
    """Checkpoints rely on these numbers: if they change, VERSION must change in order.py and in
    order.rs."""
    found = _rust.block_order(42, 3, np.array([3, 6, 8, 12]), 2, np.arange(12))
    assert found.tolist() == [10, 3, 8, 11, 4, 5, 9, 6, 0, 1, 7, 2]


def test_places_outside_are_errors():
    for i in (-1, 10):
        with pytest.raises(IndexError, match=f"place {i} "):
            _rust.permutation(0, 0, 10, np.array([i]))
    with pytest.raises(ValueError, match="n = 0"):
        _rust.permutation(0, 0, 0, np.array([0]))


def test_held_out_recordings_stay_held_out_when_others_are_added():
    few, many = (np.flatnonzero(order.held_out(np.arange(n), 0.05)) for n in (1000, 100_000))
    np.testing.assert_array_equal(few, many[many < 1000])
    assert abs(len(many) - 5000) < 5 * np.sqrt(5000)
    assert not order.held_out(np.arange(1000), 0.0).any()
