"""The contract of the operations on single rows: norms, rope, the gate, and storing keys and values."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb

from implementations import BF16, CPU, F32, Implementation, num_threads
from numerics import assert_rows_close, assert_rows_match, bits
from oracles import ORACLES
from weft.kernels.attention_batch import KvSlots
from weft.kernels.plain.rows import both_halves

SIZES = pytest.mark.parametrize("size", [2, 7, 16, 24, 100, 896, 2050, 14336])
POSITIONS = torch.tensor([0, 7, 49, 7, 3])
SLOTS = [35, -1, 16, 17, 79, -1, 48]
GATES = (0.0, -0.0, 1.0, -1.0, 20.0, -20.0, 88.0, -88.0, 104.0, -104.0, 200.0, -200.0, 3e38, -3e38)
NOT_FINITE = (float("inf"), float("-inf"), float("nan"))
NAN = torch.full((1, 32), -1, dtype=torch.int32).view(F32)
"""With all bits set: an instruction makes another NaN, 0x7FC00000."""


def angles(head_dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines at `POSITIONS`."""
    turned = POSITIONS[:, None] * 10000 ** -(torch.arange(0, head_dim, 2) / head_dim)
    return turned.cos(), turned.sin()


def turned(tensor: torch.Tensor) -> torch.Tensor:
    """The same values, elements of the last dimension apart."""
    return tensor.transpose(-1, -2).contiguous().transpose(-1, -2)


@SIZES
def test_norms_equal_the_oracle_and_leave_their_inputs(size: int, impl: Implementation, dtype: torch.dtype) -> None:
    x, residual, weight = (impl.randn(shape, dtype, seed) for seed, shape in enumerate(((5, size), (5, size), (size,))))
    before = x.clone(), residual.clone()
    assert_rows_close(impl.kernels.rms_norm(x, weight, 1e-6), ORACLES.rms_norm(x, weight, 1e-6))
    heads = impl.randn((3, 6, size), dtype)[:, 1:5]  # of a fused projection
    assert_rows_close(impl.kernels.rms_norm(heads, weight, 1e-6), ORACLES.rms_norm(heads, weight, 1e-6))
    normed, stream = impl.kernels.fused_add_rms_norm(x, residual, weight, 1e-6)
    if impl.is_interpreted:
        assert_rows_close(stream, x + residual)
    else:
        assert torch.equal(stream, x + residual)
    assert_rows_close(normed, ORACLES.rms_norm(stream, weight, 1e-6))
    assert torch.equal(x, before[0])
    assert torch.equal(residual, before[1])


def test_norms_remember_nothing(impl: Implementation) -> None:
    x, weight = impl.randn((2, 32)), impl.randn((32,), seed=1)
    impl.kernels.fused_add_rms_norm(x, x, weight, 1e-6)
    x.zero_()
    normed, stream = impl.kernels.fused_add_rms_norm(x, x, weight, 1e-6)
    assert not normed.any()
    assert not stream.any()


def test_norms_give_the_numbers_of_transformers(impl: Implementation, dtype: torch.dtype) -> None:
    x, weight = impl.randn((16, 896), dtype), impl.randn((896,), dtype, 1)
    module = LlamaRMSNorm(896, eps=1e-5).to(dtype).to(impl.device)
    module.weight.data.copy_(weight)
    rtol, atol = (1e-6, 1e-6) if dtype == F32 else (2**-6, 1e-3)
    torch.testing.assert_close(impl.kernels.rms_norm(x, weight, 1e-5), module(x).detach(), rtol=rtol, atol=atol)


def test_a_row_that_is_not_finite_stays_alone(impl: Implementation) -> None:
    x, weight = impl.randn((5, 100)), impl.randn((100,), seed=1)
    clean = impl.kernels.rms_norm(x, weight, 1e-6)
    x[2, 50] = float("nan")
    out = impl.kernels.rms_norm(x, weight, 1e-6)
    assert out[2].isnan().all()
    assert torch.equal(out[[0, 1, 3, 4]], clean[[0, 1, 3, 4]])


