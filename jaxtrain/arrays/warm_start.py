"""Parameters of another run as the start of this one, by declared rules. None is left out silently.

The source is a step of a run (`jaxtrain.checkpoint`) or a folder of safetensors. Only parameters
are taken from it. The optimizer starts from its initial state, the average of the parameters as a
copy of them, the model state as it is initialised. In this order:

1. ``renames`` turn each path of the source into one of the table. A path that ends in ``[i]`` is
   layer i of a stack, so that ``("layers/(\\d+)/w", "blocks/w[\\1]")`` stacks arrays that other
   programs keep separately.
2. Parameters that ``skip`` matches stay as they are initialised. Every other one must be in the
   source.
3. ``unused`` must match every array of the source that this model has no use for.
4. Shapes must be equal, unless a rule of ``reshape`` says how they are made so:
   ``crop``                  the first entries along each axis that is longer in the source
   ``pad``                   the source's entries first, and the rest as it is initialised
   ``fold``                  the same numbers in the same order: [heads × head dimension, D] as
                             [heads, head dimension, D]
   ``grid 32x8 to 16x8``     the first axis is a grid, row by row, resampled linearly with
                             antialiasing (`jax.image.resize`)
5. Floating-point numbers are rounded to the table's dtype, and the report lists them. Other changes
   of dtype are errors.
"""

import difflib
import functools
import logging
import math
import operator
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from etils import epath

from jaxtrain import specs, workload
from jaxtrain.arrays import checksums, orbax_steps, safetensors_reader, stored
from jaxtrain.arrays.source import Source
from jaxtrain.arrays.stored import Stored
from jaxtrain.config import RESHAPE, WarmStart
from jaxtrain.types import Array, PyTree
from loaders.io.checks import UserError

log = logging.getLogger("jaxtrain")
Shape = tuple[int, ...]

MAX_NAME = 1000  # [characters] of a parameter's path
WAYS = ("crop", "pad", "fold")  # of reshaping, besides a grid's, whose sizes no shape tells
WAYS_DO = {
    "crop": "takes the first entries",
    "pad": "leaves the new ones as initialised",
    "fold": "keeps the numbers in their order",
    "grid": "resamples patches, as in 'grid 32x8 to 16x8'",
}


class WarmStartError(UserError, ValueError):
    """A source that does not fit the parameter table. The message lists every misfit."""

    def __init__(self, source: str, problems: Iterable[str]):
        self.problems = tuple(problems)
        lines = [f"  {problem}" for problem in self.problems]
        super().__init__("\n".join([f"config.warm_start: {source} does not fit:", *lines]))


class Match(NamedTuple):
    """One parameter that is loaded."""

    stored: Stored
    how: str = ""  # of reshape; "" = as it is


class Matches(NamedTuple):
    """The use of every parameter of the table and of every array of the source."""

    loaded: dict[str, Match]
    skipped: tuple[str, ...]  # in the source, and declared to stay as initialised
    fresh: tuple[str, ...]  # not in the source, and declared to stay as initialised
    unused: tuple[str, ...]  # of the source, declared
    notes: tuple[str, ...]  # reshaped and rounded parameters

    def report(self) -> str:
        """Return lines for the log: how many parameters of each kind, and which."""
        lines = [f"{len(self.loaded)} parameters loaded: {_listed(self.loaded)}"]
        kinds = (
            (self.skipped, "skipped, although in the source"),
            (self.fresh, "freshly initialised"),
            (self.unused, "of the source unused"),
        )
        for names, kind in kinds:
            lines.append(f"{len(names)} {kind}{': ' if names else ''}{_listed(names)}")
        return "\n".join([*lines, *self.notes])


def open_source(config: WarmStart) -> dict[str, Stored]:
    """Open the parameters of the source by their paths there. Raises WarmStartError."""
    config_of(config)  # refuses another format
    try:
        if safetensors_reader.is_safetensors(config.source):
            return _open_safetensors(config.source)
        step_dir = orbax_steps.find_step(config.source)
        arrays = orbax_steps.open_step(step_dir)
    except stored.StoredError as error:
        raise WarmStartError(config.source, [str(error)]) from error
    group = "ema/" if config.ema else "params/"
    parameters = {}
    for path, array in arrays.items():
        if path.startswith(group):
            parameters[path.removeprefix(group)] = array
    if not parameters:
        problem = f"{step_dir} holds no {group[:-1]!r}"
        if config.ema:
            problem += (
                ": the run kept no average (its config.train.ema was 0); omit config.warm_start.ema"
            )
        raise WarmStartError(config.source, [problem])
    return parameters


