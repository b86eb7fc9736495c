"""Options for XLA's compilers: a table of defaults by device, and the options of a config over it.

They are arguments of a compilation. In XLA_FLAGS or LIBTPU_INIT_ARGS a name that the installed
version does not know ends the process. Here the compiler is tried first, with a program of no size.
An option of the table that it refuses is left out. An option of a config that it refuses is an
error that names it.
"""

import contextlib
import importlib.metadata
import logging
import warnings
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import SingleDeviceSharding

from jaxtrain.config import ConfigError
from jaxtrain.config.schema import COMPILER_LEVELS, LEVELS
from jaxtrain.parallel import chips
from loaders.io import machine
from loaders.io.checks import first_line

log = logging.getLogger("jaxtrain")
PLATFORMS = ("tpu", "gpu", "cpu")  # options of one of them begin with xla_tpu_ and so on


class Option(NamedTuple):
    name: str
    value: bool | int | str
    kinds: tuple[str, ...]  # prefixes of JAX's device_kind
    # also for a program of one device, which has no collectives to move
    on_one_device: bool = False
    cores: int = 1  # it needs so many of this process. The later of two options of one name wins
    with_adapters: bool = True  # also for a program whose matrices are frozen, next to adapters


# The releases of libtpu, the first and the last of those tried, whose compilers for `TRIED` take
# each of `OF_LIBTPU`. No older one works with this jaxlib.
LIBTPU = "0.0.35 to 0.0.52"
TRIED = ("v5e", "v5p", "v6e")
# Newer releases take it for v4, v5p and v6e, and then refuse a step that gathers. With 0.0.42.1 it
# changes no such step for v6e.
GATHERS = "xla_enable_async_all_gather"
# Options for TPUs that a config may want -> a value that these releases take.
# `python -m tests.proofs.options` tells what each changes in a program.
OF_LIBTPU: dict[str, bool | int] = {
    "xla_tpu_enable_latency_hiding_scheduler": True,
    "xla_enable_async_all_gather": True,
    "xla_tpu_enable_async_collective_fusion": True,
    "xla_tpu_enable_async_collective_fusion_fuse_all_gather": True,
    "xla_tpu_enable_async_collective_fusion_multiple_steps": False,
    "xla_tpu_scoped_vmem_limit_kib": 50000,
    "xla_tpu_overlap_compute_collective_tc": True,
    "xla_tpu_enable_sparse_core_collective_offload_all_gather": True,
    "xla_tpu_enable_sparse_core_collective_offload_all_reduce": True,
    "xla_tpu_enable_sparse_core_collective_offload_reduce_scatter": True,
    "xla_tpu_use_tc_device_shape_on_sc": True,
    "xla_tpu_enable_data_parallel_all_reduce_opt": True,
    "xla_tpu_data_parallel_opt_different_sized_ops": True,
    "xla_tpu_use_minor_sharding_for_major_trivial_input": True,
    "xla_tpu_relayout_group_size_threshold_for_reduce_scatter": 1,
    "xla_tpu_assign_all_reduce_scatter_layout": True,
    "xla_tpu_use_bundle_aware_cost_model_for_fusions": False,
    "xla_latency_hiding_scheduler_rerun": 2,
    "xla_jf_spmd_threshold_for_windowed_einsum_mib": 1000000,
}
TABLE = (
    # Products of one array with several matrices stay several. Merged into one, the matrices are
    # first written side by side, in every layer of every microbatch: with adapters next to the
    # frozen ones, that was half of a step's bytes. Without adapters nothing was seen to be merged.
    Option("xla_gpu_dot_merger_threshold_mb", 0, ("NVIDIA",), on_one_device=True),
    # XLA moves a product into the kernel that writes it to the activations of all layers. A product
    # that something else reads is then computed twice, as it also stays where it was (jax 0.11.2).
    # And some products read their layer's matrix in the array of all layers, but each of the others
    # then has a kernel for its slice, where one kernel makes those of all layers without this pass.
    # Adapters keep it: their products read slices of all frozen matrices in place. Runs that freeze
    # some matrices without adapters were not compared.
    Option(
        "xla_gpu_enable_dynamic_slice_fusion",
        False,
        ("NVIDIA",),
        on_one_device=True,
        with_adapters=False,
    ),
    # Collectives begin early and end late, with computation between. JAX has it off by default,
    # and NVIDIA's images of JAX turn it on.
    Option("xla_gpu_enable_latency_hiding_scheduler", True, ("NVIDIA",)),
    # Each large matrix's gradient is sent when it is there. Combined, the sums of a layer would
    # start at the end of the loop's body, with nothing left to compute. Small sums are combined,
    # as each exchange has a latency, up to so many bytes (docs/results/compiled-steps.md).
    Option("xla_gpu_reduce_scatter_combine_threshold_bytes", 2 << 20, ("NVIDIA",)),
    # The same for TPUs. Newer libtpu do so unasked (0.0.51: the same program), and without it no
    # gather of an FSDP step of the model on v5e was fused with a product.
    Option("xla_tpu_enable_latency_hiding_scheduler", True, ("TPU",)),
    # Gathers run inside the products that are scheduled between their begin and their end. Newer
    # libtpu do so unasked on v5e; on v4, v5p and v6e they refuse a step that gathers with it, as
    # "not supported".
    Option("xla_enable_async_all_gather", True, ("TPU v5 lite",)),
    Option("xla_tpu_enable_async_collective_fusion", True, ("TPU v5 lite",)),
    Option("xla_tpu_enable_async_collective_fusion_fuse_all_gather", True, ("TPU v5 lite",)),
    # But not through several of them, as libtpu does unasked: 0.0.42 then gives two of its buffers
    # one address, and refuses the step of the recursive model on 2×4 ("overlaps with another
    # chunk").
    Option("xla_tpu_enable_async_collective_fusion_multiple_steps", False, ("TPU v5 lite",)),
    # A product with a gathered matrix is not computed in a ring of permutes, one part of the matrix
    # at a time: that reads and writes its result in each round, the more the more devices there are
    # (docs/results/compiled-steps.md).
    Option("xla_jf_spmd_threshold_for_windowed_einsum_mib", 1000000, ("TPU",)),
    # YNNPACK's sums: a sum of squares without them is the squares, written, and two passes over
    # them. A step of a model with norms of 85 M numbers takes 1.3 times as long. And on several
    # cores its products of matrices, since XLA's own gain less by a second core (measured on two);
    # on one they are slower (docs/results/cpu-steps.md).
    Option(
        "xla_cpu_experimental_ynn_fusion_type",
        "LIBRARY_FUSION_TYPE_REDUCE",
        ("cpu",),
        on_one_device=True,
    ),
    Option(
        "xla_cpu_experimental_ynn_fusion_type",
        "LIBRARY_FUSION_TYPE_REDUCE,LIBRARY_FUSION_TYPE_DOT",
        ("cpu",),
        on_one_device=True,
        cores=2,
    ),
)


