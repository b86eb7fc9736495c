"""Ratchets for attention in steps compiled for v5e: a change lowers the bounds.

The encoder has 2 of 12 layers, and the language model small arrays with two blocks a row.
"""

import pytest

from jaxtrain import config as config_lib
from jaxtrain import plan
from jaxtrain.plan import hlo, traffic, worker
from jaxtrain.plan.compile import Compiled
from tests.compiled.compiled_configs import WORKLOADS, arrays_with_two_sides
from tools.chip import cases

TARGET = "tpu:v5e:2x2"
CHIPS, ROWS, TOKENS = 4, 256, 257  # rows of a chip


def compiled(config: config_lib.Config) -> Compiled:
    [answer] = worker.ask([worker.Job(config, TARGET, worker.LAST)])
    assert answer.compiled, answer.error
    return answer.compiled


@pytest.mark.slow
def test_short_rows_keep_their_scores_on_the_chip(tmp_path, tpu_compiler):
    """Before: 0.12 GB a row with two layers, and arrays of 257 × 257 for each head."""
    case = next(case for case in cases.CASES if case.name == "vit-s")
    changes = {"model.depth": "2", "train.batch": str(CHIPS * ROWS)}
    config = case.config(cases.Data(tmp_path, small=False), {}, changes)
    step = compiled(config)
    chip = plan.parse_target(TARGET).known_chip
    sums = traffic.roofline(step.kernels, traffic.Rates(chip.bandwidth, chip.flops))
    assert (sums.read + sums.written) / ROWS / 1e9 < 0.06
    assert step.library_calls["tpu_custom_call"] == 2 * config.model.depth
    assert not list(arrays_with_two_sides(step.text, TOKENS))


@pytest.mark.slow
def test_the_blocks_of_documents_are_found_once_for_all_layers(tmp_path, tpu_compiler):
    (tmp_path / "text.txt").write_text("one two three four five six seven eight nine ten\n" * 900)
    language = WORKLOADS["language"]
    longer = {"model.context": "1024", "data.context": "1024", "train.batch": "8"}
    language = language._replace(small={**language.small, **longer})
    config = language.config("small", "fsdp", CHIPS, tmp_path)
    step = compiled(config)
    program = hlo.Program(step.text)
    reductions = [  # over the tokens of blocks, and over blocks for the steps of a kernel's grid
        computation
        for computation, i in program.executed()
        if i.op == "reduce" and ("document_blocks" in i.line or i.result.startswith("s32"))
    ]
    assert reductions and not program.loops & set(reductions)
    # forward, again in the backward pass, and its own
    assert step.library_calls["tpu_custom_call"] == 3 * config.model.depth
    assert "packed_attention_backward" in step.text
