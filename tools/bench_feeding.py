"""The loader by number of threads and processes: rows for each CPU second.

    python -m tools.bench feeding  # all codecs, 1 thread to one on each core
    python -m tools.bench feeding --codecs ogg,wav --forms waveform --threads 1,2 --seconds 3

Three ways to keep n cores busy take turns: one process with n threads, n processes of one thread
each, and n processes that only compute digests. The last one's loss is the machine's: cores that
share caches, clocks or arithmetic (hyperthreads), and other work. The loss of processes beyond that
is of memory traffic. The loss of threads beyond that of processes is the loader's own: allocation,
locks, the hand-over of batches. So the last column, threads relative to processes, is the loader's.

Threads are pinned to physical cores first, and then to their second hyperthreads. Counters a row
say where to look: page faults are memory that is newly allocated, and waits are locks or a late
consumer.
"""

import argparse
import hashlib
import json
import os
import pathlib
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import IO, Any, NamedTuple, cast

from loaders.io import machine
from tools import bench_loader, loader_peers

FORMS = ("spectrogram", "waveform")
GOAL = 0.90  # of one thread's rows a CPU second, with a thread on each physical core
DIGESTED = bytes(1 << 16)
ROOT = pathlib.Path(__file__).resolve().parents[1]


class Rate(NamedTuple):
    """The sums of the processes of one way, over one round."""

    rows: float
    wall: float  # [s] of the slowest process
    cpu: float  # [s]
    faults: float  # pages that were mapped
    waits: float  # times that a thread slept

    @property
    def by_cpu(self) -> float:
        return self.rows / self.cpu


def physical_first(cores: Sequence[int]) -> list[int]:
    """Return the cores so that no two hyperthreads of one are taken before all are."""
    topology = "/sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"

    def siblings(core: int) -> str:
        path = pathlib.Path(topology.format(core))
        return path.read_text().strip() if path.exists() else str(core)

    seen: dict[str, int] = {}
    ranks = {}
    for core in sorted(cores):
        name = siblings(core)
        ranks[core] = seen.setdefault(name, 0)
        seen[name] += 1
    return sorted(cores, key=lambda core: (ranks[core], core))


def n_physical(cores: Sequence[int]) -> int:
    """Return the number of physical cores that these are of."""
    topology = pathlib.Path("/sys/devices/system/cpu")
    names = set()
    for core in cores:
        path = topology / f"cpu{core}" / "topology" / "thread_siblings_list"
        names.add(path.read_text() if path.exists() else str(core))
    return len(names)


