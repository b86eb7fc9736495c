"""Looks at all that a run needs before it starts: software, config, host, devices, disk, data.

    jaxtrain doctor [--config=FILE[:ARGUMENT] [--config.section.field=value …]] [--json]

    jaxtrain doctor                            this machine
    jaxtrain doctor --config=xcm  and the needs of this run: its folders, its data, its sizes
    srun --label jaxtrain doctor --config=xcm  every process of a job, each with its own report

Each finding is one line: ok, warn or fail, and the remedy. Under srun or mpirun, on every worker of
a TPU pod, or with JAXTRAIN_COORDINATOR, JAXTRAIN_PROCESSES and JAXTRAIN_PROCESS, each process
checks its own devices, and its own part of the data. The processes do not connect: the start of a
run compares them. Every wait is bounded.

If something failed, the process exits with 1. A warning is no failure.
"""

import sys
from collections.abc import Sequence

from jaxtrain import config
from jaxtrain.commands import arguments


@arguments.reported
def main(argv: Sequence[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    config_arguments, options = arguments.split_config(argv)
    usage = "jaxtrain doctor [--config=FILE[:ARGUMENT] [--config.section.field=value …]] [--json]"
    parser = arguments.Parser("jaxtrain doctor", __doc__, usage=usage)
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")
    args = parser.parse_args(options)
    source = ""
    overrides: Sequence[tuple[str, str]] = []
    if config_arguments:
        # A config that is missing here, and not on other hosts, is a finding.
        run = config.parse_args(config_arguments, find=False)
        source, overrides = run.source, run.overrides

    from jaxtrain.doctor import output
    from jaxtrain.doctor.examine import examine

    report = examine(source, overrides)
    if args.json:
        print(output.as_json(report))
    else:
        print("\n".join(output.lines(report)))
    return 1 if report.failed else 0
