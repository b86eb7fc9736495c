"""The peak-memory walk on small programs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxtrain import plan


def in_place(p, m, g):
    return p + g, m * 0.9 + g, g.sum()


def measured(p, m, g):
    new = p + g
    return new, m * 0.9 + g, (new * new).sum() - (p * p).sum()


def guarded(p, m, g):
    """As a step does: what may come to nothing, and parameters that are made of the old moment, too."""
    moment, good = m * 0.9 + g, g.sum() < 1
    new = jnp.where(good, p - jnp.sqrt(moment), p)
    return new, jnp.where(good, moment, m), (new * new).sum() - (p * p).sum()


@pytest.mark.parametrize(("step", "copies"), [(in_place, 0), (measured, 1), (guarded, 2)])
def test_donated_arrays_that_are_read_beside_their_results_are_copied_on_a_cpu(step, copies):
    xs = [jax.ShapeDtypeStruct((1024, 256), np.float32)] * 3
    traced = jax.jit(step, donate_argnums=(0, 1)).trace(*xs)
    found = traced.lower().compile().memory_analysis().temp_size_in_bytes
    whole = [((), ())] * 3
    planned = plan.peak(traced.jaxpr, whole, {}, [True, True, False], plan.parse_target("").compiler)
    assert found // 2**20 == copies and planned.bytes == pytest.approx(found, abs=1000)