def defaults(kind: str, *, count: int, cores: int, has_adapters: bool = False) -> dict[str, Any]:
    """Return the table's options for ``count`` devices of a kind, in a process with ``cores``."""
    values: dict[str, Any] = {}
    for option in TABLE:
        if count <= 1 and not option.on_one_device:
            continue
        if has_adapters and not option.with_adapters:
            continue
        if kind.startswith(option.kinds) and cores >= option.cores:
            values[option.name] = option.value
    return values


def options(
    own: Mapping[str, Any],
    kind: str,
    *,
    count: int,
    device: jax.Device | None,
    has_adapters: bool = False,
) -> dict[str, Any]:
    """Return options for ``count`` devices (``device_kind``): the table's, with ``own`` over them.

    Options of another platform in ``own`` are left out, and the log says so: one config may have
    those of several. Raises ConfigError with each of ``own`` that the compiler refuses.

    Args:
      device: whose compiler is asked, which need not exist; None = none is.
      has_adapters: whether a program's matrices are frozen, next to adapters.
    """
    if kind.startswith("TPU"):
        platform = "tpu"
    else:
        platform = "cpu" if kind == "cpu" else "gpu"
    other_platforms = tuple(f"xla_{name}_" for name in PLATFORMS if name != platform)
    ours = {}
    elsewhere = []
    for name, value in own.items():
        is_for_tpus = name in OF_LIBTPU
        if name.startswith(other_platforms) or (is_for_tpus and platform != "tpu"):
            elsewhere.append(name)
        else:
            ours[name] = _value(value)
    if elsewhere:
        log.info("compiler options that are not for %s: %s", kind, ", ".join(sorted(elsewhere)))
    cores = machine.cores()
    all_options = defaults(kind, count=count, cores=cores, has_adapters=has_adapters) | ours
    if device is None:
        return all_options
    refusals = _refusals(all_options, device)
    problems = []
    for name, reason in refusals.items():
        if name in ours:
            problem = (
                f"is {own[name]!r}, and {_compiler_of(kind)} refuses it: {reason}"
                f"{_taken(name, kind)}; correct it, or omit it"
            )
            problems.append((f"compiler.{name}", problem))
    if problems:
        raise ConfigError(problems)
    for name, reason in refusals.items():
        compiler = _compiler_of(kind)
        taken = _taken(name, kind)
        log.warning("compiled without %s, which %s refuses: %s%s", name, compiler, reason, taken)
    return {name: value for name, value in all_options.items() if name not in refusals}


def _compiler_of(kind: str) -> str:
    """Name a compiler, that of TPUs with its version, which is not that of JAX."""
    name = f"the compiler for {kind}"
    if kind.startswith("TPU") and machine.has_package("libtpu"):
        name += f", libtpu {importlib.metadata.version('libtpu')},"
    return name


def _taken(name: str, kind: str) -> str:
    """Say which releases of libtpu take an option, "" if that is unknown."""
    chip = chips.find(kind)
    tried = TRIED if name != GATHERS else ("v5e",)
    if name not in OF_LIBTPU or not chip or chip.name not in tried:
        return ""
    return f"; libtpu {LIBTPU} take {name}={OF_LIBTPU[name]}"


