"""The spectrogram loader compared with other ways to the same numbers, on this machine.

The result is a markdown table of examples/s.

    python -m tools.bench loader  ours and every peer that is installed, about 10 minutes
    python -m tools.bench loader --codecs ogg,wav --peers seek,torch --threads 1,2 --rounds 5

An example is 5 s of a recording of 38 s on average, as float32 [512, 128]: crop, mono, 32 kHz,
Kaldi log-mel, normalised. All make the same crops of the same recordings in the same order, drawn
by our loader. The peers are given each crop's start, which ours has to find.

    whole         soundfile reads all of the recording, soxr resamples all, then the crop, then
                  kaldi-native-fbank
    datasets      a Hugging Face datasets Audio column, which decodes and resamples all, and
                  torchaudio's Kaldi fbank
    librosa       librosa.load(offset, duration), melspectrogram: the log-mel of a librosa user, not
                  Kaldi's
    torch         a torch DataLoader: soundfile seeks, torchaudio resamples and makes the fbank
    buffer        the design of the loader that ours replaced, made of our compiled parts: decode
                  all, resample all, fbank, shuffle buffer
    lhotse        a cut of a recording: soundfile seeks, torchaudio resamples, lhotse's Fbank
    torchcodec    its AudioDecoder: a range of seconds, mono and 32 kHz by FFmpeg; then as seek
    spdl          SPDL's FFmpeg: packets by time, mono and 32 kHz by its filters; then as seek
    grain         Grain's MapDataset and its reading threads around seek
    seek          soundfile seeks, soxr, scipy's float32 FFT and a BLAS product: as fast as NumPy
                  could be made
    seek-malloc   the same, with glibc set to keep freed memory, which saves its page faults

How it is measured. One process for each peer, pinned to one core, its libraries held to one thread.
For two threads two such processes, whose rates are added (ours, buffer, Grain and the DataLoader
are one process on two cores). They take turns, one pass over the recordings each, for some rounds,
so that a drift of the machine's speed meets all. Each rate is the median of its rounds, each ratio
the median of the ratios within a round. Shards are in the page cache. A pass of ours begins with
empty queues. Compare ratios, and only within one run; on a machine that has other work, with
--clock=cpu.

The corpus is loaders.audio.demo's birds in longer recordings, one shard for each codec, made once
and kept next to the demo's.
"""

import argparse
import contextlib
import json
import os
import pathlib
import platform
import re
import statistics
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Mapping, Sequence
from concurrent import futures
from typing import IO, Any, cast

import numpy as np
import pyarrow as pa

from loaders.audio import demo, demo_birds, prepared
from loaders.io import machine
from tools import loader_peers
from tools.loader_peers import BATCH, OURS, PEERS, SEED, missing

# MP3 and WAV hold as many stereo recordings as mono ones, as archives of field recordings do.
CODECS = {
    "ogg": (
        "OGG 32k",
        demo_birds.Codec("ogg", "OGG", "VORBIS", 32000, 1, 30, 8.0, (("compression_level", 0.6),)),
    ),
    "mp3": (
        "MP3 44.1k",
        demo_birds.Codec(
            *("mp3", "MP3", "MPEG_LAYER_III", 44100, 2, 30, 16.0),
            (("bitrate_mode", "CONSTANT"), ("compression_level", 0.5)),
        ),
    ),
    "flac": ("FLAC 48k", demo_birds.Codec("flac", "FLAC", "PCM_16", 48000, 1, 30, 50.0)),
    "wav": ("WAV 44.1k", demo_birds.Codec("wav", "WAV", "PCM_16", 44100, 2, 30, 132.3)),
    # Nothing to decode and nothing to resample: here all agree up to rounding. The tests use it.
    "wav32": ("WAV 32k", demo_birds.Codec("wav", "WAV", "PCM_16", 32000, 1, 30, 64.0)),
    # These, as `jaxtrain prepare` writes them.
    "raw": ("prepared", demo_birds.Codec("wav", "WAV", "PCM_16", 32000, 1, 30, 64.0)),
    "packed": ("prepared, packed", demo_birds.Codec("wav", "WAV", "PCM_16", 32000, 1, 30, 64.0)),
}
PREPARED = ("raw", "packed")


