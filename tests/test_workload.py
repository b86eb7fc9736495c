"""Workloads as the trainer sees them: each is one value, found by a dotted name."""

import contextlib
import os
import pathlib
import re
import shutil
import subprocess
import sys

import pytest

from jaxtrain import cli, commands, workload
from jaxtrain.config import ModelSection
from jaxtrain.types import Export, Foreign, Format
from tests.support.workload_loaders import LOADERS

ROOT = pathlib.Path(__file__).parent.parent
NAMES = [name.rpartition(".")[2] for name in workload.shipped()]


def module(folder: pathlib.Path, name: str, text: str) -> None:
    (folder / f"{name}.py").write_text(f"from jaxtrain.workload import Command, Workload\n{text}")


@pytest.mark.parametrize("name", workload.shipped())
def test_every_part_of_a_shipped_workload_can_be_imported(name):
    found = workload.of(name)
    assert found.glossary and issubclass(found.config_class(), ModelSection)
    assert isinstance(found.export(), Export)
    assert callable(found.make_task) and callable(found.make_specs) and callable(found.examples)
    for load_part in (*found.formats.values(), *found.foreign.values()):
        assert isinstance(load_part(), Format | Foreign)
    assert found.commands and all(
        command.module.startswith(f"{name}.") for command in found.commands.values()
    )


