"""Fits a head for `jaxtrain detect --model` on embeddings, from 1, 5 or 20 examples of each class.

    jaxtrain fit EMBEDDINGS… --out MODEL [--labels TABLE] [--method linear|prototypes|patches]
    jaxtrain fit INDEX… --run RUN --out MODEL

    jaxtrain fit emb/windows --labels labels.csv --background 200 --out wren.npz

EMBEDDINGS are folders of `jaxtrain embed`. With --run, `fit` first embeds an INDEX of `jaxtrain
index` into the folder MODEL-embeddings (without .npz). `search` reads it too. Their own labels are
taken, or those of a table with file, start, end, label, and answer (yes, no, skip), as `jaxtrain
index` reads it. Lines about other recordings are counted, and listed in MODEL-errors.csv. A row
that has a label is taken to have no other; --background adds rows that the table does not name as
counter-examples.

    linear       logistic regression on standardised features
    prototypes   cosine with the mean direction of a class
    patches      cosine of the nearest patch with learned prototypes (arXiv 2504.12880); embed with
                 --kinds patches

The penalty is chosen by cross-validation over recordings, whose held-out rows also calibrate the
scores and give each class the threshold that reaches --precision. The command needs scikit-learn:
pip install 'jaxtrain[probe]'.
"""

import argparse
import pathlib
from collections.abc import Sequence
from typing import Any

from jaxtrain.commands import arguments
from jaxtrain.workloads.bird import commands
from loaders.audio.recordings.annotations import Errors
from loaders.io import atomic_write, files

METHODS = ("linear", "prototypes", "patches")


@arguments.reported
def main(argv: Sequence[str] | None = None) -> int:
    parser = arguments.Parser("jaxtrain fit", __doc__)
    parser.add_argument(
        "embeddings",
        metavar="EMBEDDINGS",
        nargs="+",
        help="folders of `jaxtrain embed`, or indexes",
    )
    parser.add_argument(
        "--out",
        required=True,
        type=arguments.out_file,
        metavar="MODEL",
        help="the file to write, .npz",
    )
    parser.add_argument(
        "--run",
        default="",
        metavar="RUN",
        help="a run, step directory or export, to embed an INDEX by",
    )
    parser.add_argument(
        "--ema", action="store_true", help="with --run: the average of the parameters"
    )
    parser.add_argument("--split", default="train", help="of an INDEX; default: train")
    parser.add_argument(
        "--audio-root",
        default="",
        metavar="FOLDER",
        help="of the recordings of an INDEX; default: its own",
    )
    parser.add_argument(
        "--batch",
        type=arguments.positive,
        default=64,
        help="rows of an INDEX embedded together; default: 64",
    )
    parser.add_argument(
        "--labels",
        default="",
        metavar="TABLE",
        help="file, start, end, label, answer; default: their own",
    )
    commands.add_table_flags(parser.add_argument_group("the columns of --labels"))
    parser.add_argument(
        "--background",
        type=int,
        default=0,
        metavar="N",
        help="rows that --labels does not name; default: 0",
    )
    parser.add_argument("--method", default="linear", choices=METHODS, help="default: linear")
    parser.add_argument(
        "--kind",
        default="",
        choices=("", "mean", "cls"),
        help="features; default: those of the run's head",
    )
    parser.add_argument(
        "--prototypes",
        type=arguments.positive,
        default=1,
        help="of a class, by patches; default: 1",
    )
    parser.add_argument(
        "--precision", type=float, default=0.9, help="that thresholds are for; default: 0.9"
    )
    parser.add_argument(
        "--seed", type=arguments.seed, default=0, help="of folds and background; default: 0"
    )
    args = parser.parse_args(argv)
    if not 0 < args.precision <= 1:
        parser.error(f"--precision is {args.precision}; it must lie in (0, 1]")
    if args.background < 0 or (args.background and not args.labels):
        parser.error(
            "--background draws rows that --labels does not name; give it at least 0, and --labels"
        )
    commands.need_sklearn()
    return _fit(args)