def make_corpus(
    codec: str, *, n: int, seconds: float, folder: pathlib.Path | None = None
) -> pathlib.Path:
    """Return the shard with ``n`` recordings of ``seconds`` on average, made if it is not there."""
    if codec in PREPARED:
        source = make_corpus("wav32", n=n, seconds=seconds, folder=folder)
        out = source.with_name(f"{source.stem}-{codec}")
        prepared.prepare(str(source), out, prepared.Settings(packed=codec == "packed"))
        return out / "data-00000-of-00001.arrow"
    recipe = zlib.crc32(
        pathlib.Path(demo_birds.__file__).read_bytes() + repr(CODECS[codec]).encode()
    )
    shard = (
        folder or machine.cache_folder()
    ) / f"bench-v1-{codec}-{n}x{seconds:g}s-{recipe:08x}.arrow"
    if shard.is_file():
        return shard
    print(f"making {shard}, once", file=sys.stderr)
    shard.parent.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(SEED)
    spread_n = np.clip(np.exp(0.72 * rng.standard_normal(n)), 0.15, 4.0)
    spread_n *= seconds / spread_n.mean()

    def encoded(number: int) -> bytes:
        kind = CODECS[codec][1]
        kind = kind._replace(channels=1 + number % 2) if kind.channels == 2 else kind
        # The lengths come out exactly as asked for, whatever the demo would draw.
        rec = demo_birds.Recording(
            number, number % len(demo_birds.SPECIES), kind, float(spread_n[number])
        )
        return demo_birds.encode(rec, demo_birds.waveform(rec))

    # Under another name until it is whole.
    with tempfile.TemporaryDirectory(dir=shard.parent) as temporary:
        made = pathlib.Path(temporary) / shard.name
        with (
            pa.ipc.new_stream(str(made), demo.schema()) as sink,
            futures.ThreadPoolExecutor(machine.cores()) as pool,
        ):
            for number, data in enumerate(pool.map(encoded, range(n))):
                audio = {"bytes": data, "path": f"{number:05d}.{CODECS[codec][1].suffix}"}
                columns = {"audio": [audio], "ebird_code": [number % len(demo_birds.SPECIES)]}
                sink.write_batch(pa.RecordBatch.from_pydict(columns, demo.schema()))
        made.replace(shard)
    return shard


def child(name: str, pinned: str) -> None:
    """Be one peer, in a process of its own.

    Reads requests from stdin, one in each line, and answers on stdout.

    {"shard": S, "epoch": 1, "part": [0, 2]}         -> {"n": examples, "wall": s, "cpu": s}, of
                                                     every second crop, from 0 on
    {…, "epoch": 0, "part": [0, 1], "n": 8, "to": F} -> the same; F holds the first 8 examples
    """
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # libraries print there
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, json.loads(pinned))
    threads = len(json.loads(pinned))
    peer = OURS if name == "ours" else PEERS[name]
    loader: Any = None
    open_shard = None
    for line in sys.stdin:
        request = json.loads(line)
        first, step = request["part"]
        path = pathlib.Path(request["shard"])
        if path != open_shard:
            open_shard = path
            loader = (
                peer.make(path, threads) if peer.one_process else loader_peers.Each(peer.make, path)
            )
        crops = loader_peers.crops(path, request["epoch"])[first : request.get("n") : step]
        began, spent = time.perf_counter(), time.process_time()
        out = loader.run(request["epoch"], len(crops)) if name == "ours" else loader.run(crops)
        seconds, cpu = time.perf_counter() - began, time.process_time() - spent
        if "to" in request:
            np.save(request["to"], np.concatenate(out)[: len(crops)])
        print(
            json.dumps({"n": len(crops), "wall": seconds, "cpu": cpu / threads}),
            file=answers,
            flush=True,
        )


class PeerError(RuntimeError):
    """A peer that cannot be measured here."""


class Running:
    """The processes of one peer, for every number of threads that is to be measured."""

    def __init__(self, name: str, threads: Sequence[int]):
        self.name, self.of = name, dict[int, list[subprocess.Popen[str]]]()
        single = {
            f"{library}_NUM_THREADS": "1" for library in ("OMP", "MKL", "OPENBLAS", "NUMBA", "SOXR")
        }
        env = os.environ | single | {"MKL_THREADING_LAYER": "SEQUENTIAL", "HF_HUB_OFFLINE": "1"}
        peer = OURS if name == "ours" else PEERS[name]

        def start(pinned: Sequence[int]) -> subprocess.Popen[str]:
            command = [
                sys.executable,
                "-m",
                "tools.bench_loader",
                "child",
                name,
                json.dumps(list(pinned)),
            ]
            pipes: dict[str, Any] = {
                "stdin": subprocess.PIPE,
                "stdout": subprocess.PIPE,
                "text": True,
            }
            return subprocess.Popen(
                command, env={**env, **peer.env}, cwd=pathlib.Path(__file__).parents[1], **pipes
            )

        if peer.one_process:
            self.of = {n: [start(cores()[:n])] for n in threads}
        else:  # fewer threads are some of these
            each = [start([core]) for core in cores()[: max(threads)]]
            self.of = {n: each[:n] for n in threads}

    def rate(
        self, threads: int, *, clock: str = "wall", of: int | None = None, **request: Any
    ) -> float:
        """Examples/s, of all processes together, or of the first ``of``. Raises PeerError."""
        processes = self.of[threads][:of]
        for k, process in enumerate(processes):
            with contextlib.suppress(BrokenPipeError):  # then there is no answer either
                print(
                    json.dumps(request | {"part": [k, len(processes)]}),
                    file=process.stdin,
                    flush=True,
                )
        lines = [cast(IO[str], process.stdout).readline() for process in processes]
        if not all(lines):
            raise PeerError(f"{self.name} ended early; its output is above")
        return float(sum(answer["n"] / answer[clock] for answer in map(json.loads, lines)))

    def close(self) -> None:
        for process in dict.fromkeys(process for some in self.of.values() for process in some):
            with contextlib.suppress(BrokenPipeError):
                process.communicate()