def _open_safetensors(source: str) -> dict[str, Stored]:
    arrays = safetensors_reader.open_safetensors(source)
    foreign = workload.foreign_to(arrays)
    if foreign:
        translated: dict[str, Stored] = foreign.arrays(arrays, source, False)
        return translated
    # Only our own exports may have model state next to the parameters.
    if not (epath.Path(source).expanduser() / stored.EXPORT).exists():
        return arrays
    return {
        path: array for path, array in arrays.items() if not path.startswith(stored.MODEL_STATE)
    }


def config_of(config: WarmStart) -> dict[str, Any]:
    """Return the config of the source's run, or {} of others' weights. Raises WarmStartError."""
    meta: dict[str, Any] = {}
    try:
        if not safetensors_reader.is_safetensors(config.source):
            step_dir = orbax_steps.find_step(config.source)
            meta = orbax_steps.read_json(step_dir, "meta") or {}
        else:
            folder = epath.Path(config.source).expanduser()
            if (folder / stored.EXPORT).exists():
                meta = stored.read_object(folder, stored.EXPORT)
        stored.check_format(meta, config.source)
    except stored.StoredError as error:
        raise WarmStartError(config.source, [str(error)]) from error
    run_config = meta.get("config")
    return run_config if isinstance(run_config, dict) else {}


def digests_of(config: WarmStart) -> dict[str, str]:
    """Return the digests of the files that the config of the source's run names, by the field."""
    if safetensors_reader.is_safetensors(config.source):
        export = epath.Path(config.source).expanduser()
        if not (export / stored.EXPORT).exists():
            return {}
        meta = stored.read_object(export, stored.EXPORT).get("meta")
    else:
        meta = orbax_steps.read_json(orbax_steps.find_step(config.source), "meta")
    digests = meta.get("files") if isinstance(meta, dict) else None
    return digests if isinstance(digests, dict) else {}


def damage(config: WarmStart) -> list[str]:
    """Read the whole source once, in one process, and list damage by its checksums."""
    is_export = safetensors_reader.is_safetensors(config.source)
    if is_export:
        path = stored.place_of(config.source)
    else:
        path = orbax_steps.find_step(config.source)
    try:
        return Source(path, is_export).damage_of_weights()
    except checksums.NoManifest as error:
        log.warning("%s: the warm start reads it unverified", error)
        return []


def match(
    table: Mapping[str, tuple[tuple[int, ...], Any]],
    source: Mapping[str, Stored],
    config: WarmStart,
) -> Matches:
    """Find for each parameter of ``table``, path -> (shape, dtype), its array of ``source``.

    Raises WarmStartError with each parameter and array that no rule covers, each shape and dtype
    that differs without one, and each rule that matches nothing.
    """
    matching = _Matching(config)
    source = matching.rename(source)
    for path, (shape, dtype) in table.items():
        matching.add(path, tuple(shape), jnp.dtype(dtype), source)
    unused = [path for path in source if path not in table]
    surplus = []
    for path in unused:
        if not matching.patterns.any("unused", config.unused, path):
            surplus.append(f"{path} {list(source[path].shape)}")
    problems = matching.all_problems(surplus)
    if problems:
        raise WarmStartError(config.source, problems)
    return Matches(
        matching.loaded,
        tuple(matching.skipped),
        tuple(matching.fresh),
        tuple(unused),
        tuple(matching.notes),
    )


