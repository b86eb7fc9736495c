"""The recursive model as a user runs it: a curriculum and an annealed exploration, killed and resumed; pictures."""

import json
import signal

import pytest

from tests import test_train

LOADER = """
import os, signal, time
from loaders.sudoku.sudoku import Config, facts, fields
from loaders.sudoku import sudoku

class Killing(sudoku.Boards):
    def __next__(self):
        position, batch = super().__next__()
        kill_at, after = os.environ.get("KILL_AT"), os.environ.get("KILL_AFTER")
        if self._train and kill_at and position >= int(kill_at):
            while not os.path.isdir(after):
                time.sleep(0.01)
            del os.environ["KILL_AT"]  # a signal that is asked to be gentle is sent once
            os.kill(os.getpid(), int(os.environ.get("KILL_SIGNAL", signal.SIGKILL)))
        return position, batch

def make_loader(config, *, split, rows, seed):
    return Killing(config, split=split, rows=rows, seed=seed)
"""

CONFIG = """
from ml_collections import ConfigDict

def get_config():
    return ConfigDict(dict(
        workload="jaxtrain.workloads.trm",
        loader="killing_loader",
        model=dict(embed=16, heads=2, inner_multiple=16, puzzle_tokens=1, puzzle_embed=16, dtype="float32", halt_steps=4,
                   cycles_high=2, cycles_low=2, first_high=1, first_low=1, growth=10, explore=0.9, explore_end=0.1),
        data=dict(sources=(dict(kind="sudoku4", n_train=40, n_test=9, blanks=(3, 6), views=10),)),
        train=dict(steps=16, batch=8, eval_every=8, eval_batches=1, ema=0.9),
        optim=dict(name="adam_atan2", lr=1e-3, clip=0.0, decayed=".", undecayed="^$",
                   groups=(dict(match="^puzzle/", name="sign_sgd", lr=1e-2),)),
        checkpoint=dict(every=4),
        metrics=dict(every=1),
    ))
"""


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "killing_loader.py").write_text(LOADER)
    (tmp_path / "trm.py").write_text(CONFIG)
    return tmp_path


def test_a_run_killed_between_two_stages_resumes_exactly(folder):
    """Its slots' states too, and the probability of exploring: bit for bit what the undisturbed run has at the end."""
    whole = test_train.run(folder, "trm.py", "--config.workdir=whole")
    assert "2 programs, by (stage, bucket), are compiled ahead; their first steps: {((1, 1), 0): 0, ((2, 2), 0): 10}" in whole
    killed = (folder, "trm.py", "--config.workdir=killed")
    after = str(folder / "killed" / "checkpoints" / "8")
    test_train.run(*killed, code=-signal.SIGKILL, KILL_AT="12", KILL_AFTER=after)
    output = test_train.run(*killed)
    assert "resuming from step 8" in output
    assert test_train.hashes(folder / "killed", 16) == test_train.hashes(folder / "whole", 16)
    assert any("z_h" in path for path in test_train.hashes(folder / "whole", 16))
    for split in ("train", "test"):
        assert test_train.records(folder / "killed", split) == test_train.records(folder / "whole", split)
    # On the way 8 of the 9 held-out boards, at the end all of them; a class that no board is in has no accuracy.
    lines = [json.loads(line) for line in (folder / "whole" / "metrics.jsonl").read_text().splitlines()]
    last = [line for line in lines if line["split"] == "test"][-1]
    assert round(last["exact_accuracy"] * 9, 6) % 1 == 0 and last["exact_accuracy_difficulty_4"] is None
    assert {p.name for p in (folder / "whole" / "pictures").iterdir()} >= {"step000008_steps_0.png", "step000016_steps_3.png"}
    assert "already reached step 16" in test_train.run(*killed)
    assert not test_train.unexplained(folder / "killed")
