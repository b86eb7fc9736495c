"""Print the memory, the traffic and the time of a run on any devices, before it starts.

    jaxtrain plan --config=FILE[:ARGUMENT] [--config.section.field=value …] [TARGET]

    jaxtrain plan --config=trm_sudoku                    the devices of this machine
    jaxtrain plan --config=trm_sudoku gpu:h100x8         so many GPUs of one node or more
    jaxtrain plan --config=trm_sudoku 'gpu:h100x8*4'     four nodes of eight
    jaxtrain plan --config=trm_sudoku tpu:v4:2x2x4       a TPU slice
    jaxtrain plan --config=trm_sudoku 'tpu:v4:2x2x4*2'   two such slices
    jaxtrain plan --setup gpu  fetches the compiler for GPUs (or tpu), once
    jaxtrain plan --calibrate  measures this machine's CPUs for forecasts of its steps, once

    jaxtrain plan --config=trm_sudoku gpu:h100x8 --search    the fastest meshes and options

With the target's compiler, which needs no such chip, the real step is compiled. Without it, the
plan has exact bytes between steps and a lower bound of a step's.

With --search the plan compiles meshes and options in the order of an estimate, until five meshes
fit. It prints their time, memory and exchanges, and their overrides. Ctrl-C prints the results so
far.

Ends with 1 when the plan finds a problem, for example that the run does not fit into memory.
"""

import sys
from collections.abc import Sequence

from jaxtrain import config
from jaxtrain.commands import arguments
from jaxtrain.config.command_line import COMPILERS


@arguments.reported
def main(argv: Sequence[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    config_arguments, options = arguments.split_config(argv)
    parser = arguments.Parser(
        "jaxtrain plan", __doc__, usage=arguments.CONFIG_USAGE.format("plan") + " [TARGET]"
    )
    parser.add_argument(
        "target",
        metavar="TARGET",
        nargs="?",
        default="",
        help="devices; default: those of this machine",
    )
    text = "fetch the compiler for these devices (gpu or tpu), and plan nothing"
    parser.add_argument("--setup", metavar="KIND", choices=COMPILERS, help=text)
    text = "search for the mesh and the options with the shortest step"
    parser.add_argument("--search", action="store_true", help=text)
    text = "measure this machine's CPUs in about three minutes, and plan nothing"
    parser.add_argument("--calibrate", action="store_true", help=text)
    args = parser.parse_args(options)
    if args.calibrate:
        if args.search:
            parser.error("--calibrate plans nothing; omit --search")
        return calibrate()
    if args.setup is not None:
        if args.search:
            parser.error("--setup plans nothing; omit --search")
        return set_up(args.setup)
    parsed = config.parse_args([*config_arguments, f"--plan={args.target}"])
    return search(parsed) if args.search else show(parsed)


@arguments.reported
def show(parsed: config.Arguments) -> int:
    """Print the plan of ``parsed.plan``. Return the exit code."""
    from jaxtrain import plan

    text, has_no_problem = plan.report(_loaded(parsed), parsed.plan or "")
    print(text)
    return 0 if has_no_problem else 1


@arguments.reported
def search(parsed: config.Arguments) -> int:
    """Print the fastest meshes and options for ``parsed.plan``. Return the exit code."""
    from jaxtrain import plan

    text, fits, is_interrupted = plan.report_search(_loaded(parsed), parsed.plan or "")
    print(text)
    if is_interrupted:
        return arguments.INTERRUPTED
    return 0 if fits else 1


def _loaded(parsed: config.Arguments) -> config.Config:
    """Start JAX, and load the config. Raises PlanError for an unknown target before that."""
    from jaxtrain import plan
    from jaxtrain.parallel import cluster
    from jaxtrain.telemetry import console

    console.start_console()
    cluster.start_jax()
    cluster.use_threads_for_host_devices()
    if parsed.plan:
        plan.parse_target(
            parsed.plan
        )  # an unknown one is reported before any data are read or made
    return config.load(parsed.source, parsed.overrides)


@arguments.reported
def set_up(kind: str) -> int:
    from jaxtrain import plan

    print(plan.set_up(kind))
    return 0


@arguments.reported
def calibrate() -> int:
    from jaxtrain import plan

    print(plan.calibrate())
    return 0
