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
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from etils import epath

from jaxtrain import specs, workload
from jaxtrain.arrays import checksums, orbax_steps, safetensors_reader, stored
from jaxtrain.arrays.stored import Stored
from jaxtrain.config import RESHAPE, WarmStart
from jaxtrain.types import Array, PyTree
from loaders.io.checks import UserError

log = logging.getLogger("jaxtrain")


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
        super().__init__(
            "\n".join(
                [
                    f"config.warm_start: {source} does not fit:",
                    *(f"  {text}" for text in self.problems),
                ]
            )
        )


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
        for names, text in (
            (self.skipped, "skipped, although in the source"),
            (self.fresh, "freshly initialised"),
            (self.unused, "of the source unused"),
        ):
            lines.append(f"{len(names)} {text}{': ' if names else ''}{_listed(names)}")
        return "\n".join([*lines, *self.notes])


def open_source(config: WarmStart) -> dict[str, Stored]:
    """Open the parameters of the source by their paths there. Raises WarmStartError."""
    config_of(config)  # refuses another format
    try:
        if safetensors_reader.is_safetensors(config.source):
            arrays = safetensors_reader.open_safetensors(config.source)
            if foreign := workload.foreign_to(arrays):
                own: dict[str, Stored] = foreign.arrays(arrays, config.source, False)
                return own
            # Only our own exports may have model state next to the parameters.
            ours = (epath.Path(config.source).expanduser() / stored.EXPORT).exists()
            return {
                path: array
                for path, array in arrays.items()
                if not (ours and path.startswith(stored.MODEL_STATE))
            }
        step_dir = orbax_steps.find_step(config.source, config.step)
        group = "ema/" if config.ema else "params/"
        arrays = {
            p.removeprefix(group): s
            for p, s in orbax_steps.open_step(step_dir).items()
            if p.startswith(group)
        }
    except stored.StoredError as error:
        raise WarmStartError(config.source, [str(error)]) from error
    if not arrays:
        why = (
            ": the run kept no average (its config.train.ema was 0); omit config.warm_start.ema"
            if config.ema
            else ""
        )
        raise WarmStartError(config.source, [f"{step_dir} holds no {group[:-1]!r}{why}"])
    return arrays


def config_of(config: WarmStart) -> dict[str, Any]:
    """Return the config of the source's run, or {} of others' weights. Raises WarmStartError."""
    try:
        if not safetensors_reader.is_safetensors(config.source):
            meta = (
                orbax_steps.read_json(orbax_steps.find_step(config.source, config.step), "meta")
                or {}
            )
            stored.check_format(meta, config.source)
        else:
            folder = epath.Path(config.source).expanduser()
            meta = (
                stored.read_object(folder, stored.EXPORT)
                if (folder / stored.EXPORT).exists()
                else {}
            )
            stored.check_format(meta, config.source)
    except stored.StoredError as error:
        raise WarmStartError(config.source, [str(error)]) from error
    found = meta.get("config")
    return found if isinstance(found, dict) else {}


