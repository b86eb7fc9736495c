"""The table of steps compared with PyTorch: its figures, and that the page's table has this form.
PyTorch is not needed."""

import pathlib
import subprocess
import sys
import types

from tools import bench_train as bench_train
from tools.bench_train import Times

PAGE = pathlib.Path(__file__).resolve().parents[2] / "docs" / "results" / "cpu-steps.md"


def test_a_row_has_the_ratios_of_theirs_over_ours():
    ours, eager = Times([0.1, 0.2, 0.4], [0.2, 0.3, 0.5]), Times([0.3, 0.2, 0.1], [0.1, 0.3, 0.4])
    label, *cells = cells_of(
        bench_train.row("a", {"jaxtrain": ours, "PyTorch, eager": eager}, 2e9, 123.4, 1.26)
    )
    assert (label, cells[:4]) == ("a", ["1.00", "1.00", "0.25 to 3.00", "0.50"])
    assert cells[4:] == ["not compiled", "", "10, 10", "123", "1.3"]
    compiled = Times([0.05, 0.1, 0.1], [0.1, 0.1, 0.1])
    text = bench_train.row(
        "a", {"jaxtrain": ours, "eager": eager, "torch.compile": compiled}, 2e9, 123.4, 1.26
    )
    assert cells_of(text)[5:8] == ["0.50", "0.50", "10, 10, 20"]
    assert (
        len(cells_of(text))
        == len(cells_of(bench_train.HEAD.splitlines()[0]))
        == len(bench_train.COLUMNS)
    )


def test_a_row_that_fails_is_left_out_and_the_others_come(capsys, monkeypatch):
    def run(command, **_):
        label = command[-1].removeprefix("--row=")
        failed = "bird" in label
        out = "it went wrong\n" if failed else f"losses are the same\n| {label} | 1.00 |\n"
        return subprocess.CompletedProcess(command, int(failed), out)

    monkeypatch.setattr(bench_train.subprocess, "run", run)
    assert bench_train.main(["--table", "bird-demo", "giblet-demo"]) == 1
    said = capsys.readouterr()
    label = bench_train.ROWS["giblet-demo"][0]
    assert said.out == f"{bench_train.HEAD}\n| {label} | 1.00 |\n"
    assert "bird-demo:\nit went wrong" in said.err


def test_losses_that_differ_are_reported_and_end_the_command_with_1(capsys, monkeypatch):
    def steps(factor):
        losses = iter(factor**i * (3 - 0.1 * i) for i in range(100))
        return lambda: next(losses)

    assert bench_train.agree(steps(1), steps(1.00001), within=1e-3, steps=20)
    assert "losses of 20 steps, 3.0000 to 1.1000, are within 1.9e-04" in capsys.readouterr().out
    assert not bench_train.agree(steps(1), steps(1.001), within=1e-3, steps=20)
    assert "of the first 20 within 1.9e-02, more than 0.001" in capsys.readouterr().out
    # rounding errors grow, so only the first are held
    assert bench_train.agree(steps(1), steps(1.001), within=2.5e-3, steps=3)

    ours, others = steps(1.01), {"PyTorch, eager": lambda: steps(1)}
    ours.flops = 1e9
    sides = types.SimpleNamespace(
        ours=ours, others=others, count=1, unit="rows", within=1e-3, steps=20, same=None
    )
    module = types.SimpleNamespace(DEFAULTS={"rounds": 2}, sides=lambda size: sides)
    monkeypatch.setitem(sys.modules, "tools.torch_steps.bird", module)
    assert bench_train.main(["--model=bird", "--eager"]) == 1
    assert "PyTorch, eager / jaxtrain: medians" in capsys.readouterr().out


def test_the_page_has_every_row():
    text = PAGE.read_text()
    begins, ends = "<!-- tools.bench_train begins -->\n", "<!-- tools.bench_train ends -->"
    assert text.count(begins) == text.count(ends) == 1, f"{PAGE}: the markers around the table"
    head, line, *rows = text.split(begins)[1].split(ends)[0].strip().splitlines()
    assert f"{head}\n{line}" == bench_train.HEAD
    assert [cells_of(row)[0] for row in rows] == [label for label, _ in bench_train.ROWS.values()]
    assert {len(cells_of(row)) for row in rows} == {len(bench_train.COLUMNS)}


def cells_of(row):
    return [cell.strip() for cell in row.strip().strip("|").split("|")]
