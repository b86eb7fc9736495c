"""The table of the measured cases for TPUs that need not be here."""

import pytest

from jaxtrain.plan import parse_target
from jaxtrain.plan.compile import Compiled
from jaxtrain.plan.traffic import Kernel
from tools.chip import tpu_steps

TEXT = """HloModule jit_step, num_partitions=4

ENTRY %main (x: f32[8,128]) -> f32[8,128] {
  %x = f32[8,128]{1,0:T(8,128)} parameter(0)
  ROOT %sum = f32[8,128]{1,0:T(8,128)} all-reduce(%x), replica_groups={{0,1,2,3}}, to_apply=%add
}
"""


def test_a_row_has_the_sums_of_one_chip():
    product = Kernel("product", "fusion", "step/mix/dot", 2, 300_000_000, 109_500_000, 98.5e9, 1500)
    copy = Kernel("copy", "copy", "step/guard/copy", 1, 0, 819_000_000, 0)
    compiled = Compiled(
        1, 1, 2_000_000_000, None, 1.0, {"tpu_custom_call": 3}, kernels=[product, copy], text=TEXT
    )
    step = tpu_steps.Step("trm", 16, 98.5e9, 819e6, compiled)
    target = parse_target("tpu:v5e:2x2")
    cells = [cell.strip() for cell in tpu_steps.row(step, target, 7).strip("|").split("|")]
    # 0.5 ms of FLOP at the peak; two products of 0.5 ms, bound by both, and a copy of 1 ms
    expected = "trm 16 0.5 2.000 1.6 0.102 2 0 0.00 2.0 3 2.00 7"
    assert [cell.split(" ")[0] for cell in cells] == expected.split()
    assert cells[6] == "2 (25%)" and len(cells) == tpu_steps.HEAD.splitlines()[0].count("|") - 1
    assert tpu_steps.exchanged(TEXT) == 4 * 8 * 128
    line = tpu_steps.of_scope(compiled, target, "/mix/")
    assert "0.82 GB, 0.197 TFLOP, roofline 1.0 ms, cycles 0.0 ms" in line


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--cases=vit-x"], "--cases=vit-x is unknown; expected of: vit-s, vit-b"),
        (["model.remat"], "model.remat: expected SECTION.FIELD=VALUE"),
    ],
)
def test_a_wrong_case_or_setting_is_named(arguments, message, tmp_path, capsys):
    with pytest.raises(SystemExit, match="2"):
        tpu_steps.parse([str(tmp_path), *arguments])
    assert message in capsys.readouterr().err
