"""The commands that the pages show: each has a rule in `docs_commands` and does as the rule
says."""

import contextlib
import io
import json
import os
import pathlib
import re
import shlex
import subprocess
import sys

import pytest

from jaxtrain import cli, commands
from jaxtrain import config as config_lib
from jaxtrain.config import changes
from loaders.io import checks
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


@pytest.fixture(scope="module")
def prepared(folder):
    """The same folder after the commands that take seconds, one after the other, as they are typed.
    Later ones read the files of earlier ones."""
    quick = [command for command in RUNS if command.rule.quick]
    assert len(quick) > 8
    for command in quick:
        done = helped(command) or docs_commands.run(command, folder)
        missing = docs_commands.lacks(command, done, folder)
        assert not missing, f"{missing}: {command.name}\n{done.stdout[-2000:]}{done.stderr[-4000:]}"
    return folder


def test_the_commands_that_take_seconds(prepared):
    assert (prepared / "index" / "index.json").exists()


FRONT = ("README.md", "docs/index.md")  # the first pages of a reader
OWN_FILES = ("my_config.py", "my_model.py --", "my_language", "energy")  # see test_docs.py


def outputs(text):
    """The files and folders that a command names and makes."""
    names = re.findall(r"--(?:out|pictures)[ =](\S+)|--config\.workdir=(\S+)", text)
    names = ["".join(pair) for pair in names]
    names += re.findall(r"^jaxtrain tokens ([^/\s]+)/", text)
    names += re.findall(r"^jaxtrain (?:sudoku|train-codec) (\S+)", text)
    names += [f"runs/{name}" for name in re.findall(r"train --config=(my_\w+)\.py", text)]
    return [name for name in names if not name.isupper()]  # DIR stands for any


def inputs(text, known):
    """The files and folders of ``known`` that a command reads, and the workdirs of other runs."""
    text = re.sub(r"--(out|pictures)[ =]\S+|--config\.workdir=\S+", "", text)
    text = re.sub(r"^jaxtrain ((tokens|sudoku|train-codec) \S+|\S+)", "", text)
    words = re.split(r"[\s=:,@'\"]+", text)
    names = [word for word in words if any(f"{word}/".startswith(f"{name}/") for name in known)]
    return names + [word for word in words if word.startswith("runs/")]


def literal(command):
    """The config and its errors of a training command as it is typed, or None for others."""
    text = command.text.partition("jaxtrain train ")[2]
    if "--config=" not in text or "…" in text or command.text.startswith("docker"):
        return None
    for place, replacement in docs_commands.PLACES.items():
        text = text.replace(place, replacement)
    parsed = config_lib.parse_args(shlex.split(text), find=False)
    if parsed.explain or parsed.plan is not None or any(name in text for name in OWN_FILES):
        return None
    return config_lib.read(parsed.source, parsed.overrides, make_data=False)


@pytest.fixture(scope="module")
def trained(prepared):
    """Each training command with its config. It is None if an earlier run makes its data."""
    configs = {}
    with contextlib.chdir(prepared):
        for command in COMMANDS:
            try:
                read = literal(command)
            except config_lib.ConfigError:
                configs[command] = None
                continue
            if read:
                configs[command] = read[0]
    return configs


def test_a_training_command_does_not_meet_the_run_of_another(trained):
    """Otherwise it would end with an error: a checkpoint of another config, or of other data."""
    first, refused = {}, []
    for command, config in trained.items():
        if config is None:
            assert "--config.workdir=" in command.text or "folder:" in command.text, command.name
            continue
        saved, name = first.setdefault(
            config.workdir, (json.loads(config_lib.to_json(config)), command.name)
        )
        for change in changes.compare(saved, config, {}):
            if change.kind != checks.FREE or change.path.startswith(("data.", "train.batch")):
                refused.append(f"{command.name} does not resume {name}: {change}")
    assert refused == []
    assert len(first) > 20


def test_a_command_reads_files_that_a_command_above_it_made(trained):
    """Above it on its page, or on the first pages that a reader sees. A config's docstring has the
    files of all pages."""
    every = docs_commands.shown_on_each_page()
    made_on = {command.page: set() for command in every}
    known = {name for command in every for name in outputs(command.text)}
    workdirs = {command.text: config.workdir for command, config in trained.items() if config}
    made_on["README.md"].add("runs/xcm-demo")  # make train
    missing = []
    for command in sorted(every, key=lambda command: command.page not in FRONT):
        if "results" in command.page or re.search(r"RUN|launch --", command.text):
            continue
        pages = made_on if command.page.startswith("configs/") else FRONT
        made = made_on[command.page].union(*(made_on[page] for page in pages))
        for name in inputs(command.text, known):
            if not any(f"{name}/".startswith(f"{one}/") for one in made):
                missing.append(f"{command.name}: {name}")
        made_on[command.page].update(outputs(command.text))
        if command.text in workdirs:
            made_on[command.page].add(workdirs[command.text])
    assert missing == []


def test_two_exports_of_the_pages_have_folders_of_their_own():
    """A command that exports refuses a folder that is not empty."""
    folders = {}
    for command in COMMANDS:
        if re.match(r"jaxtrain (export|lora-to-peft|checkpoint export) ", command.text):
            for name in outputs(command.text):
                folders.setdefault(name, []).append(command.name)
    assert len(folders) > 5
    assert [names for names in folders.values() if len(names) > 1] == []


def test_a_help_names_runs_that_a_page_or_a_config_makes(trained):
    made = {config.workdir for config in trained.values() if config}
    wrong = []
    for name, command in commands.table().items():
        path = docs_commands.ROOT / f"{command.module.replace('.', '/')}.py"
        text = re.sub(r"--out \S+", "", path.read_text().split('"""')[1])
        wrong += [f"{name}: {run}" for run in re.findall(r"runs/[\w-]+", text) if run not in made]
    assert wrong == []


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


def test_the_python_of_the_pages_runs(prepared):
    """The other programs are in test_docs.py (README, CONTRIBUTING, your-model) and
    test_docs_notebooks.py. The code of ARCHITECTURE is not a program."""
    records = prepared / "runs" / "xcm-demo" / "metrics.jsonl"
    records.parent.mkdir(parents=True, exist_ok=True)
    records.write_text('{"step": 2, "split": "test", "accuracy": 0.5}\n')
    # One device, like a reader's machine, and the cache in which an index is known.
    env = os.environ | {"XLA_FLAGS": SOON, "JAXTRAIN_CACHE": str(prepared / "cache")}
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
    done = subprocess.run(
        command, cwd=prepared, env=env, capture_output=True, text=True, timeout=300
    )
    assert len(blocks) > 2 and done.returncode == 0, done.stderr


@pytest.mark.slow
def test_all_commands(tmp_path, capsys):
    """All pages are run in order, in one folder. This takes half an hour of CPU time."""
    assert docs_commands.main([str(tmp_path / "checkout")]) == 0, capsys.readouterr().out
