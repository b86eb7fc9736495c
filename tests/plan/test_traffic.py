"""The bytes, products and roofline of a compiled program's kernels."""

import jax
import jax.numpy as jnp
import pytest

from jaxtrain.plan import hlo, summary, traffic
from jaxtrain.plan.compile import Compiled
from jaxtrain.plan.target import parse_target
from jaxtrain.plan.traffic import Rates, roofline

# A loop of 3 rounds that stacks a row a round, with a product in a fusion that reads one slice of
# the stacked weights, and an asynchronous copy.
TEXT = """HloModule jit_step

%fused_row (p0: f32[8,16], p1: s32[], p2: f32[3,16,16], p3: f32[3,8,16]) -> f32[3,8,16] {
  %p0 = f32[8,16]{1,0} parameter(0)
  %p1 = s32[] parameter(1)
  %p2 = f32[3,16,16]{2,1,0} parameter(2)
  %p3 = f32[3,8,16]{2,1,0} parameter(3)
  %zero = s32[] constant(0)
  %slice = f32[1,16,16]{2,1,0} dynamic-slice(%p2, %p1, %zero, %zero), dynamic_slice_sizes={1,16,16}
  %w = f32[16,16]{1,0} bitcast(%slice)
  %dot = f32[8,16]{1,0} dot(%p0, %w), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  %row = f32[1,8,16]{2,1,0} bitcast(%dot)
  ROOT %stacked = f32[3,8,16]{2,1,0} dynamic-update-slice(%p3, %row, %p1, %zero, %zero)
}

%compare (c0: s32[]) -> pred[] {
  %c0 = s32[] parameter(0)
  %limit = s32[] constant(3)
  ROOT %less = pred[] compare(%c0, %limit), direction=LT
}

%condition (t: (s32[], f32[3,8,16])) -> pred[] {
  %t = (s32[], f32[3,8,16]{2,1,0}) parameter(0)
  %n = s32[] get-tuple-element(%t), index=0
  ROOT %is_less = pred[] fusion(%n), kind=kLoop, calls=%compare
}

%body (t: (s32[], f32[3,8,16])) -> (s32[], f32[3,8,16]) {
  %t = (s32[], f32[3,8,16]{2,1,0}) parameter(0)
  %n = s32[] get-tuple-element(%t), index=0
  %rows = f32[3,8,16]{2,1,0} get-tuple-element(%t), index=1
  %x = f32[8,16]{1,0} constant({...})
  %weights = f32[3,16,16]{2,1,0} constant({...})
  %new = f32[3,8,16]{2,1,0} fusion(%x, %n, %weights, %rows), kind=kLoop, calls=%fused_row, \
metadata={op_name="jit(train_step)/transpose(jvp(decode))/while/body/closed_call/mlp/dot_general"}
  %one = s32[] constant(1)
  %next = s32[] add(%n, %one)
  ROOT %out = (s32[], f32[3,8,16]{2,1,0}) tuple(%next, %new)
}

%sum (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %add = f32[] add(%a, %b)
}

ENTRY %main (p0: (s32[], f32[3,8,16])) -> f32[3,8] {
  %p0 = (s32[], f32[3,8,16]{2,1,0}) parameter(0)
  %loop = (s32[], f32[3,8,16]{2,1,0}) while(%p0), condition=%condition, body=%body
  %rows = f32[3,8,16]{2,1,0} get-tuple-element(%loop), index=1
  %started = (f32[3,8,16]{2,1,0}, f32[3,8,16]{2,1,0}, u32[]) copy-start(%rows)
  %copied = f32[3,8,16]{2,1,0} copy-done(%started)
  %zero = f32[] constant(0)
  ROOT %reduced = f32[3,8]{1,0} reduce(%copied, %zero), dimensions={2}, to_apply=%sum
}
"""


def kernels_of(text):
    return {kernel.name: kernel for kernel in traffic.traffic(hlo.Program(text))}


def test_slices_updates_loops_and_starts_count_what_they_touch():
    kernels = kernels_of(TEXT)
    assert set(kernels) == {"new", "next", "started", "reduced"}
    new = kernels["new"]
    assert new.times == 3  # by the constant in the fusion of the loop's condition
    x, weights_of_layer, row, number = 8 * 16 * 4, 16 * 16 * 4, 8 * 16 * 4, 4
    assert (new.read, new.written) == (x + weights_of_layer + number, row)
    assert new.flops == 2 * 8 * 16 * 16
    copied = 3 * 8 * 16 * 4
    assert (kernels["started"].read, kernels["started"].written) == (copied, copied)
    assert (kernels["reduced"].read, kernels["reduced"].written) == (copied + 4, 3 * 8 * 4)


def test_the_roofline_takes_the_longer_of_bytes_and_products():
    new = kernels_of(TEXT)["new"]
    n_bytes = new.read + new.written
    by_products = roofline([new], Rates(bandwidth=1e12, flops=1.0))
    assert by_products.seconds == pytest.approx(3 * new.flops)
    assert by_products.seconds_of_bytes == 0
    by_bytes = roofline([new], Rates(bandwidth=1.0, flops=1e12))
    assert by_bytes.seconds == by_bytes.seconds_of_bytes == pytest.approx(3 * n_bytes)
    assert by_bytes.kernels == 3 and by_bytes.flops == 3 * new.flops
    assert by_bytes.scopes == {"decode/mlp/dot_general": pytest.approx(3 * n_bytes)}


