"""`python -m tools.launch_slurm …` is `jaxtrain launch …`, under the name that scripts rely on."""

import sys

from jaxtrain.commands.launch import main

if __name__ == "__main__":
    sys.exit(main())
