"""Options of the compilers: an installed compiler checks them, unknown ones are refused by name,
and the rest is passed on."""

import jax
import jax.numpy as jnp
import pytest

from jaxtrain import config, plan
from jaxtrain.compile import xla_options
from jaxtrain.nn import transformer
from jaxtrain.run import loop
from tests.support import small_runs
from tests.support.processes import run

SCHEDULER, MERGER = "xla_gpu_enable_latency_hiding_scheduler", "xla_gpu_dot_merger_threshold_mb"
SLICES = "xla_gpu_enable_dynamic_slice_fusion"
SCATTERS = "xla_gpu_reduce_scatter_combine_threshold_bytes"
ONE = {MERGER: 0, SLICES: False}
SEVERAL = {**ONE, SCHEDULER: True, SCATTERS: 2 << 20}  # for more than one GPU


@pytest.mark.usefixtures("libtpu")
@pytest.mark.parametrize("target", ["tpu:v4:2x2x1", "tpu:v5e:2x2", "tpu:v5p:2x2x1", "tpu:v6e:2x2"])
def test_libtpu_knows_every_option_of_the_table(target):
    device = plan.compile.tpu_devices(plan.parse_target(target))[0]
    wanted = {o.name: o.value for o in xla_options.TABLE if device.device_kind.startswith(o.kinds)}
    assert wanted and xla_options.options({}, device.device_kind, count=4, device=device) == wanted
    assert xla_options.options({}, device.device_kind, count=1, device=device) == {}, (
        "one chip moves nothing"
    )
    with pytest.raises(config.ConfigError) as error:
        xla_options.options(
            {"xla_tpu_fast": "True", "xla_gpu_x": 1}, device.device_kind, count=4, device=device
        )
    assert [path for path, _ in error.value.problems] == ["compiler.xla_tpu_fast"]


def test_jaxlib_knows_every_option_for_gpus_and_a_config_overrides_the_table():
    cpu, kind = jax.devices()[0], "NVIDIA H100 80GB HBM3"
    assert xla_options.options({}, kind, count=8, device=cpu) == SEVERAL
    assert xla_options.options({}, kind, count=1, device=cpu) == ONE, "one GPU moves nothing"
    own = {SCHEDULER: "false"}
    off = {**SEVERAL, SCHEDULER: False}
    assert xla_options.options(own, kind, count=8, device=cpu) == off
    with pytest.raises(
        config.ConfigError,
        match=rf"(?s)compiler.{SCHEDULER} is 'fast', .*compiler.xla_gpu_fast is 1, .*omit",
    ):
        xla_options.options({"xla_gpu_fast": 1, SCHEDULER: "fast"}, kind, count=8, device=cpu)


@pytest.mark.parametrize(("rank", "is_off"), [(0, True), (4, False)])
def test_products_are_not_moved_to_slices_of_the_array_of_all_layers(rank, is_off):
    """Else some are computed twice with jax 0.11.2. Adapters are faster so."""
    run_config = config.Config(model=transformer.Decoder(), lora=config.Lora(rank=rank))
    options = plan.compile.compiler_options(run_config, plan.parse_target("gpu:h100x1"))
    assert options.get(SLICES) == (False if is_off else None)


def test_an_option_of_the_table_that_a_version_does_not_know_is_left_out_and_told(
    monkeypatch, caplog
):
    monkeypatch.setattr(
        xla_options,
        "TABLE",
        (*xla_options.TABLE, xla_options.Option("xla_gpu_of_tomorrow", True, ("NVIDIA",))),
    )
    with caplog.at_level("INFO", "jaxtrain"):
        options = xla_options.options({}, "NVIDIA H100", count=8, device=jax.devices()[0])
    assert options == SEVERAL
    assert "compiled without xla_gpu_of_tomorrow" in caplog.text


GATHERS = "xla_tpu_enable_async_collective_fusion_fuse_all_gather"


