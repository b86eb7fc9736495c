"""The compiler's figures are cached: the same plan is compiled only once."""

import types

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jaxtrain import config as config_lib
from jaxtrain import plan
from jaxtrain.compile import xla_options
from jaxtrain.plan import compile as compile_lib
from jaxtrain.plan import plan_cache, worker
from tests.plan.cases import on


def small(n):
    """A program on n devices, and the fields of an assembly that `compiled` reads."""
    mesh = on((n, 1, 1), jax.devices())
    rows = NamedSharding(mesh, PartitionSpec("data"))
    x = jax.ShapeDtypeStruct((8, 16), jnp.float32, sharding=rows)
    assembly = types.SimpleNamespace(
        config=types.SimpleNamespace(compiler={}),
        layout=types.SimpleNamespace(mesh=mesh),
        compiler_options=dict,
    )
    return assembly, jax.jit(
        lambda x: (x @ x.T).sum(), out_shardings=NamedSharding(mesh, PartitionSpec())
    ).trace(x)


@pytest.fixture
def asked(tmp_path, monkeypatch):
    """Lists the compiled programs in order. The cache is empty."""
    programs, compile = [], xla_options.compile

    def noted(lowered, *args):
        programs.append(lowered)
        return compile(lowered, *args)

    monkeypatch.setenv("JAXTRAIN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(xla_options, "compile", noted)
    return programs


def test_a_program_is_compiled_once_for_its_devices_options_and_compilers(
    asked, tmp_path, monkeypatch
):
    one, four = small(1), small(4)

    def take(program=one, versions="a compiler 1", **options):
        return compile_lib.compiled(*program, options=options, versions=versions)

    first, again = take(), take()
    assert len(asked) == 1 and again == first._replace(again=True) and first.text and first.peak > 0
    [path] = (tmp_path / "cache" / "plans").iterdir()
    take(four), take(versions="a compiler 2"), take(xla_cpu_enable_fast_math=True)
    assert len(asked) == 4
    assert take(versions="").again is False and len(asked) == 5, "a run's own devices are asked"

    whole = path.read_bytes()
    for damaged in (b"", whole[: len(whole) // 2], whole[:40] + b"\0" * 40 + whole[80:], b"[]"):
        path.write_bytes(damaged)
        assert plan_cache.find(path.name.split(".")[0]) is None
    assert (
        take()._replace(seconds=first.seconds) == first
        and plan_cache.find(path.name.split(".")[0])
        and take().again
    )

    monkeypatch.setattr(plan_cache, "LIMIT", 2 * path.stat().st_size)
    take(xla_cpu_enable_fast_min_max=True)
    assert len(list(path.parent.iterdir())) < 4 and take(xla_cpu_enable_fast_min_max=True).again


def test_plans_that_do_not_fit_are_cached_too_and_an_unwritable_cache_is_harmless(
    asked, tmp_path, monkeypatch
):
    program, times = small(1), []

    def refuse(*_):
        times.append(1)
        raise jax.errors.JaxRuntimeError(
            "RESOURCE_EXHAUSTED: 3.00G more than there is\nallocations"
        )

    monkeypatch.setattr(xla_options, "compile", refuse)
    for _ in range(2):
        with pytest.raises(
            plan.PlanError,
            match=r"^the compiler says: RESOURCE_EXHAUSTED: 3.00G more than there is$",
        ):
            compile_lib.compiled(*program, versions="1")
    assert len(times) == 1
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setenv("JAXTRAIN_CACHE", str(tmp_path / "file"))
    with pytest.raises(plan.PlanError, match="3.00G"):
        compile_lib.compiled(*program, versions="1")
    assert len(times) == 2


def test_figures_of_another_jax_are_not_used(monkeypatch):
    arguments = "text", jax.devices(), {}, "a compiler 1"
    name = plan_cache.key(*arguments)
    assert plan_cache.key(*arguments) == name
    monkeypatch.setattr(jax, "__version__", "0.0.1")
    assert plan_cache.key(*arguments) != name


def test_figures_of_other_packages_that_compile_are_not_used(monkeypatch):
    """A plugin for CUDA 13 is another compiler than one for CUDA 12 with the same jaxlib."""

    def versions(*names):
        found = [types.SimpleNamespace(name=name, version="1") for name in names]
        monkeypatch.setattr(worker.importlib.metadata, "distributions", lambda: found)
        return worker._own_versions()

    names = "jaxlib", "jax-cuda12-plugin", "nvidia-cudnn-cu12", "nvidia_cuda_nvcc_cu12"
    every = [versions(*names[: n + 1]) for n in range(len(names))]
    assert len(set(every)) == len(names) and every[0] == "jaxlib==1"
    assert versions("jaxlib", "jax-cuda13-plugin") != versions("jaxlib", "jax-cuda12-plugin")
    assert versions(*names, "numpy", "jax") == every[-1]


def test_figures_of_a_card_that_was_described_otherwise_are_not_used(monkeypatch):
    """The description of a card that is not here decides its programs."""
    asked = []

    def compiled(assembly, traced, *, options, versions):
        asked.append(versions)

    monkeypatch.setattr(worker, "compiled", compiled)
    monkeypatch.setattr(worker, "resolve", lambda config, target: config)
    monkeypatch.setattr(worker, "_devices", lambda target: jax.devices()[:1])
    mesh = on((1, 1, 1), jax.devices()[:1])
    monkeypatch.setattr(worker.layout_lib, "make_mesh", lambda *_, devices: mesh)
    assembly = types.SimpleNamespace(trace=lambda stage, has_norms: None)
    monkeypatch.setattr(worker, "assemble", lambda config, mesh: assembly)
    job = worker.Job(config_lib.Config(), "gpu:h100x1")
    specs = worker.gpu_specs.SPECS
    for spec in (specs["h100"], specs["h100"], specs["h100"]._replace(cores=131)):
        monkeypatch.setitem(specs, "h100", spec)
        assert not worker.answer(job, "a compiler 1").error
    assert asked[0] == asked[1] != asked[2]
    worker.answer(job, "")
    assert asked[3] == "", "nothing is kept"
