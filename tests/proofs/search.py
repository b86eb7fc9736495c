"""The choice of a search against each mesh, compiled, and on this machine's devices also measured.

    python -m tests.proofs.search gpu:h100x8
    python -m tests.proofs.search --measure                 # the devices of this machine

Every allowed mesh of a small case of each workload is compiled, with the config's options. The
search's first is compared with the fastest by the same forecasts, and with --measure with the
fastest by the clock: the least of several blocks of steps of a state of zeros. The spread between
blocks is the noise.
"""

import argparse
import pathlib
import tempfile
import time

import jax
import jax.numpy as jnp
import pytest

from jaxtrain import plan
from jaxtrain.assembly import assemble
from jaxtrain.compile import xla_options
from jaxtrain.parallel import cluster
from jaxtrain.plan import mesh_search, worker
from jaxtrain.step import train_step as step_lib
from tests.plan.cases import WORKLOADS, load

BLOCKS, STEPS = 5, 3
ALL_MESHES = 1000


def compiled(config, target, enough):
    """Return the candidates that fit, the fastest first."""
    with worker.compiler(target, "" if target.here else target.name) as compiler:
        every = mesh_search.Search(config, target, compiler, fields=(), note=lambda line: None)
        return every.run(enough).best


def seconds(config):
    """Return the least time of a step on this machine, and the largest of its blocks."""
    assembly = assemble(plan.resolve(config, plan.parse_target("")))
    traced = assembly.trace(assembly.task.stage(config.train.steps - 1))
    step = xla_options.compile(traced.lower(), assembly.compiler_options(), config.compiler)

    def zeros(x):
        return jax.device_put(jnp.zeros(x.shape, x.dtype), x.sharding)

    state, batch = jax.tree.map(zeros, (assembly.abstract.state, assembly.abstract.batch))
    stop = step_lib.put_stop(assembly.layout, False)
    times = []
    for _ in range(BLOCKS + 1):  # the first one warms up
        began = time.perf_counter()
        for _ in range(STEPS):
            state, _ = step(state, batch, stop)
        jax.block_until_ready(state)
        times.append((time.perf_counter() - began) / STEPS)
    return min(times[1:]), max(times[1:])


def row(workload, config, target, *, measure):
    """Write a row of the table."""
    every = compiled(config, target, ALL_MESHES)
    choice = compiled(config, target, mesh_search.ENOUGH)[0]
    cells = [
        workload,
        str(len(every)),
        mesh_of(choice),
        f"{1e3 * choice.seconds:.3f}",
        f"{1e3 * every[0].seconds:.3f}",
        f"{choice.seconds / every[0].seconds - 1:+.1%}",
    ]
    if measure:
        times = {mesh_of(each): seconds(each.candidate.config) for each in every}
        least = min(times, key=lambda mesh: times[mesh][0])
        chosen = times[mesh_of(choice)][0]
        noise = max(most / few - 1 for few, most in times.values())
        cells += [f"{1e3 * chosen:.1f}", f"{least}: {1e3 * times[least][0]:.1f}"]
        cells += [f"{chosen / times[least][0] - 1:+.1%}", f"{noise:.0%}"]
    return f"| {' | '.join(cells)} |"


def mesh_of(settled):
    mesh = settled.candidate.config.mesh
    return f"{mesh.data} × {mesh.fsdp} × {mesh.model}"


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("target", nargs="?", default="")
    parser.add_argument("--measure", action="store_true", help="run the steps here, too")
    parser.add_argument("--only", help="one workload")
    arguments = parser.parse_args()
    cluster.use_threads_for_host_devices()
    target = plan.parse_target(arguments.target)
    names = [name for name in WORKLOADS if "," not in name]
    with pytest.MonkeyPatch.context() as monkeypatch, tempfile.TemporaryDirectory() as folder:
        for name in names:
            if arguments.only in (None, name):
                config = load(name, pathlib.Path(folder), monkeypatch)
                print(row(name, config, target, measure=arguments.measure), flush=True)


if __name__ == "__main__":
    main()
