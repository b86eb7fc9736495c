"""The settings that decide numbers besides the config: JAX's options, and the flags of XLA.

A run records them (`recorded`), by the variables of the environment that set them. They are
compared when a run resumes (`changes`), between its processes, and by `jaxtrain diff` and `jaxtrain
replay`. Some options are of no use to any program here, and are refused (`require`).

Each option of JAX is in one of the tables below. One of a newer JAX is in none: it is recorded if
the environment sets it.
"""

import enum
import functools
import os
import pathlib
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax

from jaxtrain.config import ENVIRONMENT, Change
from loaders.io.checks import FREE, FUNCTION, UserError, expected, first_line, flatten

PLATFORMS = ("cpu", "cuda", "rocm", "tpu")  # of JAX_PLATFORMS
# Other random draws, or other dtypes of the same functions: the run would be another one.
OF_THE_RUN = (
    "jax_default_matmul_precision",
    "jax_default_prng_impl",
    "jax_explicit_x64_dtypes",
    "jax_high_dynamic_range_gumbel",
    "jax_random_seed_offset",
    "jax_threefry_partitionable",
)
# Other programs for the same functions, whose last bits may differ: recorded if they do not have
# these values.
OF_ROUNDING: Mapping[str, Any] = {
    "check_vma": False,
    "eager_constant_folding": False,
    "jax_allow_f16_reductions": True,
    "jax_auto_pcast": True,
    "jax_bcoo_cusparse_lowering": False,
    "jax_compiler_enable_remat_pass": True,
    "jax_custom_jvp3": False,
    "jax_custom_vjp3": False,
    "jax_disable_most_optimizations": False,
    "jax_enable_custom_prng": False,
    "jax_enable_pgle": False,
    "jax_exec_time_optimization_effort": 0.0,
    "jax_memory_fitting_effort": 0.0,
    "jax_memory_fitting_level": "O2",
    "jax_optimization_level": "UNKNOWN",
    "jax_pallas_use_mosaic_gpu": True,
    "jax_ragged_dot_use_gpu_pallas_triton_lowering": False,
    "jax_ragged_dot_use_ragged_dot_instruction": True,
    "jax_refs_to_pins": False,
    "jax_remat3": False,
    "jax_remat_barrier_no_cotangents": False,
    "jax_remove_size_one_mesh_axis_from_type": False,
    "jax_scan3": False,
    "jax_softmax_custom_jvp": False,
    "jax_sort_devices_by_process_index": True,
    "jax_threefry_gpu_kernel_lowering": False,
    "jax_use_direct_linearize": True,
    "jax_use_emit_pipeline_primitive": False,
    "jax_use_hlo_logistic_lowering": None,
    "jax_use_magma": "auto",
    "jax_use_rgv3": True,
    "jax_use_shardy_partitioner": True,
    "jax_use_simplified_jaxpr_constants": False,
    "jax_xla_profile_version": 0,
}
# Logs, checks, caches, connections, devices, and exports of other libraries.
WITHOUT_EFFECT = re.compile(
    r"jax2tf_\w+|mock_num_gpu_processes|jax_("
    r"array_garbage_collection_guard|backend_target|captured_constants_\w+|check_\w+"
    r"|compilation_cache_\w+|compiler_detailed_logging_\w+|cpu_\w+|cross_host_\w+"
    r"|debug_(key_reuse|leaked|log)\w*"
    r"|default_device|disable_(bwd_checks|vmap_shmap_error)|disallow_mesh_context_manager"
    r"|distributed_\w+|dump_\w+|embedded_constants_max_bytes"
    r"|enable_(checks|compilation_cache|preemption_service|recoverability)"
    r"|experimental_unsafe_xla_runtime_errors|explain_cache_misses|export_\w+"
    r"|force_dcn_cross_host_transfers|hlo_source_\w+|include_\w+|legacy_prng_key|log_\w+"
    r"|logging_level|mock_\w+|mosaic_allow_hlo|mtls_\w+|mutable_array_checks|num_cpu_devices"
    r"|numpy_rank_promotion|pallas_(auto_assign|enable_debug|poison|verbose)\w+"
    r"|persistent_cache_\w+|pgle_\w+|pjrt_client_create_options|platform_name|platforms"
    r"|pprint_\w+|raise_\w+|remove_custom_partitioning_ptr_from_cache_key"
    r"|send_traceback_to_runtime|serialization_version|share_binary_\w+|source_url_schema"
    r"|thread_guard|trace\w+|transfer_guard\w*|use_cpp_shard_args|\w+_visible_devices|xla_backend)"
)
# name -> the value without which no run is possible, and the reason
REQUIRED: Mapping[str, tuple[Any, str]] = {
    "jax_debug_infs": (
        False,
        "norms that no record needs are not finite; config.guard checks every step",
    ),
    "jax_debug_nans": (False, "norms that no record needs are NaN; config.guard checks every step"),
    "jax_disable_jit": (False, "each step is compiled before it runs"),
    "jax_enable_x64": (False, "the numbers of parameters and programs have 32 bits"),
    "jax_error_checking_behavior_divide": ("ignore", "its checks fail in loops over rows"),
    "jax_error_checking_behavior_nan": ("ignore", "its checks fail in loops over rows"),
    "jax_error_checking_behavior_oob": ("ignore", "its checks fail in loops over rows"),
    "jax_no_execution": (False, "with it nothing is computed"),
    "jax_no_tracing": (False, "each step is traced before it is compiled"),
    "jax_numpy_dtype_promotion": ("standard", "models multiply numbers of several dtypes"),
}
# flags of XLA that print, wait, or name files, and the number of devices, which a mesh has
SILENT_FLAGS = re.compile(
    r"xla_(dump|detailed_logging|hlo_profile|force_host_platform_device_count"
    r"|\w*(timeout|_dir$|_path$|_file$|_log)|gpu_(dump|load)_autotune)|v$|vmodule|minloglevel"
)
# known flags, for which no process is started
COMMON_FLAGS = re.compile(r"--xla_force_host_platform_device_count=\d+")
READ_FLAGS = "from jaxlib import _jax; _jax.CompileOptions()"
# the lines of XLA about flags that it cannot read, and ours
FLAG_ERRORS = (
    (
        r"Unknown flags? in XLA_FLAGS: (.*)",
        "XLA_FLAGS has {0}, which this version of XLA does not know: correct or remove it",
    ),
    (
        r"Could not open file \"(.*?)\" to read flags",
        "XLA_FLAGS names the file {0}, which cannot be read: correct it, or begin flags with --",
    ),
    (
        r"Couldn't interpret value (.*?)\.?\n",
        "XLA_FLAGS has the value {0}, which XLA cannot read: correct or remove it",
    ),
)
PRECISIONS = ("default", "high", "highest", "bfloat16", "tensorfloat32", "float32")
FLAGS = ("XLA_FLAGS", "LIBTPU_INIT_ARGS")
# of the libraries below XLA: other algorithms for the same product or sum
VARIABLES = ("CUBLAS_WORKSPACE_CONFIG", "NCCL_ALGO", "NCCL_PROTO", "NVIDIA_TF32_OVERRIDE")


