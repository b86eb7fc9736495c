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
        (
            "replica_groups=mesh['data'=2,'fsdp'=2,'model'=2] {'data'}, x",
            [[0, 4], [1, 5], [2, 6], [3, 7]],
        ),
        (
            "replica_groups=mesh['data'=2,'fsdp'=2,'model'=2] {'data','fsdp'}, x",
            [[0, 2, 4, 6], [1, 3, 5, 7]],
        ),
        (
            "replica_groups=mesh['a'=2,'b'=4], device_ids=([4,2]T(1,0)) {'a'}, x",
            [[0, 1], [2, 3], [4, 5], [6, 7]],
        ),
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
  ROOT %all-reduce.1 = f32[4]{0} all-reduce(%a), replica_groups={{0,1},{2,3},{4,5},{6,7}}, \
to_apply=%add
}

%inner_limit (b: f32[4]) -> pred[] {
  %limit = s32[] constant(3)
  ROOT %less = pred[] compare(%i, %limit), direction=LT
}

%outer (c: f32[4]) -> f32[4] {
  ROOT %while.1 = f32[4]{0} while(%c), condition=%inner_limit, body=%inner
}

%all-reduce-scatter.7 (d: bf16[16,8]) -> bf16[4,8] {
  %all-reduce.9 = bf16[16,8]{1,0} all-reduce(%d), replica_groups={{0,2,4,6},{1,3,5,7}}, \
to_apply=%add
  ROOT %slice = bf16[4,8]{1,0} dynamic-slice(%all-reduce.9, %i), dynamic_slice_sizes={4,8}
}

ENTRY %main (x: f32[4]) -> f32[4] {
  %while.2 = f32[4]{0} while(%x), condition=%c, body=%outer, \
backend_config={"known_trip_count":{"n":"5"}}
  %gather = (bf16[2,8]{1,0}, bf16[8,8]{1,0}) all-gather-start(%y), \
replica_groups=[2,4]<=[4,2]T(1,0), dimensions={0}
  %fusion = bf16[4,8]{1,0} fusion(%z), kind=kCustom, calls=%all-reduce-scatter.7
}
"""


def test_collectives_are_counted_with_their_axes_and_bytes():
    found = {c.kind: c for c in hlo.collectives(PROGRAM)}
    assert set(found) == {"all-reduce", "all-gather", "reduce-scatter"}
    reduce, gather, scatter = found["all-reduce"], found["all-gather"], found["reduce-scatter"]
    assert (reduce.times, reduce.in_loop, reduce.bytes, reduce.axes(MIXED)) == (
        15,
        True,
        16,
        ("model",),
    )
    assert reduce.sent == 15 * 2 * 16 / 2  # a ring of two: each sends its half, then its sum
    assert (gather.times, gather.in_loop, gather.bytes, gather.axes(MIXED)) == (
        1,
        False,
        128,
        ("data", "fsdp"),
    )
    assert gather.sent == 3 / 4 * 128
    assert (scatter.bytes, scatter.sent, scatter.axes(MIXED)) == (64, 3 * 64, ("data", "fsdp"))
    table = hlo.summary(list(found.values()), MIXED)
    assert table["all-reduce", ("model",)] == (15, 240.0, 0)


GPU = """HloModule jit_step, num_partitions=8

%sum (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %add = f32[] add(%a, %b)
}

%scatter (p: f32[64]) -> f32[8] {
  %p = f32[64]{0} parameter(0)
  ROOT %rs = f32[8]{0} reduce-scatter(%p), replica_groups=[1,8]<=[8], dimensions={0}, to_apply=%sum
}

