"""The pages: their links lead somewhere, and the output of commands in them is up to date."""

import ast
import json
import math
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tomllib

import pytest

from tests import docs_data
from tests.support import processes
from tests.support.installed import needs
from tests.support.pages import examples
from tools import write_reference

ROOT = pathlib.Path(__file__).parent.parent
FRONT = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md")]
PAGES = [*FRONT, *sorted((ROOT / "docs").rglob("*.md"))]
MODEL = ROOT / "docs" / "examples" / "my_model.py"


def anchors(path: pathlib.Path) -> set[str]:
    """The anchors of a page's headings, in the spelling of GitHub and other forges."""
    headings = re.findall(r"^#+ (.*)$", path.read_text(), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if "://" in target:
            continue
        name, _, anchor = target.partition("#")
        file = (page.parent / name).resolve() if name else page
        assert file.exists(), f"{page.name} links to {target}, which does not exist"
        assert not anchor or anchor in anchors(file), (
            f"{page.name} links to {target}, and {file.name} has no such heading"
        )


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_paths_in_a_page_exist(page):
    """A module, test or config that a page names in code exists, such as `jaxtrain/run/loop.py` or
    `tests/test_kills.py`."""
    named = set(
        re.findall(
            r"(?<![\w/.-])((?:jaxtrain|loaders|rust|configs|tests|tools)/[\w/]+\.(?:py|rs|sh|png))",
            page.read_text(),
        )
    )
    assert not {name for name in named - set(examples()) if not (ROOT / name).exists()}


def test_the_readme_is_a_page_and_shows_the_model_that_is_run():
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) <= 125
    assert MODEL.read_text() in text, "docs/examples/my_model.py is the file of the README"
    assert len(MODEL.read_text().splitlines()) <= 46


def test_the_model_of_the_readme_trains_on_one_device_and_on_eight(tmp_path):
    docs_data.birds(tmp_path)
    losses = []
    for workdir, mesh in (("runs/one", ""), ("runs/eight", "--config.mesh.fsdp=8")):
        small = (
            "--config.data.train=data/XCM",
            "--config.train.steps=20",
            "--config.train.batch=16",
        )
        where = f"--config.workdir={workdir}"
        output = processes.run(
            tmp_path, str(MODEL), *small, where, *mesh.split(), devices=8 if mesh else 1
        )
        losses.append(float(re.findall(r"step 20 test .*loss ([\d.]+)", output)[-1]))
    assert losses[0] == pytest.approx(losses[1], rel=1e-3) and losses[0] < 1.2, (
        "three classes: ln 3 is 1.1"
    )


def test_the_reference_is_what_the_configs_say():
    assert write_reference.PAGE.read_text() == write_reference.page()


def python(folder: pathlib.Path, *arguments: str, **variables: str) -> str:
    env = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"} | {
        "PYTHONPATH": f"{folder}:{ROOT}",
        **variables,
    }
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env=env,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def jaxtrain(folder: pathlib.Path, *commands: str, code: int = 0) -> str:
    """Run commands as they are typed, in one process. Each has to exit with ``code``."""
    codes = "[cli.main(shlex.split(x)[1:]) for x in sys.argv[2:]]"
    program = (
        f"import shlex, sys; from jaxtrain import cli; sys.exit(set({codes}) !="
        " {int(sys.argv[1])})"
    )
    return python(folder, "-c", program, str(code), *commands)


@pytest.mark.parametrize(
    "optim",
    [(), ("name=my_optim:optimizer", "arguments.weight_decay=0.2", "schedule=my_optim:triangle")],
)
def test_the_workload_the_loader_and_the_optimizer_of_your_model_train(tmp_path, optim):
    for name in ("my_workload.py", "my_config.py", "my_loader.py", "my_optim.py"):
        (tmp_path / name).write_text(examples()[name])
    output = processes.run(tmp_path, "my_config.py", *(f"--config.optim.{x}" for x in optim))
    last = float(re.findall(r"step 200 test  loss ([\d.]+)", output)[-1])
    assert last < 0.5, "the variance of the sum of eight numbers is 0.67"


