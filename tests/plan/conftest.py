"""Keeps every plan here independent of a compiler that may be in the cache (tests/compiled uses
those)."""

import pytest

from jaxtrain.plan import environment


@pytest.fixture(autouse=True)
def no_compiler(request, monkeypatch):
    if request.path.name != "test_environment.py":
        monkeypatch.setattr(environment, "find", lambda kind: None)
