"""`python -m tools.orbax_to_safetensors …` is `jaxtrain export …`, by the name of scripts."""

import sys

from jaxtrain.commands.export import main

if __name__ == "__main__":
    sys.exit(main())
