"""The bound of a scheduled program's time, against sums by hand."""

import pytest

from jaxtrain.parallel.chips import Chip
from jaxtrain.plan import hlo, roofline

CHIP = Chip("toy", "NVIDIA toy", 1e12, 1e9, 1e9, 1e8)  # 1 TFLOP/s, 1 GB/s of memory, 0.1 GB/s of links
TPU = CHIP._replace(kind="TPU toy")
MS = 1e-3

PROGRAM = """HloModule step, is_scheduled=true, num_partitions=8

%fused (p0: bf16[4,1000,1000], p1: s32[]) -> bf16[1000,1000] {
  %p0 = bf16[4,1000,1000]{2,1,0} parameter(0)
  %p1 = s32[] parameter(1)
  %slice = bf16[1,1000,1000]{2,1,0} dynamic-slice(%p0, %p1, %p1, %p1), dynamic_slice_sizes={1,1000,1000}
  ROOT %one = bf16[1000,1000]{1,0} bitcast(%slice)
}

%updated (p0: f32[4,1000], p1: f32[1000], p2: s32[]) -> f32[4,1000] {
  %p0 = f32[4,1000]{1,0} parameter(0)
  %p1 = f32[1000]{0} parameter(1)
  %p2 = s32[] parameter(2)
  %row = f32[1,1000]{1,0} bitcast(%p1)
  ROOT %update = f32[4,1000]{1,0} dynamic-update-slice(%p0, %row, %p2, %p2)
}

%body (t: (s32[], bf16[4,1000,1000])) -> (s32[], bf16[4,1000,1000]) {
  %t = (s32[], /*index=1*/bf16[4,1000,1000]{2,1,0}) parameter(0)
  %i = s32[] get-tuple-element(%t), index=0
  %w = bf16[4,1000,1000]{2,1,0} get-tuple-element(%t), index=1
  %x = bf16[1000,1000]{1,0} fusion(%w, %i), kind=kLoop, calls=%fused
  %gather = (bf16[125,1000]{1,0}, bf16[1000,1000]{1,0}) all-gather-start(%s), replica_groups=[1,8]<=[8], dimensions={0}
  %y = (bf16[1000,1000]{1,0}, s8[0]{0}) custom-call(%x, %x), custom_call_target="__cublas$lt$matmul", backend_config=DIMENSIONS
  %gathered = bf16[1000,1000]{1,0} all-gather-done(%gather)
  ROOT %out = (s32[], bf16[4,1000,1000]{2,1,0}) tuple(%i, %w)
}

%less (t: (s32[], bf16[4,1000,1000])) -> pred[] {
  %t = (s32[], bf16[4,1000,1000]{2,1,0}) parameter(0)
  ROOT %c = pred[] constant(true)
}

ENTRY %main (p0: f32[1000], p1: bf16[4,1000,1000]) -> f32[1000] {
  %p0 = f32[1000]{0} parameter(0)
  %p1 = bf16[4,1000,1000]{2,1,0} parameter(1)
  %p2 = f32[4,1000]{1,0} parameter(2)
  %zero = s32[] constant(0)
  %start = (s32[], bf16[4,1000,1000]{2,1,0}) tuple(%zero, %p1)
  %loop = (s32[], bf16[4,1000,1000]{2,1,0}) while(%start), condition=%less, body=%body, TRIPS
  %kept = f32[4,1000]{1,0} fusion(%p2, %p0, %zero), kind=kLoop, calls=%updated
  ROOT %sum = f32[1000]{0} all-reduce(%p0), replica_groups=[1,8]<=[8], to_apply=%add
}
""".replace("TRIPS", 'backend_config={"known_trip_count":{"n":"3"}}').replace(
    "DIMENSIONS", '{"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"]}}'
)


