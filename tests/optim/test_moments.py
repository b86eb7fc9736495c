"""Moments in few bits."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxtrain.optim import moments


@pytest.mark.parametrize("how", ["bfloat16", "int8"])
def test_rounding_has_no_bias_and_is_within_a_step(how):
    x = jnp.abs(jax.random.normal(jax.random.key(0), (64, 256))) ** 3
    for name, value in (("mu", x * jnp.where(jnp.arange(256)[None] % 2, 1, -1)), ("nu", x)):
        scales = moments.row_scales(value)

        def once(salt, name=name, value=value, scales=scales):
            if how == "bfloat16":
                return moments.round_to_bfloat16(value, salt).astype(jnp.float32)
            return moments.dequantise(moments.quantise(value, scales, salt, name), scales, name)

        drawn = jax.vmap(once)(jnp.arange(400, dtype=jnp.uint32))
        error = np.abs(np.asarray(drawn.mean(0) - value))
        spread = np.asarray(drawn.std(0)) + 1e-7
        # Not all draws: a place next to a code is drawn away from it too rarely for 400 draws to
        # show its spread.
        assert np.mean(error < 4 * spread / np.sqrt(400)) > 0.97
        worst = (
            0.004 * np.abs(value)
            if how == "bfloat16"
            else 0.07 * np.abs(value) + 0.02 * np.abs(value).max()
        )
        assert (np.abs(drawn[0] - value) <= worst * 2).all()
