"""`jaxtrain COMMAND`: the table, --help, and errors of every command, all without jax."""

import ast
import dataclasses
import importlib
import importlib.metadata
import logging
import os
import pathlib
import re
import shlex
import shutil
import subprocess
import sys
import tomllib

import pytest

import jaxtrain
from jaxtrain import cli, commands
from jaxtrain import config as config_lib
from jaxtrain.commands import arguments, installation, train
from jaxtrain.parallel import cluster
from jaxtrain.parallel.cluster import processes, watchdog
from loaders.io import checks, machine
from tests.support import installed, small_runs

ROOT = pathlib.Path(__file__).parent.parent
FOLDER = ROOT / "jaxtrain" / "commands"
NAMES = list(commands.table())
SHIPPED = (
    "embed",
    "detect",
    "fit",
    "index",
    "generate",
    "sudoku",
    "encode-audio",
    "train-codec",
    "generate-audio",
)


def there(cases):
    """The cases whose command is the trainer's or an installed workload's. Each is an argv, or
    begins with one."""
    words = [
        case if isinstance(case, str) else case[0] if isinstance(case[0], list) else case
        for case in cases
    ]
    first = [word.split()[0] if isinstance(word, str) else word[0] for word in words]
    return [
        case
        for case, word in zip(cases, first, strict=True)
        if word not in set(SHIPPED) - set(NAMES)
    ]


CONFIGURED = ("train", "plan", "explain", "launch", "doctor")  # the commands that take --config


