"""Rope and the storing of keys and values in torch operators; others do them as a part of `attend`."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

import oracles
from implementations import BF16, F32, TORCH, Implementation
from manylora.kernels.kv_layer import KvLayer
from manylora.kernels.plain.rows import both_halves, kv_write, rope
from numerics import assert_rows_close, bits, turned

IMPLEMENTATIONS = [TORCH]
POSITIONS = torch.tensor([0, 7, 49, 7, 3])
SLOTS = [35, -1, 16, 17, 79, -1, 48]


def angles(head_dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines at `POSITIONS`."""
    turned = POSITIONS[:, None] * 10000 ** -(torch.arange(0, head_dim, 2) / head_dim)
    return turned.cos(), turned.sin()


@pytest.mark.parametrize("head_dim", [2, 24, 32, 48, 80, 128])
@pytest.mark.parametrize(
    "heads", [(4, 4, 6), (4, 5, 7), (3, 3, 8)], ids=["neighbours", "apart", "more keys"]
)
def test_rope_equals_the_oracle(
    heads: tuple[int, int, int], head_dim: int, impl: Implementation, dtype: torch.dtype
) -> None:
    num_queries, first, last = heads
    cos, sin = (table.to(impl.device) for table in both_halves(*angles(head_dim)))
    fused = impl.randn((5, 8, head_dim), dtype)
    expected, before = fused.clone(), fused.clone()
    rope(fused[:, :num_queries], fused[:, first:last], cos, sin)
    oracles.rope(expected[:, :num_queries], expected[:, first:last], cos, sin)
    assert_rows_close(fused, expected)
    others = [head for head in range(num_queries, 8) if not first <= head < last]
    assert torch.equal(fused[:, others], before[:, others])


def test_rope_is_that_of_transformers_for_tensors_of_their_own(impl: Implementation) -> None:
    q, k = impl.randn((5, 17, 32)), impl.randn((5, 2, 32), seed=1)
    half = [table.to(impl.device) for table in angles(32)]
    cos, sin = (torch.cat((table, table), -1)[None] for table in half)
    expected = apply_rotary_pos_emb(q.transpose(0, 1)[None], k.transpose(0, 1)[None], cos, sin)
    rope(q, k, *both_halves(*half))
    assert_rows_close(q, expected[0][0].transpose(0, 1).contiguous())
    assert_rows_close(k, expected[1][0].transpose(0, 1).contiguous())


@pytest.mark.parametrize(
    "values", ["in the same way", "in another way", "in another tensor", "before keys"]
)
@pytest.mark.parametrize(
    "mapping", [SLOTS, [16, 17, 50], [-1, -1, -1]], ids=["some", "all", "none"]
)
@pytest.mark.parametrize(
    ("heads", "head_dim", "page_tokens"), [(1, 24, 16), (3, 80, 64), (8, 128, 16)]
)
def test_kv_write_stores_every_bit_in_its_place_and_changes_nothing_else(
    heads: int,
    head_dim: int,
    page_tokens: int,
    mapping: list[int],
    values: str,
    impl: Implementation,
    dtype: torch.dtype,
) -> None:
    generator = torch.Generator().manual_seed(0)
    integers = torch.int32 if dtype == F32 else torch.int16
    shape = (len(mapping), 2 * heads + 1, head_dim)  # any bits, those of a NaN among them
    fused = (
        torch.randint(-(2**15), 2**15, shape, generator=generator)
        .to(integers)
        .view(dtype)
        .to(impl.device)
    )
    k, v = fused[:, 1 : heads + 1], fused[:, heads + 1 :]
    if values == "in another way":
        v = v.transpose(0, 1).contiguous().transpose(0, 1)
    arena = torch.full(
        (6, 3, 2, heads, page_tokens, head_dim), float("nan"), dtype=dtype, device=impl.device
    )
    expected = arena.clone()
    pages = arena[:, 1, 0], arena[:, 1, 1]
    if values == "in another tensor":
        arena, others = arena[:, :, :1].contiguous(), arena[:, :, 1:].contiguous()
        pages = arena[:, 1, 0], others[:, 1, 0]
    elif values == "before keys":
        k, v, pages = v, k, pages[::-1]
    slots = torch.tensor(mapping, device=impl.device)
    kv_write(k, v, KvLayer(*pages), slots)
    expected_pages = expected[:, 1, 0], expected[:, 1, 1]
    oracles.kv_write(k, v, KvLayer(*expected_pages), slots)
    for stored, right in zip(pages, expected_pages, strict=True):
        assert torch.equal(bits(stored), bits(right))
    assert torch.equal(
        bits(arena[:, [0, 2]]), bits(torch.full_like(arena[:, [0, 2]], float("nan")))
    )


