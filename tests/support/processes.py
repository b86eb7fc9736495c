"""Runs as a user starts them, in separate processes: their start, their end, and their files."""

import hashlib
import json
import os
import pathlib
import socket
import subprocess
import sys
import time
from collections.abc import Sequence

import jax
import numpy as np
import orbax.checkpoint as ocp

from jaxtrain.telemetry import glossary
from tests.support import forked
from tests.support.xla import KEEPS_PROGRAMS, SOON

ROOT = pathlib.Path(__file__).parents[2]


def xla_flags(devices: int) -> str:
    return f"--xla_force_host_platform_device_count={devices} {SOON}"


def command(
    folder: pathlib.Path,
    source: str,
    *overrides: str,
    devices: int = 1,
    inside: Sequence[str] = (),
    **environment: str,
) -> subprocess.Popen | forked.Process:
    """The command python -m jaxtrain.main, as a user would start it, on ``devices`` host devices,
    ``inside`` another command.

    It is a fork with the imports done (forked.py). With another command around it, or with
    JAXTRAIN_TESTS_FORK=0, it is a new process.
    """
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(("JAX", "XLA"))}
    cache = {k: v for k, v in os.environ.items() if k in KEEPS_PROGRAMS}
    env = (
        inherited
        | cache
        | {
            "IDS": str(folder / "ids.jsonl"),
            "PYTHONPATH": f"{ROOT}:{folder}",
            "JAX_PLATFORMS": "cpu",
        }
    )
    env |= {"XLA_FLAGS": xla_flags(devices)} | environment
    arguments = [f"--config={source}", *overrides]
    # a fork takes where programs are kept from its own environment, too
    others = {name: value for name, value in environment.items() if name not in KEEPS_PROGRAMS}
    if not inside and forked.starts(others) and os.environ.get("JAXTRAIN_TESTS_FORK") != "0":
        return forked.Process(arguments, cwd=folder, env=env)
    arguments = [*inside, sys.executable, "-m", "jaxtrain.main", *arguments]
    return subprocess.Popen(
        arguments, cwd=folder, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def at(port, process, processes=2):
    """The environment of one of several processes on this machine."""
    return {
        "JAXTRAIN_COORDINATOR": f"127.0.0.1:{port}",
        "JAXTRAIN_PROCESSES": str(processes),
        "JAXTRAIN_PROCESS": str(process),
    }


def run(*args, code: int = 0, within: float = 300, **kwargs) -> str:
    process = command(*args, **kwargs)
    try:
        output, _ = process.communicate(timeout=within)
    finally:
        if process.poll() is None:
            process.kill()  # otherwise it continues to compute during the next tests
    assert process.returncode == code, output
    return output


def cluster(folder, source, *overrides, processes, devices=1, **environment):
    port = free_port()
    return [
        command(
            folder,
            source,
            *overrides,
            devices=devices,
            IDS=str(folder / f"ids{i}.jsonl"),
            **at(port, i, processes),
            **environment.get(f"only{i}", {}),
        )
        for i in range(processes)
    ]


def wait_for(condition, *, seconds=240, watch=()):
    deadline = time.monotonic() + seconds
    while not condition():
        ended = [p.communicate()[0] for p in watch if p.poll() is not None]
        assert not ended, ended
        assert time.monotonic() < deadline
        time.sleep(0.05)


def step_of(workdir):
    path = workdir / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return max((json.loads(line)["step"] for line in lines[:-1]), default=0)


def records(workdir: pathlib.Path, split: str) -> dict[int, dict[str, float]]:
    """metrics.jsonl without the rates, which are about this machine."""
    lines = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    rates = {
        "steps_per_second",
        "examples_per_second",
        "mfu",
        "mfu_full_attention",
        "data_wait_share",
        "goodput",
        "eta_seconds",
    }
    rates |= {"rows_asked_per_second", "rows_given_per_second", "cores_missing"}
    steps = [r["step"] for r in lines if r["split"] == split]
    assert steps == sorted(set(steps)), "steps rise, and none is there twice"
    return {
        r["step"]: {k: v for k, v in r.items() if k not in rates}
        for r in lines
        if r["split"] == split
    }


def unexplained(workdir: pathlib.Path) -> set[str]:
    """The names in metrics.jsonl without an entry in the glossary."""
    workload = json.loads((workdir / "config.json").read_text())["workload"]
    lines = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    return {
        name
        for r in lines
        for name in r.keys() - {"step", "split"}
        if not glossary.meaning(name, workload=workload, split=r["split"])
    }


def hashes(workdir: pathlib.Path, step: int) -> dict[str, str]:
    """sha256 of every leaf of a checkpoint."""
    path = workdir.absolute() / "checkpoints" / str(step) / "state"
    checkpointer = ocp.PyTreeCheckpointer()
    as_numpy = jax.tree.map(
        lambda _: ocp.RestoreArgs(restore_type=np.ndarray),
        checkpointer.metadata(path).item_metadata.tree,
    )
    # independent of the devices that wrote it
    tree = checkpointer.restore(path, restore_args=as_numpy)
    return {
        jax.tree_util.keystr(path): hashlib.sha256(np.asarray(x).tobytes()).hexdigest()
        for path, x in jax.tree.leaves_with_path(tree)
    }


def ids(folder: pathlib.Path, name: str = "ids.jsonl") -> dict[int, list[int]]:
    """The recordings of every global batch, in row order. A batch that is read again after a kill
    must be the same."""
    found: dict[int, dict[tuple, list[int]]] = {}
    for line in (folder / name).read_text().splitlines():
        split, position, rows, index, *_ = json.loads(line)
        if split == "train":
            assert found.setdefault(position, {}).setdefault(tuple(rows), index) == index
    return {p: [i for rows in sorted(parts) for i in parts[rows]] for p, parts in found.items()}
