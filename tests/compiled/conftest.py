"""The compilers that these tests ask, fetched once and kept beneath the cache; where they cannot be had, the tests skip."""

import pytest

from jaxtrain import plan


def _fetched(kind: str) -> None:
    try:
        plan.set_up(kind)
    except plan.PlanError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def gpu_compiler():
    _fetched("gpu")


@pytest.fixture(scope="session")
def tpu_compiler():
    _fetched("tpu")