def test_the_objective_of_your_model_is_one(tmp_path):
    (name,) = [name for name in examples() if "objectives/" in name]
    for part in ("jaxtrain", "loaders"):
        shutil.copytree(ROOT / part, tmp_path / part, ignore=shutil.ignore_patterns("*.pyc.*"))
    (tmp_path / name).write_text(examples()[name])
    code = (
        "from jaxtrain.workloads.bird import model as bird; print(bird.Config(n_classes=2,"
        " energy=dict(weight=1.0)).energy)"
    )
    assert "weight" in python(tmp_path, "-c", code)


def test_the_workload_of_your_model_has_a_command_and_a_glossary(tmp_path):
    for name in ("my_workload.py", "my_config.py", "my_loader.py", "my_command.py"):
        (tmp_path / name).write_text(examples()[name])
    (tmp_path / "metrics.jsonl").write_text("1\n2\n3\n")
    own = "jaxtrain --workload my_workload"
    output = jaxtrain(
        tmp_path, f"{own} show-metrics . --last 2", own, "jaxtrain explain --config=my_config.py"
    )
    assert output.split()[:2] == ["2", "3"]
    assert "print the newest records of a run" in output and "squared error of the sum" in output


def test_the_workload_of_contributing_has_a_command_and_a_glossary(tmp_path):
    shutil.copy(MODEL, tmp_path)
    (tmp_path / "my_best.py").write_text(examples()["my_best.py"])
    records = [{"split": "test", "accuracy": accuracy} for accuracy in (0.25, 0.75, 0.5)]
    (tmp_path / "metrics.jsonl").write_text(
        "".join(f"{json.dumps(record)}\n" for record in records)
    )
    explain = "jaxtrain explain --config=my_model.py --config.workload=my_best"
    output = jaxtrain(tmp_path, "jaxtrain --workload my_best best .", explain)
    assert (
        output.split()[0] == "0.75"
        and "share of recordings whose class was the likeliest" in output
    )


@pytest.mark.slow
@needs("language")
def test_a_shipped_workload_with_one_more_metric_keeps_its_commands(tmp_path):
    """The run's last lines are commands that work as they are printed."""
    (tmp_path / "my_language.py").write_text(examples()["my_language.py"])
    (tmp_path / "input.txt").write_text(
        "ROMEO: one two three four five six seven eight nine ten\n" * 200
    )
    sizes = ("embed=32", "depth=1", "heads=2", "mlp=32", "unroll=1", "generation.tokens=2")
    small = [
        *(f"--config.model.{size}" for size in sizes),
        "--config.train.steps=2",
        "--config.train.eval_batches=1",
    ]
    own = ("--config.workload=my_language", "--config.workdir=runs/bits")
    output = processes.run(tmp_path, "shakespeare_char:input.txt", *own, *small)
    last = json.loads((tmp_path / "runs/bits/metrics.jsonl").read_text().splitlines()[-1])
    assert last["bits_per_token"] == pytest.approx(last["cross_entropy"] / math.log(2))
    page, _, export, inspect = re.findall(r": (jaxtrain .*)", output.partition("\nnext\n")[2])
    generate = 'jaxtrain --workload my_language generate runs/bits "one " --tokens 4'
    assert "have no meanings here" not in jaxtrain(tmp_path, page, export, inspect, generate)
    assert "cross_entropy in bits" in (tmp_path / "runs/bits/report.html").read_text()
    assert "exponential of cross_entropy" in (tmp_path / "runs/bits-weights/README.md").read_text()
    refused = jaxtrain(tmp_path, "jaxtrain generate runs/bits one", code=2)
    assert (
        "is a run of my_language; expected a run of jaxtrain.workloads.language (if my_l" in refused
    )


WRONG = (
    (
        "my_workload.py",
        '"y": ("batch",), ',
        "",
        "the loss reads batch['y'], which the axes of the task of my_workload do not have",
    ),
    (
        "my_loader.py",
        "base.Field((8,), number)",
        "((8,), number)",
        "as 'x'; expected loaders.base.Field(shape, dtype)",
    ),
    (
        "my_loader.py",
        "    return Sums(",
        "    yield Sums(",
        "whose make_loader gives a generator without 'buckets'; expected a loaders.base.Loader",
    ),
    (
        "my_loader.py",
        "self.order = {}",
        "",
        "whose make_loader gives a Sums without 'order'; expected a loaders.base.Loader",
    ),
)


