"""The memory that the chips' compilers report, and whether the step fits."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import SingleDeviceSharding

from jaxtrain import plan
from jaxtrain.plan import compile as compile_lib


@pytest.mark.usefixtures("libtpu")
def test_a_step_that_the_tpu_compiler_makes_fit_is_reported_to_fit():
    """Four layers that are computed again, 4 M rows of 128: libtpu reports 16.4 GB of temporaries.
    With x they are 18 of 17 GB."""

    def loss(w, x):
        x, _ = jax.lax.scan(
            jax.checkpoint(lambda x, w: (x + jnp.tanh(jnp.tanh(x @ w) @ w.T), None)), x, w
        )
        return (x * x).sum()

    target = plan.parse_target("tpu:v5e:2x2")
    device = compile_lib.tpu_devices(target)[0]
    rows, kept = 4_000_000, 4 * 4_000_000  # the layers' inputs
    for more, fits in ((1, True), (2, False)):
        w, x = (
            jax.ShapeDtypeStruct(shape, jnp.float32, sharding=SingleDeviceSharding(device))
            for shape in ((4, 128, 128), (more * rows, 128))
        )
        said, _ = compile_lib.ask(jax.jit(jax.grad(loss)).trace(w, x).lower(), [device], {})
        assert (not said.refusal) == fits, said.refusal
        if fits:
            assert 4 * 128 * (rows + kept) < said.peak < target.memory
