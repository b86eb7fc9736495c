"""Initialise or restore: the list of all sources of a run's state, in order."""

import functools
import logging
import os
import pathlib
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxtrain import config as config_lib
from jaxtrain import specs
from jaxtrain.arrays import base_weights, orbax_steps, safetensors_reader, stored, warm_start
from jaxtrain.assembly import Assembly
from jaxtrain.checkpoint import CheckpointError, History, Restored
from jaxtrain.compile import program_cache
from jaxtrain.config import OF_SCHEDULE, Config, Optim, WarmStart, section
from jaxtrain.nn import lora
from jaxtrain.optim import learning_rates
from jaxtrain.parallel import cluster
from jaxtrain.step import state as state_lib
from jaxtrain.step.state import TrainState
from jaxtrain.types import PyTree
from loaders.io import files
from loaders.io.checks import FREE

log = logging.getLogger("jaxtrain")
Overlay = Callable[[PyTree, PyTree], PyTree]
BASE_FIELDS = ("warm_start", "warm_start.source")  # of config.resume.allow


class Start(NamedTuple):
    state: TrainState
    step: int  # batches that it has read
    history: History
    # the beginning of the digest of the weights that it was initialised from
    warm: str = ""


def init_or_restore(
    assembly: Assembly,
    newest: Callable[[str], Restored | None],
    *,
    in_memory: Callable[[], Restored | None] = lambda: None,
) -> Start:
    """Return the state, step and history that the run trains from, on every process.

    ``newest``: finds and reads the newest checkpoint of a workdir, "" being the run's own.
    ``in_memory``: returns a newer step that a supervised run has kept in memory.

    Raises CheckpointError: there are checkpoints, and none can be read, or they are of another
    model or other data (never followed by a silent start at step 0); WarmStartError: the source of
    config.warm_start does not fit the parameters.
    """
    config = assembly.config
    # 1. The newest whole step in the hosts' memory, unless a sound checkpoint here is newer.
    # 2. The newest checkpoint of this workdir that can be read.
    restored = in_memory() or newest("")
    # 3. The newest one of config.resume.path that can be read.
    if not restored and config.resume.path:
        restored = newest(config.resume.path)
    if restored:
        log.info("resuming from step %d: %s", restored.step, restored.source)
        _report_schedule(config, restored)
        return _with_frozen(assembly, restored)
    # 4. The initial parameters, and over them those of config.warm_start.source.
    # 5. The initial parameters.
    rules = _exact(config.warm_start)
    frozen = assembly.abstract.state.variables.frozen
    base = None
    warm = ""
    if frozen or rules.source:
        base = _record(rules, config.warm_start.source)
        warm = _short_digest(base) if rules.source else ""
    overlay, loaded = _warm_start(assembly, _keep(config, rules, warm))
    state = _init(assembly, overlay, loaded)
    return Start(state, 0, History(base=base if frozen else None), warm)


def _init(assembly: Assembly, overlay: Overlay, loaded: dict[str, jax.Array]) -> TrainState:
    """Compute the state of step 0, by a program that an earlier start may have compiled."""
    key = jax.random.key(assembly.config.seed)
    init = state_lib.make_init(assembly.task, assembly.tx, assembly.abstract, start=overlay)
    lowered = init.lower(key, loaded)
    program = program_cache.earlier(lowered, {})
    if not program:
        program = program_cache.keep(lowered, {}, lowered.compile)
    state: TrainState = program(key, loaded)
    return state


def _report_schedule(config: Config, restored: Restored) -> None:
    """Log a line if the coming learning rates differ from those of the checkpoint's run."""
    try:
        saved_config = _saved_config(restored)
        old = section(Optim, saved_config["optim"])
        old_steps = int(saved_config["train"]["steps"])
    except (KeyError, TypeError, ValueError):
        return  # of another version, whose schedule is not known
    new, new_steps = config.optim, config.train.steps
    fields = [("train.steps", old_steps, new_steps)]
    for name in OF_SCHEDULE:
        fields.append((f"optim.{name}", getattr(old, name), getattr(new, name)))
    changed = [f"{name} from {a} to {b}" for name, a, b in fields if a != b]
    if not changed or restored.step >= new_steps:
        return
    coming_steps = np.linspace(restored.step, new_steps, 101)
    try:
        old_rates = learning_rates(old, old_steps, coming_steps)
        new_rates = learning_rates(new, new_steps, coming_steps)
    except ValueError:
        return  # the checkpoint's run had a schedule of its own, which is not here
    if old_rates is None or new_rates is None:
        return
    if np.allclose(old_rates, new_rates, rtol=1e-4, atol=1e-5 * max(new.lr, old.lr)):
        return
    log.warning(
        "the schedule of the learning rate changes (%s): at step %d it is %.3g, and was to be %.3g",
        ", ".join(changed),
        restored.step,
        new_rates[0],
        old_rates[0],
    )


