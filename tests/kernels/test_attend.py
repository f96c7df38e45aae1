"""Attention with all that a layer does before it, in one operation and composed of the single ones."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from implementations import BF16, F32, NATIVE, TORCH, Implementation, needs_compiler
from numerics import assert_rows_close, bits
from oracles import ORACLES
from scattered_kv import LAYER, AttentionCase, ScatteredKv
from weft.kernels import attend as composed
from weft.kernels.attend import HeadNorms
from weft.kernels.dispatch import Kernels, native_kernels
from weft.kernels.plain.rows import both_halves

IMPLEMENTATIONS = [TORCH, *NATIVE]
REQUESTS = ((1, 40), (20, 20), (3, 70), (1, 1), (130, 131), (1, 0))
CASES = [
    AttentionCase(REQUESTS, *sizes, 16, dtype, window, padding_rows=2)
    for sizes in ((4, 2, 24), (7, 1, 64), (3, 3, 80), (2, 2, 16), (6, 2, 128))
    for dtype in (F32, BF16)
    for window in (None, 30)
]
with_and_without_norms = pytest.mark.parametrize("has_norms", [False, True], ids=["plain", "normed heads"])


def cases(_: Implementation) -> list[AttentionCase]:
    return CASES


class Projected:
    """The operands of one call; `call` leaves them as they are."""

    def __init__(self, case: AttentionCase, has_norms: bool = True) -> None:
        kv = ScatteredKv(case)
        generator = torch.Generator().manual_seed(1)
        num_rows, width = len(kv.q), (case.q_heads + 2 * case.kv_heads) * case.head_dim
        self.qkv = torch.randn((num_rows, width), generator=generator).to(case.dtype)
        weights = torch.rand((2, case.head_dim), generator=generator).to(case.dtype)
        self.norms = HeadNorms(weights[0], weights[1], 1e-6) if has_norms else None
        angles = torch.arange(num_rows)[:, None] * torch.logspace(0, -3, case.head_dim // 2)
        self.cos, self.sin = both_halves(angles.cos(), angles.sin())
        mapping = []
        for table, (rows, context) in zip(kv.block_tables, case.requests, strict=True):
            positions = range(context - rows, context) if context else [None] * rows
            mapping += [-1 if p is None else table[p // 16] * 16 + p % 16 for p in positions]
        self.slots = torch.tensor([*mapping, *[-1] * case.padding_rows])
        self.arena, self.batch, self.scale, self.window = kv.arena, kv.batch, kv.scale, case.window

    def call(self, kernels: Kernels) -> tuple[torch.Tensor, torch.Tensor]:
        """The output, and the arena with this step's keys and values."""
        arena = self.arena.clone()
        operands = (self.qkv.clone(), self.norms, self.cos, self.sin, arena[:, LAYER, 0], arena[:, LAYER, 1])
        rest = (self.slots, self.batch, self.scale, self.window)
        attend = kernels.attend
        out = composed.attend(kernels, *operands, *rest) if attend is None else attend(*operands, *rest)
        return out, arena


@with_and_without_norms
def test_it_gives_the_numbers_of_the_oracle_and_changes_nothing_but_its_slots(
    has_norms: bool, impl: Implementation, case: AttentionCase
) -> None:
    projected = Projected(case, has_norms)
    out, arena = projected.call(impl.kernels)
    assert not torch.equal(bits(arena), bits(projected.arena))
    assert out[:-3].any(-1).all()
    assert not out[-3:].any()  # a request without context and padding
    expected, expected_arena = projected.call(ORACLES)
    assert torch.equal(bits(arena[:, :, 1]), bits(expected_arena[:, :, 1])), "values are stored as they are"
    # Each operation rounds to a narrow dtype.
    assert_rows_close(out, expected, 0.5 if case.dtype == F32 else 4)
    assert torch.equal(arena.isnan(), expected_arena.isnan())
    assert_rows_close(arena.nan_to_num(), expected_arena.nan_to_num(), 0.5 if case.dtype == F32 else 2)


@needs_compiler
def test_layers_of_a_step_share_what_is_prepared() -> None:
    projected = Projected(CASES[0])
    first, _ = projected.call(native_kernels())
    kept = first.clone()
    projected.qkv *= -1
    second, _ = projected.call(native_kernels())
    assert second is first
    assert not torch.equal(second, kept)
    projected.qkv *= -1
    assert torch.equal(projected.call(native_kernels())[0], kept)


@needs_compiler
@pytest.mark.parametrize(
    ("name", "change", "expected"),
    [
        ("qkv", lambda p: p.qkv[:, :-1], r"qkv: expected \[T, \(Hq \+ 4\) \* 24\], got"),
        ("qkv", lambda p: p.qkv[:, :96], r"qkv: expected \[T, \(Hq \+ 4\) \* 24\], got"),
        ("qkv", lambda p: p.qkv.T.contiguous().T, "qkv: expected contiguous rows, got"),
        ("qkv", lambda p: p.qkv[1:], r"cos: expected shape \[157, 24\], got \[158, 24\]"),
        ("arena", lambda p: p.arena.bfloat16(), r"k_pages: expected dtype torch\.float32, got torch\.bfloat16"),
        ("norms", lambda p: replace(p.norms, k=p.norms.k[1:]), r"norms\.k: expected shape \[24\], got \[23\]"),
        ("norms", lambda p: replace(p.norms, q=p.norms.q.double()), r"norms\.q: expected dtype torch\.float32"),
        ("cos", lambda p: p.cos[1:], r"cos: expected shape \[158, 24\], got \[157, 24\]"),
        ("cos", lambda p: p.cos.double(), r"cos: expected dtype torch\.float32, got torch\.float64"),
        ("sin", lambda p: p.sin.T.contiguous().T, "expected contiguous rows, got"),
        ("norms", lambda _: HeadNorms(torch.ones(48)[::2], torch.ones(24), 1e-6), r"norms\.q: expected consecutive"),
        ("slots", lambda _: torch.tensor([16]), r"slot_mapping: expected shape \[158\], got \[1\]"),
        ("window", lambda _: 0, "sliding_window: expected a positive number, got 0"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_misfits_are_refused(name: str, change: Callable[[Projected], object], expected: str) -> None:
    projected = Projected(CASES[0])
    setattr(projected, name, change(projected))
    with pytest.raises(ValueError, match=expected):
        projected.call(native_kernels())
