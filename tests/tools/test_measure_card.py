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

from tests import docs_data
from tools import child_group, gpu_check, show_runs
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
    asked, codes, changes = [], {}, {}

    def run(command, _):
        name = command[2] if command[2].endswith("gpu_check") else command[3]
        asked.append(name.removeprefix("tools."))
        code = codes.get(asked[-1], 0)
        if asked[-1] == "gpu_check" and code != 2:
            out = next(word for word in command if word.startswith("--out="))
            found = {**CHECKED, **changes}
            found["left_out"] = ["peers trm"] if code == 3 and not changes else []
            pathlib.Path(out[6:]).write_text(json.dumps(found))
        return code

    monkeypatch.setattr(child_group, "run", run)
    monkeypatch.setattr(gpu_check, "refuse_a_taken_card", lambda: None)
    monkeypatch.setattr(show_runs, "this_device", lambda: ("NVIDIA H100 80GB HBM3", "h100"))
    arguments = [f"--out={tmp_path / 'out'}", f"--page={tmp_path / 'h100.md'}"]
    return types.SimpleNamespace(asked=asked, codes=codes, changes=changes, arguments=arguments)


BOARDS = ["sudoku-medium", "sudoku-hard"]


def test_all_is_measured_once_and_in_order(on_card, tmp_path, capsys):
    docs_data.birds(tmp_path)
    birds = tmp_path / "data" / "esc10"
    arguments = [*on_card.arguments, f"--text={__file__}", f"--birds={birds}"]
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


def test_a_step_that_is_refused_is_taken_again_and_the_others_go_on(on_card, capsys):
    on_card.codes["sudoku-medium"] = 2
    assert card.main(on_card.arguments) == 2
    assert on_card.asked == ["gpu_check", *BOARDS]
    assert "refused: sudoku-medium" in capsys.readouterr().out
    on_card.asked.clear()
    on_card.codes.clear()
    assert card.main(on_card.arguments) == 0 and on_card.asked == ["sudoku-medium"]


@pytest.mark.parametrize(
    ("code", "changes", "said"),
    [
        (3, {"skipped": {"peers trm": "PyTorch is not installed"}}, "peers trm: PyTorch is not"),
        (1, {"tries": {"model trm": 1}}, "model trm: it failed, and is tried once more"),
    ],
)
def test_the_others_go_first_and_the_next_call_asks_the_check_again(
    on_card, capsys, code, changes, said
):
    on_card.codes["gpu_check"] = code
    on_card.changes |= changes
    assert card.main(on_card.arguments) == 3
    assert on_card.asked == ["gpu_check", *BOARDS]
    assert f"left: {said}" in capsys.readouterr().out
    on_card.asked.clear()
    on_card.codes.clear()
    on_card.changes.clear()
    assert card.main(on_card.arguments) == 0 and on_card.asked == ["gpu_check"]


def test_a_unit_that_failed_twice_is_a_failure(on_card, capsys):
    on_card.codes["gpu_check"] = 1
    on_card.changes |= {"tries": {"model trm": 2}}
    assert card.main(on_card.arguments) == 1
    assert "failed: check;" in capsys.readouterr().out
    on_card.asked.clear()
    assert card.main(on_card.arguments) == 1 and not on_card.asked


def test_figures_of_two_devices_are_never_in_one_folder_or_section(
    on_card, tmp_path, monkeypatch, capsys
):
    assert card.main(on_card.arguments) == 0
    other = "NVIDIA H100 NVL"
    monkeypatch.setattr(show_runs, "this_device", lambda: (other, "h100nvl"))
    on_card.asked.clear()
    assert card.main(on_card.arguments) == 2 and not on_card.asked
    said = capsys.readouterr().err
    assert "has steps of NVIDIA H100 80GB HBM3, and this machine has NVIDIA H100 NVL" in said
    assert card.main([f"--out={tmp_path / 'other'}", on_card.arguments[1]]) == 0
    page = (tmp_path / "h100.md").read_text()
    for device in ("NVIDIA H100 80GB HBM3", other):
        assert page.count(f"<!-- run check, {device} begins -->") == 1


