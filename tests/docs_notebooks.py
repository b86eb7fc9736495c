"""Run the notebooks of docs/notebooks, and write them as pages with their output and pictures.

    python -m tests.docs_notebooks [NAME …]      # writes docs/notebooks/NAME.md and NAME-N.png

A notebook is plain Python with cells (`# %%` and `# %% [markdown]`). The page shows the output of a
cell `# %% [hidden]`, which draws a picture, and leaves out its code.
"""

import contextlib
import io
import os
import pathlib
import re
import sys
import tempfile
import textwrap
from typing import NamedTuple

ROOT = pathlib.Path(__file__).resolve().parent.parent
FOLDER = ROOT / "docs" / "notebooks"
WIDTH = 100  # columns of code that a page shows without scrolling
NAMES = sorted(path.stem for path in FOLDER.glob("*.py"))


class Cell(NamedTuple):
    """A part of a notebook; the text of a page, or code."""

    is_text: bool
    source: str
    is_hidden: bool = False


def cells(name: str) -> list[Cell]:
    found = []
    for part in re.split(r"^# %%", (FOLDER / f"{name}.py").read_text(), flags=re.M)[1:]:
        kind, _, source = part.partition("\n")
        text = "markdown" in kind
        source = re.sub(r"^# ?", "", source, flags=re.M) if text else source
        found.append(Cell(text, source.strip(), is_hidden="hidden" in kind))
    return found


def wrapped(text: str) -> str:
    """Break the lines that are wider than the page's box of code."""
    lines = [
        textwrap.wrap(line, WIDTH, subsequent_indent="    ", break_on_hyphens=False)
        if len(line) > WIDTH
        else [line]
        for line in text.splitlines()
    ]
    return "\n".join(part for parts in lines for part in parts)


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
            if not cell.is_hidden:
                parts.append(cell.source if cell.is_text else f"```python\n{cell.source}\n```")
            if cell.is_text:
                continue
            with contextlib.redirect_stdout(io.StringIO()) as output:
                exec(compile(cell.source, f"{name}.py", "exec"), space)
            text = output.getvalue().replace(f"{folder}/", "").replace(f"{ROOT}/", "").rstrip()
            parts += [f"```text\n{wrapped(text)}\n```"] if text else []
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
