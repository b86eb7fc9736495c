"""Measures each objective's features on ESC-10, in five folds.

    python -m tools.esc10_folds /path/to/esc10 [--config.section.field=value …]

For every objective of configs/esc10_folds.py and every fold: an encoder is trained on the other
four folds (without their labels, except "supervised"). All 400 recordings are embedded, each as the
mean over three views. Classifiers are fitted to the frozen features of the four folds, and tested
on the one that neither has seen. "random" is the same encoder as it is initialised, with another
seed in each fold. Finished parts are not done again.

--objectives=supervised_long, by itself, is the result of labels alone with a wider encoder that
hears each recording whole.

DIR gets a run for each, embeddings/, and `jaxtrain probe`'s results.json and results.md,
with the margins over "random" of the same recordings, with paired bootstrap intervals.
"""

import argparse
import json
import pathlib
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxtrain.parallel import cluster
from jaxtrain.workloads.bird.inference import embed, encoder, measures, probe
from tools import trm_table

FOLDS = (1, 2, 3, 4, 5)
OBJECTIVES = ("mae", "lejepa", "diet", "teacher", "supervised")
ALONE = "supervised_long"  # whose encoder is another
VIEWS = 3


def train(
    path: str, objective: str, fold: int, out: pathlib.Path, overrides: Sequence[str]
) -> float:
    """Train a run unless it is finished. Returns CPU seconds. Raises SystemExit: other fields."""
    workdir = out / f"{objective}_{fold}"
    noted = workdir / "finished.json"
    if not noted.exists():
        command = [
            sys.executable,
            "-m",
            "jaxtrain.main",
            f"--config=configs/esc10_folds.py:{path},{objective},{fold}",
        ]
        seconds = trm_table.start([*command, f"--config.workdir={workdir}", *overrides])
        noted.write_text(
            json.dumps({"path": path, "overrides": sorted(overrides), "cpu_seconds": seconds})
        )
    earlier = json.loads(noted.read_text())
    if (earlier["path"], earlier["overrides"]) != (path, sorted(overrides)):
        raise SystemExit(
            f"tools.esc10_folds: {workdir} was trained on {earlier['path']} with"
            f" {earlier['overrides'] or 'no overrides'}; choose another --out"
        )
    return float(earlier["cpu_seconds"])


def embedded(
    path: str, source: pathlib.Path, fold: int, out: pathlib.Path, *, random: bool
) -> probe.Features:
    model = encoder.load(str(source), ema=not random, random=fold if random else None)
    data = encoder.data_config(model, train=f"{path}/*/*.arrow", views=VIEWS)
    embed.embed(model, data, out, columns=("fold",), batch=40)
    return probe.read(out, group="fold")


def margins(
    found: dict[str, list[np.ndarray]], y: np.ndarray, draws: int
) -> dict[str, dict[str, float]]:
    """Accuracy beyond that of "random", by the same bootstrap. ``found``: which were right."""
    weight = measures.bootstrap(len(y), draws)
    rate = {name: weight @ right / weight.sum(1) for name, right in found.items()}
    return {
        name: measures.summary(x - rate["random"]) for name, x in rate.items() if name != "random"
    }


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="tools.esc10_folds",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("path")
    parser.add_argument("--out", default="runs/esc10_folds")
    parser.add_argument("--objectives", default=",".join(OBJECTIVES))
    parser.add_argument("--folds", default=",".join(map(str, FOLDS)))
    parser.add_argument("--draws", type=int, default=2000)
    args, overrides = parser.parse_known_args(argv)
    if unknown := [text for text in overrides if not text.startswith("--config.")]:
        parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    if ALONE in args.objectives.split(",") and args.objectives != ALONE:
        parser.error(f"{ALONE} has an encoder of its own, and so another random one; give it alone")
    cluster.start_jax()
    out = pathlib.Path(args.out).absolute()
    objectives, folds = args.objectives.split(","), [int(fold) for fold in args.folds.split(",")]
    results: dict[str, Any] = {}
    right: dict[str, Any] = {}
    seconds: dict[str, list[float]] = {}

    for fold in folds:  # fold by fold, so that an early look compares all objectives
        for objective in objectives:
            seconds.setdefault(objective, []).append(
                train(args.path, objective, fold, out, overrides)
            )
    for name in ("random", *objectives):
        splits = []
        for fold in folds:
            source = out / f"{objectives[0] if name == 'random' else name}_{fold}"
            features = embedded(
                args.path,
                source,
                fold,
                out / "embeddings" / f"{name}_{fold}",
                random=name == "random",
            )
            splits.append(
                next(
                    p
                    for p in probe.folds_of(features)
                    if p[1].group is not None and p[1].group[0] == fold
                )
            )
        results[name] = probe.evaluate(splits, draws=args.draws)
        linear = [probe.linear(a.x, a.y, b.x, multilabel=False) for a, b in splits]
        right[name] = np.concatenate(
            [b.y.argmax(1) == s.argmax(1) for s, (_, b) in zip(linear, splits, strict=True)]
        )
        y = np.concatenate([b.y.argmax(1) for _, b in splits])
    text = probe.report(results, out)
    more = margins(right, y, args.draws)
    lines = [
        "",
        (
            "Linear probe by fold, and beyond the random encoder (paired bootstrap); CPU seconds of"
            " one training:"
        ),
        "",
    ]
    lines += [
        "| features | "
        + " | ".join(f"fold {fold}" for fold in folds)
        + " | mean | margin | CPU s |"
    ]
    lines += ["|---|" + "---:|" * (len(folds) + 3)]
    for name, result in results.items():
        each = result["linear"]["accuracy"].get("folds", [result["linear"]["accuracy"]["value"]])
        m = more.get(name)
        margin = (
            f"{100 * m['value']:+.1f} [{100 * m['low']:+.1f}, {100 * m['high']:+.1f}]" if m else ""
        )
        cpu = f"{np.mean(seconds[name]):.0f}" if name in seconds else ""
        cells = [*(f"{100 * x:.1f}" for x in each), f"{100 * np.mean(each):.1f}", margin, cpu]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    with (out / "results.md").open("a") as file:
        file.write("\n".join(lines) + "\n")
    print(text + "\n".join(lines))
    return 0


if __name__ == "__main__":
    sys.exit(main())
