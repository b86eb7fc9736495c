"""The fields of a config that are given as auto: the largest microbatch that fits, and so on.

If mesh is auto, `mesh_search` chooses it and the other fields. Without it choices are tried in this
order, and the first that fits is taken:

    model.remat        none before full: a layer that is recomputed costs a third more, or half if
                       its matrices are frozen
    train.accumulate   1 before its multiples: the matrices are read once for each microbatch

If a TPU slice splits the matrices over fsdp, all policies are tried with one number of microbatches
before the next. Each microbatch gathers the matrices again, which takes longer there than a
recomputation.

With model.unroll = 0 each is tried with layers written out (`remat.layers_at_once`), then as a
loop. A field that is not auto keeps its value. On GPUs and TPUs the compiler has the last word. On
CPUs nothing is compiled, but for a search: a step fits if it does with the arrays of its loops
counted twice.

A run decides before its first step. config.json has the result, which each later start takes.
"""

import itertools
import json
import logging
import math
import pathlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import jax

from jaxtrain import config as config_lib
from jaxtrain.nn import remat
from jaxtrain.parallel import cluster
from jaxtrain.parallel import layout as layout_lib
from jaxtrain.plan import mesh_search, worker
from jaxtrain.plan.bound import Bound, bound_of
from jaxtrain.plan.candidates import ACCUMULATE, REMAT, RULES, SEQUENCE, Choice
from jaxtrain.plan.memory import in_bytes
from jaxtrain.plan.remedies import ways
from jaxtrain.plan.target import PlanError, Target, abstractly, parse_target
from loaders.io import files

log = logging.getLogger("jaxtrain")
UNROLL = "model.unroll"
MIB = 1 << 20


class Fit(NamedTuple):
    """The first choice that fits, or the smallest."""

    config: config_lib.Config
    choice: Choice
    size: float  # [bytes] on a device, as it was compared with the limit
    limit: float  # [bytes] of a device that a step may take
    source: str  # of the size, as "at least"
    fits: bool

    def __str__(self) -> str:
        line = f"auto is {self.choice}: {self.source} {in_bytes(self.size)}"
        line += f" of {in_bytes(self.limit)} that a step may take"
        return line if self.fits else f"{line}, the smallest choice, which does not fit"

    def problem(self, auto: Sequence[str], target: Target) -> str:
        """Return the error of a config of which ``auto`` are fields that nothing fits."""
        return (
            f"{' and '.join(auto)} {'is' if len(auto) == 1 else 'are'} auto, and nothing fits: the"
            f" smallest choice, {self.choice}, needs {self.source} {in_bytes(self.size)} on each"
            f" device, and a step may take {in_bytes(self.limit)} of each of {target.name}."
            f" {ways(self.config, target)}"
        )


def decide(config: config_lib.Config, target: Target, text: str) -> tuple[config_lib.Config, str]:
    """Return the config without auto, and a line with the choice, "" without auto.

    ``text``: the target's, as in --plan=. If nothing fits, the choice with the least memory is
    returned, whose plan names the problem.
    """
    fit = best_fit(config, target, text)
    return (fit.config, str(fit)) if fit else (config, "")


def decide_once(config: config_lib.Config) -> config_lib.Config:
    """Return the config of a run without auto. A resumed run keeps its earlier choice.

    All processes call it, and get the same. Raises PlanError: nothing fits, or the rules of axes
    are not those of an earlier start with mesh=auto.
    """
    if not config.train.auto:
        return config
    target = parse_target("")
    saved = of_earlier_start(config, target)
    if saved:
        config, line = saved
        log.info("%s", line)
        return config
    fit = best_fit(config, target, "")
    assert fit is not None
    if not fit.fits:
        raise PlanError(fit.problem(config.train.auto, target))
    log.info("%s", fit)
    return fit.config


def of_earlier_start(
    config: config_lib.Config, target: Target
) -> tuple[config_lib.Config, str] | None:
    """Return a resumed run's config by its earlier choice, and a line with that, if it has one.

    None if that does not fit these devices, which may be fewer than before, or have less memory.
    """
    choice = _saved(config, target) if config.train.auto and target.here else None
    if choice is None:
        return None
    has_compiler = target.platform != "cpu" or "mesh" in config.train.auto
    size = _size_by_bound(bound_of(choice.apply(config), target), has_compiler)
    memory = _memory(target)
    if size > memory:
        log.info(
            "auto was %s at the run's first start, which needs at least %s of %s here: it is"
            " decided again",
            choice,
            in_bytes(size),
            in_bytes(memory),
        )
        return None
    return choice.apply(config), f"auto is {choice}, as at the run's first start"


