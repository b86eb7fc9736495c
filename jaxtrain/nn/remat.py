"""The rematerialisation policy of a stack of layers, as one word of a config: what the backward pass recomputes.

    none         everything is kept that the backward pass reads, but for what is `cheap`
    full         every layer is recomputed from its input
    every N      only every N-th layer is (the last of each N), the others keep theirs
    save A,B     every layer is, except for the activations of these names (`name`)

A layer's names are its own; `problems` checks a word against them.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from jaxtrain.types import Array, PyTree

WHOLE = ("none", "full")  # the policies of models that are not a stack of layers
GLOSS = "none, full, 'every 2', or 'save attention,mlp'"


def problems(word: str, names: Sequence[str], depth: int) -> Iterator[str]:
    """Yields what is wrong with a policy for ``depth`` layers whose activations have these names."""
    kind, value = _parse(word)
    if not kind:
        yield f"is {word!r}; expected one of: {GLOSS}"
    elif kind == "every" and not 1 <= int(value) <= max(depth, 1):
        yield f"is {word!r}, and the stack has {depth} layers"
    elif kind == "save":
        for name in value.split(","):
            if name not in names:
                yield f"names {name!r}; the activations that can be kept are {', '.join(names)}"


def name(x: Array, label: str) -> Array:
    """Marks an activation that "save" may keep."""
    return checkpoint_name(x, label)


def cheap(word: str) -> Callable[[Callable[..., PyTree]], Callable[..., PyTree]]:
    """Decorates a part of a layer: what its backward pass reads of its insides is computed again from its arguments.

    For norms and activations, with the product that reads them: a product has no part in its own derivative, so that none is
    computed twice. A norm in float32 of a 16-bit array leaves three float32 arrays of its size for each layer of a loop, a GELU
    six: to write and read them takes longer than to compute them again. Where the first argument has float32, the part is as it
    is: those models' numbers stay, bit by bit. So it is where ``word`` has the whole layer computed again: to do it twice would
    gather the layer's matrices once more.
    """
    whole = _parse(word)[0] in ("full", "save")

    def decorate(f: Callable[..., PyTree]) -> Callable[..., PyTree]:
        def call(x: PyTree, *args: PyTree) -> PyTree:
            halves = all(leaf.dtype.itemsize < 4 for leaf in jax.tree.leaves(x))
            return (jax.checkpoint(f, prevent_cse=False) if halves and not whole else f)(x, *args)

        return call

    return decorate


def scan(
    layer: Callable[[PyTree, PyTree], tuple[PyTree, PyTree]],
    x: PyTree,
    stack: PyTree,
    word: str,
    *,
    unroll: int | bool = 1,
    kernels: Mapping[str, Callable[[str], bool]] | None = None,
) -> tuple[PyTree, PyTree]:
    """Carries ``x`` through layer(x, w) -> (x, y) for every entry w of the stack's first axis; returns (x, all y, stacked).

    ``kernels``: name -> whether what a kernel of this name returns is kept with the activations that the former stands for. A
    kernel's backward pass reads more than its result, and only the kernel itself could name that.
    """
    kind, value = _parse(word)
    if kind == "full":
        layer = jax.checkpoint(layer)
    elif kind == "save":
        layer = jax.checkpoint(layer, policy=_keeps(value.split(","), kernels or {}))
    if kind != "every":
        return jax.lax.scan(layer, x, stack, unroll=unroll)

    n, depth = int(value), jax.tree.leaves(stack)[0].shape[0]
    whole = depth // n * n

    def group(x: PyTree, ws: PyTree) -> tuple[PyTree, PyTree]:
        ys = []
        for i in range(n):
            x, y = (jax.checkpoint(layer) if i == n - 1 else layer)(x, jax.tree.map(lambda w, i=i: w[i], ws))
            ys.append(y)
        return x, jax.tree.map(lambda *y: jnp.stack(y), *ys)

    grouped = jax.tree.map(lambda w: w[:whole].reshape(whole // n, n, *w.shape[1:]), stack)
    x, ys = jax.lax.scan(group, x, grouped, unroll=unroll)
    ys = jax.tree.map(lambda y: y.reshape(whole, *y.shape[2:]), ys)
    if whole < depth:
        x, rest = jax.lax.scan(layer, x, jax.tree.map(lambda w: w[whole:], stack), unroll=unroll)
        ys = jax.tree.map(lambda y, r: jnp.concatenate([y, r]), ys, rest)
    return x, ys


def _keeps(names: Sequence[str], kernels: Mapping[str, Callable[[str], bool]]) -> Callable[..., bool]:
    """A policy of `jax.checkpoint`."""
    named, asked = jax.checkpoint_policies.save_only_these_names(*names), [kernels[name] for name in names if name in kernels]

    def policy(primitive: Any, *avals: Any, **params: Any) -> bool:
        kernel = params["name"] if primitive.name == "pallas_call" else primitive.name
        return named(primitive, *avals, **params) or any(keep(kernel) for keep in asked)

    return policy


def _parse(word: str) -> tuple[str, str]:
    match = re.fullmatch(r"(none|full)|(every) (\d+)|(save) ([\w,]+)", word)
    if not match:
        return "", ""
    return next((match[a], match[b] or "") for a, b in ((1, 0), (2, 3), (4, 5)) if match[a])
