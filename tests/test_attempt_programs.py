"""Programs that a supervised run's later attempts find without tracing them."""

import dataclasses
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


def attempt(monkeypatch, number, config=CONFIG, run=RUN):
    value = supervised_attempt.Attempt(number, run=run)
    for name, text in value.to_environment().items():
        monkeypatch.setenv(name, text)
    return attempt_programs.AttemptPrograms(config, MESH)


@pytest.fixture
def noted(monkeypatch, tmp_path):
    """The programs of attempt 0, as one of several processes keeps them."""
    monkeypatch.setenv("JAXTRAIN_CACHE", str(tmp_path))
    monkeypatch.setattr(program_cache, "are_kept", lambda: True)
    monkeypatch.setattr(cluster, "gather", lambda value: [value])
    monkeypatch.setattr(cluster, "gather_texts", lambda text: [text])
    lowered = jax.jit(lambda x, y: {"sum": x + 2 * y}, out_shardings=EVERYWHERE).lower(X, X)
    content = serialize_executable.serialize(lowered.compile())[0]
    program_cache.write(program_cache.path_of(lowered, {}), content)
    programs = attempt(monkeypatch, 0)
    assert not programs.has_earlier
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
    monkeypatch.setattr(cluster, "gather_texts", lambda text: [text, "[]"])
    assert not attempt(monkeypatch, 1).has_earlier


def test_a_stage_without_a_name_has_no_recorded_program():
    assert attempt_programs.name_of_step((("warm", 2), 0, True)) == 'step [["warm", 2], 0, true]'
    assert attempt_programs.name_of_step((object(), 0, True)) == ""