class JaxOptionError(UserError, ValueError):
    """Settings of JAX with which nothing can be computed. The message has all of them."""

    def __init__(self, problems: list[str]):
        self.problems = tuple(problems)
        if len(problems) == 1:
            super().__init__(problems[0])
        else:
            head = f"{len(problems)} of JAX's options cannot be used:"
            super().__init__("\n".join([head, *(f"  {problem}" for problem in problems)]))


def recorded() -> dict[str, Any]:
    """Return the settings of this process that may decide numbers, by their variables."""
    values = _values()
    settings = {name: values[name] for name in OF_THE_RUN if name in values}
    for name, value in values.items():
        is_known = name in OF_THE_RUN or name in REQUIRED or WITHOUT_EFFECT.fullmatch(name)
        if name in OF_ROUNDING:
            if value != OF_ROUNDING[name]:
                settings[name] = value
        elif not is_known and name.upper() in os.environ:
            settings[name] = value
    by_variable = {name.upper(): value for name, value in sorted(settings.items())}
    for name in VARIABLES:
        if name in os.environ:
            by_variable[name] = os.environ[name]
    for name in FLAGS:
        flags = _flags(os.environ.get(name, ""))
        if flags:
            by_variable[name] = flags
    return by_variable


def changes(saved: Mapping[str, Any] | None) -> list[Change]:
    """Return the settings that differ from ``saved``, those of a checkpoint. None: unknown."""
    if saved is None:
        return []
    always_recorded = {name.upper() for name in OF_THE_RUN}
    old, new = flatten(saved), flatten(recorded())
    differences = []
    for name in sorted({*old, *new}):
        is_of_the_run = name in always_recorded
        if is_of_the_run and not (name in old and name in new):
            continue  # an option of another version of JAX
        if old.get(name) != new.get(name):
            kind = FUNCTION if is_of_the_run else FREE
            change = Change(f"{ENVIRONMENT}.{name}", kind, old.get(name), new.get(name))
            differences.append(change)
    return differences


