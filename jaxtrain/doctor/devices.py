"""The devices of a process: what jax finds, the driver, who else uses them, a product with a known result.

It runs in a process of its own (`jaxtrain.doctor.apart`), which ends before a run could want the same devices.
"""

import importlib.metadata
import os
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
QUERIED = "index,name,driver_version,memory.used,memory.total,temperature.gpu,ecc.errors.uncorrected.volatile.total"
ACTIVE, BITS = "clocks_throttle_reasons.active", "0x[0-9a-fA-F]+"
THROTTLED = {0x8: "hardware slowdown", 0x20: "too hot (software)", 0x40: "too hot (hardware)", 0x80: "power brake"}
DRIVERS = {"jax-cuda12-plugin": 525, "jax-cuda13-plugin": 580}  # the oldest driver that knows its CUDA
CHOOSE = ("CUDA_VISIBLE_DEVICES", "JAX_CUDA_VISIBLE_DEVICES")  # a user's own choice of GPUs
CHOOSE_TPUS = ("TPU_VISIBLE_CHIPS", "TPU_VISIBLE_DEVICES", "TPU_PROCESS_BOUNDS", "TPU_CHIPS_PER_PROCESS_BOUNDS")
USED = 0.05  # [share] of a device's memory that others may hold
SECONDS = 1.0  # [s] of products on each device
SIDE = {"cpu": 256}  # rows of the matrices; on accelerators:
LARGE = 2048


def examine(*, local: list[int]) -> tuple[list[Check], dict[str, Any]]:
    """Args: local: the ordinals of the process's own GPUs (none = all that it sees)."""
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    checks = list(_driver(local))
    facts: dict[str, Any] = {}
    import jax

    if local:
        jax.config.update("jax_cuda_visible_devices", ",".join(map(str, local)))
    try:
        devices = jax.local_devices()
    except Exception as error:  # noqa: BLE001  a plugin that is missing, or for another driver, raises whatever it likes
        asked = os.environ.get("JAX_PLATFORMS")
        text = f"jax finds no device{f' with JAX_PLATFORMS={asked}' if asked else ''}: {str(error) or type(error).__name__}"
        checks.append(fail(GROUP, "jax", text, _missing_remedy()))
        return checks, facts
    facts["devices"] = {"count": len(devices), "kind": devices[0].device_kind}
    checks += list(_found(devices, local))
    checks += list(_products(devices))
    return checks, facts


def _found(devices: Sequence[Any], local: Sequence[int], environment: Mapping[str, str] = os.environ) -> Iterator[Check]:
    platform, text = devices[0].platform, f"{len(devices)} × {devices[0].device_kind}"
    gpus, tpus, amd = _there()
    remedy = "see CUDA_VISIBLE_DEVICES and the launcher's --gpus-per-task, --gpu-bind"
    allotted = environment.get("SLURM_GPUS_ON_NODE", "")
    given = int(allotted) if allotted.isdecimal() else 0
    if platform == "cpu" and (gpus or tpus) and "cpu" not in environment.get("JAX_PLATFORMS", ""):
        what = f"{gpus} GPUs" if gpus else f"{tpus} TPU chips"
        yield fail(GROUP, "jax", f"jax computes on the CPU, and this machine has {what}", _missing_remedy())
    elif platform == "cpu" and amd and "cpu" not in environment.get("JAX_PLATFORMS", ""):
        more = "install jax's plugin for ROCm, or set JAX_PLATFORMS=cpu where the CPU is meant"
        yield warn(GROUP, "jax", "jax computes on the CPU, and this machine has an AMD GPU (/dev/kfd)", more)
    elif platform == "tpu" and 0 < (chips := _chips(devices)) < tpus and not any(name in environment for name in CHOOSE_TPUS):
        more = "see whether another process holds the others: fuser /dev/accel* /dev/vfio/*; and the logs in /tmp/tpu_logs"
        yield warn(GROUP, "jax", f"{text}, on {chips} chips, and this machine has {tpus} (/dev/accel*, /dev/vfio/*)", more)
    elif local and len(devices) != len(local):
        yield fail(GROUP, "jax", f"{text}, and the launcher gave {len(local)} to this process", remedy)
    elif local or platform not in ("gpu", "cuda") or any(environment.get(name) is not None for name in CHOOSE):
        yield ok(GROUP, "jax", text)  # nothing is known of how many there should be, or the user has chosen
    elif given and len(devices) != given:
        yield fail(GROUP, "jax", f"{text}, and SLURM gave {given} to this node (SLURM_GPUS_ON_NODE)", remedy)
    elif not given and len(devices) < gpus:
        more = "see nvidia-smi, dmesg (Xid), and which of /dev/nvidia* this container may open"
        yield fail(GROUP, "jax", f"{text}, and this machine has {gpus} (/dev/nvidia*)", more)
    else:
        yield ok(GROUP, "jax", text)


