"""The options of JAX that decide numbers: recorded, compared, or refused at the start."""

import json

import jax
import pytest

from jaxtrain.parallel import jax_options
from jaxtrain.parallel.cluster import processes
from loaders.io.checks import FREE, FUNCTION
from tests.support.processes import command

RUN = (
    "--config.train.eval_every=0",
    "--config.optim.schedule=constant",
    "--config.metrics.every=1",
)


def test_every_option_of_jax_is_in_one_table():
    """An option of a new JAX belongs in a table: does it change draws, programs, or nothing?"""
    for name in jax.config.values:
        tables = (
            name in jax_options.OF_THE_RUN,
            name in jax_options.OF_ROUNDING,
            name in jax_options.REQUIRED,
            bool(jax_options.WITHOUT_EFFECT.fullmatch(name)),
        )
        assert sum(tables) == 1, name


def test_what_is_recorded(monkeypatch, tmp_path):
    monkeypatch.setenv("XLA_FLAGS", "--xla_dump_to=/tmp --xla_cpu_enable_fast_math=true")
    monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", "1")
    usual = jax_options.recorded()
    assert usual["XLA_FLAGS"] == {"xla_cpu_enable_fast_math": "true"}
    assert usual["NVIDIA_TF32_OVERRIDE"] == "1"
    assert usual["JAX_THREEFRY_PARTITIONABLE"] is True
    assert "JAX_SOFTMAX_CUSTOM_JVP" not in usual
    (tmp_path / "flags").write_text("--xla_gpu_autotune_level=0\n--xla_cpu_collective_timeout=5")
    monkeypatch.setenv("XLA_FLAGS", str(tmp_path / "flags"))
    with jax.threefry_partitionable(False), jax.softmax_custom_jvp(True):
        assert jax_options.recorded() | {"JAX_THREEFRY_PARTITIONABLE": True} == usual | {
            "XLA_FLAGS": {"xla_gpu_autotune_level": "0"},
            "JAX_SOFTMAX_CUSTOM_JVP": True,
        }


def test_draws_are_of_the_run_and_flags_are_free(monkeypatch):
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    now = jax_options.recorded()
    assert jax_options.changes(None) == jax_options.changes(now) == []
    saved = now | {"JAX_RANDOM_SEED_OFFSET": 7, "XLA_FLAGS": {"xla_a": "1"}, "JAX_SCAN3": True}
    changes = {change.path: change for change in jax_options.changes(saved)}
    assert {path: change.kind for path, change in changes.items()} == {
        "environment.JAX_RANDOM_SEED_OFFSET": FUNCTION,
        "environment.XLA_FLAGS.xla_a": FREE,
        "environment.JAX_SCAN3": FREE,
    }
    text = str(changes["environment.JAX_RANDOM_SEED_OFFSET"])
    assert text == "environment.JAX_RANDOM_SEED_OFFSET: 7 saved, 0 now"
    # an option that this JAX does not have
    saved = {name: value for name, value in now.items() if name != "JAX_RANDOM_SEED_OFFSET"}
    assert jax_options.changes(saved) == []


@pytest.mark.slow
def test_a_resume_under_other_draws_is_refused_by_name(folder):
    """The record of the next start, `diff` and `replay` name the option too."""

    def ended(*overrides, code=0, **environment):
        process = command(folder, "toy.py", *RUN, *overrides, **environment)
        output, _ = process.communicate(timeout=200)
        assert process.returncode == code, output
        return output

    ended("--config.train.steps=2")
    other = {"JAX_THREEFRY_PARTITIONABLE": "0"}
    output = ended("--config.train.steps=3", code=2, **other)
    assert output.count("error:") == 1, output
    assert (
        "environment.JAX_THREEFRY_PARTITIONABLE: True saved, False now. Set it back, choose another"
        " config.workdir, or train on with the change by"
        " --config.resume.allow=environment.JAX_THREEFRY_PARTITIONABLE"
    ) in output
    allowed = "--config.resume.allow=environment.JAX_THREEFRY_PARTITIONABLE"
    output = ended("--config.train.steps=3", allowed, **other)
    assert "need not have the bits that they would have had: environment.JAX_THREEFRY" in output
    starts = []
    for line in (folder / "runs/toy/goodput/process-0.jsonl").read_text().splitlines():
        record = json.loads(line)
        if "environment" in record:
            starts.append(record["environment"]["JAX_THREEFRY_PARTITIONABLE"])
    assert starts == [True, False, False]


