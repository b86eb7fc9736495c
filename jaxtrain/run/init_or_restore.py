"""Initialise or restore: the list of all sources of a run's state, in order."""

import dataclasses
import functools
import logging
import os
import pathlib
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxtrain import specs
from jaxtrain.arrays import base_weights, stored, warm_start
from jaxtrain.assembly import Assembly
from jaxtrain.checkpoint import CheckpointError, History, Restored
from jaxtrain.compile import program_cache
from jaxtrain.config import OF_SCHEDULE, Config, Optim, WarmStart, section
from jaxtrain.nn import lora
from jaxtrain.optim import learning_rates
from jaxtrain.parallel import cluster
from jaxtrain.run.checkpoint_manager import CheckpointManager
from jaxtrain.step import state as state_lib
from jaxtrain.step.state import TrainState
from jaxtrain.types import PyTree
from loaders.io import files

log = logging.getLogger("jaxtrain")


class Start(NamedTuple):
    state: TrainState
    step: int  # batches that it has read
    history: History


def init_or_restore(assembly: Assembly, checkpoints: CheckpointManager) -> Start:
    """Return the state, step and history that the run trains from, on every process.

    Raises CheckpointError: there are checkpoints, and none can be read, or they are of another
    model or other data (never followed by a silent start at step 0); WarmStartError: the source of
    config.warm_start does not fit the parameters.
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
        return _with_frozen(assembly, restored)
    # 3. The initial parameters, and over them those of config.warm_start.source.
    # 4. The initial parameters.
    rules, history = _exact(config.warm_start), History()
    frozen, keep = abstract.state.variables.frozen, config.warm_start.keep
    base = _record(rules, config.warm_start.source) if frozen or keep else None
    history = history._replace(base=base if frozen else None)
    overlay, given = _warm_start(assembly, _kept(config, rules, base))
    key = jax.random.key(config.seed)
    init = state_lib.make_init(assembly.task, assembly.tx, abstract, start=overlay).lower(
        key, given
    )
    program = program_cache.earlier(init, {}) or program_cache.keep(init, {}, init.compile)
    return Start(program(key, given), 0, history)


def _report_schedule(config: Config, restored: Restored) -> None:
    """Log a line if the coming learning rates differ from those of the checkpoint's run."""
    try:
        saved = _saved_config(restored)
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
        old, new = (
            learning_rates(o, s, np.linspace(restored.step, n, 101))
            for o, s in ((before, steps), (now, n))
        )
    except ValueError:
        return  # the checkpoint's run had a schedule of its own, which is not here
    if (
        old is None
        or new is None
        or np.allclose(old, new, rtol=1e-4, atol=1e-5 * max(now.lr, before.lr))
    ):
        return
    log.warning(
        "the schedule of the learning rate changes (%s): at step %d it is %.3g, and was to be %.3g",
        changed,
        restored.step,
        new[0],
        old[0],
    )


def _saved_config(restored: Restored) -> Any:
    return (stored.read_json(restored.source, "meta") or {}).get("config") or {}


def _with_frozen(assembly: Assembly, restored: Restored) -> Start:
    """Return a restored state with its frozen parameters as at step 0, which no checkpoint holds.

    Raises CheckpointError: they are gone, or they and config.warm_start.source differ.
    """
    state, history = restored.state, restored.history
    frozen = _by_path(assembly.abstract.state.variables.frozen)
    if not frozen:
        return Start(state, restored.step, history)
    rules, base = _base_of(assembly.config, restored)
    overlay, given = _warm_start(
        assembly, _kept(assembly.config, rules, base), verified=base == history.base
    )
    given = {path: x for path, x in given.items() if path in frozen}
    key = jax.random.key(assembly.config.seed)
    made = state_lib.init_frozen(assembly.task, assembly.abstract, key, start=overlay, given=given)
    variables = state.variables._replace(frozen=made)
    return Start(state.replace(variables=variables), restored.step, history._replace(base=base))


