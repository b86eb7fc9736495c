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
import sys
from collections.abc import Sequence

from jaxtrain.commands import arguments
from jaxtrain.workloads.bird import commands
from loaders.io import files

COLUMNS = ("file", "start", "end", "clock", "score", "query", "embeddings", "row")
MANY = 5_000_000  # rows beyond which an index is advised


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
    import numpy as np

    from jaxtrain.workloads.bird.inference import InferenceError, embeddings, heads, search
    from loaders.io import atomic_write

    commands.prepare_process()
    folders = [embeddings.read(folder) for folder in args.embeddings]
    places = [folder.places() for folder in folders]
    if args.model:
        head = heads.read(args.model)
        if not args.label and len(head.names) > 1:
            raise InferenceError(
                f"{args.model} knows {', '.join(head.names[:20])}; name one of them: --class"
            )
        names = [args.label or head.names[0]]
        hits = search.by_head(
            folders, head, heads.read_names(names, head.names, "--class")[0], top=args.top
        )
    else:
        names = args.like
        queries, encoder = [], None
        for text in args.like:
            name, number = search.split_query(text)
            if files.expanded(name).is_dir():
                if number is None:
                    raise InferenceError(
                        f"the query {text!r} is a folder; name a row of it: {text}@0"
                    )
                queries.append(search.of_row(embeddings.read(name), number, args.kind))
                continue
            encoder = encoder or search.Encoder(
                args.run or search.run_of(folders[0]), folders[0], args.kind
            )
            queries.append(encoder.clip(name, number))
        note = functools.partial(print, file=sys.stderr)
        if args.approximate:
            hits = search.nearest_by_index(
                folders, np.stack(queries), kind=args.kind, top=args.top, note=note
            )
        else:
            if (n := sum(folder.n for folder in folders)) > MANY:
                note(
                    f"{n} rows are compared one by one; --approximate asks an index, which is made"
                    " once"
                )
            hits = search.nearest(folders, np.stack(queries), kind=args.kind, top=args.top)
    rows = []
    for hit in hits:
        place = places[hit.folder]
        times = [
            "" if np.isnan(x[hit.row]) else repr(round(float(x[hit.row]), 6))
            for x in (place.start, place.end)
        ]
        where = (place.paths[hit.row], *times, place.clock[hit.row])
        rows.append(
            (
                *where,
                f"{hit.score:.4f}",
                names[hit.query],
                str(folders[hit.folder].folder),
                str(hit.row),
            )
        )
    if args.out:
        atomic_write.write_csv(args.out, [COLUMNS, *rows])
    for file_name, start, end, clock, score, query, _, _ in rows[: 20 if args.out else args.top]:
        print(
            f"{score}  {file_name}  {start or '?'} to {end or '?'} s{f'  {clock}' if clock else ''}"
            f"  ({query})"
        )
    if args.out:
        print(f"{args.out}: {len(rows)} windows", file=sys.stderr)
    return 0