@pytest.mark.parametrize("head_dim", [2, 24, 32, 48, 80, 128])
@pytest.mark.parametrize("heads", [(4, 4, 6), (4, 5, 7), (3, 3, 8)], ids=["neighbours", "apart", "more keys"])
def test_rope_equals_the_oracle(
    heads: tuple[int, int, int], head_dim: int, impl: Implementation, dtype: torch.dtype
) -> None:
    num_queries, first, last = heads
    cos, sin = (table.to(impl.device) for table in both_halves(*angles(head_dim)))
    fused = impl.randn((5, 8, head_dim), dtype)
    expected, before = fused.clone(), fused.clone()
    impl.kernels.rope(fused[:, :num_queries], fused[:, first:last], cos, sin)
    ORACLES.rope(expected[:, :num_queries], expected[:, first:last], cos, sin)
    assert_rows_close(fused, expected)
    others = [head for head in range(num_queries, 8) if not first <= head < last]
    assert torch.equal(fused[:, others], before[:, others])


def test_rope_is_that_of_transformers_for_tensors_of_their_own(impl: Implementation) -> None:
    q, k = impl.randn((5, 17, 32)), impl.randn((5, 2, 32), seed=1)
    half = [table.to(impl.device) for table in angles(32)]
    cos, sin = (torch.cat((table, table), -1)[None] for table in half)
    expected = apply_rotary_pos_emb(q.transpose(0, 1)[None], k.transpose(0, 1)[None], cos, sin)
    impl.kernels.rope(q, k, *both_halves(*half))
    assert_rows_close(q, expected[0][0].transpose(0, 1).contiguous())
    assert_rows_close(k, expected[1][0].transpose(0, 1).contiguous())


@pytest.mark.parametrize(("rows", "width"), [(1, 1), (3, 24), (2, 1024), (2, 2049), (2, 14336), (0, 16)])
def test_silu_and_mul_equals_the_oracle(rows: int, width: int, impl: Implementation, dtype: torch.dtype) -> None:
    gate_up = impl.randn((rows, 2 * width), dtype) * 4
    before = gate_up.clone()
    assert_rows_close(impl.kernels.silu_and_mul(gate_up), ORACLES.silu_and_mul(gate_up))
    assert torch.equal(gate_up, before)


@pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered:RuntimeWarning")
def test_large_gates_let_all_through_or_nothing(impl: Implementation, dtype: torch.dtype) -> None:
    gates = torch.tensor([*GATES, *NOT_FINITE])[:, None].expand(-1, 21)
    values = torch.cat((torch.linspace(-3, 3, 20), torch.tensor([float("nan")])))
    gate_up = torch.cat((gates, values.expand(len(gates), -1)), 1).to(dtype).to(impl.device)
    assert_rows_match(impl.kernels.silu_and_mul(gate_up), ORACLES.silu_and_mul(gate_up))


@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
def test_gates_give_the_numbers_of_the_definition(impl: Implementation) -> None:
    gate_up = torch.tensor([[1.0, -2.0, 200.0, -200.0, 3.0, 5.0, 0.5, 7.0]], device=impl.device)
    expected = torch.tensor([[3 / (1 + 2.718281828**-1), -10 / (1 + 2.718281828**2), 100.0, 0.0]])
    torch.testing.assert_close(impl.kernels.silu_and_mul(gate_up).cpu(), expected)


@pytest.mark.parametrize("values", ["in the same way", "in another way", "in another tensor"])
@pytest.mark.parametrize("mapping", [SLOTS, [16, 17, 50], [-1, -1, -1]], ids=["some", "all", "none"])
@pytest.mark.parametrize(("heads", "head_dim", "page_tokens"), [(1, 24, 16), (3, 80, 64), (8, 128, 16)])
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
    fused = torch.randint(-(2**15), 2**15, shape, generator=generator).to(integers).view(dtype).to(impl.device)
    k, v = fused[:, 1 : heads + 1], fused[:, heads + 1 :]
    if values == "in another way":
        v = v.transpose(0, 1).contiguous().transpose(0, 1)
    arena = torch.full((6, 3, 2, heads, page_tokens, head_dim), float("nan"), dtype=dtype, device=impl.device)
    expected = arena.clone()
    if values == "in another tensor":
        arena, others = arena[:, :, :1].contiguous(), arena[:, :, 1:].contiguous()
        pages = arena[:, 1, 0], others[:, 1, 0]
    else:
        pages = arena[:, 1, 0], arena[:, 1, 1]
    slots = KvSlots.build(mapping, page_tokens, impl.device)
    impl.kernels.kv_write(k, v, *pages, slots)
    ORACLES.kv_write(k, v, expected[:, 1, 0], expected[:, 1, 1], slots)
    for part, stored in enumerate(pages):
        assert torch.equal(bits(stored), bits(expected[:, 1, part]))
    assert torch.equal(bits(arena[:, [0, 2]]), bits(torch.full_like(arena[:, [0, 2]], float("nan"))))


