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

All errors in the sources are counted, and --errors FILE lists each. Nothing is written if any of
them is refused: correct it, or pass --on KIND=drop (or keep). DIR is then a folder that the loader,
embed and `datasets.load_dataset("parquet")` read:

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
        "--classes",
        default="",
        metavar="FILE",
        help="a class a line, in order: NAME,SYNONYM,…; quote a name with a comma",
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

    if args.show:
        return _show(args)
    if args.dry_run:
        return _dry_run(args)
    return _make(args)


def _show(args: argparse.Namespace) -> int:
    from loaders.audio.recordings import show

    print("\n".join(show.report(args.show)))
    if args.pictures:
        for picture in show.pictures(args.show, args.pictures):
            print(picture)
    return 0


def _make(args: argparse.Namespace) -> int:
    from loaders.audio.recordings import indexing, rows, show
    from loaders.audio.recordings.annotations import Errors

    sources = list(args.sources)
    if args.unpack:
        sources = _unpack(sources, pathlib.Path(args.unpack))
    errors = Errors(args.on)
    values = vars(args)
    row_fields = [field.name for field in dataclasses.fields(rows.Options)]
    row_options: dict[str, Any] = {name: values[name] for name in row_fields if name in values}
    try:
        index = indexing.make(
            sources,
            args.out,
            reading=dataclasses.replace(commands.table_options(args), labels=args.labels),
            options=rows.Options(**row_options),
            class_file=args.classes,
            root=args.root,
            errors=errors,
            note=functools.partial(print, file=sys.stderr),
        )
    finally:
        commands.show_errors(errors)
    for split, counts in index["splits"].items():
        print(
            f"{split}: {counts['rows']} rows of {counts['recordings']} recordings,"
            f" {counts['hours']:.2f} h"
        )
    missing = {"train", "test"} - index["splits"].keys()
    if "=" in args.split and missing:
        print(
            f"--split {args.split} put no recording into {' or '.join(sorted(missing))}; of few"
            " recordings or sites a hash may choose none: try another --seed",
            file=sys.stderr,
        )
    elif "train" in missing:
        print(
            "no recording is in train; to ignore the column of splits: --split-column none",
            file=sys.stderr,
        )
    for doubt in show.doubts(index):
        print(doubt, file=sys.stderr)
    print(f"{args.out}: {len(index['classes'])} classes; {index['n_read']} recordings read")
    summary = errors.summary(f"{args.out}/errors.csv")
    print(f"{index['n_used']} recordings used, {index['n_without']} without labels; {summary}")
    return 0


def _dry_run(args: argparse.Namespace) -> int:
    """Print the columns of each source, five annotations, and errors known without recordings."""
    from loaders.audio.recordings import sources
    from loaders.audio.recordings.annotations import Errors

    errors = Errors(args.on)
    reading = dataclasses.replace(commands.table_options(args), labels=args.labels)
    for source in args.sources:
        n = 0
        for annotation in sources.read(source, reading, errors, note=print):
            n += 1
            if n <= ROWS:
                print(f"    {annotation}")
        print(f"{source}: {n} annotations")
    for line in errors.report():
        print(line)
    arguments.list_errors(errors.listed())
    print(f"{errors.summary()}{errors.hint}")
    return 1 if errors.refused() else 0


def _unpack(sources: Sequence[str], folder: pathlib.Path) -> list[str]:
    """Unpack archives that are sources or lie in one. Return the other sources, or the folder."""
    from loaders.audio.recordings import indexing

    archives: list[str] = []
    other_sources: list[str] = []
    for source in sources:
        path = files.expanded(source)
        if path.is_file() and ".tar" in path.name:
            archives.append(str(path))
            continue
        if path.is_dir():
            archives += map(str, indexing.archives_in(path))
        other_sources.append(source)
    n = indexing.unpack(archives, folder)
    print(f"{n} files unpacked from {len(archives)} archives", file=sys.stderr)
    return other_sources or [str(folder)]
