"""The forecast time of a step, by kind of kernel, and the error that is printed with it."""

import pytest

from jaxtrain import plan
from jaxtrain.plan import forecast as forecast_lib
from jaxtrain.plan import hlo
from tests.plan.scheduled import WITHIN, done, kernel, start, text

MESH = {"data": 2, "fsdp": 4}


def test_a_chip_that_nobody_measured_has_the_bound_alone():
    """Each of three rounds moves 8 MB and waits for a sum of 4 MB over four GPUs."""
    program = hlo.Program(text(start("a", WITHIN), done("a"), kernel("k")))
    found = forecast_lib.forecast(program, MESH, plan.parse_target("gpu:b200x8"))
    assert found.error is None and found.calibration == "uncalibrated: the bound alone"
    moving, sending = 3 * 8e6 / 7700e9, 3 * 6e6 / (0.82 * 900e9)
    assert found.by_kind == pytest.approx({"exchange": sending, "map": moving})
    assert found.seconds == pytest.approx(moving + sending)
    assert found.exposed == pytest.approx(sending)


def test_of_a_condition_the_longest_branch_counts():
    branches = "\n".join(
        f"%{name} (q: f32[1000000]) -> f32[1000000] {{\n  %q{name} = f32[1000000]{{0}} parameter(0)"
        f"\n{body}\n}}\n"
        for name, body in {
            "short": "  ROOT %r = f32[1000000]{0} bitcast(%qshort)",
            "long": "  %s = f32[1000000]{0} negate(%qlong)\n  ROOT %u = f32[1000000]{0} exp(%s)",
        }.items()
    )
    condition = (
        "  %c = f32[1000000]{0} conditional(%n, %x, %x), branch_computations={%short, %long}"
    )
    module = text(condition).replace("ENTRY", f"{branches}\nENTRY")
    found = forecast_lib.forecast(hlo.Program(module), MESH, plan.parse_target("gpu:b200x8"))
    assert found.seconds == pytest.approx(3 * 2 * 8e6 / 7700e9)
