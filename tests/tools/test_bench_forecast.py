"""The measured times of the benchmark of forecasts."""

import time

import pytest

from tools import bench_forecast


@pytest.mark.parametrize("seconds", [0.001, 0.02])
def test_a_step_may_take_longer_than_a_slice_of_the_measurement(seconds, monkeypatch):
    monkeypatch.setattr(bench_forecast, "SECONDS", 0.2)
    monkeypatch.setattr(bench_forecast, "SLICE", 0.005)
    assert seconds <= bench_forecast._seconds(lambda: time.sleep(seconds)) < seconds + 0.02
