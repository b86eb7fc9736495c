"""A workload's real step on a mesh, for tests: it is assembled as in a run, compiled, and taken on
numpy batches."""

import functools
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.experimental import multihost_utils

from jaxtrain import config as config_lib
from jaxtrain import specs as specs_lib
from jaxtrain.assembly import assemble
from jaxtrain.parallel import cluster
from jaxtrain.parallel.layout import make_mesh
from jaxtrain.step import state as state_lib
from jaxtrain.step import train_step as step_lib
from loaders.base import Field

# Options for machine code that compiles quickly rather than runs fast. XLA's earlier passes on the
# program are the same.
SOON = {"xla_backend_optimization_level": 0}


def initial(table, seed=0):
    """The initial arrays of a table of specs. One program makes them all, in place of several for
    each array."""
    make = jax.jit(functools.partial(specs_lib.materialise, table), compiler_options=SOON)
    return make(jax.random.key(seed))


class Case(NamedTuple):
    """A workload in a small size."""

    workload: Any  # module
    model: Any  # its Config
    optim: config_lib.Optim
    batch: Any  # seed -> field -> numpy array [rows, …]
    adapters: config_lib.Lora = config_lib.Lora()
    ema: float = 0.0
    # of initial parameters, for a start in which differences are larger
    begin: Any = lambda params: params
    steps: int = 10  # of the schedule


def assembled(case, mesh, accumulate=1, *, rules=None):
    """A case assembled on a mesh."""
    batch = case.batch(0)
    config = config_lib.Config(
        model=case.model,
        train=config_lib.Train(
            batch=len(next(iter(batch.values()))),
            steps=case.steps,
            accumulate=accumulate,
            ema=case.ema,
        ),
        mesh=config_lib.Mesh(axis_rules=rules or {}),
        metrics=config_lib.Metrics(every=1),
        optim=case.optim,
        lora=case.adapters,
    )
    fields = {name: Field(x.shape[1:], np.dtype(x.dtype)) for name, x in batch.items()}
    devices = jax.devices()[: int(np.prod(mesh))]
    return assemble(
        config, make_mesh(*mesh, devices=devices), make_task=case.workload.make_task, fields=fields
    )


class Run:
    """A case on a mesh, over all processes. Its step is compiled when it is first used."""

    def __init__(self, case, mesh, accumulate=1, *, rules=None, stage=None):
        self.case, assembly = case, assembled(case, mesh, accumulate, rules=rules)
        self._trace = functools.partial(assembly.trace, stage)
        self.layout, self.task, self.tx, self.abstract = (
            assembly.layout,
            assembly.task,
            assembly.tx,
            assembly.abstract,
        )
        self.go_on = step_lib.put_stop(self.layout, False)

    @functools.cached_property
    def step(self):
        compiled = self._trace().lower().compile(SOON)
        cluster.barrier("compiled")  # only the first collective waits for half a minute
        return compiled

    def init(self):
        def start(params, given):
            return self.case.begin(params) if params else params

        make = state_lib.make_init(self.task, self.tx, self.abstract, start=start)
        return make.lower(jax.random.key(0), ()).compile(SOON)(jax.random.key(0), ())

    def put(self, batch):
        return {
            name: jax.make_array_from_callback(
                x.shape, x.sharding, lambda i, name=name: np.asarray(batch[name][i])
            )
            for name, x in self.abstract.batch.items()
        }

    def evaluate(self, variables, batch):
        step = step_lib.make_eval_step(self.task, self.layout)
        return host(step.lower(variables, batch).compile(SOON)(variables, batch))

    def take(self, n):
        """The states and metrics after each of n steps, and then the metrics of an evaluation of
        the last batch."""
        step, state, found = self.step, self.init(), []
        for seed in range(n):
            batch = self.put(self.case.batch(seed))
            state, metrics = step(state, batch, self.go_on)
            found.append(host((state, metrics)))
        return found, self.evaluate(state.variables, batch)


def host(tree):
    """Whole arrays, on every process."""
    return jax.tree.map(
        lambda x: np.asarray(multihost_utils.process_allgather(x, tiled=True)), tree
    )


def assert_alike(expected, found, *, rtol=1e-3, share=1e-3, least=1e-3):
    """Compares leaf by leaf: ``rtol`` of each number plus ``share`` of its array's largest value,
    which counts as at least ``least``."""
    for path, x, y in zip(
        specs_lib.paths(expected), jax.tree.leaves(expected), jax.tree.leaves(found), strict=True
    ):
        x, y = np.asarray(x, "f4"), np.asarray(y, "f4")
        np.testing.assert_allclose(
            y, x, rtol=rtol, atol=share * max(least, np.abs(x).max(initial=0)), err_msg=path
        )