def compile(
    lowered: jax.stages.Lowered, options: Mapping[str, Any], own: Mapping[str, Any]
) -> jax.stages.Compiled:
    """Compile with ``options``, of which ``own`` are the config's and the others this module's.

    An option that suits a program of no size can break a compiler on a larger one. If the compiler
    fails, it tries again without this module's, then without one of them at a time, and the log
    says so. Raises ConfigError if the options in ``own`` alone make it fail, with the name of the
    one without which it does not. A step that fails without options, and a program that is too
    large (RESOURCE_EXHAUSTED), are a JaxRuntimeError.
    """
    own_options = {name: value for name, value in options.items() if name in own}
    of_table = [name for name in options if name not in own_options]
    try:
        return _compile(lowered, options)
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" in str(error) or not options:
            raise
        failure = error
    reason = first_line(failure)
    program = _compiled(lowered, own_options) if of_table else None
    if program:
        return _without_least(lowered, options, of_table, program, reason)
    for name, value in own_options.items():
        others = {other: own_options[other] for other in own_options if other != name}
        if _compiled(lowered, others):
            raise _config_error({name: value}, reason) from failure
    if len(own_options) > 1 and _compiled(lowered, {}):
        raise _config_error(own_options, reason) from failure
    raise failure


def _without_least(
    lowered: jax.stages.Lowered,
    options: Mapping[str, Any],
    of_table: list[str],
    program: jax.stages.Compiled,
    reason: str,
) -> jax.stages.Compiled:
    """Compile without one option of the table. Returns ``program``, without all, if none will."""
    left_out = ", ".join(of_table)
    for name in of_table if len(of_table) > 1 else ():
        others = {other: options[other] for other in options if other != name}
        with contextlib.suppress(jax.errors.JaxRuntimeError):  # too large, or at fault as well
            program, left_out = _compile(lowered, others), name
            break
    log.warning(
        "compiled without %s, with which %s fails: %s", left_out, _compiler_for(options), reason
    )
    return program


def _compiled(
    lowered: jax.stages.Lowered, options: Mapping[str, Any]
) -> jax.stages.Compiled | None:
    """Return None if the compiler fails, but raise JaxRuntimeError for a program too large."""
    try:
        return _compile(lowered, options)
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" in str(error):
            raise
    return None


def _compiler_for(options: Mapping[str, Any]) -> str:
    """Name the compiler that takes options, that of TPUs with its version."""
    if any(name in OF_LIBTPU or name.startswith("xla_tpu_") for name in options):
        return _compiler_of("TPUs").removesuffix(",")
    return "this compiler"


def _config_error(own: Mapping[str, Any], reason: str) -> ConfigError:
    known = ""
    if GATHERS in own and "UNIMPLEMENTED" in reason:
        known = (
            f"; newer libtpu refuse {GATHERS} for a step that gathers on v4, v5p and v6e,"
            " and 0.0.42 takes it on v6e"
        )
    problem = (
        f"is {dict(own)}, and with it {_compiler_for(own)} does not compile a step:"
        f" {reason}{known}; remove the option that causes it"
    )
    return ConfigError([("compiler", problem)])


def _compile(lowered: jax.stages.Lowered, options: Mapping[str, Any]) -> jax.stages.Compiled:
    with warnings.catch_warnings():
        # Programs compiled for other devices can be cached, but not be read from the cache.
        warnings.filterwarnings("ignore", "Error reading persistent compilation cache")
        try:
            return lowered.compile(compiler_options=dict(options))
        except (TypeError, ValueError):
            if not set(COMPILER_LEVELS) & set(options):
                raise
            # older releases of JAX have numbers for the levels
            numbers = {name: _number(name, value) for name, value in options.items()}
            return lowered.compile(compiler_options=numbers)


def _refusals(options: Mapping[str, Any], device: jax.Device) -> dict[str, str]:
    """Option -> why the device's compiler will not have it."""
    if not options:
        return {}
    x = jax.ShapeDtypeStruct((), jnp.float32, sharding=SingleDeviceSharding(device))
    lowered = jax.jit(lambda x: x + 1).trace(x).lower()

    def refusal(options: Mapping[str, Any]) -> str:
        try:
            _compile(lowered, options)
        except jax.errors.JaxRuntimeError as error:
            return first_line(error).rstrip(": ")
        return ""

    if not refusal(options):
        return {}
    reasons = {name: refusal({name: value}) for name, value in options.items()}
    return {name: reason for name, reason in reasons.items() if reason}


def _number(name: str, value: Any) -> Any:
    """Return XLA's number of a level, and any other option's value as it is."""
    return 10 * LEVELS.index(value) + 9 if name in COMPILER_LEVELS else value


def _value(value: Any) -> Any:
    """Convert a value of a command line or a file. XLA takes switches as booleans alone."""
    if not isinstance(value, str):
        return value
    return {"true": True, "false": False}.get(value.lower(), str(value))
