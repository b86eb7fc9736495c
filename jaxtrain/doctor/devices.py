"""The devices of a process: those that jax finds, their driver, a product with a known result.

It runs in a process of its own (`jaxtrain.doctor.apart`), which ends before a run needs the devices.
"""

import os
import pathlib
import re
import shutil
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from jaxtrain.doctor.check import Check, fail, in_bytes, ok, warn
from loaders.io import machine

GROUP = "devices"
ERRORS, ACTIVE = "ecc.errors.uncorrected.volatile.total", "clocks_throttle_reasons.active"
QUERIED = f"index,driver_version,memory.used,memory.total,{ERRORS}"
THROTTLED = {0x8: "hardware slowdown", 0x20: "too hot", 0x40: "too hot", 0x80: "power brake"}
GOOGLE = "0x1ae0"  # the vendor's number on the PCI bus
CHOOSE = ("CUDA_VISIBLE_DEVICES", "JAX_CUDA_VISIBLE_DEVICES")  # a user's own choice of GPUs
USED = 0.05  # [share] of a device's memory that others may hold
SECONDS = 1.0  # [s] of products on each device
SIDE = {"cpu": 256}  # rows of the matrices; on accelerators:
LARGE = 2048
MISSING = "install jax for them: pip install 'jaxtrain[cuda12]', [cuda13] or [tpu]; then see nvidia-smi"


def examine(*, local: list[int]) -> tuple[list[Check], dict[str, Any]]:
    """Check the devices. ``local``: the ordinals of the process's own GPUs (none = all it sees)."""
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    checks = list(_driver(local))
    import jax

    if local:
        jax.config.update("jax_cuda_visible_devices", ",".join(map(str, local)))
    try:
        devices = jax.local_devices()
    except Exception as error:  # noqa: BLE001  a plugin may raise anything
        asked = os.environ.get("JAX_PLATFORMS")
        text = f"jax finds no device{f' with JAX_PLATFORMS={asked}' if asked else ''}"
        text += f": {str(error) or type(error).__name__}"
        return [*checks, fail(GROUP, "jax", text, f"{MISSING}, and CUDA_VISIBLE_DEVICES")], {}
    checks += [_found(devices, local), *_products(devices)]
    return checks, {"devices": {"count": len(devices), "kind": devices[0].device_kind}}


def _found(devices: Sequence[Any], local: Sequence[int], environment: Mapping[str, str] = os.environ) -> Check:
    """Compare the devices of jax with those that the machine has, and that the launcher gave."""
    platform, text = devices[0].platform, f"{len(devices)} × {devices[0].device_kind}"
    gpus, tpus = accelerators()
    remedy = "see CUDA_VISIBLE_DEVICES and the launcher's --gpus-per-task, --gpu-bind"
    allotted = environment.get("SLURM_GPUS_ON_NODE", "")
    given = int(allotted) if allotted.isdecimal() else 0
    chosen = any(environment.get(name) is not None for name in CHOOSE)
    if platform == "cpu" and "cpu" not in environment.get("JAX_PLATFORMS", "") and gpus + tpus:
        there = f"{gpus} GPUs" if gpus else f"{tpus} TPU chips"
        text = f"jax computes on the CPU, and this machine has {there}"
        return fail(GROUP, "jax", text, MISSING)
    if local and len(devices) != len(local):
        text += f", and the launcher gave {len(local)} to this process"
        return fail(GROUP, "jax", text, remedy)
    if local or chosen or platform not in ("gpu", "cuda"):
        return ok(GROUP, "jax", text)
    if given and len(devices) != given:
        text += f", and SLURM gave {given} to this node (SLURM_GPUS_ON_NODE)"
        return fail(GROUP, "jax", text, remedy)
    if not given and len(devices) < gpus:
        remedy = "see nvidia-smi, dmesg (Xid), and which of /dev/nvidia* this container may open"
        text += f", and this machine has {gpus} (/dev/nvidia*)"
        return fail(GROUP, "jax", text, remedy)
    return ok(GROUP, "jax", text)


def accelerators(system: str = "/sys") -> tuple[int, int]:
    """How many NVIDIA GPUs and TPU chips the drivers show.

    A group of /dev/vfio may be any device of a virtual machine: only those of Google's are TPUs.
    """
    paths = machine.accelerators()
    tpus = [path for path in paths if path.name.startswith("accel")]
    for group in (path for path in paths if path.parent.name == "vfio"):
        folder = pathlib.Path(system, "kernel/iommu_groups", group.name, "devices")
        if any(file.read_text().strip() == GOOGLE for file in folder.glob("*/vendor")):
            tpus.append(group)
    return sum(path.name.startswith("nvidia") for path in paths), len(tpus)


