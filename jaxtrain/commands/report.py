"""Write one HTML file about runs: curves, goodput, pictures, generations, configs.

    jaxtrain report RUN… --out FILE [--metric NAME]

    jaxtrain report runs/xcm-demo --out report.html
    jaxtrain report runs/* --out all.html --metric accuracy

The file opens in any browser, without a network or an account. Several runs are drawn over each
other, ranked, and compared by the fields in which their configs differ. RUN is a workdir, also of a
run that trains. It needs the extra: report.
"""

from collections.abc import Sequence

from jaxtrain.commands import arguments
from loaders.io import atomic_write


@arguments.reported
def main(argv: Sequence[str] | None = None) -> int:
    parser = arguments.Parser("jaxtrain report", __doc__)
    parser.add_argument("runs", metavar="RUN", nargs="+", help="a run's workdir")
    parser.add_argument(
        "--out",
        type=arguments.out_file,
        metavar="FILE",
        required=True,
        help="the HTML file to write",
    )
    parser.add_argument(
        "--metric",
        default="",
        metavar="NAME",
        help="by which runs are ranked, for example accuracy or -loss",
    )
    args = parser.parse_args(argv)

    from jaxtrain.telemetry import glossary
    from jaxtrain.telemetry.report import page
    from jaxtrain.telemetry.report import run as run_lib

    runs = run_lib.open_runs(args.runs)
    plotly = page.library()  # before a million records are read
    text = page.Page(runs, args.metric).html(plotly=plotly)
    atomic_write.write(args.out, text)
    n_runs = f"{len(runs)} runs" if len(runs) > 1 else "1 run"
    print(f"{args.out}: {len(text) / 1e6:.1f} MB, {n_runs}; open it in a browser")
    for name in sorted({str(run.setting("workload", "")) for run in runs} - {""}):
        if not glossary.is_known(name):
            print(
                f"the metrics of {name} have no meanings here: with --workload {name} they have, if"
                " you trust its code"
            )
    return 0
