"""The five workloads at sizes and on meshes for which they are compiled, without a chip.

"published" is the size of a workload's own config, of which giblet's first matrix is a sixteenth,
and a third of the encoder's layers, which are no loop.
"small" is the same program with small arrays.
"""

import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from jaxtrain import config as config_lib
from jaxtrain import plan as plan_lib
from jaxtrain.plan import hlo, layouts, worker

ROOT = pathlib.Path(__file__).resolve().parents[2]
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

    def config(self, size: str, mesh: str, count: int, folder: pathlib.Path) -> config_lib.Config:
        own = {"small": self.small, "published": self.published}[size]
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
        {"model.depth": "4"},
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
        {"train.batch": "{rows}", "model.remat": "full"},
        {**_TINY, "train.batch": "16", "train.accumulate": "2"},
        {"train.accumulate": "8"},
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
    ),
}


def axes(mesh: str, count: int) -> dict[str, str]:
    """All devices along one axis, or "mixed": 2 × 2 along fsdp and model, the rest along data."""
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


def arrays_with_two_sides(text: str, size: int) -> Iterator[str]:
    """Yield the instructions of a program whose results have two sides of a size: its scores."""
    for _, i in hlo.Program(text).executed():
        if any(array.dims.count(size) > 1 for array in layouts.arrays(i.result)):
            yield i.line[:300]
