"""Operations on whole pages of the arena, in Triton. Semantics and operands: `weft.kernels.plain.pages`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from weft.kernels.plain.pages import WORD_BYTES, check_zero_pages

BLOCK_WORDS = 4096
PROGRAMS = 16
"""Programs that share a page. Most entries of a list are -1; for each of these so many programs end at once."""


@triton.jit(do_not_specialize_on_alignment=["listed"])
def zero_pages_kernel(words, listed, WORDS: tl.constexpr, BLOCK: tl.constexpr, PROGRAMS: tl.constexpr):
    """Fill the blocks of one listed page. Grid: (entries, PROGRAMS)."""
    page = tl.load(listed + tl.program_id(0)).to(tl.int64)
    if page <= 0:
        return
    for start in range(tl.program_id(1) * BLOCK, WORDS, PROGRAMS * BLOCK):
        i = start + tl.arange(0, BLOCK)
        tl.store(words + page * WORDS + i, tl.zeros([BLOCK], tl.int32), mask=i < WORDS)


def zero_pages(pages: Tensor, listed: Tensor) -> None:
    """See `weft.kernels.plain.pages.zero_pages`."""
    check_zero_pages(pages, listed)
    if len(listed):
        sizes = {"WORDS": pages.shape[1] // WORD_BYTES, "BLOCK": BLOCK_WORDS, "PROGRAMS": PROGRAMS}
        zero_pages_kernel[len(listed), PROGRAMS](pages.view(torch.int32), listed, **sizes)
