"""Makes an index of recordings from folders, tables and metadata. Audio is not copied.

    jaxtrain index SOURCE… --out DIR
    jaxtrain index SOURCE… --dry-run  the columns, and five rows
    jaxtrain index --show DIR [--pictures FOLDER]

    jaxtrain index recordings --out index --split recording=0.2  a folder; labels by subfolder
    jaxtrain index labels.csv --audio recordings --out index  a table: file, start, end, label
    jaxtrain index tables/*.selections.txt --audio recordings --out index --windows 5 --hop 2.5
    jaxtrain index HSN --unpack HSN --out index  BirdSet: train, test, test_5s

SOURCE is a folder of recordings; a table (CSV, TSV, Raven, Audacity, Kaleidoscope, AudioSet,
BirdNET, opensoundscape), BirdSet's or xeno-canto's metadata or a folder with them, or a list of
paths. Rerun the same command to read only what is new or changed.

All errors in the sources are listed with counts. Nothing is written if any of them is refused:
correct it, or pass --on KIND=drop (or keep). DIR is then a folder that the loader, embed and
`datasets.load_dataset("parquet")` read:

    jaxtrain train --config=folder:DIR

See docs/recordings.md.
"""

import argparse
import dataclasses
import functools
import pathlib
import sys
from collections.abc import Sequence
from typing import Any

from jaxtrain.commands import arguments
from jaxtrain.workloads.bird import commands
from loaders.io import files

ROWS = 5  # annotations that a dry run prints


@arguments.reported
def main(argv: Sequence[str] | None = None) -> int:
    parser = arguments.Parser("jaxtrain index", __doc__)
    parser.add_argument(
        "sources", metavar="SOURCE", nargs="*", help="folder, table, metadata or list of paths"
    )
    parser.add_argument(
        "--out",
        type=arguments.out_folder,
        metavar="DIR",
        help="the index to make, or to bring up to date",
    )
    parser.add_argument(
        "--show", type=pathlib.Path, metavar="DIR", help="print the contents of an index"
    )
    parser.add_argument(
        "--pictures", type=arguments.out_folder, metavar="FOLDER", help="with --show: its pictures"
    )
    source = parser.add_argument_group("sources")
    source.add_argument(
        "--audio", default="", metavar="FOLDER", help="folder of the recordings that tables name"
    )
    source.add_argument(
        "--root",
        default="",
        metavar="FOLDER",
        help="base of the names in the index; default: --audio",
    )
    source.add_argument(
        "--labels",
        default="",
        help="of a folder: folder, none, or a pattern of the path with (?P<label>…)",
    )
    commands.add_table_flags(source)
    source.add_argument(
        "--dry-run",
        action="store_true",
        help="print how the sources are understood, and write nothing",
    )
    source.add_argument(
        "--unpack",
        type=arguments.out_folder,
        metavar="FOLDER",
        help="unpack tar archives here first",
    )
    row = parser.add_argument_group("rows")
    row.add_argument(
        "--classes", default="", metavar="FILE", help="a class a line, in order: NAME,SYNONYM,…"
    )
    row.add_argument(
        "--min-count",
        type=arguments.positive,
        default=1,
        help="events of a class, at least; default: 1",
    )
    row.add_argument(
        "--windows",
        type=float,
        default=0.0,
        metavar="S",
        help="cut recordings into windows of S seconds",
    )
    row.add_argument(
        "--hop",
        type=float,
        default=0.0,
        metavar="S",
        help="from window to window; default: their length",
    )
    row.add_argument(
        "--min-overlap",
        type=float,
        default=0.25,
        metavar="S",
        help="of an event in its window; default: 0.25",
    )
    row.add_argument(
        "--no-empty", dest="empty", action="store_false", help="leave out windows without an event"
    )
    row.add_argument(
        "--channels",
        default="mean",
        help="mean, each as a row, table (as it says), or a number; default: mean",
    )
    row.add_argument(
        "--split",
        default="",
        metavar="HOW",
        help="recording=0.2, site=0.2, date=DAY, column=NAME, folder",
    )
    row.add_argument("--seed", type=arguments.seed, default=0, help="of the split; default: 0")
    row.add_argument(
        "--on",
        action="append",
        default=[],
        metavar="KIND=WHAT",
        help="refuse, drop or keep errors of a kind",
    )
    args = parser.parse_args(argv)
    if args.show is not None:
        if args.sources or args.out:
            parser.error("--show prints an index that is there; omit SOURCE and --out")
    elif args.dry_run and args.sources:
        args.out = args.out or pathlib.Path()
    elif not args.sources or not args.out:
        parser.error("expected SOURCE… and --out DIR, or --show DIR")
    elif args.pictures:
        parser.error("--pictures belongs to --show")

    command = _show if args.show else _dry_run if args.dry_run else _make
    return command(args)


