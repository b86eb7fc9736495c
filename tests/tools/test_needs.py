"""The packages that `make` requests from pip."""

import pathlib
import re
import tomllib

from packaging.requirements import Requirement

from tools import needs

ROOT = pathlib.Path(__file__).parents[2]


def test_extras_that_name_others_are_followed_and_nothing_is_asked_for_twice():
    project = {
        "name": "jaxtrain",
        "dependencies": ["jax>=1"],
        "optional-dependencies": {
            "a": ["x", "jaxtrain[b, c]"],
            "b": ["jax>=1"],
            "c": ["y; sys_platform == 'linux'"],
        },
    }
    assert needs.needs(project, []) == ["jax>=1"]
    assert needs.needs(project, ["a"]) == ["jax>=1", "x", "y; sys_platform == 'linux'"]


def test_neither_this_package_nor_a_compiler_for_plans_is_among_the_needs_to_train():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for extras in ([], ["dev"], ["all"]):
        names = [requirement.partition(">")[0] for requirement in needs.needs(project, extras)]
        assert not [name for name in names if name.startswith(("jaxtrain", "libtpu", "jax-cuda"))]
    assert (
        len(needs.needs(project, ["dev"]))
        > len(needs.needs(project, []))
        == len(project["dependencies"])
    )


def test_the_lock_holds_what_the_checkout_needs():
    """Without `make lock`, make test LOCKED=1 would miss a requirement that was added or raised."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    text = (ROOT / "requirements.lock").read_text()
    entry = r"^([a-z0-9.-]+)==(\S+)(?: \\\n    --hash=sha256:[0-9a-f]{64})+$"
    pins = {match[1]: f"{match[1]}=={match[2]}" for match in re.finditer(entry, text, re.M)}
    assert len(pins) == text.count("==") > 100, "each has a checksum"
    for text in [*needs.needs(project["project"], ["dev"]), *project["build-system"]["requires"]]:
        requirement = Requirement(text)
        name, _, version = pins[requirement.name.lower().replace("_", "-")].partition("==")
        assert requirement.specifier.contains(version, prereleases=True), (
            f"{name} {version} is not {text}"
        )