class _Matching:
    """The parameters that have been matched so far, and the problems of the others."""

    def __init__(self, config: WarmStart):
        self._config = config
        self.patterns = _Patterns()
        self.loaded: dict[str, Match] = {}
        self.skipped: list[str] = []
        self.fresh: list[str] = []
        self.notes: list[str] = []
        self._problems: list[str] = []
        self._missing: list[str] = []
        # Ways of reshaping that would do -> (shape in the source, shape here) -> paths.
        self._misfits: dict[tuple[str, ...], dict[tuple[Shape, Shape], list[str]]] = {}

    def add(self, path: str, shape: Shape, dtype: np.dtype, source: Mapping[str, Stored]) -> None:
        """Match a parameter of the table."""
        if self.patterns.any("skip", self._config.skip, path):
            (self.skipped if path in source else self.fresh).append(path)
            return
        if path not in source:
            neighbours = difflib.get_close_matches(path, source, n=1, cutoff=0.6)
            hint = f" (is it {neighbours[0]!r}?)" if neighbours else ""
            self._missing.append(f"{path} {list(shape)}{hint}")
            return
        array = source[path]
        how = self._way(path)
        # a grid's sizes may be as many patches
        if array.shape == shape and not how.startswith("grid"):
            how = ""
        elif not how:
            ways = self._misfits.setdefault(_ways(path, array.shape, shape), {})
            ways.setdefault((array.shape, shape), []).append(path)
            return
        elif problem := _misfit(array.shape, shape, how):
            self._problems.append(f"{path}: {problem}")
            return
        else:
            self.notes.append(f"{path} {list(array.shape)} → {list(shape)}: {how}")
        if self._fits_dtype(path, array, dtype):
            self.loaded[path] = Match(array, how)

    def _way(self, path: str) -> str:
        """Return the first declared way to reshape a parameter, or ""."""
        for pattern, how in self._config.reshape.items():
            if self.patterns.any("reshape", [pattern], path):
                return how
        return ""

    def _fits_dtype(self, path: str, array: Stored, dtype: np.dtype) -> bool:
        """Note a change of dtype. Return whether it is allowed."""
        if array.dtype == dtype:
            return True
        if not all(jnp.issubdtype(kind, jnp.floating) for kind in (array.dtype, dtype)):
            self._problems.append(
                f"{path}: is {array.dtype.name} in the source and {dtype.name} here"
            )
            return False
        self.notes.append(f"{path}: {array.dtype.name} → {dtype.name}")
        return True

    def all_problems(self, surplus: Sequence[str]) -> list[str]:
        """Return each problem, with its remedy. ``surplus``: arrays of the source without a use."""
        problems = [*self._problems]
        problems += _grouped(
            self._missing,
            "not in the source: rename them (config.warm_start.renames), or declare them in"
            " config.warm_start.skip",
        )
        for ways, paths_of_shapes in self._misfits.items():
            lines = []
            for (source_shape, shape), paths in paths_of_shapes.items():
                lines.append(
                    f"{', '.join(paths)}: {list(source_shape)} in the source, {list(shape)} here"
                )
            problems += _grouped(
                lines,
                f"of another shape: {_how_to_reshape(ways)} them in config.warm_start.skip",
                n=sum(len(paths) for paths in paths_of_shapes.values()),
            )
        problems += _grouped(
            surplus,
            "of the source and not in this model: rename them, or declare them in"
            " config.warm_start.unused",
        )
        return [*problems, *self.patterns.without_effect(self._config)]

    def rename(self, source: Mapping[str, Stored]) -> dict[str, Stored]:
        """Return the source under this model's paths, stacks as one array."""
        by_path: dict[str, Stored] = {}
        origin: dict[str, str] = {}
        for path, array in source.items():
            name = self._new_name(path)
            if name is None:
                return {}
            if name in by_path:
                self._problems.append(
                    f"{origin[name]} and {path} of the source are both renamed to {name}"
                )
            by_path[name] = array
            origin[name] = path
        try:
            return stored.stack(by_path)
        except stored.StoredError as error:
            self._problems.append(str(error))
            return by_path

    def _new_name(self, path: str) -> str | None:
        """Return a path after all renames, or None if it becomes too long."""
        name = path
        for pattern, replacement in self._config.renames:
            if self.patterns.any("renames", [pattern], name):
                name = re.sub(pattern, replacement, name)
            if len(name) > MAX_NAME:
                self._problems.append(
                    f"{path[:200]} of the source is renamed to more than {MAX_NAME} characters"
                )
                return None
        return name


def load(matches: Matches, params: PyTree) -> dict[str, Array]:
    """Read the arrays for abstract ``params``: each device its own part, none twice."""
    targets = dict(zip(specs.paths(params), jax.tree.leaves(params), strict=True))
    loaded: dict[str, Array] = {}
    for path, match in matches.loaded.items():
        target = targets[path]
        read = _reader(match.stored, match.how, target.shape, np.dtype(target.dtype))
        loaded[path] = jax.make_array_from_callback(target.shape, target.sharding, read)
    return loaded


def overlay(matches: Matches, params: PyTree, loaded: Mapping[str, Array]) -> PyTree:
    """Replace initial ``params`` by the loaded arrays. To be traced."""

    def choose(path: tuple[Any, ...], fresh: Array) -> Array:
        name = specs.path_name(path)
        if name not in loaded or matches.loaded[name].how != "pad":
            return loaded.get(name, fresh)
        is_inside = jnp.ones(fresh.shape, bool)
        for axis, size in enumerate(matches.loaded[name].stored.shape):
            is_inside &= jax.lax.broadcasted_iota(jnp.int32, fresh.shape, axis) < size
        return jnp.where(is_inside, loaded[name], fresh)

    return jax.tree.map_with_path(choose, params)


def folded(match: Match, shape: tuple[int, ...]) -> Stored:
    """Return a source's array in its new shape. Raises StoredError unless folding does it."""
    if match.stored.shape == tuple(shape):
        return match.stored
    return stored.fold(match.stored, tuple(shape))


def _grouped(lines: Sequence[str], remedy: str, *, n: int | None = None) -> list[str]:
    """Return one problem of several lines, or none. ``n``: its parameters, if not one a line."""
    if not lines:
        return []
    n = n or len(lines)
    head = f"{n} parameter{'s' * (n > 1)} {remedy}"
    return ["\n".join([head, *(f"    {line}" for line in lines)])]


