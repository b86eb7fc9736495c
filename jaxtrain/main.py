"""`python -m jaxtrain.main …` is `jaxtrain train …`, under the name that scripts rely on."""

import sys
from collections.abc import Sequence

from jaxtrain import cli


def main(argv: Sequence[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    return cli.main(["train", *argv])


if __name__ == "__main__":
    sys.exit(cli.process(main))
