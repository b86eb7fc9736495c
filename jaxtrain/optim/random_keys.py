"""Optimizers that draw random numbers, from keys in their state.

A typed key of JAX is no array of numbers, as a checkpoint, a digest and the choice of a state need
one. It is stored as the numbers that it is made of.
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxtrain.types import PyTree


def stored_as_numbers(
    tx: optax.GradientTransformation,
) -> optax.GradientTransformationExtraArgs:
    """Make an optimizer whose typed keys are uint32 arrays in its state."""
    tx = optax.with_extra_args_support(tx)

    def init(params: PyTree) -> PyTree:
        return jax.tree.map(_numbers, tx.init(params))

    def update(
        grads: PyTree, state: PyTree, params: PyTree = None, **extra: Any
    ) -> tuple[PyTree, PyTree]:
        leaves, structure = jax.tree.flatten(state)
        for i, impl in enumerate(_impls(tx, params)):
            if impl is not None:
                leaves[i] = jax.random.wrap_key_data(leaves[i], impl=impl)
        keyed_state = jax.tree.unflatten(structure, leaves)
        updates, new = tx.update(grads, keyed_state, params, **extra)
        return updates, jax.tree.map(_numbers, new)

    return optax.GradientTransformationExtraArgs(init, update)


def _impls(tx: optax.GradientTransformationExtraArgs, params: PyTree) -> list[Any]:
    """Return the implementation of each leaf of the state that is a key, or None."""
    impls = []

    def note(params: PyTree) -> None:
        for leaf in jax.tree.leaves(tx.init(params)):
            impls.append(jax.random.key_impl(leaf) if is_key(leaf) else None)

    jax.eval_shape(note, params)
    return impls


def is_key(x: Any) -> bool:
    """Whether an array has keys of JAX in place of numbers."""
    return jnp.issubdtype(jnp.asarray(x).dtype, jax.dtypes.prng_key)


def _numbers(x: Any) -> Any:
    return jax.random.key_data(x) if is_key(x) else x
