"""The compiled programs of a run: its step for every stage and bucket, and its evaluation for every bucket."""

import concurrent.futures
import functools
import itertools
import json
import logging
import time
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
import numpy as np

from jaxtrain import cluster, compiler, goodput
from jaxtrain import step as step_lib
from jaxtrain.assembly import Assembly
from jaxtrain.config import ConfigError
from jaxtrain.data import Data, Item
from jaxtrain.types import COUNTS

log = logging.getLogger("jaxtrain")


class Ahead:
    """Programs that one thread compiles in the order in which they are needed.

    The first step waits for the first, and the others are ready long before they are due, so that a change of stage does not
    stall the run.

    Attributes:
      starts: program's key -> the first step that needs it.
      late: steps that had to wait for their program, the first aside.
    """

    def __init__(
        self,
        key_of: Callable[[int], Hashable],
        compiled: Callable[[Any], Callable],
        *,
        start: int,
        stop: int,
        others: Sequence[Callable[[], Callable]] = (),
    ):
        """``compiled(key)`` compiles one; steps ``start`` … ``stop`` - 1 are to come.

        Args:
          others: each compiles a program that no step needs; they come right after the first step's.
        """
        self._key_of = key_of
        self.starts: dict[Hashable, int] = {}
        for step in range(start, stop):
            self.starts.setdefault(key_of(step), step)
        self.late: list[int] = []
        self._first = start
        self._pool = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="compile")
        keys = iter(self.starts)
        self._programs = {key: self._pool.submit(compiled, key) for key in itertools.islice(keys, 1)}
        self._others = [self._pool.submit(other) for other in others]
        self._programs |= {key: self._pool.submit(compiled, key) for key in keys}
        self._unchecked = list(self._others)

    def at(self, step: int) -> Callable:
        """The program of step number ``step``, 0 being the first. Raises what its compilation raised, and at any step what the
        compilation of one of the others did: an evaluation that does not fit is known before hours of training.
        """
        if self._unchecked and self._unchecked[0].done():
            self._unchecked.pop(0).result()
        program = self._programs[self._key_of(step)]
        if not program.done() and step != self._first:
            self.late.append(step)
        return program.result()

    def is_ready(self, step: int) -> bool:
        """Whether the program of step number ``step`` is compiled."""
        return self._programs[self._key_of(step)].done()

    def other(self, index: int) -> Callable:
        """One of the others, awaited. Raises what its compilation raised."""
        return self._others[index].result()

    def close(self) -> None:
        """Gives up what is not being compiled yet."""
        self._pool.shutdown(wait=False, cancel_futures=True)


class Programs:
    """A context. Made, the program of the first step is compiled; the evaluations are lowered, and compiled beside the first
    steps. All are the same on every process.

    Attributes:
      stop: the last argument of a step, by whether this process asks to stop.

    Making it raises:
      RendezvousError: processes that lowered different programs, or have other data, by number.
      ConfigError: config.checkpoint.best names what no evaluation has; the compiler refuses the options of config.compiler.
    """

    def __init__(self, assembly: Assembly, data: Data, clock: goodput.Clock, *, first: int):
        self._clock, began = clock, time.perf_counter()
        config, layout, task = assembly.config, assembly.layout, assembly.task
        options = assembly.compiler_options()

        def key_of(index: int) -> tuple[Hashable, int]:
            return task.stage(index), data.bucket_of(index)

        @functools.cache
        def lowered(key: tuple[Hashable, int]) -> jax.stages.Lowered:
            stage, bucket = key
            return assembly.with_batch(data.buckets[bucket]).trace(stage).lower()

        def compiled(key: tuple[Hashable, int]) -> jax.stages.Compiled:
            return compiler.compile(lowered(key), options, config.compiler)

        # 1. Lower, and compare: processes that run different programs would wait for each other for ever.
        variables = assembly.abstract.state.variables
        evaluations = [step_lib.make_eval_step(task, layout).lower(variables, batch) for batch in data.test_buckets]
        texts = {"data": json.dumps(data.fingerprints()), "evaluation": "".join(x.as_text() for x in evaluations)}
        if first < config.train.steps:
            texts["step"] = lowered(key_of(first)).as_text()
        cluster.compare(texts)
        # 2. What an evaluation has is known now; hours of training later would be late.
        _check_best(assembly, evaluations[0].out_info if data.test.n_batches else None)
        log.info("compiling; what takes long is kept for the next start")
        # 3. Compile in a thread: the first step, awaited here, then evaluations and later steps while the run goes on.
        others = [functools.partial(compiler.compile, x, options, config.compiler) for x in evaluations]
        self._steps = Ahead(key_of, compiled, start=first, stop=config.train.steps, others=others)
        if len(starts := self._steps.starts) > 1:
            log.info("%d programs, by (stage, bucket), are compiled ahead; their first steps: %s", len(starts), starts)
        if starts:
            self._steps.at(first)
        self.stop = {asked: step_lib.put_stop(layout, asked) for asked in (False, True)}
        log.info("compiled in %.1f s", time.perf_counter() - began)

    def __enter__(self) -> "Programs":
        return self

    def __exit__(self, *exception: object) -> None:
        self._steps.close()

    def at(self, item: Item) -> Callable:
        """The compiled step for a batch: (state, batch, stop) -> (state, metrics). The state is donated."""
        if self._steps.is_ready(item.index):
            return self._steps.at(item.index)
        with self._clock.during(goodput.COMPILATION):
            return self._steps.at(item.index)

    def evaluation(self, bucket: int) -> Callable:
        """The compiled evaluation of a bucket of the test split: (variables, batch) -> sums. Waits for its compilation."""
        return self._steps.other(bucket)


def _check_best(assembly: Assembly, evaluated: dict | None) -> None:
    """Raises ConfigError when config.checkpoint.best names a metric that no evaluation has. None: there is no test split."""
    config, task = assembly.config, assembly.task
    best = config.checkpoint.best.lstrip("-")
    if not best:
        return
    if evaluated is None:
        text = f"is {config.checkpoint.best!r}, and there is no test split; leave it unset, and train.patience too"
        raise ConfigError([("checkpoint.best", text)])
    with np.errstate(all="ignore"):
        known = task.finish({name: np.ones(mean.total.shape)[()] for name, mean in evaluated.items() if name not in COUNTS})
    if best not in known and not task.trials:  # the metrics of a trial are known once it has run
        raise ConfigError([("checkpoint.best", f"names {best!r}; expected one of: {', '.join(sorted(known))}")])
