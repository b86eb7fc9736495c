"""The figures of the real step, compiled for a target by the target's own compiler."""

import collections
import contextlib
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax

from jaxtrain import config as config_lib
from jaxtrain.assembly import Assembly
from jaxtrain.compile import xla_options
from jaxtrain.parallel import layout
from jaxtrain.plan import gpu_specs, hlo, plan_cache, slices, traffic
from jaxtrain.plan.target import PlanError, Target
from loaders.io import machine
from loaders.io.checks import first_line

# Without a card nothing is tuned, and then XLA's products by Triton find no tiles for some shapes.
# So products are cuBLAS's, for which XLA copies matrices of odd sizes to whole tiles. A card has
# Triton's for such matrices, which read them as they are.
UNTUNED = {
    "xla_gpu_enable_triton_gemm": False,
    "xla_disable_hlo_passes": "cublas-pad-for-gemms",
}

NO_OFFLOAD = "without a card, XLA's compiler for GPUs takes offloaded arrays for the device's"


class Compiled(NamedTuple):
    arguments: int  # [bytes] on one device
    temporaries: int
    peak: int
    collectives: hlo.Exchanges | None  # None = the program's text cannot be read
    seconds: float  # of compilation
    library_calls: Mapping[str, int] = {}  # target -> executions in a step
    products: Mapping[str, float] = {}  # types of the operands, as "bf16 x bf16" -> FLOP in a step
    kernels: Sequence[traffic.Kernel] = ()
    unknown: int = 0  # loops whose rounds the program's text does not say
    text: str = ""  # of the compiled program
    again: bool = False  # an earlier plan compiled it, and its figures were kept


def ask_for_no_chips() -> None:
    """Set the values for which libtpu would ask a metadata server, and let two processes load it.

    Call it before JAX makes its devices. No run can follow in this process.
    """
    for name, value in (
        ("TPU_SKIP_MDS_QUERY", "1"),
        ("TPU_WORKER_HOSTNAMES", "localhost"),
        ("TPU_ACCELERATOR_TYPE", "v4-8"),  # any will do, since a topology has its own
        ("ALLOW_MULTIPLE_LIBTPU_LOAD", "1"),
    ):
        os.environ.setdefault(name, value)


def tpu_devices(target: Target) -> list[Any]:
    """Return chips of a topology that need not exist. Two cores are one device ("megacore")."""
    from jax.experimental import topologies

    ask_for_no_chips()
    options: dict[str, Any] = {}
    if target.known_chip.name in ("v4", "v5p"):
        options["chip_config_name"] = "megacore"
    if target.slices > 1:
        options["num_slices"] = target.slices
    if bounds := slices.host_bounds(tuple(target.sides)):
        options["chips_per_host_bounds"] = bounds
    try:
        topology = topologies.get_topology_desc(target.topology, platform="tpu", **options)
        return list(topology.devices)
    except Exception as error:
        reason = f"libtpu knows no such topology: {first_line(error)}"
        raise PlanError(f"--plan={target.name}: {reason}") from error


def gpu_devices(target: Target) -> list[Any]:
    """Return GPUs that need not exist, by JAX's CUDA plugin (`jaxtrain.plan.environment`)."""
    from jax.experimental import topologies

    properties = gpu_specs.SPECS[target.known_chip.name].text()
    try:
        topology = topologies.get_topology_desc(
            "", "cuda", target_config=properties, topology=target.topology
        )
        return list(topology.devices)
    except Exception as error:
        reason = f"XLA's compiler for GPUs: {first_line(error)}"
        raise PlanError(f"--plan={target.name}: {reason}") from error


# A card of each compute capability that Pallas knows by name (jax 0.11).
KNOWN_TO_PALLAS = {
    "8.0": "NVIDIA A100",
    "8.6": "NVIDIA A10",
    "8.9": "NVIDIA L4",
    "9.0": "NVIDIA H100",
    "10.0": "NVIDIA B200",
}


@contextlib.contextmanager
def for_kernels(device: Any) -> Iterator[None]:
    """Trace kernels of Pallas for a GPU that need not exist.

    From jax 0.11 on they are traced for the GPU of the mesh around them, which one device lacks.
    """
    devices = layout.devices_like(device)
    if devices.platform != "gpu":
        yield
        return
    kind = KNOWN_TO_PALLAS.get(devices.capability, device.device_kind)
    gpu = jax.sharding.AbstractDevice(device_kind=kind, num_cores=None, platform="gpu")
    mesh = jax.sharding.AbstractMesh((), (), abstract_device=gpu)
    with jax.sharding.use_abstract_mesh(mesh):
        yield


