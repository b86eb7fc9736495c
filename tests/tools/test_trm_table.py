"""tools.trm_table: the steps of equal CPU time, and the table, from runs that are played; what is
done is not done again."""

import csv
import json
import pathlib

import pytest

from tools import trm_table


@pytest.fixture
def played(monkeypatch):
    """Commands that are recorded. A training of n steps costs 10 s and 2 s a step of "deep", 4 s of
    "last"."""
    commands, clock = [], [0.0]

    class Usage:
        def __init__(self):
            self.ru_utime, self.ru_stime = clock[0], 0.0

    def run(command, check):
        commands.append(command)
        words = dict(word.split("=", 1) for word in command if "=" in word)
        if "jaxtrain.main" in command:
            clock[0] += 10 + int(words["--config.train.steps"]) * (4 if words["--config"].endswith("last") else 2)
            pathlib.Path(words["--config.workdir"]).mkdir()
        elif "solve" in command:
            out = pathlib.Path(command[command.index("--curve") + 1])
            solved = 0.5 + 0.1 * int(out.parent.name[-1]) + (0.2 if "last" in out.parent.name else 0)
            columns = {"noise": 0, "rollouts": 1, "boards": 100, "by_q": solved, "by_check": solved + 0.1, "seconds": 0.002}
            with out.open("w", newline="") as file:
                csv.writer(file).writerows([columns, columns.values()])

    monkeypatch.setattr(trm_table.subprocess, "run", run)
    monkeypatch.setattr(trm_table.resource, "getrusage", lambda who: Usage())
    return commands


def test_a_table_at_equal_cpu_time(played, tmp_path, capsys):
    argv = ["--minutes=4", "--seeds", "0", "1", "--grades", "easy", "--out", str(tmp_path), "--config.train.batch=8"]
    assert trm_table.main(argv) == 0
    steps = {d.name: json.loads((d / "cpu.json").read_text())["steps"] for d in tmp_path.iterdir() if (d / "cpu.json").exists()}
    assert (steps["deep-0"], steps["last-1"]) == (115, 57)
    lines = (tmp_path / "table.md").read_text().splitlines()
    assert lines[2] == "| deep | 240 | 115 | easy | 1 | 0 | 55.0 % | 48.1 to 61.7 % | 65.0 % | 2.0 |"
    assert lines[3].startswith("| last | 238 | 57 | easy | 1 | 0 | 75.0 %")
    trained = [command for command in played if "jaxtrain.main" in command]
    assert len(trained) == 2 * (3 + 2) and all("--config.train.batch=8" in command for command in trained)
    assert trm_table.main(argv) == 0 and len([c for c in played if "jaxtrain.main" in c]) == len(trained)
    with pytest.raises(SystemExit):
        trm_table.main(["--seed=1"])
    assert "'--seed=1' is unknown" in capsys.readouterr().err
