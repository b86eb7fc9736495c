"""The figures of the real step, compiled for a target by the target's own compiler."""

import collections
import contextlib
import importlib.util
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax

from jaxtrain import config as config_lib
from jaxtrain.assembly import Assembly
from jaxtrain.compile import xla_options
from jaxtrain.parallel import layout
from jaxtrain.plan import gpu_specs, hlo, plan_cache
from jaxtrain.plan.target import PlanError, Target
from loaders.io.checks import first_line

# Without a card nothing is tuned, and then XLA's products by Triton find no tiles for some shapes.
UNTUNED = {"xla_gpu_enable_triton_gemm": False}


class Compiled(NamedTuple):
    arguments: int  # [bytes] on one device
    temporaries: int
    peak: int
    collectives: hlo.Exchanges | None  # None = the program's text cannot be read
    seconds: float  # of compilation
    library_calls: Mapping[str, int] = {}  # target -> executions in a step
    products: Mapping[str, float] = {}  # types of the operands, as "bf16 x bf16" -> FLOP in a step
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
    options: dict[str, Any] = (
        {"chip_config_name": "megacore"} if target.known.name in ("v4", "v5p") else {}
    )
    if target.slices > 1:
        options["num_slices"] = target.slices
    try:
        return list(
            topologies.get_topology_desc(target.topology, platform="tpu", **options).devices
        )
    except Exception as error:
        raise PlanError(
            f"--plan={target.name}: libtpu knows no such topology: {first_line(error)}"
        ) from error


def gpu_devices(target: Target) -> list[Any]:
    """Return GPUs that need not exist, by JAX's CUDA plugin (`jaxtrain.plan.environment`)."""
    from jax.experimental import topologies

    spec = gpu_specs.SPECS[target.known.name].text()
    try:
        return list(
            topologies.get_topology_desc(
                "", "cuda", target_config=spec, topology=target.topology
            ).devices
        )
    except Exception as error:
        raise PlanError(
            f"--plan={target.name}: XLA's compiler for GPUs: {first_line(error)}"
        ) from error


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
    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), (), abstract_device=gpu)):
        yield


def is_at_hand(target: Target) -> bool:
    return target.here or target.kind == "tpu" and importlib.util.find_spec("libtpu") is not None


def compiler_options(config: config_lib.Config, target: Target) -> dict[str, Any]:
    """Return the options to compile a target's step with. Raises ConfigError: refused here."""
    if target.here:
        device = jax.local_devices()[0]
        kind = device.device_kind
    else:
        kind, device = target.known.kind, None
        if is_at_hand(target):
            device = tpu_devices(target)[0]
        elif target.kind == "gpu":
            with contextlib.suppress(RuntimeError):  # JAX_PLATFORMS may leave CPUs out
                # jaxlib's own compiler knows the options for GPUs by name
                device = jax.devices("cpu")[0]
    return xla_options.options(config.compiler, kind, count=target.count, device=device)


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
    own, mesh = assembly.config.compiler, assembly.layout.mesh
    devices = list(mesh.devices.flat)
    options = {
        **xla_options.options(own, devices[0].device_kind, count=mesh.size, device=devices[0]),
        **(options or {}),
    }
    figures, again = ask(traced.lower(), devices, options, own=own, versions=versions)
    if figures.refusal:
        raise PlanError(f"the compiler says: {figures.refusal}")
    found = Compiled(
        figures.arguments, figures.temporaries, figures.peak, None, figures.seconds, again=again
    )
    if figures.text is None:
        return found
    module, shape = hlo.Program(figures.text), dict(mesh.shape)
    products: dict[str, float] = collections.defaultdict(float)
    for one in module.products():
        products[" x ".join(one.operands)] += one.flops
    return found._replace(
        collectives=hlo.summary(hlo.collectives(module), shape),
        library_calls=module.library_calls(),
        products=dict(products),
        text=figures.text,
    )


def ask(
    lowered: jax.stages.Lowered,
    devices: Sequence[Any],
    options: Mapping[str, Any],
    *,
    own: Mapping[str, Any] | None = None,
    versions: str = "",
) -> tuple[plan_cache.Figures, bool]:
    """Return a compiler's figures, and whether they were kept. ``own``: the config's options."""
    name = plan_cache.key(lowered.as_text(), devices, options, versions) if versions else ""
    if name and (known := plan_cache.find(name)):
        return known, True
    began = time.perf_counter()
    try:
        figures = _read(
            xla_options.compile(lowered, options, own or {}), devices[0].platform, began
        )
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        figures = plan_cache.Figures(
            0, 0, 0, time.perf_counter() - began, None, refusal=first_line(error)
        )
    if name:
        plan_cache.keep(name, figures)
    return figures, False


def _read(program: jax.stages.Compiled, platform: str, began: float) -> plan_cache.Figures:
    seconds = time.perf_counter() - began
    memory: Any = program.memory_analysis()  # None only for backends that do not plan
    arguments, temporaries = memory.argument_size_in_bytes, memory.temp_size_in_bytes
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
