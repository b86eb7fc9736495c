"""The shipped configs, by name or by import.

`--config=xcm`, or `from jaxtrain.configs import xcm` in a config of one's own.

Their files are in the folder configs/ next to this package, in a checkout as in an installed wheel.
"""

import pathlib

FOLDER = pathlib.Path(__file__).parents[2] / "configs"
__path__ = [str(FOLDER)]


def names() -> list[str]:
    """Return the names that --config takes, in alphabetical order."""
    stems = [path.stem for path in FOLDER.glob("*.py")]
    return sorted(stem for stem in stems if not stem.startswith("_"))
