"""Trains a config, or resumes its run from the newest checkpoint in its workdir.

    jaxtrain train --config=configs/xcm.py[:/path/to/data] [--config.section.field=value …]

    jaxtrain train --config=configs/xcm.py --config.train.batch=64 --config.optim.lr=3e-4
    jaxtrain train --config=configs/xcm.py --explain          every field: value, unit, meaning     (jaxtrain explain)
    jaxtrain train --config=configs/xcm.py --plan=gpu:h100x8  memory and time on any devices        (jaxtrain plan)

`python -m jaxtrain.main` is the same command. All mistakes of a config are reported at once, before any device is used.
A run that a signal ends is saved and exits with 75: rerun the same command to resume.
"""

import errno
import functools
import sys
from collections.abc import Sequence

from jaxtrain import config
from jaxtrain.commands import arguments, explain, plan


def main(argv: Sequence[str] | None = None) -> int:
    argv = list(sys.argv[1:] if argv is None else argv)
    parser = arguments.Parser("jaxtrain train", __doc__, usage=arguments.CONFIG_USAGE.format("train"))
    parser.add_argument("--explain", action="store_true", help="print every field of the config, and train nothing")
    parser.add_argument("--plan", metavar="TARGET", nargs="?", help="plan the run for these devices, and train nothing")
    parser.add_argument("--plan-setup", metavar="KIND", help="fetch the compiler for plans of gpu or tpu, and train nothing")
    if {"-h", "--help"} & set(arguments.split_config(argv)[1]):
        parser.print_help()
        return 0
    try:
        given = config.parse_args(argv)  # which reports a config's own mistakes next to unknown arguments
    except config.ConfigError as error:
        arguments.report(error)
        return arguments.MISTAKE
    if given.plan_setup:
        return plan.set_up(given.plan_setup)
    if given.explain:
        return arguments.run(functools.partial(explain.show, given), mistakes=explain.MISTAKES)
    return _train(given) if given.plan is None else plan.show(given)


def _train(given: config.Arguments) -> int:
    from jaxtrain import cluster, console, train

    console.start_console()
    cluster.use_compilation_cache()
    cluster.use_threads_for_host_devices()
    resolved = None
    try:
        resolved = config.load(given.source, given.overrides)
        train.run(resolved)
    except train.USER_ERRORS as error:
        arguments.report(error)
        return arguments.MISTAKE
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT) or resolved is None:
            raise
        where = error.filename or resolved.workdir
        arguments.report(
            f"{where} could not be written: {error.strerror}; free some space, then rerun the same command to resume"
        )
        return arguments.MISTAKE
    except train.Preempted as end:
        assert resolved is not None  # raised by `train.run` alone
        print(end, file=sys.stderr)
        return resolved.preemption.exit_code
    except KeyboardInterrupt:
        print("stopped; rerun the same command to resume from the last checkpoint", file=sys.stderr)
        return arguments.INTERRUPTED
    return 0
