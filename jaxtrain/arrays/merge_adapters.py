"""The weights of a run with adapters: each base matrix with the product of its adapters added."""

import contextlib
import functools
import signal
import threading
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxtrain import config as config_lib
from jaxtrain import specs as spec_lib
from jaxtrain.arrays import run_workload, stored, warm_start
from jaxtrain.arrays.safetensors_writer import rounded
from jaxtrain.arrays.stored import Stored, StoredError
from jaxtrain.nn import lora
from jaxtrain.types import Spec

# [s] that the patterns of a run's config may take; 10,000 parameters with 100 patterns take 1 s
PATTERNS = 60.0


def merged(
    arrays: Mapping[str, Stored], config: Mapping[str, Any], workload_name: str
) -> dict[str, Stored]:
    """Return merged weights of a run with adapters: the trained, over the warm start's."""
    specs = _specs(config, workload_name)
    base = _read_base(config, specs)
    adapters = run_workload.section_of(config, "lora", config_lib.Lora)
    if not adapters.rank:
        raise StoredError("the run's config.lora.rank is 0, and it holds adapters")
    weights = {}
    for path, spec in specs.items():
        if path in arrays:
            weight = arrays[path]
        elif path in base:
            folded = warm_start.folded(base[path], spec.shape)
            weight = _as_in_the_run(folded, adapters.dtype)
        else:
            raise StoredError(
                f"{path} is neither in the run nor in its base weights (config.warm_start.skip)"
            )
        weights[path] = _with_adapters(path, weight, spec, arrays, adapters)
    return weights


def base(
    arrays: Mapping[str, Stored], config: Mapping[str, Any], workload_name: str
) -> dict[str, Stored]:
    """Return the weights that a run with adapters began from, as its model has them.

    A trained one that the warm start did not read is that of the run.
    """
    specs = _specs(config, workload_name)
    weights = {path: array for path, array in arrays.items() if path in specs}
    for path, match in _read_base(config, specs).items():
        weights[path] = warm_start.folded(match, specs[path].shape)
    return {path: weights[path] for path in specs if path in weights}


def _specs(config: Mapping[str, Any], workload_name: str) -> dict[str, Spec]:
    """Return the parameters of the run's model by their paths."""
    workload = run_workload.of_run(config, workload_name)
    if workload is None:
        raise StoredError(
            f"{run_workload.unknown(config)}; without it the adapters cannot be merged"
        )
    table = run_workload.specs_of(config, workload)
    leaves = jax.tree.leaves(table, is_leaf=spec_lib.is_spec)
    return dict(zip(spec_lib.paths(table), leaves, strict=True))


def _read_base(config: Mapping[str, Any], specs: Mapping[str, Spec]) -> dict[str, warm_start.Match]:
    """Return the arrays of the source that the run began from, by the paths of the model."""
    with _within(PATTERNS, "the patterns of its config.warm_start"):
        rules = run_workload.section_of(config, "warm_start", config_lib.WarmStart)
    if not rules.source:
        raise StoredError(
            "the run's frozen parameters were initialised, not read: there is no"
            " config.warm_start.source to merge with; `jaxtrain lora-to-peft` writes its adapters"
        )
    try:
        source = warm_start.open_source(rules)
    except (warm_start.WarmStartError, MemoryError):
        raise
    except Exception as error:  # noqa: BLE001  of an address, whatever its store's client raises
        raise StoredError(
            f"the run's warm_start.source, {rules.source!r}, cannot be opened:"
            f" {run_workload.reason(error)}"
        ) from error
    shapes = {path: (spec.shape, spec.dtype) for path, spec in specs.items()}
    with _within(PATTERNS, "the patterns of its config.warm_start"):
        return warm_start.match(shapes, source, rules).loaded


def _with_adapters(
    path: str,
    weight: Stored,
    spec: Spec,
    arrays: Mapping[str, Stored],
    adapters: config_lib.Lora,
) -> Stored:
    """Return a weight with its adapters merged, if it has any. Raises StoredError: other shapes."""
    n_layers, n_first = lora.sides(spec)
    layers, matrix = spec.shape[:n_layers], spec.shape[n_layers:]
    first, last = matrix[:n_first], matrix[n_first:]
    expected = {
        lora.A: (*layers, adapters.rank, *last),
        lora.B: (*layers, *first, adapters.rank),
    }
    parts = {}
    for name in expected:
        if f"{path}/{name}" in arrays:
            parts[name] = arrays[f"{path}/{name}"]
    shapes = {name: part.shape for name, part in parts.items()}
    if weight.shape != spec.shape or shapes not in ({}, expected):
        raise StoredError(
            f"{path} is {weight.shape} with adapters {shapes}; the run's config has {spec.shape}"
            f" with {expected}"
        )
    if not parts:
        return weight
    scale = adapters.alpha / adapters.rank
    merge = functools.partial(
        _merge, weight, parts[lora.A], parts[lora.B], scale, n_layers, n_first
    )
    return weight._replace(read=merge)


def _as_in_the_run(array: Stored, dtype: str) -> Stored:
    """Round a frozen array to config.lora.dtype, as in the run, and keep its own dtype."""
    run_dtype = jnp.dtype(dtype)
    path = "/".join(map(str, array.keys))
    if jnp.promote_types(array.dtype, run_dtype) == run_dtype:
        return array

    def read(index: stored.Index) -> np.ndarray:
        return rounded(rounded(array.read(index), run_dtype, path), array.dtype, path)

    return array._replace(read=read)


def _merge(
    weight: Stored,
    a: Stored,
    b: Stored,
    scale: float,
    n_layers: int,
    n_first: int,
    index: stored.Index,
) -> np.ndarray:
    """W + scale × B A of the layers that are asked for, in float64, rounded once."""
    index = index or stored.everything(weight.shape)
    layers = index[:n_layers]

    def read_layers(array: Stored) -> np.ndarray:
        return array.read((*layers, *stored.everything(array.shape[n_layers:])))

    a_f8, b_f8 = read_layers(a).astype("f8"), read_layers(b).astype("f8")
    w = read_layers(weight)
    sum_f8 = w.astype("f8") + scale * lora.product(a_f8, b_f8, n_first)
    merged = rounded(sum_f8, w.dtype, "/".join(map(str, weight.keys)))
    return merged[(*(slice(None) for _ in layers), *index[n_layers:])]


@contextlib.contextmanager
def _within(seconds: float, activity: str) -> Iterator[None]:
    """End the block after so many seconds with a StoredError: a pattern may take for ever.

    Python's looks for signals as it goes. Only the main thread can have them: others are not ended.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(number: int, frame: Any) -> None:
        del number, frame
        raise StoredError(
            f"{activity} were not done after {seconds:g} s; one of them takes for ever"
        )

    handler = signal.signal(signal.SIGALRM, end)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)
