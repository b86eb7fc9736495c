"""Makes token files, which loaders.text.tokens reads, of text, JSONL, Parquet or Arrow.

    jaxtrain tokens OUT INPUT … --tokenizer tokenizer.json [--eos TOKEN] [--column text]
        [--documents file|paragraph|line]
                                [--specials-as-text] [--workers 2] [--skip 0]

    jaxtrain tokens corpus/train texts/*.parquet --tokenizer=tokenizer.json --eos="<|endoftext|>" \
        --workers=8

Inputs are files, folders (all files below with a known ending that are not hidden; others are
counted) or globs. By their endings, in either case:

    .txt .md          a document each, or with --documents one for each paragraph (between blank
                      lines) or line
    .jsonl .ndjson    a line is an object, whose --column is a document
    .parquet          a row is a document, by its --column, a row group at a time
    .arrow            the same, as an IPC stream or file (as Hugging Face ``datasets`` writes them)

--tokenizer is a file of Hugging Face ``tokenizers`` (its special tokens are not added, except
--eos, which ends every document, once), or ``bytes``, which needs no file. Its truncation and
padding are ignored. The name of a special token inside a text, for example <eos>, becomes that
token, and such tokens are counted. With --specials-as-text a name is split like any text. A part of
an input becomes a shard, in the order of the inputs. The files are the same bytes for any number of
workers. Rerun the same command to resume after the last complete shard. Other inputs or another
tokenizer are an error. For a complete folder, its contents are printed.

A row without text (null, of another type, a line that is not JSON) is an error that names it. With
--skip N up to N of them are skipped, counted and listed.
"""

from collections.abc import Sequence

from jaxtrain.commands import arguments


@arguments.reported
def main(argv: Sequence[str] | None = None) -> int:
    parser = arguments.Parser("jaxtrain tokens", __doc__)
    parser.add_argument(
        "out", metavar="OUT", type=arguments.out_folder, help="the folder to make, or to resume"
    )
    parser.add_argument("inputs", metavar="INPUT", nargs="+", help="files, folders or globs")
    parser.add_argument("--tokenizer", required=True, help="tokenizer.json, or bytes")
    parser.add_argument("--eos", default="", help="token that ends every document; default: none")
    parser.add_argument(
        "--column", default="text", help="of JSONL, Parquet and Arrow; default: text"
    )
    parser.add_argument(
        "--documents",
        choices=("file", "paragraph", "line"),
        default="file",
        help="of text; default: file",
    )
    parser.add_argument(
        "--specials-as-text",
        action="store_true",
        help="names of special tokens inside texts are text, not these tokens",
    )
    parser.add_argument(
        "--workers", type=arguments.positive, default=1, help="processes; default: 1"
    )
    parser.add_argument(
        "--skip",
        type=int,
        default=0,
        metavar="N",
        help="rows without text to skip, at most; default: 0",
    )
    args = parser.parse_args(argv)

    from jaxtrain.parallel.lease import Lease
    from loaders.text import tokenise

    options = tokenise.Options(
        args.tokenizer, args.eos, args.column, args.documents, not args.specials_as_text
    )
    with Lease([str(args.out)], choose="folder"):
        tokenise.make(args.out, args.inputs, options, workers=args.workers, skip=args.skip)
    return 0
