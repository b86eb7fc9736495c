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
    jaxtrain plan --config=trm_sudoku gpu:h100x8..64 --scale    the growth from 8 cards to 64

With the target's compiler, which needs no such chip, the real step is compiled. Without it, the
plan has exact bytes between steps and a lower bound of a step's.

With --search the plan compiles meshes and options in the order of an estimate, until five meshes
fit. It prints their time, memory and exchanges, and their overrides. Ctrl-C prints the results so
far.

With --scale TARGET is a range of sizes: tpu:v5p:4..4096 (chips), gpu:h100x8..1024 (cards) or
'tpu:v5e:16x16*1..8' (slices). The plan compiles a step for the first, each doubling of it and the
last, with rows in proportion to the devices and with the config's rows. It prints memory, FLOP,
exchanges, the forecast, the efficiency and what limits it. The mesh is the config's, whose axis of
-1 takes the devices, or with --config.mesh=auto the first that fits. Ctrl-C as for --search.

Ends with 1 when the plan finds a problem, for example that the run does not fit into memory.
"""

import functools
import math
import sys
from collections.abc import Sequence

from jaxtrain import config
from jaxtrain.commands import arguments
from jaxtrain.config.command_line import COMPILERS

FACTOR = functools.partial(
    arguments.integer, low=2, high=math.inf, expected="of at least 2, by which sizes grow"
)


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
    text = "compile a step for each size of a range, as tpu:v5p:4..4096, and compare them"
    parser.add_argument("--scale", action="store_true", help=text)
    text = "factor between two sizes of --scale; default: 2"
    parser.add_argument("--by", metavar="N", type=FACTOR, help=text)
    text = "measure this machine's CPUs in about three minutes, and plan nothing"
    parser.add_argument("--calibrate", action="store_true", help=text)
    args = parser.parse_args(options)
    plans = [name for name in ("search", "scale") if getattr(args, name)]
    if len(plans) > 1:
        parser.error("--search and --scale are two plans; omit one")
    for name in ("calibrate", "setup"):
        if not getattr(args, name):
            continue
        others = [*(f"--{plan}" for plan in plans), args.target, *config_arguments]
        others += ["--setup"] if name == "calibrate" and args.setup else []
        if superfluous := [other for other in others if other]:
            parser.error(f"--{name} plans nothing; omit {superfluous[0]}")
    if args.by and not args.scale:
        parser.error("--by is the factor between sizes of --scale; add --scale, or omit it")
    if args.calibrate:
        return calibrate()
    if args.setup is not None:
        return set_up(args.setup)
    parsed = config.parse_args([*config_arguments, f"--plan={args.target}"])
    if args.scale:
        return scale(parsed, args.by or 2)
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


@arguments.reported
def scale(parsed: config.Arguments, factor: int) -> int:
    """Print the growth of a run over the range ``parsed.plan``. Return the exit code.

    ``factor``: between two sizes.
    """
    from jaxtrain import plan

    loaded = _loaded(parsed, factor)
    text, fits, is_interrupted = plan.report_scale(loaded, parsed.plan or "", factor)
    print(text)
    if is_interrupted:
        return arguments.INTERRUPTED
    return 0 if fits else 1


def _loaded(parsed: config.Arguments, factor: int = 0) -> config.Config:
    """Start JAX, and load the config. Raises PlanError for an unknown target before that.

    ``factor``: between two sizes of a range, which the target is then.
    """
    from jaxtrain import plan
    from jaxtrain.parallel import cluster
    from jaxtrain.plan.scale import parse_range
    from jaxtrain.telemetry import console

    console.start_console()
    cluster.start_jax()
    cluster.use_threads_for_host_devices()
    # an unknown target is reported before any data are read or made
    if parsed.plan and factor:
        parse_range(parsed.plan, factor)
    elif parsed.plan:
        plan.parse_target(parsed.plan)
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
