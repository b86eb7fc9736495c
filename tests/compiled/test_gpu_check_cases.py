"""The cases of tools/gpu_check.py are compiled for one H100 without the card, at the first size
that fits by the plan, and their steps are within bounds: a change lowers these."""

import pytest

from jaxtrain import plan
from jaxtrain.plan import traffic, worker
from tools.chip import cases

# Of a step: [GB] read and written, [ms] by the roofline, and kernels. What they were before is in
# docs/results/compiled-steps.md.
BOUNDS = {
    "vit-s": (610, 215, 750),
    "vit-b": (610, 295, 750),
    "lm-1b-2k": (600, 460, 1500),
    "lm-1b-8k": (600, 460, 1500),
    "trm": (345, 130, 1100),
    "higgs-lora": (700, 480, 6000),
    "giblet": (160, 55, 850),
}
REACHED = traffic.Rates(3.0e12, 732e12)  # by one card: docs/results/h100.md
WITHOUT_NORMS = ("giblet",)  # most of whose steps have none


@pytest.mark.slow
@pytest.mark.parametrize("case", cases.CASES, ids=lambda case: case.name)
def test_every_case_compiles_for_an_h100_within_its_bounds(case, tmp_path, gpu_compiler):
    target, data = plan.parse_target("gpu:h100x1"), cases.Data(tmp_path, small=False)
    for choice in case.choices:
        config = case.config(data, choice, {"mesh.data": "1", "mesh.fsdp": "1"})
        config, _ = plan.decide(config, target, target.name)
        has_norms = case.name not in WITHOUT_NORMS
        [answer] = worker.ask([worker.Job(config, target.name, worker.LAST, has_norms)])
        assert answer.compiled, answer.error
        if answer.compiled.peak <= target.memory:
            break
    else:
        pytest.fail("no size fits")
    if case.name in BOUNDS:
        step = traffic.roofline(answer.compiled.kernels, REACHED)
        found = (step.read + step.written) / 1e9, 1e3 * step.seconds, step.kernels
        assert all(x <= most for x, most in zip(found, BOUNDS[case.name], strict=True)), found
