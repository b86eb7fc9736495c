"""The compiled programs of a run: steps by stage, bucket and norms, and evaluations by bucket."""

import collections
import concurrent.futures
import functools
import json
import logging
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxtrain.assembly import Assembly
from jaxtrain.checkpoint.checkpointer import saved_parts
from jaxtrain.compile import attempt_programs, program_cache, xla_options
from jaxtrain.compile.attempt_programs import AttemptPrograms, Recorded
from jaxtrain.config import ConfigError
from jaxtrain.parallel import cluster
from jaxtrain.run.stream import Data, Item
from jaxtrain.step import digest
from jaxtrain.step import train_step as step_lib
from jaxtrain.telemetry import glossary, goodput
from jaxtrain.types import COUNTS

log = logging.getLogger("jaxtrain")
THREAD = "compile"  # prefix of the names of threads that compile
FutureProgram = concurrent.futures.Future[Callable[..., Any]]
Key = tuple[Hashable, int, bool]  # of a step's program: stage, bucket, whether it has norms


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
        self._key_of = key_of
        self._compiled = compiled
        self.starts: dict[Hashable, int] = {}
        self.late: list[int] = []
        self._pool = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix=THREAD)
        self._programs: dict[Hashable, FutureProgram] = {}
        self._others: list[FutureProgram] = []
        self._unchecked: collections.deque[FutureProgram] = collections.deque()

    def expect(self, step: int, program: Callable[..., Any] | None = None) -> None:
        """Start to compile the step that is likely to be first, unless it is ``program``."""
        if program is None:
            self._submit(self._key_of(step))
        else:
            compiled: FutureProgram = concurrent.futures.Future()
            compiled.set_result(program)
            self._programs[self._key_of(step)] = compiled

    def expects(self, step: int) -> bool:
        return self._key_of(step) in self._programs

    def start(
        self, start: int, stop: int, *, others: Sequence[Callable[[], Callable[..., Any]]] = ()
    ) -> None:
        """Compile for steps ``start`` to ``stop``, and ``others`` right after the first step's."""
        for step in range(start, stop):
            self.starts.setdefault(self._key_of(step), step)
        keys = list(self.starts)
        for key in keys[:1]:
            self._submit(key)
        self._others.extend(self._pool.submit(other) for other in others)
        for key in keys[1:]:
            self._submit(key)
        self._unchecked.extend(self._others)

    def _submit(self, key: Hashable) -> None:
        if key not in self._programs:
            self._programs[key] = self._pool.submit(self._compiled, key)

    def at(self, step: int) -> Callable[..., Any]:
        """Return the program of step number ``step``, 0 being the first.

        Raises the error of its compilation, and at any step that of one of the others: an
        evaluation that does not fit is reported before hours of training.
        """
        if self._unchecked and self._unchecked[0].done():
            self._unchecked.popleft().result()
        program = self._programs[self._key_of(step)]
        if not program.done() and not self._is_first(step):
            self.late.append(step)
        return program.result()

    def _is_first(self, step: int) -> bool:
        return step == min(self.starts.values(), default=None)

    def is_ready(self, step: int) -> bool:
        return self._programs[self._key_of(step)].done()

    def other(self, index: int) -> Callable[..., Any]:
        """One of the others, awaited. Raises the error of its compilation."""
        return self._others[index].result()

    def close(self) -> None:
        """Give up the programs that are not being compiled yet."""
        self._pool.shutdown(wait=False, cancel_futures=True)


class Other(NamedTuple):
    """A program that is no step: recorded by an earlier attempt, or else lowered."""

    name: str
    arguments: tuple[Any, ...]  # as shapes
    options: dict[str, Any] | None  # of the compiler; None = those of a step
    recorded: Recorded | None
    lowered: jax.stages.Lowered | None

    @property
    def text(self) -> str:
        """The text of its program, or its digest, in all processes the same of both."""
        if self.recorded:
            return self.recorded.text
        assert self.lowered
        return self.lowered.as_text()

    @property
    def out_info(self) -> Any:
        source = self.recorded or self.lowered
        assert source
        return source.out_info


