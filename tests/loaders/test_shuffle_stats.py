"""Measures of shuffling: independent draws meet their expectations, and orders that are not
shuffled are reported."""

import numpy as np
import pytest

from loaders import _rust, order
from loaders.base import DataError, Population
from loaders.shuffle_stats import ShuffleStats

N, SHARDS, BATCH = 20_000, 40, 256
STARTS = np.arange(SHARDS) * N // SHARDS


def record(batches, rows=None, starts=STARTS):
    stats = ShuffleStats(Population(np.arange(N) if rows is None else rows, starts))
    found = []
    for batch in batches:
        stats.add(batch)
        found.append(stats.record())
    return found


def test_independent_draws_are_as_expected():
    rng = np.random.default_rng(0)
    found = record(rng.integers(N, size=(300, BATCH)))[100:]
    mean = {name: np.mean([r[name] for r in found]) for name in found[0]}
    for name in (
        "chi2_mod",
        "chi2_div",
        "chi2_hash",
        "chi2_shard",
        "unique",
        "overlap",
        "bucket_overlap",
        "window_unique",
    ):
        assert mean[name] == pytest.approx(
            mean[f"{name}_expected"], rel=0.1 if name == "overlap" else 0.03
        ), name
    assert found[0]["overlap_expected"] == pytest.approx(BATCH**2 / N, rel=0.02)
    assert found[0]["window_unique_expected"] == pytest.approx(
        N * (1 - (1 - 1 / N) ** (100 * BATCH))
    )
    for kind in ("mod", "div", "hash", "shard"):
        assert abs(mean[f"acf_{kind}"]) < 0.05


def test_the_global_order_is_shuffled_and_repeats_nothing():
    places = np.arange(70 * BATCH)
    found = record(order.permutation(0, 0, N, places).reshape(-1, BATCH))
    last = found[-1]
    assert abs(last["acf_shard"]) < 0.1 and abs(last["acf_div"]) < 0.1
    assert np.mean([r["chi2_shard"] for r in found]) == pytest.approx(
        last["chi2_shard_expected"], rel=0.1
    )
    assert last["unique"] == BATCH and last["overlap"] == 0
    assert last["window_unique"] == 70 * BATCH > last["window_unique_expected"]


def test_an_order_that_is_not_shuffled_is_reported():
    found = record(np.arange(N)[: 70 * BATCH].reshape(-1, BATCH))[-1]
    assert found["chi2_shard"] > 20 * found["chi2_shard_expected"] and found["chi2_div"] > 20
    assert found["chi2_mod"] < 0.1 < 0.9 < found["chi2_mod_expected"], (
        "neighbours are spread too evenly"
    )
    # A buffer that holds a few batches: one batch tells much about the next.
    found = record(buffered())[-1]
    assert found["acf_shard"] > 0.7 and found["acf_div"] > 0.5


def test_the_block_order_mixes_worse_than_the_global_one_and_better_than_a_buffer():
    """The order is compared by the metrics of a run, as docs/results/loader.md does it for larger
    ones."""
    stops = order.block_stops(np.arange(N), STARTS, 8)
    blocks = _rust.block_order(0, 0, stops, 256, np.arange(70 * BATCH))
    assert len(np.unique(blocks)) == len(blocks)
    orders = [order.permutation(0, 0, N, np.arange(70 * BATCH)), blocks, buffered()]
    found = [record(rows.reshape(-1, BATCH)) for rows in orders]
    acf = [batches[-1]["acf_shard"] for batches in found]
    chi2 = [np.mean([batch["chi2_shard"] for batch in batches]) for batches in found]
    assert abs(acf[0]) < 0.1 < acf[1] < acf[2] and chi2[0] < chi2[1] < chi2[2]


def buffered():
    """The rows in sequence, through a buffer of 2,000 from which the row at a random place is taken
    each time."""
    rng = np.random.default_rng(0)
    buffer, out = list(range(2_000)), []
    for i in range(2_000, N):
        j = rng.integers(len(buffer))
        out.append(buffer[j])
        buffer[j] = i
    return np.array(out[: 70 * BATCH]).reshape(-1, BATCH)


def test_a_split_is_judged_by_its_own_rows():
    """The split is every other row of two shards of three. One of a single shard has no measure
    of shards."""
    rows = np.arange(0, N, 2)[: N // 3]
    rng = np.random.default_rng(0)
    starts = np.array([0, N // 3, 2 * N // 3])
    found = record(rng.choice(rows, (100, BATCH)), rows, starts)
    for name in ("chi2_mod", "chi2_div", "chi2_hash", "chi2_shard"):
        assert np.mean([r[name] for r in found]) == pytest.approx(1, rel=0.2), name
    assert "chi2_shard" not in record([rows[:8]], rows, np.array([0]))[0]


@pytest.mark.parametrize("index", [-1, N, 3 << 30])
def test_an_index_that_no_recording_has_is_an_error_with_its_value(index):
    with pytest.raises(
        DataError,
        match=(
            f"the index {index} of an example in a batch is that of no recording, which have 0 to"
        ),
    ):
        record([[5, index]])