def _there() -> tuple[int, int, bool]:
    """How many NVIDIA GPUs and TPU chips the drivers show, and whether there is a GPU of AMD's.

    A group of /dev/vfio may be any device that is handed to a virtual machine: those on the PCI bus are counted, too.
    """
    paths = machine.accelerators()
    groups = sum(path.parent.name == "vfio" for path in paths)
    if groups:
        try:
            from jax._src import hardware_utils  # by which jax itself decides whether it looks for TPUs

            groups = min(groups, hardware_utils.num_available_tpu_chips_and_device_id()[0])
        except (ImportError, AttributeError, OSError):  # no public name has it
            groups = 0
    tpus = sum(path.name.startswith("accel") for path in paths) + groups
    return sum(path.name.startswith("nvidia") for path in paths), tpus, any(path.name == "kfd" for path in paths)


def _chips(devices: Sequence[Any]) -> int:
    """How many chips TPU devices are on: of some kinds a chip is two devices. 0 = not known."""
    places = {tuple(getattr(device, "coords", None) or ()) for device in devices}
    return 0 if () in places else len(places)


def _missing_remedy() -> str:
    return (
        "install jax for them: pip install 'jaxtrain[cuda12]', [cuda13] or [tpu]; then see nvidia-smi, and CUDA_VISIBLE_DEVICES"
    )


def _driver(local: Sequence[int]) -> Iterator[Check]:
    """What nvidia-smi says of this process's GPUs, before jax takes memory of theirs."""
    gpus, _, _ = _there()
    if not gpus and not shutil.which("nvidia-smi"):
        return
    rows, problem = query(QUERIED)
    if problem:
        remedy = "install the driver, or start the container with it: docker run --gpus=all, nvidia-container-toolkit"
        yield fail(GROUP, "driver", f"nvidia-smi: {problem}", remedy)
        return
    rows = own(rows, os.environ.get("CUDA_VISIBLE_DEVICES"), local)
    if rows:
        yield judge_driver(rows[0]["driver_version"], _plugins())
    for row in rows:
        yield from judge_gpu(row)
    reasons, _ = query(f"index,{ACTIVE}")
    reasons = own(reasons, os.environ.get("CUDA_VISIBLE_DEVICES"), local)
    if rows:
        yield _was_read(rows, reasons)
    for row in reasons:
        bits = row.get(ACTIVE, "")
        named = [text for bit, text in THROTTLED.items() if re.fullmatch(BITS, bits) and int(bits, 16) & bit]
        if named:
            text = f"GPU {row['index']} is slowed down: {', '.join(named)}"
            yield warn(
                GROUP, "throttling", text, "see to its cooling and power (nvidia-smi -q -d PERFORMANCE), or leave it out"
            )


def _was_read(rows: Sequence[Mapping[str, str]], reasons: Sequence[Mapping[str, str]]) -> Check:
    """What was read of the GPUs, and what could not be: else the silence on a healthy one could be either."""
    throttles = {row["index"]: row.get(ACTIVE, "") for row in reasons}
    readable = {
        "memory in use": [row["memory.used"].isdecimal() and row["memory.total"].isdecimal() for row in rows],
        "memory errors": [row["ecc.errors.uncorrected.volatile.total"].isdecimal() for row in rows],
        "throttling": [re.fullmatch(BITS, throttles.get(row["index"], "")) is not None for row in rows],
    }
    read = ", ".join(what for what, each in readable.items() if any(each)) or "nothing"
    unread = ", ".join(f"{what} of {each.count(False)}" for what, each in readable.items() if not all(each))
    return ok(GROUP, "state", f"of {len(rows)} GPUs: {read} read{f'; not readable: {unread}' if unread else ''}")