def damage(config: WarmStart) -> list[str]:
    """Read the whole source once, in one process, and list damage by its checksums."""
    if safetensors_reader.is_safetensors(config.source):
        return []
    try:
        return checksums.verify(orbax_steps.find_step(config.source, config.step))
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
    problems: list[str] = []
    skipped: list[str] = []
    fresh: list[str] = []
    notes: list[str] = []
    missing: list[str] = []
    tried = _Patterns()
    source = _renamed(source, config.renames, tried, problems)
    loaded: dict[str, Match] = {}
    # Ways of reshaping that would do -> (shape in the source, shape here) -> paths.
    misfits: dict[tuple[str, ...], dict[tuple[tuple[int, ...], tuple[int, ...]], list[str]]] = {}
    for path, (shape, dtype) in table.items():
        if tried.any("skip", config.skip, path):
            (skipped if path in source else fresh).append(path)
            continue
        if path not in source:
            near = difflib.get_close_matches(path, source, n=1, cutoff=0.6)
            hint = f" (is it {near[0]!r}?)" if near else ""
            missing.append(f"{path} {list(shape)}{hint}")
            continue
        array = source[path]
        how = next(
            (
                how
                for pattern, how in config.reshape.items()
                if tried.any("reshape", [pattern], path)
            ),
            "",
        )
        # whose sizes may be as many patches
        if array.shape == tuple(shape) and not how.startswith("grid"):
            how = ""
        elif not how:
            shapes = array.shape, tuple(shape)
            misfits.setdefault(_ways(path, *shapes), {}).setdefault(shapes, []).append(path)
            continue
        elif problem := _misfit(array.shape, tuple(shape), how):
            problems.append(f"{path}: {problem}")
            continue
        else:
            notes.append(f"{path} {list(array.shape)} → {list(shape)}: {how}")
        if array.dtype != (wanted := jnp.dtype(dtype)):
            if not (
                jnp.issubdtype(array.dtype, jnp.floating) and jnp.issubdtype(wanted, jnp.floating)
            ):
                problems.append(
                    f"{path}: is {array.dtype.name} in the source and {wanted.name} here"
                )
                continue
            notes.append(f"{path}: {array.dtype.name} → {wanted.name}")
        loaded[path] = Match(array, how)
    unused = [path for path in source if path not in table]
    surplus = [
        f"{path} {list(source[path].shape)}"
        for path in unused
        if not tried.any("unused", config.unused, path)
    ]
    problems += _grouped(
        missing,
        "not in the source: rename them (config.warm_start.renames), or declare them in"
        " config.warm_start.skip",
    )
    for ways, by_shape in misfits.items():
        lines = [
            f"{', '.join(names)}: {list(a)} in the source, {list(b)} here"
            for (a, b), names in by_shape.items()
        ]
        n = sum(map(len, by_shape.values()))
        problems += _grouped(
            lines, f"of another shape: {_how_to_reshape(ways)} them in config.warm_start.skip", n=n
        )
    problems += _grouped(
        surplus,
        "of the source and not in this model: rename them, or declare them in"
        " config.warm_start.unused",
    )
    problems += tried.without_effect(config)
    if problems:
        raise WarmStartError(config.source, problems)
    return Matches(loaded, tuple(skipped), tuple(fresh), tuple(unused), tuple(notes))


def load(matches: Matches, params: PyTree) -> dict[str, Array]:
    """Read the arrays for abstract ``params``: each device its own part, none twice."""
    targets = dict(zip(specs.paths(params), jax.tree.leaves(params), strict=True))
    by_path: dict[str, Array] = {}
    for path, (one, how) in matches.loaded.items():
        target = targets[path]
        read = _reader(one, how, target.shape, np.dtype(target.dtype))
        by_path[path] = jax.make_array_from_callback(target.shape, target.sharding, read)
    return by_path


def overlay(matches: Matches, params: PyTree, loaded: Mapping[str, Array]) -> PyTree:
    """Replace initial ``params`` by the loaded arrays. To be traced."""

    def choose(path: tuple[Any, ...], fresh: Array) -> Array:
        name = specs.path_name(path)
        if name not in loaded or matches.loaded[name].how != "pad":
            return loaded.get(name, fresh)
        inside = jnp.ones(fresh.shape, bool)
        for axis, size in enumerate(matches.loaded[name].stored.shape):
            inside &= jax.lax.broadcasted_iota(jnp.int32, fresh.shape, axis) < size
        return jnp.where(inside, loaded[name], fresh)

    return jax.tree.map_with_path(choose, params)


def folded(match: Match, shape: tuple[int, ...]) -> Stored:
    """Return a source's array in its new shape. Raises StoredError unless folding does it."""
    return (
        match.stored
        if match.stored.shape == tuple(shape)
        else stored.fold(match.stored, tuple(shape))
    )


def _grouped(lines: Sequence[str], remedy: str, *, n: int | None = None) -> list[str]:
    if not lines:
        return []
    n = n or len(lines)
    return [
        "\n".join([f"{n} parameter{'s' * (n > 1)} {remedy}", *(f"    {line}" for line in lines)])
    ]


def _ways(path: str, source: tuple[int, ...], target: tuple[int, ...]) -> tuple[str, ...]:
    """Return the ways from ``source`` to ``target``. No shape tells the grids of positions."""
    ways = [way for way in WAYS if not _misfit(source, target, way)]
    is_grid = (
        re.search(r"(^|/)pos[^/]*$", path)
        and len(source) == len(target) == 2
        and source[1] == target[1]
    )
    return (*ways, "grid") if is_grid else tuple(ways)


def _how_to_reshape(ways: Sequence[str]) -> str:
    """Return the choices of config.warm_start.reshape that give the shape, with their effects."""
    if not ways:
        return f"{', '.join(WAYS)} and grid do not give it; declare"
    does = "; ".join(f"{way} {WAYS_DO[way]}" if len(ways) > 1 else WAYS_DO[way] for way in ways)
    how = "grid 32x8 to 16x8" if ways[0] == "grid" else ways[0]
    named = f"{' or '.join(ways)} would do in config.warm_start.reshape ({does})"
    return f"{named}, for example \"--config.warm_start.reshape={{'REGEX': '{how}'}}\", or declare"


