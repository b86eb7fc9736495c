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
    config_arguments, rest = arguments.split_config(sys.argv[1:] if argv is None else argv)
    arguments.Parser(
        "jaxtrain explain", __doc__, usage=arguments.CONFIG_USAGE.format("explain")
    ).parse_args(rest)
    return show(config.parse_args(config_arguments))


@arguments.reported
def show(given: config.Arguments) -> int:
    """Print the config, then its errors, and return the exit code. Nothing is generated for it.

    Of a config that refuses its argument, or misses it, these are the fields that every config has.
    """
    try:
        found, problems = config.read(given.source, given.overrides, make_data=False)
    except config.ArgumentError as error:
        found, problems = (
            config.Config(workload="", loader=""),
            [(path, f"{text}; {OTHERS}") for path, text in error.problems],
        )
    print(f"{config.explain(found)}\n\n{glossary.explained(found.workload)}", flush=True)
    if not problems:
        return 0
    arguments.report(config.ConfigError(problems))
    return arguments.USER_ERROR
