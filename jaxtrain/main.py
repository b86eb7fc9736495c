"""python -m jaxtrain.main --config=configs/xcm.py[:/path/to/data] [--config.section.field=value …] [--explain | --plan[=…]]"""

import errno
import sys
from collections.abc import Sequence

from jaxtrain import cluster, config, console, plan, train


def main(argv: Sequence[str] | None = None) -> int:
    console.start_console()
    cluster.use_compilation_cache()
    cluster.use_threads_for_host_devices()
    try:
        arguments = config.parse_args(sys.argv[1:] if argv is None else argv)
        resolved = config.load(arguments.source, arguments.overrides)
        if arguments.explain:
            print(config.explain(resolved))
        elif arguments.plan is not None:
            text, well = plan.report(resolved, arguments.plan)
            print(text)
            return 0 if well else 1
        else:
            train.run(resolved)
    except train.USER_ERRORS as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        where = error.filename or resolved.workdir
        print(
            f"error: {where} could not be written: {error.strerror}; make room, and say the same command again", file=sys.stderr
        )
        return 2
    except train.Preempted as end:
        print(end, file=sys.stderr)
        return resolved.preemption.exit_code
    except KeyboardInterrupt:
        print("stopped; the same command goes on from the last checkpoint", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