def _show(args: argparse.Namespace) -> int:
    from loaders.audio.recordings import show

    print("\n".join(show.report(args.show)))
    if args.pictures:
        for picture in show.pictures(args.show, args.pictures):
            print(picture)
    return 0


def _make(args: argparse.Namespace) -> int:
    from loaders.audio.recordings import indexing, rows
    from loaders.audio.recordings.annotations import Errors

    given = list(args.sources)
    if args.unpack:
        given = _unpack(given, pathlib.Path(args.unpack))
    errors, named = Errors(args.on), vars(args)
    chosen: dict[str, Any] = {
        field.name: named[field.name]
        for field in dataclasses.fields(rows.Options)
        if field.name in named
    }
    reading = dataclasses.replace(commands.table_options(args), labels=args.labels)
    options = {"reading": reading, "options": rows.Options(**chosen), "class_file": args.classes}
    note = functools.partial(print, file=sys.stderr)
    try:
        about = indexing.make(given, args.out, root=args.root, errors=errors, note=note, **options)
    finally:
        commands.show_errors(errors)
    for split, counts in about["splits"].items():
        print(
            f"{split}: {counts['rows']} rows of {counts['recordings']} recordings,"
            f" {counts['hours']:.2f} h"
        )
    if "=" in args.split and (left := {"train", "test"} - about["splits"].keys()):
        why = "of few recordings or sites a hash may choose none: try another --seed"
        print(
            f"--split {args.split} put no recording into {' or '.join(sorted(left))}; {why}",
            file=sys.stderr,
        )
    elif "train" not in about["splits"]:
        print(
            "no recording is in train; to ignore the column of splits: --split-column none",
            file=sys.stderr,
        )
    print(f"{args.out}: {len(about['classes'])} classes; {about['n_read']} recordings read")
    counts = errors.summary(f"{args.out}/errors.csv")
    print(f"{about['n_used']} recordings used, {about['n_without']} without labels; {counts}")
    return 0


def _dry_run(args: argparse.Namespace) -> int:
    """Print the columns of each source, five annotations, and errors known without recordings."""
    from loaders.audio.recordings import sources
    from loaders.audio.recordings.annotations import Errors

    errors = Errors(args.on)
    reading = dataclasses.replace(commands.table_options(args), labels=args.labels)
    for given in args.sources:
        n = 0
        for n, each in enumerate(sources.read(given, reading, errors, note=print), 1):
            if n <= ROWS:
                print(f"    {each}")
        print(f"{given}: {n} annotations")
    for line in errors.report():
        print(line)
    print(errors.summary())
    return 1 if errors.refused() else 0


def _unpack(given: Sequence[str], folder: pathlib.Path) -> list[str]:
    """Unpack archives that are sources or lie in one. Return the other sources, or the folder."""
    from loaders.audio.recordings import indexing

    archives: list[str] = []
    rest: list[str] = []
    for each in given:
        path = files.expanded(each)
        if path.is_file() and ".tar" in path.name:
            archives.append(str(path))
        else:
            archives += map(str, indexing.archives_in(path) if path.is_dir() else ())
            rest.append(each)
    n = indexing.unpack(archives, folder)
    print(f"{n} files unpacked from {len(archives)} archives", file=sys.stderr)
    return rest or [str(folder)]
