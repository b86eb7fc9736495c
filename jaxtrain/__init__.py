"""A training stack in pure JAX.

config ─▶ process ─▶ assembly ─▶ plan ─▶ data ─▶ checkpoints ─▶ programs ─▶ init_or_restore ─▶ step ─▶ metrics_logger

Read `jaxtrain.loop.run` from top to bottom: it is the whole program.
"""

import sys

__version__ = "0.1.0"  # as in pyproject.toml: of the code that runs, which may be a checkout that nobody installed

if sys.version_info < (3, 11):  # noqa: UP036  # a checkout is not asked by pip; said before any syntax that is too new
    sys.stderr.write(f"error: jaxtrain needs Python 3.11 or newer, and this is {sys.version_info[0]}.{sys.version_info[1]}\n")
    sys.exit(2)
