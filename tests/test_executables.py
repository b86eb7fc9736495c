"""The cache of compiled programs that several processes on CPUs share (tests/test_reliability.py
runs some)."""

import jax
import jax.numpy as jnp
import pytest

from jaxtrain.compile import program_cache

X = jax.ShapeDtypeStruct((4,), jnp.float32)


def path_of(f, *arguments, options=()):
    return program_cache.path_of(jax.jit(f).lower(*arguments), dict(options))


def test_programs_that_differ_only_in_their_arguments_are_different():
    """JAX's text of a program leaves out unused arguments, so these programs have the same text."""
    table = {"u": X, "w": X}
    first = path_of(lambda v, x: v["u"] * x, table, X)
    assert (
        jax.jit(lambda v, x: v["u"] * x).lower(table, X).as_text()
        == jax.jit(lambda v, x: v["w"] * x).lower(table, X).as_text()
    )
    assert path_of(lambda v, x: v["u"] * x, table, X) == first
    assert path_of(lambda v, x: v["w"] * x, table, X) != first
    assert (
        path_of(lambda v, x: v["u"] * x, {**table, "w": jax.ShapeDtypeStruct((8,), jnp.float32)}, X)
        != first
    )
    assert (
        path_of(
            lambda v, x: v["u"] * x, table, X, options={"xla_backend_optimization_level": 1}.items()
        )
        != first
    )


@pytest.mark.parametrize("setting", ["jax_disable_most_optimizations", "jax_enable_x64"])
def test_a_program_is_another_under_other_settings_of_jax(setting):
    first = path_of(lambda x: x + 1, X)
    before = jax.config.values[setting]
    jax.config.update(setting, not before)
    try:
        assert path_of(lambda x: x + 1, X) != first
    finally:
        jax.config.update(setting, before)


def test_no_program_is_kept_if_the_cache_is_off(monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    assert program_cache.are_kept()
    monkeypatch.setenv("JAX_ENABLE_COMPILATION_CACHE", "false")
    assert not program_cache.are_kept()