def query(fields: str) -> tuple[list[dict[str, str]], str]:
    """What nvidia-smi says: a row for each GPU; or what is wrong."""
    try:
        done = subprocess.run(
            ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader,nounits"], capture_output=True, text=True, timeout=20
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return [], getattr(error, "strerror", None) or "no answer within 20 s"
    if done.returncode:
        return [], (done.stdout + done.stderr).strip().partition("\n")[0]
    names = fields.split(",")
    return [dict(zip(names, map(str.strip, line.split(",")), strict=False)) for line in done.stdout.splitlines()], ""


def own(rows: list[dict[str, str]], visible: str | None, local: Sequence[int]) -> list[dict[str, str]]:
    """Of all GPUs of a machine those that CUDA_VISIBLE_DEVICES shows, by number, and of these those of the process."""
    if visible is not None:
        named = [name.strip() for name in visible.split(",") if name.strip()]
        if not all(name.isdecimal() for name in named):
            return rows if not local else []  # by UUID: which are whose is not told apart
        rows = [row for name in named for row in rows if row["index"] == name]
    return [rows[i] for i in local if i < len(rows)] if local else rows


def _plugins() -> dict[str, str]:
    found = {}
    for name in DRIVERS:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def judge_driver(driver: str, plugins: dict[str, str]) -> Check:
    """Whether a driver knows the CUDA of the installed plugins."""
    major = int(driver.split(".")[0]) if driver.split(".")[0].isdecimal() else 0
    if not plugins:
        return fail(GROUP, "driver", f"driver {driver}, and jax is installed without CUDA", _missing_remedy())
    for name, least in DRIVERS.items():
        if name in plugins and major < least:
            text = f"driver {driver} is too old for {name} {plugins[name]}, which needs {least} or newer"
            return fail(GROUP, "driver", text, "update the driver, or install jaxtrain[cuda12] (525 or newer)")
    return ok(GROUP, "driver", f"driver {driver}, {', '.join(f'{name} {version}' for name, version in plugins.items())}")


def judge_gpu(row: dict[str, str]) -> Iterator[Check]:
    """Memory in use and memory errors of one GPU, of a row of `query`."""
    used, total, errors = row["memory.used"], row["memory.total"], row["ecc.errors.uncorrected.volatile.total"]
    if used.isdecimal() and total.isdecimal() and int(used) > USED * int(total):
        text = f"{in_bytes(2**20 * int(used))} of {in_bytes(2**20 * int(total))} of GPU {row['index']} are in use already"
        yield warn(GROUP, "memory", text, "end who holds it: nvidia-smi --query-compute-apps=pid,name,used_memory --format=csv")
    if errors.isdecimal() and int(errors):
        text = f"GPU {row['index']} has had {errors} memory errors that could not be corrected"
        yield fail(GROUP, "ECC", text, "reset it (nvidia-smi --gpu-reset) or have it replaced; leave this host out until then")


def _products(devices: Sequence[Any]) -> Iterator[Check]:
    """Products on every device, for `SECONDS` each. Their result is known, so that a device that computes wrongly is found."""
    import jax

    side = SIDE.get(devices[0].platform, LARGE)
    product = jax.jit(lambda a, b: a @ b)
    wrong, rounds, slowest = [], 0, 0.0
    for device in devices:
        a, b = matrices(side)
        on_device = [jax.device_put(x, device) for x in (a, b)]
        try:
            jax.block_until_ready(product(*on_device))
            began, n = time.perf_counter(), 0
            while n < 2 or (time.perf_counter() - began < min(SECONDS, 8 / len(devices)) and n < 1000):
                found = product(*on_device)
                n += 1
                if not is_product(np.asarray(found), a, b):
                    wrong.append(str(device))
                    break
        except RuntimeError as error:
            yield fail(GROUP, "product", f"{device} failed: {error}", "see dmesg (Xid), reset the device, or leave it out")
            continue
        rounds, slowest = rounds + n, max(slowest, (time.perf_counter() - began) / n)
    if wrong:
        text = f"{', '.join(wrong)} computed a product of small integers wrongly"
        yield fail(GROUP, "product", text, "leave this device out, and have it replaced: its results cannot be trusted")
    elif rounds:
        yield ok(GROUP, "product", f"{rounds} products of {side} × {side} on {len(devices)} devices are exact")


def matrices(side: int) -> tuple[np.ndarray, np.ndarray]:
    """Integers of at most 4: each sum of ``side`` products is exact in float32, also where the factors are TF32 or bfloat16."""
    random = np.random.default_rng(side)
    a, b = random.integers(-4, 5, (2, side, side))
    return a.astype(np.float32), b.astype(np.float32)


def is_product(c: np.ndarray, a: np.ndarray, b: np.ndarray, *, times: int = 24) -> bool:
    """Whether ``c`` is a @ b, by Freivalds' test in integers: a wrong one passes with a probability of 2^-times."""
    if not np.isfinite(c).all() or (c != np.rint(c)).any():
        return False
    random = np.random.default_rng()
    v = random.integers(0, 2, (b.shape[1], times)).astype(np.float64)  # exact: all sums are far below 2^53
    return bool((c.astype(np.float64) @ v == a.astype(np.float64) @ (b.astype(np.float64) @ v)).all())
