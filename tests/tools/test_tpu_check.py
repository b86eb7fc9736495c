"""The check of a TPU slice: its small form on CPU devices, and what it says of places and rates."""

import json
import os
import pathlib
import subprocess
import sys
import types

import pytest

from jaxtrain.parallel import chips
from tools import tpu_check

ROOT = pathlib.Path(__file__).parents[2]


@pytest.mark.slow
def test_the_small_form_ends_on_cpu_devices(tmp_path):
    out = tmp_path / "check.json"
    devices = "--xla_force_host_platform_device_count=4"
    done = subprocess.run(
        [sys.executable, "-m", "tools.tpu_check", f"--out={out}", "--minutes=20"],
        cwd=ROOT,
        env={**os.environ, "XLA_FLAGS": devices, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=1200,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = json.loads(out.read_text())
    rates = ["slice", "memory", "product", "copy", "links", "attention vit", "attention packed"]
    assert [line["name"] for line in lines] == [*rates, *tpu_check.tpu_steps.SETTINGS]
    assert all(line["is_well"] for line in lines)
    assert lines[0]["numbers"]["devices"] == 4 and lines[4]["numbers"]["found"] > 0
    assert all(line["numbers"]["seconds"] > 0 for line in lines[len(rates) :])
    assert "failed: nothing" in done.stdout


def places(*sides):
    x, y, z = sides
    return [
        types.SimpleNamespace(coords=(i, j, k), device_kind="TPU v5 lite", platform="tpu")
        for i in range(x)
        for j in range(y)
        for k in range(z)
    ]


@pytest.mark.parametrize(
    ("chip", "sides", "name"),
    [
        ("v5e", (2, 2, 1), "tpu:v5e:2x2"),
        ("v5e", (4, 2, 1), "tpu:v5e:2x4"),
        ("v4", (2, 2, 4), "tpu:v4:2x2x4"),
        ("v5p", (1, 1, 1), "tpu:v5p:1x1x1"),
        ("v5e", (3, 2, 1), ""),
    ],
)
def test_a_slice_is_named_by_the_places_of_its_chips(chip, sides, name):
    assert tpu_check.slice_name(places(*sides), chips.by_name(chip)) == name
    assert tpu_check.of_slice(places(*sides), chips.by_name(chip)).is_well == bool(name)


def test_a_rate_far_below_the_table_fails():
    assert tpu_check.rate("copy", 700e9, 819e9, "bytes/s").text == "7e+11 bytes/s, 85% of 8.19e+11"
    assert not tpu_check.rate("copy", 400e9, 819e9, "bytes/s").is_well
    assert tpu_check.rate("copy", 1e9, 0, "bytes/s").is_well, "a chip that no table has"


def test_less_memory_than_the_plan_grants_fails():
    chip = chips.by_name("v5e")
    for n_bytes, is_well in ((chip.memory, True), (0.9 * chip.memory, False)):
        device = types.SimpleNamespace(memory_stats=lambda n=n_bytes: {"bytes_limit": n})
        assert tpu_check.of_memory(device, chip).is_well == is_well


def test_a_case_that_fails_is_named_and_the_next_one_begins(monkeypatch, tmp_path):
    def of_case(name, data, target):
        if name == "trm":
            raise RuntimeError("no memory\nand more lines")
        return tpu_check.Line(name, True, "1 ms", {})

    monkeypatch.setattr(tpu_check, "of_case", of_case)
    monkeypatch.setattr(tpu_check.correctness, "attention", lambda **_: [])
    lines = list(tpu_check.measure(["trm", "vit-s"], tmp_path))
    assert [(line.name, line.is_well) for line in lines[-2:]] == [("trm", False), ("vit-s", True)]
    assert lines[-2].text == "RuntimeError: no memory"


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("--cases=vit", "--cases=vit is unknown; expected of: vit-s"),
        ("--minutes=0", "--minutes=0.0: expected a number above 0"),
        ("--out=/no/such/check.json", "/no/such is no folder"),
    ],
)
def test_a_wrong_argument_is_named(argument, message, capsys):
    with pytest.raises(SystemExit, match="2"):
        tpu_check.parse([argument])
    assert message in capsys.readouterr().err