@pytest.fixture(autouse=True)
def logging_as_before():
    """Restore the log handlers: a command's console writes to a stream that is closed after the
    test."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


def test_the_table_lists_every_file_once():
    folders = [FOLDER, *(ROOT / "jaxtrain" / "workloads").glob("*/commands")]
    files = {path.stem for folder in folders for path in folder.glob("*.py")} - {
        "__init__",
        "arguments",
        "installation",
    }
    assert sorted(name.replace("-", "_") for name in NAMES) == sorted(files)


def test_a_command_that_keeps_compiled_programs_says_so_in_the_table():
    """The command line looks at the cache folder by this entry before it imports jax."""
    for name, command in commands.table().items():
        text = (ROOT / f"{command.module.replace('.', '/')}.py").read_text()
        assert command.caches or not re.search("start_jax|prepare_process", text), name


def test_the_listing_has_a_line_for_each_command_in_its_group(capsys):
    assert cli.main([]) == 0
    alone = capsys.readouterr().out
    assert cli.main(["--help"]) == 0 and capsys.readouterr().out == alone
    lines = alone.splitlines()
    for name, command in commands.table().items():
        at = lines.index(next(line for line in lines if line.startswith(f"  {name} ")))
        assert command.summary in lines[at]
        group = next(
            line for line in reversed(lines[:at]) if line.endswith(":") and not line.startswith(" ")
        )
        assert group == f"{command.group}:"
    groups = [line for line in lines if line.endswith(":") and not line.startswith(" ")]
    used = {command.group for command in commands.table().values()}
    assert groups == [*(f"{group}:" for group in commands.GROUPS if group in used), "exit codes:"]
    assert {"train", "monitor", "plan", "weights", "clusters"} <= used
    codes = lines[lines.index("exit codes:") :]
    listed = [line.split()[0] for line in codes[1:]]
    assert listed == ["0", "1", "2", str(watchdog.Watchdog.EXIT_CODE), "75", "130", "128+N"]
    rows = re.findall(r"^\| ([\d+N]+) \| ", (ROOT / "docs" / "install.md").read_text(), re.M)
    assert rows == listed, "the page has the same"
    assert all(len(line) <= 128 for line in lines)


def test_help_imports_no_jax():
    """The listing, every command's help and every error appear at once, because none of them
    imports jax."""
    given = [
        [],
        ["--help"],
        ["--version"],
        ["tran"],
        *([name, flag] for name in NAMES for flag in ("--help", "--nonsense")),
    ]
    # the doctor reports a missing config together with the rest
    words = ("--config=xmc", "--config=none/xcm.py:x", "--config")
    given += [
        [name, *each.split()]
        for name in CONFIGURED
        for each in words
        if name != "doctor" or each == "--config"
    ]
    given += [
        ["train", *words.split()]
        for words in ("--config=xcm --none", "--config=xmc --plan", "--config=xcm --config.x")
    ]
    given += [
        ["plan", "--setup", "tpux"],
        ["plan", "--config=xcm", "--setup=tpux"],
        ["train", "--plan-setup=tpux"],
    ]
    program = (
        f"import contextlib, io, sys\nfrom jaxtrain import cli\nfor argv in {given}:\n    with"
        " contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):\n "
        "       try:\n            cli.main(argv)\n        except SystemExit:\n            pass\n  "
        "  heavy = {'jax', 'grain', 'orbax', 'tensorstore', 'optax', 'flax'} &"
        " set(sys.modules)\n    assert not heavy, (argv, heavy)\n    if len(argv) < 2:\n       "
        " assert 'numpy' not in sys.modules, argv\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", NAMES)
def test_the_help_of_a_command_has_an_example_and_all_arguments(name, capsys):
    try:
        code = cli.main([name, "--help"])
    except SystemExit as end:  # argparse's own exit
        code = end.code or 0
    text = capsys.readouterr().out
    assert code == 0 and text.startswith(f"usage: jaxtrain {name}")
    examples = [line for line in text.splitlines() if line.startswith(f"    jaxtrain {name} ")]
    assert any("[" not in line and "…" not in line for line in examples), (
        "one can be copied as it is"
    )
    assert "configs/" not in text, (
        "which a wheel does not put where its user stands; --config=NAME is there for all"
    )
    module = importlib.import_module(commands.table()[name].module)
    assert (
        (ast.get_docstring(ast.parse(pathlib.Path(module.__file__).read_text())) or "")
        .splitlines()[0]
        .endswith(".")
    )
    # Each argument is explained.
    for node in ast.walk(ast.parse(pathlib.Path(module.__file__).read_text())):
        adds = isinstance(node, ast.Call) and getattr(
            node.func, "attr", getattr(node.func, "id", "")
        ) in (
            "add_argument",
            "add",
        )
        if adds and node.args and isinstance(node.args[0], ast.Constant):
            named = {keyword.arg for keyword in node.keywords}
            assert "help" in named or "metavar" in named, ast.unparse(node)


@pytest.mark.parametrize(
    ("argv", "text"),
    there(
        [
            (["tran"], "did you mean 'train'?; see jaxtrain --help"),
            (["checkpont"], "did you mean 'checkpoint'?"),
            (["zzz"], "expected one of: train, runs,"),
            (["help", "tran"], "command 'tran' is unknown; did you mean 'train'?; see"),
            (["--hlep"], "flag '--hlep' is unknown; did you mean '--help'?; see"),
            (["version"], "did you mean '--version'?"),
            (["checkpoint", "verfy", "run"], "'verfy' is unknown; expected one of: "),
            (
                ["checkpoint", "verify", "--stpe", "3", "x"],
                (
                    "'--stpe' is unknown; expected one of: --help, --step; did you mean '--step'?;"
                    " see jaxtrain checkpoint verify"
                ),
            ),
            (
                ["checkpoint", "export", "x", "--out=y", "--ot"],
                "expected one of: --help, --step, --out, --base; did you mean '--out'?",
            ),
            (["embed", "run", "--out", "x", "--veiws=2"], "did you mean '--views'?"),
            (["checkpoint", "export", "run", "--out=x", "--stepp=2"], "did you mean '--step'?"),
            (
                ["export", "run"],
                "the following arguments are required: --out; see jaxtrain export --help",
            ),
            (
                ["embed", "run", "--out", "x", "--batch", "0"],
                "'0'; it must be an integer of at least 1",
            ),
            (["export", "run", "--out=x", "--only=("], "'(' is not a regular expression"),
            (
                ["export", "run", "--out=x", "--shard-size=big"],
                "'big' is not a size; expected for example 5GB",
            ),
            (
                ["sudoku", "out", "--kind=maze", "--grade=hard"],
                "--grade is 'hard', of a generated Sudoku alone",
            ),
            (["sudoku", "out", "--blanks", "9", "3"], "--blanks is (9, 3)"),
            (["plan", "gpu:h100x8"], "file is missing; for example --config=xcm"),
            (["train", "--config"], "the config has an error: --config is given without a value"),
            (["plan", "--config=xmc"], "did you mean 'xcm'?"),
            (
                ["plan", "--setup", "tpux"],
                (
                    "argument --setup: 'tpux' is unknown; expected one of: gpu, tpu; did you mean"
                    " 'tpu'?"
                ),
            ),
            (
                ["train", "--plan-setup=tpux"],
                "--plan-setup is 'tpux'; expected one of: gpu, tpu; did you mean 'tpu'?",
            ),
            (["plan", "--config=configs/nothing.py"], "configs/nothing.py"),
            (
                ["explain", "--config=configs/sums.py", "--cnofig.seed=3"],
                "argument '--cnofig.seed=3' is unknown",
            ),
            (["train", "--config=configs/sums.py", "--plann"], "did you mean '--plan'?"),
            (["launch", "--status=nowhere"], "nowhere/slurm/jobs.jsonl does not exist"),
            (
                ["encode-audio", "nowhere.json", "--codec=none.npz"],
                "none.npz does not exist; name a codec.npz",
            ),
            (["train-codec", "codec.npz", "nowhere"], "nowhere does not exist"),
        ]
    ),
)
def test_an_error_is_one_line_with_its_remedy(argv, text, capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    try:
        code = cli.main(argv)
    except SystemExit as end:
        code = end.code
    told = capsys.readouterr()
    assert code == 2 and not told.out and told.err.startswith("error: ") and text in told.err
    assert len(told.err.splitlines()) <= 2, (
        "the line, or a line about a config and one for its problem"
    )


@pytest.mark.parametrize(
    "name", there(["embed", "export", "lora-to-peft", "generate-audio", "checkpoint"])
)
def test_every_command_reports_a_path_without_a_run_the_same_way(name, tmp_path, capsys):
    rest = {"generate-audio": ["a dog", "--out", str(tmp_path / "out")], "checkpoint": []}
    for path, what in ((tmp_path / "none", "does not exist"), (tmp_path, "holds no step")):
        command = [name, *(["verify"] if name == "checkpoint" else []), str(path)]
        assert cli.main([*command, *rest.get(name, ["--out", str(tmp_path / "out")])]) == 2
        expected = (
            "expected a run's workdir, a step directory of it, or a folder of `jaxtrain export`"
        )
        assert capsys.readouterr().err == f"error: {path} {what}; {expected}\n"


STORES = [
    ("gs://b/x", "needs gcsfs; pip install 'jaxtrain[gcs]'"),
    ("ss://b/x", "is in no store of checkpoints; expected one of: gs"),
]


@pytest.mark.parametrize(("run", "text"), STORES)
@pytest.mark.parametrize(
    "argv",
    there(
        [
            "embed {run} --out o",
            "detect {run} recordings --out o",
            "lora-to-peft {run} --out o",
            "generate {run} hello",
            "checkpoint verify {run}",
            "export {run} --out o",
            "export --reverse {run} --out o",
        ]
    ),
)
def test_a_store_that_cannot_be_read_is_reported(argv, run, text, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "gcsfs", None)  # as if gcsfs were not installed
    assert cli.main(argv.format(run=run).split()) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"error: {run} {text}") and len(said.splitlines()) == 1


@pytest.mark.parametrize(("path", "text"), STORES)
@pytest.mark.parametrize("field", ["checkpoint.folder", "resume.path", "warm_start.source"])
def test_a_store_in_a_config_that_cannot_be_read_is_reported(
    field, path, text, monkeypatch, tmp_path
):
    monkeypatch.setitem(sys.modules, "gcsfs", None)
    with pytest.raises(config_lib.ConfigError) as error:
        config_lib.load(
            str(small_runs.rows(tmp_path) / "rows.py"), [("workdir", str(tmp_path)), (field, path)]
        )
    assert (
        str(error.value).startswith(f"config.{field} is {path!r}, which {text}")
        and len(error.value.problems) == 1
    )


def test_arguments_without_a_command_are_those_of_train(capsys, monkeypatch):
    """`jaxtrain --config=…` trained a model before there were commands."""
    seen = []
    monkeypatch.setattr("jaxtrain.commands.train.main", lambda argv: seen.append(argv) or 0)
    for argv in (
        ["--config=a.py"],
        ["--config", "a.py"],
        ["--plan=gpu:h100x8", "--config=a.py"],
        ["--explain", "--config=a.py"],
    ):
        assert cli.main(argv) == 0 and seen[-1] == argv
    assert cli.main(["train", "--config=a.py"]) == 0 and seen[-1] == ["--config=a.py"]
    assert cli.main(["--confg=a.py"]) == 2 and len(seen) == 5


def test_plan_and_explain_are_what_train_prints(capsys, tmp_path):
    config = f"--config={small_runs.rows(tmp_path)}/rows.py"
    assert cli.main(["explain", config, "--config.train.steps=70"]) == 0
    explained = capsys.readouterr().out
    assert "config.train.steps" in explained
    assert cli.main(["train", config, "--config.train.steps", "70", "--explain"]) == 0
    assert capsys.readouterr().out == explained


def test_the_old_names_are_the_commands():
    for module, name in (
        ("jaxtrain.main", "train"),
        ("tools.orbax_to_safetensors", "export"),
        ("tools.launch_slurm", "launch"),
    ):
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        command = [sys.executable, "-m", module, "--help"]
        done = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 0 and done.stdout.startswith(f"usage: jaxtrain {name}"), (
            done.stderr
        )


@pytest.mark.parametrize(
    ("error", "code", "text"),
    [
        (KeyboardInterrupt(), 130, "interrupted"),
        (PermissionError(13, "Permission denied", "/data/x"), 2, "/data/x: Permission denied"),
        (
            OSError(28, "No space left on device", "/data/x"),
            2,
            "/data/x could not be written: No space left on device; free some",
        ),
        (
            OSError(40, "Too many levels of symbolic links", "/data/x"),
            2,
            "/data/x: Too many levels of symbolic links; name",
        ),
        (KeyError("known"), 2, "known"),
    ],
)
def test_the_exit_code_of_a_command_tells_how_it_ended(error, code, text, capsys):
    def action():
        raise error

    assert arguments.run(action, errors=(KeyError,)) == code
    assert text in capsys.readouterr().err


def test_an_interruption_before_the_work_begins_has_no_traceback(capsys, monkeypatch):
    def interrupted(argv):
        raise KeyboardInterrupt

    monkeypatch.setattr("jaxtrain.commands.export.main", interrupted)
    assert cli.main(["export", "run"]) == 130 and capsys.readouterr().err == "error: interrupted\n"


def test_a_bug_keeps_its_traceback():
    with pytest.raises(ZeroDivisionError):
        arguments.run(lambda: 1 // 0)


def test_a_reader_may_close_the_output_early(tmp_path):
    config = f"--config={small_runs.rows(tmp_path)}/rows.py"
    command = (
        f"{sys.executable} -m jaxtrain.cli explain {config} | head -1; exit ${{PIPESTATUS[0]}}"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        ["bash", "-c", command],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0 and done.stderr == "" and len(done.stdout.splitlines()) == 1


@pytest.mark.parametrize(
    ("words", "reader"),
    [
        ("", "head -1"),
        ("", "true"),
        ("--version", "true"),
        ("train --help", "true"),
        ("help plan", "true"),
        ("runs .", "true"),
    ],
)
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_closed_output_is_not_an_error(words, reader, unbuffered, tmp_path):
    """A pipe breaks when it is written to after its reader has gone. A buffer may delay that until
    Python exits."""
    command = (
        f"{{ sleep 0.3; {sys.executable} -m jaxtrain.cli {words}; }} | {reader}; exit"
        " ${PIPESTATUS[0]}"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": unbuffered}
    done = subprocess.run(
        ["bash", "-c", command],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_a_terminal_without_a_character_gets_its_escape(encoding):
    for words in ([], ["--help"], ["--version"], ["plan", "--help"]):
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONIOENCODING": encoding}
        command = [sys.executable, "-m", "jaxtrain.cli", *words]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
        assert (done.returncode, done.stderr) == (0, "") and done.stdout, words


def test_an_error_keeps_its_exit_code_if_the_output_is_closed():
    command = f"{sys.executable} -m jaxtrain.cli plan gpu:h100x8 | true; exit ${{PIPESTATUS[0]}}"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        ["bash", "-c", command],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 2 and "file is missing" in done.stderr


@pytest.mark.parametrize(
    ("argv", "name"),
    there(
        [
            (["train", "--config=configs/nothing.py", "--help"], "train"),
            (["train", "--nonsense", "-h"], "train"),
            (["--config=configs/nothing.py", "--help"], "train"),
            (["--config", "--help"], "train"),
            (["plan", "--config", "--help"], "plan"),
            (["explain", "--config.train.steps", "--help"], "explain"),
            (["launch", "--nodes=none", "--help"], "launch"),
            (["sudoku", "--kind=none", "--help"], "sudoku"),
            (["checkpoint", "--nonsense", "--help"], "checkpoint"),
            (["checkpoint", "verify", "--nonsense", "--help"], "checkpoint verify"),
            (["help", "export"], "export"),
            (["--help", "export"], "export"),
        ]
    ),
)
def test_help_is_given_wherever_it_is_asked_for(argv, name, capsys):
    try:
        code = cli.main(argv)
    except SystemExit as end:
        code = end.code or 0
    told = capsys.readouterr()
    assert (code, told.err) == (0, "") and told.out.startswith(f"usage: jaxtrain {name} ")


def test_help_behind_an_unknown_command_is_the_list(capsys):
    assert cli.main(["tran", "--help"]) == 0
    assert capsys.readouterr().out == f"{cli.listing(commands.table())}\n"


def run_in(folder, *argv, **environment):
    """Run a command in a process of its own, which imports from ``folder`` before all else."""
    env = {**os.environ, "PYTHONPATH": f"{folder}{os.pathsep}{ROOT}", **environment}
    command = [sys.executable, "-X", "importtime", "-m", "jaxtrain.cli", *argv]
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=60)
    said = [line for line in done.stderr.splitlines() if not line.startswith("import time:")]
    imported = {
        line.rpartition("|")[2].strip()
        for line in done.stderr.splitlines()
        if line.startswith("import time:")
    }
    return done.returncode, said, imported


@pytest.mark.parametrize(
    "argv",
    there([["train", "--config=xcm"], ["plan", "--config=xcm"], ["embed", "run", "--out=x"]]),
)
def test_a_cache_that_cannot_be_written_is_reported_before_jax_is_imported(argv, tmp_path):
    (tmp_path / "file").touch()
    code, said, imported = run_in(tmp_path, *argv, JAXTRAIN_CACHE=str(tmp_path / "file" / "cache"))
    assert code == 2 and "jax" not in imported and "numpy" not in imported
    assert said == [
        f"error: the cache folder {tmp_path}/file/cache cannot be written (Not a directory); "
        "set JAXTRAIN_CACHE to a folder that can be"
    ]
    assert (
        run_in(tmp_path, argv[0], "--help", JAXTRAIN_CACHE=str(tmp_path / "file" / "cache"))[0] == 0
    )


HOMELESS = "~no-such-user/x: there is no such home on this machine; write the path out"
OUT = ["~no-such-user/x", "--out", "y"]


BIRDS = pytest.param(["train", "--config=xcm:~no-such-user/x"], marks=installed.needs("bird"))


@pytest.mark.parametrize("argv", [*there([["fit", *OUT], ["export", *OUT]]), BIRDS])
def test_a_path_without_a_home_folder_is_reported(argv, capsys):
    assert cli.main(argv) == 2
    assert capsys.readouterr().err in (
        f"error: {HOMELESS}\n",
        f"error: config.data.train {HOMELESS}\n",
    )


def test_a_path_without_a_home_folder_is_an_error_of_python_code(tmp_path):
    with pytest.raises(checks.UserError, match=re.escape(HOMELESS)):
        config_lib.load(
            str(small_runs.rows(tmp_path) / "rows.py"), [("workdir", "~no-such-user/x")]
        )


def test_a_cache_without_a_home_folder_is_reported(monkeypatch):
    monkeypatch.setenv("JAXTRAIN_CACHE", "~no-such-user/cache")
    assert installation.unwritable_cache().startswith(
        "the cache folder of this user cannot be written (there is no such home);"
    )
    with pytest.raises(FileNotFoundError, match="no such home: '~no-such-user/cache'"):
        machine.cache_folder()


@pytest.mark.parametrize(
    ("needed", "text"),
    [
        ("jax>=99.1", "and jaxtrain needs 99.1 or newer; pip install --upgrade 'jax>=99.1'"),
        (
            "no-such-package>=2",
            "the package no-such-package is missing; pip install --upgrade 'no-such-package>=2'",
        ),
        ("no-such-package>=2; extra == 'slurm'", ""),
    ],
)
def test_packages_that_are_missing_or_too_old_are_reported_before_jax_is_imported(
    needed, text, tmp_path
):
    """The packages are as pip leaves them if another version is installed afterwards."""
    about = tmp_path / "jaxtrain-0.1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(
        f"Metadata-Version: 2.4\nName: jaxtrain\nVersion: 0.1.0\nRequires-Dist: {needed}\n"
    )
    code, said, imported = run_in(tmp_path, "export", "nowhere", "--out=x")
    assert code == 2 and len(said) == 1
    assert (
        ("jax" not in imported and said[0].endswith(text))
        if text
        else "nowhere does not exist" in said[0]
    )


@pytest.mark.parametrize(
    ("version", "least", "is_old"),
    [
        ("0.10", "0.10.0", False),
        ("0.10.0", "0.10", False),
        ("0.10.0rc1", "0.10.0", False),
        ("0.10.1", "0.10", False),
        ("0.9.9", "0.10.0", True),
        ("0", "0.1", True),
    ],
)
def test_zeros_at_the_end_of_a_version_do_not_count(version, least, is_old, monkeypatch):
    monkeypatch.setattr(installation, "_version", lambda name: version)
    assert bool(installation.package_problem([f"jax>={least}"])) is is_old


@pytest.mark.parametrize(
    ("argv", "package", "text"),
    [
        (
            "launch --config=sums --dry-run",
            "submitit",
            "the package submitit is missing; pip install 'jaxtrain[slurm]'",
        ),
        pytest.param(
            "export run --out x --format onnx",
            "onnx",
            "--format onnx: the package onnx is missing; pip install 'jaxtrain[onnx]'",
            marks=installed.needs("bird"),
        ),
        (
            "export x --push me/it",
            "huggingface_hub",
            "--push: the package huggingface_hub is missing; pip install huggingface_hub",
        ),
    ],
)
def test_a_package_of_an_extra_that_is_missing_is_reported_before_jax_is_imported(
    argv, package, text, tmp_path
):
    (tmp_path / "sitecustomize.py").write_text(f"import sys\nsys.modules[{package!r}] = None\n")
    code, said, imported = run_in(tmp_path, *argv.split())
    assert code == 2 and said == [f"error: {text}"] and not {"jax", "orbax"} & imported


def test_an_extension_that_was_not_built_is_reported(tmp_path):
    for part in ("jaxtrain", "loaders"):
        shutil.copytree(
            ROOT / part, tmp_path / part, ignore=shutil.ignore_patterns("*.pyc.*", "*.so")
        )
    code, said, _ = run_in(tmp_path, "train", "--config=xcm")
    assert code == 2 and said == [
        "error: the extension loaders._rust is not built; say `make train` in the checkout, or pip"
        " install its wheel"
    ]


@pytest.mark.parametrize(
    "argv",
    there(
        [
            ["train", "--config=xcm"],
            ["index", "recordings", "--out=x"],
            ["encode-audio", "a", "--codec=b"],
            ["sudoku", "x"],
        ]
    ),
)
def test_a_debug_build_is_reported_before_jax_is_imported(argv, tmp_path):
    """The extension of this test is the real one, with a changed description of its build."""
    stand_in = "import sys, loaders._rust as m\nm.build_profile = lambda: 'debug'\n"
    (tmp_path / "sitecustomize.py").write_text(stand_in)
    code, said, imported = run_in(tmp_path, *argv)
    remedy = (
        "say `make train` in the checkout, or pip install its wheel, or train with it"
        " nevertheless: "
    )
    text = (
        f"a debug build, which is many times slower; {remedy}--config.data.allow_debug_build=True"
    )
    assert (
        code == 2
        and "jax" not in imported
        and said == [f"error: the extension loaders._rust is {text}"]
    )
    assert run_in(tmp_path, argv[0], "--help")[0] == 0


@pytest.mark.parametrize(
    ("words", "allows"),
    [
        ("--config=xcm --config.data.allow_debug_build=True", True),
        ("--config.data.allow_debug_build true --config=xcm", True),
        ("--config=xcm --config.data.allow_debug_build=False", False),
        ("--config=xcm --config.data.allow_debug_build", False),
    ],
)
def test_a_config_may_allow_a_debug_build(words, allows, monkeypatch):
    monkeypatch.setattr("loaders._rust.build_profile", lambda: "debug")
    assert bool(installation.problem(words.split(), caches=False)) is not allows


def test_the_version_needs_no_installation(monkeypatch, capsys):
    """A checkout on PYTHONPATH has no metadata. The tasks of `jaxtrain launch --container` use
    one."""
    of_a_package = importlib.metadata.version

    def version(name):
        if name == "jaxtrain":
            raise importlib.metadata.PackageNotFoundError(name)
        return of_a_package(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    assert cli.main(["--version"]) == 0
    assert re.fullmatch(
        rf"jaxtrain {re.escape(jaxtrain.__version__)}( \(commit \w+\))?\n", capsys.readouterr().out
    )
    assert cluster.versions() == {
        "jaxtrain": jaxtrain.__version__,
        **{name: version(name) for name in processes.VERSIONED},
    }
    assert (
        tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
        == jaxtrain.__version__
    )


def test_python_m_jaxtrain_is_the_command(capsys):
    assert cli.main(["--version"]) == 0
    command = [sys.executable, "-m", "jaxtrain", "--version"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, capsys.readouterr().out)


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="an installed package has no commit")
def test_the_version_of_a_checkout_names_its_commit(capsys):
    assert cli.main(["--version"]) == 0
    command = ["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    assert capsys.readouterr().out == f"jaxtrain {jaxtrain.__version__} (commit {commit})\n"


def test_a_python_that_is_too_old_is_reported():
    """The report comes before any syntax that the old Python does not know."""
    program = "import sys; sys.version_info = (3, 10, 2); import jaxtrain.cli"
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 2
    assert done.stderr == "error: jaxtrain needs Python 3.11 or newer, and this is 3.10\n"


def test_the_installed_command_finds_a_folder_of_the_users_modules(tmp_path):
    """`python -m jaxtrain.main` has the working directory on its path, and so has the installed
    `jaxtrain`."""
    (tmp_path / "my_config.py").write_text(
        "import my_words\n\n\ndef get_config():\n    raise ValueError(my_words.TEXT)\n"
    )
    (tmp_path / "my_words.py").write_text("TEXT = 'found'\n")
    program = "import sys; sys.path.remove(''); from jaxtrain.cli import start; sys.exit(start())"
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", program, "train", "--config=my_config.py"]
    done = subprocess.run(
        command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60
    )
    assert "says: found" in done.stderr, done.stderr


def test_a_folder_of_others_is_no_place_for_modules(monkeypatch):
    monkeypatch.setattr(cli, "main", lambda: 0)
    for argv, is_on_path in (
        ("tokens o i", False),
        ("embed r --out o", False),
        ("x --config=a", True),
        ("export r --workload m", True),
    ):
        monkeypatch.setattr(sys, "argv", ["jaxtrain", *argv.split()])
        monkeypatch.setattr(sys, "path", [])
        cli.start()
        assert sys.path == [os.getcwd()] * is_on_path


def test_the_suggested_next_command_extends_the_typed_one(tmp_path):
    """The words are quoted as needed. After a run that keeps only weights, commands that need more
    are not suggested."""
    (tmp_path / "metrics.jsonl").touch()
    words = [
        "--config=lm:qwen3-0.6b",
        "--config.data.sources=({'path': 'a b'},)",
        "--config.optim.undecayed=$x'\"",
        "--config.seed=3",
    ]
    overrides = [tuple(word.removeprefix("--config.").split("=", 1)) for word in words[1:]]
    given = config_lib.Arguments("lm:qwen3-0.6b", [*overrides, ("train.steps", "40")], False, None)
    run = config_lib.Config(
        workdir=str(tmp_path), train=config_lib.Train(steps=40), workload="tests.support.toy"
    )
    lines = dict(
        line.strip().split(": ", 1)
        for line in train.last_lines(given, run).splitlines()
        if ": " in line
    )
    assert shlex.split(lines["to train for longer"]) == [
        "jaxtrain",
        "train",
        *words,
        "--config.train.steps=80",
    ]
    assert "\"--config.data.sources=({'path': 'a b'},)\"" in lines["to train for longer"], (
        "as a person would quote it"
    )
    assert lines["records of training and evaluations, a line each"] == str(
        tmp_path / "metrics.jsonl"
    )
    assert "embed" not in " ".join(lines.values()), "which is for recordings"
    ended = dataclasses.replace(
        run, checkpoint=config_lib.Checkpoint(final="weights"), lora=config_lib.Lora(rank=4)
    )
    text = train.last_lines(given, ended)
    assert "to train for longer" not in text and f" lora-to-peft {tmp_path} --out " in text


def test_the_suggested_commands_find_a_users_workload_next_to_its_config(tmp_path, monkeypatch):
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "words_of_mine.py").write_text(
        "from jaxtrain import Workload\nWORKLOAD = Workload(None, None)\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path / "own")
    run = config_lib.Config(workdir="runs/x", workload="words_of_mine")
    text = train.last_lines(config_lib.Arguments("own/words.py:a", [], False, None), run)
    assert (
        f": PYTHONPATH={tmp_path}/own:$PYTHONPATH jaxtrain --workload words_of_mine export runs/x"
        in text
    )
    monkeypatch.chdir("own")
    text = train.last_lines(config_lib.Arguments("words.py:a", [], False, None), run)
    assert ": jaxtrain --workload words_of_mine checkpoint inspect runs/x" in text


@pytest.mark.parametrize(
    ("body", "code", "said"),
    [("return 2", 2, ""), ("raise ValueError('a bug')", 1, "ValueError: a bug")],
)
def test_no_process_waits_for_a_compilation_that_nobody_needs(body, code, said):
    """The interpreter itself would wait: an error in reading a checkpoint would keep a job alive
    for minutes."""
    program = (
        "import sys, time, concurrent.futures\nfrom jaxtrain import cli\nfrom jaxtrain.run"
        " import step_compiler as programs\nconcurrent.futures.ThreadPoolExecutor(1,"
        " thread_name_prefix=programs.THREAD).submit(time.sleep, 100)\ndef run():\n    print('the"
        f" error')\n    {body}\nsys.exit(cli.process(run))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == code and done.stdout == "the error\n" and said in done.stderr


def test_a_process_without_compilations_exits_normally():
    with pytest.raises(ZeroDivisionError):
        cli.process(lambda: 1 // 0)
    program = (
        "import atexit, os, signal, sys\nfrom jaxtrain import cli\n"
        "atexit.register(os.kill, os.getpid(), signal.SIGINT)\n"
        "sys.exit(cli.process(lambda: 75))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (75, ""), "Ctrl-C as the interpreter ends"
