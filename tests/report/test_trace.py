"""Traces are read without jax, compared with jax's own reader, and damaged."""

import os
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.compilation_cache import compilation_cache

from jaxtrain.telemetry.report import trace
from loaders.io.files import FileError


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    def step(w, x):
        with jax.named_scope("loss_and_grad"):
            g = jax.grad(lambda w: (jnp.tanh(x @ w) @ w.T).sum())(w)
        with jax.named_scope("update"):
            return w - 0.1 * g

    w, x = jnp.ones((256, 256)), jnp.ones((512, 256))
    compiled = jax.jit(step).lower(w, x).compile()
    place = tmp_path_factory.mktemp("trace")
    with jax.profiler.trace(str(place)):
        for _ in range(3):
            w = compiled(w, x)
        w.block_until_ready()
    return place


def test_the_time_of_operations_is_that_of_jaxs_reader(folder):
    found = trace.of_folder(folder)
    [path] = folder.glob("plugins/profile/*/*.xplane.pb")
    events = [
        event
        for plane in jax.profiler.ProfileData.from_file(str(path)).planes
        for line in plane.lines
        for event in line.events
        if "hlo_op" in dict(event.stats) and event.duration_ns > 0
    ]
    assert found.operations == len(events)
    begin, end = min(e.start_ns for e in events), max(e.start_ns + e.duration_ns for e in events)
    assert found.seconds == pytest.approx((end - begin) * 1e-9, rel=1e-6)
    own = list(trace._operations(path.read_bytes()))
    assert sum(stop - start for _, _, start, stop in own) == pytest.approx(
        1000 * sum(e.duration_ns for e in events), rel=1e-6
    )


def test_parts_are_the_whole_and_scopes_are_the_programs(folder):
    found = trace.of_folder(folder)
    assert sum(found.parts.values()) == pytest.approx(1) and all(
        share > 0 for share in found.parts.values()
    )
    assert found.parts["backward"] > found.parts["optimizer"] and found.parts["forward"] > 0
    scopes = [name for name, _, _ in found.scopes]
    assert any(name.startswith("loss_and_grad/transpose(jvp") for name in scopes)
    assert any(name.startswith("update") for name in scopes)


@pytest.fixture
def compiled_here():
    """No program comes from the compilation cache or gets into it. One from there has the number
    under which it was compiled, which may be that of another program of the trace."""
    before = jax.config.jax_enable_compilation_cache
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()
    yield
    jax.config.update("jax_enable_compilation_cache", before)
    compilation_cache.reset_cache()


def test_programs_that_share_names_keep_their_scopes(tmp_path, compiled_here):
    """Both programs have instructions with the same names. Each ran twice.

    They compute different numbers. The compilation cache leaves the scopes out of its key, and one
    program would be the other's.
    """

    def product(scope, factor):
        def f(w, x):
            with jax.named_scope(scope):
                return jnp.tanh(factor * (x @ w)) @ w.T

        return jax.jit(f).lower(w, x).compile()

    w, x = jnp.ones((256, 256)), jnp.ones((512, 256))
    mine, other = product("mine", 0.5), product("other", 0.25)
    with jax.profiler.trace(str(tmp_path)):
        for program in (other, mine, other, mine):
            program(w, x).block_until_ready()
    times = {"mine": 0, "other": 0}
    for name, _, count in trace.of_folder(tmp_path).scopes:
        times[name.split("/")[0]] += count
    assert times["mine"] == times["other"] > 0


FROM_THE_CACHE = """
import sys
import jax
import jax.numpy as jnp
for i in range(int(sys.argv[2])):
    jax.jit(lambda x: x * 2 + 1).lower(jnp.ones(i + 1)).compile()

def step(w, x):
    with jax.named_scope("mine"):
        return jnp.tanh(x @ w) @ w.T

w, x = jnp.ones((256, 256)), jnp.ones((512, 256))
program = jax.jit(step).lower(w, x).compile()
with jax.profiler.trace(sys.argv[1]):
    program(w, x).block_until_ready()
"""


def test_a_program_from_the_cache_keeps_its_scopes(tmp_path):
    """Its operations have the number of the process that compiled it. Here that number belongs to
    another program."""
    own = {
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path / "cache"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }
    for others in (0, 12):
        command = [sys.executable, "-c", FROM_THE_CACHE, str(tmp_path / str(others)), str(others)]
        subprocess.run(command, env={**os.environ, **own}, check=True, capture_output=True)
        found = trace.of_folder(tmp_path / str(others)).scopes
        assert (
            found[0][0].startswith("mine/")
            and sum(share for name, share, _ in found if name.startswith("mine/")) > 0.5
        )


def test_operations_that_run_next_to_each_other_share_their_time():
    """Forward from 0 to 10 on two threads, backward from 6 to 10 on one, nothing until 16, then 4
    of the optimizer."""
    forward, backward, update = (
        "jit(f)/loss_and_grad/jvp(x)/dot",
        "jit(f)/loss_and_grad/transpose(jvp(x))/dot",
        "jit(f)/update/mul",
    )
    ops = [
        trace.Operation("a", forward, 0, 10),
        trace.Operation("b", forward, 0, 10),
        trace.Operation("c", backward, 6, 10),
        trace.Operation("d", update, 16, 20),
    ]
    parts = trace._summary(ops).parts
    assert parts == pytest.approx(
        {
            "forward": (6 + 4 * 2 / 3) / 20,
            "backward": 4 / 3 / 20,
            "optimizer": 4 / 20,
            "gaps": 6 / 20,
        }
    )


def test_a_damaged_trace_is_an_error_by_name(folder, tmp_path):
    [path] = folder.glob("plugins/profile/*/*.xplane.pb")
    whole, bad = path.read_bytes(), tmp_path / "bad.xplane.pb"
    for i in range(12):
        at = len(whole) * i // 12
        bad.write_bytes(whole[:at] if i % 2 else whole[:at] + b"\xff" * 3 + whole[at + 3 :])
        try:
            trace.read(pathlib.Path(bad))
        except FileError as error:
            assert str(error).startswith(str(bad))
