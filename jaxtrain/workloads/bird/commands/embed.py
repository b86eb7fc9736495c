"""Embeds every recording of a dataset with a trained encoder.

    jaxtrain embed RUN --out DIR [--data FOLDER --split train]

    jaxtrain embed runs/xcm --data /data/esc10 --split train --out embeddings
    jaxtrain embed runs/xcm --recordings recordings --overlap 2.5 --out embeddings

RUN is a run of jaxtrain.workloads.bird: its workdir, a step directory of it, or a folder of
`jaxtrain export`. Every recording of the split is read once, in order, as a test split is: its
centre, or with --views several views evenly over it, whose features are averaged. With
--recordings, files, folders, indexes or lists of recordings of any length are cut into windows as
long as the run's clips, and each is a row.

    DIR/mean.npy         float32 [n, D]        mean of the patches (--kinds: which of these three)
        cls.npy          float32 [n, D]        mean of the CLS tokens
        patches.npy      float16 [n, V, N, D]  every patch of every view
        scores.npy       float32 [n, C]        logits of the run's supervised head, if it has one
        label.npy        int64 [n]; or labels.npy uint8 [n, C] with --multilabel
        rows.parquet     path, start, end [s], clock of every row, as far as the data say them,
                         a digest that copies of a recording share, and whether the run was
                         trained on it
        index.npy        int64 [n]             the recording's row in its split's shards
        weight.npy       float32 [n]           0 if it cannot be decoded: its features mean nothing
        NAME.npy         any other column of integers: --columns fold,site
        embeddings.json  model, data and options, class names, and the progress

Rerun the same command to resume after an interruption; DIR is refused when it was made of something
else.
"""

import argparse
import pathlib
import shutil
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

from jaxtrain.commands import arguments
from jaxtrain.workloads.bird import commands
from loaders.io import atomic_write, files

KINDS = ("mean", "cls", "patches")


@arguments.reported
def main(argv: Sequence[str] | None = None) -> int:
    parser = arguments.Parser("jaxtrain embed", __doc__)
    arguments.add_run(parser, ema=True)
    parser.add_argument(
        "--out",
        required=True,
        type=arguments.out_folder,
        metavar="DIR",
        help="folder to make or resume",
    )
    parser.add_argument(
        "--data", help="folder, glob or file of shards; default: the run's training data"
    )
    parser.add_argument(
        "--recordings", nargs="+", metavar="RECORDING", help="cut into windows, instead of --data"
    )
    parser.add_argument(
        "--overlap",
        type=float,
        default=0.0,
        metavar="S",
        help="of neighbouring windows; default: 0",
    )
    parser.add_argument(
        "--audio-root",
        default="",
        help="folder of recordings that are files; default: each shard's own",
    )
    parser.add_argument(
        "--follow-links", action="store_true", help="links in folders of data may lead out of them"
    )
    parser.add_argument(
        "--split",
        default="train",
        help="any split of the data: train, test, test_5s, …; default: train",
    )
    parser.add_argument("--label", help="column of labels; default: the run's; '' = none")
    parser.add_argument(
        "--multilabel", action="store_true", help="the column holds lists of classes"
    )
    parser.add_argument(
        "--kinds",
        type=commands.some_of(KINDS),
        help=f"some of {','.join(KINDS)}; default: mean, and cls if the encoder has a class token",
    )
    parser.add_argument("--columns", default="", help="other columns to keep, of integers")
    parser.add_argument(
        "--time-expansion",
        type=float,
        metavar="TIMES",
        help="times slower than life that recordings are (bats: often 10); default: the run's",
    )
    parser.add_argument(
        "--views",
        type=arguments.positive,
        default=1,
        help="of each recording, averaged; default: 1",
    )
    parser.add_argument(
        "--batch",
        type=arguments.positive,
        default=64,
        help="recordings computed together; default: 64",
    )
    commands.add_table_flags(
        parser.add_argument_group("tables that name recordings"), names=("file",)
    )
    args = parser.parse_args(argv)
    has_labels = args.label or args.multilabel or args.columns
    if args.recordings and (args.data or has_labels or args.split != "train"):
        parser.error(
            "--recordings have no labels, splits or columns; omit --data, --label, --multilabel,"
            " --columns, --split"
        )
    if args.kinds is not None and not args.kinds:
        parser.error(f"--kinds is empty; expected some of {','.join(KINDS)}")
    if args.overlap and not args.recordings:
        parser.error("--overlap belongs to --recordings")
    return _embed(args)


def _embed(args: argparse.Namespace) -> int:
    from jaxtrain.workloads.bird.inference import embed, encoder

    commands.prepare_process()
    model = encoder.load(args.run, step=args.step, ema=args.ema)
    changes: dict[str, Any] = {
        "views": args.views,
        "multilabel": args.multilabel,
        "audio_root": args.audio_root,
        "follow_links": args.follow_links,
    }
    if args.label is not None:
        changes["label"] = args.label
    if args.time_expansion is not None:
        changes["time_expansion"] = args.time_expansion
    if args.data:
        changes |= {"train": args.data, "test": ""}
    options: dict[str, Any] = {
        "split": args.split,
        "kinds": args.kinds or (),
        "columns": [name for name in args.columns.split(",") if name],
        "batch": args.batch,
    }
    out = files.expanded(args.out)
    with atomic_write.alone(out):
        if args.recordings:
            embedded = _embed_windows(args, model, changes, options, out)
        else:
            data = encoder.data_config(model, **changes)
            embedded = _Embedded(embed.embed(model, data, out, **options))
    progress = embedded.progress
    for reason in progress["reasons"]:
        print(f"unreadable: {reason}", file=sys.stderr)
    print(
        f"{args.out}: {progress['done']} recordings ({progress['unreadable']} unreadable),"
        f" {progress['examples_per_second']:.0f} a second, {progress['waiting']:.0%} of the time"
        " waiting for the loader"
    )
    if embedded.counts:
        print(embedded.counts)
    return embedded.code


class _Embedded(NamedTuple):
    """The result of the command."""

    progress: dict[str, Any]  # the content of embeddings.json
    counts: str = ""  # of recordings, for people
    code: int = 0  # 1: a recording cannot be read


def _embed_windows(
    args: argparse.Namespace,
    model: Any,
    changes: dict[str, Any],
    options: dict[str, Any],
    out: pathlib.Path,
) -> _Embedded:
    from jaxtrain.workloads.bird.inference import embed, encoder

    changes = {**changes, "label": "", "test": ""}
    windows, errors = encoder.cut_windows(
        args.recordings,
        encoder.data_config(model, **changes),
        overlap=args.overlap,
        root=args.audio_root,
        links=args.follow_links,
        reading=commands.table_options(args),
    )
    # always the same, by which the loader caches headers of large recordings
    index = out / ".windows"
    shutil.rmtree(index, ignore_errors=True)
    try:
        windows.write(index)
        changes |= {"train": str(index), "audio_root": windows.root}
        data = encoder.data_config(model, **changes)
        progress = embed.embed(model, data, out, **options)
    finally:
        shutil.rmtree(index, ignore_errors=True)
    error_table = out / "errors.csv"
    commands.show_errors(errors, error_table)
    counts = f"{len(windows.recordings)} recordings used; {errors.summary(str(error_table))}"
    return _Embedded(progress, counts, code=1 if errors.serious else 0)
