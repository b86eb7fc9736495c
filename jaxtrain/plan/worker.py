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
from typing import Any, NamedTuple

import jax

from jaxtrain.assembly import assemble
from jaxtrain.config import Config
from jaxtrain.parallel import layout as layout_lib
from jaxtrain.plan import environment
from jaxtrain.plan.choices import resolve
from jaxtrain.plan.compile import (
    UNTUNED,
    Compiled,
    ask_for_no_chips,
    compiled,
    for_kernels,
    gpu_devices,
    tpu_devices,
)
from jaxtrain.plan.target import PlanError, Target, parse_target

# With "-m" the module would be __main__ there, and its classes not those of this module.
START = "import sys; from jaxtrain.plan import worker; worker.main(*sys.argv[1:])"
LAST = "the last step's"  # as a stage


class Job(NamedTuple):
    config: Config
    target: str  # as in --plan=
    stage: Hashable = None  # of `Task.stage`; LAST: of the last step
    has_norms: bool = True  # False: the program of steps whose norms nobody reads


class Answer(NamedTuple):
    compiled: Compiled | None
    error: str = ""  # the reason if there is no program
    too_large: bool = False  # the compiler found that it does not fit


def ask(jobs: Sequence[Job]) -> list[Answer]:
    """Compile each job's step, one after the other in one process. All targets are of one kind.

    Raises PlanError without its environment, and if the process ends before it answers.
    """
    [kind] = {parse_target(job.target).kind for job in jobs}
    packages = environment.find(kind)
    if packages is None:
        remedy = f"jaxtrain plan --setup {kind} fetches it, once"
        raise PlanError(f"no compiler for --plan={kind}:… is here; {remedy}")
    with tempfile.TemporaryDirectory(prefix="jaxtrain-plan-") as folder:
        jobs_file = pathlib.Path(folder, "jobs")
        answers_file = pathlib.Path(folder, "answers")
        jobs_file.write_bytes(pickle.dumps(list(jobs)))
        # It sees CPUs only. Else it would wait for an accelerator of this machine, or take it.
        env = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": environment.path(packages)}
        arguments = [str(jobs_file), str(answers_file), environment.versions(packages)]
        process = subprocess.run(
            [sys.executable, "-c", START, *arguments],
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        if process.returncode or not answers_file.exists():
            last_lines = "; ".join(process.stdout.strip().splitlines()[-3:])
            raise PlanError(
                f"the process that compiles for --plan={jobs[0].target} ended with code"
                f" {process.returncode}: {last_lines}"
            )
        answers: list[Answer] = pickle.loads(answers_file.read_bytes())
        return answers


def answer(job: Job, versions: str = "") -> Answer:
    """Trace and compile a step in this process. ``versions`` is as for `compiled`."""
    target = parse_target(job.target)
    is_traced = False
    for_gpus_elsewhere = target.kind == "gpu" and not target.here
    try:
        config = resolve(job.config, target)
        sizes = config.mesh.data, config.mesh.fsdp, config.mesh.model
        mesh = layout_lib.make_mesh(*sizes, devices=_devices(target))
        assembly = assemble(config, mesh)
        stage = job.stage
        if stage == LAST:
            stage = assembly.task.stage(config.train.steps - 1)
        with contextlib.ExitStack() as stack:
            options = None
            if for_gpus_elsewhere:
                stack.enter_context(for_kernels(mesh.devices.flat[0]))
                options = UNTUNED
            traced = assembly.trace(stage, has_norms=job.has_norms)
            is_traced = True
            return Answer(compiled(assembly, traced, options=options, versions=versions))
    except PlanError as error:
        return Answer(None, str(error), too_large=is_traced)
    except Exception as error:  # of the compiler or the trace; other jobs go on
        lines = str(error).strip().splitlines() or [""]
        return Answer(None, f"{type(error).__name__}: {lines[0][:300]}")


def _devices(target: Target) -> list[Any] | None:
    if target.here:
        return None
    return gpu_devices(target) if target.kind == "gpu" else tpu_devices(target)


def main(jobs: str, answers: str, versions: str) -> None:
    ask_for_no_chips()
    # A kernel's text has the lines of its source. Without them its figures survive edits elsewhere.
    jax.config.update("jax_traceback_in_locations_limit", 0)
    every_job: list[Job] = pickle.loads(pathlib.Path(jobs).read_bytes())
    every_answer = [answer(job, versions) for job in every_job]
    pathlib.Path(answers).write_bytes(pickle.dumps(every_answer))
