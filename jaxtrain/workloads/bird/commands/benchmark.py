"""Scores a run as a published benchmark does, from the files that the benchmark publishes.

    jaxtrain benchmark birdset SET RUN --data DIR --out DIR [--probe]
    jaxtrain benchmark esc10 RUN --data DIR --out DIR         (or esc50)

    jaxtrain benchmark birdset HSN runs/xcm --data /path/to/HSN --out bench/hsn --probe
    jaxtrain benchmark esc10 runs/xcm --data /path/to/esc10 --out bench/esc10

SET is one of POW, PER, NES, UHH, HSN, NBP, SSW, SNE. RUN is a run of jaxtrain.workloads.bird, a
step of it, a folder of `jaxtrain export`, or one under timm's names (AudioMAE, Bird-MAE).
The folder of --data is that of the published archive, of
shards of Hugging Face `datasets`, or an index of `jaxtrain index`.

BirdSet: cmAP, AUROC and top-1 on the segments of 5 s, by the run's own head (of the set's classes
alone) or with --probe by a linear probe on the set's train split. ESC: the accuracy of a linear
probe and of nearest neighbours, in five folds. Each has an interval of 95 % over bootstrap draws.
DIR gets results.json and the embeddings, from which the same command resumes. ESC and --probe need
scikit-learn: pip install 'jaxtrain[probe]'.
"""

import argparse
from collections.abc import Sequence

from jaxtrain.commands import arguments
from jaxtrain.workloads.bird import commands
from loaders.io import files

ACTIONS = {"birdset": "the segments of 5 s of a set", "esc10": "five folds", "esc50": "five folds"}
SETS = ("POW", "PER", "NES", "UHH", "HSN", "NBP", "SSW", "SNE")


@arguments.reported
def main(argv: Sequence[str] | None = None) -> int:
    parser = arguments.Parser("jaxtrain benchmark", __doc__)
    benchmarks = parser.add_subparsers(dest="name", metavar="BENCHMARK", required=True)
    for name, text in ACTIONS.items():
        action = benchmarks.add_parser(name, help=text)
        if name == "birdset":
            action.add_argument(
                "set", metavar="SET", choices=SETS, help=f"one of {', '.join(SETS)}"
            )
            action.add_argument(
                "--probe", action="store_true", help="by a linear probe on its train split"
            )
            action.add_argument(
                "--names",
                default="",
                metavar="FILE",
                help="the run's classes, one a line, if it has no names",
            )
        else:
            action.add_argument(
                "--views",
                type=arguments.positive,
                default=1,
                help="of each clip, averaged; default: 1",
            )
        _add_shared_flags(action)
    args = parser.parse_args(argv)
    if args.name != "birdset" or args.probe:
        commands.need_sklearn()

    from jaxtrain.workloads.bird.inference import benchmark, detect, encoder

    commands.prepare_process()
    model = encoder.load(args.run, step=args.step, ema=args.ema)
    out = files.expanded(args.out)
    if args.name == "birdset":
        lines = benchmark.birdset(
            model,
            args.set,
            args.data,
            out,
            linear=args.probe,
            names=detect.read_classes(args.names),
            draws=args.draws,
            batch=args.batch,
        )
    else:
        lines = benchmark.esc(
            model,
            args.name,
            args.data,
            out,
            views=args.views,
            draws=args.draws,
            batch=args.batch,
        )
    print("\n".join(lines))
    return 0


def _add_shared_flags(parser: argparse.ArgumentParser) -> None:
    arguments.add_run(parser, ema=True)
    parser.add_argument(
        "--data", required=True, metavar="DIR", help="the benchmark's recordings and labels"
    )
    parser.add_argument(
        "--out",
        required=True,
        type=arguments.out_folder,
        metavar="DIR",
        help="the folder of the results",
    )
    parser.add_argument(
        "--draws", type=arguments.positive, default=200, help="of the bootstrap; default: 200"
    )
    parser.add_argument(
        "--batch",
        type=arguments.positive,
        default=64,
        help="recordings computed together; default: 64",
    )
