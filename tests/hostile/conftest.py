"""One zygote for all attacks, and inputs that are made once."""

import pathlib

import pytest

from tests.hostile import harness
from tests.support.xla import SOON


@pytest.fixture(scope="session")
def zygote(tmp_path_factory):
    made = harness.Zygote(tmp_path_factory.mktemp("cache"), xla_flags=SOON)
    yield made
    made.close()


@pytest.fixture(scope="session")
def whole(tmp_path_factory):
    """Maps each make function to the folder that it filled."""
    made: dict[str, pathlib.Path] = {}
    root = tmp_path_factory.mktemp("inputs")

    def get(make) -> pathlib.Path:
        if make.__name__ not in made:
            folder = root / make.__name__
            folder.mkdir(exist_ok=True)
            make(folder)
            made[make.__name__] = folder
        return made[make.__name__]

    return get