@pytest.mark.parametrize(
    ("environment", "lines"),
    [
        (
            {"JAX_ENABLE_X64": "1", "JAX_DEBUG_NANS": "1"},
            ["2 of JAX's options cannot be used:", "  JAX_DEBUG_NANS is True", "  JAX_ENABLE_X64"],
        ),
        ({"JAX_DISABLE_JIT": "maybe"}, ["'maybe' for environment 'JAX_DISABLE_JIT'; correct"]),
        ({"JAX_PLATFORMS": "gpu"}, ["JAX_PLATFORMS=gpu, which means cuda and rocm together"]),
        (
            {"XLA_FLAGS": "--xla_cpu_fast=true", "JAX_PLATFORMS": "cpu"},
            ["XLA_FLAGS has --xla_cpu_fast=true, which this version of XLA does not know"],
        ),
        (
            {"JAX_DEFAULT_MATMUL_PRECISION": "BF16_BF16_F32", "JAX_PLATFORMS": "cpu"},
            ["is 'BF16_BF16_F32', an algorithm that XLA does not have on CPUs; write one of"],
        ),
    ],
    ids=["two", "unreadable", "platform", "flag", "algorithm"],
)
def test_what_nothing_runs_with_is_one_error_at_the_start(folder, environment, lines):
    process = command(folder, "toy.py", *RUN, "--config.train.steps=2", **environment)
    output, _ = process.communicate(timeout=200)
    assert process.returncode == 2, output
    _, _, error = output.partition("error: ")
    assert len(error.splitlines()) == len(lines), output
    for line, part in zip(error.splitlines(), lines, strict=True):
        assert part in line, output


@pytest.mark.parametrize(
    ("platforms", "text"),
    [
        ("cuda", "JAX_PLATFORMS=cuda: there is none; install jax for it"),
        ("cuda,cdua", "'cdua' is unknown; expected one of: cpu, cuda, rocm, tpu"),
        ("", "JAX finds no device: there is none; see `jaxtrain doctor`"),
    ],
)
def test_a_platform_without_its_plugin_or_name(platforms, text):
    before = jax.config.values["jax_platforms"]
    jax.config.update("jax_platforms", platforms)
    try:
        assert text in jax_options.without_devices(AssertionError())
    finally:
        jax.config.update("jax_platforms", before)


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        ("--xla_bar=1 --xla_gpu_deterministic_ops=true", "XLA_FLAGS has --xla_bar=1, which"),
        ("xla_cpu_enable_fast_math", "names the file xla_cpu_enable_fast_math, which cannot be"),
        ("--xla_gpu_deterministic_ops=maybe", "has the value maybe for flag xla_gpu_determ"),
        ("--xla_gpu_deterministic_ops=true", ""),
        ("--xla_force_host_platform_device_count=8", ""),
        ("", ""),
    ],
)
def test_flags_that_xla_would_end_the_process_for_are_one_line(flags, text):
    lines = jax_options.unreadable_flags(flags)
    assert len(lines) == bool(text) and all(text in line for line in lines), lines


@pytest.mark.parametrize("name", ["XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"])
def test_a_process_takes_a_gpus_memory_but_for_a_share_that_the_user_sets(name):
    of_user, default = {name: "0.5"}, {}
    processes.take_gpu_memory(of_user)
    processes.take_gpu_memory(default)
    assert of_user == {name: "0.5"} and default == {"XLA_CLIENT_MEM_FRACTION": "0.92"}