def test_a_nan_of_any_bits_stays_one(impl: Implementation) -> None:
    nan = torch.full((1, 32), -1, dtype=torch.int32, device=impl.device).view(
        F32
    )  # instructions make another
    q, k = (torch.ones((1, 1, 32), dtype=BF16, device=impl.device) for _ in range(2))
    rope(q, k, nan, nan)
    assert q.isnan().all()
    assert k.isnan().all()


FUSED, HALF = torch.randn((5, 8, 32)), torch.randn((5, 64))
Q, K, COS = FUSED[:, :4], FUSED[:, 4:6], torch.ones(5, 32)
ARENA, KV = torch.zeros((6, 2, 2, 16, 8)), torch.randn((7, 4, 8))
PAGES, KEYS, VALUES = ARENA[:, 0], KV[:, :2], KV[:, 2:]
MAPPING = torch.tensor(SLOTS)
MISFITS: list[tuple[Callable[..., None], Callable[[], tuple[Any, ...]], str]] = [
    (rope, lambda: (Q, K, COS[1:], COS[1:]), r"cos: expected shape \[5, 32\], got \[4, 32\]"),
    (
        rope,
        lambda: (Q, K.bfloat16(), COS, COS),
        r"k: expected dtype torch\.float32, got torch\.bfloat16",
    ),
    (
        rope,
        lambda: (Q, K, COS, COS.double()),
        r"sin: expected dtype torch\.float32, got torch\.float64",
    ),
    (rope, lambda: (turned(Q), K, COS, COS), "q: expected consecutive elements, got"),
    (rope, lambda: (Q, turned(K), COS, COS), "q: expected consecutive elements, got"),
    (rope, lambda: (Q, K, HALF[:, :32], COS), "cos: expected contiguous rows, got"),
    (rope, lambda: (Q, K, COS, HALF[:, :32]), "cos: expected contiguous rows, got"),
    (
        kv_write,
        lambda: (KEYS, VALUES, KvLayer(PAGES, PAGES), torch.tensor([1])),
        r"slot_mapping: expected shape \[7\]",
    ),
    (
        kv_write,
        lambda: (KEYS, VALUES[1:], KvLayer(PAGES, PAGES), MAPPING),
        r"v: expected shape \[7, 2, 8\], got \[6, 2, 8\]",
    ),
    (
        kv_write,
        lambda: (KEYS.half(), VALUES.half(), KvLayer(PAGES, PAGES), MAPPING),
        r"k_pages: expected dtype torch\.fl",
    ),
    (
        kv_write,
        lambda: (KEYS, VALUES, KvLayer(PAGES, PAGES[1:]), MAPPING),
        r"v_pages: expected shape \[6, 2, 16, 8\], got",
    ),
    (
        kv_write,
        lambda: (KEYS, VALUES, KvLayer(turned(PAGES), PAGES), MAPPING),
        "k_pages: expected consecutive elements",
    ),
    (
        kv_write,
        lambda: (KEYS, VALUES, KvLayer(PAGES, PAGES.contiguous()), MAPPING),
        "v_pages: expected strides",
    ),
    (
        kv_write,
        lambda: (turned(KEYS), VALUES, KvLayer(PAGES, PAGES), MAPPING),
        "k: expected consecutive elements, got",
    ),
    (
        kv_write,
        lambda: (KEYS, turned(VALUES), KvLayer(PAGES, PAGES), MAPPING),
        "k: expected consecutive elements, got",
    ),
    (
        kv_write,
        lambda: (KEYS, VALUES, KvLayer(PAGES, PAGES), torch.stack((MAPPING, MAPPING), 1)[:, 0]),
        "slot_mapping: expected consecutive elements",
    ),
]


@pytest.mark.parametrize(("operation", "operands", "expected"), MISFITS)
def test_misfits_are_refused_before_anything_is_changed(
    operation: Callable[..., None], operands: Callable[[], tuple[Any, ...]], expected: str
) -> None:
    before = FUSED.clone()
    with pytest.raises(ValueError, match=expected):
        operation(*operands())
    assert torch.equal(FUSED, before)
    assert not ARENA.any()
