"""The compilers that plans need, each in an environment of its own beneath the cache: never in the one that trains.

    jaxtrain plan --setup gpu      # XLA's compiler for NVIDIA GPUs, and ptxas: some 0.6 GB
    jaxtrain plan --setup tpu      # libtpu: some 0.5 GB

An environment is a folder of packages, $JAXTRAIN_CACHE/envs/plan-KIND-jaxlib-VERSION-pyVERSION (or ~/.cache/jaxtrain/envs/…),
which a process of its own has on its path before this Python's packages (`jaxtrain.plan.worker`): so its jax is the jax that
asks, and the plugin's version is that of jaxlib. It needs the network once. A set-up is made in a folder next to it and renamed
when it is whole; MARK, written last, has the versions. Of several at once one fetches and the others wait.
"""

import contextlib
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
import tempfile
from collections.abc import Iterator

from jaxtrain.config.arguments import COMPILERS
from jaxtrain.plan.target import PlanError
from loaders.io import checks, machine

MARK = "whole.json"
NVCC = "12.9.86"  # ptxas and libdevice; any of CUDA 12 from 12.6 on would do


def folder(kind: str) -> pathlib.Path:
    """Where the environment is, or would be."""
    jaxlib, python = importlib.metadata.version("jaxlib"), f"{sys.version_info.major}{sys.version_info.minor}"
    return machine.cache_folder("envs", f"plan-{kind}-jaxlib-{jaxlib}-py{python}")


def requirements(kind: str) -> list[str]:
    """What pip installs, without dependencies: they are here already, or not needed to compile."""
    if kind == "gpu":
        jaxlib = importlib.metadata.version("jaxlib")
        return [f"jax-cuda12-plugin=={jaxlib}", f"jax-cuda12-pjrt=={jaxlib}", f"nvidia-cuda-nvcc-cu12=={NVCC}"]
    needs = importlib.metadata.requires("jax") or []
    pinned = (match[1] for text in needs if (match := re.match(r"(libtpu\S*?);? *;? .*extra == ['\"]tpu['\"]", text)))
    return [next(pinned, "libtpu")]


def find(kind: str) -> pathlib.Path | None:
    """The environment, where it is whole."""
    return place if versions(place := folder(kind)) else None


def set_up(kind: str) -> str:
    """Makes the environment, unless it is there. Returns a line for a person.

    Raises PlanError for an unknown kind, without pip, and where pip fails, with its command; what it had written is gone then.
    """
    if kind not in COMPILERS:
        raise PlanError(f"no compiler can be fetched for {kind!r}; {checks.expected(kind, COMPILERS)}")
    if place := find(kind):
        return f"{place} is there already: {versions(place)}"
    if not importlib.util.find_spec("pip"):  # an environment that uv made has none
        raise PlanError(f"{sys.executable} has no pip, which fetches the compiler; say {sys.executable} -m ensurepip")
    place = folder(kind)
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", *requirements(kind), "--target"]
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        with _only_one(place) as alone, tempfile.TemporaryDirectory(prefix=f"{place.name}.part-", dir=place.parent) as part:
            if find(kind):
                return f"{place} is there already: {versions(place)}"  # made by the process that this one waited for
            for left in place.parent.glob(f"{place.name}.part-*") if alone else ():
                if left != pathlib.Path(part):  # of a process that was killed
                    shutil.rmtree(left, ignore_errors=True)
            made = pathlib.Path(part, "packages")
            done = subprocess.run([*pip, str(made)], capture_output=True, text=True)
            if done.returncode:
                said = [line for line in done.stderr.splitlines() if line.strip()]
                why = next((line for line in said if line.startswith("ERROR")), said[-1] if said else "it said nothing")
                raise PlanError(
                    f"the environment for --plan={kind}:… could not be made: {why.removeprefix('ERROR: ')}. It needs the "
                    f"network once; this was: {' '.join([*pip, str(place)])}"
                )
            (made / MARK).write_text(json.dumps({"requirements": requirements(kind), "python": sys.version.split()[0]}) + "\n")
            _rename(made, place)
    except OSError as error:
        raise PlanError(
            f"{place} could not be written: {error.strerror}; set JAXTRAIN_CACHE to a folder that can be"
        ) from error
    return f"{place} is made: {versions(place)}"


def versions(place: pathlib.Path) -> str:
    """What pip installed there; "" where the environment is not whole, or its mark was damaged, as by a full disk."""
    try:
        return ", ".join(json.loads((place / MARK).read_text())["requirements"])
    except (OSError, ValueError, LookupError, TypeError):
        return ""


def path(place: pathlib.Path) -> str:
    """PYTHONPATH of a process that uses it: before all that this process imports from."""
    return os.pathsep.join([str(place), *(entry or os.getcwd() for entry in sys.path)])


@contextlib.contextmanager
def _only_one(place: pathlib.Path) -> Iterator[bool]:
    """Holds a lock, which the kernel releases when its holder dies. Yields False on a file system without locks."""
    with place.with_name(f"{place.name}.lock").open("w") as file:  # never removed: another process may be waiting for it
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError:
            yield False
        else:
            yield True


def _rename(made: pathlib.Path, place: pathlib.Path) -> None:
    """Puts a whole environment in its place, unless another process has been faster; a broken one there makes way."""
    if versions(place):
        return
    shutil.rmtree(place, ignore_errors=True)
    try:
        made.rename(place)
    except OSError:
        if not versions(place):
            raise