def _saved_config(restored: Restored) -> Any:
    return (orbax_steps.read_json(restored.source, "meta") or {}).get("config") or {}


def _with_frozen(assembly: Assembly, restored: Restored) -> Start:
    """Return a restored state with its frozen parameters as at step 0, which no checkpoint holds.

    Raises CheckpointError: they are gone, or they and config.warm_start.source differ.
    """
    state = restored.state
    frozen = _by_path(assembly.abstract.state.variables.frozen)
    if not frozen:
        return Start(state, restored.step, restored.history)
    rules, base = _base_of(assembly.config, restored)
    overlay, loaded = _warm_start(
        assembly,
        _keep(assembly.config, rules, _short_digest(base)),
        verified=base == restored.history.base,
    )
    frozen_parameters = state_lib.init_frozen(
        assembly.task,
        assembly.abstract,
        jax.random.key(assembly.config.seed),
        start=overlay,
        given={path: x for path, x in loaded.items() if path in frozen},
    )
    variables = state.variables._replace(frozen=frozen_parameters)
    history = restored.history._replace(base=base)
    return Start(state.replace(variables=variables), restored.step, history)


def _base_of(config: Config, restored: Restored) -> tuple[WarmStart, dict[str, str]]:
    """Return the rules for a restored run's frozen weights, at their place, and their record."""
    rules = config.warm_start
    base = base_weights.recorded(restored.history._asdict())
    if base is None:
        raise CheckpointError(f"{restored.source} does not record which weights the run froze")
    change = f"config.warm_start.source: {base.named!r} saved, {rules.source!r} now"
    if base.named and not rules.source:
        raise CheckpointError(
            f"the frozen weights of {restored.source} are those of {base.source}, and without a"
            f" source they would be random ({change}); set --config.warm_start.source={base.named}"
        )
    is_same = base.is_named(rules.source)
    if any(field in config.resume.allow for field in BASE_FIELDS):
        exact = _exact(rules)
        return exact, _record(exact, config.warm_start.source)
    if base.source:
        problem = "" if is_same else f"{change}; "
        place = _place_of_base(config, restored, base, is_same=is_same, problem=problem)
        return base_weights.at(rules, place), base._asdict()
    if not is_same:
        raise CheckpointError(
            f"the frozen weights of {restored.source} are others ({change}); set it back, choose"
            " another config.workdir, or train on with these by"
            " --config.resume.allow=warm_start.source"
        )
    return rules, base._asdict()  # they are initialised again, from the same seed


def _place_of_base(
    config: Config, restored: Restored, base: base_weights.Base, *, is_same: bool, problem: str
) -> str:
    """Return the place where process 0 finds the recorded weights. Raises CheckpointError."""
    rules = config.warm_start
    if is_same:
        workdirs = base_weights.workdirs(restored.source, _saved_config(restored).get("workdir"))
        places = base_weights.places(base, [config.workdir, *workdirs])
    else:
        places = [_exact(rules).source]
    place, reason = 0, "process 0 says why"
    if cluster.is_main():
        try:
            place = places.index(base_weights.find(base, rules, places))
        except stored.StoredError as error:
            place, reason = -1, str(error)
    place = cluster.agree(place)
    if place < 0:
        raise CheckpointError(
            f"{restored.source}: {problem}{reason}. Put them back, or train"
            " on with the weights that config.warm_start.source names now by"
            " --config.resume.allow=warm_start.source"
        )
    return places[place]


def _exact(rules: WarmStart) -> WarmStart:
    """``rules`` with the step that process 0 finds newest, if they name a run."""
    try:
        pinned = base_weights.pin(rules)
        name = pathlib.PurePath(pinned.source).name
        is_step = pinned is not rules and name.isdecimal()
        step = cluster.agree(int(name) if is_step else -1)
        if step < 0 or name == str(step):
            return pinned
        return base_weights.pin(rules, step)
    except stored.StoredError as error:
        raise warm_start.WarmStartError(rules.source, [str(error)]) from error


