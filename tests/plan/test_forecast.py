"""The forecast time of a step, by kind of kernel, and the error that is printed with it."""

import collections
import json
import math
import pathlib
import re
import statistics

import jax
import jax.numpy as jnp
import pytest

from jaxtrain import plan
from jaxtrain.parallel import chips
from jaxtrain.plan import calibration, cpu_work, estimate, hlo
from jaxtrain.plan import forecast as forecast_lib
from tests.plan.scheduled import WITHIN, done, kernel, start, text

MESH = {"data": 2, "fsdp": 4, "model": 1}


def test_a_chip_that_nobody_measured_has_the_bound_alone():
    """Each of three rounds moves 8 MB and waits for a sum of 4 MB over four GPUs, whose tree has
    six steps."""
    program = hlo.Program(text(start("a", WITHIN), done("a"), kernel("k")))
    found = forecast_lib.forecast(program, MESH, plan.parse_target("gpu:b200x8"))
    assert found.error is None and found.calibration == "uncalibrated: the bound alone"
    moving, sending = 3 * 8e6 / 7700e9, 3 * (6e6 / (0.82 * 900e9) + 6 * 1.2e-6)
    assert found.by_kind == pytest.approx({"exchange": sending, "map": moving})
    assert found.seconds == pytest.approx(moving + sending)
    assert found.exposed == pytest.approx(sending)


def test_a_card_outside_of_the_table_has_no_forecast_of_a_cpu(monkeypatch):
    monkeypatch.setattr(calibration, "load", lambda n: pytest.fail(f"the costs of {n} CPUs"))
    monkeypatch.setattr(plan.Target, "platform", "gpu")
    card = plan.Target("8 × NVIDIA GeForce RTX 4090", None, 8, here=True)
    program = hlo.Program(text(start("a", WITHIN), done("a"), kernel("k")))
    assert forecast_lib.forecast(program, MESH, card) is None
    machine = estimate.machine_of(card, {"data": 1, "fsdp": 1, "model": 1})
    assert machine.rates == forecast_lib.rates_of(chips.by_name("l40s"))
    assert machine.links.within < 32e9


def test_an_h100_reaches_the_share_of_its_rates_that_measured_steps_reached():
    program = hlo.Program(text(kernel("k")))
    found = forecast_lib.forecast(program, MESH, plan.parse_target("gpu:h100x8"))
    fit = forecast_lib.FITS["NVIDIA H100"]
    assert found.seconds == pytest.approx(3 * 8e6 / (fit.share * 3020e9))
    assert found.error == fit.error
    assert found.calibration.startswith("NVIDIA H100: within 12% on 6 steps, 35% too low with")
    assert "all of them on one card; exchanges are by" in found.calibration
    alone = forecast_lib.forecast(program, {"data": 1}, plan.parse_target("gpu:h100x1"))
    assert alone.seconds == found.seconds and "exchanges" not in alone.calibration
    other = forecast_lib.forecast(program, MESH, plan.parse_target("gpu:h100pciex1"))
    assert other.error is None, "of another kind, which nobody measured"


@pytest.mark.parametrize(
    ("target", "note"),
    [
        ("gpu:a100x8*2", "; the rate between nodes, 22.50 GB/s a device, is assumed"),
        ("tpu:v4:2x2x1*2", "; the rate between slices, 6.25 GB/s a device, is assumed"),
        ("gpu:a100x8", ""),
        ("gpu:h100x8*2", ""),
        ("tpu:tpu7x:2x2x1*2", ""),
    ],
)
def test_a_rate_of_a_network_that_no_page_states_is_printed_as_assumed(target, note):
    program = hlo.Program(text(kernel("k")))
    target = plan.parse_target(target)
    mesh = {"data": target.count, "fsdp": 1, "model": 1}
    found = forecast_lib.forecast(program, mesh, target)
    assert note in found.calibration
    assert ("is assumed" in found.calibration) == bool(note)


