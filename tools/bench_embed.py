"""`jaxtrain embed` compared with its parts: a loader without an encoder, an encoder without a loader, in turns.

    NPROC=1 python -m tools.bench_embed RUN --data '/path/to/esc10/*/*.arrow' --threads 1

Each part makes one pass in a round, with empty queues and a compiled program. Times are medians, and ratios medians of
those within a round. If loader and encoder have cores of their own (as in the command, of one thread each on two cores)
or a device, embedding can be as fast as the slower of them, "slower". If they share all cores it can be as fast as both
parts' times in turn, "turns".

Seen on two free cores, one thread each, with the encoder of configs/esc10_folds.py (2.5 s, 128 wide): loader 227,
encoder 1,045, embedding 238, 1.10 of "slower". And with that of its supervised_long (5 s, 192 wide): loader 146,
encoder 218, embedding 120, 0.76 of "slower" and 1.26 of "turns". On cores that other work kept busy (load 10): 237, 930
and 184, 0.95 of "turns".
"""

import argparse
import pathlib
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax

from jaxtrain.workloads.bird.inference import embed, encoder
from loaders.audio import shards, spectrogram


def measured(model: encoder.Model, data: spectrogram.Config, *, batch: int) -> dict[str, float]:
    """Run one pass of each part. Return name -> recordings/s."""
    setup = encoder.set_up(model, data, embed.features(model.config, ("mean", "cls"), data.views), model.head, batch=batch)

    def rate(run: Callable[[], object]) -> float:
        begun = time.perf_counter()
        run()
        return setup.n / (time.perf_counter() - begun)

    def load() -> dict[str, Any]:
        setup.loader.seek(0)
        stream = setup.stream()
        return [jax.block_until_ready(arrays) for _, arrays in stream][-1]

    rates: dict[str, float] = {}
    last: dict[str, Any] = {}
    rates["loader"] = rate(lambda: last.update(load()))
    times = -(-setup.n // setup.batch)
    jax.block_until_ready(setup.run(setup.weights, last))
    rates["encoder"] = rate(lambda: jax.block_until_ready([setup.run(setup.weights, last) for _ in range(times)]))
    setup.loader.close()
    with tempfile.TemporaryDirectory() as folder:
        rates["embed"] = embed.embed(model, data, folder, batch=batch)["samples_per_second"]
    rates["slower"] = min(rates["loader"], rates["encoder"])
    rates["turns"] = 1 / (1 / rates["loader"] + 1 / rates["encoder"])
    return rates


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="tools.bench_embed", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", metavar="RUN")
    parser.add_argument("--data", required=True, help="folder, glob or file of shards")
    parser.add_argument("--repeat", type=int, default=1, help="how often the shards are read in a pass")
    parser.add_argument("--threads", type=int, default=0, help="of the loader; 0 = one for each core")
    parser.add_argument("--views", type=int, default=1)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args(argv)
    model = encoder.load(args.run)
    with tempfile.TemporaryDirectory() as folder:
        for i in range(args.repeat):
            for shard in shards.find_shards(args.data, "train"):
                name = "-".join(pathlib.Path(shard).parts[-2:])
                (pathlib.Path(folder) / f"{i}-{name}").symlink_to(pathlib.Path(shard).absolute())
        data = encoder.data_config(model, train=f"{folder}/*.arrow", test="", views=args.views, threads=args.threads)
        rounds = [measured(model, data, batch=args.batch) for _ in range(args.rounds)]
    for name in rounds[0]:
        rate, share = (statistics.median(each) for each in zip(*((r[name], r["embed"] / r[name]) for r in rounds), strict=True))
        print(f"{name:8} {rate:8.0f}   embed is {share:.2f} of it")
    return 0


if __name__ == "__main__":
    sys.exit(main())
