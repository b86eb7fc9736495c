"""Ratchets for the measured cases compiled for v5e: a change lowers the bounds.

The table of all sizes is in docs/results/compiled-steps.md. Here the encoders have 2 of 12 layers,
and the recursive model a microbatch of its four.
"""

import re
from typing import NamedTuple

import pytest

from jaxtrain import plan
from jaxtrain.plan import hlo
from tests.compiled.compiled_configs import arrays_with_two_sides
from tools.chip import cases, tpu_steps


class Bounds(NamedTuple):
    settings: dict[str, str]  # beyond those of `tpu_steps.SETTINGS`
    target: str = tpu_steps.V5E
    products: float = 0.0  # executed ÷ counted FLOP; kernels of Pallas are not among the executed
    gigabytes: float = 0.0  # of HBM, of a chip and row
    milliseconds: float = 0.0  # by the compiler's own estimate
    exchanged: float = 0.0  # [GB] results of exchanges
    sent: float = 0.0  # [GB]
    calls: int = 0  # of kernels of Pallas
    peak: float = 0.0  # [GB]
    tokens: int = 0  # of a row whose scores, tokens × tokens, no array may have


ATTENTION = {"model.mixer": "attention", "model.positions": "rope"}
CASES = {
    "vit-s": Bounds(
        {"model.depth": "2"},
        products=0.9,
        gigabytes=0.05,
        milliseconds=40,
        exchanged=0.025,
        calls=4,
        peak=2.0,
        tokens=257,
    ),
    "vit-b": Bounds(
        {"model.depth": "2"},
        products=0.95,
        gigabytes=0.112,
        milliseconds=49,
        exchanged=0.065,
        calls=4,
        peak=2.1,
        tokens=257,
    ),
    "trm": Bounds(
        {"train.batch": "768", "train.accumulate": "1"},
        products=0.76,  # the mixer's are in kernels of Pallas
        gigabytes=0.12,
        milliseconds=70,
        exchanged=0.025,
        calls=56,
        peak=2.8,
    ),
    "lm-1b-2k": Bounds({}, products=1.14, gigabytes=32, milliseconds=560, exchanged=5.8, calls=48),
    # 168 GB and 589 ms with gathers in rings of permutes
    "lm-1b-8k": Bounds({}, products=0.99, gigabytes=124, milliseconds=560, exchanged=6, calls=48),
    # as `auto` chooses
    "higgs-lora": Bounds(
        {"train.accumulate": "1", "model.remat": "none"},
        products=1.2,
        gigabytes=21.5,
        milliseconds=620,
        calls=56,
        peak=13.8,
        tokens=608,
        sent=15.6,  # as in rings of permutes, whose results lack a device's own part
    ),
    "trm, attention": Bounds(
        {"train.batch": "768", "train.accumulate": "1", **ATTENTION},
        products=0.98,
        gigabytes=0.23,
        milliseconds=146,
        exchanged=0.035,
        calls=56,
        peak=4.3,
        tokens=97,
    ),
    "giblet": Bounds({}, "tpu:v5e:4x4", gigabytes=2.0, milliseconds=17, exchanged=0.12),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_a_step_executes_no_more_than_the_table(name, tmp_path, tpu_compiler):
    bounds = CASES[name]
    name = name.partition(",")[0]
    case = next(case for case in cases.CASES if case.name == name)
    settings = {**tpu_steps.SETTINGS[name], **bounds.settings}
    config = case.config(cases.Data(tmp_path, small=False), {}, settings)
    step = tpu_steps.compiled(name, config, bounds.target)
    assert isinstance(step, tpu_steps.Step), step
    target = plan.parse_target(bounds.target)
    print(tpu_steps.row(step, target, 0))
    sums = tpu_steps.sums_of(step.compiled.kernels, target)
    assert (sums.read + sums.written) / step.rows / 1e9 <= bounds.gigabytes
    assert 1e3 * sums.cycles / target.known_chip.clock <= bounds.milliseconds
    if bounds.exchanged:
        assert tpu_steps.exchanged(step.compiled.text) / 1e9 <= bounds.exchanged
    if bounds.sent:
        sent = sum(each.sent for each in hlo.collectives(step.compiled.text))
        assert sent / 1e9 <= bounds.sent
    if bounds.products:
        assert sums.flops / step.flops <= bounds.products
    if bounds.calls:
        assert step.compiled.library_calls["tpu_custom_call"] == bounds.calls
    if bounds.peak:
        assert step.compiled.peak / 1e9 <= bounds.peak
    if bounds.tokens:
        assert not list(arrays_with_two_sides(step.compiled.text, bounds.tokens))


@pytest.mark.slow
def test_a_step_of_giblet_moves_its_largest_matrix_seven_times(tmp_path, tpu_compiler):
    """Forward it is read. The kernel of its gradient reads it and both moments, and writes them."""
    name, target = "giblet", "tpu:v5e:4x4"
    case = next(case for case in cases.CASES if case.name == name)
    config = case.config(cases.Data(tmp_path, small=False), {}, tpu_steps.SETTINGS[name])
    step = tpu_steps.compiled(name, config, target)
    assert isinstance(step, tpu_steps.Step), step
    program = hlo.Program(step.compiled.text)
    [matrix] = {shape for shape in re.findall(r"bf16\[102600,4096\]", step.compiled.text)}
    bodies = {i.name: i for _, i in program.executed()}
    moved = 0
    for kernel in step.compiled.kernels:
        i = bodies[kernel.name]
        moved += kernel.times * i.result.count(matrix)
        moved += kernel.times * sum(bodies[name].result.count(matrix) for name in i.operands)
    assert moved <= 7