def _ways(path: str, source: Shape, target: Shape) -> tuple[str, ...]:
    """Return the ways from ``source`` to ``target``. No shape tells the grids of positions."""
    ways = [way for way in WAYS if not _misfit(source, target, way)]
    is_positions = re.search(r"(^|/)pos[^/]*$", path) is not None
    if is_positions and len(source) == len(target) == 2 and source[1] == target[1]:
        ways.append("grid")
    return tuple(ways)


def _how_to_reshape(ways: Sequence[str]) -> str:
    """Return the choices of config.warm_start.reshape that give the shape, with their effects."""
    if not ways:
        return f"{', '.join(WAYS)} and grid do not give it; declare"
    if len(ways) == 1:
        effects = WAYS_DO[ways[0]]
    else:
        effects = "; ".join(f"{way} {WAYS_DO[way]}" for way in ways)
    how = "grid 32x8 to 16x8" if ways[0] == "grid" else ways[0]
    return (
        f"{' or '.join(ways)} would do in config.warm_start.reshape ({effects}), for example"
        f" \"--config.warm_start.reshape={{'REGEX': '{how}'}}\", or declare"
    )


class _Patterns:
    """Applies regular expressions, and remembers which of them ever matched."""

    def __init__(self) -> None:
        self._matched: set[tuple[str, str]] = set()

    def any(self, field: str, patterns: Iterable[str], path: str) -> bool:
        hits = [pattern for pattern in patterns if re.search(pattern, path)]
        self._matched |= {(field, pattern) for pattern in hits}
        return bool(hits)

    def without_effect(self, config: WarmStart) -> list[str]:
        declared: dict[str, Iterable[str]] = {
            "renames": [pattern for pattern, _ in config.renames],
            "skip": config.skip,
            "unused": config.unused,
            "reshape": config.reshape,
        }
        problems = []
        for field, patterns in declared.items():
            for pattern in patterns:
                if (field, pattern) not in self._matched:
                    problems.append(f"config.warm_start.{field}: {pattern!r} matches nothing")
        return problems


def _grid(how: str) -> tuple[int, int, int, int]:
    """Return the sizes in a rule "grid AxB to CxD", which `config.WarmStart` has checked."""
    rule = RESHAPE.fullmatch(how)
    assert rule is not None, how
    a, b, c, d = map(int, rule.groups())
    return a, b, c, d


def _misfit(source: Shape, target: Shape, how: str) -> str:
    """Explain why ``how`` does not turn ``source`` into ``target``. Return "" if it does."""
    if how.startswith("grid"):
        a, b, c, d = _grid(how)
        fits = source[:1] == (a * b,) and target[:1] == (c * d,) and source[1:] == target[1:]
    elif how == "fold":
        fits = math.prod(source) == math.prod(target)
    else:
        larger, smaller = (source, target) if how == "crop" else (target, source)
        fits = len(source) == len(target) and all(map(operator.ge, larger, smaller))
    if fits:
        return ""
    return f"is {list(source)} in the source and {list(target)} here, which {how!r} does not fit"


def _reader(array: Stored, how: str, shape: Shape, dtype: np.dtype) -> Callable[[Any], np.ndarray]:
    """Make a reader of slices of the target, cached for replicas."""
    if how == "fold":
        array = stored.fold(array, shape)

    @functools.cache
    def resampled() -> np.ndarray:
        a, b, c, d = _grid(how)
        grid = array.read(()).astype(np.float32).reshape(a, b, -1)
        with jax.default_device(jax.local_devices(backend="cpu")[0]):
            resized = jax.image.resize(grid, (c, d, grid.shape[-1]), "linear")
            return np.asarray(resized).reshape(shape)

    @functools.cache
    def read(bounds: tuple[tuple[int | None, int | None], ...]) -> np.ndarray:
        index = []
        for (first, last), n in zip(bounds, shape, strict=True):
            start, stop, _ = slice(first, last).indices(n)
            index.append(slice(start, stop))
        if how.startswith("grid"):
            return resampled()[tuple(index)].astype(dtype)
        if how == "pad":
            return _read_padded(array, index, dtype)
        return array.read(tuple(index)).astype(dtype)

    return lambda slices: read(tuple((s.start, s.stop) for s in slices))


def _read_padded(array: Stored, index: Sequence[slice], dtype: np.dtype) -> np.ndarray:
    """Read a part that may reach beyond the array, where it is zero."""
    part = np.zeros([s.stop - s.start for s in index], dtype)
    inside = []
    for s, n in zip(index, array.shape, strict=True):
        inside.append(slice(min(s.start, n), min(s.stop, n)))
    sizes = [s.stop - s.start for s in inside]
    if all(sizes):
        part[tuple(slice(0, size) for size in sizes)] = array.read(tuple(inside))
    return part


def _listed(names: Iterable[str]) -> str:
    return ", ".join(sorted(names))
