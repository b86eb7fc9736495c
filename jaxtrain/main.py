"""`python -m jaxtrain.main …` is `jaxtrain train …`, under the name that scripts and launchers rely on."""

import sys

from jaxtrain.commands.train import main

if __name__ == "__main__":
    sys.exit(main())
