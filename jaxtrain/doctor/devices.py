"""A process's devices (jax, driver, a known product), in a subprocess that ends before a run."""

import os
import pathlib
import shutil
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from jaxtrain.doctor.check import Check, Found, fail, ok, warn
from jaxtrain.telemetry.console import in_bytes
from loaders.io import machine

GROUP = "devices"
QUERIED = "index,driver_version,memory.used,memory.total,ecc.errors.uncorrected.volatile.total"
GOOGLE = "0x1ae0"  # the vendor's number on the PCI bus
CHOOSE = ("CUDA_VISIBLE_DEVICES", "JAX_CUDA_VISIBLE_DEVICES")  # a user's own choice of GPUs
USED = 0.05  # [share] of a device's memory that others may hold
SECONDS = 1.0  # [s] of products on each device
MISSING = "install jax for them: pip install 'jaxtrain[cuda12]', [cuda13] or [tpu]; see nvidia-smi"


def examine(*, local: list[int]) -> Found:
    """Check the devices. ``local``: ordinals of the process's own GPUs (none = all visible)."""
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    checks = list(_driver(local))
    import jax

    if local:
        jax.config.update("jax_cuda_visible_devices", ",".join(map(str, local)))
    try:
        devices = jax.local_devices()
    except Exception as error:  # noqa: BLE001  a plugin may raise anything
        asked = os.environ.get("JAX_PLATFORMS")
        text = f"jax finds no device{f' with JAX_PLATFORMS={asked}' if asked else ''}: {error!s}"
        return [*checks, fail(GROUP, "jax", text, f"{MISSING}, CUDA_VISIBLE_DEVICES")], {}
    checks += [_found(devices, local), *_products(devices)]
    return checks, {"devices": {"count": len(devices), "kind": devices[0].device_kind}}


def _found(
    devices: Sequence[Any], local: Sequence[int], environment: Mapping[str, str] = os.environ
) -> Check:
    """Compare the devices of jax with those of the machine, and of the launcher."""
    platform, text = devices[0].platform, f"{len(devices)} × {devices[0].device_kind}"
    gpus, tpus = accelerators()
    remedy = "see CUDA_VISIBLE_DEVICES and the launcher's --gpus-per-task, --gpu-bind"
    allotted = environment.get("SLURM_GPUS_ON_NODE", "")
    given = int(allotted) if allotted.isdecimal() else 0
    if platform == "cpu" and "cpu" not in environment.get("JAX_PLATFORMS", "") and gpus + tpus:
        there = f"{gpus} GPUs" if gpus else f"{tpus} TPU chips"
        return fail(GROUP, "jax", f"jax computes on the CPU, and this machine has {there}", MISSING)
    if local and len(devices) != len(local):
        return fail(
            GROUP, "jax", f"{text}, and the launcher gave {len(local)} to this process", remedy
        )
    if (
        local
        or platform not in ("gpu", "cuda")
        or any(environment.get(name) is not None for name in CHOOSE)
    ):
        return ok(GROUP, "jax", text)
    if given and len(devices) != given:
        return fail(
            GROUP,
            "jax",
            f"{text}, and SLURM gave {given} to this node (SLURM_GPUS_ON_NODE)",
            remedy,
        )
    if not given and len(devices) < gpus:
        remedy = "see nvidia-smi, dmesg (Xid), and which of /dev/nvidia* this container may open"
        return fail(GROUP, "jax", f"{text}, and this machine has {gpus} (/dev/nvidia*)", remedy)
    return ok(GROUP, "jax", text)


def accelerators(system: str = "/sys") -> tuple[int, int]:
    """Count the NVIDIA GPUs and TPU chips that the drivers show."""
    paths = machine.accelerators()
    tpus = [path for path in paths if path.name.startswith("accel")]
    for group in (path for path in paths if path.parent.name == "vfio"):
        folder = pathlib.Path(system, "kernel/iommu_groups", group.name, "devices")
        if any(file.read_text().strip() == GOOGLE for file in folder.glob("*/vendor")):
            tpus.append(group)
    return sum(path.name.startswith("nvidia") for path in paths), len(tpus)


def _driver(local: Sequence[int]) -> Iterator[Check]:
    """Judge the answer of nvidia-smi on this process's GPUs, before jax takes their memory."""
    if not accelerators()[0] and not shutil.which("nvidia-smi"):
        return
    rows, problem = query()
    if problem:
        remedy = "install the driver, or start the container with it: docker run --gpus=all"
        yield fail(GROUP, "driver", f"nvidia-smi: {problem}", remedy)
    unread = set()
    for i, (index, _, used, total, errors) in enumerate(rows):
        if local and i not in local:
            continue
        if not (used + total).isdecimal():
            unread.add("memory in use")
        elif int(used) > USED * int(total):
            text = f"{in_bytes(2**20 * int(used))} of {in_bytes(2**20 * int(total))} are in use"
            remedy = "end the process: nvidia-smi --query-compute-apps=pid,name,used_memory"
            yield warn(GROUP, "memory", f"GPU {index}: {text}", f"{remedy} --format=csv")
        if not errors.isdecimal():
            unread.add("memory errors")
        elif int(errors):
            text = f"GPU {index} has had {errors} memory errors that could not be corrected"
            remedy = "reset it (nvidia-smi --gpu-reset) or have it replaced; leave this host out"
            yield fail(GROUP, "ECC", text, remedy)
    if rows:
        more = f"; not readable: {', '.join(sorted(unread))}" if unread else ""
        yield ok(
            GROUP,
            "driver",
            f"{rows[0][1]}, of {len(rows)} GPUs memory in use and memory errors{more}",
        )


def query() -> tuple[list[list[str]], str]:
    """Ask nvidia-smi for `QUERIED` of each visible GPU. Returns the rows, and the problem or ""."""
    command = ["nvidia-smi", f"--query-gpu={QUERIED}", "--format=csv,noheader,nounits"]
    if visible := os.environ.get("CUDA_VISIBLE_DEVICES"):
        command.append(f"--id={visible}")
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired) as error:
        return [], getattr(error, "strerror", None) or "no answer within 20 s"
    if done.returncode:
        return [], (done.stdout + done.stderr).strip().partition("\n")[0]
    return [[x.strip() for x in line.split(",")] for line in done.stdout.splitlines()], ""


def _products(devices: Sequence[Any]) -> Iterator[Check]:
    """Compute a product of integers on every device, which is exact also in TF32 and bfloat16."""
    import jax

    side = 256 if devices[0].platform == "cpu" else 2048
    a, b = np.random.default_rng(0).integers(-4, 5, (2, side, side)).astype(np.float32)
    product, expected, rounds, well = jax.jit(lambda a, b: a @ b), a @ b, 0, True
    for device in devices:
        try:
            on_device = [jax.device_put(x, device) for x in (a, b)]
            until, n, right = time.perf_counter() + min(SECONDS, 8 / len(devices)), 0, True
            while right and (n < 2 or time.perf_counter() < until):
                right, n = np.array_equal(product(*on_device), expected), n + 1
            rounds += n
        except RuntimeError as error:
            yield fail(
                GROUP,
                "product",
                f"{device} failed: {error}",
                "see dmesg (Xid), reset the device, or leave it out",
            )
            well = False
            continue
        if not right:
            remedy = "leave it out, and have it replaced: its results cannot be trusted"
            yield fail(
                GROUP, "product", f"{device} computed a product of small integers wrongly", remedy
            )
        well &= right
    if well:
        yield ok(
            GROUP,
            "product",
            f"{rounds} products of {side} × {side} on {len(devices)} devices are exact",
        )