def test_the_fit_of_the_h100_is_that_of_the_published_steps():
    """Half of the steps forecast the others, both ways."""
    results = pathlib.Path(__file__).parents[2] / "docs" / "results"
    rooflines = dict(
        re.findall(
            r"^\| ([\w-]+), [^|]*\| [\d,]+ GB, (\d+) ms",
            (results / "compiled-steps.md").read_text(),
            re.MULTILINE,
        )
    )
    steps = re.findall(
        r"^\| speed \| ([\w-]+): .*?([\d.]+) steps/s",
        (results / "h100.md").read_text(),
        re.MULTILINE,
    )
    ratios = [
        1000 / float(rate) / float(rooflines[name]) for name, rate in steps if name in rooflines
    ]
    fit = forecast_lib.FITS["NVIDIA H100"]
    assert len(ratios) == fit.steps
    errors = []
    for half in (0, 1):
        factor = statistics.geometric_mean(ratios[half::2])
        errors += [abs(factor / ratio - 1) for ratio in ratios[1 - half :: 2]]
    assert len(errors) == fit.steps and fit.error - 0.01 < max(errors) <= fit.error
    assert 1 / statistics.geometric_mean(ratios) == pytest.approx(fit.share, abs=0.005)


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


def test_the_costs_of_work_are_found_again(monkeypatch):
    """Of kernels that take twice as long in a program, since they share the cores."""
    monkeypatch.setattr(calibration, "TYPICAL_WEIGHT", 1e-5)
    monkeypatch.setattr(calibration, "LEAST_SHARE", 1e-6)
    costs = {"launch": 2e-6, "map": 1e-10, "sum": 0.0}
    others = {"call": 3e-5, "rendezvous": 8e-5}
    works = [(1, 10, 5), (1, 1e6, 3e5), (1, 1e4, 1e6), (1, 1e7, 10)]
    calls = [(1, 0), (1, 5), (1, 40), (1, 2)]
    samples = []
    for times, (of_kernel, of_call) in enumerate(zip(works, calls, strict=True), 1):
        work = dict(zip(costs, of_kernel, strict=True))
        seconds = sum(costs[kind] * n for kind, n in work.items())
        rest = dict(zip(others, of_call, strict=True))
        whole = sum(others[kind] * n for kind, n in rest.items()) + 2 * times * seconds
        timed = [calibration.Timed(work, times, seconds)]
        samples.append(calibration.Sample(str(work), timed, rest, whole))
    found, error = calibration.fit(samples)
    doubled = {kind: 2 * cost for kind, cost in costs.items()}
    assert found == pytest.approx(doubled | others, rel=1e-3, abs=1e-14) and error < 1e-3


def test_the_work_of_a_cpu_program_is_counted_by_kind():
    def step(x, w):
        return jnp.exp(x @ w), jnp.cos(x)

    x, w = jnp.ones((64, 48)), jnp.ones((48, 40))
    program = hlo.Program(jax.jit(step).lower(x, w).compile().as_text())
    work = collections.Counter()
    for timed, of_one in cpu_work.works(program, 1):
        for kind, amount in of_one.items():
            work[kind.removeprefix(cpu_work.LIBRARY)] += timed.times * amount
    assert work["product"] == 2 * 64 * 48 * 40 and work["result of a product"] == 64 * 40
    assert work["exponential"] == 64 * 40 and work["most expensive"] == 64 * 48
    rest = cpu_work.work_without_kernels(program)
    assert rest["argument"] == 2 and rest["call"] == 1


def test_the_kernels_of_a_program_are_timed_by_their_names():
    def step(x, w):
        for _ in range(3):
            x = jnp.sort(x @ w, -1)
        return jnp.sum(x)

    arguments = jnp.ones((64, 64)), jnp.ones((64, 64))
    compiled = jax.jit(step).lower(*arguments).compile()
    program = hlo.Program(compiled.as_text())
    found = calibration.sample_of("step", program, 1, lambda: compiled(*arguments), 1e-3)
    assert len(found.kernels) == len(list(cpu_work.works(program, 1))) >= 3
    for timed in found.kernels:
        assert 0 < timed.seconds < 1


