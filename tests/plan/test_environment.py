"""The compilers' environments: their packages, incomplete environments, and the message if there is
none."""

import concurrent.futures
import contextlib
import fcntl
import importlib.metadata
import json
import os
import signal
import subprocess
import sys
import threading
import time
import types

import pytest

from jaxtrain import plan
from jaxtrain.commands import plan as plan_command
from jaxtrain.commands import train as main
from jaxtrain.config.command_line import COMPILERS
from jaxtrain.plan import environment, worker
from tests.support import processes


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("JAXTRAIN_CACHE", str(tmp_path))
    return tmp_path


@pytest.fixture
def pip(monkeypatch):
    """A pip that writes one file into --target, and fails if ``fails`` is set."""
    calls = []

    class Pip:
        fails = ""
        commands = calls

    def run(command, **kwargs):
        calls.append(command)
        target = environment.pathlib.Path(command[command.index("--target") + 1])
        (target / "jax_plugins").mkdir(parents=True)
        return subprocess.CompletedProcess(command, 1 if Pip.fails else 0, "", Pip.fails)

    monkeypatch.setattr(environment.subprocess, "run", run)
    return Pip


@pytest.mark.parametrize("kind", COMPILERS)
def test_an_environment_is_made_once_with_the_versions_of_this_one(kind, cache, pip):
    assert environment.find(kind) is None
    text = plan.set_up(kind)
    place = environment.find(kind)
    assert place == environment.folder(kind) and place.parent.parent == cache and str(place) in text
    jaxlib = importlib.metadata.version("jaxlib")
    assert jaxlib in place.name
    if kind == "gpu":
        assert (
            f"jax-cuda12-plugin=={jaxlib}" in pip.commands[0]
            and f"jax-cuda12-pjrt=={jaxlib}" in pip.commands[0]
        )
    else:
        assert any(word.startswith("libtpu") for word in pip.commands[0])
    assert json.loads((place / environment.MARK).read_text())[
        "requirements"
    ] == environment.requirements(kind)
    assert "is there already" in plan.set_up(kind) and len(pip.commands) == 1
    assert [path for path in place.parent.iterdir() if path.is_dir()] == [place], (
        "no folder is left beside it"
    )


def test_a_set_up_that_fails_leaves_nothing_and_names_its_command(cache, pip, capsys):
    pip.fails = "WARNING: retrying\nERROR: No matching distribution found for jax-cuda12-plugin\n"
    assert main.main(["--plan-setup", "gpu"]) == 2
    said = capsys.readouterr().err
    assert (
        "No matching distribution" in said
        and "pip install" in said
        and "network" in said
        and "jax-cuda12-plugin==" in said
    )
    assert environment.find("gpu") is None and not [
        path for path in (cache / "envs").iterdir() if path.is_dir()
    ]
    pip.fails = ""
    assert main.main(["--plan-setup=gpu"]) == 0 and environment.find("gpu")
    assert (
        plan_command.main(["--setup", "gpu"]) == 0 and "is there already" in capsys.readouterr().out
    )


def test_an_environment_without_pip_is_reported(cache, monkeypatch, capsys):
    """An environment of `uv venv` has no pip: the message does not blame the network."""
    monkeypatch.setitem(sys.modules, "pip", None)
    assert plan_command.main(["--setup", "gpu"]) == 2
    python = sys.executable
    expected = (
        f"error: {python} has no pip, which fetches the compiler; run {python} -m ensurepip\n"
    )
    assert capsys.readouterr().err == expected and not (cache / "envs").exists()


@pytest.mark.parametrize("mark", [None, "", '{"old": 1}', "[1]", '{"requirements": 1}'])
def test_a_folder_without_a_whole_mark_is_not_taken_for_an_environment(mark, cache, pip):
    """A killed process, a full disk, or a person may leave such a folder."""
    (environment.folder("gpu") / "jax_plugins").mkdir(parents=True)
    if mark is not None:
        (environment.folder("gpu") / environment.MARK).write_text(mark)
    assert environment.find("gpu") is None
    plan.set_up("gpu")
    assert environment.find("gpu") and len(pip.commands) == 1


def test_leftovers_of_a_killed_set_up_are_removed_by_the_next_one(cache, pip):
    place = environment.folder("gpu")
    left, other = (
        place.with_name(f".{name}.partial") for name in (place.name, environment.folder("tpu").name)
    )
    (left / "packages").mkdir(parents=True), other.mkdir()
    plan.set_up("gpu")
    assert environment.find("gpu") and not left.exists() and other.exists(), "only one's own"


