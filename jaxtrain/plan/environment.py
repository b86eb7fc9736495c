"""The compilers of plans, each in its own environment in the cache, never in the one that trains.

    jaxtrain plan --setup gpu      # XLA's compiler for NVIDIA GPUs, and ptxas: some 0.6 GB
    jaxtrain plan --setup tpu      # libtpu: some 0.5 GB

An environment is a folder of packages: $JAXTRAIN_CACHE/envs/plan-KIND-jaxlib-VERSION-pyVERSION.
A separate process has it on its path before this Python's packages (`jaxtrain.plan.worker`). So it
has the same jax, and the plugin's version is that of jaxlib. It needs the network once. A set-up
is renamed once it is complete. MARK has its versions.
"""

import fcntl
import importlib.metadata
import importlib.util
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys

from jaxtrain.config.command_line import COMPILERS
from jaxtrain.plan.target import PlanError
from loaders.io import atomic_write, checks, machine

MARK = "whole.json"
NVCC = "12.9.86"  # ptxas and libdevice; any of CUDA 12 from 12.6 on would do


def folder(kind: str) -> pathlib.Path:
    jaxlib = importlib.metadata.version("jaxlib")
    python = f"{sys.version_info.major}{sys.version_info.minor}"
    return machine.cache_folder("envs", f"plan-{kind}-jaxlib-{jaxlib}-py{python}")


def requirements(kind: str) -> list[str]:
    """List the packages, which pip installs without their dependencies."""
    if kind == "gpu":
        jaxlib = importlib.metadata.version("jaxlib")
        plugins = [f"jax-cuda12-plugin=={jaxlib}", f"jax-cuda12-pjrt=={jaxlib}"]
        return [*plugins, f"nvidia-cuda-nvcc-cu12=={NVCC}"]
    pattern = r"(libtpu\S*?);? *;? .*extra == ['\"]tpu['\"]"
    needs = importlib.metadata.requires("jax") or []
    for requirement in needs:
        if match := re.match(pattern, requirement):
            return [match[1]]
    return ["libtpu"]


def find(kind: str) -> pathlib.Path | None:
    """Return the folder of the environment if it is complete."""
    place = folder(kind)
    return place if versions(place) else None


def set_up(kind: str) -> str:
    """Make the environment if there is none, in one process at a time. Returns a line for a person.

    Raises PlanError for an unknown kind, without pip, or if pip fails. Nothing is left then.
    """
    if kind not in COMPILERS:
        expected = checks.expected(kind, COMPILERS)
        raise PlanError(f"no compiler can be fetched for {kind!r}; {expected}")
    place = folder(kind)
    if find(kind):
        return f"{place} is there already: {versions(place)}"
    if not machine.has_package("pip"):  # an environment that uv made has none
        remedy = f"run {sys.executable} -m ensurepip"
        raise PlanError(f"{sys.executable} has no pip, which fetches the compiler; {remedy}")
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        # The lock is never removed, since another process may be waiting for it.
        with place.with_name(f"{place.name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if find(kind):
                return f"{place} is there already: {versions(place)}"
            shutil.rmtree(place, ignore_errors=True)  # an incomplete one
            with atomic_write.folder(place) as partial:
                _install(kind, place, partial)
    except OSError as error:
        remedy = "set JAXTRAIN_CACHE to a folder that can be"
        raise PlanError(f"{place} could not be written: {error.strerror}; {remedy}") from error
    return f"{place} is made: {versions(place)}"


def _install(kind: str, place: pathlib.Path, partial: pathlib.Path) -> None:
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", *requirements(kind)]
    process = subprocess.run([*pip, "--target", str(partial)], capture_output=True, text=True)
    if process.returncode:
        lines = [line for line in process.stderr.splitlines() if line.strip()] or ["no message"]
        reason = next((line for line in lines if line.startswith("ERROR")), lines[-1])
        command = " ".join([*pip, "--target", str(place)])
        raise PlanError(
            f"the environment for --plan={kind}:… could not be made: "
            f"{reason.removeprefix('ERROR: ')}. It needs the network once; this was: {command}"
        )
    mark = {"requirements": requirements(kind), "python": sys.version.split()[0]}
    (partial / MARK).write_text(json.dumps(mark) + "\n")


def versions(place: pathlib.Path) -> str:
    """Return the installed packages, or "" if the environment is incomplete or its mark damaged."""
    try:
        mark = json.loads((place / MARK).read_text())
        return ", ".join(mark["requirements"])
    except (OSError, ValueError, LookupError, TypeError):
        return ""


def path(place: pathlib.Path) -> str:
    """Return the PYTHONPATH of a process that uses it, before all that this one imports from."""
    return os.pathsep.join([str(place), *(entry or os.getcwd() for entry in sys.path)])
