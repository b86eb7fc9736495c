"""tools.trm_table: its table, from simulated runs. Finished runs are not repeated."""

import csv
import json
import os
import pathlib

import pytest

from tools import trm_table


@pytest.fixture
def played(monkeypatch):
    """Records commands with their cores."""
    commands = []

    def start(command):
        commands.append((command, os.sched_getaffinity(0)))
        words = dict(word.split("=", 1) for word in command if "=" in word)
        if "jaxtrain.main" in command:
            pathlib.Path(words["--config.workdir"]).mkdir()
            return 230.0 if words["--config"].endswith("last") else 240.0
        if "sudoku" in command:
            (folder := pathlib.Path(command[4])).mkdir()
            (folder / "test.csv").write_text("question\n")
            return 1.0
        out = pathlib.Path(command[command.index("--curve") + 1])
        solved = 0.5 + 0.1 * int(out.parent.name[-1]) + (0.2 if "last" in out.parent.name else 0)
        noise = float(command[-1]) if "--noise" in command else 0.0
        with out.open("w", newline="") as file:
            rows = csv.writer(file)
            rows.writerow(("noise", "rollouts", "boards", "by_q", "by_check", "seconds"))
            rows.writerow((0, 1, 100, solved, solved, 0.002))
            rows.writerow((noise, 4, 100, solved, solved + 0.1, 0.008))
        return 5.0

    monkeypatch.setattr(trm_table, "start", start)
    return commands


def test_a_table_of_contracts_rollouts_and_grades(played, tmp_path, capsys):
    whole = os.sched_getaffinity(0)
    argv = [
        "--seeds",
        "0",
        "1",
        "--grades",
        "easy:16:24",
        "--rollouts=4",
        "--noise",
        "0.3",
        "--out",
        str(tmp_path),
    ]
    assert trm_table.main([*argv, "--config.train.batch=8"]) == 0
    lines = (tmp_path / "table.md").read_text().splitlines()
    assert [line.split(" | ")[:5] for line in lines[2:5]] == [
        ["| deep", "240", "easy:16:24", "1", ""],
        ["| deep", "240", "easy:16:24", "4", "symmetry"],
        ["| deep", "240", "easy:16:24", "4", "noise 0.3"],
    ]
    assert lines[3].endswith(
        " | symmetry | 55.0 % | 65.0 % | 58.2 to 71.3 % | 60.0 to 70.0 % | 8.0 |"
    )
    assert (
        lines[6].startswith("| last | 230 | easy:16:24 | 4 | symmetry | 75.0 % | 85.0 %")
        and len(lines) == 8
    )
    trained = [(command, cores) for command, cores in played if "jaxtrain.main" in command]
    assert len(trained) == 4 and all("--config.train.batch=8" in command for command, _ in trained)
    assert len(set.union(*(cores for _, cores in trained))) == min(4, len(whole)) and {
        len(c) for _, c in trained
    } == {1}
    assert os.sched_getaffinity(0) == whole
    n = len(played)
    assert trm_table.main([*argv, "--config.train.batch=8"]) == 0 and len(played) == n, (
        "all of it is there"
    )
    assert json.loads((tmp_path / "deep-0" / "cpu.json").read_text())["seconds"] == 240.0
    for words, text in (
        (["--seed=1"], "'--seed=1' is unknown"),
        (["--grades", "easy"], "'easy'; expected a grade and its"),
    ):
        with pytest.raises(SystemExit):
            trm_table.main(words)
        assert text in capsys.readouterr().err
