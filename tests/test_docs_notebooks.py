"""The notebooks of the docs run, and their pages show the code that is run."""

import os
import pathlib
import re
import subprocess
import sys

import pytest

from tests import docs_notebooks

ROOT = pathlib.Path(__file__).parent.parent


@pytest.mark.parametrize("name", docs_notebooks.NAMES)
def test_a_page_shows_the_cells_of_its_notebook(name):
    page = (docs_notebooks.FOLDER / f"{name}.md").read_text()
    for cell in docs_notebooks.cells(name):
        assert (cell.source in page) != cell.is_hidden, (
            f"python -m tests.docs_notebooks {name} writes the page again"
        )
    for picture in re.findall(r"\]\((\S+\.png)\)", page):
        assert (docs_notebooks.FOLDER / picture).exists()


@pytest.mark.slow
@pytest.mark.parametrize("name", docs_notebooks.NAMES)
def test_a_notebook_ends_within_five_minutes(name, tmp_path):
    script = (
        "import pathlib, sys; from tests import docs_notebooks as d; d.run(sys.argv[1],"
        " *map(pathlib.Path, sys.argv[2:]))"
    )
    (tmp_path / "pictures").mkdir()
    # the folder of `jaxtrain`
    env = os.environ | {"PATH": f"{pathlib.Path(sys.executable).parent}:{os.environ['PATH']}"}
    env.pop("XLA_FLAGS", None)
    command = [sys.executable, "-c", script, name, tmp_path, tmp_path / "pictures"]
    subprocess.run(command, cwd=ROOT, env=env, check=True, timeout=300)
