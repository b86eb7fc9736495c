"""The command line of a run: its config and overrides, and whether to explain or plan it."""

from collections.abc import Sequence
from typing import NamedTuple

from jaxtrain.config.build import locate
from jaxtrain.config.checks import ConfigError
from loaders.io import checks

COMPILERS = ("gpu", "tpu")  # that can be fetched for plans


class Arguments(NamedTuple):
    """The requests of a command line."""

    source: str  # FILE[:ARG] of --config
    overrides: list[tuple[str, str]]  # (section.field, text)
    explain: bool
    plan: str | None  # the target, "" for this machine; None = no plan
    plan_setup: str = ""  # the compiler to fetch for plans, one of COMPILERS; nothing else happens then


def parse_args(argv: Sequence[str], *, find: bool = True) -> Arguments:
    """``--config=FILE[:ARG]`` with its overrides, or ``--plan-setup KIND`` alone.

    Overrides are --config.section.field=value. Further flags are --explain and --plan[=TARGET].

    The config is not read yet, since the module of its workload may take a second to import.

    Args:
      find: whether the config must exist. If not, its reader reports a missing one.

    Raises ConfigError for a missing --config, a config that does not exist and every argument that
    is none of these.
    """
    source, overrides, explain, plan, setup, problems = "", [], False, None, "", []
    rest = iter(argv)
    for argument in rest:
        flag, equals, value = argument.partition("=")
        if flag == "--explain" and not equals:
            explain = True
            continue
        if flag == "--plan":
            plan = value
            continue
        if flag == "--plan-setup":
            setup = value if equals else next(rest, "")
            if not setup:
                problems.append(("", "--plan-setup is given without a value; expected --plan-setup=gpu or --plan-setup=tpu"))
            elif setup not in COMPILERS:
                problems.append(("", f"--plan-setup is {setup!r}; {checks.expected(setup, COMPILERS)}"))
            continue
        if flag != "--config" and not flag.startswith("--config."):
            problems.append(
                (
                    "",
                    f"argument {argument!r} is unknown; "
                    f"{checks.expected(flag, ('--config', '--explain', '--plan', '--plan-setup', '--config.section.field'))}",
                )
            )
            continue
        if not equals:
            following = next(rest, None)
            if following is None:
                problems.append(("", f"{flag} is given without a value"))
                continue
            value = following
        if flag == "--config":
            source = value
        else:
            overrides.append((flag.removeprefix("--config."), value))
    if not source and not problems and not setup:
        problems.append(("", "file is missing; for example --config=xcm"))
    if source and find:
        try:
            locate(source.partition(":")[0])
        except ConfigError as error:
            problems += error.problems
    if problems:
        raise ConfigError(problems)
    return Arguments(source, overrides, explain, plan, setup)
