"""Thousands of damaged files for every reader in Python (readers.py): each is read, or refused in one line that names it."""

import json
import os
import subprocess
import sys

import pytest
from harness import HERE, ROOT
from readers import READERS

N = {"short": 30, "long": 4000}  # damaged files for each reader


@pytest.mark.parametrize("size", ["short", pytest.param("long", marks=pytest.mark.slow)])
def test_a_damaged_file_is_read_or_refused(tmp_path, size):
    for name in ("files", "here", "cache"):
        (tmp_path / name).mkdir()
    (tmp_path / "here" / "payload.py").write_text("raise SystemExit(55)\n")  # a module that files name
    paths = os.pathsep.join([str(HERE), str(ROOT)])
    environment = {**os.environ, "PYTHONPATH": paths, "JAX_PLATFORMS": "cpu", "JAXTRAIN_CACHE": str(tmp_path / "cache")}
    done = subprocess.run(
        [sys.executable, str(HERE / "readers.py"), str(tmp_path / "files"), str(N[size])],
        env=environment, cwd=tmp_path / "here", capture_output=True, text=True,
    )  # fmt: skip
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    for each in found:
        print(f"{each['reader']}: {N[size]} damaged files, {each['refused']} refused, {each['cpu']} s")
    problems = [problem for each in found for problem in each["problems"]]
    assert not problems, f"{len(problems)} of them:\n" + "\n".join(problems[:20])
    assert done.returncode == 0, f"the process ended with {done.returncode}: {done.stderr[-3000:]}"
    assert [each["reader"] for each in found] == [reader.name for reader in READERS]
    assert all(N[size] // 20 < each["refused"] <= N[size] for each in found), "each refuses some: damage is noticed"
