"""A process's devices (jax, driver, a known product), in a subprocess that ends before a run."""

import functools
import os
import pathlib
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxtrain.doctor.check import Check, Findings, fail, ok, warn
from jaxtrain.telemetry.console import in_bytes
from loaders.io import machine

GROUP = "devices"
QUERIED = "index,driver_version,memory.used,memory.total,ecc.errors.uncorrected.volatile.total"
GOOGLE = "0x1ae0"  # the vendor's number on the PCI bus
CHOOSE = ("CUDA_VISIBLE_DEVICES", "JAX_CUDA_VISIBLE_DEVICES")  # a user's own choice of GPUs
MAX_IN_USE = 0.05  # [share] of a device's memory that others may hold
SECONDS = 1.0  # [s] of products on each device
OPTIONS = "unset these variables, or the options that the program sets"
MISSING = "install jax for them: pip install 'jaxtrain[cuda12]', [cuda13] or [tpu]; see nvidia-smi"


class _Gpu(NamedTuple):
    """A line of nvidia-smi with the columns `QUERIED`. A card may lack some of them."""

    ordinal: str
    driver: str
    memory_used: str  # [MiB]
    memory_total: str  # [MiB]
    ecc_errors: str


def examine(*, local: list[int]) -> Findings:
    """Check the devices. ``local``: ordinals of the process's own GPUs (none = all visible)."""
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    checks = list(_check_driver(local))
    import jax

    from jaxtrain.parallel import jax_options

    for problem in jax_options.problems():
        checks.append(fail(GROUP, "options", problem, OPTIONS))
    if jax_options.unreadable_flags(os.environ.get("XLA_FLAGS", "")):
        return Findings(checks, {})  # looking for devices would end this process
    jax_options.see_only(local)
    try:
        devices = jax.local_devices()
        jax_options.refuse_algorithm(devices)
    except jax_options.JaxOptionError as error:
        checks.append(fail(GROUP, "options", str(error), OPTIONS))
        return Findings(checks, {})
    except Exception as error:  # noqa: BLE001  a plugin may raise anything
        remedy = f"{MISSING}, CUDA_VISIBLE_DEVICES"
        checks.append(fail(GROUP, "jax", jax_options.without_devices(error), remedy))
        return Findings(checks, {})
    checks.append(_check_count(devices, local))
    checks += _check_products(devices)
    return Findings(checks, {"count": len(devices), "kind": devices[0].device_kind})


def _check_count(
    devices: Sequence[Any], local: Sequence[int], environment: Mapping[str, str] = os.environ
) -> Check:
    """Compare the devices of jax with those of the machine, and of the launcher."""
    platform = devices[0].platform
    text = f"{len(devices)} × {devices[0].device_kind}"
    gpus, tpus = accelerators()
    remedy = "see CUDA_VISIBLE_DEVICES and the launcher's --gpus-per-task, --gpu-bind"
    if platform == "cpu" and "cpu" not in environment.get("JAX_PLATFORMS", "") and gpus + tpus:
        unused = f"{gpus} GPUs" if gpus else f"{tpus} TPU chips"
        text = f"jax computes on the CPU, and this machine has {unused}"
        return fail(GROUP, "jax", text, MISSING)
    if local and len(devices) != len(local):
        text += f", and the launcher gave {len(local)} to this process"
        return fail(GROUP, "jax", text, remedy)
    chosen = any(environment.get(name) is not None for name in CHOOSE)
    if local or chosen or platform not in ("gpu", "cuda"):
        return ok(GROUP, "jax", text)
    allotted = environment.get("SLURM_GPUS_ON_NODE", "")
    n_allotted = int(allotted) if allotted.isdecimal() else 0
    if n_allotted and len(devices) != n_allotted:
        text += f", and SLURM gave {n_allotted} to this node (SLURM_GPUS_ON_NODE)"
        return fail(GROUP, "jax", text, remedy)
    if not n_allotted and len(devices) < gpus:
        text += f", and this machine has {gpus} (/dev/nvidia*)"
        remedy = "see nvidia-smi, dmesg (Xid), and which of /dev/nvidia* this container may open"
        return fail(GROUP, "jax", text, remedy)
    return ok(GROUP, "jax", text)


def accelerators(system: str = "/sys") -> tuple[int, int]:
    """Count the NVIDIA GPUs and TPU chips that the drivers show."""
    paths = machine.accelerators()
    n_gpus = sum(path.name.startswith("nvidia") for path in paths)
    n_tpus = sum(path.name.startswith("accel") for path in paths)
    for path in paths:
        if path.parent.name == "vfio" and _is_tpu(path.name, system):
            n_tpus += 1
    return n_gpus, n_tpus


