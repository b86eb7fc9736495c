"""Ratchets for the step of the recursive model, compiled for one H100: a change lowers the bounds.

The case is the one of tools/gpu_check.py.
"""

import pytest

from jaxtrain import plan
from jaxtrain.plan import traffic, worker
from tools.chip import cases

TARGET = "gpu:h100x1"
MOSAIC = 'custom_call_target="mosaic_gpu'  # the calls of tokamax's kernels


def compiled(tmp_path, kernel):
    """Return the case's step, its sums, and the FLOP that its formula counts."""
    case = next(case for case in cases.CASES if case.name == "trm")
    data = cases.Data(tmp_path, small=False)
    config = case.config(data, case.choices[0], {"model.kernel": kernel})
    [answer] = worker.ask([worker.Job(config, TARGET, worker.LAST)])
    assert answer.compiled, answer.error
    target = plan.parse_target(TARGET)
    chip = target.known_chip
    sums = traffic.roofline(answer.compiled.kernels, traffic.Rates(chip.bandwidth, chip.flops))
    return answer.compiled, sums, plan.abstractly(config, target).task.flops


def gigabytes_of_row(sums):
    return (sums.read + sums.written) / 1e9 / 768


@pytest.mark.slow
def test_bytes_products_kernels_and_memory_of_a_step(tmp_path, gpu_compiler):
    step, sums, counted = compiled(tmp_path, "xla")
    assert gigabytes_of_row(sums) <= 0.455 and MOSAIC not in step.text
    assert sums.flops <= 1.01 * counted
    assert sums.kernels <= 1_100
    assert step.peak <= 32e9


@pytest.mark.slow
def test_bytes_of_a_row_by_tokamaxs_kernel(tmp_path, gpu_compiler):
    """By default, if it is installed. Two layers have two calls each for thoughts, and two for the
    answer."""
    pytest.importorskip("tokamax")
    step, sums, _ = compiled(tmp_path, "auto")
    assert gigabytes_of_row(sums) <= 0.37 and step.text.count(MOSAIC) == 8