def test_a_started_all_reduce_counts_its_results_once():
    """From jax 0.11 on its result holds the operands, too."""
    text = """HloModule jit_step, replica_count=8

%sum (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %add = f32[] add(%a, %b)
}

ENTRY %main (p0: f32[8]) -> f32[8] {
  %p0 = f32[8]{0} parameter(0)
  %all = TYPE all-reduce-start(%p0), replica_groups=[1,8]<=[8], to_apply=%sum
  ROOT %done = f32[8]{0} all-reduce-done(%all)
}
"""
    for type_of_start in ("((f32[8]{0}), f32[8]{0})", "f32[8]{0}"):
        [collective] = hlo.collectives(text.replace("TYPE", type_of_start))
        assert collective.bytes == 32


@pytest.mark.parametrize(
    ("instruction", "read", "written"),
    [
        ("(f32[8]{0}, f32[64]{0}) all-gather-start(%p), dimensions={0}", 32, 256),
        ("(f32[8]{0}, f32[1]{0}) reduce-scatter-start(%p), dimensions={0}", 32, 4),
        ("((f32[8]{0}), f32[8]{0}) all-reduce-start(%p), to_apply=%sum", 32, 32),
        ("f32[8]{0} all-reduce-start(%p), to_apply=%sum", 32, 32),
        ("(f32[8]{0}, f32[8]{0}, u32[], u32[]) collective-permute-start(%p)", 32, 32),
        # a product and the room that cuBLAS has for itself
        ('(f32[8]{0}, s8[4096]{0}) custom-call(%p), custom_call_target="__cublas$gemm"', 32, 32),
        ('(f32[8]{0}, s8[4096]{0}) custom-call(%p), custom_call_target="other"', 32, 4128),
    ],
)
def test_bytes_of_exchanges_and_products_are_those_of_their_values(instruction, read, written):
    text = f"""HloModule step

ENTRY %main (p: f32[8]) -> f32[8] {{
  %p = f32[8]{{0}} parameter(0)
  %x = {instruction}, replica_groups=[1,8]<=[8]
}}
"""
    [kernel] = traffic.traffic(hlo.Program(text))
    assert (kernel.read, kernel.written) == (read, written)


def test_a_program_of_this_machine_has_the_products_of_its_formula():
    def step(weights, x):
        return jax.lax.scan(lambda y, w: (jnp.tanh(y @ w), None), x, weights)[0]

    shapes = (
        jax.ShapeDtypeStruct((5, 256, 256), "float32"),
        jax.ShapeDtypeStruct((64, 256), "float32"),
    )
    text = jax.jit(step).lower(*shapes).compile().as_text()
    sums = roofline(traffic.traffic(hlo.Program(text)), Rates(1e12, 1e12))
    assert sums.flops == 5 * 2 * 64 * 256 * 256
    weights = 5 * 256 * 256 * 4
    # XLA may copy the weights of a layer before the product
    assert weights < sums.read < 5 * weights


def test_the_plan_states_the_roofline_and_whose_rates_it_has():
    step = Compiled(1, 1, 1, None, 1.0, kernels=traffic.traffic(hlo.Program(TEXT)))
    measured = list(summary.roofline_lines(step, parse_target("gpu:h100x1")))
    assert "3.02 TB/s and 732 TFLOP/s (the rates measured on such a card)" in measured[0]
    assert "8 kernels" in measured[1] and "100% is bound by bytes" in measured[1]
    assert any(line.endswith("ms  decode/mlp/dot_general") for line in measured)
    [first, *_] = summary.roofline_lines(step, parse_target("gpu:a100x1"))
    assert "datasheet" in first


def kernel(scope, *, n_bytes, flops=0.0):
    return traffic.Kernel("k", "fusion", f"jit(step)/{scope}/add", 1, n_bytes, 0, flops)


@pytest.mark.parametrize(
    ("products", "others", "matrices", "expected"),
    [
        # the update takes 100 s, products 10 s by bytes and 1 s by FLOP: 21 of 110 s are 21 of 1 s
        ({"n_bytes": 10, "flops": 1.0}, 0, 10, 64 * 21),
        # 4 s of activations grow with the rows: 11.4 s more are 3.85 times as many
        ({"n_bytes": 10, "flops": 1.0}, 4, 10, int(64 * (1.1 * 114 - 110) / 4)),
        # products of activations, with a small matrix
        ({"n_bytes": 10, "flops": 1.0}, 0, 1, int(64 * (21 - 3) / 7)),
    ],
)
def test_rows_that_cost_little_more_are_counted(products, others, matrices, expected):
    kernels = [
        kernel("update", n_bytes=100),
        kernel("loss_and_grad", **products),
        kernel("loss_and_grad/mlp", n_bytes=others),
    ]
    found = traffic.rows_for_little_more(kernels, Rates(1, 1), rows=64, matrices=matrices)
    assert found == pytest.approx(expected, abs=1)


def test_a_step_without_an_update_of_note_has_no_room_for_rows():
    kernels = [kernel("update", n_bytes=1), kernel("loss_and_grad", n_bytes=100, flops=90.0)]
    assert 64 <= traffic.rows_for_little_more(kernels, Rates(1, 1), rows=64, matrices=1) < 80
