"""The check of a TPU slice: its small form on CPU devices, and what it says of places and rates."""

import json
import os
import pathlib
import re
import subprocess
import sys
import types

import jax
import pytest

from jaxtrain.parallel import chips, layout
from tests.support.processes import at, free_port, xla_flags
from tools import tpu_check
from tools.chip import correctness

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
    rates = ["slice", "memory", "product", "copy", "links"]
    kernels = ["attention vit", "attention packed", "mixer"]
    assert [line["name"] for line in lines] == [*rates, *kernels, *tpu_check.tpu_steps.SETTINGS]
    states = {line["name"]: line["state"] for line in lines}
    assert all(states[name] == "ok" for name in kernels)
    assert {state for name, state in states.items() if name not in kernels} == {"not compared"}
    assert lines[0]["numbers"]["devices"] == 4 and lines[4]["numbers"]["found"] > 0
    assert all(line["numbers"]["seconds"] > 0 for line in lines[len(rates + kernels) :])
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
    assert tpu_check.of_slice(places(*sides), chips.by_name(chip)).state == (
        "ok" if name else "FAILED"
    )


def test_a_rate_far_below_the_table_fails():
    assert tpu_check.rate("copy", 700e9, 819e9, "bytes/s").text == "7e+11 bytes/s, 85% of 8.19e+11"
    assert tpu_check.rate("copy", 700e9, 819e9, "bytes/s").state == "ok"
    assert tpu_check.rate("copy", 400e9, 819e9, "bytes/s").state == "FAILED"
    assert tpu_check.rate("links", 1.0, 0.0, "bytes/s").state == "not compared", "no table has it"


def test_less_memory_than_the_plan_grants_fails():
    chip = chips.by_name("v5e")
    for stats, state in (
        ({"bytes_limit": chip.memory}, "ok"),
        ({"bytes_limit": 0.9 * chip.memory}, "FAILED"),
        (None, "not compared"),
    ):
        device = types.SimpleNamespace(memory_stats=lambda stats=stats: stats)
        assert tpu_check.of_memory(device, chip).state == state


def fails(*args, **kwargs):
    raise RuntimeError("Mosaic failed\nand more lines")


def test_a_check_that_fails_is_named_and_the_next_one_begins(monkeypatch, tmp_path):
    """Also a kernel that the compiler refuses, and the gather, which ended the whole check."""

    def of_case(name, data, target):
        return fails() if name == "trm" else tpu_check.Line(name, "ok", "1 ms", {})

    monkeypatch.setattr(tpu_check, "of_case", of_case)
    monkeypatch.setattr(tpu_check, "gathered", fails)
    monkeypatch.setattr(tpu_check.correctness, "attention_of", fails)
    monkeypatch.setattr(tpu_check.correctness, "mixer", lambda **_: None)
    monkeypatch.setattr(tpu_check.ceilings, "measure", fails)
    checks = tpu_check.units(["trm", "vit-s"], tmp_path)
    lines = list(tpu_check.measure(checks, lambda: False))
    failed = ["rates", "links", "attention vit", "attention packed", "trm"]
    assert [line.name for line in lines if line.state == "FAILED"] == failed
    texts = {line.text for line in lines if line.state == "FAILED"}
    assert texts == {"RuntimeError: Mosaic failed"}
    states = {line.name: line.state for line in lines}
    assert states["mixer"] == "not run" and states["vit-s"] == "ok"


@pytest.mark.parametrize(("n_checks", "left", "code"), [(3, [], 0), (1, ["b", "c"], 3)])
def test_checks_that_are_left_when_the_time_is_over_are_named(
    n_checks, left, code, monkeypatch, tmp_path
):
    """The time may be over as the last one ends: then nothing is left."""
    times = iter([0.0] * (n_checks + 1) + [1e9] * 9)
    monkeypatch.setattr(tpu_check.time, "monotonic", lambda: next(times))
    one = {name: lambda name=name: [tpu_check.Line(name, "ok", "", {})] for name in "abc"}
    monkeypatch.setattr(tpu_check, "units", lambda *_: one)
    monkeypatch.setattr(tpu_check, "join", lambda: None)
    out = tmp_path / "check.json"
    assert tpu_check.main([f"--out={out}"]) == code
    lines = json.loads(out.read_text())
    assert [line["name"] for line in lines if line["state"] == "not run"] == left


