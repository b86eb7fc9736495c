"""The parts of a kernel's final program, as `tools.chip.kernel_bundles` prints them."""

import pytest

from tools.chip import kernel_bundles

DUMP = """= control target key start
LH: loop header
= control target key end

     0   :  { %s1_s3 = smov [#allocation6]  ;;  %s2_s0 = inlined_call_operand.<no memory space> }
   0x1   :  { %5 = sbr.rel (%p3_p0) target = bundleno = 9 (0x9), region = 12 }
   0x2 LB: > { %v1_v2 = vld [vmem:[%s1_s3] sm:$0xff] }
   0x3   : > { %v2_v3 = vadd.f32 %v1_v2, %v1_v2 }
   0x4 LB: >> { %v4_v1 = vld [vmem:[%s1_s3] sm:$0xff]  ;;  %v5_v4 = vmul.f32 %v4_v1, %v4_v1 }
   0x5   : >> { %6 = sbr.rel (!%p4_p1) target = $region8 }
   0x6   : >> { vnop }
   0x7 PF: > { vnop }
   0x8   :  { vnop }
"""


def test_the_bundles_of_loops_and_branches_are_counted():
    assert kernel_bundles.parts(DUMP) == [
        (0, "begin", 1),
        (1, "branch %p3_p0 9", 1),
        (2, "LB>", 2),
        (4, "LB>>", 1),
        (5, "branch !%p4_p1 region8", 2),
        (7, "PF>", 2),
    ]


def test_a_block_of_another_kernel_than_splash_is_refused(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["kernel_bundles", str(tmp_path), "--block=256"])
    with pytest.raises(SystemExit):
        kernel_bundles.main()
    assert "--block is of splash, and the kernel is pair_blocks" in capsys.readouterr().err