%body (t: (s32[], bf16[16,32])) -> (s32[], bf16[16,32]) {
  %t = (s32[], bf16[16,32]{1,0}) parameter(0)
  %x = bf16[16,32]{1,0} get-tuple-element(%t), index=1
  %w = bf16[32,32]{1,0} constant({...})
  %y = (bf16[16,32]{1,0}, s8[64]{0}) custom-call(%x, %w), \
custom_call_target="__cublas$lt$matmul", backend_config=DIMENSIONS
  %q = (bf16[2,64,4,32]{3,2,1,0}, u8[0]{0}) custom-call(%x), \
custom_call_target="__cudnn$fmhaSoftmaxBackward"
  %i = s32[] get-tuple-element(%t), index=0
  ROOT %out = (s32[], bf16[16,32]{1,0}) tuple(%i, %x)
}

%less (t: (s32[], bf16[16,32])) -> pred[] {
  %t = (s32[], bf16[16,32]{1,0}) parameter(0)
  ROOT %c = pred[] constant(true)
}

ENTRY %main (p0: f32[64], p1: (s32[], bf16[16,32])) -> f32[8] {
  %p0 = f32[64]{0} parameter(0)
  %p1 = (s32[], bf16[16,32]{1,0}) parameter(1)
  %loop = (s32[], bf16[16,32]{1,0}) while(%p1), condition=%less, body=%body, \
backend_config={"known_trip_count":{"n":"3"}}
  %started = ((f32[64]{0}), f32[8]{0}) async-start(%p0), calls=%scatter
  %all = f32[64]{0} all-reduce-start(%p0), replica_groups=[1,8]<=[8], to_apply=%sum, \
backend_config={"is_sync":true}
  %wide = f32[16,16]{1,0} constant({...})
  %dot = f32[16,16]{1,0} dot(%wide, %wide), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  ROOT %done = f32[8]{0} async-done(%started)
}
""".replace("DIMENSIONS", '{"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"]}}')


def test_calls_products_and_what_is_asynchronous_are_read_off_a_gpus_program():
    program = hlo.Program(GPU)
    assert program.library_calls() == {"__cublas$lt$matmul": 3, "__cudnn$fmhaSoftmaxBackward": 3}
    products = {one.operands: one.flops for one in program.products()}
    assert products == {("bf16", "bf16"): 3 * 2 * 16 * 32 * 32, ("f32", "f32"): 2 * 16 * 16 * 16}
    found = {c.kind: c.is_async for c in hlo.collectives(program)}
    assert found == {"reduce-scatter": True, "all-reduce": False}
    table = hlo.summary(hlo.collectives(program), {"data": 8})
    assert {key: exchanged.early for key, exchanged in table.items()} == {
        ("reduce-scatter", ("data",)): 1,
        ("all-reduce", ("data",)): 0,
    }


TPU = """HloModule jit_step, num_partitions=8

ENTRY %main (p0: bf16[4,4]) -> bf16[4,4] {
  %p0 = bf16[4,4]{1,0} parameter(0)
  %kernel = bf16[4,4]{1,0} custom-call(%p0), custom_call_target="tpu_custom_call", \
backend_config={"custom_call_config": {
"metadata":"{}"
}}, metadata={op_name="splash"}
  ROOT %other = bf16[4,4]{1,0} custom-call(%kernel), custom_call_target="other"
}
"""


def test_a_kernel_of_pallas_has_a_text_of_several_lines():
    assert hlo.Program(TPU).library_calls() == {"tpu_custom_call": 1, "other": 1}


RING = """HloModule jit_step, num_partitions=8

%cond (p: (f32[8], u32[])) -> pred[] {
  %bound = u32[]{:T(128)} constant(8)
  %p = (f32[8]{0}, u32[]{:T(128)}) parameter(0)
  %i = u32[]{:T(128)} get-tuple-element(%p), index=1
  ROOT %less = pred[] compare(%i, %bound), direction=LT
}

