"""The five workloads, compiled for absent chips, as tables.

python -m tools.compile_table [--targets …]

    jaxtrain plan --setup gpu                                            # once
    python -m tools.compile_table  # the tables of docs/results/compiled-steps.md
    python -m tools.compile_table --targets tpu:v5e:4x4 --workloads bird language --meshes fsdp
    python -m tools.compile_table --targets gpu:b200x8 gpu:h100x8*2 --sizes small

"published" is the size of a workload's own config, of which giblet's first matrix is a sixteenth.
The whole of it takes minutes to compile: --sizes whole. "small" is the same program with small
arrays. There is a row for each step and a column for each mesh: bytes, and overlapped exchanges.
`jaxtrain plan` says more of one step.
"""

import argparse
import pathlib
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from jaxtrain import config as config_lib
from jaxtrain import plan as plan_lib
from jaxtrain.plan import worker

ROOT = pathlib.Path(__file__).resolve().parents[1]
SIZES = ("small", "published", "whole")
# all devices along one axis; or 2 × 2 along fsdp and model, the rest along data
MESHES = ("data", "fsdp", "mixed")
BF16 = {"model.dtype": "bfloat16"}
Key = tuple[str, str, str]  # workload, size, mesh
_TINY = {
    "model.embed": "256",
    "model.depth": "2",
    "model.heads": "4",
    "model.kv_heads": "2",
    "model.head_dim": "64",
    "model.mlp": "512",
    "model.vocab": "1024",
    **BF16,
}


class Workload(NamedTuple):
    source: str  # config file and its argument
    common: Mapping[str, str]
    small: Mapping[str, str]
    published: Mapping[str, str] = {}
    whole: Mapping[str, str] | None = None  # None: as published

    def config(self, size: str, mesh: str, count: int, folder: pathlib.Path) -> config_lib.Config:
        own = self.published if size == "whole" and self.whole is None else getattr(self, size)
        settings = {**self.common, **own, **axes(mesh, count), "workdir": str(folder / "run")}
        # Higgs has 8 rows for each device: a batch that every mesh divides.
        texts = {
            name: text.replace("{folder}", str(folder)).replace("{rows}", str(8 * count))
            for name, text in settings.items()
        }
        return config_lib.load(f"{ROOT}/{self.source}", texts.items())


WORKLOADS = {
    "bird": Workload(
        "configs/xcm.py:demo",
        {},
        {
            "model.embed": "128",
            "model.depth": "2",
            "model.heads": "4",
            "model.patch": "(16, 16)",
            "train.batch": "64",
            "train.accumulate": "1",
            **BF16,
        },
    ),
    "language": Workload(
        "configs/lm.py:qwen3-0.6b",
        {"data.sources": "({'path': '{folder}/text.txt'},)"},
        {**_TINY, "model.context": "256", "data.context": "256", "train.batch": "32"},
    ),
    "trm": Workload(
        "configs/trm_sudoku.py",
        {"data.sources": "({'n_train': 20, 'n_test': 5, 'blanks': (20, 30)},)"},
        {
            "model.embed": "128",
            "model.heads": "4",
            "model.inner_multiple": "128",
            "model.puzzle_embed": "128",
            "model.cycles_high": "2",
            "model.cycles_low": "2",
            "train.batch": "64",
        },
    ),
    "higgs": Workload(
        "configs/higgs.py:blank",
        {"train.batch": "{rows}"},
        {**_TINY, "train.batch": "16", "train.accumulate": "2"},
    ),
    "giblet": Workload(
        "configs/giblet.py:blank",
        {},
        {
            **{
                f"model.{name}_widths": "(64, 32)"
                for name in ("audio", "text", "decode_video", "decode_audio", "decode_text")
            },
            "model.video_widths": "(64, 64, 32)",
            "model.trunk_widths": "(128, 128)",
            "model.bottleneck": "64",
            "model.decoder_widths": "(128, 128, 64, 64)",
            "model.head_width": "128",
            "train.batch": "16",
        },
        {"model.video_widths": "(256, 2048, 1024)"},
        whole={},
    ),
}


def axes(mesh: str, count: int) -> dict[str, str]:
    sizes = {"data": (count, 1, 1), "fsdp": (1, count, 1), "mixed": (count // 4, 2, 2)}[mesh]
    return {
        f"mesh.{name}": str(n) for name, n in zip(("data", "fsdp", "model"), sizes, strict=True)
    }


def write_data(folder: pathlib.Path) -> None:
    """Write the files that configs name, on which no step depends."""
    (folder / "text.txt").write_text("one two three four five six seven eight nine ten\n" * 200)


def jobs(
    target: str,
    names: Sequence[str],
    sizes: Sequence[str],
    meshes: Sequence[str],
    folder: pathlib.Path,
) -> dict[Key, worker.Job]:
    count, jobs_of = plan_lib.parse_target(target).count, {}
    for name in names:
        for size in sizes:
            for mesh in meshes:
                config = WORKLOADS[name].config(size, mesh, count, folder)
                jobs_of[name, size, mesh] = worker.Job(config, target, worker.LAST)
    return jobs_of


def tables(args: argparse.Namespace, folder: pathlib.Path) -> Iterator[str]:
    """For each target, bytes and overlapped exchanges: a row a step, a column a mesh."""
    for target in args.targets:
        found: dict[Key, worker.Answer] = {}
        for name in args.workloads:
            asked = jobs(target, [name], args.sizes, args.meshes, folder)
            found |= zip(asked, worker.ask(list(asked.values())), strict=True)
        for key, answer in found.items():
            if not answer.compiled:
                print(f"{', '.join(key)}: {answer.error}", file=sys.stderr)
        for title, cell in (
            (f"{target}, GB of each device", _bytes),
            ("exchanges that overlap", _overlap),
        ):
            yield from (
                "",
                f"| {title} | {' | '.join(args.meshes)} |",
                f"|---|{'---:|' * len(args.meshes)}",
            )
            for name, size in dict.fromkeys((name, size) for name, size, _ in found):
                cells = [cell(found[name, size, mesh]) for mesh in args.meshes]
                yield f"| {name}, {size} | {' | '.join(cells)} |"


def _bytes(answer: worker.Answer) -> str:
    return f"{answer.compiled.peak / 1e9:.2f}" if answer.compiled else "does not compile"


def _overlap(answer: worker.Answer) -> str:
    """As "129 of 144 all-gather, …": the early ones, of all."""
    step = answer.compiled
    if step is None or step.collectives is None:
        return ""
    kinds: dict[str, list[int]] = {}
    for (kind, _), found in sorted(step.collectives.items()):
        early, every = kinds.get(kind, (0, 0))
        kinds[kind] = [early + found.early, every + found.times]
    return ", ".join(f"{early:,} of {every:,} {kind}" for kind, (early, every) in kinds.items())


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        "compile_table", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--targets", nargs="+", default=["gpu:h100x8"], help="as in --plan=")
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=list(WORKLOADS))
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=["published"])
    parser.add_argument("--meshes", nargs="+", choices=MESHES, default=list(MESHES))
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="compile_table-") as folder:
        write_data(pathlib.Path(folder))
        try:
            for line in tables(args, pathlib.Path(folder)):
                print(line, flush=True)
        except (plan_lib.PlanError, config_lib.ConfigError) as error:
            print(f"error: {error}", file=sys.stderr)
            return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
