"""Run the notebooks of docs/notebooks, and write them as pages with their output and pictures.

    python -m tests.docs_notebooks [NAME …]      # writes docs/notebooks/NAME.md and NAME-N.png

A notebook is plain Python with cells (`# %%` and `# %% [markdown]`).
"""

import contextlib
import io
import os
import pathlib
import re
import sys
import tempfile
from typing import NamedTuple

ROOT = pathlib.Path(__file__).resolve().parent.parent
FOLDER = ROOT / "docs" / "notebooks"
NAMES = sorted(path.stem for path in FOLDER.glob("*.py"))


class Cell(NamedTuple):
    """A part of a notebook; the text of a page, or code."""

    is_text: bool
    source: str


def cells(name: str) -> list[Cell]:
    found = []
    for part in re.split(r"^# %%", (FOLDER / f"{name}.py").read_text(), flags=re.M)[1:]:
        kind, _, source = part.partition("\n")
        text = "markdown" in kind
        found.append(
            Cell(text, re.sub(r"^# ?", "", source, flags=re.M).strip() if text else source.strip())
        )
    return found


def run(name: str, folder: pathlib.Path, pictures: pathlib.Path) -> str:
    """Run a notebook in ``folder``, write its pictures into ``pictures``, and return its page."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    parts, space, shown = [], {"__name__": "__main__"}, 0
    before = pathlib.Path.cwd()
    os.chdir(folder)
    try:
        for cell in cells(name):
            parts.append(cell.source if cell.is_text else f"```python\n{cell.source}\n```")
            if cell.is_text:
                continue
            with contextlib.redirect_stdout(io.StringIO()) as output:
                exec(compile(cell.source, f"{name}.py", "exec"), space)
            text = output.getvalue().replace(f"{folder}/", "").replace(f"{ROOT}/", "").rstrip()
            parts += [f"```text\n{text}\n```"] if text else []
            for number in pyplot.get_fignums():
                shown += 1
                pyplot.figure(number).savefig(pictures / f"{name}-{shown}.png", dpi=80)
                parts.append(f"![Output of the cell above]({name}-{shown}.png)")
            pyplot.close("all")
    finally:
        os.chdir(before)
    return "\n\n".join(parts) + "\n"


def main(names: list[str]) -> None:
    for name in names or NAMES:
        with tempfile.TemporaryDirectory() as folder:
            (FOLDER / f"{name}.md").write_text(run(name, pathlib.Path(folder), FOLDER))


if __name__ == "__main__":
    main(sys.argv[1:])
