"""Draws of a token follow the distribution."""

import jax
import jax.numpy as jnp
import numpy as np

from jaxtrain.nn import sampling


def test_draws_follow_the_distribution_cut_at_top_p():
    p = np.array([0.5, 0.05, 0.25, 0.15, 0.05])
    draw = jax.vmap(
        lambda key: sampling.choose(jnp.log(jnp.asarray(p)), key, temperature=1.0, top_p=0.8)
    )
    counts = np.bincount(draw(jax.random.split(jax.random.key(0), 20_000)), minlength=5) / 20_000
    np.testing.assert_allclose(counts, [0.5 / 0.9, 0, 0.25 / 0.9, 0.15 / 0.9, 0], atol=0.015)
    hot = jax.vmap(
        lambda key: sampling.choose(jnp.log(jnp.asarray(p)), key, temperature=0.5, top_p=1.0)
    )
    counts = np.bincount(hot(jax.random.split(jax.random.key(0), 20_000)), minlength=5) / 20_000
    np.testing.assert_allclose(counts, p**2 / (p**2).sum(), atol=0.015)