def choices(config: config_lib.Config, target: Target) -> Iterator[Choice]:
    """Yield the choices, the fastest first."""
    auto = config.train.auto
    policies = ["none", "full"] if REMAT in auto else [None]
    counts = _divisors(config, target) if ACCUMULATE in auto else [None]
    pairs = list(itertools.product(policies, counts))
    if REMAT in auto and ACCUMULATE in auto and _gathers_on_tpus(config, target):
        pairs.sort(key=lambda pair: pair[1] or 0)
    for policy, count in pairs:
        values = {ACCUMULATE: count, REMAT: policy}
        yield Choice(tuple((path, values[path]) for path in auto))


def _divisors(config: config_lib.Config, target: Target) -> list[int]:
    """Return the numbers of microbatches that a device's rows can be divided into."""
    sizes = config.mesh.data, config.mesh.fsdp, config.mesh.model
    data, fsdp, _ = layout_lib.mesh_sizes(sizes, target.count, target.name)
    rows = max(1, config.train.batch // (data * fsdp))
    return [n for n in range(1, rows + 1) if rows % n == 0]


def _gathers_on_tpus(config: config_lib.Config, target: Target) -> bool:
    """Tell whether each microbatch gathers matrices that are split over a TPU slice."""
    sizes = config.mesh.data, config.mesh.fsdp, config.mesh.model
    _, fsdp, _ = layout_lib.mesh_sizes(sizes, target.count, target.name)
    return fsdp > 1 and target.platform == "tpu"


def best_fit(config: config_lib.Config, target: Target, text: str) -> Fit | None:
    """Return the first choice that fits, else the smallest. None without auto."""
    if not config.train.auto:
        return None
    if "mesh" in config.train.auto:
        return _searched(config, target, text)
    if target.platform == "cpu":
        return _first_fit(config, target, None)
    with worker.compiler(target, text) as compiler:
        return _first_fit(config, target, compiler)


def _searched(config: config_lib.Config, target: Target, text: str) -> Fit:
    """Return the fastest choice of a mesh, and of the other fields on auto, else the nearest."""
    fields = tuple(path for path in config.train.auto if path != "mesh")
    with worker.compiler(target, text) as compiler:
        search = mesh_search.Search(config, target, compiler, fields=fields, note=_note)
        result = search.run()
    # of a config with optim.offload no candidate may have a compiler (`mesh_search`)
    settled = next(iter([*result.best, *result.likely]), result.nearest)
    if settled is None and result.failed:
        lacks = "\n  ".join(mesh_search.lacks(result.failed)[: mesh_search.MAX_REASONS])
        raise PlanError(f"mesh is auto, and no candidate compiles:\n  {lacks}")
    if settled is None:
        raise PlanError(f"mesh is auto, and {mesh_search.no_mesh(result, target)}")
    source = "at least"
    if settled.step:
        source = "by its compiler"
    choice = settled.candidate.choice
    limit = search.memory * (mesh_search.ROOM if settled.step else 1)
    return Fit(settled.candidate.config, choice, settled.size, limit, source, not settled.reason)


def _note(line: str) -> None:
    log.info("auto: %s", line)


def _first_fit(config: config_lib.Config, target: Target, compiler: worker.Compiler | None) -> Fit:
    """Return the first choice that fits, else the smallest."""
    memory = _memory(target)
    tried: list[Fit] = []
    for fit in _fits(config, target, compiler, memory):
        if fit.fits:
            return fit
        tried.append(fit)
    # A bound is below the size of its program, so it stands back behind programs. Of those that the
    # compiler refuses, without a size, the last one.
    programs = [fit for fit in tried if fit.source != "at least"]
    sizes = [fit for fit in programs if math.isfinite(fit.size)]
    smallest: Fit = min(reversed(sizes or programs or tried), key=lambda fit: fit.size)
    if math.isinf(smallest.size):
        return smallest._replace(size=smallest.limit, source="by its compiler more than")
    return smallest


def _memory(target: Target) -> float:
    """Return the least memory of a device that any process sees."""
    if target.here and jax.process_count() > 1:
        return min(cluster.gather(int(target.memory / MIB))) * MIB
    return target.memory


def _size_by_bound(lower: Bound, has_compiler: bool) -> float:
    """Return the bytes of a step by its lower bound. Without a compiler it is a guess of more."""
    return lower.peak + (0.0 if has_compiler else sum(array.bytes for array in lower.kept))


def _fits(
    config: config_lib.Config, target: Target, compiler: worker.Compiler | None, memory: float
) -> Iterator[Fit]:
    """Yield the size of each choice, by its compiler if there is one and the lower bound fits."""
    compiled = _Compiled(config, compiler, memory)
    limit = mesh_search.ROOM * memory
    for choice in choices(config, target):
        candidate = choice.apply(config)
        lower = bound_of(candidate, target)
        size = _size_by_bound(lower, compiler is not None)
        if compiler is None or size > memory:
            yield Fit(candidate, choice, size, memory, "at least", fits=size <= memory)
            continue
        for written in _written(candidate, target):
            size, source = compiled.size(written, lower)
            yield Fit(written, choice, size, limit, source, fits=size <= limit)


def _written(config: config_lib.Config, target: Target) -> Iterator[config_lib.Config]:
    """Yield a config with its layers written out, and with a loop, if it leaves that open."""
    model = config.model
    if getattr(model, "unroll", 1):
        yield config
        return
    shard = abstractly(config, target).layout.shard
    for at_once in dict.fromkeys((remat.layers_at_once(0, model.depth, shard), 1)):
        yield replace(config, model=replace(model, unroll=at_once))


class _Compiled:
    """The sizes of compiled steps.

    Bytes beyond the exact ones are in proportion to the rows of a microbatch. So a step that cannot
    fit by a program compiled before is not compiled.
    """

    def __init__(self, config: config_lib.Config, compiler: worker.Compiler | None, memory: float):
        self._auto = config.train.auto
        self._compiler = compiler
        self._memory = memory
        # of a policy and a number of layers at once, for one microbatch
        self._beyond: dict[Any, float] = {}

    def size(self, config: config_lib.Config, lower: Bound) -> tuple[float, str]:
        """Return the bytes of a step and their source, an estimate if it cannot fit.

        They are inf if the compiler refuses the step as too large.
        """
        count = config.train.accumulate
        program = getattr(config.model, "remat", ""), getattr(config.model, "unroll", 1)
        estimate = lower.certain + self._beyond.get(program, 0.0) / count
        if estimate > self._memory:
            return estimate, "by the program of another number of microbatches"
        size = _agreed(self._peak(config)) + lower.second
        if math.isfinite(size):
            self._beyond[program] = (size - lower.certain) * count
        return size, "by its compiler"

    def _peak(self, config: config_lib.Config) -> float:
        """Return the bytes of a compiled step, inf if it does not fit."""
        assert self._compiler is not None
        answer = self._compiler(config)
        if answer.compiled:
            return float(answer.compiled.peak)
        if answer.too_large:
            return math.inf
        raise PlanError(f"{self._auto} cannot be decided: {answer.error}")


def _agreed(size: float) -> float:
    """Return the largest size of all processes, in whole MiB."""
    largest = max(cluster.gather(math.ceil(size / MIB) if math.isfinite(size) else -1))
    return largest * MIB if largest >= 0 else math.inf


def _saved(config: config_lib.Config, target: Target) -> Choice | None:
    """Return the choice of an earlier start by config.json, which process 0 reads.

    None if there is no such start, or its mesh and microbatches do not divide these devices' rows.
    Raises PlanError if it has other rules of axes than the config has besides mesh=auto.
    """
    text = json.dumps(_read(config)) if cluster.is_main() else ""
    tree = json.loads(cluster.gather_texts(text)[0])
    choice = Choice(tuple(tree.items()))
    saved = choice.apply(config)
    sizes = saved.mesh.data, saved.mesh.fsdp, saved.mesh.model
    is_of_these = min(sizes) > 0 and math.prod(sizes) == target.count
    if "mesh" in config.train.auto and not is_of_these:
        return None
    try:
        if not tree or tree.get(ACCUMULATE, 1) not in _divisors(saved, target):
            return None
        abstractly(saved, target)
    except (ValueError, TypeError):
        return None
    if RULES in tree:
        _refuse_other_rules(config, tree[RULES])
    return choice


def _refuse_other_rules(config: config_lib.Config, saved: dict[str, str]) -> None:
    """Raise PlanError for rules of axes that neither are a run's nor become them by a search."""
    given = config.mesh.axis_rules
    if given and saved not in (given, {**given, **SEQUENCE}):
        raise PlanError(
            f"mesh.axis_rules is {given}, and the run in {config.workdir} began with {saved} and"
            " mesh=auto, which a resume keeps; omit mesh.axis_rules, or give mesh.data, mesh.fsdp"
            " and mesh.model in place of mesh=auto"
        )


def _read(config: config_lib.Config) -> dict[str, Any]:
    """Return the values of config.json of the fields that the plan decides, {} without one."""
    path = pathlib.Path(config.workdir, "config.json")
    names = [name for name in config.train.auto if name != "mesh"]
    if getattr(config.model, "unroll", 1) == 0:
        names.append(UNROLL)
    try:
        tree = files.read_json(path)
        values = {}
        if "mesh" in config.train.auto:
            mesh = config_lib.section(config_lib.Mesh, tree["mesh"])
            values = {f"mesh.{name}": value for name, value in vars(mesh).items()}
        values |= {name: _field(tree, name) for name in names}
    except (OSError, ValueError, LookupError, TypeError):  # none, or damaged
        return {}
    return values


def _field(tree: Any, path: str) -> Any:
    section, _, name = path.partition(".")
    return tree[section][name]