def test_loops_slices_and_what_an_exchange_waits_for():
    found = roofline.times(hlo.Program(PROGRAM), CHIP)
    slice_ms, product_ms = 4.0, 6.0  # 2 × 2 MB at 1 GB/s; three matrices, which take longer than 2e9 FLOP at 1 TFLOP/s
    gather_ms = 7 / 8 * 2e6 / 1e8 / MS
    sum_ms = 2 * 7 / 8 * 4000 / 1e8 / MS
    assert found.computing == pytest.approx((3 * (slice_ms + product_ms) + 8000 / 1e9 / MS) * MS)
    assert found.sending == pytest.approx((3 * gather_ms + sum_ms) * MS)
    assert found.waiting == pytest.approx((3 * (gather_ms - product_ms) + sum_ms) * MS), "the product is computed beside it"
    assert found.together == found.computing + found.waiting


PREFETCHED = """HloModule step, is_scheduled=true, num_partitions=1

ENTRY %main (p0: f32[1000,1000], p1: f32[1000]) -> f32[1000] {
  %p0 = f32[1000,1000]{1,0:T(8,128)} parameter(0)
  %p1 = f32[1000]{0:T(1024)} parameter(1)
  %begun = (f32[1000,1000]{1,0:T(8,128)S(1)}, f32[1000,1000]{1,0:T(8,128)}, u32[]{:S(2)}) copy-start(%p0)
  %between = f32[1000]{0:T(1024)} negate(%p1)
  %near = f32[1000,1000]{1,0:T(8,128)S(1)} copy-done(%begun)
  ROOT %far = f32[1000]{0:T(1024)} custom-call(%near), custom_call_target="x"
}
"""


def test_what_lies_near_a_tpus_cores_takes_none_of_the_memorys_time_but_its_copy_does():
    found = roofline.times(hlo.Program(PREFETCHED), TPU)
    # 4 MB are copied, while 8 kB are read and written; then 4 kB are written.
    assert found.computing == pytest.approx(4e6 / 1e9 + 4e3 / 1e9)
    assert found.sending == found.waiting == 0


def test_attentions_kernels_count_though_they_are_no_products():
    text = """HloModule step, is_scheduled=true

ENTRY %main (q: bf16[2,512,4,64], k: bf16[2,512,2,64]) -> bf16[2,512,4,64] {
  %q = bf16[2,512,4,64]{3,2,1,0} parameter(0)
  %k = bf16[2,512,2,64]{3,2,1,0} parameter(1)
  ROOT %y = (bf16[2,512,4,64]{3,2,1,0}, u8[0]{0}) custom-call(%q, %k, %k), custom_call_target="__cudnn$fmhaSoftmaxBackward"
}
"""
    slow = CHIP._replace(flops=1e9)
    assert roofline.times(hlo.Program(text), slow).computing == pytest.approx(2 * 5 * 2 * 512 * 4 * 64 * 512 / 1e9)


def test_a_product_that_gathers_inside_of_it_takes_as_long_as_the_longer_of_the_two():
    text = """HloModule step, is_scheduled=true, num_partitions=8

%both (p0: bf16[1000,1000], p1: bf16[125,1000]) -> (bf16[1000,1000], bf16[1000,1000]) {
  %p0 = bf16[1000,1000]{1,0} parameter(0)
  %y = bf16[1000,1000]{1,0} dot(%p0, %p0), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  %p1 = bf16[125,1000]{1,0} parameter(1)
  %whole = bf16[1000,1000]{1,0} all-gather(%p1), replica_groups=[1,8]<=[8], dimensions={0}
  ROOT %out = (bf16[1000,1000]{1,0}, bf16[1000,1000]{1,0}) tuple(%y, %whole)
}

ENTRY %main (x: bf16[1000,1000], s: bf16[125,1000]) -> (bf16[1000,1000], bf16[1000,1000]) {
  %x = bf16[1000,1000]{1,0} parameter(0)
  %s = bf16[125,1000]{1,0} parameter(1)
  ROOT %fusion = (bf16[1000,1000]{1,0}, bf16[1000,1000]{1,0}) fusion(%x, %s), kind=kOutput, calls=%both
}
"""
    gather, product = 7 / 8 * 2e6 / 1e8, (2 + 0.25 + 4) * 1e6 / 1e9
    found = roofline.times(hlo.Program(text), TPU)
    assert found.computing == pytest.approx(product) and found.waiting == pytest.approx(gather - product)
    quick = roofline.times(hlo.Program(text), TPU._replace(links=1e12))
    assert quick.waiting == 0 and quick.together == pytest.approx(product)