def _is_tpu(iommu_group: str, system: str) -> bool:
    folder = pathlib.Path(system, "kernel/iommu_groups", iommu_group, "devices")
    return any(file.read_text().strip() == GOOGLE for file in folder.glob("*/vendor"))


def _check_driver(local: Sequence[int]) -> Iterator[Check]:
    """Judge the answer of nvidia-smi on this process's GPUs, before jax takes their memory."""
    n_gpus, _ = accelerators()
    if not n_gpus and not shutil.which("nvidia-smi"):
        return
    gpus, problem = _query()
    if problem:
        remedy = "install the driver, or start the container with it: docker run --gpus=all"
        yield fail(GROUP, "driver", f"nvidia-smi: {problem}", remedy)
    unreadable = set()
    for i, gpu in enumerate(gpus):
        if local and i not in local:
            continue
        if not (gpu.memory_used + gpu.memory_total).isdecimal():
            unreadable.add("memory in use")
        elif int(gpu.memory_used) > MAX_IN_USE * int(gpu.memory_total):
            yield _in_use(gpu)
        if not gpu.ecc_errors.isdecimal():
            unreadable.add("memory errors")
        elif int(gpu.ecc_errors):
            errors = f"{gpu.ecc_errors} memory errors that could not be corrected"
            remedy = "reset it (nvidia-smi --gpu-reset) or have it replaced; leave this host out"
            yield fail(GROUP, "ECC", f"GPU {gpu.ordinal} has had {errors}", remedy)
    if gpus:
        text = f"{gpus[0].driver}, of {len(gpus)} GPUs memory in use and memory errors"
        if unreadable:
            text += f"; not readable: {', '.join(sorted(unreadable))}"
        yield ok(GROUP, "driver", text)


def _in_use(gpu: _Gpu) -> Check:
    used = in_bytes(2**20 * int(gpu.memory_used))
    total = in_bytes(2**20 * int(gpu.memory_total))
    processes = "nvidia-smi --query-compute-apps=pid,name,used_memory --format=csv"
    text = f"GPU {gpu.ordinal}: {used} of {total} are in use"
    return warn(GROUP, "memory", text, f"end the process: {processes}")


def _query() -> tuple[list[_Gpu], str]:
    """Ask nvidia-smi for each visible GPU. Returns the GPUs, and the problem or ""."""
    command = ["nvidia-smi", f"--query-gpu={QUERIED}", "--format=csv,noheader,nounits"]
    if visible := os.environ.get("CUDA_VISIBLE_DEVICES"):
        command.append(f"--id={visible}")
    try:
        completed = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired) as error:
        return [], getattr(error, "strerror", None) or "no answer within 20 s"
    if completed.returncode:
        output = completed.stdout + completed.stderr
        return [], output.strip().partition("\n")[0]
    rows = [line.split(",") for line in completed.stdout.splitlines()]
    return [_Gpu(*(value.strip() for value in row)) for row in rows], ""


def _check_products(devices: Sequence[Any]) -> Iterator[Check]:
    """Compute a product of integers on every device, which is exact also in TF32 and bfloat16."""
    import jax

    side = 256 if devices[0].platform == "cpu" else 2048
    integers = np.random.default_rng(0).integers(-4, 5, (2, side, side))
    a, b = integers.astype(np.float32)
    product = jax.jit(lambda a, b: a @ b)
    expected = a @ b
    seconds = min(SECONDS, 8 / len(devices))
    n_products = 0
    all_exact = True
    for device in devices:
        try:
            factors = jax.device_put((a, b), device)
            n_tried, exact = _repeat(functools.partial(product, *factors), expected, seconds)
        except RuntimeError as error:
            remedy = "see dmesg (Xid), reset the device, or leave it out"
            yield fail(GROUP, "product", f"{device} failed: {error}", remedy)
            all_exact = False
            continue
        n_products += n_tried
        all_exact &= exact
        if not exact:
            text = f"{device} computed a product of small integers wrongly"
            remedy = "leave it out, and have it replaced: its results cannot be trusted"
            yield fail(GROUP, "product", text, remedy)
    if all_exact:
        text = f"{n_products} products of {side} × {side} on {len(devices)} devices are exact"
        yield ok(GROUP, "product", text)


def _repeat(compute: Callable[[], Any], expected: np.ndarray, seconds: float) -> tuple[int, bool]:
    """Compute twice at least, until ``seconds`` are over or a result is wrong: (count, exact)."""
    deadline = time.perf_counter() + seconds
    n_tried = 0
    while n_tried < 2 or time.perf_counter() < deadline:
        n_tried += 1
        if not np.array_equal(compute(), expected):
            return n_tried, False
    return n_tried, True
