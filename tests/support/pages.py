"""The files that docs/your-model.md and CONTRIBUTING.md show."""

import pathlib
import re

ROOT = pathlib.Path(__file__).parents[2]
PAGES = (ROOT / "docs" / "your-model.md", ROOT / "CONTRIBUTING.md")


def examples() -> dict[str, str]:
    """Maps a file name to its content: the first line of each block of Python names the file."""
    text = "\n".join(page.read_text() for page in PAGES)
    return dict(re.findall(r"^```python\n# (\S+\.py)[^\n]*\n(.*?)^```", text, re.M | re.S))
