"""Prints every field of a config: its value, unit and meaning.

    jaxtrain explain --config=FILE[:ARGUMENT] [--config.section.field=value …]

    jaxtrain explain --config=configs/xcm.py --config.train.batch=64

Nothing is trained, and no device is used.
"""

import functools
import sys
from collections.abc import Sequence

from jaxtrain import config
from jaxtrain.commands import arguments
from loaders.base import DataError

MISTAKES = (config.ConfigError, DataError)


def main(argv: Sequence[str] | None = None) -> int:
    config_arguments, rest = arguments.split_config(sys.argv[1:] if argv is None else argv)
    arguments.Parser("jaxtrain explain", __doc__, usage=arguments.CONFIG_USAGE.format("explain")).parse_args(rest)
    return arguments.run(functools.partial(_explain, config_arguments), mistakes=MISTAKES)


def show(given: config.Arguments) -> int:
    """Prints the config. Raises ConfigError and DataError."""
    print(config.explain(config.load(given.source, given.overrides)))
    return 0


def _explain(config_arguments: Sequence[str]) -> int:
    return show(config.parse_args(config_arguments))
