"""Figures for people: means, rates and the share of the peak."""

import math
import time
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxtrain.telemetry import metrics
from jaxtrain.types import Mean


@pytest.fixture
def clock(monkeypatch):
    """A clock that the test moves."""
    now = types.SimpleNamespace(time=1000.0)
    for name in ("monotonic", "perf_counter"):
        monkeypatch.setattr(time, name, lambda: now.time)
    return now


def test_sums_are_added_before_they_are_divided():
    sums = [
        {"a": Mean(jnp.float32(6), jnp.float32(2))},
        {"a": Mean(jnp.float32(1), jnp.float32(3))},
    ]
    assert metrics.mean(sums) == {"a": 7 / 5}
    assert math.isnan(metrics.mean([{"a": Mean(jnp.float32(0), jnp.float32(0))}])["a"])
    assert metrics.mean([]) == {}


def test_sums_over_many_batches_are_kept_in_float64():
    """In float32, adding 1 to 2**25 would lose the 1."""
    sums = [{"a": Mean(np.float32(2**25), np.float32(1))}] + [
        {"a": Mean(np.float32(1), np.float32(0))}
    ] * 3
    assert metrics.mean(sums)["a"] == 2**25 + 3


def test_rates_name_the_cores_that_the_loader_lacks(clock, monkeypatch):
    monkeypatch.setattr(metrics.machine, "cores", lambda: 2)
    # one of two processes
    meter = metrics.Meter(steps=100, batch=80, flops=1000, peak=4000.0, local_rows=40)
    meter.start(0, 0.0)
    clock.time += 10
    loader = {
        "rows": 400,
        "threads": 2,
        "seconds": {"read": 1.0, "decode": 15.0, "idle": 4.0, "wait": 8.0},
    }
    # 800 rows in 2 s of computing; 400 rows in 16 s of a thread, in both processes
    rates = meter.rates(10, 8.0, loader)
    assert (
        rates["rows_asked_per_second"],
        rates["rows_given_per_second"],
        rates["cores_missing"],
    ) == (400.0, 100.0, 6)
    clock.time += 10
    faster = {
        "rows": 1200,
        "threads": 2,
        "seconds": {"read": 1.0, "decode": 19.0, "idle": 14.0, "wait": 8.0},
    }
    rates = meter.rates(20, 8.0, faster)
    assert (
        rates["rows_asked_per_second"],
        rates["rows_given_per_second"],
        rates["cores_missing"],
    ) == (80.0, 800.0, 0)
    clock.time += 1
    assert "cores_missing" not in meter.rates(
        21, 8.0, faster
    ) and "cores_missing" not in meter.rates(22, 8.0, {"rows": 1})


def test_rates_are_those_since_the_last_line(clock):
    meter = metrics.Meter(steps=100, batch=8, flops=1000, peak=4000.0)
    meter.start(10, 5.0)
    clock.time += 2
    rates = meter.rates(20, 5.5)
    assert rates == {
        "steps_per_second": 5.0,
        "examples_per_second": 40.0,
        "mfu": 1.25,
        "data_wait_share": 0.25,
        "eta_seconds": 16.0,
    }
    both = metrics.Meter(steps=100, batch=8, flops=1000, full_flops=1600, peak=4000.0)
    both.start(10, 5.0)
    clock.time += 2
    assert {k: v for k, v in both.rates(20, 5.5).items() if "mfu" in k} == {
        "mfu": 1.25,
        "mfu_full_attention": 2.0,
    }
    clock.time += 2
    by_documents = both.rates(30, 5.5, document_flops=800)
    assert by_documents["mfu_documents"] == 1.0 and by_documents["mfu"] == 1.25
    clock.time += 100  # an evaluation does not count in the speed
    meter.start(20, 5.5)
    clock.time += 1
    assert meter.rates(25, 5.5)["steps_per_second"] == 5.0
    clock.time += 1
    assert meter.rates(26, 8.0)["data_wait_share"] == 1.0


def test_peak_of_a_cpu_is_measured_once_for_all_its_devices():
    peak, source = metrics.peak_flops()
    assert 1e9 < peak < 1e15 and "measured" in source


@pytest.mark.parametrize(
    ("kind", "each"),
    [
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA H100 NVL", 835e12),
        ("NVIDIA H200", 989e12),
        ("TPU v5 lite", 197e12),
        ("TPU v5p", 459e12),
        ("TPU v5", 459e12),
    ],
)
def test_peak_of_a_known_chip_is_its_datasheets(monkeypatch, kind, each):
    monkeypatch.setattr(
        jax, "devices", lambda: [types.SimpleNamespace(device_kind=kind, platform="x")] * 4
    )
    peak, source = metrics.peak_flops()
    assert peak == 4 * each and kind in source