def _base_of(config: Config, restored: Restored) -> tuple[WarmStart, dict[str, str]]:
    """Return the rules for a restored run's frozen weights, at their place, and their record."""
    rules = config.warm_start
    base = base_weights.recorded(restored.history._asdict())
    named = (
        base.named
        if base
        else str((_saved_config(restored).get("warm_start") or {}).get("source") or "")
    )
    change = f"config.warm_start.source: {named!r} saved, {rules.source!r} now"
    if named and not rules.source:
        raise CheckpointError(
            f"the frozen weights of {restored.source} are those of"
            f" {base.source if base else named}, and without a source they would be random"
            f" ({change}); set --config.warm_start.source={named}"
        )
    same = base.is_named(rules.source) if base else rules.source == named
    if (
        base
        and same
        and rules.step is not None
        and pathlib.PurePath(base.source).name != str(rules.step)
    ):
        same, change = (
            False,
            f"config.warm_start.step: the run froze {base.source}, {rules.step} now",
        )
    allowed = any(
        name in config.resume.allow
        for name in ("warm_start", "warm_start.source", "warm_start.step")
    )
    if base and base.source and not allowed:
        theirs = base_weights.workdirs(restored.source, _saved_config(restored).get("workdir"))
        where = (
            base_weights.places(base, [config.workdir, *theirs]) if same else [_exact(rules).source]
        )
        try:
            i = where.index(base_weights.find(base, rules, where)) if cluster.is_main() else 0
            problem = ""
        except stored.StoredError as error:
            i, problem = -1, str(error)
        if (i := cluster.agree(i)) >= 0:
            return base_weights.at(rules, where[i]), base._asdict()
        problem = problem or "process 0 says why"
        raise CheckpointError(
            f"{restored.source}: {'' if same else f'{change}; '}{problem}. Put them back, or train"
            " on with the weights that config.warm_start.source names now by"
            " --config.resume.allow=warm_start.source"
        )
    if not same and not allowed:
        raise CheckpointError(
            f"the frozen weights of {restored.source} are others ({change}); set it back, choose"
            " another config.workdir, or train on with these by"
            " --config.resume.allow=warm_start.source"
        )
    rules = _exact(rules)
    if not base and rules.source:
        log.warning(
            "%s does not record which step it froze: the run continues with %s",
            restored.source,
            rules.source,
        )
    return rules, _record(rules, config.warm_start.source)


def _exact(rules: WarmStart) -> WarmStart:
    """``rules`` with the step that process 0 finds newest, if they name a run."""
    try:
        pinned = base_weights.pin(rules)
        name = pathlib.PurePath(pinned.source).name
        step = cluster.agree(int(name) if pinned is not rules and name.isdecimal() else -1)
        return (
            pinned
            if step < 0 or name == str(step)
            else base_weights.pin(dataclasses.replace(rules, step=step))
        )
    except stored.StoredError as error:
        raise warm_start.WarmStartError(rules.source, [str(error)]) from error


def _record(rules: WarmStart, named: str) -> dict[str, str]:
    """Return the record of frozen weights for the checkpoints, which process 0 writes."""
    digest = base_weights.digest(rules) if rules.source and cluster.is_main() else ""
    source = (
        os.path.abspath(files.expanded(rules.source))
        if rules.source and "://" not in rules.source
        else rules.source
    )
    return base_weights.Base(source, named, digest)._asdict()


def _kept(config: Config, rules: WarmStart, base: dict[str, str] | None) -> WarmStart:
    """``rules`` for the copy in the workdir, made first if config.warm_start.keep asks for it."""
    if not (config.warm_start.keep and rules.source and base):
        return rules
    digest = base["digest"][: base_weights.SHORT] or "0"  # process 0 alone has one
    short = f"{cluster.agree(int(digest, 16)):0{base_weights.SHORT}x}"
    if cluster.is_main():
        base_weights.keep(rules, config.workdir, short)
    cluster.barrier("the copy of the base is written")
    return base_weights.at(rules, base_weights.keep(rules, config.workdir, short))


def _warm_start(
    assembly: Assembly, config: WarmStart, *, verified: bool = False
) -> tuple[Callable[[PyTree, PyTree], PyTree], dict[str, jax.Array]]:
    """Return `state.init_state`'s arguments to begin from a source, which has no adapters."""
    if not config.source:
        return (lambda params, given: params), {}
    problems = warm_start.damage(config) if cluster.is_main() and not verified else []
    if cluster.agree(len(problems)):
        raise warm_start.WarmStartError(config.source, problems or ["process 0 found it damaged"])
    if not config.other_front_end and (
        unfit := list(assembly.config.model.validate_warm_start(warm_start.config_of(config)))
    ):
        raise warm_start.WarmStartError(config.source, unfit)
    is_run = not (config.ema or stored.is_safetensors(config.source))
    if is_run and (warm_start.config_of(config).get("train") or {}).get("ema"):
        text = (
            "evaluations of that run are of the average of its parameters, which"
            " config.warm_start.ema=true takes"
        )
        log.warning("warm start from %s: %s", config.source, text)
    variables = assembly.abstract.state.variables
    table = {**_by_path(variables.params), **_by_path(variables.frozen)}
    table = {path: x for path, x in table.items() if not lora.is_adapter(path)}
    source = warm_start.open_source(config)
    if any(map(lora.is_adapter, source)):
        text = (
            "it holds adapters without the weights that they change; `jaxtrain export` merges them,"
            " to start from the result"
        )
        raise warm_start.WarmStartError(config.source, [text])
    matches = warm_start.match(
        {path: (x.shape, x.dtype) for path, x in table.items()}, source, config
    )
    log.info("warm start from %s: %s", config.source, matches.report())
    return functools.partial(warm_start.overlay, matches), warm_start.load(matches, table)


def _by_path(tree: PyTree) -> dict[str, jax.ShapeDtypeStruct]:
    return dict(zip(specs.paths(tree), jax.tree.leaves(tree), strict=True))
