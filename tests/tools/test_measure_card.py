"""The one command for a card: its order, a call that is cut off, and what it refuses."""

import json
import os
import pathlib
import signal
import subprocess
import sys
import time
import types

import pytest

from tools import gpu_check, show_runs
from tools import measure_card as card

ROOT = pathlib.Path(__file__).parents[2]
MACHINE = {"platform": "gpu", "device": "NVIDIA H100 80GB HBM3", "chip": "h100", "cores": 16}
MACHINE |= {"datasheet_flops_per_second": 989e12, "datasheet_bytes_per_second": 3350e9}
MACHINE |= {"reached": {"flops_per_second": 732e12, "bytes_per_second": 3020e9}, "versions": {}}
PART = {"when": "2026-01-01", "seconds": 400.0, "machine": MACHINE, "units": []}
CHECKED = {"form": "full", "parts": [PART], "correctness": None, "models": {}, "more": {}}
CHECKED |= {"failures": [], "left_out": [], "cut": {}, "tries": {}, "skipped": {}}


@pytest.fixture
def on_card(monkeypatch, tmp_path):
    """A card whose steps end at once, with the codes of a table. Each is listed."""
    asked, codes = [], {}

    def run(command, **_):
        name = command[2] if command[2].endswith("gpu_check") else command[3]
        asked.append(name.removeprefix("tools."))
        code = codes.get(asked[-1], 0)
        if asked[-1] == "gpu_check" and code != 2:
            out = next(word for word in command if word.startswith("--out="))
            found = {**CHECKED, "left_out": ["peers trm"] if code == 3 else []}
            pathlib.Path(out[6:]).write_text(json.dumps(found))
        return types.SimpleNamespace(returncode=code)

    monkeypatch.setattr(card.subprocess, "run", run)
    monkeypatch.setattr(gpu_check, "refuse_a_taken_card", lambda: None)
    monkeypatch.setattr(show_runs, "this_device", lambda: ("NVIDIA H100 80GB HBM3", "h100"))
    arguments = [f"--out={tmp_path / 'out'}", f"--page={tmp_path / 'h100.md'}"]
    return types.SimpleNamespace(asked=asked, codes=codes, arguments=arguments)


BOARDS = ["sudoku-medium", "sudoku-hard"]


def test_all_is_measured_once_and_in_order(on_card, tmp_path, capsys):
    arguments = [*on_card.arguments, f"--text={__file__}", f"--birds={tmp_path}"]
    assert card.main(arguments) == 0
    assert on_card.asked == ["gpu_check", *BOARDS, "characters", "birds"]
    assert "all is done; failed: nothing" in capsys.readouterr().out
    assert "## The check of this card" in (tmp_path / "h100.md").read_text()
    on_card.asked.clear()
    assert card.main(arguments) == 0 and not on_card.asked


def test_the_check_measures_the_front_end_in_the_step_too(tmp_path):
    check, *_ = card.steps(card.parse([]), tmp_path, tmp_path / "h100.md")
    args = gpu_check.parse(check.command[1:])
    assert args.vary == ["vit-s data.form=waveform"] and set(args.only) == set(gpu_check.PARTS)


def test_the_next_call_goes_on_where_the_time_was_over(on_card, monkeypatch, capsys):
    on_card.codes["gpu_check"] = 3
    assert card.main(on_card.arguments) == 3
    on_card.codes |= {"gpu_check": 0, "sudoku-hard": 3}
    assert card.main(on_card.arguments) == 3
    assert "continues with sudoku-hard" in capsys.readouterr().out
    on_card.codes.clear()
    assert card.main(on_card.arguments) == 0
    assert on_card.asked == ["gpu_check", "gpu_check", *BOARDS, "sudoku-hard"]
    monkeypatch.setattr(card.results_file, "code", lambda: "another")
    on_card.asked.clear()
    assert card.main(on_card.arguments) == 0
    assert on_card.asked == ["gpu_check", *BOARDS], "other code is measured anew"


def test_a_step_that_fails_is_named_and_the_others_go_on(on_card, capsys):
    on_card.codes["sudoku-medium"] = 70
    assert card.main(on_card.arguments) == 1
    assert on_card.asked == ["gpu_check", *BOARDS]
    assert "failed: sudoku-medium;" in capsys.readouterr().out
    on_card.asked.clear()
    assert card.main(on_card.arguments) == 1 and not on_card.asked