def _fit(args: argparse.Namespace) -> int:
    import numpy as np

    from jaxtrain.workloads.bird.inference import embeddings, fit, heads, labelled_rows

    listed = args.out.with_name(f"{args.out.name.removesuffix('.npz')}-errors.csv")
    atomic_write.refuse_unwritable(listed, folder=False)
    commands.prepare_process()
    errors = Errors()
    folders = [embeddings.read(folder) for folder in _embedded(args)]
    if args.labels:
        options: dict[str, Any] = {"reading": commands.table_options(args), "errors": errors}
        given = labelled_rows.of_table(
            folders, args.labels, background=args.background, seed=args.seed, **options
        )
    else:
        given = labelled_rows.own(folders)
    labelled_rows.refuse_one_sided(given)
    pool = args.kind or str(folders[0].metadata.get("pool"))
    pool = pool if pool in heads.POOLS and folders[0].has(pool) else "mean"
    options = {"prototypes": args.prototypes, "precision": args.precision, "seed": args.seed}
    fitted = fit.fit(folders, given, method=args.method, pool=pool, **options)
    heads.save(args.out, fitted.head)
    width = max(len(name) for name in (*given.names, "class"))
    print(f"{'class':{width}}  examples  others  average precision  threshold")
    bounds = fitted.head.thresholds
    assert bounds is not None
    for c, name in enumerate(given.names):
        n, others = (
            (given.y[:, c] * given.known[:, c]).sum(),
            ((1 - given.y[:, c]) * given.known[:, c]).sum(),
        )
        average = f"{fitted.precision[c]:.3f}" if np.isfinite(fitted.precision[c]) else "-"
        print(f"{name:{width}}  {n:8.0f}  {others:6.0f}  {average:>17}  {bounds[c]:9.3g}")
    how = (
        f"{fitted.folds} folds"
        if fitted.folds
        else "no cross-validation: some class has one example"
    )
    mean = f", mean average precision {np.nanmean(fitted.precision):.3f}" if fitted.folds else ""
    print(
        f"{args.out}: {args.method}, {len(given.y)} rows, penalty {fitted.penalty:g}, {how}{mean}"
    )
    if (given.y.any(1) | (given.known == 0).any(1)).all():
        remedy = "add silence: --background N, or empty windows"
        print(f"no row is without a class, so the thresholds hold among calls alone; {remedy}")
    commands.show_errors(errors, listed)
    print(
        f"{len(given.y)} rows used, {int((~given.y.any(1)).sum())} without a class;"
        f" {errors.summary(str(listed))}"
    )
    return 0


def _embedded(args: argparse.Namespace) -> list[pathlib.Path]:
    """Return the folders of embeddings, of which those of indexes are made, or completed."""
    from jaxtrain.workloads.bird.inference import InferenceError, embed, encoder
    from loaders.audio.recordings import store

    given = [files.expanded(each) for each in args.embeddings]
    indexes = [folder for folder in given if (folder / "index.json").is_file()]
    if indexes and not args.run:
        raise InferenceError(
            f"{indexes[0]} is an index of recordings; name the run that embeds it: --run RUN"
        )
    if args.run and not indexes:
        raise InferenceError(
            "--run is given, and none of the folders is an index of `jaxtrain index`"
        )
    if not indexes:
        return given
    model = encoder.load(args.run, ema=args.ema)
    kinds = ["mean", "patches"] if args.method == "patches" else ["mean", "cls"]
    place = args.out.with_name(f"{args.out.name.removesuffix('.npz')}-embeddings")
    made = {}
    for number, index in enumerate(indexes):
        has_labels = not args.labels and bool(store.read(index)["classes"])
        changes = {"train": str(index), "test": "", "audio_root": args.audio_root, "views": 1}
        data = encoder.data_config(
            model, **changes, label="labels" if has_labels else "", multilabel=has_labels
        )
        made[index] = place if len(indexes) == 1 else place.with_name(f"{place.name}-{number}")
        with atomic_write.alone(made[index]):
            done = embed.embed(
                model, data, made[index], split=args.split, kinds=kinds, batch=args.batch
            )
        print(
            f"{made[index]}: {done['done']} rows of {index} embedded ({done['unreadable']}"
            " unreadable)"
        )
    return [made.get(folder, folder) for folder in given]
