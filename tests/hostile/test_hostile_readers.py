"""Every reader in Python gets thousands of damaged files (readers.py). Each file is read, or
refused in one line that names it."""

import json
import os
import subprocess
import sys

import pytest

from tests.hostile.harness import HERE, ROOT
from tests.hostile.readers import READERS

N = {"short": 30, "long": 4000}  # damaged files for each reader


TRUSTING = """
import json
import pyarrow
from tests.hostile import readers
from loaders.base import DataError

def make(folder):
    (folder / "a.json").write_text('{"path": "b.json"}')
    (folder / "b.json").write_text("{}")

def read(folder):
    path = folder / "a.json"
    try:
        OPEN(str(folder / json.loads(path.read_bytes())["path"])).close()
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise DataError(f"{path}: damaged") from error

readers.READERS = (readers.Reader("a trusting one", make, read),)
readers.main()
"""


def start(tmp_path, n, *program, chosen=()):
    """Runs readers.py with some of its readers or all, or ``program`` instead, in its own process
    and folder."""
    for name in ("files", "here", "cache"):
        (tmp_path / name).mkdir()
    # a module that files name
    (tmp_path / "here" / "payload.py").write_text("raise SystemExit(55)\n")
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "JAX_PLATFORMS": "cpu",
        "JAXTRAIN_CACHE": str(tmp_path / "cache"),
    }
    command = [
        sys.executable,
        *(program or [str(HERE / "readers.py")]),
        str(tmp_path / "files"),
        str(n),
        *chosen,
    ]
    return subprocess.run(
        command, env=environment, cwd=tmp_path / "here", capture_output=True, text=True
    )


NAMES = [reader.name for reader in READERS]
HALVES = [
    pytest.param("long", NAMES[i::2], marks=pytest.mark.slow, id=f"long-{i}") for i in range(2)
]


@pytest.mark.parametrize(("size", "names"), [pytest.param("short", NAMES, id="short"), *HALVES])
def test_a_damaged_file_is_read_or_refused(tmp_path, size, names):
    done = start(tmp_path, N[size], chosen=names)
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    for each in found:
        print(
            f"{each['reader']}: {N[size]} damaged files, {each['refused']} refused, {each['cpu']} s"
        )
    problems = [problem for each in found for problem in each["problems"]]
    assert not problems, f"{len(problems)} of them:\n" + "\n".join(problems[:20])
    assert done.returncode == 0, f"the process ended with {done.returncode}: {done.stderr[-3000:]}"
    assert [each["reader"] for each in found] == names
    assert all(N[size] // 20 < each["refused"] <= N[size] for each in found), (
        "each refuses some: damage is noticed"
    )


@pytest.mark.parametrize(
    ("function", "seen"),
    [("open", "/dev/zero"), ("pyarrow.OSFile", "{files}/outside/secret.json")],
    ids=["Python", "C++"],
)
def test_a_reader_that_opens_what_a_file_names_is_noticed(tmp_path, function, seen):
    done = start(tmp_path, 100, "-c", TRUSTING.replace("OPEN", function))
    assert done.returncode == 0, done.stderr
    problems = json.loads(done.stdout)["problems"]
    assert any(
        f"it opened {seen.format(files=tmp_path / 'files')}" in problem for problem in problems
    ), problems