def problems() -> Iterator[str]:
    """Yield a line for each setting with which nothing can be computed, with its remedy."""
    values = _values()
    for name, (required, reason) in REQUIRED.items():
        value = values.get(name, required)
        if value != required:
            yield f"{name.upper()} is {value!r}, and {reason}: unset it"
    yield from unreadable_flags(os.environ.get("XLA_FLAGS", ""))


@functools.lru_cache(maxsize=4)
def unreadable_flags(text: str) -> tuple[str, ...]:
    """Return a line if XLA cannot read its flags: it would end the process with its devices.

    A process of its own reads them, unless they are just the number of devices of a CPU.
    """
    if not text.strip() or COMMON_FLAGS.fullmatch(text.strip()):
        return ()
    command = [sys.executable, "-c", READ_FLAGS]
    environment = {**os.environ, "XLA_FLAGS": text}
    try:
        process = subprocess.run(
            command, env=environment, capture_output=True, timeout=60, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ()
    output = process.stderr.decode(errors="replace")
    for pattern, line in FLAG_ERRORS:
        if match := re.search(pattern, output):
            return (line.format(match[1].strip()),)
    return ()


def refuse_algorithm(devices: Sequence[jax.Device]) -> None:
    """Raise JaxOptionError for an algorithm of products that XLA does not have on CPUs.

    Some end the process, others are an error of the first program.
    """
    algorithm = str(_values().get("jax_default_matmul_precision") or "")
    is_preset = re.fullmatch(r"[A-Z0-9_]+", algorithm) and algorithm != "F32_F32_F32"
    if is_preset and any(device.platform == "cpu" for device in devices):
        raise JaxOptionError(
            [
                f"JAX_DEFAULT_MATMUL_PRECISION is {algorithm!r}, an algorithm that XLA does not"
                f" have on CPUs; write one of {', '.join(PRECISIONS)}, or unset it"
            ]
        )


def require() -> None:
    """Raise JaxOptionError for the settings with which nothing can be computed."""
    lines = list(problems())
    if lines:
        raise JaxOptionError(lines)


def devices() -> list[jax.Device]:
    """Return the devices of all processes. Raises JaxOptionError: JAX finds none, or fails."""
    try:
        found = jax.devices()
    except Exception as error:  # a plugin may raise anything
        raise JaxOptionError([without_devices(error)]) from error
    refuse_algorithm(found)
    return found


def see_only(ordinals: Sequence[int]) -> None:
    """Let JAX see only these of the visible GPUs, before it makes its devices. () = all."""
    if not ordinals:
        return
    options: Any = jax.config  # jax adds its options as it is imported
    for platform in ("cuda", "rocm"):
        options.update(f"jax_{platform}_visible_devices", ",".join(map(str, ordinals)))


def without_devices(error: Exception) -> str:
    """Return the line for an ``error`` of JAX that looked for devices."""
    platforms = _values().get("jax_platforms") or ""
    reason = first_line(error) if str(error) else "there is none"
    if not platforms:
        return f"JAX finds no device: {reason}; see `jaxtrain doctor`"
    problem = f"JAX finds no device with JAX_PLATFORMS={platforms}"
    names = platforms.split(",")
    if "gpu" in names:  # an alias, for which JAX wants the plugins of both
        return f"{problem}, which means cuda and rocm together; write one of them, or unset it"
    for name in names:
        if name not in PLATFORMS:
            return f"{problem}: {name!r} is unknown; {expected(name, PLATFORMS)}, or unset it"
    return (
        f"{problem}: {reason}; install jax for it (pip install 'jaxtrain[cuda12]', [cuda13] or"
        " [tpu]), or unset it"
    )


def _values() -> dict[str, Any]:
    """Return the value of each option of JAX, as JSON has it."""
    options: Any = jax.config  # jax adds its options as it is imported
    return {name: _plain(value) for name, value in options.values.items()}


def _plain(value: Any) -> Any:
    if isinstance(value, enum.Enum):
        return value.name.lower()
    if value is None or isinstance(value, bool | int | float | str):
        return value
    return str(value)


def _flags(text: str) -> dict[str, str]:
    """Return the flags of a variable, or of the file that it names, that may change numbers."""
    text = text.strip()
    if text and not text.startswith("-"):
        try:
            text = pathlib.Path(text).read_text()
        except (OSError, ValueError):
            return {}
    flags = {}
    for word in text.split():
        name, _, value = word.lstrip("-").partition("=")
        if name and not SILENT_FLAGS.match(name):
            flags[name] = value or "true"
    return dict(sorted(flags.items()))
