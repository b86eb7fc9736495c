"""A separate process that compiles steps, with the compilers of `jaxtrain.plan.environment`.

    answers = worker.ask([Job(config, "gpu:h100x8", stage), …])        # in the process that plans

Jobs and answers are pickles in a temporary folder, of this code and this Python.
"""

import contextlib
import os
import pathlib
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Hashable, Sequence
from typing import NamedTuple

import jax

from jaxtrain.assembly import assemble
from jaxtrain.config import Config
from jaxtrain.parallel import layout as layout_lib
from jaxtrain.plan import environment
from jaxtrain.plan.compile import (
    UNTUNED,
    Compiled,
    ask_for_no_chips,
    compiled,
    for_kernels,
    gpu_devices,
    tpu_devices,
)
from jaxtrain.plan.target import PlanError, parse_target

# With "-m" the module would be __main__ there, and its classes not those of this module.
START = "import sys; from jaxtrain.plan import worker; worker.main(*sys.argv[1:])"
LAST = "the last step's"  # as a stage


class Job(NamedTuple):
    config: Config
    target: str  # as in --plan=
    stage: Hashable = None  # of `Task.stage`; LAST: of the last step


class Answer(NamedTuple):
    compiled: Compiled | None
    error: str = ""  # the reason if there is no program
    too_large: bool = False  # the compiler found that it does not fit


def ask(jobs: Sequence[Job]) -> list[Answer]:
    """Compile each job's step, one after the other in one process. All targets are of one kind.

    Raises PlanError without its environment, and if the process ends before it answers.
    """
    [kind] = {parse_target(job.target).kind for job in jobs}
    place = environment.find(kind)
    if place is None:
        raise PlanError(
            f"no compiler for --plan={kind}:… is here; jaxtrain plan --setup {kind} fetches it,"
            " once"
        )
    with tempfile.TemporaryDirectory(prefix="jaxtrain-plan-") as folder:
        asked, answered = pathlib.Path(folder, "jobs"), pathlib.Path(folder, "answers")
        asked.write_bytes(pickle.dumps(list(jobs)))
        # It sees CPUs only. Else it would wait for an accelerator of this machine, or take it.
        env = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": environment.path(place)}
        command = [
            sys.executable,
            "-c",
            START,
            str(asked),
            str(answered),
            environment.versions(place),
        ]
        done = subprocess.run(
            command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        if done.returncode or not answered.exists():
            last = "; ".join(done.stdout.strip().splitlines()[-3:])
            raise PlanError(
                f"the process that compiles for --plan={jobs[0].target} ended with code"
                f" {done.returncode}: {last}"
            )
        answers: list[Answer] = pickle.loads(answered.read_bytes())
        return answers


def answer(job: Job, versions: str = "") -> Answer:
    """Trace and compile a step in this process. ``versions`` is as for `compiled`."""
    target, is_traced = parse_target(job.target), False
    of_gpus = target.kind == "gpu" and not target.here
    try:
        devices = None if target.here else gpu_devices(target) if of_gpus else tpu_devices(target)
        m = job.config.mesh
        mesh = layout_lib.make_mesh(m.data, m.fsdp, m.model, devices=devices)
        assembly = assemble(job.config, mesh)
        stage = assembly.task.stage(job.config.train.steps - 1) if job.stage == LAST else job.stage
        with for_kernels(mesh.devices.flat[0]) if of_gpus else contextlib.nullcontext():
            traced = assembly.trace(stage)
            is_traced = True
            return Answer(
                compiled(assembly, traced, options=UNTUNED if of_gpus else None, versions=versions)
            )
    except PlanError as error:
        return Answer(None, str(error), too_large=is_traced)
    except Exception as error:  # of the compiler or the trace; other jobs go on
        lines = str(error).strip().splitlines() or [""]
        return Answer(None, f"{type(error).__name__}: {lines[0][:300]}")


def main(jobs: str, answers: str, versions: str) -> None:
    ask_for_no_chips()
    # A kernel's text has the lines of its source. Without them its figures survive edits elsewhere.
    jax.config.update("jax_traceback_in_locations_limit", 0)
    every = [answer(job, versions) for job in pickle.loads(pathlib.Path(jobs).read_bytes())]
    pathlib.Path(answers).write_bytes(pickle.dumps(every))
