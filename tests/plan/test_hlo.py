"""The reader of compiled programs."""

import pytest

from jaxtrain.plan import hlo

MIXED = {"data": 2, "fsdp": 2, "model": 2}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("all-reduce(y), replica_groups={{0,4},{1,5}}, foo", [[0, 4], [1, 5]]),
        ("collective-permute(x), source_target_pairs={{0,1},{1,0}}, y", [[0, 1], [1, 0]]),
        ("replica_groups=[4,2]<=[2,4]T(1,0), x", [[0, 4], [1, 5], [2, 6], [3, 7]]),
        ("replica_groups=[2,4]<=[8], x", [[0, 1, 2, 3], [4, 5, 6, 7]]),
        ("replica_groups=mesh['data'=2,'fsdp'=2,'model'=2] {'data'}, x", [[0, 4], [1, 5], [2, 6], [3, 7]]),
        ("replica_groups=mesh['data'=2,'fsdp'=2,'model'=2] {'data','fsdp'}, x", [[0, 2, 4, 6], [1, 3, 5, 7]]),
        ("replica_groups=mesh['a'=2,'b'=4], device_ids=([4,2]T(1,0)) {'a'}, x", [[0, 1], [2, 3], [4, 5], [6, 7]]),
        ("replica_groups={}, x", [[0, 1, 2, 3, 4, 5, 6, 7]]),
    ],
)
def test_groups_in_every_notation(text, expected):
    assert hlo.groups(text, 8) == expected


def test_an_unknown_notation_is_an_error_not_a_guess():
    with pytest.raises(ValueError, match="an unknown notation of groups: all-reduce"):
        hlo.groups("all-reduce(x), replica_groups=everyone", 8)


PROGRAM = """HloModule step, num_partitions=8

%inner (a: f32[4]) -> f32[4] {
  %a = f32[4]{0} parameter(0)
  ROOT %all-reduce.1 = f32[4]{0} all-reduce(%a), replica_groups={{0,1},{2,3},{4,5},{6,7}}, to_apply=%add
}

%inner_limit (b: f32[4]) -> pred[] {
  %limit = s32[] constant(3)
  ROOT %less = pred[] compare(%i, %limit), direction=LT
}

%outer (c: f32[4]) -> f32[4] {
  ROOT %while.1 = f32[4]{0} while(%c), condition=%inner_limit, body=%inner
}

%all-reduce-scatter.7 (d: bf16[16,8]) -> bf16[4,8] {
  %all-reduce.9 = bf16[16,8]{1,0} all-reduce(%d), replica_groups={{0,2,4,6},{1,3,5,7}}, to_apply=%add
  ROOT %slice = bf16[4,8]{1,0} dynamic-slice(%all-reduce.9, %i), dynamic_slice_sizes={4,8}
}

ENTRY %main (x: f32[4]) -> f32[4] {
  %while.2 = f32[4]{0} while(%x), condition=%c, body=%outer, backend_config={"known_trip_count":{"n":"5"}}
  %gather = (bf16[2,8]{1,0}, bf16[8,8]{1,0}) all-gather-start(%y), replica_groups=[2,4]<=[4,2]T(1,0), dimensions={0}
  %fusion = bf16[4,8]{1,0} fusion(%z), kind=kCustom, calls=%all-reduce-scatter.7
}
"""


def test_what_is_executed_how_often_over_which_axes_and_how_much():
    found = {c.kind: c for c in hlo.collectives(PROGRAM)}
    assert set(found) == {"all-reduce", "all-gather", "reduce-scatter"}
    reduce, gather, scatter = found["all-reduce"], found["all-gather"], found["reduce-scatter"]
    assert (reduce.times, reduce.in_loop, reduce.bytes, reduce.axes(MIXED)) == (15, True, 16, ("model",))
    assert reduce.sent == 15 * 2 * 16 / 2  # a ring of two: each sends its half, then what it has summed
    assert (gather.times, gather.in_loop, gather.bytes, gather.axes(MIXED)) == (1, False, 128, ("data", "fsdp"))
    assert gather.sent == 3 / 4 * 128
    assert (scatter.bytes, scatter.sent, scatter.axes(MIXED)) == (64, 3 * 64, ("data", "fsdp"))
    table = hlo.summary(list(found.values()), MIXED)
    assert table["all-reduce", ("model",)] == (15, 240.0)
