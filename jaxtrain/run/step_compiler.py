"""The compiled programs of a run: its step by stage and bucket, and its evaluation by bucket."""

import concurrent.futures
import functools
import itertools
import json
import logging
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
import numpy as np

from jaxtrain.assembly import Assembly
from jaxtrain.compile import program_cache, xla_options
from jaxtrain.config import ConfigError
from jaxtrain.parallel import cluster
from jaxtrain.run.stream import Data, Item
from jaxtrain.step import train_step as step_lib
from jaxtrain.telemetry import goodput
from jaxtrain.types import COUNTS

log = logging.getLogger("jaxtrain")
THREAD = "compile"  # prefix of the names of threads that compile


class CompileAhead:
    """Programs that one thread compiles in the order in which they are needed.

    The first step waits for the first. The others are ready long before they are due, so that a
    change of stage does not stall the run. ``starts``: key -> the first step that needs it.
    ``late``: steps that waited for their program, without the first.
    """

    def __init__(
        self, key_of: Callable[[int], Hashable], compiled: Callable[[Any], Callable[..., Any]]
    ):
        """``compiled(key)`` compiles one."""
        self._key_of, self._compiled = key_of, compiled
        self.starts: dict[Hashable, int] = {}
        self.late: list[int] = []
        self._pool = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix=THREAD)
        self._programs: dict[Hashable, concurrent.futures.Future[Callable[..., Any]]] = {}

    def expect(self, step: int, program: Callable[..., Any] | None = None) -> None:
        """Start to compile the step that is likely to be first, unless it is ``program``."""
        if program is None:
            self._submit(self._key_of(step))
        else:
            done: concurrent.futures.Future[Callable[..., Any]] = concurrent.futures.Future()
            done.set_result(program)
            self._programs[self._key_of(step)] = done

    def expects(self, step: int) -> bool:
        return self._key_of(step) in self._programs

    def start(
        self, start: int, stop: int, *, others: Sequence[Callable[[], Callable[..., Any]]] = ()
    ) -> None:
        """Compile for steps ``start`` to ``stop``, and ``others`` right after the first step's."""
        self._first = start
        for step in range(start, stop):
            self.starts.setdefault(self._key_of(step), step)
        keys = iter(self.starts)
        for key in itertools.islice(keys, 1):
            self._submit(key)
        self._others = [self._pool.submit(other) for other in others]
        for key in keys:
            self._submit(key)
        self._unchecked = list(self._others)

    def _submit(self, key: Hashable) -> None:
        if key not in self._programs:
            self._programs[key] = self._pool.submit(self._compiled, key)

    def at(self, step: int) -> Callable[..., Any]:
        """Return the program of step number ``step``, 0 being the first.

        Raises the error of its compilation, and at any step that of one of the others: an
        evaluation that does not fit is reported before hours of training.
        """
        if self._unchecked and self._unchecked[0].done():
            self._unchecked.pop(0).result()
        program = self._programs[self._key_of(step)]
        if not program.done() and step != self._first:
            self.late.append(step)
        return program.result()

    def is_ready(self, step: int) -> bool:
        return self._programs[self._key_of(step)].done()

    def other(self, index: int) -> Callable[..., Any]:
        """One of the others, awaited. Raises the error of its compilation."""
        return self._others[index].result()

    def close(self) -> None:
        """Give up the programs that are not being compiled yet."""
        self._pool.shutdown(wait=False, cancel_futures=True)