class StepCompiler:
    """A context that compiles the programs of a run in the background, identical on every process.

    Its constructor starts to compile the likely first step. `ready` waits for the first step, and
    then has evaluations and later steps compiled while the run trains. ``stop`` is the last
    argument of a step, by whether this process asks to stop. Making it raises ConfigError: the
    compiler refuses the options of config.compiler.
    """

    def __init__(
        self,
        assembly: Assembly,
        data: Data,
        clock: goodput.Clock,
        attempts: AttemptPrograms,
        *,
        likely: int,
    ):
        """``likely``: the number of batches that the restored state will probably have read."""
        self._assembly = assembly
        self._data = data
        self._clock = clock
        self._attempts = attempts
        self._offset = 0  # of the run's data; before `ready` nobody knows of another
        self._lowered: dict[Key, jax.stages.Lowered] = {}
        self._recorded: dict[Key, Recorded] = {}  # steps that are not lowered
        self._steps = CompileAhead(self._key_of, self._compile_step)
        self.stop = {flag: step_lib.put_stop(assembly.layout, flag) for flag in (False, True)}
        if likely < assembly.config.train.steps:
            self._expect(likely)

    @functools.cached_property
    def _options(self) -> dict[str, Any]:
        """Those of a step's compilation, for which the compiler is asked."""
        return self._assembly.compiler_options()

    def compile(
        self, lowered: jax.stages.Lowered, options: dict[str, Any] | None = None
    ) -> Callable[..., Any]:
        """Compile a program. ``options``: None = those of a step."""
        chosen = self._options if options is None else options

        def compile_now() -> Callable[..., Any]:
            return xla_options.compile(lowered, chosen, self._assembly.config.compiler)

        return program_cache.keep(lowered, chosen, compile_now)

    def _compile_step(self, key: Key) -> Callable[..., Any]:
        lowered = self._lower(key)
        program = self.compile(lowered)
        self._note_step(key, lowered)
        return program

    def _note_step(self, key: Key, lowered: jax.stages.Lowered) -> None:
        name = attempt_programs.name_of_step(key)
        self._attempts.note(name, self._arguments_of(key), lowered, self._options)

    def _arguments_of(self, key: Key) -> tuple[Any, ...]:
        """Return a step's arguments, as shapes."""
        abstract = self._assembly.with_batch(self._data.buckets[key[1]]).abstract
        return abstract.state, abstract.batch, step_lib.abstract_stop(self._assembly.layout)

    def _key_of(self, index: int) -> Key:
        """Return the key of step number ``index``, the first being 0."""
        bucket = self._data.train.bucket_at(index - self._offset)
        return self._assembly.task.stage(index), bucket, self._assembly.has_norms(index + 1)

    def _lower(self, key: Key) -> jax.stages.Lowered:
        if key not in self._lowered:
            stage, bucket, has_norms = key
            assembly = self._assembly.with_batch(self._data.buckets[bucket])
            self._lowered[key] = assembly.trace(stage, has_norms=has_norms).lower()
        return self._lowered[key]

    def _expect(self, index: int) -> None:
        """Lower a first step in this thread, which has the time, and start to compile it.

        One of an earlier attempt of the run is not even lowered.
        """
        key = self._key_of(index)
        recorded = self._attempts.find(attempt_programs.name_of_step(key), self._arguments_of(key))
        if recorded:
            self._recorded[key] = recorded
            self._steps.expect(index, recorded.program)
            return
        lowered = self._lower(key)
        program = program_cache.earlier(lowered, self._options)
        if program:
            self._note_step(key, lowered)
        self._steps.expect(index, program)

    def _text_of_step(self, key: Key) -> str:
        """Return the text of a step's program, or its digest, in all processes the same of both."""
        if key in self._recorded:
            return self._recorded[key].text
        return self._lower(key).as_text()

    def ready(self, first: int, offset: int) -> None:
        """Return once the program of step number ``first``, from 0 on, is compiled, if one is left.

        ``offset``: batches of other data that the run has read before.

        Raises RendezvousError: processes that lowered different programs, or have other data, by
        number; ConfigError: config.checkpoint.best is no metric, or has the wrong sign.
        """
        assembly = self._assembly
        n_steps = assembly.config.train.steps
        self._offset = offset
        # 1. Lower, and compare: different programs would wait for each other for ever.
        evaluations = self._evaluations()
        texts = {
            "data": json.dumps(self._data.fingerprints()),
            "evaluation": "".join(evaluation.text for evaluation in evaluations),
        }
        if first < n_steps:
            texts["step"] = self._text_of_step(self._key_of(first))
        cluster.compare(texts)
        if first < n_steps and not self._steps.expects(first):
            self._expect(first)
        # 2. The metrics of an evaluation are known now, not hours of training later.
        _check_best(assembly, evaluations[0].out_info if self._data.test.n_batches else None)
        log.info("compiling; slow programs are cached for the next start")
        # 3. Compile in a thread: the first step, awaited here, then the rest while the run goes on.
        programs = [*evaluations, *self._digests()]
        others = [self._from_cache_or_compile(other) for other in programs]
        self._steps.start(first, n_steps, others=others)
        starts = self._steps.starts
        if len(starts) > 1:
            log.info(
                "%d programs, by (stage, bucket, norms), are compiled ahead; their first steps: %s",
                len(starts),
                starts,
            )
        if starts:
            self._steps.at(first)
        log.info("compiled")

    def _other(
        self,
        name: str,
        function: jax.stages.Wrapped,
        arguments: tuple[Any, ...],
        options: dict[str, Any] | None,
    ) -> Other:
        """Find a program that an earlier attempt recorded, or lower it."""
        recorded = self._attempts.find(name, arguments)
        lowered = None if recorded else function.lower(*arguments)
        return Other(name, arguments, options, recorded, lowered)

    def _evaluations(self) -> list[Other]:
        """Return the evaluations by bucket."""
        assembly = self._assembly
        evaluate = step_lib.make_eval_step(assembly.task, assembly.layout)
        evaluations = []
        for bucket, batch in enumerate(self._data.test_buckets):
            arguments = (assembly.abstract.state.variables, batch)
            name = f"evaluation {bucket}"
            evaluations.append(self._other(name, evaluate, arguments, None))
        return evaluations

    def _digests(self) -> list[Other]:
        """Return the programs of config.metrics.digest by bucket, or none."""
        assembly = self._assembly
        if not assembly.config.metrics.digest:
            return []
        everywhere = assembly.layout.replicated()
        function = jax.jit(digest.of_batch_and_state, out_shardings=everywhere)
        state = saved_parts(assembly.abstract.state)
        programs = []
        for bucket, fields in enumerate(self._data.buckets):
            batch = assembly.with_batch(fields).abstract.batch
            programs.append(self._other(f"digest {bucket}", function, (batch, state), {}))
        return programs

    def _from_cache_or_compile(self, other: Other) -> Callable[[], Callable[..., Any]]:
        """Return a function that gives the program, which this thread looks for in the cache."""
        lowered = other.lowered
        if not lowered:
            assert other.recorded
            recorded = other.recorded.program
            return lambda: recorded
        options = self._options if other.options is None else other.options
        note = functools.partial(self._attempts.note, other.name, other.arguments, lowered, options)
        cached = program_cache.earlier(lowered, options)
        if cached:
            note()
            return lambda: cached

        def compile_now() -> Callable[..., Any]:
            program = self.compile(lowered, options)
            note()
            return program

        return compile_now

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

    def digest(self, bucket: int) -> Callable[..., jax.Array]:
        """Wait for a bucket's digests: (batch, parts of the state) -> uint32 [arrays, 2]."""
        return self._steps.other(len(self._data.test_buckets) + bucket)


def _check_best(assembly: Assembly, evaluated: dict[str, Any] | None) -> None:
    """Raise ConfigError if no evaluation has config.checkpoint.best, or its sign is wrong.

    ``evaluated``: the sums of an evaluation; None: there is no test split.
    """
    task = assembly.task
    wanted_metric = assembly.config.checkpoint.best
    name = wanted_metric.lstrip("-")
    if not name:
        return
    if evaluated is None:
        problem = (
            f"is {wanted_metric!r}, and there is no test split; leave it unset, and"
            " train.patience and train.target too"
        )
        raise ConfigError([("checkpoint.best", problem)])
    ones = {
        metric: np.ones(mean.total.shape)[()]
        for metric, mean in evaluated.items()
        if metric not in COUNTS
    }
    with np.errstate(all="ignore"):
        metrics = task.finish(ones)
    # metrics of a generative evaluation are known once it has run
    if name not in metrics and not task.generative:
        problem = f"names {name!r}; expected one of: {', '.join(sorted(metrics))}"
        raise ConfigError([("checkpoint.best", problem)])
    problem = glossary.wrong_sign(wanted_metric, workload=assembly.config.workload)
    if problem:
        raise ConfigError([("checkpoint.best", problem)])
