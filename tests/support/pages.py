"""The files that docs/your-model.md shows."""

import pathlib
import re

PAGE = pathlib.Path(__file__).parents[2] / "docs" / "your-model.md"


def examples() -> dict[str, str]:
    """Maps a file name to its content: the first line of each block of Python names the file."""
    return dict(re.findall(r"^```python\n# (\S+\.py)[^\n]*\n(.*?)^```", PAGE.read_text(), re.M | re.S))
