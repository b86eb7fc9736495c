"""The products of cuDNN's attention, counted from its calls, against masks written out."""

import numpy as np
import pytest

from jaxtrain.plan import hlo, kinds, traffic

ROWS, HEADS, T, WIDTH = 2, 3, 48, 16
Q = f"bf16[{ROWS},{T},{HEADS},{WIDTH}]"


def program(name, mask, window, documents, space=" "):
    dims = ", ".join(f'"{n}"' for n in (ROWS, HEADS, T, T))
    return hlo.Program(f"""HloModule jit_step

ENTRY %main (q: {Q}) -> {Q} {{
  %q = {Q}{{3,2,1,0}} parameter(0)
  %y = (bf16[{ROWS},{HEADS},{T},{WIDTH}]{{3,1,2,0}}, u8[0]{{0}}) custom-call(%q, %q, %q), \
custom_call_target="__cudnn$fmha{name}", backend_config={{"cudnn_fmha_backend_config": \
{{"intermediate_tensor_shape": {{"element_type": "BF16", "dimensions":{space}[{dims}]}}, \
"mask_type":{space}"{mask}", "sliding_window_length":{space}{window}, \
"max_seg_per_batch":{space}{documents}}}}}
  ROOT %out = {Q}{{3,1,2,0}} get-tuple-element(%y), index=0
}}
""")


def pairs_left(documents, is_causal, window):
    """Of a row with documents of equal length."""
    i, j = np.mgrid[:T, :T]
    mask = i * documents // T == j * documents // T
    if is_causal:
        mask &= (j <= i) & (i - j < (window or T))
    return mask.sum()


@pytest.mark.parametrize("documents", [1, 4])
@pytest.mark.parametrize(
    ("mask", "window"), [("", 0), ("CAUSAL", 0), ("CAUSAL", 5), ("CAUSAL", 20)]
)
@pytest.mark.parametrize(("name", "products"), [("Softmax", 2), ("SoftmaxDropoutBackward", 5)])
def test_a_call_has_the_products_of_the_pairs_that_its_mask_leaves(
    name, products, mask, window, documents
):
    masks = ["PADDING"] * (documents > 1) + [mask] * bool(mask)
    texts = [program(name, "_".join(masks) or "NO_MASK", window, documents, s) for s in (" ", "")]
    [kernel], [same] = (traffic.traffic(text) for text in texts)
    assert same == kernel
    pairs = pairs_left(documents, mask == "CAUSAL", window)
    assert kernel.flops == products * 2 * ROWS * HEADS * pairs * WIDTH


def test_a_call_is_of_its_own_kind_and_reads_no_matrices():
    """Its bytes grow with the rows: none of them are a matrix's, which a step reads once."""
    text = program("Softmax", "CAUSAL", 0, 1)
    [kernel] = traffic.traffic(text)
    instructions = {i.name: i for _, i in text.executed()}
    assert kinds.kind(kernel, instructions[kernel.name], text) == "attention"
    slow = traffic.Rates(bandwidth=1, flops=1e9)
    assert traffic.rows_for_little_more([kernel], slow, rows=100, matrices=1e9) == 110


def test_more_documents_than_places_have_a_pair_for_each_place():
    [kernel] = traffic.traffic(program("Softmax", "PADDING_CAUSAL", 0, 2 * T))
    assert kernel.flops == 2 * 2 * ROWS * HEADS * T * WIDTH
