import numpy as np
import pytest

from tools import index_scale, shuffle_quality


@pytest.mark.parametrize("rows", [60_000])
def test_the_orders_mix_as_the_docs_of_order_say(rows):
    starts = shuffle_quality.shard_starts(rows, 100)
    orders = {
        "global": np.asarray(shuffle_quality._rust.permutation(0, 0, rows, np.arange(rows))),
        "block": shuffle_quality.block(rows, starts, 8, 256),
        "buffer": shuffle_quality.shuffle_buffer(rows, starts),
    }
    found = {name: shuffle_quality.measure(order, batch=256, starts=starts) for name, order in orders.items()}
    assert all((np.sort(order) == np.arange(rows)).all() for order in orders.values())
    acf, shards, chi2, unique = zip(*found.values(), strict=True)
    assert abs(acf[0]) < 0.05 and 0.9 < chi2[0] < 1.1
    assert acf[1] < acf[2] and chi2[1] < chi2[2] and shards[0] > shards[1] > shards[2]
    assert min(unique) > rows * (1 - (1 - 1 / rows) ** (100 * 256))  # more than independent draws


def test_autocorrelation_of_what_is_known():
    one, other = np.eye(2)
    assert shuffle_quality.autocorrelation(np.stack([one, other] * 50)) == pytest.approx(-0.99, abs=0.001)
    assert shuffle_quality.autocorrelation(np.repeat(np.eye(2), 50, 0)) == pytest.approx(0.98, abs=0.011)


def test_a_small_index_scale(capsys, monkeypatch):
    monkeypatch.setattr("sys.argv", ["index_scale", "--rows=2500", "--shards=2", "--gigabytes=1"])
    index_scale.main()
    assert "2500 rows in 2 shards of 1 GB" in capsys.readouterr().out
