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

from jaxtrain import plan
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
    assert [line["name"] for line in lines] == [*rates, *kernels, *tpu_check.CASES]
    states = {line["name"]: line["state"] for line in lines}
    assert all(states[name] == "ok" for name in kernels)
    assert {state for name, state in states.items() if name not in kernels} == {"not compared"}
    assert lines[0]["numbers"]["devices"] == 4 and lines[4]["numbers"]["found"] > 0
    assert all(line["numbers"]["seconds"] > 0 for line in lines[len(rates + kernels) :])
    assert "failed: nothing" in done.stdout


def device(*coords, slice_index=0):
    return types.SimpleNamespace(
        coords=coords, slice_index=slice_index, device_kind="TPU v5 lite", platform="tpu"
    )


def places(*sides, slice_index=0):
    x, y, z = sides
    return [
        device(i, j, k, slice_index=slice_index)
        for i in range(x)
        for j in range(y)
        for k in range(z)
    ]


@pytest.mark.parametrize(
    ("chip", "devices", "name"),
    [
        ("v5e", places(2, 2, 1), "tpu:v5e:2x2"),
        ("v5e", places(4, 2, 1), "tpu:v5e:2x4"),
        ("v4", places(2, 2, 4), "tpu:v4:2x2x4"),
        ("v5p", places(1, 1, 1), "tpu:v5p:1x1x1"),
        ("tpu7x", 2 * places(2, 2, 1), "tpu:tpu7x:2x2x1"),  # two devices on a chip
        ("v5e", places(2, 2, 1) + places(2, 2, 1, slice_index=1), "tpu:v5e:2x2*2"),
        ("v5e", places(3, 2, 1), ""),
        ("v5e", [device(0, 0, 0), device(1, 1, 0)], ""),
        ("v5e", 2 * places(2, 2, 1), ""),
        ("v5e", places(2, 2, 2), ""),
        ("tpu7x", places(2, 2, 1), ""),
        ("v5e", places(2, 2, 1) + places(2, 4, 1, slice_index=1), ""),
        ("v5e", places(2, 2, 1) + [device(0, 0, 0, slice_index=1)] * 4, ""),
    ],
)
def test_slices_are_named_by_the_places_of_their_chips(chip, devices, name):
    """Before, two slices and two corners of one were four chips of a whole slice."""
    assert tpu_check.slice_name(devices, chips.by_name(chip)) == name
    state = "ok" if name else "FAILED"
    assert tpu_check.of_slice(devices, chips.by_name(chip)).state == state
    if name:
        assert plan.parse_target(name).count == len(devices)


@pytest.mark.parametrize(("n_slices", "table"), [(1, 100e9), (2, 0.0)])
def test_links_of_several_slices_are_compared_with_nothing(n_slices, table, monkeypatch):
    """Their gather goes over the network, too."""
    devices = [one for i in range(n_slices) for one in places(2, 2, 1, slice_index=i)]
    monkeypatch.setattr(jax, "devices", lambda: devices)
    monkeypatch.setattr(tpu_check, "gathered", lambda **_: 1e9)
    line = tpu_check.of_links(chips.by_name("v5e"), is_small=False)
    assert line.numbers == {"found": 1e9, "table": table}


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


def test_checks_are_in_the_order_of_their_worth(tmp_path):
    """Ten minutes reach each kernel, and then steps of three workloads that have kernels."""
    assert set(tpu_check.CASES) == set(tpu_check.tpu_steps.SETTINGS)
    cases = tpu_check.parse([]).cases
    shapes = correctness.attention_shapes(quick=False)
    kernels = [correctness.attention_kernel(one, ("tpu", "v5e")) for one in shapes.values()]
    assert set(kernels[:3]) == set(kernels) == {"short", "pair_blocks", "splash"}
    checks = list(tpu_check.units(cases, tmp_path))
    assert checks[:3] == ["slice", "memory", "rates"] and checks[-7:] == cases
    assert cases[:3] == ["vit-s", "lm-1b-2k", "trm"]


def test_minutes_are_a_limit_for_the_begin_of_checks(capsys):
    with pytest.raises(SystemExit):
        tpu_check.parse(["--help"])
    assert "begins no check after so many" in " ".join(capsys.readouterr().out.split())


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


