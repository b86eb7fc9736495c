"""The cache of compiled programs that several processes on CPUs share (tests/test_reliability.py
runs some)."""

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import serialize_executable
from jax.experimental.compilation_cache import compilation_cache

from jaxtrain.compile import jax_cache, program_cache

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


SETTINGS = {
    "jax_enable_compilation_cache": True,
    "jax_persistent_cache_min_compile_time_secs": 0.0,
    "jax_persistent_cache_min_entry_size_bytes": -1,
}


@pytest.fixture
def own_cache(tmp_path):
    """JAX's cache, empty and on."""
    settings = {**SETTINGS, "jax_compilation_cache_dir": str(tmp_path)}
    before = {name: jax.config.values[name] for name in settings}
    for values in (settings, before):
        for name, value in values.items():
            jax.config.update(name, value)
        compilation_cache.reset_cache()
        if values is settings:
            yield


def several_kernels(x):
    return {"a": jax.nn.softmax(jnp.sin(x) @ x.T).sum(0), "b": jnp.linalg.norm(x * 2)}


def test_a_program_of_jaxs_cache_is_kept_by_the_bytes_that_the_cache_has(own_cache):
    x = jnp.arange(64.0).reshape(8, 8)
    expected = several_kernels(x)
    read = []
    for _ in range(2):
        jax.clear_caches()
        lowered = jax.jit(several_kernels).lower(x)
        with jax_cache.reading() as contents:
            program = lowered.compile()
        read.append(len(contents))
        content = jax_cache.serialize(program, contents)
        structure = jax.tree.structure(lowered.args_info)
        loaded = serialize_executable.deserialize_and_load(
            content, structure, lowered.out_tree, execution_devices=jax.devices()[:1]
        )
        results = loaded(x)
        assert jnp.allclose(results["a"], expected["a"]) and results["b"] == expected["b"]
    assert read == [0, 1], "the second is of the cache"
    with pytest.raises(ValueError, match="of JAX's cache, which does not tell"):
        jax_cache.serialize(program, None)
    with pytest.raises(ValueError, match="read several programs"):
        jax_cache.serialize(program, [*contents, *contents])
