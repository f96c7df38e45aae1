"""How often Triton compiles its kernels while an engine serves: not again because of what a step has."""

from __future__ import annotations

import pytest
import torch

from fake_triton import fake_triton
from implementations import BF16, INTERPRETS, TRITON

pytestmark = pytest.mark.skipif(INTERPRETS, reason="the interpreter compiles nothing")
pytest.importorskip("triton", reason="needs Triton, which is there on Linux")
META = torch.device("meta")


def test_the_fake_counts_launches_and_what_they_are_compiled_for() -> None:
    kernels = TRITON.make()
    with fake_triton() as fake:
        for width in (4096, 4096, 512):
            kernels.silu_and_mul(torch.empty((3, 2 * width), dtype=BF16, device=META))
    assert fake.counts == {"silu_and_mul_kernel": 3}
    assert fake.variants == {"silu_and_mul_kernel": 2}
    assert fake.launches[0].grid[0] == 3
    with fake_triton() as again:
        assert not again.launches
        kernels.silu_and_mul(torch.empty((3, 1024), dtype=BF16, device=META))
    assert again.variants == {"silu_and_mul_kernel": 1}, "nothing is left of the fake before"
    assert len(fake.launches) == 3
