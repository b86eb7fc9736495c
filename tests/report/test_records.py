"""Curves of records: spikes of the loss."""

import numpy as np

from jaxtrain.telemetry.report import records


def test_a_spike_of_the_loss_is_found_and_a_noisy_or_falling_loss_has_none():
    rng = np.random.default_rng(0)
    step = np.arange(1.0, 2001)
    loss = 5 * np.exp(-step / 300) + 1 + 0.05 * rng.standard_normal(2000)
    assert records.spikes({"step": step, "loss": loss}) == []
    loss[[700, 1500]] += (3.0, 1.0)
    loss[900] = np.nan
    found = records.spikes({"step": step, "loss": loss})
    assert [row[0] for row in found] == [701, 1501]
    assert found[0][1] == loss[700] and abs(found[0][2] - 1.5) < 0.1
