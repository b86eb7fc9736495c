"""Ratchets for the step of the recursive model, compiled for one H100: a change lowers the bounds.

The case is the one of tools/gpu_check.py.
"""

import pytest

from jaxtrain.plan import worker
from tools.chip import cases

MOSAIC = 'custom_call_target="mosaic_gpu'  # the calls of tokamax's kernels


def gigabytes_of_row_and_text(tmp_path, kernel):
    """The bytes that a step moves for a row, and the step's program."""
    case = next(case for case in cases.CASES if case.name == "trm")
    data = cases.Data(tmp_path, small=False)
    config = case.config(data, case.choices[0], {"model.kernel": kernel})
    [answer] = worker.ask([worker.Job(config, "gpu:h100x1", worker.LAST)])
    assert answer.compiled, answer.error
    step = answer.compiled
    moved = sum(kernel.times * (kernel.read + kernel.written) for kernel in step.kernels)
    return moved / 1e9 / config.train.batch, step.text


@pytest.mark.slow
def test_bytes_of_a_row(tmp_path, gpu_compiler):
    gigabytes, text = gigabytes_of_row_and_text(tmp_path, "xla")
    assert gigabytes <= 0.46 and MOSAIC not in text


@pytest.mark.slow
def test_bytes_of_a_row_by_tokamaxs_kernel(tmp_path, gpu_compiler):
    """By default, if it is installed. Two layers have two calls each for thoughts, and two for the
    answer."""
    pytest.importorskip("tokamax")
    gigabytes, text = gigabytes_of_row_and_text(tmp_path, "auto")
    assert gigabytes <= 0.37 and text.count(MOSAIC) == 8
