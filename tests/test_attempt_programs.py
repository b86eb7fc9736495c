"""Programs that a supervised run's later attempts find without tracing them."""

import dataclasses
import json
import pathlib

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import serialize_executable

from jaxtrain.compile import attempt_programs, program_cache
from jaxtrain.config import Config
from jaxtrain.parallel import cluster, supervised_attempt

MESH = jax.make_mesh((8,), ("data",))
EVERYWHERE = jax.NamedSharding(MESH, jax.P())
X = jax.ShapeDtypeStruct((4,), jnp.float32, sharding=EVERYWHERE)
CONFIG = Config()
RUN = "3b5d"


def attempt(monkeypatch, number, config=CONFIG, run=RUN, idle=0):
    value = supervised_attempt.Attempt(number, run=run, idle=idle)
    for name, text in value.to_environment().items():
        monkeypatch.setenv(name, text)
    return attempt_programs.AttemptPrograms(config, MESH)


@pytest.fixture
def noted(monkeypatch, tmp_path):
    """The programs of attempt 0, as one of several processes keeps them."""
    monkeypatch.setenv("JAXTRAIN_CACHE", str(tmp_path))
    monkeypatch.setattr(cluster, "gather", lambda value: [value])
    monkeypatch.setattr(cluster, "gather_texts", lambda text: [text])
    lowered = jax.jit(lambda x, y: {"sum": x + 2 * y}, out_shardings=EVERYWHERE).lower(X, X)
    programs = attempt(monkeypatch, 0)
    program_cache.keep(lowered, {}, lowered.compile)
    assert not programs.has_earlier
    assert programs.peak(lambda: (5.0, "measured")) == (5.0, "measured")
    programs.note("step", (X, X), lowered, {})
    return lowered


def test_a_later_attempt_finds_a_program_by_its_name(monkeypatch, noted):
    programs = attempt(monkeypatch, 1)
    assert programs.has_earlier
    found = programs.find("step", (X, X))
    ones = jax.device_put(jnp.ones(4), EVERYWHERE)
    assert found.program(ones, ones)["sum"].tolist() == [3, 3, 3, 3]
    assert found.out_info["sum"].shape == (4,) and len(found.text) == 64
    assert programs.find("evaluation 0", (X, X)) is None
    assert programs.peak(lambda: pytest.fail("it was measured")) == (5.0, "measured")
    other = jax.ShapeDtypeStruct((8,), jnp.float32)
    assert programs.find("step", (X, other)) is None


def test_another_run_config_or_code_has_no_programs(monkeypatch, noted):
    other = dataclasses.replace(CONFIG, seed=1)
    assert not attempt(monkeypatch, 1, config=other).has_earlier
    assert not attempt(monkeypatch, 1, run="77").has_earlier
    with monkeypatch.context() as patch:
        patch.setattr(cluster, "digest_of_files", lambda: "other")
        assert not attempt(monkeypatch, 1).has_earlier
    with monkeypatch.context() as patch:
        patch.setattr(attempt_programs, "_digest_of_own_modules", lambda: "a user's model")
        assert not attempt(monkeypatch, 1).has_earlier
    assert attempt(monkeypatch, 1).has_earlier


def test_a_program_that_a_process_does_not_have_or_cannot_read_is_traced_again(
    monkeypatch, noted, caplog
):
    programs = attempt(monkeypatch, 1)
    monkeypatch.setattr(cluster, "gather", lambda value: [value, 0])
    with caplog.at_level("INFO", "jaxtrain"):
        assert programs.find("step", (X, X)) is None
    assert "step is traced again" in caplog.text
    monkeypatch.setattr(cluster, "gather", lambda value: [value])
    path: pathlib.Path = program_cache.path_of(noted, {})
    path.write_bytes(path.read_bytes()[:-9])
    assert programs.find("step", (X, X)) is None
    of_another_attempt = json.dumps([["step", 2]])
    for others in ("[]", of_another_attempt):
        monkeypatch.setattr(cluster, "gather_texts", lambda text, others=others: [text, others])
        assert not attempt(monkeypatch, 1).has_earlier


def test_two_attempts_without_a_step_trace_their_programs_again(monkeypatch, noted, caplog):
    assert attempt(monkeypatch, 2, idle=1).has_earlier
    assert not attempt(monkeypatch, 3, idle=2).has_earlier
    assert "programs are traced again: the last 2 attempts made no step" in caplog.text


@pytest.mark.parametrize("platform", ["gpu", "tpu"])
def test_a_supervised_process_with_another_device_keeps_its_programs_too(
    monkeypatch, noted, caplog, platform
):
    """One that JAX's own cache gave at once is kept, and one that is not loaded is traced."""
    monkeypatch.setattr(jax, "default_backend", lambda: platform)
    programs = attempt(monkeypatch, 4)
    lowered = jax.jit(lambda x, y: x - y, out_shardings=EVERYWHERE).lower(X, X)
    program_cache.keep(lowered, {}, lowered.compile)
    programs.note("digest 0", (X, X), lowered, {})
    assert program_cache.earlier(lowered, {}) is None, "JAX's cache has it"
    programs = attempt(monkeypatch, 5)
    found = programs.find("digest 0", (X, X))
    ones = jax.device_put(jnp.ones(4), EVERYWHERE)
    assert found.program(ones, ones).tolist() == [0, 0, 0, 0]

    def fail(*given):
        raise RuntimeError("another driver\nand more")

    monkeypatch.setattr(serialize_executable, "deserialize_and_load", fail)
    with caplog.at_level("INFO", "jaxtrain"):
        assert programs.find("digest 0", (X, X)) is None
    assert "digest 0 is traced again: not all processes load its program: another driver\n" in (
        caplog.text
    )


def test_no_program_is_recorded_without_a_supervisor_or_a_cache(monkeypatch, noted):
    attempt(monkeypatch, 1)
    assert program_cache.are_recorded()
    monkeypatch.setenv("JAX_ENABLE_COMPILATION_CACHE", "0")
    assert not program_cache.are_recorded() and not attempt(monkeypatch, 1).has_earlier
    monkeypatch.delenv("JAX_ENABLE_COMPILATION_CACHE")
    monkeypatch.delenv(supervised_attempt.VARIABLE)
    assert not program_cache.are_recorded()


def test_a_stage_without_a_name_has_no_recorded_program():
    assert attempt_programs.name_of_step((("warm", 2), 0, True)) == 'step [["warm", 2], 0, true]'
    assert attempt_programs.name_of_step((object(), 0, True)) == ""
