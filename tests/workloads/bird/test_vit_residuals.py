"""The arrays that a vision transformer's training step keeps for its backward pass."""

import jax.numpy as jnp
import pytest

from jaxtrain.workloads.bird import vit
from tests.support import residuals
from tests.support.residuals import ONE, WIDE, D, L, M, T, gradient, shard_on

VIT = vit.Stack(embed=D, depth=L, heads=4, hidden=M)
STACKS = {
    "gelu": VIT,
    "swiglu, norms and rotation of q and k": VIT._replace(
        gated=True, qk_norm=True, layer_scale=0.1
    ),
}


def of(stack, dtype, word="none"):
    """The jaxpr of a stack's gradient."""
    stack, shard = stack._replace(dtype=dtype, remat=word), shard_on(1, 1, 1)
    turns = (jnp.ones((1, T, 1, 8)), jnp.zeros((1, T, 1, 8))) if stack.qk_norm else None
    return gradient(
        lambda params, x: vit.run_stack(stack, params, x, shard, turns=turns),
        vit.stack_specs(stack),
        dtype,
    )


# The inputs of both parts, q, k and v as attention reads them, its output, and the input of the
# activation.
KEPT = {
    "gelu": [WIDE, *[ONE] * 6],
    # In addition q and k before their norms, and both parts before they are scaled.
    "swiglu, norms and rotation of q and k": [WIDE, WIDE, *[ONE] * 10],
}


@pytest.mark.parametrize("name", STACKS)
def test_layers_keep_what_norms_and_activations_read_in_16_bits_alone(name):
    residuals.check(of, STACKS[name], KEPT[name])
