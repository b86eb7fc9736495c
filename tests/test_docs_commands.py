"""The commands that the pages show: each has a rule in `docs_commands` and does as the rule
says."""

import contextlib
import io
import os
import pathlib
import re
import subprocess
import sys

import pytest

from jaxtrain import cli
from tests import docs_commands
from tests.support.xla import SOON

COMMANDS = docs_commands.shown()
RUNS = [command for command in COMMANDS if isinstance(command.rule, docs_commands.Run)]
HOW = (
    f"append a row to RULES in {pathlib.Path(docs_commands.__file__).name}, whose docstring"
    " says how"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder as a reader has it."""
    here = tmp_path_factory.mktemp("reader") / "checkout"
    docs_commands.start(here)
    return here


def test_every_command_has_a_rule():
    without = [command.name for command in COMMANDS if command.rule is None]
    assert not without, f"{HOW}: {without}"
    assert len(COMMANDS) > 80 and len(RUNS) > 40, "the pages are read"


def test_a_reason_names_what_is_there():
    for command in COMMANDS:
        if isinstance(command.rule, docs_commands.Why):
            for path in re.findall(r"(?:tests|tools)/[\w/]+(?:\.py)?", command.rule.reason):
                assert (docs_commands.ROOT / path).exists(), command.name
        if made := re.match(r"make ([a-z-]+)", command.text):
            targets = (f"\n{made[1]}:", f"\n{made[1].partition('-')[0]}-%:")
            assert any(
                target in (docs_commands.ROOT / "Makefile").read_text() for target in targets
            ), command.name


def helped(command):
    """Run a command that only prints its help in this process. Others give None."""
    program, *words = command.line().split()
    if program != "jaxtrain" or len(words) != 2 or words[1] != "--help":
        return None
    out, error = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(error):
        try:
            code = cli.main(words)
        except SystemExit as end:  # argparse's own exit
            code = end.code or 0
    return subprocess.CompletedProcess(words, code, out.getvalue(), error.getvalue())


def test_the_commands_that_take_seconds(folder):
    """The commands run one after the other, as they are typed. Later ones read the files of earlier
    ones."""
    quick = [command for command in RUNS if command.rule.quick]
    assert len(quick) > 8
    for command in quick:
        done = helped(command) or docs_commands.run(command, folder)
        missing = docs_commands.lacks(command, done, folder)
        assert not missing, f"{missing}: {command.name}\n{done.stdout[-2000:]}{done.stderr[-4000:]}"


def test_a_command_that_does_nothing_is_found_out(tmp_path):
    """Exit code 0 alone does not pass."""
    for command in RUNS:
        silent = subprocess.CompletedProcess([], command.rule.code, stdout="", stderr="")
        assert (
            docs_commands.lacks(command, silent, tmp_path) or "write_reference" in command.text
        ), command.name
    (run,) = [command for command in RUNS if command.text == "jaxtrain train --config=xcm"]
    ended = (
        "the run has ended; it left\n  metrics: runs/metrics.jsonl\nnext\n  to look: jaxtrain"
        " embed\n"
    )
    done = subprocess.CompletedProcess([], 0, stdout="", stderr=ended)
    (tmp_path / "runs").mkdir()
    for loss, missing in (("NaN", "the loss of step 2: [nan]"), ("1.5", "")):
        (tmp_path / "runs" / "metrics.jsonl").write_text(
            f'{{"step": 2, "split": "train", "loss": {loss}}}'
        )
        assert docs_commands.lacks(run, done, tmp_path) == missing


def test_the_python_of_the_pages_runs(folder):
    """The other programs are in test_docs.py (README, CONTRIBUTING, your-model) and
    test_docs_notebooks.py. The code of ARCHITECTURE is not a program."""
    records = folder / "runs" / "xcm-demo" / "metrics.jsonl"
    records.parent.mkdir(parents=True, exist_ok=True)
    records.write_text('{"step": 2, "split": "test", "accuracy": 0.5}\n')
    env = os.environ | {"XLA_FLAGS": SOON}  # one device, like a reader's machine
    blocks = [
        (page.name, block)
        for page in docs_commands.PAGES
        if page.stem not in ("README", "CONTRIBUTING", "your-model", "ARCHITECTURE")
        and page.parent.name != "notebooks"
        for block in re.findall(r"^```python\n(.*?)^```", page.read_text(), re.M | re.S)
    ]
    # Each has names of its own. One process runs them all, and its traceback names the page.
    program = (
        "import sys\nfor page, block in eval(sys.argv[1]):\n    exec(compile(block, page, 'exec'),"
        " {'__name__': '__main__'})"
    )
    command = [sys.executable, "-c", program, repr(blocks)]
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=300)
    assert len(blocks) > 2 and done.returncode == 0, done.stderr


@pytest.mark.slow
def test_all_commands(tmp_path, capsys):
    """All pages are run in order, in one folder. This takes half an hour of CPU time."""
    assert docs_commands.main([str(tmp_path / "checkout")]) == 0, capsys.readouterr().out
