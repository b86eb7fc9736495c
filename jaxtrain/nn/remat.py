"""The rematerialisation policy of a stack of layers, as one word of a config.

    none         the backward pass recomputes nothing but what is `cheap`
    full         every layer is recomputed from its input
    save A,B     every layer is recomputed, except for the activations of these names (`name`)

Each stack of layers has its own names. `problems` checks a policy against them.

`layers_at_once` decides whether a stack is a loop or written out, layer after layer.
"""

import contextvars
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name
from jax.experimental.layout import Layout, with_layout_constraint

from jaxtrain.parallel import replicas
from jaxtrain.parallel.layout import DATA, manual_axes
from jaxtrain.types import Array, PyTree, Shard, T

WHOLE = ("none", "full")  # the policies of models that are not a stack of layers
GLOSS = "none, full, or 'save attention,mlp'"
MAX_WRITTEN_OUT = 64  # [layers] of a stack, since compilation takes longer with each
# whether XLA transposes the inputs that a loop keeps, unless their order is given
TRANSPOSES = jax.__version_info__ >= (0, 12)
_WRITTEN_OUT = contextvars.ContextVar("written_out", default=False)


def are_written_out() -> bool:
    """Whether the layers that are being traced are written out on GPUs (`scan`)."""
    return _WRITTEN_OUT.get()


def problems(policy: str, names: Sequence[str]) -> Iterator[str]:
    """Yield the errors of a policy for layers whose activations have these names."""
    saved = _saved(policy)
    if policy not in WHOLE and not saved:
        yield f"is {policy!r}; expected one of: {GLOSS}"
    for name in saved:
        if name not in names:
            yield f"names {name!r}; the activations that can be kept are {', '.join(names)}"


def name(x: Array, label: str) -> Array:
    """Name an activation, so that "save" can keep it."""
    x = checkpoint_name(x, label)
    return x


def cheap(policy: str, part: Callable[..., T], x: PyTree, *args: PyTree) -> T:
    """Compute a part of a layer, which the backward pass computes again from its arguments.

    It is for norms and activations, with the product that reads them. A product has no part in its
    own derivative, so none is computed twice. For each layer, a norm in float32 of a 16-bit array
    leaves three float32 arrays of its size, and a GELU six. Writing and reading them takes longer
    than computing them again.

    The part stays as it is in two cases: if its first argument has float32, so that the numbers of
    those models do not change by a bit, and if ``policy`` recomputes the whole layer. A second
    recomputation would gather the layer's matrices once more.

    The rounds of a loop keep the forward pass and the recomputation apart. XLA merges the two in
    layers that are written out, and would keep the activations of `cheap`, unless it is prevented.
    """
    is_narrow = all(leaf.dtype.itemsize < 4 for leaf in jax.tree.leaves(x))
    if is_narrow and policy == "none":
        part = jax.checkpoint(part, prevent_cse=_WRITTEN_OUT.get())
    return part(x, *args)


def layers_at_once(unroll: int, depth: int, shard: Shard | None) -> int:
    """Return how many of a stack's ``depth`` layers a round of its loop has. depth = no loop.

    That is ``unroll``, or if it is 0 all layers on GPUs, and else one. A loop copies each
    activation into the array of all layers, and out of it again. If matrices are split over fsdp,
    it is a loop on GPUs too, since the written-out layers would be gathered side by side.

    ``shard``: None = the program is not for GPUs.
    """
    if unroll or shard is None:
        return unroll or 1
    is_gathered = shard.mesh is not None and shard.mesh.shape.get("fsdp", 1) > 1
    is_loop = shard.devices[0] != "gpu" or is_gathered or depth > MAX_WRITTEN_OUT
    return 1 if is_loop else depth


def scan(
    layer: Callable[[T, PyTree], tuple[T, PyTree]],
    x: T,
    stack: PyTree,
    policy: str,
    *,
    unroll: int = 1,
    shard: Shard | None = None,
    kernels: Mapping[str, Callable[[str], bool]] | None = None,
    once: bool = False,
) -> tuple[T, PyTree]:
    """Carry ``x`` through layer(x, w) -> (x, y) for every entry w of the stack's first axis.

    Returns (x, all y, stacked).

    Args:
      unroll, shard: as in `layers_at_once`.
      kernels: by a name of activations, tells whether a kernel's results are kept with them. The
        backward pass of a kernel reads more than its result, and only the kernel could name that.
      once: whether a loss runs through the stack once. Then replicas sum up the gradients of each
        layer while the backward pass computes those of the next (`replicas.by_layer`).
    """
    if once and DATA in manual_axes():
        layer, stack = replicas.by_layer(layer, stack)
    depth = len(jax.tree.leaves(stack)[0])
    at_once = layers_at_once(unroll, depth, shard)
    is_for_gpus = shard is not None and shard.devices[0] == "gpu"
    layer = _by_rows(layer) if is_for_gpus and at_once < depth and TRANSPOSES else layer
    if policy != "none":
        layer = jax.checkpoint(layer, policy=_checkpoint_policy(policy, kernels or {}))
    token = _WRITTEN_OUT.set(is_for_gpus and at_once >= depth)
    try:
        return jax.lax.scan(layer, x, stack, unroll=at_once)
    finally:
        _WRITTEN_OUT.reset(token)


def _by_rows(
    layer: Callable[[T, PyTree], tuple[T, PyTree]],
) -> Callable[[T, PyTree], tuple[T, PyTree]]:
    """Keep the layer's input and its cotangent by rows in memory, as they are outside of the loop.

    XLA 0.12 gives cotangents the order of a gradient that is summed up over fsdp, by columns, and
    then transposes the inputs that a loop keeps, of all layers at once. Older partitioners send
    an array that has an order to every device.
    """

    def rows(x: Array) -> Array:
        x = with_layout_constraint(x, Layout(tuple(range(x.ndim))))
        return x

    return lambda x, w: layer(jax.tree.map(rows, x), w)


def _checkpoint_policy(
    policy: str, kernels: Mapping[str, Callable[[str], bool]]
) -> Callable[..., bool] | None:
    """Return the policy of `jax.checkpoint` for a layer. None keeps its input alone."""
    if policy == "full":
        return None
    names = _saved(policy)
    has_name = jax.checkpoint_policies.save_only_these_names(*names)
    is_kernel = [kernels[name] for name in names if name in kernels]

    def is_saved(primitive: Any, *avals: Any, **params: Any) -> bool:
        if has_name(primitive, *avals, **params):
            return True
        return any(is_one(primitive.name) for is_one in is_kernel)

    return is_saved


def _saved(policy: str) -> list[str]:
    match = re.fullmatch(r"save ([\w,]+)", policy)
    return match[1].split(",") if match else []
