"""What an installation must have, looked at before a command imports what takes a second: packages, extension, cache folder."""

import importlib.metadata
import importlib.util
import os
import re
from collections.abc import Iterable

from loaders import machine


def problem(*, caches: bool) -> str:
    """What is wrong, with its remedy; empty where nothing is.

    Args:
      caches: whether the command keeps compiled programs, for which the cache folder must be one that can be written.
    """
    try:
        requirements = importlib.metadata.requires("jaxtrain") or []
    except importlib.metadata.PackageNotFoundError:  # a checkout on PYTHONPATH: nobody noted what it needs
        requirements = []
    if wrong := packages(requirements):
        return wrong
    if importlib.util.find_spec("loaders._rust") is None:
        return "the extension loaders._rust is not built; say `make train` in the checkout, or pip install its wheel"
    return unwritable_cache() if caches else ""


def packages(requirements: Iterable[str]) -> str:
    """The first of these requirements (``name>=1.2``; those of extras do not count) that is missing or too old."""
    for text in requirements:
        needed, _, marker = text.partition(";")
        found = re.match(r"\s*([\w.-]+)(?:\[[^]]*])?\s*(?:>=\s*([\d.]+))?", needed)
        if "extra" in marker or not found:
            continue
        name, least = found[1], found[2] or "0"
        remedy = f"; pip install --upgrade '{needed.strip()}'"
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            return f"the package {name} is missing{remedy}"
        if _numbers(version) < _numbers(least):
            return f"the package {name} is {version}, and jaxtrain needs {least} or newer{remedy}"
    return ""


def unwritable_cache() -> str:
    """Why the cache folder cannot be written; empty where it can."""
    folder = "of this user"
    try:
        folder = str(machine.cache_folder())
        os.makedirs(folder, exist_ok=True)
        if os.access(folder, os.W_OK | os.X_OK):
            return ""
        why = "no permission"
    except OSError as error:
        why = error.strerror or str(error)
    return f"the cache folder {folder} cannot be written ({why}); set JAXTRAIN_CACHE to a folder that can be"


def _numbers(version: str) -> list[int]:
    """The release of a version: [0, 10, 2] of 0.10.2rc1."""
    release = re.match(r"\d+(?:\.\d+)*", version)
    return [int(part) for part in release[0].split(".")] if release else []
