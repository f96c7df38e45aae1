"""The inner loop of paged attention in Triton: blocks of keys and values, and the running softmax."""

import triton
import triton.language as tl


@triton.jit
def load(pointers, live, INTERPRET: tl.constexpr):
    """Load the live part of a block, zero elsewhere; float32 in the interpreter, which is wrong in other dtypes."""
    values = tl.load(pointers, mask=live, other=0.0)
    if INTERPRET:
        values = values.to(tl.float32)
    return values


@triton.jit
def _scaled(q, k, v, k_scales, v_scales, place, live, factor):
    """Keys and values of int8 in the dtype of q, and the factors of the scores, [1, tokens]."""
    key_scales = tl.load(k_scales + place, mask=live, other=0.0)
    value_scales = tl.load(v_scales + place, mask=live, other=0.0)
    values = v.to(tl.float32) * value_scales[:, None]
    return k.to(q.dtype), values.to(q.dtype), factor * key_scales[None, :]


@triton.jit
def shrunk(old_top, new_top):
    """Factor of the sums that were relative to the old maximum, and the new maximum that scores are relative to."""
    # A row without a key yet has the maximum -inf. The difference of two infinities is not a number.
    base = tl.where(new_top == float("-inf"), 0.0, new_top)
    return tl.exp2(old_top - base), base


@triton.jit
def attend(
    query,
    top,
    total,
    acc,
    k_pages,
    v_pages,
    k_scales,
    v_scales,
    table,
    begin,
    end,
    last,
    position,
    factor,
    page_stride,
    token_stride,
    scale_page_stride,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PAGE_TOKENS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WINDOW: tl.constexpr,
    MASKED: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    """Add the keys from `begin` to `end` to the running maximum, the sum of weights and the weighted sum of values.

    If masked, keys from `last` on are not read, and a row sees the keys up to its position and in its window. If not,
    all blocks are full, and all rows see them.
    """
    d = tl.arange(0, BLOCK_D)
    live_d = d < D
    for start in range(begin, end, BLOCK_N):
        n = start + tl.arange(0, BLOCK_N)
        live_n = n < last if MASKED else n >= 0
        page = tl.load(table + n // PAGE_TOKENS, mask=live_n, other=0).to(tl.int64)
        token = (n % PAGE_TOKENS).to(tl.int64)
        tokens = page * page_stride + token * token_stride
        k = load(
            k_pages + tokens[None, :] + d[:, None], live_d[:, None] & live_n[None, :], INTERPRET
        )
        v = load(
            v_pages + tokens[:, None] + d[None, :], live_n[:, None] & live_d[None, :], INTERPRET
        )
        factors = factor
        if k_scales is not None:
            place = page * scale_page_stride + token
            k, v, factors = _scaled(query, k, v, k_scales, v_scales, place, live_n, factor)
        s = tl.dot(query, k, input_precision="ieee") * factors
        if MASKED:
            seen = (n[None, :] <= position[:, None]) & live_n[None, :]
            if WINDOW > 0:
                seen = seen & (n[None, :] > position[:, None] - WINDOW)
            s = tl.where(seen, s, float("-inf"))
        new_top = tl.maximum(top, tl.max(s, axis=1))
        shrink, base = shrunk(top, new_top)
        p = tl.exp2(s - base[:, None])
        total = total * shrink + tl.sum(p, axis=1)
        acc = tl.dot(p.to(v.dtype), v, acc=acc * shrink[:, None], input_precision="ieee")
        top = new_top
    return top, total, acc
