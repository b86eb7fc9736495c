"""The cases of tools/gpu_check.py are compiled for one H100 without the card, at the first size
that fits by the plan."""

import pytest

from jaxtrain import plan
from jaxtrain.plan import worker
from tools.chip import cases


@pytest.mark.slow
@pytest.mark.parametrize("case", cases.CASES, ids=lambda case: case.name)
def test_every_case_compiles_for_an_h100(case, tmp_path, gpu_compiler):
    target, data = plan.parse_target("gpu:h100x1"), cases.Data(tmp_path, small=False)
    for choice in case.choices:
        config = case.config(data, choice, {"mesh.data": "1", "mesh.fsdp": "1"})
        config, _ = plan.decide(config, target, target.name)
        [answer] = worker.ask([worker.Job(config, target.name, worker.LAST)])
        assert answer.compiled, answer.error
        if answer.compiled.peak <= target.memory:
            return
    pytest.fail("no size fits")
