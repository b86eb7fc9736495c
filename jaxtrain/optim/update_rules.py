"""Built-in update rules that optax lacks, or has in another form.

`jaxtrain.config.UPDATE_RULES` lists all of them. Muon is not optax's, which averages gradients and
corrects the average's bias. Its first updates have other directions than the golden trajectories of
tests/data/optim/muon.npz. Here parameters also name their axes, so that query, key, value and heads
are separate matrices.
"""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxtrain.specs import path_name
from jaxtrain.types import Array, PyTree, Spec

MOMENTUM = 0.95  # of Muon: decay of the sum of gradients


class MuonState(NamedTuple):
    # a checkpoint has this name, and nobody asks for tuple.count
    count: Array  # type: ignore[assignment]
    mu: PyTree


class RuleError(ValueError):
    """A rule that cannot be applied to a parameter. The message names the remedy."""


def matrix_axes(path: str, spec: Spec) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the dimensions of the rows, and those of the columns, of a parameter's matrices.

    Every other dimension counts matrices: "layer", and a nameless dimension next to two others
    (query, key and value stacked). "head_dim" belongs to the heads before it. Raises RuleError
    unless this leaves two.
    """
    groups: list[list[int]] = []
    for i, axis in enumerate(spec.axes):
        if axis == "head_dim" and groups and spec.axes[i - 1] in ("heads", "kv_heads"):
            groups[-1].append(i)
        elif axis != "layer":
            groups.append([i])
    if len(groups) > 2:
        groups = [group for group in groups if spec.axes[group[0]] is not None]
    if len(groups) != 2:
        raise RuleError(
            f"{path!r} with the axes {spec.axes} has {len(groups)} dimensions besides its layers,"
            " and muon needs matrices; give it another rule with optim.groups"
        )
    return tuple(groups[0]), tuple(groups[1])


def is_hidden_matrix(path: str, spec: Spec) -> bool:
    """Tell whether a parameter is a matrix between hidden states, no table, head or vector."""
    if {"vocab", "item"} & set(spec.axes):
        return False
    try:
        matrix_axes(path, spec)
    except RuleError:
        return False
    return True


def scale_by_muon(specs: Mapping[str, Spec]) -> optax.GradientTransformation:
    """Make Muon: B <- MOMENTUM B + g, then u = g + MOMENTUM B (Jordan et al. 2024).

    Every matrix of u is orthogonalised and scaled by 0.2 sqrt(max(rows, columns)), which moves as
    far as AdamW does (Liu et al. 2025). ``specs``: path -> Spec.
    """

    def init(params: PyTree) -> MuonState:
        return MuonState(jnp.zeros((), jnp.int32), optax.tree.zeros_like(params))

    def update(grads: PyTree, state: MuonState, params: PyTree = None) -> tuple[PyTree, MuonState]:
        mu = jax.tree.map(lambda b, g: MOMENTUM * b + g, state.mu, grads)

        def orthogonal(path: tuple[Any, ...], g: Array, b: Array) -> Array:
            name = path_name(path)
            rows, columns = matrix_axes(name, specs[name])
            many = tuple(i for i in range(g.ndim) if i not in rows + columns)
            order = many + rows + columns
            u = jnp.transpose(g + MOMENTUM * b, order)
            n, m = (math.prod(g.shape[i] for i in group) for group in (rows, columns))
            x = 0.2 * math.sqrt(max(n, m)) * orthogonalise(u.reshape(*u.shape[: len(many)], n, m))
            return jnp.transpose(x.reshape(u.shape), np.argsort(order).tolist())

        return jax.tree.map_with_path(orthogonal, grads, mu), MuonState(state.count + 1, mu)

    return optax.GradientTransformation(init, update)


def orthogonalise(x: Array, *, steps: int = 5, eps: float = 1e-7) -> Array:
    """Bring singular values near 1 by Newton-Schulz: x <- a x + (b g + c g g) x with g = x x^T."""
    a, b, c = 3.4445, -4.775, 2.0315
    wide = x.shape[-2] <= x.shape[-1]
    x = x if wide else jnp.swapaxes(x, -1, -2)
    x = x / jnp.maximum(jnp.linalg.norm(x, axis=(-2, -1), keepdims=True), eps)
    for _ in range(steps):
        g = x @ jnp.swapaxes(x, -1, -2)
        x = a * x + (b * g + c * g @ g) @ x
    return x if wide else jnp.swapaxes(x, -1, -2)


def scale_by_adam_atan2(b1: float, b2: float) -> optax.GradientTransformation:
    """Make Adam with its quotient as an angle, which needs no eps (Everett et al. 2024).

    It does not depend on the gradient's scale. An update is 1 / (1 - b1^t) atan2(m, sqrt(v_hat)),
    as the package adam-atan2 computes it (0.0.3). The published atan2(m_hat, sqrt(v_hat)) differs
    while 1 - b1^t is far from 1.
    """

    def init(params: PyTree) -> optax.ScaleByAdamState:
        return optax.ScaleByAdamState(
            jnp.zeros((), jnp.int32), optax.tree.zeros_like(params), optax.tree.zeros_like(params)
        )

    def update(
        grads: PyTree, state: optax.ScaleByAdamState, params: PyTree = None
    ) -> tuple[PyTree, optax.ScaleByAdamState]:
        mu = optax.tree.update_moment(grads, state.mu, b1, 1)
        nu = optax.tree.update_moment(grads, state.nu, b2, 2)
        count = state.count + 1
        first, second = 1 - b1**count, 1 - b2**count

        def angle(m: Array, v: Array) -> Array:
            u: Array = 1.0 / first * jnp.arctan2(m, jnp.sqrt(v / second))
            return u

        return jax.tree.map(angle, mu, nu), optax.ScaleByAdamState(count, mu, nu)

    return optax.GradientTransformation(init, update)


def scale_by_adafactor() -> optax.GradientTransformation:
    """Make Adafactor: g / sqrt(v), v of rank one over the two largest dimensions.

    It has neither first moments nor relative rates. A root mean square of an update beyond 1 is
    scaled down to 1 (Shazeer & Stern 2018).
    """
    return optax.chain(optax.scale_by_factored_rms(), optax.clip_by_block_rms(1.0))
