"""The blocks that attention on TPUs computes for rows of documents."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxtrain.nn import attention, splash
from jaxtrain.nn.splash import LANES
from tests.nn import document_rows
from tests.nn.document_rows import ROWS, assert_equals_the_formula


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(splash, "BLOCK", LANES)


@pytest.mark.parametrize("case", [(True, 0), (False, 0), (True, 60), (False, 129)], ids=str)
def test_blocks_are_those_with_a_pair_that_is_seen(case):
    causal, window = case
    segments = jnp.asarray(list(ROWS.values()), jnp.int32)
    blocks = splash.document_blocks(segments, causal=causal, window=window)
    seen = document_rows.blocks_with_a_pair(segments, causal=causal, window=window)
    for name, row, seen_nm in zip(ROWS, np.asarray(blocks), seen, strict=True):
        for (first, last), is_seen in [
            *zip(row[:, :2], seen_nm, strict=True),
            *zip(row[:, 2:], seen_nm.T, strict=True),
        ]:
            places = np.flatnonzero(is_seen)
            assert first <= places[0] and last >= places[-1], name
            if name != "in no order":
                assert (first, last) == (places[0], places[-1]), name


@pytest.mark.parametrize(("lengths", "computed"), document_rows.WHOLE_BLOCKS)
def test_steps_that_compute_are_counted_against_documents(lengths, computed):
    segments = document_rows.of_lengths(lengths)
    blocks = splash.document_blocks(segments, causal=True, window=0)
    first_key, last_key, first_query, last_query = jnp.moveaxis(blocks, 2, 0)
    data_next, is_active = splash._lists(first_key, last_key)
    assert int(is_active.sum()) == computed
    assert int(splash._lists(first_query, last_query)[1].sum()) == computed
    # steps that compute nothing read the block that is there
    moves = (np.diff(data_next, axis=1) != 0).sum() + len(data_next)
    assert int(moves) == computed


@pytest.mark.parametrize(
    ("key_heads", "causal", "window"), [(1, True, 60), (2, False, 0), (1, False, 140)]
)
def test_documents_under_other_masks_equal_the_formula_and_its_gradients(key_heads, causal, window):
    """The last row is padding alone."""
    segments = jnp.asarray([ROWS["one"], ROWS["across blocks"], [0] * 384], jnp.int32)
    assert_equals_the_formula(
        splash.splash, segments, (2, key_heads, 64), causal=causal, window=window
    )


def test_rows_may_have_more_documents_than_blocks_and_any_numbers():
    segments = document_rows.with_any_numbers()
    assert_equals_the_formula(splash.splash, segments, (2, 1, 64))


def test_rows_whose_lists_exceed_the_scalar_memory_take_several_calls(monkeypatch):
    monkeypatch.setattr(splash, "LISTS", 2 * 3 * LANES * splash.BYTES)
    assert splash.rows_of_a_call(384) == 2
    segments = jnp.asarray([ROWS["aligned"], ROWS["across blocks"], ROWS["one"]], jnp.int32)
    assert_equals_the_formula(splash.splash, segments, (2, 1, 64))


def test_longer_rows_have_larger_blocks_so_that_their_lists_fit(monkeypatch):
    monkeypatch.setattr(splash, "BLOCK", 512)
    sizes = {t: splash.block_size(t) for t in (1 << 11, 1 << 18, 1 << 19, 1 << 20)}
    assert sizes == {1 << 11: 512, 1 << 18: 512, 1 << 19: 1024, 1 << 20: 2048}
    for t in sizes:
        n = t // splash.block_size(t)
        assert splash.rows_of_a_call(t) * n * max(n, LANES) * splash.BYTES <= 1 << 20


@pytest.mark.parametrize(
    ("tokens", "longer"),
    [(76_928, 77_056), (130_944, 131_072), (153_856, 154_112), (524_416, 526_336)],
)
def test_rows_whose_lists_exceed_the_scalar_memory_are_refused_by_name(
    tokens, longer, monkeypatch, caplog
):
    """Before, they were left to libtpu."""
    monkeypatch.setattr(splash, "BLOCK", 512)
    attention._log_no_kernel.cache_clear()
    q = jax.ShapeDtypeStruct((1, tokens, 4, 128), jnp.bfloat16)
    masks = attention.Masks(causal=True, packed=True)
    with caplog.at_level("INFO", "jaxtrain"):
        assert attention.choose(q, ("tpu", "v5e"), masks) == "xla"
    assert caplog.text.strip().endswith(f"all pairs of tokens; one takes rows of {longer}")
    assert attention.choose(q, ("tpu", "v5e"), masks._replace(packed=False)) == "splash"


@pytest.mark.slow
@pytest.mark.usefixtures("libtpu")
@pytest.mark.parametrize(("rows", "tokens"), [(256, 2048), (4096, 512), (64, 8192)])
def test_lists_of_many_rows_fit_into_the_scalar_memory(rows, tokens, monkeypatch):
    """Before, libtpu refused 256 rows of 2,048 tokens, by 1.1 kB."""
    monkeypatch.setattr(splash, "BLOCK", 512)
    calls = document_rows.kernels_on_tpu(splash.splash, rows, tokens, (1, 1, 128))
    assert calls == 3 * -(-rows // splash.rows_of_a_call(tokens))


def test_a_document_reads_no_block_of_another_one():
    """Keys and values of other documents and rows are not numbers: forward and backward."""
    document_rows.assert_reads_no_other_blocks(splash.splash, (1, 2))
