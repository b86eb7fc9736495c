"""Measure the cost of digests and of verified steps on the demos.

    python -m tools.bench verify --out DIR [--workload NAME …] [--steps N]

A run of each demo takes plain and verified steps in turn (guard.verify_every=2) and a digest with
every other record. The medians of N of each give the share of a step that metrics.digest costs at
the demo's metrics.every, and guard.verify_every at 200. CPU time of the process is measured, since
other programs may use the machine.
"""

import argparse
import functools
import pathlib
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import jax

from jaxtrain import config as config_lib
from jaxtrain.parallel import cluster
from jaxtrain.run import loop
from jaxtrain.run.metrics_logger import MetricsLogger
from jaxtrain.run.step_compiler import StepCompiler
from jaxtrain.run.verify import Verifier
from tests.proofs.replay_proof import CONFIGS, patch

SIZES = {
    "embed": "256",
    "depth": "4",
    "heads": "4",
    "kv_heads": "2",
    "head_dim": "64",
    "mlp": "1024",
}
OWN = {  # of a config that is not a demo by itself
    "audio_language": (
        {f"model.{name}": n for name, n in SIZES.items()}
        | {"train.batch": "8", "train.accumulate": "1"}
    )
}
AT = 200  # of guard.verify_every


def measure(name: str, out: pathlib.Path, steps: int) -> str:
    times: dict[str, list[float]] = {"plain": [], "verified": [], "digest": []}

    def timed(kind: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            began = time.process_time()
            result = jax.block_until_ready(function(*arguments))
            times[kind].append(time.process_time() - began)
            return result

        return call

    at, verify, start = StepCompiler.at, Verifier.__call__, MetricsLogger.__init__

    def program(self: Any, item: Any) -> Any:
        return timed("plain", at(self, item)) if item.step % 2 else at(self, item)

    def begin(self: Any, *arguments: Any, **more: Any) -> None:
        start(self, *arguments, **more)
        self._digest = timed("digest", self._digest)

    demo, sizes = CONFIGS[name][0], OWN.get(name, {})
    own = {
        **config_lib.WITHOUT_OUTPUTS,
        "workdir": str(out / name),
        "train.steps": str(2 * steps + 2),
        "train.eval_every": "0",
        "train.patience": "0",
        "checkpoint.best": "",
        "checkpoint.every": "1000",
        "metrics.every": "2",
        "metrics.digest": "true",
        "guard.verify_every": "2",
        "mesh.data": "-1",
        "mesh.fsdp": "1",
    }
    every = config_lib.load(demo, list(sizes.items())).metrics.every
    with (
        patch(StepCompiler, "at", program),
        patch(
            Verifier,
            "__call__",
            lambda self, *a: timed("verified", functools.partial(verify, self))(*a),
        ),
        patch(MetricsLogger, "__init__", begin),
    ):
        loop.run(config_lib.load(demo, list({**sizes, **own}.items())))
    plain, verified, digest = (
        statistics.median(times[kind][1:]) for kind in ("plain", "verified", "digest")
    )
    return (
        f"| {name} | {1e3 * plain:.1f} | {1e3 * digest:.2f} | {every} |"
        f" {digest / plain / every:.2%} | {1e3 * verified:.1f} |"
        f" {(verified - plain) / plain / AT:.2%} |"
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=pathlib.Path, required=True)
    parser.add_argument("--workload", nargs="+", choices=CONFIGS, default=list(CONFIGS))
    parser.add_argument(
        "--steps", type=int, default=20, metavar="N", help="plain and verified ones of each demo"
    )
    args = parser.parse_args()
    cluster.start_jax()
    print(
        "| demo | step [ms] | digest [ms] | metrics.every | of a step | verified step [ms] | of a"
        " step at 200 |",
        flush=True,
    )
    for name in args.workload:
        print(measure(name, args.out, args.steps), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
