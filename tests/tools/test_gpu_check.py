"""tools.gpu_check in its small form, and the parts that decide its result: bounds, processes that
fail, the table."""

import contextlib
import functools
import json
import math
import os
import pathlib
import subprocess
import sys
import time
import types

import numpy as np
import pytest

from tools import gpu_check, measure_card
from tools.chip import bits, cases, correctness, peers, results_file, results_rows, results_table

ROOT = pathlib.Path(__file__).parents[2]
REFUSE = gpu_check.refuse_a_taken_card


@pytest.mark.slow
def test_the_small_form_prints_a_table_and_writes_every_number(tmp_path):
    out = tmp_path / "numbers.json"
    command = [
        sys.executable,
        "tools/gpu_check.py",
        "--only=correctness,speed",
        "--models=trm",
        "--quick",
    ]
    done = subprocess.run(
        [*command, f"--out={out}"], cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(out.read_text())
    [part] = found["parts"]
    assert found["well"] and not found["failures"] and part["machine"]["platform"] == "cpu"
    assert part["units"] == ["correctness", "model trm"]
    assert min(part["machine"]["reached"].values()) > 0
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
    assert math.isfinite(trm["loss"])
    predicted = trm["predicted"]
    assert predicted["seconds"] == pytest.approx(sum(predicted["scopes"].values()), rel=0.5)
    assert predicted["flops"] == pytest.approx(trm["flops_per_step"], rel=0.5)
    assert predicted["forecast"] is None or predicted["forecast"]["seconds"] > 0
    for text in ("within their bounds", "trm: ", "rows/s", str(out), "small form"):
        assert text in done.stdout, text


@pytest.mark.slow
def test_the_front_end_in_the_step_is_measured_next_to_its_case(tmp_path):
    """The variant that tools/measure_card.py asks for, in its small form."""
    out = tmp_path / "x.json"
    command = [sys.executable, "tools/gpu_check.py", "--only=speed", "--models=bird", "--quick"]
    command += [f"--vary={measure_card.FRONT_END}", f"--out={out}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stdout + done.stderr
    models = json.loads(out.read_text())["models"]
    case, variant = models["vit-s"], models[measure_card.FRONT_END]
    assert variant["settings"] == {"data.form": "waveform"} and not case["settings"]
    assert variant["rows"] == case["rows"] and math.isfinite(variant["loss"])
    # the products of the front end are in the compiled step, and not in the model's FLOPs
    assert variant["predicted"]["flops"] > case["predicted"]["flops"]
    assert "× the speed of its case" in done.stdout


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
            return machine("cpu"), ""
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
    assert "left out" in said and "machine" in said and "the next call begins with it" in said


BITS_AND_KILLS = [f"{kind}{end} trm" for kind in ("bits", "kills") for end in ("", gpu_check.FIXED)]


@pytest.mark.parametrize(
    ("arguments", "platform", "expected"),
    [
        (
            ["--only=correctness,speed"],
            "gpu",
            ["correctness", *(f"model {case.name}" for case in cases.CASES)],
        ),
        (["--quick"], "gpu", ["correctness", "model vit-s", "model lm-1b-2k"]),
        (["--only=speed", "--models=language"], "gpu", ["model lm-1b-2k", "model lm-1b-8k"]),
        (["--only=speed"], "cpu", [f"model {name}" for name in gpu_check.SMALL_CASES]),
        (["--only=peers"], "gpu", [f"peers {name}" for name in peers.TWINS]),
        (["--only=peers", "--models=bird"], "cpu", ["peers vit-s"]),
        (["--only=bits,kills", "--models=trm"], "gpu", BITS_AND_KILLS),
        (["--only=feeding"], "gpu", ["feeding"]),
    ],
)
def test_only_the_selected_parts_are_run(arguments, platform, expected):
    found = {"parts": [{"machine": machine(platform)}], "correctness": None}
    found |= {"models": {}, "more": {}, "cut": {}}
    units = gpu_check.units(gpu_check.parse(arguments), found)
    assert [str(unit) for unit in units] == ["machine", *expected]


@pytest.mark.parametrize(
    "arguments",
    [
        ["--only=speeed"],
        ["--models=bert"],
        ["--out=/no/such/folder/x.json"],
        ["--vary", "vit-z model.unroll=1"],
        ["--vary", "vit-s unroll"],
    ],
)
def test_bad_arguments_list_the_allowed_values(arguments, capsys):
    with pytest.raises(SystemExit) as exit_:
        gpu_check.main(arguments)
    assert exit_.value.code == 2
    said = capsys.readouterr().err
    assert any(
        text in said
        for text in (
            "expected one of: correctness",
            "expected one of: bird",
            "is no folder",
            "expected one of: vit-s",
            "write it as vit-s model.unroll=1",
        )
    )


def machine(platform, chip=None):
    return {
        "platform": platform,
        "device": "NVIDIA H100 80GB HBM3" if chip else "cpu",
        "chip": chip,
        "cores": 16,
        "versions": {"jax": "0.11.2"},
        "datasheet_flops_per_second": 989e12 if chip else None,
        "datasheet_bytes_per_second": 3350e9 if chip else None,
        "reached": {"flops_per_second": 732e12, "bytes_per_second": 3020e9},
    }


FORECAST = {"seconds": 0.061, "error": 0.12, "calibration": "NVIDIA H100: within 12% on 6 steps"}


def found_on(platform, chip=None):
    case = {
        "part": 0,
        "settings": {},
        "predicted": {"seconds": 0.05, "seconds_of_bytes": 0.04, "forecast": FORECAST},
        "choice": {"train.batch": "1024"},
        "parameters": 22e6,
        "rows": 1024,
        "unit": "spectrograms",
        "units_per_second": 14_000.0,
        "seconds_per_step": 0.0731,
        "flops_per_second": 200e12,
        "full_flops_per_second": 300e12,
        "document_flops_per_second": 200e12,
        "refused": [],
        "memory": {"least": 40e9, "compiler": 41e9, "allocator": 42e9, "of": 75e9},
        "compile_seconds": {"cold": 30.0, "cached": 3.0},
    }
    variant = {**case, "settings": {"model.unroll": "1"}, "units_per_second": 7_000.0}
    part = {"when": "2026-01-01", "seconds": 400.0, "machine": machine(platform, chip)}
    return {
        "form": "full",
        "parts": [part],
        "correctness": None,
        "failures": [],
        "left_out": [],
        "skipped": {},
        "models": {"vit-s": case, "vit-s model.unroll=1": variant},
        "more": {},
    }


def test_the_table_has_speed_memory_and_goals():
    text = results_table.text(found_on("gpu", "h100"))
    assert "gpu_check on NVIDIA H100 80GB HBM3 (16 cores)" in text
    assert "14,000 spectrograms/s" in text and "MFU causal 20.2% full 30.3%" in text
    assert "goal 28% MFU: missed" in text
    assert "least 40, compiler 41, allocator 42" in text
    assert "73.1 ms a step, 1.46 × its roofline (80% of it bytes)" in text
    assert "1.20 × its forecast, NVIDIA H100: within 12% on 6 steps" in text
    assert "732 TFLOP/s; 3,020 GB/s" in text and "74% of the datasheet's" in text
    assert "0.50 × the speed of its case" in text


@pytest.mark.parametrize(
    ("name", "change", "expected"),
    [
        ("vit-s", {"flops_per_second": 0.281 * 989e12}, "goal 28% MFU: reached"),
        ("vit-b", {"flops_per_second": 0.405 * 989e12}, "goal 41% MFU: missed"),
        ("lm-1b-2k", {"flops_per_second": 0.551 * 989e12}, "goal 55% causal MFU: reached"),
        ("lm-1b-8k", {"flops_per_second": 0.6 * 989e12}, "goal 55% MFU by documents: missed"),
        ("trm", {"flops_per_second": 0.271 * 989e12}, "goal 27% MFU: reached"),
        ("higgs-lora", {"flops_per_second": 0.359 * 989e12}, "goal 36% causal MFU: missed"),
        ("giblet", {"seconds_per_step": 0.0599, "rows": 64}, "goal 60 ms a step: reached"),
        ("giblet", {"seconds_per_step": 0.0601, "rows": 64}, "goal 60 ms a step: missed"),
        ("giblet", {"seconds_per_step": 0.03, "rows": 32}, "not judged, it is for 64 rows"),
    ],
)
def test_each_goal_of_an_h100_is_judged_by_its_own_figure(name, change, expected):
    """The figures of docs/results/h100.md: full MFU would count pairs that nobody computes."""
    found = found_on("gpu", "h100")
    full = {"full_flops_per_second": 989e12}
    found["models"] = {name: {**found["models"]["vit-s"], **full, **change}}
    assert expected in results_table.text(found)
    column = [line.split("|")[6] for line in GOAL_LINES if name in line.split("|")[1]]
    assert column and f"{results_table.GOALS[name].amount:.2g}".removeprefix("0.") in column[0]


PAGE = (ROOT / "docs" / "results" / "h100.md").read_text()
GOAL_LINES = PAGE.partition("| goal | limit |")[2].partition("\n\n")[0].splitlines()[2:]


def test_the_table_has_the_speed_by_the_documents_own_pairs():
    """Else pairs of two documents, which a kernel skips, would count as speed."""
    found = found_on("gpu", "h100")
    found["models"]["vit-s"]["document_flops_per_second"] = 100e12
    assert "MFU causal 20.2% by documents 10.1% full 30.3%" in results_table.text(found)


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


@pytest.fixture
def measured(monkeypatch):
    """Units that are measured at once, by this device. Each call of a process is listed."""
    asked = []

    def run(unit, args, folder, seconds):
        asked.append(str(unit))
        if unit.kind == "machine":
            return machine("gpu", "h100"), ""
        if unit.kind in ("peers", "bits", "kills", "feeding") or unit.kind.endswith("-fixed"):
            return results_of(unit), ""
        if unit.kind == "correctness":
            return [{"name": "loss", "found": 0.0, "bound": 1.0, "note": "", "well": True}], ""
        return found_on("gpu", "h100")["models"]["vit-s"], ""

    monkeypatch.setattr(gpu_check, "run", run)
    monkeypatch.setattr(gpu_check, "refuse_a_taken_card", lambda: None)
    return asked


def test_the_next_call_begins_with_what_the_last_one_did_not_reach(tmp_path, measured, monkeypatch):
    out, arguments = tmp_path / "x.json", ["--only=correctness,speed", "--models=bird"]
    clock = iter([0, 0, 0, 0, 0, 0, 0])

    def times():  # the last two units of the first call come too late
        return next(clock, gpu_check.LIMIT)

    with monkeypatch.context() as patch:
        patch.setattr(gpu_check.time, "time", times)
        assert gpu_check.main([*arguments, f"--out={out}"]) == 3
    first = json.loads(out.read_text())
    reached = ["machine", "correctness", "model vit-s", "model vit-b"]
    assert measured + first["left_out"] == reached and first["left_out"]
    measured.clear()
    assert gpu_check.main([*arguments, f"--out={out}"]) == 0
    assert measured == ["machine", *first["left_out"]]
    found = json.loads(out.read_text())
    assert set(found["models"]) == {"vit-s", "vit-b"} and len(found["parts"]) == 2
    measured.clear()
    assert gpu_check.main([*arguments, "--anew", f"--out={out}"]) == 0
    assert measured == reached


def test_a_unit_that_failed_comes_last_in_the_next_call(tmp_path, measured, monkeypatch):
    """Else one that takes minutes to fail would keep the others from being reached."""
    arguments = ["--only=speed", "--models=bird", f"--out={tmp_path / 'x.json'}"]
    run = gpu_check.run

    def fail(unit, *rest):
        return (None, "no room") if str(unit) == "model vit-s" else run(unit, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(gpu_check, "run", fail)
        assert gpu_check.main([*arguments]) == 1
    assert measured == ["machine", "model vit-b"]
    found = json.loads((tmp_path / "x.json").read_text())
    (tmp_path / "x.json").write_text(json.dumps({**found, "models": {}}))
    measured.clear()
    assert gpu_check.main([*arguments]) == 0
    assert measured == ["machine", "model vit-b", "model vit-s"]


def test_peers_without_pytorch_are_named_with_the_remedy_and_asked_again(
    tmp_path, measured, monkeypatch, capsys
):
    """Else a card that gets PyTorch between two calls would keep its empty row."""
    out = tmp_path / "x.json"
    arguments = ["--only=peers", "--models=trm", f"--out={out}"]
    run = gpu_check.run

    def without(unit, *rest):
        skipped = {"case": unit.case, "skipped": peers.missing(is_gpu=True)}
        return (skipped, "") if unit.kind == "peers" else run(unit, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(gpu_check, "run", without)
        patch.setattr(peers.importlib.util, "find_spec", lambda _: None)
        assert gpu_check.main(arguments) == 3
    last = capsys.readouterr().out.strip().splitlines()[-1]
    assert last.startswith("left: peers trm: PyTorch is not installed; pip install")
    assert not json.loads(out.read_text())["more"]
    measured.clear()
    assert gpu_check.main(arguments) == 0 and measured == ["machine", "peers trm"]
    assert "left: " not in capsys.readouterr().out


def cut(patch, names, after=gpu_check.LIMIT - 30):
    """End these units as `gpu_check.run` does, in a call that has 30 s left."""
    run, began = gpu_check.run, time.time()

    def too_long(unit, args, folder, seconds):
        if unit.kind == "machine":
            patch.setattr(gpu_check.time, "time", lambda: began + after)
        if str(unit) in names:
            return None, f"a line\nwas ended after its {seconds:.0f} s"
        return run(unit, args, folder, seconds)

    patch.setattr(gpu_check, "run", too_long)


def test_a_unit_that_the_calls_end_cuts_is_no_failure_and_the_first_of_the_next(
    tmp_path, measured, monkeypatch
):
    out = tmp_path / "x.json"
    arguments = ["--only=correctness,speed", "--models=bird", f"--out={out}"]
    with monkeypatch.context() as patch:
        cut(patch, ["model vit-b"])
        assert gpu_check.main(arguments) == 3
    found = json.loads(out.read_text())
    assert found["left_out"] == ["model vit-b"] and not found["failures"]
    # so that it is first for another reason than that there are no others
    out.write_text(json.dumps({**found, "models": {}, "correctness": None}))
    measured.clear()
    assert gpu_check.main(arguments) == 0
    assert measured == ["machine", "model vit-b", "correctness", "model vit-s"]


def test_a_unit_that_had_all_of_its_time_and_took_longer_is_a_failure(
    tmp_path, measured, monkeypatch
):
    arguments = ["--only=speed", "--models=bird", f"--out={tmp_path / 'x.json'}"]
    cut(monkeypatch, ["model vit-s"], after=0)
    assert gpu_check.main(arguments) == 1
    found = json.loads((tmp_path / "x.json").read_text())
    assert [one["unit"] for one in found["failures"]] == ["model vit-s"] and not found["left_out"]
    assert found["tries"] == {"model vit-s": 1}


def test_a_unit_that_two_calls_cut_lets_the_others_go_first(
    tmp_path, measured, monkeypatch, capsys
):
    """A short call can never end it. The text says so."""
    out = tmp_path / "x.json"
    arguments = ["--only=speed", "--models=bird", f"--out={out}"]
    for _ in range(2):
        with monkeypatch.context() as patch:
            cut(patch, ["model vit-s"])
            assert gpu_check.main(arguments) == 3
    said = capsys.readouterr().out
    assert "left: model vit-s, cut 2 times: it may take 100 s, give a longer call" in said
    out.write_text(json.dumps({**json.loads(out.read_text()), "models": {}}))
    measured.clear()
    assert gpu_check.main(arguments) == 0
    assert measured == ["machine", "model vit-b", "model vit-s"]


def test_a_variant_is_measured_beside_its_case_and_kept(tmp_path, measured):
    out = tmp_path / "x.json"
    arguments = ["--only=speed", "--models=bird", f"--out={out}"]
    assert gpu_check.main(arguments) == 0
    measured.clear()
    assert gpu_check.main([*arguments, "--vary", "vit-s model.unroll=1"]) == 0
    assert measured == ["machine", "model vit-s", "model vit-s model.unroll=1"]
    measured.clear()
    assert gpu_check.main([*arguments, "--vary", "vit-s model.unroll=1"]) == 0
    assert measured == ["machine"]


def test_a_call_that_is_cut_off_has_written_what_it_measured(tmp_path, measured, monkeypatch):
    out, run = tmp_path / "x.json", gpu_check.run

    def cut(unit, *rest):
        if str(unit) == "model vit-b":
            raise KeyboardInterrupt
        return run(unit, *rest)

    monkeypatch.setattr(gpu_check, "run", cut)
    with pytest.raises(KeyboardInterrupt):
        gpu_check.main(["--only=speed", "--models=bird", f"--out={out}"])
    assert set(json.loads(out.read_text())["models"]) == {"vit-s"}


def test_a_call_that_is_terminated_ends_the_process_that_has_the_card(tmp_path):
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\necho $$ > {tmp_path}/pid\nexec sleep 60\n")
    python.chmod(0o755)
    program = (
        f"from tools import gpu_check; gpu_check.sys.executable = {str(python)!r};"
        f" gpu_check.refuse_a_taken_card = lambda: None; gpu_check.main(['--out={tmp_path}/x'])"
    )
    with subprocess.Popen([sys.executable, "-c", program], cwd=ROOT) as call:
        pid = eventually(lambda: (tmp_path / "pid").read_text().strip())
        call.terminate()
        assert call.wait(60) == 128 + 15
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid), 0)


def eventually(read, seconds=60):
    """Return the first result that is not empty."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError):
            if result := read():
                return result
        time.sleep(0.05)
    raise TimeoutError


def test_figures_of_two_machines_or_codes_are_never_in_one_file(
    tmp_path, measured, monkeypatch, capsys
):
    out = tmp_path / "x.json"
    arguments = ["--only=speed", "--models=giblet", f"--out={out}"]
    assert gpu_check.main(arguments) == 0
    before = out.read_text()
    other = {**machine("gpu", "h100"), "device": "NVIDIA H200"}
    with monkeypatch.context() as patch:
        patch.setattr(gpu_check, "run", lambda *_: (other, ""))
        assert gpu_check.main(arguments) == 2
    said = capsys.readouterr().err
    assert "H100" in said and "NVIDIA H200" in said and "--out" in said
    assert out.read_text() == before
    monkeypatch.setattr(results_file, "code", lambda: "another")
    measured.clear()
    assert gpu_check.main(arguments) == 0
    assert measured == ["machine", "model giblet"], "other code is measured anew"
    out.write_text("{}")
    assert gpu_check.main(arguments) == 2
    assert "has no figures of this check" in capsys.readouterr().err


def nvidia_smi(folder, monkeypatch, text):
    """Put a program of this name and output first on the path."""
    program = folder / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n{text}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(folder), prepend=":")


def test_a_card_that_somebody_else_uses_is_refused_with_their_processes(
    tmp_path, monkeypatch, capsys
):
    nvidia_smi(tmp_path, monkeypatch, "echo '4711, python3, 61234 MiB'")
    assert gpu_check.main([f"--out={tmp_path / 'x.json'}"]) == 2
    said = capsys.readouterr().err
    assert "taken by 4711, python3, 61234 MiB" in said and "CUDA_VISIBLE_DEVICES" in said


def test_a_card_in_use_by_a_process_that_is_not_listed_is_refused(
    tmp_path, monkeypatch, measured, capsys
):
    """The driver lists no process of another container. A card in use by nobody has some memory."""
    monkeypatch.setattr(gpu_check, "refuse_a_taken_card", REFUSE)
    arguments = ["--only=speed", "--models=giblet", f"--out={tmp_path / 'x.json'}"]
    answer = 'case "$*" in *query-gpu*) echo "0, NVIDIA H100 80GB HBM3, {} MiB";; esac'
    nvidia_smi(tmp_path, monkeypatch, answer.format(61234))
    assert gpu_check.main(arguments) == 2
    said = capsys.readouterr().err
    assert "the card is taken: 0, NVIDIA H100 80GB HBM3, 61234 MiB" in said
    assert "another container" in said
    nvidia_smi(tmp_path, monkeypatch, answer.format(600))
    assert gpu_check.main(arguments) == 0


def test_a_process_whose_memory_the_driver_does_not_state_takes_the_card(
    tmp_path, monkeypatch, capsys
):
    """As in an instance (MIG) or another container."""
    nvidia_smi(tmp_path, monkeypatch, "echo '4711, python3, [N/A]'")
    assert gpu_check.main([f"--out={tmp_path / 'x.json'}"]) == 2
    assert "taken by 4711, python3, [N/A]" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ("echo no driver; exit 9", "nvidia-smi ended with code 9 (no driver)"),
        (
            'case "$*" in *query-gpu*) echo "0, NVIDIA GH200 480GB, [N/A]";; esac',
            "nvidia-smi states no memory in use (0, NVIDIA GH200 480GB, [N/A])",
        ),
    ],
)
def test_a_driver_that_does_not_answer_is_said_and_not_taken_as_a_free_card(
    tmp_path, monkeypatch, measured, capsys, answer, expected
):
    monkeypatch.setattr(gpu_check, "refuse_a_taken_card", REFUSE)
    nvidia_smi(tmp_path, monkeypatch, answer)
    arguments = ["--only=speed", "--models=giblet", f"--out={tmp_path / 'x.json'}"]
    assert gpu_check.main(arguments) == 0
    said = capsys.readouterr().err
    assert f"{expected}: whether somebody else computes on the card is not known" in said


def test_a_free_card_is_taken_though_another_one_is_used(tmp_path, monkeypatch, measured):
    of_card_0 = 'case "$*" in *--id=1*) ;; *) echo "4711, python3, 61234 MiB";; esac'
    nvidia_smi(tmp_path, monkeypatch, of_card_0)
    monkeypatch.setattr(gpu_check, "refuse_a_taken_card", REFUSE)
    arguments = ["--only=speed", "--models=giblet", f"--out={tmp_path / 'x.json'}"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    assert gpu_check.main(arguments) == 2
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert gpu_check.main(arguments) == 0


def test_a_case_that_no_size_of_fits_a_smaller_card_is_named(tmp_path, monkeypatch):
    """The largest of the others is measured with fewer rows."""
    import jax

    from tools.chip import speed

    tiny = types.SimpleNamespace(memory=10_000)
    monkeypatch.setattr(speed.plan_lib, "parse_target", lambda _: tiny)
    bound = types.SimpleNamespace(peak=20_000)
    config = types.SimpleNamespace(train=types.SimpleNamespace(batch=3, accumulate=1))
    assembly = types.SimpleNamespace(config=config)
    chosen = types.SimpleNamespace(bound=bound, assembly=assembly, choice={})
    monkeypatch.setattr(speed.cases, "choose", lambda *_: chosen)
    case = next(case for case in cases.CASES if case.name == "trm")
    data = cases.Data(tmp_path, small=True)
    one = speed.measure(case, data, jax.devices()[0], (1e9, 1e9), more={}, quick=True)
    assert one["too_large"] == {"least": 20_000, "of": 10_000}
    found = found_on("gpu", "h100")
    found["models"]["giblet"] = {**one, "too_large": {"least": 33.4e9, "of": 24e9}}
    text = results_table.text(found)
    assert "needs 33.4 GB at least" in text and "the card has 24" in text


def test_rows_that_do_not_fit_are_halved(monkeypatch):
    import jax

    full = jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory")
    monkeypatch.setattr(cases, "smaller", lambda rows: rows // 2 or None)
    monkeypatch.setattr(cases, "put_together", lambda rows, device, choice: Rows(rows))

    def measure(limit, error, rows):
        if rows > limit:
            raise error
        return int(rows)

    measured = functools.partial(cases.with_fewer_rows, Rows(64), None)
    assert measured(functools.partial(measure, 20, full)) == 16
    with pytest.raises(jax.errors.JaxRuntimeError, match="RESOURCE"):
        measured(functools.partial(measure, 4, full))
    other = jax.errors.JaxRuntimeError("INTERNAL")
    with pytest.raises(jax.errors.JaxRuntimeError, match="INTERNAL"):
        measured(functools.partial(measure, 20, other))


class Rows(int):
    """Stand for a case of so many rows."""

    choice = None


def test_a_forecast_that_is_a_tenth_off_is_named():
    found = found_on("gpu", "h100")
    text = results_table.text(found)
    # 73.1 ms measured, 61 by the forecast; 42 GB measured are within a tenth of 40 and 41
    assert "vit-s: time, forecast" in text and "+20%" in text and "+46%" not in text
    assert "vit-s: memory" not in text
    found["models"]["vit-s"]["memory"]["allocator"] = 50e9
    text = results_table.text(found)
    assert "vit-s: memory, least" in text and "40 GB planned, 50 measured" in text
    lines = [line for line in text.splitlines() if "vit-s: memory" in line]
    assert ["layers that are written out" in line for line in lines] == [True, False]
    close = {**FORECAST, "seconds": 0.07}
    found["models"]["vit-s"]["predicted"]["forecast"] = close
    assert "vit-s: time" not in results_table.text(found), "the bound alone is further off"


@pytest.mark.parametrize("forecast", [None, {**FORECAST, "seconds": 0.07, "error": None}])
def test_a_chip_without_a_fit_is_held_to_its_bound_and_called_uncalibrated(forecast):
    found = found_on("gpu", "h100")
    found["models"]["vit-s"]["predicted"]["forecast"] = forecast
    text = results_table.text(found)
    assert "vit-s: time, the bound alone (uncalibrated)" in text and "+46%" in text


def results_of(unit):
    """Figures of a unit that went well, in the form of its process."""
    if unit.kind == "peers":
        ours = {"units_per_second": 100.0, "rows": 8, "losses": [2.0, 1.0], "dtype": "bfloat16"}
        side = {"units_per_second": 50.0, "rows": 8, "refused": [], "bytes": 3e9}
        return {
            **{"case": unit.case, "unit": "rows", "rows": 8, "ours": ours, "again": ours},
            **{"theirs": {"eager": side}, "failures": {}, "ours_by_theirs": {"eager": 2.0}},
            **{"losses": {"eager": 1e-3}, "bound": 2e-2},
            **{"gradients": {"eager": 1e-2}, "gradient_bound": 5e-2},
        }
    if unit.part == "bits":
        seconds = 0.3 if unit.kind.endswith("-fixed") else 0.2
        return {
            **{"case": unit.case, "seconds_per_step": seconds, "arrays": 30, "repeats": 4},
            **{"differing": 0, "earliest": None},
        }
    if unit.part == "kills":
        result = {"same": True, "broken": False, "lines": ["each ended with the same bits"]}
        return {"case": unit.case, "prove": result, "replay": result}
    ways = {"rows_per_second": 500.0, "rows_per_cpu_second": 490.0}
    slower = {**ways, "rows_per_cpu_second": 430.0}
    by_threads = {"1": dict.fromkeys(WAYS, ways), "8": dict.fromkeys(WAYS, slower)}
    names = ("ogg spectrogram", "wav waveform")
    return {
        **{"cores": 16, "physical": 8, "goal": 0.9, "rows": dict.fromkeys(names, by_threads)},
        "of_one_thread": dict(zip(names, (430 / 490, None), strict=True)),
    }


WAYS = ("threads", "processes", "digests")


def test_peers_bits_kills_and_feeding_are_in_the_table(tmp_path, measured, capsys):
    out = tmp_path / "x.json"
    arguments = ["--only=peers,bits,kills,feeding", "--models=bird", f"--out={out}"]
    assert gpu_check.main(arguments) == 0
    text = capsys.readouterr().out
    for expected in (
        *(
            "vit-b: ours ÷ PyTorch's",
            "eager 2.00",
            "losses 1.0e-03, gradients' norms 1.0e-02 apart",
            "3 GB",
        ),
        *("vit-s, fixed order: 300.0 ms a step", "a step takes 1.50 × that of XLA's own order"),
        *("vit-s, XLA's order: replay", "the same bits", "500 rows/s, 490 a CPU s"),
        *("16 cores, 8 of them physical", "goal 0.90: missed", "not compared with the goal"),
    ):
        assert expected in text, expected
    measured.clear()
    assert gpu_check.main(arguments) == 0
    assert measured == ["machine"], "the next call takes them over"


@pytest.mark.parametrize(
    ("kind", "change", "expected"),
    [
        ("peers", {"losses": {"eager": 0.5}}, "losses of eager are 5.0e-01 apart"),
        ("peers", {"losses": {"eager": math.nan}}, "losses of eager are nan apart"),
        ("peers", {"gradients": {"eager": 0.06}}, "gradients of eager are 6.0e-02 apart"),
        ("peers", {"losses": {"eager": None}, "gradients": {"eager": None}}, ""),
        ("bits-fixed", {"differing": 1}, "steps do not repeat in XLA's fixed order"),
        ("bits", {"differing": 1}, ""),
        ("kills-fixed", {"prove": {"same": False, "broken": False, "lines": ["x"]}}, "prove"),
        ("kills", {"prove": {"same": False, "broken": False, "lines": ["x"]}}, ""),
        ("kills", {"replay": {"same": False, "broken": True, "lines": ["x"]}}, "replay"),
    ],
)
def test_bits_must_repeat_in_the_fixed_order_alone(kind, change, expected):
    unit = gpu_check.Unit(kind, "vit-s")
    found = results_rows.problems({**results_of(unit), **change, "kind": kind})
    assert bool(found) == bool(expected) and expected in "".join(found)


def test_processes_in_the_fixed_order_have_the_documented_option(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu_check, "platforms", lambda: "cuda,cpu")
    flags = {
        kind: gpu_check.environment(gpu_check.Unit(kind, "trm"), tmp_path)["XLA_FLAGS"]
        for kind in ("bits", "bits-fixed", "kills-fixed", "model")
    }
    assert {kind for kind, text in flags.items() if gpu_check.FIXED_ORDER in text} == {
        "bits-fixed",
        "kills-fixed",
    }
    page = (ROOT / "docs" / "accelerator.md").read_text()
    assert f"XLA_FLAGS={gpu_check.FIXED_ORDER}" in page


def test_a_digest_by_array_names_the_layer_that_differs():
    table = {"blocks": {"w_q": np.ones((3, 4, 4), "f4")}, "embed": np.arange(8, dtype="f4")}
    digests = [bits.named(table)]
    assert set(digests[0]) == {"embed", *(f"blocks/w_q[{i}]" for i in range(3))}
    table["blocks"]["w_q"][1, 2, 3] = np.nextafter(np.float32(1), np.float32(2))
    found = bits._first_difference(digests, [bits.named(table)])
    assert (found["step"], found["names"], found["has_loss"]) == (1, ["blocks/w_q[1]"], False)
    table["blocks"]["w_q"][1] = table["blocks"]["w_q"][1][::-1]
    assert bits.named(table)["blocks/w_q[1]"] != digests[0]["blocks/w_q[1]"], "places count"
    assert bits._first_difference(digests, digests) is None
