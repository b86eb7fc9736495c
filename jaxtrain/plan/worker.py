"""A separate process that compiles steps, with the compilers of `jaxtrain.plan.environment`.

    answers = worker.ask([Job(config, "gpu:h100x8", stage), …])        # in the process that plans

    with worker.Process("gpu") as process:                             # jobs that depend on answers
        answer = process.ask(job)

Jobs and answers are pickles in pipes, of this code and this Python.
"""

import contextlib
import importlib.metadata
import os
import pickle
import re
import select
import subprocess
import sys
import tempfile
import threading
import types
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, NamedTuple, Self

import jax

from jaxtrain.assembly import assemble
from jaxtrain.config import Config
from jaxtrain.parallel import layout as layout_lib
from jaxtrain.plan import environment, gpu_specs
from jaxtrain.plan.choices import resolve
from jaxtrain.plan.compile import (
    UNTUNED,
    Compiled,
    ask_for_no_chips,
    compiled,
    for_kernels,
    gpu_devices,
    is_at_hand,
    tpu_devices,
)
from jaxtrain.plan.target import PlanError, Target, parse_target

# With "-m" the module would be __main__ there, and its classes not those of this module.
START = "import sys; from jaxtrain.plan import worker; worker.main(*sys.argv[1:])"
# A plugin for GPUs (CUDA 12 or 13), and ptxas and cuDNN, which decide kernels.
COMPILES = re.compile(r"jaxlib$|libtpu|jax-cuda|nvidia-(cuda-nvcc|cudnn|cublas)")
LAST = "the last step's"  # as a stage
GRACE = 5  # [s] for the process to end when no more jobs come


class Job(NamedTuple):
    config: Config
    target: str  # as in --plan=
    stage: Hashable = None  # of `Task.stage`; LAST: of the last step
    has_norms: bool = True  # False: the program of steps whose norms nobody reads


class Answer(NamedTuple):
    compiled: Compiled | None
    error: str = ""  # the reason if there is no program
    too_large: bool = False  # the compiler found that it does not fit


class Process:
    """A process with the compiler of one kind of devices. Raises PlanError without it.

    Ctrl-C in a terminal ends the process that plans alone. If the compiler ends its process, the
    next job starts another one.
    """

    def __init__(self, kind: str):
        packages = environment.find(kind)
        if packages is None:
            remedy = f"jaxtrain plan --setup {kind} fetches it, once"
            raise PlanError(f"no compiler for --plan={kind}:… is here; {remedy}")
        self._packages = packages

    def __enter__(self) -> Self:
        self._start()
        return self

    def _start(self) -> None:
        self._closing = contextlib.ExitStack()
        self._log = self._closing.enter_context(tempfile.TemporaryFile())
        jobs_end, jobs = os.pipe()
        answers, answers_end = os.pipe()
        # It sees CPUs only. Else it would wait for an accelerator of this machine, or take it.
        path = environment.path(self._packages)
        env = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": path}
        versions = environment.versions(self._packages)
        arguments = [str(jobs_end), str(answers_end), versions]
        self._process = subprocess.Popen(
            [sys.executable, "-c", START, *arguments],
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            pass_fds=(jobs_end, answers_end),
            process_group=0,  # to which a terminal sends no Ctrl-C
        )
        os.close(jobs_end)
        os.close(answers_end)
        self._jobs = open(jobs, "wb")
        self._answers = self._closing.enter_context(open(answers, "rb"))

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: types.TracebackType | None,
    ) -> None:
        self._end(0 if kind else GRACE)

    def _end(self, grace: float) -> None:
        with contextlib.suppress(BrokenPipeError):
            self._jobs.close()  # by which it ends
        try:
            self._process.wait(grace)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._closing.close()

    def ask(self, job: Job) -> Answer:
        """Compile a job's step. Raises PlanError if the process ends before it answers."""
        if self._process.returncode is not None:  # it ended at an earlier job
            self._start()
        try:
            pickle.dump(job, self._jobs)
            self._jobs.flush()
            answer: Answer = pickle.load(self._answers)
            return answer
        except (BrokenPipeError, EOFError, pickle.UnpicklingError) as error:
            code = self._process.wait()
            self._log.seek(0)
            text = self._log.read().decode(errors="replace")
            last_lines = "; ".join(text.strip().splitlines()[-3:])
            self._end(GRACE)
            raise PlanError(
                f"the process that compiles for --plan={job.target} ended with code {code}:"
                f" {last_lines}"
            ) from error


def ask(jobs: Sequence[Job]) -> list[Answer]:
    """Compile each job's step, one after the other in one process. All targets are of one kind.

    Raises PlanError as `Process` does.
    """
    [kind] = {parse_target(job.target).kind for job in jobs}
    with Process(kind) as process:
        return [process.ask(job) for job in jobs]


Compiler = Callable[[Config], Answer]  # of the last stage's step


@contextlib.contextmanager
def compiler(target: Target, text: str) -> Iterator[Compiler | None]:
    """Make the compiler of a target's devices, None if there is none to ask.

    ``text``: the target's, as in --plan=.
    """
    if is_at_hand(target):
        # GPUs share what they tune among processes: either all of them compile, or none does.
        versions = _own_versions() if jax.process_count() == 1 else ""
        yield lambda config: answer(Job(config, text, LAST), versions)
    elif environment.find(target.kind):
        with Process(target.kind) as process:
            yield lambda config: process.ask(Job(config, text, LAST))
    else:
        yield None


def _own_versions() -> str:
    """Return the versions of the packages of this process that compile."""
    installed = set()
    for package in importlib.metadata.distributions():
        name = (package.name or "").lower().replace("_", "-")  # none if its metadata are damaged
        if COMPILES.match(name):
            installed.add(f"{name}=={package.version}")
    return ", ".join(sorted(installed))


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
                if versions:  # its figures depend on the card's description, too
                    versions += f"; {gpu_specs.SPECS[target.known_chip.name].text()}"
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


def main(jobs_end: str, answers_end: str, versions: str) -> None:
    ask_for_no_chips()
    # A kernel's text has the lines of its source. Without them its figures survive edits elsewhere.
    jax.config.update("jax_traceback_in_locations_limit", 0)
    threading.Thread(target=_end_with_the_pipe, args=(int(jobs_end),), daemon=True).start()
    with open(int(jobs_end), "rb") as jobs, open(int(answers_end), "wb") as answers:
        while True:
            try:
                job: Job = pickle.load(jobs)
            except EOFError:
                return
            pickle.dump(answer(job, versions), answers)
            answers.flush()


def _end_with_the_pipe(jobs_end: int) -> None:
    """End this process when the one that plans closes the pipe of jobs, or ends.

    It ends at once: a compilation would take its core for minutes, and nobody waits for it.
    """
    poll = select.poll()
    poll.register(jobs_end, 0)  # for a hang-up alone
    poll.poll()
    os._exit(0)