def test_of_two_set_ups_at_once_one_fetches(cache, pip, monkeypatch):
    """The second process begins while the first one's pip runs, and waits."""
    begun, run = threading.Event(), environment.subprocess.run

    def slow(*args, **kwargs):
        begun.set()
        time.sleep(0.5)
        return run(*args, **kwargs)

    monkeypatch.setattr(environment.subprocess, "run", slow)
    with concurrent.futures.ThreadPoolExecutor() as pool:
        first = pool.submit(plan.set_up, "gpu")
        assert begun.wait(10)
        second = pool.submit(plan.set_up, "gpu")
        assert "is made" in first.result() and "is there already" in second.result()
    assert len(pip.commands) == 1


def test_an_unknown_kind_names_those_that_are(cache, capsys):
    assert main.main(["--plan-setup", "rocm"]) == 2
    assert "expected one of: gpu, tpu" in capsys.readouterr().err
    assert main.main(["--plan-setup"]) == 2
    assert "--plan-setup is given without a value" in capsys.readouterr().err


def test_without_an_environment_nothing_is_compiled_and_the_command_is_named(cache):
    with pytest.raises(plan.PlanError, match="jaxtrain plan --setup gpu fetches it"):
        worker.ask([worker.Job(None, "gpu:h100x8")])


ANSWERING = """
import os, pickle, sys
jobs, answers = open(int(sys.argv[1]), "rb"), open(int(sys.argv[2]), "wb")
while True:
    try:
        job = pickle.load(jobs)
    except EOFError:
        break
    if job.target == "too much":
        sys.exit("no memory")
    pickle.dump(os.getpgid(0), answers)
    answers.flush()
"""


def test_a_compiler_that_ends_its_process_has_another_one_for_the_next_job(cache, monkeypatch):
    """A terminal's Ctrl-C, which is for the group of the process that plans, spares it."""
    monkeypatch.setattr(worker, "START", ANSWERING)
    monkeypatch.setattr(environment, "find", lambda kind: cache)
    with worker.Process("gpu") as process:
        first = process.ask(types.SimpleNamespace(target="small"))
        for _ in range(2):
            with pytest.raises(plan.PlanError, match="=too much ended with code 1: no memory"):
                process.ask(types.SimpleNamespace(target="too much"))
        second = process.ask(types.SimpleNamespace(target="small"))
    assert len({first, second, os.getpgid(0)}) == 3


COMPILING_FOR_LONG = """
import fcntl, sys, time
from jaxtrain.plan import worker

def answer(path, versions):
    file = open(path, "wb")
    fcntl.flock(file, fcntl.LOCK_EX)
    open(path + ".begun", "wb").close()
    time.sleep(300)

worker.answer = answer
worker.main(*sys.argv[1:])
"""
PLANNING = f"""
import pathlib, sys
from jaxtrain.plan import environment, worker

worker.START = {COMPILING_FOR_LONG!r}
environment.find = pathlib.Path
with worker.Process(sys.argv[1]) as process:
    process.ask(sys.argv[2])
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_compiler_ends_with_the_process_that_plans(tmp_path, number):
    """Else it would take a core for minutes after a kill."""
    locked, begun = tmp_path / "locked", tmp_path / "locked.begun"
    planning = subprocess.Popen([sys.executable, "-c", PLANNING, str(tmp_path), str(locked)])
    processes.wait_for(begun.exists, seconds=60)
    planning.send_signal(number)
    assert planning.wait(20) == -number
    with open(locked, "rb") as file:
        processes.wait_for(lambda: is_free(file), seconds=20)


def test_a_job_that_the_compiler_cannot_read_is_an_error(cache, monkeypatch):
    """As one of a class in a module that this process alone has."""
    module = types.ModuleType("of_this_process_alone")
    module.Job = type("Job", (), {"__module__": module.__name__, "target": "gpu:h100x8"})
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(environment, "find", lambda kind: cache)
    wanted = "=gpu:h100x8 ended with code 1: .*No module named 'of_this_process_alone'"
    with worker.Process("gpu") as process, pytest.raises(plan.PlanError, match=wanted):
        process.ask(module.Job())


def is_free(file):
    with contextlib.suppress(BlockingIOError):
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    return False
