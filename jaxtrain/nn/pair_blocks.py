"""Attention for TPUs over rows of documents, by a list of the blocks with pairs.

A kernel of Pallas walks the list: each step of its grid is a block of queries and one of keys, for
all heads that fit into VMEM. So blocks are as small as the lanes, and a step costs little next to
its products. The grid ends where the list ends. The backward kernel walks the same list, and keeps
the gradients of a row's keys and values on the chip.

The first keys of a block of queries may be those of other documents: a step computes only the slabs
of 32 keys from the first one that has a pair. Each number of slabs has its own code.

Tokens are in the lanes of all arrays, so that no head is padded, and keys in the rows of scores, so
that maxima and sums over keys need no other lanes.

Shapes: B batch, T queries, S keys, which are as many, H heads, G key/value heads, R = H / G, K head
dimension. N blocks of a row, C blocks of all rows, P the longest list, I calls of the kernel, each
with its rows. In kernels T and S are the tokens of a block.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.layout import with_layout_constraint

from jaxtrain.nn import remat, splash
from jaxtrain.types import Array

BLOCK = 128  # [queries or keys], the lanes of a TPU's vector registers
SLAB = 32  # [keys] of a block that a step computes or leaves out
NUMBERS = 1 << 22  # of a head's keys in a row whose gradients fit into VMEM
BLOCKS = 40 << 20  # [bytes] of VMEM for the arrays of the heads of a step
VMEM = 48 << 20  # [bytes] that a kernel may take
LISTS = 3 << 18  # [bytes] of a call's list in scalar memory, which has 1 MiB
AT_ONCE = 8  # heads whose steps are written out, so that one's products hide another's sums
HIDDEN = -1e30  # score of a key that a query does not see
# A step in 32 bits: the block of keys, the block of queries, the row, whether it is the first or
# the last one of its queries, and the first of four slabs of keys that it computes
BITS = 9
MOST_ROWS = 1 << 10
FIRST, LAST = 1 << 28, 1 << 29
SLAB_BIT = 30

Heads = list[tuple[Array, Array]]  # of queries, each with its head of keys


class Form(NamedTuple):
    causal: bool
    window: int
    interpret: bool
    keep: str | None


def pair_blocks_fit(shape: tuple[int, ...], *, causal: bool) -> bool:
    """Tell whether the kernel takes queries of this shape [B, T, H, K]."""
    _, t, _, k = shape
    fills_lanes = t % BLOCK == 0 and k % 64 == 0
    return fills_lanes and t * k <= NUMBERS and rows_of_a_call(t, causal=causal) > 0


def rows_of_a_call(t: int, *, causal: bool) -> int:
    """Return how many rows a call of the kernel takes."""
    n = t // BLOCK
    return min(MOST_ROWS, LISTS // (4 * _most_steps(n, causal))) if n <= 1 << BITS else 0


def _most_steps(n: int, causal: bool) -> int:
    """Return the number of blocks of a row that the mask alone does not empty."""
    return n * (n + 1) // 2 if causal else n * n


def pair_blocks(
    q_bthk: Array,
    k_bsgk: Array,
    v_bsgk: Array,
    *,
    causal: bool,
    window: int,
    segments_bt: Array,
    blocks: Array | None = None,
    interpret: bool = False,
    keep: str | None = None,
) -> Array:
    """Call the kernel for TPUs. ``interpret`` runs it anywhere, slowly.

    ``blocks``: the steps of `document_steps`, int32 [I, 1 + P]. None = they are listed here.
    """
    if blocks is None:
        blocks = document_steps(segments_bt, causal=causal, window=window)
    form = Form(causal, window, interpret, keep)
    b, t, h, k = q_bthk.shape
    times = _times(h // k_bsgk.shape[2], k, t, q_bthk.dtype.itemsize)
    if times > 1:
        k_bsgk, v_bsgk = (jnp.repeat(x, times, axis=2) for x in (k_bsgk, v_bsgk))
    q_bthk = (q_bthk * q_bthk.shape[3] ** -0.5).astype(q_bthk.dtype)
    qkv = (q_bthk, k_bsgk, v_bsgk)
    if k < BLOCK and not interpret:
        # Rotated with the few values of a head in the lanes, q would be two to four times its size.
        qkv = tuple(with_layout_constraint(x, splash.TOKENS_LAST) for x in qkv)
    arrays = (*(x.transpose(0, 2, 3, 1) for x in qkv), segments_bt)
    rows = rows_of_a_call(t, causal=causal)
    parts = []
    for first, list_p in zip(range(0, b, rows), blocks, strict=True):
        of_rows = (x[first : first + rows] for x in arrays)
        parts.append(_attend(form, *of_rows, list_p[1:], list_p[0]))
    y_bhkt = parts[0] if len(parts) == 1 else jnp.concatenate(parts)
    return y_bhkt.transpose(0, 3, 1, 2)


def document_steps(segments_bt: Array, *, causal: bool, window: int) -> Array:
    """List the steps of each call's grid, after their number: int32 [I, 1 + P].

    Those of a block of queries follow each other, and the first one leaves out the slabs of keys
    before the first slab with a pair. Numbers after the last step are not read. Blocks are left out
    exactly under the same condition as by `splash.document_blocks`.
    """
    sizes = (BLOCK, SLAB)
    shared_bnm = splash.shared_blocks(segments_bt, sizes, causal=causal, window=window)
    slabs_bn2 = jnp.stack(splash.ends(shared_bnm), axis=2)
    b, t = segments_bt.shape
    rows = rows_of_a_call(t, causal=causal)
    calls = [_steps(slabs_bn2[first : first + rows], causal) for first in range(0, b, rows)]
    longest = len(calls[0])
    return jnp.stack([jnp.pad(list_p, (0, longest - len(list_p))) for list_p in calls])


def _steps(slabs_bn2: Array, causal: bool) -> Array:
    """List the steps of rows after their number, by the first and last slab of keys of a block."""
    b, n, _ = slabs_bn2.shape
    blocks, slab = jnp.divmod(slabs_bn2.reshape(b * n, 2), BLOCK // SLAB)
    first_c, slab_c = blocks[:, 0], slab[:, 0]
    end_c = jnp.cumsum(blocks[:, 1] - first_c + 1)
    begin_c = jnp.concatenate([jnp.zeros(1, jnp.int32), end_c[:-1]])
    place_p = jnp.arange(b * _most_steps(n, causal), dtype=jnp.int32)
    # Sums of comparisons, as TPUs gather numbers slowly: the block of queries is the number of
    # those that end before.
    is_over_pc = end_c[None] <= place_p[:, None]
    query_p = jnp.minimum(is_over_pc.sum(1, dtype=jnp.int32), b * n - 1)
    offset_c = first_c - begin_c  # block of keys - place
    change_c = jnp.diff(offset_c, append=offset_c[-1:])
    key_p = place_p + offset_c[0] + jnp.where(is_over_pc, change_c[None], 0).sum(1)
    is_first_pc = place_p[:, None] == begin_c[None]
    is_first_p = is_first_pc.any(1)
    slab_p = jnp.where(is_first_pc, slab_c[None], 0).sum(1)
    is_last_p = (place_p[:, None] + 1 == end_c[None]).any(1)
    row_p, query_of_row_p = query_p // n, query_p % n
    list_p = key_p | query_of_row_p << BITS | row_p << 2 * BITS
    list_p |= jnp.where(is_first_p, FIRST, 0) | jnp.where(is_last_p, LAST, 0)
    list_p |= slab_p << SLAB_BIT
    return jnp.concatenate([end_c[-1:], list_p])


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(
    form: Form,
    q_bhkt: Array,
    k_bgks: Array,
    v_bgks: Array,
    ids_bt: Array,
    list_p: Array,
    count: Array,
) -> Array:
    args = (q_bhkt, k_bgks, v_bgks, ids_bt, list_p, count)
    return _attend_forward(form, *args)[0]


def _attend_forward(form: Form, *args: Array) -> tuple[Array, tuple[Array, ...]]:
    q_bhkt, k_bgks, v_bgks, *listed = args
    y_bhkt, log_sum = _call(_forward, form, (q_bhkt, k_bgks, v_bgks), listed)
    log_sum_bht = log_sum.reshape(*q_bhkt.shape[:2], -1)
    if form.keep:
        y_bhkt, log_sum_bht = (remat.name(x, form.keep) for x in (y_bhkt, log_sum_bht))
    return y_bhkt, (*args, y_bhkt, log_sum_bht)


def _attend_backward(
    form: Form, kept: tuple[Array, ...], dy_bhkt: Array
) -> tuple[Array | None, ...]:
    q_bhkt, k_bgks, v_bgks, *listed, y_bhkt, log_sum_bht = kept
    mean_bht = (y_bhkt.astype(jnp.float32) * dy_bhkt.astype(jnp.float32)).sum(2)
    arrays = (q_bhkt, k_bgks, v_bgks, dy_bhkt, log_sum_bht, mean_bht)
    dq_bhkt, dk_bgks, dv_bgks = _call(_backward, form, arrays, listed)
    dk_bgks, dv_bgks = dk_bgks.astype(k_bgks.dtype), dv_bgks.astype(v_bgks.dtype)
    return dq_bhkt, dk_bgks, dv_bgks, None, None, None


_attend.defvjp(_attend_forward, _attend_backward)


def _call(kernel: Any, form: Form, arrays: tuple[Array, ...], listed: list[Array]) -> list[Array]:
    """Call a kernel on arrays q, k, v, and of the backward pass dy and its sums."""
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import tpu as pltpu

    (b, h, k, t), g = arrays[0].shape, arrays[1].shape[1]
    itemsize = arrays[0].dtype.itemsize
    ids_bt, list_p, count = listed
    is_forward = kernel is _forward
    parts = _parts(h, g, k, 0 if is_forward else t, itemsize)
    h_part, g_part = h // parts, g // parts

    def row(entry: Array) -> Array:
        return (entry >> 2 * BITS) & (MOST_ROWS - 1)

    def of_queries(i: Array, step: Array, list_ref: Any) -> tuple[Array | int, ...]:
        entry = list_ref[step]
        return row(entry), i, 0, _query(entry)

    def of_keys(i: Array, step: Array, list_ref: Any) -> tuple[Array | int, ...]:
        entry = list_ref[step]
        return row(entry), i, 0, _key(entry)

    def of_row(i: Array, step: Array, list_ref: Any) -> tuple[Array | int, ...]:
        return row(list_ref[step]), i, 0, 0

    def ids_of(place: Any) -> Any:
        return lambda i, step, list_ref: (row(list_ref[step]), 0, place(list_ref[step]))

    q_block = pl.BlockSpec((1, h_part, k, BLOCK), of_queries)
    k_block = pl.BlockSpec((1, g_part, k, BLOCK), of_keys)
    # of three dimensions, a part would need eight heads
    sums = pl.BlockSpec((1, 1, h_part, BLOCK), of_queries)
    arrays = tuple(x if x.ndim == 4 else x.reshape(b, parts, h_part, t) for x in arrays)
    ids = [pl.BlockSpec((1, 1, BLOCK), ids_of(place)) for place in (_query, _key)]
    like_q = jax.ShapeDtypeStruct((b, h, k, t), arrays[0].dtype)
    if is_forward:
        blocks = [q_block, k_block, k_block]
        out_shape = [like_q, jax.ShapeDtypeStruct((b, parts, h_part, t), jnp.float32)]
        out_blocks = [q_block, sums]
        of_a_head = [pltpu.VMEM((h_part, BLOCK), jnp.float32)] * 2
    else:
        blocks = [q_block, k_block, k_block, q_block, sums, sums]
        out_shape = [like_q, *[jax.ShapeDtypeStruct((b, g, k, t), jnp.float32)] * 2]
        # changes once a row, so that a second buffer would be idle
        alone = pl.Buffered(buffer_count=1)
        row_block = pl.BlockSpec((1, g_part, k, t), of_row, pipeline_mode=alone)
        out_blocks = [q_block, row_block, row_block]
        of_a_head = []
    products = 2 if is_forward else 5
    moved = sum(x.size * x.dtype.itemsize for x in arrays)
    moved += sum(x.size * x.dtype.itemsize for x in out_shape)
    causal_pairs = b * h * t * t // 2
    out: list[Array] = pl.pallas_call(
        functools.partial(kernel, form),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(parts, count),
            in_specs=[*ids, *blocks],
            out_specs=out_blocks,
            scratch_shapes=[pltpu.VMEM((h_part, k, BLOCK), jnp.float32), *of_a_head],
        ),
        out_shape=out_shape,
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"), vmem_limit_bytes=VMEM
        ),
        cost_estimate=pl.CostEstimate(
            flops=products * 2 * k * causal_pairs,
            transcendentals=causal_pairs,
            bytes_accessed=moved,
        ),
        interpret=form.interpret,
        name=f"packed_attention{kernel.__name__}",
    )(list_p, ids_bt[:, None], ids_bt[:, None], *arrays)
    return out


def _query(entry: Array) -> Array:
    return (entry >> BITS) & ((1 << BITS) - 1)


def _key(entry: Array) -> Array:
    return entry & ((1 << BITS) - 1)


def _slab(entry: Array) -> Array:
    return (entry >> SLAB_BIT) & (BLOCK // SLAB - 1)


def _parts(h: int, g: int, k: int, t: int, itemsize: int) -> int:
    """Return into how many parts the heads are split, so that a part's arrays fit into VMEM."""
    sizes = {n: _bytes(h // n, g // n, k, t, itemsize) for n in range(1, g + 1) if g % n == 0}
    return next((n for n, size in sizes.items() if size <= BLOCKS), g)


def _times(r: int, k: int, t: int, itemsize: int) -> int:
    """Return how often keys are repeated: more of the ``r`` heads to a key head exceed VMEM."""
    sizes = {n: _bytes(r // n, 1, k, t, itemsize) for n in range(1, r + 1) if r % n == 0}
    return next((n for n, size in sizes.items() if size <= BLOCKS), r)


def _bytes(h: int, g: int, k: int, t: int, itemsize: int) -> int:
    """Return the bytes in VMEM of ``h`` heads of queries and ``g`` of keys.

    ``t``: tokens of the rows of gradients, 0 = there are none.
    """
    of_queries = k * BLOCK * (2 * 3 * itemsize + 4)  # q, y or dy, and dq, of two steps, and sums
    of_keys = 2 * k * (2 * BLOCK * itemsize + 4 * t)
    return h * of_queries + g * of_keys


def _forward(form: Form, list_ref: Any, *refs: Any) -> None:
    from jax.experimental import pallas as pl

    q_ids, k_ids, q_ref, k_ref, v_ref, y_ref, log_sum_ref, y_sum_ref, max_ref, sum_ref = refs
    entry = list_ref[pl.program_id(1)]

    @pl.when(entry & FIRST != 0)
    def _() -> None:
        y_sum_ref[...] = jnp.zeros(y_sum_ref.shape, jnp.float32)
        max_ref[...] = jnp.full(max_ref.shape, HIDDEN, jnp.float32)
        sum_ref[...] = jnp.zeros(sum_ref.shape, jnp.float32)

    def of_heads(skip: int, seen_st: Array, heads: Heads) -> None:
        rows = [pl.ds(head, 1) for head, _ in heads]
        keys = {id(group): k_ref[0, group].T[skip:] for _, group in heads}
        values = [v_ref[0, group][:, skip:] for _, group in heads]
        s_st = [_product(keys[id(group)], q_ref[0, head], "sk,kt->st") for head, group in heads]
        s_st = [jnp.where(seen_st, s_st, HIDDEN) for s_st in s_st]
        before = [(max_ref[row], sum_ref[row]) for row in rows]
        y_kt = [y_sum_ref[head] for head, _ in heads]
        after = []
        for i, (max_1t, sum_1t) in enumerate(before):
            new_max_1t = jnp.maximum(max_1t, s_st[i].max(0, keepdims=True))
            p_st = jnp.exp(s_st[i] - new_max_1t)
            shrunk_1t = jnp.exp(max_1t - new_max_1t)
            after.append((new_max_1t, shrunk_1t * sum_1t + p_st.sum(0, keepdims=True)))
            y_kt[i] = shrunk_1t * y_kt[i] + _product(
                values[i], p_st.astype(values[i].dtype), "ks,st->kt"
            )
        for i, (head, _) in enumerate(heads):
            max_ref[rows[i]], sum_ref[rows[i]] = after[i]
            y_sum_ref[head] = y_kt[i]

    seen = functools.partial(_seen, form, entry, q_ids, k_ids)
    _for_all_heads(of_heads, seen, entry, (q_ref.shape[1], k_ref.shape[1]))

    @pl.when(entry & LAST != 0)
    def _() -> None:
        y_ref[0] = (y_sum_ref[...] / sum_ref[...][:, None]).astype(y_ref.dtype)
        log_sum_ref[0, 0] = max_ref[...] + jnp.log(sum_ref[...])


def _backward(form: Form, list_ref: Any, *refs: Any) -> None:
    from jax.experimental import pallas as pl

    q_ids, k_ids, q_ref, k_ref, v_ref, dy_ref, log_sum_ref, mean_ref, *results = refs
    dq_ref, dk_ref, dv_ref, dq_sum_ref = results
    entry = list_ref[pl.program_id(1)]

    @pl.when(entry & FIRST != 0)
    def _() -> None:
        dq_sum_ref[...] = jnp.zeros(dq_sum_ref.shape, jnp.float32)

    @pl.when((entry & FIRST != 0) & (_query(entry) == 0))
    def _() -> None:
        dk_ref[...] = jnp.zeros(dk_ref.shape, jnp.float32)
        dv_ref[...] = jnp.zeros(dv_ref.shape, jnp.float32)

    tokens = pl.ds(pl.multiple_of(_key(entry) * BLOCK, BLOCK), BLOCK)

    def of_heads(skip: int, seen_st: Array, heads: Heads) -> None:
        groups = {id(group): group for _, group in heads}
        keys = {n: _after(skip, k_ref[0, group]) for n, group in groups.items()}
        values_sk = {n: v_ref[0, group].T[skip:] for n, group in groups.items()}
        keys_sk = {n: k_ref[0, group].T[skip:] for n, group in groups.items()}
        dk_ks = {n: dk_ref[0, group, :, tokens] for n, group in groups.items()}
        dv_ks = {n: dv_ref[0, group, :, tokens] for n, group in groups.items()}
        q_kt = [q_ref[0, head] for head, _ in heads]
        dy_kt = [dy_ref[0, head] for head, _ in heads]
        dq_kt = [dq_sum_ref[head] for head, _ in heads]
        for i, (head, group) in enumerate(heads):
            n = id(group)
            row = pl.ds(head, 1)
            s_st = _product(keys_sk[n], q_kt[i], "sk,kt->st")
            p_st = jnp.exp(jnp.where(seen_st, s_st, HIDDEN) - log_sum_ref[0, 0, row])
            dp_st = _product(values_sk[n], dy_kt[i], "sk,kt->st")
            ds_st = (p_st * (dp_st - mean_ref[0, 0, row])).astype(q_kt[i].dtype)
            ds_st = _all_keys(skip, ds_st)
            p_st = _all_keys(skip, p_st.astype(dy_kt[i].dtype))
            dv_ks[n] += _product(dy_kt[i], p_st, "kt,st->ks")
            dk_ks[n] += _product(q_kt[i], ds_st, "kt,st->ks")
            dq_kt[i] += _product(keys[n], ds_st, "ks,st->kt")
        for i, (head, _) in enumerate(heads):
            dq_sum_ref[head] = dq_kt[i]
        for n, group in groups.items():
            for ref, d_ks in ((dk_ref, dk_ks[n]), (dv_ref, dv_ks[n])):
                ref[0, group, :, tokens] = _after(skip, d_ks, ref[0, group, :, tokens])

    seen = functools.partial(_seen, form, entry, q_ids, k_ids)
    _for_all_heads(of_heads, seen, entry, (q_ref.shape[1], k_ref.shape[1]))

    @pl.when(entry & LAST != 0)
    def _() -> None:
        dq_ref[0] = dq_sum_ref[...].astype(dq_ref.dtype)


def _for_all_heads(of_heads: Any, seen: Any, entry: Array, n_heads: tuple[int, int]) -> None:
    """Call a function with some heads of queries at a time, each with its head of keys.

    It is called with the number of keys that the step leaves out, and with which of the other ones
    the queries see.
    """
    from jax.experimental import pallas as pl

    h, g = n_heads
    r = h // g
    at_once = next(n for n in range(max(1, AT_ONCE // r), 0, -1) if g % n == 0)

    def leave_out(skip: int) -> None:
        seen_st = seen(skip)

        def some(i: Array, _: None) -> None:
            groups = [i * at_once + n for n in range(at_once)]
            heads = [(group * r + head, group) for group in groups for head in range(r)]
            of_heads(skip, seen_st, heads)

        jax.lax.fori_loop(0, g // at_once, some, None)

    for slab in range(BLOCK // SLAB):
        pl.when(_slab(entry) == slab)(functools.partial(leave_out, slab * SLAB))


def _after(skip: int, x_ks: Array, first: Array | float = 0) -> Array:
    """Replace the first keys of a block."""
    if not skip:
        return x_ks
    key_ks = jax.lax.broadcasted_iota(jnp.int32, x_ks.shape, 1)
    return jnp.where(key_ks < skip, first, x_ks)


def _all_keys(skip: int, p_st: Array) -> Array:
    """Put zeros in the place of the keys that a step leaves out."""
    zeros_st = jnp.zeros((skip, p_st.shape[1]), p_st.dtype)
    return jnp.concatenate([zeros_st, p_st]) if skip else p_st


def _seen(form: Form, entry: Array, q_ids: Any, k_ids: Any, skip: int) -> Array:
    """Tell which keys the queries of a block see, without its first keys, bool [S, T]."""
    shape = (BLOCK - skip, BLOCK)
    k_ids_st = jnp.broadcast_to(k_ids[0], (BLOCK, BLOCK)).T[skip:]
    seen_st: Array = k_ids_st == q_ids[0]
    key_st, query_st = (jax.lax.broadcasted_iota(jnp.int32, shape, axis) for axis in (0, 1))
    back_st = query_st - key_st + (_query(entry) - _key(entry)) * BLOCK - skip
    if form.causal:
        seen_st &= back_st >= 0
    if form.window:
        seen_st &= jnp.abs(back_st) < form.window
    return seen_st


def _product(a: Array, b: Array, equation: str) -> Array:
    """Multiply two matrices by an equation such as "ts,sl->tl", with a float32 result."""
    left, right, result = equation.replace("->", ",").split(",")
    [summed] = set(left) - set(result)
    axes = (((left.index(summed),), (right.index(summed),)), ((), ()))
    c: Array = jax.lax.dot_general(a, b, axes, preferred_element_type=jnp.float32)
    return c
