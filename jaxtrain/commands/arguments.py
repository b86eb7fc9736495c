"""What all commands share: the parser, RUN and the config's arguments, and how a mistake is reported.

A command is a module with a docstring, which its --help prints, and ``main(argv) -> exit code``. It imports what takes a second
(jax, and all that imports it) after its arguments are parsed.

Exit codes:

    0     done
    1     done, and it found a problem: a plan that does not fit, a damaged checkpoint, an unreadable recording
    2     a mistake to fix, reported in a line on stderr
    75    saved after a signal; rerun the same command to resume      (config.preemption.exit_code)
    130   interrupted
"""

import argparse
import errno
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

from loaders import checks

# A path that a user named is in the way, or is missing.
PATHS = (FileExistsError, FileNotFoundError, IsADirectoryError, NotADirectoryError, PermissionError)
INTERRUPTED = 130
MISTAKE = 2
CONFIG_USAGE = "jaxtrain {} --config=FILE[:ARGUMENT] [--config.section.field=value …]"


class Parser(argparse.ArgumentParser):
    """A parser whose --help prints a command's docstring, and whose mistakes are one line with the nearest spelling."""

    def __init__(self, prog: str, description: str | None = None, **options: Any):
        super().__init__(
            prog=prog,
            description=description,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
            **options,
        )

    def parse_args(  # type: ignore[override]  # typeshed's also returns a namespace of the caller's own type
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> argparse.Namespace:
        parsed, unknown = self.parse_known_args(args, namespace)
        if unknown:
            known = [option for parser in self._with_actions() for a in parser._actions for option in a.option_strings]
            flag, remedy = unknown[0].partition("=")[0], "omit it"
            if flag.startswith("-"):
                remedy = checks.expected(flag, (name for name in known if name.startswith("--")))
            self.error(f"argument {unknown[0]!r} is unknown; {remedy}")
        return parsed

    def _with_actions(self) -> Iterator[argparse.ArgumentParser]:
        """This parser, and those of its actions (`jaxtrain checkpoint verify`)."""
        yield self
        for action in self._actions:
            if isinstance(action, argparse._SubParsersAction):
                yield from action.choices.values()

    def error(self, message: str) -> NoReturn:
        report(f"{message}; see {self.prog} --help")
        sys.exit(MISTAKE)


def add_run(parser: argparse.ArgumentParser, *, ema: bool = False, nargs: int | str | None = None) -> None:
    """Adds RUN and --step (and --ema), which `jaxtrain.weights.source.find` takes."""
    parser.add_argument(
        "run", metavar="RUN", nargs=nargs, help="a run's workdir, a step directory of it, or a folder of `jaxtrain export`"
    )
    parser.add_argument("--step", type=int, help="step of a workdir; default: the newest")
    if ema:
        parser.add_argument("--ema", action="store_true", help="the average of the parameters, which evaluation uses")


def split_config(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Splits ``argv`` into what `jaxtrain.config.parse_args` reads (--config… with their values) and the rest."""
    config, rest = [], []
    given = iter(argv)
    for argument in given:
        flag, equals, _ = argument.partition("=")
        if flag != "--config" and not flag.startswith("--config."):
            rest.append(argument)
            continue
        config.append(argument)
        if not equals and (value := next(given, None)) is not None:
            config.append(value)
    return config, rest


def positive(text: str) -> int:
    """The type of an argument that counts something: an integer of at least 1."""
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r}; it must be an integer of at least 1")
    return value


def report(text: object) -> None:
    """Prints a mistake on stderr."""
    print(f"error: {text}", file=sys.stderr)


def run(action: Callable[[], int], *, mistakes: tuple[type[Exception], ...] = ()) -> int:
    """Calls ``action`` and returns its exit code; reports ``mistakes``, files that are in the way, and an interruption."""
    try:
        return action()
    except mistakes as error:
        report(error)
        return MISTAKE
    except BrokenPipeError:
        # Whoever read our output has enough of it. Python flushes stdout at its end, and would complain again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            report(
                f"{error.filename or 'a file'} could not be written: {error.strerror}; free some space, then rerun the command"
            )
            return MISTAKE
        if error.filename is None or not isinstance(error, PATHS):
            raise
        report(f"{error.filename}: {error.strerror}; name another path, or change its permissions")
        return MISTAKE
    except KeyboardInterrupt:
        report("interrupted")
        return INTERRUPTED
