"""The bytes, products and cycles of kernels of a TPU's program.

The lines are those of ViT-S, 256 rows of 257 tokens, compiled for v5e by libtpu 0.0.42.
"""

import pytest

from jaxtrain.plan import hlo, layouts, summary, traffic
from jaxtrain.plan.compile import Compiled
from jaxtrain.plan.target import parse_target

# scores of all heads, from queries in VMEM and keys in HBM; a prefetch and its part; a product
TEXT = """HloModule jit_step

%rename (param_0.1: bf16[256,257,6,64]) -> bf16[256,257,6,64] {
  %param_0.1 = bf16[256,257,6,64]{1,3,2,0:T(8,128)(2,1)} parameter(0)
  ROOT %bitcast.9 = bf16[256,257,6,64]{1,3,2,0:T(8,128)(2,1)} bitcast(%param_0.1)
}

%layer (param_0.2: f32[12,384,384], param_1.2: s32[]) -> f32[384,384] {
  %param_0.2 = f32[12,384,384]{2,1,0:T(8,128)} parameter(0)
  %param_1.2 = s32[]{:T(128)S(6)} parameter(1)
  %zero = s32[]{:T(128)} constant(0)
  %slice.2 = f32[1,384,384]{2,1,0:T(8,128)} dynamic-slice(%param_0.2, %param_1.2, %zero, %zero), \
dynamic_slice_sizes={1,384,384}
  ROOT %bitcast.2 = f32[384,384]{1,0:T(8,128)} bitcast(%slice.2)
}

%scores (param_0.3: bf16[256,257,6,64], param_1.3: bf16[256,257,6,64]) -> f32[256,6,257,257] {
  %param_0.3 = bf16[256,257,6,64]{1,3,2,0:T(8,128)(2,1)S(1)} parameter(0)
  %fusion.543 = bf16[256,257,6,64]{1,3,2,0:T(8,128)(2,1)} fusion(%param_0.3), kind=kLoop, \
calls=%rename
  %param_1.3 = bf16[256,257,6,64]{1,3,2,0:T(8,128)(2,1)} parameter(1)
  %fusion.544 = bf16[256,257,6,64]{1,3,2,0:T(8,128)(2,1)} fusion(%param_1.3), kind=kLoop, \
calls=%rename
  ROOT %convolution.30 = f32[256,6,257,257]{2,3,1,0:T(8,128)} convolution(%fusion.543, \
%fusion.544), window={size=256x6 stride=255x5 lhs_dilate=256x6}, dim_labels=0b1f_0o1i->01bf
}

%product (param_0.4: f32[12,384,384], param_1.4: s32[], param_2.4: f32[256,384]) -> f32[256,384] {
  %param_0.4 = f32[12,384,384]{2,1,0:T(8,128)} parameter(0)
  %param_1.4 = s32[]{:T(128)S(6)} parameter(1)
  %fusion.575 = f32[384,384]{1,0:T(8,128)} fusion(%param_0.4, %param_1.4), kind=kLoop, calls=%layer
  %param_2.4 = f32[256,384]{1,0:T(8,128)S(1)} parameter(2)
  ROOT %convolution.52 = f32[256,384]{1,0:T(8,128)S(1)} convolution(%param_2.4, %fusion.575), \
dim_labels=bf_oi->bf
}

ENTRY %main (x: bf16[256,257,384], k: bf16[256,257,6,64], w: f32[12,384,384]) -> f32[256,384] {
  %x = bf16[256,257,384]{2,0,1:T(8,128)(2,1)} parameter(0)
  %k = bf16[256,257,6,64]{1,3,2,0:T(8,128)(2,1)} parameter(1)
  %w = f32[12,384,384]{2,1,0:T(8,128)} parameter(2)
  %n = s32[]{:T(128)S(6)} constant(3)
  %y = f32[256,384]{1,0:T(8,128)S(1)} constant({...})
  %q = bf16[256,257,6,64]{1,3,2,0:T(8,128)(2,1)S(1)} constant({...})
  %copy-start = (bf16[256,257,384]{2,0,1:T(8,128)(2,1)S(1)}, \
bf16[256,257,384]{2,0,1:T(8,128)(2,1)}, u32[]{:S(2)}) copy-start(%x)
  %copy-done = bf16[256,257,384]{2,0,1:T(8,128)(2,1)S(1)} copy-done(%copy-start)
  %slice-start = ((bf16[256,257,384]{2,0,1:T(8,128)(2,1)}), \
bf16[256,65,384]{2,0,1:T(8,128)(2,1)S(1)}, s32[]{:S(2)}) slice-start(%x), \
slice={[0:256], [0:65], [0:384]}
  %slice-done = bf16[256,65,384]{2,0,1:T(8,128)(2,1)S(1)} slice-done(%slice-start)
  %buffer = bf16[8,8]{1,0:T(8,128)(2,1)} custom-call(), custom_call_target="AllocateBuffer"
  %s = f32[256,6,257,257]{2,3,1,0:T(8,128)} fusion(%q, %k), kind=kOutput, calls=%scores, \
metadata={op_name="jit(step)/jvp()/while/body/attention/dot_general"}, \
backend_config={"estimated_cycles":"1200000","window_config":{}}
  ROOT %out = f32[256,384]{1,0:T(8,128)S(1)} fusion(%w, %n, %y), kind=kOutput, calls=%product, \
backend_config={"estimated_cycles":"3000"}
}
"""


