"""Hooks of the site's build (mkdocs.yml).

Pages from elsewhere, the list of commands, and checks of the public API.
"""

import ast
import os
import pathlib
import re

import griffe
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File

import jaxtrain
from jaxtrain import commands

ROOT = pathlib.Path(__file__).parent.parent
OUTSIDE = {"CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)#\s]+)(#[^)\s]*)?\)")


def on_files(files, config):
    """Add the pages that lie at the repository's root."""
    for source, page in OUTSIDE.items():
        files.append(File.generated(config, page, content=(ROOT / source).read_text()))
    return files


def on_page_markdown(markdown, page, config, files):
    """Fill in the commands, and make plain text of links to code, which the site does not have."""
    site = (ROOT / "docs" / page.file.src_uri).parent
    here = ROOT if page.file.src_uri in OUTSIDE.values() else site

    def link(found):
        picture, text, target, anchor = found.groups()
        path = pathlib.Path(os.path.normpath(here / target))
        if "://" in target or not path.exists():
            return found[0]  # the build says so
        path = ROOT / "docs" / OUTSIDE.get(str(path.relative_to(ROOT)), path)
        return (
            f"{picture}[{text}]({os.path.relpath(path, site)}{anchor or ''})"
            if path.is_relative_to(ROOT / "docs")
            else text
        )

    return LINK.sub(link, markdown.replace("<!-- commands -->", command_list()))


def command_list() -> str:
    """Return a section for each group of commands, with the help of each."""
    parts, group = [], ""
    for name, command in commands.table().items():
        if command.group != group:
            group = command.group
            parts.append(f"## {group.capitalize()}")
        path = ROOT / (command.module.replace(".", "/"))
        source = (
            path.with_suffix(".py") if path.with_suffix(".py").exists() else path / "__init__.py"
        )
        parts.append(
            "### jaxtrain"
            f" {name}\n\n```text\n{ast.get_docstring(ast.parse(source.read_text()))}\n```"
        )
    return "\n\n".join(parts)


def on_pre_build(config):
    """Each public name has a docstring, and a place on the page of the API."""
    package = griffe.load(
        "jaxtrain", search_paths=[str(ROOT)], resolve_aliases=True, resolve_external=True
    )
    page = (ROOT / "docs" / "api.md").read_text()
    missing = [name for name in jaxtrain.__all__ if f"::: jaxtrain.{name}\n" not in page]
    if missing:
        raise PluginError(
            f"docs/api.md lacks the public names {', '.join(missing)}: add ::: jaxtrain.NAME"
        )
    bare = [name for name in jaxtrain.__all__ if not package[name].has_docstring]
    if bare:
        raise PluginError(f"public names without a docstring: {', '.join(bare)}")