def first_rows(peer: Running, shard: pathlib.Path, threads: Sequence[int], n: int) -> np.ndarray:
    """Make the first ``n`` examples, and plans and filters, which take their time at the first use.

    Bands from 120 on are left out: there lies the edge of every resampler's filter, and no two have
    the same.
    """
    with tempfile.TemporaryDirectory() as folder:
        peer.rate(threads[0], of=1, shard=str(shard), epoch=0, n=n, to=f"{folder}/out.npy")
        for each in threads[1:]:
            peer.rate(each, shard=str(shard), epoch=0, n=n)
        rows: np.ndarray = np.load(f"{folder}/out.npy")
        return rows[..., :120]


def measure(
    peers: Sequence[Running],
    shard: pathlib.Path,
    *,
    threads: Sequence[int],
    rounds: int,
    clock: str,
) -> dict[str, dict[str, list[float]]]:
    """Return number of threads -> peer -> examples/s of each round.

    All wait at the same time: who works has the machine alone.
    """
    turns = [(each, n) for n in threads for each in peers]
    rates: dict[str, dict[str, list[float]]] = {
        str(n): {each.name: [] for each in peers} for n in threads
    }
    for round_ in range(rounds):
        first = round_ % len(turns)
        for each, n in turns[first:] + turns[:first]:  # nobody is always last
            rates[str(n)][each.name].append(
                each.rate(n, shard=str(shard), epoch=round_, clock=clock)
            )
    return rates


