"""Ratchets for the step of a vision transformer, compiled for one H100: a change lowers the bounds.

The cases are those of tools/gpu_check.py with 3 of 12 layers and fewer rows, as each layer does the
same.
"""

import math
import re
from typing import NamedTuple

import pytest

from jaxtrain import config as config_lib
from jaxtrain import plan
from jaxtrain.plan import hlo, traffic, worker
from jaxtrain.plan.compile import Compiled
from tools.chip import cases

TARGET = "gpu:h100x1"
DEPTH, ROWS, TOKENS = 3, 256, 258
# [MB] a row with three layers, and kernels
BOUNDS = {"vit-s": (84, 360), "vit-b": (165, 360)}
MOVES = ("pad", "slice", "concatenate", "dynamic-slice", "dynamic-update-slice")


class Step(NamedTuple):
    config: config_lib.Config
    compiled: Compiled

    @property
    def layer_kernels(self) -> list[traffic.Kernel]:
        """The kernels of layers that read or write an array of all tokens."""
        size = 2 * ROWS * TOKENS * self.config.model.embed
        in_layers = [k for k in self.compiled.kernels if re.search("/(attention|mlp)", k.scope)]
        return [k for k in in_layers if max(k.read, k.written) >= size]


@pytest.fixture(scope="module")
def steps(tmp_path_factory, request):
    """Return the cases' steps by name. One process compiles those that are tested."""
    request.getfixturevalue("gpu_compiler")
    data = cases.Data(tmp_path_factory.mktemp("data"), small=False)
    changes = {"model.depth": str(DEPTH), "train.batch": str(ROWS)}
    chosen = [case for case in cases.CASES if case.name in BOUNDS]
    configs = [case.config(data, {}, changes) for case in chosen]
    answers = worker.ask([worker.Job(config, TARGET, worker.LAST) for config in configs])
    assert all(answer.compiled for answer in answers), [answer.error for answer in answers]
    return {
        case.name: Step(config, answer.compiled)
        for case, config, answer in zip(chosen, configs, answers, strict=True)
    }


@pytest.mark.slow
@pytest.mark.parametrize("name", BOUNDS)
def test_bytes_and_kernels_of_a_step(name, steps):
    """Before: 119 MB a row of ViT-S with 3 layers, 232 of ViT-B."""
    chip = plan.parse_target(TARGET).known_chip
    kernels = steps[name].compiled.kernels
    executed = traffic.roofline(kernels, traffic.Rates(chip.bandwidth, chip.flops))
    megabytes = (executed.read + executed.written) / ROWS / 1e6
    most_megabytes, most_kernels = BOUNDS[name]
    assert megabytes <= most_megabytes and executed.kernels <= most_kernels


@pytest.mark.slow
@pytest.mark.parametrize("name", BOUNDS)
def test_a_layer_calls_cudnn_once_and_once_in_the_backward_pass(name, steps):
    calls = steps[name].compiled.library_calls
    attention = {target: n for target, n in calls.items() if "fmha" in target}
    assert attention == {"__cudnn$fmhaSoftmax": DEPTH, "__cudnn$fmhaSoftmaxBackward": DEPTH}


@pytest.mark.slow
@pytest.mark.parametrize("name", BOUNDS)
def test_layers_neither_stack_nor_pad_nor_widen_their_tokens(name, steps):
    """Arrays of all tokens are neither copied into a stack of layers, nor padded, nor float32."""
    step = steps[name]
    program = hlo.Program(step.compiled.text)
    executed = {i.name: i for name in program.times for i in program.bodies.get(name, ())}
    size = ROWS * (TOKENS - 1) * step.config.model.embed
    kernels = [executed[kernel.name] for kernel in step.layer_kernels]
    assert len(kernels) > 25 * DEPTH
    moved = []
    for kernel in kernels:
        wide = [dims for dtype, dims in kernel.shapes if dtype == "f32"]
        assert all(math.prod(dims) < size for dims in wide), kernel.line
        inner = [i for _, name in kernel.called for i in program.bodies.get(name, ())]
        moved += [i.line for i in inner if i.op in MOVES and math.prod(i.shapes[0][1]) >= size]
    # The last layer's two gradients of biases read the result's gradient, which is not padded.
    assert len(moved) <= 2, moved