@pytest.fixture(scope="module")
def kernels():
    return {kernel.name: kernel for kernel in traffic.traffic(hlo.Program(TEXT))}


@pytest.mark.parametrize(
    ("result", "n_bytes"),
    [
        ("bf16[256,257,384]{2,0,1:T(8,128)(2,1)}", 2 * 257 * 256 * 384),  # rows are innermost but 1
        ("bf16[256,257,384]{2,1,0:T(8,128)(2,1)}", 2 * 256 * 264 * 384),
        ("f32[256,6,257,257]{2,3,1,0:T(8,128)}", 4 * 256 * 6 * 264 * 384),
        ("f32[4,8,64]{2,1,0:T(8,128)}", 4 * 4 * 8 * 128),
        ("f32[300]{0:T(256)}", 4 * 512),
        ("s32[]{:T(128)}", 4 * 128),
        ("f32[3,5]{1,0}", 4 * 3 * 5),  # of a GPU
        ("pred[3,5]", 3 * 5),
    ],
)
def test_arrays_are_padded_to_their_tiles(result, n_bytes):
    [array] = layouts.arrays(result)
    assert (array.bits / 8, array.bits_in_memory / 8) == (n_bytes, n_bytes)


def test_arrays_in_vmem_take_no_memory():
    [array] = layouts.arrays("bf16[8,128]{1,0:T(8,128)(2,1)S(1)}")
    assert (array.bits, array.bits_in_memory) == (16 * 8 * 128, 0)


def test_scores_write_their_padding_and_queries_in_vmem_are_free(kernels):
    scores = kernels["s"]
    assert scores.read == 2 * 256 * 6 * 64 * 384  # keys, of which 257 places are innermost
    assert scores.written == 4 * 256 * 6 * 264 * 384
    # the window's 256 × 6 places are the batch's, of which each result has one
    assert scores.flops == 2 * 256 * 6 * 257 * 257 * 64
    assert scores.cycles == 1_200_000


def test_prefetches_read_what_they_keep_in_vmem(kernels):
    assert set(kernels) == {"copy-start", "slice-start", "s", "out"}  # no buffer, and no end
    token = 2 * 256 * 384
    assert (kernels["copy-start"].read, kernels["copy-start"].written) == (257 * token, 0)
    assert (kernels["slice-start"].read, kernels["slice-start"].written) == (65 * token, 0)


def test_a_product_reads_its_layer_of_a_stack_through_a_fusion_inside(kernels):
    product = kernels["out"]
    assert (product.read, product.written) == (4 * 384 * 384, 0)
    assert product.flops == 2 * 256 * 384 * 384


def test_places_in_the_padding_are_no_products():
    text = """HloModule jit_f

ENTRY %main (x: f32[8,10,4], w: f32[3,4,16]) -> f32[8,10,16] {
  %x = f32[8,10,4]{2,1,0} parameter(0)
  %w = f32[3,4,16]{2,1,0} parameter(1)
  ROOT %c = f32[8,10,16]{2,1,0} convolution(%x, %w), window={size=3 pad=1_1}, \
dim_labels=b0f_0io->b0f
}
"""
    [kernel] = traffic.traffic(hlo.Program(text))
    assert kernel.flops == 2 * 8 * 16 * 4 * (10 * 3 - 2)
    [product] = hlo.Program(text).products()
    assert product.operands == ("f32", "f32") and product.flops == kernel.flops


def test_the_plan_states_padded_bytes_and_the_compilers_own_estimate(kernels):
    step = Compiled(1, 1, 1, None, 1.0, kernels=list(kernels.values()))
    lines = list(summary.roofline_lines(step, parse_target("tpu:v5e:2x2")))
    assert "0.82 TB/s and 197 TFLOP/s (the datasheet's rates" in lines[0]
    assert "written with the padding of tiles" in lines[1]
    assert lines[2].startswith("  0.80 ms by the compiler's own estimate, cycles at 1.5 GHz")
    assert lines[3].endswith("ms  step/attention/dot_general")
