"""Learning rates by step match golden numbers."""

import json
import pathlib

import numpy as np
import optax
import pytest

from jaxtrain.config import Optim
from jaxtrain.optim import make_schedule

DATA = pathlib.Path(__file__).parents[1] / "data"
SCHEDULES = json.loads((DATA / "schedule" / "schedule.json").read_text())


@pytest.mark.parametrize("name", SCHEDULES)
def test_schedule_equals_the_golden_one(name):
    kind, p, values = (SCHEDULES[name][k] for k in ("kind", "params", "values"))
    ratios = {"lr_init": p["init"] / p["peak"], "lr_floor": p["floor"] / p["peak"]}
    optim = Optim(
        schedule=kind.split("_")[0],
        warmup=p["W"],
        decay=p.get("D", 0),
        decay_shape=p.get("shape", "linear"),
        **ratios,
    )
    found = make_schedule(optim, p["N"])(np.arange(len(values)))
    np.testing.assert_allclose(np.asarray(found) * p["peak"], values, rtol=0, atol=2e-6 * p["peak"])


def test_constant_schedule_warms_up_and_stays():
    found = make_schedule(Optim(schedule="constant", warmup=4, lr_init=0.2), 10)(
        np.array([0, 2, 4, 9, 50])
    )
    np.testing.assert_allclose(found, [0.2, 0.6, 1, 1, 1], rtol=1e-6)


def test_three_phases_meet_where_they_should():
    # 10 up, 150 flat, 40 down
    rate = make_schedule(Optim(schedule="three_phase", lr_floor=0.1), 200)
    found = rate(np.array([0, 5, 9, 10, 11, 159, 160, 161, 180, 199, 200, 300]))
    expected = [1e-8, 0.5, 0.9, 1, 1, 1, 1, 1 - 0.9 / 40, 0.55, 0.1 + 0.9 / 40, 0.1, 0.1]
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    cosine = make_schedule(
        Optim(schedule="three_phase", decay_shape="cosine", warmup=20, decay=100), 200
    )
    np.testing.assert_allclose(
        cosine(np.array([10, 20, 100, 150, 200])), [0.5, 1, 1, 0.5, 0], atol=1e-6
    )


def test_cycles_are_those_of_optax_and_the_last_one_ends_with_the_run():
    optim = Optim(schedule="cycle", cycle=20, warmup=4, lr_init=0.1, lr_floor=0.05)
    one = dict(init_value=0.1, peak_value=1.0, warmup_steps=4, decay_steps=20, end_value=0.05)
    expected = optax.sgdr_schedule([one] * 3)
    found = make_schedule(optim, 60)(np.arange(64))
    np.testing.assert_allclose(found[:60], [expected(s) for s in range(60)], rtol=1e-5)
    np.testing.assert_allclose(found[60:], 0.05, rtol=1e-5)


@pytest.mark.parametrize("cycle", [0, 10, 500])
def test_one_cycle_is_the_cosine_of_a_run(cycle):
    steps = np.arange(12)
    cosine = make_schedule(Optim(schedule="cosine", warmup=3), 10)(steps)
    found = make_schedule(Optim(schedule="cycle", cycle=cycle, warmup=3), 10)(steps)
    np.testing.assert_array_equal(found, cosine)