@pytest.mark.parametrize(
    ("device", "expected"),
    [
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA A100-SXM4-40GB", "nvidia-a100-sxm4-40gb"),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", "nvidia-h100-80gb-hbm3-mig-1g.10gb"),
        ("Tesla V100-SXM2-16GB", "tesla-v100-sxm2-16gb"),
        ("cpu", "cpu"),
    ],
)
def test_a_page_is_of_one_kind_and_size_of_card(device, expected):
    assert show_runs.page_name(device) == expected


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
        (["--page=/no/such/x.md"], "--page=/no/such/x.md: /no/such is no folder; make it first"),
        (["--only=speeed"], "expected one of: correctness"),
        (["--models=bert"], "expected one of: bird"),
        ([f"--text={ROOT}"], f"--text={ROOT}: config.data"),
        ([f"--birds={ROOT / 'docs'}"], "a folder without Arrow or Parquet shards"),
    ],
)
def test_bad_arguments_have_a_remedy(arguments, expected, capsys):
    with pytest.raises(SystemExit):
        card.main(arguments)
    assert expected in capsys.readouterr().err


@pytest.mark.parametrize("call_of", ["card.main([", "show_runs.main(['sudoku-hard', "])
@pytest.mark.parametrize("ignores", [False, True])
def test_a_call_that_is_terminated_ends_its_child_and_what_that_started(tmp_path, ignores, call_of):
    """The stand-in for a step writes its own id and that of a process of its own."""
    python = tmp_path / "python"
    ignoring = "trap '' TERM" if ignores else ":"
    python.write_text(
        f"#!/bin/sh\n{ignoring}\nsleep 60 &\necho $$ $! > {tmp_path}/new\n"
        f"mv {tmp_path}/new {tmp_path}/pids\nwait\nsleep 60\n"
    )
    python.chmod(0o755)
    program = (
        "from tools import child_group, measure_card as card, show_runs;"
        f" card.sys.executable = {str(python)!r}; child_group.GRACE = 0.5;"
        " card.gpu_check.refuse_a_taken_card = lambda: None;"
        " show_runs.this_device = lambda: ('NVIDIA H100', 'h100');"
        f" {call_of}'--out={tmp_path / 'out'}', '--page={tmp_path / 'page.md'}'])"
    )
    with subprocess.Popen([sys.executable, "-c", program], cwd=ROOT) as call:
        deadline = time.monotonic() + 60
        while not (tmp_path / "pids").exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        pids = [int(pid) for pid in (tmp_path / "pids").read_text().split()]
        call.terminate()
        assert call.wait(60) == 128 + 15
    for pid in pids:
        assert has_ended(pid), pid


def test_a_call_that_is_killed_has_its_child_asked_to_end(tmp_path):
    if not sys.platform.startswith("linux"):
        pytest.skip("of Linux alone")
    program = (
        "import pathlib; from tools import child_group;"
        f" child_group.run(['sh', '-c', 'echo $$ > {tmp_path}/pid; exec sleep 60'],"
        " pathlib.Path('.'))"
    )
    with subprocess.Popen([sys.executable, "-c", program], cwd=ROOT) as call:
        deadline = time.monotonic() + 60
        path = tmp_path / "pid"
        while not (path.exists() and path.read_text().strip()) and time.monotonic() < deadline:
            time.sleep(0.05)
        call.kill()
    assert has_ended(int(path.read_text()))


def has_ended(pid, seconds=10):
    """Wait until a process is not there, or only its exit status is."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            status = pathlib.Path(f"/proc/{pid}/stat").read_text()
        except FileNotFoundError:
            return True
        if status.rpartition(")")[2].split()[0] == "Z":
            return True
        time.sleep(0.05)
    return False


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
    for name in (f"{card.CHECK}, cpu", *(f"{name}, seed 0, cpu" for name in BOARDS)):
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