def test_a_check_that_is_refused_is_asked_again(on_card):
    """Another machine wrote the file: nothing goes to the page, and the runs wait."""
    on_card.codes["gpu_check"] = 2
    assert card.main(on_card.arguments) == 2 and card.main(on_card.arguments) == 2
    assert on_card.asked == ["gpu_check", "gpu_check"]
    assert not pathlib.Path(on_card.arguments[1].removeprefix("--page=")).exists()


def test_each_kind_has_its_own_folder_and_page(on_card, tmp_path, monkeypatch):
    monkeypatch.setattr(card, "ROOT", tmp_path)
    monkeypatch.setattr(show_runs, "RESULTS", tmp_path)
    for device, kind in (("NVIDIA H100 80GB HBM3", "h100"), ("NVIDIA H200", "h200")):
        monkeypatch.setattr(show_runs, "this_device", lambda found=(device, kind): found)
        assert card.main([]) == 0
        assert (tmp_path / f"{kind}.md").read_text().startswith(f"# {device}\n")
        assert (tmp_path / "runs" / f"card-{kind}" / "done.json").exists()


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--text=/no/such"], "--text=/no/such: there is no such file or folder"),
        (["--small"], "give --page"),
        (["--minutes=0"], "--minutes=0.0: expected a number above 0"),
    ],
)
def test_bad_arguments_have_a_remedy(arguments, expected, capsys):
    with pytest.raises(SystemExit):
        card.main(arguments)
    assert expected in capsys.readouterr().err


def test_without_a_card_nothing_is_measured(on_card, monkeypatch, capsys):
    for device, expected in (("cpu", "give --small --page"), ("unknown", "JAX finds no device")):
        monkeypatch.setattr(show_runs, "this_device", lambda found=(device, device): found)
        assert card.main(on_card.arguments) == 2
        assert expected in capsys.readouterr().err
    assert not on_card.asked


def test_a_card_that_somebody_else_uses_is_named(tmp_path, monkeypatch, capsys):
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho '4711, python3, 61234 MiB'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert card.main([]) == 2
    assert "taken by 4711, python3, 61234 MiB" in capsys.readouterr().err


def test_a_list_of_steps_that_is_damaged_is_named(on_card, tmp_path, capsys):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "done.json").write_text("[1]")
    assert card.main(on_card.arguments) == 2
    assert "done.json lists no steps" in capsys.readouterr().err


@pytest.mark.slow
def test_all_of_it_on_a_cpu_killed_once(tmp_path):
    """One workload: a call is killed after its first figure, and the next ones end the rest."""
    out, page = tmp_path / "out", tmp_path / "cpu.md"
    command = [
        sys.executable,
        "-m",
        "tools.measure_card",
        "--small",
        "--models=trm",
        f"--out={out}",
    ]
    command += [f"--page={page}", "--only=correctness,speed,bits,kills"]
    with subprocess.Popen(command, cwd=ROOT, start_new_session=True) as call:
        deadline = time.monotonic() + 600
        while time.monotonic() < deadline and not figures(out)[:1]:
            time.sleep(0.1)
        os.killpg(call.pid, signal.SIGKILL)
    before = figures(out)
    assert before
    codes = [subprocess.run([*command, "--minutes=2"], cwd=ROOT).returncode]
    while codes[-1] == 3 and len(codes) < 20:
        codes.append(subprocess.run([*command, "--minutes=9"], cwd=ROOT).returncode)
    assert codes[-1] == 0, codes
    units = figures(out)
    assert units[: len(before)] == before and len(set(units)) == len(units), "none is taken twice"
    expected = ["correctness", "model trm"]
    expected += [f"{kind}{end} trm" for kind in ("bits", "kills") for end in ("", gpu_check.FIXED)]
    assert units == expected
    text = page.read_text()
    for name in (card.CHECK, *(f"{name}, seed 0" for name in BOARDS)):
        assert f"<!-- run {name} begins -->" in text
    assert json.loads((out / "done.json").read_text())["codes"] == dict.fromkeys(
        [card.CHECK, *BOARDS], 0
    )


def figures(out):
    """Return the units with figures, in their order."""
    if not (out / "check.json").exists():
        return []
    parts = json.loads((out / "check.json").read_text())["parts"]
    return [unit for part in parts for unit in part["units"]]