def child(shard: str, form: str, threads: str, cores: str) -> None:
    """Be one process: for each number of seconds on stdin, work so long, and print the counters."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # libraries print there
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, json.loads(cores))
    work = Digests() if form == "digests" else Loading(shard, form, int(threads))
    for line in sys.stdin:
        seconds = float(line)
        before, began, spent = usage(), time.perf_counter(), time.process_time()
        rows = -work.rows()
        while time.perf_counter() - began < seconds:
            work.advance()
        rows += work.rows()
        wall, cpu = time.perf_counter() - began, time.process_time() - spent
        faults, waits = (b - a for a, b in zip(before, usage(), strict=True))
        print(json.dumps(Rate(rows, wall, cpu, faults, waits)), file=answers, flush=True)


def usage() -> tuple[int, int]:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_minflt, used.ru_nvcsw


class Digests:
    """Computation in the registers and the first cache."""

    def __init__(self) -> None:
        self.n = 0

    def rows(self) -> int:
        return self.n

    def advance(self) -> None:
        for _ in range(64):
            hashlib.sha256(DIGESTED).digest()
        self.n += 64


class Loading:
    """Batches of a shard, one after the other, through all of its epochs."""

    def __init__(self, shard: str, form: str, threads: int):
        ours = loader_peers.Ours(pathlib.Path(shard), threads, cast(Any, form))
        self.loader = ours.loader
        self.loader.seek(0)
        for _ in range(ours.n_batches):  # filters and plans are made at their first use
            next(self.loader)

    def rows(self) -> int:
        """Return the number of rows that the workers have written, taken or not."""
        return int(self.loader.diagnostics()["rows"])

    def advance(self) -> None:
        next(self.loader)


class Way:
    """Processes that work at the same time."""

    def __init__(self, shard: str, form: str, threads: int, cores: Sequence[Sequence[int]]):
        base = [sys.executable, "-m", "tools.bench_feeding", "child", shard, form, str(threads)]
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        path = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(path)}
        self.processes = [
            subprocess.Popen([*base, json.dumps(list(pinned))], cwd=ROOT, env=env, **pipes)
            for pinned in cores
        ]

    def rate(self, seconds: float) -> Rate:
        """Return the sums of a turn. Raises RuntimeError if a process has ended."""
        for process in self.processes:
            print(seconds, file=process.stdin, flush=True)
        lines = [cast(IO[str], process.stdout).readline() for process in self.processes]
        if not all(lines):
            raise RuntimeError("a process ended early; its output is above")
        each = [Rate(*json.loads(line)) for line in lines]
        walls = [rate.wall for rate in each]
        sums = [sum(column) for column in zip(*each, strict=True)]
        return Rate(*sums)._replace(wall=max(walls))

    def close(self) -> None:
        for process in self.processes:
            process.communicate()


def measure(
    shard: str, form: str, threads: Sequence[int], seconds: float, rounds: int
) -> dict[str, Any]:
    """Return the medians by number of threads: of threads, processes and digests."""
    cores = physical_first(bench_loader.cores())
    found: dict[str, Any] = {}
    for n in threads:
        alone = [[core] for core in cores[:n]]
        ways = {
            "threads": Way(shard, form, n, [cores[:n]]),
            "processes": Way(shard, form, 1, alone),
            "digests": Way(shard, "digests", 1, alone),
        }
        try:
            rates: dict[str, list[Rate]] = {name: [] for name in ways}
            for _ in range(rounds):
                for name, way in ways.items():
                    rates[name].append(way.rate(seconds))
        finally:
            for way in ways.values():
                way.close()
        found[str(n)] = {name: summary(of_rounds) for name, of_rounds in rates.items()}
    return found


def summary(rates: Sequence[Rate]) -> dict[str, float]:
    """Return medians of rounds: rows a second of the clock and of the CPU, counters a row."""
    middle = statistics.median
    return {
        "rows_per_second": middle(rate.rows / rate.wall for rate in rates),
        "rows_per_cpu_second": middle(rate.by_cpu for rate in rates),
        "faults_per_row": middle(rate.faults / rate.rows for rate in rates),
        "waits_per_row": middle(rate.waits / rate.rows for rate in rates),
    }


def of_one_thread(found: dict[str, Any], physical: int) -> float | None:
    """Return the rows a CPU second with a thread on each physical core, relative to one thread's.

    None if that number of threads was not measured, or if one core is all there is.
    """
    if physical == 1 or not {"1", str(physical)} <= found.keys():
        return None
    name = "rows_per_cpu_second"
    return float(found[str(physical)]["threads"][name] / found["1"]["threads"][name])


def result(share: float | None, physical: int) -> str:
    if share is None:
        return f"not compared with the goal: 1 and {physical} threads, two numbers, are needed"
    text = f"{share:.2f} of one thread's on {physical} physical cores, goal {GOAL:.2f}"
    return f"{text}: {'reached' if share >= GOAL else 'missed'}"


HEAD = (
    "codec, form",
    "threads",
    "rows/s",
    "rows/CPU s",
    "of one thread's",
    "processes, of one's",
    "digests, of one's",
    "threads / processes",
    "page faults a row",
    "waits a row",
)


def row(label: str, n: str, found: dict[str, Any]) -> str:
    """Return a row of the table, in Markdown."""
    one, here = found[next(iter(found))], found[n]

    def share(way: str) -> float:
        name = "rows_per_cpu_second"
        return float(here[way][name] / one[way][name])

    ours = here["threads"]
    by_processes = ours["rows_per_cpu_second"] / here["processes"]["rows_per_cpu_second"]
    cells = (
        *(label, n, f"{ours['rows_per_second']:,.0f}", f"{ours['rows_per_cpu_second']:,.0f}"),
        *(f"{share(way):.2f}" for way in ("threads", "processes", "digests")),
        *(f"{by_processes:.2f}", f"{ours['faults_per_row']:.2f}", f"{ours['waits_per_row']:.2f}"),
    )
    return f"| {' | '.join(cells)} |"


def bytes_of_row(form: str) -> int:
    """Bytes that a row of 5 s takes to the device."""
    return 2 * 160_000 if form == "waveform" else 4 * 512 * 128


def main(argv: Sequence[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else list(argv)
    if argv[:1] == ["child"]:
        child(*argv[1:])
        return 0
    summary_line, _, rest = (__doc__ or "").partition("\n")
    parser = argparse.ArgumentParser(
        prog="tools.bench feeding",
        description=summary_line,
        epilog=rest,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--codecs", default="ogg,mp3,flac,wav", help="default: %(default)s")
    parser.add_argument("--forms", default="spectrogram,waveform", help="default: %(default)s")
    n_cores = len(bench_loader.cores())
    powers = [2**i for i in range(10) if 2**i < n_cores]
    text = "numbers of threads; default: %(default)s"
    parser.add_argument("--threads", default=",".join(map(str, [*powers, n_cores])), help=text)
    parser.add_argument("--seconds", type=float, default=2.0, help="of a way's turn")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--recordings", type=int, default=120, help="of a corpus")
    parser.add_argument("--out", type=pathlib.Path, help="all numbers, as JSON")
    args = parser.parse_args(argv)
    codecs, forms = args.codecs.split(","), args.forms.split(",")
    threads = sorted({int(n) for n in args.threads.split(",")})
    for values, allowed in ((codecs, bench_loader.CODECS), (forms, FORMS)):
        if unknown := sorted(set(values) - set(allowed)):
            parser.error(f"{unknown[0]!r} is unknown; expected some of: {', '.join(allowed)}")
    if threads[0] < 1 or threads[-1] > n_cores:
        parser.error(f"--threads {args.threads}: this process may use {n_cores} cores")

    machine.keep_freed_memory()
    physical = n_physical(bench_loader.cores())
    print(f"{n_cores} cores, {physical} of them physical")
    print(f"| {' | '.join(HEAD)} |\n|---|{'---:|' * (len(HEAD) - 1)}", flush=True)
    results: dict[str, Any] = {}
    for codec in codecs:
        shard = bench_loader.make_corpus(codec, n=args.recordings, seconds=38.0)
        for form in forms:
            label = f"{bench_loader.CODECS[codec][0]}, {form} of {bytes_of_row(form):,} bytes"
            found = measure(str(shard), form, threads, args.seconds, args.rounds)
            results[f"{codec} {form}"] = found
            for n in found:
                print(row(label, n, found), flush=True)
    shares = {name: of_one_thread(found, physical) for name, found in results.items()}
    print()
    for name, share in shares.items():
        print(f"{name}: {result(share, physical)}")
    if args.out:
        about = {"cores": n_cores, "physical": physical, "goal": GOAL, "of_one_thread": shares}
        args.out.write_text(json.dumps({**about, "rows": results}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
