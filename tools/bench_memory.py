"""Measure the cost of steps in memory on the demos.

    python -m tools.bench memory --out DIR [--workload NAME …] [--every N] [--pairs N] [--partner]

A run of each demo copies a step into shared memory after every second block of N steps
(checkpoint.memory_every). The blocks with and without a copy alternate, and the median of their
differences is the cost, by CPU time of the process and by wall time. Next to it stands the CPU time
of the threads that copy, compute checksums, and send and take copies.

One process has no partner on another host. With --partner it is its own: it sends each copy over a
socket, and takes it, as each process of several does whose parts are not replicated elsewhere.
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
from jaxtrain.supervise.partners import Receiver
from jaxtrain.supervise.steps_in_memory import Memory
from tests.proofs.replay_proof import CONFIGS, patch
from tools.bench_verify import OWN

WARM = 2  # pairs of blocks that are not counted


def measure(name: str, out: pathlib.Path, every: int, pairs: int, *, partner: bool) -> str:
    clocks: list[tuple[float, float]] = []  # CPU and wall time at the end of each block
    copying: list[float] = []  # [s] of CPU time
    sealing: list[float] = []
    taking: list[float] = []  # of all copies
    at, save, seal, reserve = Schedule.at, Memory.save, Memory._seal, Memory.reserve
    close = Receiver.close

    def in_every_second_block(self: Schedule, step: int) -> Due:
        due = at(self, step)
        if due.remember:
            clocks.append((time.process_time(), time.perf_counter()))
        return due._replace(remember=due.remember and step % (2 * every) == 0)

    def timed_save(self: Memory, *arguments: Any, **more: Any) -> None:
        began = time.thread_time()
        save(self, *arguments, **more)
        copying.append(time.thread_time() - began)

    def reserve_with_partner(self: Memory) -> None:
        reserve(self)
        if partner:
            self._secret = b"a secret of the job"
            self._receiver = Receiver(self.folder, attempt.run, self._secret, "127.0.0.1")
            self._partner = self._receiver.address

    def timed_close(self: Receiver) -> None:
        assert self._thread.ident
        taking.append(time.clock_gettime(time.pthread_getcpuclockid(self._thread.ident)))
        close(self)

    def timed_seal(self: Memory, *arguments: Any) -> bool:
        began = time.thread_time()
        is_older_free = seal(self, *arguments)
        sealing.append(time.thread_time() - began)
        return is_older_free

    memory = out / f"memory-{name}"
    shared = pathlib.Path("/dev/shm", f"bench-{os.getpid()}-{name}-0")
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
            patch(Memory, "reserve", reserve_with_partner),
            patch(Receiver, "close", timed_close),
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
    copied, sealed = statistics.median(copying[WARM:]), statistics.median(sealing[WARM:])
    taken = sum(taking) / len(copying)
    own_time = copied + sealed + taken
    return (
        f"| {name} | {n_bytes / 1e6:.1f} | {cpu_of_block:.2f} |"
        f" {1e3 * copied:.1f} | {1e3 * sealed:.1f} | {1e3 * taken:.1f} |"
        f" {own_time / cpu_of_block:.2%} |"
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
    parser.add_argument("--partner", action="store_true", help="send and take each copy, too")
    args = parser.parse_args()
    cluster.start_jax()
    print(
        "| demo | step [MB] | a block's CPU time [s] | copying [ms] | checksum, sending [ms] |"
        " taking [ms] | together, of a block | difference of CPU time | of wall time |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|",
        sep="\n",
        flush=True,
    )
    for name in args.workload:
        print(
            measure(name, args.out, args.every, args.pairs, partner=args.partner),
            flush=True,
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