def test_each_device_of_a_group_meets_the_others_once_for_each_array():
    """A sum of three arrays of 4 kB over two devices, or over two pairs of four."""
    array = "f32[1000]{0}"
    sums = (
        f"  %a = ({array}, {array}, {array}) all-reduce(%x, %x, %x), replica_groups={{{{0,1}}}},"
        " to_apply=%add"
    )
    program = hlo.Program(text(sums))
    work = cpu_work.work_without_kernels(program)
    assert work["rendezvous"] == 3 * 3 * 2 and work["sending"] == 3 * 3 * 4000 * 2
    [collective] = hlo.collectives(program)
    assert cpu_work.Exchanges(1e-4, 1e-9).seconds(collective) == pytest.approx(6e-4 + 24e-6)
    pairs = hlo.Program(text(sums.replace("{{0,1}}", "{{0,1},{2,3}}")))
    assert cpu_work.work_without_kernels(pairs)["rendezvous"] == work["rendezvous"]


def test_a_machine_has_a_forecast_from_its_own_calibration_alone(tmp_path, monkeypatch):
    """With twice as many devices as were measured, each waits twice as long for a core."""
    monkeypatch.setenv("JAXTRAIN_CACHE", str(tmp_path))
    program = hlo.Program(jax.jit(lambda x: x * x).lower(jnp.ones(8)).compile().as_text())
    assert calibration.load(1) is None and "plan --calibrate" in calibration.refusal()
    fits = {n: {"costs": {"launch": 1e-3, "call": 0.5}, "error": 0.1, "programs": 7} for n in "124"}
    kinds = calibration.kinds_hash()
    content = {"machine": calibration.machine_key(), "kinds": kinds, "fits": fits}
    path = tmp_path / "calibrations" / "host.json"
    path.parent.mkdir()
    path.write_text(json.dumps(content))
    monkeypatch.setattr(calibration.machine, "cores", lambda: 2)
    content["machine"] = calibration.machine_key()
    path.write_text(json.dumps(content))
    for n_devices, ratio in ((1, 1), (2, 1), (3, 1.5), (4, 1), (8, 2)):
        found = forecast_lib.on_hosts(program, MESH, calibration.load(n_devices))
        assert found.seconds == pytest.approx(0.501 * ratio)
        assert list(found.by_kind) == ["call", "map"]
        assert "median error 10% on the 7 programs" in found.calibration
    one = fits["1"]
    several = one | {"costs": {"launch": 1e-3, "rendezvous": 1e-4}}
    path.write_text(json.dumps(content | {"fits": {"1": one, "8": several, "16": several}}))
    assert calibration.load(1).exchanges.rendezvous == 0
    assert calibration.load(3).exchanges.rendezvous == 1e-4, "fewer devices than any fit"
    of_costs = [{"1": one | {"costs": costs}} for costs in ({"launch": "-"}, {}, {"launch": -1e-3})]
    not_finite = [{"1": one | {"costs": {"launch": math.nan}}}, {"1": one | {"error": math.inf}}]
    for damaged in ({}, [], None, {"x": one}, {"1": {}}, {"0": one}, *of_costs, *not_finite):
        path.write_text(json.dumps(content | {"fits": damaged}))
        assert str(path) in calibration.refusal() and calibration.load(1) is None, damaged
    path.write_text(json.dumps(content | {"kinds": "earlier"}))
    assert "other kinds of work" in calibration.refusal() and calibration.load(1) is None
    content["machine"]["cores"] = -3
    path.write_text(json.dumps(content))
    assert "of another machine, since its cores is -3" in calibration.refusal()
    assert calibration.load(1) is None
    path.write_text("{")
    assert "cannot be read" in calibration.refusal() and calibration.load(1) is None


def test_processes_of_their_own_measure_this_machine(tmp_path, monkeypatch):
    """With a few programs in place of all."""
    few = "calibration.programs = lambda n: [*calibration._of_maps(n)][:2]; calibration.main()"
    assert calibration.PROGRAM.endswith("calibration.main()")
    monkeypatch.setattr(
        calibration, "PROGRAM", calibration.PROGRAM.replace("calibration.main()", few)
    )
    monkeypatch.setattr(calibration.machine, "cores", lambda: 1)  # so 1 and 2 devices
    monkeypatch.setenv("JAXTRAIN_CACHE", str(tmp_path))
    answer = calibration.calibrate()
    assert "median error of the fit by number of devices: 1 devices" in answer
    assert not calibration.refusal()
    for n_devices in (1, 2):
        assert calibration.load(n_devices).steps == 2