def cores() -> list[int]:
    return (
        sorted(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else list(range(os.cpu_count() or 1))
    )


def ratio(rates: Mapping[str, Sequence[float]], a: str, b: str) -> float:
    return statistics.median(x / y for x, y in zip(rates[a], rates[b], strict=True))


def label(name: str) -> str:
    """Return the row's name of a peer, with the versions of its libraries."""
    needs = PEERS[name].needs if name in PEERS and not missing(name) else ()
    return f"{name} ({', '.join(loader_peers.versions(needs))})" if needs else name


def table(results: Mapping[str, Mapping[str, Mapping[str, Sequence[float]]]]) -> str:
    """codec -> threads -> peer -> rates, as markdown: one table for each number of threads."""
    lines, codecs = [], list(results)
    head = [CODECS[codec][0] for codec in codecs]
    for threads in results[codecs[0]]:
        of = {codec: results[codec][threads] for codec in codecs}
        middle = {
            codec: {name: statistics.median(r) for name, r in rates.items()}
            for codec, rates in of.items()
        }
        lines += [
            f"| examples/s, {threads} thread{'s' * (threads != '1')} | {' | '.join(head)} |",
            "|---|" + "---:|" * len(head),
        ]
        for name in of[codecs[0]]:
            lines.append(
                f"| {label(name)} |"
                f" {' | '.join(f'{middle[codec][name]:.0f}' for codec in codecs)} |"
            )
        if len(of[codecs[0]]) > 1:
            best = {
                codec: max((name for name in m if name != "ours"), key=m.__getitem__)
                for codec, m in middle.items()
            }
            cells = [
                f"**{ratio(of[codec], 'ours', best[codec]):.2f}** × {best[codec]}"
                for codec in codecs
            ]
            lines.append(f"| ours / best peer | {' | '.join(cells)} |")
        lines.append("")
    one, *others = results[codecs[0]]
    for more in others:
        pairs = {
            codec: {n: rates["ours"] for n, rates in results[codec].items()} for codec in codecs
        }
        cells = [f"{CODECS[codec][0]} {ratio(pairs[codec], more, one):.2f}" for codec in codecs]
        lines.append(f"Ours, {more} threads / {one}: {', '.join(cells)}.")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else list(argv)
    if argv[:1] == ["child"]:
        child(*argv[1:])
        return 0
    summary, _, rest = (__doc__ or "").partition("\n")
    parser = argparse.ArgumentParser(
        prog="tools.bench loader",
        description=summary,
        epilog=rest,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    names = [codec for codec in CODECS if codec not in ("wav32", *PREPARED)]
    parser.add_argument(
        "--codecs", default=",".join(names), help=f"of {', '.join(CODECS)} (default: %(default)s)"
    )
    parser.add_argument(
        "--peers", default="all", help=f"of {', '.join(PEERS)}; or all, or none (default: all)"
    )
    parser.add_argument(
        "--threads", default="1,2", help="numbers of threads, one table each (default: %(default)s)"
    )
    parser.add_argument(
        "--rounds", type=int, default=3, help="passes of each peer (default: %(default)s)"
    )
    parser.add_argument(
        "--recordings",
        type=int,
        default=100,
        help="in a corpus, which is a pass (default: %(default)s)",
    )
    parser.add_argument(
        "--seconds",
        type=float,
        default=38.0,
        help="of a recording, on average (default: %(default)s)",
    )
    parser.add_argument(
        "--folder", type=pathlib.Path, help=f"of the corpora (default: {machine.cache_folder()})"
    )
    parser.add_argument(
        "--clock",
        choices=("wall", "cpu"),
        default="wall",
        help=(
            "cpu: seconds that a core worked for the peer, for a machine that has other work too"
            " (default: %(default)s)"
        ),
    )
    args = parser.parse_args(argv)

    codecs, threads = args.codecs.split(","), [int(n) for n in args.threads.split(",")]
    chosen = {"all": list(PEERS), "none": []}.get(args.peers, args.peers.split(","))
    for value, allowed in ((codecs, CODECS), (chosen, PEERS)):
        if unknown := sorted(set(value) - set(allowed)):
            parser.error(f"{', '.join(unknown)}: unknown; expected some of: {', '.join(allowed)}")
    if min(threads) < 1 or max(threads) > len(cores()):
        parser.error(
            f"--threads {args.threads}: this process may use {len(cores())} cores, and each thread"
            " is pinned to one"
        )
    if args.rounds < 1 or args.recordings < 2 * max(threads):
        parser.error("at least 1 round, and 2 recordings for each thread")

    skipped = {name: missing(name) for name in chosen if missing(name)}
    if args.clock == "cpu" and max(threads) > 1 and "torch" in chosen:
        skipped["torch"] = [
            "the time of a DataLoader's workers is not its own; use --clock=wall, or --threads=1"
        ]
    results: dict[str, dict[str, dict[str, list[float]]]] = {}
    differences: dict[str, dict[str, float]] = {}
    with contextlib.ExitStack() as stack:
        names = ["ours", *(name for name in chosen if name not in skipped)]
        running = {
            name: stack.enter_context(contextlib.closing(Running(name, threads))) for name in names
        }
        for codec in codecs:
            shard = make_corpus(codec, n=args.recordings, seconds=args.seconds, folder=args.folder)
            loader_peers.unpack(shard)
            n = min(args.recordings, BATCH)
            expected = first_rows(running["ours"], shard, threads, n)
            for name in list(running)[1:]:
                try:
                    rows = first_rows(running[name], shard, threads, n)
                    differences.setdefault(name, {})[codec] = float(np.abs(rows - expected).mean())
                # a library that is there and does not work, as torchcodec without FFmpeg
                except PeerError as error:
                    skipped[name] = [str(error)]
                    del running[name]
            print(f"{CODECS[codec][0]}: {args.rounds} rounds", file=sys.stderr)
            results[codec] = measure(
                list(running.values()), shard, threads=threads, rounds=args.rounds, clock=args.clock
            )
    peers = [name for name in running if name != "ours"]
    for rates in (rates for of in results.values() for rates in of.values()):
        for name in skipped:  # one that failed on a later codec
            rates.pop(name, None)

    print(table(results))
    if peers:
        print(
            "\nMean |difference| to ours, in units of the normalised spectrogram, bands below 120:"
        )
        for name in peers:
            print(
                f"  {name:12}"
                + "".join(f"  {codec} {value:.1e}" for codec, value in differences[name].items())
            )
    for name, why in skipped.items():
        modules = [re.sub("[._]", "-", module) for module in why if " " not in module]
        remedy = f"pip install {' '.join(modules)}" if modules else why[0]
        print(f"\nskipped: {name}: {remedy}")
    versions = loader_peers.versions(
        sorted({"numpy", "soundfile"}.union(*(PEERS[name].needs for name in peers)))
    )
    print(f"\nPython {platform.python_version()}, {', '.join(versions)}; {platform.platform()}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
