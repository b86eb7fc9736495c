"""Measure the cost of steps in memory on the demos.

    python -m tools.bench memory --out DIR [--workload NAME …] [--every N] [--pairs N]

A run of each demo copies a step into shared memory after every second block of N steps
(checkpoint.memory_every). The blocks with and without a copy alternate, and the median of their
differences is the cost, by CPU time of the process and by wall time. Next to it stands the CPU time
of the two threads that copy and compute checksums. One process has no partner on another host, to
whom it would send the copy.
"""

import argparse
import os
import pathlib
import statistics
import sys
import time
import uuid
from typing import Any

from jaxtrain import config as config_lib
from jaxtrain.parallel import cluster, supervised_attempt
from jaxtrain.run import loop
from jaxtrain.run.schedule import Due, Schedule
from jaxtrain.supervise.steps_in_memory import Memory
from tests.proofs.replay_proof import CONFIGS, patch
from tools.bench_verify import OWN

WARM = 2  # pairs of blocks that are not counted


def measure(name: str, out: pathlib.Path, every: int, pairs: int) -> str:
    clocks: list[tuple[float, float]] = []  # CPU and wall time at the end of each block
    copying: list[float] = []  # [s] of CPU time
    sealing: list[float] = []
    at, save, seal = Schedule.at, Memory.save, Memory._seal

    def in_every_second_block(self: Schedule, step: int) -> Due:
        due = at(self, step)
        if due.remember:
            clocks.append((time.process_time(), time.perf_counter()))
        return due._replace(remember=due.remember and step % (2 * every) == 0)

    def timed_save(self: Memory, *arguments: Any, **more: Any) -> None:
        began = time.thread_time()
        save(self, *arguments, **more)
        copying.append(time.thread_time() - began)

    def timed_seal(self: Memory, *arguments: Any) -> None:
        began = time.thread_time()
        seal(self, *arguments)
        sealing.append(time.thread_time() - began)

    memory = out / f"memory-{name}"
    shared = pathlib.Path("/dev/shm", f"bench-{os.getpid()}-{name}")
    shared.mkdir(mode=0o700)
    attempt = supervised_attempt.Attempt(0, run=uuid.uuid4().hex, memory=str(shared))
    own = {
        **config_lib.WITHOUT_OUTPUTS,
        "workdir": str(memory),
        "train.steps": str(2 * every * (pairs + WARM) + every + 1),
        "train.eval_every": "0",
        "train.patience": "0",
        "checkpoint.best": "",
        "checkpoint.every": "1000000",
        "checkpoint.memory_every": str(every),
        "mesh.data": "-1",
        "mesh.fsdp": "1",
    }
    sizes = OWN.get(name, {})
    config = config_lib.load(CONFIGS[name][0], list({**sizes, **own}.items()))
    os.environ |= attempt.to_environment()
    try:
        with (
            patch(Schedule, "at", in_every_second_block),
            patch(Memory, "save", timed_save),
            patch(Memory, "_seal", timed_seal),
        ):
            loop.run(config)
        n_bytes = (shared / "0.bin").stat().st_size
    finally:
        for path in shared.iterdir():
            path.unlink()
        shared.rmdir()
        del os.environ[supervised_attempt.VARIABLE]
    cells = []
    cpu_of_block = 0.0
    for clock in (0, 1):
        times = [moment[clock] for moment in clocks]
        blocks = [after - before for before, after in zip(times, times[1:], strict=False)]
        # clocks begin at step `every`: a block without a copy is first
        without, with_copy = blocks[0::2][WARM:], blocks[1::2][WARM:]
        differences = [b - a for a, b in zip(without, with_copy, strict=False)]
        plain = statistics.median(without)
        cells.append(f"{statistics.median(differences) / plain:+.2%}")
        cpu_of_block = cpu_of_block or plain
    own_time = statistics.median(copying[WARM:]) + statistics.median(sealing[WARM:])
    return (
        f"| {name} | {n_bytes / 1e6:.1f} | {cpu_of_block:.2f} |"
        f" {1e3 * statistics.median(copying[WARM:]):.1f} |"
        f" {1e3 * statistics.median(sealing[WARM:]):.1f} | {own_time / cpu_of_block:.2%} |"
        f" {cells[0]} | {cells[1]} |"
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=pathlib.Path, required=True)
    parser.add_argument("--workload", nargs="+", choices=CONFIGS, default=["bird", "language"])
    parser.add_argument("--every", type=int, default=10, metavar="N", help="steps of a block")
    parser.add_argument("--pairs", type=int, default=10, metavar="N", help="of blocks")
    args = parser.parse_args()
    cluster.start_jax()
    print(
        "| demo | step [MB] | a block's CPU time [s] | copying [ms] | checksum [ms] | both, of a"
        " block | difference of CPU time | of wall time |",
        "|---|---:|---:|---:|---:|---:|---:|---:|",
        sep="\n",
        flush=True,
    )
    for name in args.workload:
        print(measure(name, args.out, args.every, args.pairs), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
