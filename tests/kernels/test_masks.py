"""The contract of masks of tokens."""

import numpy as np
import pytest
import torch

from implementations import Implementation
from manylora.kernels.native.library import native_library

NOTHING = -torch.inf


@pytest.mark.parametrize("vocab_size", [7, 32, 640, 1025])
@pytest.mark.parametrize("num_words", [1, 20, 40])
def test_tokens_without_a_bit_are_ruled_out_and_no_others_change(
    vocab_size: int, num_words: int, impl: Implementation
) -> None:
    if impl.build is not None and native_library() is None:
        pytest.skip("needs a C++ compiler")
    logits = impl.randn((5, vocab_size))
    rows = torch.tensor([3, 0, 2])
    bits = np.random.default_rng(1).integers(-(2**31), 2**31, (3, num_words)).astype(np.int32)
    bits[1] = -1
    bits[2] = 0
    allowed = np.zeros((3, max(vocab_size, num_words * 32)), dtype=bool)
    allowed[:, : num_words * 32] = np.unpackbits(bits.view(np.uint8), axis=1, bitorder="little")
    expected = logits.clone()
    expected[rows] = logits[rows].masked_fill(
        ~torch.from_numpy(allowed[:, :vocab_size]).to(impl.device), NOTHING
    )
    impl.kernels.mask_tokens(logits, rows.to(impl.device), torch.from_numpy(bits).to(impl.device))
    assert torch.equal(logits, expected)


def test_a_mask_that_does_not_fit_is_refused(impl: Implementation) -> None:
    logits, bits = impl.randn((2, 40)), torch.zeros((1, 2), dtype=torch.int32, device=impl.device)
    rows = torch.tensor([0, 1], device=impl.device)
    with pytest.raises(ValueError, match="bits: expected shape"):
        impl.kernels.mask_tokens(logits, rows, bits)
    with pytest.raises(ValueError, match="rows: expected dtype"):
        impl.kernels.mask_tokens(logits, rows.int(), bits)


def test_what_is_no_number_stays_though_it_is_ruled_out(impl: Implementation) -> None:
    """Else the sampler would take a row for a distribution that is none."""
    if impl.build is not None and native_library() is None:
        pytest.skip("needs a C++ compiler")
    values = [torch.nan, torch.inf, 1e30, 1e29, -torch.inf, -1e35, 0.0]
    logits = torch.tensor([values * 10], device=impl.device)
    bits = torch.tensor([[0, 1 << 5]], dtype=torch.int32, device=impl.device)
    impl.kernels.mask_tokens(logits, torch.tensor([0], device=impl.device), bits)
    expected = torch.tensor([[*values[:3], *[NOTHING] * 4] * 10])
    expected[0, 37] = values[37 % 7]
    assert torch.equal(
        logits.cpu().nan_to_num(12345.0, posinf=1e33), expected.nan_to_num(12345.0, posinf=1e33)
    )
