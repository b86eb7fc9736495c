"""`python -m jaxtrain COMMAND …` is `jaxtrain COMMAND …`."""

import sys

from jaxtrain import cli

if __name__ == "__main__":
    sys.exit(cli.process(cli.main))
