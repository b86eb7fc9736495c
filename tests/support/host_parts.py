"""Start, save and restore a run's state in one of several processes; print its memory and reads.

    python -m tests.support.host_parts CONFIG OVERRIDES

CONFIG is a config's file, and OVERRIDES are JSON: [["model.embed", "64"], …]. The place of the
process is in JAXTRAIN_COORDINATOR, JAXTRAIN_PROCESSES and JAXTRAIN_PROCESS.

The last line is JSON: bytes of the state on all devices ("whole") and on those of this process
("held"), by phase the growth of this process's peak memory, and the bytes that it read in a save
and in a restore. A restore comes on top of nothing: the state that was saved has been dropped.
"""

import gc
import json
import pathlib
import sys

import jax

from jaxtrain import config as config_lib
from jaxtrain.assembly import assemble
from jaxtrain.checkpoint import Checkpointer, History
from jaxtrain.parallel import cluster
from jaxtrain.parallel import layout as layout_lib
from jaxtrain.plan import hosts
from jaxtrain.plan.target import parse_target
from jaxtrain.run.init_or_restore import init_or_restore
from loaders.io import machine


def memory(name: str) -> int:
    """Return the bytes of a field of /proc/self/status."""
    for line in pathlib.Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return 1024 * int(line.split()[1])
    raise ValueError(name)


class Peak:
    """The growth of this process's peak memory since it was made."""

    def __init__(self) -> None:
        gc.collect()
        machine.give_back_freed_memory()
        pathlib.Path("/proc/self/clear_refs").write_text("5")  # the peak begins again
        self._before = memory("VmRSS")

    def growth(self) -> int:
        return memory("VmHWM") - self._before


def bytes_read() -> int:
    """Return the bytes that this process has read from files, from a disk or its cache."""
    for line in pathlib.Path("/proc/self/io").read_text().splitlines():
        if line.startswith("rchar:"):
            return int(line.split()[1])
    raise ValueError("rchar")


def config_of(source: str, overrides: str) -> config_lib.Config:
    """Return the config. Only what it lacks of data is no error, since no step is made."""
    pairs = [tuple(pair) for pair in json.loads(overrides)]
    config, problems = config_lib.read(source, pairs)
    assert not {path for path, _ in problems} & {path for path, _ in pairs}, problems
    return config


def main(source: str, overrides: str) -> None:
    membership = cluster.find()
    config = config_of(source, overrides)
    links = cluster.initialize(membership, config)
    jax.block_until_ready(jax.numpy.zeros(8) + 1)
    mesh = layout_lib.make_mesh(config.mesh.data, config.mesh.fsdp, config.mesh.model)
    assembly = assemble(config, mesh)
    of_host = hosts.share(assembly, parse_target(""))
    found = {}
    peak = Peak()
    start = init_or_restore(assembly, lambda workdir: None)
    jax.block_until_ready(start.state)
    found["start"] = peak.growth()
    saves = Checkpointer(config, assembly.task)
    peak, before = Peak(), bytes_read()
    saves.save(1, start.state, {"position": 1}, History())
    saves.close()
    found["save"] = peak.growth()
    found["read in a save"] = bytes_read() - before
    del start
    saves = Checkpointer(config, assembly.task)
    peak, before = Peak(), bytes_read()
    restored = saves.restore(assembly.abstract, {"position": 1})
    assert restored and restored.step == 1
    jax.block_until_ready(restored.state)
    found["restore"] = peak.growth()
    found["read in a restore"] = bytes_read() - before
    saves.close()
    links.close()
    print(json.dumps({"whole": of_host.checkpoint, "held": of_host.held, **found}))


if __name__ == "__main__":
    main(*sys.argv[1:])