class _Patterns:
    """Applies regular expressions, and remembers which of them ever matched."""

    def __init__(self) -> None:
        self._matched: set[tuple[str, str]] = set()

    def any(self, field: str, patterns: Iterable[str], path: str) -> bool:
        hits = [pattern for pattern in patterns if re.search(pattern, path)]
        self._matched |= {(field, pattern) for pattern in hits}
        return bool(hits)

    def without_effect(self, config: WarmStart) -> list[str]:
        renames = [pattern for pattern, _ in config.renames]
        declared = {
            "renames": renames,
            "skip": config.skip,
            "unused": config.unused,
            "reshape": config.reshape,
        }
        return [
            f"config.warm_start.{field}: {pattern!r} matches nothing"
            for field, patterns in declared.items()
            for pattern in patterns
            if (field, pattern) not in self._matched
        ]


def _renamed(
    source: Mapping[str, Stored],
    renames: Iterable[tuple[str, str]],
    tried: _Patterns,
    problems: list[str],
) -> dict[str, Stored]:
    by_path: dict[str, Stored] = {}
    origin: dict[str, str] = {}
    for path, one in source.items():
        name = path
        for pattern, replacement in renames:
            if tried.any("renames", [pattern], name):
                name = re.sub(pattern, replacement, name)
            if len(name) > MAX_NAME:
                problems.append(
                    f"{path[:200]} of the source is renamed to more than {MAX_NAME} characters"
                )
                return {}
        if name in by_path:
            problems.append(f"{origin[name]} and {path} of the source are both renamed to {name}")
        by_path[name], origin[name] = one, path
    try:
        return stored.stack(by_path)
    except stored.StoredError as error:
        problems.append(str(error))
        return by_path


def _grid(how: str) -> tuple[int, int, int, int]:
    """Return the sizes in a rule "grid AxB to CxD", which `config.WarmStart` has checked."""
    found = RESHAPE.fullmatch(how)
    assert found is not None, how
    a, b, c, d = map(int, found.groups())
    return a, b, c, d


def _misfit(source: tuple[int, ...], target: tuple[int, ...], how: str) -> str:
    """Explains why ``how`` does not turn ``source`` into ``target``. Return "" if it does."""
    if how.startswith("grid"):
        a, b, c, d = _grid(how)
        fits = source[:1] == (a * b,) and target[:1] == (c * d,) and source[1:] == target[1:]
    elif how == "fold":
        fits = math.prod(source) == math.prod(target)
    else:
        pairs = zip(source, target, strict=False)
        fits = len(source) == len(target) and all(
            s >= t if how == "crop" else s <= t for s, t in pairs
        )
    return (
        ""
        if fits
        else f"is {list(source)} in the source and {list(target)} here, which {how!r} does not fit"
    )


def _reader(
    one: Stored, how: str, shape: tuple[int, ...], dtype: np.dtype
) -> Callable[[Any], np.ndarray]:
    """Make a reader of slices of the target, cached for replicas."""
    if how == "fold":
        one = stored.fold(one, shape)

    @functools.cache
    def resampled() -> np.ndarray:
        a, b, c, d = _grid(how)
        grid = one.read(()).astype(np.float32).reshape(a, b, -1)
        with jax.default_device(jax.local_devices(backend="cpu")[0]):
            return np.asarray(jax.image.resize(grid, (c, d, grid.shape[-1]), "linear")).reshape(
                shape
            )

    @functools.cache
    def read(bounds: tuple[tuple[int | None, int | None], ...]) -> np.ndarray:
        index = tuple(slice(*slice(*b).indices(n)[:2]) for b, n in zip(bounds, shape, strict=True))
        if how.startswith("grid"):
            return resampled()[index].astype(dtype)
        if how != "pad":
            return one.read(index).astype(dtype)
        part = np.zeros([s.stop - s.start for s in index], dtype)
        inside = tuple(
            slice(min(s.start, n), min(s.stop, n)) for s, n in zip(index, one.shape, strict=True)
        )
        if all(s.stop > s.start for s in inside):
            part[tuple(slice(0, s.stop - s.start) for s in inside)] = one.read(inside)
        return part

    return lambda slices: read(tuple((s.start, s.stop) for s in slices))


def _listed(names: Iterable[str]) -> str:
    return ", ".join(sorted(names))