WORKERS = """
import sys, time, types, jax
from jaxtrain import plan
from tools import tpu_check
from tools.chip import cases

tpu_check.HEARTBEAT = 10
tpu_check.join()
tpu_check.join = lambda: None
tpu_check.say = lambda text: print(text, flush=True)  # of all workers
worker = jax.process_index()

class Steps(cases.Steps):
    n = 0
    def __init__(self, *args):
        pass
    def __call__(self):
        self.n += 1
        time.sleep(0.001 + 0.02 * worker)

chosen = types.SimpleNamespace(assembly=None, bound=types.SimpleNamespace(peak=0))
tpu_check.put_together = lambda *args: chosen
cases.compiled = cases.first_batch = lambda *args: None

def case(name, steps):
    def check():
        cases.Steps = steps
        return [tpu_check.of_case(name, cases.Data(None, small=True), plan.parse_target(""))]
    return check

def other():
    yield tpu_check.Line("other", "ok", "", {})
"""
TOGETHER = """
def steps():
    each = Steps()
    each.seconds(0.1)
    yield tpu_check.Line("steps", "ok", str(each.n), {})

def alone():
    tpu_check.together(lambda: 1 // (1 - worker))
    jax.experimental.multihost_utils.sync_global_devices("a step of both")

def memory():
    state = "FAILED" if worker else "ok"
    yield tpu_check.Line("memory", state, f"{10 + worker} GiB", {"limit": 10 + worker})

class WithoutRoom(Steps):
    def __init__(self, *args):
        if worker == 1:
            raise RuntimeError("RESOURCE_EXHAUSTED: its state")

checks = dict(
    steps=steps, memory=memory, alone=alone, state=case("state", WithoutRoom), other=other
)
tpu_check.units = lambda *args: checks
minutes = 1e-9 if worker else 10
sys.exit(tpu_check.main([f"--out={sys.argv[1]}/{worker}.json", f"--minutes={minutes}"]))
"""
ENDS = """
wrong, by = int(sys.argv[2]), sys.argv[3]

class Stuck(Steps):
    def __call__(self):
        if worker == wrong and by == "error":
            raise RuntimeError("a chip alone")
        time.sleep(1000)  # inside the program of all workers

def alone():
    time.sleep(1000 * (worker == wrong))
    yield tpu_check.Line("alone", "ok", "", {})

if by == "deadline":
    tpu_check.LONGEST = 10.0
checks = dict(other=other, vit=alone if by == "deadline" else case("vit", Stuck))
tpu_check.units = lambda *args: checks
sys.exit(tpu_check.main([f"--out={sys.argv[1]}/{worker}.json"]))
"""


def of_two_workers(program, *arguments, within):
    """The exit code, stdout and stderr of each worker."""
    port = free_port()
    workers = [
        subprocess.Popen(
            [sys.executable, "-c", WORKERS + program, *map(str, arguments)],
            cwd=ROOT,
            env={**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": xla_flags(1), **at(port, i)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for i in range(2)
    ]
    try:
        outputs = [worker.communicate(timeout=within) for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
    return [(worker.returncode, *output) for worker, output in zip(workers, outputs, strict=True)]


def test_workers_of_one_slice_take_as_many_steps_and_fail_together(tmp_path):
    """Before, each counted steps by its own clock, and waited for one that had failed. A line that
    failed on another worker than 0 was lost."""
    outputs = of_two_workers(TOGETHER, tmp_path, within=120)
    lines, others = (re.findall(".* (?:ok|FAILED) .*", output) for _, output, _ in outputs)
    assert lines == others and len(lines) == 5, outputs
    n_steps, *others = (re.sub(" +", " ", line) for line in lines)
    assert n_steps.startswith("steps ok ")
    assert others[0] == "memory FAILED worker 1: 11 GiB"
    assert others[1].startswith("alone FAILED worker 1: ZeroDivisionError")
    assert others[2] == "state FAILED worker 1: RuntimeError: RESOURCE_EXHAUSTED: its state"
    assert others[3].strip() == "other ok"
    assert [code for code, _, _ in outputs] == [1, 1], outputs
    assert json.loads((tmp_path / "0.json").read_text())[1]["numbers"] == {"limit": 11}


@pytest.mark.parametrize(
    ("wrong", "by"),
    [
        (1, "error"),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in ((0, "error"), (1, "deadline"))),
    ],
)
def test_all_workers_end_if_one_fails_in_a_step_or_never_comes(wrong, by, tmp_path):
    """The others are inside the step, or in an exchange after it, and waited without end."""
    outputs = of_two_workers(ENDS, tmp_path, wrong, by, within=60)
    code, _, errors = outputs[wrong]
    reason = "no end after 10 s" if by == "deadline" else "RuntimeError: a chip alone"
    assert code == 1 and f"worker {wrong}: vit: {reason}" in errors.splitlines(), outputs
    assert outputs[1 - wrong][0], outputs
    assert [line["name"] for line in json.loads((tmp_path / "0.json").read_text())] == ["other"]


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
