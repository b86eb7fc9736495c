"""The options by which every command that reads tables names their columns."""

import argparse
from collections.abc import Sequence

from loaders.audio.recordings.columns import FLAGS, Options


def add(parser: argparse._ArgumentGroup, names: Sequence[str] = tuple(FLAGS)) -> None:
    """Add the options of `loaders.audio.recordings.columns`, or some of them."""
    for name in names:
        flag = FLAGS[name]
        several = {"label": ", or several between commas", "duration": ", or the length of all events, 5s"}.get(name, "")
        text = f"column of a table: {name}{several}; none; default: by usual names"
        parser.add_argument(flag, default="", metavar="NAME", help=text)
    if len(names) == 1:
        return
    parser.add_argument("--dates", default="", choices=("", "day-first", "month-first"), help="which of 01/06/2024 is first")
    parser.add_argument("--encoding", default="", metavar="NAME", help="of tables, for example cp1250; default: by their bytes")
    parser.add_argument("--separator", default="", metavar="TEXT", help="between several labels in one field of a table")


def of(args: argparse.Namespace) -> Options:
    """Return the options that were given."""
    named = vars(args)
    return Options(**{name: named[name] for name in Options.__dataclass_fields__ if name in named and name != "labels"})
