"""An installation away from the checkout: it works without a network and without a compiler, and
prints no extra line."""

import os
import pathlib
import re
import shutil
import subprocess
import sys

import pytest

from tests.support import installed
from tests.support.xla import KEEPS_PROGRAMS

ROOT = pathlib.Path(__file__).parent.parent
BOARDS = "({'kind': 'sudoku4', 'n_train': 64, 'n_test': 16, 'blanks': (3, 6)},)"
SMALL = {
    "data.sources": BOARDS,
    "model.embed": 16,
    "model.puzzle_embed": 16,
    "model.heads": 2,
    "model.cycles_high": 1,
    "model.cycles_low": 1,
    "train.steps": 4,
    "train.batch": 16,
    "train.eval_every": 2,
    "optim.warmup": 2,
    "checkpoint.every": 2,
    "metrics.every": 1,
}
RUN = ["--config=trm_sudoku:4x4", *(f"--config.{name}={value}" for name, value in SMALL.items())]
NUMBER = r"-?\d[\d.,e+-]*"
# All lines that a run may print. Other lines, such as a library's warnings, are not for the user.
CONSOLE = (
    rf"{NUMBER} parameters, .* of state per device; mesh .* on 1 × cpu",
    r"generated 80 sudoku4 puzzles in .* s, kept in /.*\.npz",
    r"MFU is of .* TFLOP/s \(measured .* on cpu\)",
    r"compiling; slow programs are cached for the next start",
    r"compiled$",
    rf"{NUMBER} s from the command to the first step: .*",
    (
        rf"step \d/4  loss {NUMBER}  {NUMBER} examples/s  MFU {NUMBER}%  waiting for data .* "
        r" \d:\d\d:\d\d left"
    ),
    rf"step [24] test  accuracy {NUMBER}  exact_accuracy {NUMBER}  .*q_halt_loss {NUMBER}",
    r"goodput \d+% of \d+ s over all starts; .*",
    r"the run has ended; it left",
    r"next",
    r"  [a-z ,]+: (runs/trm-4x4/.*|jaxtrain .*)",  # a file of the run, or a command
)
SOMETIMES = (r"evaluation after step \d: batch \d of \d",)  # printed if an evaluation takes long


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The packages of a wheel, in a folder as pip makes it, without the checkout."""
    folder = tmp_path_factory.mktemp("site")
    for name in ("jaxtrain", "loaders", "configs"):
        # files that are being written
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("*.pyc.*"))
    return folder


@pytest.fixture(scope="module")
def alone(site, tmp_path_factory):
    """Run a command without a network. PATH has only the programs of a system without a
    compiler."""
    if (
        not shutil.which("unshare")
        or subprocess.run(["unshare", "-rn", "true"], capture_output=True).returncode
    ):
        pytest.skip("this machine makes no network namespaces (unshare -rn)")
    folder = tmp_path_factory.mktemp("here")
    kept = ("HOME", "LD_LIBRARY_PATH", "TMPDIR", *KEEPS_PROGRAMS)
    env = {name: os.environ[name] for name in kept if name in os.environ}
    env |= {
        "PYTHONPATH": str(site),
        "JAXTRAIN_CACHE": str(folder / "cache"),
        "PATH": str(folder),
        "JAX_PLATFORMS": "cpu",
    }
    unshare = shutil.which("unshare")

    def run(*argv, code=0):
        command = [unshare, "-rn", sys.executable, "-m", "jaxtrain.cli", *argv]
        done = subprocess.run(
            command, cwd=folder, env=env, capture_output=True, text=True, timeout=300
        )
        assert done.returncode == code, done.stderr
        return done

    return run


def test_the_namespace_has_no_network(site, tmp_path):
    """This tests the test itself: looking up a name fails in the namespace."""
    if (
        not shutil.which("unshare")
        or subprocess.run(["unshare", "-rn", "true"], capture_output=True).returncode
    ):
        pytest.skip("this machine makes no network namespaces (unshare -rn)")
    program = "import socket; socket.create_connection(('127.0.0.1', 9), 1)"
    done = subprocess.run(
        ["unshare", "-rn", sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert "Network is unreachable" in done.stderr


@pytest.mark.slow
@installed.needs("trm")
def test_a_run_its_plan_and_its_export_need_no_network_and_say_what_they_should(alone):
    trained = alone("train", *RUN)
    lines = (trained.stdout + trained.stderr).splitlines()
    assert not [
        line
        for line in lines
        if not any(re.fullmatch(pattern, line) for pattern in CONSOLE + SOMETIMES)
    ]
    assert not [
        pattern for pattern in CONSOLE if not any(re.fullmatch(pattern, line) for line in lines)
    ], lines
    planned = alone("plan", *RUN, "gpu:h100x8")
    assert "this run has no problem" in planned.stdout and not planned.stderr
    exported = alone("export", "runs/trm-4x4", "--ema", "--out", "out")
    assert "ema of step 4" in exported.stdout and not exported.stderr
    assert "no problems" in alone("checkpoint", "verify", "out").stdout