def _record(rules: WarmStart, named: str) -> dict[str, str]:
    """Return the record of frozen weights for the checkpoints, which process 0 writes."""
    source = rules.source
    digest = base_weights.digest(rules) if source and cluster.is_main() else ""
    if source and "://" not in source:
        source = os.path.abspath(files.expanded(source))
    return base_weights.Base(source, named, digest)._asdict()


def _short_digest(base: Mapping[str, str]) -> str:
    """Return the beginning of the digest of a record, which process 0 alone has whole."""
    digest = base["digest"][: base_weights.SHORT] or "0"
    return f"{cluster.agree(int(digest, 16)):0{base_weights.SHORT}x}"


def _keep(config: Config, rules: WarmStart, short: str) -> WarmStart:
    """``rules`` for the copy in the workdir, made first if config.warm_start.keep asks for it."""
    if not (config.warm_start.keep and rules.source and short):
        return rules
    if cluster.is_main():
        base_weights.keep(rules, config.workdir, short)
    cluster.barrier("the copy of the base is written")
    return base_weights.at(rules, base_weights.keep(rules, config.workdir, short))


def _warm_start(
    assembly: Assembly, config: WarmStart, *, verified: bool = False
) -> tuple[Overlay, dict[str, jax.Array]]:
    """Return `state.init_state`'s arguments to begin from a source, which has no adapters."""
    if not config.source:
        return (lambda params, loaded: params), {}
    damage = warm_start.damage(config) if cluster.is_main() and not verified else []
    if cluster.agree(len(damage)):
        raise warm_start.WarmStartError(config.source, damage or ["process 0 found it damaged"])
    source_config = warm_start.config_of(config)
    if not config.other_front_end:
        run = assembly.config
        misfits = list(run.model.validate_warm_start(source_config, config.source, run.data))
        if misfits:
            raise warm_start.WarmStartError(config.source, misfits)
    _warn_of_other_function(assembly.config, config, source_config)
    _warn_of_average(config)
    source = warm_start.open_source(config)
    if any(map(lora.is_adapter, source)):
        problem = (
            "it holds adapters without the weights that they change; `jaxtrain export` merges them,"
            " to start from the result"
        )
        raise warm_start.WarmStartError(config.source, [problem])
    variables = assembly.abstract.state.variables
    targets = {**_by_path(variables.params), **_by_path(variables.frozen)}
    targets = {path: x for path, x in targets.items() if not lora.is_adapter(path)}
    shapes = {path: (x.shape, x.dtype) for path, x in targets.items()}
    matches = warm_start.match(shapes, source, config)
    log.info("warm start from %s: %s", config.source, matches.report())
    return functools.partial(warm_start.overlay, matches), warm_start.load(matches, targets)


def _warn_of_other_function(
    config: Config, rules: WarmStart, source_config: Mapping[str, Any]
) -> None:
    """Log a warning that names each field by which the source computed another function."""
    saved = source_config
    if not saved:
        saved = {"model": config.model.foreign_model(rules.source)}
    changes = []
    for change in config_lib.compare(saved, config, warm_start.digests_of(rules)):
        section, _, field = change.path.partition(".")
        if section not in ("model", "data") or change.kind == FREE:
            continue
        is_saved = field.partition(".")[0].partition("[")[0] in (saved.get(section) or {})
        if is_saved:
            changes.append(str(change))
    if changes:
        log.warning(
            "warm start from %s: its run computed another function: %s",
            rules.source,
            "; ".join(changes),
        )


def _warn_of_average(config: WarmStart) -> None:
    """Log a warning if the source has an average, which its run evaluated, and it is not used."""
    if config.ema or safetensors_reader.is_safetensors(config.source):
        return
    if (warm_start.config_of(config).get("train") or {}).get("ema"):
        log.warning(
            "warm start from %s: evaluations of that run are of the average of its parameters,"
            " which config.warm_start.ema=true takes",
            config.source,
        )


def _by_path(tree: PyTree) -> dict[str, jax.ShapeDtypeStruct]:
    return dict(zip(specs.paths(tree), jax.tree.leaves(tree), strict=True))
