"""`jaxtrain detect` compared with its parts on long recordings: the loader without an encoder, the encoder without a loader.

    NPROC=1 python -m tools.bench_detect RUN --hours 2 --kinds WAV FLAC --threads 1

Writes recordings of noise (tools.bench_windows) once, then runs, in turns, the loader over all windows, the encoder and head
over as many batches, and the command's scoring with its files. Prints windows/s, hours of recording an hour ("× real time"),
and detect's share of the slower part, and of both parts in turn, which is the limit if they share all cores. The peak
of memory is printed after each round: a constant one means that length costs none.
"""

import argparse
import dataclasses
import pathlib
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence

import jax

from jaxtrain.workloads.bird.inference import detect, encoder
from loaders.audio.recordings import windows as windows_lib
from tools import bench_windows


def measured(
    model: encoder.Model, windows: windows_lib.Windows, folder: pathlib.Path, batch: int, threads: int
) -> dict[str, float]:
    """One round. Returns name -> windows/s."""
    head = detect.head_of(model, [str(i) for i in range(_classes(model))])
    chosen = range(len(head.names))
    data = encoder.data_config(model, label="", multilabel=False, test="", threads=threads, audio_root=windows.root)

    def rate(action: Callable[[], object]) -> float:
        begun = time.perf_counter()
        action()
        return windows.n / (time.perf_counter() - begun)

    rates: dict[str, float] = {}
    with tempfile.TemporaryDirectory(dir=folder) as place:
        out = pathlib.Path(place) / "out"
        windows.write(pathlib.Path(place) / "index")
        of_windows = dataclasses.replace(data, train=f"{place}/index")
        setup = encoder.set_up(model, of_windows, detect.compute_of(head, chosen), dict(head.arrays), batch=batch)
        last: dict[str, jax.Array] = {}

        def load() -> None:
            setup.loader.seek(0)
            for _, arrays in setup.stream():
                last.update(jax.block_until_ready(arrays))

        rates["loader"] = rate(load)
        jax.block_until_ready(setup.run(setup.weights, last))
        times = -(-windows.n // setup.batch)
        rates["encoder"] = rate(lambda: [jax.block_until_ready(setup.run(setup.weights, last)) for _ in range(times)])
        parts, made_of = detect.prepare(model, head, windows, out, chosen=chosen, batch=batch)
        done = detect.score(model, head, data, parts, made_of, chosen=chosen)
        rates["detect"] = done["windows"] / done["seconds"]
    rates["slower"] = min(rates["loader"], rates["encoder"])
    rates["turns"] = 1 / (1 / rates["loader"] + 1 / rates["encoder"])
    return rates


def _classes(model: encoder.Model) -> int:
    head = model.head or model.probe
    return int(head["b"].shape[0]) if head else 0


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="tools.bench_detect", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", metavar="RUN")
    parser.add_argument("--hours", type=float, default=1.0, help="of a recording")
    parser.add_argument("--kinds", nargs="+", default=["FLAC"], choices=list(bench_windows.KINDS), help="of recordings")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--threads", type=int, default=0, help="of the loader; 0 = one for each core")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--keep", type=pathlib.Path, help="folder that keeps the recordings; default: none")
    args = parser.parse_args(argv)
    model = encoder.load(args.run)
    seconds = encoder.data_config(model).clip_seconds
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.keep or pathlib.Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        for kind in args.kinds:
            path = bench_windows.write(folder, kind, args.hours)
            named = path.with_name(f"{path.name}.{bench_windows.KINDS[kind][0].lower()}")
            if not named.exists():
                named.symlink_to(path)
            windows = windows_lib.cut([str(named)], seconds=seconds, hop=seconds, mistakes=windows_lib.lenient(), links=True)
            rounds = []
            for _ in range(args.rounds):
                rounds.append(measured(model, windows, folder, args.batch, args.threads))
                print(f"{kind}: peak of {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024:.0f} MB", file=sys.stderr)
            for name in rounds[0]:
                median = statistics.median(each[name] for each in rounds)
                share = statistics.median(each["detect"] / each[name] for each in rounds)
                print(
                    f"{kind:14} {name:8} {median:8.1f} windows/s {median * seconds:8.0f} × real time  detect: {share:.2f} of it"
                )
    return 0


if __name__ == "__main__":
    sys.exit(main())