class Lowered:
    """A program that its compiler refuses with one option, as libtpu 0.0.51 does for v4 if products
    gather.

    The libtpu that jax asks for (0.0.42) does not refuse it. No option is known that this libtpu
    accepts only for a small program.
    """

    def __init__(self):
        self._program = jax.jit(lambda x: x + 1).lower(jnp.zeros(()))

    def compile(self, *, compiler_options):
        if compiler_options.get(GATHERS):
            raise jax.errors.JaxRuntimeError(
                "UNIMPLEMENTED: fusing all-gather is not supported\nand more lines"
            )
        # the compiler of this machine, which knows no option for TPUs
        return self._program.compile()


VMEM = "xla_tpu_scoped_vmem_limit_kib"


@pytest.fixture
def libtpu_42(monkeypatch):
    monkeypatch.setattr(xla_options.machine, "has_package", lambda name: name == "libtpu")
    monkeypatch.setattr(xla_options.importlib.metadata, "version", lambda name: "0.0.42")


def test_options_of_the_table_never_keep_a_step_from_being_compiled(caplog, libtpu_42):
    """The user did not ask for these options, so the step is compiled without the one at fault."""
    with caplog.at_level("WARNING", "jaxtrain"):
        assert xla_options.compile(Lowered(), {SCHEDULER: True, GATHERS: True}, {}).as_text()
    by = "the compiler for TPUs, libtpu 0.0.42"
    assert f"compiled without {GATHERS}, with which {by} fails: UNIMPLEMENTED" in caplog.text
    assert SCHEDULER not in caplog.text


def test_an_error_of_compilation_names_the_option(libtpu_42):
    """Neither options of the table nor others of the config are blamed for the error."""
    own = {VMEM: 50000, GATHERS: True}
    with pytest.raises(
        config.ConfigError, match="config.compiler is .*fuse_all_gather.* libtpu 0.0.42 .*supported"
    ) as error:
        xla_options.compile(Lowered(), {**own, SCHEDULER: True}, own)
    assert SCHEDULER not in str(error.value) and VMEM not in str(error.value)
    assert "newer libtpu" not in str(error.value)


@pytest.mark.parametrize(
    ("error", "is_known"), [("UNIMPLEMENTED: not supported", True), ("INTERNAL: x", False)]
)
def test_an_option_with_which_newer_releases_do_not_gather_is_named_with_its_chips(
    error, is_known, libtpu_42
):
    class Gathering(Lowered):
        def compile(self, *, compiler_options):
            if compiler_options:
                raise jax.errors.JaxRuntimeError(error)
            return self._program.compile()

    own = {xla_options.GATHERS: True}
    with pytest.raises(config.ConfigError) as raised:
        xla_options.compile(Gathering(), own, own)
    known = f"{error}; newer libtpu refuse {xla_options.GATHERS} for a step that gathers on v4,"
    assert (
        f"{known} v5p and v6e, and 0.0.42 takes it on v6e; remove" in str(raised.value)
    ) == is_known


@pytest.mark.parametrize("own", [{}, {VMEM: 50000}, {VMEM: 50000, GATHERS: True}], ids=len)
def test_a_step_that_fails_without_options_is_the_compilers_own_error(own):
    class Broken:
        def compile(self, *, compiler_options):
            raise jax.errors.JaxRuntimeError("INTERNAL: Mosaic failed")

    with pytest.raises(jax.errors.JaxRuntimeError, match="Mosaic failed"):
        xla_options.compile(Broken(), {SCHEDULER: True, **own}, own)


def test_two_options_that_each_make_a_step_fail_are_both_named(libtpu_42):
    class Refusing(Lowered):
        def compile(self, *, compiler_options):
            if compiler_options:
                raise jax.errors.JaxRuntimeError("INTERNAL: Mosaic failed")
            return self._program.compile()

    own = {VMEM: 50000, GATHERS: True}
    with pytest.raises(config.ConfigError, match=f"{VMEM}.*{GATHERS}.*Mosaic failed"):
        xla_options.compile(Refusing(), own, own)


