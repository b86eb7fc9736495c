"""The files that CONTRIBUTING shows."""

import pathlib
import re

PAGE = pathlib.Path(__file__).parents[2] / "CONTRIBUTING.md"


def examples() -> dict[str, str]:
    """File name -> content: the first line of each block of Python names its own."""
    return dict(re.findall(r"^```python\n# (\S+\.py)[^\n]*\n(.*?)^```", PAGE.read_text(), re.M | re.S))
