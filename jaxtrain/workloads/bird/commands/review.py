"""Review the results of detect or search on a page of this machine, by keys.

    jaxtrain review TABLE [--root RECORDINGS] [--out ANSWERS.csv] [--order uncertain] [--class NAME]
        [--port 8000]

    jaxtrain review found --class wren --order uncertain --out answers.csv

TABLE is a folder of `jaxtrain detect`, a table of `jaxtrain search --out`, or any table with file,
start, end and label. Open the address that is printed, in a browser on this machine (or through ssh
-L): it holds a token, and nobody else can ask. Keys: y yes, n no, c another class, s skip, left and
right, o the first open one, space plays. Each answer is saved at once: file, start, end, label,
answer, asked, score. `jaxtrain fit --labels` reads them, and `jaxtrain index`. Rerun the same
command to continue. Ctrl-C ends it. With --embeddings, of the same recordings by `jaxtrain embed`,
the page shows the windows that sound most like the current one, and their answers.
"""

import errno
import pathlib
from collections.abc import Sequence

from jaxtrain.commands import arguments
from jaxtrain.workloads.bird import commands
from loaders.audio.recordings.annotations import Errors
from loaders.io import atomic_write

ORDERS = ("table", "best", "uncertain", "diverse")


@arguments.reported
def main(argv: Sequence[str] | None = None) -> int:
    parser = arguments.Parser("jaxtrain review", __doc__)
    parser.add_argument("table", metavar="TABLE", help="a folder of `jaxtrain detect`, or a table")
    parser.add_argument(
        "--root",
        default="",
        metavar="FOLDER",
        help="folder above all recordings; default: their nearest",
    )
    parser.add_argument(
        "--out",
        type=arguments.out_file,
        default=pathlib.Path("answers.csv"),
        help="default: answers.csv",
    )
    parser.add_argument(
        "--embeddings",
        nargs="+",
        default=[],
        metavar="EMB",
        help="show similar sounds of these folders",
    )
    parser.add_argument(
        "--order", default="uncertain", choices=ORDERS, help="the first windows; default: uncertain"
    )
    parser.add_argument(
        "--class",
        dest="label",
        default="",
        metavar="NAME",
        help="of these alone, or the class of rows without one",
    )
    commands.add_table_flags(parser.add_argument_group("the columns of TABLE"))
    parser.add_argument(
        "--port", type=int, default=0, help="on the loopback; default: any that is free"
    )
    args = parser.parse_args(argv)
    if not 0 <= args.port < 65536:
        parser.error(f"--port is {args.port}; expected 0 to 65535")

    from jaxtrain.workloads.bird.inference import (
        InferenceError,
        embeddings,
        neighbours,
        review,
        review_server,
    )

    error_table = args.out.with_name(f"{args.out.stem}-errors.csv")
    atomic_write.refuse_unwritable(error_table, folder=False)
    errors = Errors()
    items = review.read(
        args.table,
        root=args.root,
        order=args.order,
        label=args.label,
        reading=commands.table_options(args),
        errors=errors,
    )
    commands.show_errors(errors, error_table)
    similar = None
    if args.embeddings:
        windows = [neighbours.Window(item.path, item.start, item.end) for item in items]
        folders = [embeddings.read(folder) for folder in args.embeddings]
        similar = neighbours.Neighbours(folders, windows)
        if similar.missing:
            print(
                f"{similar.missing} of {len(items)} windows are in no embeddings, and have no"
                " neighbours"
            )
    session = review.Session(items, args.out, similar)
    try:
        server = review_server.Server(session, args.port)
    except OSError as error:
        if error.errno not in (errno.EADDRINUSE, errno.EACCES):
            raise
        raise InferenceError(
            f"--port {args.port} is in use, or not allowed; choose another, or omit it"
        ) from error
    with server:
        recordings = len({item.path for item in items})
        print(
            f"{args.table}: {len(items)} windows of {recordings} recordings used;"
            f" {errors.summary(str(error_table))}"
        )
        print(f"answers go to {args.out}; Ctrl-C ends\n{server.address}", flush=True)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            print(f"\n{args.out}: {session.counts()}")
    return 0
