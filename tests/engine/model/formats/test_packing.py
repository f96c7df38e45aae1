"""Packings and their inverses, on any numbers."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from integer_writers import three_half as written_by_hand
from manylora.engine.model.formats import dequantised
from manylora.engine.model.formats.stored import StoredLinear, pack, unpack
from manylora.engine.model.formats.three_half import LEVELS, encoded
from manylora.engine.model.formats.three_half import pack as pack_levels
from manylora.engine.model.formats.three_half import unpack as unpack_levels
from manylora.engine.model.quantisation import Quantisation
from quantised_models import words

Q35 = Quantisation(layout="q3.5", bits=4)


@st.composite
def _numbers(draw: st.DrawFn) -> tuple[int, torch.Tensor]:
    bits = draw(st.sampled_from([4, 8]))
    shape = draw(st.tuples(st.integers(1, 5), st.integers(1, 70)))
    return bits, torch.from_numpy(
        draw(arrays(np.int32, shape, elements=st.integers(0, 2**bits - 1)))
    )


@given(_numbers())
def test_words_are_packed_as_bit_by_bit_and_unpacked_again(
    numbers: tuple[int, torch.Tensor],
) -> None:
    bits, values = numbers
    packed = pack(values, bits)
    assert torch.equal(packed, words(values, bits))
    assert torch.equal(unpack(packed, bits)[:, : values.shape[1]].int(), values)


@given(
    arrays(
        np.uint8,
        st.tuples(st.integers(1, 4), st.integers(1, 3), st.just(64)),
        elements=st.integers(0, LEVELS - 1),
    )
)
def test_levels_take_28_bytes_for_64_and_come_back(levels: np.ndarray) -> None:
    packed = pack_levels(torch.from_numpy(levels))
    assert packed.shape == (levels.shape[0], levels.shape[1] * 28)
    assert torch.equal(unpack_levels(packed), torch.from_numpy(levels))


@settings(max_examples=25, deadline=None)
@given(
    arrays(
        np.float32,
        st.tuples(st.integers(1, 3), st.integers(1, 130)),
        elements=st.floats(-3, 3, width=16),
    )
)
def test_a_weight_in_3_5_bits_is_at_most_half_a_step_off(values: np.ndarray) -> None:
    weight = torch.from_numpy(values)
    parts = encoded(weight)
    decoded = dequantised(StoredLinear("linear", weight.shape[0], weight.shape[1], Q35, parts))
    step = parts["weight_step"].float().repeat_interleave(64, 1)[:, : weight.shape[1]]
    assert ((decoded - weight).abs() <= 0.51 * step + 4e-3).all()


def test_weights_in_3_5_bits_are_written_as_by_hand() -> None:
    weight = torch.randn(7, 150, generator=torch.Generator().manual_seed(0))
    expected, decoded = written_by_hand(weight)
    parts = encoded(weight)
    assert parts.keys() == expected.keys()
    assert all(torch.equal(parts[name], expected[name]) for name in expected)
    assert torch.equal(dequantised(StoredLinear("linear", 7, 150, Q35, parts)), decoded)
    assert sum(part.nbytes for part in parts.values()) == 7 * 3 * 32
