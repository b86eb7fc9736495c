"""Run every test of this folder in a folder with the toy modules and their config."""

import sys

import pytest

from tests.config.toys import FILE, LOADER, WORKLOAD


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    """Work in a folder with toy modules and configs/toy.py."""
    (tmp_path / "configs").mkdir()
    (tmp_path / "toy_workload.py").write_text(WORKLOAD)
    (tmp_path / "toy_loader.py").write_text(LOADER)
    (tmp_path / "configs" / "toy.py").write_text(FILE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("toy_workload", "toy_loader"):
        sys.modules.pop(name, None)
    return tmp_path
