"""The parameters of a run, a step or an export, as the workload's functions take them."""

from typing import Any

import jax

from jaxtrain import config as config_lib
from jaxtrain import specs
from jaxtrain.arrays import stored, warm_start
from jaxtrain.arrays.source import Source
from jaxtrain.arrays.stored import Stored, StoredError
from jaxtrain.nn import lora
from jaxtrain.parallel import jax_options
from jaxtrain.parallel import layout as layout_lib
from jaxtrain.types import PyTree


def one_device() -> layout_lib.Layout:
    """Return the layout of the first device. Raises JaxOptionError: JAX finds none."""
    first = jax_options.devices()[:1]
    return layout_lib.make_layout(layout_lib.make_mesh(1, 1, 1, devices=first), {})


def read(
    source: Source,
    table: Any,
    layout: layout_lib.Layout,
    *,
    ema: bool = False,
    model_state: bool = False,
) -> PyTree:
    """Arrays of a table of `Spec` on the devices of ``layout``.

    With ``model_state`` the table is of the model state.

    Raises StoredError: they cannot be read, are adapters without the weights that they change, or
    have no size in the config; WarmStartError: they are of another shape than the config says.
    """
    weights = _model_state(source) if model_state else source.parameters(ema=ema)
    if any(lora.is_adapter(path) for path in weights):
        raise StoredError(
            f"{source.path} holds adapters without the weights that they change; merge them with"
            " `jaxtrain export`"
        )
    leaves = jax.tree.leaves(table, is_leaf=specs.is_spec)
    for path, spec in zip(specs.paths(table), leaves, strict=True):
        if None in spec.shape:
            raise StoredError(
                f"{source.path}: its config does not say the size of {path}: it is damaged"
            )
    abstract = specs.abstract(table, layout)
    paths = specs.paths(abstract)
    shapes = {}
    for path, x in zip(paths, jax.tree.leaves(abstract), strict=True):
        shapes[path] = (x.shape, x.dtype)
    matches = warm_start.match(shapes, weights, config_lib.WarmStart(source=str(source.path)))
    loaded = warm_start.load(matches, abstract)
    return jax.tree.unflatten(jax.tree.structure(abstract), [loaded[path] for path in paths])


def _model_state(source: Source) -> dict[str, Stored]:
    arrays = {}
    for path, array in source.arrays().items():
        if path.startswith(stored.MODEL_STATE):
            arrays[path.removeprefix(stored.MODEL_STATE)] = array
    return arrays