%body (p: (f32[8], u32[])) -> (f32[8], u32[]) {
  %p = (f32[8]{0}, u32[]{:T(128)}) parameter(0)
  %x = f32[8]{0} get-tuple-element(%p), index=0
  %i = u32[]{:T(128)} get-tuple-element(%p), index=1
  %two = u32[]{:T(128)} constant(2)
  %next = u32[]{:T(128)} add(%i, %two), metadata={op_name="step"}
  %one = f32[8]{0} collective-permute(%x), source_target_pairs={{0,1},{1,0}}
  %other = f32[8]{0} collective-permute(%one), source_target_pairs={{0,1},{1,0}}
  ROOT %out = (f32[8]{0}, u32[]{:T(128)}) tuple(%other, /*index=1*/%next)
}

ENTRY %main (x: (f32[8], u32[])) -> (f32[8], u32[]) {
  %x = (f32[8]{0}, u32[]) parameter(0)
  ROOT %loop = (f32[8]{0}, u32[]) while(%x), condition=%cond, body=%body
}
"""


def test_a_ring_that_counts_by_twos_has_half_the_rounds():
    """With as many rounds as the loop's bound, its whole content was counted twice: 1.5 times a
    v5e's products, and all data that its rings send."""
    assert [c.times for c in hlo.collectives(RING)] == [4, 4]
    assert [c.times for c in hlo.collectives(RING.replace("constant(2)", "constant(3)"))] == [3, 3]


def test_a_loop_of_unknown_length_is_counted_once_and_reported():
    program = hlo.Program(RING.replace("constant(8)", "parameter(1)"))
    assert program.unknown == {"loop"} and [c.times for c in hlo.collectives(program)] == [1, 1]
    assert not hlo.Program(RING).unknown


def test_an_all_reduce_counts_once_in_either_notation():
    """From jax 0.11 on its start has the operands, too."""
    for result in ("f32[8]{0}", "((f32[8]{0}), f32[8]{0})"):
        text = RING.replace(
            "  %one = ", f"  %sum = {result} all-reduce-start(%x), replica_groups={{}}\n  %one = "
        )
        [found] = [c for c in hlo.collectives(text) if c.kind == "all-reduce"]
        assert found.bytes == 32 and found.dtypes == ("f32",)


def test_a_gather_inside_of_a_products_kernel_overlaps_it():
    text = """HloModule step, num_partitions=8

%both (p0: bf16[8,8], p1: bf16[1,8]) -> (bf16[8,8], bf16[8,8]) {
  %p0 = bf16[8,8]{1,0} parameter(0)
  %p1 = bf16[1,8]{1,0} parameter(1)
  %y = bf16[8,8]{1,0} convolution(%p0, %p0), dim_labels=bf_io->bf
  %whole = bf16[8,8]{1,0} all-gather(%p1), replica_groups=[1,8]<=[8], dimensions={0}
  ROOT %out = (bf16[8,8]{1,0}, bf16[8,8]{1,0}) tuple(%y, %whole)
}

ENTRY %main (x: bf16[8,8], s: bf16[1,8]) -> (bf16[8,8], bf16[8,8]) {
  %x = bf16[8,8]{1,0} parameter(0)
  %s = bf16[1,8]{1,0} parameter(1)
  %alone = bf16[8,8]{1,0} all-gather(%s), replica_groups=[1,8]<=[8], dimensions={0}
  ROOT %fusion = (bf16[8,8]{1,0}, bf16[8,8]{1,0}) fusion(%alone, %s), kind=kOutput, calls=%both
}
"""
    [(key, found)] = hlo.summary(hlo.collectives(text), {"fsdp": 8}).items()
    assert key == ("all-gather", ("fsdp",)) and (found.times, found.early) == (2, 1)


def test_both_branches_of_a_condition_belong_to_the_program():
    both = (
        "branch_computations={%t, %f}",
        "true_computation=%t, false_computation=%f",
        "true_computation=%t, false_computation=%f, metadata={}",
    )
    for branches in both:
        call = hlo.instruction(f"%r = f32[8]{{0}} conditional(%x, %y, %y), {branches}")
        assert [name for _, name in call.called] == ["t", "f"], branches
