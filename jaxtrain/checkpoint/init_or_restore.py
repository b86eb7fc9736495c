"""Initialise or restore: the list of all sources of a run's state, in order."""

import functools
import logging
from collections.abc import Callable
from typing import NamedTuple

import jax
import numpy as np

from jaxtrain import specs
from jaxtrain.arrays import stored
from jaxtrain.assembly import Assembly
from jaxtrain.checkpoint import History, Restored, warm_start
from jaxtrain.checkpoint.manager import CheckpointManager
from jaxtrain.config import OF_SCHEDULE, Config, Optim, section
from jaxtrain.nn import lora
from jaxtrain.optim import learning_rates
from jaxtrain.parallel import cluster
from jaxtrain.step import state as state_lib
from jaxtrain.step.state import TrainState
from jaxtrain.types import PyTree

log = logging.getLogger("jaxtrain")


class Start(NamedTuple):
    """The state, the step and the history that a run trains from."""

    state: TrainState
    step: int  # batches that it has read
    history: History


def init_or_restore(assembly: Assembly, checkpoints: CheckpointManager) -> Start:
    """Return the state, step and history that the run trains from. Every process calls it. Nothing else is changed.

    Raises:
      CheckpointError: there are checkpoints, and none can be read, or they are of another model or other data. Never
        followed by a silent start at step 0.
      WarmStartError: the source of config.warm_start does not fit the parameters.
    """
    config, abstract = assembly.config, assembly.abstract
    # 1. The newest checkpoint of this workdir that can be read.
    restored = checkpoints.newest()
    # 2. The newest one of config.resume.path that can be read.
    if not restored and config.resume.path:
        restored = checkpoints.newest(config.resume.path)
    if restored:
        log.info("resuming from step %d: %s", restored.step, restored.source)
        _report_schedule(config, restored)
        return Start(_with_frozen(assembly, restored.state), restored.step, restored.history)
    # 3. The initial parameters, and over them those of config.warm_start.source.
    # 4. The initial parameters.
    overlay, given = _warm_start(assembly)
    key = jax.random.key(config.seed)
    state = state_lib.init_state(assembly.task, assembly.tx, abstract, key, start=overlay, given=given)
    return Start(state, 0, History())


def _report_schedule(config: Config, restored: Restored) -> None:
    """Log a line if the coming learning rates differ from those of the checkpoint's run."""
    try:
        saved = (stored.read_json(restored.source, "meta") or {})["config"]
        before, steps = section(Optim, saved["optim"]), int(saved["train"]["steps"])
    except (KeyError, TypeError, ValueError):
        return  # of another version, whose schedule is not known
    now, n = config.optim, config.train.steps
    pairs = [("train.steps", steps, n)]
    pairs += [(f"optim.{name}", getattr(before, name), getattr(now, name)) for name in OF_SCHEDULE]
    changed = ", ".join(f"{name} from {a} to {b}" for name, a, b in pairs if a != b)
    if not changed or restored.step >= n:
        return
    try:
        old, new = (learning_rates(o, s, np.linspace(restored.step, n, 101)) for o, s in ((before, steps), (now, n)))
    except ValueError:
        return  # the checkpoint's run had a schedule of its own, which is not here
    if old is None or new is None or np.allclose(old, new, rtol=1e-4, atol=1e-5 * max(now.lr, before.lr)):
        return
    log.warning(
        "the schedule of the learning rate changes (%s): at step %d it is %.3g, and was to be %.3g",
        changed, restored.step, new[0], old[0],
    )  # fmt: skip


def _with_frozen(assembly: Assembly, state: TrainState) -> TrainState:
    """A restored state with its frozen parameters, which no checkpoint holds, as they were at step 0."""
    frozen = _by_path(assembly.abstract.state.variables.frozen)
    if not frozen:
        return state
    overlay, given = _warm_start(assembly)
    given = {path: x for path, x in given.items() if path in frozen}
    key = jax.random.key(assembly.config.seed)
    made = state_lib.init_frozen(assembly.task, assembly.abstract, key, start=overlay, given=given)
    return state.replace(variables=state.variables._replace(frozen=made))


def _warm_start(assembly: Assembly) -> tuple[Callable[[PyTree, PyTree], PyTree], dict[str, jax.Array]]:
    """Both arguments of `state.init_state` that lay the source's arrays over initial parameters. No source has adapters."""
    config = assembly.config.warm_start
    if not config.source:
        return (lambda params, given: params), {}
    problems = warm_start.damage(config) if cluster.is_main() else []
    if cluster.agree(len(problems)):
        raise warm_start.WarmStartError(config.source, problems or ["process 0 found it damaged"])
    if not config.other_front_end and (unfit := list(assembly.config.model.warm_start_problems(warm_start.config_of(config)))):
        raise warm_start.WarmStartError(config.source, unfit)
    variables = assembly.abstract.state.variables
    table = {**_by_path(variables.params), **_by_path(variables.frozen)}
    table = {path: x for path, x in table.items() if not lora.is_adapter(path)}
    source = warm_start.open_source(config)
    matches = warm_start.match({path: (x.shape, x.dtype) for path, x in table.items()}, source, config)
    log.info("warm start from %s: %s", config.source, matches.report())
    return functools.partial(warm_start.overlay, matches), warm_start.load(matches, table)


def _by_path(tree: PyTree) -> dict[str, jax.ShapeDtypeStruct]:
    return dict(zip(specs.paths(tree), jax.tree.leaves(tree), strict=True))
