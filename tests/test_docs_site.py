"""The site is built strictly and without a network, and loads nothing from elsewhere."""

import os
import pathlib
import re
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parent.parent


def build(
    site: pathlib.Path, config: pathlib.Path = ROOT / "mkdocs.yml"
) -> subprocess.CompletedProcess:
    env = os.environ | {
        "PYTHONPATH": str(ROOT),
        "NO_MKDOCS_2_WARNING": "1",
        "https_proxy": "http://127.0.0.1:9",
    }
    command = [
        sys.executable,
        "-m",
        "mkdocs",
        "build",
        "--quiet",
        f"--site-dir={site}",
        f"--config-file={config}",
    ]
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=300)


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    done = build(folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def test_the_site_has_every_page_and_loads_nothing_from_elsewhere(site):
    pages = {
        str(page.relative_to(ROOT / "docs").with_suffix(".html"))
        for page in (ROOT / "docs").rglob("*.md")
    }
    assert pages | {"contributing.html", "changelog.html"} <= {
        str(page.relative_to(site)) for page in site.rglob("*.html")
    }
    for page in site.rglob("*.html"):
        loaded = re.findall(
            r"<(?:script|img|iframe)[^>]* src=\"?([^\s\">]+)|<link[^>]*stylesheet[^>]*"
            r" href=\"?([^\s\">]+)",
            page.read_text(),
        )
        assert not [address for pair in loaded for address in pair if "://" in address], page.name


def test_the_site_has_the_api_and_the_commands(site):
    assert (
        "Train a config" in (site / "api.html").read_text()
        or "Trains a config" in (site / "api.html").read_text()
    )
    assert "jaxtrain detect" in (site / "cli.html").read_text()
    assert (site / "examples" / "my_model.py").exists()


def test_each_page_begins_with_what_its_reader_can_do():
    for page in sorted((ROOT / "docs").rglob("*.md")):
        _, _, text = page.read_text().partition("\n\n")
        assert text.startswith("After this page "), page.name
        assert "\n```" in text[:2_000], f"{page.name} has no example near its top"


def test_each_workload_has_the_same_headings():
    for page in (ROOT / "docs" / "workloads").glob("*.md"):
        headings = re.findall(r"^## (.*)", page.read_text(), re.M)
        usual = ["What it is", "Train", "Evaluate", "Use", "Export", "What it reached"]
        assert page.name == "bird-inference.md" or headings == usual, page.name


def test_each_picture_is_small_and_described():
    for page in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]:
        for text, target in re.findall(r"!\[([^\]]*)\]\(([^)]+)\)", page.read_text()):
            assert text and (page.parent / target).stat().st_size < 60_000, f"{page.name}: {target}"
