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

    tables = []
    n_odd = 0
    for path in args.runs:
        records_of_run = records.read(run_lib.open_run(path).file("metrics.jsonl"))
        n_odd += records_of_run.odd
        for split, metrics in records_of_run.splits.items():
            steps = metrics["step"].astype(np.int64)
            columns = {
                "run": pa.array([path] * len(steps)),
                "split": pa.array([split] * len(steps)),
                "step": steps,
            }
            for name, values in metrics.items():
                column = f"metric_{name}" if name in ("run", "split") else name
                if name != "step":
                    columns[column] = pa.array(values, mask=np.isnan(values))
            tables.append(pa.table(columns))
    if not tables:
        raise run_lib.RunError(
            f"{', '.join(args.runs)}: no record in metrics.jsonl; name a run that has taken a step"
        )
    table = pa.concat_tables(tables, promote_options="default")
    with atomic_write.file(args.out) as file:
        pq.write_table(table, file)
    text = f"{args.out}: {table.num_rows} records, {table.num_columns - 3} metrics"
    if n_odd:
        text += f"; {n_odd} lines are no records, and are left out"
    print(text)
    return 0
