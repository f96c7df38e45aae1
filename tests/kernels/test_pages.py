"""The contract of operations on whole pages."""

import pytest
import torch

from implementations import Implementation

PAGE_BYTES = [256, 4 * (17 * 4096 + 64)]
"""In Triton, one that is less than a block, and one of which two programs take two blocks, the last of them in part."""


@pytest.mark.parametrize("page_bytes", PAGE_BYTES)
@pytest.mark.parametrize("listed", [[3], [-1, 5, -1, 2, 5], [-1, -1], [0, 4], []])
def test_listed_pages_become_zero_and_no_other_byte_changes(
    page_bytes: int, listed: list[int], impl: Implementation
) -> None:
    pages = torch.full((7, page_bytes), 0xA5, dtype=torch.uint8, device=impl.device)
    expected = pages.clone()
    for page in listed:
        if page > 0:
            expected[page] = 0
    impl.kernels.zero_pages(pages, torch.tensor(listed, dtype=torch.int32, device=impl.device))
    assert torch.equal(pages, expected)
    assert (pages[0] == 0xA5).all(), "page 0 is never written"


def test_a_list_that_is_part_of_a_larger_tensor_is_read_where_it_lies(impl: Implementation) -> None:
    pages = torch.full((7, 256), 1, dtype=torch.uint8, device=impl.device)
    packed = torch.tensor([6, -1, 2, 3, 5], dtype=torch.int32, device=impl.device)
    impl.kernels.zero_pages(pages, packed[1:4])
    assert [page for page in range(7) if not pages[page].any()] == [2, 3]


def test_misfits_are_refused(impl: Implementation) -> None:
    pages = torch.ones((4, 256), dtype=torch.uint8, device=impl.device)
    listed = torch.tensor([1, 2], dtype=torch.int32, device=impl.device)
    for wrong_pages, wrong_list in (
        (pages.view(torch.float32), listed),
        (pages[:, :128], listed),
        (torch.ones((4, 6), dtype=torch.uint8, device=impl.device), listed),
        (pages, listed.long()),
        (pages, listed.repeat(2)[::2]),
    ):
        with pytest.raises(ValueError, match="expected"):
            impl.kernels.zero_pages(wrong_pages, wrong_list)
    assert pages.all()