def test_a_command_of_a_taken_name_is_an_error_that_names_both(tmp_path, monkeypatch, capsys):
    own = 'dict.fromkeys(("train", "show", "plan"), Command("x", "train", "y"))'
    module(tmp_path, "twice", f"WORKLOAD = Workload(None, None, commands={own})\n")
    monkeypatch.syspath_prepend(tmp_path)
    of_the_trainer = "the command '%s' of twice is one of the trainer already; "
    with pytest.raises(
        workload.WorkloadError,
        match=of_the_trainer % "train" + of_the_trainer % "plan" + "rename them",
    ):
        commands.table("twice")
    assert cli.main(["--workload=twice", "train"]) == 2
    assert "--workload twice: the command 'train'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("{}", "odd.WORKLOAD is a dict; expected a jaxtrain.workload.Workload"),
        (
            'Workload(None, None, commands={"show": ("a", "b")})',
            "'show' of odd.WORKLOAD is no jaxtrain.workload.Command",
        ),
    ],
)
def test_a_workload_that_is_none_is_one_line(tmp_path, monkeypatch, capsys, value, text):
    module(tmp_path, "odd", f"WORKLOAD = {value}\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "odd", raising=False)
    assert cli.main(["--workload=odd", "runs"]) == 2
    told = capsys.readouterr().err
    assert text in told and told.startswith("error: ") and told.count("\n") == 1


def test_a_workload_may_keep_the_commands_of_another(tmp_path, monkeypatch):
    name = workload.shipped()[0]
    (tmp_path / "further.py").write_text(
        f"import dataclasses\nfrom {name} import WORKLOAD as FIRST\nWORKLOAD ="
        " dataclasses.replace(FIRST)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    assert commands.table("further") == commands.table()


def test_a_workload_that_does_not_exist_is_one_line(capsys):
    assert cli.main(["--workload", "nothing_here", "runs"]) == 2
    assert capsys.readouterr().err.splitlines() == [
        "error: --workload nothing_here: No module named 'nothing_here'"
    ]


@pytest.mark.parametrize(
    ("name", "wrong"),
    [("nowhere.show", "does not exist"), ("json.decoder", "has no function main")],
)
def test_a_command_that_is_no_module_with_a_main_is_one_line(
    name, wrong, tmp_path, monkeypatch, capsys
):
    value = (
        f'WORKLOAD = Workload(None, None, commands={{"show": Command("{name}", "data",'
        ' "shows")})\n'
    )
    module(tmp_path, "showing", value)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "showing", raising=False)
    assert cli.main(["--workload=showing", "show"]) == 2
    text = (
        f"the command 'show' of showing is the module '{name}', which {wrong}; correct it in"
        " WORKLOAD"
    )
    assert capsys.readouterr().err.splitlines() == [f"error: {text}"]


@pytest.mark.parametrize("argv", [["--workload"], ["--workload="], ["runs", "--workload"]])
def test_a_flag_without_its_workload_is_one_line(argv, capsys):
    assert cli.main(argv) == 2
    text = "error: --workload names no module; expected --workload MODULE"
    assert capsys.readouterr().err.splitlines() == [text]


def test_the_name_of_a_workload_may_follow_the_command(tmp_path, monkeypatch, capsys):
    value = (
        'WORKLOAD = Workload(None, None, commands={"show": Command("printing", "data", "shows")})\n'
    )
    module(tmp_path, "showing_2", value)
    (tmp_path / "printing.py").write_text("def main(argv):\n    print(argv)\n    return 0\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert cli.main(["show", "--last", "3", "--workload", "showing_2"]) == 0
    assert cli.main(["--workload=showing_2", "show"]) == 0
    assert capsys.readouterr().out.splitlines() == ["['--last', '3']", "[]"]
    assert cli.main(["show"]) == 2
    assert "a command of your own workload needs --workload MODULE" in capsys.readouterr().err


def test_a_module_without_a_value_is_an_error_that_shows_the_line(tmp_path, monkeypatch, capsys):
    module(tmp_path, "plain", "class Config: ...\ndef make_task(): ...\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert cli.main(["--workload=plain", "runs"]) == 2
    text = (
        "the module plain has no WORKLOAD; add the line WORKLOAD = Workload(config=Config,"
        " make_task=make_task), with Workload from jaxtrain"
    )
    assert capsys.readouterr().err.splitlines() == [f"error: --workload plain: {text}"]


# Deletes one folder after the other. An argument names the folder and, after commas, the packages
# that need it. Each time a fork, which has only the libraries, imports every other module and lists
# the commands. Configs name the workload that they train, so those of the deleted workload cannot
# be imported.
IMPORT = """
import importlib, os, pathlib, pkgutil, sys
import flax, jax, optax, orbax.checkpoint, pyarrow.parquet
import sklearn.linear_model, sklearn.model_selection

def import_the_rest(dependent):
    for top in ("jaxtrain", "loaders"):
        package = importlib.import_module(top)
        for each in pkgutil.walk_packages(package.__path__, f"{top}."):
            left_out = each.name in ("jaxtrain.main", "loaders._rust")
            left_out |= any(f"{each.name}.".startswith(f"{name}.") for name in dependent)
            if not left_out and not each.name.startswith("jaxtrain.configs"):
                importlib.import_module(each.name)
    from jaxtrain import cli
    return cli.main([])

assert not any(name.split(".")[0] in ("jaxtrain", "loaders") for name in sys.modules)
for argument in sys.argv[1:]:
    place, *dependent = argument.split(",")
    folder = pathlib.Path(place).rename("deleted")
    print("without", place, flush=True)
    if not (child := os.fork()):
        sys.exit(import_the_rest(dependent))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0, place
    folder.rename(place)
"""


# All tests but those of one workload, of one kind of data, of a fault found in either, of the
# pages, the sources, the tools, the compilers and the whole package.
OTHERS = re.compile(
    r"tests/(workloads|loaders|field|hostile|compiled|tools"
    r"|test_(docs|prose|words|floors|wheel|workload))"
)
MODULES = (
    str(path.relative_to(ROOT))
    for path in (ROOT / "tests").rglob("test_*.py")
    if "data" not in path.parts
)
TRAINERS = sorted(path for path in MODULES if not OTHERS.match(path))
# Cheap ones. One of the tests trains on a mesh, saves, and resumes bit for bit.
CHEAP = (
    "tests/test_specs.py",
    "tests/test_layout.py",
    "tests/run/test_init_or_restore.py",
    "tests/run/test_evaluate.py",
    "tests/run/test_step_compiler.py",
    "tests/optim/test_open.py::test_an_optimizer_of_optax_trains_on_a_mesh_and_resumes_bit_for_bit"
    "[adamw-data]",
)
# Those that ask which workloads are installed.
ASK = (
    "tests/config",
    "tests/test_cli.py",
    "tests/test_glossary.py",
    "tests/test_matrix.py",
    "tests/test_object_store.py",
)
# A plugin of pytest that runs a choice of all tests that were collected.
CHOICE = """
def pytest_collection_modifyitems(config, items):
    chosen = [item for item in items if item.nodeid.startswith(CHOSEN)]
    config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
    items[:] = chosen
"""


@pytest.fixture(scope="module")
def copied(tmp_path_factory):
    """A copy of the packages, the tests and what they read, with Python's compiled files except the
    unfinished ones."""
    folder = tmp_path_factory.mktemp("copied")
    for part in ("jaxtrain", "loaders", "configs", "tests", "tools", "docs"):
        shutil.copytree(ROOT / part, folder / part, ignore=shutil.ignore_patterns("*.pyc.*"))
    for name in ("pyproject.toml", "README.md", "CONTRIBUTING.md"):
        shutil.copy(ROOT / name, folder)
    return folder


@contextlib.contextmanager
def deleted(folder, *names):
    for name in names:
        (folder / "jaxtrain" / "workloads" / name).rename(folder / name)
    try:
        yield
    finally:
        for name in names:
            (folder / name).rename(folder / "jaxtrain" / "workloads" / name)


def python(folder, *arguments):
    env = {**os.environ, "PYTHONPATH": str(folder)}
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env=env,
        capture_output=True,
        text=True,
        timeout=3000,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]
    return done.stdout


def trainers_tests(folder, *chosen):
    """Collect the quick tests of the trainer, and run those whose name begins with one of
    ``chosen``."""
    (folder / "choice.py").write_text(f"CHOSEN = {chosen}\n{CHOICE}")
    options = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "choice", "-m", "not slow")
    return python(folder, *options, *TRAINERS)


def test_the_rest_works_without_a_workload(copied):
    """The folder of a workload is deleted. All other modules are imported, and `jaxtrain` lists the
    remaining commands."""
    folders = [f"jaxtrain/workloads/{name}" for name in NAMES]
    for name, listed in zip(NAMES, commands_listed_without(copied, folders), strict=True):
        gone = workload.of(f"{workload.PACKAGE}.{name}").commands
        assert set(commands.table()) - set(gone) <= listed and not set(gone) & listed, name


def commands_listed_without(folder, arguments):
    """Run `IMPORT` with its arguments. Return the names that `jaxtrain` lists, for each of them."""
    output = python(folder, "-c", IMPORT, *arguments)
    _, *listings = re.split(r"^without .*\n", output, flags=re.M)
    return [
        {line.split()[0] for line in listing.splitlines() if line.startswith("  ")}
        for listing in listings
    ]


@pytest.mark.slow
def test_the_rest_works_without_a_package_of_loaders(copied):
    """A package of loaders/ is deleted. The workloads that do not need it are imported, with their
    loaders, and `jaxtrain` lists all commands."""
    arguments = []
    packages = sorted(set.union(*LOADERS.values()))
    for package in packages:
        users = [name for name in NAMES if package in LOADERS[name]]
        others = [LOADERS[name] for name in NAMES if name not in users]
        not_needed = set(packages) - set.union(*others)
        dependent = [f"{workload.PACKAGE}.{name}" for name in users]
        dependent += [f"loaders.{name}" for name in sorted(not_needed)]
        arguments.append(",".join((f"loaders/{package}", *dependent)))
    for package, listed in zip(packages, commands_listed_without(copied, arguments), strict=True):
        assert set(commands.table()) <= listed, package


@pytest.mark.slow
def test_the_trainers_own_tests_pass_without_any_workload(copied):
    """All five folders are deleted. All tests are collected, and cheap ones pass."""
    with deleted(copied, *NAMES):
        assert " passed" in trainers_tests(copied, *CHEAP)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_the_trainers_tests_that_ask_for_workloads_pass_without_one(copied, name):
    with deleted(copied, name):
        assert " passed" in trainers_tests(copied, *ASK)


@pytest.mark.slow
def test_all_quick_tests_of_the_trainer_pass_without_any_workload(copied):
    with deleted(copied, *NAMES):
        assert " passed" in trainers_tests(copied, "tests/")
