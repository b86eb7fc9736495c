"""Ratchets for the step of a language model, compiled for one H100: a change lowers the bounds.

The case is one of tools/gpu_check.py. Only its number of layers is smaller in some tests, if the
effect is that of each layer.
"""

import pytest

from jaxtrain import plan
from jaxtrain.nn import transformer
from jaxtrain.plan import traffic, worker
from tools.chip import cases

TARGET = "gpu:h100x1"


def compiled(tmp_path, name="lm-1b-2k", **model):
    """The case's config and its step, compiled. ``model``: fields of the config with new values."""
    case = next(case for case in cases.CASES if case.name == name)
    changes = {f"model.{field}": str(value) for field, value in model.items()}
    config = case.config(cases.Data(tmp_path, small=False), case.choices[0], changes)
    [answer] = worker.ask([worker.Job(config, TARGET, worker.LAST)])
    assert answer.compiled, answer.error
    return config, answer.compiled


def executed(step):
    chip = plan.parse_target(TARGET).known_chip
    return traffic.roofline(step.kernels, traffic.Rates(chip.bandwidth, chip.flops))


def counted(config):
    """The products of a step by the model's formula, without those of attention."""
    specs = transformer.decoder_specs(config.model, config.model.vocab)
    tokens = config.train.batch * config.data.context
    return 3 * tokens * transformer.token_flops(config.model, specs)


@pytest.mark.slow
@pytest.mark.parametrize("model", [{"unroll": 1}, {"unroll": 4}], ids=["loop", "written out"])
def test_no_product_is_computed_twice(model, tmp_path, gpu_compiler):
    """The loop had gate, up and the attention's output twice with jax 0.11.2: 1.16 at 16 layers."""
    config, step = compiled(tmp_path, depth=4, **model)
    assert executed(step).flops <= 1.02 * counted(config)
