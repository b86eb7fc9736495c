"""The commands of this workload, one file each."""

import argparse
from collections.abc import Callable, Sequence

from loaders.io import checks


def some_of(allowed: Sequence[str]) -> Callable[[str], list[str]]:
    """Return the type of an argument that names some of ``allowed``, between commas."""

    def parse(text: str) -> list[str]:
        names = [name for name in text.split(",") if name]
        if unknown := [name for name in names if name not in allowed]:
            raise argparse.ArgumentTypeError(f"{unknown[0]!r} is unknown; {checks.expected(unknown[0], allowed)}")
        return names

    return parse