class StepCompiler:
    """A context that compiles the programs of a run in the background, identical on every process.

    Its constructor starts to compile the likely first step. `ready` waits for the first step, and
    then has evaluations and later steps compiled while the run trains. ``stop`` is the last
    argument of a step, by whether this process asks to stop. Making it raises ConfigError: the
    compiler refuses the options of config.compiler.
    """

    def __init__(self, assembly: Assembly, data: Data, clock: goodput.Clock, *, likely: int):
        """``likely``: the number of batches that the restored state will probably have read."""
        self._assembly, self._data, self._clock = assembly, data, clock
        self._options = assembly.compiler_options()

        @functools.cache
        def lowered(key: tuple[Hashable, int]) -> jax.stages.Lowered:
            stage, bucket = key
            program: jax.stages.Lowered = (
                assembly.with_batch(data.buckets[bucket]).trace(stage).lower()
            )
            return program

        self._lowered = lowered
        self._steps = CompileAhead(self._key_of, lambda key: self.compile(lowered(key)))
        self.stop = {asked: step_lib.put_stop(assembly.layout, asked) for asked in (False, True)}
        if likely < assembly.config.train.steps:
            first = lowered(self._key_of(likely))  # by this thread, which has the time
            self._steps.expect(likely, program_cache.earlier(first, self._options))

    def compile(self, lowered: jax.stages.Lowered) -> Callable[..., Any]:
        own = self._assembly.config.compiler
        return program_cache.keep(
            lowered, self._options, lambda: xla_options.compile(lowered, self._options, own)
        )

    def _key_of(self, index: int) -> tuple[Hashable, int]:
        return self._assembly.task.stage(index), self._data.bucket_of(index)

    def ready(self, first: int) -> None:
        """Return once the program of step number ``first``, from 0 on, is compiled, if one is left.

        Raises RendezvousError: processes that lowered different programs, or have other data, by
        number; ConfigError: config.checkpoint.best names a metric that no evaluation has.
        """
        assembly, data = self._assembly, self._data
        task, variables, steps = (
            assembly.task,
            assembly.abstract.state.variables,
            assembly.config.train.steps,
        )
        # 1. Lower, and compare: different programs would wait for each other for ever.
        evaluations = [
            step_lib.make_eval_step(task, assembly.layout).lower(variables, batch)
            for batch in data.test_buckets
        ]
        texts = {
            "data": json.dumps(data.fingerprints()),
            "evaluation": "".join(x.as_text() for x in evaluations),
        }
        if first < steps:
            texts["step"] = self._lowered(self._key_of(first)).as_text()
        cluster.compare(texts)
        if first < steps and not self._steps.expects(first):
            self._steps.expect(
                first, program_cache.earlier(self._lowered(self._key_of(first)), self._options)
            )
        # 2. The metrics of an evaluation are known now, not hours of training later.
        _check_best(assembly, evaluations[0].out_info if data.test.n_batches else None)
        log.info("compiling; slow programs are cached for the next start")
        # 3. Compile in a thread: the first step, awaited here, then the rest while the run goes on.
        found = [program_cache.earlier(x, self._options) for x in evaluations]
        others = [
            functools.partial(lambda x, f: f or self.compile(x), *each)
            for each in zip(evaluations, found, strict=True)
        ]
        self._steps.start(first, steps, others=others)
        if len(starts := self._steps.starts) > 1:
            log.info(
                "%d programs, by (stage, bucket), are compiled ahead; their first steps: %s",
                len(starts),
                starts,
            )
        if starts:
            self._steps.at(first)
        log.info("compiled")

    def __enter__(self) -> "StepCompiler":
        return self

    def __exit__(self, *exception: object) -> None:
        self._steps.close()

    def at(self, item: Item) -> Callable[..., Any]:
        """Return a batch's step: (state, batch, stop) -> (state, metrics). It donates the state."""
        if self._steps.is_ready(item.index):
            return self._steps.at(item.index)
        with self._clock.during(goodput.COMPILATION):
            return self._steps.at(item.index)

    def evaluation(self, bucket: int) -> Callable[..., Any]:
        """Wait for the evaluation of a bucket of the test split: (variables, batch) -> sums."""
        return self._steps.other(bucket)


def _check_best(assembly: Assembly, evaluated: dict[str, Any] | None) -> None:
    """Raise ConfigError if no evaluation has config.checkpoint.best. None: no test split."""
    config, task = assembly.config, assembly.task
    best = config.checkpoint.best.lstrip("-")
    if not best:
        return
    if evaluated is None:
        text = (
            f"is {config.checkpoint.best!r}, and there is no test split; leave it unset, and"
            " train.patience too"
        )
        raise ConfigError([("checkpoint.best", text)])
    with np.errstate(all="ignore"):
        known = task.finish(
            {
                name: np.ones(mean.total.shape)[()]
                for name, mean in evaluated.items()
                if name not in COUNTS
            }
        )
    if best not in known and not task.generative:  # its metrics are known once it has run
        raise ConfigError(
            [("checkpoint.best", f"names {best!r}; expected one of: {', '.join(sorted(known))}")]
        )
