"""Update rules: from gradients to the updates that decay and the learning rate are then applied to.

Those that optax has as they are needed here come from optax; the others are here.
"""

import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxtrain.config import Optim
from jaxtrain.specs import path_name
from jaxtrain.types import Array, PyTree, Spec


class MuonState(NamedTuple):
    count: Array  # type: ignore[assignment]  # a checkpoint has this name, and nobody asks for tuple.count
    mu: PyTree


class FactoredState(NamedTuple):
    count: Array  # type: ignore[assignment]  # as above
    row: PyTree  # mean of squares over the columns, [..., rows, 1]
    column: PyTree  # and over the rows, [..., 1, columns]
    whole: PyTree  # squares of what is not factored


class RuleError(ValueError):
    """A rule that cannot be applied to a parameter. The message names the remedy."""


def matrix_axes(path: str, spec: Spec) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Returns the dimensions of the rows and of the columns of a parameter's matrices; every other one counts matrices.

    "layer" counts matrices, and so does a nameless dimension next to two others (query, key and value stacked). "head_dim"
    belongs to the heads before it. Raises RuleError where this does not leave two.
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
            f"{path!r} with the axes {spec.axes} has {len(groups)} dimensions besides its layers, and muon needs "
            "matrices; give it another rule with optim.groups"
        )
    return tuple(groups[0]), tuple(groups[1])


def is_hidden_matrix(path: str, spec: Spec) -> bool:
    """Whether Muon is meant for the parameter: a matrix between hidden states, not a table, a head or a vector."""
    if {"vocab", "puzzle"} & set(spec.axes):
        return False
    try:
        matrix_axes(path, spec)
    except RuleError:
        return False
    return True


def scale_by_muon(specs: Mapping[str, Spec], *, momentum: float, scale: str) -> optax.GradientTransformation:
    """B <- momentum B + g; u = g + momentum B; every matrix of u is orthogonalised (Jordan et al. 2024) and scaled.

    scale: "rms" 0.2 sqrt(max(rows, columns)), which moves as far as AdamW does (Liu et al. 2025); "in_out" and "out_in"
    sqrt(max(1, outputs / inputs)) for parameters stored with the inputs or the outputs first. ``specs``: path -> Spec.
    """

    def init(params: PyTree) -> MuonState:
        return MuonState(jnp.zeros((), jnp.int32), optax.tree.zeros_like(params))

    def update(grads: PyTree, state: MuonState, params: PyTree = None) -> tuple[PyTree, MuonState]:
        del params
        mu = jax.tree.map(lambda b, g: momentum * b + g, state.mu, grads)

        def orthogonal(path: tuple, g: Array, b: Array) -> Array:
            name = path_name(path)
            rows, columns = matrix_axes(name, specs[name])
            many = tuple(i for i in range(g.ndim) if i not in rows + columns)
            order = many + rows + columns
            u = jnp.transpose(g + momentum * b, order)
            n, m = (math.prod(g.shape[i] for i in group) for group in (rows, columns))
            factor = {
                "rms": 0.2 * math.sqrt(max(n, m)),
                "in_out": math.sqrt(max(1, m / n)),
                "out_in": math.sqrt(max(1, n / m)),
            }[scale]
            x = factor * orthogonalise(u.reshape(*u.shape[: len(many)], n, m))
            return jnp.transpose(x.reshape(u.shape), np.argsort(order).tolist())

        return jax.tree.map_with_path(orthogonal, grads, mu), MuonState(state.count + 1, mu)

    return optax.GradientTransformation(init, update)


def orthogonalise(x: Array, *, steps: int = 5, eps: float = 1e-7) -> Array:
    """Brings the singular values of [..., n, m] matrices near 1: Newton-Schulz, x <- a x + (b g + c g g) x with g = x x^T."""
    a, b, c = 3.4445, -4.775, 2.0315
    wide = x.shape[-2] <= x.shape[-1]
    x = x if wide else jnp.swapaxes(x, -1, -2)
    x = x / jnp.maximum(jnp.linalg.norm(x, axis=(-2, -1), keepdims=True), eps)
    for _ in range(steps):
        g = x @ jnp.swapaxes(x, -1, -2)
        x = a * x + (b * g + c * g @ g) @ x
    return x if wide else jnp.swapaxes(x, -1, -2)


