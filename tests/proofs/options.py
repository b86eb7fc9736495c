"""The options of each chip, by what they change in the compiled program of a language model.

    python -m tests.proofs.options gpu:b300x8 gpu:gb300x8 tpu:tpu7x:2x2x1
    python -m tests.proofs.options tpu:v5e:2x2 --case=lm-1b-2k model.depth=2

A step of a small language model with fsdp over all devices is compiled with the options of a run
(jaxtrain/compile/xla_options.py), then without each of them, and with each that other chips have. A
row has the collectives that begin early, the bytes that a device sends, the forecast without a
calibration, its exposed part, and the memory.

With --case, a measured case (`tools.chip.tpu_steps`) is compiled for TPUs with each option that
others set (`xla_options.OF_LIBTPU`), one at a time. A row has the bytes of HBM, the compiler's
cycles, the exchanges and the memory, or says that the program is the same.
"""

import argparse
import collections
import hashlib
import pathlib
import re
import tempfile
from dataclasses import replace

import pytest

from jaxtrain import plan
from jaxtrain.compile import xla_options
from jaxtrain.plan import hlo, mesh_advice, mesh_search, worker
from jaxtrain.plan.memory import in_bytes
from tests.plan.cases import LARGE, load
from tools.chip import cases, tpu_steps

OWN = "those of a run"
WITHOUT = {
    "gpu": {
        "xla_gpu_enable_latency_hiding_scheduler": False,
        "xla_gpu_reduce_scatter_combine_threshold_bytes": 31457287,  # XLA's own
    },
    "tpu": {
        "xla_tpu_enable_latency_hiding_scheduler": False,
        "xla_jf_spmd_threshold_for_windowed_einsum_mib": 0,
    },
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


HEAD_OF_CASE = (
    "| case | option | GB of HBM | cycles ms | exchanges, early of all | exchanged GB | peak GB |\n"
    "|---|---|---:|---:|---|---:|---:|"
)


def opposite(name, value, own):
    """Return a value that a run does not have: the one that others set, or its opposite."""
    if own.get(name) != value:
        return value
    return not value if isinstance(value, bool) else 0


def digest(text):
    """Return a digest of a program without what tells where its instructions come from."""
    lines = text.splitlines()[1:]
    first = next(i for i, line in enumerate(lines) if line.endswith("{"))
    program = re.sub(r", (metadata|frontend_attributes)=\{[^}]*\}", "", "\n".join(lines[first:]))
    return hashlib.sha256(program.encode()).hexdigest()


def figures(step, target):
    """Return the figures of a row."""
    sums = tpu_steps.sums_of(step.kernels, target)
    times, early = collections.Counter(), collections.Counter()
    for each in hlo.collectives(step.text):
        times[each.kind] += each.times
        early[each.kind] += each.times * each.is_async
    kinds = [f"{kind} {early[kind]} of {n}" for kind, n in sorted(times.items())]
    return [
        f"{(sums.read + sums.written) / 1e9:.2f}",
        f"{1e3 * sums.cycles / target.known_chip.clock:.2f}",
        ", ".join(kinds) or "none",
        f"{tpu_steps.exchanged(step.text) / 1e9:.2f}",
        f"{step.peak / 1e9:.2f}",
    ]


def compare(name, text, settings, only):
    """Print the rows of a case."""
    target = plan.parse_target(text)
    with tempfile.TemporaryDirectory() as folder:
        case = next(case for case in cases.CASES if case.name == name)
        more = dict(setting.split("=", 1) for setting in settings)
        data = cases.Data(pathlib.Path(folder), small=False)
        config = case.config(data, {}, {**tpu_steps.SETTINGS[name], **more})
        config, _ = plan.decide(config, target, text)
        own = xla_options.defaults(target.known_chip.kind, count=target.count, cores=1)
        variants = {OWN: {}}
        for option, value in xla_options.OF_LIBTPU.items():
            if not only or option in only.split(","):
                value = opposite(option, value, own)
                variants[f"`{option}={value}`"] = {option: value}
        digests = {}
        with worker.compiler(target, text) as compiler:
            for label, options in variants.items():
                answer = compiler(replace(config, compiler={**config.compiler, **options}))
                step = answer.compiled
                if step is None:
                    cells = [answer.error[:160], "", "", "", ""]
                elif digest(step.text) in digests:
                    cells = [f"the program of {digests[digest(step.text)]}", "", "", "", ""]
                else:
                    digests[digest(step.text)] = label
                    cells = figures(step, target)
                print(f"| {name}, {target.name} | {label} | {' | '.join(cells)} |", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("targets", nargs="+", help="and with --case, settings")
    parser.add_argument("--case", default="", help="of tools.chip.tpu_steps")
    parser.add_argument("--only", default="", help="options, with --case")
    arguments = parser.parse_intermixed_args()
    if arguments.case:
        print(HEAD_OF_CASE, flush=True)
        settings = [word for word in arguments.targets if "=" in word]
        for text in arguments.targets:
            if text not in settings:
                compare(arguments.case, text, settings, arguments.only)
        return
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
