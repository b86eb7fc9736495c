"""tools.gpu_check in its small form, and the parts that decide its result: bounds, traces,
processes that fail, claims in README."""

import json
import math
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tools import gpu_check
from tools.chip import cases, correctness, operations, results_table

ROOT = pathlib.Path(__file__).parents[2]


def test_the_small_form_prints_a_table_and_writes_every_number(tmp_path):
    out = tmp_path / "numbers.json"
    command = [
        sys.executable,
        "tools/gpu_check.py",
        "--only=ceilings,correctness,speed,profile",
        "--models=trm",
        "--quick",
    ]
    done = subprocess.run(
        [*command, f"--out={out}"], cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(out.read_text())
    assert found["well"] and not found["failures"] and found["machine"]["platform"] == "cpu"
    assert {one["name"] for one in found["correctness"]} >= {
        "trm float32: loss",
        "trm float32: gradients",
        "attention packed",
    }
    assert all(one["well"] and one["found"] <= one["bound"] for one in found["correctness"])
    trm = found["models"]["trm"]
    assert trm["units_per_second"] == pytest.approx(trm["rows"] / trm["seconds_per_step"])
    assert trm["flops_per_second"] == pytest.approx(trm["flops_per_step"] / trm["seconds_per_step"])
    assert 0 < trm["memory"]["least"] <= trm["memory"]["compiler"]
    assert math.isfinite(trm["loss"]) and found["ceilings"]["product"]["flops_per_second"] > 1e9
    assert 0 < trm["profile"]["matrix"] < 1 and trm["profile"]["next"]
    for text in (
        "ceilings",
        "within their bounds",
        "trm: ",
        "rows/s",
        "of the product",
        "in matrix units",
        str(out),
        "small form",
    ):
        assert text in done.stdout, text


@pytest.mark.slow
def test_the_small_form_feeds_a_step_and_resumes_a_run(tmp_path):
    out = tmp_path / "numbers.json"
    command = [sys.executable, "tools/gpu_check.py", "--only=feeding,state", f"--out={out}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(out.read_text())
    assert set(found["feeding"]) == {"float32", "bfloat16", "waveform"}
    assert all(
        0 < form["rows_per_second"] and 0 <= form["wait_share"] <= 1
        for form in found["feeding"].values()
    )
    assert found["state"]["same_bits"] and found["state"]["restore_seconds"] > 0


def test_a_gradient_that_differs_is_found_and_named():
    rng = np.random.default_rng(0)
    grads = {"a": rng.normal(size=(4, 4)).astype("f4"), "b": rng.normal(size=8).astype("f4")}
    off = {**grads, "b": grads["b"] * np.float32(1.01)}
    loss, gradient = correctness.compare("x", (2.0, grads), (2.0, off), "float32")
    assert (
        loss.well
        and not gradient.well
        and gradient.note.endswith("b")
        and gradient.found == pytest.approx(0.01, rel=0.01)
    )
    loss, gradient = correctness.compare(
        "x", (2.0, grads), (2.1, {**grads, "a": grads["a"] * np.nan}), "float32"
    )
    assert not loss.well and not gradient.well and "finite" in gradient.note
    assert all(
        check.well for check in correctness.compare("x", (2.0, grads), (2.0, grads), "float32")
    )


def test_a_process_that_fails_or_hangs_is_reported_and_ends_no_other(tmp_path):
    args = gpu_check.parse(["--quick"])
    result, why = gpu_check.run(gpu_check.Unit("model", "no-such-case"), args, tmp_path, 60)
    assert result is None and "StopIteration" in why and why.endswith("ended with code 1")
    result, why = gpu_check.run(gpu_check.Unit("correctness"), args, tmp_path, 0.2)
    assert result is None and why.endswith("was ended after its 0 s")


@pytest.mark.parametrize("broken", ["check", "part"])
def test_a_failed_check_and_a_part_that_cannot_run_are_its_exit_code(
    broken, tmp_path, monkeypatch, capsys
):
    bad = {
        "name": "trm float32: loss",
        "found": 0.5,
        "bound": 1e-5,
        "note": "",
        "well": broken != "check",
    }

    def run(unit, args, folder, seconds):
        if unit.kind == "machine":
            return {
                "platform": "cpu",
                "device": "cpu",
                "cores": 1,
                "chip": None,
                "versions": {},
            }, ""
        return (
            ([bad], "") if broken == "check" else (None, "RuntimeError: no room\nended with code 1")
        )

    monkeypatch.setattr(gpu_check, "run", run)
    assert gpu_check.main(["--only=correctness", f"--out={tmp_path / 'x.json'}"]) == 1
    said = capsys.readouterr().out
    assert (
        ("FAILED: 0.5" in said)
        if broken == "check"
        else ("no room" in said and "did not run" in said)
    )


def test_time_that_is_over_leaves_parts_out_by_name(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(gpu_check, "QUICK_LIMIT", 4)
    assert gpu_check.main(["--quick", f"--out={tmp_path / 'x.json'}"]) == 3
    said = capsys.readouterr().out
    assert "left out" in said and "machine" in said and "the time of the whole run was over" in said


@pytest.mark.parametrize(
    ("arguments", "platform", "expected"),
    [
        (
            [],
            "gpu",
            [
                "ceilings",
                "correctness",
                *(f"model {case.name}" for case in cases.CASES),
                "feeding",
                "state",
            ],
        ),
        (
            ["--quick"],
            "gpu",
            ["ceilings", "correctness", "model vit-s", "model lm-1b-2k", "feeding"],
        ),
        (["--quick", "--only=feeding,state"], "gpu", ["feeding", "state"]),
        (["--only=profile", "--models=language"], "gpu", ["model lm-1b-2k", "model lm-1b-8k"]),
        (["--only=speed"], "cpu", [f"model {name}" for name in gpu_check.SMALL_CASES]),
        (["--only=feeding,state", "--models=trm"], "gpu", []),
    ],
)
def test_only_the_selected_parts_are_run(arguments, platform, expected):
    units = gpu_check.units(gpu_check.parse(arguments), {"machine": {"platform": platform}})
    assert [str(unit) for unit in units] == ["machine", *expected]


@pytest.mark.parametrize(
    "arguments", [["--only=speeed"], ["--models=bert"], ["--out=/no/such/folder/x.json"]]
)
def test_bad_arguments_list_the_allowed_values(arguments, capsys):
    with pytest.raises(SystemExit) as exit_:
        gpu_check.main(arguments)
    assert exit_.value.code == 2
    said = capsys.readouterr().err
    assert any(
        text in said
        for text in ("expected one of: ceilings", "expected one of: bird", "is no folder")
    )


def timed(*rows):
    return [operations.Operation(name, f"scope/{name}", start, end) for name, start, end in rows]


def test_a_trace_is_summed_up_by_kind_gaps_and_overlap():
    found = operations.summary(
        timed(
            ("nvjet_hsh_128x256", 0, 40),
            ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop", 40, 60),
            ("loop_fusion_3", 60, 70),
            ("loop_convert_fusion", 70, 80),
            ("MemcpyH2D", 30, 50),
            ("MemcpyH2D", 85, 95),
            ("loop_fusion_4", 90, 100),
        )
    )
    assert found.seconds == pytest.approx(100e-9) and found.idle == pytest.approx(0.05)
    assert found.longest_gap == pytest.approx(5e-9)
    assert found.matrix == pytest.approx(60 / 120)
    assert found.kinds["copy to the device"] == pytest.approx(30 / 120) and found.kinds[
        "other"
    ] == pytest.approx(30 / 120)
    # 20 ns during the products, and 5 of the other 10 during a fusion
    assert found.overlap == pytest.approx(25 / 30)
    assert found.top[0][:3] == ("nvjet_hsh_128x256", "scope/nvjet_hsh_128x256", "product")
    assert ("loop_fusion", "scope/loop_fusion_3", "other", pytest.approx(20 / 120), 2) in found.top
    assert "outside matrix units" in operations.advice(found)


def test_of_a_cpus_operations_the_products_are_products():
    rows = timed(("dot_general.3", 0, 1), ("onednn_matmul", 1, 2), ("copy_bitcast_fusion", 2, 3))
    assert [each.kind for each in rows] == ["product", "product", "copy"]


def test_ynnpacks_operations_are_in_its_scope(tmp_path):
    """Its fusions have one name, for a product as for a sum.

    The programs have different names. If two have the same name and one came from the compilation
    cache, its trace has the number under which it was compiled, so it may be confused with the
    other.
    """

    def product(x):
        return x @ x

    def total(x):
        return (x * x).sum()

    x = jnp.ones((256, 256))
    options = {
        "xla_cpu_experimental_ynn_fusion_type": "LIBRARY_FUSION_TYPE_REDUCE,LIBRARY_FUSION_TYPE_DOT"
    }
    for name, program, kind in (("product", product, "product"), ("sum", total, "other")):
        compiled = jax.jit(program).lower(x).compile(compiler_options=options)
        with jax.profiler.trace(tmp_path / name):
            jax.block_until_ready([compiled(x) for _ in range(5)])
        rows = [each for each in operations.read(tmp_path / name) if "ynn" in each.name]
        assert {each.kind for each in rows} == {kind} and operations.summary(rows).matrix == (
            kind == "product"
        )


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ([("gemm", 0, 10), ("gemm", 60, 100)], "gaps"),
        ([("gemm", 0, 50), ("nccl_AllReduce", 50, 100)], "between devices: 50%"),
        ([("gemm", 0, 98), ("loop_fusion", 98, 100)], "nothing stands out"),
        ([("CudaGraph:5", 0, 100)], "xla_gpu_enable_command_buffer="),
    ],
)
def test_a_trace_suggests_the_next_thing_to_look_at(rows, said):
    assert said in operations.advice(operations.summary(timed(*rows)))


def machine(platform, chip=None):
    return {
        "platform": platform,
        "device": "NVIDIA H100 80GB HBM3" if chip else "cpu",
        "chip": chip,
        "cores": 16,
        "versions": {"jax": "0.11.2"},
        "datasheet_flops_per_second": 989e12 if chip else None,
        "datasheet_bytes_per_second": 3350e9 if chip else None,
    }


def found_on(platform, chip=None):
    product = {"dtype": "bfloat16", "flops_per_second": 700e12, "by_size": {"8192": 700e12}}
    speed = {
        "choice": {"train.batch": "1024"},
        "parameters": 22e6,
        "rows": 1024,
        "unit": "spectrograms",
        "units_per_second": 14_000.0,
        "seconds_per_step": 0.0731,
        "flops_per_second": 200e12,
        "full_flops_per_second": 300e12,
        "refused": [],
        "memory": {"least": 40e9, "compiler": 41e9, "allocator": 42e9, "of": 75e9},
        "compile_seconds": {"cold": 30.0, "cached": 3.0},
    }
    return {
        "when": "2026-01-01",
        "form": "full",
        "seconds": 400.0,
        "machine": machine(platform, chip),
        "failures": [],
        "left_out": [],
        "ceilings": {
            "product": product,
            "copy": {"bytes_per_second": 3e12},
            "from_host": {"bytes_per_second": 2e10},
        },
        "models": {"vit-s": speed},
    }


def test_readme_tells_what_a_chip_was_measured_at_and_what_was_not():
    text = results_table.markdown(found_on("gpu", "h100"))
    assert "one NVIDIA H100 80GB HBM3 with 16 cores" in text and "14,000 spectrograms/s" in text
    assert (
        "MFU causal 20.2% full 30.3%" in text and "of the product causal 28.6% full 42.9%" in text
    )
    assert (
        "goal 13,000 spectrograms/s: reached" in text
        and "least 40, compiler 41, allocator 42" in text
    )
    [missing] = [
        line for line in text.splitlines() if line.startswith("Not measured on a chip yet: ")
    ]
    names = {
        part.split(" of ")[0]: part.partition(" of ")[2].rstrip(".").split(", ")
        for part in missing[28:].split("; ")
    }
    assert "lm-1b-8k" in names["speed"] and "vit-s" not in names["speed"]
    assert names["state"] == [""] or names["state."] == [""]


def test_readme_tells_no_figure_of_a_cpu(tmp_path):
    numbers, readme = tmp_path / "x.json", tmp_path / "README.md"
    numbers.write_text(json.dumps(found_on("cpu")))
    readme.write_text(f"a\n{results_table.BEGIN}\nold\n{results_table.END}\nb\n")
    assert results_table.write_readme(numbers, readme) == 0
    text = readme.read_text()
    assert (
        text.startswith("a\n")
        and text.endswith("\nb\n")
        and "old" not in text
        and "14,000" not in text
    )
    assert len(list(results_table.expected())) == 2 * len(cases.CASES) + 6
    assert "| part |" not in text, "no table until there is a figure"
    readme.write_text("no marks")
    assert results_table.write_readme(numbers, readme) == 2 and readme.read_text() == "no marks"


def test_readmes_section_is_what_the_command_writes():
    section = (
        (ROOT / "docs" / "results" / "h100.md")
        .read_text()
        .partition(results_table.BEGIN)[2]
        .partition(results_table.END)[0]
        .strip()
    )
    if "Measured on one" not in section:
        assert section == results_table.markdown(found_on("cpu"))
        return
    left = next(
        (line for line in section.splitlines() if line.startswith("Not measured on a chip yet: ")),
        "",
    )
    for part, what in results_table.expected():
        measured = any(
            line.startswith(f"| {part} |") and (what or "") in line for line in section.splitlines()
        )
        assert measured or part in left and (what or "") in left, (part, what)


def test_cases_are_named_once_and_every_small_one_exists():
    names = [case.name for case in cases.CASES]
    assert len(set(names)) == len(names)
    assert {
        *gpu_check.SMALL_CASES,
        *gpu_check.QUICK_CASES,
        *correctness.MODELS,
        *results_table.GOALS,
    } <= set(names)
    assert {case.model for case in cases.CASES} == {"bird", "language", "trm", "higgs", "giblet"}