def scale_by_adam_atan2(b1: float, b2: float, *, a: float, b: float, correction: str) -> optax.GradientTransformation:
    """Adam's quotient as an angle, which needs no eps and does not see the gradient's scale (Everett et al. 2024).

    inside: a atan2(m_hat, b sqrt(v_hat)), as published. outside: a / (1 - b1^t) atan2(m, b sqrt(v_hat)), as the package
    adam-atan2 computes it (0.0.3); the two differ while 1 - b1^t is far from 1.
    """

    def init(params: PyTree) -> optax.ScaleByAdamState:
        return optax.ScaleByAdamState(jnp.zeros((), jnp.int32), optax.tree.zeros_like(params), optax.tree.zeros_like(params))

    def update(grads: PyTree, state: optax.ScaleByAdamState, params: PyTree = None) -> tuple[PyTree, optax.ScaleByAdamState]:
        del params
        mu = optax.tree.update_moment(grads, state.mu, b1, 1)
        nu = optax.tree.update_moment(grads, state.nu, b2, 2)
        count = state.count + 1
        first, second = 1 - b1**count, 1 - b2**count

        def angle(m: Array, v: Array) -> Array:
            root = b * jnp.sqrt(v / second)
            return a * jnp.arctan2(m / first, root) if correction == "inside" else a / first * jnp.arctan2(m, root)

        return jax.tree.map(angle, mu, nu), optax.ScaleByAdamState(count, mu, nu)

    return optax.GradientTransformation(init, update)


def scale_by_adafactor(
    *, power: float = 0.8, eps: float = 1e-30, least: int = 128, clip: float = 1.0
) -> optax.GradientTransformation:
    """g / sqrt(v), v of rank one over the two largest dimensions (Shazeer & Stern 2018); no first moment, no relative rates.

    The average v decays by 1 - t^-power. Parameters whose second largest dimension is below ``least`` keep all of v. An update
    whose root mean square exceeds ``clip`` is scaled down to it.
    """

    def factored(shape: tuple[int, ...]) -> tuple[int, int] | None:
        if len(shape) < 2:
            return None
        *_, second, first = np.argsort(shape, kind="stable").tolist()
        return None if shape[second] < least else (first, second)

    def init(params: PyTree) -> FactoredState:
        def zeros(without: int | None) -> PyTree:
            """Zeros for the factor without that dimension; with None, for what is not factored. Unused ones are a single 0."""

            def zero(p: Array) -> Array:
                shape, dims = list(p.shape), factored(p.shape)
                if (dims is None) != (without is None):
                    shape = [1] * p.ndim
                elif dims is not None and without is not None:
                    shape[dims[without]] = 1
                return jnp.zeros(shape, jnp.float32)

            return jax.tree.map(zero, params)

        return FactoredState(jnp.zeros((), jnp.int32), zeros(0), zeros(1), zeros(None))

    def update(grads: PyTree, state: FactoredState, params: PyTree = None) -> tuple[PyTree, FactoredState]:
        del params
        count = state.count + 1
        keep = 1 - count.astype(jnp.float32) ** -power

        def scaled(g: Array, row: Array, column: Array, whole: Array) -> tuple[Array, ...]:
            squares = g * g + eps
            if dims := factored(g.shape):
                first, second = dims
                row = keep * row + (1 - keep) * squares.mean(first, keepdims=True)
                column = keep * column + (1 - keep) * squares.mean(second, keepdims=True)
                u = g * jax.lax.rsqrt(row / row.mean(second, keepdims=True)) * jax.lax.rsqrt(column)
            else:
                whole = keep * whole + (1 - keep) * squares
                u = g * jax.lax.rsqrt(whole)
            return u / jnp.maximum(1.0, jnp.sqrt(jnp.mean(u * u)) / clip), row, column, whole

        leaves, tree = jax.tree.flatten(grads)
        each = [scaled(g, *ms) for g, *ms in zip(leaves, *map(jax.tree.leaves, state[1:]), strict=True)]
        u, row, column, whole = (jax.tree.unflatten(tree, x) for x in zip(*each, strict=True)) if each else [grads] * 4
        return u, FactoredState(count, row, column, whole)

    return optax.GradientTransformation(init, update)


# name -> (optim, path -> spec) -> the update before decay and rate.
UPDATE_RULES: dict[str, Callable[[Optim, Mapping[str, Spec]], optax.GradientTransformation]] = {
    # m_hat / (sqrt(v_hat) + eps) (Loshchilov & Hutter 2019)
    "adamw": lambda o, _: optax.scale_by_adam(b1=o.b1, b2=o.b2, eps=o.eps),
    "adam_atan2": lambda o, _: scale_by_adam_atan2(o.b1, o.b2, a=o.atan2_a, b=o.atan2_b, correction=o.atan2_correction),
    # g / sqrt(v) with v of rank one: rows + columns numbers instead of rows × columns
    "adafactor": lambda o, _: scale_by_adafactor(),
    # sign(b1 m + (1 - b1) g), then m <- b2 m + (1 - b2) g (Chen et al. 2023)
    "lion": lambda o, _: optax.scale_by_lion(b1=o.b1, b2=o.b2),
    "muon": lambda o, specs: scale_by_muon(specs, momentum=o.momentum, scale=o.muon_scale),
    # sign(g), without state: a table of millions of rows needs no moments
    "sign_sgd": lambda o, _: optax.scale_by_sign(),
}
