"""Looks at all that a run needs before it starts: software, config, host, devices, disk, data.

It looks at the network, too.

    jaxtrain doctor [--config=FILE[:ARGUMENT] [--config.section.field=value …]] [--json] [--wait S]

    jaxtrain doctor                            this machine
    jaxtrain doctor --config=xcm  and the needs of this run: its folders, its data, its sizes
    srun jaxtrain doctor --config=xcm          all processes of a job: one report, by process 0

Each finding is one line: ok, warn or fail, and the remedy. Under srun or mpirun, on every worker of
a TPU pod, or with JAXTRAIN_COORDINATOR, JAXTRAIN_PROCESSES and JAXTRAIN_PROCESS, the processes meet
by the rendezvous of a run. They compare their software, config, data and clocks, connect to each
other, and check that all see the folder of the checkpoints. A process that cannot reach process 0
prints the reason itself. Every wait is bounded.

If something failed in any process, every process exits with 1. A warning is no failure.
"""

import sys
from collections.abc import Sequence

from jaxtrain import config
from jaxtrain.commands import arguments


@arguments.reported
def main(argv: Sequence[str] | None = None) -> int:
    config_arguments, rest = arguments.split_config(sys.argv[1:] if argv is None else argv)
    usage = (
        "jaxtrain doctor [--config=FILE[:ARGUMENT] [--config.section.field=value …]] [--json]"
        " [--wait S]"
    )
    parser = arguments.Parser("jaxtrain doctor", __doc__, usage=usage)
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")
    parser.add_argument(
        "--wait",
        type=arguments.positive,
        default=60,
        metavar="S",
        help="for the other processes; default: 60",
    )
    args = parser.parse_args(rest)
    # A config that is missing here, and not on other hosts, is a finding: this process meets the
    # others to report it.
    given = config.parse_args(config_arguments, find=False) if config_arguments else None

    from jaxtrain.doctor import output
    from jaxtrain.doctor.examine import examine

    found = examine(given.source if given else "", given.overrides if given else [], wait=args.wait)
    if found.speaks:
        print(output.as_json(found) if args.json else "\n".join(output.lines(found)))
    return 0 if found.well else 1
