"""The exchanges of an evaluation, compiled for a TPU slice."""

import json
import os
import subprocess
import sys

import pytest

from jaxtrain.plan import environment

# This runs in a process of its own, which has the compiler.
PROGRAM = """
import json, pathlib, sys
from jaxtrain import plan
from jaxtrain.parallel import layout
from jaxtrain.step import train_step as step
from jaxtrain.assembly import assemble
from jaxtrain.plan import hlo
from tests.compiled import compiled_configs

target, folder = plan.parse_target("tpu:v4:2x2x2"), pathlib.Path(sys.argv[1])
config = compiled_configs.WORKLOADS["trm"].config("small", "mixed", target.count, folder)
mesh = layout.make_mesh(2, 2, 2, devices=plan.compile.tpu_devices(target))
assembly = assemble(config, mesh)
evaluate = step.make_eval_step(assembly.task, assembly.layout)
lowered = evaluate.lower(assembly.abstract.state.variables, assembly.abstract.batch)
moves = hlo.collectives(lowered.compile(compiler_options=assembly.compiler_options()).as_text())
print(json.dumps([[c.kind, c.axes(dict(mesh.shape)), c.times] for c in moves]))
"""


@pytest.mark.slow
def test_rows_of_the_recursive_models_evaluation_stay_on_their_device(tmp_path, tpu_compiler):
    """Earlier there were 16 gathers of rows over data, and 50 exchanges of rows and widths."""
    path = os.pathsep.join([environment.path(environment.find("tpu")), *sys.path])
    env = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": path}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path)], env=env, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    moves = json.loads(done.stdout.splitlines()[-1])
    assert {kind for kind, *_ in moves} == {"all-gather", "all-reduce"}
    assert {tuple(axes) for kind, axes, _ in moves if kind == "all-gather"} == {("fsdp",)}
    assert [times for kind, axes, times in moves if "data" in axes] == [1]  # only the sums, once
