"""Checks of the installation before a command's slow imports: packages, extension, cache folder."""

import functools
import importlib
import importlib.metadata
import importlib.util
import itertools
import os
import re
from collections.abc import Iterable, Sequence

from loaders.io import machine

ALLOW_DEBUG = "--config.data.allow_debug_build"


def problem(argv: Sequence[str] = (), *, caches: bool) -> str:
    """Return the first problem of the installation with its remedy, or "".

    ``argv`` may allow an extension without optimisation. ``caches``: the command keeps compiled
    programs, so the cache folder must be one that can be written.
    """
    try:
        requirements = importlib.metadata.requires("jaxtrain") or []
    # a checkout on PYTHONPATH has no list of requirements
    except importlib.metadata.PackageNotFoundError:
        requirements = []
    wrong_package = package_problem(requirements)
    if wrong_package:
        return wrong_package
    remedy = "say `make train` in the checkout, or pip install its wheel"
    if importlib.util.find_spec("loaders._rust") is None:
        return f"the extension loaders._rust is not built; {remedy}"
    profile = importlib.import_module("loaders._rust").build_profile()
    if profile != "release" and not allows_debug(argv):
        return (
            f"the extension loaders._rust is a {profile} build, which is many times slower;"
            f" {remedy}, or train with it nevertheless: {ALLOW_DEBUG}=True"
        )
    return unwritable_cache() if caches else ""


def allows_debug(argv: Sequence[str]) -> bool:
    """Whether a command line sets the field of a config that allows a debug build."""
    words: list[str] = []
    for argument in argv:
        words += argument.split("=", 1)
    for word, value in itertools.pairwise(words):
        if word == ALLOW_DEBUG and value.lower() == "true":
            return True
    return False


def package_problem(requirements: Iterable[str]) -> str:
    """Return the first missing or old one of ``name>=1.2``, …, without those of extras."""
    for text in requirements:
        requirement, _, marker = text.partition(";")
        match = re.match(r"\s*([\w.-]+)(?:\[[^]]*])?\s*(?:>=\s*([\d.]+))?", requirement)
        if "extra" in marker or not match:
            continue
        name, least = match[1], match[2] or "0"
        remedy = f"; pip install --upgrade '{requirement.strip()}'"
        try:
            version = _version(name)
        except importlib.metadata.PackageNotFoundError:
            return f"the package {name} is missing{remedy}"
        if _release(version) < _release(least):
            return f"the package {name} is {version}, and jaxtrain needs {least} or newer{remedy}"
    return ""


def unwritable_cache() -> str:
    """Return the reason why the cache folder cannot be written, or ""."""
    folder = "of this user"
    try:
        folder = str(machine.cache_folder())
        os.makedirs(folder, exist_ok=True)
        if os.access(folder, os.W_OK | os.X_OK):
            return ""
        why = "no permission"
    except OSError as error:
        why = error.strerror or str(error)
    return (
        f"the cache folder {folder} cannot be written ({why}); set JAXTRAIN_CACHE to a folder that"
        " can be"
    )


# it parses a file; many commands may run in one process
_version = functools.cache(importlib.metadata.version)


def _release(version: str) -> list[int]:
    """Return the numbers of a version without zeros at their end: [0, 10] of 0.10.0rc1."""
    release = re.match(r"\d+(?:\.\d+)*", version)
    numbers = [int(part) for part in release[0].split(".")] if release else []
    while numbers and not numbers[-1]:
        numbers.pop()
    return numbers
