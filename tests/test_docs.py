"""The pages: their links lead somewhere, and what a command writes is what it would write now."""

import pathlib
import re

import pytest

from tools import write_reference

ROOT = pathlib.Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]


def anchors(path: pathlib.Path) -> set[str]:
    """The headings of a page, as forges spell them in a link."""
    headings = re.findall(r"^#+ (.*)$", path.read_text(), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if "://" in target:
            continue
        name, _, anchor = target.partition("#")
        file = (page.parent / name).resolve() if name else page
        assert file.exists(), f"{page.name} links to {target}, which does not exist"
        assert not anchor or anchor in anchors(file), f"{page.name} links to {target}, and {file.name} has no such heading"


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_paths_in_a_page_exist(page):
    """A module, test or config that a page names in code is there: `jaxtrain/train.py`, `tests/test_kills.py`."""
    named = set(
        re.findall(r"(?<![\w/.-])((?:jaxtrain|loaders|rust|configs|tests|tools)/[\w/]+\.(?:py|rs|sh|png))", page.read_text())
    )
    assert not {name for name in named if not (ROOT / name).exists()}


def test_the_readme_is_a_page():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 130


def test_the_reference_is_what_the_configs_say():
    assert write_reference.PAGE.read_text() == write_reference.page()
