"""Writes the records of runs as one Parquet table: a row for each record, a column for each metric.

    jaxtrain metrics RUN… --out FILE

    jaxtrain metrics runs/xcm-demo --out metrics.parquet

Columns are run (the workdir as it was named), split (train, test, save, data), step, and the
metrics in float64, null if a record has none. pandas, polars and DuckDB read it. Lines of
metrics.jsonl that are no records are left out, and counted.
"""

from collections.abc import Sequence

from jaxtrain.commands import arguments
from loaders.io import atomic_write


@arguments.reported
def main(argv: Sequence[str] | None = None) -> int:
    parser = arguments.Parser("jaxtrain metrics", __doc__)
    parser.add_argument("runs", metavar="RUN", nargs="+", help="a run's workdir")
    parser.add_argument(
        "--out",
        type=arguments.out_file,
        metavar="FILE",
        required=True,
        help="the Parquet file to write",
    )
    args = parser.parse_args(argv)

    import numpy as np
    import pyarrow as pa
    import pyarrow.parquet as pq

    from jaxtrain.telemetry.report import records
    from jaxtrain.telemetry.report import run as run_lib

    tables, odd = [], 0
    for path in args.runs:
        found = records.read(run_lib.open_run(path).file("metrics.jsonl"))
        odd += found.odd
        for split, columns in found.splits.items():
            n = len(columns["step"])
            named = {
                "run": pa.array([path] * n),
                "split": pa.array([split] * n),
                "step": columns["step"].astype(np.int64),
            }
            taken = {
                f"metric_{name}" if name in named else name: x
                for name, x in columns.items()
                if name != "step"
            }
            tables.append(
                pa.table(named | {name: pa.array(x, mask=np.isnan(x)) for name, x in taken.items()})
            )
    if not tables:
        raise run_lib.RunError(
            f"{', '.join(args.runs)}: no record in metrics.jsonl; name a run that has taken a step"
        )
    table = pa.concat_tables(tables, promote_options="default")
    with atomic_write.file(args.out) as file:
        pq.write_table(table, file)
    left = f"; {odd} lines are no records, and are left out" if odd else ""
    print(f"{args.out}: {table.num_rows} records, {table.num_columns - 3} metrics{left}")
    return 0