def test_values_may_lie_before_keys(impl: Implementation) -> None:
    fused, slots = impl.randn((len(SLOTS), 4, 8)), KvSlots.build(SLOTS, 16, impl.device)
    arena = torch.zeros((6, 2, 2, 16, 8), device=impl.device)
    impl.kernels.kv_write(fused[:, 2:], fused[:, :2], arena[:, 1], arena[:, 0], slots)
    for token, slot in enumerate(SLOTS):
        if slot >= 0:
            stored = arena[slot // 16, :, :, slot % 16].flatten(0, 1)
            assert torch.equal(stored, fused[token])


def test_slots_know_which_rows_are_stored() -> None:
    slots = KvSlots.build(SLOTS, 16, CPU)
    assert slots.mapping.tolist() == SLOTS
    assert slots.rows is not None
    assert slots.rows.tolist() == [0, 2, 3, 4, 6]
    assert slots.pages.tolist() == [2, 1, 1, 4, 3]
    assert slots.offsets.tolist() == [3, 0, 1, 15, 0]
    assert KvSlots.build([1, 2], 16, CPU).rows is None


@pytest.mark.parametrize("distance", [0, 1, 5000, 20000])
def test_sums_are_rounded_to_the_nearest_bfloat16(distance: int, impl: Implementation) -> None:
    if impl.is_interpreted:
        return  # its stores truncate
    every = torch.arange(2**16).to(torch.int16).view(BF16).view(256, 256).to(impl.device)
    other = every.view(-1).roll(distance).view(256, 256)
    _, stream = impl.kernels.fused_add_rms_norm(every, other, torch.ones_like(every[0]), 1e-6)
    # Instructions for bfloat16 take numbers below the smallest normal one for zero.
    smallest = torch.finfo(BF16).tiny
    torch.testing.assert_close(stream, every + other, rtol=0, atol=smallest, equal_nan=True)


def test_a_nan_of_any_bits_stays_one(impl: Implementation) -> None:
    nan = NAN.to(impl.device)
    assert impl.kernels.silu_and_mul(nan).isnan().all()
    q, k = (torch.ones((1, 1, 32), dtype=BF16, device=impl.device) for _ in range(2))
    impl.kernels.rope(q, k, nan, nan)
    assert q.isnan().all()
    assert k.isnan().all()


def test_results_have_the_same_bits_alone_and_with_more_threads(impl: Implementation, dtype: torch.dtype) -> None:
    if not impl.is_bitwise:
        return
    x, weight, gate_up = (impl.randn(shape, dtype) for shape in ((100, 896), (896,), (100, 1792)))
    normed, gated = impl.kernels.rms_norm(x, weight, 1e-6), impl.kernels.silu_and_mul(gate_up)
    for row in range(100):
        assert torch.equal(impl.kernels.rms_norm(x[row : row + 1], weight, 1e-6)[0], normed[row])
        assert torch.equal(impl.kernels.silu_and_mul(gate_up[row : row + 1])[0], gated[row])
    with num_threads(2):
        assert torch.equal(impl.kernels.rms_norm(x, weight, 1e-6), normed)
        assert torch.equal(impl.kernels.silu_and_mul(gate_up), gated)


X, ONES = torch.randn((3, 128)), torch.ones(128)
FUSED, HALF = torch.randn((5, 8, 32)), torch.randn((5, 64))
Q, K, COS = FUSED[:, :4], FUSED[:, 4:6], torch.ones(5, 32)
ARENA, KV = torch.zeros((6, 2, 2, 16, 8)), torch.randn((7, 4, 8))
PAGES, KEYS, VALUES = ARENA[:, 0], KV[:, :2], KV[:, 2:]
MAPPING = KvSlots.build(SLOTS, 16, CPU)
MISFITS: list[tuple[str, Callable[[], tuple[Any, ...]], str]] = [
    ("rms_norm", lambda: (X, ONES[1:], 1e-6), r"weight: expected shape \[128\], got \[127\]"),
    ("rms_norm", lambda: (X, ONES.bfloat16(), 1e-6), r"weight: expected dtype torch\.float32, got torch\.bfloat16"),
    ("rms_norm", lambda: (X, torch.ones(256)[::2], 1e-6), r"weight: expected consecutive elements, got \(2,\)"),
    ("rms_norm", lambda: (turned(X), ONES, 1e-6), r"x: expected consecutive elements, got \(1, 3\)"),
    ("rms_norm", lambda: (X[None, None], ONES, 1e-6), r"x: expected two or three dimensions, got \[1, 1, 3, 128\]"),
    ("fused_add_rms_norm", lambda: (X, X, ONES[1:], 1e-6), r"x: expected shape \[any, 127\], got \[3, 128\]"),
    ("fused_add_rms_norm", lambda: (X, X[1:], ONES, 1e-6), r"residual: expected shape \[3, 128\], got \[2, 128\]"),
    ("fused_add_rms_norm", lambda: (X, X.bfloat16(), ONES, 1e-6), r"residual: expected dtype torch\.float32, got"),
    ("fused_add_rms_norm", lambda: (X, X, torch.ones(256)[::2], 1e-6), "weight: expected consecutive elements"),
    ("fused_add_rms_norm", lambda: (turned(X), X, ONES, 1e-6), r"x: expected contiguous rows, got \(1, 3\)"),
    ("fused_add_rms_norm", lambda: (X, turned(X), ONES, 1e-6), r"residual: expected contiguous rows, got \(1, 3\)"),
    ("rope", lambda: (Q, K, COS[1:], COS[1:]), r"cos: expected shape \[5, 32\], got \[4, 32\]"),
    ("rope", lambda: (Q, K.bfloat16(), COS, COS), r"k: expected dtype torch\.float32, got torch\.bfloat16"),
    ("rope", lambda: (Q, K, COS, COS.double()), r"sin: expected dtype torch\.float32, got torch\.float64"),
    ("rope", lambda: (turned(Q), K, COS, COS), "q: expected consecutive elements, got"),
    ("rope", lambda: (Q, turned(K), COS, COS), "q: expected consecutive elements, got"),
    ("rope", lambda: (Q, K, HALF[:, :32], COS), "cos: expected contiguous rows, got"),
    ("rope", lambda: (Q, K, COS, HALF[:, :32]), "cos: expected contiguous rows, got"),
    ("silu_and_mul", lambda: (X[:, 1:],), r"gate_up: expected two dimensions, the second even, got \[3, 127\]"),
    ("silu_and_mul", lambda: (X[:, 2:],), r"gate_up: expected contiguous rows, got \(128, 1\)"),
    ("silu_and_mul", lambda: (X[None],), r"gate_up: expected two dimensions, the second even, got \[1, 3, 128\]"),
    (
        "kv_write",
        lambda: (KEYS, VALUES, PAGES, PAGES, KvSlots.build([1], 16, CPU)),
        r"slot_mapping: expected shape \[7\]",
    ),
    ("kv_write", lambda: (KEYS, VALUES[1:], PAGES, PAGES, MAPPING), r"v: expected shape \[7, 2, 8\], got \[6, 2, 8\]"),
    (
        "kv_write",
        lambda: (KEYS.half(), VALUES.half(), PAGES, PAGES, MAPPING),
        r"k_pages: expected dtype torch\.float16",
    ),
    ("kv_write", lambda: (KEYS, VALUES, PAGES, PAGES[1:], MAPPING), r"v_pages: expected shape \[6, 2, 16, 8\], got"),
    (
        "kv_write",
        lambda: (KEYS, VALUES, turned(PAGES), turned(PAGES), MAPPING),
        "k_pages: expected consecutive elements",
    ),
    ("kv_write", lambda: (KEYS, VALUES, PAGES, PAGES.contiguous(), MAPPING), "v_pages: expected strides"),
    ("kv_write", lambda: (turned(KEYS), VALUES, PAGES, PAGES, MAPPING), "k: expected consecutive elements, got"),
    ("kv_write", lambda: (KEYS, turned(VALUES), PAGES, PAGES, MAPPING), "k: expected consecutive elements, got"),
]


@pytest.mark.parametrize(("name", "operands", "expected"), MISFITS)
def test_misfits_are_refused_before_anything_is_changed(
    name: str, operands: Callable[[], tuple[Any, ...]], expected: str, impl: Implementation
) -> None:
    before = FUSED.clone()
    with pytest.raises(ValueError, match=expected):
        getattr(impl.kernels, name)(*operands())
    assert torch.equal(FUSED, before)
    assert not ARENA.any()