@pytest.mark.parametrize(
    ("name", "text", "replacement", "error"), WRONG, ids=("axes", "fields", "generator", "order")
)
def test_an_error_in_a_users_workload_or_loader_is_one_line(
    tmp_path, name, text, replacement, error
):
    for each in ("my_workload.py", "my_config.py", "my_loader.py"):
        (tmp_path / each).write_text(examples()[each])
    path = tmp_path / name
    path.write_text(path.read_text().replace(text, replacement))
    output = processes.run(tmp_path, "my_config.py", code=2)
    assert "Traceback" not in output
    assert error in output


def test_the_pages_count_the_kills_of_the_newest_proof():
    (kills,) = re.findall(
        r"^\| kills \| (\d+) kills ", (ROOT / "docs/results/proofs.md").read_text(), re.M
    )
    counts = {
        "README.md": "{} runs on CPUs were killed",
        "docs/reliability.md": "({} of them, `tests/test_kills.py`)",
        "docs/results/index.md": "| {} kills and",
    }
    assert [
        page for page, text in counts.items() if text.format(kills) not in (ROOT / page).read_text()
    ] == []


def test_examples_parse():
    assert len(examples()) == 9
    for text in examples().values():
        ast.parse(text)


def test_each_extra_has_its_row():
    page = (ROOT / "docs" / "install.md").read_text()
    table = page[page.index("| extra | for |") :].partition("\n\n")[0]
    named = {
        name
        for line in table.splitlines()[2:]
        for name in re.findall(r"`([a-z0-9]+)`", line.split("|")[1])
    }
    assert named == set(
        tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    )


def test_every_file_states_the_same_version():
    def stated(name, pattern):
        return set(re.findall(pattern, (ROOT / name).read_text(), re.M))

    versions = {
        "pyproject.toml": stated("pyproject.toml", r'^version = "(.*)"'),
        "jaxtrain/__init__.py": stated("jaxtrain/__init__.py", r'^__version__ = "(.*)"'),
        "CITATION.cff": stated("CITATION.cff", r"^version: (.*)"),
        "CHANGELOG.md": set(
            re.findall(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.M)[:1]
        ),
        "docs/install.md": stated("docs/install.md", r"jaxtrain-([\d.]+)-"),
        "rust/Cargo.toml": stated("rust/Cargo.toml", r'^version = "(.*)"'),
    }
    crates = r'name = "jaxtrain-(?:decode|loader|loader-python)"\nversion = "(.*)"'
    for lock in ("rust/Cargo.lock", "rust/fuzz/Cargo.lock"):
        versions[lock] = stated(lock, crates)
    (version,) = versions["pyproject.toml"]
    assert versions == dict.fromkeys(versions, {version})


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_code_fits_into_its_box(page):
    """A window of 1,300 pixels shows 103 columns of code (docs/site.css)."""
    blocks = re.findall(r"^ *```\w*\n(.*?)^ *```", page.read_text(), re.M | re.S)
    assert not [line for text in blocks for line in text.splitlines() if len(line) > 100]


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_fields_that_a_page_sets_exist(page):
    """Fields of the reader's own code (`model.energy`) and of other programs are not listed."""
    fields = set(re.findall(r"^\| `([\w.]+)`", write_reference.PAGE.read_text(), re.M))
    known = fields | {field.rpartition(".")[0] for field in fields}
    named = set(re.findall(r"config\.((?:\w+\.)+\w+)", page.read_text()))
    others = ("compiler.", "optim.arguments.", "model.energy.")
    assert not {name for name in named - known if not name.startswith(others)}


def test_the_pages_quote_the_speed_of_the_loader_from_its_table():
    page = (ROOT / "docs" / "results" / "loader.md").read_text()
    (table,) = re.findall(r"^\| examples/s.*?\n\n", page, re.M | re.S)
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.strip().split("\n")]
    _, _, ours, *others, ratios = rows
    assert len(others) == 11
    libraries = [row for row in others if not re.search(r"^our composition|our parts$", row[0])]
    to_the_best = [float(ratio.rstrip("×")) for ratio in ratios[1:]]
    to_libraries = [
        float(ours[i]) / max(float(row[i]) for row in libraries) for i in range(1, len(ours))
    ]
    for name in ("README.md", "docs/loader.md", "docs/results/index.md"):
        text = (ROOT / name).read_text()
        for figures in (to_the_best, to_libraries):
            assert f"{min(figures):.1f} to {max(figures):.1f} times as fast" in text, name
