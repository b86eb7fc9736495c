"""The list of TPU slices against libtpu, which refuses those that it cannot make."""

import json
import math
import os
import subprocess
import sys

import pytest

from jaxtrain.parallel import chips
from jaxtrain.plan import environment, slices

LARGEST = 10  # of a version's slices, besides those of up to 512 chips
ASK = """
import json, sys
from jaxtrain.plan import compile, target
compile.ask_for_no_chips()
for text in json.load(sys.stdin):
    try:
        found = target.parse_target(text)
        answer = len(compile.tpu_devices(found)) == found.count
    except target.PlanError as error:
        answer = str(error)
    print("ANSWER", json.dumps(answer), flush=True)
"""


def asked_of_libtpu(place, names):
    env = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": environment.path(place)}
    process = subprocess.run(
        [sys.executable, "-c", ASK],
        input=json.dumps(names),
        capture_output=True,
        text=True,
        env=env,
    )
    lines = [line for line in process.stdout.splitlines() if line.startswith("ANSWER ")]
    return dict(zip(names, [json.loads(line[7:]) for line in lines], strict=True))


def names_of(chip):
    every = slices.existing(chip)
    some = [sides for sides in every if math.prod(sides) <= 512] + every[-LARGEST:]
    return [slices.name(chip, sides) for sides in some]


@pytest.mark.slow
def test_libtpu_makes_each_slice(tpu_compiler):
    names = [name for chip in chips.CHIPS if chip.is_tpu for name in names_of(chip.name)]
    answers = asked_of_libtpu(tpu_compiler, names)
    assert len(answers) > 90
    assert {name: answer for name, answer in answers.items() if answer is not True} == {}


def test_a_slice_of_a_number_of_chips_has_the_most_even_sides():
    assert slices.of_count("v5p", 4096) == (16, 16, 16)
    assert slices.of_count("v5p", 512) == (8, 8, 8)
    assert slices.of_count("v5e", 32) == (4, 8)
    assert slices.of_count("v5e", 3) is None
    assert slices.nearest("v5p", 3) == [(2, 1, 1), (2, 2, 1)]
    assert slices.host_bounds((2, 1, 1)) == (2, 1, 1) and slices.host_bounds((1, 1)) == (1, 1, 1)
    assert slices.host_bounds((2, 2)) is None
