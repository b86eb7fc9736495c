"""The real step, compiled for a target by the target's own compiler."""

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

# Without a card nothing is tuned, and untuned, XLA's own products (by Triton) find no tiles for some shapes.
UNTUNED = {"xla_gpu_enable_triton_gemm": False}


class Compiled(NamedTuple):
    """What a compiler says of the step."""

    arguments: int  # [bytes] on one device
    temporaries: int
    peak: int
    collectives: hlo.Exchanges | None  # None: the program's text cannot be read
    seconds: float  # that compiling took
    library_calls: Mapping[str, int] = {}  # target -> executions in a step
    products: Mapping[str, float] = {}  # types of the operands, as "bf16 x bf16" -> FLOP in a step
    text: str = ""  # of the compiled program
    again: bool = False  # an earlier plan compiled it, and its answer was kept


def ask_for_no_chips() -> None:
    """Sets what libtpu, where it is installed, would ask a metadata server for, and would complain about without one.

    It also refuses to be loaded by two processes. To be called before the first device is touched; a run cannot follow.
    """
    for name, value in (
        ("TPU_SKIP_MDS_QUERY", "1"),
        ("TPU_WORKER_HOSTNAMES", "localhost"),
        ("TPU_ACCELERATOR_TYPE", "v4-8"),  # any will do: a topology says its own
        ("ALLOW_MULTIPLE_LIBTPU_LOAD", "1"),
    ):
        os.environ.setdefault(name, value)


def tpu_devices(target: Target) -> list[Any]:
    """The chips of a topology, which need not exist. Those of two cores act as one device ("megacore"), as JAX runs them."""
    from jax.experimental import topologies

    ask_for_no_chips()
    options: dict[str, Any] = {"chip_config_name": "megacore"} if target.known.name in ("v4", "v5p") else {}
    if target.slices > 1:
        options["num_slices"] = target.slices
    try:
        return list(topologies.get_topology_desc(target.topology, platform="tpu", **options).devices)
    except Exception as error:
        raise PlanError(f"--plan={target.name}: libtpu knows no such topology: {str(error).splitlines()[0]}") from error


def gpu_devices(target: Target) -> list[Any]:
    """GPUs that need not exist, for a process whose jax has the CUDA plugin (`jaxtrain.plan.environment`)."""
    from jax.experimental import topologies

    spec = gpu_specs.SPECS[target.known.name].text()
    try:
        return list(topologies.get_topology_desc("", "cuda", target_config=spec, topology=target.topology).devices)
    except Exception as error:
        raise PlanError(f"--plan={target.name}: XLA's compiler for GPUs: {str(error).splitlines()[0]}") from error


# Of each compute capability, a card that Pallas knows by name (jax 0.11).
KNOWN_TO_PALLAS = {"8.0": "NVIDIA A100", "8.6": "NVIDIA A10", "8.9": "NVIDIA L4", "9.0": "NVIDIA H100", "10.0": "NVIDIA B200"}


@contextlib.contextmanager
def for_kernels(device: Any) -> Iterator[None]:
    """Traces kernels of Pallas for a GPU that need not exist.

    From jax 0.11 on they are traced for the GPU of the mesh around them, and on one device there is no such mesh: then for this
    machine's, of which a plan has none.
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
    """Whether this process can compile for the target itself."""
    return target.here or target.kind == "tpu" and importlib.util.find_spec("libtpu") is not None


def compiler_options(config: config_lib.Config, target: Target) -> dict[str, Any]:
    """What a step for the target is compiled with. Raises ConfigError for options that a compiler at hand refuses."""
    if target.here:
        device = jax.local_devices()[0]
        kind = device.device_kind
    else:
        kind, device = target.known.kind, None
        if is_at_hand(target):
            device = tpu_devices(target)[0]
        elif target.kind == "gpu":
            with contextlib.suppress(RuntimeError):  # JAX_PLATFORMS may leave CPUs out
                device = jax.devices("cpu")[0]  # jaxlib's own compiler knows the options for GPUs by name
    return xla_options.options(config.compiler, kind, count=target.count, device=device)


def compiled(
    assembly: Assembly, traced: jax.stages.Traced, *, options: Mapping[str, Any] | None = None, versions: str = ""
) -> Compiled:
    """Compiles a step on the assembly's real mesh, with the options of a run; ``options`` come over them.

    Args:
      versions: of the compilers. With them what a compiler says is kept, and the same program is not compiled again.

    Raises PlanError when the compiler finds that it does not fit, ConfigError when it refuses an option of the config.
    """
    own, mesh = assembly.config.compiler, assembly.layout.mesh
    devices = list(mesh.devices.flat)
    options = {**xla_options.options(own, devices[0].device_kind, count=mesh.size, device=devices[0]), **(options or {})}
    said, again = ask(traced.lower(), devices, options, own=own, versions=versions)
    if said.refusal:
        raise PlanError(f"the compiler says: {said.refusal}")
    found = Compiled(said.arguments, said.temporaries, said.peak, None, said.seconds, again=again)
    if said.text is None:
        return found
    module, shape = hlo.Program(said.text), dict(mesh.shape)
    products: dict[str, float] = collections.defaultdict(float)
    for one in module.products():
        products[" x ".join(one.operands)] += one.flops
    return found._replace(
        collectives=hlo.summary(hlo.collectives(module), shape), library_calls=module.library_calls(), products=dict(products),
        text=said.text,
    )  # fmt: skip


def ask(
    lowered: jax.stages.Lowered,
    devices: Sequence[Any],
    options: Mapping[str, Any],
    *,
    own: Mapping[str, Any] | None = None,
    versions: str = "",
) -> tuple[plan_cache.Said, bool]:
    """What a compiler says of a program for these devices, and whether that was kept (`compiled`).

    Raises ConfigError when it refuses ``own``, those of the options that are the config's.
    """
    name = plan_cache.key(lowered.as_text(), devices, options, versions) if versions else ""
    if name and (known := plan_cache.find(name)):
        return known, True
    began = time.perf_counter()
    try:
        said = _read(xla_options.compile(lowered, options, own or {}), devices[0].platform, began)
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        said = plan_cache.Said(0, 0, 0, time.perf_counter() - began, None, refusal=str(error).splitlines()[0])
    if name:
        plan_cache.keep(name, said)
    return said, False


def _read(program: jax.stages.Compiled, platform: str, began: float) -> plan_cache.Said:
    seconds = time.perf_counter() - began
    memory: Any = program.memory_analysis()  # None only where a backend has none, and those that plan have one
    arguments, temporaries = memory.argument_size_in_bytes, memory.temp_size_in_bytes
    results = memory.output_size_in_bytes - memory.alias_size_in_bytes
    if platform == "tpu" and memory.peak_memory_in_bytes > arguments:  # else it says none
        # libtpu (0.0.42) tells of more temporaries than it takes, by up to a half: of a program that it finds to fit more than
        # the chip has. Its peak is what lives at once; gaps between arrays, 1 to 2 % of the models' steps, come on top.
        temporaries = memory.peak_memory_in_bytes - arguments - results
    peak = arguments + temporaries + results
    try:
        text = program.as_text() or ""
    except jax.errors.JaxRuntimeError:  # a libtpu newer than jaxlib can write what jaxlib does not know
        text = None
    return plan_cache.Said(arguments, temporaries, peak, seconds, text)