def test_a_program_that_grows_without_one_option_is_compiled_without_all(caplog):
    class Large(Lowered):
        def compile(self, *, compiler_options):
            if len(compiler_options) == 1:
                raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: too large")
            return super().compile(compiler_options=compiler_options)

    with caplog.at_level("WARNING", "jaxtrain"):
        assert xla_options.compile(Large(), {SCHEDULER: True, GATHERS: True}, {}).as_text()
    assert f"compiled without {SCHEDULER}, {GATHERS}" in caplog.text


def test_options_of_libtpu_with_other_names_are_for_tpus_alone(caplog):
    """One config may have those of several platforms."""
    own = {name: value for name, value in xla_options.OF_LIBTPU.items() if "xla_tpu_" not in name}
    assert len(own) == 3
    for kind in ("cpu", "NVIDIA H100"):
        with caplog.at_level("INFO", "jaxtrain"):
            found = xla_options.options(own, kind, count=1, device=jax.devices()[0])
        assert not own.keys() & found.keys()
        assert f"compiler options that are not for {kind}: {', '.join(sorted(own))}" in caplog.text


def test_a_refusal_for_a_tpu_names_the_version_of_libtpu(monkeypatch, caplog):
    monkeypatch.setattr(
        xla_options, "_refusals", lambda options, device: dict.fromkeys(options, "x")
    )
    monkeypatch.setattr(xla_options.machine, "has_package", lambda name: name == "libtpu")
    monkeypatch.setattr(xla_options.importlib.metadata, "version", lambda name: "0.0.42")
    by = "the compiler for TPU v5 lite, libtpu 0.0.42, refuses"
    with pytest.raises(config.ConfigError, match=f"xla_tpu_fast is 'true', and {by} it: x"):
        options = {"xla_tpu_fast": "true"}
        xla_options.options(options, "TPU v5 lite", count=1, device=jax.devices()[0])
    with caplog.at_level("WARNING", "jaxtrain"):
        assert not xla_options.options({}, "TPU v5 lite", count=4, device=jax.devices()[0])
    assert f"compiled without xla_tpu_enable_latency_hiding_scheduler, which {by}" in caplog.text


@pytest.mark.usefixtures("libtpu")
@pytest.mark.parametrize("target", ["tpu:v5e:2x2", "tpu:v5p:2x2x1", "tpu:v6e:2x2"])
def test_libtpu_takes_the_options_that_it_is_said_to_take(target):
    device = plan.compile.tpu_devices(plan.parse_target(target))[0]
    taken = xla_options.OF_LIBTPU
    of_table = {o.name: o.value for o in xla_options.TABLE if "TPU v5 lite".startswith(o.kinds)}
    assert taken.items() >= of_table.items()
    options = xla_options.options(taken, device.device_kind, count=4, device=device)
    assert options.items() >= taken.items()


def test_a_refusal_for_a_tpu_names_the_versions_of_libtpu_that_take_the_option(monkeypatch, caplog):
    """An older libtpu does not know it, or the value is of another type."""
    monkeypatch.setattr(
        xla_options, "_refusals", lambda options, device: dict.fromkeys(options, "No such option")
    )
    vmem, cpu = "xla_tpu_scoped_vmem_limit_kib", jax.devices()[0]
    take = f"; libtpu {xla_options.LIBTPU} take"
    with pytest.raises(
        config.ConfigError, match=f"{vmem} is 7, .* refuses it: No such option{take} {vmem}=50000; "
    ):
        xla_options.options({vmem: 7}, "TPU v5 lite", count=1, device=cpu)
    with pytest.raises(config.ConfigError, match="refuses it: No such option; correct it"):
        xla_options.options({"xla_tpu_fast": 7}, "TPU v5 lite", count=1, device=cpu)
    with caplog.at_level("WARNING", "jaxtrain"):
        assert not xla_options.options({}, "TPU v6 lite", count=4, device=cpu)
    name = "xla_tpu_enable_latency_hiding_scheduler"
    assert f"refuses: No such option{take} {name}=True" in caplog.text


