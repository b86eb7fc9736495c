"""Finds the windows of embeddings that sound like a clip, or that a fitted head gives most.

    jaxtrain search EMBEDDINGS… --like QUERY… [--top N] [--out FILE.csv]
    jaxtrain search EMBEDDINGS… --model HEAD --class NAME [--top N] [--out FILE.csv]

    jaxtrain search emb/windows --like call.wav@12.5 --run runs/xcm --out like-the-call.csv

EMBEDDINGS are folders of `jaxtrain embed`. QUERY is a recording (its centre), RECORDING@SECONDS
(the window that begins there), or FOLDER@ROW (a row of another folder of embeddings). Recordings
are embedded by --run. Of several queries the nearest counts. Every row is compared: answers are
exact. --approximate, for many millions of rows, makes an index once (of usearch: pip install
'jaxtrain[search]'), which is kept in the user's cache. It may miss some.
"""

import argparse
import functools
import math
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from jaxtrain.commands import arguments
from jaxtrain.workloads.bird import commands
from loaders.io import files

if TYPE_CHECKING:  # JAX is not imported for the help of the command
    from jaxtrain.workloads.bird.inference.embeddings import Embeddings, Places
    from jaxtrain.workloads.bird.inference.search import Hit

MANY = 5_000_000  # rows beyond which an index is advised


class Row(NamedTuple):
    """A line of the table. Times in s, or empty."""

    file: str
    start: str
    end: str
    clock: str
    score: str
    query: str
    embeddings: str
    row: str


@arguments.reported
def main(argv: Sequence[str] | None = None) -> int:
    parser = arguments.Parser("jaxtrain search", __doc__)
    parser.add_argument(
        "embeddings", metavar="EMBEDDINGS", nargs="+", help="folders of `jaxtrain embed`"
    )
    parser.add_argument(
        "--like",
        nargs="+",
        default=[],
        metavar="QUERY",
        help="RECORDING, RECORDING@SECONDS or FOLDER@ROW",
    )
    parser.add_argument(
        "--run",
        default="",
        metavar="RUN",
        help="the run that embeds recordings; default: as the folder says",
    )
    parser.add_argument(
        "--model", default="", metavar="HEAD", help="a file of `jaxtrain fit`, instead of --like"
    )
    parser.add_argument(
        "--class",
        dest="label",
        default="",
        metavar="NAME",
        help="of --model; default: its only one",
    )
    parser.add_argument(
        "--kind", default="mean", choices=("mean", "cls"), help="features of --like; default: mean"
    )
    parser.add_argument(
        "--approximate",
        action="store_true",
        help="by an index that is made once; for many millions of rows",
    )
    parser.add_argument("--top", type=arguments.positive, default=20, help="how many; default: 20")
    parser.add_argument("--out", type=arguments.out_file, metavar="FILE", help="write a CSV, too")
    args = parser.parse_args(argv)
    if bool(args.like) == bool(args.model):
        parser.error("expected --like QUERY or --model HEAD")
    if args.approximate and args.model:
        parser.error("--approximate belongs to --like; --model scores every row")
    return _search(args)


def _search(args: argparse.Namespace) -> int:
    from jaxtrain.workloads.bird.inference import embeddings
    from loaders.io import atomic_write

    commands.prepare_process()
    folders = [embeddings.read(folder) for folder in args.embeddings]
    places = [folder.places() for folder in folders]
    if args.model:
        label, hits = _hits_of_head(args, folders)
        queries = [label]
    else:
        queries = args.like
        hits = _hits_of_queries(args, folders)
    rows = []
    for hit in hits:
        folder = str(folders[hit.folder].folder)
        rows.append(_table_row(hit, places[hit.folder], queries[hit.query], folder))
    if args.out:
        atomic_write.write_csv(args.out, [Row._fields, *rows])
    for row in rows[: 20 if args.out else args.top]:
        clock = f"  {row.clock}" if row.clock else ""
        times = f"{row.start or '?'} to {row.end or '?'} s"
        print(f"{row.score}  {row.file}  {times}{clock}  ({row.query})")
    if args.out:
        print(f"{args.out}: {len(rows)} windows", file=sys.stderr)
    return 0


def _table_row(hit: "Hit", places: "Places", query: str, folder: str) -> Row:
    return Row(
        file=places.paths[hit.row],
        start=_seconds(places.start[hit.row]),
        end=_seconds(places.end[hit.row]),
        clock=places.clock[hit.row],
        score=f"{hit.score:.4f}",
        query=query,
        embeddings=folder,
        row=str(hit.row),
    )


def _seconds(value: float) -> str:
    """Format a time, to the microsecond, or "" of nan."""
    return "" if math.isnan(value) else repr(round(float(value), 6))


def _hits_of_head(
    args: argparse.Namespace, folders: Sequence["Embeddings"]
) -> tuple[str, list["Hit"]]:
    """Return the class of --class, and the rows that --model gives most."""
    from jaxtrain.workloads.bird.inference import InferenceError, heads, search

    head = heads.read(args.model)
    if not args.label and len(head.names) > 1:
        raise InferenceError(
            f"{args.model} knows {', '.join(head.names[:20])}; name one of them: --class"
        )
    label = args.label or head.names[0]
    (number,) = heads.read_names([label], head.names, "--class")
    return label, search.by_head(folders, head, number, top=args.top)


def _hits_of_queries(args: argparse.Namespace, folders: Sequence["Embeddings"]) -> list["Hit"]:
    """Return the rows nearest to --like."""
    import numpy as np

    from jaxtrain.workloads.bird.inference import InferenceError, embeddings, search

    queries = []
    encoder = None
    for query in args.like:
        name, number = search.split_query(query)
        if files.expanded(name).is_dir():
            if number is None:
                raise InferenceError(
                    f"the query {query!r} is a folder; name a row of it: {query}@0"
                )
            queries.append(search.of_row(embeddings.read(name), number, args.kind))
            continue
        if encoder is None:
            run = args.run or search.run_of(folders[0])
            encoder = search.Encoder(run, folders[0], args.kind)
        queries.append(encoder.clip(name, number))
    features = np.stack(queries)
    note = functools.partial(print, file=sys.stderr)
    if args.approximate:
        return search.nearest_by_index(folders, features, kind=args.kind, top=args.top, note=note)
    n_rows = sum(folder.n for folder in folders)
    if n_rows > MANY:
        note(
            f"{n_rows} rows are compared one by one; --approximate asks an index, which is made"
            " once"
        )
    return search.nearest(folders, features, kind=args.kind, top=args.top)
