"""Tests among the trainer's that take a shipped workload for their example."""

import pytest

from jaxtrain import workload

NAMES = [name.rpartition(".")[2] for name in workload.shipped()]


def needs(*names: str) -> pytest.MarkDecorator:
    """Skip a test, or a case of it, if the package of one of these workloads is deleted."""
    gone = sorted(set(names) - set(NAMES))
    return pytest.mark.skipif(bool(gone), reason=f"jaxtrain.workloads has no {', '.join(gone)}")