def test_a_step_is_compared_with_the_times_of_its_program():
    def state(seconds, loss=1.0, **times):
        return tpu_check.state_of_step({"seconds": seconds, "loss": loss, **times})

    times = {"roofline": 0.1, "cycles": 0.3}
    assert state(0.5, **times) == "ok" and state(0.7, **times) == "FAILED"
    assert state(0.5) == "not compared" and state(0.5, loss=float("nan")) == "FAILED"


def test_rows_of_a_chip_are_those_of_the_tables_on_any_slice():
    assert [tpu_check.rows("higgs-lora", 32, count) for count in (1, 4, 64)] == [8, 32, 512]
    assert [tpu_check.rows("giblet", 64, count) for count in (4, 16, 256)] == [16, 64, 1024]


def test_a_gather_over_many_chips_fits_each_of_them():
    assert tpu_check.gathered_bytes(4) == 1 << 26
    assert all(256 <= tpu_check.gathered_bytes(n) * n <= 1 << 30 for n in (16, 48, 256, 9216))


TWO_WORKERS = """
import sys, time, jax
from tools import tpu_check
from tools.chip import cases

tpu_check.join()
worker = jax.process_index()

class Steps(cases.Steps):
    n = 0
    def __init__(self):
        pass
    def __call__(self):
        self.n += 1
        time.sleep(0.001 + 0.02 * worker)

def steps():
    each = Steps()
    each.seconds(0.1)
    yield tpu_check.Line("steps", "ok", str(each.n), {})

def alone():
    tpu_check.together(lambda: 1 // (1 - worker))
    jax.experimental.multihost_utils.sync_global_devices("a step of both")

def after():
    yield tpu_check.Line("after", "ok", "", {})

checks = dict(steps=steps, alone=alone, after=after)
for line in tpu_check.measure(checks, lambda: worker == 1):
    print(line.name, line.state, line.text, flush=True)
"""


def test_workers_of_one_slice_take_as_many_steps_and_fail_together():
    """Before, each counted steps by its own clock, and waited for one that had failed."""
    port = free_port()
    workers = [
        subprocess.Popen(
            [sys.executable, "-c", TWO_WORKERS],
            cwd=ROOT,
            env={**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": xla_flags(1), **at(port, i)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for i in range(2)
    ]
    try:
        outputs = [worker.communicate(timeout=120) for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
    lines, others = (re.findall(".* (?:ok|FAILED) .*", output) for output, _ in outputs)
    assert lines == others and len(lines) == 3, outputs
    n_steps, failed, after = lines
    assert n_steps.startswith("steps ok ")
    assert failed.startswith("alone FAILED worker 1: ZeroDivisionError")
    assert after.strip() == "after ok"


@pytest.mark.parametrize(
    ("version", "tokens", "state", "text"),
    [
        ("v4", 608, tpu_check.NOT_RUN, "the chip has no room for short; xla: error "),
        ("v5e", 700, tpu_check.FAILED, "; a kernel was expected"),
    ],
)
def test_a_chip_without_room_for_a_kernel_fails_no_check(version, tokens, state, text, monkeypatch):
    shape = correctness.AttentionShape(1, tokens, 2, 2, 64, causal=True, packed=False)
    found = correctness.Check("attention", 1e-3, 2e-2, "")
    monkeypatch.setattr(correctness, "attention_of", lambda name, shape: found)
    monkeypatch.setattr(correctness.one_device, "host", lambda: layout.Devices("tpu", version))
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    line = tpu_check.of_attention("attention", shape)
    assert line.state == state and text in line.text


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