def is_at_hand(target: Target) -> bool:
    return target.here or target.kind == "tpu" and machine.has_package("libtpu")


def compiler_options(config: config_lib.Config, target: Target) -> dict[str, Any]:
    """Return the options to compile a target's step with. Raises ConfigError: refused here."""
    if target.here:
        device = jax.local_devices()[0]
        kind = device.device_kind
    else:
        device = _device_that_knows_options(target)
        kind = target.known_chip.kind
    return xla_options.options(
        config.compiler,
        kind,
        count=target.count,
        device=device,
        has_adapters=config.lora.rank > 0,
    )


def _device_that_knows_options(target: Target) -> Any | None:
    if is_at_hand(target):
        return tpu_devices(target)[0]
    if target.kind == "gpu":
        with contextlib.suppress(RuntimeError):  # JAX_PLATFORMS may leave CPUs out
            # jaxlib's own compiler knows the options for GPUs by name
            return jax.devices("cpu")[0]
    return None


def compiled(
    assembly: Assembly,
    traced: jax.stages.Traced,
    *,
    options: Mapping[str, Any] | None = None,
    versions: str = "",
) -> Compiled:
    """Compile a step on the assembly's real mesh, with the options of a run and ``options``.

    With ``versions`` of the compilers the figures are kept. Raises PlanError if the compiler finds
    that the step does not fit, and ConfigError if it refuses an option of the config.
    """
    config_options = assembly.config.compiler
    mesh = assembly.layout.mesh
    figures, again = ask(
        traced.lower(),
        list(mesh.devices.flat),
        assembly.compiler_options() | dict(options or {}),
        config_options=config_options,
        versions=versions,
    )
    if figures.refusal:
        raise PlanError(f"the compiler says: {figures.refusal}")
    step = Compiled(
        figures.arguments, figures.temporaries, figures.peak, None, figures.seconds, again=again
    )
    if figures.text is None:
        return step
    program = hlo.Program(figures.text)
    products: dict[str, float] = collections.defaultdict(float)
    for product in program.products():
        products[" x ".join(product.operands)] += product.flops
    return step._replace(
        collectives=hlo.summary(hlo.collectives(program), dict(mesh.shape)),
        library_calls=program.library_calls(),
        products=dict(products),
        kernels=traffic.traffic(program),
        unknown=len(program.unknown),
        text=figures.text,
    )


def ask(
    lowered: jax.stages.Lowered,
    devices: Sequence[Any],
    options: Mapping[str, Any],
    *,
    config_options: Mapping[str, Any] | None = None,
    versions: str = "",
) -> tuple[plan_cache.Figures, bool]:
    """Return a compiler's figures, and whether they were kept.

    ``config_options``: those of ``options`` that the config has.
    """
    key = plan_cache.key(lowered.as_text(), devices, options, versions) if versions else ""
    if key:
        cached = plan_cache.find(key)
        if cached:
            return cached, True
    began = time.perf_counter()
    try:
        program = xla_options.compile(lowered, options, config_options or {})
        figures = _read(program, devices[0].platform, time.perf_counter() - began)
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        seconds = time.perf_counter() - began
        figures = plan_cache.Figures(0, 0, 0, seconds, None, refusal=first_line(error))
    if key:
        plan_cache.keep(key, figures)
    return figures, False


def _read(program: jax.stages.Compiled, platform: str, seconds: float) -> plan_cache.Figures:
    memory: Any = program.memory_analysis()  # None only for backends that do not plan
    arguments = memory.argument_size_in_bytes
    temporaries = memory.temp_size_in_bytes
    results = memory.output_size_in_bytes - memory.alias_size_in_bytes
    if platform == "tpu" and memory.peak_memory_in_bytes > arguments:  # else it is not known
        # libtpu (0.0.42) reports up to half more temporaries than it places, also of a program that
        # fits. Its peak has the arrays that live at once. Gaps between them add 1 to 2 %.
        temporaries = memory.peak_memory_in_bytes - arguments - results
    peak = arguments + temporaries + results
    try:
        text = program.as_text() or ""
    except jax.errors.JaxRuntimeError:  # jaxlib cannot read the text of a newer libtpu
        text = None
    return plan_cache.Figures(arguments, temporaries, peak, seconds, text)
