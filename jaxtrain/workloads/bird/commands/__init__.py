"""The commands of this workload, one file each, and what several of them share."""

import argparse
import pathlib
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from jaxtrain.commands import arguments
from loaders.io import checks

if TYPE_CHECKING:  # numpy is not imported for the help of a command that reads no table
    from loaders.audio.recordings.annotations import Errors
    from loaders.audio.recordings.columns import Options

SKLEARN = "pip install 'jaxtrain[probe]'"


def some_of(allowed: Sequence[str]) -> Callable[[str], list[str]]:
    """Return the type of an argument that names some of ``allowed``, between commas."""

    def parse(text: str) -> list[str]:
        names = [name for name in text.split(",") if name]
        for name in names:
            if name not in allowed:
                raise argparse.ArgumentTypeError(
                    f"{name!r} is unknown; {checks.expected(name, allowed)}"
                )
        return names

    return parse


def add_table_flags(parser: argparse._ArgumentGroup, names: Sequence[str] = ()) -> None:
    """Add the options of `loaders.audio.recordings.columns`, or those of some columns alone."""
    from loaders.audio.recordings.columns import FLAGS

    alternatives = {
        "label": ", or several between commas",
        "duration": ", or the length of all events, 5s",
    }
    for name in names or FLAGS:
        parser.add_argument(
            FLAGS[name],
            default="",
            metavar="NAME",
            help=(
                f"column of a table: {name}{alternatives.get(name, '')}; none; default: by usual"
                " names"
            ),
        )
    if not names:
        parser.add_argument(
            "--dates",
            default="",
            choices=("", "day-first", "month-first"),
            help="which of 01/06/2024 is first",
        )
        parser.add_argument(
            "--encoding",
            default="",
            metavar="NAME",
            help="of tables, for example cp1250; default: by their bytes",
        )
        parser.add_argument(
            "--separator",
            default="",
            metavar="TEXT",
            help="between several labels in a field of a table; none: a field is one label",
        )


def table_options(args: argparse.Namespace) -> "Options":
    """Return the options of `add_table_flags` that were given."""
    from loaders.audio.recordings.columns import Options

    values = vars(args)
    fields = {}
    for name in Options.__dataclass_fields__:
        if name in values and name != "labels":
            fields[name] = values[name]
    return Options(**fields)


def prepare_process() -> None:
    """Make a process that computes with an encoder start and load quickly."""
    from jaxtrain.parallel import cluster
    from loaders.io import machine

    cluster.start_jax()
    machine.keep_freed_memory()


def need_sklearn() -> None:
    if error := arguments.missing("sklearn", SKLEARN):
        raise checks.UserError(error)


def show_errors(errors: "Errors", listed: pathlib.Path | None = None) -> None:
    """Print a few errors of each kind to stderr, and write the whole list into a file."""
    for line in errors.report():
        print(line, file=sys.stderr)
    arguments.list_errors(errors.listed())
    if listed:
        errors.save(listed)
