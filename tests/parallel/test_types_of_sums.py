"""The type in which replicas add up each workload's gradients, as docs/ARCHITECTURE.md decides it.

It is that of the parameters: float32, unless giblet's have 16 bits, which CPUs add up in float32.
Activations have 16 bits here.
"""

import collections
import math

import jax
import pytest
from jax.extend.core import jaxprs_in_params

from jaxtrain import plan
from tests.plan import cases

REPLICAS = (("mesh.data", "-1"), ("mesh.fsdp", "1"), ("model.dtype", "bfloat16"))
NARROW = (("model.param_dtype", "bfloat16"),)
SMALL = 64  # [numbers] of metrics and weights of a loss


def equations(jaxpr):
    """All of a jaxpr and of those in it."""
    for equation in jaxpr.eqns:
        yield equation
        for inner in jaxprs_in_params(equation.params):
            yield from equations(inner)


def sums(config, target):
    """Map each type to the numbers that are added up over "data"."""
    assembly = plan.abstractly(config, plan.parse_target(target))
    traced = assembly.trace(assembly.task.stage(config.train.steps - 1))
    counts = collections.Counter()
    for equation in equations(traced.jaxpr.jaxpr):
        if equation.primitive.name.startswith("psum"):
            for variable in equation.invars:
                if math.prod(variable.aval.shape) > SMALL:
                    counts[str(variable.aval.dtype)] += math.prod(variable.aval.shape)
    return counts


@pytest.mark.skipif(jax.device_count() < 2, reason="a mesh of one device adds up nothing")
@pytest.mark.parametrize(
    ("workload", "changes", "target", "dtype"),
    [
        ("bird", (), "", "float32"),
        ("language", (), "", "float32"),
        ("trm", (), "", "float32"),
        ("giblet", (), "", "float32"),
        ("giblet", NARROW, "gpu:h100x8", "bfloat16"),
        ("giblet", (*NARROW, ("train.accumulate", "2")), "gpu:h100x8", "bfloat16"),
        ("giblet", NARROW, "tpu:v5e:2x4", "bfloat16"),
        ("giblet", NARROW, "", "float32"),  # cpus: XLA has no such sum
    ],
)
def test_replicas_add_up_gradients_in_the_type_of_the_parameters(
    workload, changes, target, dtype, tmp_path, monkeypatch
):
    config = cases.load(workload, tmp_path, monkeypatch, *REPLICAS, *changes)
    counts = sums(config, target)
    assert counts[dtype] > 10_000
    # what a giblet of 16 bits keeps in float32: biases and norms
    assert sum(counts.values()) - counts[dtype] <= 0.05 * counts[dtype], counts
