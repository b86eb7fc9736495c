"""Every workload runs on every mesh, in one process and in several: five steps and an evaluation
equal those of one device."""

import functools
import importlib
import os
import pathlib
import pickle
import subprocess
import sys

import pytest

from jaxtrain import config as config_lib
from jaxtrain.parallel import cluster
from tests.support import installed
from tests.support.cases import Run, assert_alike
from tests.support.processes import ROOT, at, free_port, xla_flags

STEPS = 5
# Each shipped workload has its cases.
CASES = {
    name: case
    for each in installed.NAMES
    for name, case in importlib.import_module(f"tests.support.cases.{each}").MATRIX.items()
}
# All are slow: in `make test` each workload has a mesh in a file of its own.
pytestmark = pytest.mark.slow
MATRIX = [
    pytest.param(name, mesh, id=f"{name}-{'x'.join(map(str, mesh))}")
    for name in CASES
    for mesh in ((8, 1, 1), (1, 8, 1), (1, 1, 8), (2, 2, 2))
]


@functools.cache
def alone(name):
    return Run(CASES[name], (1, 1, 1)).take(STEPS)


@pytest.mark.parametrize(("name", "mesh"), MATRIX)
def test_steps_on_a_mesh_are_those_of_one_device(name, mesh):
    """The comparison covers parameters, moments (equal to the gradient after the first step),
    model state, averages, the loss and every metric."""
    assert_alike(alone(name), Run(CASES[name], mesh).take(STEPS))


@pytest.mark.parametrize(
    ("processes", "mesh"),
    [(2, (2, 2, 2)), (2, (1, 8, 1)), (4, (2, 2, 2))],
    ids=["2", "2-fsdp", "4"],
)
@pytest.mark.parametrize("name", CASES)
def test_steps_of_several_processes_are_those_of_one_device(name, processes, mesh, tmp_path):
    port, running = free_port(), []
    try:
        for i in range(processes):
            env = {k: v for k, v in os.environ.items() if not k.startswith("XLA")}
            env |= {
                "XLA_FLAGS": xla_flags(8 // processes),
                "PYTHONPATH": str(ROOT),
            }
            env |= at(port, i, processes)
            command = [
                sys.executable,
                "-m",
                "tests.test_matrix",
                name,
                str(tmp_path),
                *map(str, mesh),
            ]
            running.append(
                subprocess.Popen(
                    command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
                )
            )
        for process in running:
            output, _ = process.communicate(timeout=540)
            assert process.returncode == 0, output
    finally:
        for process in running:
            process.kill()
    assert_alike(alone(name), pickle.loads((tmp_path / "found").read_bytes()))


def main(name, folder, *mesh):
    """Run one of the processes."""
    links = cluster.initialize(cluster.find(), config_lib.Config(workdir=folder))
    cluster.start_jax()
    cluster.barrier("all are here")
    found = Run(CASES[name], tuple(map(int, mesh))).take(STEPS)
    if cluster.is_main():
        (pathlib.Path(folder) / "found").write_bytes(pickle.dumps(found))
    cluster.barrier("written")
    links.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
