"""The recursive model as a user runs it: a curriculum and an annealed exploration, killed and
resumed, with pictures."""

import json
import signal

import pytest

from tests.support import processes, small_runs


@pytest.fixture
def folder(tmp_path):
    return small_runs.trm(tmp_path)


def test_a_run_killed_between_two_stages_resumes_exactly(folder):
    """The states of its slots and the probability of exploring also equal those of the undisturbed
    run at the end, bit for bit."""
    whole = processes.run(folder, "trm.py", "--config.workdir=whole")
    assert (
        "2 programs, by (stage, bucket, norms), are compiled ahead; their first steps: {((1, 1),"
        " 0, True): 0, ((2, 2), 0, True): 10}" in whole
    )
    killed = (folder, "trm.py", "--config.workdir=killed")
    after = str(folder / "killed" / "checkpoints" / "8")
    processes.run(*killed, code=-signal.SIGKILL, KILL_AT="12", KILL_AFTER=after)
    output = processes.run(*killed)
    assert "resuming from step 8" in output
    assert processes.hashes(folder / "killed", 16) == processes.hashes(folder / "whole", 16)
    assert any("z_h" in path for path in processes.hashes(folder / "whole", 16))
    for split in ("train", "test"):
        assert processes.records(folder / "killed", split) == processes.records(
            folder / "whole", split
        )
    # Before the end, evaluations have 8 of the 9 held-out boards. At the end they have all. A class
    # without a board has no accuracy.
    lines = [
        json.loads(line) for line in (folder / "whole" / "metrics.jsonl").read_text().splitlines()
    ]
    last = [line for line in lines if line["split"] == "test"][-1]
    assert (
        round(last["exact_accuracy"] * 9, 6) % 1 == 0
        and last["exact_accuracy_difficulty_4"] is None
    )
    assert {p.name for p in (folder / "whole" / "pictures").iterdir()} >= {
        "step000008_steps_0.png",
        "step000016_steps_3.png",
    }
    assert "already reached step 16" in processes.run(*killed)
    assert not processes.unexplained(folder / "killed")


@pytest.mark.slow
def test_a_run_of_one_loss_killed_while_its_depth_grows_resumes_exactly(folder):
    """The drawn depths follow from the step, and the state has no slots."""
    growth = ("least_steps=1", "first_steps=2", "growth_steps=12")
    last = [f"--config.model.{name}" for name in ("contract=last", "explore_end=None", *growth)]
    whole = processes.run(folder, "trm.py", "--config.workdir=whole", *last)
    assert "step 16" in whole
    killed = (folder, "trm.py", "--config.workdir=killed", *last)
    after = str(folder / "killed" / "checkpoints" / "8")
    processes.run(*killed, code=-signal.SIGKILL, KILL_AT="12", KILL_AFTER=after)
    assert "resuming from step 8" in processes.run(*killed)
    assert processes.hashes(folder / "killed", 16) == processes.hashes(folder / "whole", 16)
    assert not any("z_h" in path for path in processes.hashes(folder / "whole", 16))
    found = processes.records(folder / "killed", "train")
    assert found == processes.records(folder / "whole", "train")
