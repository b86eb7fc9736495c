"""Print every field of a config with its value, unit and meaning, and the meaning of its metrics.

    jaxtrain explain --config=FILE[:ARGUMENT] [--config.section.field=value …]

    jaxtrain explain --config=xcm --config.train.batch=64

Nothing is trained or generated, and no device is used. Missing and wrong values are listed after
the fields.
"""

import sys
from collections.abc import Sequence

from jaxtrain import config
from jaxtrain.commands import arguments
from jaxtrain.telemetry import glossary

OTHERS = (
    "above are the defaults of every run; this config's own values, its model and its data come"
    " with --config=FILE:ARGUMENT"
)


@arguments.reported
def main(argv: Sequence[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    config_arguments, options = arguments.split_config(argv)
    usage = arguments.CONFIG_USAGE.format("explain")
    arguments.Parser("jaxtrain explain", __doc__, usage=usage).parse_args(options)
    return show(config.parse_args(config_arguments))


@arguments.reported
def show(parsed: config.Arguments) -> int:
    """Print the config, then its errors, and return the exit code. Nothing is generated for it.

    Of a config that refuses its argument, or misses it, these are the fields that every config has.
    """
    try:
        run, problems = config.read(parsed.source, parsed.overrides, make_data=False)
    except config.ArgumentError as error:
        run = config.Config(workload="", loader="")
        problems = [(path, f"{text}; {OTHERS}") for path, text in error.problems]
    print(f"{config.explain(run)}\n\n{glossary.explained(run.workload)}", flush=True)
    if not problems:
        return 0
    arguments.report(config.ConfigError(problems))
    return arguments.USER_ERROR
