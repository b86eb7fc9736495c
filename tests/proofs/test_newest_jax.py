"""The environment with the newest jax: which Python it takes, and when it is made again."""

import json
import time

import pytest

from tests.proofs import newest_jax
from tests.proofs import parts as proofs


@pytest.fixture
def programs(tmp_path, monkeypatch):
    """Return a function that puts a program onto a PATH that has no other Python."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("JAXTRAIN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.setenv("PYENV_ROOT", str(tmp_path / "pyenv"))
    monkeypatch.setattr(newest_jax.sys, "version_info", (3, 11, 7))

    def add(name, code):
        path = folder / name
        path.write_text(f"#!/bin/sh\nexit {code}\n")
        path.chmod(0o755)
        return str(path)

    return add


def test_the_newest_python_that_starts_is_taken(programs):
    programs("python3.14", 127)  # as a name of pyenv without its version
    right = programs("python3.13", 0)
    programs("python3.12", 0)
    assert newest_jax.base_interpreter() == right


def test_without_a_new_python_the_part_fails_and_says_what_it_needs(programs, capsys):
    programs("python3.12", 1)
    assert proofs.run("newest") == proofs.Result(0, 1, 0, 0)
    assert "needs Python 3.12 or newer" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("age", "is_current"), [(0, True), (newest_jax.WEEK + 60, False), (None, False)]
)
def test_the_environment_is_made_again_after_a_week(tmp_path, monkeypatch, age, is_current):
    monkeypatch.setenv("JAXTRAIN_CACHE", str(tmp_path))
    folder = tmp_path / "envs" / "newest-jax"
    folder.mkdir(parents=True)
    if age is not None:
        made = {"made": time.time() - age}
        (folder / newest_jax.MARK).write_text(json.dumps(made))
    installed = []
    monkeypatch.setattr(newest_jax, "base_interpreter", lambda: "true")
    monkeypatch.setattr(newest_jax, "install", installed.append)
    assert newest_jax.python() == str(folder / "bin" / "python")
    assert installed == ([] if is_current else [folder])
