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
from typing import TYPE_CHECKING

from jaxtrain.commands import arguments
from jaxtrain.workloads.bird import commands
from loaders.audio.recordings.annotations import Errors
from loaders.io import atomic_write, files

if TYPE_CHECKING:  # JAX is not imported for the help of the command
    from jaxtrain.workloads.bird.inference.encoder import Model
    from jaxtrain.workloads.bird.inference.fit import Fitted
    from jaxtrain.workloads.bird.inference.labelled_rows import Examples

MAX_LISTED = 5  # classes in a line
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

    from jaxtrain.workloads.bird.inference import embeddings, fit, heads, labelled_rows

    error_table = _next_to(args.out, "errors.csv")
    atomic_write.refuse_unwritable(error_table, folder=False)
    commands.prepare_process()
    errors = Errors()
    folders = [embeddings.read(folder) for folder in _embedded(args)]
    if args.labels:
        examples = labelled_rows.of_table(
            folders,
            args.labels,
            background=args.background,
            seed=args.seed,
            reading=commands.table_options(args),
            errors=errors,
        )
    else:
        examples = labelled_rows.own(folders, errors)
    labelled_rows.refuse_one_sided(examples)
    pool = args.kind or str(folders[0].metadata.get("pool"))
    if pool not in heads.POOLS or not folders[0].has(pool):
        pool = "mean"
    fitted = fit.fit(
        folders,
        examples,
        method=args.method,
        pool=pool,
        prototypes=args.prototypes,
        precision=args.precision,
        seed=args.seed,
    )
    heads.save(args.out, fitted.head)
    _print_classes(examples, fitted)
    n_rows = len(examples.y)
    print(f"{args.out}: {args.method}, {n_rows} rows, penalty {fitted.penalty:g}")
    print("\n".join(_validation_lines(examples, fitted)))
    has_class = examples.y.any(1)
    has_unknown = (examples.known == 0).any(1)
    if (has_class | has_unknown).all():
        print(
            "no row is without a class, so the thresholds hold among calls alone; add silence:"
            " --background N, or empty windows"
        )
    commands.show_errors(errors, error_table)
    print(
        f"{n_rows} rows used, {int((~has_class).sum())} without a class;"
        f" {errors.summary(str(error_table))}"
    )
    return 0


def _next_to(out: pathlib.Path, name: str) -> pathlib.Path:
    """Return the path MODEL-name of MODEL.npz."""
    return out.with_name(f"{out.name.removesuffix('.npz')}-{name}")


def _validation_lines(examples: "Examples", fitted: "Fitted") -> list[str]:
    """Return how the head was validated, and how much evidence that is."""
    import numpy as np

    from jaxtrain.workloads.bird.inference.fit import MIN_EXAMPLES

    n_recordings = examples.recordings
    if not fitted.folds:
        return ["no cross-validation: each class is in one recording", *fitted.evidence.lines()]
    n_groups = len(np.unique(examples.group))
    average = np.nanmean(fitted.precision)
    lines = [
        f"{fitted.folds} folds of {n_groups} recordings, mean average precision {average:.3f}"
        f" of {int((n_recordings > 1).sum())} of {len(examples.names)} classes"
    ]
    alone = [name for name, n in zip(examples.names, n_recordings, strict=True) if n < 2]
    if alone:
        lines.append(f"not validated, as all examples are of one recording: {_listed(alone)}")
    few = []
    for name, n_apart, n in zip(examples.names, examples.apart, n_recordings, strict=True):
        if 1 < n and min(n_apart, n) < MIN_EXAMPLES:
            few.append(f"{name} ({n_apart} examples in {n} recordings)")
    if few:
        lines.append(f"of few examples, so little evidence: {_listed(few)}")
    return lines + fitted.evidence.lines()


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - MAX_LISTED} more" if len(names) > MAX_LISTED else ""
    return ", ".join(names[:MAX_LISTED]) + more


def _print_classes(examples: "Examples", fitted: "Fitted") -> None:
    """Print a table: for each class its examples, average precision and threshold.

    Examples that overlap count once.
    """
    import numpy as np

    width = max(map(len, (*examples.names, "class")))
    print(f"{'class':{width}}  examples  recordings  others  average precision  threshold")
    bounds = fitted.head.thresholds
    assert bounds is not None
    n_apart, n_recordings = examples.apart, examples.recordings
    n_counter_examples = ((1 - examples.y) * examples.known).sum(0)
    for c, name in enumerate(examples.names):
        is_measured = np.isfinite(fitted.precision[c])
        average = f"{fitted.precision[c]:.3f}" if is_measured else "-"
        print(
            f"{name:{width}}  {n_apart[c]:8}  {n_recordings[c]:10}  {n_counter_examples[c]:6.0f}"
            f"  {average:>17}  {bounds[c]:9.3g}"
        )


def _embedded(args: argparse.Namespace) -> list[pathlib.Path]:
    """Return the folders of embeddings, of which those of indexes are made, or completed."""
    from jaxtrain.workloads.bird.inference import InferenceError, encoder

    folders = [files.expanded(folder) for folder in args.embeddings]
    indexes = [folder for folder in folders if (folder / "index.json").is_file()]
    if indexes and not args.run:
        raise InferenceError(
            f"{indexes[0]} is an index of recordings; name the run that embeds it: --run RUN"
        )
    if args.run and not indexes:
        raise InferenceError(
            "--run is given, and none of the folders is an index of `jaxtrain index`"
        )
    if not indexes:
        return folders
    model = encoder.load(args.run, ema=args.ema)
    embeddings_of = {}
    for number, index in enumerate(indexes):
        name = "embeddings" if len(indexes) == 1 else f"embeddings-{number}"
        embeddings_of[index] = _next_to(args.out, name)
        _embed_index(args, model, index, embeddings_of[index])
    return [embeddings_of.get(folder, folder) for folder in folders]


def _embed_index(
    args: argparse.Namespace, model: "Model", index: pathlib.Path, out: pathlib.Path
) -> None:
    from jaxtrain.workloads.bird.inference import embed, encoder
    from loaders.audio.recordings import store

    has_labels = not args.labels and bool(store.read(index)["classes"])
    data = encoder.data_config(
        model,
        train=str(index),
        test="",
        audio_root=args.audio_root,
        views=1,
        label="labels" if has_labels else "",
        multilabel=has_labels,
    )
    kinds = ["mean", "patches"] if args.method == "patches" else []
    with atomic_write.alone(out):
        progress = embed.embed(model, data, out, split=args.split, kinds=kinds, batch=args.batch)
    print(
        f"{out}: {progress['done']} rows of {index} embedded ({progress['unreadable']} unreadable)"
    )
