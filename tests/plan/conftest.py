"""No plan here depends on a compiler that the cache may have (tests/compiled asks those)."""

import pytest

from jaxtrain.plan import environment


@pytest.fixture(autouse=True)
def no_compiler(request, monkeypatch):
    if request.path.name != "test_environment.py":
        monkeypatch.setattr(environment, "find", lambda kind: None)
