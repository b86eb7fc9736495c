"""The command line of a run: its config and overrides, and whether to explain or plan it."""

from collections.abc import Sequence
from typing import NamedTuple

from jaxtrain.config.build import locate
from jaxtrain.config.consistency import ConfigError
from loaders.io import checks

COMPILERS = ("gpu", "tpu")  # that can be fetched for plans
FLAGS = ("--config", "--explain", "--plan", "--plan-setup", "--supervise", "--config.section.field")


class Arguments(NamedTuple):
    """The requests of a command line."""

    source: str  # FILE[:ARG] of --config
    overrides: list[tuple[str, str]]  # (section.field, text)
    explain: bool
    plan: str | None  # the target, "" for this machine; None = no plan
    # the compiler to fetch for plans, one of COMPILERS; nothing else happens then
    plan_setup: str = ""
    supervise: bool = False  # restart the processes of the run when one ends


def parse_args(argv: Sequence[str], *, find: bool = True) -> Arguments:
    """Parse --config=FILE[:ARG] with --config.section.field=value, and a flag of `Arguments`.

    ``--plan-setup KIND`` may stand alone. The config's file is not imported, and with ``find`` it
    must exist. Raises ConfigError with all errors.
    """
    source, setup = "", ""
    explain = False
    supervise = False
    plan = None
    overrides: list[tuple[str, str]] = []
    problems: list[tuple[str, str]] = []
    remaining = iter(argv)
    for argument in remaining:
        flag, equals, value = argument.partition("=")
        if argument == "--explain":
            explain = True
        elif argument == "--supervise":
            supervise = True
        elif flag == "--plan":
            plan = value
        elif flag not in ("--config", "--plan-setup") and not flag.startswith("--config."):
            remedy = checks.expected(flag, FLAGS)
            problems.append(("", f"argument {argument!r} is unknown; {remedy}"))
        # "" is a value: --config.resume.path ""
        elif (text := value if equals else next(remaining, None)) is None:
            problems.append(("", f"{flag} is given without a value"))
        elif flag == "--config":
            source = text
        elif flag == "--plan-setup":
            setup = text
            if setup not in COMPILERS:
                remedy = checks.expected(setup, COMPILERS)
                problems.append(("", f"--plan-setup is {setup!r}; {remedy}"))
        else:
            overrides.append((flag.removeprefix("--config."), text))
    if not source and not problems and not setup:
        problems.append(("", "file is missing; for example --config=xcm"))
    if source and find:
        try:
            locate(source.partition(":")[0])
        except ConfigError as error:
            problems += error.problems
    if problems:
        raise ConfigError(problems)
    return Arguments(source, overrides, explain, plan, setup, supervise)
