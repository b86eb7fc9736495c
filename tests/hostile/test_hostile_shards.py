"""Pyarrow reads the columns of classes and times of thousands of damaged shards. The result is an
error for every change."""

import json
import os
import pathlib
import random
import subprocess
import sys

import pytest

from tests.hostile import inputs
from tests.hostile.damage import mutated
from tests.hostile.harness import ROOT

# the 303rd ended the process, as long as times were not validated
N = {"short": 310, "long": 12_000}
CODE = """
import faulthandler, json, pathlib, sys
faulthandler.enable()
from tests.hostile import test_hostile_shards
print(json.dumps(test_hostile_shards.read_all(pathlib.Path(sys.argv[1]), int(sys.argv[2]))))
"""


def read_all(folder: pathlib.Path, n: int) -> dict[str, int]:
    """Reads ``n`` mutations, one after the other. A crash ends this process. Counts the reads and
    the refusals."""
    from loaders.audio import shards
    from loaders.base import DataError
    from loaders.io import columnar

    seeds = [path.read_bytes() for path in sorted(folder.glob("seed*"))]
    counts = {"read": 0, "refused": 0}
    for number in range(n):
        rng = random.Random(number)
        source = seeds[number % len(seeds)]
        path = folder / ("now.parquet" if source[:4] == b"PAR1" else "now.arrow")
        path.unlink(missing_ok=True)
        path.write_bytes(mutated(source, rng))
        (folder / "number").write_text(str(number))
        shards._class_lists_once.cache_clear()
        try:
            lists = shards.read_class_lists([path], "labels")
            lists.hot(range(len(lists.starts) - 1))
            columnar.timed(path)
            counts["read"] += 1
        except DataError:
            counts["refused"] += 1
    return counts


@pytest.mark.parametrize("size", ["short", pytest.param("long", marks=pytest.mark.slow)])
def test_a_damaged_shard_is_an_error(tmp_path, size):
    for k, make in enumerate((inputs.class_lists, inputs.class_lists_parquet, inputs.events)):
        (tmp_path / "made").mkdir(exist_ok=True)
        make(tmp_path / "made")
        for path in list((tmp_path / "made").iterdir()):
            path.rename(tmp_path / f"seed-{k}{path.suffix}")
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", CODE, str(tmp_path), str(N[size])]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    number = (tmp_path / "number").read_text()
    assert done.returncode == 0, (
        f"mutation {number} ended the process ({done.returncode}): {done.stderr[-2000:]}"
    )
    counts = json.loads(done.stdout.splitlines()[-1])
    assert (
        sum(counts.values()) == N[size] and counts["refused"] > N[size] // 10 and counts["read"] > 0
    )
