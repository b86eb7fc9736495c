"""`jaxtrain completion`: what a shell offers, asked of the shell itself."""

import ast
import importlib
import pathlib
import shutil
import subprocess

import pytest

from jaxtrain import commands
from jaxtrain.commands import completion

ROOT = pathlib.Path(__file__).parents[2]
# bash splits a line at = and spaces, and calls the function that `complete -F` names.
ASK = """
source "$0"
COMP_LINE=$1 COMP_POINT=${#1} COMP_WORDS=($2) COMP_CWORD=$(( ${#COMP_WORDS[@]} - 1 ))
compopt() { :; }
_jaxtrain
printf '%s\\n' "${COMPREPLY[@]}"
"""


@pytest.fixture(scope="module")
def scripts(tmp_path_factory):
    folder, words = tmp_path_factory.mktemp("completion"), completion.words()
    for shell in completion.SHELLS:
        (folder / shell).write_text(getattr(completion, shell)(words))
    return folder


@pytest.mark.parametrize(
    ("line", "words", "offered"),
    [
        ("jaxtrain che", "jaxtrain che", {"checkpoint"}),
        ("jaxtrain checkpoint ve", "jaxtrain checkpoint ve", {"verify"}),
        ("jaxtrain checkpoint export --o", "jaxtrain checkpoint export --o", {"--out"}),
        ("jaxtrain completion z", "jaxtrain completion z", {"zsh"}),
        ("jaxtrain benchmark esc", "jaxtrain benchmark esc", {"esc10", "esc50"}),
        ("jaxtrain embed --vi", "jaxtrain embed --vi", {"--views"}),
        ("jaxtrain train --con", "jaxtrain train --con", {"--config="}),
        ("jaxtrain train --config=xc", "jaxtrain train --config = xc", {"xcm", "xcl"}),
        ("jaxtrain plan --config.train.b", "jaxtrain plan --config.train.b", {"--config.train.batch="}),
        ("jaxtrain export mod", "jaxtrain export mod", {"model.bin"}),
    ],
)
def test_bash_offers(line, words, offered, scripts, tmp_path):
    (tmp_path / "model.bin").touch()
    done = subprocess.run(
        ["bash", "-c", ASK, str(scripts / "bash"), line, words], cwd=tmp_path, capture_output=True, text=True, timeout=30
    )
    assert done.returncode == 0 and not done.stderr, done.stderr
    assert set(done.stdout.split()) == offered


def test_every_flag_of_every_command_is_known():
    words = completion.words()
    assert sorted(words.commands) == sorted(commands.table())
    for name, command in commands.table().items():
        module = importlib.import_module(command.module)
        calls = [node for node in ast.walk(ast.parse(pathlib.Path(module.__file__).read_text())) if isinstance(node, ast.Call)]
        added = [
            node.args[0]
            for node in calls
            if getattr(node.func, "attr", getattr(node.func, "id", "")) in ("add_argument", "add")
        ]
        flags = {arg.value for arg in added if isinstance(arg, ast.Constant) and str(arg.value).startswith("--")}
        assert flags <= set(words.flags[name]), name
    assert set(words.configured) == {"train", "plan", "explain", "launch", "doctor"}
    assert {"train.steps", "optim.lr", "workdir"} <= set(words.fields) and not [
        f for f in words.fields if f.startswith("model")
    ]


@pytest.mark.parametrize("shell", completion.SHELLS)
def test_a_shell_reads_its_script(shell, scripts):
    if not shutil.which(shell):
        pytest.skip(f"no {shell} here")
    done = subprocess.run([shell, "-n", str(scripts / shell)], capture_output=True, text=True, timeout=30)
    assert done.returncode == 0 and not done.stderr
