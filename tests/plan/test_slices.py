"""The list of TPU slices against libtpu, which refuses those that it cannot make."""

import json
import math
import os
import subprocess
import sys

import pytest

from jaxtrain.parallel import chips
from jaxtrain.plan import environment, estimate, slices, target, torus

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


def asked_of_libtpu(place, questions, program):
    env = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": environment.path(place)}
    process = subprocess.run(
        [sys.executable, "-c", program],
        input=json.dumps(questions),
        capture_output=True,
        text=True,
        env=env,
    )
    lines = [line for line in process.stdout.splitlines() if line.startswith("ANSWER ")]
    assert len(lines) == len(questions), process.stderr[-2000:]
    return [json.loads(line[7:]) for line in lines]


def names_of(chip):
    every = slices.existing(chip)
    some = [sides for sides in every if math.prod(sides) <= 512] + every[-LARGEST:]
    return [slices.name(chip, sides) for sides in some]


@pytest.mark.slow
def test_libtpu_makes_each_slice(tpu_compiler):
    names = [name for chip in chips.CHIPS if chip.is_tpu for name in names_of(chip.name)]
    answers = asked_of_libtpu(tpu_compiler, names, ASK)
    assert len(names) > 90
    assert [pair for pair in zip(names, answers, strict=True) if pair[1] is not True] == []


def test_a_slice_of_a_number_of_chips_has_the_most_even_sides():
    assert slices.of_count("v5p", 4096) == (16, 16, 16)
    assert slices.of_count("v5p", 512) == (8, 8, 8)
    assert slices.of_count("v5e", 32) == (4, 8)
    assert slices.of_count("v5e", 3) is None
    assert slices.nearest("v5p", 3) == [(2, 1, 1), (2, 2, 1)]
    assert slices.host_bounds((2, 1, 1)) == (2, 1, 1) and slices.host_bounds((1, 1)) == (1, 1, 1)
    assert slices.host_bounds((2, 2)) is None


MESHES = """
import json, sys
from jaxtrain.parallel import layout
from jaxtrain.plan import compile, target
compile.ask_for_no_chips()
for text, sizes in json.load(sys.stdin):
    mesh = layout.make_mesh(*sizes, devices=compile.tpu_devices(target.parse_target(text)))
    print("ANSWER", json.dumps(list(mesh.shape.values())), flush=True)
"""


@pytest.mark.slow
def test_a_mesh_may_split_a_side_of_a_slice(tpu_compiler):
    """JAX's own meshes have axes of whole sides alone."""
    sizes = {"tpu:v5p:4x4x4": [2, 32, 1], "tpu:v4:4x4x8": [2, 8, 8], "tpu:v5e:4x8": [2, 16, 1]}
    assert asked_of_libtpu(tpu_compiler, list(sizes.items()), MESHES) == list(sizes.values())


PLACES = """
import json, sys
from jaxtrain.parallel import layout
from jaxtrain.plan import compile, target
compile.ask_for_no_chips()
for text, sizes in json.load(sys.stdin):
    found = target.parse_target(text)
    mesh = layout.make_mesh(*sizes, devices=compile.tpu_devices(found))
    coords = [device.coords[:len(found.sides)] for device in mesh.devices.flat]
    print("ANSWER", json.dumps(coords), flush=True)
"""


@pytest.mark.slow
def test_a_plan_has_the_chips_at_the_places_where_a_run_has_them(tpu_compiler):
    cases = [
        (text, sizes)
        for text, n in (
            ("tpu:v5e:2x2", 4),
            ("tpu:v5e:2x4", 8),
            ("tpu:v5e:4x4", 16),
            ("tpu:v5e:4x8", 32),
            ("tpu:v6e:8x8", 64),
            ("tpu:v4:2x2x4", 16),
            ("tpu:v5p:2x2x2", 8),
            ("tpu:v5p:4x4x4", 64),
            ("tpu:v5p:4x4x4*2", 128),
            ("tpu:tpu7x:2x2x4", 32),
        )
        for sizes in ((2, n // 2, 1), (2, n // 4, 2), (n // 2, 2, 1), (n, 1, 1))
    ]
    for (text, sizes), found in zip(
        cases, asked_of_libtpu(tpu_compiler, cases, PLACES), strict=True
    ):
        n_slices = target.parse_target(text).slices
        planned = torus.torus_of(target.parse_target(text), sizes)
        assert [list(place) for place in planned.places] * n_slices == found, (text, sizes)


def test_gathers_over_a_whole_torus_are_sums():
    """As libtpu compiles them: docs/results/scale.md."""
    for text, fsdp, expected in (
        ("tpu:v5p:4x4x4", 64, True),
        ("tpu:v5p:4x4x4", 32, False),
        ("tpu:v5p:4x4x4*2", 64, True),
        ("tpu:v5p:8x8x8", 256, False),
        ("tpu:v5p:2x4x4", 32, False),
        ("tpu:tpu7x:4x4x4", 128, True),
        ("tpu:tpu7x:4x4x4", 64, False),
        ("tpu:v5e:16x16", 256, False),
        ("gpu:h100x8", 8, False),
    ):
        assert estimate.gathers_by_sums(target.parse_target(text), fsdp) == expected, text
