"""The parts of the slow proofs: each slow test is in one of them, and their results are on the
page."""

import ast
import pathlib
import subprocess

import pytest

from tests.proofs import parts as proofs

ROOT = pathlib.Path(__file__).resolve().parents[2]


def slow_tests(path: pathlib.Path) -> set[str]:
    """The names of a file's tests with some slow case: marked slow itself, or by a slow constant
    of its module."""
    tree = ast.parse(path.read_text())

    def is_slow(node: ast.AST, names: set[str]) -> bool:
        return any(
            (isinstance(n, ast.Attribute) and n.attr == "slow")
            or (isinstance(n, ast.Name) and n.id in names)
            for n in ast.walk(node)
        )

    names: set[str] = set()
    for _ in range(2):  # a constant may be built from another
        for node in tree.body:
            if isinstance(node, ast.Assign) and is_slow(node.value, names):
                names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    tests = [
        node
        for node in tree.body
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    ]
    if "pytestmark" in names:
        return {test.name for test in tests}
    return {
        test.name
        for test in tests
        if any(is_slow(decorator, names) for decorator in test.decorator_list)
    }


def test_every_slow_test_is_in_exactly_one_part():
    own = [part for part in proofs.PARTS.values() if not part.on_newest_jax]
    named = [name for part in own for name in part.tests]
    assert len(named) == len(set(named))
    found = {
        str(path.relative_to(ROOT)): slow_tests(path)
        for path in sorted((ROOT / "tests").rglob("test_*.py"))
    }
    assert sum(map(len, found.values())) > 40
    for file, tests in found.items():
        for test in tests:
            parts = [name for name in named if name in (file, f"{file}::{test}")]
            assert len(parts) == 1, (
                f"{file}::{test} is in {len(parts)} parts of tests/proofs/parts.py"
            )
    for name in named:
        file, _, test = name.partition("::")
        assert found[file] and (not test or test in found[file]), f"{name} names no slow test"


def test_the_makefile_runs_them_and_test_all_is_their_sum():
    makefile = (ROOT / "Makefile").read_text()
    assert "-m tests.proofs $*" in makefile
    assert "\ntest-all: test\n" in makefile


@pytest.mark.parametrize("workers", [1, 2])
def test_a_part_that_takes_too_long_says_what_it_has_found(tmp_path, monkeypatch, capfd, workers):
    tests = (
        "def test_good(): pass\ndef test_bad(): assert 'found' == 'lost'\ndef test_long():"
        " time.sleep(600)\n"
    )
    (tmp_path / "test_few.py").write_text(
        f"import time, pytest\npytestmark = pytest.mark.slow\n{tests}"
    )
    monkeypatch.setitem(
        proofs.PARTS, "few", proofs.Part("a few", str(tmp_path / "test_few.py"), workers)
    )
    monkeypatch.setattr(proofs, "MINUTES", 0.25)
    result = proofs.run("few")
    assert (result.passed, result.failed, result.skipped) == (1, 1, 0)
    assert "assert 'found' == 'lost'" in capfd.readouterr().out


def test_a_row_names_the_commit_that_was_run(tmp_path, monkeypatch):
    """The row does not name a commit that was made meanwhile, and it names a file that is not
    committed."""

    def git(*arguments):
        own = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
        return subprocess.run(
            ["git", "-C", str(tmp_path), *own, *arguments],
            capture_output=True,
            text=True,
            check=True,
        ).stdout

    page = tmp_path / "docs" / "results" / "proofs.md"
    page.parent.mkdir(parents=True)
    page.write_text(proofs.PAGE.read_text())
    git("init")
    git("add", ".")
    git("commit", "--message=first")
    first = git("rev-parse", "--short=12", "HEAD").strip()
    for name, value in (
        ("ROOT", tmp_path),
        ("PAGE", page),
        ("run", lambda name: proofs.Result(1, 0, 0, 2.0)),
    ):
        monkeypatch.setattr(proofs, name, value)
    assert proofs.main(["kills"]) == proofs.main(["plan"]) == 0, (
        "the page's own rows change nothing"
    )
    assert all(
        f"| {first} |" in proofs.rows_of(page.read_text())[name] for name in ("kills", "plan")
    )

    def run(name):
        git("commit", "--all", "--message=second")
        return proofs.Result(1, 0, 0, 2.0)

    monkeypatch.setattr(proofs, "run", run)
    proofs.main(["kills"])
    assert f"| {first}, changed meanwhile |" in proofs.rows_of(page.read_text())["kills"]
    (tmp_path / "new.py").touch()
    assert proofs.commit().endswith("-dirty")


@pytest.mark.parametrize("failures", [0, 1])
def test_a_result_is_kept_in_the_page_until_the_part_is_run_again(failures):
    page = proofs.PAGE.read_text()
    report = (
        f'<testsuites><testsuite tests="9" failures="{failures}" errors="0"'
        ' skipped="2"/></testsuites>'
    )
    result = proofs.result_of(report, 12.3)
    assert result == (7 - failures, failures, 2, 12.3)
    once = proofs.keep(page, "kills", result, "0123456789ab", "2026-01-02")
    row = (
        f"| kills | {proofs.PARTS['kills'].what} | {7 - failures} | {failures} | 2 | 12 |"
        " 0123456789ab | 2026-01-02 |\n"
    )
    assert row in once and once.count("\n| kills |") == 1
    again = proofs.keep(once, "plan", result, "fedcba987654", "2026-01-03")
    assert (
        row in again
        and "| fedcba987654 | 2026-01-03 |\n" in again
        and len(again.splitlines()) == len(page.splitlines())
    )
    assert {
        line.split("|")[1].strip()
        for line in again[again.index(proofs.BEGIN) :].splitlines()
        if "|" in line
    } >= set(proofs.PARTS)