@pytest.mark.parametrize(
    ("kind", "name", "is_said"),
    [
        *((kind, VMEM, True) for kind in ("TPU v5 lite", "TPU v5", "TPU v5p", "TPU v6 lite")),
        *((kind, VMEM, False) for kind in ("TPU v4", "TPU7x", "TPU of tomorrow", "NVIDIA H100")),
        # steps that gather compile with it on v5e alone
        ("TPU v5 lite", xla_options.GATHERS, True),
        *((kind, xla_options.GATHERS, False) for kind in ("TPU v4", "TPU v5", "TPU v6 lite")),
    ],
)
def test_a_release_is_said_to_take_an_option_for_the_chips_that_were_tried(kind, name, is_said):
    assert bool(xla_options._taken(name, kind)) == is_said


@pytest.mark.usefixtures("libtpu")
def test_a_value_that_libtpu_refuses_is_named_with_one_that_it_takes():
    device = plan.compile.tpu_devices(plan.parse_target("tpu:v5e:2x2"))[0]
    own = {"xla_tpu_scoped_vmem_limit_kib": "much"}
    with pytest.raises(config.ConfigError, match=r"kib is 'much', .* take .*kib=50000; correct it"):
        xla_options.options(own, device.device_kind, count=4, device=device)


def test_invalid_options_are_reported_before_any_data_are_read(tmp_path):
    small_runs.rows(tmp_path)
    overrides = [("workdir", str(tmp_path)), ("compiler.xla_cpu_fast", "true")]
    with pytest.raises(
        config.ConfigError,
        match="config.compiler.xla_cpu_fast is 'true', and the compiler for cpu refuses it: ",
    ):
        loop.run(config.load(f"{tmp_path}/rows.py", overrides))


@pytest.mark.slow  # it compiles everything again: programs in the cache leave no dump
def test_a_run_compiles_its_step_with_them(folder):
    run(
        folder,
        "toy.py",
        f"--config.compiler.xla_dump_to={folder / 'hlo'}",
        "--config.compiler.xla_tpu_scoped_vmem_limit_kib=98304",  # an option of another platform
        "--config.compiler.xla_backend_optimization_level=0",
        "--config.model.depth=1",
        "--config.train.steps=1",
        JAX_ENABLE_COMPILATION_CACHE="false",
    )
    assert any("jit_step" in path.name for path in (folder / "hlo").iterdir())


def test_sums_for_cpus_are_one_pass_and_products_ynnpacks_where_a_process_has_several_cores(
    monkeypatch,
):
    cpu, x = jax.devices()[0], jnp.ones((512, 512))
    for cores, products in ((1, False), (2, True), (16, True)):
        monkeypatch.setattr(xla_options.machine, "cores", lambda cores=cores: cores)
        options = xla_options.options({}, "cpu", count=1, device=cpu)
        assert list(options) == ["xla_cpu_experimental_ynn_fusion_type"]
        product = xla_options.compile(jax.jit(jnp.dot).lower(x, x), options, {})
        assert ("__ynn_fusion" in product.as_text()) == products and (product(x, x) == 512).all()
        norm = xla_options.compile(jax.jit(lambda x: jnp.sum(jnp.square(x))).lower(x), options, {})
        assert (
            "__ynn_fusion" in norm.as_text()
            and "reduce-window" not in norm.as_text()
            and norm(x) == 512 * 512
        )
        [name] = options
        # the config's options override the table's
        for value in ("LIBRARY_FUSION_TYPE_REDUCE", "LIBRARY_FUSION_TYPE_DOT"):
            assert xla_options.options({name: value}, "cpu", count=1, device=cpu) == {name: value}