def _driver(local: Sequence[int]) -> Iterator[Check]:
    """Judge what nvidia-smi says of this process's GPUs, before jax takes memory of theirs."""
    if not accelerators()[0] and not shutil.which("nvidia-smi"):
        return
    rows, problem = query(QUERIED)
    if problem:
        remedy = "install the driver, or start the container with it: docker run --gpus=all"
        yield fail(GROUP, "driver", f"nvidia-smi: {problem}", remedy)
        return
    rows = [row for i, row in enumerate(rows) if not local or i in local]
    throttles = {row["index"]: row.get(ACTIVE, "") for row in query(f"index,{ACTIVE}")[0]}
    unread = set()
    for row in rows:
        used, total, errors = row["memory.used"], row["memory.total"], row[ERRORS]
        gpu, bits = f"GPU {row['index']}", throttles.get(row["index"], "")
        if not (used + total).isdecimal():
            unread.add("memory in use")
        elif int(used) > USED * int(total):
            text = f"{in_bytes(2**20 * int(used))} of {in_bytes(2**20 * int(total))} of {gpu} are in use"
            remedy = "end the process: nvidia-smi --query-compute-apps=pid,name,used_memory --format=csv"
            yield warn(GROUP, "memory", text, remedy)
        if not errors.isdecimal():
            unread.add("memory errors")
        elif int(errors):
            text = f"{gpu} has had {errors} memory errors that could not be corrected"
            remedy = "reset it (nvidia-smi --gpu-reset) or have it replaced; leave this host out"
            yield fail(GROUP, "ECC", text, remedy)
        if not re.fullmatch("0x[0-9a-fA-F]+", bits):
            unread.add("throttling")
        elif reasons := {text for bit, text in THROTTLED.items() if int(bits, 16) & bit}:
            text = f"{gpu} is slowed down: {', '.join(sorted(reasons))}"
            remedy = "see its cooling and power (nvidia-smi -q -d PERFORMANCE), or leave it out"
            yield warn(GROUP, "throttling", text, remedy)
    if rows:
        text = f"{rows[0]['driver_version']}, {len(rows)} GPUs: memory in use, errors, throttling"
        more = f"; not readable: {', '.join(sorted(unread))}" if unread else ""
        yield ok(GROUP, "driver", f"{text}{more}")


def query(fields: str) -> tuple[list[dict[str, str]], str]:
    """Ask nvidia-smi for a row of each visible GPU. Returns the rows, and the problem or ""."""
    command = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader,nounits"]
    if visible := os.environ.get("CUDA_VISIBLE_DEVICES"):
        command.append(f"--id={visible}")
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired) as error:
        return [], getattr(error, "strerror", None) or "no answer within 20 s"
    if done.returncode:
        return [], (done.stdout + done.stderr).strip().partition("\n")[0]
    names, lines = fields.split(","), [line.split(",") for line in done.stdout.splitlines()]
    return [dict(zip(names, map(str.strip, line), strict=False)) for line in lines], ""


def _products(devices: Sequence[Any]) -> Iterator[Check]:
    """Compute products with a known result on every device: a broken device is found."""
    import jax

    side = SIDE.get(devices[0].platform, LARGE)
    product, (a, b) = jax.jit(lambda a, b: a @ b), matrices(side)
    wrong, rounds = [], 0
    for device in devices:
        try:
            on_device = [jax.device_put(x, device) for x in (a, b)]
            began, n = time.perf_counter(), 0
            while n < 2 or time.perf_counter() - began < min(SECONDS, 8 / len(devices)):
                n += 1
                if not is_product(np.asarray(product(*on_device)), a, b):
                    wrong.append(str(device))
                    break
            rounds += n
        except RuntimeError as error:
            remedy = "see dmesg (Xid), reset the device, or leave it out"
            yield fail(GROUP, "product", f"{device} failed: {error}", remedy)
    if wrong:
        text = f"{', '.join(wrong)} computed a product of small integers wrongly"
        remedy = "leave this device out, and have it replaced: its results cannot be trusted"
        yield fail(GROUP, "product", text, remedy)
    elif rounds:
        text = f"{rounds} products of {side} × {side} on {len(devices)} devices are exact"
        yield ok(GROUP, "product", text)


def matrices(side: int) -> tuple[np.ndarray, np.ndarray]:
    """Matrices of integers up to 4. All sums are exact in float32, for TF32 or bfloat16 factors too."""
    random = np.random.default_rng(side)
    a, b = random.integers(-4, 5, (2, side, side))
    return a.astype(np.float32), b.astype(np.float32)


def is_product(c: np.ndarray, a: np.ndarray, b: np.ndarray, *, times: int = 24) -> bool:
    """Test c == a @ b, by Freivalds' algorithm: a wrong one passes with a probability of 2^-times."""
    if not np.isfinite(c).all() or (c != np.rint(c)).any():
        return False
    v = np.random.default_rng().integers(0, 2, (b.shape[1], times)).astype(np.float64)
    left, right = c.astype(np.float64) @ v, a.astype(np.float64) @ (b.astype(np.float64) @ v)
    return bool((left == right).all())  # exact: all sums are far below 2^53
