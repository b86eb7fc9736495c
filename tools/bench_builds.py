"""Builds of the extension compared by examples per second of CPU time.

python -m tools.bench builds A.so B.so [--rounds 5]

    cd rust
    cargo build --release -p jaxtrain-loader-python --features extension-module
    cargo build --profile editable -p jaxtrain-loader-python --features extension-module
    cd .. && python -m tools.bench builds target/release/lib_rust.so target/editable/lib_rust.so

Every codec of `tools.bench loader`, most of which are resampled, and both forms of a row. A process
of one build makes a pass over the corpora in turn with the others, on one thread. The table has the
median of the ratios to the first build.
"""

import argparse
import importlib.machinery
import importlib.util
import json
import pathlib
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Literal

FORMS: tuple[Literal["spectrogram", "waveform"], ...] = ("spectrogram", "waveform")
PASSES = 4  # over a corpus, in one turn


def child(build: str, shards: Sequence[str]) -> None:
    """Print {"FORM SHARD": examples per CPU second} of one pass with a build of the extension."""
    loader = importlib.machinery.ExtensionFileLoader("loaders._rust", build)
    spec = importlib.util.spec_from_loader("loaders._rust", loader)
    assert spec is not None
    sys.modules["loaders._rust"] = module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    import loaders

    loaders._rust = module
    from tools.loader_peers import Ours

    rates = {}
    for form in FORMS:
        for shard in shards:
            source = Ours(pathlib.Path(shard), 1, form)
            source.run(0, 1)  # filters are made at their first use
            began, n = time.process_time(), PASSES * source.batch * source.n_batches
            source.run(0, n)
            rates[f"{form} {shard}"] = n / (time.process_time() - began)
            source.loader.close()
    print(json.dumps(rates))


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("builds", nargs="+", type=pathlib.Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--recordings", type=int, default=100)
    args = parser.parse_args(argv)
    from tools import bench_loader as bench_loader

    shards = {
        str(bench_loader.make_corpus(codec, n=args.recordings, seconds=38.0)): label
        for codec, (label, _) in bench_loader.CODECS.items()
    }
    rates: dict[str, dict[str, list[float]]] = {str(build): {} for build in args.builds}
    for turn in range(args.rounds):
        builds = [str(build) for build in args.builds]
        for build in builds[:: -1 if turn % 2 else 1]:
            command = [sys.executable, "-m", "tools.bench_builds", "child", build, *shards]
            done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
            for key, rate in json.loads(done.stdout).items():
                rates[build].setdefault(key, []).append(rate)
    first, *others = rates
    print(
        "| form | codec | "
        + " | ".join(rates)
        + " | "
        + " | ".join(f"{name} / first" for name in others)
        + " |"
    )
    print("|---" * (2 + len(rates) + len(others)) + "|")
    for key in rates[first]:
        form, shard = key.split(" ", 1)
        middle = [f"{statistics.median(rates[name][key]):.0f}" for name in rates]
        ratios = []
        for name in others:
            pairs = zip(rates[name][key], rates[first][key], strict=True)
            ratios.append(f"{statistics.median(rate / of_first for rate, of_first in pairs):.3f}")
        print(f"| {form} | {shards[shard]} | {' | '.join(middle + ratios)} |")
    return 0


if __name__ == "__main__":
    if sys.argv[1:2] == ["child"]:
        child(sys.argv[2], sys.argv[3:])
    else:
        sys.exit(main())
