"""The options of each chip, by what they change in the compiled program of a language model.

    python -m tests.proofs.options gpu:b300x8 gpu:gb300x8 tpu:tpu7x:2x2x1

A step of a small language model with fsdp over all devices is compiled with the options of a run
(jaxtrain/compile/xla_options.py), then without each of them, and with each that other chips have. A
row has the collectives that begin early, the bytes that a device sends, the forecast without a
calibration, its exposed part, and the memory.
"""

import argparse
import pathlib
import tempfile
from dataclasses import replace

import pytest

from jaxtrain import plan
from jaxtrain.plan import mesh_advice, mesh_search, worker
from jaxtrain.plan.memory import in_bytes
from tests.plan.cases import LARGE, load

OWN = "those of a run"
WITHOUT = {
    "gpu": {
        "xla_gpu_enable_latency_hiding_scheduler": False,
        "xla_gpu_reduce_scatter_combine_threshold_bytes": 31457287,  # XLA's own
    },
    "tpu": {"xla_tpu_enable_latency_hiding_scheduler": False},
}
ASYNC = "xla_tpu_enable_async_collective_fusion"
# Options that the table has for other chips, or for none.
WITH = {
    "gpu": [mesh_advice.MORE_OVERLAP],
    "tpu": [
        {"xla_enable_async_all_gather": True, ASYNC: True, f"{ASYNC}_fuse_all_gather": True},
        {"xla_tpu_scoped_vmem_limit_kib": 50000},
    ],
}


def variants(kind):
    """Yield options over those of a run, each with its name."""
    yield OWN, {}
    for name, value in WITHOUT[kind].items():
        yield f"`{name}={value}`", {name: value}
    for options in WITH[kind]:
        names = " ".join(f"{name}={value}" for name, value in options.items())
        yield f"`{names}`", options


def row(name, answer, assembly, target):
    step = answer.compiled
    if step is None:
        return f"| {target.name} | {name} | {answer.error[:160]} | | | | |"
    found = mesh_search.forecast_of(step, assembly, target)
    times = sum(exchanged.times for exchanged in step.collectives.values())
    early = sum(exchanged.early for exchanged in step.collectives.values())
    sent = sum(exchanged.sent for exchanged in step.collectives.values())
    cells = [
        target.name,
        name,
        f"{early} of {times}",
        in_bytes(sent),
        f"{1e3 * found.seconds:.2f}",
        f"{1e3 * found.exposed:.2f}",
        in_bytes(step.peak),
    ]
    return f"| {' | '.join(cells)} |"


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("targets", nargs="+")
    arguments = parser.parse_args()
    sizes = [("mesh.data", "1"), ("mesh.fsdp", "-1"), ("train.batch", "64")]
    with pytest.MonkeyPatch.context() as monkeypatch, tempfile.TemporaryDirectory() as folder:
        config = load("language", pathlib.Path(folder), monkeypatch, *LARGE["language"], *sizes)
        for text in arguments.targets:
            target = plan.parse_target(text)
            assembly = plan.abstractly(config, target)
            with worker.compiler(target, text) as compiler:
                for name, options in variants(target.kind):
                    answer = compiler(replace(config, compiler=options))
                    print(row(name, answer, assembly, target), flush=True)


if __name__ == "__main__":
    main()
