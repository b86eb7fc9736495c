"""Looks into checkpoints on any CPU, without the model's code and without the mesh that wrote them.

    jaxtrain checkpoint inspect RUN              the tree: shapes, dtypes, shardings, bytes, and
                                                 step, data, versions; then the checksums
    jaxtrain checkpoint verify  RUN  checksums, then every array read, and its numbers finite
    jaxtrain checkpoint diff  RUN RUN  changes: norms, largest change, cosine, NaNs, missing, new
    jaxtrain checkpoint export  RUN --out DIR    the weights without the optimizer, as
                                DIR/checkpoints/<step>

    jaxtrain checkpoint verify runs/xcm/checkpoints/500

RUN is a run's workdir (its newest step, or --step), a step directory of it, or a folder of
`jaxtrain export`. Ends with 0 when all is well (diff: when nothing differs) and with 1 when not.
"""

from collections.abc import Sequence

from jaxtrain.commands import arguments

ACTIONS = {
    "inspect": "print the tree",
    "verify": "check every file and every array",
    "diff": "print the changes from the first to the second",
    "export": "copy the weights, to warm-start from",
}


@arguments.reported
def main(argv: Sequence[str] | None = None) -> int:
    parser = arguments.Parser("jaxtrain checkpoint", __doc__)
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    for name, text in ACTIONS.items():
        action = actions.add_parser(name, help=text, description=f"{text[0].upper()}{text[1:]}.")
        arguments.add_run(action, nargs=2 if name == "diff" else 1, default="the newest")
        if name == "export":
            text = "a workdir to make; DIR/checkpoints/<step> must not exist"
            action.add_argument(
                "--out", type=arguments.out_folder, metavar="DIR", required=True, help=text
            )
            arguments.add_base(action)
    args = parser.parse_args(argv)

    from jaxtrain.arrays import saved_steps, source

    # the others print the damage, and go on
    is_refused = args.action == "export"
    sources = [source.find(run, args.step, verified=is_refused) for run in args.run]
    if args.action == "inspect":
        return saved_steps.inspect(sources[0])
    if args.action == "export":
        return saved_steps.export(sources[0], args.out, base=args.base)
    if args.action == "verify":
        return saved_steps.verify(sources[0])
    return saved_steps.diff(*sources)
