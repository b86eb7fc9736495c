"""Measures how good frozen features are: linear probe, k-NN, few shot, and the run's own head.

    jaxtrain probe --train EMBEDDINGS … --test EMBEDDINGS … --out DIR
    jaxtrain probe --train EMBEDDINGS … --folds COLUMN --out DIR

    jaxtrain probe --train emb/hsn-train --test emb/hsn-test --out runs/xcm/features

EMBEDDINGS are folders of `jaxtrain embed`. On features that stay as they are:

    linear     logistic regression, its penalty chosen on a part of the train rows
    knn        the 20 nearest by cosine, weighted by exp(cosine / 0.07) (Wu et al. 2018)
    few shot   nearest mean of 1, 2, 4 … examples of each class, of many draws (Snell et al. 2017)
    scores     the run's supervised head as it is, if there is one

With --folds COLUMN (kept by `jaxtrain embed --columns`) every fold of --train is predicted from the
others instead. Measures are accuracy, cmAP and AUROC, with percentile intervals of 95 % over
bootstrap draws of the test recordings.

DIR gets results.json, results.md, and with matplotlib (extra: plots) measures.png and few_shot.png.
The command needs scikit-learn: pip install 'jaxtrain[probe]'.
"""

import pathlib
from collections.abc import Sequence

from jaxtrain.commands import arguments
from jaxtrain.workloads.bird import commands


@arguments.reported
def main(argv: Sequence[str] | None = None) -> int:
    parser = arguments.Parser("jaxtrain probe", __doc__)
    parser.add_argument(
        "--train",
        required=True,
        nargs="+",
        metavar="EMBEDDINGS",
        help="folders, each a row of the table",
    )
    parser.add_argument(
        "--test", nargs="+", metavar="EMBEDDINGS", help="as many, of the test recordings"
    )
    parser.add_argument(
        "--folds", metavar="COLUMN", help="instead of --test: predict each fold from the others"
    )
    parser.add_argument(
        "--out",
        required=True,
        type=arguments.out_folder,
        metavar="DIR",
        help="the folder of the results",
    )
    parser.add_argument("--kind", default="mean", choices=("mean", "cls"), help="default: mean")
    parser.add_argument(
        "--draws", type=arguments.positive, default=1000, help="of the bootstrap; default: 1000"
    )
    args = parser.parse_args(argv)
    n_test = len(args.test) if args.test else len(args.train)
    if (args.test is None) == (args.folds is None) or n_test != len(args.train):
        parser.error("give as many --test as --train, or --folds")
    commands.need_sklearn()

    from jaxtrain.workloads.bird.inference import probe

    results = {}
    for i, folder in enumerate(args.train):
        train = probe.read(folder, kind=args.kind, group=args.folds)
        if args.folds:
            splits = probe.folds_of(train)
        else:
            splits = [(train, probe.read(args.test[i], kind=args.kind))]
        results[pathlib.Path(folder).name] = probe.evaluate(splits, draws=args.draws)
    print(probe.report(results, args.out))
    return 0
