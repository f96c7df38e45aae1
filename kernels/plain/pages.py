"""Operations on whole pages of the arena, on the CPU in torch operators. The docstring defines them for all kernels."""

from __future__ import annotations

import torch
from torch import Tensor

from weft.kernels.checks import expect, expect_that

WORD_BYTES = 4


def zero_pages(pages: Tensor, listed: Tensor) -> None:
    """Fill pages with zeros. On a GPU nothing is read by the host, so the list may be part of a step's packed input.

    Semantics:
        for page in listed, page > 0:
            pages[page] = 0

    Args:
        pages: uint8 [num_pages, page_bytes], contiguous, page_bytes a multiple of 4. Mutated; page 0 is never written.
        listed: int32 [N], consecutive elements, each below num_pages; -1 is no page. A page may stand there twice.

    Raises:
        ValueError: A shape, dtype, device or stride does not fit.
    """
    check_zero_pages(pages, listed)
    for page in listed.tolist():
        if page > 0:
            pages[page].zero_()


def check_zero_pages(pages: Tensor, listed: Tensor) -> None:
    """Check what a call to `zero_pages` was given.

    Raises:
        ValueError: A shape, dtype, device or stride does not fit.
    """
    expect("pages", pages, (None, None), torch.uint8)
    expect("listed", listed, (None,), torch.int32, pages.device)
    is_whole = pages.is_contiguous() and pages.shape[1] % WORD_BYTES == 0
    expect_that("pages", is_whole, "contiguous pages of whole words of 4 bytes", [*pages.shape, *pages.stride()])
    expect_that("listed", listed.is_contiguous(), "consecutive elements", listed.stride())
